"""What a repository on the Hugging Face hub holds: names, sizes, hashes. Metadata only, never bytes.

Owns every call of huggingface_hub; must not know where files are put. Whatever the hub answers is untrusted
and checked here, before anybody makes a path of it.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from llmrun.config import Settings
from llmrun.errors import LlmrunError, LoginRequiredError, ModelNotFoundError, NetworkError, OutOfMemoryError
from llmrun.gguf import filenames
from llmrun.models.registry import ModelSpec, near_quants

if TYPE_CHECKING:
    from huggingface_hub import HfApi

CONNECT_SECONDS = 4.0
# In all: a hub with ten addresses behind a firewall would take ten times the connect timeout.
ANSWER_SECONDS = 10.0

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_MOST_BYTES = 1 << 50
_MOST_NAME_BYTES = 255  # of a file on every usual disk
_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")


_SCRATCH_BYTES = 64 << 20
_LEFT_FREE_BYTES = 512 << 20  # or a tenth, as in plan.py

OnNote = Callable[[str], None]
"""Gets one line for people."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A model file of a repository. name is relative and safe to use as a path; sha256 is lower-case hex."""

    name: str
    size: int
    sha256: str


Parts = tuple[RemoteFile, ...]
"""The files of one model: itself alone when it is not split."""


def _ignore(text: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Repository:
    """What a repository holds at one commit.

    Attributes:
        id: "owner/repo".
        commit: 40 hex digits.
        gated: whether its terms have to be accepted first.
        files: its .gguf files.
    """

    id: str
    commit: str
    gated: bool
    files: tuple[RemoteFile, ...]


def repository_files(repository: str, revision: str, settings: Settings) -> Repository:
    """Ask the hub for a repository's model files.

    Raises:
        ModelNotFoundError: there is no such repository or revision.
        LoginRequiredError: it is gated.
        NetworkError: the hub can't be reached, answers nonsense, or we are offline.
    """
    _refuse_offline(f"{repository} can't be fetched", settings)
    info = _within(ANSWER_SECONDS, settings.endpoint, lambda: _ask(repository, revision, settings))
    commit = info.sha
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise _nonsense(settings, f"the commit {commit!r}")
    siblings = info.siblings or []
    files = [_file(item, settings) for item in siblings if str(item.rfilename).lower().endswith(".gguf")]
    return Repository(repository, commit, bool(info.gated), tuple(files))


@dataclass(frozen=True, slots=True)
class Match:
    """A repository that a search found. updated is an ISO date, "" when the hub tells none."""

    repository: str
    downloads: int
    likes: int
    updated: str
    gated: bool


def search(words: Sequence[str], settings: Settings, limit: int = 20) -> list[Match]:
    """Repositories with GGUF files whose names have these words, the most downloaded first.

    Raises:
        NetworkError: the hub can't be reached, answers nonsense, or we are offline.
    """
    _refuse_offline("the hub can't be searched", settings)
    text = " ".join(words)
    found = _within(ANSWER_SECONDS, settings.endpoint, lambda: _search(text, settings, limit))
    return [match for match in map(_match, found[:limit]) if match]


def choose(spec: ModelSpec, files: Sequence[RemoteFile], room: int = 0, on_note: OnNote = _ignore) -> Parts:
    """The files of a repository that a spec means; of a split model all parts, in order.

    Args:
        spec: of a repository.
        files: what the repository has.
        room: free memory of this machine in bytes; 0 is unknown. Where no quant was asked for, one that fits is taken.
        on_note: gets one line when the choice is not simply the usual one.

    Raises:
        ModelNotFoundError: there is no such file or quant; the message says what there is.
        OutOfMemoryError: no quant was asked for, and none fits.
    """
    if spec.filename is not None and not spec.any_quant:
        return parts_of(files, spec.filename)
    if spec.filename is None:
        return choose_file(files, spec.quant, room, on_note, name=spec.repository or "")
    proposed = parts_of(files, spec.filename)
    if not room or _fits(proposed, room):
        return proposed
    return _that_fits(by_quant(files), proposed, room, on_note, spec.alias or "")


def choose_file(
    files: Sequence[RemoteFile], quant: str | None, room: int = 0, on_note: OnNote = _ignore, *, name: str = ""
) -> Parts:
    """The file of a quant, or the best there is; of a split model all its parts, in order.

    Args:
        quant: upper or lower case; None takes Q4_K_M or the nearest to it that fits.
        room, on_note: as choose().
        name: what a quant is appended to in hints.

    Raises:
        ModelNotFoundError: there is no model file, none of this quant, or a part is missing.
        OutOfMemoryError: no quant was asked for, and none fits.
    """
    by_name = {file.name: file for file in files}
    chosen = filenames.choose(by_name, quant)
    if chosen is None:
        raise _no_such_quant(files, quant, name)
    parts = parts_of(files, chosen)
    if quant is None and room and not _fits(parts, room):
        return _that_fits(by_quant(files), parts, room, on_note, name)
    if quant is None and filenames.quant_of(chosen) and len(filenames.available(by_name)) > 1:
        on_note(f"{filenames.quant_of(chosen)} of {_listed(files)}: the usual choice, good answers for its size")
    return parts


def _no_such_quant(files: Sequence[RemoteFile], quant: str | None, name: str) -> ModelNotFoundError:
    choices = by_quant(files)
    if not quant or not choices:
        return ModelNotFoundError("the repository has no GGUF model file", hint="look for one whose name ends in -GGUF")
    near = near_quants(quant, list(choices))
    start = f"{name}:" if name else ""
    return ModelNotFoundError(
        f"there is no quant {quant}" + (f" of {name}" if name else ""),
        why=f"there are {_listed(files)}",
        hint="did you mean " + " or ".join(start + one for one in near) + "?" if near else f"name one: {start}QUANT",
    )


def by_quant(files: Sequence[RemoteFile]) -> dict[str, Parts]:
    """Quant -> its files, of those that are complete; the preferred first."""
    by_name = {file.name: file for file in files}
    found = {quant: filenames.all_parts(first) for quant, first in filenames.available(by_name).items()}
    return {
        quant: tuple(by_name[name] for name in names)
        for quant, names in found.items()
        if all(name in by_name for name in names)
    }


def _that_fits(choices: Mapping[str, Parts], wanted: Parts, room: int, on_note: OnNote, name: str) -> Parts:
    """The largest of the quants that fit; below the usual choice, larger is better."""
    first = filenames.quant_of(wanted[0].name) or wanted[0].name
    fitting = {quant: parts for quant, parts in choices.items() if _fits(parts, room)}
    start = f"{name}:" if name else ""
    if not fitting:
        smallest = min(choices, key=lambda quant: _bytes(choices[quant]))
        raise OutOfMemoryError(
            f"no quant{f' of {name}' if name else ''} fits into memory",
            why=f"the smallest, {smallest}, takes {shown_size(_bytes(choices[smallest]))}; "
            f"{shown_size(room)} of memory are free",
            hint=f"take a smaller model, or name a quant to have it all the same: {start}{smallest}",
        )
    chosen = max(fitting, key=lambda quant: _bytes(fitting[quant]))
    on_note(
        f"{chosen} ({shown_size(_bytes(fitting[chosen]))}): {first} with {shown_size(_bytes(wanted))} "
        f"and a KV cache does not fit into {shown_size(room)} of free memory"
    )
    return fitting[chosen]


def _fits(parts: Parts, room: int) -> bool:
    """Whether weights, a KV cache worth having and scratch memory leave the system what a plan leaves it.

    The header would tell exactly, but it is not here yet: an eighth of the weights is a few thousand tokens' KV cache.
    """
    return _bytes(parts) * 9 // 8 + _SCRATCH_BYTES <= room - max(_LEFT_FREE_BYTES, room // 10)


def _bytes(parts: Parts) -> int:
    return sum(part.size for part in parts)


def _listed(files: Sequence[RemoteFile]) -> str:
    return ", ".join(f"{quant} ({shown_size(_bytes(parts))})" for quant, parts in by_quant(files).items())


def shown_size(n_bytes: int) -> str:
    """Bytes in the decimal units of the hub, e.g. "4.7 GB"."""
    return f"{n_bytes / 1e9:.1f} GB" if n_bytes >= 10**9 else f"{max(n_bytes / 1e6, 0.1):.1f} MB"


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


def token() -> str | None:
    """The user's token for the hub, from HF_TOKEN or `hf auth login`."""
    from huggingface_hub import get_token

    return get_token()


def login_hint(settings: Settings, repository: str) -> str:
    """What to do when a repository is gated or private."""
    return f"open {settings.endpoint}/{repository}, accept the terms, then run `hf auth login` or set HF_TOKEN"


def _refuse_offline(what: str, settings: Settings) -> None:
    if settings.offline:
        raise NetworkError(
            what,
            why="HF_HUB_OFFLINE is set, so the network is not used",
            hint="unset HF_HUB_OFFLINE, or use a model of `llmrun list`",
        )


def _ask(repository: str, revision: str, settings: Settings) -> Any:
    """The hub's answer about a repository, or one of our errors."""
    with _our_errors(settings) as api:
        from huggingface_hub import errors

        try:
            return api.model_info(repository, revision=revision, files_metadata=True, timeout=_timeout())
        except errors.GatedRepoError as error:
            raise LoginRequiredError(
                f"{repository} is gated",
                why="its makers want their terms accepted first",
                hint=login_hint(settings, repository),
            ) from error
        except errors.RepositoryNotFoundError as error:
            raise ModelNotFoundError(
                f"the hub has no repository {repository}",
                why="it does not exist, or it is private",
                hint="check the spelling; for a private one run `hf auth login` or set HF_TOKEN",
            ) from error
        except (errors.RevisionNotFoundError, errors.EntryNotFoundError) as error:
            raise ModelNotFoundError(f"{repository} has no revision {revision!r}") from error
        except errors.HFValidationError as error:
            raise ModelNotFoundError(f"{repository!r} can't be a repository's name") from error


def _search(text: str, settings: Settings, limit: int) -> list[Any]:
    """The hub's answer to a search, or one of our errors. HfApi.list_models() would try five times, loudly."""
    with _our_errors(settings):
        import httpx2

        fields = ["downloads", "likes", "lastModified", "gated"]
        asked: Any = {"filter": "gguf", "search": text, "sort": "downloads", "limit": limit, "expand": fields}
        known = token()
        headers = {"User-Agent": "llmrun", **({"Authorization": f"Bearer {known}"} if known else {})}
        answer = httpx2.get(f"{settings.endpoint}/api/models", params=asked, headers=headers, timeout=_timeout())
        if answer.status_code != 200:
            raise _http_error(answer, settings)
        found = answer.json()
    if not isinstance(found, list):
        raise _nonsense(settings, "something that is not a list")
    return found


@contextmanager
def _our_errors(settings: Settings) -> Iterator[HfApi]:
    """The hub's interface; what goes wrong with it becomes one of our errors."""
    # Read when huggingface_hub is imported; without it the hub is told about torch and the like.
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    import httpx2
    from huggingface_hub import HfApi, errors

    try:
        yield HfApi(endpoint=settings.endpoint)
    except errors.HfHubHTTPError as error:
        raise _http_error(error.response, settings) from error
    except (httpx2.HTTPError, errors.OfflineModeIsEnabled) as error:
        raise NetworkError(
            f"can't reach the hub at {settings.endpoint}",
            why=str(error) or type(error).__name__,
            hint="check the network; models of `llmrun list` work without it",
        ) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # an answer that is not such JSON
        raise _nonsense(settings, f"something that can't be read ({type(error).__name__})") from error


def _timeout() -> Any:
    import httpx2

    return httpx2.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS)


def _match(answer: Any) -> Match | None:
    """One repository of a search's answer, None when it can't be one: then there is nothing to type."""
    facts = answer if isinstance(answer, dict) else {}
    repository, updated = facts.get("id"), str(facts.get("lastModified"))
    if not isinstance(repository, str) or len(repository) > 200 or not _REPOSITORY.fullmatch(repository):
        return None
    downloads, likes = (facts[name] if isinstance(facts.get(name), int) else 0 for name in ("downloads", "likes"))
    date = updated[:10] if _DATE.fullmatch(updated[:10]) else ""
    return Match(repository, downloads, likes, date, gated=bool(facts.get("gated")))


def _http_error(answer: Any, settings: Settings) -> LlmrunError:
    status = answer.status_code
    if status == 429:
        wait = answer.headers.get("retry-after", "")
        seconds = f" for {wait} seconds" if wait.isascii() and wait.isdigit() else ""
        return NetworkError(
            "the hub has had too many requests from here",
            why=f"it asks to be left alone{seconds}",
            hint="wait, or log in with `hf auth login`: known users may ask more often",
        )
    if status in (401, 403):
        return LoginRequiredError(
            "the hub refuses the login",
            why=f"it answered {status}",
            hint="run `hf auth login` again, or check HF_TOKEN",
        )
    return NetworkError(f"the hub at {settings.endpoint} answered {status}", hint="try again later")


def _within(seconds: float, endpoint: str, call: Callable[[], Any]) -> Any:
    """Run a call in a thread, so that no resolver or list of dead addresses holds us up longer than this."""
    results: list[Any] = []
    failures: list[BaseException] = []

    def work() -> None:
        try:
            results.append(call())
        except BaseException as error:  # raised again by whoever waits
            failures.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if failures:
        raise failures[0]
    if not results:
        raise NetworkError(f"can't reach the hub at {endpoint}", why=f"no answer within {seconds:.0f} seconds")
    return results[0]


def _file(sibling: Any, settings: Settings) -> RemoteFile:
    name, size, lfs = sibling.rfilename, sibling.size, sibling.lfs
    if not isinstance(name, str) or not _is_safe(name):
        raise _nonsense(settings, f"the file name {name!r}")
    sha256 = getattr(lfs, "sha256", None)
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        raise _nonsense(settings, f"the hash {sha256!r} of {name!r}")
    if not isinstance(size, int) or isinstance(size, bool) or not 0 < size <= _MOST_BYTES:
        raise _nonsense(settings, f"the size {size!r} of {name!r}")
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


def _nonsense(settings: Settings, what: str) -> NetworkError:
    return NetworkError(
        f"the hub at {settings.endpoint} answered nonsense",
        why=f"it sent {what}",
        hint="check HF_ENDPOINT, and whether something on the way changes answers",
    )
