"""`llmrun run` as it is installed, over the fake engine, which says Hello to everything."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.gguf_writer import tiny_model, write
from support.installed import SUMMARY, Terminal

FRONT = Path(__file__).parents[1] / "support/front.py"
Run = Callable[..., "subprocess.CompletedProcess[bytes]"]

pytestmark = pytest.mark.usefixtures("package_on_path")


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "tiny.gguf", tiny_model())
    path = os.environ["PYTHONPATH"] + os.pathsep + str(FRONT.parents[1])
    home = {"LLMRUN_HOME": str(tmp_path / "home"), "TERM": "xterm-256color", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **home, "PYTHONPATH": path}


@pytest.fixture
def run(environment: dict[str, str]) -> Run:
    """run(mode, argument, ...): `llmrun run ./tiny.gguf` with these arguments in pipes."""

    def make(mode: str, *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        words = [sys.executable, str(FRONT), mode, "run", "./tiny.gguf", *arguments]
        return subprocess.run(words, input=stdin, capture_output=True, env=environment, timeout=300)

    return make


@pytest.fixture
def terminal(environment: dict[str, str]) -> Iterator[Callable[..., Terminal]]:
    """The same in a pseudo-terminal."""
    opened: list[Terminal] = []

    def make(mode: str, *arguments: str) -> Terminal:
        opened.append(Terminal([sys.executable, str(FRONT), mode, "run", "./tiny.gguf", *arguments], environment))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def test_an_answer_with_tools(run: Run, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("from the folder")
    asked = '{"path": "notes.txt"}'
    done = run("calling", asked, "--tools", "files", "--yes-to", "read_file")
    assert (done.returncode, done.stdout) == (0, b"Let me see.\nI heard: from the folder\n")
    assert "● read_file\n    path: notes.txt\n" in done.stderr.decode()
    refused = run("calling", asked, "--tools", "files")
    assert refused.stdout.startswith(b"Let me see.\nI heard: Error: it was not run: there is nobody here")
    assert b"--yes-to read_file allows it" in refused.stderr
    beyond = run("calling", '{"path": "../x"}', "--tools", "files", "--yes-to", "read_file")
    assert b"I heard: Error: PermissionError: ../x is outside of the folder" in beyond.stdout
    for other in (["--raw"], ["--beams", "2"], ["--answers", "2"], ["--record", "x.json"], ["--logprobs", "0"]):
        done = run("calling", asked, "--tools", "files", *other)
        assert (done.returncode, done.stdout) == (2, b"")


def test_a_call_of_an_answer_is_asked_about(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("from the folder")
    for answer, heard in (("y", "I heard: from the folder"), ("n", "I heard: Error: the user does not allow it")):
        screen = terminal("calling", '{"path": "notes.txt"}', "--tools", "files")
        screen.wait(lambda screen=screen: any("Run it?" in line for line in screen.lines))
        screen.type(answer)
        assert screen.end() == 0
        assert any(heard in line for line in screen.lines)
    stopped = terminal("calling", '{"path": "notes.txt"}', "--tools", "files")
    stopped.wait(lambda: any("Run it?" in line for line in stopped.lines))
    stopped.press("c")
    assert stopped.end() == -signal.SIGINT


def test_an_answer_in_a_pipe_is_a_line(run: Run) -> None:
    done = run("normal", "hi")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"Hello\n", b"")


def test_raw_text_is_continued_without_a_newline(run: Run) -> None:
    assert run("normal", "--raw", "hi").stdout == b"Hello"


def test_figures_that_are_asked_for_come_in_a_pipe_too(run: Run) -> None:
    done = run("normal", "--stats", "hi")
    assert done.stdout == b"Hello\n"
    (line,) = done.stderr.decode().splitlines()
    assert SUMMARY.search(line)


@pytest.mark.skipif(os.name == "nt", reason="needs a pseudo-terminal")
def test_without_a_prompt_a_terminal_gets_a_chat(terminal: Callable[..., Terminal]) -> None:
    chat = terminal("normal")
    chat.wait(chat.at_prompt)
    assert "Hello" in chat.ask("hi")


@pytest.mark.skipif(os.name == "nt", reason="needs a pseudo-terminal")
@pytest.mark.parametrize("option", ["--raw", "--json", "--prompt-cache", "--explain-sampling"])
def test_what_only_run_can_do_wants_a_prompt(terminal: Callable[..., Terminal], option: str) -> None:
    asked = terminal("normal", option)
    assert asked.end() == 2
    assert "there is no prompt" in " ".join(asked.lines)


@pytest.mark.parametrize(
    ("mode", "why", "hint"),
    [
        ("at_max_tokens", "--max-tokens 2", "a larger --max-tokens"),
        ("window_full", "the context window of 256 tokens is full", "a larger --ctx"),
    ],
)
def test_a_structured_answer_that_is_cut_off_is_an_error_that_names_the_limit(
    run: Run, mode: str, why: str, hint: str
) -> None:
    done = run(mode, "--json-schema", "{}", "hi")
    assert (done.returncode, done.stdout) == (9, b"Hel\n")
    what, cause, advice = done.stderr.decode().splitlines()
    assert what == "error: the answer is cut off and incomplete"
    assert cause == f"  why: {why}"
    assert hint in advice


def test_a_plain_answer_that_a_limit_ends_is_none(run: Run) -> None:
    done = run("at_max_tokens", "-n", "2", "hi")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"Hel\n", b"")


def test_a_full_context_window_is_said(run: Run) -> None:
    done = run("window_full", "hi")
    assert done.returncode == 0
    assert done.stderr == b"the answer is cut off: the context window of 256 tokens is full\n"


def test_a_pattern_without_quotes_does_not_become_a_prompt(run: Run, tmp_path: Path) -> None:
    for name in ("a.py", "b.py", "c.py"):
        (tmp_path / name).write_text("pass\n")
    done = run("normal", "-f", "a.py", "b.py", "c.py", "Explain")
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.decode().splitlines()[0] == "error: 'b.py' is a file in the place of the prompt"
    assert "-f '*.py'" in done.stderr.decode()
    assert run("normal", "-f", "*.py", "Explain b.py").stdout == b"Hello\n"
    assert run("normal", "b.py").stdout == b"Hello\n"


@pytest.mark.parametrize("place", [".", "not/there.json", "/dev/null/x.json", "/proc/x.json"])
def test_a_record_that_cannot_be_written_is_found_before_the_answer(run: Run, place: str) -> None:
    done = run("normal", "--record", place, "hi")
    assert done.returncode in (2, 6)
    assert done.stdout == b""
    assert place.split("/")[-2 if "/" in place else 0] in done.stderr.decode()


def test_a_schema_from_windows_is_read(run: Run, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_bytes(b'\xef\xbb\xbf{"type": "object"}')
    assert run("normal", "--json-schema", "schema.json", "hi").returncode == 0


def test_several_answers_in_a_pipe_come_one_after_the_other_with_their_seeds(run: Run) -> None:
    done = run("together", "-N", "2", "--seed", "41", "hi")
    assert done.stdout == b"--- answer 1 of 2, seed 41 ---\nHello\n--- answer 2 of 2, seed 42 ---\nHello\n"
    assert done.stderr == b""


def test_several_answers_as_json_are_a_list(run: Run) -> None:
    answers = json.loads(run("together", "--answers", "2", "--seed", "4294967295", "--json", "hi").stdout)
    assert [(each["seed"], each["text"], each["reason"]) for each in answers] == [
        (2**32 - 1, "Hello", "stop"),
        (0, "Hello", "stop"),
    ]


def test_without_a_seed_several_answers_have_seeds_in_a_row(run: Run) -> None:
    first, second = json.loads(run("together", "-N", "2", "--json", "hi").stdout)
    assert (first["seed"] + 1) % 2**32 == second["seed"]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["-N", "0"], "invalid --answers 0"),
        (["-N", "129"], "invalid --answers 129"),
        (["-N", "2", "--record", "x.json"], "--record and --answers 2 can't be used together"),
        (["-N", "3", "--temp", "0"], "3 answers would all be the same"),
    ],
)
def test_several_answers_that_cannot_be_are_refused(run: Run, options: list[str], what: str) -> None:
    done = run("together", *options, "hi")
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.decode().startswith(f"error: {what}")


def test_one_of_several_structured_answers_that_is_cut_off_is_an_error(run: Run) -> None:
    done = run("at_max_tokens", "-N", "2", "--json-schema", "{}", "hi")
    assert done.returncode == 9
    assert done.stdout.count(b"Hel\n") == 2


@pytest.mark.skipif(os.name == "nt", reason="needs a pseudo-terminal")
def test_several_answers_on_a_terminal_stand_side_by_side(terminal: Callable[..., Terminal]) -> None:
    asked = terminal("together", "-N", "2", "--seed", "1", "hi")
    assert asked.end() == 0
    head, text = (line.split() for line in asked.lines if "│" in line)
    assert head == ["1.", "seed", "1", "│", "2.", "seed", "2"]
    assert text == ["Hello", "│", "Hello"]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--logprobs", "21"], "invalid --logprobs 21"),
        (["--logprobs", "-1"], "invalid --logprobs -1"),
        (["--logprobs", "2"], "--logprobs needs colours"),
        (["--logprobs", "2", "-N", "2"], "--logprobs and --answers can't be used together"),
    ],
)
def test_log_probabilities_that_cannot_be_shown_are_refused(run: Run, options: list[str], what: str) -> None:
    done = run("normal", *options, "hi")
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.decode().startswith(f"error: {what}")
