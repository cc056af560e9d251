"""Ctrl-Z, `fg` and questions on real pseudo-terminals, beside an answer that is being drawn."""

from __future__ import annotations

import os
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.installed import Terminal

# The shell leaves the terminal's modes alone, as it has nobody to talk to: what is restored is restored by the program.
SHELL = """
set -m
'{python}' -c "$0" {drawing}
touch stopped
until test -e continue; do sleep 0.05; done
fg
"""

ANSWER = """
import signal, sys, time
from pathlib import Path
from llmrun.protocol.messages import Finished, Rendering, Started, Stats, TextDelta
from llmrun.ui.answer.columns import n_answers_view
from llmrun.ui.answer.view import DisplayOptions, answer_view
from llmrun.ui.terminal.activity import Activity
from llmrun.ui.terminal.keyboard import keyboard
from llmrun.ui.terminal.output import Output

output, stopped = Output(), []
signal.signal(signal.SIGINT, lambda number, frame: stopped.append(True))


def events():
    for request in requests:
        yield Rendering(request)
        yield Started(request, 9, 0, seeds[request - 1])
    number = 0
    while not stopped:
        for request in requests:
            yield TextDelta(request, f"w{number} ", 1)
        number += 1
        time.sleep(0.02)
    for request in requests:
        yield Finished(request, "cancelled", Stats())


requests, seeds = [1], [5, 6]
if sys.argv[1] == "bar":
    with keyboard(output.stdin, echoes=False), Activity(output) as activity:
        while not stopped:
            activity.show("decode ...", 0.5)
            time.sleep(0.02)
else:
    view = answer_view(output, DisplayOptions(stats=True, markdown=False), n_ctx=100)
    if sys.argv[1] == "beside":
        requests = [1, 2]
        view = n_answers_view(output, seeds, DisplayOptions(markdown=False), together=True)
    with keyboard(output.stdin, echoes=False), view:
        for event in events():
            view.show(event)
print("ended", flush=True)
"""

QUESTION = """
from llmrun.ui.terminal.keyboard import keyboard
from llmrun.ui.terminal.output import Output
output = Output()
with keyboard(output.stdin, echoes=False):
    chosen = output.choose(" ".join(["Which turns should be dropped?"] * 8), {"r": "the oldest", "n": "none"})
    output.note(f"chosen: {chosen}.")
    output.note(f"confirmed: {output.confirm('Remove it?')}.")
"""

CTRL_C = """
import signal, threading, time
from llmrun.ui.prompt.input import ChatInput
from llmrun.ui.terminal.output import Output


def interrupt():
    time.sleep(0.3)  # the main thread waits in a system call
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # this thread: no system call is interrupted


signal.signal(signal.SIGINT, signal.default_int_handler)
output = Output()
for ask in (lambda: output.confirm("Remove it?"), lambda: output.press("Which one?", "ab"), ChatInput(output).read):
    threading.Thread(target=interrupt).start()
    try:
        print("read", ask(), flush=True)
    except KeyboardInterrupt:
        print("stopped", flush=True)
"""

RUN = """
import time
from llmrun.cli.answering import cancelling
from llmrun.ui.terminal.output import Output


class Model:
    def cancel(self):
        stopped.append(True)


stopped = []
with cancelling(Output(), Model()):
    print("answering", flush=True)
    while not stopped:
        time.sleep(0.02)
print("ended", flush=True)
"""

BACKGROUND = """
import sys
from llmrun.ui.terminal.keyboard import keyboard
with keyboard(sys.stdin, echoes=False):
    print("ended", flush=True)
"""


@pytest.fixture
def start(tmp_path: Path, package_on_path: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Terminal]]:
    """start(command, ...): a command in a terminal, in an empty folder."""
    started: list[Terminal] = []
    monkeypatch.chdir(tmp_path)

    def begin(*command: str) -> Terminal:
        clean = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")}
        started.append(Terminal(command, {**clean, "TERM": "xterm-256color"}))
        return started[-1]

    yield begin
    for terminal in started:
        terminal.close()


def echoes(terminal: Terminal) -> bool:
    """Whether the terminal shows keys by itself."""
    return bool(terminal.modes()[3] & termios.ECHO)


def is_drawn(terminal: Terminal) -> bool:
    """Whether there is a live line."""
    return any("decode" in line for line in terminal.lines)


@pytest.mark.parametrize("drawing", ["answer", "beside", "bar"])
def test_ctrl_z_leaves_no_live_line_and_fg_goes_on(
    start: Callable[..., Terminal], tmp_path: Path, drawing: str
) -> None:
    terminal = start("bash", "-c", SHELL.format(python=sys.executable, drawing=drawing), ANSWER)
    terminal.wait(lambda: is_drawn(terminal) and not echoes(terminal))
    terminal.press("z")
    terminal.wait((tmp_path / "stopped").exists)
    terminal.wait(lambda: echoes(terminal) and not is_drawn(terminal))
    assert terminal.raw.count(b"\x1b[?25l") == terminal.raw.count(b"\x1b[?25h"), "the shell sees its cursor"
    (tmp_path / "continue").touch()
    terminal.wait(lambda: is_drawn(terminal) and not echoes(terminal))
    terminal.press("c")
    terminal.wait(lambda: "ended" in terminal.lines)
    assert not any("^" in line for line in terminal.lines)
    columns = [line.split("│")[0] for line in terminal.lines]
    words = [word for text in columns for word in text.split() if word[:1] == "w" and word[1:].isdigit()]
    assert words == [f"w{number}" for number in range(len(words))], "no word is lost, and none is there twice"


def test_a_stop_that_nobody_notices_leaves_the_keyboard_quiet(start: Callable[..., Terminal]) -> None:
    import psutil

    terminal = start(sys.executable, "-c", ANSWER, "answer")
    terminal.wait(lambda: is_drawn(terminal) and not echoes(terminal))
    process = psutil.Process(terminal.pid)
    process.suspend()
    modes = terminal.modes()
    modes[3] |= termios.ECHO  # as a shell does that takes its terminal back
    termios.tcsetattr(terminal._child.child_fd, termios.TCSANOW, modes)
    process.resume()
    terminal.wait(lambda: not echoes(terminal))


def test_a_question_beside_an_answer_shows_what_is_typed(start: Callable[..., Terminal]) -> None:
    terminal = start(sys.executable, "-c", QUESTION)
    terminal.wait(lambda: any(line.endswith("[r/n]") for line in terminal.lines) and echoes(terminal))
    terminal.type("what")
    terminal.wait(lambda: sum("[r/n]" in line for line in terminal.lines) == 2)
    terminal.type("R")
    terminal.wait(lambda: any(line == "Remove it? [y/N]" for line in terminal.lines) and echoes(terminal))
    terminal.type("y")
    terminal.wait(lambda: terminal.lines[-1] == "confirmed: True.")
    first, rest, *others = terminal.lines[2:]
    asked = " ".join(["Which turns should be dropped?"] * 8)
    assert f"{first} {rest}" == asked + " [r/n] what", "it is broken between words"
    assert others[1].endswith("[r/n] R")
    assert others[2:] == ["chosen: r.", "Remove it? [y/N] y", "confirmed: True."]


def test_ctrl_c_ends_a_wait_for_keys_that_it_does_not_interrupt(start: Callable[..., Terminal]) -> None:
    """The system may deliver it as the question appears, just before the call that waits."""
    terminal = start("env", "TERM=dumb", sys.executable, "-c", CTRL_C)
    terminal.wait(lambda: any(line.startswith("Press Ctrl-C once more") for line in terminal.lines))
    assert terminal.lines.count("stopped") == 2
    terminal.press("d")
    terminal.wait(lambda: "read None" in " ".join(terminal.lines))


@pytest.mark.parametrize("before", ["", "true |"])
def test_keys_do_not_break_into_an_answer_of_run(start: Callable[..., Terminal], before: str) -> None:
    terminal = start("bash", "-c", f"{before} '{sys.executable}' -c \"$0\"", RUN)
    terminal.wait(lambda: "answering" in terminal.lines and not echoes(terminal))
    terminal.type("typed ahead")
    terminal.press("c")
    terminal.wait(lambda: "ended" in terminal.lines and echoes(terminal))
    assert terminal.lines == ["answering", "ended"]


def test_run_leaves_a_terminal_alone_whose_answer_goes_elsewhere(
    start: Callable[..., Terminal], tmp_path: Path
) -> None:
    """A pager below it has its own mode, which ours would undo."""
    answer = tmp_path / "answer"
    terminal = start("bash", "-c", f"'{sys.executable}' -c \"$0\" > answer", RUN)
    terminal.wait(lambda: "answering" in (answer.read_text() if answer.exists() else ""))
    assert echoes(terminal)
    terminal.press("c")
    terminal.wait(lambda: "ended" in answer.read_text())


def test_a_command_in_the_background_leaves_the_terminal_alone(start: Callable[..., Terminal]) -> None:
    """The system would stop it for a change."""
    terminal = start("bash", "-c", f"set -m; '{sys.executable}' -c \"$0\" & wait; echo waited", BACKGROUND)
    terminal.wait(lambda: "waited" in terminal.lines)
    assert "ended" in terminal.lines
    assert echoes(terminal)
