"""What an explained answer's parts are, in a sentence or two each: the same on a terminal and on a page.

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
    "previous": "looks at the token before",
    "first": "rests on the first token",
    "spread": "looks at everything alike",
    "sharp": "looks at few, chosen tokens",
}
_REFUSED = {
    "names": "the model's tensors have no names that it knows",
    "norm": "the model's last norm is of a kind that it doesn't know",
    "differs": "it does not give this model's own logits behind the last layer",
}
_WHOLE = 0.99  # what a row of attention sums to at least, unless some goes to a sink

NO_ATTENTION = "This model computes no attention weights that could be shown."
EXPERTS = "In a mixture of experts each token wakes a few in each layer."
TIME = (
    "Prefill reads the weights once for all tokens of a prompt, so that arithmetic is the limit; decode reads them "
    "again for each token of the answer, so that memory is."
)
SAMPLING = (
    "The logits become probabilities, each step of the sampler cuts some or changes them, and one token is drawn."
)


def known_tokens(run: RunCollected) -> Mapping[int, Token]:
    """Every token that is shown, by its id."""
    return {each.token: Token(each.token, bytes.fromhex(each.data), each.is_control) for each in run.pieces}


def quoted(token: Token) -> str:
    """A token as one sees its spaces and line ends."""
    return clean(repr(token.data.decode("utf-8", "replace")))


def looked_at(run: RunCollected) -> tuple[int, str]:
    """The place among the watched positions that the story is about, and what it is."""
    at = run.n_prompt - 1 - run.first
    return (at, "the prompt's last token") if at >= 0 else (0, "the first token that was watched")


def about_tokens(run: RunCollected) -> str:
    """How long the prompt is, and what of it can be seen."""
    text = f"The whole prompt is {counted(run.n_prompt, 'token')} of the vocabulary."
    if run.first:
        text += f" What follows is of the last {len(run.tokens) - run.first}, prompt and answer together."
    return text


def about_embeddings(embeddings: EmbeddingPlane | None) -> str:
    """What embeddings are, and what lies near them; or that they can't be shown."""
    if embeddings is None:
        return "This model's file has no input embeddings that could be shown."
    return (
        f"Each token of the vocabulary has a vector of {embeddings.width:,} numbers, its embedding, which the first "
        "layer begins with. In training, tokens that are used alike get similar vectors; the nearest in the whole "
        "vocabulary are those with the smallest angle between them, given as its cosine. What training hardly touched, "
        "and lies nearer to control tokens, is left out."
    )


def about_layers(run: RunCollected) -> str:
    """What layers do."""
    return f"Each of {counted(len(run.layers), 'layer')} adds to the token's vector, the residual stream."


def about_lens(run: RunCollected, where: str) -> str:
    """What the logit lens is, and how exact; or why there is none."""
    if run.lens_refused:
        return f"The lens, what the model would say behind each layer, is not shown: {_REFUSED[run.lens_refused]}."
    return (
        f"What the model would say after {where} if it ended behind a layer: the residual stream there, through the "
        "last norm and the output matrix. Behind the last layer that has to give the model's own logits, and does, "
        f"within {run.lens_difference:.1%}."
    )


def about_attention(run: RunCollected) -> str:
    """What heads do, where there are pictures of some."""
    n_heads = sum(len(layer.heads) for layer in run.layers)
    least = min(sum(row) for picture in run.pictures for row in picture.rows)
    sums = "; what a row lacks to 1 goes to the head's attention sink" if least < _WHOLE else "; every row sums to 1"
    flash = (
        " To see that, it was computed without flash attention, which the answer may have had: the same, rounded "
        "otherwise, so that probabilities may differ a little from those the answer was drawn with."
    )
    return (
        f"For each token, each of {n_heads:,} heads shares out its attention among the tokens up to it{sums}."
        f"{flash if run.flash_attention else ''} The best examples of what heads do:"
    )


def head_name(picture: HeadAttention) -> str:
    """Which head it is."""
    return f"layer {picture.layer + 1}, head {picture.head + 1}"


def about_cache(cache: CacheUse, n_tokens: int) -> str:
    """What the KV cache takes, and what saves some of it."""
    if not cache.layers:
        return "This model keeps no keys and values: its state has the same size for any text."
    per_layer = cache.bytes_per_token / cache.layers
    parts = [
        "Keys and values of every token are kept, so that none is computed twice: "
        f"{readable_size(cache.bytes_per_token)} a token, {readable_size(per_layer)} in each of {cache.layers} layers. "
        f"That is {readable_size(cache.bytes_per_token * n_tokens)} for these {counted(n_tokens, 'token')}, "
        f"{readable_size(cache.full_bytes)} for the whole context window of {cache.n_ctx:,}."
    ]
    if cache.unshared_bytes_per_token > cache.bytes_per_token:
        times = cache.unshared_bytes_per_token / cache.bytes_per_token
        parts.append(f"Heads share keys and values (GQA): without that it would be {times:.3g} times as much.")
    if cache.window_layers:
        full = cache.bytes_per_token * cache.n_ctx
        saved = f", which saves {1 - cache.full_bytes / full:.0%} of a full window" if cache.full_bytes < full else ""
        parts.append(f"{cache.window_layers} layers look back only {cache.window:,} tokens{saved}.")
    return " ".join(parts)


class TimedPhase(NamedTuple):
    """Prefill or decode as it was timed.

    Attributes:
        name: which of them.
        tokens: that were computed at once.
        seconds: for all of it.
        layers: seconds of each; zeros where that can't be told.
        limit: what the machine could do at most; None where unknown.
    """

    name: str
    tokens: int
    seconds: float
    layers: tuple[float, ...]
    limit: Limit | None

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    @property
    def of_limit(self) -> str:
        """Of what the machine could do at most, and what that is limited by."""
        return f"{self.speed / self.limit.tokens_per_second:.0%} of {self.limit.binds}" if self.limit else ""


def phases(found: ExplainedAnswer) -> tuple[TimedPhase, ...]:
    """Prefill and decode, where they were timed."""
    run = found.run
    prefill = tuple(layer.prefill_seconds for layer in run.layers)
    decode = tuple(layer.decode_seconds for layer in run.layers)
    both = (
        TimedPhase("prefill", len(run.tokens) - run.first, run.prefill_seconds, prefill, found.prefill_limit),
        TimedPhase("decode", 1, run.decode_seconds, decode, found.decode_limit),
    )
    return tuple(phase for phase in both if phase.seconds)


def decided(column: LensColumn | None) -> str:
    """From which layer on the token that came was the lens's likeliest; "" where it never was."""
    if column is None or column.cells[-1].rank:
        return ""
    since = column.cells[-1].layer
    for cell, after in pairwise(reversed([*column.cells])):
        if after.rank:
            return str(cell.layer + 1)
        since = after.layer
    return str(since + 1)
