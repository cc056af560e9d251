"""The sampler's flags, one for each field of SamplingParams, with parsing and display of their values."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from llmrun.errors import UsageError, did_you_mean
from llmrun.protocol.params import DEFAULTS, SERVER, SamplingParams, check_parameter

# SamplingParams field -> flag, help.
FLAGS: dict[str, tuple[str, str]] = {
    "temperature": ("--temp", "Temperature; 0 is greedy."),
    "seed": ("--seed", "Seed of the random generator."),
    "top_k": ("--top-k", "Keep the k likeliest tokens; 0 is off."),
    "top_p": ("--top-p", "Keep the likeliest tokens until their probabilities add up to this; 1 is off."),
    "min_p": ("--min-p", "Keep tokens with at least this fraction of the top token's probability; 0 is off."),
    "typical_p": ("--typical-p", "Locally typical sampling; 1 is off."),
    "top_n_sigma": ("--top-n-sigma", "Keep logits within n standard deviations of the highest; <= 0 is off."),
    "xtc_probability": ("--xtc-probability", "Probability of removing the likeliest tokens; 0 is off."),
    "xtc_threshold": ("--xtc-threshold", "Minimum probability of a token that XTC removes."),
    "repeat_penalty": ("--repeat-penalty", "Divide the logits of recent tokens by this; 1 is off."),
    "repeat_last_n": ("--repeat-last-n", "Number of recent tokens that penalties apply to; 0 is off."),
    "frequency_penalty": (
        "--frequency-penalty",
        "Subtract this from a token's logit for each recent occurrence; 0 is off.",
    ),
    "presence_penalty": ("--presence-penalty", "Subtract this once from the logit of each recent token; 0 is off."),
    "dry_multiplier": ("--dry-multiplier", "Strength of the DRY penalty on repeated sequences; 0 is off."),
    "dry_base": ("--dry-base", "Growth of the DRY penalty with the length of the repeat."),
    "dry_allowed_length": ("--dry-allowed-length", "Longest repeat without a DRY penalty."),
    "dry_last_n": ("--dry-last-n", "Number of recent tokens that DRY searches; 0 is off."),
    "dry_breakers": ("--dry-breaker", "Text that ends a repeat for DRY; may be repeated."),
    "temperature_range": ("--dynatemp-range", "Vary the temperature by up to +- this much, by entropy; 0 is off."),
    "temperature_exponent": ("--dynatemp-exp", "Exponent that maps entropy to the dynamic temperature."),
    "mirostat": ("--mirostat", "Use Mirostat 1 or 2 instead of the truncating samplers; 0 is off."),
    "mirostat_tau": ("--mirostat-tau", "Mirostat's target surprise, in bits."),
    "mirostat_eta": ("--mirostat-eta", "Mirostat's learning rate."),
    "logit_bias": ("--logit-bias", "TOKEN=BIAS: add a bias to a token's logit; -inf bans the token; may be repeated."),
    "order": ("--sampler-order", "Steps of the sampler chain in order, separated by commas; a missing step is off."),
    "watermark": ("--watermark", "Watermark the answer with a green list; see llmrun help watermarks."),
    "watermark_key": (
        "--watermark-key",
        "Secret key of the watermark; @FILE reads it from a file. Default: $LLMRUN_WATERMARK_KEY.",
    ),
}
PRESET_ORIGINS: dict[str, str] = {}
USED_BY_BEAMS = frozenset({"repeat_penalty", "repeat_last_n", "frequency_penalty", "presence_penalty", "logit_bias"})

"""Parameter that the command line leaves out -> origin of its value: the environment, or the model's preset."""
_KEY_VARIABLE = "LLMRUN_WATERMARK_KEY"
_REPEATED = {"dry_breakers", "logit_bias"}
_TEXTS = {"order", "watermark", "watermark_key"}
_INTEGERS = {"seed", "top_k", "repeat_last_n", "dry_allowed_length", "dry_last_n", "mirostat"}


def sampling_flags(**options: Any) -> dict[str, Any]:
    """Collect the sampling options as typed, in the types of SamplingParams.

    Missing options are left out, so that the model's own recommendation applies.

    Raises:
        UsageError: a value is out of bounds or malformed; names the flag.
    """
    given = {name: value for name, value in options.items() if value is not None and value != []}
    if given.get("watermark"):
        given["watermark_key"] = read_key(given.get("watermark_key"), FLAGS["watermark_key"][0])
    return {name: _read(name, value, FLAGS[name][0]) for name, value in given.items()}


def _read(name: str, value: Any, label: str) -> Any:
    """Parse a parameter's value to the type in SamplingParams. label is its name in errors."""
    if name == "dry_breakers":
        value = tuple(value)
    elif name == "logit_bias":
        value = tuple(_bias(text, label) for text in value)
    elif name == "order":
        value = tuple(step for part in re.split("[,;]", value) if (step := part.strip()))
    elif name == "watermark_key":
        value = read_key(value, label)
    return check_parameter(name, value, label)


def read_key(text: str | None, label: str) -> str:
    """Return a watermark key: the text, the content of the file after an @, or the environment variable.

    Raises:
        UsageError: the file can't be read, or there is no key.
    """
    text = os.environ.get(_KEY_VARIABLE, "") if text is None else text
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise UsageError(f"{label} {text} can't be read", why=why) from None
    if not text:
        raise UsageError("a watermark needs a key", hint=f"{label} KEY, or {_KEY_VARIABLE}")
    return text


def _sampling_parameter(name: str) -> inspect.Parameter:
    flag, text = FLAGS[name]
    kind: Any = list[str] if name in _REPEATED else int if name in _INTEGERS else str if name in _TEXTS else float
    shown = shown_value(name, getattr(DEFAULTS, name))
    names = [flag, "--temperature"] if name == "temperature" else [flag]
    note = f" Default: {shown}." if shown not in ("", None) else ""
    option = typer.Option(*names, help=f"{text}{note}", rich_help_panel="Sampling", show_default=False)
    annotation: Any = Annotated[kind | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def read_value(name: str, text: str, before: str = "") -> tuple[str, Any]:
    """Parse a sampling parameter that is set within a chat; return its field and its value.

    Args:
        name: that of the field, or of its flag with or without dashes.
        text: the value.
        before: text in errors before the name.

    Raises:
        UsageError: the parameter does not exist, or its value is invalid.
    """
    spelled = name.lstrip("-").replace("_", "-").lower()
    known = {flag.lstrip("-"): field for field, (flag, _) in FLAGS.items()}
    known |= {field.replace("_", "-"): field for field in FLAGS}
    if spelled not in known:
        hint = did_you_mean(spelled, known, "/set lists all")
        raise UsageError(f"there is no sampling parameter called {name}", hint=hint)
    field, label = known[spelled], f"{before}{spelled}"
    if not text:
        raise UsageError(f"{label} needs a value", hint="/set temp 0.5; /set lists all")
    value: Any = text
    try:
        if field in _REPEATED:
            value = text.split()
        elif field not in _TEXTS:
            value = int(text) if field in _INTEGERS else float(text)
    except ValueError:
        raise UsageError(f"invalid {label} {text}", why="must be a number") from None
    return field, _read(field, value, label)


def shown_value(name: str, value: Any) -> str:
    """Return a sampling parameter's value in the syntax of its flag."""
    if name == "seed":
        return "random" if value is None else str(value)
    if name == "order":
        return ", ".join(value)  # a table can wrap it
    if name == "watermark_key" and value:
        from llmrun.protocol.watermark import fingerprint

        return fingerprint(value)
    if name == "logit_bias":
        return " ".join(f"{token}={bias:g}" for token, bias in value)
    if name == "dry_breakers":
        return " ".join(map(repr, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def sampling_rows(params: SamplingParams, origins: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Return every sampling parameter as (flag, value, origin of the value); the values of a server are unknown."""
    return [
        (
            flag,
            "" if origins[name] == SERVER else shown_value(name, getattr(params, name)),
            PRESET_ORIGINS.get(name, "flag") if origins[name] == "flag" else origins[name],
        )
        for name, (flag, _) in FLAGS.items()
    ]


def _bias(text: str, label: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise UsageError(f"invalid {label} {text!r}", hint=f"{label} 2=-inf") from None


def watermark_flags(**options: Any) -> dict[str, Any]:
    """Collect the watermark options of a server; see sampling_flags().

    Raises:
        UsageError: a value is malformed, or there is no key.
    """
    return sampling_flags(**options)


# What with_options reads: one parameter for each flag.
vars(sampling_flags)["__signature__"] = inspect.Signature([_sampling_parameter(name) for name in FLAGS])
vars(watermark_flags)["__signature__"] = inspect.Signature(
    [_sampling_parameter(name) for name in ("watermark", "watermark_key")]
)
