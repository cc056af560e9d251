"""The result of a reader of documents: the text, or why there is none."""

from __future__ import annotations

from typing import NamedTuple


class DocumentText(NamedTuple):
    """The text of a document.

    Attributes:
        text: of a PDF, with a line "[page N]" before each page.
        note: what of it is missing, or how it was read; empty if there is nothing to say.
    """

    text: str
    note: str = ""


class UnreadableError(Exception):
    """A document has no text.

    Args:
        why: the reason.
        hint: what to do about it.
        is_lasting: whether its bytes are the cause; otherwise something around it is, such as a missing package.
    """

    def __init__(self, why: str, hint: str = "", *, is_lasting: bool = True) -> None:
        super().__init__(why)
        self.why, self.hint, self.is_lasting = why, hint, is_lasting
