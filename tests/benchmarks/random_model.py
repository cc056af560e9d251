"""Makes model files of any shape and quantization with random weights, in seconds.

Not a benchmark itself. A weight matrix repeats a few rows that ggml quantized: speed and memory depend on shapes and
types alone; only logits differ from token to token. The vocabulary is SentencePiece's with a token for every number:
prompts of any length can be made.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter

from llmrun.engine.llama.library import import_llama

_ROWS = 64  # different ones of a matrix
_TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"


@dataclass(frozen=True)
class DeltaNet:
    """The recurrent layers of a qwen35, a hybrid with one prediction head: gated delta nets."""

    interval: int  # one of so many layers has full attention
    state: int  # length of keys and values
    key_heads: int
    value_heads: int
    kernel: int = 4  # of the convolution

    @property
    def inner(self) -> int:
        return self.state * self.value_heads

    @property
    def convolved(self) -> int:
        return 2 * self.state * self.key_heads + self.inner


@dataclass(frozen=True)
class Shape:
    """A llama's dimensions, with experts a qwen3moe's, with recurrent layers a qwen35's.

    feed_forward (of one expert, if there are any), width and key heads times head length should be multiples of 256.
    """

    width: int
    layers: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_length: int
    vocabulary: int
    tied: bool = False
    experts: int = 0
    experts_used: int = 0
    recurrent: DeltaNet | None = None

    @property
    def n_all(self) -> int:
        """Layers with those of prediction heads."""
        return self.layers + (self.recurrent is not None)

    def is_recurrent(self, layer: int) -> bool:
        return self.recurrent is not None and layer < self.layers and (layer + 1) % self.recurrent.interval > 0


HYBRID_4B = Shape(2560, 32, 9216, 16, 4, 256, 248_320, tied=True, recurrent=DeltaNet(4, 128, 16, 32))
"""Qwen3.5-4B's."""


def write_model(path: Path, shape: Shape, type_of: Callable[[str], str], n_ctx: int = 32_768) -> Path:
    """Write a model file.

    Args:
        type_of: gives the ggml type of a matrix by its name, e.g. "ffn_down.weight" or "output.weight".
    """
    arch = "qwen3moe" if shape.experts else "qwen35" if shape.recurrent else "llama"
    writer = GGUFWriter(path, arch)
    writer.add_name(path.stem)
    writer.add_block_count(shape.n_all)
    writer.add_context_length(n_ctx)
    writer.add_embedding_length(shape.width)
    writer.add_feed_forward_length(shape.feed_forward)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.experts_used)
        writer.add_expert_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_length)
    writer.add_value_length(shape.head_length)
    if shape.recurrent is None:
        writer.add_rope_dimension_count(shape.head_length)
    else:
        _add_recurrent(writer, shape.recurrent)
    writer.add_layer_norm_rms_eps(1e-5)
    _add_vocabulary(writer, shape.vocabulary)
    for name, columns, rows in _matrices(shape):
        kind = type_of(name.split(".", 2)[-1] if name.startswith("blk.") else name)
        make = _mixed if name in ("output.weight", "token_embd.weight") else _matrix
        data = make(kind, columns, rows)
        if "_exps" in name:
            data = np.tile(data, (shape.experts, 1, 1))
        writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType[kind])
    for name, length in _norms(shape):
        writer.add_tensor(name, np.ones(length, np.float32))
    for layer in filter(shape.is_recurrent, range(shape.layers)):
        net = shape.recurrent
        assert net is not None
        writer.add_tensor(f"blk.{layer}.ssm_a", -np.ones(net.value_heads, np.float32))
        writer.add_tensor(f"blk.{layer}.ssm_dt.bias", np.zeros(net.value_heads, np.float32))
        writer.add_tensor(f"blk.{layer}.ssm_conv1d.weight", np.full((net.convolved, net.kernel), 0.25, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_vocabulary(writer: GGUFWriter, size: int) -> None:
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    words = [f"\u2581{number}" for number in range(size - 259)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *bytes_, *words])
    writer.add_token_scores([0.0] * 259 + [-1.0] * len(words))
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * len(words)])
    writer.add_chat_template(_TEMPLATE)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _add_recurrent(writer: GGUFWriter, net: DeltaNet) -> None:
    writer.add_uint32("qwen35.nextn_predict_layers", 1)
    writer.add_uint32("qwen35.full_attention_interval", net.interval)
    writer.add_rope_dimension_count(64)
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_ssm_conv_kernel(net.kernel)
    writer.add_ssm_inner_size(net.inner)
    writer.add_ssm_state_size(net.state)
    writer.add_ssm_time_step_rank(net.value_heads)
    writer.add_ssm_group_count(net.key_heads)


def _matrices(shape: Shape) -> Iterator[tuple[str, int, int]]:
    """Name, columns and rows; of experts, one's."""
    queries, keys = shape.heads * shape.head_length, shape.kv_heads * shape.head_length
    experts = "_exps" if shape.experts else ""
    yield "token_embd.weight", shape.width, shape.vocabulary
    if not shape.tied:
        yield "output.weight", shape.width, shape.vocabulary
    for layer in range(shape.n_all):
        net = shape.recurrent
        if net is not None and shape.is_recurrent(layer):
            mixing = [
                ("attn_qkv", shape.width, net.convolved),
                ("attn_gate", shape.width, net.inner),
                ("ssm_beta", shape.width, net.value_heads),
                ("ssm_alpha", shape.width, net.value_heads),
                ("ssm_out", net.inner, shape.width),
            ]
        else:
            mixing = [
                ("attn_q", shape.width, queries * (1 if net is None else 2)),  # with a gate
                ("attn_k", shape.width, keys),
                ("attn_v", shape.width, keys),
                ("attn_output", queries, shape.width),
            ]
        if layer >= shape.layers:
            mixing.append(("nextn.eh_proj", 2 * shape.width, shape.width))
        for name, columns, rows in (
            *mixing,
            *([("ffn_gate_inp", shape.width, shape.experts)] if shape.experts else []),
            (f"ffn_gate{experts}", shape.width, shape.feed_forward),
            (f"ffn_up{experts}", shape.width, shape.feed_forward),
            (f"ffn_down{experts}", shape.feed_forward, shape.width),
        ):
            yield f"blk.{layer}.{name}.weight", columns, rows


def _norms(shape: Shape) -> Iterator[tuple[str, int]]:
    """Name and length."""
    yield "output_norm.weight", shape.width
    for layer in range(shape.n_all):
        yield f"blk.{layer}.attn_norm.weight", shape.width
        yield f"blk.{layer}.{'post_attention_norm' if shape.recurrent else 'ffn_norm'}.weight", shape.width
        if layer >= shape.layers:
            for name in ("enorm", "hnorm", "shared_head_norm"):
                yield f"blk.{layer}.nextn.{name}.weight", shape.width
        if shape.recurrent and shape.is_recurrent(layer):
            yield f"blk.{layer}.ssm_norm.weight", shape.recurrent.state
        elif shape.experts or shape.recurrent:
            yield f"blk.{layer}.attn_q_norm.weight", shape.head_length
            yield f"blk.{layer}.attn_k_norm.weight", shape.head_length


def _matrix(kind: str, columns: int, rows: int) -> Any:
    """The rows again and again."""
    return np.resize(_rows(kind, columns), (rows, _rows(kind, columns).shape[1]))


def _mixed(kind: str, columns: int, rows: int) -> Any:
    """Rows that differ: each block is one of a random row. Logits that repeat would slow the sampler fivefold."""
    some = _rows(kind, columns)
    n_blocks = columns // GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0]
    blocks = some.reshape(_ROWS, n_blocks, -1)
    chosen = np.random.default_rng(2).integers(0, _ROWS, (rows, n_blocks))
    return blocks[chosen, np.arange(n_blocks)].reshape(rows, -1)


@cache
def _rows(kind: str, columns: int) -> Any:
    """Some random rows, quantized by ggml itself."""
    values = np.random.default_rng(1).normal(0.0, 0.02, (_ROWS, columns)).astype(np.float32)
    library = import_llama()._lib
    number = int(GGMLQuantizationType[kind])
    library.ggml_row_size.restype = ctypes.c_size_t
    row = library.ggml_row_size(ctypes.c_int(number), ctypes.c_int64(columns))
    out = np.zeros((_ROWS, row), np.uint8)
    quantize = library.ggml_quantize_chunk
    quantize.restype = ctypes.c_size_t
    quantize.argtypes = (ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p)
    weights = np.ones(columns, np.float32)  # importance, which some types can't do without
    quantize(number, values.ctypes.data, out.ctypes.data, 0, _ROWS, columns, weights.ctypes.data)
    if kind in ("F16", "F32"):
        return out.view(np.float16 if kind == "F16" else np.float32)
    return out
