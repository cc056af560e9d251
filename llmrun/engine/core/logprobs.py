"""The token probabilities of an answer, released with the text they belong to. Must not know samplers."""

from __future__ import annotations

from llmrun.protocol.messages import TokenLogprob


class LogprobStream:
    """A queue of token probabilities: each is released with the text in which the token's own text begins.

    So the tokens of a stop string, whose text is never shown, are not released. A token that holds a part of a
    character belongs to that character.
    """

    def __init__(self) -> None:
        self._tokens: list[tuple[int, TokenLogprob]] = []  # with the index in the answer where their text begins
        self._n_decoded = self._n_shown = 0  # characters
        self._n_released = 0

    def push(self, logprob: TokenLogprob, text: str) -> None:
        self._tokens.append((self._n_decoded, logprob))
        self._n_decoded += len(text)

    def retract(self, n_tokens: int) -> None:
        first = len(self._tokens) - n_tokens
        self._n_decoded = self._tokens[first][0]
        del self._tokens[first:]
        self._n_released = min(self._n_released, first)

    def show(self, text: str) -> tuple[TokenLogprob, ...]:
        """Return the probabilities that belong to text which is shown now."""
        self._n_shown += len(text)
        first = self._n_released
        while self._n_released < len(self._tokens) and self._tokens[self._n_released][0] < self._n_shown:
            self._n_released += 1
        return tuple(logprob for _, logprob in self._tokens[first : self._n_released])
