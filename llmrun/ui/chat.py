'''What a person types into a chat: lines, pastes and """ blocks on a terminal, plain lines from a pipe.

Owns reading only; must not know what a message means. prompt_toolkit is imported when the first line is
read from a terminal, so a pipe never pays for it.
'''

from __future__ import annotations

import io
import os
import re
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from llmrun.ui.keyboard import restore_terminal_mode, terminal_mode
from llmrun.ui.output import Output

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings

_FENCE = '"""'
_SURROGATE = re.compile("[\ud800-\udfff]")
_LEAVE_HINT = "Press Ctrl-C once more or Ctrl-D to leave, /? for help."


class ChatInput:
    """Reads one message after the other. Use it in a `with`, which puts the terminal back as it was.

    Keys on a terminal: Enter sends, Alt-Enter makes a newline, a paste stays one message, a text that
    starts with three double quotes goes on until three more; Tab completes slash commands. Ctrl-C drops
    what was typed, on an empty line it hints, twice it leaves; Ctrl-D leaves.

    Args:
        output: tells whether stdin is a terminal; without one, each line of stdin is a message.
        history: file with what was typed before; made with mode 0600 in a directory of mode 0700. None, or
            a place that can't be written, keeps the history of this chat only.
        commands: slash commands that Tab completes.
        session_options: for prompt_toolkit's PromptSession; tests give input and output here.
    """

    def __init__(
        self,
        output: Output,
        history: Path | None = None,
        *,
        commands: Sequence[str] = (),
        session_options: dict[str, Any] | None = None,
    ) -> None:
        self._output = output
        self._history = history
        self._commands = tuple(commands)
        self._session_options = session_options
        self._session: PromptSession[str] | None = None
        self._before = terminal_mode(output) if output.stdin_is_terminal else None
        if isinstance(output.stdin, io.TextIOWrapper):
            output.stdin.reconfigure(encoding="utf-8", errors="replace")  # possible before the first read only

    @property
    def interactive(self) -> bool:
        """Whether a person types."""
        return self._output.stdin_is_terminal

    def read(self) -> str | None:
        """The next message, never an empty one; None when the person leaves or stdin ends."""
        return self._read_typed() if self.interactive else self._read_line()

    def close(self) -> None:
        """Put the terminal back as it was. May be called twice."""
        if self._before is not None:
            restore_terminal_mode(self._output, self._before)

    def __enter__(self) -> ChatInput:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read_line(self) -> str | None:
        while line := self._output.stdin.readline():
            message = without_surrogates(line.rstrip("\r\n"))
            if message.strip():
                return message
        return None

    def _read_typed(self) -> str | None:
        if self._session is None:
            self._session = self._make_session()
        interrupted = False
        while True:
            try:
                text = self._session.prompt()
            except EOFError:
                return None
            except KeyboardInterrupt:
                if interrupted:
                    return None
                interrupted = True
                self._output.note(_LEAVE_HINT)
                continue
            interrupted = False
            message = without_surrogates(without_fence(text))
            if message.strip():
                return message

    def _make_session(self) -> PromptSession[str]:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.shortcuts import CompleteStyle

        options = {"output": self._terminal()} if self._session_options is None else self._session_options
        return PromptSession(
            ">>> ",
            multiline=True,
            prompt_continuation="... ",
            history=_open_history(self._history),
            key_bindings=_keys(),
            completer=WordCompleter(list(self._commands), sentence=True) if self._commands else None,
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,  # a menu would keep eight rows free below the prompt
            **options,
        )

    def _terminal(self) -> Any:
        from prompt_toolkit.output import create_output

        # The prompt is not part of the result: with `llmrun chat > file` it has to go to stderr.
        stream = self._output.stdout if self._output.stdout_is_terminal else self._output.stderr
        terminal = create_output(stream)
        if hasattr(terminal, "enable_cpr"):
            # Some terminals answer "where is the cursor" late, and the answer would be read as typed text.
            terminal.enable_cpr = False
        return terminal


def is_open_block(text: str) -> bool:
    """Whether a text begins with a fence (three double quotes) that is not closed yet."""
    body = text.lstrip()
    return body.startswith(_FENCE) and _FENCE not in body[len(_FENCE) :]


def without_fence(text: str) -> str:
    """What stands between the fences of a block, and after them; any other text as it is."""
    body = text.strip()
    if not body.startswith(_FENCE):
        return text
    inside, _, after = body[len(_FENCE) :].partition(_FENCE)
    return inside.removeprefix("\n").removesuffix("\n") + after


def without_surrogates(text: str) -> str:
    """Bytes that were no UTF-8 become U+FFFD; a lone surrogate could not be tokenized."""
    return _SURROGATE.sub("\ufffd", text)


def _keys() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if is_open_block(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def newline(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    def drop(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

    return keys


def _open_history(path: Path | None) -> History:
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    if path is None:
        return InMemoryHistory()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_RDWR, 0o600))
    except OSError:  # a home that can't be written is no reason not to chat
        return InMemoryHistory()
    return FileHistory(str(path))
