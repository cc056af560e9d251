"""The small commands of the installation, and what starting one costs and touches."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.installed import Installed, only_error_line

HEAVY = {"llama_cpp", "numpy", "huggingface_hub", "prompt_toolkit"}


UNUSED = (
    "email socket importlib.metadata statistics sqlite3 asyncio http llmrun.model.embeddings "
    "llmrun.protocol.jobs.machine llmrun.server.registry llmrun.chat.store"
)
"""Modules of other commands and options."""


def modules_of(llmrun: Installed, *arguments: str) -> set[str]:
    """Modules that the command's own process imports."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", llmrun.command, *arguments],
        capture_output=True,
        env=llmrun.environment(),
        stdin=subprocess.DEVNULL,
        timeout=60,
    )
    assert done.returncode == 0
    modules = [line.rpartition("|")[2].strip() for line in done.stderr.decode().splitlines() if "|" in line]
    assert "llmrun.cli.main" in modules
    return {*modules}


def imported(llmrun: Installed, *arguments: str) -> set[str]:
    """Top-level names that the command's own process imports."""
    return {module.partition(".")[0] for module in modules_of(llmrun, *arguments)}


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], []])
def test_help_imports_nothing_heavy(llmrun: Installed, arguments: list[str]) -> None:
    assert not imported(llmrun, *arguments) & {*HEAVY, "rich"}


def test_an_answer_in_a_pipe_imports_nothing_heavy_in_the_front(llmrun: Installed) -> None:
    modules = modules_of(llmrun, "run", "smollm2", "--max-tokens", "1", "hi")
    assert not {module.partition(".")[0] for module in modules} & {*HEAVY, "jinja2"}
    assert not modules & {*UNUSED.split()}
    assert len(modules) < 285


def test_list_show_and_doctor_in_words(llmrun: Installed, model_path: Path) -> None:
    for arguments, word in [
        (["list"], "smollm2"),
        (["list", "--all"], "qwen"),
        (["show", "smollm2"], "Q4_1"),
        (["show", str(model_path)], "Q4_1"),
        (["doctor"], "llama-cpp-python"),
        (["help", "exit-codes"], "130"),
        (["--version"], "llmrun 0."),
    ]:
        done = llmrun.run(*arguments)
        assert done.returncode == 0, arguments
        assert not done.stderr or arguments == ["list", "--all"], "it may name the command that measures speeds"
        assert word in done.stdout.decode(), arguments
        assert b"\x1b" not in done.stdout, arguments


def test_doctor_says_at_once_that_it_works_and_names_the_model_as_its_file_does(llmrun: Installed) -> None:
    terminal = llmrun.terminal("doctor")
    terminal.wait(lambda: terminal.lines)
    assert terminal.lines[0].startswith("Testing an answer")
    assert terminal.end() == 0
    assert any("smollm2 (llama 135M Q4_1)" in " ".join(line.split()) for line in terminal.lines)


def test_list_show_and_doctor_in_json(llmrun: Installed, model_path: Path) -> None:
    def result(*arguments: str) -> object:
        done = llmrun.run(*arguments, "--json")
        assert (done.returncode, done.stderr) == (0, b""), arguments
        return json.loads(done.stdout)

    listed = result("list")
    assert isinstance(listed, list)
    assert any(Path(model["path"]).samefile(model_path) for model in listed)
    shown = result("show", str(model_path))
    assert isinstance(shown, dict)
    assert (shown["architecture"], shown["quant"], shown["vocabulary"]) == ("llama", "Q4_1", 49152)
    findings = result("doctor")
    assert isinstance(findings, list)
    assert not [finding for finding in findings if finding["status"] == "problem"]


def test_a_wrong_name_gets_a_suggestion(llmrun: Installed) -> None:
    for command in (["run", "smolm2", "hi"], ["chat", "smolm2"], ["show", "smolm2"], ["pull", "smolm2"]):
        done = llmrun.run(*command)
        assert (done.returncode, done.stdout) == (3, b""), command
        stderr = done.stderr.decode()
        assert "smolm2" in only_error_line(stderr)
        assert "smollm2" in stderr
        assert "did you mean" in stderr.lower()


@pytest.mark.parametrize(
    "arguments",
    [
        ["run"],
        ["nonsense"],
        ["run", "smollm2", "hi", "--top-p", "7"],
    ],
    ids=" ".join,
)
def test_usage_errors(llmrun: Installed, arguments: list[str]) -> None:
    done = llmrun.run(*arguments)
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"rror" in done.stderr
    assert b"Traceback" not in done.stderr


def test_errors_are_json_where_the_answer_is(llmrun: Installed) -> None:
    done = llmrun.run("run", "--json", "smolm2", "hi")
    assert (done.returncode, done.stdout) == (3, b"")
    assert json.loads(done.stderr)["error"]["code"] == "model-not-found"
