"""The real model under every name it can have: imported, found where other programs keep theirs, verified, removed."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from support.installed import WITHOUT_END, Installed, Running
from support.model_disk import put_lm_studio, put_ollama, tree

from llmrun import load

ANSWER = ("hi", "--temp", "0", "--max-tokens", "4")


@pytest.fixture
def place(tmp_path: Path, llmrun: Installed) -> dict[str, str]:
    """The environment of a machine without models."""
    home = tmp_path / "home"
    home.mkdir()
    return {
        "HOME": str(home),
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "OLLAMA_MODELS": str(home / ".ollama/models"),
    }


def names(llmrun: Installed, place: dict[str, str]) -> list[str]:
    return llmrun.run("list", "-q", env=place).stdout.decode().splitlines()


def test_imported_verified_run_and_removed(
    llmrun: Installed, place: dict[str, str], model_path: Path, tmp_path: Path
) -> None:
    own = tmp_path / "mine-Q4_1.gguf"
    shutil.copyfile(model_path, own)
    done = llmrun.run("import", str(own), "--name", "me/mine", env=place)
    assert done.returncode == 0, done.stderr
    assert names(llmrun, place) == ["me/mine:Q4_1"]
    assert llmrun.run("verify", env=place).returncode == 0
    for name in ("me/mine", "me/mine:q4_1", str(own), str(own.parent)):
        answered = llmrun.run("run", name, *ANSWER, env=place)
        assert (answered.returncode, answered.stderr) == (0, b""), name
        assert answered.stdout.strip()
    (blob,) = Path(place["HF_HUB_CACHE"]).glob("models--me--mine/blobs/*")
    with blob.open("r+b") as file:
        file.seek(50_000_000)
        file.write(b"\xff\x00\xff")
    done = llmrun.run("verify", "me/mine", env=place)
    assert done.returncode == 5
    assert b"llmrun rm -y me/mine:Q4_1 && llmrun pull me/mine:Q4_1" in done.stderr
    assert llmrun.run("rm", "-y", "me/mine", env=place).returncode == 0
    assert names(llmrun, place) == []
    assert own.exists()


def test_a_model_that_answers_is_not_removed(llmrun: Installed, place: dict[str, str], model_path: Path) -> None:
    assert llmrun.run("import", str(model_path), "--name", "me/mine", env=place).returncode == 0
    with subprocess.Popen(
        [llmrun.command, "run", "me/mine", "--json", *WITHOUT_END, "Count to a million."],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=llmrun.environment(place),
    ) as answering:
        Running(answering).event("TextDelta")
        done = llmrun.run("rm", "-y", "me/mine", env=place)
        answering.kill()
    assert done.returncode == 2
    assert b"me/mine:Q4_1 is in use" in done.stderr
    assert names(llmrun, place) == ["me/mine:Q4_1"]
    assert llmrun.run("rm", "-y", "me/mine", env=place).returncode == 0


def test_ollamas_and_lm_studios_files_are_used_where_they_are(
    llmrun: Installed, place: dict[str, str], model_path: Path
) -> None:
    home = Path(place["HOME"])
    content = model_path.read_bytes()
    put_ollama(home / ".ollama/models", "library/smollm2:135m", content, file_type="Q4_1")
    put_lm_studio(home / ".lmstudio/models", "lms/SmolLM2-GGUF", "SmolLM2-Q4_1.gguf", content)
    before = tree(home)
    assert names(llmrun, place) == ["lmstudio/lms/SmolLM2-GGUF:Q4_1", "ollama/smollm2:135m"]
    answers = {
        llmrun.run("run", name, *ANSWER, env=place).stdout
        for name in ("ollama/smollm2:135m", "lmstudio/lms/SmolLM2-GGUF", "lms/SmolLM2-GGUF:Q4_1")
    }
    assert len(answers) == 1
    assert answers.pop().strip()
    assert tree(home) == before
    assert not Path(place["HF_HUB_CACHE"]).exists()
    facts = json.loads(llmrun.run("show", "ollama/smollm2:135m", "--json", env=place).stdout)
    assert (facts["architecture"], facts["layers"]) == ("llama", 30)


def test_ollamas_settings_of_a_model_are_used(
    llmrun: Installed, place: dict[str, str], model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its system prompt, example turns, template and stop texts; what has no meaning here is named."""
    content, store = model_path.read_bytes(), Path(place["OLLAMA_MODELS"])
    example = [{"role": "user", "content": "Ahoy?"}, {"role": "assistant", "content": "Arr!"}]
    put_ollama(store, "library/plain:latest", content)
    put_ollama(store, "library/system:latest", content, system=b"Be a pirate.")
    put_ollama(store, "library/examples:latest", content, messages=json.dumps(example).encode())
    put_ollama(store, "library/template:latest", content, template=b"Q: {{ .Prompt }}")
    put_ollama(store, "library/params:latest", content, params=b'{"num_predict": 3, "temperature": 0, "num_gpu": 1}')

    def answered(name: str, *options: str) -> tuple[dict[str, object], dict[str, object], bytes]:
        done = llmrun.run("run", f"ollama/{name}", "hi", "--json", *options, env=place)
        events = [json.loads(line) for line in done.stdout.splitlines()]
        ends = [next(event for event in events if event["event"] == kind) for kind in ("Started", "Finished")]
        return ends[0], ends[1], done.stderr

    def n_prompt(name: str, *options: str) -> int:
        return int(str(answered(name, "-n", "2", *options)[0]["prompt_tokens"]))

    counts = {name: n_prompt(name) for name in ("plain", "system", "examples", "template")}
    plain = counts["plain"]
    assert counts["system"] == n_prompt("plain", "-s", "Be a pirate.") != plain
    assert n_prompt("system", "-s", "") == plain
    assert counts["examples"] > plain
    assert counts["template"] == n_prompt("plain", "--raw") + len("Q:") != plain
    _, finished, said = answered("params")
    assert (finished["reason"], said) == ("length", b"PARAMETER num_gpu is left out: llmrun has no such setting\n")
    monkeypatch.setenv("OLLAMA_MODELS", str(store))
    for name, count in counts.items():
        with load(f"ollama/{name}", pull=False, n_ctx=512) as model:
            assert model.chat("hi", max_tokens=2).stats.prompt_tokens == count
