"""A small llama of random weights, whose heads have 64 elements as GPU kernels want them."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from llmrun.gguf.reader import read_header
from support.gguf_writer import TensorSpec, gguf, runnable_metadata

_HEAD, _N_VOCAB = 64, 261


def write_random_model(
    path: Path,
    *,
    layers: int = 6,
    width: int = 256,
    n_ctx: int = 2048,
    head: int = _HEAD,
    inner: int = 0,
    experts: int = 0,
    template: str = "",
) -> Path:
    """Write the model; weights are the same every time.

    Args:
        inner: width of the feed-forward part; 0 is four times the model's.
        experts: of each layer, two of which a token uses; 0 for a dense model.
        template: of chats; by default all contents one after the other.
    """
    inner, kv = inner or 4 * width, width // 2
    shapes = llama_shapes(layers, width, kv, inner, _N_VOCAB)
    for layer in range(layers if experts else 0):
        for name in ("ffn_gate", "ffn_up", "ffn_down"):
            shapes[f"blk.{layer}.{name}_exps.weight"] = (*shapes.pop(f"blk.{layer}.{name}.weight"), experts)
        shapes[f"blk.{layer}.ffn_gate_inp.weight"] = (width, experts)
    changes: dict[str, Any] = {
        "llama.block_count": layers, "llama.context_length": n_ctx, "llama.embedding_length": width,
        "llama.feed_forward_length": inner, "llama.attention.head_count": width // head,
        "llama.attention.head_count_kv": kv // head, "llama.rope.dimension_count": head,
    }  # fmt: skip
    if experts:
        changes |= {"llama.expert_count": experts, "llama.expert_used_count": 2}
    if template:
        changes["tokenizer.chat_template"] = template
    return write_weights(path, runnable_metadata(**changes), shapes, seed=7)


def llama_shapes(layers: int, width: int, kv: int, inner: int, n_vocab: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a dense llama's tensors, by name."""
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (width, n_vocab), "output_norm.weight": (width,)}
    for layer in range(layers):
        block = {
            "attn_norm": (width,), "attn_q": (width, width), "attn_k": (width, kv), "attn_v": (width, kv),
            "attn_output": (width, width), "ffn_norm": (width,), "ffn_gate": (width, inner), "ffn_up": (width, inner),
            "ffn_down": (inner, width),
        }  # fmt: skip
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in block.items()}
    return shapes


def write_weights(path: Path, metadata: dict[str, Any], shapes: dict[str, tuple[int, ...]], *, seed: int) -> Path:
    """Write a model of random weights in F32, the same for a seed every time."""
    path.write_bytes(gguf(metadata, [TensorSpec(name, shape, 0, 4 * prod(shape)) for name, shape in shapes.items()]))
    generator = np.random.default_rng(seed)
    data = np.memmap(path, np.uint8, "r+")
    for tensor in read_header(path).tensors:
        values = generator.standard_normal(tensor.n_elements, np.float32) / np.sqrt(tensor.shape[0], dtype=np.float32)
        values = np.ones_like(values) if "norm" in tensor.name else values
        data[tensor.offset : tensor.offset + tensor.n_bytes] = values.view(np.uint8)
    data.flush()
    return path
