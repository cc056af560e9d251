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
EXPERTS, EXPERT_FEED_FORWARD = 4, 32
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
    data = bytearray()
    for name, values in tensors.items():
        raw = np.ascontiguousarray(values).tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": _KINDS[values.dtype.str], "shape": list(values.shape), "data_offsets": offsets}
        data += raw
    return raw_safetensors(header, bytes(data))


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
    n_vocab: int,
    *,
    bias: bool = False,
    head_norms: bool = False,
    tied: bool = False,
    gemma: bool = False,
    layers: int = LAYERS,
) -> Tensors:
    """Weights of llama, mistral, granite, qwen2 (bias), qwen3 (head_norms) and gemma (with more norms)."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (n_vocab, WIDTH)}
    for layer in range(layers):
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


def mixture(n_vocab: int, architecture: str) -> Tensors:
    """Weights of models that choose among experts: Mixtral, Qwen3-MoE and Granite-MoE."""
    plain = llama_like(n_vocab, head_norms=architecture.startswith("Qwen"))
    found = {name: values for name, values in plain.items() if ".mlp." not in name}
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(LAYERS):
        place = f"model.layers.{layer}." + ("mlp" if architecture.startswith("Qwen") else "block_sparse_moe")
        if architecture.startswith("Granite"):
            shapes |= {
                f"{place}.router.layer.weight": (EXPERTS, WIDTH),
                f"{place}.input_linear.weight": (EXPERTS, 2 * EXPERT_FEED_FORWARD, WIDTH),
                f"{place}.output_linear.weight": (EXPERTS, WIDTH, EXPERT_FEED_FORWARD),
            }
            continue
        shapes[f"{place}.gate.weight"] = (EXPERTS, WIDTH)
        names = ("gate_proj", "down_proj", "up_proj") if architecture.startswith("Qwen") else ("w1", "w2", "w3")
        wide, narrow = (EXPERT_FEED_FORWARD, WIDTH), (WIDTH, EXPERT_FEED_FORWARD)
        for expert in range(EXPERTS):
            for name, shape in zip(names, (wide, narrow, wide), strict=True):
                shapes[f"{place}.experts.{expert}.{name}.weight"] = shape
    return found | _random(shapes, seed=7)


def olmo2(n_vocab: int) -> Tensors:
    """Weights of OLMo 2: norms behind attention and feed-forward, and over all heads at once."""
    plain = llama_like(n_vocab)
    found = {name: values for name, values in plain.items() if "input_layernorm" not in name}
    norms = {"self_attn.q_norm": HEADS * HEAD, "self_attn.k_norm": KV_HEADS * HEAD, "post_feedforward_layernorm": WIDTH}
    shapes = {f"model.layers.{n}.{name}.weight": (size,) for n in range(LAYERS) for name, size in norms.items()}
    return found | _random(shapes, seed=8)


def with_vision(tensors: Tensors) -> Tensors:
    """The same as the text part of a model that sees."""
    text = {f"language_model.{name}": values for name, values in tensors.items()}
    return text | _random({"vision_tower.patch_conv.weight": (8, 8), "multi_modal_projector.norm.weight": (8,)}, seed=9)


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


def with_head(n_vocab: int) -> Tensors:
    """Weights of BERT as its training has them."""
    body = {f"bert.{name}": values for name, values in bert(n_vocab).items() if not name.startswith("pooler.")}
    return body | _random({"cls.predictions.bias": (n_vocab,)}, seed=10)


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


def _added(number: int, text: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": text, **flags, "special": True}


def byte_level(merges: Any = MERGES, regex: str = QWEN2_REGEX) -> dict[str, Any]:
    """tokenizer.json of byte-level BPE in Qwen's way; the special tokens have the last ids."""
    texts = [*byte_texts(), *(merge.replace(" ", "") for merge in MERGES)]
    vocabulary = {text: number for number, text in enumerate(texts)}
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    whole = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    return {
        "version": "1.0",
        "added_tokens": [_added(len(texts) + number, text) for number, text in enumerate(SPECIAL)],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [split, {**whole, "use_regex": False}],
        },
        "post_processor": whole,
        "decoder": whole,
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
    out += _field(2, b"\x18" + _varint(kind) + _varint(35 << 3) + b"\x01")  # 35: byte_fallback
    keeps_spaces = b"\x20\x00"  # remove_extra_whitespaces, as in Llama 2 and Gemma
    return out + _field(3, _field(1, b"identity") + b"\x18" + _varint(adds_space) + keeps_spaces)


def word_piece() -> dict[str, Any]:
    """tokenizer.json of BERT."""
    texts = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "model", "run", "##s", "a", "b", "##b"]
    normalizer = {"clean_text": True, "handle_chinese_chars": True, "lowercase": True, "strip_accents": None}
    model = {"unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    return {
        "version": "1.0",
        "added_tokens": [_added(number, text) for number, text in enumerate(texts[:5])],
        "normalizer": {"type": "BertNormalizer", **normalizer},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "model": {"type": "WordPiece", **model, "vocab": {text: number for number, text in enumerate(texts)}},
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


_GEMMA = {
    "head_dim": HEAD, "query_pre_attn_scalar": HEAD, "sliding_window": 4, "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip
_GEMMA3 = {**_GEMMA, "num_hidden_layers": 6, "rope_local_base_freq": 100.0}
_MIXTURE = {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "intermediate_size": EXPERT_FEED_FORWARD}
_GRANITE = {
    "attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e6, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
_MODEL_TYPES = {
    "LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "MixtralForCausalLM": "mixtral",
    "Mistral3ForConditionalGeneration": "mistral3", "Ministral3ForCausalLM": "ministral3",
    "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3_moe",
    "SmolLM3ForCausalLM": "smollm3", "GraniteForCausalLM": "granite", "GraniteMoeForCausalLM": "granitemoe",
    "Olmo2ForCausalLM": "olmo2", "Gemma2ForCausalLM": "gemma2", "Gemma3ForCausalLM": "gemma3_text",
    "Gemma3ForConditionalGeneration": "gemma3", "Phi3ForCausalLM": "phi3", "BertModel": "bert",
    "BertForMaskedLM": "bert",
}  # fmt: skip
_TEXT_TYPES = {"Mistral3ForConditionalGeneration": "mistral", "Gemma3ForConditionalGeneration": "gemma3_text"}

ARCHITECTURES = tuple(_MODEL_TYPES)
_SPIECES = {
    "tokenizer.model": tokenizer_model(),
    "tokenizer_config.json": {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "LlamaTokenizer"},
}
_GEMMA_PIECES = {**_SPIECES, "tokenizer.model": tokenizer_model(adds_space=False)}
_BERT = {"max_position_embeddings": 32, "num_key_value_heads": None, "rms_norm_eps": None, "rope_theta": None}
_BERT_TOKENS = {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}
_WORDS = {
    "tokenizer.json": word_piece(),
    "tokenizer_config.json": {
        "tokenizer_class": "BertTokenizer", **{f"{kind}_token": text for kind, text in _BERT_TOKENS.items()}
    },
}  # fmt: skip


def files_of(architecture: str, **changes: Any) -> dict[str, Any]:
    """The files of a tiny model; `changes` are those of config.json."""
    fast = {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    bytes_in = {"tokenizer.json": byte_level(), "tokenizer_config.json": fast}
    makers: dict[str, tuple[int, Any, dict[str, Any], dict[str, Any]]] = {
        "LlamaForCausalLM": (N_PIECES, llama_like, {}, _SPIECES),
        "MistralForCausalLM": (N_PIECES, llama_like, {"head_dim": HEAD}, _SPIECES),
        "Qwen2ForCausalLM": (N_BYTE_LEVEL, lambda n: llama_like(n, bias=True), {}, bytes_in),
        "Qwen3ForCausalLM": (N_BYTE_LEVEL, lambda n: llama_like(n, head_norms=True), {"head_dim": HEAD}, bytes_in),
        "SmolLM3ForCausalLM": (
            N_BYTE_LEVEL, lambda n: llama_like(n, tied=True), {"tie_word_embeddings": True, "pad_token_id": 0}, bytes_in
        ),
        "MixtralForCausalLM": (N_PIECES, lambda n: mixture(n, architecture), _MIXTURE, _SPIECES),
        "Mistral3ForConditionalGeneration": (
            N_BYTE_LEVEL, lambda n: with_vision(llama_like(n)), {"head_dim": HEAD}, bytes_in
        ),
        "Ministral3ForCausalLM": (
            N_BYTE_LEVEL, llama_like, {"head_dim": HEAD, "rope_parameters": _YARN, "rope_theta": None}, bytes_in
        ),
        "Qwen3MoeForCausalLM": (
            N_BYTE_LEVEL, lambda n: mixture(n, architecture),
            {"head_dim": HEAD, "num_experts": EXPERTS, "num_experts_per_tok": 2, "norm_topk_prob": True,
             "moe_intermediate_size": EXPERT_FEED_FORWARD}, bytes_in,
        ),
        "GraniteForCausalLM": (N_BYTE_LEVEL, llama_like, _GRANITE, bytes_in),
        "GraniteMoeForCausalLM": (N_BYTE_LEVEL, lambda n: mixture(n, architecture), {**_GRANITE, **_MIXTURE}, bytes_in),
        "Olmo2ForCausalLM": (N_BYTE_LEVEL, olmo2, {}, bytes_in),
        "Gemma2ForCausalLM": (N_PIECES, lambda n: llama_like(n, tied=True, gemma=True), _GEMMA, _GEMMA_PIECES),
        "Gemma3ForCausalLM": (
            N_PIECES, lambda n: llama_like(n, tied=True, gemma=True, head_norms=True, layers=6), _GEMMA3, _GEMMA_PIECES
        ),
        "Gemma3ForConditionalGeneration": (
            N_PIECES,
            lambda n: with_vision(llama_like(n, tied=True, gemma=True, head_norms=True, layers=6)),
            _GEMMA3,
            _GEMMA_PIECES,
        ),
        "Phi3ForCausalLM": (N_PIECES, phi, {"pad_token_id": 0}, _SPIECES),
        "BertModel": (12, bert, _BERT, _WORDS),
        "BertForMaskedLM": (12, with_head, _BERT, _WORDS),
    }  # fmt: skip
    n_vocab, weights, settings, tokenizer = makers[architecture]
    stated = config(architecture, n_vocab, **{"model_type": _MODEL_TYPES[architecture], **settings, **changes})
    if architecture.endswith("ForConditionalGeneration"):
        inner = {name: value for name, value in stated.items() if name != "architectures"}
        stated = {name: stated[name] for name in ("architectures", "model_type")}
        stated["text_config"] = inner | {"model_type": _TEXT_TYPES[architecture]}
    return {
        "config.json": stated,
        "model.safetensors": safetensors(weights(n_vocab)),
        **tokenizer,
    }
