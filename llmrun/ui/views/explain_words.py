"""Explanations of an answer's parts in a sentence or two each, for the terminal and the page.

Owns the words; must not know how anything is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

from llmrun.bench.results import Limit
from llmrun.insight.explain import CacheUse, ExplainedAnswer
from llmrun.insight.tokens import Token
from llmrun.protocol.jobs.explain import EmbeddingPlane, HeadAttention, LensColumn, RunCollected
from llmrun.protocol.sizes import readable_size
from llmrun.ui.terminal.format import counted
from llmrun.ui.terminal.sanitize import clean

ROLES = {
    "previous": "attends to the previous token",
    "first": "rests on the first token",
    "spread": "attends to all tokens alike",
    "sharp": "attends to a few tokens",
}
_REFUSED = {
    "names": "the model's tensors have unknown names",
    "norm": "the kind of the model's last norm is unknown",
    "differs": "after the last layer it does not reproduce the model's logits",
}
_WHOLE = 0.99  # minimum sum of a row of attention without an attention sink

NO_ATTENTION = "This model computes no attention weights that could be shown."
EXPERTS = "In a mixture of experts each token activates a few of them in each layer."
TIME = (
    "Prefill reads the weights once for all tokens of a prompt, so arithmetic is the limit; decode reads them again "
    "for each token of the answer, so memory bandwidth is the limit."
)
SAMPLING = "The logits become probabilities, each step of the sampler removes or changes some, and one token is drawn."


def known_tokens(run: RunCollected) -> Mapping[int, Token]:
    """Return all tokens that are shown, by id."""
    return {each.token: Token(each.token, bytes.fromhex(each.data), each.is_control) for each in run.pieces}


def quoted(token: Token) -> str:
    """Return a token in quotes, with visible line ends."""
    return clean(repr(token.data.decode("utf-8", "replace")))


def looked_at(run: RunCollected) -> tuple[int, str]:
    """Return the index of the watched position that the terminal explains, and its description."""
    at = run.n_prompt - 1 - run.first
    return (at, "the prompt's last token") if at >= 0 else (0, "the first watched token")


def about_tokens(run: RunCollected) -> str:
    """Return the length of the prompt, and of the watched part."""
    text = f"The whole prompt has {counted(run.n_prompt, 'token')}."
    if run.first:
        text += f" The following is about the last {len(run.tokens) - run.first}, prompt and answer together."
    return text


def about_embeddings(embeddings: EmbeddingPlane | None) -> str:
    """Return an explanation of embeddings and their neighbours."""
    if embeddings is None:
        return "This model's file has no input embeddings to show."
    return (
        f"Each token of the vocabulary has a vector of {embeddings.width:,} numbers, its embedding, which the first "
        "layer reads. In training, tokens that are used alike get similar vectors; the nearest in the whole vocabulary "
        "have the smallest angle between them, given as its cosine. Tokens that training hardly touched, which are "
        "nearer to control tokens, are left out."
    )


def about_layers(run: RunCollected) -> str:
    """Return an explanation of layers."""
    return f"Each of {counted(len(run.layers), 'layer')} adds to the token's vector, the residual stream."


def about_lens(run: RunCollected, where: str) -> str:
    """Return an explanation of the logit lens and its error, or the reason for its absence.

    Args:
        where: the position, in words.
    """
    if run.lens_refused:
        return f"The logit lens, the model's prediction after each layer, is not shown: {_REFUSED[run.lens_refused]}."
    return (
        f"The prediction after {where} if the model ended after a layer: the residual stream there, through the last "
        "norm and the output matrix. After the last layer this must give the model's own logits, and does, within "
        f"{run.lens_difference:.1%}."
    )


def about_attention(run: RunCollected) -> str:
    """Return an explanation of attention heads, for a run with attention maps."""
    n_heads = sum(len(layer.heads) for layer in run.layers)
    minimum = min(sum(row) for head in run.pictures for row in head.rows)
    sums = "; what a row lacks to 1 goes to the head's attention sink" if minimum < _WHOLE else "; every row sums to 1"
    flash = (
        " The weights were computed without flash attention, which the answer may have used: this rounds differently, "
        "so probabilities may differ a little from those of the answer."
    )
    return (
        f"For each token, each of {n_heads:,} heads distributes its attention over the tokens up to it{sums}."
        f"{flash if run.flash_attention else ''} The clearest examples of roles of heads:"
    )


def head_name(head: HeadAttention) -> str:
    """Return a head's layer and number, counted from 1."""
    return f"layer {head.layer + 1}, head {head.head + 1}"


def about_cache(cache: CacheUse, n_tokens: int) -> str:
    """Return the memory use of the KV cache, and the savings by GQA and sliding windows."""
    if not cache.layers:
        return "This model stores no keys and values: its state has the same size for any text."
    per_layer = cache.bytes_per_token / cache.layers
    parts = [
        "Keys and values of every token are stored, so none is computed twice: "
        f"{readable_size(cache.bytes_per_token)} a token, {readable_size(per_layer)} in each of {cache.layers} layers. "
        f"That is {readable_size(cache.bytes_per_token * n_tokens)} for these {counted(n_tokens, 'token')}, "
        f"{readable_size(cache.full_bytes)} for the whole context window of {cache.n_ctx:,}."
    ]
    if cache.unshared_bytes_per_token > cache.bytes_per_token:
        times = cache.unshared_bytes_per_token / cache.bytes_per_token
        parts.append(f"Heads share keys and values (GQA): without that it would be {times:.3g} times as much.")
    full = cache.bytes_per_token * cache.n_ctx
    if cache.window_layers:
        window = f"A sliding window of {cache.window:,} tokens in {counted(cache.window_layers, 'layer')}"
        saved = (
            f"saves {1 - cache.full_bytes / full:.0%} of a full window" if cache.full_bytes < full else "saves nothing"
        )
        parts.append(f"{window} {saved}.")
    return " ".join(parts)


class TimedPhase(NamedTuple):
    """The time of prefill or decode."""

    name: str
    tokens: int  # computed at once
    seconds: float
    layers: tuple[float, ...]  # seconds of each; zeros if unknown
    limit: Limit | None  # of the machine; None if unknown

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    @property
    def of_limit(self) -> str:
        """Share of the machine's limit, and the resource that sets this limit."""
        return f"{self.speed / self.limit.tokens_per_second:.0%} of {self.limit.binds}" if self.limit else ""


def phases(found: ExplainedAnswer) -> tuple[TimedPhase, ...]:
    """Return prefill and decode if they were timed."""
    run = found.run
    prefill = tuple(layer.prefill_seconds for layer in run.layers)
    decode = tuple(layer.decode_seconds for layer in run.layers)
    both = (
        TimedPhase("prefill", len(run.tokens) - run.first, run.prefill_seconds, prefill, found.prefill_limit),
        TimedPhase("decode", 1, run.decode_seconds, decode, found.decode_limit),
    )
    return tuple(phase for phase in both if phase.seconds)


def decided(column: LensColumn | None) -> str:
    """Return the layer from which on the lens ranks the actual next token first; "" if it never does."""
    if column is None or column.cells[-1].rank:
        return ""
    since = column.cells[-1].layer
    for cell, after in pairwise(reversed([*column.cells])):
        if after.rank:
            return str(cell.layer + 1)
        since = after.layer
    return str(since + 1)
