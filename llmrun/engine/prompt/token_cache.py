"""Tokens of prompts that were tokenized before: a turn of a conversation costs its own length, not that of all turns.

The tokenizer splits a text at control tokens and tokenizes each part alone. So the tokens of a prompt are those of its
segments, one after the other, if each segment begins behind a control token. A segment is tokenized together with that
token, since some tokenizers treat the beginning of a text in another way. Must not know messages.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from llmrun.engine.prompt.control_texts import ControlTexts

MIN_SEGMENT = 256  # characters; one call for several short turns costs less than one for each
MAX_TOKENS = 1 << 20  # of all segments together: 4 MiB, and their texts


class Tokenize(Protocol):
    """See TokenCache."""

    def __call__(self, text: str, *, begins: bool) -> list[int]: ...


class TokenCache:
    """The tokens of the latest segments.

    Args:
        tokenize: returns the tokens of a text in which control texts are control tokens; begins=True for a text that
            begins a prompt.
        control: the texts of the control tokens.
    """

    def __init__(self, tokenize: Tokenize, control: ControlTexts) -> None:
        self._tokenize, self._control = tokenize, control
        self._segments: OrderedDict[tuple[str, bool], array[int]] = OrderedDict()
        self._n_tokens = 0

    def tokens(self, text: str, *, begins: bool = True) -> list[int]:
        """Return what tokenize() returns."""
        if len(text) < 2 * MIN_SEGMENT:
            return self._tokenize(text, begins=begins)
        tokens: list[int] = []
        start = begin = 0  # of the control token before the segment, and of the segment
        for next_start, end in (*self._cuts(text), (len(text), len(text))):
            segment = self._segment(text[start:end], begins=begins)
            tokens += segment[1:] if start < begin else segment
            start, begin = next_start, end
        return tokens

    def _cuts(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield the start and the end of control texts behind which the text can be divided.

        None lies before whitespace, which some control tokens take in, or where a longer control text may go on.
        """
        last = 0
        for match in self._control.pattern.finditer(text):
            end = match.end()
            is_long = end - last >= MIN_SEGMENT and end < len(text)
            if is_long and not text[end].isspace() and not self._control.may_continue(text[last:end]):
                yield match.start(), end
                last = end

    def _segment(self, text: str, *, begins: bool) -> array[int]:
        tokens = self._segments.pop((text, begins), None)
        if tokens is None:
            tokens = array("i", self._tokenize(text, begins=begins))
            self._n_tokens += len(tokens)
        self._segments[text, begins] = tokens
        while self._n_tokens > MAX_TOKENS and len(self._segments) > 1:
            self._n_tokens -= len(self._segments.popitem(last=False)[1])
        return tokens
