"""Writes small GGUF files by hand, right ones and wrong ones, for tests.

Knows the format a second time on purpose: a mistake in the reader must not be repeated here by import.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_CODES = {
    U8: "B",
    I8: "b",
    U16: "H",
    I16: "h",
    U32: "I",
    I32: "i",
    F32: "f",
    BOOL: "?",
    U64: "Q",
    I64: "q",
    F64: "d",
}
ALIGNMENT = 32


@dataclass(frozen=True)
class Typed:
    """A value whose GGUF type is not the one its Python type suggests."""

    kind: int
    value: Any


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of zeros. type is ggml's number; offset None is the right one."""

    name: str
    shape: tuple[int, ...]
    type: int = 0
    n_bytes: int = 0
    offset: int | None = None


def string(text: str | bytes) -> bytes:
    """Length and bytes."""
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def value(item: Any) -> bytes:
    """Type and value."""
    if isinstance(item, Typed):
        return struct.pack("<I", item.kind) + struct.pack("<" + _CODES[item.kind], item.value)
    if isinstance(item, bool):
        return struct.pack("<I?", BOOL, item)
    if isinstance(item, int):
        return struct.pack("<II", U32, item)
    if isinstance(item, float):
        return struct.pack("<If", F32, item)
    if isinstance(item, str | bytes):
        return struct.pack("<I", STRING) + string(item)
    return struct.pack("<I", ARRAY) + _array(item)


def _array(items: Sequence[Any]) -> bytes:
    if items and isinstance(items[0], str | bytes):
        return struct.pack("<IQ", STRING, len(items)) + b"".join(map(string, items))
    kind = F32 if items and isinstance(items[0], float) else I32
    return struct.pack(f"<IQ{len(items)}{_CODES[kind]}", kind, len(items), *items)


def gguf(
    metadata: Mapping[str, Any], tensors: Sequence[TensorSpec] = (), *, version: int = 3, alignment: int = ALIGNMENT
) -> bytes:
    """A whole file. alignment is how its tensors lie, whatever the metadata say."""
    out = bytearray(b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata)))
    for key, item in metadata.items():
        out += string(key) + value(item)
    offset = 0
    for tensor in tensors:
        out += string(tensor.name) + struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
        out += struct.pack("<IQ", tensor.type, offset if tensor.offset is None else tensor.offset)
        offset += -(-tensor.n_bytes // alignment) * alignment
    out += b"\0" * (-len(out) % alignment)
    return bytes(out) + b"\0" * offset


def metadata(**changes: Any) -> dict[str, Any]:
    """What a tiny llama says of itself, with some keys changed; None removes one."""
    found = {
        "general.architecture": "llama",
        "general.name": "Tiny",
        "general.file_type": 3,
        "llama.block_count": 2,
        "llama.context_length": 128,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [f"t{n}" for n in range(16)],
    }
    return {key: item for key, item in {**found, **changes}.items() if item is not None}


TENSORS = (
    TensorSpec("token_embd.weight", (64, 16), 0, 64 * 16 * 4),
    TensorSpec("output_norm.weight", (64,), 0, 64 * 4),
    TensorSpec("blk.0.attn_q.weight", (64, 64), 3, 64 * 64 // 32 * 20),
)


def tiny_model(changes: Mapping[str, Any] | None = None, tensors: Sequence[TensorSpec] = TENSORS) -> bytes:
    """The bytes of a tiny model; no weights worth running, but a header like a real one's."""
    return gguf(metadata(**(changes or {})), tensors)


def tiny_adapter(changes: Mapping[str, Any] | None = None, tensors: Sequence[TensorSpec] | None = None) -> bytes:
    """The bytes of a LoRA adapter for tiny_model(), of zeros."""
    found = {
        "general.architecture": "llama",
        "general.type": "adapter",
        "general.base_model.count": 1,
        "general.base_model.0.repo_url": "https://huggingface.co/somebody/Tiny",
        "adapter.type": "lora",
        "adapter.lora.alpha": 8.0,
        **(changes or {}),
    }
    return gguf({key: item for key, item in found.items() if item is not None}, tensors or lora_tensors())


def lora_tensors(name: str = "blk.0.attn_q.weight", n_in: int = 64, n_out: int = 64, rank: int = 4) -> list[TensorSpec]:
    """Both matrices."""
    a, b = (n_in, rank), (rank, n_out)
    return [TensorSpec(f"{name}.lora_{end}", shape, 0, math.prod(shape) * 4) for end, shape in (("a", a), ("b", b))]


def write(path: Path, content: bytes) -> Path:
    """Writes and gives the path back."""
    path.write_bytes(content)
    return path


RUNNABLE_VOCABULARY = ("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581hi", "\u2581")
_F32 = 4
_WIDTH, _FEED_FORWARD = 32, 64


def runnable_metadata(**changes: Any) -> dict[str, Any]:
    """What the smallest llama says of itself that llama.cpp loads and runs; None removes a key."""
    size = len(RUNNABLE_VOCABULARY)
    found = {
        "general.architecture": "llama",
        "general.name": "Smallest",
        "general.file_type": 0,
        "llama.block_count": 1,
        "llama.context_length": 64,
        "llama.embedding_length": _WIDTH,
        "llama.feed_forward_length": _FEED_FORWARD,
        "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 1,
        "llama.rope.dimension_count": 16,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(RUNNABLE_VOCABULARY),
        "tokenizer.ggml.scores": [-float(number) for number in range(size)],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, 1, 1],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
    }
    return {key: item for key, item in {**found, **changes}.items() if item is not None}


def runnable_tensors() -> list[TensorSpec]:
    """Its tensors. Weights of zero make every token as likely as any other."""
    shapes = {
        "token_embd.weight": (_WIDTH, len(RUNNABLE_VOCABULARY)),
        "output_norm.weight": (_WIDTH,),
        "blk.0.attn_norm.weight": (_WIDTH,),
        "blk.0.attn_q.weight": (_WIDTH, _WIDTH),
        "blk.0.attn_k.weight": (_WIDTH, _WIDTH // 2),
        "blk.0.attn_v.weight": (_WIDTH, _WIDTH // 2),
        "blk.0.attn_output.weight": (_WIDTH, _WIDTH),
        "blk.0.ffn_norm.weight": (_WIDTH,),
        "blk.0.ffn_gate.weight": (_WIDTH, _FEED_FORWARD),
        "blk.0.ffn_up.weight": (_WIDTH, _FEED_FORWARD),
        "blk.0.ffn_down.weight": (_FEED_FORWARD, _WIDTH),
    }
    return [TensorSpec(name, shape, 0, math.prod(shape) * _F32) for name, shape in shapes.items()]


def runnable_model(changes: Mapping[str, Any] | None = None, tensors: Sequence[TensorSpec] | None = None) -> bytes:
    """The bytes of a model of some 80 kB that llama.cpp runs in milliseconds."""
    return gguf(runnable_metadata(**(changes or {})), runnable_tensors() if tensors is None else tensors)


SPELLING_VOCABULARY = (*RUNNABLE_VOCABULARY, "h", "i", "\u2581h")


def spelling_model(changes: Mapping[str, Any] | None = None) -> bytes:
    """A vocabulary without weights in which "hi" is one token, as its letters are joined."""
    size = len(SPELLING_VOCABULARY)
    return gguf(
        runnable_metadata(
            **{
                "tokenizer.ggml.tokens": list(SPELLING_VOCABULARY),
                "tokenizer.ggml.scores": [-float(number) for number in range(size)],
                "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (size - 259)],
                **(changes or {}),
            }
        )
    )
