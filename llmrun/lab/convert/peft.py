"""Conversion of a PEFT folder (adapter_config.json, adapter_model.safetensors) to the GGUF file of a LoRA adapter.

The tensors equal the ones that llama.cpp's convert_lora_to_gguf.py writes; features that it drops silently are refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llmrun.errors import BadModelError, ModelNotFoundError, UsageError, listed
from llmrun.gguf.adapter import adapter_facts, check_fits, ties_embeddings
from llmrun.gguf.header import Header
from llmrun.gguf.reader import read_header
from llmrun.gguf.rules import check
from llmrun.gguf.types import FILE_TYPES
from llmrun.lab.convert.architectures import FAMILIES, Family, bare_name, find_family, required_tensors, text_config
from llmrun.lab.convert.checkpoint import (
    CheckpointTensor,
    TensorSource,
    array_source,
    map_values,
    permute_heads,
    read_table,
    require_floats,
    stored_source,
    to_float32,
)
from llmrun.lab.convert.folder import Config, Folder, is_file, open_regular
from llmrun.lab.convert.gguf_file import OnProgress, OutputTensor, embeddings_name, output_tensor, write_model
from llmrun.lab.convert.hyperparameters import MAX_WIDTH, Bounds, read_shape
from llmrun.lab.convert.job import QUANTIZATION_VERSION, ConvertedModel, adapter_metadata, read_config

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NAME = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(?:embedding_)?([AB])(?:\.default)?(?:\.weight)?")
_HEAD = "lm_head.weight"
_SHOWN = 3
_MIN_ALPHA = 1e-6
_MAX_PATTERN, _MAX_REPEATS = 200, 2
# PEFT settings that change the computation -> their names in messages.
_REFUSED = {
    "use_dora": "DoRA",
    "modules_to_save": "fully trained layers (modules_to_save)",
    "lora_bias": "biases",
    "layer_replication": "layers used more than once (layer_replication)",
    "trainable_token_indices": "trained single tokens (trainable_token_indices)",
    "alora_invocation_tokens": "an activated LoRA, which applies only after certain tokens",
    "target_parameters": "parameters outside of layers (target_parameters)",
    "fan_in_fan_out": "transposed weights (fan_in_fan_out)",
}
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq")  # initializations that subtract the adapter from the model


class BaseModel(NamedTuple):
    """Base model of an adapter."""

    family: Family
    n_layers: int
    n_heads: int
    n_kv_heads: int
    tied: bool  # the embeddings are the output matrix too
    header: Header | None = None  # of its GGUF file; None for a Hugging Face folder


def convert_adapter(
    folder: Path,
    base: Path | None,
    target: Path,
    *,
    type: str = "",  # noqa: A002  # what the option is called
    on_progress: OnProgress = lambda done, total: None,
) -> ConvertedModel:
    """Convert a PEFT folder to an adapter's GGUF file; arguments and errors as in convert_folder().

    Args:
        base: the base model: a Hugging Face folder, its config.json or a GGUF file; None for the folder named in
            adapter_config.json.

    Raises:
        UsageError: the adapter is not supported, does not fit the base, or no base is named.
    """
    source = Folder(folder)
    config = Config(source.json(CONFIG))
    _refuse(config)
    model = _read_base(folder, base, config)
    if not source.has(WEIGHTS):
        raise ModelNotFoundError(f"{str(folder)!r} has no {WEIGHTS}", hint="save the adapter as safetensors")
    with open_regular(folder / WEIGHTS) as file:
        tensors = list(_planned(read_table(file, folder / WEIGHTS), config, model, type.upper()))
        type_name = type.upper() or tensors[0].type
        metadata: dict[str, Any] = {
            "general.architecture": model.family.name,
            "general.type": "adapter",
            **adapter_metadata(source, str(config.get("base_model_name_or_path") or "")),
            "general.file_type": FILE_TYPES[type_name],
            "general.quantization_version": QUANTIZATION_VERSION,
            "adapter.type": "lora",
            "adapter.lora.alpha": _alpha(config),
        }

        def check_adapter(header: Header) -> None:
            facts = adapter_facts(header)
            if model.header is not None:
                check_fits(facts, model.header)

        size = write_model(target, metadata, tensors, on_progress, check_adapter)
    count = sum(math.prod(tensor.source.shape) for tensor in tensors)
    return ConvertedModel(target, model.family.name, type_name, size, len(tensors), count, ())


# ---- settings --------------------------------------------------------------------------------------


def _refuse(config: Config) -> None:
    """Raise UsageError for a setting that an adapter's file can't represent."""
    hint = "merge it into its model with PEFT (merge_and_unload), and convert that"
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UsageError(f"adapters of the type {str(kind)[:40]} can't be converted", why="only LoRA can", hint=hint)
    refused = [words for name, words in _REFUSED.items() if config.get(name)]
    if config.get("bias") not in (None, "none"):
        refused.append("biases")
    start = str(config.get("init_lora_weights") or "").lower()
    if start.startswith(_CHANGE_THE_BASE):
        refused.append(f"a changed base model (init_lora_weights {start[:40]!r})")
    if refused:
        raise UsageError("this adapter can't be converted", why=f"it has {refused[0]}", hint=hint)


def _alpha(config: Config) -> float:
    """Return the alpha that llama.cpp multiplies by, after dividing by the rank."""
    alpha = config.number("lora_alpha")
    if abs(alpha) < _MIN_ALPHA:
        config.fail("lora_alpha", "different from 0")
    return alpha * math.sqrt(config.count("r", MAX_WIDTH)) if config.flag("use_rslora") else alpha


def _extra_scale(config: Config, module: str, rank: int) -> float:
    """Return the ratio of a module's scale in PEFT to the scale that llama.cpp will use."""
    patterns = config.part("alpha_pattern")
    key = next((key for key in patterns if _pattern(key).fullmatch(module)), None)
    alpha = Config(patterns).number(key) if key is not None else config.number("lora_alpha")
    scale = alpha / (math.sqrt(rank) if config.flag("use_rslora") else rank)
    return scale / (_alpha(config) / rank)


@cache
def _pattern(key: str) -> re.Pattern[str]:
    """Compile a key of alpha_pattern: a regular expression for the end of a layer's name.

    Refuses expressions that may take exponential time: repeated groups, or many repetitions.
    """
    repeats = re.findall(r"[*+?{]", key)
    if len(key) <= _MAX_PATTERN and len(repeats) <= _MAX_REPEATS and not re.search(r"\)[*+?{]", key):
        with suppress(re.error):
            return re.compile(rf"(?:.*\.)?(?:{key})")
    raise UsageError("this adapter can't be converted", why=f"alpha_pattern has the unsupported pattern {key[:80]!r}")


# ---- the base model --------------------------------------------------------------------------------


def _read_base(folder: Path, base: Path | None, config: Config) -> BaseModel:
    named = str(config.get("base_model_name_or_path") or "")
    if base is None:
        candidates = [Path(named), folder / named] if named else []
        base = next((path for path in candidates if is_file(path / "config.json")), None)
    if base is None:
        raise UsageError(
            "the adapter's base model is not named",
            why=f"{CONFIG} names {named[:80]!r}, which is not a folder here" if named else f"{CONFIG} names none",
            hint=f"llmrun convert {folder} --base MODEL: its folder, its GGUF file or its name",
        )
    if base.is_file() and base.suffix != ".json":
        return _of_header(read_header(base))
    source = Folder(base.parent if base.is_file() else base)
    model = read_config(source)
    family = find_family(model)[1]
    settings = text_config(model, family)
    shape = read_shape(settings, family, source, Bounds())
    tied = family.tied or settings.flag("tie_word_embeddings")
    return BaseModel(family, shape.n_layers, shape.n_heads, shape.n_kv_heads, tied)


def _of_header(header: Header) -> BaseModel:
    check(header)
    candidates = (
        family for family in FAMILIES.values() if bool(family.experts or family.halves) == (header.n_experts > 0)
    )
    family = next((candidate for candidate in candidates if candidate.name == header.architecture), None)
    if family is None:
        raise UsageError(f"adapters of {header.architecture!r} models can't be converted")
    return BaseModel(
        family, header.n_layers, header.heads_of(0), header.kv_heads_of(0), ties_embeddings(header), header
    )


# ---- tensors ---------------------------------------------------------------------------------------


def _planned(
    stored: Mapping[str, CheckpointTensor], config: Config, base: BaseModel, type_name: str
) -> Iterator[OutputTensor]:
    """Yield the tensors of the file: A and B of each pair."""
    pairs = _pairs(stored)
    names = _adaptable_tensors(base)
    bare = {module: bare_name(f"{module}.weight", base.family) or module for module in pairs}
    _refuse_tensors([module for module in pairs if bare[module] not in names])
    order = {name: number for number, name in enumerate(names)}
    for module in sorted(pairs, key=lambda module: order[bare[module]]):
        pair = pairs[module]
        if len(pair) < 2:
            raise BadModelError(f"the adapter has only one of two matrices for {module!r}")
        a, b = (require_floats(stored_source(pair[matrix])) for matrix in "AB")
        if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1] or not all(a.shape + b.shape):
            raise BadModelError(f"the matrices for {module!r} have the shapes {list(a.shape)} and {list(b.shape)}")
        scale = _extra_scale(config, module, a.shape[0])
        yield from _pair(names[bare[module]], bare[module], a, b, scale, base, type_name)


def _pairs(stored: Mapping[str, CheckpointTensor]) -> dict[str, dict[str, CheckpointTensor]]:
    """Return name of a model's layer -> its matrices by name, "A" and "B"."""
    pairs: dict[str, dict[str, CheckpointTensor]] = {}
    unknown: list[str] = []
    for name, tensor in stored.items():
        match = _NAME.fullmatch(name)
        if match is None:
            unknown.append(name)
        else:
            pairs.setdefault(match[1], {})[match[2]] = tensor
    _refuse_tensors(unknown)
    if not pairs:
        raise BadModelError(f"{WEIGHTS} holds no tensors")
    return pairs


def _adaptable_tensors(base: BaseModel) -> dict[str, str]:
    """Return bare name -> GGUF name of each tensor that an adapter may change, in the file's order."""
    required = required_tensors(base.family, base.n_layers)
    names = {f"{hf_name}.weight": f"{gguf_name}.weight" for hf_name, gguf_name in required.items()}
    if base.tied:
        del names[embeddings_name(base.family)]
        return names
    return {**names, _HEAD: "output.weight"}


def _refuse_tensors(names: list[str]) -> None:
    if names:
        why = f"{listed(sorted(names), _SHOWN)} can't be in an adapter's file for this model"
        raise UsageError("this adapter can't be converted", why=why)


def _pair(
    name: str, bare: str, a: TensorSource, b: TensorSource, scale: float, base: BaseModel, type_name: str
) -> Iterator[OutputTensor]:
    if bare == embeddings_name(base.family):  # llama.cpp gets rows of A
        a = array_source(a.name, to_float32(np.concatenate(list(a.chunks(1))), a.type).T)
    if base.family.permutes and bare.endswith(("q_proj.weight", "k_proj.weight")):
        b = permute_heads(b, base.n_heads if bare.endswith("q_proj.weight") else base.n_kv_heads)
    if not math.isclose(scale, 1.0):
        b = map_values(b, lambda values: values * scale)
    for end, matrix in (("a", a), ("b", b)):
        stated = type_name or (matrix.type if matrix.type in FILE_TYPES else "F32")
        yield output_tensor(f"{name}.lora_{end}", matrix, stated)
