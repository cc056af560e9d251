"""Drives the installed command as a person or a script would: to its end, in the background, or in a terminal."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import termios
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pexpect
import psutil
import pyte

from support.screens import CachedScreen

SECONDS = 300.0
"""A command that takes longer hangs; on a busy machine everything takes many times its own time."""
LONG_PROMPT = "The quick brown fox jumps over the lazy dog. " * 600
"""About 6,000 tokens: seconds of prefill on any CPU."""
WITHOUT_END = ("--logit-bias", "2=-inf", "--logit-bias", "0=-inf")
"""SmolLM2's answer goes on until its limit or until it is stopped, on every CPU: its two end tokens are forbidden."""
PROMPT = ">>>"
ROWS, COLUMNS = 150, 200


def eventually(condition: Callable[[], Any], seconds: float) -> Any:
    """The condition's first true value, or its last one when the time is over."""
    ends = time.monotonic() + seconds
    while not (value := condition()) and time.monotonic() < ends:
        time.sleep(0.002)
    return value


def gone(process: psutil.Process | None) -> bool:
    """Whether a process has ended; a zombie has."""
    if process is None:
        return True
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def engine_of(front: int) -> psutil.Process:
    """The engine process of a front, as soon as it is there."""
    return eventually(lambda: _engine(front), SECONDS) or pytest_fail(f"process {front} has no engine")


def _engine(front: int) -> psutil.Process | None:
    return next(iter(children_of(front, "llmrun.engine")), None)


def children_of(parent: int | None, words: str, *, recursive: bool = False) -> list[psutil.Process]:
    """The children of a process, by default this one, with these words in their command lines.

    One that ends meanwhile, or is a zombie, has no command line.
    """
    found = []
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(parent).children(recursive=recursive):
            with suppress(psutil.Error):
                if words in " ".join(child.cmdline()):
                    found.append(child)
    return found


def pytest_fail(why: str) -> Any:
    """An assertion error, as an expression."""
    raise AssertionError(why)


def only_error_line(stderr: str) -> str:
    """The one "error:" line, checked to be the only one and no traceback."""
    lines = [line for line in stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1, stderr
    assert "Traceback" not in stderr
    return lines[0]


class Running:
    """A command in the background, its stdout read line by line as JSON events."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.engine = engine_of(process.pid)

    def event(self, *kinds: str) -> dict[str, Any]:
        """Skip to the next event of one of these kinds."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event = json.loads(line)
            if event["event"] in kinds:
                return dict(event)
        raise AssertionError(f"no {kinds}: {self.process.stderr.read().decode() if self.process.stderr else ''}")

    def end(self, seconds: float = SECONDS) -> tuple[int, str]:
        """Exit status and stderr, once it has ended; minus the signal's number if one ended it."""
        _, stderr = self.process.communicate(timeout=seconds)
        return self.process.returncode, stderr.decode()


class Installed:
    """The command, run with arguments.

    Args:
        command: its path.
        home: LLMRUN_HOME, where it may keep what was typed.
    """

    def __init__(self, command: str, home: Path) -> None:
        self.command = command
        self._environment = {**os.environ, "LLMRUN_HOME": str(home), "HF_HUB_OFFLINE": "1"}
        for name in ("NO_COLOR", "FORCE_COLOR", "LLMRUN_DEBUG", "COLUMNS", "LINES"):
            self._environment.pop(name, None)
        self._started: list[subprocess.Popen[bytes]] = []
        self._terminals: list[Terminal] = []

    def environment(self, changes: dict[str, str] | None = None) -> dict[str, str]:
        """What the command sees."""
        return {**self._environment, **(changes or {})}

    def run(
        self,
        *arguments: str,
        stdin: str | bytes = b"",
        env: dict[str, str] | None = None,
        seconds: float = SECONDS,
    ) -> subprocess.CompletedProcess[bytes]:
        """Run to the end, all three streams being pipes."""
        data = stdin.encode() if isinstance(stdin, str) else stdin
        return subprocess.run(
            [self.command, *arguments], input=data, capture_output=True, env=self.environment(env), timeout=seconds
        )

    def answer(self, *arguments: str, stdin: str | bytes = b"", env: dict[str, str] | None = None) -> str:
        """What `llmrun run smollm2 ...` answers in a line, which must succeed without a word on stderr."""
        done = self.run("run", "smollm2", *arguments, stdin=stdin, env=env)
        assert (done.returncode, done.stderr) == (0, b"")
        return done.stdout.decode().removesuffix("\n")

    def events(self, *arguments: str, stdin: str | bytes = b"") -> list[dict[str, Any]]:
        """The events of `llmrun run smollm2 --json ...`, which must succeed."""
        return [json.loads(line) for line in self.answer("--json", *arguments, stdin=stdin).splitlines()]

    def shell(self, script: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[bytes]:
        """Run a shell script in which $llmrun is the command."""
        return subprocess.run(
            ["bash", "-c", script],
            capture_output=True,
            env=self.environment({"llmrun": self.command, **(env or {})}),
            stdin=subprocess.DEVNULL,
            timeout=SECONDS,
        )

    def start(self, *arguments: str, stdin: str = "") -> Running:
        """Start in the background; Running finds its engine."""
        process = subprocess.Popen(
            [self.command, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self.environment(),
        )
        self._started.append(process)
        running = Running(process)
        assert process.stdin is not None
        process.stdin.write(stdin.encode())
        process.stdin.close()
        process.stdin = None
        return running

    def terminal(self, *arguments: str, env: dict[str, str] | None = None) -> Terminal:
        """Start in a pseudo-terminal."""
        terminal = Terminal([self.command, *arguments], self.environment({"TERM": "xterm-256color", **(env or {})}))
        self._terminals.append(terminal)
        return terminal

    def close(self) -> None:
        """End what is still running."""
        for process in self._started:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
        for terminal in self._terminals:
            terminal.close()


class Terminal:
    """A command in a pseudo-terminal, and the screen as a person sees it."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self.screen = CachedScreen(COLUMNS, ROWS)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self._child = pexpect.spawn(
            command[0], list(command[1:]), env=environment, dimensions=(ROWS, COLUMNS), timeout=SECONDS
        )
        self._child.delaybeforesend = None
        self.modes_before = self.modes()

    @property
    def pid(self) -> int:
        """Of the command."""
        return int(self._child.pid)

    @property
    def engine(self) -> psutil.Process:
        """The engine process of the command."""
        return engine_of(self.pid)

    def modes(self) -> list[Any]:
        """How the terminal is set."""
        return termios.tcgetattr(self._child.child_fd)

    @property
    def lines(self) -> list[str]:
        """What is on the screen, without what is blank."""
        return [line.rstrip() for line in self.screen.display if line.strip()]

    def at_prompt(self) -> bool:
        """Whether an empty prompt waits for a person."""
        return self.screen.display[self.screen.cursor.y].rstrip() == PROMPT

    def wait(self, condition: Callable[[], Any], seconds: float = SECONDS) -> Any:
        """Read what the command writes until the condition is true; gives its value."""
        ends = time.monotonic() + seconds
        while not (value := condition()):
            assert time.monotonic() < ends, "\n".join(["this is on the screen:", *self.lines])
            if not self._read():
                value = condition()
                assert value, "\n".join(["it ended with this on the screen:", *self.lines])
                break
        return value

    def _read(self) -> bool:
        """Read for a moment; False when the command has closed the terminal."""
        try:
            data = self._child.read_nonblocking(1 << 16, timeout=0.05)
        except pexpect.TIMEOUT:
            return True
        except pexpect.EOF:
            return False
        self.raw += data
        self._stream.feed(data)
        return True

    def type(self, text: str) -> None:
        """Type a line and press Enter."""
        self._child.send(text + "\r")

    def press(self, control: str) -> None:
        """Press Ctrl and a letter."""
        self._child.sendcontrol(control)

    def ask(self, text: str, seconds: float = SECONDS) -> list[str]:
        """Type a line and wait for the next prompt; gives the lines between the two."""
        echo = f"{PROMPT} {text}"
        before = self.lines.count(echo)  # the same was typed earlier
        self.type(text)
        self.wait(lambda: self.lines.count(echo) > before and self.between(text) is not None, seconds)
        return self.between(text) or []

    def exported(self, folder: Path) -> list[str]:
        """What was said in a chat, the user's and the model's turns one after the other."""
        file = folder / "chat.jsonl"
        file.unlink(missing_ok=True)
        self.ask(f"/export {file}")
        return [json.loads(line)["content"] for line in file.read_text(encoding="utf-8").splitlines()]

    def between(self, typed: str) -> list[str] | None:
        """The lines between the last prompt with this text and the empty prompt after it; None before that is there."""
        lines = self.lines
        asked = [index for index, line in enumerate(lines) if line == f"{PROMPT} {typed}"]
        if not asked or not self.at_prompt() or lines[-1] != PROMPT:
            return None
        return lines[asked[-1] + 1 : -1]

    def end(self, seconds: float = SECONDS) -> int:
        """The exit status, once it has ended; minus the signal's number if one ended it."""
        ends = time.monotonic() + seconds
        while self._read():
            assert time.monotonic() < ends, "\n".join(["it does not end:", *self.lines])
        self._child.wait()
        return -int(self._child.signalstatus) if self._child.signalstatus else int(self._child.exitstatus)

    def hang_up(self) -> None:
        """Close the terminal, as somebody who closes its window."""
        os.close(self._child.child_fd)
        self._child.closed = True

    def close(self) -> None:
        """End the command if it still runs."""
        if self._child.isalive():
            self._child.kill(signal.SIGKILL)
            self._child.wait()
        if not self._child.closed:
            self._child.close(force=True)


SUMMARY = re.compile(
    r"prefill (?P<prefilled>[\d,]+) tokens?.* · decode (?P<decoded>[\d,]+) tokens?.*"
    r" · ctx (?P<used>[\d,]+)/(?P<window>[\d,]+)(?: · reused (?P<reused>[\d,]+) of (?P<prompt>[\d,]+))?"
    r".* · seed \d+(?P<stopped>.*)"
)


def summary(lines: Sequence[str]) -> dict[str, int]:
    """The figures of the summary among these lines: tokens prefilled, reused (0 if none), decoded, in the context."""
    rows: list[str] = []
    for line in lines:  # a long summary has several
        if rows and rows[-1].endswith(" ·"):
            rows[-1] += f" {line}"
        else:
            rows.append(line)
    found = [match for row in rows if (match := SUMMARY.search(row))]
    assert len(found) == 1, lines
    figures = {
        name: int((text or "0").replace(",", "")) for name, text in found[0].groupdict().items() if name != "stopped"
    }
    return {**figures, "cancelled": int("Ctrl-C" in found[0]["stopped"])}
