"""The job `beams`: the most likely answers that beam search finds, and its tree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from llmrun.errors import UsageError, require_within
from llmrun.protocol.arguments import check_fields
from llmrun.protocol.jobs import JobKind
from llmrun.protocol.messages import AnswerRequest

LENGTH_RULES = ("transformers", "vllm", "tensorrt")
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
    groups: int = 1  # number of groups for diverse beam search; they choose in turn, each its share of the beams
    # Penalty on a token's log-probability for each beam of earlier groups that chose it in the same step.
    diversity: float = 0.0
    # One of LENGTH_RULES: vLLM counts the prompt in the length but not the end token, and continues to the limit;
    # TensorRT-LLM differs from transformers only in its defaults, see of().
    length_rule: str = "transformers"

    def __post_init__(self) -> None:
        check_fields(self)
        require_within("--beams", self.beams, (2, MOST_BEAMS))
        require_within("--length-penalty", self.length_penalty, (-100.0, 100.0))
        require_within("--diversity", self.diversity, (0.0, 100.0))
        _require_one_of("--early-stopping", self.early_stopping, EARLY_STOPPING)
        _require_one_of("--length-rule", self.length_rule, LENGTH_RULES)
        if not 1 <= self.groups <= self.beams or self.beams % self.groups:
            raise UsageError(
                f"invalid --beam-groups {self.groups}", why=f"must divide the {self.beams} beams into equal parts"
            )
        if (self.groups > 1) != (self.diversity > 0):
            raise UsageError(
                "--beam-groups and --diversity need each other",
                why="groups without a diversity penalty would all find the same answers",
                hint="--beam-groups 2 --diversity 0.5",
            )
        if self.length_rule == "vllm" and (self.groups > 1 or self.early_stopping != "never"):
            raise UsageError("--length-rule vllm has neither groups nor early stopping")

    @classmethod
    def of(
        cls,
        beams: int,
        length_penalty: float | None = None,
        early_stopping: str | None = None,
        groups: int = 1,
        diversity: float = 0.0,
        length_rule: str = "transformers",
    ) -> BeamSettings:
        """Return settings; None is the default of the length rule's program."""
        penalty, stopping = {"vllm": (1.0, "never"), "tensorrt": (0.0, "true")}.get(length_rule, (1.0, "false"))
        return cls(
            beams,
            penalty if length_penalty is None else length_penalty,
            stopping if early_stopping is None else early_stopping,
            groups,
            diversity,
            length_rule,
        )


def _require_one_of(label: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(f"invalid {label} {value!r}", why=f"must be {', '.join(known[:-1])} or {known[-1]}")


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
    cells: int  # of the KV cache that all beams share, at the end
    is_full: bool  # the search ended because the KV cache was full
    is_cancelled: bool


BEAMS = JobKind("beams", SearchBeams, BeamStep, BeamsFound, needs_model=True)
