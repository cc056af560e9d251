"""A turn that is being answered: its question, and what has come of its answer so far. Must not know models."""

from __future__ import annotations

from dataclasses import dataclass, field

from llmrun.chat.store.turns import CallRound, Question, Truncation, WindowTurn
from llmrun.protocol.params import SamplingParams


@dataclass(slots=True)
class OpenTurn:
    """A question that is being answered, in several rounds where the model calls tools.

    Attributes:
        question: of the turn.
        sampling: of all rounds.
        before: the turns that the model still sees.
        departures: what left before them.
        rounds: calls and their results so far.
        thoughts: of these rounds.
        said: the text that came with the calls that have no results yet.
    """

    question: Question
    sampling: SamplingParams
    before: list[WindowTurn]
    departures: list[Truncation] = field(default_factory=list)
    rounds: list[CallRound] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    said: str = ""
