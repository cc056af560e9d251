"""Download of one file to a path on this disk: resumed, verified, installed atomically.

Arrived bytes survive Ctrl-C and crashes; the next run requests only the missing ones. Without a known sha256, resuming
needs a server that identifies versions of the file. One thread decides, writes, hashes and reports progress; each
connection has its own thread, which only reads.

    <target>.part        the file's first bytes, appended unbuffered: its length is what has arrived
    <target>.part.from   for a file without a known hash: the server's name of this version (ETag or date)
"""

from __future__ import annotations

import hashlib
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, cast

import httpx2

from llmrun.errors import BadModelError, CancelledError, IntegrityError, NetworkError, TerminatedError, first_bytes
from llmrun.models.download import transfer
from llmrun.models.download.transfer import (
    SLOWEST_BYTES,
    Link,
    OnNote,
    RetryableError,
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
from llmrun.models.store.new_file import disk_errors, exclusive, require_space
from llmrun.storage import sync_folder

CHUNK_BYTES = 1 << 20
_LONGEST_VERSION = 1024


class WrongBytesError(Exception):
    """Mismatch between the bytes and the promised size or sha256."""


def part_path(target: Path) -> Path:
    return target.with_name(target.name + ".part")


def arrived_bytes(target: Path, size: int) -> int:
    """Return the number of bytes an earlier run has left of a target of this size."""
    try:
        length = part_path(target).stat().st_size
    except OSError:
        return 0
    return length if length <= size else 0


class DownloadPart:
    """Partial download.

    Args:
        target: final path, in an existing folder.
        size: in bytes, None when unknown.
        sha256: lower-case hex, None when unknown.

    Raises (all methods):
        OSError: from the disk; bytes that arrived before remain.
    """

    def __init__(self, target: Path, size: int | None, sha256: str | None) -> None:
        self.target = target
        self.path = part_path(target)
        self._version_path = self.path.with_name(self.path.name + ".from")
        self._sha256 = sha256
        self.size = size
        self.arrived = 0
        self._digest = hashlib.sha256()
        self._hashed = 0

    def __enter__(self) -> DownloadPart:
        self.path.touch()
        # Unbuffered: written bytes survive a kill.
        self._file = cast(BinaryIO, self.path.open("r+b", buffering=0))
        self.arrived = self._file.seek(0, os.SEEK_END)
        if not self.resumable or (self.size is not None and self.arrived > self.size):
            self.restart()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._file.close()
        is_useful = self.arrived and self.resumable
        if kind is not None and (issubclass(kind, WrongBytesError) or not is_useful):
            self.path.unlink(missing_ok=True)
            self._version_path.unlink(missing_ok=True)

    @property
    def complete(self) -> bool:
        """Whether every byte has arrived, verified or not."""
        return self.size is not None and self.arrived >= self.size

    @property
    def unhashed(self) -> int:
        return self.arrived - self._hashed if self._sha256 else 0

    def append(self, chunk: bytes) -> None:
        """Write the next bytes; drop those beyond the file's end."""
        rest = memoryview(chunk)
        if self.size is not None:
            rest = rest[: self.size - self.arrived]
        while rest:
            written = self._file.write(rest)
            if self._hashed == self.arrived:
                self._digest.update(rest[:written])
                self._hashed += written
            self.arrived += written
            rest = rest[written:]

    def restart(self) -> None:
        """Discard every byte."""
        self._file.truncate(0)
        self.arrived = self._file.seek(0)
        self._digest = hashlib.sha256()
        self._hashed = 0

    # ---- version of the file, where no hash is known

    @property
    def resumable(self) -> bool:
        """Whether a later run can tell that these bytes belong to the file it fetches."""
        return bool(self._sha256 or self.version)

    @property
    def version(self) -> str:
        """Version recorded by remember(), also by an earlier run; "" when none."""
        try:
            return self._version_path.read_text(encoding="ascii")
        except (OSError, ValueError):
            return ""

    def remember(self, version: str) -> None:
        """Record the server's name of this version; without one, nothing can be resumed."""
        if not version or len(version) > _LONGEST_VERSION or not version.isascii():
            self._version_path.unlink(missing_ok=True)
        elif version != self.version:
            self._version_path.write_text(version, encoding="ascii")

    # ---- the end

    def hash_some(self) -> bool:
        """Hash a few of the bytes that an earlier run has left; return whether there were any."""
        if not self.unhashed:
            return False
        self._file.seek(self._hashed)
        chunk = self._file.read(min(CHUNK_BYTES, self.unhashed))
        self._file.seek(self.arrived)
        self._digest.update(chunk)
        self._hashed += len(chunk)
        return bool(chunk)

    def install(self) -> None:
        """Verify the bytes and move them to the target, once hash_some() has nothing left to do.

        Raises WrongBytesError for other bytes than promised; they are deleted when the block ends.
        """
        if self.size is not None and self.arrived != self.size:
            raise WrongBytesError(f"{self.arrived} bytes arrived, expected {self.size}")
        if self._sha256 not in (None, self._digest.hexdigest()):
            raise WrongBytesError(f"the sha256 is {self._digest.hexdigest()}, expected {self._sha256}")
        os.fsync(self._file.fileno())
        self._file.close()
        self.path.replace(self.target)
        self._version_path.unlink(missing_ok=True)
        sync_folder(self.target.parent)


OnProgress = Callable[[int, int], None]
"""Called with (bytes arrived, total bytes); the total is 0 when the server doesn't say."""


def ignore_progress(done: int, total: int) -> None:
    pass


LARGE_FILE_BYTES = 128 << 20
"""Files from this size on arrive over several connections. A smaller one has arrived before they would help."""
CONNECTIONS = 4
"""Of a large file: slow servers limit the rate per connection."""
RANGE_BYTES = 8 << 20
"""Length of a large file's requests. A connection reads so much ahead at most, which a kill loses."""
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
            _fetch(source, target, _Progress(on_progress), on_note)


def _fetch(source: TransferSource, target: Path, progress: _Progress, note: OnNote) -> None:
    if source.size is not None:
        require_space(target.parent, source.size - arrived_bytes(target, source.size))
    try:
        with (
            DownloadPart(target, source.size, source.sha256) as part,
            disk_errors(part.path, lambda: (part.size or 0) - part.arrived),
        ):
            with _note_when_stopped(part, note):
                if not part.complete:
                    _Transfer(source, part, progress, note).run()
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
    """Transfer of all bytes of a part, in file order.

    A large file is requested in ranges over several connections, which read ahead of the one whose bytes come next.
    """

    def __init__(self, source: TransferSource, part: DownloadPart, progress: _Progress, note: OnNote) -> None:
        self._source = source
        self._part = part
        self._progress = progress
        self._note = note
        self._link = Link(source)
        self._readers: list[_RangeReader] = []  # in file order, without gaps; the first one's bytes come next
        self._connections = CONNECTIONS
        self._in_ranges = source.sha256 is not None and (source.size or 0) >= LARGE_FILE_BYTES
        self._ranges_work = False
        self._failures = 0
        self._bad_ranges = 0
        self._arrived_at_failure = part.arrived
        self._not_before = 0.0

    def run(self) -> None:
        """Return when every byte has arrived, verified or not. Raises as download()."""
        self._progress(self._part.arrived, self._part.size, always=True)
        try:
            with new_client() as client:
                try:
                    while not self._part.complete:
                        self._start_readers(client)
                        self._receive(wait=not self._hash_some())
                        ahead = sum(reader.n_ahead for reader in self._readers)
                        self._progress(self._part.arrived + ahead, self._part.size)
                finally:
                    self._stop(self._readers)
        except httpx2.InvalidURL as error:
            raise NetworkError(f"invalid link of {self._source.label}", why=str(error)) from error

    def _start_readers(self, client: httpx2.Client) -> None:
        """Start all allowed readers. The first runs alone until its answer shows that the server supports ranges."""
        if time.monotonic() < self._not_before:
            return
        position = self._part.arrived
        after = self._readers[0].position if self._readers else None
        if after != position:  # nothing is read, or the first reader has failed
            self._readers.insert(0, self._started(client, position, after or self._range_end(position)))
        while (
            self._ranges_work
            and len(self._readers) < self._connections
            and (start := self._readers[-1].end) is not None
            and (end := self._range_end(start)) != start
        ):
            self._readers.append(self._started(client, start, end))

    def _range_end(self, start: int) -> int | None:
        """Return the end of the range to request from `start` on, None for all that follows."""
        return min(start + RANGE_BYTES, self._part.size or 0) if self._in_ranges else None

    def _started(self, client: httpx2.Client, start: int, end: int | None) -> _RangeReader:
        version = self._part.version if self._source.sha256 is None else ""
        reader = _RangeReader(self._link, start, end, version)
        reader.start(client)
        return reader

    def _hash_some(self) -> bool:
        """Hash a few megabytes, so that progress and Ctrl-C need not wait; return whether there were any."""
        hashed = [self._part.hash_some() for _ in range(_CHUNKS_HASHED_AT_ONCE)]
        return any(hashed)

    def _receive(self, *, wait: bool) -> None:
        """Write what the first reader has read; with `wait`, wait briefly for it."""
        now = time.monotonic()
        for reader in self._readers:
            reader.check_for_stall(now)
        if not self._readers or self._readers[0].position != self._part.arrived:  # the next attempt has to wait
            time.sleep(_TICK_SECONDS)
            return
        reader = self._readers[0]
        try:
            for item in reader.take(_TICK_SECONDS if wait else 0):
                if isinstance(item, bytes):
                    self._write(item)
                else:
                    self._prepare_part(reader, item)
            if reader.has_ended:
                self._readers.remove(reader)
                self._check_end(reader)
        except RetryableError as failure:
            self._schedule_retry(reader, failure)

    def _prepare_part(self, reader: _RangeReader, answer: _RangeAnswer) -> None:
        """Prepare the part for the bytes that follow an answer."""
        source, part = self._source, self._part
        if answer.total is not None and source.size is not None and answer.total != source.size:
            raise IntegrityError(
                f"the server has another file than {source.label}",
                why=f"it has {answer.total:,} bytes instead of {source.size:,}",
                hint="try again later, then check HF_ENDPOINT and the proxy",
            )
        if answer.is_range:
            self._ranges_work = self._in_ranges
        else:  # the server ignores ranges and sends the whole file
            self._stop([other for other in self._readers if other is not reader])
            reader.position, reader.end = 0, None
            self._restart()
        if source.sha256 is None:
            part.remember(answer.version)
        if part.size is None:
            part.size = answer.total
        require_space(part.path.parent, (part.size or 0) - part.arrived)

    def _write(self, chunk: bytes) -> None:
        expected = self._source.starts_with
        if self._part.arrived == 0 and chunk[: len(expected)] != expected[: len(chunk)]:
            raise BadModelError(
                f"the link leads to no model: {self._source.label}",
                why=f"the file begins with {first_bytes(chunk[:12])}",
            )
        self._part.append(chunk)

    def _check_end(self, reader: _RangeReader) -> None:
        """Raise RetryableError unless a reader that has ended read its whole range."""
        part = self._part
        if part.size is None:
            part.size = part.arrived
        end = part.size if reader.end is None else reader.end
        if part.arrived < end:
            error = NetworkError(
                f"the server stopped in the middle of {self._source.label}",
                why=f"after {part.arrived:,} of {end:,} bytes",
                hint="run the same command again: it goes on where it stopped",
            )
            raise RetryableError(error)

    def _schedule_retry(self, reader: _RangeReader, failure: RetryableError) -> None:
        """Schedule the next attempt. Raises the attempt's error when no retry is left."""
        self._stop([reader])
        if self._readers and not reader.has_answer:  # refused: the server allows fewer connections
            self._connections = len(self._readers)
        self._link.forget()
        arrived = self._part.arrived
        progressed = arrived - self._arrived_at_failure >= CHUNK_BYTES
        self._failures = 1 if progressed else self._failures + 1
        self._arrived_at_failure = arrived
        self._bad_ranges += failure.bad_range
        if failure.bad_range and self._bad_ranges == _MAX_BAD_RANGES:
            self._stop(self._readers)
            self._restart()  # resuming fails there; a whole download may work
            self._failures = 1
        # A single failure beside working connections may be chance.
        limit = transfer.RETRY_POLICY.retries * (CONNECTIONS if self._readers else 1)
        if self._failures > limit:
            raise failure.error from failure
        backoff = transfer.RETRY_POLICY.backoff_seconds * 2 ** min(self._failures - 1, 6)
        backoff *= random.uniform(0.75, 1.25)  # noqa: S311 - no secret: spreads the retries of many clients
        seconds = max(failure.wait_seconds, backoff)
        self._not_before = time.monotonic() + seconds
        if seconds >= _NOTED_WAIT_SECONDS:
            self._note(f"{failure.error}; trying again in {seconds:.0f} seconds")

    def _restart(self) -> None:
        """Discard every byte, and request the file as a whole."""
        self._in_ranges = self._ranges_work = False
        self._part.restart()
        self._arrived_at_failure = 0

    def _stop(self, readers: list[_RangeReader]) -> None:
        for reader in readers:
            reader.stop()
        self._readers = [reader for reader in self._readers if reader not in readers]


@dataclass(frozen=True, slots=True)
class _RangeAnswer:
    """The headers of a response to a request for a range of bytes."""

    total: int | None  # bytes of the file, None when not stated
    is_range: bool  # the requested one; False for the whole file
    version: str


class _RangeReader:
    """One connection that reads a range of the file ahead, in a thread."""

    def __init__(self, link: Link, start: int, end: int | None, version: str) -> None:
        self._link = link
        self._start = start
        self._version = version
        self._response: httpx2.Response | None = None
        self._changed = threading.Condition()  # guards the fields up to _stopped
        self._items: list[_RangeAnswer | bytes] = []
        self._error: BaseException | None = None
        self._done = False
        self._stopped = False
        self.n_ahead = 0  # bytes that were read and not taken
        self._n_bytes = 0  # read
        self._marked_bytes = 0
        self._marked_at = time.monotonic()
        self.position = start  # of the next byte to take
        self.end = end  # None for all that follow
        self.has_answer = False
        self.has_ended = False  # and all was taken

    def start(self, client: httpx2.Client) -> None:
        threading.Thread(target=self._run, args=(client,), name="download", daemon=True).start()

    def take(self, seconds: float) -> Iterator[_RangeAnswer | bytes]:
        """Yield what was read since the last call: first the answer, then bytes. Raise the reader's error after them.

        Args:
            seconds: to wait while there is nothing.
        """
        with self._changed:
            if not self._items and not self._done:
                self._changed.wait(seconds)
            items, self._items, self.n_ahead = self._items, [], 0
            error, done = self._error, self._done
            self._changed.notify()
        for item in items:
            if isinstance(item, bytes):
                self.position += len(item)
            yield item
        if error is not None:
            raise error
        self.has_ended = done

    def check_for_stall(self, now: float) -> None:
        """End with an error if too few bytes arrived for too long; connecting and headers count as silence."""
        with self._changed:
            waits_for_us = self._done or self.n_ahead >= RANGE_BYTES
        if waits_for_us or self._n_bytes - self._marked_bytes >= SLOWEST_BYTES:
            self._marked_bytes, self._marked_at = self._n_bytes, now
        if now - self._marked_at > transfer.RETRY_POLICY.stall_seconds:
            host = self._response.url.host if self._response else host_of(self._link.source.url)
            self._finish(RetryableError(stalled_error(self._link.source, host)))
            self.stop()

    def stop(self) -> None:
        """Close the connection. Harmless after the end."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._response is not None:
            stream = self._response.extensions.get("network_stream")
            if stream and not self._response.is_closed:
                with suppress(OSError, AttributeError):  # it ends right now
                    stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)  # wakes the thread that reads from it

    def _run(self, client: httpx2.Client) -> None:
        try:
            self._read(client)
            self._finish(None)
        except httpx2.HTTPError as error:
            self._finish(RetryableError(connection_error(self._link.source, error)))
        except BaseException as error:  # raised again by take()
            self._finish(error)

    def _read(self, client: httpx2.Client) -> None:
        source = self._link.source
        with self._link.answer(client, self._headers()) as response:
            self._response = response
            raise_for_status(response, source)
            total = total_bytes(response, self._start, self.end)
            is_range = response.status_code == 206
            end = self.end if is_range else None
            left = None if end is None else end - self._start
            self._put(_RangeAnswer(total, is_range, version_of(response)), 0)
            for chunk in response.iter_raw():
                if left == 0 or self._stopped:  # more than requested, or than wanted
                    break
                if left is not None:
                    chunk = chunk[:left]
                    left -= len(chunk)
                self._put(chunk, len(chunk))

    def _headers(self) -> dict[str, str]:
        # Compressed bytes would be neither countable nor resumable.
        headers = {"Accept-Encoding": "identity"}
        if self.end is not None:
            headers["Range"] = f"bytes={self._start}-{self.end - 1}"
        elif self._start and (self._link.source.sha256 or self._version):
            headers["Range"] = f"bytes={self._start}-"
            if self._link.source.sha256 is None:
                headers["If-Range"] = self._version
        return headers

    def _put(self, item: _RangeAnswer | bytes, n_bytes: int) -> None:
        with self._changed:
            while self.n_ahead >= RANGE_BYTES and not self._stopped:
                self._changed.wait()
            self._items.append(item)
            self.has_answer = True
            self.n_ahead += n_bytes
            self._n_bytes += n_bytes
            self._changed.notify()

    def _finish(self, error: BaseException | None) -> None:
        with self._changed:
            if not self._done:
                self._done, self._error = True, error
            self._changed.notify()
