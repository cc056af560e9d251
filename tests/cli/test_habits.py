"""Habits from llama.cpp, Ollama, LM Studio, vLLM and llm: each command typed, and what happens."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.gguf_writer import tiny_model, write

from llmrun.cli import habits
from llmrun.cli.app import call
from llmrun.cli.commands import ALIASES, COMMANDS
from llmrun.cli.options import answer_options, remote_server
from llmrun.config import load_settings
from llmrun.errors import LlmrunError, ModelNotFoundError, UsageError
from llmrun.models.registry import resolve
from llmrun.server.registry import RunningServer

FRONT = Path(__file__).parents[1] / "support/front.py"
Run = Callable[[str], "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package_on_path: None) -> Run:
    """run("llmrun ..."): the command over the fake engine, which says Hello, with an empty cache."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "tiny.gguf", tiny_model())

    def make(line: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, str(FRONT), "normal", *shlex.split(line)[1:]]
        return subprocess.run(words, input="", capture_output=True, text=True, timeout=300)

    return make


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("llmrun -m ./tiny.gguf -p 'Why is it so?'", "Hello"),
        ("llmrun -p -5 --model=./tiny.gguf", "Hello"),
        ("llmrun run -m ./tiny.gguf 'Why is it so?'", "Hello"),
        ("llmrun run -m ./tiny.gguf why is it so", "Hello"),
        ("llmrun run ./tiny.gguf -p why", "Hello"),
        ("llmrun run ./tiny.gguf --format json why", None),
        ("llmrun cli -m ./tiny.gguf", None),
        ("llmrun show -m ./tiny.gguf", "tiny.gguf"),
        ("llmrun info ./tiny.gguf", "tiny.gguf"),
        ("llmrun ls", None),
        ("llmrun sessions ls", None),
        ("llmrun config get serve.port", "8080"),
    ],
)
def test_a_habit_that_works(typed: str, shown: str | None, run: Run) -> None:
    done = run(typed)
    assert (done.returncode, "error" in done.stderr) == (0, False), done.stderr
    assert (shown or "") in done.stdout


@pytest.mark.parametrize(
    ("typed", "status", "hint"),
    [
        ("llmrun create mine -f Modelfile", 2, "llmrun import FILE --name NAME"),
        ("llmrun push me/mine", 2, "hf upload"),
        ("llmrun cp smollm2 mine", 2, "llmrun import FILE --link --name NAME"),
        ("llmrun load smollm2", 2, "llmrun serve MODEL"),
        ("llmrun unload smollm2", 2, "llmrun stop"),
        ("llmrun login", 2, "HF_TOKEN"),
        ("llmrun signin", 2, "HF_TOKEN"),
        ("llmrun update smollm2", 2, "llmrun pull MODEL"),
        ("llmrun version", 2, "llmrun --version"),
        ("llmrun generate smollm2 hi", 2, "llmrun run MODEL PROMPT"),
        ("llmrun complete hi", 2, "--raw"),
        ("llmrun status", 2, "llmrun ps"),
        ("llmrun sessions delete it", 2, "llmrun sessions list"),
        ("llmrun sessions lst", 2, "did you mean list?"),
        ("llmrun config gett model", 2, "did you mean get?"),
        ("llmrun config remove model", 2, "llmrun config"),
        ("llmrun config get model", 2, "llmrun config set model"),
        ("llmrun run ./tiny.gguf --session it hi", 2, "llmrun chat MODEL --session NAME"),
        ("llmrun run ./tiny.gguf --continue hi", 2, "llmrun chat MODEL --continue"),
        ("llmrun start", 2, "llmrun serve"),
        ("llmrun server start", 2, "llmrun serve"),
        ("llmrun server stop", 2, "llmrun stop"),
        ("llmrun server status", 2, "llmrun ps"),
        ("llmrun stop smollm2", 2, "llmrun ps"),
        ("llmrun download nothing-of-that-name", 3, "llmrun list --all"),
        ("llmrun get nothing-of-that-name", 3, "llmrun list --all"),
        ("llmrun delete nothing-of-that-name", 3, "llmrun list"),
        ("llmrun run smollm2 hi --format xml", 2, "--json-schema"),
        ("llmrun run smollm2 hi --ctx-size 512", 2, "--ctx"),
        ("llmrun run smollm2 hi --n-predict 5", 2, "--max-tokens"),
        ("llmrun run smollm2 hi --n-gpu-layers 5", 2, "--gpu-layers"),
        ("llmrun run smollm2 hi --system-prompt x", 2, "--system"),
        ("llmrun run smollm2 hi --keepalive 5m", 2, "llmrun serve MODEL --keep"),
        ("llmrun run smollm2 hi --hidethinking", 2, "--show-thoughts hide"),
        ("llmrun run smollm2 --conversation", 2, "llmrun chat MODEL"),
        ("llmrun serve smollm2 --max-model-len 512", 2, "--ctx"),
        ("llmrun serve -m smollm2 --api-key x", 2, "--key-file"),
        ("llmrun import f.gguf --name a/b/c", 3, ""),
    ],
)
@pytest.mark.usefixtures("home")
def test_a_habit_that_gets_a_hint(typed: str, status: int, hint: str) -> None:
    with pytest.raises(LlmrunError) as caught:
        call(shlex.split(typed)[1:])
    assert caught.value.exit_status == status
    assert hint in caught.value.hint


def test_no_habit_hides_a_command_or_names_one_that_is_missing() -> None:
    assert not set(habits.COMMANDS) & {*COMMANDS, *ALIASES}
    assert set(ALIASES.values()) <= set(COMMANDS)
    hints = [each.hint for each in habits.COMMANDS.values()] + [*habits.OPTIONS.values(), *habits.SERVER_WORDS.values()]
    ours = [hint.split()[1] for hint in hints if hint.startswith("llmrun")]
    assert set(ours) <= {*COMMANDS, "--version"}


def test_format_json_allows_any_json() -> None:
    assert (
        answer_options(json_format="json").request.grammar
        == answer_options(json_schema="{}").request.grammar
        is not None
    )


def test_stop_with_a_model_names_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    server = RunningServer(1, "http://127.0.0.1:81", 81, 0.0, ("smollm2",))
    monkeypatch.setattr("llmrun.cli.servers.running_servers", lambda _: [server])
    with pytest.raises(UsageError) as caught:
        call(["stop", "smollm2"])
    assert caught.value.hint == "llmrun stop --port 81"


def test_an_imported_model_has_a_short_name(run: Run) -> None:
    imported = run("llmrun import tiny.gguf --name mine")
    assert 'llmrun run mine "Hello"' in imported.stderr
    assert run("llmrun run mine hi").stdout == "Hello\n"
    assert "local/smollm2" in run("llmrun import tiny.gguf --name smollm2").stderr  # the catalogue's name wins
    assert run("llmrun rm -y mine").returncode == 0
    assert run("llmrun run mine hi").returncode == 3


def test_a_short_name_must_be_on_this_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(ModelNotFoundError):
        resolve("mine")
    (load_settings().hub_cache / "models--local--mine").mkdir(parents=True)
    assert resolve("mine").repository == "local/mine"


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("", "http://127.0.0.1:11434/v1"),
        ("0.0.0.0", "http://127.0.0.1:11434/v1"),
        (":81", "http://127.0.0.1:81/v1"),
        ("https://big-box:443", "https://big-box:443/v1"),
    ],
)
def test_at_ollama_is_the_server_of_ollama_host(host: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_HOST", host)
    monkeypatch.delenv("LLMRUN_SERVER", raising=False)
    server = remote_server("ollama", None)
    assert server is not None
    assert server.url == url
    assert remote_server(None, None) is None, "OLLAMA_HOST alone sends nothing"


def test_hf_token_is_the_token_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    from llmrun.models.hub import token

    monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
    assert token() == "hf_of_a_test"
