"""The header of a model file, or one of several: tensors, the meaning of its metadata, and the figures that follow.

reader.py has the file format, rules.py the values that are refused, layers.py the KV cache of each
architecture.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import NoReturn

from llmrun.errors import BadModelError
from llmrun.gguf.filenames import all_parts
from llmrun.gguf.layers import (
    MAX_LAYERS,
    KvLayer,
    LayerShares,
    can_roll_back,
    head_elements,
    kv_layers,
    most_feed_forward,
    n_heads,
    recurrent_bytes,
    recurrent_layers,
    window_of,
)
from llmrun.gguf.metadata import ModelMetadata, length_of, of_layer
from llmrun.gguf.types import FILE_TYPES
from llmrun.protocol.params import BOUNDS, PARAMETERS
from llmrun.protocol.sizes import readable_count

# general.file_type -> the quantization's usual name.
_FILE_TYPES = {number: name for name, number in FILE_TYPES.items()} | {38: "MXFP4", 39: "NVFP4"}
_FILE_TYPE_GUESSED = 1024  # a flag that llama.cpp sets on a type it had to guess

# The matrices of a layer's experts, as llama.cpp's --n-cpu-moe means them.
_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(?:up|down|gate|gate_up)_(?:ch)?exps\.")

# Architectures whose layers for multi-token prediction can draft here: llama.cpp's graph for them gives the hidden
# states of all rows. The proven ones were run, in tiny; the others are used only on request.
_PROVEN = frozenset({"qwen35", "glm4moe", "step35"})
_DRAFTING = frozenset(
    {*_PROVEN, "qwen35moe", "glm-dsa", "deepseek2", "deepseek32", "cohere2moe", "nemotron_h_moe", "bailingmoe3"}
)

DRAFT_KINDS = {
    "mtp": "prediction heads (MTP) without a model",
    "gemma4-assistant": "a prediction head of Gemma 4 (MTP)",
    "eagle3": "an EAGLE-3 head",
    "dflash": "a DFlash drafter",
    "dspark": "a DSpark drafter",
}
"""Kind of a file that can only draft for another model -> words. Others than "mtp" can't be used here: they read hidden
states of several layers of that model. By general.architecture, as in llama.cpp's llama-arch.cpp."""

# Kind of chat template -> texts that it contains; the first match counts.
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
class Tensor:
    """One row of the tensor table."""

    name: str  # untrusted text
    shape: tuple[int, ...]  # in ggml's order, the contiguous dimension first
    type: str  # ggml's name of the element type, e.g. "Q4_K"
    n_bytes: int  # of its data, without padding
    offset: int  # of its data, in bytes from the start of its file
    part: int = 0  # number of its file in a split model, from 0

    @property
    def n_elements(self) -> int:
        """Number of weights."""
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
        """Average, with scales and minima; 0.0 for tensors without elements."""
        return 8 * self.n_bytes / self.n_elements if self.n_elements else 0.0


@dataclass(frozen=True)
class Header(ModelMetadata):
    """Everything before the weights."""

    tensors: tuple[Tensor, ...]  # in the file's order; of a split model those of all files
    token_texts: Mapping[int, bytes] = field(default_factory=dict)  # of tokens whose ids are in the metadata

    @property
    def name(self) -> str:
        """The makers' name of the model, or else the file's name."""
        return self.text("general.name") or self.path.stem

    @property
    def n_vocab(self) -> int:
        """Tokens in the vocabulary."""
        return length_of(self.metadata.get("tokenizer.ggml.tokens")) or self.model_count("vocab_size")

    @property
    def n_merges(self) -> int:
        """Merges of a byte-pair encoding; 0 for other vocabularies."""
        return length_of(self.metadata.get("tokenizer.ggml.merges"))

    @property
    def n_experts(self) -> int:
        """Experts of a mixture; 0 for a dense model."""
        return self.model_count("expert_count")

    @property
    def n_experts_used(self) -> int | tuple[int, ...]:
        """Experts that compute one token, in all layers or one number per layer."""
        return self._per_layer("expert_used_count")

    @property
    def expert_bytes(self) -> dict[int, int]:
        """Layer -> bytes of its experts; empty for a dense model."""
        sizes: dict[int, int] = {}
        for tensor in self.tensors if self.n_experts else ():
            if match := _EXPERTS.match(tensor.name):
                sizes[int(match[1])] = sizes.get(int(match[1]), 0) + tensor.n_bytes
        return sizes

    @property
    def n_parameters(self) -> int:
        """Weights of the model."""
        return sum(tensor.n_elements for tensor in self.tensors)

    @property
    def readable_parameters(self) -> str:
        """Number of weights in words, e.g. "135M", "1.71B"."""
        return readable_count(self.n_parameters)

    @property
    def n_active_parameters(self) -> int:
        """Weights that compute one token: of a mixture, only the used experts'."""
        return int(sum(tensor.n_elements * self.active_share(tensor) for tensor in self.tensors))

    def active_share(self, tensor: Tensor) -> float:
        """Return the share of a tensor that computes one token."""
        match = _EXPERTS.match(tensor.name) if self.n_experts else None
        return min(of_layer(self.n_experts_used, int(match[1])) / self.n_experts, 1.0) if match else 1.0

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.n_bytes for tensor in self.tensors)

    @property
    def n_draft_heads(self) -> int:
        """Layers that predict further tokens (multi-token prediction, NextN) and whose tensors are in the file."""
        count = n_heads(self)
        first = f"blk.{self.n_layers - count}.nextn.eh_proj.weight"
        return count if count and any(tensor.name == first for tensor in self.tensors) else 0

    @property
    def can_use_heads(self) -> bool:
        """Whether these layers can draft here."""
        can_cut = not self.recurrent_bytes or self.can_roll_back
        return self.architecture in _DRAFTING and can_cut and self.n_draft_heads > 0

    @property
    def has_proven_heads(self) -> bool:
        """Whether they draft by default."""
        return self.can_use_heads and self.architecture in _PROVEN

    @property
    def is_heads_only(self) -> bool:
        """Whether the file has these layers and not the model's own (mtp-*.gguf)."""
        return self.n_draft_heads > 0 and not any(tensor.name.startswith("blk.0.") for tensor in self.tensors)

    @property
    def draft_kind(self) -> str:
        """A key of DRAFT_KINDS; "" for a model of its own."""
        if self.architecture == "dflash" and any(tensor.name == "markov_w1.weight" for tensor in self.tensors):
            return "dspark"
        if self.architecture in DRAFT_KINDS:
            return self.architecture
        return "mtp" if self.is_heads_only else ""

    @property
    def target_layers(self) -> tuple[int, ...]:
        """Layers of the other model whose hidden states an EAGLE-3, DFlash or DSpark file reads."""
        layers = self.metadata.get(self.model_key("target_layers"))
        return tuple(layer for layer in layers if isinstance(layer, int)) if isinstance(layers, tuple) else ()

    @property
    def head_bytes(self) -> int:
        """Bytes of their tensors."""
        names = tuple(f"blk.{layer}." for layer in range(self.n_layers - self.n_draft_heads, self.n_layers))
        return sum(tensor.n_bytes for tensor in self.tensors if names and tensor.name.startswith(names))

    def head_cache_bytes(self, n_tokens: int, bytes_per_element: float = 2.0) -> int:
        """Return the bytes of their KV cache."""
        return int(head_elements(self) * n_tokens * bytes_per_element) if self.n_draft_heads else 0

    @property
    def type_shares(self) -> tuple[TypeShare, ...]:
        """The quant mix: element types in descending order of bytes."""
        rows: dict[str, list[int]] = {}
        for tensor in self.tensors:
            row = rows.setdefault(tensor.type, [0, 0, 0])
            row[0] += 1
            row[1] += tensor.n_bytes
            row[2] += tensor.n_elements
        shares = [TypeShare(type_name, *row) for type_name, row in rows.items()]
        return tuple(sorted(shares, key=lambda share: -share.n_bytes))

    @property
    def bytes_per_type(self) -> dict[str, int]:
        """Element type -> bytes, in descending order."""
        return {share.type: share.n_bytes for share in self.type_shares}

    @property
    def bits_per_weight(self) -> float:
        """Average over all weights; 0.0 without tensors."""
        n_parameters = self.n_parameters
        return 8 * self.weight_bytes / n_parameters if n_parameters else 0.0

    @property
    def quant(self) -> str:
        """Name of general.file_type, e.g. "Q4_K_M", or else the type of most bytes; "" without tensors."""
        stated = self.integer("general.file_type")
        named = _FILE_TYPES.get(stated & ~_FILE_TYPE_GUESSED) if stated is not None else None
        return named or next(iter(self.bytes_per_type), "")

    @property
    def chat_template(self) -> str | None:
        """Jinja text; None without one."""
        return self.text("tokenizer.chat_template")

    @property
    def template_kind(self) -> str:
        """Kind of the chat template, e.g. "chatml"; "other" for unknown kinds, "" without a template."""
        template = self.chat_template
        if template is None:
            return ""
        fitting = (name for name, texts in _TEMPLATE_KINDS if all(text in template for text in texts))
        return next(fitting, "other")

    @property
    def license(self) -> str | None:
        """E.g. "apache-2.0"; None if the file names none."""
        return self.text("general.license")

    @property
    def author(self) -> str | None:
        """Author or organization; None if the file names none."""
        return self.text("general.author") or self.text("general.organization")

    @property
    def base_model(self) -> str | None:
        """The base model, as "owner/repo" if the file has that; None if it names none."""
        for key in ("general.base_model.0.repo_url", "general.source.huggingface.repository"):
            if url := self.text(key):
                return url.removeprefix("https://huggingface.co/")
        return self.text("general.base_model.0.name")

    @property
    def tokenizer_model(self) -> str:
        """E.g. "gpt2" (BPE) or "llama" (SentencePiece); "" if the file names none."""
        return self.text("tokenizer.ggml.model") or ""

    @property
    def tokenizer_pre(self) -> str:
        """The pre-tokenizer, e.g. "qwen2"; "" if the file names none."""
        return self.text("tokenizer.ggml.pre") or ""

    def special_token(self, name: str) -> str | None:
        """Return the text of a special token, e.g. "bos", "eos" or "eot"; None if the file names none."""
        number = self.integer(f"tokenizer.ggml.{name}_token_id")
        text = self.token_texts.get(-1 if number is None else number)
        return None if text is None else text.decode("utf-8", "replace")

    @property
    def split_count(self) -> int:
        """Number of files of a split model; 1 if it is whole."""
        return max(self.integer("split.count") or 1, 1)

    @property
    def split_number(self) -> int | None:
        """Number of this file in a split model, from 0; None if the file does not state it."""
        return self.integer("split.no")

    @property
    def rope_base(self) -> float:
        """Base frequency of rotary positions."""
        return self.model_number("rope.freq_base") or 10_000.0

    @property
    def rope_scaling(self) -> str:
        """Scaling of positions: "linear", "yarn" or "longrope"; "" without."""
        stated = self.text(self.model_key("rope.scaling.type")) or ("linear" if self.rope_factor != 1.0 else "")
        return "" if stated == "none" else stated

    @property
    def rope_factor(self) -> float:
        """Factor of the scaling; 1.0 without."""
        return self.model_number("rope.scaling.factor") or self.model_number("rope.scale_linear") or 1.0

    @property
    def rope_original_context(self) -> int:
        """Context window before the scaling, in tokens; 0 if the file does not state it."""
        return self.model_count("rope.scaling.original_context_length")

    @property
    def rope_dimensions(self) -> int:
        """Elements of a head that are rotated."""
        return self.model_count("rope.dimension_count") or self.key_length

    @cached_property
    def rope_depends_on_window(self) -> bool:
        """Whether the encoding of positions depends on the context window (LongRoPE)."""
        return any(tensor.name.startswith("rope_factors_long") for tensor in self.tensors)

    @property
    def recommended_sampling(self) -> dict[str, float]:
        """Sampling parameters of general.sampling.* by our names; values out of bounds are left out."""
        advice: dict[str, float] = {}
        for name, (low, high) in BOUNDS.items():
            row = PARAMETERS[name]
            value = self.number(f"general.sampling.{row.card}") if row.card else None
            if value is not None and low <= value <= high:
                advice[name] = int(value) if row.is_whole else float(value)
        return advice

    @property
    def sliding_window(self) -> int:
        """Tokens of the sliding window; 0 without one."""
        return window_of(self)

    @cached_property
    def kv_layers(self) -> tuple[KvLayer, ...]:
        """The layers with a KV cache of their own; others are recurrent or share one."""
        return kv_layers(self)

    @property
    def most_feed_forward(self) -> int:
        return most_feed_forward(self, self.n_experts_used)

    @cached_property
    def layer_shares(self) -> LayerShares:
        """Shares of the weights of each layer."""
        return LayerShares.of(self.n_layers, {tensor.name: tensor.n_bytes for tensor in self.tensors})

    @property
    def n_window_layers(self) -> int:
        """Number of KV layers with a sliding window."""
        return sum(layer.window > 0 for layer in self.kv_layers)

    @property
    def recurrent_bytes(self) -> int:
        """Bytes of recurrent state of a sequence, whatever its length."""
        return recurrent_bytes(self)

    @property
    def can_roll_back(self) -> bool:
        """Whether a recurrent state can take back its last tokens, with a copy of it for each of them."""
        return can_roll_back(self)

    @property
    def window_bytes(self) -> int:
        """Bytes of the sliding windows' keys and values, as f16."""
        return sum(2 * layer.elements * layer.window for layer in self.kv_layers)

    def kv_bytes_per_token(self, bytes_per_element: float = 2.0) -> float:
        """Return the bytes of KV cache of one token in all layers; an element of f16 has 2.0 bytes."""
        return sum(layer.elements for layer in self.kv_layers) * bytes_per_element

    def n_caches(self, sequences: int) -> int:
        """Return the number of KV caches of equal size of some sequences: one that they share, or one of each.

        A shared one has the cells of several windows; llama.cpp takes them for one window, and would choose LongRoPE's
        factors by its size.
        """
        return sequences if self.rope_depends_on_window else 1

    def cache_bytes(self, n_tokens: int, bytes_per_element: float = 2.0, *, ubatch: int, sequences: int = 1) -> float:
        """Return the bytes of a KV cache without the recurrent state, as llama_kv_cache_iswa allocates it.

        Args:
            n_tokens: of all sequences together.
            ubatch: tokens of a micro-batch, which sliding windows cache beside the windows.
            sequences: that have room in it.
        """
        elements = sum(layer.elements * self._cells(layer, n_tokens, ubatch, sequences) for layer in self.kv_layers)
        return elements * bytes_per_element

    def cache_shares(
        self, n_tokens: int, bytes_per_element: float = 2.0, *, ubatch: int, sequences: int = 1
    ) -> tuple[float, ...]:
        """Return each layer's fraction of a KV cache with recurrent states; arguments as in cache_bytes()."""
        sizes = [0.0] * min(self.n_layers, MAX_LAYERS)
        for layer in self.kv_layers:
            sizes[layer.layer] += layer.elements * self._cells(layer, n_tokens, ubatch, sequences) * bytes_per_element
        recurrent = recurrent_layers(self)
        for number in recurrent:
            sizes[number] += self.recurrent_bytes / len(recurrent) * sequences
        total = sum(sizes) or 1.0
        return tuple(size / total for size in sizes)

    def _cells(self, layer: KvLayer, n_tokens: int, ubatch: int, sequences: int) -> int:
        """Return the cells of a layer's caches; arguments as in cache_bytes()."""
        if not layer.window:
            return n_tokens
        n_caches = self.n_caches(sequences)
        of_each = layer.window * (sequences // n_caches) + ubatch
        return min(n_tokens, n_caches * -(-of_each // 256) * 256)


# ---- split models (`-00001-of-00003.gguf`) ----


def other_parts(first: Header) -> tuple[str, ...]:
    """Return the names of the files after the first, in order; none if the model is whole.

    Raises:
        BadModelError: the file is not the first, or the others' names don't follow from its name.
    """
    name = first.path.name
    if first.split_count == 1:
        return ()
    names = all_parts(name)
    number = first.split_number
    if number:
        hint = f"open the first: {names[0]}" if len(names) > number else "open the first"
        raise BadModelError(f"{name!r} is part {number + 1} of a split model", why=f"'split.no' is {number}", hint=hint)
    if len(names) != first.split_count:
        raise BadModelError(
            f"{name!r} is the first of {first.split_count} files, but its name does not tell their names",
            why=f"'split.count' is {first.split_count}",
            hint=f"restore the names of the files: they end in -00001-of-{first.split_count:05}.gguf",
        )
    if names[0] != name:
        _fail(first, f"'split.no' is 0, but by its name it is not {names[0]!r}")
    return names[1:]


def unite(first: Header, others: Iterable[Header]) -> Header:
    """Return one header for the whole model: the first file's metadata, all files' tensors and bytes.

    Args:
        others: headers of other_parts(), in that order.

    Raises:
        BadModelError: a file's number contradicts its name, or the number of tensors is wrong.
    """
    tensors = list(first.tensors)
    size = first.file_size
    for number, part in enumerate(others, 1):
        if part.split_number != number:
            stated = part.split_number
            _fail(part, f"'split.no' is {'missing' if stated is None else stated}; it should be {number}")
        tensors += [replace(tensor, part=number) for tensor in part.tensors]
        size += part.file_size
    _check_names(first, tensors)
    stated = first.integer("split.tensors.count")
    if stated != len(tensors):
        shown = "missing" if stated is None else stated
        _fail(first, f"'split.tensors.count' is {shown}, but its files have {len(tensors)} tensors")
    return replace(first, file_size=size, tensors=tuple(tensors))


def _check_names(first: Header, tensors: list[Tensor]) -> None:
    names: set[str] = set()
    for tensor in tensors:
        if tensor.name in names:
            _fail(first, f"tensor {tensor.name!r} is in two of its files")
        names.add(tensor.name)


def _fail(header: Header, why: str) -> NoReturn:
    raise BadModelError(
        f"the files of the split model {header.path.name!r} don't belong together",
        why=why,
        hint="download all of them again",
    )
