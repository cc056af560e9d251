"""What a repository on the Hugging Face hub holds: names, sizes, hashes. Metadata only, never bytes.

Owns every call of huggingface_hub; must not know where files are put. Whatever the hub answers is untrusted
and checked here, before anybody makes a path of it.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from llmrun.config import Settings
from llmrun.errors import LlmrunError, LoginRequiredError, ModelNotFoundError, NetworkError
from llmrun.models import quants

CONNECT_SECONDS = 4.0
# In all: a hub with ten addresses behind a firewall would take ten times the connect timeout.
ANSWER_SECONDS = 10.0

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MOST_BYTES = 1 << 50


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A model file of a repository. name is relative and safe to use as a path; sha256 is lower-case hex."""

    name: str
    size: int
    sha256: str


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
    if settings.offline:
        raise NetworkError(
            f"{repository} can't be fetched",
            why="HF_HUB_OFFLINE is set, so the network is not used",
            hint="unset HF_HUB_OFFLINE, or use a model of `llmrun list`",
        )
    # Read when huggingface_hub is imported; without it the hub is told about torch and the like.
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    info = _within(ANSWER_SECONDS, settings.endpoint, lambda: _ask(repository, revision, settings))
    commit = info.sha
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise _nonsense(settings, f"the commit {commit!r}")
    siblings = info.siblings or []
    files = [_file(item, settings) for item in siblings if str(item.rfilename).lower().endswith(".gguf")]
    return Repository(repository, commit, bool(info.gated), tuple(files))


def choose_file(files: Sequence[RemoteFile], quant: str | None) -> tuple[RemoteFile, ...]:
    """The file of a quant, or the best there is; of a split model all its parts, in order.

    Args:
        quant: upper or lower case; None takes Q4_K_M or the nearest to it.

    Raises:
        ModelNotFoundError: there is no model file, none of this quant, or a part is missing.
    """
    by_name = {file.name: file for file in files}
    chosen = quants.choose(by_name, quant)
    if chosen is None:
        choices = ", ".join(quants.available(by_name))
        if quant and choices:
            raise ModelNotFoundError(f"there is no quant {quant}", why=f"there are {choices}")
        raise ModelNotFoundError("the repository has no GGUF model file", hint="look for one whose name ends in -GGUF")
    return parts_of(files, chosen)


def parts_of(files: Sequence[RemoteFile], filename: str) -> tuple[RemoteFile, ...]:
    """The file of this name and, when the model is split, all its other parts.

    Raises:
        ModelNotFoundError: it or a part is missing; the message lists the files there are.
    """
    by_name = {file.name: file for file in files}
    names = quants.all_parts(filename)
    missing = [name for name in names if name not in by_name]
    if missing:
        choices = ", ".join(quants.available(by_name).values()) or "no model files"
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


def _ask(repository: str, revision: str, settings: Settings) -> Any:
    """The hub's answer, or one of our errors."""
    import httpx2
    from huggingface_hub import HfApi, errors

    timeout: Any = httpx2.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS)
    try:
        api = HfApi(endpoint=settings.endpoint)
        return api.model_info(repository, revision=revision, files_metadata=True, timeout=timeout)
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
    except errors.HfHubHTTPError as error:
        raise _http_error(error, settings) from error
    except (httpx2.HTTPError, errors.OfflineModeIsEnabled) as error:
        raise NetworkError(
            f"can't reach the hub at {settings.endpoint}",
            why=str(error) or type(error).__name__,
            hint="check the network; models of `llmrun list` work without it",
        ) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # an answer that is no such JSON
        raise _nonsense(settings, f"something that can't be read ({type(error).__name__})") from error


def _http_error(error: Any, settings: Settings) -> LlmrunError:
    status = error.response.status_code
    if status == 429:
        wait = error.response.headers.get("retry-after", "")
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
        and all(part not in ("", ".", "..") for part in name.split("/"))
    )


def _nonsense(settings: Settings, what: str) -> NetworkError:
    return NetworkError(
        f"the hub at {settings.endpoint} answered nonsense",
        why=f"it sent {what}",
        hint="check HF_ENDPOINT, and whether something on the way changes answers",
    )
