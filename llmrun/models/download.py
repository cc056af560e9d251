"""The bytes of one file, from a server to a place on this disk: resumed, verified, installed at once.

Owns transfer, hashing, locks and disk space; must not know the hub, indexes or models. A file is either
not there or whole: bytes are collected in `<target>.part` under a lock, verified, synced and renamed. When
the sha256 is known, a part outlives Ctrl-C and crashes, and the next run sends only what is missing.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrun.errors import (
    DiskFullError,
    IntegrityError,
    LlmrunError,
    LoginRequiredError,
    ModelNotFoundError,
    NetworkError,
    ResourceError,
)

if TYPE_CHECKING:
    import httpx2

OnProgress = Callable[[int, int], None]
"""Called with (bytes there, bytes in all) while bytes arrive; the second is 0 when the server doesn't say."""

CHUNK_BYTES = 1 << 20
_PROGRESS_SECONDS = 0.1
_MAX_REDIRECTS = 5
_LONGEST_WAIT_SECONDS = 60.0
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})
_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)")


@dataclass(frozen=True, slots=True)
class Source:
    """A file on a server.

    Attributes:
        url: where to ask; redirects are followed.
        label: what messages call it. Links themselves stay out of messages: they may hold secrets.
        sha256: lower-case hex; without it nothing can be resumed or verified.
        size: in bytes, when known.
        token: sent as a bearer token to the url's own host, never to another one.
        ca_file: certificates to trust in place of the usual ones.
        login_hint: what to do when the server wants a login.
    """

    url: str
    label: str
    sha256: str | None = None
    size: int | None = None
    token: str | None = None
    ca_file: str | None = None
    login_hint: str = ""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for a server, and how often to try again.

    Attributes:
        connect_seconds: for a connection.
        stall_seconds: without a single byte.
        retries: in a row, without a megabyte of progress between them.
        backoff_seconds: before the first retry; doubles each time.
    """

    connect_seconds: float = 10.0
    stall_seconds: float = 30.0
    retries: int = 4
    backoff_seconds: float = 0.5


PATIENT = Patience()


class _TryAgain(Exception):  # noqa: N818  # no error by itself: it carries the one to raise in the end
    def __init__(self, error: LlmrunError, wait_seconds: float = 0.0) -> None:
        super().__init__(str(error))
        self.error = error
        self.wait_seconds = wait_seconds


def download(
    source: Source,
    target: Path,
    *,
    lock: Path,
    on_progress: OnProgress | None = None,
    patience: Patience = PATIENT,
) -> None:
    """Put the source's bytes at `target`, unless they are there already.

    Args:
        lock: file that only one process may hold while it writes this target.
        on_progress: called about ten times a second while bytes arrive, and at the end.

    Raises:
        NetworkError: the server can't be reached, or answers something unusable, after retries.
        IntegrityError: the bytes are not those promised; they are deleted.
        LoginRequiredError: the server wants a token or accepted terms.
        ModelNotFoundError: the server has no such file.
        DiskFullError: it does not fit; what has arrived is kept.
        ResourceError: the place can't be written.
    """
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(lock):
            if target.exists():  # another process was faster
                return
            with _Part(target, source) as part:
                _transfer(source, part, patience, _Progress(on_progress))
                part.install()


@contextmanager
def exclusive(lock: Path) -> Iterator[None]:
    """Hold a lock file; wait for whoever has it. The lock of a dead process counts for nothing."""
    from filelock import FileLock

    lock.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(lock):
        yield


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn what the file system says while `path` is written into our errors."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(
                f"no space is left on the disk for {str(path)!r}",
                why=f"{_free_bytes(path.parent)} bytes are free",
                hint="free some space and run the same command again; what has arrived is kept",
            ) from error
        raise ResourceError(f"can't write {str(path)!r}", why=error.strerror or str(error)) from error


def require_space(folder: Path, needed: int) -> None:
    """Raises DiskFullError unless the folder's disk has so many free bytes."""
    free = _free_bytes(folder)
    if needed > free:
        raise DiskFullError(
            f"the disk of {str(folder)!r} is too full",
            why=f"{needed} bytes are needed, {free} are free",
            hint="free some space, or move the models with HF_HOME",
        )


def sync_folder(folder: Path) -> None:
    """Make a rename in this folder survive a power cut."""
    if os.name == "nt":  # folders can't be opened there
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fetch_page(
    url: str,
    label: str,
    *,
    accept: str,
    most_bytes: int,
    ca_file: str | None = None,
    patience: Patience = PATIENT,
) -> tuple[str, str, bytes]:
    """A small page: (the url it came from in the end, its content type, its bytes).

    Raises:
        NetworkError, LoginRequiredError, ModelNotFoundError: as download().
    """
    import httpx2

    source = Source(url, label, ca_file=ca_file)
    body = bytearray()
    try:
        with (
            _client(source, patience) as client,
            _answer(client, source, {"Accept": accept}) as response,
        ):
            _refuse_errors(response, source)
            for chunk in response.iter_bytes():
                body += chunk
                if len(body) > most_bytes:
                    raise NetworkError(f"{label} is larger than {most_bytes} bytes")
            return str(response.url), response.headers.get("content-type", ""), bytes(body)
    except httpx2.HTTPError as error:
        raise _unreachable(source, error) from error
    except _TryAgain as trouble:
        raise trouble.error from trouble


def _free_bytes(folder: Path) -> int:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


class _Progress:
    """Passes progress on, ten times a second at most."""

    def __init__(self, callback: OnProgress | None) -> None:
        self.callback = callback
        self.last = 0.0

    def __call__(self, done: int, total: int, *, always: bool = False) -> None:
        now = time.monotonic()
        if self.callback and (always or now - self.last >= _PROGRESS_SECONDS):
            self.last = now
            self.callback(done, total)


class _Part:
    """The bytes that have arrived, and their hash."""

    def __init__(self, target: Path, source: Source) -> None:
        self.target = target
        self.source = source
        self.path = target.with_name(target.name + ".part")
        self.size = 0
        self.digest = hashlib.sha256()

    def __enter__(self) -> _Part:
        # Unbuffered: what was written survives even when we are killed.
        self.file: Any = self.path.open("a+b", buffering=0)
        if self.source.sha256 is None:
            self.restart()
        else:
            self._hash_what_is_there()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.file.close()
        if self.source.sha256 is None or (isinstance(kind, type) and issubclass(kind, IntegrityError)):
            self.path.unlink(missing_ok=True)

    def _hash_what_is_there(self) -> None:
        self.file.seek(0)
        while chunk := self.file.read(CHUNK_BYTES):
            self.digest.update(chunk)
            self.size += len(chunk)
        if self.source.size is not None and self.size > self.source.size:
            self.restart()

    def append(self, chunk: bytes) -> None:
        """Add bytes at the end. Raises IntegrityError when there are more than promised."""
        if self.source.size is not None and self.size + len(chunk) > self.source.size:
            raise _wrong_bytes(self.source, f"more than the {self.source.size} bytes promised arrived")
        rest = memoryview(chunk)
        while rest:
            rest = rest[self.file.write(rest) :]
        self.digest.update(chunk)
        self.size += len(chunk)

    def restart(self) -> None:
        """Forget everything."""
        self.file.truncate(0)
        self.size = 0
        self.digest = hashlib.sha256()

    def install(self) -> None:
        """Verify the bytes and move them to the target."""
        if self.source.size is not None and self.size != self.source.size:
            raise _wrong_bytes(self.source, f"{self.size} bytes arrived, {self.source.size} were promised")
        if self.source.sha256 not in (None, self.digest.hexdigest()):
            raise _wrong_bytes(
                self.source, f"their sha256 is {self.digest.hexdigest()}, it should be {self.source.sha256}"
            )
        os.fsync(self.file.fileno())
        self.file.close()
        self.path.replace(self.target)
        sync_folder(self.target.parent)


def _wrong_bytes(source: Source, why: str) -> IntegrityError:
    return IntegrityError(
        f"the bytes of {source.label} are wrong, so they were deleted",
        why=why,
        hint="run the same command again; if it happens again, the server or something on the way is broken",
    )


def _transfer(source: Source, part: _Part, patience: Patience, progress: _Progress) -> None:
    """Ask until the part is complete, or patience ends."""
    failures = 0
    if source.size is not None:
        require_space(part.path.parent, source.size - part.size)
    with _client(source, patience) as client:
        while source.size is None or part.size < source.size:
            before = part.size
            try:
                _attempt(client, source, part, progress)
                break
            except _TryAgain as trouble:
                failures = 1 if part.size - before >= CHUNK_BYTES else failures + 1
                if failures > patience.retries:
                    raise trouble.error from trouble
                time.sleep(max(trouble.wait_seconds, patience.backoff_seconds * 2 ** (failures - 1)))
    progress(part.size, source.size or part.size, always=True)


def _client(source: Source, patience: Patience) -> httpx2.Client:
    """A client that heeds the environment's proxies and certificates."""
    import httpx2

    timeout = httpx2.Timeout(patience.stall_seconds, connect=patience.connect_seconds)
    if source.ca_file is None:
        return httpx2.Client(timeout=timeout)
    import ssl

    try:
        context = ssl.create_default_context(cafile=source.ca_file)
    except OSError as error:
        raise NetworkError(f"can't read the certificates in {source.ca_file!r}", why=str(error)) from error
    return httpx2.Client(timeout=timeout, verify=context)


def _attempt(client: httpx2.Client, source: Source, part: _Part, progress: _Progress) -> None:
    import httpx2

    # Compressed bytes would be neither countable nor resumable.
    headers = {"Accept-Encoding": "identity"}
    if part.size:
        headers["Range"] = f"bytes={part.size}-"
    try:
        with _answer(client, source, headers) as response:
            total = _begin(response, source, part)
            progress(part.size, total, always=True)
            for chunk in response.iter_raw():
                part.append(chunk)
                progress(part.size, total)
    except httpx2.HTTPError as error:
        raise _TryAgain(_unreachable(source, error)) from error
    if total and part.size < total:
        raise _TryAgain(NetworkError(f"the server stopped after {part.size} of {total} bytes of {source.label}"))


@contextmanager
def _answer(client: httpx2.Client, source: Source, headers: dict[str, str]) -> Iterator[httpx2.Response]:
    """The first answer that is no redirect."""
    import httpx2

    try:
        url = first = httpx2.URL(source.url)
        for _ in range(_MAX_REDIRECTS + 1):
            sent = {"User-Agent": "llmrun", **headers}
            if source.token and _origin(url) == _origin(first):
                sent["Authorization"] = f"Bearer {source.token}"
            with client.stream("GET", url, headers=sent) as response:
                if response.status_code not in _REDIRECTS:
                    yield response
                    return
                url = url.join(response.headers.get("location", ""))
            if url.scheme not in ("https", first.scheme):
                raise NetworkError(
                    f"the server sent us to an unsafe link for {source.label}",
                    why=f"from {first.scheme} to {url.scheme}",
                )
    except httpx2.InvalidURL as error:
        raise NetworkError(f"the link of {source.label} makes no sense", why=str(error)) from error
    raise NetworkError(f"the server sent us in circles for {source.label}")


def _origin(url: httpx2.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


def _begin(response: httpx2.Response, source: Source, part: _Part) -> int:
    """Get the part ready for an answer's body; gives the size of the whole file, 0 when unknown."""
    if response.status_code == 416:
        part.restart()  # the server's file is shorter than our part, so the part is of no use
        raise _TryAgain(NetworkError(f"the server has a shorter {source.label} than it had"))
    _refuse_errors(response, source)
    if response.headers.get("content-encoding", "identity") != "identity":
        raise NetworkError(f"the server compressed {source.label}, though it was asked not to")
    if response.status_code == 206 and part.size:
        total = _range_total(response, part)
    else:
        part.restart()  # the whole file comes, whatever we have
        length = response.headers.get("content-length", "")
        total = int(length) if length.isascii() and length.isdigit() else 0
    if total and source.size is not None and total != source.size:
        raise _wrong_bytes(source, f"the server has {total} bytes, {source.size} were promised")
    require_space(part.path.parent, max(total - part.size, 0))
    return total or source.size or 0


def _range_total(response: httpx2.Response, part: _Part) -> int:
    answer = response.headers.get("content-range", "")
    found = _CONTENT_RANGE.fullmatch(answer)
    if found is None or found[1] is None or int(found[1]) != part.size:
        start = part.size
        part.restart()
        raise _TryAgain(NetworkError(f"the server was asked for bytes from {start} on and sent {answer!r}"))
    return int(found[3]) if found[3] != "*" else 0


def _refuse_errors(response: httpx2.Response, source: Source) -> None:
    """Raises for every status but 200 and 206: _TryAgain where waiting may help."""
    status = response.status_code
    if status in (200, 206):
        return
    host = response.url.host
    error: LlmrunError = NetworkError(f"{host} answered {status} when asked for {source.label}")
    if status in _BUSY:
        raise _TryAgain(error, _wait_seconds(response, error))
    moved = host != _host(source.url)
    if status == 403 and moved:  # a signed link has expired; asking again gets a fresh one
        raise _TryAgain(error)
    if status in (401, 403) and source.login_hint:
        raise LoginRequiredError(
            f"{host} wants a login for {source.label}", why=f"it answered {status}", hint=source.login_hint
        )
    if status in (404, 410):
        raise ModelNotFoundError(f"{host} has no {source.label}", why=f"it answered {status}")
    raise error


def _host(url: str) -> str:
    from urllib.parse import urlsplit

    return urlsplit(url).hostname or ""


def _wait_seconds(response: httpx2.Response, error: LlmrunError) -> float:
    """What Retry-After asks for. Raises the error at once when that is too long to wait."""
    text = response.headers.get("retry-after", "").strip()
    seconds = 0.0
    if text.isascii() and text.isdigit():
        seconds = float(text)
    elif text:
        from datetime import datetime, timezone
        from email.utils import parsedate_to_datetime

        with suppress(ValueError, TypeError):
            seconds = (parsedate_to_datetime(text) - datetime.now(timezone.utc)).total_seconds()
    if seconds > _LONGEST_WAIT_SECONDS:
        error.hint = f"it asks to be left alone for {seconds:.0f} seconds; try again then"
        raise error
    return max(seconds, 0.0)


def _unreachable(source: Source, error: httpx2.HTTPError) -> NetworkError:
    import httpx2

    host = _host(source.url)
    if isinstance(error, httpx2.ReadTimeout):
        return NetworkError(f"{source.label} stopped arriving", why=f"{host} sent nothing for too long")
    if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
        return NetworkError(f"can't reach {host}", why=str(error) or type(error).__name__)
    return NetworkError(f"the transfer of {source.label} broke off", why=str(error) or type(error).__name__)
