"""What a model says to its user: its answer without calls of tools. Pure; must not know how it is shown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from llmrun.protocol.reasoning import ReasoningKind, ReasoningPart, Splitter
from llmrun.protocol.toolcalls import SYNTAXES, CallKind, CallPart, CallSplitter


class SpokenSplitter(Splitter):
    """A Splitter that leaves calls out.

    Args:
        tool_syntax: of the calls, as in Started.
    """

    def __init__(self, tags: Sequence[str], *, inside: bool = False, tool_syntax: str = "") -> None:
        super().__init__(tags, inside=inside)
        self._calls = CallSplitter(SYNTAXES.get(tool_syntax))

    @property
    def has_calls(self) -> bool:
        """Whether a whole call was left out."""
        return self._calls.n_calls > 0

    def feed(self, text: str) -> list[ReasoningPart]:
        """See Splitter."""
        return self._spoken(super().feed(text))

    def flush(self) -> list[ReasoningPart]:
        """See Splitter."""
        return [*self._spoken(super().flush()), *_texts(self._calls.flush())]

    def _spoken(self, parts: Iterable[ReasoningPart]) -> list[ReasoningPart]:
        spoken: list[ReasoningPart] = []
        for part in parts:
            if part.kind is ReasoningKind.ANSWER:
                spoken += _texts(self._calls.feed(part.text))
            else:
                spoken.append(part)
        return spoken


def _texts(parts: Iterable[CallPart]) -> Iterator[ReasoningPart]:
    return (ReasoningPart(ReasoningKind.ANSWER, part.text) for part in parts if part.kind is CallKind.TEXT)
