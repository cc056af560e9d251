"""Models of Ollama, LM Studio and the folders of models.folders on this disk. Used in place, never written or removed.

The names of their models:

    ollama/NAME[:TAG]                    NAME as `ollama list` shows it; without a tag "latest"
    lmstudio/PUBLISHER/REPO[:QUANT]      LM Studio's folder names; without a quant the preferred one
    lmstudio/PUBLISHER/REPO/FILE.gguf
    folder/NAME[:QUANT]                  the name of a file in a folder of models.folders, or below it

A repository of the hub whose owner is called ollama, lmstudio or folder is reached as hf.co/OWNER/REPO. The contents of
their files are untrusted: values are checked before they become paths.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmrun.config import load_settings, model_folders
from llmrun.errors import ModelNotFoundError, did_you_mean
from llmrun.gguf import filenames
from llmrun.models.store.installed import LM_STUDIO, OLLAMA, OWN_FOLDER, InstalledModel, Layer, measure
from llmrun.protocol.codec import load_json
from llmrun.system import user_path

PROGRAMS = {"ollama": OLLAMA, "lmstudio": LM_STUDIO, "folder": OWN_FOLDER}
"""First part of a name -> the program, or the setting."""

_LAYER = "application/vnd.ollama.image."
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_QUANT = re.compile(r"[A-Za-z0-9_]{1,16}")
_LIBRARY = "registry.ollama.ai"
_HUB_HOSTS = frozenset({"hf.co", "huggingface.co"})
_LARGEST_JSON = 1 << 20
_MAX_ENTRIES = 20_000  # the configured folder may be a whole disk
_MAX_DEPTH = 4  # of folders below it
_SYSTEM_OLLAMA = Path("/usr/share/ollama/.ollama/models")  # of its Linux service


def models(environment: Mapping[str, str] | None = None) -> list[InstalledModel]:
    """Return every model that llama.cpp could load, each file once.

    Args:
        environment: os.environ by default; OLLAMA_MODELS is read.
    """
    found = [*_ollama_models(environment), *_lm_studio_models()]
    return [*found, *_own_models({os.path.realpath(model.path) for model in found})]


def missing_folders() -> list[Path]:
    """Return the folders of models.folders that can't be looked into: a disk that is not mounted, for example."""
    return [folder for folder in model_folders() if not folder.is_dir()]


def find(name: str) -> InstalledModel:
    """Return the model for a name with a program's prefix.

    Raises:
        ModelNotFoundError: the program has no such model; the message lists those it has.
    """
    program, _, rest = name.partition("/")
    if PROGRAMS[program.lower()] == OLLAMA:
        installed = list(_ollama_models(None))
        chosen = _of_ollama(rest, installed)
    elif PROGRAMS[program.lower()] == OWN_FOLDER:
        installed = [model for model in models() if model.place == OWN_FOLDER]
        chosen = _named(rest, installed)
    else:
        installed = list(_lm_studio_models())
        chosen = _of_lm_studio(rest, installed)
    return chosen or _fail(name, program, rest, installed)


def of_repository(repository: str, filename: str | None, quant: str | None) -> InstalledModel | None:
    """Return another program's model from this repository of the hub: this file or quant, or the preferred one."""
    fetched = [model for model in models() if model.repository.lower() == repository.lower()]
    if filename is None:
        return _by_quant(fetched, quant)
    quant = filenames.quant_of(filename)  # Ollama keeps the file's quant, not its name
    return next(
        (m for m in fetched if m.filename == filename or (m.place == OLLAMA and quant and m.quant == quant)), None
    )


def _fail(name: str, program: str, rest: str, installed: list[InstalledModel]) -> InstalledModel:
    title = PROGRAMS[program.lower()]
    names = [model.name for model in installed]
    why = "it has " + ", ".join(names[:12]) + (" and more" if len(names) > 12 else "")
    gone = [f"{folder} is not there" for folder in missing_folders() if title == OWN_FOLDER]
    raise ModelNotFoundError(
        f"{title} has no model {rest!r} on this disk",
        why="; ".join([why if names else f"no models of {title} were found", *gone]),
        hint=did_you_mean(name, names, f"for the hub's write hf.co/{name}"),
    )


def _by_quant(installed: list[InstalledModel], quant: str | None) -> InstalledModel | None:
    by_name = {model.filename: model for model in installed}
    chosen = filenames.choose(by_name, quant)
    if chosen is None:  # Ollama's file names have no quant
        return next((model for model in installed if quant is None or model.quant.upper() == quant.upper()), None)
    return by_name[chosen]


# ---- Ollama ----------------------------------------------------------------------------------------


def _ollama_models(environment: Mapping[str, str] | None) -> Iterator[InstalledModel]:
    env = os.environ if environment is None else environment
    named = env.get("OLLAMA_MODELS")
    folders = [user_path(named)] if named else [*_at_home(".ollama", "models"), _SYSTEM_OLLAMA]
    folders += [folder for folder in model_folders() if _is_of_ollama(folder)]
    for folder in {os.path.realpath(folder): folder for folder in reversed(folders)}.values():
        for manifest in _manifests(folder / "manifests"):
            model = _ollama_model(folder, manifest)
            if model:
                yield model


def _manifests(folder: Path) -> Iterator[Path]:
    """Yield the files HOST/NAMESPACE/MODEL/TAG."""
    level = [folder]
    for _ in range(3):
        level = [path for above in level for path in _entries(above) if path.is_dir()]
    for model in level:
        yield from (path for path in _entries(model) if path.is_file())


def _ollama_model(folder: Path, manifest: Path) -> InstalledModel | None:
    fields = _json(manifest)
    layers = _layers(folder, fields.get("layers"))
    blob = next((layer.path for layer in layers if layer.kind == "model"), None)
    measured = measure([blob]) if blob else None
    if blob is None or measured is None:
        return None
    size, modified = measured
    host, namespace, model, tag = manifest.parts[-4:]
    config = _blob(folder, fields["config"].get("digest") if isinstance(fields.get("config"), dict) else None)
    stated_in = _json(config) if config else {}
    stated = stated_in.get("file_type")
    quant = stated.upper() if isinstance(stated, str) and _QUANT.fullmatch(stated) else ""
    prefix = "" if (host, namespace) == (_LIBRARY, "library") else f"{namespace}/"
    prefix = prefix if host == _LIBRARY else f"{host}/{prefix}"
    return InstalledModel(
        name=f"ollama/{prefix}{model}:{tag}",
        repository=f"{namespace}/{model}" if host in _HUB_HOSTS else "",
        filename=blob.name,
        revision="",
        size=size,
        quant=quant or filenames.quant_of(tag) or "",
        path=blob,
        place=OLLAMA,
        modified=modified,
        layers=_besides_weights(layers, stated_in),
    )


def _layers(folder: Path, stated: object) -> list[Layer]:
    """Return the layers of a manifest that have a file's name."""
    found = [layer for layer in stated if isinstance(layer, dict)] if isinstance(stated, list) else []
    kinds = [(str(layer.get("mediaType")), _blob(folder, layer.get("digest"))) for layer in found]
    return [Layer(kind.removeprefix(_LAYER), path) for kind, path in kinds if kind.startswith(_LAYER) and path]


def _besides_weights(layers: list[Layer], config: Mapping[str, Any]) -> tuple[Layer, ...]:
    """Return the layers that make a difference; Ollama's own code writes prompts where the config names a renderer."""
    left_out = {"model", "license"}
    if config.get("renderer") or config.get("parser"):
        left_out |= {"template", "prompt"}
    return tuple(layer for layer in layers if layer.kind not in left_out)


def _blob(folder: Path, digest: object) -> Path | None:
    match = _DIGEST.fullmatch(digest) if isinstance(digest, str) else None
    return folder / "blobs" / f"sha256-{match[1]}" if match else None


def _of_ollama(rest: str, installed: list[InstalledModel]) -> InstalledModel | None:
    wanted = rest.lower()
    by_name = {model.name.lower().removeprefix("ollama/"): model for model in installed}
    if wanted in by_name:
        return by_name[wanted]
    tags = [model for name, model in by_name.items() if name.rpartition(":")[0] == wanted]
    latest = by_name.get(f"{wanted}:latest")
    return latest or (tags[0] if len(tags) == 1 else None)


# ---- LM Studio -------------------------------------------------------------------------------------


def _lm_studio_models() -> Iterator[InstalledModel]:
    budget = _MAX_ENTRIES
    for folder in _lm_studio_folders():
        for publisher in _entries(folder):
            for repository in _entries(publisher) if publisher.is_dir() else ():
                names = [path.name for path in _entries(repository)] if repository.is_dir() else []
                budget -= len(names) + 1
                if budget < 0:
                    return
                yield from _lm_studio_repository(repository, names)


def _whole_models(folder: Path, names: Iterable[str], place: str) -> Iterator[InstalledModel]:
    """Yield the models of which all parts are in a folder; their names and repositories are the caller's to give."""
    for filename in names:
        if not filenames.is_model(filename) or filenames.is_later_part(filename):
            continue
        measured = measure(folder / part for part in filenames.all_parts(filename))
        if measured is not None:
            size, modified = measured
            quant = filenames.quant_of(filename) or ""
            yield InstalledModel("", "", filename, "", size, quant, folder / filename, place, modified)


def _lm_studio_repository(folder: Path, names: list[str]) -> Iterator[InstalledModel]:
    by_quant = filenames.available(names)
    repository = f"{folder.parent.name}/{folder.name}"
    for model in _whole_models(folder, names, LM_STUDIO):
        short = bool(model.quant) and by_quant.get(model.quant) == model.filename
        name = f"{repository}:{model.quant}" if short else f"{repository}/{model.filename}"
        yield replace(model, name=f"lmstudio/{name}", repository=repository)


def _lm_studio_folders() -> list[Path]:
    """Return the folders of its models: the home has moved once, can be redirected, and settings name another."""
    pointers = _at_home(".lmstudio-home-pointer")
    pointed = [Path(text.strip()) for text in map(_text, pointers) if text.strip()]
    folders: dict[Path, None] = {}
    for home in [*pointed, *_at_home(".lmstudio"), *_at_home(".cache", "lm-studio")]:
        chosen = _json(home / "settings.json").get("downloadsFolder")
        if isinstance(chosen, str) and Path(chosen).is_absolute():
            folders[Path(chosen)] = None
        folders[home / "models"] = None
    real: dict[str, Path] = {}
    for folder in folders:
        real.setdefault(os.path.realpath(folder), folder)
    return list(real.values())


def _of_lm_studio(rest: str, installed: list[InstalledModel]) -> InstalledModel | None:
    wanted = rest.lower()
    exact = [model for model in installed if f"{model.repository}/{model.filename}".lower() == wanted]
    if exact:
        return exact[0]
    repository, _, quant = wanted.partition(":")
    return _by_quant([model for model in installed if model.repository.lower() == repository], quant or None)


# ---- models.folders --------------------------------------------------------------------------------


def _own_models(known: Set[str]) -> Iterator[InstalledModel]:
    """Yield the models of the user's folders; one whose name another file has, too, has its path as name.

    Args:
        known: real paths of the models of other programs, which such a folder may hold, too.
    """
    seen = {*known}
    found: list[InstalledModel] = []
    for model in _in_own_folders():
        if (real := os.path.realpath(model.path)) not in seen:
            seen.add(real)
            found.append(model)
    counts = Counter(model.name.lower() for model in found)
    for model in found:
        yield replace(model, name=str(model.path)) if counts[model.name.lower()] > 1 else model


def _in_own_folders() -> Iterator[InstalledModel]:
    budget, cache = _MAX_ENTRIES, os.path.realpath(load_settings().hub_cache)
    for folder in model_folders():
        for inside, folders, names in os.walk(folder):
            budget -= len(names) + 1
            if budget < 0:
                return
            depth = len(Path(inside).relative_to(folder).parts)
            if depth == _MAX_DEPTH or os.path.realpath(inside) == cache or (not depth and _is_of_ollama(folder)):
                folders.clear()
            else:
                folders[:] = sorted(name for name in folders if not name.startswith("."))
            yield from _of_folder(folder, Path(inside), sorted(names))


def _of_folder(root: Path, folder: Path, names: list[str]) -> Iterator[InstalledModel]:
    above = folder.relative_to(root).parts
    repository = "/".join(above) if len(above) == 2 else ""  # as LM Studio keeps the hub's
    for model in _whole_models(folder, names, OWN_FOLDER):
        name = f"folder/{filenames.model_name(model.filename)}" + (f":{model.quant}" if model.quant else "")
        yield replace(model, name=name, repository=repository)


def of_own_folder(name: str) -> InstalledModel | None:
    """Return the model for a name without "folder/"; None if there is none."""
    if not model_folders():
        return None
    return _named(name, [model for model in models() if model.place == OWN_FOLDER])


def _named(rest: str, installed: list[InstalledModel]) -> InstalledModel | None:
    wanted = rest.lower()
    by_name = {model.name.lower().removeprefix("folder/"): model for model in installed}
    if wanted in by_name:
        return by_name[wanted]
    return _by_quant([model for name, model in by_name.items() if name.partition(":")[0] == wanted], None)


def _is_of_ollama(folder: Path) -> bool:
    """Return whether a folder is a store of Ollama's."""
    return (folder / "manifests").is_dir() and (folder / "blobs").is_dir()


# ---- untrusted files -------------------------------------------------------------------------------


def _at_home(*parts: str) -> list[Path]:
    try:
        return [Path.home().joinpath(*parts)]
    except RuntimeError:  # no home
        return []


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    """Return the file's text; "" when missing, too large or not UTF-8."""
    try:
        if not path.is_file():  # a pipe would hang
            return ""
        with path.open("rb") as file:
            data = file.read(_LARGEST_JSON + 1)
        return data.decode("utf-8") if len(data) <= _LARGEST_JSON else ""
    except (OSError, ValueError):
        return ""


def _json(path: Path) -> dict[str, Any]:
    """Return the file's JSON object; {} when it has none."""
    try:
        value = load_json(_text(path))
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
