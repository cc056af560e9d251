"""What a repository on the Hugging Face hub holds: names, sizes, hashes. Metadata only, never bytes.

Owns what its answers mean; must not know where files are put. Whatever the hub answers is untrusted and checked here,
before anybody makes a path of it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from llmrun.config import Settings
from llmrun.errors import ModelNotFoundError, NetworkError
from llmrun.gguf import filenames
from llmrun.models.download.transfer import PATIENT, OnNote, RetryPolicy, ignore_note
from llmrun.models.hub_api import ask, nonsense
from llmrun.models.registry import ModelSpec, near_quants
from llmrun.protocol.sizes import readable_size

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_MOST_BYTES = 1 << 50
_MOST_NAME_BYTES = 255  # of a file on every usual disk
_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A model file of a repository. name is relative and safe to use as a path; sha256 is lower-case hex."""

    name: str
    size: int
    sha256: str


Parts = tuple[RemoteFile, ...]
"""The files of one model: itself alone when it is not split."""


@dataclass(frozen=True, slots=True)
class Repository:
    """What a repository holds at one commit.

    Attributes:
        id: "owner/repo".
        commit: 40 hex digits.
        gated: whether its terms have to be accepted first.
        updated: when it was last changed, an ISO date; "" when the hub does not tell.
        files: its .gguf files, without those whose hash the hub does not tell: they could not be verified.
    """

    id: str
    commit: str
    gated: bool
    files: tuple[RemoteFile, ...]
    updated: str = ""


def repository_files(
    repository: str,
    revision: str,
    settings: Settings,
    on_note: OnNote = ignore_note,
    *,
    patience: RetryPolicy = PATIENT,
) -> Repository:
    """Ask the hub for a repository's model files.

    Args:
        on_note: told when the hub is asked again, and of files that are left out.

    Raises:
        ModelNotFoundError: there is no such repository or revision.
        LoginRequiredError: it is gated.
        NetworkError: the hub can't be reached, answers nonsense, or we are offline.
    """
    _refuse_offline(f"{repository} can't be fetched", settings)
    if not _REPOSITORY.fullmatch(repository) or "--" in repository or ".." in repository:
        raise ModelNotFoundError(f"{repository!r} can't be a repository's name")
    path = f"/api/models/{repository}/revision/{quote(revision, safe='')}"
    info = ask(path, {"blobs": "true"}, settings, on_note, about=(repository, revision), patience=patience)
    try:
        commit, siblings, gated = info["sha"], info.get("siblings") or [], bool(info.get("gated"))
        models = [one for one in siblings if str(one["rfilename"]).lower().endswith(".gguf")]
        verifiable = [one for one in models if one.get("lfs")]
    except (TypeError, KeyError, AttributeError) as error:
        raise nonsense(settings, "something that can't be read") from error
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise nonsense(settings, f"the commit {commit!r}")
    left_out = [one["rfilename"] for one in models if one not in verifiable and _is_safe(str(one["rfilename"]))]
    if left_out:
        on_note(f"left out, for the hub tells no sha256 to verify them by: {', '.join(left_out)}")
    files = tuple(_file(one, settings) for one in verifiable)
    return Repository(repository, commit, gated, files, _date(info.get("lastModified")))


@dataclass(frozen=True, slots=True)
class Match:
    """A repository that a search found. updated is an ISO date, "" when the hub tells none."""

    repository: str
    downloads: int
    likes: int
    updated: str
    gated: bool


def search(
    words: Sequence[str],
    settings: Settings,
    limit: int = 20,
    on_note: OnNote = ignore_note,
    *,
    patience: RetryPolicy = PATIENT,
) -> list[Match]:
    """Repositories with GGUF files whose names have these words, the most downloaded first.

    Args:
        on_note: told when the hub is asked again.

    Raises:
        NetworkError: the hub can't be reached, answers nonsense, or we are offline.
    """
    _refuse_offline("the hub can't be searched", settings)
    fields = ["downloads", "likes", "lastModified", "gated"]
    asked = {"filter": "gguf", "search": " ".join(words), "sort": "downloads", "limit": limit, "expand": fields}
    found = ask("/api/models", asked, settings, on_note, patience=patience)
    if not isinstance(found, list):
        raise nonsense(settings, "something that is not a list")
    return [match for match in map(_match, found[:limit]) if match]


def choose(spec: ModelSpec, files: Sequence[RemoteFile]) -> Parts:
    """The files of a repository that a spec means, or the usual choice; of a split model all parts, in order.

    Raises:
        ModelNotFoundError: there is no such file or quant, or a part is missing; the message says what there is.
    """
    if spec.filename is not None:
        return parts_of(files, spec.filename)
    chosen = filenames.choose((file.name for file in files), spec.quant)
    if chosen is None:
        raise _no_such_quant(files, spec.quant, spec.repository or "")
    return parts_of(files, chosen)


def _no_such_quant(files: Sequence[RemoteFile], quant: str | None, name: str) -> ModelNotFoundError:
    choices = by_quant(files)
    if not quant or not choices:
        return ModelNotFoundError("the repository has no GGUF model file", hint="look for one whose name ends in -GGUF")
    near = near_quants(quant, list(choices))
    start = f"{name}:" if name else ""
    return ModelNotFoundError(
        f"there is no quant {quant}" + (f" of {name}" if name else ""),
        why=f"there are {listed(files)}",
        hint="did you mean " + " or ".join(start + one for one in near) + "?" if near else f"name one: {start}QUANT",
    )


def offers(spec: ModelSpec, files: Sequence[RemoteFile]) -> dict[str, Parts]:
    """Quant -> its files, as by_quant(); what the spec means is among them, also beside another file of its quant."""
    meant = choose(spec, files)
    return {**by_quant(files), quant_of(meant): meant}


def quant_of(parts: Parts) -> str:
    """What the model's quant is called: as by_quant() has it."""
    return filenames.quant_of(parts[0].name) or parts[0].name


def by_quant(files: Sequence[RemoteFile]) -> dict[str, Parts]:
    """Quant -> its files, of those that are complete; the preferred first."""
    by_name = {file.name: file for file in files}
    found = {quant: filenames.all_parts(first) for quant, first in filenames.available(by_name).items()}
    return {
        quant: tuple(by_name[name] for name in names)
        for quant, names in found.items()
        if all(name in by_name for name in names)
    }


def listed(files: Sequence[RemoteFile]) -> str:
    """The quants there are, with their sizes."""
    return ", ".join(f"{quant} ({readable_size(n_bytes(parts))})" for quant, parts in by_quant(files).items())


def n_bytes(parts: Parts) -> int:
    """Of all files of a model."""
    return sum(part.size for part in parts)


def parts_of(files: Sequence[RemoteFile], filename: str) -> Parts:
    """The file of this name and, when the model is split, all its other parts.

    Raises:
        ModelNotFoundError: it or a part is missing; the message lists the files there are.
    """
    by_name = {file.name: file for file in files}
    names = filenames.all_parts(filename)
    missing = [name for name in names if name not in by_name]
    if missing:
        choices = ", ".join(filenames.available(by_name).values()) or "no model files"
        raise ModelNotFoundError(f"the repository has no file {missing[0]!r}", why=f"there are {choices}")
    return tuple(by_name[name] for name in names)


def file_url(settings: Settings, repository: str, commit: str, filename: str) -> str:
    """Where the hub hands out a file's bytes."""
    return f"{settings.endpoint}/{repository}/resolve/{commit}/{quote(filename)}"


def _refuse_offline(what: str, settings: Settings) -> None:
    if settings.offline:
        raise NetworkError(
            what,
            why="HF_HUB_OFFLINE is set, so the network is not used",
            hint="unset HF_HUB_OFFLINE, or use a model of `llmrun list`",
        )


def _match(answer: Any) -> Match | None:
    """One repository of a search's answer, None when it can't be one: then there is nothing to type."""
    facts = answer if isinstance(answer, dict) else {}
    repository = facts.get("id")
    if not isinstance(repository, str) or len(repository) > 200 or not _REPOSITORY.fullmatch(repository):
        return None
    downloads, likes = (facts[name] if isinstance(facts.get(name), int) else 0 for name in ("downloads", "likes"))
    return Match(repository, downloads, likes, _date(facts.get("lastModified")), gated=bool(facts.get("gated")))


def _date(time: object) -> str:
    """The day of an ISO time, "" where it is none."""
    day = str(time)[:10]
    return day if _DATE.fullmatch(day) else ""


def _file(sibling: Any, settings: Settings) -> RemoteFile:
    name, size, lfs = sibling["rfilename"], sibling.get("size"), sibling["lfs"]
    if not isinstance(name, str) or not _is_safe(name):
        raise nonsense(settings, f"the file name {name!r}")
    sha256 = lfs.get("sha256") if isinstance(lfs, dict) else None
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        raise nonsense(settings, f"the hash {sha256!r} of {name!r}")
    if not isinstance(size, int) or isinstance(size, bool) or not 0 < size <= _MOST_BYTES:
        raise nonsense(settings, f"the size {size!r} of {name!r}")
    return RemoteFile(name, size, sha256)


def _is_safe(name: str) -> bool:
    """Whether a name stays inside the folder it is put into, on every system, and can be shown."""
    return (
        name.isprintable()
        and len(name) <= 512
        and "\\" not in name
        and ":" not in name
        and all(part not in ("", ".", "..") and len(part.encode()) <= _MOST_NAME_BYTES for part in name.split("/"))
    )
