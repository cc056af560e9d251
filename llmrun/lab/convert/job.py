"""The conversion of one folder to one file: the order of the steps, and the general.* metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped,unused-ignore]
from gguf import GGUFValueType, GGUFWriter
from gguf.metadata import Metadata
from gguf.utility import size_label

from llmrun.errors import BadModelError, ModelNotFoundError, UsageError
from llmrun.gguf.types import FILE_TYPES
from llmrun.lab.convert.architectures import find_family, text_config
from llmrun.lab.convert.checkpoint import TensorSource, open_checkpoint, weight_sources
from llmrun.lab.convert.folder import Config, Folder, Json
from llmrun.lab.convert.gguf_file import OnProgress, OutputTensor, SignedInt, count_rows, plan_tensors, write_model
from llmrun.lab.convert.hyperparameters import bounds_of, read_shape
from llmrun.lab.convert.vocabulary import read_vocabulary
from llmrun.protocol.params import PARAMETERS

MAX_FRONT_MATTER = 64 * 1024
MAX_ENTRIES = 256
MAX_TEXT = 4096

_BASES = ("base_model", "base_models", "base_model_sources")
_LISTS = frozenset({*_BASES, "datasets", "dataset", "dataset_sources", "tags", "pipeline_tag", "languages", "language"})
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
        type_name = type.upper() or _default_type(sources, quantization)
        tensors = plan_tensors(sources, family, settings, shape, type_name)
        vocabulary, vocabulary_notes = read_vocabulary(source, config, family.name, n_rows)
        n_parameters = sum(prod(tensor.source.shape) for tensor in tensors)
        metadata: dict[str, Any] = {"general.architecture": family.name, "general.type": "model"}
        metadata |= general_metadata(source, config, n_parameters, _size_label(tensors, shape.n_experts))
        metadata |= {f"{family.name}.{key}": value for key, value in shape.metadata.items()}
        metadata |= {"general.file_type": FILE_TYPES[type_name], "general.quantization_version": QUANTIZATION_VERSION}
        metadata |= vocabulary
        size = write_model(target, metadata, tensors, on_progress)
    notes = (*shape.notes, *vocabulary_notes, *_type_notes(tensors, type_name))
    return ConvertedModel(target, name, type_name, size, len(tensors), n_parameters, notes)


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
    types = (source.type for source in sources.values() if len(source.shape) > 1)
    return "BF16" if next(types, "") in ("BF16", "F8_E4M3", "F8_E5M2") else "F16"


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
    sizes = {tensor.name: prod(tensor.source.shape) for tensor in tensors}
    expert_size = sum(size for name, size in sizes.items() if "_exps." in name)
    total = sum(sizes.values())
    return size_label(total, total - expert_size, expert_size // max(n_experts, 1), n_experts)


def _type_notes(tensors: list[OutputTensor], type_name: str) -> list[str]:
    other = [tensor.name for tensor in tensors if tensor.type not in (type_name, "F32")]
    if not other:
        return []
    return [f"{len(other)} tensors are F16: their rows don't divide into blocks of 32"]


# ---- general.*: origin, names and advised sampling settings, from README.md and the JSON files
#
# gguf-py's Metadata chooses the keys and guesses from names, so a file says what llama.cpp's own converter would have
# written. Metadata.load() is not used: it reads the files without limits.


def general_metadata(folder: Folder, config: Json, n_parameters: int, size_label: str) -> dict[str, Any]:
    """Return the general.* metadata except the architecture and the facts about the file itself.

    Args:
        size_label: e.g. "135M" or "8x7B"; used if neither card nor name states one.

    Raises:
        BadModelError: generation_config.json is damaged.
    """
    name = config.get("_name_or_path")
    metadata = _describe(folder, read_card(folder.text("README.md")), name, n_parameters)
    metadata.size_label = metadata.size_label or size_label
    for key, value in _sampling(Config(folder.json("generation_config.json"))).items():
        setattr(metadata, f"sampling_{key}", value)
    return _keys(metadata)


def adapter_metadata(folder: Folder, base: str) -> dict[str, Any]:
    """Return the general.* metadata of an adapter except the architecture and the facts about the file itself.

    Args:
        base: the base model if the adapter's card names none: "owner/name" or a path.
    """
    card = read_card(folder.text("README.md"))
    if not any(name in card for name in _BASES):
        card["base_model"] = [base if base.count("/") == 1 else base.rstrip("/").rpartition("/")[2]]
    full = _describe(folder, card, None, 0)
    return _keys(Metadata(name=full.name, author=full.author, license=full.license, base_models=full.base_models))


def read_card(text: str) -> Json:
    """Return the bounded front matter of a model card: texts, and lists of texts under the keys that hold lists.

    The front matter is YAML between two lines of dashes. The result is empty if there is none or it is damaged.
    """
    lines = text.splitlines()
    if not lines or lines[0] != "---" or "---" not in lines[1:]:
        return {}
    matter = "\n".join(lines[1 : lines.index("---", 1)]).replace("\t", "  ") + "\n"
    # "no" is the code of Norwegian, not a boolean.
    matter = matter.replace("- no\n", '- "no"\n')
    if len(matter) > MAX_FRONT_MATTER or "<<" in matter:  # merged mappings may grow without end
        return {}
    try:
        card = yaml.safe_load(matter)
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    values = {key: _texts(value) if key in _LISTS else _text(value) for key, value in _items(card)}
    return {key: value for key, value in values.items() if value}


def _items(card: Any) -> list[tuple[str, Any]]:
    return [(key, value) for key, value in card.items() if isinstance(key, str)] if isinstance(card, dict) else []


def _texts(value: Any) -> list[str]:
    entries = value if isinstance(value, list) else [value]
    return [entry[:MAX_TEXT] for entry in entries[:MAX_ENTRIES] if isinstance(entry, str)]


def _text(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        value = ",".join(value)
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**63:
        value = str(value)
    return value[:MAX_TEXT] if isinstance(value, str) else ""


def _describe(folder: Folder, card: Json, name: Any, n_parameters: int) -> Metadata:
    """Return gguf-py's description of a model."""
    names = {"_name_or_path": name[:MAX_TEXT]} if name and isinstance(name, str) else {}
    path = folder.path.resolve()
    metadata = Metadata.apply_metadata_heuristic(Metadata(), card, names, path, n_parameters)
    metadata.name = metadata.name or path.name
    return metadata


def _sampling(advice: Config) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for ours, row in PARAMETERS.items():
        # Named as in a GGUF file, as here or as in transformers, whose names vLLM has; the first stated one counts.
        name = next((name for name in (row.card, ours, row.servers.get("vllm")) if name and advice.has(name)), None)
        if not row.card or name is None:
            continue
        try:
            value = advice.number(name)
        except BadModelError:
            continue  # it is only advice: the defaults are used instead
        if not row.is_whole:
            values[row.card] = value
        elif abs(value) < 2**31:
            values[row.card] = int(value)
    return values


def _keys(metadata: Metadata) -> dict[str, Any]:
    writer = GGUFWriter(None, "")  # without a path it only collects keys
    metadata.set_gguf_meta_model(writer)
    entries = writer.kv_data[0].items()
    return {
        key: SignedInt(entry.value) if entry.type == GGUFValueType.INT32 else entry.value
        for key, entry in entries
        if key != "general.architecture"
    }
