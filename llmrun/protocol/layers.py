"""Precedence: settings come in layers, such as the command line, a preset and a model's file. Pure.

The command line, a server and the sampler resolve theirs here, so that each value has the origin that is shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FLAG = "flag"
Layer = Mapping[str, tuple[Any, str]]
"""Field -> its value and the origin of it, as users read it: "flag", "environment", "preset pirate"."""


def layer(origin: str, values: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Return values of one origin as a layer."""
    return {name: (value, origin) for name, value in values.items()}


def resolved(*layers: Layer) -> dict[str, tuple[Any, str]]:
    """Return each field's value and origin of the first layer that has it.

    Args:
        layers: strongest first.
    """
    return {name: each for one in reversed(layers) for name, each in one.items()}


def values_of(found: Layer) -> dict[str, Any]:
    return {name: value for name, (value, _) in found.items()}


def origins_of(found: Layer) -> dict[str, str]:
    return {name: origin for name, (_, origin) in found.items()}
