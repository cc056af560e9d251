"""One question to a server, and what its answer means: redirects, logins, errors, ranges.

Owns every HTTP detail of fetching bytes; must not know disks, hubs, indexes or models. A token goes to the host it is
meant for and to no other; links stay out of messages, since they may hold secrets.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from llmrun.config import ca_file
from llmrun.errors import LlmrunError, LoginRequiredError, ModelNotFoundError, NetworkError

if TYPE_CHECKING:
    import ssl

    import httpx2

_MAX_REDIRECTS = 5
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses after which the same question may be answered."""
_EXPIRED = frozenset({400, 401, 403, 410})
Answer = TypeVar("Answer")
OnNote = Callable[[str], None]
"""Called with one line when there is something to say."""
_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)", re.ASCII)


@dataclass(frozen=True, slots=True)
class TransferSource:
    """A file on a server.

    Attributes:
        url: where to ask; redirects are followed.
        label: what messages call it.
        sha256: lower-case hex, when known: then it was promised, and its bytes are verified.
        size: in bytes, when known.
        token: sent as a bearer token to the url's own host, never to another one.
        login_hint: what to do when the server wants a login.
        starts_with: the file's first bytes, when known; others end the transfer at once.
    """

    url: str
    label: str
    sha256: str | None = None
    size: int | None = None
    token: str | None = None
    login_hint: str = ""
    starts_with: bytes = b""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long to wait for a server, and how often to try again.

    Attributes:
        connect_seconds: for a connection.
        stall_seconds: in which (nearly) nothing has arrived, headers included, until a connection is given up.
        retries: in a row, without a megabyte of progress between them.
        backoff_seconds: before the first retry; doubles each time, give or take a quarter.
        longest_wait_seconds: that a server may ask for.
    """

    connect_seconds: float = 10.0
    stall_seconds: float = 25.0
    retries: int = 5
    backoff_seconds: float = 0.5
    longest_wait_seconds: float = 120.0


PATIENT = RetryPolicy()


class RetryableError(Exception):  # no error by itself: it carries the one to raise in the end
    """Something that may be better next time.

    Attributes:
        error: to raise when patience ends.
        wait_seconds: that the server asks for.
        bad_range: the server was asked for a range of bytes and sent something else.
    """

    def __init__(self, error: LlmrunError, wait_seconds: float = 0.0, *, bad_range: bool = False) -> None:
        super().__init__(str(error))
        self.error = error
        self.wait_seconds = wait_seconds
        self.bad_range = bad_range


def ignore_note(text: str) -> None:
    """For who does not want to know."""


def with_retries(ask: Callable[[], Answer], patience: RetryPolicy, on_note: OnNote = ignore_note) -> Answer:
    """What a question brings, asked again while RetryableError says that this may help; on_note is told each time."""
    for failures in range(patience.retries):
        try:
            return ask()
        except RetryableError as trouble:
            seconds = max(trouble.wait_seconds, patience.backoff_seconds * 2**failures)
            on_note(f"{trouble.error}; trying again in {seconds:g} seconds")
            time.sleep(seconds)
    try:
        return ask()
    except RetryableError as trouble:
        raise trouble.error from trouble


def new_client(patience: RetryPolicy) -> httpx2.Client:
    """A client that heeds the environment's proxies and certificates."""
    import httpx2

    timeout = httpx2.Timeout(patience.stall_seconds, connect=patience.connect_seconds)
    try:
        return httpx2.Client(timeout=timeout, verify=trusted())
    except (ValueError, httpx2.InvalidURL, ImportError) as error:  # ImportError: socks without its package
        raise NetworkError("the proxy can't be used", why=str(error), hint="check HTTPS_PROXY and ALL_PROXY") from error


def trusted() -> ssl.SSLContext | bool:
    """Which certificates count: those that the environment names, or True, which is the system's.

    Raises:
        NetworkError: the ones that are named can't be read.
    """
    import ssl

    place = ca_file()
    if place is None:
        return True
    try:
        if Path(place).is_dir():
            return ssl.create_default_context(capath=place)
        return ssl.create_default_context(cafile=place)
    except OSError as error:
        raise NetworkError(f"can't read the certificates in {place!r}", why=str(error)) from error


class Link:
    """Where a source's bytes are handed out in the end. A signed link is kept while it works, asked for again after."""

    def __init__(self, source: TransferSource) -> None:
        self.source = source
        self._lock = threading.Lock()
        self._final = ""

    def forget(self) -> None:
        """The link has expired."""
        with self._lock:
            self._final = ""

    @contextmanager
    def answer(self, client: httpx2.Client, headers: dict[str, str]) -> Iterator[httpx2.Response]:
        """The first answer that is not a redirect.

        Raises:
            NetworkError: the redirects lead nowhere, or to where nobody should go.
        """
        import httpx2

        first = httpx2.URL(self.source.url)
        with self._lock:
            url = httpx2.URL(self._final or first)
        for _ in range(_MAX_REDIRECTS + 1):
            sent = {"User-Agent": "llmrun", **headers}
            if self.source.token and _origin(url) == _origin(first):
                sent["Authorization"] = f"Bearer {self.source.token}"
            with client.stream("GET", url, headers=sent) as response:
                if response.status_code not in _REDIRECTS:
                    if response.is_success:
                        with self._lock:
                            self._final = str(url)
                    yield response
                    return
                url = _next_url(url, response, self.source)
            if url.scheme not in ("https", first.scheme):
                raise NetworkError(
                    f"the server sent us to an unsafe link for {self.source.label}",
                    why=f"from {first.scheme} to {url.scheme}",
                )
        raise NetworkError(
            f"the server sent us in circles for {self.source.label}", why=f"more than {_MAX_REDIRECTS} redirects"
        )


def _next_url(url: httpx2.URL, response: httpx2.Response, source: TransferSource) -> httpx2.URL:
    import httpx2

    location = response.headers.get("location", "")
    try:
        found = url.join(location)
    except httpx2.InvalidURL as error:
        raise _senseless_link(source) from error
    if not location or not found.host:
        raise _senseless_link(source)
    return found


def _senseless_link(source: TransferSource) -> NetworkError:
    return NetworkError(f"the server sent us to an invalid link for {source.label}")


def _origin(url: httpx2.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


def host_of(url: str) -> str:
    """The host's name, for messages."""
    return urlsplit(url).hostname or ""


def refuse_errors(response: httpx2.Response, source: TransferSource, patience: RetryPolicy = PATIENT) -> None:
    """Raises for every answer that does not bring the file: RetryableError where another try may help."""
    status = response.status_code
    host = response.url.host
    if status in (200, 206):
        _refuse_other_things(response, source)
        return
    error: LlmrunError = NetworkError(f"{host} answered {status} when asked for {source.label}")
    if status in BUSY:
        if status == 429:
            error.why = "it has had too many requests from here"
        raise RetryableError(error, wait_seconds(response, error, patience))
    if status == 416:
        error.why = "it says that the file has no such bytes: there it is shorter, or another one"
        raise RetryableError(error, bad_range=True)
    if status in _EXPIRED and _was_redirected(response, source):
        error.why = "the link it got from the hub is refused, or expires at once"
        raise RetryableError(error)
    if status in (401, 403):
        raise LoginRequiredError(
            f"{host} wants a login for {source.label}",
            why=f"it answered {status}",
            hint=source.login_hint or "fetch it with a tool that can log in there, and run the file by its path",
        )
    if status in (404, 410) and source.sha256 is None:
        raise ModelNotFoundError(f"{host} has no {source.label}", why=f"it answered {status}")
    if status in (404, 410):
        error.why = "the file is listed there, but it is gone"
    raise error


def _was_redirected(response: httpx2.Response, source: TransferSource) -> bool:
    import httpx2

    return response.url != httpx2.URL(source.url)


def _refuse_other_things(response: httpx2.Response, source: TransferSource) -> None:
    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind in ("text/html", "application/xhtml+xml"):
        raise NetworkError(
            f"a web page came in place of {source.label}",
            why=f"{response.url.host} sent {kind}: often the login page of a network or a proxy",
            hint="open the link in a browser and see what is asked for there",
        )
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", ""):
        raise NetworkError(
            f"the server compressed {source.label}, though it was asked not to", why=f"it sent {encoding[:40]}"
        )


def total_bytes(response: httpx2.Response, source: TransferSource, start: int, end: int | None) -> int | None:
    """The size of the whole file by an answer with status 200 or 206, None when it does not say.

    Args:
        start, end: the bytes that were asked for; end is None for all that follow.

    Raises:
        RetryableError: these are not the bytes asked for.
    """
    if response.status_code == 200:
        length = response.headers.get("content-length", "")
        return int(length) if length.isascii() and length.isdigit() else None
    answer = response.headers.get("content-range", "")
    found = _CONTENT_RANGE.fullmatch(answer)
    if found is None or found[1] is None or not _is_asked(response, found, start, end):
        error = NetworkError(f"the server was asked for bytes from {start} on and sent {answer[:80]!r}")
        error.why = "it, or something on the way, does not understand ranges"
        raise RetryableError(error, bad_range=True)
    return int(found[3]) if found[3] != "*" else None


def _is_asked(response: httpx2.Response, found: re.Match[str], start: int, end: int | None) -> bool:
    """Whether a Content-Range is what was asked for, and says the same as the Content-Length."""
    first, last = int(found[1]), int(found[2])
    length = response.headers.get("content-length", str(last - first + 1))
    return first == start and (end is None or last < end) and length == str(last - first + 1)


def version_of(response: httpx2.Response) -> str:
    """What If-Range may be asked with later; empty when the server can't resume, or can't tell versions apart."""
    ranges = response.headers.get("accept-ranges", "").strip().lower()
    if response.status_code != 206 and ranges != "bytes":
        return ""
    tag = response.headers.get("etag", "").strip()
    if tag.startswith('"'):  # a weak one may stand for other bytes
        return tag
    return response.headers.get("last-modified", "").strip()


def wait_seconds(response: httpx2.Response, error: LlmrunError, patience: RetryPolicy) -> float:
    """What Retry-After asks for, 0 when nothing. Raises the error at once when that is too long to wait."""
    text = response.headers.get("retry-after", "").strip()
    seconds = 0.0
    if text.isascii() and text.isdigit():
        seconds = float(text[:12])
    elif text:
        from datetime import datetime, timezone
        from email.utils import parsedate_to_datetime

        with suppress(ValueError, TypeError, OverflowError):
            seconds = (parsedate_to_datetime(text) - datetime.now(timezone.utc)).total_seconds()
    if seconds > patience.longest_wait_seconds:
        error.hint = f"it asks to be left alone for {seconds:.0f} seconds; try again then"
        raise error
    return max(seconds, 0.0)


def unreachable(source: TransferSource, error: httpx2.HTTPError) -> NetworkError:
    """What a failed connection means, in our words."""
    import httpx2

    host = host_of(source.url)
    with suppress(RuntimeError):  # no request was made yet
        host = error.request.url.host or host
    if isinstance(error, httpx2.ReadTimeout):
        return stalled(source, host)
    if isinstance(error, httpx2.ConnectTimeout):
        return NetworkError(f"can't reach {host}", why="it did not answer in time")
    if isinstance(error, httpx2.ConnectError):
        return NetworkError(f"can't reach {host}", why=str(error) or type(error).__name__)
    return NetworkError(
        f"the transfer of {source.label} broke off",
        why=str(error) or type(error).__name__,
        hint="run the same command again: it goes on where it stopped",
    )


def stalled(source: TransferSource, host: str) -> NetworkError:
    """The error for a server that has fallen silent."""
    return NetworkError(
        f"{source.label} stopped arriving",
        why=f"{host} sent nothing, or next to nothing, for too long",
        hint="run the same command again: it goes on where it stopped",
    )


def fetch_page(
    source: TransferSource, *, accept: str, most_bytes: int, patience: RetryPolicy = PATIENT
) -> tuple[str, str, bytes]:
    """A small page: (the url it came from in the end, its content type, its bytes). It may be a web page.

    Raises:
        NetworkError, LoginRequiredError, ModelNotFoundError: as download().
    """
    import httpx2

    try:
        with (
            new_client(patience) as client,
            Link(source).answer(client, {"Accept": accept}) as response,
        ):
            if response.status_code != 200:
                refuse_errors(response, source, patience)
            body = read_body(response, source, most_bytes, patience)
            return str(response.url), response.headers.get("content-type", ""), body
    except httpx2.InvalidURL as error:
        raise NetworkError(f"invalid link of {source.label}", why=str(error)) from error
    except httpx2.HTTPError as error:
        raise unreachable(source, error) from error
    except RetryableError as trouble:
        raise trouble.error from trouble


def read_body(response: httpx2.Response, source: TransferSource, most_bytes: int, patience: RetryPolicy) -> bytes:
    """The whole of a small answer.

    Raises:
        NetworkError: it is too large, or trickles in.
    """
    body = bytearray()
    ends = time.monotonic() + 2 * patience.stall_seconds
    for chunk in response.iter_bytes():
        body += chunk
        if len(body) > most_bytes:
            raise NetworkError(f"{source.label} is larger than {most_bytes:,} bytes")
        if time.monotonic() > ends:
            raise stalled(source, response.url.host)
    return bytes(body)
