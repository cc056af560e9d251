"""Where the tokens of each sequence stand, for models that don't count a picture by its tokens.

Owns the way from a token's index to its position: with M-RoPE a picture takes as many positions as its longer side has
patches, and what follows moves up (Qwen2-VL, arXiv:2409.12191, section 2.1). Must not know what a context holds.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmrun.engine.llama.base import EmbeddedInput, Entry, ImageSpan


class Positions:
    """Of the sequences of one context. Where all pictures are counted by their tokens, it remembers nothing."""

    def __init__(self) -> None:
        self._spans: dict[int, list[ImageSpan]] = {}

    def differ(self, sequence_id: int) -> bool:
        """Whether a sequence has tokens whose position isn't their index."""
        return sequence_id in self._spans

    def at(self, sequence_id: int, index: int) -> int | None:
        """The position of a token; None within a picture, which has no cut there."""
        position = index
        for span in self._spans.get(sequence_id, ()):
            if span.start < index < span.end:
                return None
            if span.end <= index:
                position -= span.saved
        return position

    def n_tokens(self, sequence_id: int, n_positions: int) -> int:
        """How many tokens take so many first positions."""
        count = n_positions
        for span in self._spans.get(sequence_id, ()):
            if count > span.start:
                count += span.saved
        return count

    def of_entries(self, entries: Sequence[Entry]) -> Sequence[Entry]:
        """The entries with positions in place of indexes."""
        if not self._spans:
            return entries
        return [entry._replace(position=self.at(entry.sequence_id, entry.position) or 0) for entry in entries]

    def of_image(self, part: EmbeddedInput) -> Sequence[int]:
        """The positions of a part, see base.Embedded; those of what will follow the picture are known from now on."""
        span, sequence_id = part.span, part.sequence_id
        first = self.at(sequence_id, span.start) or 0
        if span.saved and span not in self._spans.get(sequence_id, ()):
            self._spans.setdefault(sequence_id, []).append(span)
        return part.positions(first)

    def cut(self, sequence_id: int, start: int) -> None:
        """A sequence has only the tokens before start."""
        kept = [span for span in self._spans.pop(sequence_id, ()) if span.start < start]
        if kept:
            self._spans[sequence_id] = kept

    def copy(self, source: int, target: int) -> None:
        """A sequence has the tokens of another one."""
        if source in self._spans:
            self._spans[target] = list(self._spans[source])

    def clear(self) -> None:
        """No sequence has any."""
        self._spans.clear()
