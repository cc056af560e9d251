"""What a model says to its user: its answer without calls of tools. Pure; must not know how it is shown.

What tells calls from text is imported where there can be some: few answers have any.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from llmrun.protocol.reasoning import ReasoningKind, ReasoningPart, Splitter

if TYPE_CHECKING:
    from llmrun.protocol.toolcalls import CallPart, CallSplitter


class SpokenSplitter(Splitter):
    """A Splitter that leaves calls out.

    Args:
        tool_syntax: of the calls, as in Started.
    """

    def __init__(self, tags: Sequence[str], *, inside: bool = False, tool_syntax: str = "") -> None:
        super().__init__(tags, inside=inside)
        self._calls: CallSplitter | None = None
        if tool_syntax:
            from llmrun.protocol.toolcalls import SYNTAXES, CallSplitter

            self._calls = CallSplitter(SYNTAXES.get(tool_syntax))

    @property
    def has_calls(self) -> bool:
        """Whether a whole call was left out."""
        return self._calls is not None and self._calls.n_calls > 0

    def feed(self, text: str) -> list[ReasoningPart]:
        """See Splitter."""
        return self._spoken(super().feed(text))

    def flush(self) -> list[ReasoningPart]:
        """See Splitter."""
        parts = self._spoken(super().flush())
        return parts if self._calls is None else [*parts, *_texts(self._calls.flush())]

    def _spoken(self, parts: list[ReasoningPart]) -> list[ReasoningPart]:
        if self._calls is None:
            return parts
        spoken: list[ReasoningPart] = []
        for part in parts:
            is_answer = part.kind is ReasoningKind.ANSWER
            spoken += _texts(self._calls.feed(part.text)) if is_answer else [part]
        return spoken


def _texts(parts: Iterable[CallPart]) -> list[ReasoningPart]:
    from llmrun.protocol.toolcalls import CallKind

    return [ReasoningPart(ReasoningKind.ANSWER, part.text) for part in parts if part.kind is CallKind.TEXT]
