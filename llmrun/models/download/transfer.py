"""HTTP request for a file and the meaning of its response: redirects, logins, errors, ranges.

A token goes only to the host it is meant for. Links stay out of messages, since they may contain secrets.
"""

from __future__ import annotations

import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from functools import lru_cache
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import httpx2

from llmrun.config import ca_file
from llmrun.errors import LlmrunError, LoginRequiredError, ModelNotFoundError, NetworkError
from llmrun.system import file_identity

_MAX_REDIRECTS = 5
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses after which the same request may succeed."""
_EXPIRED = frozenset({400, 401, 403, 410})
Answer = TypeVar("Answer")
OnNote = Callable[[str], None]
"""Called with one line for the user."""
_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)", re.ASCII)


@dataclass(frozen=True, slots=True)
class TransferSource:
    """File on a server."""

    url: str  # redirects are followed
    label: str  # name in messages
    sha256: str | None = None  # lower-case hex; None skips verification
    size: int | None = None  # in bytes, when known
    token: str | None = None  # bearer token, sent only to the url's own host
    login_hint: str = ""  # advice for when the server requires a login
    starts_with: bytes = b""  # expected first bytes; others end the transfer at once


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Timeouts and number of retries."""

    connect_seconds: float = 10.0
    stall_seconds: float = 25.0  # maximum time with (nearly) no bytes, headers included
    retries: int = 5  # in a row, without a megabyte of progress between them
    backoff_seconds: float = 0.5  # before the first retry; doubles each time, +/- 25 %
    longest_wait_seconds: float = 120.0  # maximum accepted Retry-After


RETRY_POLICY = RetryPolicy()
"""Of all downloads, and of the hub."""
SLOWEST_BYTES = 16 << 10
"""A connection that delivers fewer in RetryPolicy.stall_seconds has stalled."""


class RetryableError(Exception):
    """Failure that another attempt may avoid; carries the error to raise when no retry is left."""

    def __init__(self, error: LlmrunError, wait_seconds: float = 0.0, *, bad_range: bool = False) -> None:
        super().__init__(str(error))
        self.error = error
        self.wait_seconds = wait_seconds  # requested by the server
        self.bad_range = bad_range  # the response has another range than requested


def ignore_note(text: str) -> None:
    pass


def with_retries(ask: Callable[[], Answer], on_note: OnNote = ignore_note) -> Answer:
    """Call `ask` until it raises no RetryableError; report each retry to on_note."""
    for failures in range(RETRY_POLICY.retries):
        try:
            return ask()
        except RetryableError as failure:
            seconds = max(failure.wait_seconds, RETRY_POLICY.backoff_seconds * 2**failures)
            on_note(f"{failure.error}; trying again in {seconds:g} seconds")
            time.sleep(seconds)
    try:
        return ask()
    except RetryableError as failure:
        raise failure.error from failure


def new_client(policy: RetryPolicy | None = None) -> httpx2.Client:
    """Return a client that uses the environment's proxies and certificates; by default, with RETRY_POLICY."""
    policy = policy or RETRY_POLICY
    timeout = httpx2.Timeout(policy.stall_seconds, connect=policy.connect_seconds)
    try:
        return httpx2.Client(timeout=timeout, verify=trusted_certificates())
    except (ValueError, httpx2.InvalidURL, ImportError) as error:  # ImportError: socks without its package
        raise NetworkError("the proxy can't be used", why=str(error), hint="check HTTPS_PROXY and ALL_PROXY") from error


def trusted_certificates() -> ssl.SSLContext:
    """Return a context that trusts the certificates named in the environment, else the system's.

    Raises NetworkError if the named file or folder can't be read.
    """
    path = ca_file()
    try:
        return _trusting(path, file_identity(Path(path)) if path is not None else "")
    except OSError as error:
        raise NetworkError(f"can't read the certificates in {path!r}", why=str(error)) from error


@lru_cache(maxsize=1)
def _trusting(path: str | None, identity: str) -> ssl.SSLContext:
    """Return a context for all clients until the file changes: it takes 20 ms to read the certificates of a system."""
    if path is None:
        return httpx2.create_ssl_context()
    if Path(path).is_dir():
        return ssl.create_default_context(capath=path)
    return ssl.create_default_context(cafile=path)


class Link:
    """Final URL of a source after redirects. A signed URL is reused until forget()."""

    def __init__(self, source: TransferSource) -> None:
        self.source = source
        self._lock = threading.Lock()
        self._final = ""

    def forget(self) -> None:
        with self._lock:
            self._final = ""

    @contextmanager
    def answer(self, client: httpx2.Client, headers: dict[str, str]) -> Iterator[httpx2.Response]:
        """Open the first response that is not a redirect.

        Raises NetworkError for too many redirects, or one to an invalid or insecure URL.
        """
        first = httpx2.URL(self.source.url)
        with self._lock:
            url = httpx2.URL(self._final or first)
        for _ in range(_MAX_REDIRECTS + 1):
            all_headers = {"User-Agent": "llmrun", **headers}
            if self.source.token and _origin(url) == _origin(first):
                all_headers["Authorization"] = f"Bearer {self.source.token}"
            with _opened(client, url, all_headers) as response:
                if response.status_code not in _REDIRECTS:
                    if response.is_success:
                        with self._lock:
                            self._final = str(url)
                    yield response
                    return
                url = _next_url(url, response, self.source)
            if url.scheme not in ("https", first.scheme):
                raise NetworkError(
                    f"unsafe redirect for {self.source.label}", why=f"from {first.scheme} to {url.scheme}"
                )
        raise NetworkError(
            f"too many redirects for {self.source.label}", why=f"the server sent more than {_MAX_REDIRECTS}"
        )


@contextmanager
def _opened(client: httpx2.Client, url: httpx2.URL, headers: dict[str, str]) -> Iterator[httpx2.Response]:
    """Open a response. Raises InvalidURL for a host that is no name, such as "a..b", also that of a proxy."""
    with ExitStack() as stack:
        try:
            response = stack.enter_context(client.stream("GET", url, headers=headers))
        except UnicodeError as error:
            raise httpx2.InvalidURL(str(error)) from error
        yield response


def _next_url(url: httpx2.URL, response: httpx2.Response, source: TransferSource) -> httpx2.URL:
    location = response.headers.get("location", "")
    invalid = NetworkError(f"invalid redirect for {source.label}")
    try:
        target = url.join(location)
    except httpx2.InvalidURL as error:
        raise invalid from error
    if not location or not target.host:
        raise invalid
    return target


def _origin(url: httpx2.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


def host_of(url: str) -> str:
    return urlsplit(url).hostname or ""


def raise_for_status(response: httpx2.Response, source: TransferSource) -> None:
    """Raise unless the response brings the file: RetryableError where another attempt may help."""
    status = response.status_code
    host = response.url.host
    if status in (200, 206):
        _refuse_other_content(response, source)
        return
    error: LlmrunError = NetworkError(f"{host} answered {status} when asked for {source.label}")
    if status in BUSY:
        if status == 429:
            error.why = "too many requests"
        raise RetryableError(error, wait_seconds(response, error, RETRY_POLICY))
    if status == 416:
        error.why = "the server's file is shorter, or another one"
        raise RetryableError(error, bad_range=True)
    if status in _EXPIRED and response.url != httpx2.URL(source.url):  # redirected
        error.why = "the signed link from the hub is refused or has expired"
        raise RetryableError(error)
    if status in (401, 403):
        raise LoginRequiredError(
            f"{host} requires a login for {source.label}",
            why=f"it answered {status}",
            hint=source.login_hint or "fetch it with a tool that can log in there, and run the file by its path",
        )
    if status in (404, 410) and source.sha256 is None:
        raise ModelNotFoundError(f"{host} has no {source.label}", why=f"it answered {status}")
    if status in (404, 410):
        error.why = "the file is listed, but missing"
    raise error


def _refuse_other_content(response: httpx2.Response, source: TransferSource) -> None:
    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind in ("text/html", "application/xhtml+xml"):
        raise NetworkError(
            f"a web page came instead of {source.label}",
            why=f"{response.url.host} sent {kind}: often the login page of a network or a proxy",
            hint="open the link in a browser and log in",
        )
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", ""):
        raise NetworkError(f"the server compressed {source.label} against the request", why=f"it sent {encoding[:40]}")


def total_bytes(response: httpx2.Response, start: int, end: int | None) -> int | None:
    """Return the file's size from a response with status 200 or 206, None when not stated.

    Args:
        start, end: requested range; end is None for all that follow.

    Raises:
        RetryableError: the response has another range.
    """
    if response.status_code == 200:
        length = response.headers.get("content-length", "")
        return int(length) if length.isascii() and length.isdigit() else None
    answer = response.headers.get("content-range", "")
    match = _CONTENT_RANGE.fullmatch(answer)
    if match is None or match[1] is None or not _is_requested(response, match, start, end):
        error = NetworkError(f"the server was asked for bytes from {start} on and sent {answer[:80]!r}")
        error.why = "the server or a proxy does not understand ranges"
        raise RetryableError(error, bad_range=True)
    return int(match[3]) if match[3] != "*" else None


def _is_requested(response: httpx2.Response, match: re.Match[str], start: int, end: int | None) -> bool:
    """Return whether a Content-Range is the requested one and agrees with the Content-Length."""
    first, last = int(match[1]), int(match[2])
    length = response.headers.get("content-length", str(last - first + 1))
    return first == start and (end is None or last < end) and length == str(last - first + 1)


def version_of(response: httpx2.Response) -> str:
    """Return a value for If-Range; "" when the server can't resume or identify versions."""
    ranges = response.headers.get("accept-ranges", "").strip().lower()
    if response.status_code != 206 and ranges != "bytes":
        return ""
    tag = response.headers.get("etag", "").strip()
    if tag.startswith('"'):  # a weak one may stand for other bytes
        return tag
    return response.headers.get("last-modified", "").strip()


def wait_seconds(response: httpx2.Response, error: LlmrunError, policy: RetryPolicy) -> float:
    """Return the seconds in Retry-After, 0 without one. Raises the error when they exceed the policy's limit."""
    text = response.headers.get("retry-after", "").strip()
    seconds = 0.0
    if text.isascii() and text.isdigit():
        seconds = float(text[:12])
    elif text:
        with suppress(ValueError, TypeError, OverflowError):
            seconds = (parsedate_to_datetime(text) - datetime.now(timezone.utc)).total_seconds()
    if seconds > policy.longest_wait_seconds:
        error.hint = f"try again in {seconds:.0f} seconds, as the server asks"
        raise error
    return max(seconds, 0.0)


def connection_error(source: TransferSource, error: httpx2.HTTPError) -> NetworkError:
    """Translate a failed connection into our error."""
    host = host_of(source.url)
    with suppress(RuntimeError):  # no request was made yet
        host = error.request.url.host or host
    if isinstance(error, httpx2.ReadTimeout):
        return stalled_error(source, host)
    if isinstance(error, httpx2.ConnectTimeout):
        return NetworkError(f"can't reach {host}", why="it did not answer in time")
    if isinstance(error, httpx2.ConnectError):
        return NetworkError(f"can't reach {host}", why=str(error) or type(error).__name__)
    return NetworkError(
        f"the transfer of {source.label} broke off",
        why=str(error) or type(error).__name__,
        hint="run the same command again: it goes on where it stopped",
    )


def stalled_error(source: TransferSource, host: str) -> NetworkError:
    return NetworkError(
        f"{source.label} stopped arriving",
        why=f"{host} sent almost nothing for too long",
        hint="run the same command again: it goes on where it stopped",
    )


def fetch_page(source: TransferSource, *, accept: str, max_bytes: int) -> tuple[str, bytes]:
    """Fetch a small page: (final URL, bytes). It may be HTML.

    Raises:
        NetworkError, LoginRequiredError, ModelNotFoundError: as download().
    """
    try:
        with (
            new_client() as client,
            Link(source).answer(client, {"Accept": accept}) as response,
        ):
            if response.status_code != 200:
                raise_for_status(response, source)
            body = read_body(response, source, max_bytes, RETRY_POLICY)
            return str(response.url), body
    except httpx2.InvalidURL as error:
        raise NetworkError(f"invalid link of {source.label}", why=str(error)) from error
    except httpx2.HTTPError as error:
        raise connection_error(source, error) from error
    except RetryableError as failure:
        raise failure.error from failure


def read_body(response: httpx2.Response, source: TransferSource, max_bytes: int, policy: RetryPolicy) -> bytes:
    """Read a small response whole. Raises NetworkError if it is too large, or arrives too slowly."""
    body = bytearray()
    ends = time.monotonic() + 2 * policy.stall_seconds
    for chunk in response.iter_bytes():
        body += chunk
        if len(body) > max_bytes:
            raise NetworkError(f"{source.label} is larger than {max_bytes:,} bytes")
        if time.monotonic() > ends:
            raise stalled_error(source, response.url.host)
    return bytes(body)
