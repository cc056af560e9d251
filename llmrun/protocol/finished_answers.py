"""What can be asked about an answer that has ended: how its tokens were chosen, and to save its KV state.

Records like those of messages.py, which says what all of them have in common.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Explain(NamedTuple):
    """How the last tokens of a finished answer were chosen; answered by Explained, or Failed.

    Attributes:
        answer: the request it was asked with.
        last: how many of its tokens, at most as many as it was told to remember.
        candidates: how many of the likeliest candidates to name for each.
    """

    request: int
    answer: int
    last: int
    candidates: int


class ChainStep(NamedTuple):
    """What one step of the sampler chain left.

    Attributes:
        name: "model" for what the model gave, then names as in params.STEPS.
        remaining: how many tokens can still be chosen after it.
        probabilities: of the choice's candidates after it, in their order; 0 for one that was cut.
    """

    name: str
    remaining: int
    probabilities: tuple[float, ...]


class Choice(NamedTuple):
    """How one token was chosen.

    Attributes:
        text: of the token; bytes that are not a whole character as U+FFFD.
        forced: the grammar left no choice, so none was made; there are no candidates then.
        candidates: texts of the tokens that are compared, the model's likeliest first.
        chosen: index of the token among them.
        steps: the chain's, in order.
    """

    text: str
    forced: bool
    candidates: tuple[str, ...] = ()
    chosen: int = 0
    steps: tuple[ChainStep, ...] = ()


@dataclass(frozen=True, slots=True)
class AnswerExplanation:
    """The last tokens of an answer, oldest first."""

    request: int
    choices: tuple[Choice, ...]


class SaveState(NamedTuple):
    """Save the KV state of a finished answer, so that what begins like it needs no prefill; answered by StateSaved.

    Attributes:
        answer: the request it was asked with, the last one.
        prompt_only: leave the answer out, because other questions will follow the prompt's beginning.
    """

    request: int
    answer: int
    prompt_only: bool = False


class StateSaved(NamedTuple):
    """How many tokens' keys and values were saved, in how many bytes; none where nothing could be."""

    request: int
    tokens: int
    n_bytes: int
