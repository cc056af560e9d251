"""Size and header of a remote model file, from its first bytes alone.

Responses are read like downloads (transfer.py): the token goes only to its own host, and no more bytes are read than a
header may have.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit, urlunsplit

import httpx2

from llmrun.errors import NetworkError
from llmrun.gguf.header import Header, other_parts, unite
from llmrun.gguf.reader import MAX_HEADER_BYTES, NeedMoreBytes, parse_header
from llmrun.models.download import transfer
from llmrun.models.download.transfer import (
    SLOWEST_BYTES,
    Answer,
    Link,
    OnNote,
    RetryableError,
    TransferSource,
    connection_error,
    ignore_note,
    new_client,
    raise_for_status,
    stalled_error,
    total_bytes,
    with_retries,
)

FIRST_BYTES = 2 << 20
"""Length of the first request: enough for a vocabulary of 50,000 tokens."""
GROWTH = 4
"""Factor between the ends of two requests."""


def read_remote_header(
    url: str,
    *,
    token: str | None = None,
    login_hint: str = "",
    on_note: OnNote = ignore_note,
) -> Header:
    """Read the header of a file behind a link; join a split model's other headers to the first.

    Args:
        url: of the .gguf file; redirects are followed.
        token: sent only to the url's own host.
        login_hint: advice for when the server requires a login.

    Raises:
        NetworkError, LoginRequiredError, ModelNotFoundError: as download().
        BadModelError: the file is damaged or not GGUF.
    """
    source = _source(url, token, login_hint)
    with new_client() as client:
        first = _RemoteFile(source, client, on_note).header()
        parts = [_source(_beside(url, name), token, login_hint) for name in other_parts(first)]
        return unite(first, [_RemoteFile(part, client, on_note).header() for part in parts]) if parts else first


def remote_size(url: str, *, on_note: OnNote = ignore_note) -> int | None:
    """Return the bytes of the file behind a link, None when the server does not say; raise as read_remote_header()."""
    source = _source(url, None, "")
    with new_client() as client:
        return _RemoteFile(source, client, on_note).size()


def _source(url: str, token: str | None, login_hint: str) -> TransferSource:
    name = unquote(urlsplit(url).path).rpartition("/")[2] or "the file"
    return TransferSource(url, name, token=token, login_hint=login_hint)


def _beside(url: str, name: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(path=f"{parts.path.rpartition('/')[0]}/{quote(name)}"))


class _RemoteFile:
    """First bytes of a remote file, as far as needed."""

    def __init__(self, source: TransferSource, client: httpx2.Client, on_note: OnNote) -> None:
        self._source = source
        self._on_note = on_note
        self._client = client
        self._link = Link(source)
        self._data = bytearray()
        self._size: int | None = None

    def header(self) -> Header:
        until = FIRST_BYTES
        while True:
            size = self._read_until(until)
            try:
                return parse_header(bytes(self._data), size, Path(self._source.label))
            except NeedMoreBytes as more:
                until = min(max(more.until, GROWTH * until), size, MAX_HEADER_BYTES)

    def size(self) -> int | None:
        return self._with_retries(self._ask_size)

    def _ask_size(self) -> int | None:
        with self._link.answer(self._client, {"Accept-Encoding": "identity", "Range": "bytes=0-0"}) as response:
            raise_for_status(response, self._source)
            return total_bytes(response, 0, 1)

    def _read_until(self, until: int) -> int:
        """Read the first `until` bytes, or all there are; return the file's size."""
        return self._with_retries(lambda: self._request(until))

    def _with_retries(self, ask: Callable[[], Answer]) -> Answer:
        def once() -> Answer:
            try:
                with _network_errors(self._source):
                    return ask()
            except RetryableError:
                self._link.forget()
                raise

        return with_retries(once, self._on_note)

    def _request(self, until: int) -> int:
        start = len(self._data)
        headers = {"Accept-Encoding": "identity", "Range": f"bytes={start}-{until - 1}"}
        with self._link.answer(self._client, headers) as response:
            raise_for_status(response, self._source)
            size = self._checked_size(total_bytes(response, start, until))
            end = min(until, size)
            # Without range support the whole file comes; reading stops at `end`.
            self._read(response, end, skip=start if response.status_code == 200 else 0)
        if len(self._data) < end:
            raise RetryableError(
                NetworkError(
                    f"the server stopped in the middle of {self._source.label}",
                    why=f"after {len(self._data):,} of the first {end:,} bytes",
                )
            )
        return size

    def _checked_size(self, size: int | None) -> int:
        label = self._source.label
        if size is None:
            raise NetworkError(f"the server does not say how large {label} is")
        if self._size is not None and size != self._size:
            why = f"first it had {self._size:,} bytes, then {size:,}"
            raise NetworkError(f"{label} changed while it was read", why=why, hint="run the same command again")
        self._size = size
        return size

    def _read(self, response: httpx2.Response, end: int, skip: int) -> None:
        """Append the body without its first `skip` bytes, until `end` bytes are held."""
        arrived = marked = 0
        ends = time.monotonic() + transfer.RETRY_POLICY.stall_seconds
        for chunk in response.iter_raw():
            self._data += chunk[skip : skip + end - len(self._data)]
            skip = max(skip - len(chunk), 0)
            arrived += len(chunk)
            if len(self._data) >= end:
                return
            if arrived - marked >= SLOWEST_BYTES:
                marked, ends = arrived, time.monotonic() + transfer.RETRY_POLICY.stall_seconds
            elif time.monotonic() > ends:  # a slow trickle never triggers httpx's timeout
                raise stalled_error(self._source, response.url.host)


@contextmanager
def _network_errors(source: TransferSource) -> Iterator[None]:
    try:
        yield
    except httpx2.InvalidURL as error:
        raise NetworkError(f"invalid link of {source.label}", why=str(error)) from error
    except httpx2.HTTPError as error:
        raise RetryableError(connection_error(source, error)) from error
