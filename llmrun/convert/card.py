"""general.* metadata: origin, names and advised sampling settings, from README.md and the JSON files of a folder.

Owns the limits on these untrusted files; gguf-py's Metadata chooses the keys and guesses from names, so a file says
what llama.cpp's own converter would have written. Metadata.load() is not used: it reads the files without limits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmrun.convert.config import Config
from llmrun.convert.folder import Folder, Json
from llmrun.convert.write import SignedInt
from llmrun.errors import BadModelError
from llmrun.protocol.params import PARAMETERS

if TYPE_CHECKING:
    from gguf.metadata import Metadata

MAX_FRONT_MATTER = 64 * 1024
MAX_ENTRIES = 256
MAX_TEXT = 4096

_BASES = ("base_model", "base_models", "base_model_sources")
_LISTS = frozenset({*_BASES, "datasets", "dataset", "dataset_sources", "tags", "pipeline_tag", "languages", "language"})


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
    from gguf.metadata import Metadata

    card = read_card(folder.text("README.md"))
    if not any(name in card for name in _BASES):
        card["base_model"] = [base if base.count("/") == 1 else base.rstrip("/").rpartition("/")[2]]
    full = _describe(folder, card, None, 0)
    return _keys(Metadata(name=full.name, author=full.author, license=full.license, base_models=full.base_models))


def read_card(text: str) -> Json:
    """Return the bounded front matter of a model card: texts, and lists of texts under the keys that hold lists.

    The front matter is YAML between two lines of dashes. The result is empty if there is none or it is damaged.
    """
    import yaml  # type: ignore[import-untyped,unused-ignore]

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
    from gguf.metadata import Metadata

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
    from gguf import GGUFValueType, GGUFWriter

    writer = GGUFWriter(None, "")  # without a path it only collects keys
    metadata.set_gguf_meta_model(writer)
    entries = writer.kv_data[0].items()
    return {
        key: SignedInt(entry.value) if entry.type == GGUFValueType.INT32 else entry.value
        for key, entry in entries
        if key != "general.architecture"
    }
