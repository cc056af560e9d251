"""The bytes of one file, from a server to a place on this disk: resumed, verified, installed at once.

Owns the order of things: lock, room, attempts, retries, the end. Must not know the hub, indexes or models. A file is
either not there or whole. What has arrived outlives Ctrl-C and crashes, and the next run asks only for what is missing;
without a promised sha256 that needs a server that can tell the versions of a file apart.

One thread decides, hashes and reports progress; each connection has a thread of its own, which only moves bytes.
"""

from __future__ import annotations

import queue
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.errors import BadModelError, CancelledError, IntegrityError, NetworkError, TerminatedError
from llmrun.models.download.part import CHUNK_BYTES, Claim, ClaimLostError, DownloadPart, WrongBytesError, arrived_bytes
from llmrun.models.download.transfer import (
    PATIENT,
    Link,
    OnNote,
    RetryableError,
    RetryPolicy,
    TransferSource,
    host_of,
    new_client,
    refuse_errors,
    stalled,
    total_bytes,
    unreachable,
    version_of,
)
from llmrun.models.store.disk import disk_errors, exclusive, require_space

if TYPE_CHECKING:
    import httpx2

OnProgress = Callable[[int, int], None]
"""Called with (bytes there, bytes in all) while bytes arrive; the second is 0 when the server doesn't say."""

CONNECTIONS = 4
"""For a file in pieces. A server that hands out bytes slowly does so per connection."""
_PROGRESS_SECONDS = 0.1
_TICK_SECONDS = 0.05
_HASHED_AT_ONCE = 8
_SLOWEST_BYTES = 16 << 10
"""A connection that brings fewer in Patience.stall_seconds has stalled."""
_MOST_BAD_RANGES = 2
_WORTH_A_WORD_SECONDS = 5.0
_LONG_TO_HASH_BYTES = 1 << 30


def download(
    source: TransferSource,
    target: Path,
    *,
    lock: Path,
    on_progress: OnProgress | None = None,
    on_note: OnNote | None = None,
    patience: RetryPolicy = PATIENT,
) -> None:
    """Put the source's bytes at `target`, unless they are there already.

    Args:
        lock: file that only one process may hold while it writes this target.
        on_progress: called about ten times a second, also while nothing arrives, and at the end.
        on_note: told when the download has to wait, and for what.

    Raises:
        NetworkError: the server can't be reached, or answers something unusable, after retries.
        IntegrityError: the bytes are not those promised; they are deleted.
        LoginRequiredError: the server wants a token or accepted terms.
        ModelNotFoundError: the server has no such file, and nobody promised that it has.
        BadModelError: the file does not begin as it should.
        DiskFullError: it does not fit; what has arrived is kept.
        ResourceError: the place can't be written.
    """
    note = on_note or (lambda text: None)
    wait_note = f"{source.label} is being downloaded by another process; waiting for it"
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(lock, lambda: note(wait_note)):
            if target.exists():  # another process was faster
                return
            _fetch(source, target, _Progress(on_progress), note, patience)


def _fetch(source: TransferSource, target: Path, progress: _Progress, note: OnNote, patience: RetryPolicy) -> None:
    if source.size is not None:
        require_space(target.parent, source.size - arrived_bytes(target, source.size))
    try:
        with (
            DownloadPart(target, source.size, source.sha256) as part,
            disk_errors(part.path, lambda: (part.size or 0) - part.arrived),
        ):
            with _saying_what_is_kept(part, note):
                if not part.complete:
                    _Transfer(source, part, progress, note, patience).run()
                if part.unhashed > _LONG_TO_HASH_BYTES:
                    note(f"checking the sha256 of {source.label}")
                while part.hash_some():
                    progress(part.arrived, part.size)
            part.install()
            progress(part.arrived, part.size, always=True)
    except WrongBytesError as error:
        raise IntegrityError(
            f"the bytes of {source.label} are wrong, so they were deleted",
            why=str(error),
            hint="run the same command again; if it happens again, the server or something on the way is broken",
        ) from error


@contextmanager
def _saying_what_is_kept(part: DownloadPart, note: OnNote) -> Iterator[None]:
    """Whoever stops a download is told that it can go on."""
    try:
        yield
    except (KeyboardInterrupt, CancelledError, TerminatedError):
        if part.arrived and part.resumable:
            share = f" of {part.size:,}" if part.size else ""
            note(f"{part.arrived:,}{share} bytes are kept; run the same command to go on")
        raise


class _Progress:
    """Passes progress on, ten times a second at most."""

    def __init__(self, callback: OnProgress | None) -> None:
        self._callback = callback
        self._last = 0.0

    def __call__(self, done: int, total: int | None, *, always: bool = False) -> None:
        now = time.monotonic()
        if self._callback and (always or now - self._last >= _PROGRESS_SECONDS):
            self._last = now
            self._callback(done, total or 0)


class _Transfer:
    """Brings all bytes of a part, with as many attempts as patience allows, several at once where that works."""

    def __init__(
        self, source: TransferSource, part: DownloadPart, progress: _Progress, note: OnNote, patience: RetryPolicy
    ) -> None:
        self._source = source
        self._part = part
        self._progress = progress
        self._note = note
        self._patience = patience
        self._link = Link(source)
        self._attempts: list[_Attempt] = []
        self._ended: queue.SimpleQueue[tuple[_Attempt, BaseException | None]] = queue.SimpleQueue()
        self._connections = CONNECTIONS
        self._failures = 0
        self._bad_ranges = 0
        self._ranges_work = False
        self._arrived_at_failure = part.arrived
        self._not_before = 0.0

    def run(self) -> None:
        """Returns when every byte is there, right or wrong. Raises: see download()."""
        import httpx2

        self._progress(self._part.arrived, self._part.size, always=True)
        try:
            with new_client(self._patience) as client:
                try:
                    while not self._part.complete:
                        self._start_attempts(client)
                        self._hear(wait=not self._hash_some())
                        self._drop_stalled()
                        self._progress(self._part.arrived, self._part.size)
                finally:
                    for attempt in self._attempts:
                        attempt.abandon()
        except httpx2.InvalidURL as error:
            raise NetworkError(f"invalid link of {self._source.label}", why=str(error)) from error

    def _start_attempts(self, client: httpx2.Client) -> None:
        """As many as may be. The first is alone until its answer shows that the server understands ranges."""
        while time.monotonic() >= self._not_before:
            self._ranges_work |= any(attempt.got_range for attempt in self._attempts)
            several = self._part.in_pieces and self._ranges_work
            if len(self._attempts) >= (self._connections if several else 1):
                return
            claim = self._part.claim()
            if claim is None:
                return
            attempt = _Attempt(self._source, self._link, self._part, claim, self._patience)
            self._attempts.append(attempt)
            attempt.start(client, self._ended)

    def _hash_some(self) -> bool:
        """A few megabytes, so that progress and Ctrl-C need not wait; False when there was nothing to hash."""
        hashed = [self._part.hash_some() for _ in range(_HASHED_AT_ONCE)]
        return any(hashed)

    def _hear(self, *, wait: bool) -> None:
        """What attempts have come to; waits a moment for the first."""
        with suppress(queue.Empty):
            while True:
                attempt, trouble = self._ended.get(timeout=_TICK_SECONDS) if wait else self._ended.get_nowait()
                wait = False
                if attempt in self._attempts:  # else it was given up, and whatever it met is no news
                    self._finish(attempt, trouble)

    def _drop_stalled(self) -> None:
        now = time.monotonic()
        for attempt in [one for one in self._attempts if one.is_stalled(now)]:
            self._finish(attempt, RetryableError(stalled(self._source, attempt.host)))

    def _finish(self, attempt: _Attempt, trouble: BaseException | None) -> None:
        self._attempts.remove(attempt)
        attempt.abandon()
        if isinstance(trouble, RetryableError):
            if self._attempts and not attempt.brought_bytes:  # it was turned away: there are too many of us
                self._connections = len(self._attempts)
            self._try_later(trouble)
        elif trouble is not None and not isinstance(trouble, ClaimLostError):
            raise trouble

    def _try_later(self, trouble: RetryableError) -> None:
        """Plan the next attempt. Raises the trouble's error when patience ends."""
        self._link.forget()
        arrived = self._part.arrived
        progressed = arrived - self._arrived_at_failure >= CHUNK_BYTES
        self._failures = 1 if progressed else self._failures + 1
        self._arrived_at_failure = arrived
        self._bad_ranges += trouble.bad_range
        if trouble.bad_range and self._bad_ranges == _MOST_BAD_RANGES:
            self._restart()  # it can't be resumed there, but perhaps had in one go
        # One that fails while others are at work may only be unlucky.
        most = self._patience.retries * (CONNECTIONS if self._attempts else 1)
        if self._failures > most:
            raise trouble.error from trouble
        backoff = self._patience.backoff_seconds * 2 ** min(self._failures - 1, 6)
        backoff *= random.uniform(0.75, 1.25)  # noqa: S311 - no secret: so that many clients don't come back at once
        seconds = max(trouble.wait_seconds, backoff)
        self._not_before = time.monotonic() + seconds
        if seconds >= _WORTH_A_WORD_SECONDS:
            self._note(f"{trouble.error}; trying again in {seconds:.0f} seconds")

    def _restart(self) -> None:
        for attempt in self._attempts:
            attempt.abandon()
        self._attempts = []
        self._part.restart()
        self._arrived_at_failure = 0
        self._failures = 1


class _Attempt:
    """One connection that fetches one piece, in a thread.

    Attributes:
        got_range: whether the server has answered with the very bytes that were asked for.
        host: that was asked last, for messages.
    """

    def __init__(
        self, source: TransferSource, link: Link, part: DownloadPart, claim: Claim, patience: RetryPolicy
    ) -> None:
        self._source = source
        self._link = link
        self._part = part
        self._claim = claim
        self._patience = patience
        self._response: httpx2.Response | None = None
        self._bytes = self._marked_bytes = 0
        self._marked_at = time.monotonic()
        self.got_range = False
        self.host = host_of(source.url)

    def start(self, client: httpx2.Client, ended: queue.SimpleQueue[tuple[_Attempt, BaseException | None]]) -> None:
        """Begin; puts (this, what went wrong or None) into `ended` at the end."""

        def work() -> None:
            try:
                self._fetch(client)
                ended.put((self, None))
            except BaseException as error:  # raised again by whoever decides
                ended.put((self, error))

        threading.Thread(target=work, name="download", daemon=True).start()

    def abandon(self) -> None:
        """Write nothing more, and let go of the connection. Harmless when it has ended."""
        self._part.give_back(self._claim)
        if self._response is not None:
            stream = self._response.extensions.get("network_stream")
            if stream and not self._response.is_closed:
                with suppress(OSError, AttributeError):  # it ends right now
                    stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)  # wakes the thread that reads from it

    @property
    def brought_bytes(self) -> bool:
        """Whether any of the file's bytes came."""
        return self._bytes > 0

    def is_stalled(self, now: float) -> bool:
        """Whether next to nothing has come for too long, be it headers, bytes or a host's address."""
        if self._bytes - self._marked_bytes >= _SLOWEST_BYTES:
            self._marked_bytes, self._marked_at = self._bytes, now
        return now - self._marked_at > self._patience.stall_seconds

    def _fetch(self, client: httpx2.Client) -> None:
        import httpx2

        try:
            with self._link.answer(client, self._headers()) as response:
                self._response = response
                self.host = response.url.host
                self._begin(response)
                self._take(response)
        except httpx2.HTTPError as error:
            raise RetryableError(unreachable(self._source, error)) from error

    def _headers(self) -> dict[str, str]:
        piece = self._claim.piece
        # Compressed bytes would be neither countable nor resumable.
        headers = {"Accept-Encoding": "identity"}
        if self._part.in_pieces:
            headers["Range"] = f"bytes={piece.position}-{(piece.end or 1) - 1}"
        elif piece.position and (self._source.sha256 or self._part.version):
            headers["Range"] = f"bytes={piece.position}-"
            if self._source.sha256 is None:
                headers["If-Range"] = self._part.version
        return headers

    def _begin(self, response: httpx2.Response) -> None:
        """Get the part ready for an answer's body."""
        source, part, piece = self._source, self._part, self._claim.piece
        refuse_errors(response, source, self._patience)
        total = total_bytes(response, source, piece.position, piece.end if part.in_pieces else None)
        if total is not None and source.size is not None and total != source.size:
            raise IntegrityError(
                f"the server has another file than {source.label}",
                why=f"it has {total:,} bytes, {source.size:,} were promised",
                hint="try again later; if it stays so, HF_ENDPOINT or something on the way is wrong",
            )
        if response.status_code == 206:
            self.got_range = True
        elif part.in_pieces or piece.position:
            part.restart(self._claim)  # the whole file comes, whatever was asked for
        if source.sha256 is None:
            part.remember(version_of(response))
        if source.size is None and total is not None:
            part.ends_at(self._claim, total)
        require_space(part.path.parent, (total or source.size or 0) - part.arrived)

    def _take(self, response: httpx2.Response) -> None:
        for chunk in response.iter_raw():
            if self._claim.piece.whole:
                break  # more than was asked for; the sha256 tells whether the rest is right
            if self._claim.piece.position == 0:
                self._check_beginning(chunk)
            self._part.write(self._claim, chunk)
            self._bytes += len(chunk)
        piece = self._claim.piece
        if piece.end is None:
            self._part.ends_at(self._claim, piece.position)
        elif not piece.whole:
            error = NetworkError(
                f"the server stopped in the middle of {self._source.label}",
                why=f"after {piece.position:,} of {piece.end:,} bytes",
                hint="run the same command again: it goes on where it stopped",
            )
            raise RetryableError(error)

    def _check_beginning(self, chunk: bytes) -> None:
        wanted = self._source.starts_with
        if chunk[: len(wanted)] != wanted[: len(chunk)]:
            raise BadModelError(
                f"the link leads to no model: {self._source.label}", why=f"the file begins with {chunk[:12]!r}"
            )
