"""Shares of a model's weights and KV cache that llama.cpp puts on a GPU with each layer.

Owns the names of the tensors that stay in RAM; must not know devices.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmrun.gguf.header import Header

_BLOCK = re.compile(r"blk\.(\d+)\.")
# llama-arch.cpp: LLM_TENSOR_LAYER_INPUT. The input is always looked up by the processor.
_INPUT = ("token_embd.", "token_types.", "position_embd.", "per_layer_token_embd.", "masked_embd_")
_OUTPUT, _OUTPUT_NORM = "output.weight", "output_norm.weight"


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
    def of(cls, header: Header) -> LayerShares:
        """Return the shares of a model file."""
        layers, total = header.n_layers, max(header.weight_bytes, 1)
        sizes, largest, names = [0] * (layers + 1), 0, set()
        for tensor in header.tensors:
            names.add(tensor.name)
            block = _BLOCK.match(tensor.name)
            if block is not None:
                sizes[min(int(block[1]), layers)] += tensor.n_bytes
                largest = max(largest, tensor.n_bytes)
            elif not tensor.name.startswith(_INPUT):
                sizes[layers] += tensor.n_bytes
        is_tied = _OUTPUT_NORM in names and _OUTPUT not in names
        embeddings = sum(tensor.n_bytes for tensor in header.tensors if tensor.name == "token_embd.weight")
        copied = embeddings if is_tied else 0
        sizes[layers] += copied
        kv = [0] * layers
        for layer in header.kv_layers:
            kv[layer.layer] = layer.elements
        elements = max(sum(kv), 1)
        return cls(
            tuple(size / total for size in sizes),
            tuple(each / elements for each in kv),
            copied / total,
            largest / total,
        )


def most_feed_forward(header: Header) -> int:
    """Return the width of the widest feed-forward part that one token goes through; 0 if the file does not state it."""
    found = [0]
    for name, times in (("feed_forward_length", 1), ("expert_feed_forward_length", header.n_experts_used)):
        widths = header.metadata.get(header.model_key(name))
        factor = times if isinstance(times, int) else max(times, default=0)
        found += [
            width * factor for width in (widths if isinstance(widths, tuple) else (widths,)) if isinstance(width, int)
        ]
    return max(found)
