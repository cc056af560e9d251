"""Upper bounds of the numbers in config.json, set by the tensors and by llama.cpp.

A number is checked before anything is allocated or repeated by it, so a hostile one costs neither memory nor time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmrun.convert.sources import TensorSource
from llmrun.gguf.rules import MAX_EXPERTS, MAX_LAYERS, MAX_VOCABULARY

MAX_WIDTH = 1 << 20


@dataclass(frozen=True, slots=True)
class Bounds:
    """The largest numbers; the defaults are for a config.json without tensors.

    Attributes:
        n_layers: each has a tensor at least.
        n_experts: of a layer.
        width: of vectors, heads, and the number of heads.
        n_tokens: rows of the embeddings.
    """

    n_layers: int = MAX_LAYERS
    n_experts: int = MAX_EXPERTS
    width: int = MAX_WIDTH
    n_tokens: int = MAX_VOCABULARY


def bounds_of(sources: Mapping[str, TensorSource], n_tokens: int) -> Bounds:
    """Return the bounds set by the number of tensors and by the longest dimension of a tensor that is not empty."""
    longest = max((max(source.shape) for source in sources.values() if all(source.shape)), default=1)
    return Bounds(min(MAX_LAYERS, len(sources)), min(MAX_EXPERTS, max(len(sources), longest)), longest, n_tokens)
