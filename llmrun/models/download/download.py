"""Download of one file to a path on this disk: resumed, verified, installed atomically.

Owns locking, free space, attempts, retries and installation. Must not know the hub, indexes or models. Arrived bytes
survive Ctrl-C and crashes; the next run requests only the missing ones. Without a known sha256, resuming needs a server
that identifies versions of the file.

One thread decides, hashes and reports progress; each connection has its own thread, which only moves bytes.
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
    DEFAULT_RETRY_POLICY,
    SLOWEST_BYTES,
    Link,
    OnNote,
    RetryableError,
    RetryPolicy,
    TransferSource,
    connection_error,
    host_of,
    ignore_note,
    new_client,
    raise_for_status,
    stalled_error,
    total_bytes,
    version_of,
)
from llmrun.models.store.disk import disk_errors, exclusive, require_space

if TYPE_CHECKING:
    import httpx2

OnProgress = Callable[[int, int], None]
"""Called with (bytes arrived, total bytes); the total is 0 when the server doesn't say."""


def ignore_progress(done: int, total: int) -> None:
    pass


CONNECTIONS = 4
"""For a file in pieces: slow servers limit the rate per connection."""
_PROGRESS_SECONDS = 0.1
_TICK_SECONDS = 0.05
_CHUNKS_HASHED_AT_ONCE = 8
_MAX_BAD_RANGES = 2
_NOTED_WAIT_SECONDS = 5.0
_NOTED_HASH_BYTES = 1 << 30


def download(
    source: TransferSource,
    target: Path,
    *,
    lock: Path,
    on_progress: OnProgress = ignore_progress,
    on_note: OnNote = ignore_note,
    policy: RetryPolicy = DEFAULT_RETRY_POLICY,
) -> None:
    """Download the source to `target` unless the file exists.

    Args:
        lock: file that only one process may hold while it writes this target.
        on_progress: called about ten times a second, also while nothing arrives, and at the end.
        on_note: called when the download has to wait.

    Raises:
        NetworkError: the server can't be reached, or answers something unusable, after retries.
        IntegrityError: the bytes differ from the promised size or sha256; they are deleted.
        LoginRequiredError: the server requires a token or accepted terms.
        ModelNotFoundError: the server has no such file, and no sha256 was promised.
        BadModelError: the file begins with unexpected bytes.
        DiskFullError, ResourceError: the file can't be written; arrived bytes are kept.
    """
    wait_note = f"{source.label} is being downloaded by another process; waiting for it"
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(lock, lambda: on_note(wait_note)):
            if target.exists():  # another process was faster
                return
            _fetch(source, target, _Progress(on_progress), on_note, policy)


def _fetch(source: TransferSource, target: Path, progress: _Progress, note: OnNote, policy: RetryPolicy) -> None:
    if source.size is not None:
        require_space(target.parent, source.size - arrived_bytes(target, source.size))
    try:
        with (
            DownloadPart(target, source.size, source.sha256) as part,
            disk_errors(part.path, lambda: (part.size or 0) - part.arrived),
        ):
            with _note_when_stopped(part, note):
                if not part.complete:
                    _Transfer(source, part, progress, note, policy).run()
                if part.unhashed > _NOTED_HASH_BYTES:
                    note(f"checking the sha256 of {source.label}")
                while part.hash_some():
                    progress(part.arrived, part.size)
            part.install()
            progress(part.arrived, part.size, always=True)
    except WrongBytesError as error:
        raise IntegrityError(
            f"the bytes of {source.label} are wrong, so they were deleted",
            why=str(error),
            hint="run the same command again; if that fails too, the server or a proxy changes the file",
        ) from error


@contextmanager
def _note_when_stopped(part: DownloadPart, note: OnNote) -> Iterator[None]:
    try:
        yield
    except (KeyboardInterrupt, CancelledError, TerminatedError):
        if part.arrived and part.resumable:
            share = f" of {part.size:,}" if part.size else ""
            note(f"{part.arrived:,}{share} bytes are kept; run the same command to resume")
        raise


class _Progress:
    """Progress callback, limited to ten calls a second."""

    def __init__(self, callback: OnProgress) -> None:
        self._callback = callback
        self._last = 0.0

    def __call__(self, done: int, total: int | None, *, always: bool = False) -> None:
        now = time.monotonic()
        if always or now - self._last >= _PROGRESS_SECONDS:
            self._last = now
            self._callback(done, total or 0)


class _Transfer:
    """Transfer of all bytes of a part, over several connections where the server supports ranges."""

    def __init__(
        self, source: TransferSource, part: DownloadPart, progress: _Progress, note: OnNote, policy: RetryPolicy
    ) -> None:
        self._source = source
        self._part = part
        self._progress = progress
        self._note = note
        self._policy = policy
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
        """Return when every byte has arrived, verified or not. Raises as download()."""
        import httpx2

        self._progress(self._part.arrived, self._part.size, always=True)
        try:
            with new_client(self._policy) as client:
                try:
                    while not self._part.complete:
                        self._start_attempts(client)
                        self._finish_ended(wait=not self._hash_some())
                        self._drop_stalled()
                        self._progress(self._part.arrived, self._part.size)
                finally:
                    for attempt in self._attempts:
                        attempt.abandon()
        except httpx2.InvalidURL as error:
            raise NetworkError(f"invalid link of {self._source.label}", why=str(error)) from error

    def _start_attempts(self, client: httpx2.Client) -> None:
        """Start all allowed attempts. The first runs alone until its answer shows that the server supports ranges."""
        while time.monotonic() >= self._not_before:
            self._ranges_work |= any(attempt.got_range for attempt in self._attempts)
            several = self._part.in_pieces and self._ranges_work
            if len(self._attempts) >= (self._connections if several else 1):
                return
            claim = self._part.claim()
            if claim is None:
                return
            attempt = _Attempt(self._link, self._part, claim, self._policy)
            self._attempts.append(attempt)
            attempt.start(client, self._ended)

    def _hash_some(self) -> bool:
        """Hash a few megabytes, so that progress and Ctrl-C need not wait; return whether there were any."""
        hashed = [self._part.hash_some() for _ in range(_CHUNKS_HASHED_AT_ONCE)]
        return any(hashed)

    def _finish_ended(self, *, wait: bool) -> None:
        """Handle finished attempts; with `wait`, wait briefly for the first."""
        with suppress(queue.Empty):
            while True:
                attempt, error = self._ended.get(timeout=_TICK_SECONDS) if wait else self._ended.get_nowait()
                wait = False
                if attempt in self._attempts:  # an abandoned attempt's error does not matter
                    self._finish(attempt, error)

    def _drop_stalled(self) -> None:
        now = time.monotonic()
        for attempt in [one for one in self._attempts if one.is_stalled(now)]:
            self._finish(attempt, RetryableError(stalled_error(self._source, attempt.host)))

    def _finish(self, attempt: _Attempt, error: BaseException | None) -> None:
        self._attempts.remove(attempt)
        attempt.abandon()
        if isinstance(error, RetryableError):
            if self._attempts and not attempt.n_bytes:  # refused: the server allows fewer connections
                self._connections = len(self._attempts)
            self._schedule_retry(error)
        elif error is not None and not isinstance(error, ClaimLostError):
            raise error

    def _schedule_retry(self, failure: RetryableError) -> None:
        """Schedule the next attempt. Raises the attempt's error when no retry is left."""
        self._link.forget()
        arrived = self._part.arrived
        progressed = arrived - self._arrived_at_failure >= CHUNK_BYTES
        self._failures = 1 if progressed else self._failures + 1
        self._arrived_at_failure = arrived
        self._bad_ranges += failure.bad_range
        if failure.bad_range and self._bad_ranges == _MAX_BAD_RANGES:
            self._restart()  # resuming fails there; a whole download may work
        # A single failure beside working connections may be chance.
        limit = self._policy.retries * (CONNECTIONS if self._attempts else 1)
        if self._failures > limit:
            raise failure.error from failure
        backoff = self._policy.backoff_seconds * 2 ** min(self._failures - 1, 6)
        backoff *= random.uniform(0.75, 1.25)  # noqa: S311 - no secret: spreads the retries of many clients
        seconds = max(failure.wait_seconds, backoff)
        self._not_before = time.monotonic() + seconds
        if seconds >= _NOTED_WAIT_SECONDS:
            self._note(f"{failure.error}; trying again in {seconds:.0f} seconds")

    def _restart(self) -> None:
        for attempt in self._attempts:
            attempt.abandon()
        self._attempts = []
        self._part.restart()
        self._arrived_at_failure = 0
        self._failures = 1


class _Attempt:
    """One connection that fetches one piece, in a thread."""

    def __init__(self, link: Link, part: DownloadPart, claim: Claim, policy: RetryPolicy) -> None:
        self._source = link.source
        self._link = link
        self._part = part
        self._claim = claim
        self._policy = policy
        self._response: httpx2.Response | None = None
        self._marked_bytes = 0
        self._marked_at = time.monotonic()
        self.n_bytes = 0  # arrived
        self.got_range = False  # the response had the requested range
        self.host = host_of(link.source.url)  # last host, for messages

    def start(self, client: httpx2.Client, ended: queue.SimpleQueue[tuple[_Attempt, BaseException | None]]) -> None:
        """Start the thread; it puts (this attempt, its error or None) into `ended` at the end."""

        def work() -> None:
            try:
                self._fetch(client)
                ended.put((self, None))
            except BaseException as error:  # raised again by the deciding thread
                ended.put((self, error))

        threading.Thread(target=work, name="download", daemon=True).start()

    def abandon(self) -> None:
        """Stop writing and close the connection. Harmless after the end."""
        self._part.release(self._claim)
        if self._response is not None:
            stream = self._response.extensions.get("network_stream")
            if stream and not self._response.is_closed:
                with suppress(OSError, AttributeError):  # it ends right now
                    stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)  # wakes the thread that reads from it

    def is_stalled(self, now: float) -> bool:
        """Return whether too few bytes arrived for too long; connecting and headers count as silence."""
        if self.n_bytes - self._marked_bytes >= SLOWEST_BYTES:
            self._marked_bytes, self._marked_at = self.n_bytes, now
        return now - self._marked_at > self._policy.stall_seconds

    def _fetch(self, client: httpx2.Client) -> None:
        import httpx2

        try:
            with self._link.answer(client, self._headers()) as response:
                self._response = response
                self.host = response.url.host
                self._prepare_part(response)
                self._read(response)
        except httpx2.HTTPError as error:
            raise RetryableError(connection_error(self._source, error)) from error

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

    def _prepare_part(self, response: httpx2.Response) -> None:
        """Prepare the part for the response's body."""
        source, part, piece = self._source, self._part, self._claim.piece
        raise_for_status(response, source, self._policy)
        total = total_bytes(response, source, piece.position, piece.end if part.in_pieces else None)
        if total is not None and source.size is not None and total != source.size:
            raise IntegrityError(
                f"the server has another file than {source.label}",
                why=f"it has {total:,} bytes instead of {source.size:,}",
                hint="try again later, then check HF_ENDPOINT and the proxy",
            )
        if response.status_code == 206:
            self.got_range = True
        elif part.in_pieces or piece.position:
            part.restart(self._claim)  # the server ignores ranges and sends the whole file
        if source.sha256 is None:
            part.remember(version_of(response))
        if source.size is None and total is not None:
            part.ends_at(self._claim, total)
        require_space(part.path.parent, (total or source.size or 0) - part.arrived)

    def _read(self, response: httpx2.Response) -> None:
        for chunk in response.iter_raw():
            if self._claim.piece.whole:
                break  # more than requested
            if self._claim.piece.position == 0:
                self._check_beginning(chunk)
            self._part.write(self._claim, chunk)
            self.n_bytes += len(chunk)
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
        expected = self._source.starts_with
        if chunk[: len(expected)] != expected[: len(chunk)]:
            raise BadModelError(
                f"the link leads to no model: {self._source.label}", why=f"the file begins with {chunk[:12]!r}"
            )
