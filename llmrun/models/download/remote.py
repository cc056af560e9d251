"""Size and header of a model file that is on a server, from its first bytes alone.

Owns which bytes are asked for, and in how many steps; must not know hubs or indexes. Answers are read like downloads
(transfer.py): the token goes to its own host only, and never more is read than a header may have.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from llmrun.errors import NetworkError
from llmrun.gguf.reader import MAX_HEADER_BYTES, Header, NeedMoreBytes, parse_header
from llmrun.gguf.split import other_parts, unite
from llmrun.models.download.transfer import (
    PATIENT,
    Answer,
    Link,
    OnNote,
    RetryableError,
    RetryPolicy,
    TransferSource,
    ignore_note,
    new_client,
    refuse_errors,
    stalled,
    total_bytes,
    unreachable,
    with_retries,
)

if TYPE_CHECKING:
    import httpx2

FIRST_BYTES = 2 << 20
"""Of the first request: enough for a vocabulary of 50,000 tokens."""
GROWTH = 4
"""By which the next request goes further."""
_SLOWEST_BYTES = 16 << 10
"""A connection that brings fewer in Patience.stall_seconds has stalled."""


def read_remote_header(
    url: str,
    *,
    token: str | None = None,
    client: httpx2.Client | None = None,
    arrays: Collection[str] = (),
    login_hint: str = "",
    on_note: OnNote = ignore_note,
    patience: RetryPolicy = PATIENT,
) -> Header:
    """Read what read_header() reads, of a file behind a link; of a split model's first file, with the others.

    Args:
        url: of the .gguf file; redirects are followed.
        token: sent to the url's own host and to no other.
        client: to ask with; one is made by default.
        arrays: keys of arrays to read whatever their length.
        login_hint: what to do when the server wants a login.
        on_note: told when the server is asked again, and why.
        patience: how long to wait for the server.

    Raises:
        NetworkError: the server can't be reached, or answers something unusable.
        LoginRequiredError: it wants a token.
        ModelNotFoundError: it has no such file.
        BadModelError: that is not GGUF, or damaged.
    """
    source = _source(url, token, login_hint)
    opened = nullcontext(client) if client is not None else new_client(patience)
    with opened as used:
        first = _RemoteFile(source, used, patience, on_note).header(arrays)
        names = other_parts(first)
        parts = [_source(_beside(url, name), token, login_hint) for name in names]
        return unite(first, [_RemoteFile(part, used, patience, on_note).header() for part in parts]) if names else first


def remote_size(url: str, *, on_note: OnNote = ignore_note, patience: RetryPolicy = PATIENT) -> int | None:
    """Bytes of the file behind a link; None where its server does not say.

    Args:
        on_note, patience: as read_remote_header().

    Raises:
        NetworkError, LoginRequiredError, ModelNotFoundError: as read_remote_header().
    """
    source = _source(url, None, "")
    with new_client(patience) as client:
        return _RemoteFile(source, client, patience, on_note).size()


def _source(url: str, token: str | None, login_hint: str) -> TransferSource:
    name = unquote(urlsplit(url).path).rpartition("/")[2] or "the file"
    return TransferSource(url, name, token=token, login_hint=login_hint)


def _beside(url: str, name: str) -> str:
    """The link of another file in the same folder."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(path=f"{parts.path.rpartition('/')[0]}/{quote(name)}"))


class _RemoteFile:
    """The beginning of one file, as far as it was needed."""

    def __init__(self, source: TransferSource, client: httpx2.Client, patience: RetryPolicy, on_note: OnNote) -> None:
        self._source = source
        self._on_note = on_note
        self._client = client
        self._patience = patience
        self._link = Link(source)
        self._data = bytearray()
        self._size: int | None = None

    def header(self, arrays: Collection[str] = ()) -> Header:
        """Ask for more until the header is there."""
        until = FIRST_BYTES
        while True:
            size = self._read_until(until)
            try:
                return parse_header(bytes(self._data), size, Path(self._source.label), arrays=arrays)
            except NeedMoreBytes as more:
                until = min(max(more.until, GROWTH * until), size, MAX_HEADER_BYTES)

    def size(self) -> int | None:
        """Of the whole file, as far as the server says it."""
        return self._with_retries(self._ask_size)

    def _ask_size(self) -> int | None:
        with self._link.answer(self._client, {"Accept-Encoding": "identity", "Range": "bytes=0-0"}) as response:
            refuse_errors(response, self._source, self._patience)
            return total_bytes(response, self._source, 0, 1)

    def _read_until(self, until: int) -> int:
        """Have so many of the file's bytes, or all it has; gives the file's size."""
        return self._with_retries(lambda: self._request(until))

    def _with_retries(self, ask: Callable[[], Answer]) -> Answer:
        def once() -> Answer:
            try:
                with _network_errors(self._source):
                    return ask()
            except RetryableError:
                self._link.forget()
                raise

        return with_retries(once, self._patience, self._on_note)

    def _request(self, until: int) -> int:
        start = len(self._data)
        # Compressed bytes would be no part of the file.
        headers = {"Accept-Encoding": "identity", "Range": f"bytes={start}-{until - 1}"}
        with self._link.answer(self._client, headers) as response:
            refuse_errors(response, self._source, self._patience)
            size = self._checked_size(total_bytes(response, self._source, start, until))
            end = min(until, size)
            # The whole file comes where ranges are not understood: it is read up to there and no further.
            self._take(response, end, skip=start if response.status_code == 200 else 0)
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

    def _take(self, response: httpx2.Response, end: int, skip: int) -> None:
        """Append what comes, leaving out the first `skip` bytes, until there are `end`."""
        arrived = marked = 0
        ends = time.monotonic() + self._patience.stall_seconds
        for chunk in response.iter_raw():
            self._data += chunk[skip : skip + end - len(self._data)]
            skip = max(skip - len(chunk), 0)
            arrived += len(chunk)
            if len(self._data) >= end:
                return
            if arrived - marked >= _SLOWEST_BYTES:
                marked, ends = arrived, time.monotonic() + self._patience.stall_seconds
            elif time.monotonic() > ends:  # bytes that trickle in never time out by themselves
                raise stalled(self._source, response.url.host)


@contextmanager
def _network_errors(source: TransferSource) -> Iterator[None]:
    import httpx2

    try:
        yield
    except httpx2.InvalidURL as error:
        raise NetworkError(f"invalid link of {source.label}", why=str(error)) from error
    except httpx2.HTTPError as error:
        raise RetryableError(unreachable(source, error)) from error
