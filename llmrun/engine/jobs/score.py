"""The job `score`: the log-probability of each token of a text.

Owns the windows of a long text; evaluate.py decodes and scores them as chunks of which all positions count.
"""

from __future__ import annotations

from dataclasses import replace

from llmrun import _native
from llmrun.engine.jobs.evaluate import Evaluation, Report, open_context
from llmrun.engine.jobs.evaluate_scores import bits_per_byte, joined, perplexity
from llmrun.engine.llama.base import Context
from llmrun.engine.llama.model import LlamaModel
from llmrun.errors import UsageError
from llmrun.protocol.jobs.evaluate import Evaluate, EvaluateUpdate
from llmrun.protocol.jobs.score import ScoredText, ScoredToken, ScoreText
from llmrun.protocol.settings import common_fields


def run(command: ScoreText, report: Report, flag: _native.CancelFlag) -> ScoredText:
    """Score a text.

    Raises:
        UsageError: the text is too short.
        BadModelError: the file is not a model that predicts text.
        BadLogitsError: the model computes invalid logits.
    """
    report(EvaluateUpdate(0, 0))
    model = LlamaModel(command.model, command.gpu_layers, flag, settings=command)
    vocabulary = model.vocabulary
    tokens, begin = vocabulary.with_bos(vocabulary.tokenize(command.text, special=False)), vocabulary.with_bos([])
    if len(tokens) < 2:
        reason = f"it is {'one token, which has no context' if tokens else 'empty'}"
        raise UsageError("the text is too short to be scored", why=reason)
    evaluate = Evaluate(
        model.path,
        "",
        n_ctx=min(command.n_ctx, len(tokens)),
        every_position=True,
        adapters=command.adapters,
        **common_fields(command),
    )
    return score(evaluate, open_context(model, evaluate), tokens, begin, report)


def score(command: Evaluate, context: Context, tokens: list[int], begin: list[int], report: Report) -> ScoredText:
    """Score tokens."""
    starts = window_starts(len(tokens), command.n_ctx)
    windows = [token for start in starts for token in tokens[start : start + command.n_ctx]]
    reading = Evaluation(replace(command, chunks=len(starts)), [context], windows, begin, report)
    known, parts = 1, []
    for number, start in enumerate(starts):
        scores = reading.score_chunk(number)
        parts.append(scores[start + scores["position"] + 1 >= known])
        known = start + command.n_ctx
    scores = joined(parts)
    logprobs = [None, *(-float(nll) for nll in scores["nll"])]
    pieces = (context.vocabulary.piece(token).hex() for token in tokens)
    found = list(map(ScoredToken, tokens, pieces, logprobs))[len(begin) :]
    return ScoredText(tuple(found), command.n_ctx, len(starts), perplexity(scores), bits_per_byte(scores))


def window_starts(n_tokens: int, n_ctx: int) -> list[int]:
    """Return the first index of each window over a text: full windows that overlap by half or more."""
    last = n_tokens - n_ctx
    return [*range(0, last, max(n_ctx // 2, 1)), last]
