"""Removal of everything that could control a terminal from untrusted text: escapes, controls, invisible characters.

Text of the model, its metadata, file names and answers of the hub are all untrusted. The sequences are ECMA-48's and
xterm's.
"""

from __future__ import annotations

import re

# A string sequence (OSC, DCS, ...) that is longer than this gives up, so that it can't swallow the answer.
MAX_STRING = 4096

# Everything that is not printable text, newline or tab. Joiners and variation selectors stay: emoji and
# several scripts need them.
_REMOVED = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 without tab and newline, DEL, C1
    "\u00ad\u034f\u061c\u180e"  # soft hyphen, grapheme joiner, Arabic letter mark, Mongolian separator
    "\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f"  # zero width, bidi controls, invisible operators
    "\ufeff\ufff9-\ufffb\ufffe\uffff"  # byte order mark, annotations, noncharacters
    "\U000e0000-\U000e007f"  # tags
)
_SEPARATORS = "\u2028\u2029"
_SURROGATES = "\ud800-\udfff"
_SPECIAL = re.compile(f"[{_REMOVED}{_SEPARATORS}{_SURROGATES}]")

_CSI = r"(?:\x1b\[|\x9b)[0-?]{0,64}[ -/]{0,8}"
# Any control character ends a string sequence: a terminal aborts it there too, and no scan is done twice.
_STRING = rf"(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x00-\x1f\x7f-\x9f]{{0,{MAX_STRING}}}"

_COMPLETE = rf"{_CSI}[@-~]|{_STRING}(?:\x07|\x1b\\|\x9c)"
_BROKEN = rf"{_CSI}|\x1b[\]PX^_]|[\x90\x98\x9d-\x9f]"  # the opening goes, what was meant as its content stays
_ESCAPE = r"\x1b[ -/]{1,8}[0-~]|\x1b[0-~]|\x1b"
_SINGLE = f"[{_REMOVED}]"
_NEWLINE = rf"(?P<newline>[{_SEPARATORS}])"
_LONE = rf"(?P<lone>[{_SURROGATES}])"
_OPEN = rf"(?P<open>(?:{_CSI}|{_STRING}\x1b?|\x1b[ -/]{{0,8}})\Z)"

_WHOLE_TEXT = re.compile("|".join((_COMPLETE, _BROKEN, _ESCAPE, _SINGLE, _NEWLINE, _LONE)))
_TEXT_GOES_ON = re.compile("|".join((_COMPLETE, _OPEN, _BROKEN, _ESCAPE, _SINGLE, _NEWLINE, _LONE)))

_REPLACEMENTS = {"newline": "\n", "lone": "\ufffd"}


def _replacement(match: re.Match[str]) -> str:
    return _REPLACEMENTS.get(match.lastgroup or "", "")


def clean(text: str, *, newlines: bool = False) -> str:
    """Return a whole untrusted text, such as a file name, that is safe to print.

    Args:
        text: anything, lone surrogates included.
        newlines: keep newlines and tabs; otherwise they become spaces, so that the text stays on its line.
    """
    if _SPECIAL.search(text):
        text = _WHOLE_TEXT.sub(_replacement, text)
    return text if newlines else text.replace("\n", " ").replace("\t", " ")


class Sanitizer:
    """A sanitizer of text in pieces: a sequence may be split at any place."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, text: str) -> str:
        """Return the printable text; the start of an unfinished sequence is held back."""
        if not self._held and not _SPECIAL.search(text):
            return text
        text, self._held = self._held + text, ""
        return _TEXT_GOES_ON.sub(self._replace, text)

    def flush(self) -> str:
        """Return the printable rest, and reset the sanitizer."""
        held, self._held = self._held, ""
        return clean(held, newlines=True)

    def _replace(self, match: re.Match[str]) -> str:
        if match.lastgroup == "open":
            self._held = match[0]
            return ""
        return _replacement(match)
