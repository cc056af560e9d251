"""Hugging Face hub repositories: requests to its API, file names, sizes, hashes. Metadata only, never bytes.

Responses are untrusted: every name, hash and size is checked here, before it becomes a path. A refusal explains
itself in X-Error-Code.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from os.path import commonprefix
from typing import Any
from urllib.parse import quote, urlencode

import httpx2

from llmrun.config import Settings
from llmrun.errors import LlmrunError, LoginRequiredError, ModelNotFoundError, NetworkError
from llmrun.gguf import filenames
from llmrun.models.download import transfer
from llmrun.models.download.transfer import (
    BUSY,
    Link,
    OnNote,
    RetryableError,
    RetryPolicy,
    TransferSource,
    ignore_note,
    new_client,
    read_body,
    wait_seconds,
    with_retries,
)
from llmrun.models.registry import IMPORTED, ModelSpec, similar_quants
from llmrun.protocol.codec import load_json
from llmrun.protocol.sizes import readable_size

CONNECT_SECONDS = 4.0
# In total: ten addresses blocked by a firewall would take ten times the connect timeout.
ANSWER_SECONDS = 10.0
_MAX_ANSWER_BYTES = 64 << 20
_WRONG_LOGIN = "Invalid credentials in Authorization header"


def request_json(
    path: str,
    query: dict[str, Any],
    settings: Settings,
    on_note: OnNote = ignore_note,
    *,
    about: tuple[str, str] = ("", ""),
) -> Any:
    """Return the JSON of the hub's response.

    Args:
        path: below the endpoint, with a slash.
        query: a list stands for one pair per item.
        on_note: called before each retry, with the reason.
        about: repository and revision, for messages.

    Raises:
        ModelNotFoundError: there is no such repository or revision.
        LoginRequiredError: it is gated, or the token is refused.
        NetworkError: the hub can't be reached, or its response is invalid, after retries.
    """
    url = f"{settings.endpoint}{path}?{urlencode(query, doseq=True)}"
    source = TransferSource(url, "the answer", token=token())
    patience = transfer.RETRY_POLICY
    stall_seconds = min(ANSWER_SECONDS, patience.stall_seconds)
    one_try = replace(patience, connect_seconds=CONNECT_SECONDS, stall_seconds=stall_seconds)
    body = with_retries(
        lambda: _within(ANSWER_SECONDS + CONNECT_SECONDS, settings, lambda: _get(source, settings, about, one_try)),
        on_note,
    )
    try:
        return load_json(body)
    except ValueError as error:
        raise invalid_response(settings, "something that can't be read") from error


def token() -> str | None:
    """Return the user's token for the hub, from HF_TOKEN or `hf auth login`; None when implicit tokens are disabled."""
    # Read when huggingface_hub is imported; otherwise requests report the installed packages to the hub.
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    from huggingface_hub import constants, get_token

    return None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()


def login_hint(settings: Settings, repository: str) -> str:
    return f"open {settings.endpoint}/{repository}, accept the terms, then run `hf auth login` or set HF_TOKEN"


def invalid_response(settings: Settings, what: str) -> NetworkError:
    return NetworkError(
        f"the hub at {settings.endpoint} sent an invalid response",
        why=f"it sent {what}",
        hint="check HF_ENDPOINT and the proxy",
    )


def _get(source: TransferSource, settings: Settings, about: tuple[str, str], policy: RetryPolicy) -> bytes:
    try:
        with (
            new_client(policy) as client,
            Link(source).answer(client, {"Accept": "application/json"}) as response,
        ):
            if response.status_code != 200:
                _refuse(response, settings, about, policy)
            return read_body(response, source, _MAX_ANSWER_BYTES, policy)
    except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.ProxyError, httpx2.InvalidURL) as error:
        raise _unreachable(settings, str(error) or type(error).__name__) from error
    except httpx2.HTTPError as error:
        what = f"the hub at {settings.endpoint} sent an incomplete response"
        raise RetryableError(NetworkError(what, why=str(error) or type(error).__name__)) from error


def _refuse(response: httpx2.Response, settings: Settings, about: tuple[str, str], policy: RetryPolicy) -> None:
    """Raise the error that a refusal means."""
    repository, revision = about
    status, headers = response.status_code, response.headers
    code = headers.get("x-error-code", "")
    if code == "GatedRepo":
        raise LoginRequiredError(
            f"{repository} is gated",
            why="its terms have to be accepted first",
            hint=login_hint(settings, repository),
        )
    if code == "RevisionNotFound":
        raise ModelNotFoundError(f"{repository} has no revision {revision!r}")
    if code == "RepoNotFound" or (status == 401 and headers.get("x-error-message") != _WRONG_LOGIN):
        raise ModelNotFoundError(
            f"the hub has no repository {repository}",
            why="it does not exist, or it is private",
            hint="check the spelling; for a private one run `hf auth login` or set HF_TOKEN",
        )
    if status in (401, 403):
        raise LoginRequiredError(
            "the hub refuses the login",
            why=f"it answered {status}",
            hint="run `hf auth login` again, or check HF_TOKEN",
        )
    error: LlmrunError = NetworkError(f"the hub at {settings.endpoint} answered {status}", hint="try again later")
    if status == 429:
        error = NetworkError(
            "too many requests to the hub",
            hint="wait, or log in with `hf auth login` for a higher limit",
        )
    if status in BUSY:
        raise RetryableError(error, wait_seconds(response, error, policy))
    raise error


def _unreachable(settings: Settings, why: str) -> NetworkError:
    hint = "check the network; models of `llmrun list` work without it"
    if "CERTIFICATE" in why:
        hint = "name the certificates to trust: SSL_CERT_FILE=FILE"
    why = re.sub(r"^\[Errno -?\d+\] ", "", why)
    return NetworkError(f"can't reach the hub at {settings.endpoint}: {why}", hint=hint)


def _within(seconds: float, settings: Settings, call: Callable[[], bytes]) -> bytes:
    """Run a call in a thread, because a resolver or a list of dead addresses has no overall timeout."""
    results: list[bytes] = []
    failures: list[BaseException] = []

    def work() -> None:
        try:
            results.append(call())
        except BaseException as error:  # raised again by the waiting thread
            failures.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if failures:
        raise failures[0]
    if not results:
        raise _unreachable(settings, f"no answer within {seconds:.0f} seconds")
    return results[0]


_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_MAX_BYTES = 1 << 50
_MAX_NAME_BYTES = 255  # of a file on common file systems
_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    name: str  # relative, safe as a path
    size: int
    sha256: str  # lower-case hex


Parts = tuple[RemoteFile, ...]
"""Files of one model: a single one when it is not split."""


@dataclass(frozen=True, slots=True)
class Repository:
    """Contents of a repository at one commit."""

    id: str  # "owner/repo"
    commit: str  # 40 hex digits
    gated: bool  # its terms have to be accepted first
    files: tuple[RemoteFile, ...]  # .gguf files; without a hash they can't be verified and are left out
    updated: str = ""  # ISO date of the last change; "" when unknown


def repository_files(
    repository: str,
    revision: str,
    settings: Settings,
    on_note: OnNote = ignore_note,
) -> Repository:
    """Fetch the list of a repository's model files.

    Args:
        on_note: called before each retry, and with the names of ignored files.

    Raises:
        ModelNotFoundError: there is no such repository or revision, or it is one of `llmrun import`.
        LoginRequiredError: it is gated.
        NetworkError: the hub can't be reached, its response is invalid, or we are offline.
    """
    if repository.lower().startswith(IMPORTED):
        raise ModelNotFoundError(
            f"{repository} is not on this disk",
            why=f"{IMPORTED}* are models of `llmrun import`, never the hub's; a file imported with --link may be gone",
            hint=f"llmrun import FILE --name {repository.removeprefix(IMPORTED)}; llmrun gc removes broken links",
        )
    refuse_offline(f"{repository} can't be fetched", settings)
    if not _REPOSITORY.fullmatch(repository) or "--" in repository or ".." in repository:
        raise ModelNotFoundError(f"{repository!r} can't be a repository's name")
    path = f"/api/models/{repository}/revision/{quote(revision, safe='')}"
    info = request_json(path, {"blobs": "true"}, settings, on_note, about=(repository, revision))
    try:
        commit, siblings, gated = info["sha"], info.get("siblings") or [], bool(info.get("gated"))
        models = [sibling for sibling in siblings if str(sibling["rfilename"]).lower().endswith(".gguf")]
        verifiable = [sibling for sibling in models if sibling.get("lfs")]
    except (TypeError, KeyError, AttributeError) as error:
        raise invalid_response(settings, "something that can't be read") from error
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise invalid_response(settings, f"the commit {commit!r}")
    left_out = [
        sibling["rfilename"] for sibling in models if sibling not in verifiable and _is_safe(str(sibling["rfilename"]))
    ]
    if left_out:
        on_note(f"ignored, because the hub has no sha256 to verify them: {', '.join(left_out)}")
    files = tuple(_file(sibling, settings) for sibling in verifiable)
    return Repository(repository, commit, gated, files, _date(info.get("lastModified")))


@dataclass(frozen=True, slots=True)
class Match:
    repository: str
    downloads: int
    likes: int
    updated: str  # ISO date, "" when unknown
    gated: bool


def search(
    words: Sequence[str],
    settings: Settings,
    limit: int = 20,
    on_note: OnNote = ignore_note,
) -> list[Match]:
    """Return repositories with GGUF files whose names have these words, the most downloaded first.

    Raises NetworkError if the hub can't be reached, its response is invalid, or we are offline.
    """
    refuse_offline("the hub can't be searched", settings)
    fields = ["downloads", "likes", "lastModified", "gated"]
    query = {"filter": "gguf", "search": " ".join(words), "sort": "downloads", "limit": limit, "expand": fields}
    rows = request_json("/api/models", query, settings, on_note)
    if not isinstance(rows, list):
        raise invalid_response(settings, "something that is not a list")
    return [match for match in map(_match, rows[:limit]) if match]


def choose(spec: ModelSpec, files: Sequence[RemoteFile]) -> Parts:
    """Return the files that a spec names, or the preferred quant's; of a split model all parts, in order.

    Repositories change: a catalogue's file that is gone is replaced by the most similar quant of as many bits.

    Raises:
        ModelNotFoundError: a file or quant is missing; the message lists those available.
    """
    if spec.filename is not None:
        kin = nearest_quant(spec, files)
        return by_quant(files)[kin] if kin else parts_of(files, spec.filename)
    chosen = filenames.choose((file.name for file in files), spec.quant)
    if chosen is None:
        raise _no_such_quant(files, spec.quant, spec.repository or "")
    return parts_of(files, chosen)


def nearest_quant(spec: ModelSpec, files: Sequence[RemoteFile]) -> str:
    """Return the quant that replaces a catalogue's file; "" if that is there, or has no similar one."""
    if not spec.alias or not spec.quant or any(file.name in filenames.all_parts(spec.filename or "") for file in files):
        return ""
    wanted, quants = spec.quant.removeprefix("UD-"), by_quant(files)
    names = {quant: quant.upper().removeprefix("UD-") for quant in quants}
    shared = {quant: len(commonprefix((wanted, name))) for quant, name in names.items()}  # noqa: RUF071 - of texts
    best = max(quants, key=lambda quant: (shared[quant], -n_bytes(quants[quant])), default="")
    bits = re.search(r"\d", wanted)
    return best if best and bits and shared[best] >= bits.end() else ""


def _no_such_quant(files: Sequence[RemoteFile], quant: str | None, name: str) -> ModelNotFoundError:
    choices = by_quant(files)
    if not quant or not choices:
        return ModelNotFoundError("the repository has no GGUF model file", hint="look for one whose name ends in -GGUF")
    near = similar_quants(quant, list(choices))
    start = f"{name}:" if name else ""
    return ModelNotFoundError(
        f"there is no quant {quant}" + (f" of {name}" if name else ""),
        why=f"there are {listed(files)}",
        hint="did you mean " + " or ".join(start + quant for quant in near) + "?"
        if near
        else f"name one: {start}QUANT",
    )


def offers(spec: ModelSpec, files: Sequence[RemoteFile]) -> dict[str, Parts]:
    """Return by_quant() together with the spec's own choice, even if another file has the same quant."""
    meant = choose(spec, files)
    return {**by_quant(files), quant_of(meant): meant}


def quant_of(parts: Parts) -> str:
    """Return the model's key in by_quant()."""
    return filenames.quant_of(parts[0].name) or parts[0].name


def by_quant(files: Sequence[RemoteFile]) -> dict[str, Parts]:
    """Map each quant to its files, complete models only, the preferred first."""
    by_name = {file.name: file for file in files}
    parts = {quant: filenames.all_parts(first) for quant, first in filenames.available(by_name).items()}
    return {
        quant: tuple(by_name[name] for name in names)
        for quant, names in parts.items()
        if all(name in by_name for name in names)
    }


def listed(files: Sequence[RemoteFile]) -> str:
    """Return the available quants and their sizes as text."""
    return ", ".join(f"{quant} ({readable_size(n_bytes(parts))})" for quant, parts in by_quant(files).items())


def n_bytes(parts: Parts) -> int:
    return sum(part.size for part in parts)


def parts_of(files: Sequence[RemoteFile], filename: str) -> Parts:
    """Return the file of this name and, when the model is split, all its other parts.

    Raises:
        ModelNotFoundError: a file or part is missing; the message lists those available.
    """
    by_name = {file.name: file for file in files}
    names = filenames.all_parts(filename)
    missing = [name for name in names if name not in by_name]
    if missing:
        choices = ", ".join(filenames.available(by_name).values()) or "no model files"
        raise ModelNotFoundError(f"the repository has no file {missing[0]!r}", why=f"there are {choices}")
    return tuple(by_name[name] for name in names)


def file_url(settings: Settings, repository: str, commit: str, filename: str) -> str:
    return f"{settings.endpoint}/{repository}/resolve/{commit}/{quote(filename)}"


def refuse_offline(what: str, settings: Settings) -> None:
    if settings.offline:
        raise NetworkError(
            what,
            why="HF_HUB_OFFLINE is set, so the network is not used",
            hint="unset HF_HUB_OFFLINE, or use a model of `llmrun list`",
        )


def _match(answer: Any) -> Match | None:
    """Return one search result, None when its repository's name is invalid."""
    facts = answer if isinstance(answer, dict) else {}
    repository = facts.get("id")
    if not isinstance(repository, str) or len(repository) > 200 or not _REPOSITORY.fullmatch(repository):
        return None
    downloads, likes = (facts[name] if isinstance(facts.get(name), int) else 0 for name in ("downloads", "likes"))
    return Match(repository, downloads, likes, _date(facts.get("lastModified")), gated=bool(facts.get("gated")))


def _date(time: object) -> str:
    """Return the day of an ISO time, "" when invalid."""
    day = str(time)[:10]
    return day if _DATE.fullmatch(day) else ""


def _file(sibling: Any, settings: Settings) -> RemoteFile:
    name, size, lfs = sibling["rfilename"], sibling.get("size"), sibling["lfs"]
    if not isinstance(name, str) or not _is_safe(name):
        raise invalid_response(settings, f"the file name {name!r}")
    sha256 = lfs.get("sha256") if isinstance(lfs, dict) else None
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        raise invalid_response(settings, f"the hash {sha256!r} of {name!r}")
    if not isinstance(size, int) or isinstance(size, bool) or not 0 < size <= _MAX_BYTES:
        raise invalid_response(settings, f"the size {size!r} of {name!r}")
    return RemoteFile(name, size, sha256)


def _is_safe(name: str) -> bool:
    """Return whether a name stays inside its folder on every system and can be printed."""
    return (
        name.isprintable()
        and len(name) <= 512
        and "\\" not in name
        and ":" not in name
        and all(part not in ("", ".", "..") and len(part.encode()) <= _MAX_NAME_BYTES for part in name.split("/"))
    )
