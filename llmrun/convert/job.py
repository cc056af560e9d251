"""The conversion of one folder to one file.

Owns the order of the steps; each step is in a module of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from llmrun.convert.architectures import find_family, text_config
from llmrun.convert.card import general_metadata
from llmrun.convert.folder import Folder, Json
from llmrun.convert.hyperparameters import bounds_of, read_shape
from llmrun.convert.packed import weight_sources
from llmrun.convert.safetensors import open_checkpoint
from llmrun.convert.sources import TensorSource
from llmrun.convert.tensors import OutputTensor, count_rows, plan_tensors
from llmrun.convert.vocabulary import read_vocabulary
from llmrun.convert.write import OnProgress, write_model
from llmrun.errors import ModelNotFoundError, UsageError
from llmrun.gguf.types import FILE_TYPES

TYPES = ("f16", "bf16", "f32", "q8_0")
QUANTIZATION_VERSION = 2  # GGML_QNT_VERSION


@dataclass(frozen=True, slots=True)
class ConvertedModel:
    """Result of a conversion."""

    path: Path
    architecture: str  # from config.json
    type: str  # of the matrices, e.g. "BF16"
    n_bytes: int
    n_tensors: int
    n_parameters: int
    notes: tuple[str, ...]  # features that GGUF can't represent; untrusted text


def convert_folder(
    folder: Path,
    target: Path,
    *,
    type: str = "",  # noqa: A002  # what the option is called
    on_progress: OnProgress = lambda done, total: None,
) -> ConvertedModel:
    """Convert a Hugging Face folder to a GGUF file.

    Args:
        folder: has config.json, safetensors files and a tokenizer.
        target: the GGUF file; an existing one is replaced once the new one is complete and verified.
        type: of the matrices, one of TYPES; empty for their stored type (float16 for float32).
        on_progress: called with (bytes written, total bytes).

    Raises:
        UsageError: the model, or the type of its weights, is not supported.
        BadModelError: a file of the folder is damaged or does not fit the others.
        ModelNotFoundError: the folder or one of its files is missing.
        DiskFullError: there is no room for the file.
    """
    if type and type not in TYPES:
        raise UsageError(f"--type {type} can't be written", hint=f"one of {', '.join(TYPES)}")
    source = Folder(folder)
    config = read_config(source)
    name, family = find_family(config)
    settings = text_config(config, family)
    with open_checkpoint(source) as stored:
        quantization = settings.part("quantization_config")
        sources = weight_sources(stored, quantization)
        n_rows = count_rows(sources, family)
        shape = read_shape(settings, family, source, bounds_of(sources, n_rows))
        kind = type.upper() or _default_type(sources, quantization)
        tensors = plan_tensors(sources, family, settings, shape, kind)
        vocabulary = read_vocabulary(source, config, family.name, n_rows)
        n_parameters = sum(prod(tensor.source.shape) for tensor in tensors)
        metadata: dict[str, Any] = {"general.architecture": family.name, "general.type": "model"}
        metadata |= general_metadata(source, config, n_parameters, _size_label(tensors, shape.n_experts))
        metadata |= {f"{family.name}.{key}": value for key, value in shape.metadata.items()}
        metadata |= {"general.file_type": FILE_TYPES[kind], "general.quantization_version": QUANTIZATION_VERSION}
        metadata |= vocabulary.metadata
        size = write_model(target, metadata, tensors, on_progress)
    notes = (*shape.notes, *vocabulary.notes, *_type_notes(tensors, kind))
    return ConvertedModel(target, name, kind, size, len(tensors), n_parameters, notes)


def stored_type(folder: Path) -> str:
    """Return the type of TYPES that convert_folder() uses by default; errors are the same."""
    source = Folder(folder)
    config = read_config(source)
    settings = text_config(config, find_family(config)[1])
    with open_checkpoint(source) as stored:
        quantization = settings.part("quantization_config")
        return _default_type(weight_sources(stored, quantization), quantization).lower()


def _default_type(sources: Mapping[str, TensorSource], quantization: Json) -> str:
    """Choose bfloat16 or float16, whichever loses less precision.

    The first matrix decides: "torch_dtype" in config.json is not always right. AWQ and GPTQ have float16 scales.
    """
    method = str(quantization.get("quant_method", "")).lower()
    if method:
        return "F16" if method in ("awq", "gptq") else "BF16"
    kinds = (source.kind for source in sources.values() if len(source.shape) > 1)
    return "BF16" if next(kinds, "") in ("BF16", "F8_E4M3", "F8_E5M2") else "F16"


def read_config(folder: Folder) -> Json:
    """Return config.json; raise ModelNotFoundError without one."""
    if not folder.has("config.json"):
        raise ModelNotFoundError(
            f"{str(folder.path)!r} has no config.json",
            why="every Hugging Face model has one",
            hint="name the folder that contains it",
        )
    return folder.json("config.json")


def _size_label(tensors: list[OutputTensor], n_experts: int) -> str:
    from gguf.utility import size_label

    sizes = {tensor.name: prod(tensor.source.shape) for tensor in tensors}
    expert_size = sum(size for name, size in sizes.items() if "_exps." in name)
    total = sum(sizes.values())
    return size_label(total, total - expert_size, expert_size // max(n_experts, 1), n_experts)


def _type_notes(tensors: list[OutputTensor], kind: str) -> list[str]:
    other = [tensor.name for tensor in tensors if tensor.kind not in (kind, "F32")]
    if not other:
        return []
    return [f"{len(other)} tensors are F16: their rows don't divide into blocks of 32"]
