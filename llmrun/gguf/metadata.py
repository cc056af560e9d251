"""The metadata of a model file: values by key, and the settings of its architecture and layers.

header.py adds the tensors and the meaning of the other keys; layers.py computes from these values alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

NORMALIZER = "llmrun.tokenizer.normalizer"
"""Key of the steps, as JSON, that text goes through before llama.cpp tokenizes it; llama.cpp has none of them."""

SPACE_PREFIX = "llmrun.tokenizer.space_prefix"
"""Key of the texts that get a space in front: a key of engine/llama/text_rules.py's SPACE_PREFIXES."""

CHARSMAP = "llmrun.tokenizer.charsmap"
"""Key of a SentencePiece model's normalization rules (precompiled_charsmap), compressed with zlib, in base64."""

ADDED_FLAGS = {flag: f"llmrun.tokenizer.{flag}" for flag in ("lstrip", "rstrip", "single_word", "normalized", "piece")}
"""Flag of added tokens -> key of the ids that have it, separated by spaces; llama.cpp has none. A "piece" is a
user-defined one of a SentencePiece model."""


@dataclass(frozen=True, slots=True)
class ArrayInfo:
    """An array that was skipped."""

    length: int


Value = int | float | str | ArrayInfo | tuple[Any, ...]


@dataclass(frozen=True)
class ModelMetadata:
    """The metadata of a model file. Counts that the file does not state are 0.

    Texts are untrusted and may hold control characters.
    """

    path: Path  # of the file; of a split model the first. A file on a server has only its name here
    file_size: int  # in bytes; of all files of a split model together
    version: int  # of the GGUF format
    metadata: Mapping[str, Value]
    """Key -> number, text, tuple, or ArrayInfo. Arrays of up to 512 numbers and requested arrays are tuples; their
    strings are bytes, since a token need not be whole UTF-8."""

    def text(self, key: str) -> str | None:
        """Return the string of a key; None without one."""
        value = self.metadata.get(key)
        return value if isinstance(value, str) else None

    def integer(self, key: str) -> int | None:
        """Return the whole number of a key; None without one."""
        value = self.metadata.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def number(self, key: str) -> float | None:
        """Return the finite number of a key; None without one."""
        value = self.metadata.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            return None
        return value

    def model_key(self, name: str) -> str:
        """Return the key of an architecture's own setting, e.g. "llama.block_count"."""
        return f"{self.architecture}.{name}"

    def model_count(self, name: str) -> int:
        """Return an architecture's own count, e.g. "block_count"; 0 if it is not stated."""
        return max(self.integer(self.model_key(name)) or 0, 0)

    def model_number(self, name: str) -> float | None:
        """Return an architecture's own finite number; None if it is not stated."""
        value = self.number(self.model_key(name))
        return None if value is None else float(value)

    def _per_layer(self, name: str) -> int | tuple[int, ...]:
        value = self.metadata.get(self.model_key(name))
        if isinstance(value, tuple):
            return tuple(item if isinstance(item, int) and item > 0 else 0 for item in value)
        return self.model_count(name)

    @property
    def architecture(self) -> str:
        """E.g. "llama"; "" if the file names none."""
        return self.text("general.architecture") or ""

    @property
    def n_layers(self) -> int:
        """Transformer blocks."""
        return self.model_count("block_count")

    @property
    def n_embd(self) -> int:
        """Width of the residual stream."""
        return self.model_count("embedding_length")

    @property
    def n_heads(self) -> int | tuple[int, ...]:
        """Query heads, of all layers or one number per layer."""
        return self._per_layer("attention.head_count")

    @property
    def n_kv_heads(self) -> int | tuple[int, ...]:
        """Key and value heads, of all layers or one number per layer."""
        if self.model_key("attention.head_count_kv") in self.metadata:
            return self._per_layer("attention.head_count_kv")
        return self.n_heads

    @property
    def most_heads(self) -> int:
        """Maximum query heads of a layer."""
        heads = self.n_heads
        return heads if isinstance(heads, int) else max(heads, default=0)

    def heads_of(self, layer: int) -> int:
        return of_layer(self.n_heads, layer)

    def kv_heads_of(self, layer: int) -> int:
        return of_layer(self.n_kv_heads, layer)

    @property
    def n_ctx_train(self) -> int:
        """Context window of training, in tokens."""
        return self.model_count("context_length")

    @property
    def key_length(self) -> int:
        """Elements of one key head."""
        return self.model_count("attention.key_length") or self._default_head_length()

    @property
    def value_length(self) -> int:
        """Elements of one value head."""
        return self.model_count("attention.value_length") or self._default_head_length()

    def _default_head_length(self) -> int:
        heads = self.n_heads
        # llama.cpp divides by the first layer's count.
        first = heads if isinstance(heads, int) else (heads[0] if heads else 0)
        return self.n_embd // first if first else 0

    @property
    def is_latent(self) -> bool:
        """Whether keys and values are cached in a compressed form (multi-head latent attention)."""
        names = ("attention.key_length_mla", "attention.value_length_mla")
        return all(self.model_count(name) for name in names)


def length_of(value: Value | None) -> int:
    """Return the length of an array; 0 for other values."""
    return value.length if isinstance(value, ArrayInfo) else len(value) if isinstance(value, tuple) else 0


def of_layer(counts: int | tuple[int, ...], layer: int) -> int:
    """Return the count of a layer: that of all layers, or one of them; 0 if the file lists fewer layers."""
    if isinstance(counts, int):
        return counts
    return counts[layer] if layer < len(counts) else 0
