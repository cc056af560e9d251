"""The Tab key: right names for every shell, nothing a shell could trip over, and no engine behind it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from support.bench_rows import result, row
from support.model_disk import put, put_lm_studio, put_ollama, settings

from llmrun.cli.chat import chat
from llmrun.cli.commands import ALIASES, COMMANDS
from llmrun.cli.completion import complete_installed, complete_model, completes, fix_words
from llmrun.config import load_settings
from llmrun.lab.bench.history import History
from llmrun.models.store.store import Store
from llmrun.server.registry import RunningServer, registered

pytestmark = pytest.mark.usefixtures("package_on_path")

ENTRY = "import sys; sys.argv[0] = 'llmrun'; from llmrun.__main__ import main; main()"


@pytest.fixture
def home(home: Path, tmp_path: Path) -> Path:
    """With two models of the hub and one of Ollama's."""
    store = Store(settings(tmp_path / "hub"))
    put(store, "tiny-Q4_0.gguf")
    put(store, "tiny-Q8_0.gguf", content=b"GGUF 2")
    put_ollama(home / ".ollama/models", "library/llama3.2:1b")
    return home


def pressed(variables: dict[str, str]) -> list[str]:
    """What the shell gets to read."""
    done = subprocess.run(
        [sys.executable, "-c", ENTRY], env={**os.environ, **variables}, capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""
    return done.stdout.split("\n")[:-1]


def bash(*words: str) -> list[str]:
    variables = {"COMP_WORDS": "\n".join(["llmrun", *words]), "COMP_CWORD": str(len(words))}
    return [line for line in pressed({"_LLMRUN_COMPLETE": "complete_bash", **variables}) if line]


def test_servers_of_this_machine(home: Path) -> None:
    address = "http://127.0.0.1:8123"
    assert bash("bench", "--at", "http", ":", "//127") == []
    with registered(home, address) as file:
        assert file is not None
        file.write(RunningServer(os.getpid(), address, 8123, 0.0))
        assert bash("bench", "--at", "http", ":", "//127") == ["//127.0.0.1:8123"]
        assert bash("bench", "--at", "http", ":", "//128") == []


def test_models_of_this_disk_and_of_the_catalogue(home: Path) -> None:
    names = complete_model("")
    assert names[:3] == ["maker/tiny-GGUF:Q4_0", "maker/tiny-GGUF:Q8_0", "ollama/llama3.2:1b"]
    assert {"smollm2", "qwen3-8b"} <= set(names)
    assert complete_model("maker/tiny-GGUF:Q8") == ["maker/tiny-GGUF:Q8_0"]
    assert complete_model("smollm2:Q4_") == ["smollm2:Q4_0", "smollm2:Q4_1", "smollm2:Q4_K_M"]
    assert complete_model("nothing") == []


def test_paths_are_the_shells_own_business(home: Path) -> None:
    for start in (".", "/", "~", "./ma"):
        assert complete_model(start) == []


def test_only_what_is_ours_can_be_removed(home: Path) -> None:
    assert complete_installed("") == ["maker/tiny-GGUF:Q4_0", "maker/tiny-GGUF:Q8_0"]


@pytest.mark.parametrize("name", ["a$(x)-Q4_0.gguf", "a b-Q4_0.gguf", "a`x`-Q4_0.gguf", "a'\"-Q4_0.gguf", "a\n*.gguf"])
def test_names_that_a_shell_would_evaluate_are_not_offered(home: Path, name: str) -> None:
    put_lm_studio(home / ".lmstudio/models", "pub/repo;rm", name)
    put_lm_studio(home / ".lmstudio/models", "pub/good", name)
    assert complete_model("lmstudio/") in ([], ["lmstudio/pub/good:Q4_0"])


@pytest.mark.parametrize(
    ("words", "mended", "head"),
    [
        (["run", "qw"], ["run", "qw"], ""),
        (["run", "a/b", ":", "Q4"], ["run", "Q4"], "a/b:"),
        (["run", "a/b", ":"], ["run", ""], "a/b:"),
        (["rm", "x", "a/b", ":", "Q4"], ["rm", "x", "Q4"], "a/b:"),
        (["run", "https", ":", "//h", ":", "8"], ["run", "8"], "https://h:"),
    ],
)
def test_bash_splits_at_colons(words: list[str], mended: list[str], head: str) -> None:
    environment = {
        "_LLMRUN_COMPLETE": "complete_bash",
        "COMP_WORDS": "\n".join(["llmrun", *words]),
        "COMP_CWORD": str(len(words)),
    }
    fix_words(environment)
    assert environment["COMP_WORDS"].split("\n") == ["llmrun", *mended]
    assert environment["COMP_CWORD"] == str(len(mended))
    assert environment["_LLMRUN_COMPLETE_HEAD"] == head


@pytest.mark.parametrize("variables", [{}, {"COMP_CWORD": "9"}, {"COMP_CWORD": "x"}, {"COMP_CWORD": "-1"}])
def test_nonsense_from_the_shell_changes_nothing(variables: dict[str, str]) -> None:
    environment = {"_LLMRUN_COMPLETE": "complete_bash", "COMP_WORDS": "llmrun\nrun", **variables}
    before = dict(environment)
    fix_words(environment)
    assert environment == before
    completes(environment)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("llmrun ", "command"),
        ("llmrun show", "command"),
        ("llmrun show ", "model"),
        ("llmrun show qw", "model"),
        ("llmrun show --js", ""),
        ("llmrun run qwen3 he", ""),
    ],
)
def test_what_is_completed(line: str, what: str) -> None:
    assert completes({"_LLMRUN_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": line}) == what
    assert completes({"_TYPER_COMPLETE_ARGS": line}) == ""


def test_every_command_completes(home: Path) -> None:
    assert set(bash("")) >= set(COMMANDS)
    assert not set(bash("")) & set(ALIASES)
    assert bash("sho") == ["show"]


@pytest.mark.parametrize("command", ["run", "chat", "pull", "show", "plan", "rm", "verify"])
def test_models_complete_behind_a_command(home: Path, command: str) -> None:
    assert bash(command, "maker/") == ["maker/tiny-GGUF:Q4_0", "maker/tiny-GGUF:Q8_0"]
    assert bash(command, "maker/tiny-GGUF", ":", "Q8") == ["Q8_0"]


def test_options_complete_behind_a_command(home: Path) -> None:
    assert "--json" in bash("show", "--")
    assert "--dry-run" in bash("gc", "--")


def test_saved_chats_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["trip", "it's $(x)", "cats"]
    monkeypatch.setattr("llmrun.cli.sessions._sessions", lambda: nullcontext(SimpleNamespace(names=lambda: names)))
    app = typer.Typer()
    app.command()(chat)
    (option,) = (each for each in typer.main.get_command(app).params if "--session" in each.opts)
    assert [each.value for each in option.shell_complete(None, "")] == ["trip", "cats"]
    assert [each.value for each in option.shell_complete(None, "t")] == ["trip"]


def test_values_of_options_complete(home: Path) -> None:
    assert bash("run", "smollm2", "--show-thoughts", "") == ["on", "fold", "hide"]
    assert bash("run", "smollm2", "--show-thoughts", "h") == ["hide"]
    assert bash("run", "smollm2", "--think") == ["--think", "--think-tokens", "--think-effort"]
    assert bash("chat", "smollm2", "--cache-type-k", "") == ["f16", "q8_0"]
    assert bash("quantize", "smollm2", "--type", "q4_k") == ["q4_k_m", "q4_k_s"]
    assert bash("quantize", "smollm2", "--type", "Q4_K") == ["Q4_K_M", "Q4_K_S"]
    assert "int4" in bash("quantize", "smollm2", "--type", "")
    assert bash("convert", "folder", "--type", "b") == ["bf16"]


def test_other_shells(home: Path) -> None:
    line = {"_TYPER_COMPLETE_ARGS": "llmrun show ollama/"}
    assert pressed({"_LLMRUN_COMPLETE": "complete_zsh", **line}) == ["_arguments '*: :((\"ollama/llama3.2\\\\:1b\"))'"]
    fish = {"_LLMRUN_COMPLETE": "complete_fish", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    assert pressed({**fish, **line}) == ["ollama/llama3.2:1b"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_in_a_real_bash(home: Path, tmp_path: Path) -> None:
    """Typer's own script, with the words that bash makes of a name with a colon."""
    command = tmp_path / "llmrun"
    command.write_text(f"#!{sys.executable}\n{ENTRY.replace('; ', chr(10))}\n")
    command.chmod(0o755)
    script = f"""
        PATH={tmp_path}:$PATH
        eval "$(llmrun --show-completion bash)"
        COMP_WORDS=(llmrun run maker/tiny-GGUF : Q) COMP_CWORD=4
        _llmrun_completion llmrun
        echo "${{COMPREPLY[*]}}"
    """
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["Q4_0", "Q8_0"], done.stderr


@pytest.mark.parametrize(("typed", "cursor"), [("llmrun\nrun\nmaker", "2"), ("llmrun\nr", "1")])
def test_a_key_press_loads_no_engine(home: Path, typed: str, cursor: str) -> None:
    variables = {"_LLMRUN_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": cursor}
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", ENTRY],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )
    loaded = {line.split("|")[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "llmrun.cli.completion" in loaded
    heavy = {
        "llmrun.runner.launch",
        "llmrun.runner.client",
        "llmrun.model",
        "llmrun.gguf.reader",
        "rich",
        "huggingface_hub",
        "numpy",
    }
    assert not loaded & heavy


def test_bench_offers_models_and_what_else_it_does(home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with History(load_settings()) as history:
        history.add(result(row("pp512"), row("tg128")))
    assert {"run", "history", "compare", "rm", "smollm2"} <= set(bash("bench", ""))
    assert bash("bench", "comp") == ["compare"]
    for words in (["history"], ["compare", "1"], ["rm"]):
        assert bash("bench", *words, "") == ["1"]
    assert bash("bench", "rm", "2") == []


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("help", "exit"), ["exit-codes"]),
        (("help", "quan"), ["quantize", "quantization"]),
        (("run", "smollm2", "-fa", "o"), ["on", "off"]),
        (("evaluate", "smollm2", "-ctk", "q"), ["q8_0"]),
        (("bench", "smollm2", "-ctk", "q8"), ["q8_0"]),
        (("bench", "smollm2", "-o", "j"), ["json", "jsonl"]),
        (("bench", "smollm2", "--vs", "l"), ["llama-bench"]),
        (("replay", "r.json", "--model", "smollm2-3"), ["smollm2-360m"]),
    ],
)
def test_values_that_are_known_are_offered(home: Path, words: tuple[str, ...], offered: list[str]) -> None:
    assert bash(*words) == offered
