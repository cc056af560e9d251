"""The process's streams: results on stdout, everything else on stderr, colour only where it is wanted.

Rich is imported only for a table or a progress bar, and so is everything that a page of help does not need.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, TextIO, cast

from llmrun.errors import LlmrunError
from llmrun.ui.terminal.cells import wrapped, wrapped_by_blanks
from llmrun.ui.terminal.sanitize import clean

if TYPE_CHECKING:
    from rich.console import Console

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of a full disk, a quota, or a limit on file sizes."""
_MAX_CLIPBOARD_BYTES = 74_994  # limit of xterm
_DECLINING = ("", "\r", "\n", "\x1b", "\x04", "q")
_DIM, _RED, _RESET = "\x1b[2m", "\x1b[1;31m", "\x1b[0m"


class Output:
    """The three streams of this process, and their abilities.

    Args:
        json: results, events and errors are JSON.
        stdin, stdout, stderr: the process's own by default; a closed one reads as empty, and discards writes.
        environment: os.environ by default; TERM, NO_COLOR and FORCE_COLOR are read.

    Attributes:
        cursor_moves: stdout is a terminal that understands cursor movement.
        stderr_cursor_moves: the same for stderr.
    """

    def __init__(
        self,
        *,
        json: bool = False,
        stdin: TextIO | None = None,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        env = os.environ if environment is None else environment
        self.json = json
        self._environment = env
        self.stdin = stdin or sys.stdin or _null_stream("r")
        self.stdout = _never_fails_to_encode(stdout or sys.stdout or _null_stream("w"))
        self.stderr = _never_fails_to_encode(stderr or sys.stderr or _null_stream("w"))
        self.stdin_is_terminal = _is_terminal(self.stdin)
        self.stdout_is_terminal = _is_terminal(self.stdout)
        self.stderr_is_terminal = _is_terminal(self.stderr)
        self._dumb = env.get("TERM", "") in {"", "dumb", "unknown"} and os.name != "nt"
        self._no_color = bool(env.get("NO_COLOR"))
        self._force_color = env.get("FORCE_COLOR", "") not in {"", "0", "false"}
        self.cursor_moves = self.stdout_is_terminal and not self._dumb
        self.stderr_cursor_moves = self.stderr_is_terminal and not self._dumb

    @property
    def stdout_has_color(self) -> bool:
        """Whether to use colour and dim text on stdout. NO_COLOR beats FORCE_COLOR."""
        return self._has_color(self.stdout_is_terminal)

    @property
    def stderr_has_color(self) -> bool:
        return self._has_color(self.stderr_is_terminal)

    @property
    def can_ask(self) -> bool:
        """Whether a user can answer a question."""
        return self.stdin_is_terminal and self.stderr_is_terminal and not self.json

    def columns(self, *, stderr: bool = False) -> int:
        """Return the columns of the terminal, or of COLUMNS; 0 off a terminal or if unknown."""
        if not (self.stderr_is_terminal if stderr else self.stdout_is_terminal):
            return 0
        if (columns := self._environment.get("COLUMNS", "")).isdecimal():
            return int(columns)
        try:
            return os.get_terminal_size((self.stderr if stderr else self.stdout).fileno()).columns
        except (OSError, ValueError):  # not a terminal
            return 0

    def note(self, text: str, *, is_command: bool = False, dim: bool = True) -> None:
        """Print a line on stderr; on a terminal it is wrapped between words.

        Args:
            is_command: the line will be copied as one line.
            dim: the line is secondary.
        """
        line = clean(text)
        shown = self._wrapped(line, is_command=is_command)
        self._to_stderr(self._styled(_DIM, shown) if dim else shown)

    def error(self, error: LlmrunError) -> None:
        """Print an error: what happened, the reason, a hint; up to three lines on stderr, or one JSON object."""
        if self.json:
            facts = {"code": error.code, "what": error.what, "why": error.why, "hint": error.hint}
            self._to_stderr(_json({"error": facts}))
            return
        first = self._wrapped("error: " + clean(error.what))
        lines = [self._styled(_RED, "error:") + first.removeprefix("error:")]
        if error.why:
            lines.append(self._wrapped("  why: " + clean(error.why)))
        if error.hint:
            lines.append(self._wrapped("  try: " + clean(error.hint), is_command=True))
        self._to_stderr("\n".join(lines))

    def text(self, text: str) -> None:
        """Print lines of a result on stdout; they must be sanitized."""
        self.stdout.write(text + "\n")
        self.stdout.flush()

    def sentence(self, text: str, *, is_command: bool = False) -> None:
        """Print text of a result on stdout; on a terminal it is wrapped. is_command as in note()."""
        self.text(self._wrapped(clean(text), stderr=False, is_command=is_command))

    def result_json(self, value: Any) -> None:
        """Print a command's result on stdout as one JSON document.

        Raises:
            TypeError: the value is not plain JSON data.
        """
        self.text(_json(value, indent=2))

    def json_line(self, value: Any) -> None:
        """Print a part of a result on stdout as one line of JSON. Raises as result_json()."""
        self.text(_json(value))

    def confirm(self, question: str, *, enter: bool = False) -> bool:
        """Ask a yes/no question on the terminal. Without a terminal the answer is no.

        Args:
            enter: the meaning of Enter alone; True only if yes harms nothing.
        """
        while self.can_ask:
            answer = self._ask(f"{question} [{'Y/n' if enter else 'y/N'}]")
            word = (answer or "no").strip().lower() or ("yes" if enter else "no")
            if word in {"y", "yes", "n", "no"}:
                return word[0] == "y"
        return False

    def choose(self, question: str, answers: Mapping[str, str], *, explained: bool = True) -> str:
        """Ask for one of several letters on the terminal.

        Args:
            answers: letter -> meaning; the last one is the default without an answer.
            explained: print the meanings first.
        """
        for letter, meaning in answers.items() if explained else ():
            self.note(f"  {letter}  {meaning}")
        while self.can_ask:
            if not (answer := self._ask(f"{question} [{'/'.join(answers)}]")):
                break
            if answer.strip().lower()[:1] in answers:
                return answer.strip().lower()[:1]
        return list(answers)[-1]

    def press(self, question: str, keys: Collection[str]) -> str:
        """Ask for one key on the terminal; return it, or "" for Enter, Escape and Ctrl-D."""
        from llmrun.ui.terminal.keyboard import read_key

        key = "?"
        try:
            self.stderr.write(self._wrapped(clean(question)) + " ")
            self.stderr.flush()
            while key not in keys and key not in _DECLINING:
                key = read_key(self.stdin)
        finally:
            self.stderr.write(f"{key if key in keys and key != '?' else ''}\n")
            self.stderr.flush()
        return key if key in keys else ""

    def _ask(self, question: str) -> str:
        """Return the line typed after a question; "" at Ctrl-D. The cursor ends at the start of a row."""
        from llmrun.ui.terminal.keyboard import keyboard, read_line

        answer = ""
        with keyboard(self.stdin, echoes=True):
            try:
                self.stderr.write(self._wrapped(clean(question)) + " ")
                self.stderr.flush()
                answer = read_line(self.stdin)
            finally:  # Ctrl-C and Ctrl-D leave the cursor where it is
                if not answer.endswith("\n"):
                    self.stderr.write("\n")
                    self.stderr.flush()
        return answer

    def to_clipboard(self, text: str) -> bool:
        """Copy text to the clipboard of the user's terminal, over ssh too (OSC 52); False if it is too long."""
        import base64

        data = base64.b64encode(text.encode())
        if len(data) > _MAX_CLIPBOARD_BYTES or not self.cursor_moves:
            return False
        self.stdout.write(f"\x1b]52;c;{data.decode()}\x07")
        self.stdout.flush()
        return True

    def console(self, *, stderr: bool = False) -> Console:
        """Return a Rich console on stdout or stderr that follows the same rules."""
        from rich.console import Console

        terminal = self.stderr_is_terminal if stderr else self.stdout_is_terminal
        color = self.stderr_has_color if stderr else self.stdout_has_color
        return Console(
            file=self.stderr if stderr else self.stdout,
            force_terminal=terminal,
            no_color=not color,
            color_system="auto" if color else None,
            markup=False,
            highlight=False,
            emoji=False,
            _environ=self._environment,
        )

    def _has_color(self, terminal: bool) -> bool:
        if self._no_color:
            return False
        return self._force_color or (terminal and not self._dumb)

    def _styled(self, style: str, text: str) -> str:
        return f"{style}{text}{_RESET}" if self.stderr_has_color else text

    def _wrapped(self, line: str, *, stderr: bool = True, is_command: bool = False) -> str:
        """Return a line, wrapped if it goes to a terminal."""
        cells = self.columns(stderr=stderr)
        if not cells:
            return line
        return wrapped_by_blanks(line, cells) if is_command else "\n".join(wrapped(line, cells))

    def _to_stderr(self, text: str) -> None:
        """Write a line. A full disk below stderr does not end the command: the line is lost, or follows later."""
        try:
            self.stderr.write(text + "\n")
            self.stderr.flush()
        except OSError as error:
            if error.errno not in FULL:
                raise


def drop_output(stream: TextIO | None = None) -> None:
    """Discard all further output of a broken stream, so that Python's last flush is quiet.

    Args:
        stream: sys.stdout by default.
    """
    broken = stream or sys.stdout
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, broken.fileno())
    finally:
        os.close(null)


def _json(value: Any, indent: int | None = None) -> str:
    import json

    # json.dumps escapes every control character but DEL, which can only be inside a string.
    return json.dumps(value, indent=indent, ensure_ascii=True).replace("\x7f", "\\u007f")


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except ValueError:  # closed
        return False


def _null_stream(mode: str) -> TextIO:
    # Open until the process ends.
    return cast(TextIO, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123 - pathlib takes longer than a page


def _never_fails_to_encode(stream: TextIO) -> TextIO:
    """Print a question mark instead of raising, e.g. for an emoji with LANG=C."""
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")
    return stream
