"""The jobs `evaluate`, `score` and `prompt_scores`: how well a model predicts a text.

`evaluate` has llama-perplexity's method: the text is tokenized as a whole and cut into chunks of n_ctx tokens; the
first token of each becomes the begin-of-sequence token if the model uses one; only the second half of a chunk is
scored, so that there is always some context. Model and reference decode each batch in turn, and their logits are
compared in llama.cpp's memory: without a file or copy of them. `score` decodes overlapping windows as chunks of which
all positions count. `prompt_scores` computes in a second context of the loaded model, which returns the logits of every
position: the context of the answers returns only a few, and keeps prefixes, whose logits are gone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from llmrun import _native
from llmrun.engine.jobs import needles
from llmrun.engine.jobs.scores import (
    SCORE,
    Array,
    Rows,
    bits_per_byte,
    divergence,
    joined,
    logits_at,
    perplexity,
    position_ranges,
)
from llmrun.engine.llama.base import Context, Entry, Vocabulary
from llmrun.engine.llama.context import LlamaContext
from llmrun.engine.llama.model import LlamaModel
from llmrun.errors import BadLogitsError, ContextOverflowError, LlmrunError, UsageError
from llmrun.protocol.adapters import by_default
from llmrun.protocol.jobs.evaluate import (
    Evaluate,
    EvaluateResult,
    EvaluateUpdate,
    Needle,
    ScoredText,
    ScoredToken,
    ScorePrompt,
    ScoreText,
)
from llmrun.protocol.loading import Load
from llmrun.protocol.messages import TokenLogprob
from llmrun.protocol.settings import common_fields

if TYPE_CHECKING:
    from llmrun.engine.loaded import LoadedModel
    from llmrun.engine.slices import TimeShare


BATCH = 512  # Tokens of a decode call. More would take more memory for logits and be no faster
_PROMPT_BATCH = 128  # positions of prompt_scores; their logits take 100 MB in the largest vocabularies
_SHORTEST_CHUNK = 32
_CHECKED = 1024  # tokens whose texts must be equal in both vocabularies, besides those of the text

Report = Callable[[EvaluateUpdate], None]


def run_evaluate(command: Evaluate, report: Report, flag: _native.CancelFlag) -> EvaluateResult:
    """Evaluate a model.

    Raises:
        UsageError: the text is too short, or the reference has another vocabulary.
        BadModelError: a file is not a model that predicts text.
        BadLogitsError: a model computes something that is not a probability.
    """
    report(EvaluateUpdate(0, 0))
    model = LlamaModel(command.model, command.gpu_layers, flag, settings=command)
    vocabulary = model.vocabulary
    tokens = vocabulary.with_bos(vocabulary.tokenize(command.text, special=False))
    if len(tokens) < command.n_ctx:
        raise _too_short(len(tokens), command)
    contexts = [open_context(model, command)]
    if command.reference:
        try:
            reference = LlamaModel(command.reference, command.gpu_layers, flag, settings=command)
            contexts.append(open_context(reference, replace(command, kv_type_k="f16", kv_type_v="f16", adapters=())))
        except LlmrunError as error:
            raise type(error)(f"the reference: {error.what}", why=error.why, hint=error.hint) from None
        check_vocabulary(vocabulary, reference.vocabulary, tokens, command.text)
    return Evaluation(command, contexts, tokens, vocabulary.with_bos([]), report).run()


def open_context(model: LlamaModel, command: Evaluate) -> LlamaContext:
    """Create a context that returns the logits of a whole batch."""
    load = Load.of(
        command,
        model.path,
        n_batch=min(BATCH, command.n_ctx),
        n_ubatch=BATCH,
        gpu_layers=model.gpu_layers,
        adapters=command.adapters,
    )
    return LlamaContext(model, load, n_outputs=load.n_batch)


def _too_short(n_tokens: int, command: Evaluate) -> UsageError:
    smaller = 1 << (max(n_tokens, 1).bit_length() - 1)
    fits = smaller >= (2 * needles.SHORTEST if command.needles else _SHORTEST_CHUNK)
    return UsageError(
        "the text is too short",
        why=f"it has {n_tokens:,} token{'s' * (n_tokens != 1)}, and one chunk takes {command.n_ctx:,}",
        hint="a longer --text" + (f", or --ctx {smaller}" if fits else ""),
    )


def _no_numbers(name: str, where: str) -> BadLogitsError:
    hint = "check the file for damage with `llmrun verify MODEL`"
    return BadLogitsError(f"{name} computed logits that are not numbers", why=where, hint=hint)


def check_vocabulary(model: Vocabulary, reference: Vocabulary, tokens: list[int], text: str) -> None:
    """Require the same vocabulary of both models.

    Raises:
        UsageError: the vocabularies differ.
    """
    reason = ""
    if model.n_tokens != reference.n_tokens:
        reason = f"the model has {model.n_tokens:,} tokens and the reference {reference.n_tokens:,}"
    elif reference.with_bos(reference.tokenize(text, special=False)) != tokens:
        reason = "their tokenizers split the text differently"
    else:
        spread = range(0, model.n_tokens, max(1, model.n_tokens // _CHECKED))
        different = [token for token in {*tokens, *spread} if model.piece(token) != reference.piece(token)]
        if different:
            reason = f"token {different[0]} has another text in each"
    if reason:
        raise UsageError(
            "these models can't be compared: they have different vocabularies",
            why=reason,
            hint="use a reference of the same model, e.g. its F16 or Q8_0 file",
        )


@dataclass(frozen=True, slots=True)
class Layout:
    """The tokens of each chunk, and its scored positions."""

    tokens: list[int]  # of the whole text
    begin: list[int]  # replaces the first tokens of each chunk: the begin-of-sequence token, or nothing
    n_ctx: int  # tokens of a chunk
    first: int  # first position whose prediction is scored; the last position's has no next token to score

    @property
    def chunks(self) -> int:
        """The number of whole chunks."""
        return len(self.tokens) // self.n_ctx

    def chunk(self, index: int) -> list[int]:
        tokens = self.tokens[index * self.n_ctx : (index + 1) * self.n_ctx]
        return [*self.begin, *tokens[len(self.begin) :]]

    def batches(self, index: int, size: int) -> list[list[Entry]]:
        """Return the batches to decode in order, starting with an empty sequence 0."""
        entries = [
            Entry(token, position, 0, self.first <= position < self.n_ctx - 1)
            for position, token in enumerate(self.chunk(index))
        ]
        return [entries[start : start + size] for start in range(0, len(entries), size)]


class Evaluation:
    """One evaluation, which reports partial figures after each chunk.

    Args:
        contexts: the model's and the reference's, if there is one, each with an empty sequence 0.
    """

    def __init__(
        self, command: Evaluate, contexts: Sequence[Context], tokens: list[int], begin: list[int], report: Report
    ) -> None:
        self._command, self._contexts, self._report = command, contexts, report
        first = 0 if command.every_position else command.n_ctx // 2
        self._layout = Layout(tokens, begin, command.n_ctx, first)
        self._chunks = min(command.chunks, self._layout.chunks)
        self._begin = begin
        self._rows = Rows(contexts[0].vocabulary.n_tokens)
        self._scores: list[Array] = []
        self._needles: list[Needle] = []
        self._decode_seconds = self._score_seconds = 0.0
        lengths = needles.lengths(command.n_ctx) if command.needles else []
        self._done, self._total = 0, (self._chunks * command.n_ctx + sum(lengths)) * len(contexts)
        self._lengths = lengths

    def run(self) -> EvaluateResult:
        """Decode and score everything."""
        self._report(EvaluateUpdate(0, self._total))
        for index in range(self._chunks):
            self._scores.append(self.score_chunk(index))
            self._report(EvaluateUpdate(self._done, self._total, self._figures()))
        for length in self._lengths:
            self._needles += self._find_needles(length)
            self._report(EvaluateUpdate(self._done, self._total, self._figures()))
        return self._figures()

    def score_chunk(self, index: int) -> Array:
        """Decode a chunk; return the scores of its positions, in order."""
        size = min(context.n_batch for context in self._contexts)
        parts = []
        for context in self._contexts:
            context.forget(0, 0)
        targets = self._layout.tokens[index * self._layout.n_ctx :]
        for batch in self._layout.batches(index, size):
            for context in self._contexts:
                self._decode(context, batch)
            parts.append(self._score(batch, index, targets))
        return joined(parts)

    def _decode(self, context: Context, batch: list[Entry]) -> None:
        began = time.perf_counter()
        context.decode(batch)
        context.synchronize()
        self._decode_seconds += time.perf_counter() - began
        self._done = min(self._done + len(batch), self._total)  # the total leaves out the questions about needles
        self._report(EvaluateUpdate(self._done, self._total))

    def _score(self, batch: list[Entry], chunk: int, targets: list[int]) -> Array:
        """Return the scores of the batch's positions with logits."""
        began = time.perf_counter()
        scored = [(index, entry) for index, entry in enumerate(batch) if entry.wants_logits]
        scores = np.zeros(len(scored), SCORE)
        model, *references = self._contexts
        for place, (index, entry) in enumerate(scored):
            token = targets[entry.position + 1]
            row = scores[place]  # a view
            row["chunk"], row["position"] = chunk, entry.position
            row["n_bytes"] = len(model.vocabulary.piece(token))
            if references:
                self._rows.compare(model.logits(index), references[0].logits(index), token, row)
            else:
                row["nll"], row["top"] = self._rows.score(model.logits(index), token)
        self._check(scores, chunk)
        self._score_seconds += time.perf_counter() - began
        return scores

    def _check(self, scores: Array, chunk: int) -> None:
        for column, name in (("nll", "the model"), ("reference_nll", "the reference"), ("kld", "one of the models")):
            if not np.isfinite(scores[column]).all():
                raise _no_numbers(name, f"in chunk {chunk + 1} of the text")

    def _find_needles(self, length: int) -> list[Needle]:
        haystack = needles.Haystack(self._contexts[0].vocabulary, self._begin, length)
        answers = [needles.ask(context, haystack, self._rows, self._decode) for context in self._contexts]
        for name, answers_of_model in zip(("the model", "the reference"), answers, strict=False):
            if any(math.isnan(probability) for _, probability in answers_of_model):
                raise _no_numbers(name, f"in a text of {length:,} tokens")
        model, *references = answers
        return [
            Needle(length, depth, *answer, *(references[0][index] if references else (None, None)))
            for index, (depth, answer) in enumerate(zip(needles.DEPTHS, model, strict=True))
        ]

    def _figures(self) -> EvaluateResult:
        compared = len(self._contexts) > 1
        scores = joined(self._scores)
        counted = scores[scores["position"] >= self._command.n_ctx // 2]
        has_scores = len(counted) > 0
        return EvaluateResult(
            chunks=len(self._scores),
            chunks_there=self._layout.chunks,
            n_ctx=self._command.n_ctx,
            positions=len(counted),
            perplexity=perplexity(counted) if has_scores else None,
            bits_per_byte=bits_per_byte(counted),
            divergence=divergence(counted) if has_scores and compared else None,
            by_position=position_ranges(scores, self._command.n_ctx, compared=compared)
            if self._command.every_position
            else (),
            needles=tuple(self._needles),
            decode_seconds=self._decode_seconds,
            score_seconds=self._score_seconds,
        )


def run_score(command: ScoreText, report: Report, flag: _native.CancelFlag) -> ScoredText:
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
    n_scored, parts = 1, []  # tokens; the first one has no context
    for number, start in enumerate(starts):
        scores = reading.score_chunk(number)
        parts.append(scores[start + scores["position"] + 1 >= n_scored])
        n_scored = start + command.n_ctx
    scores = joined(parts)
    logprobs = [None, *(-float(nll) for nll in scores["nll"])]
    pieces = (context.vocabulary.piece(token).hex() for token in tokens)
    scored = list(map(ScoredToken, tokens, pieces, logprobs))[len(begin) :]
    return ScoredText(tuple(scored), command.n_ctx, len(starts), perplexity(scores), bits_per_byte(scores))


def window_starts(n_tokens: int, n_ctx: int) -> list[int]:
    """Return the first index of each window over a text: full windows that overlap by half or more."""
    last = n_tokens - n_ctx
    return [*range(0, last, max(n_ctx // 2, 1)), last]


def run_prompt_scores(
    command: ScorePrompt, loaded: LoadedModel, share: TimeShare, is_wanted: Callable[[], bool]
) -> Generator[None, None, tuple[TokenLogprob, ...]]:
    """Score a prompt; yield when it is tokenized, and after each slice.

    Raises:
        UsageError: it is empty, or has a token that the vocabulary lacks.
        ContextOverflowError: it is longer than the context window.
        OutOfMemoryError: a second context does not fit.
    """
    vocabulary, n_ctx = loaded.weights.vocabulary, loaded.load.n_ctx
    tokens, n_more = loaded.preparer.prompts.plain_tokens(command.tokens or (command.text,))
    if not tokens:
        raise UsageError("the prompt is empty", hint="type something")
    if len(tokens) + n_more > n_ctx:
        raise ContextOverflowError.of_prompt(len(tokens) + n_more, n_ctx)
    size = min(_PROMPT_BATCH, len(tokens))
    yield
    scored = [_token_logprob(vocabulary, tokens[0], 0.0)]
    with closing(LlamaContext(loaded.weights, loaded.load_for(len(tokens), size), n_outputs=size)) as context:
        context.adapt(by_default(loaded.load.adapters))
        while (start := len(scored) - 1) < len(tokens) - 1:
            piece = tokens[start : start + share.tokens(size)]
            with share.measured(len(piece)):
                context.decode([Entry(token, start + place, 0, True) for place, token in enumerate(piece)])
                context.synchronize()
                predicted = tokens[start + 1 : start + 1 + len(piece)]
                scored += [_score(context, place, token, command.top) for place, token in enumerate(predicted)]
            yield
    return tuple(scored)


def _score(context: LlamaContext, place: int, token: int, top: int) -> TokenLogprob:
    """Return the score of the token after a position of the last batch."""
    vocabulary = context.vocabulary
    logits = logits_at(context.logits(place), vocabulary.n_tokens).astype(np.float64)
    highest = float(logits.max())
    logprobs = logits - highest - np.log(np.exp(logits - highest).sum())
    if not np.isfinite(logprobs[token]):
        raise BadLogitsError("the model computed logits that are not numbers")
    best = np.argpartition(-logprobs, top)[:top] if top else np.array([], int)
    best = best[np.argsort(-logprobs[best], kind="stable")]
    likely = (_token_logprob(vocabulary, int(other), float(logprobs[other])) for other in best)
    alternatives = tuple(likely_token[:3] for likely_token in likely)
    return _token_logprob(vocabulary, token, float(logprobs[token]))._replace(top=alternatives)


def _token_logprob(vocabulary: Vocabulary, token: int, logprob: float) -> TokenLogprob:
    piece = vocabulary.control_piece(token)
    return TokenLogprob(piece.decode("utf-8", "replace"), tuple(piece), logprob, ())
