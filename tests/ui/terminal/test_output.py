"""Which stream gets what, in which clothes."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import pytest
from support.streams import Terminal

from llmrun.cli.answering import print_event
from llmrun.errors import LlmrunError, ModelNotFoundError
from llmrun.protocol.messages import Finished, Stats, TextDelta
from llmrun.ui.terminal.output import Output, drop_output

ERROR = ModelNotFoundError("there is no model 'x\x1b[2J'", why="no such\nfile", hint="llmrun list --all")


def terminal_output(stdin: str = "", *, json: bool = False, **environment: str) -> Output:
    return Output(
        json=json,
        stdin=Terminal(stdin),
        stdout=Terminal(),
        stderr=Terminal(),
        environment={"TERM": "xterm", **environment},
    )


def pipe_output(*, json: bool = False, **environment: str) -> Output:
    return Output(json=json, stdin=io.StringIO(), stdout=io.StringIO(), stderr=io.StringIO(), environment=environment)


def written(output: Output) -> tuple[str, str]:
    assert isinstance(output.stdout, io.StringIO)
    assert isinstance(output.stderr, io.StringIO)
    return output.stdout.getvalue(), output.stderr.getvalue()


def test_error_is_three_clean_lines_on_stderr() -> None:
    output = pipe_output()
    output.error(ERROR)
    assert written(output) == (
        "",
        "error: there is no model 'x'\n  why: no such file\n  try: llmrun list --all\n",
    )


def test_an_error_is_wrapped_between_words() -> None:
    output = terminal_output(COLUMNS="30", NO_COLOR="1")
    output.error(LlmrunError("there is no saved chat called nothing"))
    assert written(output)[1] == "error: there is no saved chat\ncalled nothing\n"


def test_a_hint_is_wrapped_between_words_and_stays_one_line() -> None:
    output = terminal_output(COLUMNS="30", NO_COLOR="1")
    output.error(LlmrunError("it broke", hint="llmrun run granite4-h-tiny 'Why is it so?'"))
    first = "  try: llmrun run".ljust(30)
    assert written(output)[1] == f"error: it broke\n{first}{'  granite4-h-tiny'.ljust(30)}  'Why is it so?'\n"


def test_error_without_why_and_hint_is_one_line() -> None:
    output = pipe_output()
    output.error(LlmrunError("it broke"))
    assert written(output) == ("", "error: it broke\n")


def test_error_as_json() -> None:
    output = terminal_output(json=True)
    output.error(ERROR)
    out, err = written(output)
    assert out == ""
    assert "\x1b" not in err
    assert json.loads(err) == {
        "error": {"code": "model-not-found", "what": ERROR.what, "why": ERROR.why, "hint": ERROR.hint}
    }


@pytest.mark.parametrize(
    ("environment", "colored"),
    [
        ({}, True),
        ({"NO_COLOR": "1"}, False),
        ({"NO_COLOR": ""}, True),
        ({"TERM": "dumb"}, False),
        ({"TERM": ""}, False),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
    ],
)
def test_colour_on_a_terminal(environment: dict[str, str], colored: bool) -> None:
    output = terminal_output(**environment)
    output.error(ERROR)
    output.note("note")
    assert ("\x1b[" in written(output)[1]) is colored
    assert output.stdout_has_color is colored


@pytest.mark.parametrize(
    ("environment", "colored"), [({}, False), ({"FORCE_COLOR": "1"}, True), ({"FORCE_COLOR": "0"}, False)]
)
def test_colour_in_a_pipe(environment: dict[str, str], colored: bool) -> None:
    output = pipe_output(TERM="xterm", **environment)
    output.note("note")
    assert ("\x1b[" in written(output)[1]) is colored
    assert not output.cursor_moves


def test_cursor_moves_only_on_a_capable_terminal() -> None:
    assert terminal_output().cursor_moves
    assert terminal_output(NO_COLOR="1").cursor_moves
    assert not terminal_output(TERM="dumb").cursor_moves


def test_note_is_clean() -> None:
    output = pipe_output()
    output.note("a\x1b]0;t\x07b\nc")
    assert written(output) == ("", "ab c\n")


def test_events_are_lines_of_json_without_control_characters() -> None:
    output = pipe_output(json=True)
    print_event(output, TextDelta(1, "a\x1b\x7f\u202e\n🙂\udc80", 1))
    print_event(output, Finished(1, "stop", Stats(seed=5)))
    out, _ = written(output)
    first, second = out.splitlines()
    assert first.isascii()
    assert first.isprintable()
    assert json.loads(first) == {
        "event": "TextDelta",
        "request": 1,
        "text": "a\x1b\x7f\u202e\n🙂\udc80",
        "tokens": 1,
        "logprobs": [],
        "drafted": False,
        "parts": None,
        "ids": [],
    }
    assert json.loads(second)["stats"]["seed"] == 5


def test_result_is_one_json_document() -> None:
    output = pipe_output(json=True)
    output.result_json([{"name": "é"}])
    out, _ = written(output)
    assert out.isascii()
    assert json.loads(out) == [{"name": "é"}]


@pytest.mark.parametrize(
    ("typed", "answer"),
    [("\n", False), ("y\n", True), ("YES\n", True), ("n\n", False), ("what\nno\n", False), ("", False)],
)
def test_confirm(typed: str, answer: bool) -> None:
    output = terminal_output(typed)
    assert output.confirm("Remove \x1b[2Jit?") is answer
    out, err = written(output)
    assert out == ""
    assert err.startswith("Remove it? [y/N] ")


def test_enter_is_a_yes_only_where_that_is_said() -> None:
    output = terminal_output("\n")
    assert output.confirm("Download it?", enter=True)
    assert written(output)[1] == "Download it? [Y/n] "


def test_confirm_does_not_ask_without_a_person() -> None:
    for output in (pipe_output(), terminal_output("y\n", json=True)):
        assert not output.can_ask
        assert output.confirm("Remove?") is False
        assert written(output) == ("", "")


# ---- real processes --------------------------------------------------------------------------------


def run(code: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **options)  # type: ignore[call-overload,no-any-return]


def test_ascii_streams_do_not_crash() -> None:
    code = "from llmrun.ui.terminal.output import Output; o = Output(); o.text('a🙂b'); o.note('· 🙂')"
    done = run(code, env={"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "a?b\n", "? ?\n")


def test_closed_streams_do_not_crash() -> None:
    code = """
import sys
from llmrun.cli.answering import print_event
from llmrun.ui.terminal.output import Output
sys.stdin = sys.stdout = sys.stderr = None
output = Output()
output.text("x")
output.note("y")
assert output.stdin.read() == ""
assert not output.can_ask
"""
    done = run(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_broken_pipe_is_quiet() -> None:
    code = """
from llmrun.cli.answering import print_event
from llmrun.ui.terminal.output import Output, drop_output
output = Output()
try:
    for _ in range(100_000):
        output.text("x" * 100)
except BrokenPipeError:
    drop_output()
    raise SystemExit(3)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=120) == 3


def test_drop_output_takes_a_stream() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    stream = os.fdopen(write_end, "w")
    stream.write("x")
    with pytest.raises(BrokenPipeError):
        stream.flush()
    drop_output(stream)
    stream.close()


def test_a_pipe_never_pays_for_rich_or_prompt_toolkit() -> None:
    code = """
import sys
from llmrun.protocol.messages import Finished, Stats, TextDelta
from llmrun.ui.answer import view as answer
from llmrun.ui.prompt import input as chat
from llmrun.ui.terminal.activity import download_progress
from llmrun.ui.terminal import output, tables
o = output.Output()
with answer.answer_view(o, answer.DisplayOptions(stats=True)) as view:
    view.show(TextDelta(1, "é", 1)); view.show(Finished(1, "stop", Stats()))
tables.show_table(o, [tables.Column("A")], [["é"]])
with download_progress(o, "x") as on_progress:
    on_progress(1, 2)
chat.ChatInput(o).read()
print([name for name in ("rich", "prompt_toolkit", "wcwidth") if name in sys.modules])
"""
    done = run(code, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
