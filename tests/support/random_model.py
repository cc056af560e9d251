"""A small llama of random weights, whose heads have 64 elements as GPU kernels want them."""

from __future__ import annotations

from math import prod
from pathlib import Path

import numpy as np

from llmrun.gguf.reader import read_header
from support.gguf_writer import TensorSpec, gguf, runnable_metadata

_F32, _F32_BYTES, _HEAD = 0, 4, 64
_N_VOCAB = 261


def write_random_model(
    path: Path,
    *,
    layers: int = 6,
    width: int = 256,
    n_ctx: int = 2048,
    head: int = _HEAD,
    inner: int = 0,
    experts: int = 0,
) -> Path:
    """Write the model; weights are the same every time.

    Args:
        inner: width of the feed-forward part; 0 is four times the model's.
        experts: of each layer, two of which a token uses; 0 for a dense model.
    """
    inner, kv = inner or 4 * width, width // 2
    shapes = {"token_embd.weight": (width, _N_VOCAB), "output_norm.weight": (width,)}
    for layer in range(layers):
        block = {
            "attn_norm": (width,), "attn_q": (width, width), "attn_k": (width, kv), "attn_v": (width, kv),
            "attn_output": (width, width), "ffn_norm": (width,), "ffn_gate": (width, inner), "ffn_up": (width, inner),
            "ffn_down": (inner, width),
        }  # fmt: skip
        if experts:
            wide = {name: (*block.pop(name), experts) for name in ("ffn_gate", "ffn_up", "ffn_down")}
            block |= {f"{name}_exps": shape for name, shape in wide.items()} | {"ffn_gate_inp": (width, experts)}
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in block.items()}
    changes = {
        "llama.block_count": layers, "llama.context_length": n_ctx, "llama.embedding_length": width,
        "llama.feed_forward_length": inner, "llama.attention.head_count": width // head,
        "llama.attention.head_count_kv": kv // head, "llama.rope.dimension_count": head,
    }  # fmt: skip
    if experts:
        changes |= {"llama.expert_count": experts, "llama.expert_used_count": 2}
    tensors = [TensorSpec(name, shape, _F32, prod(shape) * _F32_BYTES) for name, shape in shapes.items()]
    path.write_bytes(gguf(runnable_metadata(**changes), tensors))
    generator = np.random.default_rng(7)
    data = np.memmap(path, np.uint8, "r+")
    for tensor in read_header(path).tensors:
        values = generator.standard_normal(tensor.n_elements, np.float32) / np.sqrt(tensor.shape[0], dtype=np.float32)
        values = np.ones_like(values) if "norm" in tensor.name else values
        data[tensor.offset : tensor.offset + tensor.n_bytes] = values.view(np.uint8)
    data.flush()
    return path
