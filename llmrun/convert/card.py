"""Who made a model, and how they advise to sample: general.* metadata.

Owns what of README.md, config.json and generation_config.json is taken over; the keys and the guesses from a name are
those of gguf-py's Metadata, so that the file says what llama.cpp's own converter would have written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmrun.convert.config import Config
from llmrun.convert.folder import Folder, Json
from llmrun.errors import BadModelError

MAX_FRONT_MATTER = 64 * 1024
MAX_ENTRIES = 256
MAX_TEXT = 4096

# GGUF's key -> keys of a model card, the first that is there counts.
_CARD_TEXTS = {
    "name": ("name", "model_name"),
    "author": ("author", "model_author", "model_creator"),
    "version": ("version", "model_version"),
    "organization": ("organization", "model_organization"),
    "finetune": ("finetune", "model_finetune"),
    "basename": ("basename", "model_basename", "model_type"),
    "description": ("description", "model_description"),
    "size_label": ("size_label", "model_size_label"),
    "license": ("license",),
    "license.name": ("license_name",),
    "license.link": ("license_link",),
    "source.url": ("url", "model_url"),
    "source.doi": ("doi", "model_doi"),
    "source.repo_url": ("repo_url", "model_repo_url"),
}
_FROM_NAME = ("name", "organization", "basename", "finetune", "version", "size_label")
# generation_config.json -> general.sampling.*; a later name counts only when the earlier is missing.
_SAMPLING = {
    "top_k": ("top_k",), "top_p": ("top_p",), "min_p": ("min_p",), "xtc_probability": ("xtc_probability",),
    "xtc_threshold": ("xtc_threshold",), "temp": ("temperature",), "penalty_last_n": ("penalty_last_n",),
    "penalty_repeat": ("penalty_repeat", "repetition_penalty"), "mirostat": ("mirostat",),
    "mirostat_tau": ("mirostat_tau",), "mirostat_eta": ("mirostat_eta",),
}  # fmt: skip
_BASES = ("base_model", "base_models", "base_model_sources")
_WHOLE = frozenset({"top_k", "penalty_last_n", "mirostat"})


@dataclass(frozen=True)
class SignedInt:
    """A whole number that is written as signed (GGUF's i32)."""

    value: int


def general_metadata(folder: Folder, config: Json, n_parameters: int, size_label: str) -> dict[str, Any]:
    """All general.* keys but the architecture and those about the file itself.

    Args:
        size_label: e.g. "135M", or "8x7B", where neither card nor name says it.

    Raises:
        BadModelError: generation_config.json is damaged.
    """
    card = read_card(folder.text("README.md"))
    found = {f"sampling.{key}": value for key, value in _sampling(folder).items()}
    found |= _named(card, config, folder.path.resolve().name, n_parameters, size_label)
    found |= _sources("base_model", card, _BASES, n_parameters)
    found |= _sources("dataset", card, ("datasets", "dataset", "dataset_sources"), n_parameters)
    found |= _lists(card)
    return {f"general.{key}": value for key, value in found.items()}


def adapter_metadata(folder: Folder, base: str) -> dict[str, Any]:
    """The general.* keys of an adapter but the architecture and those about the file itself.

    Args:
        base: of what it was made, where its card does not say; "owner/name", or a path.
    """
    card = read_card(folder.text("README.md"))
    if not any(name in card for name in _BASES):
        card = {**card, "base_model": base if base.count("/") == 1 else base.rstrip("/").rpartition("/")[2]}
    named = _named(card, {}, folder.path.resolve().name, 0, "")
    found: dict[str, Any] = {name: named[name] for name in ("name", "author", "license") if name in named}
    found |= _sources("base_model", card, _BASES, 0)
    return {f"general.{key}": value for key, value in found.items()}


def read_card(text: str) -> Json:
    """The front matter of a model card: YAML between two lines of dashes. Empty when there is none that can be read."""
    import yaml  # type: ignore[import-untyped,unused-ignore]

    lines = text.splitlines()
    if not lines or lines[0] != "---" or "---" not in lines[1:]:
        return {}
    matter = "\n".join(lines[1 : lines.index("---", 1)]).replace("\t", "  ") + "\n"
    # "no" is the code of Norwegian here, not a truth value.
    matter = matter.replace("- no\n", '- "no"\n')
    if len(matter) > MAX_FRONT_MATTER or "<<" in matter:  # merged mappings may grow without end
        return {}
    try:
        found = yaml.safe_load(matter)
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _sampling(folder: Folder) -> dict[str, Any]:
    advice = Config(folder.json("generation_config.json"))
    found: dict[str, Any] = {}
    for key, names in _SAMPLING.items():
        name = next((name for name in names if advice.has(name)), None)
        if name is None:
            continue
        try:
            value = advice.number(name)
        except BadModelError:
            continue  # it is advice: without it the defaults count
        found[key] = SignedInt(int(value)) if key in _WHOLE and abs(value) < 2**31 else value
    return found


def _named(card: Json, config: Json, folder_name: str, n_parameters: int, size_label: str) -> dict[str, str]:
    """Texts about the model: from the card, else guessed from the name it goes by, else from the folder's."""
    found: dict[str, str] = {}
    for key, names in _CARD_TEXTS.items():
        text = next((shown for name in names if (shown := _text(card.get(name)))), "")
        if text:
            found[key] = text
    stated = config.get("_name_or_path")
    ids = [stated] if isinstance(stated, str) and stated.count("/") <= 1 else []
    for model_id in [*ids, folder_name]:
        for key, value in _components(model_id[:MAX_TEXT], n_parameters).items():
            found.setdefault(key, value)
    found.setdefault("name", folder_name)
    found.setdefault("size_label", size_label)
    order = (*_CARD_TEXTS,)
    return {key: found[key] for key in order if key in found}


def _text(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        value = ",".join(value)
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**63:
        value = str(value)
    return value[:MAX_TEXT] if isinstance(value, str) else ""


def _components(model_id: str, n_parameters: int) -> dict[str, str]:
    """What a name like "owner/Name-2-7B-chat" tells."""
    from gguf.metadata import Metadata

    full, owner, basename, finetune, version, size = Metadata.get_model_id_components(model_id, n_parameters)
    found = {
        "name": _title(full) if full else None,
        "organization": _title(owner) if owner else None,
        "basename": basename,
        "finetune": finetune,
        "version": version,
        "size_label": size,
    }
    return {key: found[key] or "" for key in _FROM_NAME if found[key]}


def _title(text: str) -> str:
    """With capitals, but for acronyms and versions."""
    words = text.strip().replace("-", " ").split()
    return " ".join(
        word.title() if word.islower() and not re.match(r"^(v\d+(?:\.\d+)*|\d.*)$", word) else word for word in words
    )


def _sources(kind: str, card: Json, names: tuple[str, ...], n_parameters: int) -> dict[str, Any]:
    """The models or data sets that a model was made from."""
    value = next((card[name] for name in names if name in card), None)
    if value is None:
        return {}
    listed = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    rows = [_source(one[:MAX_TEXT], n_parameters) for one in listed[:MAX_ENTRIES] if isinstance(one, str)]
    found: dict[str, Any] = {f"{kind}.count": len(rows)}
    for number, row in enumerate(rows):
        found |= {f"{kind}.{number}.{key}": text for key, text in row.items()}
    return found


def _source(model_id: str, n_parameters: int) -> Mapping[str, str]:
    hub = "https://huggingface.co/"
    if model_id.startswith(("http://", "https://", "ssh://")):
        match = re.fullmatch(r"https?://huggingface.co/([^/]+/[^/]+)", model_id)
        parts = _components(match[1], n_parameters) if match else {}
        url = model_id
    else:
        parts = _components(model_id, n_parameters)
        url = f"{hub}{model_id}" if "/" in model_id and "organization" in parts else ""
    found = {key: parts[key] for key in ("name", "version", "organization") if key in parts}
    return found | ({"repo_url": url} if url else {})


def _lists(card: Json) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key, names in {"tags": ("tags", "pipeline_tag"), "languages": ("languages", "language")}.items():
        for name in names:
            value = card.get(name)
            texts = value if isinstance(value, list) else [value]
            found.setdefault(key, []).extend(text[:MAX_TEXT] for text in texts[:MAX_ENTRIES] if isinstance(text, str))
    return {key: texts for key, texts in found.items() if texts}
