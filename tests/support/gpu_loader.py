"""Loads the random model of tests/gpu."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from llmrun.model import Model

if TYPE_CHECKING:
    from pathlib import Path


class Loader(Protocol):
    """Loads a model; closes it after the test.

    Args:
        others: arguments of prepare().
        preferred: fields of LoadPreferences, with the first GPU as the default device.
    """

    def __call__(self, path: Path = ..., *, others: dict[str, Any] | None = ..., **preferred: Any) -> Model: ...


def on_gpus(model: Model) -> tuple[float, float]:
    """Return the bytes that the plan expected on GPUs, and those that llama.cpp allocated there."""
    names = [name for name, _ in model.plan.gpu_bytes]
    return sum(size for _, size in model.plan.gpu_bytes), held(model, names)


def held(model: Model, names: Sequence[str]) -> int:
    """Return the bytes that llama.cpp allocated on devices."""
    return sum(buffer.n_bytes for buffer in model.loaded.buffers if buffer.device in names)
