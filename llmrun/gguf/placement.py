"""Shares of a model's weights that llama.cpp puts on a GPU with each layer.

Owns the names of the tensors that stay in RAM; must not know devices.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from llmrun.gguf.kv_layers import MAX_LAYERS
from llmrun.gguf.metadata import ModelMetadata

_BLOCK = re.compile(r"blk\.(\d+)\.")
# llama-arch.cpp: LLM_TENSOR_LAYER_INPUT. The input is always looked up by the processor.
_INPUT = ("token_embd.", "token_types.", "position_embd.", "per_layer_token_embd.", "masked_embd_")
INPUT_LAYER = -1
_EMBEDDINGS, _OUTPUT, _OUTPUT_NORM = "token_embd.weight", "output.weight", "output_norm.weight"


@dataclass(frozen=True, slots=True)
class LayerShares:
    """Fractions of all weights.

    Attributes:
        weights: of each layer, the output last.
        copied: of the output's weights, the part that is in RAM too: token embeddings that are also its matrix.
        largest: the largest matrix of a layer.
        tensors: name -> layer, INPUT_LAYER for those always in RAM, and share of all weights.
    """

    weights: tuple[float, ...]
    copied: float = 0.0
    largest: float = 0.0
    tensors: Mapping[str, tuple[int, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, layers: int, tensors: Mapping[str, int]) -> LayerShares:
        """Return the shares of a model file.

        Args:
            layers: number of blocks.
            tensors: name -> bytes.
        """
        layers, total = min(layers, MAX_LAYERS), max(sum(tensors.values()), 1)
        sizes, largest = [0] * (layers + 1), 0
        places: dict[str, tuple[int, float]] = {}
        for name, size in tensors.items():
            block = _BLOCK.match(name)
            layer = layers if block is None else min(int(block[1]), layers)
            if block is not None:
                largest = max(largest, size)
            elif name.startswith(_INPUT):
                layer = INPUT_LAYER
            if layer != INPUT_LAYER:
                sizes[layer] += size
            places[name] = layer, size / total
        is_tied = _OUTPUT_NORM in tensors and _OUTPUT not in tensors
        copied = tensors.get(_EMBEDDINGS, 0) if is_tied else 0
        sizes[layers] += copied
        weights = tuple(size / total for size in sizes)
        return cls(weights, copied / total, largest / total, places)


def most_feed_forward(header: ModelMetadata, experts_used: int | tuple[int, ...]) -> int:
    """Return the width of the widest feed-forward part that one token goes through; 0 if the file does not state it."""
    found = [0]
    for name, times in (("feed_forward_length", 1), ("expert_feed_forward_length", experts_used)):
        widths = header.metadata.get(header.model_key(name))
        factor = times if isinstance(times, int) else max(times, default=0)
        each = widths if isinstance(widths, tuple) else (widths,)
        found += [width * factor for width in each if isinstance(width, int)]
    return max(found)
