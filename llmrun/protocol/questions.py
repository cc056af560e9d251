"""Short jobs about the loaded model: commands and results.

The engine's own threads do them (engine/main.py); jobs that take long are in protocol/jobs/.
Named tuples for the reason given in messages.py.
"""

from __future__ import annotations

from typing import NamedTuple

from llmrun.protocol.jobs import Empty, JobKind
from llmrun.protocol.jobs.text import TextTokens, TokenizeText
from llmrun.protocol.messages import AnswerRequest, DraftedToken, PromptHistory, Stats
from llmrun.protocol.speculation import ComparisonTimes


class TokenCount(NamedTuple):
    """The numbers of tokens of a conversation."""

    each: tuple[int, ...]  # of each message's content
    total: int  # of the whole prompt, including what the chat template adds
    history: PromptHistory | None = None  # as in Started

    def after_answer(self, stats: Stats) -> TokenCount:
        """Return the count of a conversation as its last answer, whose figures are given, left it in the KV cache.

        This is the figure that is shown with the answer. The next prompt may have other tokens, without the reasoning.
        """
        left = self._replace(each=(*self.each[:-1], stats.completion_tokens), total=stats.context_used)
        return left if sum(left.each) <= left.total else self  # another system prompt since, or no figures


MOST_CHOICES = 64  # Limit of an answer's tokens with explained choices: the logits of each are stored


class ExplainChoices(NamedTuple):
    """Explain how the last tokens of a finished answer were chosen."""

    answer: int  # number of its request
    last: int  # number of tokens, at most the AnswerRequest.remember of the answer
    candidates: int  # number of the most likely candidates to report for each token


class ChainStep(NamedTuple):
    """The candidates after one step of the sampler chain."""

    name: str  # "model" for the model's own distribution, then names as in params.STEPS
    remaining: int  # number of tokens that can still be chosen
    probabilities: tuple[float, ...]  # of Choice.candidates, in their order; 0 for a token that was cut


class Choice(NamedTuple):
    """The choice of one token."""

    text: str  # bytes that are not a whole character are U+FFFD
    forced: bool  # by the grammar, or its end before the limit: nothing was sampled, and there are no candidates
    candidates: tuple[str, ...] = ()  # texts of the compared tokens, the model's most likely first
    chosen: int = 0  # index of the token among them
    steps: tuple[ChainStep, ...] = ()  # of the sampler chain, in order
    draft: DraftedToken | None = None  # in its place


class AnswerExplanation(NamedTuple):
    """The choices of the last tokens of an answer, oldest first."""

    choices: tuple[Choice, ...]


class SaveState(NamedTuple):
    """Save the KV state of a finished answer, so that a prompt with the same beginning needs no prefill."""

    answer: int  # number of its request, the last one
    prompt_only: bool = False  # leave the answer out, because other questions will follow the prompt's beginning


class StateSaved(NamedTuple):
    """The size of a saved KV state; zeros if none could be written."""

    tokens: int
    n_bytes: int


class Compare(NamedTuple):
    """Compare ways to compute, for the next loads of such a model."""

    attention: bool = False  # flash attention on and off
    variant_types: tuple[str, ...] = ()  # types of weights for which to compare the processor's variants


class EngineStatus(NamedTuple):
    """The load of an engine; the last four counts are of tokens since its start."""

    running: int = 0  # answers in the batch
    waiting: int = 0  # answers not admitted yet
    cells: int = 0  # of the KV cache
    cells_used: int = 0
    cells_shared: int = 0  # used by more than one sequence
    checkpoint_bytes: int = 0  # copies of recurrent states and sliding windows
    prefix_queries: int = 0  # prompt tokens received
    prefix_hits: int = 0  # of these, found in the KV cache
    prefilled: int = 0
    decoded: int = 0
    threads: tuple[int, int] = (0, 0)  # as in Stats


COUNT_TOKENS = JobKind("count_tokens", AnswerRequest, Empty, TokenCount, needs_model=True)
# The prompt of a conversation, without its images.
APPLY_TEMPLATE = JobKind("apply_template", AnswerRequest, Empty, str, needs_model=True)
TOKENIZE_LOADED = JobKind("tokenize_loaded", TokenizeText, Empty, TextTokens, needs_model=True)
# The text of token ids, with the texts of control tokens; bytes that are not characters are U+FFFD.
DETOKENIZE = JobKind("detokenize", tuple[int, ...], Empty, str, needs_model=True)
EXPLAIN_CHOICES = JobKind("explain_choices", ExplainChoices, Empty, AnswerExplanation, needs_model=True)
SAVE_STATE = JobKind("save_state", SaveState, Empty, StateSaved, needs_model=True)
# Interrupted by any other command; the comparisons are empty then, or if the machine is too busy.
COMPARE = JobKind("compare", Compare, Empty, ComparisonTimes, needs_model=True)
# Answered at once, in the middle of a step too.
STATUS = JobKind("status", Empty, Empty, EngineStatus, needs_model=True)

_ALL = (
    COUNT_TOKENS, APPLY_TEMPLATE, TOKENIZE_LOADED, DETOKENIZE, EXPLAIN_CHOICES, SAVE_STATE, COMPARE, STATUS
)  # fmt: skip
QUESTIONS = {kind.name: kind for kind in _ALL}
