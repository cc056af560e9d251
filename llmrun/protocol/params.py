"""The table of sampling parameters, their checks and their merging; and the limits of an answer.

Everything that is stated about a parameter stands in its row of SamplingParams: the command line, the settings file,
requests of all protocols, other servers, models' files, the chat page and the engine's check take it from there. What
it does is native/params.hpp and native/stages.cpp. Defaults are llama.cpp's (common/common.h, 0.3.36's vendored copy).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from llmrun.errors import TEXT, UsageError, ValueKind, brief, require, require_within
from llmrun.protocol.arguments import BIASES, NUMBER, TEXTS, check_fields
from llmrun.protocol.arguments import MOST_TOKENS as MOST_TOKENS
from llmrun.protocol.layers import layer, origins_of, resolved, values_of

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


class Slider(NamedTuple):
    """A slider that shows what a step of the sampler does to the candidates of a token, from 0 to `high`."""

    off: float  # the value that changes nothing
    high: float
    step: float


class Parameter(NamedTuple):
    """The description of a field of SamplingParams, besides its name, type and default."""

    flag: str
    help: str
    bounds: tuple[float, float] | None = None  # of a number, inclusive; of a whole number both are ints
    values: ValueKind | None = None  # of anything else
    second_flag: str = ""
    minus_one: int | None = None  # what -1 means, as in other programs: off, or the whole context
    is_repeated: bool = False  # each use of the flag adds an item
    in_preset: bool = True  # the settings file and the environment may set it
    for_beams: bool = False  # a beam search uses it
    servers: Mapping[str, str] = {}  # another server that takes it -> its name there, "" if it is ours
    aliases: tuple[str, ...] = ()  # more names in requests
    card: str = ""  # general.sampling.NAME in a model's file
    label: str = ""  # on the chat page; "" is not shown there
    slider: Slider | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it is a whole number."""
        return self.bounds is not None and isinstance(self.bounds[1], int)


def parameter(
    default: Any,
    flag: str,
    text: str,
    bounds: tuple[float, float] | None = None,
    *,
    is_secret: bool = False,
    **facts: Any,
) -> Any:
    """Return a field of SamplingParams, described as Parameter(); `text` is its help."""
    return field(default=default, repr=not is_secret, metadata={"parameter": Parameter(flag, text, bounds, **facts)})


_LLAMA_SERVER = {"llamacpp": ""}
_LOCAL = {"llamacpp": "", "vllm": ""}
_ALL = {"openai": "", **_LOCAL}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of the sampler chain. By default only top-k, top-p, min-p and temperature have an effect.

    Attributes:
    """

    # None draws a new seed for each answer, reported in its stats.
    seed: int | None = parameter(
        None, "--seed", "Seed of the random generator.", (0, 2**32 - 1),
        servers=_ALL, label="Seed",
    )  # fmt: skip
    temperature: float = parameter(
        0.8, "--temp", "Temperature; 0 is greedy.", (0.0, 100.0), second_flag="--temperature",
        servers=_ALL, card="temp", label="Temperature", slider=Slider(1.0, 2.0, 0.01),
    )  # fmt: skip
    temperature_range: float = parameter(
        0.0, "--dynatemp-range", "Vary the temperature by up to +- this much, by entropy; 0 is off.", (0.0, 100.0),
        servers={"llamacpp": "dynatemp_range"},
    )  # fmt: skip
    temperature_exponent: float = parameter(
        1.0, "--dynatemp-exp", "Exponent that maps entropy to the dynamic temperature.", (0.0, 100.0),
        servers={"llamacpp": "dynatemp_exponent"},
    )  # fmt: skip
    top_k: int = parameter(
        40, "--top-k", "Keep the k likeliest tokens; 0 is off.", (0, _INT32_MAX), minus_one=0,
        servers=_LOCAL, card="top_k", label="Top-k", slider=Slider(0, 200, 1),
    )  # fmt: skip
    top_p: float = parameter(
        0.95, "--top-p", "Keep the likeliest tokens until their probabilities add up to this; 1 is off.", (0.0, 1.0),
        servers=_ALL, card="top_p", label="Top-p", slider=Slider(1.0, 1.0, 0.001),
    )  # fmt: skip
    min_p: float = parameter(
        0.05, "--min-p", "Keep tokens with at least this fraction of the top token's probability; 0 is off.",
        (0.0, 1.0), servers=_LOCAL, card="min_p", label="Min-p", slider=Slider(0.0, 1.0, 0.001),
    )  # fmt: skip
    typical_p: float = parameter(
        1.0, "--typical-p", "Locally typical sampling; 1 is off.", (0.0, 1.0),
        servers=_LLAMA_SERVER, aliases=("typ_p",),
    )  # fmt: skip
    top_n_sigma: float = parameter(
        -1.0, "--top-n-sigma", "Keep logits within n standard deviations of the highest; <= 0 is off.", (-1.0, 100.0),
        servers=_LLAMA_SERVER,
    )  # fmt: skip
    xtc_probability: float = parameter(
        0.0, "--xtc-probability", "Probability of removing the likeliest tokens; 0 is off.", (0.0, 1.0),
        servers=_LLAMA_SERVER, card="xtc_probability",
    )  # fmt: skip
    xtc_threshold: float = parameter(
        0.10, "--xtc-threshold", "Minimum probability of a token that XTC removes.", (0.0, 1.0),
        servers=_LLAMA_SERVER, card="xtc_threshold",
    )  # fmt: skip
    repeat_last_n: int = parameter(
        64, "--repeat-last-n", "Number of recent tokens that penalties apply to; 0 is off.", (0, _MOST_LAST),
        minus_one=_MOST_LAST, for_beams=True, servers=_LLAMA_SERVER, card="penalty_last_n",
    )  # fmt: skip
    repeat_penalty: float = parameter(
        1.0, "--repeat-penalty", "Divide the logits of recent tokens by this; 1 is off.", (0.01, 100.0),
        for_beams=True, card="penalty_repeat", label="Repeat penalty",
        servers={"llamacpp": "", "vllm": "repetition_penalty"},
    )  # fmt: skip
    frequency_penalty: float = parameter(
        0.0, "--frequency-penalty", "Subtract this from a token's logit for each recent occurrence; 0 is off.",
        (-100.0, 100.0), for_beams=True, servers=_ALL,
    )  # fmt: skip
    presence_penalty: float = parameter(
        0.0, "--presence-penalty", "Subtract this once from the logit of each recent token; 0 is off.",
        (-100.0, 100.0), for_beams=True, servers=_ALL,
    )  # fmt: skip
    dry_multiplier: float = parameter(
        0.0, "--dry-multiplier", "Strength of the DRY penalty on repeated sequences; 0 is off.", (0.0, 100.0),
        servers=_LLAMA_SERVER,
    )  # fmt: skip
    dry_base: float = parameter(
        1.75, "--dry-base", "Growth of the DRY penalty with the length of the repeat.", (0.0, 100.0),
        servers=_LLAMA_SERVER,
    )  # fmt: skip
    dry_allowed_length: int = parameter(
        2, "--dry-allowed-length", "Longest repeat without a DRY penalty.", (0, 65_536),
        servers=_LLAMA_SERVER,
    )  # fmt: skip
    dry_last_n: int = parameter(
        64, "--dry-last-n", "Number of recent tokens that DRY searches; 0 is off.", (0, _MOST_LAST),
        minus_one=_MOST_LAST, servers={"llamacpp": "dry_penalty_last_n"},
    )  # fmt: skip
    dry_breakers: tuple[str, ...] = parameter(
        ("\n", ":", '"', "*"), "--dry-breaker", "Text that ends a repeat for DRY; may be repeated.",
        values=TEXTS, is_repeated=True, in_preset=False, servers={"llamacpp": "dry_sequence_breakers"},
    )  # fmt: skip
    mirostat: int = parameter(
        0, "--mirostat", "Use Mirostat 1 or 2 instead of the truncating samplers; 0 is off.", (0, 2),
        servers=_LLAMA_SERVER, card="mirostat",
    )  # fmt: skip
    mirostat_tau: float = parameter(
        5.0, "--mirostat-tau", "Mirostat's target surprise, in bits.", (0.0, 100.0),
        servers=_LLAMA_SERVER, card="mirostat_tau",
    )  # fmt: skip
    mirostat_eta: float = parameter(
        0.1, "--mirostat-eta", "Mirostat's learning rate.", (0.0, 1.0),
        servers=_LLAMA_SERVER, card="mirostat_eta",
    )  # fmt: skip
    # A text stands for each of its tokens.
    logit_bias: tuple[tuple[int | str, float], ...] = parameter(
        (), "--logit-bias", "TOKEN=BIAS: add a bias to a token's logit; -inf bans the token; may be repeated.",
        values=BIASES, is_repeated=True, in_preset=False, for_beams=True, servers=_ALL,
    )  # fmt: skip
    # Names of STEPS; temperature is never missing if it is 0. Mirostat has an order of its own.
    order: tuple[str, ...] = parameter(
        STEPS, "--sampler-order", "Steps of the sampler chain in order, separated by commas; a missing step is off.",
        values=TEXTS, aliases=("samplers",),
    )  # fmt: skip
    # See llmrun.protocol.watermark.read_watermark(); "" is none. Applied after all steps.
    watermark: str = parameter(
        "", "--watermark", "Watermark the answer with a green list; see llmrun help watermarks.",
        values=TEXT, in_preset=False,
    )  # fmt: skip
    watermark_key: str = parameter(
        "", "--watermark-key",
        "Secret key of the watermark; @FILE reads it from a file. Default: $LLMRUN_WATERMARK_KEY.",
        values=TEXT, in_preset=False, is_secret=True,
    )  # fmt: skip

    def __post_init__(self) -> None:
        for name in BOUNDS:
            value = check_parameter(name, getattr(self, name))
            object.__setattr__(self, name, value)
        for name, row in PARAMETERS.items():
            if row.values is not None:
                require(name, getattr(self, name), row.values)
        check_parameter("logit_bias", self.logit_bias)
        check_parameter("order", self.order)
        if self.temperature <= 0 and "temperature" not in self.order:  # means greedy, with any order
            object.__setattr__(self, "order", (*self.order, "temperature"))
        if self.watermark:
            self._check_watermark()

    @property
    def is_repeatable(self) -> bool:
        """Whether the same request is expected to give the same answer again: it has a seed, or is greedy."""
        return self.seed is not None or self.temperature == 0

    def _check_watermark(self) -> None:
        check_parameter("watermark", self.watermark)
        if not self.watermark_key:
            raise UsageError("a watermark needs a key", hint="--watermark-key KEY; in a chat, /set watermark-key KEY")
        if self.mirostat:
            raise UsageError("mirostat and a watermark can't be used together", hint="give one of them")


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
    row = PARAMETERS[name]
    if value == -1 and row.minus_one is not None:
        return row.minus_one
    (low, high), whole = BOUNDS[name], row.is_whole
    is_number = NUMBER.fits(value)
    kind = "a whole number " if whole else "" if is_number else "a number "
    why = f"must be {kind}between {low:g} and {high:.12g}"
    if not is_number:
        raise UsageError(f"invalid {label} {brief(value)}", why=why)
    # A comparison with NaN is false.
    if not low <= value <= high or (whole and value != int(value)):
        raise UsageError(f"invalid {label} {value:.12g}", why=why)
    return int(value) if whole else value if isinstance(value, int) else float(value)


def _check_biases(biases: tuple[tuple[int | str, float], ...], label: str) -> None:
    for token, bias in biases:
        if (isinstance(token, int) and token < 0) or math.isnan(bias) or bias == math.inf:
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


PARAMETERS: dict[str, Parameter] = {row.name: row.metadata["parameter"] for row in fields(SamplingParams)}
BOUNDS = {name: row.bounds for name, row in PARAMETERS.items() if row.bounds is not None}
"""Both bounds of every numeric parameter, inclusive."""
SamplingParams.__doc__ = f"{(SamplingParams.__doc__ or '').rstrip()}\n" + "".join(
    f"        {name}: {row.help}\n" for name, row in PARAMETERS.items()
)
DEFAULTS = SamplingParams()
SERVER = "server"
"""Origin of a parameter that a remote server chooses, and does not report."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of an answer, besides the model's end token."""

    max_tokens: int | None = None  # None is up to the end of the context window
    stop: tuple[str, ...] = ()  # texts that end the answer, and are not part of it; they do not count in the reasoning
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
    found = resolved(*(layer(origin, values) for origin, values in layers))
    if (unknown := next((name for name in found if name not in known), None)) is not None:
        raise UsageError(f"there is no sampling parameter {unknown!r}")
    return replace(DEFAULTS, **values_of(found)), {**dict.fromkeys(known, "default"), **origins_of(found)}
