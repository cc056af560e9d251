"""Sampling parameters and limits of a generation: names, defaults, bounds, and their merging.

Must not know the source of a value. Names and defaults are llama.cpp's (common/common.h, 0.3.36's vendored copy).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from llmrun.errors import UsageError, brief, require_within
from llmrun.protocol.arguments import MOST_TOKENS as MOST_TOKENS
from llmrun.protocol.arguments import NUMBER, check_fields

_INT32_MAX = 2**31 - 1
_MOST_LAST = 65_536

# The steps of the sampler chain that can be moved, in llama.cpp's order; biases come before them, the draw after.
STEPS = (
    "penalties",
    "dry",
    "top_n_sigma",
    "top_k",
    "typical_p",
    "top_p",
    "min_p",
    "xtc",
    "temperature",
)


def _bounded(default: Any, low: float, high: float) -> Any:
    """Return a field of a dataclass, with both bounds of its values, inclusive."""
    return field(default=default, metadata={"bounds": (low, high)})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of the sampler chain. By default only top-k, top-p, min-p and temperature have an effect.

    Attributes:
        seed: of the random generator; None draws a new one for each answer, reported in its stats.
        temperature: logits are divided by it; 0 is greedy.
        temperature_range: dynamic temperature, +- this much by entropy; 0 is off.
        temperature_exponent: maps entropy to dynamic temperature.
        top_k: keep the k most likely; 0 is off.
        top_p: keep the shortest prefix whose probability reaches p; 1 is off.
        min_p: keep tokens at least min_p times as likely as the most likely; 0 is off.
        typical_p: locally typical sampling; 1 is off.
        top_n_sigma: keep logits within n standard deviations of the maximum; <= 0 is off.
        xtc_probability: chance of removing all but the least likely of the tokens over the threshold; 0 is off.
        xtc_threshold: probability from which XTC counts a token; over 0.5 is off.
        repeat_last_n: number of last tokens (prompt included) that the three penalties below look at; 0 is off.
        repeat_penalty: divides positive and multiplies negative logits of tokens seen; 1 is off.
        frequency_penalty: subtracted once per occurrence; 0 is off.
        presence_penalty: subtracted once if the token occurred; 0 is off.
        dry_multiplier: strength of the DRY penalty on extending a repeated sequence; 0 is off.
        dry_base: factor of the DRY penalty per token of repeated length.
        dry_allowed_length: repeats up to this length are free.
        dry_last_n: number of last tokens that DRY looks at; 0 is off.
        dry_breakers: texts that end a repeat.
        mirostat: 1 or 2 replaces every truncating sampler by mirostat; 0 is off.
        mirostat_tau: target surprise, in bits.
        mirostat_eta: learning rate.
        logit_bias: (token id, added logit) pairs; -inf bans a token.
        order: of the chain's steps, names of STEPS; a missing one is off, except temperature if that is 0. Mirostat has
            its own.
        watermark: see llmrun.protocol.watermark.read_watermark(); "" is none. Applied after all steps.
        watermark_key: secret that marks the answer and detects the mark.
    """

    seed: int | None = _bounded(None, 0, 2**32 - 1)
    temperature: float = _bounded(0.8, 0.0, 100.0)
    temperature_range: float = _bounded(0.0, 0.0, 100.0)
    temperature_exponent: float = _bounded(1.0, 0.0, 100.0)
    top_k: int = _bounded(40, 0, _INT32_MAX)
    top_p: float = _bounded(0.95, 0.0, 1.0)
    min_p: float = _bounded(0.05, 0.0, 1.0)
    typical_p: float = _bounded(1.0, 0.0, 1.0)
    top_n_sigma: float = _bounded(-1.0, -1.0, 100.0)
    xtc_probability: float = _bounded(0.0, 0.0, 1.0)
    xtc_threshold: float = _bounded(0.10, 0.0, 1.0)
    repeat_last_n: int = _bounded(64, 0, _MOST_LAST)
    repeat_penalty: float = _bounded(1.0, 0.01, 100.0)
    frequency_penalty: float = _bounded(0.0, -100.0, 100.0)
    presence_penalty: float = _bounded(0.0, -100.0, 100.0)
    dry_multiplier: float = _bounded(0.0, 0.0, 100.0)
    dry_base: float = _bounded(1.75, 0.0, 100.0)
    dry_allowed_length: int = _bounded(2, 0, 65_536)
    dry_last_n: int = _bounded(64, 0, _MOST_LAST)
    dry_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    mirostat: int = _bounded(0, 0, 2)
    mirostat_tau: float = _bounded(5.0, 0.0, 100.0)
    mirostat_eta: float = _bounded(0.1, 0.0, 1.0)
    logit_bias: tuple[tuple[int, float], ...] = ()
    order: tuple[str, ...] = STEPS
    watermark: str = ""
    watermark_key: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        for name in BOUNDS:
            value = check_parameter(name, getattr(self, name))
            object.__setattr__(self, name, value)
        check_fields(self)
        check_parameter("logit_bias", self.logit_bias)
        check_parameter("order", self.order)
        if self.temperature <= 0 and "temperature" not in self.order:  # means greedy, with any order
            object.__setattr__(self, "order", (*self.order, "temperature"))
        if self.watermark:
            self._check_watermark()

    def _check_watermark(self) -> None:
        check_parameter("watermark", self.watermark)
        if not self.watermark_key:
            raise UsageError("a watermark needs a key", hint="--watermark-key KEY; in a chat, /set watermark-key KEY")
        if self.mirostat:
            raise UsageError("mirostat and a watermark exclude each other", hint="give one of them")


def check_parameter(name: str, value: Any, label: str = "") -> Any:
    """Return the value of a sampling parameter, whole numbers as int.

    Args:
        name: of a field of SamplingParams.
        value: None is allowed for the seed.
        label: the user's name for it, e.g. the flag; by default `name`.

    Raises:
        UsageError: the value is of the wrong type, or out of its bounds.
    """
    label = label or name
    if name == "logit_bias":
        _check_biases(value, label)
    elif name == "order":
        _check_order(value, label)
    elif name == "watermark" and value:
        from llmrun.protocol.watermark import read_watermark

        read_watermark(value, label)
    if name not in BOUNDS or (value is None and name == "seed"):
        return value
    if value == -1 and name in _MINUS_ONE:
        return _MINUS_ONE[name]
    low, high = BOUNDS[name]
    whole = isinstance(high, int)
    is_number = NUMBER.fits(value)
    kind = "a whole number " if whole else "" if is_number else "a number "
    why = f"must be {kind}between {low:g} and {high:.12g}"
    if not is_number:
        raise UsageError(f"invalid {label} {brief(value)}", why=why)
    # A comparison with NaN is false.
    if not low <= value <= high or (whole and value != int(value)):
        raise UsageError(f"invalid {label} {value:.12g}", why=why)
    return int(value) if whole else value if isinstance(value, int) else float(value)


def _check_biases(biases: tuple[tuple[int, float], ...], label: str) -> None:
    for token, bias in biases:
        if token < 0 or math.isnan(bias) or bias == math.inf:
            raise UsageError(
                f"invalid {label} of token {token}: {bias}",
                why="a token id is not negative, a bias is a number or -inf",
            )


def _check_order(order: tuple[str, ...], label: str) -> None:
    for step in order:
        if step not in STEPS or order.count(step) > 1:
            raise UsageError(
                f"{label}: {step!r} {'comes twice' if step in STEPS else 'is not a step of the sampler'}",
                why=f"the steps are {', '.join(STEPS)}, each once at most",
            )


BOUNDS: dict[str, tuple[float, float]] = {
    each.name: each.metadata["bounds"] for each in fields(SamplingParams) if each.metadata
}
"""Both bounds of every numeric parameter, inclusive."""
_MINUS_ONE = {"top_k": 0, "repeat_last_n": _MOST_LAST, "dry_last_n": _MOST_LAST}
"""What -1 means, as in other programs: off, or the whole context."""
DEFAULTS = SamplingParams()
SERVER = "server"
"""Origin of a parameter that a remote server chooses, and does not report."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of an answer, besides the model's end token."""

    max_tokens: int | None = None  # None is up to the end of the context window
    stop: tuple[str, ...] = ()  # texts that end the answer, and are not part of it
    # In any case; before a phrase is completed, the model goes back to its first token and takes another one.
    ban: tuple[str, ...] = ()
    ignores_end: bool = False  # never sample the model's end token

    def __post_init__(self) -> None:
        check_fields(self)
        check_limits(self.max_tokens, self.stop, self.ban)


def check_limits(
    max_tokens: int | None,
    stop: Sequence[str],
    ban: Sequence[str],
    labels: tuple[str, str, str] = ("max_tokens", "stop", "ban"),
) -> None:
    """Raise UsageError if a field of Limits is out of its bounds.

    Args:
        labels: the user's names for the fields, e.g. flags.
    """
    require_within(labels[0], max_tokens, (1, MOST_TOKENS))
    for label, texts, limit in ((labels[1], stop, 64), (labels[2], ban, 1024)):
        if len(texts) > limit or any(not text or len(text) > 1024 for text in texts):
            why = f"there may be {limit:,} texts at most, each of 1 to 1,024 characters"
            raise UsageError(f"invalid {label} {brief(texts)}", why=why)


def resolve_sampling(
    *layers: tuple[str, Mapping[str, Any]],
) -> tuple[SamplingParams, dict[str, str]]:
    """Merge layers of settings; the first layer with a value wins.

    Args:
        layers: (origin, values) pairs, strongest first, e.g. ("flag", {"top_k": 20}), ("model", {...}).

    Returns:
        The parameters, and the origin of each field's value ("default" if no layer has it).

    Raises:
        UsageError: a value is out of bounds or its name unknown.
    """
    known = {field.name for field in fields(SamplingParams)}
    values: dict[str, Any] = {}
    origins = dict.fromkeys(known, "default")
    for origin, layer in reversed(layers):
        for name, value in layer.items():
            if name not in known:
                raise UsageError(f"there is no sampling parameter called {name!r}")
            values[name] = value
            origins[name] = origin
    return replace(DEFAULTS, **values), origins
