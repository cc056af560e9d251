"""Input of a chat: lines, pastes and triple-quoted blocks on a terminal, plain lines from a pipe.

prompt.py needs prompt_toolkit and is imported for the first line from a terminal, so a pipe never pays for it.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrun.protocol.codec import without_surrogates
from llmrun.ui.prompt.completion import Completion
from llmrun.ui.prompt.drafts import is_command, is_open_block, read_typed
from llmrun.ui.terminal.keyboard import keyboard, read_line, restore_terminal_mode, terminal_mode
from llmrun.ui.terminal.output import Output

if TYPE_CHECKING:
    from llmrun.ui.prompt.prompt import Prompt

KEYS = {
    "Enter": "send",
    "Alt-Enter": "new line; the other way round after /multiline",
    '"""': "begin and end a text of several lines",
    "//": "begin a message with a slash, such as //usr/bin is what?",
    "Tab": "complete a command, a file, a model",
    "Up, Down": "earlier messages, except those that began with a space",
    "Ctrl-R": "search them",
    "Ctrl-G": "continue in $EDITOR",
    "Ctrl-L": "clear the screen",
    "Ctrl-C": "stop an answer, or drop the typed text (Ctrl-_ restores it); twice: leave",
    "Ctrl-D": "leave",
    "Ctrl-Z": "suspend; fg continues",
}

USUAL_KEYS = ("Alt-Enter", "Tab", "Ctrl-C")
"""Those that the short help shows."""

_PROMPT, _CONTINUATION = ">>> ", "... "
_LEAVE_HINT = "Press Ctrl-C once more or Ctrl-D to leave, /? for help."


class ChatInput:
    """A reader of messages. Use it in a `with`, which restores the terminal.

    The keys are those of KEYS. A paste is one message, whatever it contains. Ctrl-C drops the typed text, hints on an
    empty line, and leaves the second time. A terminal that can't move its cursor is read line by line, with its own
    keys only.

    Args:
        output: without a terminal at stdin, each line of stdin is a message.
        history: file of earlier input; made with mode 0600 in a directory of mode 0700. None, or an unwritable place,
            keeps the history of this chat only.
        commands: slash commands that Tab completes, with their slashes.
        session_options: for prompt_toolkit's PromptSession; used by tests for input and output.

    Attributes:
        commands: the completion of each slash command's arguments, if any; may be replaced at any time.
        multiline: Enter makes a newline and Alt-Enter sends; multiline_hint explains it.
        is_command: the last message is a command, see drafts.is_command(): typed, not pasted with more lines, not
            between fences, and not from a pipe.
    """

    def __init__(
        self,
        output: Output,
        history: Path | None = None,
        *,
        commands: Mapping[str, Completion | None] | Sequence[str] = (),
        session_options: dict[str, Any] | None = None,
    ) -> None:
        self.commands = commands if isinstance(commands, Mapping) else dict.fromkeys(commands)
        self.multiline = False
        self.is_command = False
        self._output = output
        self._history = history
        self._session_options = session_options
        self._prompt: Prompt | None = None
        self._prefilled = ""
        self._moves = output.cursor_moves or (output.stderr_cursor_moves and not output.stdout_is_terminal)
        self._before = terminal_mode(output.stdin) if output.stdin_is_terminal else None
        if isinstance(output.stdin, io.TextIOWrapper):
            output.stdin.reconfigure(encoding="utf-8-sig", errors="replace")  # possible before the first read only

    @property
    def interactive(self) -> bool:
        """Whether a user types."""
        return self._output.stdin_is_terminal

    @property
    def multiline_hint(self) -> str:
        """The note for a change of `multiline`."""
        if not self.multiline:
            return "Enter sends now."
        return f"Enter makes a new line now, {'Alt-Enter' if self._moves else 'an empty line'} sends."

    def prefill(self, text: str) -> None:
        """Put this text into the next prompt, to be edited."""
        self._prefilled = text

    def read(self) -> str | None:
        """Return the next message, never an empty one; None when the user leaves or stdin ends."""
        self.is_command = False
        return self._read_typed() if self.interactive else self._read_line()

    def unechoed(self) -> AbstractContextManager[None]:
        """Keep typed keys off the screen inside the block; the next prompt shows them, where the cursor moves."""
        return keyboard(self._output.stdin, echoes=False) if self._moves and self.interactive else nullcontext()

    def close(self) -> None:
        """Restore the terminal. May be called twice."""
        if self._prompt is not None:
            self._prompt.close()
            self._prompt = None
        if self._before is not None:
            restore_terminal_mode(self._output.stdin, self._before)

    def __enter__(self) -> ChatInput:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _read_line(self) -> str | None:
        while line := self._output.stdin.readline():
            message = without_surrogates(line.rstrip("\r\n"))
            if message.strip():
                return message
        return None

    def _read_typed(self) -> str | None:
        interrupted = False
        while True:
            prefilled, self._prefilled = self._prefilled, ""
            try:
                text, literal = self._ask(prefilled) if self._moves else self._ask_line(prefilled)
            except EOFError:
                return None
            except KeyboardInterrupt:
                if interrupted:
                    return None
                interrupted = True
                self._output.note(_LEAVE_HINT)
                continue
            interrupted = False
            message = without_surrogates(text if literal else read_typed(text))
            if message.strip():
                self.is_command = is_command(text) and not literal
                return message

    def _ask(self, prefilled: str) -> tuple[str, bool]:
        """Return the text typed at a prompt, and whether it is always a message, whatever it contains."""
        if self._prompt is None:
            from llmrun.ui.prompt.prompt import Prompt

            self._prompt = Prompt(self._output, self._history, lambda: self.commands, self._session_options)
        self._prompt.multiline = self.multiline
        return self._prompt.ask(_PROMPT, _CONTINUATION, prefilled), self._prompt.literal

    def _ask_line(self, prefilled: str) -> tuple[str, bool]:
        """Do the same where the cursor can't be moved."""
        if prefilled:
            self._output.note(f"Enter alone sends this again: {prefilled}")
        lines = [self._line(_PROMPT)]
        if prefilled and not lines[0].strip():
            return prefilled, True
        while is_open_block("\n".join(lines)) or (self.multiline and lines[-1] and not is_command(lines[0])):
            lines.append(self._line(_CONTINUATION))
        return "\n".join(lines), False

    def _line(self, prompt: str) -> str:
        stream = self._output.stdout if self._output.stdout_is_terminal else self._output.stderr
        stream.write(prompt)
        stream.flush()
        try:
            line = read_line(self._output.stdin)
        except KeyboardInterrupt:
            stream.write("\n")
            raise
        if not line:
            stream.write("\n")
            raise EOFError
        return line.rstrip("\r\n")
