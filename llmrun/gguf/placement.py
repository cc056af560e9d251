"""Shares of a model's weights and KV cache that llama.cpp puts on a GPU with each layer.

Owns the names of the tensors that stay in RAM; must not know devices.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from llmrun.gguf.kv_layers import MAX_LAYERS, KvLayer
from llmrun.gguf.metadata import ModelMetadata

_BLOCK = re.compile(r"blk\.(\d+)\.")
# llama-arch.cpp: LLM_TENSOR_LAYER_INPUT. The input is always looked up by the processor.
_INPUT = ("token_embd.", "token_types.", "position_embd.", "per_layer_token_embd.", "masked_embd_")
_EMBEDDINGS, _OUTPUT, _OUTPUT_NORM = "token_embd.weight", "output.weight", "output_norm.weight"


@dataclass(frozen=True, slots=True)
class LayerShares:
    """Fractions of all weights and of the KV cache.

    Attributes:
        weights: of each layer, the output last.
        kv: of each layer but the output.
        copied: of the output's weights, the part that is in RAM too: token embeddings that are also its matrix.
        largest: the largest matrix of a layer.
    """

    weights: tuple[float, ...]
    kv: tuple[float, ...]
    copied: float = 0.0
    largest: float = 0.0

    @classmethod
    def of(cls, layers: int, tensors: Mapping[str, int], kv_layers: Iterable[KvLayer]) -> LayerShares:
        """Return the shares of a model file.

        Args:
            layers: number of blocks.
            tensors: name -> bytes.
        """
        layers, total = min(layers, MAX_LAYERS), max(sum(tensors.values()), 1)
        sizes, largest = [0] * (layers + 1), 0
        for name, size in tensors.items():
            block = _BLOCK.match(name)
            if block is not None:
                sizes[min(int(block[1]), layers)] += size
                largest = max(largest, size)
            elif not name.startswith(_INPUT):
                sizes[layers] += size
        is_tied = _OUTPUT_NORM in tensors and _OUTPUT not in tensors
        copied = tensors.get(_EMBEDDINGS, 0) if is_tied else 0
        sizes[layers] += copied
        kv = [0] * layers
        for layer in kv_layers:
            kv[layer.layer] = layer.elements
        elements = max(sum(kv), 1)
        weights = tuple(size / total for size in sizes)
        return cls(weights, tuple(each / elements for each in kv), copied / total, largest / total)


def most_feed_forward(header: ModelMetadata, experts_used: int | tuple[int, ...]) -> int:
    """Return the width of the widest feed-forward part that one token goes through; 0 if the file does not state it."""
    found = [0]
    for name, times in (("feed_forward_length", 1), ("expert_feed_forward_length", experts_used)):
        widths = header.metadata.get(header.model_key(name))
        factor = times if isinstance(times, int) else max(times, default=0)
        each = widths if isinstance(widths, tuple) else (widths,)
        found += [width * factor for width in each if isinstance(width, int)]
    return max(found)
