"""What the header of a model file says, and the figures that follow from it.

Owns the names and meaning of metadata; must not know the file format (reader.py reads it), which values
llama.cpp can't bear (rules.py) nor what it keeps of each layer (kv_layers.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite, prod
from pathlib import Path
from typing import Any

from llmrun.gguf.kv_layers import KvLayer, kv_layers, recurrent_bytes, window_of
from llmrun.gguf.placement import LayerShares, most_feed_forward
from llmrun.protocol.params import BOUNDS

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

# The matrices of a layer's experts, as llama.cpp's --n-cpu-moe means them.
_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(?:up|down|gate|gate_up)_(?:ch)?exps\.")

# Kind of chat template -> texts that all stand in it; the first that fits is meant.
_TEMPLATE_KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("phi4", ("<|im_start|>", "<|im_sep|>")),
    ("smolvlm", ("<|im_start|>", "<end_of_utterance>")),
    ("chatml", ("<|im_start|>",)),
    ("mistral", ("[INST]", "[SYSTEM_PROMPT]")),
    ("mistral", ("[INST]", "[AVAILABLE_TOOLS]")),
    ("llama2", ("[INST]", "<<SYS>>")),
    ("mistral", ("[INST]",)),
    ("gpt-oss", ("<|start|>", "<|channel|>")),
    ("gemma4", ("<|turn>",)),
    ("gemma", ("<start_of_turn>",)),
    ("llama3", ("<|start_header_id|>",)),
    ("llama4", ("<|header_start|>",)),
    ("kimi", ("<|im_middle|>",)),
    ("glm4", ("[gMASK]",)),
    ("granite", ("<|start_of_role|>",)),
    ("deepseek", ("<｜User｜>", "<｜Assistant｜>")),
    ("hunyuan", ("<｜hy_Assistant｜>",)),
    ("command-r", ("<|START_OF_TURN_TOKEN|>",)),
    ("exaone", ("[|assistant|]",)),
    ("phi3", ("<|assistant|>", "<|end|>")),
    ("zephyr", ("<|user|>", "<|assistant|>")),
    ("vicuna", ("USER: ", "ASSISTANT: ")),
    ("alpaca", ("### Instruction:",)),
)


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
        offset: of its data, in bytes from the start of its file.
        part: which file of a split model it is in, 0 for the first.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    n_bytes: int
    offset: int
    part: int = 0

    @property
    def n_elements(self) -> int:
        """How many weights it holds."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class TypeShare:
    """All tensors of one element type, e.g. "Q4_K"."""

    type: str
    n_tensors: int
    n_bytes: int
    n_elements: int

    @property
    def bits_per_weight(self) -> float:
        """Scales and minima count; 0.0 for tensors without elements."""
        return 8 * self.n_bytes / self.n_elements if self.n_elements else 0.0


@dataclass(frozen=True)
class Header:
    """Everything before the weights. Counts that the file does not state are 0.

    Texts are the file's own and may hold control characters: whoever prints them makes them safe.

    Attributes:
        path: the file that was read; of a split model the first. A file on a server has only its name here.
        file_size: in bytes; of all files of a split model together.
        version: of the GGUF format.
        metadata: key -> number, text, tuple (arrays of up to 512 numbers, and those asked for; their
            strings are bytes, since a token need not be whole UTF-8), or ArrayInfo for arrays skipped.
        tensors: the tensor table, in the file's order; of a split model that of all files.
        token_texts: the texts of those tokens whose numbers stand in the metadata.
    """

    path: Path
    file_size: int
    version: int
    metadata: Mapping[str, Value]
    tensors: tuple[Tensor, ...]
    token_texts: Mapping[int, bytes] = field(default_factory=dict)

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

    def _length_of(self, name: str) -> int:
        """Of an array, 0 where there is none."""
        array = self.metadata.get(name)
        return array.length if isinstance(array, ArrayInfo) else len(array) if isinstance(array, tuple) else 0

    def model_count(self, name: str) -> int:
        """An architecture's own setting that is a count, e.g. "block_count"; 0 when it is not stated."""
        return max(self.integer(self.model_key(name)) or 0, 0)

    def model_number(self, name: str) -> float | None:
        """An architecture's own setting that is a finite number, None when it is not stated."""
        value = self.metadata.get(self.model_key(name))
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            return None
        return float(value)

    def _per_layer(self, name: str) -> int | tuple[int, ...]:
        value = self.metadata.get(self.model_key(name))
        if isinstance(value, tuple):
            return tuple(item if isinstance(item, int) and item > 0 else 0 for item in value)
        return self.model_count(name)

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
        return self.model_count("block_count")

    @property
    def n_embd(self) -> int:
        """Width of the residual stream."""
        return self.model_count("embedding_length")

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
    def most_heads(self) -> int:
        """Query heads of the layer that has most."""
        heads = self.n_heads
        return heads if isinstance(heads, int) else max(heads, default=0)

    def heads_of(self, layer: int) -> int:
        """Query heads of one layer."""
        return _of_layer(self.n_heads, layer)

    def kv_heads_of(self, layer: int) -> int:
        """Key and value heads of one layer."""
        return _of_layer(self.n_kv_heads, layer)

    @property
    def n_ctx_train(self) -> int:
        """Context window in tokens that the model was trained on."""
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
    def n_vocab(self) -> int:
        """Tokens in the vocabulary."""
        return self._length_of("tokenizer.ggml.tokens") or self.model_count("vocab_size")

    @property
    def n_merges(self) -> int:
        """Merges of a byte-pair encoding; 0 for other vocabularies."""
        return self._length_of("tokenizer.ggml.merges")

    @property
    def n_experts(self) -> int:
        """Experts of a mixture; 0 for a dense model."""
        return self.model_count("expert_count")

    @property
    def n_experts_used(self) -> int | tuple[int, ...]:
        """Experts that compute one token: in every layer, or one number per layer."""
        return self._per_layer("expert_used_count")

    @property
    def expert_bytes(self) -> dict[int, int]:
        """Layer -> bytes of its experts; none of a dense model."""
        found: dict[int, int] = {}
        for tensor in self.tensors if self.n_experts else ():
            if match := _EXPERTS.match(tensor.name):
                found[int(match[1])] = found.get(int(match[1]), 0) + tensor.n_bytes
        return found

    @property
    def n_parameters(self) -> int:
        """Weights of the model."""
        return sum(tensor.n_elements for tensor in self.tensors)

    @property
    def readable_parameters(self) -> str:
        """E.g. "135M", "1.7B"."""
        count = self.n_parameters
        return f"{count / 1e9:.1f}B" if count >= 10**9 else f"{count / 1e6:.0f}M"

    @property
    def n_active_parameters(self) -> int:
        """Weights that one token is computed with: of a mixture's experts only as many as are used."""
        return int(sum(tensor.n_elements * self.active_share(tensor) for tensor in self.tensors))

    def active_share(self, tensor: Tensor) -> float:
        """How much of a tensor one token is computed with."""
        match = _EXPERTS.match(tensor.name) if self.n_experts else None
        return min(_of_layer(self.n_experts_used, int(match[1])) / self.n_experts, 1.0) if match else 1.0

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.n_bytes for tensor in self.tensors)

    @property
    def type_shares(self) -> tuple[TypeShare, ...]:
        """The quant mix: element types with their tensors, the one with most bytes first."""
        rows: dict[str, list[int]] = {}
        for tensor in self.tensors:
            row = rows.setdefault(tensor.type, [0, 0, 0])
            row[0] += 1
            row[1] += tensor.n_bytes
            row[2] += tensor.n_elements
        shares = [TypeShare(kind, *row) for kind, row in rows.items()]
        return tuple(sorted(shares, key=lambda share: -share.n_bytes))

    @property
    def bytes_per_type(self) -> dict[str, int]:
        """Element type -> bytes of tensors that have it, the largest first."""
        return {share.type: share.n_bytes for share in self.type_shares}

    @property
    def bits_per_weight(self) -> float:
        """Of the whole model; 0.0 without tensors."""
        n_parameters = self.n_parameters
        return 8 * self.weight_bytes / n_parameters if n_parameters else 0.0

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
    def template_kind(self) -> str:
        """What the chat template looks like, e.g. "chatml"; "other" is none we know, empty when there is none."""
        template = self.chat_template
        if template is None:
            return ""
        fitting = (kind for kind, texts in _TEMPLATE_KINDS if all(text in template for text in texts))
        return next(fitting, "other")

    @property
    def license(self) -> str | None:
        """E.g. "apache-2.0", None when the file names none."""
        return self.text("general.license")

    @property
    def author(self) -> str | None:
        """Who made the model, None when the file does not say."""
        return self.text("general.author") or self.text("general.organization")

    @property
    def base_model(self) -> str | None:
        """What it was made from, "owner/repo" where the file tells it; None when it tells nothing."""
        for key in ("general.base_model.0.repo_url", "general.source.huggingface.repository"):
            if found := self.text(key):
                return found.removeprefix("https://huggingface.co/")
        return self.text("general.base_model.0.name")

    @property
    def tokenizer_model(self) -> str:
        """E.g. "gpt2" (BPE) or "llama" (SentencePiece); empty when the file names none."""
        return self.text("tokenizer.ggml.model") or ""

    @property
    def tokenizer_pre(self) -> str:
        """How text is cut before merges, e.g. "qwen2"; empty when the file does not say."""
        return self.text("tokenizer.ggml.pre") or ""

    def special_token(self, name: str) -> str | None:
        """The text of a special token, e.g. "bos", "eos" or "eot"; None when the file names none."""
        number = self.integer(f"tokenizer.ggml.{name}_token_id")
        text = self.token_texts.get(-1 if number is None else number)
        return None if text is None else text.decode("utf-8", "replace")

    @property
    def split_count(self) -> int:
        """How many files the model is split into; 1 when it is whole."""
        return max(self.integer("split.count") or 1, 1)

    @property
    def split_number(self) -> int | None:
        """Which of them was read, 0 for the first; None when the file does not say."""
        return self.integer("split.no")

    @property
    def rope_base(self) -> float:
        """Base frequency of rotary positions."""
        return self.model_number("rope.freq_base") or 10_000.0

    @property
    def rope_scaling(self) -> str:
        """How positions are stretched: "linear", "yarn" or "longrope"; empty when they are not."""
        stated = self.text(self.model_key("rope.scaling.type")) or ("linear" if self.rope_factor != 1.0 else "")
        return "" if stated == "none" else stated

    @property
    def rope_factor(self) -> float:
        """By how much they are stretched; 1.0 when they are not."""
        return self.model_number("rope.scaling.factor") or self.model_number("rope.scale_linear") or 1.0

    @property
    def rope_original_context(self) -> int:
        """The context window in tokens before the stretching; 0 when the file does not say."""
        return self.model_count("rope.scaling.original_context_length")

    @property
    def rope_dimensions(self) -> int:
        """Elements of a head that are rotated."""
        return self.model_count("rope.dimension_count") or self.key_length

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

    @property
    def sliding_window(self) -> int:
        """Tokens that layers with a sliding window look back at; 0 when there are none."""
        return window_of(self)

    @cached_property
    def kv_layers(self) -> tuple[KvLayer, ...]:
        """The layers that keep keys and values; the others are recurrent or look at another one's."""
        return kv_layers(self)

    @property
    def most_feed_forward(self) -> int:
        return most_feed_forward(self)

    @cached_property
    def layer_shares(self) -> LayerShares:
        """Shares of weights and KV cache of each layer."""
        return LayerShares.of(self)

    @property
    def n_window_layers(self) -> int:
        """Layers with a sliding window, of those that keep keys and values."""
        return sum(layer.window > 0 for layer in self.kv_layers)

    @property
    def is_latent(self) -> bool:
        """Whether keys and values are kept in a compressed form (multi-head latent attention)."""
        names = ("attention.key_length_mla", "attention.value_length_mla")
        return all(self.model_count(name) for name in names)

    @property
    def recurrent_bytes(self) -> int:
        """Bytes of state that recurrent layers keep for a sequence, however long it is; 0 without such layers."""
        return recurrent_bytes(self)

    def kv_bytes_per_token(self, bytes_per_element: float = 2.0) -> float:
        """Bytes of KV cache that one token takes in all layers together, those with a sliding window too.

        bytes_per_element is 2.0 for f16.
        """
        return sum(layer.elements for layer in self.kv_layers) * bytes_per_element

    def kv_bytes(self, n_tokens: int, bytes_per_element: float = 2.0, *, batch: int | None = None) -> float:
        """Bytes of KV cache for a window of so many tokens, without the recurrent state.

        Args:
            n_tokens: context window.
            bytes_per_element: 2.0 for f16.
            batch: tokens computed at a time, when layers with a sliding window keep only those and their window;
                None when they keep all (llama.cpp's swa_full, its default).
        """
        total = 0.0
        for layer in self.kv_layers:
            kept = n_tokens
            if batch is not None and layer.window:
                kept = min(n_tokens, -(-(layer.window + batch) // 256) * 256)  # llama.cpp rounds up to 256
            total += layer.elements * kept * bytes_per_element
        return total


def _of_layer(counts: int | tuple[int, ...], layer: int) -> int:
    if isinstance(counts, int):
        return counts
    return counts[layer] if layer < len(counts) else 0
