"""The options of the sampler, made from the table of its parameters; parsing and display of their values."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from llmrun.cli.options import option_table
from llmrun.errors import UsageError, did_you_mean
from llmrun.protocol.arguments import BIASES, TEXTS
from llmrun.protocol.layers import FLAG
from llmrun.protocol.params import DEFAULTS, PARAMETERS, SERVER, SamplingParams, check_parameter

_KEY_VARIABLE = "LLMRUN_WATERMARK_KEY"


def sampling_flags(**options: Any) -> dict[str, Any]:
    """Collect the sampling options as typed, in the types of SamplingParams.

    Missing options are left out, so that the model's own recommendation applies.

    Raises:
        UsageError: a value is out of bounds or malformed; names the flag.
    """
    given = {name: value for name, value in options.items() if value is not None and value != []}
    if given.get("watermark"):
        given["watermark_key"] = read_key(given.get("watermark_key"), PARAMETERS["watermark_key"].flag)
    return {name: _read(name, value, PARAMETERS[name].flag) for name, value in given.items()}


def _read(name: str, value: Any, label: str) -> Any:
    """Parse a parameter's value to the type in SamplingParams. label is its name in errors."""
    row = PARAMETERS[name]
    if row.values is BIASES:
        value = tuple(_bias(text, label) for text in value)
    elif row.is_repeated:
        value = tuple(value)
    elif row.values is TEXTS:
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


def _option(name: str) -> Any:
    """Return the annotated type of a sampling parameter's option."""
    row = PARAMETERS[name]
    shown = shown_value(name, getattr(DEFAULTS, name))
    text = f"{row.help} Default: {shown}." if shown else row.help
    flags = filter(None, (row.flag, row.second_flag))
    option = typer.Option(*flags, help=text, rich_help_panel="Sampling", show_default=False)
    type_: Any = list[str] if row.is_repeated else str if row.bounds is None else int if row.is_whole else float
    return Annotated[type_ | None, option]


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
    known = {row.flag.lstrip("-"): field for field, row in PARAMETERS.items()}
    known |= {field.replace("_", "-"): field for field in PARAMETERS}
    if spelled not in known:
        hint = did_you_mean(spelled, known, "/set lists all")
        raise UsageError(f"there is no sampling parameter {name!r}", hint=hint)
    field, label = known[spelled], f"{before}{spelled}"
    if not text:
        raise UsageError(f"{label} needs a value", hint="/set temp 0.5; /set lists all")
    value: Any = text
    try:
        if PARAMETERS[field].is_repeated:
            value = text.split()
        elif PARAMETERS[field].bounds:
            value = int(text) if PARAMETERS[field].is_whole else float(text)
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


def sampling_rows(
    params: SamplingParams, origins: Mapping[str, str], presets: Mapping[str, str] = {}
) -> list[tuple[str, str, str]]:
    """Return every sampling parameter as (flag, value, origin of the value); the values of a server are unknown.

    Args:
        presets: parameters that presets have set instead of flags, with their origins.
    """
    return [
        (
            row.flag,
            "" if origins[name] == SERVER else shown_value(name, getattr(params, name)),
            presets.get(name, FLAG) if origins[name] == FLAG else origins[name],
        )
        for name, row in PARAMETERS.items()
    ]


def _bias(text: str, label: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise UsageError(f"invalid {label} {text!r}", hint=f"{label} 2=-inf") from None


SAMPLING_OPTIONS = option_table({name: _option(name) for name in PARAMETERS}, sampling_flags)
"""All options of the sampler, read by sampling_flags()."""
WATERMARK_OPTIONS = option_table({name: _option(name) for name in ("watermark", "watermark_key")}, sampling_flags)
"""Those of a watermark, for a server."""
