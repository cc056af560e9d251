"""Sources of drafts for tests of what happens to drafts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from llmrun.engine.core.draft_source import Draft, DraftedSequence


class NoDrafts:
    """A source that never has a draft, so that all come from elsewhere."""

    def propose(self, asked: Mapping[DraftedSequence, int]) -> dict[DraftedSequence, Draft]:
        return {sequence: Draft("answer", 0) for sequence in asked}


class Foreseeing:
    """A source that knows an answer, and of each of its tokens what to draft."""

    def __init__(self, whole: Sequence[int], drafted: Callable[[int], int] = int) -> None:
        self._whole, self._drafted = whole, drafted

    def propose(self, asked: Mapping[DraftedSequence, int]) -> dict[DraftedSequence, Draft]:
        return {sequence: self._draft(len(sequence.tokens), limit) for sequence, limit in asked.items()}

    def _draft(self, start: int, limit: int) -> Draft:
        return Draft("prompt", 3, [self._drafted(token) for token in self._whole[start : start + limit]])
