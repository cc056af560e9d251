"""Rules for headers of models that llama.cpp would take badly, with a message for each.

check() refuses before loading: files that are no models, sizes that are false or would overflow, and values that make
llama.cpp hang. Other files are loaded: llama.cpp refuses many cleanly, and where it aborts, the engine's death
carries its assertion (GGML_ASSERT). Only a broken vocabulary is looked for afterwards, since no assertion names the
token. No list of rules is complete; the real defence is the engine's own process.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any, NoReturn

from llmrun.errors import BadModelError, LlmrunError
from llmrun.gguf.header import DRAFT_KINDS, Header
from llmrun.gguf.layers import MAX_LAYERS
from llmrun.gguf.metadata import length_of
from llmrun.gguf.reader import read_header, read_part

MAX_CONTEXT = 1 << 24
MAX_VOCABULARY = 1 << 20
MAX_VOCABULARY_BYTES = 64 * 1024 * 1024
MAX_TEMPLATE_CHARACTERS = 1 << 20

_NOT_MODELS = {
    "mmproj": "it is the image or audio part of a model",
    "imatrix": "it is an importance matrix",
    "vocab": "it is a vocabulary without weights",
}
_LAYER = re.compile(r"blk\.(\d+)\.")
_MAY_ROTATE_NOTHING = frozenset({"glm5-next", "granitehybrid", "kimi-linear", "kimi-k3"})  # others hang
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


def check_vocabulary(header: Header) -> None:
    """Check a vocabulary for errors that make llama.cpp abort.

    Reads the file again, which takes 20 ms for 50,000 tokens; so it is not a part of check().

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


def _numbers(value: Any) -> tuple[int, ...]:
    values = value if isinstance(value, tuple) else (value,)
    return tuple(item for item in values if isinstance(item, int))


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
