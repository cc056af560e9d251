"""Saved KV states on disk: a conversation or a long prompt that comes again is read in, not prefilled again.

Owns the files: format, lookup by token prefix, checks, cap and eviction. Must not know llama.cpp or the loop. A file
is only a cache: one that is damaged, or of another model or build, is as good as none, and may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from llmrun.engine.core.prefix import common_prefix

_MAGIC = b"LLMRUNKV"
_VERSION = 1
_HEAD = struct.Struct(
    "<8sIIQQI"
)  # magic, version, bytes of the key, tokens, bytes of the state, CRC-32 of what follows
_TOKEN_BYTES = array("i").itemsize
_SUFFIX, _UNFINISHED = ".kv", ".tmp"
_SAMPLE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class SavedState:
    """A saved state that begins like a prompt.

    Attributes:
        tokens: token ids whose keys and values it holds.
        state: what llama.cpp wrote for them.
    """

    tokens: list[int]
    state: bytes


class KVStore:
    """The saved states of one model.

    Args:
        folder: of all models' states; made when the first one is saved.
        key: names all that a state depends on: the model, llama.cpp's build, the type of the KV cache.
        cap_bytes: of all models' states together; those not used for longest go first.
    """

    def __init__(self, folder: Path, key: str, cap_bytes: int) -> None:
        self._root = folder
        self._folder = folder / hashlib.sha256(key.encode()).hexdigest()[:16]
        self._key = key.encode()
        self._cap = cap_bytes

    def find(self, prompt: list[int], *, longer_than: int) -> SavedState | None:
        """The saved state that shares most tokens with the beginning of a prompt.

        Args:
            prompt: token ids.
            longer_than: only one that shares more tokens than this.
        """
        shared = [(common_prefix(self._tokens(path), prompt), path) for path in self._files()]
        for length, path in sorted(shared, reverse=True):
            if length <= longer_than:
                return None
            saved = self._read(path)
            if saved is not None:
                _touch(path)
                return saved
            _remove(path)
        return None

    def save(self, tokens: list[int], state: bytes | bytearray) -> int:
        """Keep a state; those of its beginnings go. How many bytes were written: none where the cap is too small.

        Raises:
            OSError: it can't be written; nothing is left of it.
        """
        ids = array("i", tokens).tobytes()
        checksum = _checksum(self._key, ids, state)
        head = _HEAD.pack(_MAGIC, _VERSION, len(self._key), len(tokens), len(state), checksum)
        size = len(head) + len(self._key) + len(ids) + len(state)
        if size > self._cap:
            return 0
        for path in self._files():
            known = self._tokens(path)
            if len(known) <= len(tokens) and common_prefix(known, tokens) == len(known):
                _remove(path)
        self._make_room(size)
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _write(self._folder / (hashlib.sha256(ids).hexdigest()[:32] + _SUFFIX), (head, self._key, ids, state))
        return size

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob("*" + _SUFFIX))

    def _tokens(self, path: Path) -> list[int]:
        """The tokens of a file; none if it is not a state of this model."""
        with contextlib.suppress(OSError), path.open("rb") as file:
            parts = self._open(file)
            if parts is not None:
                return list(parts[1])
        return []

    def _open(self, file: BinaryIO) -> tuple[int, array[int]] | None:
        """The checksum and the tokens of a file that is ours and as long as it says; its state comes next."""
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
        """Delete the states, of any model, that were not used for longest, and what dead writers left behind."""
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


def model_key(path: Path) -> str:
    """What tells one model's file from another, without reading all of it: its size and samples of its bytes.

    Raises:
        OSError: it can't be read.
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
        # Not fsynced: after a power loss the checksum tells, and the state is computed again.
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            for part in parts:
                file.write(part)
        temporary.replace(target)
    except BaseException:
        _remove(temporary)
        raise


def _is_alive(unfinished: Path) -> bool:
    """Whether the process that writes this file still runs."""
    number = unfinished.stem.rpartition(".")[2]
    try:
        os.kill(int(number), 0)
    except (ValueError, ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _touch(path: Path) -> None:
    with contextlib.suppress(OSError):
        os.utime(path)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
