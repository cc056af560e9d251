"""The prompt of a terminal that can move its cursor: keys, history, completion, the editor.

Imported only when a user types.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.application import run_in_terminal
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.completion import CompleteEvent, Completer, get_common_complete_suffix
from prompt_toolkit.completion import Completion as Inserted
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import Condition, has_focus
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import create_output
from prompt_toolkit.shortcuts import CompleteStyle
from wcwidth import grapheme_boundary_before, iter_graphemes

from llmrun.errors import LlmrunError
from llmrun.ui.prompt.completion import Completion, Completions, offer
from llmrun.ui.prompt.drafts import is_command, is_open_block
from llmrun.ui.prompt.editor import edit
from llmrun.ui.prompt.history import open_history
from llmrun.ui.terminal.cells import fitting, width
from llmrun.ui.terminal.keyboard import Suspendable
from llmrun.ui.terminal.output import Output

if TYPE_CHECKING:
    from prompt_toolkit.input import Input

FOLDED_LINES, FOLDED_CHARACTERS = 20, 2_000
"""A paste of more lines, or of more characters, is shown as one row."""
_ALLOW_PASTES, _FORBID_PASTES = "\x1b[?2004h", "\x1b[?2004l"


class Prompt:
    """A prompt that asks for texts.

    Args:
        history: file of earlier input, see open_history().
        commands: returns the slash commands and the completion of their arguments; called when Tab is pressed.
        session_options: for prompt_toolkit's PromptSession; used by tests for input and output.

    Attributes:
        multiline: Enter makes a newline and Alt-Enter sends, instead of the other way round.
        literal: the last text began with a paste of several lines or of two slashes: it is always a message.
    """

    def __init__(
        self,
        output: Output,
        history: Path | None,
        commands: Callable[[], Mapping[str, Completion | None]],
        session_options: dict[str, Any] | None = None,
    ) -> None:
        self.multiline = False
        self.literal = False
        self._output = output
        self._offers = _Offers(commands)
        self._editing = False
        self._pastes: dict[str, str] = {}  # the row that stands for a long paste -> its text
        self._session: PromptSession[str] = PromptSession(
            multiline=True,
            history=open_history(history, self._unfolded),
            key_bindings=self._keys(),
            completer=self._offers,
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,  # a menu would keep eight rows free below the prompt
            enable_suspend=True,
            **(session_options or {"input": open_keyboard(output.stdin), "output": _terminal(output)}),
        )
        self._session.default_buffer.on_text_changed += self._forget_paste
        self._suspendable = Suspendable(lambda: self._write(_FORBID_PASTES), lambda: self._write(_ALLOW_PASTES))
        self._suspendable.__enter__()

    def ask(self, prompt: str, continuation: str, default: str = "") -> str:
        """Return the text that the user types.

        Args:
            prompt: before the first line.
            continuation: before the other lines.
            default: a message to be edited.

        Raises:
            EOFError: Ctrl-D on an empty line.
            KeyboardInterrupt: Ctrl-C on an empty line.
        """
        self.literal = False
        self._pastes.clear()
        try:
            text = self._session.prompt(
                prompt,
                prompt_continuation=continuation,
                default=default,
                pre_run=lambda: self._mark(literal=bool(default)),
            )
            return self._unfolded(text)
        finally:
            # What is pasted while an answer is written is one message, too.
            self._write(_ALLOW_PASTES)

    def close(self) -> None:
        """Switch off the terminal modes."""
        self._suspendable.__exit__()
        self._write(_FORBID_PASTES)

    def _write(self, escape: str) -> None:
        self._session.output.write_raw(escape)
        self._session.output.flush()

    def _mark(self, *, literal: bool) -> None:
        self.literal = literal

    def _forget_paste(self, buffer: Buffer) -> None:
        if not buffer.text:
            self.literal = False

    def _folded(self, text: str) -> str:
        """Return a pasted text, or the row that stands for a long one."""
        n_lines = text.strip("\n").count("\n") + 1
        if n_lines <= FOLDED_LINES and len(text) <= FOLDED_CHARACTERS:
            return text
        number = len(self._pastes) + 1
        amount = f"{n_lines:,} lines" if n_lines > FOLDED_LINES else f"{len(text):,} characters"
        row = f"[{amount} pasted]" if number == 1 else f"[{amount} pasted, {number}]"
        self._pastes[row] = text
        return row

    def _unfolded(self, text: str) -> str:
        """Return a typed text with its pastes in place of the rows that stand for them."""
        if not self._pastes:
            return text
        rows = re.compile("|".join(map(re.escape, self._pastes)))  # in one go: a paste may contain such a row
        return rows.sub(lambda match: self._pastes[match[0]], text)

    def _length_before(self, before: str) -> int:
        """Return the number of code points that Backspace removes: a character, or a folded paste."""
        row = next((row for row in self._pastes if before.endswith(row)), "")
        return len(row) or len(before) - grapheme_boundary_before(before, len(before))

    def _sends(self, text: str) -> bool:
        """Return whether Enter sends a text."""
        if self.literal or not is_open_block(text):
            return not self.multiline or (is_command(text) and not self.literal and "\n" not in text)
        return False

    def _add_character_keys(self, keys: KeyBindings, typing: Condition) -> None:
        """Add the keys that act on one character as it is seen, which may be several code points."""

        @keys.add("backspace", filter=typing)
        def delete_before(event: KeyPressEvent) -> None:
            before = event.current_buffer.document.text_before_cursor
            event.current_buffer.delete_before_cursor(self._length_before(before))

        @keys.add("delete", filter=typing)
        @keys.add("c-d", filter=typing & Condition(lambda: bool(self._session.default_buffer.text)))
        def delete_after(event: KeyPressEvent) -> None:
            after = event.current_buffer.document.text_after_cursor
            event.current_buffer.delete(len(next(iter_graphemes(after), "")))

        @keys.add("left", filter=typing)
        @keys.add("c-b", filter=typing)
        def left(event: KeyPressEvent) -> None:
            before = event.current_buffer.document.current_line_before_cursor
            event.current_buffer.cursor_position -= len(before) - grapheme_boundary_before(before, len(before))

        @keys.add("right", filter=typing)
        @keys.add("c-f", filter=typing)
        def right(event: KeyPressEvent) -> None:
            after = event.current_buffer.document.current_line_after_cursor
            event.current_buffer.cursor_position += len(next(iter_graphemes(after), ""))

    def _keys(self) -> KeyBindings:
        keys = KeyBindings()
        typing = has_focus(DEFAULT_BUFFER)  # not searching the history
        self._add_character_keys(keys, typing)

        @keys.add("enter", filter=typing)
        def enter(event: KeyPressEvent) -> None:
            if self._sends(event.current_buffer.text):
                event.current_buffer.validate_and_handle()
            else:
                event.current_buffer.insert_text("\n")

        @keys.add("escape", "enter", filter=typing)
        def other_enter(event: KeyPressEvent) -> None:
            if self.multiline:
                event.current_buffer.validate_and_handle()
            else:
                event.current_buffer.insert_text("\n")

        @keys.add(Keys.BracketedPaste, filter=typing)
        def paste(event: KeyPressEvent) -> None:
            text = event.data.replace("\r\n", "\n").replace("\r", "\n")
            buffer = event.current_buffer
            begins = not buffer.document.text_before_cursor.strip()
            buffer.insert_text(self._folded(text))
            self.literal = self.literal or (begins and ("\n" in text.strip() or text.lstrip().startswith("//")))

        @keys.add("c-c", filter=typing)
        @keys.add("<sigint>")
        def drop(event: KeyPressEvent) -> None:
            buffer = self._session.default_buffer
            if self._editing:
                return  # meant for the editor
            if buffer.text:
                buffer.save_to_undo_stack()
                buffer.document = Document()
            else:
                event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

        @keys.add("c-g", filter=typing)
        def open_editor(event: KeyPressEvent) -> None:
            event.app.create_background_task(self._edit(event.current_buffer))

        @keys.add("tab", filter=typing)
        def complete(event: KeyPressEvent) -> None:
            buffer = event.current_buffer
            hint = self._offers.at(buffer.document).hint
            found = list(self._offers.get_completions(buffer.document, CompleteEvent(completion_requested=True)))
            if hint:
                run_in_terminal(lambda: self._output.note(f"  {hint}"))
            elif len(found) == 1:
                buffer.delete_before_cursor(-found[0].start_position)
                buffer.insert_text(found[0].text)
            elif common := get_common_complete_suffix(buffer.document, found):
                buffer.insert_text(common)
            elif found:
                names = [offered.display_text for offered in found]
                run_in_terminal(lambda: self._list(names), render_cli_done=True)

        return keys

    def _list(self, names: Sequence[str]) -> None:
        """Print the names in columns, all at once: in the pages of prompt_toolkit, Ctrl-C is a traceback."""
        output, cells = self._session.output, max(map(width, names)) + 2
        columns = output.get_size().columns
        n_rows = -(-len(names) // max(columns // cells, 1))
        for row in (names[start::n_rows] for start in range(n_rows)):
            line = "".join(name + " " * (cells - width(name)) for name in row).rstrip()
            output.write(fitting(line, columns) + "\n")
        output.flush()

    async def _edit(self, buffer: Buffer) -> None:
        """Open the typed text in the user's editor, or print why that is not possible."""

        def edited() -> str | None:
            try:
                return edit(self._unfolded(buffer.text))
            except LlmrunError as error:
                self._output.error(error)
                return None

        self._editing = True
        try:
            text = await run_in_terminal(edited, in_executor=True)
        finally:
            self._editing = False
        if text is not None and text != buffer.text:
            literal = self.literal or ("\n" in text and not is_command(buffer.text))
            buffer.save_to_undo_stack()
            buffer.document = Document(text)
            self.literal = literal and bool(text)


class _Offers(Completer):
    """The completions in prompt_toolkit's form."""

    def __init__(self, commands: Callable[[], Mapping[str, Completion | None]]) -> None:
        self._commands = commands

    def at(self, document: Document) -> Completions:
        """Return the completions at the cursor."""
        return offer(document.text_before_cursor, self._commands())

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Inserted]:
        """Yield the completions when Tab is pressed."""
        typed, candidates = self.at(document)
        for text, hint in candidates:
            shown = text.rstrip("/").rpartition("/")[2] + "/" * text.endswith("/") if text.count("/") > 1 else text
            yield Inserted(text, -len(typed), display=f"{shown}  {hint}" if hint else shown)


def _terminal(output: Output) -> Any:
    # The prompt is not part of the result: with `llmrun chat > file` it has to go to stderr.
    terminal = create_output(output.stdout if output.stdout_is_terminal else output.stderr)
    if hasattr(terminal, "enable_cpr"):
        # Some terminals answer "where is the cursor" late, and the answer would be read as typed text.
        terminal.enable_cpr = False
    return terminal


_BEGIN, _END = "\x1b[200~", "\x1b[201~"  # around a paste, if the terminal marks it
_INTERRUPTS = ("\x03", "\x04")  # Ctrl-C and Ctrl-D
_READ_BYTES = 1 << 16
# Nobody types so much between two looks at the keyboard. A key at a time, each makes a new document and a new screen.
_PASTE = re.compile(r"[^\x00-\x1f\x7f]{64,}")


class PasteMarker:
    """Marks pastes in what a terminal sends, read by read."""

    def __init__(self) -> None:
        self._last = ""  # the end of the last data, where a marker may have begun
        self._in_paste = False

    def mark(self, data: str) -> str:
        """Return the next data, with markers around a paste that has none, and the end of a paste before Ctrl-C."""
        if self._in_paste and data in _INTERRUPTS:  # alone: the end of the paste was lost
            self._in_paste, self._last = False, ""
            return _END + data
        seen = self._last + data
        begin, end = seen.rfind(_BEGIN), seen.rfind(_END)
        was_in_paste = self._in_paste
        if begin >= 0 or end >= 0:
            self._in_paste = begin > end
        self._last = seen[-(len(_BEGIN) - 1) :]
        return data if was_in_paste or begin >= 0 else _PASTE.sub(rf"{_BEGIN}\g<0>{_END}", data)


def open_keyboard(stdin: TextIO) -> Input:
    """Return the keys of a terminal for prompt_toolkit."""
    if sys.platform != "win32":
        from prompt_toolkit.input.posix_utils import PosixStdinReader
        from prompt_toolkit.input.vt100 import Vt100Input

        class Reader(PosixStdinReader):
            """A reader that marks pastes."""

            pastes = PasteMarker()

            def read(self, count: int = _READ_BYTES) -> str:
                return self.pastes.mark(super().read(count))

        keys = Vt100Input(stdin)
        keys.stdin_reader = Reader(stdin.fileno(), encoding=stdin.encoding)
        return keys
    from prompt_toolkit.input import create_input

    return create_input(stdin)
