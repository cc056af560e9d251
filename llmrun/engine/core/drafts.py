"""Tokens that an answer may go on with, guessed before they are computed, so that one step can verify several.

Owns where guesses come from and what became of them; must not know batches, samplers or contexts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from llmrun.engine.core.draft_model import ModelDrafter
from llmrun.engine.core.gate import MODEL, NOTHING, DraftChoice, Gate, StepShape
from llmrun.engine.core.prefix import common_prefix
from llmrun.protocol.speculation import Speculation

_LEAST_KNOWN = 15  # tokens of a guess that are compared with what comes, whether or not they are drafted
_FEW_MISSING = 8  # tokens that a draft model reads beside guessing, at hardly more cost
_MANY_MISSING = 64  # ... and without guessing


class Drafter(Protocol):
    """Guesses how a sequence goes on. Deterministic, so that a request takes the same steps again."""

    def extend(self, tokens: Sequence[int]) -> None:
        """The sequence has these tokens behind the others."""

    def rewind(self, length: int) -> None:
        """Only so many first tokens of the sequence stay."""

    def draft(self, most: int) -> tuple[list[int], int]:
        """At most so many tokens, and how many last tokens of the sequence they are known to have followed."""


class _Draft(NamedTuple):
    """What was expected to stand from a place of the sequence on.

    Attributes:
        start: index of its first token in the sequence.
        tokens: all of them.
        match: as Drafter.draft() gives it.
    """

    start: int
    tokens: list[int]
    match: int


class Drafting:
    """What is drafted for one answer.

    Args:
        speculation: how much may be.
        drafter: has seen nothing; it reads the prompt now.
        prompt: of the answer.
        model: guesses where the drafter knows too little; as new.

    Attributes:
        model: see Args.
    """

    def __init__(
        self,
        speculation: Speculation,
        drafter: Drafter,
        prompt: Sequence[int],
        model: ModelDrafter | None = None,
    ) -> None:
        self.model = model
        self._drafter = drafter
        self._drafters: list[Drafter] = [drafter, *([model] if model is not None else ())]
        for each in self._drafters:
            each.extend(prompt)
        self._gate = Gate(speculation)
        self._known = len(prompt)  # tokens that the drafters have
        self._wanted = max(speculation.most, _LEAST_KNOWN)
        self._guesses: list[_Draft] = []  # about the same place
        self._step = StepShape(1, 1, 0)  # the last one that a draft could have been added to ...
        self._length = 0  # ... how many tokens were ...
        self._seconds = 0.0  # ... and what the model took for it, by the table

    def plan(self, tokens: Sequence[int], most: int, step: StepShape) -> int:
        """How many tokens take() will give at most; mostly none.

        If the model has a wish then, DraftModel.work() has to come before take().

        Args:
            tokens: of the sequence.
            most: how many there can be.
            step: what they are added to.
        """
        for drafter in self._drafters:
            drafter.extend(tokens[self._known :])
        self._known = len(tokens)
        self._learn(tokens)
        guessed, match = self._drafter.draft(self._wanted)
        choice = self._gate.choose(match, min(most, len(guessed)), step) if match and most > 0 else NOTHING
        self._guesses = [_Draft(len(tokens), guessed, match)]
        self._step, self._length, self._seconds = step, choice.length, 0.0
        if self.model is not None:
            self.model.wish = self._wish(self.model, most, choice) if most > 0 else None
            self._length = max(self._length, self.model.wish or 0)
        return self._length

    def take(self, allowed: Callable[[list[int]], int]) -> list[int]:
        """The tokens to verify in the step that was planned.

        Args:
            allowed: how many first tokens of a draft can be chosen at all.
        """
        start, tokens, match = self._guesses[0]
        model, length = self.model, self._length
        if model is not None and model.wish:
            tokens, match = model.draft(self._wanted)
            self._guesses.append(_Draft(start, tokens, match))
            length = len(tokens)
            self._gate.asked(sure=length > 0)
            self._seconds = self._gate.draft_seconds(self._step, max(length, 1))
        if length:
            possible = allowed(tokens[:length])
            if possible < length:
                length = self._gate.choose(match, possible, self._step).length if possible else 0
        self._length = length
        return tokens[:length]

    def rewind(self, length: int) -> None:
        """Tokens behind so many were taken back."""
        for drafter in self._drafters:
            drafter.rewind(length)
        self._known = min(self._known, length)
        self._guesses = []

    def close(self) -> None:
        """The answer ended."""
        if self.model is not None:
            self.model.close()

    def _wish(self, model: ModelDrafter, most: int, choice: DraftChoice) -> int | None:
        """What the model is to do: guess, only read, or nothing, where that would not pay, or less than this choice."""
        missing = model.count_missing()
        if missing is None or (missing > _FEW_MISSING and not self._gate.is_worth_prefill(missing, self._step)):
            return None
        if missing > _MANY_MISSING:
            return 0
        by_model = self._gate.choose(MODEL, most, self._step)
        return by_model.length if by_model.rate > choice.rate else None

    def _learn(self, tokens: Sequence[int]) -> None:
        """What became of the last guesses. A batch that failed is tried again: then there is nothing new to learn."""
        guesses, self._guesses = self._guesses, []
        if not guesses or len(tokens) == guesses[0].start:
            return
        came = list(tokens[guesses[0].start :])
        same = 0
        for _, guessed, match in guesses:
            same = common_prefix(came, guessed)
            if match:
                self._gate.learn(match, same, missed=same < min(len(came), len(guessed)))
        self._gate.stepped(self._step, self._length, min(same, self._length), self._seconds)
