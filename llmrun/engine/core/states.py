"""KV states on disk, so that a repeated conversation or long prompt needs no prefill, and their background writer.

Owns the files: format, lookup by token prefix, checks, size limit and eviction. Must not know llama.cpp or the loop. A
file is only a cache: a damaged one, or one of another model or build, is ignored, and any may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import threading
import zlib
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Full, Queue
from typing import BinaryIO

from llmrun.engine.core.prefix import common_prefix

_MAGIC = b"LLMRUNKV"
_VERSION = 1
_HEAD = struct.Struct("<8sIIQQI")  # magic, version, bytes of the key, tokens, bytes of the state, CRC-32 of the rest
_TOKEN_BYTES = array("i").itemsize
_SUFFIX, _UNFINISHED = ".kv", ".tmp"
_SAMPLE_BYTES = 1 << 20
_MIN_NEW = 256  # tokens that are not on disk yet, for the saver
_MAX_REMEMBERED = 64  # saved states
_MAX_QUEUED = 2  # states: they take as much memory as their cells


@dataclass(frozen=True, slots=True)
class SavedState:
    """A state that shares a prefix with a prompt."""

    tokens: list[int]  # with keys and values in the state
    state: bytes  # from llama.cpp


class KVStore:
    """The saved states of one model.

    Args:
        folder: of all models' states; created when the first one is saved.
        key: everything a state depends on: the model, llama.cpp's build, the type of the KV cache.
        cap_bytes: maximum size of all models' states together; the least recently used ones are deleted first.
    """

    def __init__(self, folder: Path, key: str, cap_bytes: int) -> None:
        self._root = folder
        self._folder = folder / hashlib.sha256(key.encode()).hexdigest()[:16]
        self._key = key.encode()
        self._cap = cap_bytes

    def find(self, prompt: list[int], *, longer_than: int) -> SavedState | None:
        """Return the state with the longest prefix of a prompt, if it is longer than this."""
        shared = [(common_prefix(self._tokens(path), prompt), path) for path in self._files()]
        for length, path in sorted(shared, reverse=True):
            if length <= longer_than:
                return None
            saved = self._read(path)
            if saved is not None:
                with contextlib.suppress(OSError):
                    os.utime(path)
                return saved
            _remove(path)
        return None

    def save(self, tokens: list[int], state: bytes | bytearray) -> int:
        """Write a state and delete those of its prefixes; return its bytes, 0 if it is larger than the limit.

        Raises:
            OSError: the file can't be written; no part of it remains.
        """
        ids = array("i", tokens).tobytes()
        checksum = _checksum(self._key, ids, state)
        head = _HEAD.pack(_MAGIC, _VERSION, len(self._key), len(tokens), len(state), checksum)
        size = len(head) + len(self._key) + len(ids) + len(state)
        if size > self._cap:
            return 0
        for path in self._files():
            saved = self._tokens(path)
            if len(saved) <= len(tokens) and common_prefix(saved, tokens) == len(saved):
                _remove(path)
        self._make_room(size)
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _write(self._folder / (hashlib.sha256(ids).hexdigest()[:32] + _SUFFIX), (head, self._key, ids, state))
        return size

    def background_saver(self) -> StateSaver:
        return StateSaver(self)

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob("*" + _SUFFIX))

    def _tokens(self, path: Path) -> list[int]:
        """Return the tokens of a file; none if it is not a state of this model."""
        with contextlib.suppress(OSError), path.open("rb") as file:
            parts = self._open(file)
            if parts is not None:
                return list(parts[1])
        return []

    def _open(self, file: BinaryIO) -> tuple[int, array[int]] | None:
        """Return checksum and tokens of a valid file, which is left open at its state; None for any other."""
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            return None
        magic, version, key_bytes, n_tokens, state_bytes, checksum = _HEAD.unpack(head)
        if (magic, version, key_bytes) != (_MAGIC, _VERSION, len(self._key)):
            return None
        if _HEAD.size + key_bytes + n_tokens * _TOKEN_BYTES + state_bytes != os.fstat(file.fileno()).st_size:
            return None
        if file.read(key_bytes) != self._key:
            return None
        tokens = array("i")
        tokens.frombytes(file.read(n_tokens * _TOKEN_BYTES))
        return checksum, tokens

    def _read(self, path: Path) -> SavedState | None:
        with contextlib.suppress(OSError), path.open("rb") as file:
            parts = self._open(file)
            if parts is not None:
                checksum, tokens = parts
                state = file.read()
                if _checksum(self._key, tokens.tobytes(), state) == checksum:
                    return SavedState(list(tokens), state)
        return None

    def _make_room(self, needed: int) -> None:
        """Delete the least recently used states of any model, and unfinished files of dead processes."""
        files: list[tuple[float, int, Path]] = []
        for path in self._root.glob("*/*"):
            if path.suffix == _UNFINISHED and not _is_alive(path):
                _remove(path)
            with contextlib.suppress(OSError):
                status = path.stat()
                files.append((status.st_mtime, status.st_size, path))
        used = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if used + needed <= self._cap:
                return
            _remove(path)
            used -= size


class StateSaver:
    """A background thread that writes states into a store, so that the loop does not wait for files."""

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self._saved = deque[list[int]](maxlen=_MAX_REMEMBERED)
        self._queue = Queue[tuple[list[int], bytearray]](_MAX_QUEUED)
        self._thread: threading.Thread | None = None

    def accepts(self, tokens: list[int]) -> bool:
        """Return whether enough of these tokens are not on disk yet, and the queue has space."""
        shared = max((common_prefix(saved, tokens) for saved in self._saved), default=0)
        return len(tokens) - shared >= _MIN_NEW and not self._queue.full()

    def save(self, tokens: list[int], state: bytearray) -> None:
        """Queue a state for writing; discard it if the queue is full."""
        self.note_saved(tokens)
        with contextlib.suppress(Full):
            self._queue.put_nowait((list(tokens), state))
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, name="state saver", daemon=True)
            self._thread.start()

    def note_saved(self, tokens: list[int]) -> None:
        """Remember that the state of these tokens is on disk."""
        self._saved.append(list(tokens))

    def wait(self) -> None:
        self._queue.join()

    def _write(self) -> None:
        while True:
            tokens, state = self._queue.get()
            with contextlib.suppress(OSError):
                self._store.save(tokens, state)
            self._queue.task_done()


def model_key(path: Path) -> str:
    """Return a key of a model file, made of its size and samples of its bytes, so that not all of it is read.

    Raises:
        OSError: the file can't be read.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        for start in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
            file.seek(start)
            digest.update(file.read(_SAMPLE_BYTES))
    return f"{size}-{digest.hexdigest()}"


def _checksum(*parts: bytes | bytearray) -> int:
    value = 0
    for part in parts:
        value = zlib.crc32(part, value)
    return value


def _write(target: Path, parts: Sequence[bytes | bytearray]) -> None:
    temporary = target.with_name(f"{target.stem}.{os.getpid()}{_UNFINISHED}")
    try:
        # Not fsynced: after a power loss the checksum is wrong, and the state is computed again.
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            for part in parts:
                file.write(part)
        temporary.replace(target)
    except BaseException:
        _remove(temporary)
        raise


def _is_alive(unfinished: Path) -> bool:
    """Return whether the process that writes this file is running."""
    number = unfinished.stem.rpartition(".")[2]
    try:
        os.kill(int(number), 0)
    except (ValueError, ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
