"""The keys of a terminal: text that arrives all at once is one paste, and no paste swallows Ctrl-C.

Owns prompt_toolkit's input; must not know what the keys do.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from prompt_toolkit.input import Input

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
