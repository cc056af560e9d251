"""Makes tiny model folders as Hugging Face has them, of random weights, for tests; no torch, no tokenizers.

Names and shapes stand here a second time on purpose: a mistake in the converter's tables must not be repeated by
import.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Tensors = dict[str, Array]

WIDTH, FEED_FORWARD, LAYERS, HEADS, KV_HEADS, HEAD = 64, 96, 2, 4, 2, 16
_KINDS = {"<f4": "F32", "<f2": "F16", "<u2": "BF16", "<i4": "I32", "|u1": "F8_E4M3", "<f8": "F64", "<i8": "I64"}

QWEN2_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MERGES = (
    "h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld", "Ġ t", "Ġt he", "i n", "in g", "Ð ¿",
    "1 2", "Ċ Ċ", "Ġ Ġ", "e r", "a b",
)  # fmt: skip
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def bfloat16(values: Array) -> Array:
    """The upper halves of float32, cut off."""
    return (values.astype("<f4").view("<u4") >> 16).astype("<u2")


def safetensors(tensors: Tensors) -> bytes:
    """A file's bytes. uint16 is written as BF16, uint8 as F8_E4M3."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, values in tensors.items():
        raw = np.ascontiguousarray(values).tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": _KINDS[values.dtype.str], "shape": list(values.shape), "data_offsets": offsets}
        data += raw
    return raw_safetensors(header, data)


def raw_safetensors(header: Any, data: bytes) -> bytes:
    """A file's bytes with any header."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


# ---- weights


def _random(shapes: dict[str, tuple[int, ...]], seed: int) -> Tensors:
    random = np.random.default_rng(seed)
    found: Tensors = {}
    for name, shape in shapes.items():
        values = random.standard_normal(shape) * 0.2
        found[name] = (values + ("norm" in name.lower())).astype("<f4")
    return found


def llama_like(
    n_vocab: int, *, bias: bool = False, head_norms: bool = False, tied: bool = False, gemma: bool = False
) -> Tensors:
    """Weights of llama, mistral, qwen2 (bias), qwen3 (head_norms) and gemma (with more norms)."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (n_vocab, WIDTH)}
    for layer in range(LAYERS):
        own: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (WIDTH,),
            "self_attn.q_proj.weight": (HEADS * HEAD, WIDTH),
            "self_attn.k_proj.weight": (KV_HEADS * HEAD, WIDTH),
            "self_attn.v_proj.weight": (KV_HEADS * HEAD, WIDTH),
            "self_attn.o_proj.weight": (WIDTH, HEADS * HEAD),
            "post_attention_layernorm.weight": (WIDTH,),
            "mlp.gate_proj.weight": (FEED_FORWARD, WIDTH),
            "mlp.up_proj.weight": (FEED_FORWARD, WIDTH),
            "mlp.down_proj.weight": (WIDTH, FEED_FORWARD),
        }
        if bias:
            own |= {f"self_attn.{p}_proj.bias": own[f"self_attn.{p}_proj.weight"][:1] for p in "qkv"}
        if head_norms:
            own |= {"self_attn.q_norm.weight": (HEAD,), "self_attn.k_norm.weight": (HEAD,)}
        if gemma:
            own |= {f"{place}_feedforward_layernorm.weight": (WIDTH,) for place in ("pre", "post")}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
    shapes["model.norm.weight"] = (WIDTH,)
    if not tied:
        shapes["lm_head.weight"] = (n_vocab, WIDTH)
    return _random(shapes, seed=n_vocab)


def phi(n_vocab: int) -> Tensors:
    """Weights of phi3: queries, keys and values in one matrix, gate and up in another."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (n_vocab, WIDTH)}
    for layer in range(LAYERS):
        own: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (WIDTH,),
            "self_attn.qkv_proj.weight": ((HEADS + 2 * KV_HEADS) * HEAD, WIDTH),
            "self_attn.o_proj.weight": (WIDTH, WIDTH),
            "post_attention_layernorm.weight": (WIDTH,),
            "mlp.gate_up_proj.weight": (2 * FEED_FORWARD, WIDTH),
            "mlp.down_proj.weight": (WIDTH, FEED_FORWARD),
        }
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
    return _random({**shapes, "model.norm.weight": (WIDTH,), "lm_head.weight": (n_vocab, WIDTH)}, seed=5)


def bert(n_vocab: int) -> Tensors:
    """Weights of BERT, with the parts that are of no use."""
    pairs: dict[str, tuple[int, ...]] = {"embeddings.LayerNorm": (WIDTH,), "pooler.dense": (WIDTH, WIDTH)}
    for layer in range(LAYERS):
        own: dict[str, tuple[int, ...]] = {
            **{f"attention.self.{part}": (WIDTH, WIDTH) for part in ("query", "key", "value")},
            "attention.output.dense": (WIDTH, WIDTH),
            "attention.output.LayerNorm": (WIDTH,),
            "intermediate.dense": (FEED_FORWARD, WIDTH),
            "output.dense": (WIDTH, FEED_FORWARD),
            "output.LayerNorm": (WIDTH,),
        }
        pairs |= {f"encoder.layer.{layer}.{name}": shape for name, shape in own.items()}
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (n_vocab, WIDTH),
        "embeddings.position_embeddings.weight": (32, WIDTH),
        "embeddings.token_type_embeddings.weight": (2, WIDTH),
    }
    for name, shape in pairs.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return _random(shapes, seed=6)


def config(architecture: str, n_vocab: int, **changes: Any) -> dict[str, Any]:
    """config.json; None removes a setting."""
    found = {
        "architectures": [architecture],
        "vocab_size": n_vocab,
        "hidden_size": WIDTH,
        "intermediate_size": FEED_FORWARD,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    }
    return {key: value for key, value in {**found, **changes}.items() if value is not None}


# ---- vocabularies


def byte_texts() -> list[str]:
    """What byte-level BPE writes for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def byte_level(merges: Any = MERGES, regex: str = QWEN2_REGEX) -> dict[str, Any]:
    """tokenizer.json of byte-level BPE in Qwen's way; the special tokens have the last ids."""
    texts = [*byte_texts(), *(merge.replace(" ", "") for merge in MERGES)]
    vocabulary = {text: number for number, text in enumerate(texts)}
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return {
        "added_tokens": [
            {"id": len(texts) + number, "content": text, "special": True} for number, text in enumerate(SPECIAL)
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [split, {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}],
        },
        "post_processor": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": list(merges), "ignore_merges": False},
    }


N_BYTE_LEVEL = 256 + len(MERGES) + len(SPECIAL)
_PIECES = ("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁h", "▁he", "▁", "h", "e", "l", "o")
N_PIECES = len(_PIECES)


def _varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def tokenizer_model(*, kind: int = 2, adds_space: bool = True) -> bytes:
    """A SentencePiece file: unknown, controls, bytes, a few pieces. kind 2 is BPE, 1 is unigram."""
    out = b""
    for number, text in enumerate(_PIECES):
        kinds = 2 if number == 0 else 3 if number < 3 else 6 if number < 259 else 1
        piece = _field(1, text.encode()) + b"\x15" + struct.pack("<f", -float(max(number - 258, 0)))
        out += _field(1, piece + (b"\x18" + _varint(kinds) if kinds != 1 else b""))
    out += _field(2, b"\x18" + _varint(kind))
    return out + _field(3, _field(1, b"identity") + b"\x18" + _varint(adds_space))


def word_piece() -> dict[str, Any]:
    """tokenizer.json of BERT."""
    texts = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "model", "run", "##s", "a", "b", "##b"]
    special = [{"id": number, "content": text, "special": True} for number, text in enumerate(texts[:5])]
    return {
        "added_tokens": special,
        "normalizer": {"type": "BertNormalizer", "lowercase": True, "strip_accents": None},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "model": {"type": "WordPiece", "vocab": {text: number for number, text in enumerate(texts)}},
    }


# ---- folders


def write(folder: Path, files: dict[str, Any]) -> Path:
    """Write files: bytes as they are, texts, and everything else as JSON. Gives the folder back."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return folder


_GEMMA = {"head_dim": HEAD, "query_pre_attn_scalar": HEAD, "sliding_window": 16, "rms_norm_eps": 1e-6}
_SPIECES = {"tokenizer.model": tokenizer_model(), "tokenizer_config.json": {"bos_token": "<s>", "eos_token": "</s>"}}


def files_of(architecture: str, **changes: Any) -> dict[str, Any]:
    """The files of a tiny model; `changes` are those of config.json."""
    bytes_in = {"tokenizer.json": byte_level(), "tokenizer_config.json": {"eos_token": "<|im_end|>"}}
    makers: dict[str, tuple[int, Any, dict[str, Any], dict[str, Any]]] = {
        "LlamaForCausalLM": (N_PIECES, llama_like, {}, _SPIECES),
        "MistralForCausalLM": (N_PIECES, llama_like, {"head_dim": HEAD}, _SPIECES),
        "Qwen2ForCausalLM": (N_BYTE_LEVEL, lambda n: llama_like(n, bias=True), {}, bytes_in),
        "Qwen3ForCausalLM": (N_BYTE_LEVEL, lambda n: llama_like(n, head_norms=True), {"head_dim": HEAD}, bytes_in),
        "SmolLM3ForCausalLM": (
            N_BYTE_LEVEL, lambda n: llama_like(n, tied=True), {"tie_word_embeddings": True}, bytes_in
        ),
        "Gemma2ForCausalLM": (N_PIECES, lambda n: llama_like(n, tied=True, gemma=True), _GEMMA, _SPIECES),
        "Gemma3ForCausalLM": (
            N_PIECES, lambda n: llama_like(n, tied=True, gemma=True, head_norms=True), _GEMMA, _SPIECES
        ),
        "Phi3ForCausalLM": (N_PIECES, phi, {}, _SPIECES),
        "BertModel": (12, bert, {"max_position_embeddings": 32}, {"tokenizer.json": word_piece()}),
    }  # fmt: skip
    n_vocab, weights, settings, tokenizer = makers[architecture]
    return {
        "config.json": config(architecture, n_vocab, **{**settings, **changes}),
        "model.safetensors": safetensors(weights(n_vocab)),
        **tokenizer,
    }
