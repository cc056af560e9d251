"""The job `beams`: the most likely answers that beam search finds, and its tree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from llmrun.errors import UsageError, require_within
from llmrun.protocol.arguments import check_fields
from llmrun.protocol.jobs import JobKind
from llmrun.protocol.messages import AnswerRequest

EARLY_STOPPING = ("true", "false", "never")
MOST_BEAMS = 64
ROOT = -1
"""Parent of the nodes of an answer's first token."""


@dataclass(frozen=True, slots=True)
class BeamSettings:
    """Settings of a beam search."""

    beams: int = 4  # number of beams
    length_penalty: float = 1.0  # exponent of the length that divides a sum of log-probabilities
    # "true" stops when as many answers as beams have finished, "false" when no running beam scores higher at its
    # present length, "never" when none can ever score higher.
    early_stopping: str = "false"

    def __post_init__(self) -> None:
        check_fields(self)
        require_within("--beams", self.beams, (2, MOST_BEAMS))
        require_within("--length-penalty", self.length_penalty, (-100.0, 100.0))
        if self.early_stopping not in EARLY_STOPPING:
            why = f"must be {', '.join(EARLY_STOPPING[:-1])} or {EARLY_STOPPING[-1]}"
            raise UsageError(f"invalid --early-stopping {self.early_stopping!r}", why=why)


@dataclass(frozen=True, slots=True)
class SearchBeams:
    """Search for answers. Of the request's sampling parameters, penalties and biases are used."""

    asked: AnswerRequest
    settings: BeamSettings


class TreeNode(NamedTuple):
    """A token of the search tree: part of a beam for at least one step, or the end of an answer."""

    parent: int  # number of the node before it, or ROOT; nodes are numbered in order of creation
    token: int
    text: str  # bytes that are not a whole character as U+FFFD
    logprob: float  # natural logarithm, after penalties
    total: float  # sum of the log-probabilities from the root to this node
    ended: bool  # an answer ends with it


class BeamStep(NamedTuple):
    """One step of the search."""

    nodes: tuple[TreeNode, ...]  # the new ones
    running: tuple[int, ...]  # numbers of the beams' last nodes, the best first


class BeamAnswer(NamedTuple):
    """A finished answer."""

    tokens: tuple[int, ...]  # the end token included
    text: str  # without end token or stop string
    total: float  # sum of the tokens' log-probabilities, after penalties
    score: float  # the same with the length penalty
    reason: str  # "stop" (end token or stop string) or "length"
    node: int  # number of its last node


@dataclass(frozen=True, slots=True)
class BeamsFound:
    """The result of a search."""

    answers: tuple[BeamAnswer, ...]  # the best first
    prompt_tokens: int
    prefill_seconds: float
    steps: int  # of decoding; the first tokens come from the prompt's logits
    rows: int  # tokens decoded in all steps
    decode_seconds: float
    cells: int  # of the KV cache that the beams have used together
    is_full: bool  # the search ended because the KV cache was full
    is_cancelled: bool


BEAMS = JobKind("beams", SearchBeams, BeamStep, BeamsFound, needs_model=True)
