"""The job `prompt_scores`: the log-probability of each token of a prompt, as the loaded model predicts it."""

from __future__ import annotations

from dataclasses import dataclass

from llmrun.protocol.jobs import Empty, JobKind
from llmrun.protocol.messages import TokenLogprob


@dataclass(frozen=True, slots=True)
class ScorePrompt:
    """Score a prompt."""

    text: str
    tokens: tuple[int, ...]  # ids; the text counts if there are none
    top: int  # number of most likely tokens to report in each place


@dataclass(frozen=True, slots=True)
class PromptScores:
    """The scores of a prompt."""

    tokens: tuple[TokenLogprob, ...]  # of the first one, which nothing predicts, the log-probability is 0


PROMPT_SCORES = JobKind("prompt_scores", ScorePrompt, Empty, PromptScores, needs_model=True)
