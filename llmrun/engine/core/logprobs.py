"""Which tokens' probabilities belong to a piece of text, however much of it is held back or taken back.

Must not know where the probabilities come from.
"""

from __future__ import annotations

from llmrun.protocol.messages import TokenLogprob


class LogprobStream:
    """The probabilities of an answer's tokens: each is given out with the text in which the token's own text begins.

    So the tokens of a stop string, whose text is never shown, stay untold. A token that holds a part of a character
    belongs to that character.
    """

    def __init__(self) -> None:
        self._tokens: list[tuple[int, TokenLogprob]] = []  # where in the answer the text of each begins
        self._decoded = self._shown = 0  # characters
        self._n_told = 0

    def push(self, logprob: TokenLogprob, text: str) -> None:
        """One more token, and the text that it completed."""
        self._tokens.append((self._decoded, logprob))
        self._decoded += len(text)

    def retract(self, n_tokens: int) -> None:
        """The last tokens were taken back."""
        first = len(self._tokens) - n_tokens
        self._decoded = self._tokens[first][0]
        del self._tokens[first:]
        self._n_told = min(self._n_told, first)

    def show(self, text: str) -> tuple[TokenLogprob, ...]:
        """More text is shown: the probabilities that belong to it."""
        self._shown += len(text)
        first = self._n_told
        while self._n_told < len(self._tokens) and self._tokens[self._n_told][0] < self._shown:
            self._n_told += 1
        return tuple(logprob for _, logprob in self._tokens[first : self._n_told])
