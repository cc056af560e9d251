"""What the header of a model file says, and the figures that follow from it.

Owns the names and meaning of metadata; must not know the file format (gguf.py reads it) nor which
values llama.cpp can't bear (check.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, prod
from pathlib import Path
from typing import Any

from llmrun.params import BOUNDS

# general.file_type -> the quantization's usual name, from llama.h (llama_ftype).
_FILE_TYPES: dict[int, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S",
    12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K",
    19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL",
    26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16",
    36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4", 39: "NVFP4", 40: "Q1_0", 41: "Q2_0",
}  # fmt: skip
_FILE_TYPE_GUESSED = 1024  # a flag that llama.cpp sets on a type it had to guess

# general.sampling.* -> our name of the parameter.
_SAMPLING_NAMES = {
    "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "temp": "temperature",
    "xtc_probability": "xtc_probability", "xtc_threshold": "xtc_threshold",
    "penalty_last_n": "repeat_last_n", "penalty_repeat": "repeat_penalty",
    "mirostat": "mirostat", "mirostat_tau": "mirostat_tau", "mirostat_eta": "mirostat_eta",
}  # fmt: skip
_WHOLE_NUMBERS = {"top_k", "repeat_last_n", "mirostat"}


@dataclass(frozen=True, slots=True)
class ArrayInfo:
    """An array that was skipped. element_type is GGUF's name for it, e.g. "string" or "f32"."""

    element_type: str
    length: int


Value = int | float | str | ArrayInfo | tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One row of the tensor table.

    Attributes:
        name: as it stands in the file.
        shape: ggml's order, the contiguous dimension first.
        type: ggml's name of the element type, e.g. "Q4_K".
        n_bytes: of its data, without padding.
        offset: of its data, in bytes from the start of the file.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    n_bytes: int
    offset: int

    @property
    def n_elements(self) -> int:
        """How many weights it holds."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Header:
    """Everything before the weights. Counts that the file does not state are 0.

    Texts are the file's own and may hold control characters: whoever prints them makes them safe.

    Attributes:
        path: the file that was read.
        file_size: in bytes.
        version: of the GGUF format.
        metadata: key -> number, text, tuple (arrays of up to 512 numbers, and those asked for; their
            strings are bytes, since a token need not be whole UTF-8), or ArrayInfo for arrays skipped.
        tensors: the tensor table, in the file's order.
    """

    path: Path
    file_size: int
    version: int
    metadata: Mapping[str, Value]
    tensors: tuple[Tensor, ...]

    def text(self, key: str) -> str | None:
        """The string under this key, None when there is none."""
        value = self.metadata.get(key)
        return value if isinstance(value, str) else None

    def integer(self, key: str) -> int | None:
        """The whole number under this key, None when there is none."""
        value = self.metadata.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def model_key(self, name: str) -> str:
        """The key of an architecture's own setting, e.g. "llama.block_count"."""
        return f"{self.architecture}.{name}"

    def _count(self, name: str) -> int:
        return max(self.integer(self.model_key(name)) or 0, 0)

    def _per_layer(self, name: str) -> int | tuple[int, ...]:
        value = self.metadata.get(self.model_key(name))
        if isinstance(value, tuple):
            return tuple(item if isinstance(item, int) and item > 0 else 0 for item in value)
        return self._count(name)

    @property
    def architecture(self) -> str:
        """E.g. "llama"; empty when the file names none."""
        return self.text("general.architecture") or ""

    @property
    def name(self) -> str:
        """What the makers call the model; the file's name when they don't."""
        return self.text("general.name") or self.path.stem

    @property
    def n_layers(self) -> int:
        """Transformer blocks."""
        return self._count("block_count")

    @property
    def n_embd(self) -> int:
        """Width of the residual stream."""
        return self._count("embedding_length")

    @property
    def n_heads(self) -> int | tuple[int, ...]:
        """Query heads: of every layer, or one number per layer."""
        return self._per_layer("attention.head_count")

    @property
    def n_kv_heads(self) -> int | tuple[int, ...]:
        """Key and value heads: of every layer, or one number per layer."""
        if self.model_key("attention.head_count_kv") in self.metadata:
            return self._per_layer("attention.head_count_kv")
        return self.n_heads

    @property
    def n_ctx_train(self) -> int:
        """Context window in tokens that the model was trained on."""
        return self._count("context_length")

    @property
    def key_length(self) -> int:
        """Elements of one key head."""
        return self._count("attention.key_length") or self._default_head_length()

    @property
    def value_length(self) -> int:
        """Elements of one value head."""
        return self._count("attention.value_length") or self._default_head_length()

    def _default_head_length(self) -> int:
        heads = self.n_heads
        # llama.cpp divides by the first layer's count.
        first = heads if isinstance(heads, int) else (heads[0] if heads else 0)
        return self.n_embd // first if first else 0

    @property
    def n_vocab(self) -> int:
        """Tokens in the vocabulary."""
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, ArrayInfo):
            return tokens.length
        return len(tokens) if isinstance(tokens, tuple) else self._count("vocab_size")

    @property
    def n_experts(self) -> int:
        """Experts of a mixture; 0 for a dense model."""
        return self._count("expert_count")

    @property
    def n_parameters(self) -> int:
        """Weights in this file."""
        return sum(tensor.n_elements for tensor in self.tensors)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors in this file (of a split model: in this part)."""
        return sum(tensor.n_bytes for tensor in self.tensors)

    @property
    def bytes_per_type(self) -> dict[str, int]:
        """Element type -> bytes of tensors that have it, the largest first."""
        sizes: Counter[str] = Counter()
        for tensor in self.tensors:
            sizes[tensor.type] += tensor.n_bytes
        return dict(sizes.most_common())

    @property
    def quant(self) -> str:
        """E.g. "Q4_K_M": what general.file_type says, or the type most bytes have; empty without tensors."""
        stated = self.integer("general.file_type")
        named = _FILE_TYPES.get(stated & ~_FILE_TYPE_GUESSED) if stated is not None else None
        return named or next(iter(self.bytes_per_type), "")

    @property
    def chat_template(self) -> str | None:
        """Jinja text, None when the file has none."""
        return self.text("tokenizer.chat_template")

    @property
    def license(self) -> str | None:
        """E.g. "apache-2.0", None when the file names none."""
        return self.text("general.license")

    @property
    def tokenizer_model(self) -> str:
        """E.g. "gpt2" (BPE) or "llama" (SentencePiece); empty when the file names none."""
        return self.text("tokenizer.ggml.model") or ""

    @property
    def split_count(self) -> int:
        """How many files the model is split into; 1 when it is whole."""
        return max(self.integer("split.count") or 1, 1)

    @property
    def rope_depends_on_window(self) -> bool:
        """Whether positions are encoded differently when the context window is made larger (LongRoPE)."""
        return any(tensor.name.startswith("rope_factors_long") for tensor in self.tensors)

    @property
    def recommended_sampling(self) -> dict[str, float]:
        """The makers' advice (general.sampling.*) by our names; values out of bounds are left out."""
        advice: dict[str, float] = {}
        for theirs, ours in _SAMPLING_NAMES.items():
            value = self.metadata.get(f"general.sampling.{theirs}")
            if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
                continue
            low, high = BOUNDS[ours]
            if low <= value <= high:
                advice[ours] = int(value) if ours in _WHOLE_NUMBERS else float(value)
        return advice

    def kv_bytes_per_token(self, bytes_per_element: float = 2.0) -> float:
        """Bytes of KV cache that one token takes in all layers together; an upper bound.

        Models with sliding windows or recurrent layers need less. bytes_per_element is 2.0 for f16.
        """
        heads = self.n_kv_heads
        total = heads * self.n_layers if isinstance(heads, int) else sum(heads[: self.n_layers])
        return total * (self.key_length + self.value_length) * bytes_per_element
