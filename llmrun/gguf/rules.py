"""Rules for headers of models, with a message for each. Must not know the file format.

check() refuses before loading: files that are no models, sizes that are false or would overflow, and values that make
llama.cpp hang. Other files are loaded: llama.cpp refuses many cleanly, and if it aborts or crashes (llama-cpp-python
0.3.36), check_crashes() finds the reason afterwards. So a rule that a later llama.cpp relaxes refuses no good model.
No list of rules is complete; the real defence is the engine's own process.
"""

from __future__ import annotations

import re
import shlex
from math import isfinite
from pathlib import Path
from typing import Any, NoReturn

from llmrun.errors import BadModelError, LlmrunError
from llmrun.gguf.header import DRAFT_KINDS, Header, Tensor
from llmrun.gguf.layers import MAX_LAYERS, sliding_layers
from llmrun.gguf.metadata import length_of
from llmrun.gguf.reader import read_header, read_part

MAX_EXPERTS = 1024  # LLAMA_MAX_EXPERTS
MAX_CONTEXT = 1 << 24
MAX_VOCABULARY = 1 << 20
MAX_VOCABULARY_BYTES = 64 * 1024 * 1024
MAX_TEMPLATE_CHARACTERS = 1 << 20
ALIGNMENT = 32  # of the data in the mapped file: TENSOR_ALIGNMENT of ggml-backend.cpp

_TOKENIZERS = frozenset({"llama", "gpt2", "gemma4", "bert", "t5", "rwkv", "plamo2", "hybriddna", "whitespace"})
_NOT_MODELS = {
    "mmproj": "it is the image or audio part of a model",
    "imatrix": "it is an importance matrix",
    "vocab": "it is a vocabulary without weights",
}
_ROPE_SCALINGS = frozenset({"none", "linear", "yarn", "longrope"})
# ggml has no kernel to multiply with these, and calls it all the same.
_NO_WEIGHT_TYPES = frozenset({"Q8_1", "Q8_K", "I8", "I16", "F64"})
_INDEX_TYPES = frozenset({"I32", "I64"})
_MATRIX = re.compile(
    r"(?:^|\.)(?:token_embd|output|attn_(?:q|k|v|qkv|output|gate)|ffn_(?:gate|up|down)(?:_inp|_exps|_shexp)?)\.weight$"
)
_LAYER = re.compile(r"blk\.(\d+)\.")
_VECTOR = re.compile(
    r"(?:_norm\.weight|\.bias|\.scale|(?:^|\.)(?:rope_freqs|rope_factors_(?:long|short)|attn_sinks)\.weight)$"
)
# Graphs that assert that keys are as long as values, and in the second set also that all of a key is rotated.
_EQUAL_HEADS = frozenset({
    "afmoe", "apertus", "arcee", "arctic", "baichuan", "bailingmoe2", "bert", "bitnet", "bloom", "chameleon",
    "chatglm", "codeshell", "cogvlm", "cohere2", "cohere2moe", "command-r", "dbrx", "deci", "deepseek", "dots1",
    "dream", "ernie4_5", "ernie4_5-moe", "eurobert", "exaone", "falcon", "glm4", "glm4moe", "gpt2", "gptneox",
    "granite", "granite_swa", "granitehybrid", "graniteswitch", "grok", "hunyuan-moe", "hunyuan_vl", "hy_v3",
    "internlm2", "jais", "jais2", "laguna", "llada", "llada-moe", "llama", "llama4", "maincoder", "mellum",
    "minimax-01", "minimax-m2", "minimax-m3", "mistral3", "modern-bert", "mpt", "muse-glimmer", "nanbeige", "nemotron",
    "nemotron_h", "nemotron_h_moe", "neo-bert", "olmo", "olmo2", "olmoe", "openelm", "orion", "paddleocr",
    "pangu-embedded", "phi2", "phi3", "plamo", "qwen", "qwen2", "qwen2moe", "qwen2vl", "qwen3", "qwen35", "qwen35moe",
    "qwen3moe", "qwen3next", "qwen3vl", "qwen3vlmoe", "refact", "rnd1", "seed_oss", "smallthinker", "smollm3",
    "stablelm", "starcoder", "starcoder2", "t5", "xverse",
})  # fmt: skip
_ROTATED_HEADS = frozenset({
    "apertus", "arcee", "arctic", "baichuan", "chameleon", "codeshell", "cogvlm", "cohere2moe", "dbrx", "deci",
    "deepseek", "dots1", "dream", "ernie4_5", "ernie4_5-moe", "exaone", "falcon", "granite", "granite_swa",
    "graniteswitch", "grok", "hunyuan-moe", "hunyuan_vl", "hy_v3", "internlm2", "jais2", "llada", "llada-moe", "llama",
    "llama4", "maincoder", "mellum", "mistral3", "olmo", "olmo2", "olmoe", "orion", "paddleocr", "pangu-embedded",
    "plamo", "qwen2", "qwen2moe", "qwen2vl", "qwen3", "qwen3moe", "qwen3vl", "qwen3vlmoe", "rnd1", "seed_oss",
    "smallthinker", "smollm3", "starcoder2", "xverse",
})  # fmt: skip
# Architectures that divide by the first layer's number of heads.
_DIVIDE_BY_HEADS = frozenset({"olmo2", "phimoe", "gemma2", "gemma3", "deepseek2", "deepseek2-ocr"})
_MAY_ROTATE_NOTHING = frozenset({"glm5-next", "granitehybrid", "kimi-linear", "kimi-k3"})  # others hang
_SECTIONED_ROPE = frozenset({"qwen2vl", "qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe", "paddleocr"})
# Architecture -> minimum of settings that it divides by or asserts, if the file states them.
_AT_LEAST: dict[str, dict[str, int]] = {
    "qwen3next": {"full_attention_interval": 1},
    "qwen35": {"full_attention_interval": 1},
    "qwen35moe": {"full_attention_interval": 1},
    "minimax-01": {"full_attention_interval": 1},
    "minimax-m3": {"attention.indexer.block_size": 1},
    "ernie4_5-moe": {"interleave_moe_layer_step": 1},
    "grovemoe": {"experts_per_group": 1},
    "lfm2": {"shortconv.l_cache": 2},
    "lfm2moe": {"shortconv.l_cache": 2},
}
_STATE_SPACE_HEADS = frozenset({"mamba2", "falcon-h1", "granitehybrid", "nemotron_h", "nemotron_h_moe"})
# tokenizer -> ids llama.cpp assumes for beginning, end and separator when the file names none.
_DEFAULT_IDS: dict[str, dict[str, int]] = {
    "llama": {"bos": 1, "eos": 2},
    "gpt2": {"bos": 11, "eos": 11},
    "hybriddna": {"bos": 11, "eos": 11},
    "whitespace": {"bos": 11, "eos": 11},
    "bert": {"bos": 101, "seperator": 102},  # GGUF's own spelling
    "t5": {"eos": 1},
    "plamo2": {"bos": 1, "eos": 2},
}
_TOKENS, _TOKEN_TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
_BYTE_TYPE = 6  # LLAMA_TOKEN_TYPE_BYTE


def check(header: Header, *, is_of_heads: bool = False) -> None:
    """Check a header before loading; takes a millisecond, since no long array is read.

    Args:
        is_of_heads: the file may have nothing but prediction heads.

    Raises:
        BadModelError: a rule is broken; names the field and its value.
    """
    _check_kind(header)
    _check_sizes(header)
    if not is_of_heads:
        _check_trunk(header)
    _check_rotation(header)


def check_crashes(header: Header) -> None:
    """Raise BadModelError for values that make llama.cpp abort, beyond those of check()."""
    _check_experts(header)
    _check_attention(header)
    _check_heads(header)
    _check_rope(header)
    _check_windows(header)
    _check_divisors(header)
    _check_numbers(header)
    _check_tokenizer(header)
    _check_tensors(header)


def check_vocabulary(header: Header) -> None:
    """Check a vocabulary for errors that make llama.cpp abort.

    Reads the file again, which takes 20 ms for 50,000 tokens; so only cause_of_crash() calls it.

    Raises:
        BadModelError: a token is a duplicate, or a required one is missing.
        ModelNotFoundError: the file is gone.
    """
    full = read_part(header.path, arrays=(_TOKENS, _TOKEN_TYPES))
    tokens = full.metadata.get(_TOKENS)
    if not isinstance(tokens, tuple) or not all(isinstance(token, bytes) for token in tokens[:1]):
        _fail(header, f"{_TOKENS} is missing or holds no texts")
    distinct = set(tokens)
    if len(distinct) < len(tokens):
        _check_duplicates(header, tokens)
    total = sum(map(len, tokens))
    if total > MAX_VOCABULARY_BYTES:
        _fail(header, f"{_TOKENS} holds {total} bytes; at most {MAX_VOCABULARY_BYTES} are allowed")
    if header.tokenizer_model == "llama":
        _check_byte_tokens(header, distinct)
    types = full.metadata.get(_TOKEN_TYPES)
    if header.tokenizer_model in {"bert", "rwkv"} and isinstance(types, tuple) and _BYTE_TYPE in types:
        _fail(header, f"{_TOKEN_TYPES} of token {types.index(_BYTE_TYPE)} is {_BYTE_TYPE} (byte),"
              f" which the tokenizer {header.tokenizer_model!r} does not have")  # fmt: skip


def cause_of_crash(path: Path) -> BadModelError | None:
    """Return the known error in a model's file that makes llama.cpp crash; None without one."""
    try:
        header = read_header(path)
        check(header)
        check_crashes(header)
        check_vocabulary(header)
    except BadModelError as reason:
        return reason
    except LlmrunError:  # the file can't be read any more
        return None
    return None


def _fail(header: Header, why: str) -> NoReturn:
    raise BadModelError(
        f"{header.path.name!r} is not a model that can be run", why=why, hint="try another file of this model"
    )


def _check_kind(header: Header) -> None:
    if not header.architecture:
        _fail(header, "general.architecture is missing")
    if header.architecture == "clip":
        _fail(header, "general.architecture is 'clip': it is the image or audio part of a model")
    if header.draft_kind in DRAFT_KINDS.keys() - {"mtp"}:
        raise BadModelError(
            f"{header.path.name!r} is {DRAFT_KINDS[header.draft_kind]}, not a model",
            why="it can only draft for the model that it was made for, and llmrun can't draft with it yet",
            hint="llmrun run MODEL, which drafts from the text, and with the model's own heads if it has some",
        )
    general_type = header.text("general.type")
    if general_type == "adapter":
        raise BadModelError(
            f"{header.path.name!r} is an adapter, not a model",
            why=f"general.type is 'adapter': it goes with {header.base_model or 'the model that it was made for'}",
            hint=shlex.join(["llmrun", "run", header.base_model or "MODEL", "--lora", str(header.path)]),
        )
    if general_type in _NOT_MODELS:
        _fail(header, f"general.type is {general_type!r}: {_NOT_MODELS[general_type]}")
    if not header.tensors:
        _fail(header, "it holds no tensors")


def _check_sizes(header: Header) -> None:
    _check_range(header, "block_count", 1, MAX_LAYERS)
    _check_range(header, "context_length", 1, MAX_CONTEXT)
    _check_range(header, "embedding_length", 1, 1 << 24)
    _check_range(header, "nextn_predict_layers", 0, header.n_layers, optional=True)
    _check_range(header, "vocab_size", 0, MAX_VOCABULARY, optional=True)
    for name in ("feed_forward_length", "expert_feed_forward_length"):
        _check_counts(header, name, 1 << 24)
    for name in ("head_count", "head_count_kv", "key_length", "value_length", "key_length_swa", "value_length_swa"):
        _check_counts(header, f"attention.{name}", 1 << 16)
    _check_counts(header, "attention.sliding_window", MAX_CONTEXT)
    if not 1 <= header.n_vocab <= MAX_VOCABULARY:
        _fail(header, f"the vocabulary has {header.n_vocab} tokens, not between 1 and {MAX_VOCABULARY}")
    template = header.metadata.get("tokenizer.chat_template")
    length = len(template) if isinstance(template, str) else length_of(template)
    if length > MAX_TEMPLATE_CHARACTERS:
        _fail(header, f"'tokenizer.chat_template' has {length} characters, more than {MAX_TEMPLATE_CHARACTERS}")


def _check_trunk(header: Header) -> None:
    """Refuse a file of draft layers alone, for which llama.cpp reads through a null pointer."""
    layers = {int(match[1]) for tensor in header.tensors if (match := _LAYER.match(tensor.name))}
    predicting = header.model_count("nextn_predict_layers")
    if predicting and layers and min(layers) >= header.n_layers - predicting:
        raise BadModelError(
            f"{header.path.name!r} is not a model that can be run",
            why="it holds only layers for multi-token prediction (a draft head), not the model's own layers",
            hint=shlex.join(["llmrun", "run", "MODEL", "--draft", str(header.path)]),
        )


def _check_rotation(header: Header) -> None:
    """Refuse heads without rotation, with which llama.cpp hangs."""
    for ending in ("", "_swa"):
        key = header.model_key(f"rope.dimension_count{ending}")
        if header.integer(key) == 0 and header.heads_of(0) and header.architecture not in _MAY_ROTATE_NOTHING:
            _fail(header, f"{key!r} is 0, so nothing of a head is rotated")


def _check_range(header: Header, name: str, low: int, high: int, *, optional: bool = False) -> None:
    key = header.model_key(name)
    if optional and key not in header.metadata:
        return
    value = header.metadata.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        shown = "missing" if value is None else repr(value)
        _fail(header, f"{key!r} is {shown}, not a whole number between {low} and {high}")


def _check_counts(header: Header, name: str, limit: int) -> None:
    """Check one number, or one for each layer: products of large ones overflow."""
    key = header.model_key(name)
    for value in _numbers(header.metadata.get(key, 0)):
        if not 0 <= value <= limit:
            _fail(header, f"{key!r} is {value}, not a whole number between 0 and {limit}")


def _check_experts(header: Header) -> None:
    prefix = header.model_key("expert_")
    count = header.integer(prefix + "count") or 0
    used = max(_numbers(header.metadata.get(prefix + "used_count", 0)), default=0)
    groups = header.integer(prefix + "group_count") or 0
    groups_used = header.integer(prefix + "group_used_count") or 0
    if header.architecture.startswith("hunyuan") and count <= 1:  # llama.cpp forgets the experts then
        count = used = 0
    if not 0 <= count <= MAX_EXPERTS:
        _fail(header, f"'{prefix}count' is {count}, not between 0 and {MAX_EXPERTS}")
    if not (0 < used <= count if count else used == 0):
        _fail(header, f"'{prefix}used_count' is {used}, but '{prefix}count' is {count}")
    if not (0 <= groups < count if count else groups == 0):
        _fail(header, f"'{prefix}group_count' is {groups}, but '{prefix}count' is {count}")
    if groups > 1 and count % groups:
        _fail(header, f"'{prefix}group_count' is {groups}, which does not divide the {count} experts")
    if groups > 1 and not 0 < groups_used < groups:
        _fail(header, f"'{prefix}group_used_count' is {groups_used}, but there are {groups} groups")


def _check_attention(header: Header) -> None:
    for layer in range(header.n_layers):
        queries, keys = header.heads_of(layer), header.kv_heads_of(layer)
        if queries and keys and queries % keys:
            _fail(header, f"in layer {layer} the {queries} heads can't share {keys} key and value heads")
    first = header.heads_of(0)
    if first and header.model_key("attention.key_length") not in header.metadata and header.n_embd % first:
        _fail(header, f"'{header.model_key('embedding_length')}' is {header.n_embd},"
              f" which {first} heads can't share")  # fmt: skip


def _check_heads(header: Header) -> None:
    """Check the graphs' assertions about the length of heads."""
    first = header.heads_of(0)
    if header.architecture in _DIVIDE_BY_HEADS and not first:
        _fail(header, f"{header.model_key('attention.head_count')!r} is 0")
    if not first or header.is_latent or any(key.endswith("_swa") for key in header.metadata):
        return
    key, value = header.model_key("attention.key_length"), header.model_key("attention.value_length")
    for name in (key, value):
        if header.integer(name) == 0:
            _fail(header, f"{name!r} is 0, but there are {first} heads")
    if header.architecture in _EQUAL_HEADS and header.key_length != header.value_length:
        _fail(
            header, f"{key!r} is {header.key_length} and {value!r} is {header.value_length}; they have to be the same"
        )
    rotated = header.model_key("rope.dimension_count")
    stated = header.integer(rotated)
    if header.architecture in _ROTATED_HEADS and stated is not None and stated != header.key_length:
        _fail(header, f"{rotated!r} is {stated}, but heads are {header.key_length} long")


def _check_rope(header: Header) -> None:
    for ending in ("", "_swa"):
        key = header.model_key(f"rope.dimension_count{ending}")
        rotated = header.integer(key)
        longest = header.model_count(f"attention.key_length{ending}") or header.key_length
        if rotated is not None and (rotated < 0 or rotated % 2):
            _fail(header, f"{key!r} is {rotated}, not an even number")
        if rotated is not None and longest and rotated > longest:
            _fail(header, f"{key!r} is {rotated}, but heads are {longest} long")
    key = header.model_key("rope.dimension_sections")
    sections = header.metadata.get(key, (1,))
    if header.architecture in _SECTIONED_ROPE and not any(number > 0 for number in _numbers(sections)[:3]):
        _fail(header, f"{key!r} is {list(_numbers(sections))}; one of the first three has to be more than 0")


def _check_windows(header: Header) -> None:
    if header.sliding_window and not any(sliding_layers(header)):
        key = header.model_key("attention.sliding_window_pattern")
        _fail(header, f"{key!r} gives no layer a sliding window, but the window is {header.sliding_window}")
    if header.architecture == "gemma4":
        key = header.model_key("attention.shared_kv_layers")
        shared = header.integer(key) or 0
        if not 0 <= shared <= header.n_layers - 2:
            _fail(header, f"{key!r} is {shared} of {header.n_layers} layers; two have to keep their own")


def _check_divisors(header: Header) -> None:
    for name, minimum in _AT_LEAST.get(header.architecture, {}).items():
        _check_range(header, name, minimum, 1 << 24, optional=True)
    if header.architecture in _STATE_SPACE_HEADS:
        _check_range(header, "ssm.time_step_rank", 1, 1 << 24)
        heads, inner = header.model_count("ssm.time_step_rank"), header.model_count("ssm.inner_size")
        if inner % heads:
            _fail(header, f"'{header.model_key('ssm.inner_size')}' is {inner}, which {heads} heads can't share")
    if header.architecture in {"jamba", "granitehybrid"}:
        inner = header.model_count("ssm.inner_size")
        if inner != 2 * header.n_embd:
            _fail(header, f"'{header.model_key('ssm.inner_size')}' is {inner}, not twice the width {header.n_embd}")


def _numbers(value: Any) -> tuple[int, ...]:
    values = value if isinstance(value, tuple) else (value,)
    return tuple(item for item in values if isinstance(item, int))


def _check_numbers(header: Header) -> None:
    for name in ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"):
        key = header.model_key(name)
        value = header.metadata.get(key)
        if isinstance(value, float) and not (isfinite(value) and 0 <= value < 1):
            _fail(header, f"{key!r} is {value}, not a number from 0 to 1")
    key = header.model_key("rope.scaling.type")
    scaling = header.metadata.get(key, "linear")
    if scaling not in _ROPE_SCALINGS:
        _fail(header, f"{key!r} is {scaling!r}, not one of {', '.join(sorted(_ROPE_SCALINGS))}")


def _check_tokenizer(header: Header) -> None:
    model = header.tokenizer_model
    if model not in _TOKENIZERS:
        _fail(header, f"'tokenizer.ggml.model' is {model!r}, which llama.cpp does not know")
    for name, flag in (("bos", "add_bos_token"), ("eos", "add_eos_token"), ("seperator", "add_sep_token")):
        always = model == "bert" and name != "eos"
        if not always and header.metadata.get(f"tokenizer.ggml.{flag}") is not True:
            continue
        key = f"tokenizer.ggml.{name}_token_id"
        stated = header.integer(key)
        default = _DEFAULT_IDS.get(model, {}).get(name)
        if not any(number is not None and 0 <= number < header.n_vocab for number in (stated, default)):
            _fail(header, f"{key!r} is {'missing' if stated is None else stated},"
                  f" but 'tokenizer.ggml.{flag}' asks for it")  # fmt: skip


def _check_tensors(header: Header) -> None:
    if header.architecture == "phi3":
        _check_attention_weights(header)
    for tensor in header.tensors:
        if not _usable(tensor):
            _fail(header, f"tensor {tensor.name!r} has the type {tensor.type}, which is not for weights")
        if tensor.type != "F32" and _VECTOR.search(tensor.name):
            _fail(header, f"tensor {tensor.name!r} has the type {tensor.type}; it has to be F32")
        if tensor.offset % ALIGNMENT:
            _fail(header, f"tensor {tensor.name!r} is at byte {tensor.offset}, not a multiple of {ALIGNMENT}")


def _check_attention_weights(header: Header) -> None:
    """Check for attention weights, which this architecture's loader does not require."""
    names = {tensor.name for tensor in header.tensors}
    for layer in range(header.n_layers):
        separate = {f"blk.{layer}.attn_{part}.weight" for part in "qkv"}
        fused = f"blk.{layer}.attn_qkv.weight"
        if fused not in names and not separate <= names:
            _fail(header, f"tensor {fused!r} is missing")


def _usable(tensor: Tensor) -> bool:
    return tensor.type not in _NO_WEIGHT_TYPES and not (tensor.type in _INDEX_TYPES and _MATRIX.search(tensor.name))


def _check_duplicates(header: Header, tokens: tuple[bytes, ...]) -> None:
    """Refuse the first duplicate token; empty ones are named by llama.cpp."""
    first: dict[bytes, int] = {}
    for number, token in enumerate(tokens):
        text = token or f"[EMPTY_{number}]".encode()
        if text in first:
            _fail(header, f"tokens {first[text]} and {number} of {_TOKENS} are both {text!r}")
        first[text] = number


def _check_byte_tokens(header: Header, tokens: set[bytes]) -> None:
    """Require the byte tokens, by which a SentencePiece vocabulary spells unknown characters."""
    missing = [b for b in range(256) if f"<0x{b:02X}>".encode() not in tokens and bytes([b]) not in tokens]
    if missing:
        _fail(header, f"{_TOKENS} lacks {len(missing)} byte tokens, the first is '<0x{missing[0]:02X}>'")
