"""Token positions of each sequence, for models in which an image takes fewer positions than tokens.

Maps a token's index to its position: with M-RoPE an image takes as many positions as its longer side has patches, and
the following tokens continue from there (Qwen2-VL, arXiv:2409.12191, section 2.1). Must not know what a context holds.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmrun.engine.llama.base import EmbeddedInput, Entry, ImageSpan


class Positions:
    """The positions of one context's sequences; empty while every image takes as many positions as tokens."""

    def __init__(self) -> None:
        self._spans: dict[int, list[ImageSpan]] = {}

    def differ(self, sequence_id: int) -> bool:
        """Return whether a sequence has tokens whose position is not their index."""
        return sequence_id in self._spans

    def at(self, sequence_id: int, index: int) -> int | None:
        """Return a token's position; None inside an image, where a sequence can't be cut."""
        position = index
        for span in self._spans.get(sequence_id, ()):
            if span.start < index < span.end:
                return None
            if span.end <= index:
                position -= span.saved
        return position

    def n_tokens(self, sequence_id: int, n_positions: int) -> int:
        """Return the number of tokens in a sequence's first n_positions positions."""
        count = n_positions
        for span in self._spans.get(sequence_id, ()):
            if count > span.start:
                count += span.saved
        return count

    def of_entries(self, entries: Sequence[Entry]) -> Sequence[Entry]:
        """Return the entries with positions instead of indexes."""
        if not self._spans:
            return entries
        return [entry._replace(position=self.at(entry.sequence_id, entry.position) or 0) for entry in entries]

    def of_image(self, part: EmbeddedInput) -> Sequence[int]:
        """Return the positions of an image's part, see EmbeddedInput.positions(); remember the image's span."""
        span, sequence_id = part.span, part.sequence_id
        first = self.at(sequence_id, span.start) or 0
        if span.saved and span not in self._spans.get(sequence_id, ()):
            self._spans.setdefault(sequence_id, []).append(span)
        return part.positions(first)

    def cut(self, sequence_id: int, start: int) -> None:
        """Truncate a sequence to the tokens before start."""
        remaining = [span for span in self._spans.pop(sequence_id, ()) if span.start < start]
        if remaining:
            self._spans[sequence_id] = remaining

    def copy(self, source: int, target: int) -> None:
        if source in self._spans:
            self._spans[target] = list(self._spans[source])

    def clear(self) -> None:
        self._spans.clear()
