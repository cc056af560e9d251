"""Tokens that an answer may go on with, guessed before they are computed, so that one step can verify several.

Owns where guesses come from and what became of them; must not know batches, samplers or models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from llmrun.engine.core.gate import Gate, Step
from llmrun.engine.core.prefix import common_prefix
from llmrun.protocol.speculation import Speculation

_LEAST_KNOWN = 15  # tokens of a guess that are compared with what comes, whether or not they are drafted


class Drafter(Protocol):
    """Guesses how a sequence goes on. Deterministic, so that a request takes the same steps again."""

    def extend(self, tokens: Sequence[int]) -> None:
        """The sequence has these tokens behind the others."""

    def rewind(self, length: int) -> None:
        """Only so many first tokens of the sequence stay."""

    def draft(self, most: int) -> tuple[list[int], int]:
        """At most so many tokens, and how many last tokens of the sequence they are known to have followed."""


class _Guess(NamedTuple):
    """What was expected to stand from a place of the sequence on.

    Attributes:
        start: index of its first token in the sequence.
        tokens: all of them.
        match: as Drafter.draft() gives it.
        step: to which some of them were added.
        drafted: how many.
    """

    start: int
    tokens: list[int]
    match: int
    step: Step
    drafted: int


class Drafting:
    """What is drafted for one answer.

    Args:
        speculation: how much may be.
        drafter: has seen nothing; it reads the prompt now.
        prompt: of the answer.
    """

    def __init__(self, speculation: Speculation, drafter: Drafter, prompt: Sequence[int]) -> None:
        self._drafter = drafter
        drafter.extend(prompt)
        self._gate = Gate(speculation)
        self._known = len(prompt)  # tokens that the drafter has
        self._wanted = max(speculation.most, _LEAST_KNOWN)
        self._guess: _Guess | None = None

    def draft(self, tokens: Sequence[int], most: int, step: Step, allowed: Callable[[list[int]], int]) -> list[int]:
        """Tokens to verify in the next step; mostly none.

        Args:
            tokens: of the sequence.
            most: how many there can be.
            step: what they are added to.
            allowed: how many first tokens of a draft can be chosen at all.
        """
        self._drafter.extend(tokens[self._known :])
        self._known = len(tokens)
        self._learn(tokens)
        guessed, match = self._drafter.draft(self._wanted)
        drafted = self._gate.length(match, min(most, len(guessed)), step) if match and most > 0 else 0
        if drafted:
            possible = allowed(guessed[:drafted])
            if possible < drafted:
                drafted = self._gate.length(match, possible, step) if possible else 0
        self._guess = _Guess(len(tokens), guessed, match, step, drafted)
        return guessed[:drafted]

    def rewind(self, length: int) -> None:
        """Tokens behind so many were taken back."""
        self._drafter.rewind(length)
        self._known = min(self._known, length)
        self._guess = None

    def _learn(self, tokens: Sequence[int]) -> None:
        """What became of the last guess. A batch that failed is tried again: then there is nothing new to learn."""
        guess, self._guess = self._guess, None
        if guess is None or len(tokens) == guess.start:
            return
        came = list(tokens[guess.start :])
        same = common_prefix(came, guess.tokens)
        if guess.match:
            self._gate.learn(guess.match, same, missed=same < min(len(came), len(guess.tokens)))
        self._gate.stepped(guess.step, guess.drafted, min(same, guess.drafted))
