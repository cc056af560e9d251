"""The job `beams`: the likeliest answers that beam search finds, and the tree that it grew."""

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
"""Parent of the nodes that stand for an answer's first token."""


@dataclass(frozen=True, slots=True)
class BeamSettings:
    """How beam search chooses.

    Attributes:
        beams: how many branches are kept at each step.
        length_penalty: exponent of the length by which a sum of log-probabilities is divided.
        early_stopping: "true" stops at as many finished answers as beams, "false" when no running one is better than
            they are by its own length, "never" when none can become better.
        groups: that choose one after the other, each its share of the beams.
        diversity: taken from a token's log-probability for each beam of earlier groups that chose it in the same step.
        length_rule: whose lengths and stops hold, see LENGTH_RULES: vLLM counts the prompt in the length, the end token
            not, and goes on to the limit; TensorRT-LLM differs from transformers in its defaults only, see of().
    """

    beams: int = 4
    length_penalty: float = 1.0
    early_stopping: str = "false"
    groups: int = 1
    diversity: float = 0.0
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
                why="groups that may choose alike would all find the same",
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
        """Settings of which None is what the rule's makers take."""
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
    """What to answer, and how to search. Of the request's sampling, penalties and biases count."""

    asked: AnswerRequest
    settings: BeamSettings


class TreeNode(NamedTuple):
    """A token of the tree: one that was kept for at least a step, or that ended an answer.

    Attributes:
        parent: number of the node before it, ROOT where there is none; nodes are numbered as they come.
        token: its id.
        text: what it stands for; bytes that are not a whole character as U+FFFD.
        logprob: natural logarithm of its probability, after penalties.
        total: sum of those from the root to here.
        ended: an answer ends with it.
    """

    parent: int
    token: int
    text: str
    logprob: float
    total: float
    ended: bool


class BeamStep(NamedTuple):
    """A step was made.

    Attributes:
        nodes: that are new.
        running: numbers of the nodes that go on, the best one first.
    """

    nodes: tuple[TreeNode, ...]
    running: tuple[int, ...]


class BeamAnswer(NamedTuple):
    """An answer that was found.

    Attributes:
        tokens: with the end token, where it has one.
        text: without what ended it.
        total: sum of the tokens' log-probabilities, after penalties.
        score: the same, with the length penalty.
        reason: "stop" (end token or stop string) or "length".
        node: number of its last node.
    """

    tokens: tuple[int, ...]
    text: str
    total: float
    score: float
    reason: str
    node: int


@dataclass(frozen=True, slots=True)
class BeamsFound:
    """What came of a search.

    Attributes:
        answers: the best one first.
        prompt_tokens: of the prompt.
        prefill_seconds: for them.
        steps: of the search.
        rows: that went through the model in them.
        decode_seconds: for all steps.
        cells: of the KV cache that all beams share, at the end.
        is_full: the search ended because there was no room for more.
        is_cancelled: the search was ended by a cancel.
    """

    answers: tuple[BeamAnswer, ...]
    prompt_tokens: int
    prefill_seconds: float
    steps: int
    rows: int
    decode_seconds: float
    cells: int
    is_full: bool
    is_cancelled: bool


BEAMS = JobKind("beams", SearchBeams, BeamStep, BeamsFound, needs_model=True)
