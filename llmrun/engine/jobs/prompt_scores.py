"""The job `prompt_scores`: compute a prompt in a second context that returns the logits of every position.

The context of the answers returns only a few positions' logits, and keeps prefixes, whose logits are gone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np

from llmrun.engine.llama.base import Entry, Vocabulary
from llmrun.engine.llama.context import LlamaContext
from llmrun.engine.loaded import LoadedModel
from llmrun.engine.slices import TimeShare
from llmrun.errors import BadLogitsError, ContextOverflowError, UsageError
from llmrun.protocol.adapters import by_default
from llmrun.protocol.jobs.prompt_scores import PromptScores, ScorePrompt
from llmrun.protocol.messages import TokenLogprob

_BATCH = 128  # positions; their logits take 100 MB in the largest vocabularies


def slices(
    command: ScorePrompt, loaded: LoadedModel, share: TimeShare, is_wanted: Callable[[], bool]
) -> Generator[None, None, PromptScores]:
    """Score a prompt; yield when it is tokenized, and after each slice.

    Raises:
        UsageError: it is empty, or has a token that the vocabulary lacks.
        ContextOverflowError: it is longer than the context window.
        OutOfMemoryError: a second context does not fit.
    """
    vocabulary, load = loaded.weights.vocabulary, loaded.load
    text = vocabulary.cut(command.text, load.n_ctx)
    tokens = list(command.tokens) or vocabulary.with_bos(vocabulary.tokenize(text, special=False))
    invalid = next((token for token in tokens if not 0 <= token < vocabulary.n_tokens), None)
    if invalid is not None:
        raise UsageError(f"there is no token {invalid}", why=f"the vocabulary has {vocabulary.n_tokens:,}")
    if not tokens:
        raise UsageError("the prompt is empty", hint="type something")
    if len(tokens) > load.n_ctx:
        at_least = "at least " if len(text) < len(command.text) else ""
        what = f"the prompt is {at_least}{len(tokens):,} tokens long, the context window {load.n_ctx:,}"
        raise ContextOverflowError(what, hint="shorten it", size=(len(tokens), load.n_ctx))
    size = min(_BATCH, len(tokens))
    load = replace(
        load,
        n_ctx=load.n_ctx if loaded.weights.rope_depends_on_window else len(tokens),
        n_ctx_start=len(tokens),
        n_batch=size,
        n_ubatch=size,
        n_seq_max=1,
        n_parked=0,
        n_cells=0,
        warm_up=False,
    )
    yield
    found = [_scored(vocabulary, tokens[0], 0.0)]
    with closing(LlamaContext(loaded.weights, load, n_outputs=size)) as context:
        context.adapt(by_default(load.adapters))
        while (start := len(found) - 1) < len(tokens) - 1:
            piece = tokens[start : start + share.tokens(size)]
            with share.measured(len(piece)):
                context.decode([Entry(token, start + place, 0, True) for place, token in enumerate(piece)])
                context.synchronize()
                predicted = tokens[start + 1 : start + 1 + len(piece)]
                found += [_score(context, place, token, command.top) for place, token in enumerate(predicted)]
            yield
    return PromptScores(tuple(found))


def _score(context: LlamaContext, place: int, token: int, top: int) -> TokenLogprob:
    """Return the score of the token after a position of the last batch."""
    vocabulary = context.vocabulary
    memory: Any = (ctypes.c_float * vocabulary.n_tokens).from_address(context.logits(place))
    logits = np.frombuffer(memory, np.float32).astype(np.float64)
    highest = float(logits.max())
    logprobs = logits - highest - np.log(np.exp(logits - highest).sum())
    if not np.isfinite(logprobs[token]):
        raise BadLogitsError("the model computed logits that are not numbers")
    best = np.argpartition(-logprobs, top)[:top] if top else np.array([], int)
    best = best[np.argsort(-logprobs[best], kind="stable")]
    likely = (_scored(vocabulary, int(each), float(logprobs[each])) for each in best)
    alternatives = tuple((each.text, each.bytes, each.logprob) for each in likely)
    return _scored(vocabulary, token, float(logprobs[token]))._replace(top=alternatives)


def _scored(vocabulary: Vocabulary, token: int, logprob: float) -> TokenLogprob:
    piece = vocabulary.control_piece(token)
    return TokenLogprob(piece.decode("utf-8", "replace"), tuple(piece), logprob, ())
