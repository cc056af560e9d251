"""The rules a header has to obey so that llama.cpp does not abort, each with words for who breaks it.

Owns the rules; must not know the file format. llama.cpp refuses many files cleanly and those are left to it;
here stand the cases where it calls abort() or crashes (its version 0.3.36 of llama-cpp-python), so that the
user reads a reason. The engine's own process is the real defence: no list of rules is complete.
"""

from __future__ import annotations

import re
from math import isfinite
from typing import Any, NoReturn

from llmrun.errors import BadModelError
from llmrun.models.gguf import read_header
from llmrun.models.header import Header

MAX_LAYERS = 512  # LLAMA_MAX_LAYERS
MAX_EXPERTS = 1024  # LLAMA_MAX_EXPERTS
MAX_CONTEXT = 1 << 24
MAX_VOCABULARY = 1 << 20
MAX_VOCABULARY_BYTES = 64 * 1024 * 1024
MAX_TEMPLATE_CHARACTERS = 1 << 20

_TOKENIZERS = frozenset({"llama", "gpt2", "gemma4", "bert", "t5", "rwkv", "plamo2", "hybriddna", "whitespace"})
_NOT_MODELS = {
    "adapter": "it is an adapter, to be used together with a model",
    "mmproj": "it is the image part of a model",
    "imatrix": "it is an importance matrix",
    "vocab": "it is a vocabulary without weights",
}
_ROPE_SCALINGS = frozenset({"none", "linear", "yarn", "longrope"})
_WHOLE_NUMBER_TYPES = frozenset({"I8", "I16", "I32", "I64", "F64"})
_MATRIX = re.compile(
    r"(?:^|\.)(?:token_embd|output|attn_(?:q|k|v|qkv|output)|ffn_(?:gate|up|down)(?:_exps|_shexp)?)\.weight$"
)
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


def check(header: Header) -> None:
    """Refuse a header that would make llama.cpp abort. Looks at no long array: a few microseconds.

    Raises:
        BadModelError: a rule is broken; `why` names the field and its value.
    """
    _check_kind(header)
    _check_sizes(header)
    _check_experts(header)
    _check_attention(header)
    _check_numbers(header)
    _check_tokenizer(header)
    _check_tensors(header)


def check_vocabulary(header: Header) -> None:
    """Refuse a vocabulary that would make llama.cpp abort. Reads the file again: 20 ms for 50,000 tokens.

    Raises:
        BadModelError: two tokens are the same, or one that has to be there is missing.
        ModelNotFoundError: the file is gone.
    """
    full = read_header(header.path, arrays=(_TOKENS, _TOKEN_TYPES))
    tokens = full.metadata.get(_TOKENS)
    if not isinstance(tokens, tuple) or not all(isinstance(token, bytes) for token in tokens[:1]):
        _fail(header, f"{_TOKENS} is missing or holds no texts")
    known = set(tokens)
    if len(known) < len(tokens):
        _check_duplicates(header, tokens)
    total = sum(map(len, tokens))
    if total > MAX_VOCABULARY_BYTES:
        _fail(header, f"{_TOKENS} holds {total} bytes; at most {MAX_VOCABULARY_BYTES} are allowed")
    if header.tokenizer_model == "llama":
        _check_byte_tokens(header, known)
    types = full.metadata.get(_TOKEN_TYPES)
    if header.tokenizer_model in {"bert", "rwkv"} and isinstance(types, tuple) and _BYTE_TYPE in types:
        _fail(header, f"{_TOKEN_TYPES} of token {types.index(_BYTE_TYPE)} is {_BYTE_TYPE} (byte),"
              f" which the tokenizer {header.tokenizer_model!r} does not have")  # fmt: skip


def _fail(header: Header, why: str) -> NoReturn:
    raise BadModelError(
        f"{header.path.name!r} is not a model that can be run", why=why, hint="try another file of this model"
    )


def _check_kind(header: Header) -> None:
    if not header.architecture:
        _fail(header, "general.architecture is missing")
    if header.architecture == "clip":
        _fail(header, "general.architecture is 'clip': it is the image part of a model")
    kind = header.text("general.type")
    if kind in _NOT_MODELS:
        _fail(header, f"general.type is {kind!r}: {_NOT_MODELS[kind]}")
    if not header.tensors:
        _fail(header, "it holds no tensors")


def _check_sizes(header: Header) -> None:
    _check_range(header, "block_count", 1, MAX_LAYERS)
    _check_range(header, "context_length", 1, MAX_CONTEXT)
    _check_range(header, "embedding_length", 1, 1 << 24)
    _check_range(header, "nextn_predict_layers", 0, header.n_layers, optional=True)
    _check_range(header, "vocab_size", 0, MAX_VOCABULARY, optional=True)
    if not 1 <= header.n_vocab <= MAX_VOCABULARY:
        _fail(header, f"the vocabulary has {header.n_vocab} tokens, not between 1 and {MAX_VOCABULARY}")


def _check_range(header: Header, name: str, low: int, high: int, *, optional: bool = False) -> None:
    key = header.model_key(name)
    if optional and key not in header.metadata:
        return
    value = header.metadata.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        shown = "missing" if value is None else repr(value)
        _fail(header, f"{key!r} is {shown}, not a whole number between {low} and {high}")


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
    heads, kv_heads = header.n_heads, header.n_kv_heads
    for layer in range(header.n_layers):
        queries, keys = _of_layer(heads, layer), _of_layer(kv_heads, layer)
        if queries and keys and queries % keys:
            _fail(header, f"in layer {layer} the {queries} heads can't share {keys} key and value heads")
    first = _of_layer(heads, 0)
    if first and header.model_key("attention.key_length") not in header.metadata and header.n_embd % first:
        _fail(header, f"'{header.model_key('embedding_length')}' is {header.n_embd},"
              f" which {first} heads can't share")  # fmt: skip
    key = header.model_key("rope.dimension_count")
    rotated = header.integer(key)
    if rotated is not None and (rotated < 0 or rotated % 2):
        _fail(header, f"{key!r} is {rotated}, not an even number")


def _of_layer(heads: int | tuple[int, ...], layer: int) -> int:
    if isinstance(heads, int):
        return heads
    return heads[layer] if layer < len(heads) else 0


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
    template = header.chat_template
    if template is not None and len(template) > MAX_TEMPLATE_CHARACTERS:
        _fail(header, f"'tokenizer.chat_template' has {len(template)} characters,"
              f" more than {MAX_TEMPLATE_CHARACTERS}")  # fmt: skip
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
    for tensor in header.tensors:
        if tensor.type != "F32" and tensor.name.endswith(("_norm.weight", ".bias")):
            _fail(header, f"tensor {tensor.name!r} has the type {tensor.type}; it has to be F32")
        if tensor.type in _WHOLE_NUMBER_TYPES and _MATRIX.search(tensor.name):
            _fail(header, f"tensor {tensor.name!r} has the type {tensor.type}, which is none for weights")


def _check_duplicates(header: Header, tokens: tuple[bytes, ...]) -> None:
    """Name the first token that is there twice. An empty one is none: llama.cpp gives it a name."""
    first: dict[bytes, int] = {}
    for number, token in enumerate(tokens):
        text = token or f"[EMPTY_{number}]".encode()
        if text in first:
            _fail(header, f"tokens {first[text]} and {number} of {_TOKENS} are both {text!r}")
        first[text] = number


def _check_byte_tokens(header: Header, known: set[bytes]) -> None:
    """A SentencePiece vocabulary spells unknown characters by byte tokens."""
    missing = [b for b in range(256) if f"<0x{b:02X}>".encode() not in known and bytes([b]) not in known]
    if missing:
        _fail(header, f"{_TOKENS} lacks {len(missing)} byte tokens, the first is '<0x{missing[0]:02X}>'")
