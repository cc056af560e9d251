"""Passages of documents that went along with a question."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmrun.ui.terminal.format import short
from llmrun.ui.terminal.output import Output
from llmrun.ui.terminal.sanitize import clean

if TYPE_CHECKING:
    from llmrun.chat.passages import Passage

_EXCERPT = 160  # characters


def show_passages(output: Output, passages: Sequence[Passage]) -> None:
    """Print the number, place and score of each passage on stderr, and the beginning of its text."""
    for number, passage in enumerate(passages, 1):
        heading = f" ({clean(passage.heading)})" if passage.heading else ""
        output.note(f"[{number}] {clean(passage.place)}{heading}, score {passage.score:.2f}", dim=False)
        output.note(f"    {short(clean(passage.text), _EXCERPT)}")
