"""KV states on disk, so that a repeated conversation or long prompt needs no prefill, and their background writer.

Owns the files: format, lookup by token prefix, checks, size limit and eviction. Must not know llama.cpp or the loop. A
file is only a cache: a damaged one, or one of another model or build, is ignored, and any may be deleted at any time.

No state is copied in memory on its way: it is written into its file directly, and read by mapping the file, whose pages
the system can take back.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import re
import struct
import sys
import threading
import time
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from io import FileIO
from itertools import count
from pathlib import Path
from queue import Queue
from typing import NamedTuple

from llmrun.engine.core.policy import POLICY
from llmrun.engine.core.prefix import Checkpoint, Prefix, Salt, longest
from llmrun.engine.environment import lower_thread_priority
from llmrun.system import file_identity

_MAGIC = b"LLMRUNKV"
_VERSION = 6
# The end of a file. Before it come the bytes of the index; before those the content, which is the state, behind what
# llama.cpp writes before it, and the checkpoints.
# Magic, version, bytes of key and owner, tokens, checkpoints, bytes of the turns, first byte of the state, bytes of
# content.
_FIELDS = struct.Struct("<8sIIIQQQQQ")
_CHECKSUMS = struct.Struct("<II")  # CRC-32 of fields and index, and of these and the content
_END_BYTES = _FIELDS.size + _CHECKSUMS.size
_CHECKPOINT = struct.Struct("<QQ")  # tokens, bytes
_TOKEN_BYTES = array("i").itemsize
_SUFFIX, _UNFINISHED = ".kv", ".tmp"
_PIECE_BYTES = 1 << 22
_HASHES = "hashes"  # folder of the model files' hashes
_NEW = "new"  # folder of unfinished states, whose model may not be hashed yet
_MAX_HASHES = 1000
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MAX_AHEAD = 64  # mapped files, each of which has a descriptor

Buffer = bytes | bytearray | memoryview
StateSource = Buffer | Callable[[Path], int | None]
"""A state, or what writes it into a file and returns its first byte there: it ends with the file. None: it can't."""


class StateFile(NamedTuple):
    """A file without its content; it may not be among the saved ones yet."""

    path: Path
    owner: str  # only requests of theirs find the state
    tokens: array[int]  # with keys and values in the state
    checkpoints: tuple[tuple[int, int], ...]  # numbers of tokens, and bytes
    start: int  # first byte of the state
    n_bytes: int  # of the content
    turns: bytes = b""  # of the conversation, see KVStore
    checksums: tuple[int, int] = (0, 0)

    @property
    def parts(self) -> tuple[bytes, bytes, bytes, bytes]:
        return (
            self.owner.encode(),
            self.tokens.tobytes(),
            b"".join(_CHECKPOINT.pack(*checkpoint) for checkpoint in self.checkpoints),
            self.turns,
        )

    @property
    def prefix(self) -> Prefix:
        """The prefix, without its state and those of its checkpoints."""
        checkpoints = [Checkpoint(length, bytearray(), is_planned=True) for length, _ in self.checkpoints]
        n_tokens = len(self.tokens)
        return Prefix(self.tokens, Salt(self.owner), n_prompt=n_tokens, checkpoints=checkpoints, n_saved=n_tokens)

    def fields(self, key: bytes) -> bytes:
        counts = len(key), len(self.owner.encode()), len(self.tokens), len(self.checkpoints), len(self.turns)
        return _FIELDS.pack(_MAGIC, _VERSION, *counts, self.start, self.n_bytes)


_Identity = tuple[str, int, int]  # name, inode and bytes of a state's file: a file is replaced, never changed


class KVStore:
    """The saved states of one model, for several threads.

    Args:
        folder: of all models' states; created when the first one is saved.
        key: everything a state depends on, see StateKey.
        cap_bytes: maximum size of all models' states together; the least recently used ones are deleted first.

    Attributes:
        turns_of: returns what is to be saved with the state of these tokens about the turns of their conversation.
    """

    def __init__(self, folder: Path, key: str | StateKey, cap_bytes: int) -> None:
        self.turns_of: Callable[[list[int]], bytes] = lambda tokens: b""
        self._root, self._cap = folder, cap_bytes
        self._state_key = key if isinstance(key, StateKey) else StateKey(folder, (), key)
        self._folder, self._key = folder, b""
        self._lock = threading.Lock()  # of what follows
        self._opened: dict[_Identity, tuple[Prefix, StateFile] | None] = {}  # in the folder
        self._ahead: dict[Prefix, Prefix] = {}  # one of a file -> with its state, checked before it is asked for
        self._numbers = count()
        self._is_known = False
        self._is_open()

    def _is_open(self) -> bool:
        """Return whether the key is known; before, the model has no states, since each was saved under its key."""
        if not self._is_known and (key := self._state_key.known()) is not None:
            self._folder = self._root / hashlib.sha256(key.encode()).hexdigest()[:16]
            self._key, self._is_known = key.encode(), True
        return self._is_known

    def find(self, prompt: list[int], *, longer_than: int, cuts: bool = True, owner: str = "") -> Prefix | None:
        """Return the owner's state with the longest prefix of a prompt, if it is longer than this.

        Args:
            cuts: a state can be cut to any length, not only to its checkpoints.
        """
        files = self._files()
        while True:
            found, length = _best(files, prompt, owner, cuts=cuts)
            if length <= longer_than:
                return None
            path = files.pop(found).path
            with self._lock:
                saved = self._ahead.pop(found, None)
            saved = saved or self._read(path)
            if saved is not None:
                _mark_used(path, self._root.glob("*/*" + _SUFFIX))
                return saved
            _remove(path)

    def read_ahead(self, prompt: list[int], *, longer_than: int, cuts: bool = True, owner: str = "") -> None:
        """Read and check the file of the state that find() will return, in a thread that holds nothing up."""
        files = self._files()
        found, length = _best(files, prompt, owner, cuts=cuts)
        is_wanted = length > longer_than and found not in self._ahead
        if is_wanted and (saved := self._read(files[found].path)) is not None:
            with self._lock:
                self._ahead[found] = saved
                while len(self._ahead) > _MAX_AHEAD:
                    del self._ahead[next(iter(self._ahead))]

    def forget_ahead(self) -> None:
        """Free the states that nobody asked for, since their requests were cancelled."""
        with self._lock:
            self._ahead.clear()

    def n_saved(self, prefix: Prefix, unfinished: Iterable[StateFile] = ()) -> int:
        """Return how many of a prefix's first tokens are in its owner's files, or in unfinished files."""
        saved = [*self._files(), *(file.prefix for file in unfinished)]
        return longest(saved, prefix.tokens, Salt(prefix.salt.owner))[1]

    def fits(self, n_bytes: int) -> bool:
        """Return whether a state of this size will be kept."""
        return n_bytes <= self._cap

    def save(
        self,
        tokens: Sequence[int],
        state: StateSource,
        checkpoints: Sequence[Checkpoint] = (),
        *,
        owner: str = "",
    ) -> int:
        """Write a state as write() and finish() do; return its bytes, 0 if it can't be saved or is over the limit."""
        unfinished = self.write(tokens, state, checkpoints, owner=owner)
        return self.finish(unfinished) if unfinished is not None else 0

    def write(
        self,
        tokens: Sequence[int],
        state: StateSource,
        checkpoints: Sequence[Checkpoint] = (),
        *,
        owner: str = "",
    ) -> StateFile | None:
        """Write an owner's state into a file; return None if it can't be saved.

        Raises:
            OSError: the file can't be written; no part of it remains.
        """
        folder = self._root / _NEW
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = folder / f"{next(self._numbers)}.{threading.get_ident()}.{os.getpid()}{_UNFINISHED}"
        with _removed_on_failure(path):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))  # others may not read it
            start = state(path) if callable(state) else path.write_bytes(state) - len(state)
            if start is None:
                _remove(path)
                return None
            with path.open("ab") as file:
                file.writelines(checkpoint.state for checkpoint in checkpoints)
            sizes = tuple((checkpoint.length, len(checkpoint.state)) for checkpoint in checkpoints)
            return StateFile(path, owner, array("i", tokens), sizes, start, path.stat().st_size)

    def finish(self, unfinished: StateFile) -> int:
        """Make a written state a saved one and delete those of its prefixes; return its bytes, 0 if over the limit.

        The first time, the model's files are hashed, which takes a second for each few gigabytes.

        Raises:
            OSError: the file can't be written; no part of it remains. Or a model file was changed since it was loaded.
        """
        path, owner, tokens, sizes, _, n_bytes = unfinished[:6]
        with _removed_on_failure(path):
            self._state_key.compute()
            self._is_open()
            written = unfinished._replace(turns=self.turns_of(list(tokens)))
            described = self._key, *written.parts
            size = n_bytes + sum(map(len, described)) + _END_BYTES
            if not self.fits(size):
                _remove(path)
                return 0
            with path.open("rb", buffering=0) as file:
                checksum = _checksum(written.fields(self._key), *described)
                of_all = _checksum_of_file(file, n_bytes, checksum)
            if of_all is None:
                raise OSError(f"{path} was changed")
            with path.open("ab") as file:
                file.writelines((*described, written.fields(self._key), _CHECKSUMS.pack(checksum, of_all)))
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            before = self._files()
            # Not fsynced: after a power loss the checksum is wrong, and the state is computed again.
            target = self._folder / (hashlib.sha256(b"|".join(described[1:3])).hexdigest()[:32] + _SUFFIX)
            path.replace(target)
        _mark_used(target, self._root.glob("*/*" + _SUFFIX))
        kept = {length for length, _ in sizes} | {len(tokens)}
        for found in before.values():
            is_prefix = found.owner == owner and found.tokens == tokens[: len(found.tokens)]
            if is_prefix and found.path != target and (not sizes or len(found.tokens) in kept):
                _remove(found.path)
        self._remove_beyond_limit(target)
        return size

    def saved_turns(self) -> Iterator[tuple[list[int], bytes]]:
        """Yield the tokens of each state and what turns_of() returned for them, the least recently used one first."""
        for file in sorted(self._files().values(), key=lambda file: _used_at(file.path)):
            yield list(file.tokens), file.turns

    def background_saver(self, min_new: int = POLICY.min_saved) -> StateSaver:
        return StateSaver(self, min_new)

    def _files(self) -> dict[Prefix, StateFile]:
        """Return this model's files; only new ones are opened."""
        with self._lock:
            before, self._opened = self._opened, {}
            for entry in sorted(self._entries(), key=lambda entry: entry.name):
                with contextlib.suppress(OSError):
                    path, status = Path(entry.path), entry.stat()
                    identity = entry.name, status.st_ino, status.st_size
                    if identity in before:
                        self._opened[identity] = before[identity]
                        continue
                    with path.open("rb", buffering=0) as file:
                        saved = self._open(path, file)
                    self._opened[identity] = None if saved is None else (saved.prefix, saved)
            return dict(filter(None, self._opened.values()))

    def _entries(self) -> list[os.DirEntry[str]]:
        if not self._is_open():
            return []
        with contextlib.suppress(OSError), os.scandir(self._folder) as entries:
            return [entry for entry in entries if entry.name.endswith(_SUFFIX)]
        return []

    def _open(self, path: Path, file: FileIO) -> StateFile | None:
        """Return a valid file without its content, None for any other."""
        size = os.fstat(file.fileno()).st_size
        if size < _END_BYTES:
            return None
        file.seek(size - _END_BYTES)
        end = _next_bytes(file, _END_BYTES)
        magic, version, key_bytes, owner_bytes, n_tokens, n_checkpoints, n_turns, start, n_bytes = _FIELDS.unpack_from(
            end
        )
        if (magic, version, key_bytes) != (_MAGIC, _VERSION, len(self._key)):
            return None
        index_bytes = key_bytes + owner_bytes + n_tokens * _TOKEN_BYTES + n_checkpoints * _CHECKPOINT.size + n_turns
        if n_bytes + index_bytes + _END_BYTES != size:
            return None
        file.seek(n_bytes)
        if _next_bytes(file, key_bytes) != self._key:
            return None
        owner, tokens = _next_bytes(file, owner_bytes).decode(errors="replace"), array("i")
        tokens.frombytes(_next_bytes(file, n_tokens * _TOKEN_BYTES))
        sizes = tuple(_CHECKPOINT.iter_unpack(_next_bytes(file, n_checkpoints * _CHECKPOINT.size)))
        checksums = _CHECKSUMS.unpack_from(end, _FIELDS.size)
        saved = StateFile(path, owner, tokens, sizes, start, n_bytes, _next_bytes(file, n_turns), checksums)
        is_whole = _checksum(saved.fields(self._key), self._key, *saved.parts) == checksums[0]
        return saved if is_whole and start + sum(size for _, size in sizes) <= n_bytes else None

    def _read(self, path: Path) -> Prefix | None:
        """Check a file and map its state, in memory that is private and can be written.

        The pages are the file's: the system can take them back.
        """
        with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:
            saved = self._open(path, file)
            if saved is None or _checksum_of_file(file, saved.n_bytes, saved.checksums[0]) != saved.checksums[1]:
                return None
            content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))[: saved.n_bytes]
            end, checkpoints = saved.n_bytes, list[Checkpoint]()
            for length, size in reversed(saved.checkpoints):
                checkpoints.insert(0, Checkpoint(length, content[end - size : end], is_planned=True))
                end -= size
            state = content[saved.start : end]
            return replace(saved.prefix, tokens=list(saved.tokens), state=state, checkpoints=checkpoints)
        return None

    def _remove_beyond_limit(self, newest: Path) -> None:
        """Delete the least recently used other states of any model, and unfinished files of dead processes."""
        files: list[tuple[int, int, Path]] = []
        for path in self._root.glob("*/*"):
            if path.suffix == _UNFINISHED:
                if not _is_alive(path):
                    _remove(path)
            elif path.parent.name != _HASHES:  # without its hash, a model has no states
                with contextlib.suppress(OSError):
                    status = path.stat()
                    files.append((status.st_mtime_ns, status.st_size, path))
        used = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if used <= self._cap:
                return
            if path != newest:
                _remove(path)
                used -= size


class StateKey:
    """Everything that a model's states depend on: hashes of all its files, and whatever else changes their meaning.

    Hashing takes seconds, so it waits for the first state to save, and is remembered by the identity of the file. A
    file of the hub's cache has its hash as its name.

    Args:
        folder: of all states, which remembers hashes too.
        files: the paths of the model's and its adapters' files, and the file_identity() of each when it was loaded.
        rest: the engine's build, types, adapter scales and the like.
    """

    def __init__(self, folder: Path, files: Iterable[tuple[str, str]], rest: str) -> None:
        self._folder, self._rest = folder / _HASHES, rest
        self._files = [(Path(path), identity) for path, identity in files]
        self._hashes: dict[str, str] = {}  # by identity

    def known(self) -> str | None:
        """Return the key; None if a file was never hashed."""
        hashes = [self._known(path, identity) for path, identity in self._files]
        return None if None in hashes else " ".join((*filter(None, hashes), self._rest))

    def compute(self) -> None:
        """Hash the files that were never hashed, and check that the others are those that were loaded.

        Raises:
            OSError: a file can't be read, or was changed since it was loaded.
        """
        for path, identity in self._files:
            _check_identity(path, identity)
            if self._known(path, identity) is not None:
                continue
            digest = hashlib.sha256()
            with path.open("rb") as file:
                while piece := file.read(_PIECE_BYTES):
                    digest.update(piece)
            _check_identity(path, identity)
            self._hashes[identity] = digest.hexdigest()
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with contextlib.suppress(OSError):
                remembered = self._remembered(identity)
                _write(remembered, digest.hexdigest().encode())
                _mark_used(remembered, self._folder.glob("*" + _SUFFIX))
                for old in sorted(self._folder.glob("*" + _SUFFIX), key=_used_at)[:-_MAX_HASHES]:
                    _remove(old)

    def _known(self, path: Path, identity: str) -> str | None:
        name = path.resolve().name
        if _SHA256.fullmatch(name):
            return name
        if identity not in self._hashes:
            with contextlib.suppress(OSError, ValueError):
                text = self._remembered(identity).read_text(encoding="ascii")
                if _SHA256.fullmatch(text):
                    self._hashes[identity] = text
                    _mark_used(self._remembered(identity), self._folder.glob("*" + _SUFFIX))
        return self._hashes.get(identity)

    def _remembered(self, identity: str) -> Path:
        return self._folder / (hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()[:32] + _SUFFIX)


class StateSaver:
    """A background thread that finishes the states of a store: it hashes model files and computes checksums.

    Args:
        min_new: tokens of a prefix that are not on disk yet, which make saving it worthwhile.
    """

    def __init__(self, store: KVStore, min_new: int) -> None:
        self._store, self._min_new = store, min_new
        self._queue = Queue[StateFile]()
        self._unfinished: list[StateFile] = []  # in the queue, or being finished
        self._thread: threading.Thread | None = None
        self._has_failed = False

    def accepts(self, prefix: Prefix, n_bytes: int, most_saved: float = 1.0) -> bool:
        """Return whether enough of a prefix has not been on disk yet, and a state of this size will be kept.

        Args:
            most_saved: share of the tokens that may be on disk.
        """
        n_tokens, unfinished = len(prefix.tokens), self._unfinished[:]
        n_saved = max(prefix.n_saved, self._store.n_saved(prefix, unfinished))
        is_new = n_tokens - n_saved >= self._min_new and n_saved <= most_saved * n_tokens
        return is_new and self._store.fits(sum(file.n_bytes for file in unfinished) + n_bytes)

    def save(
        self,
        tokens: Sequence[int],
        state: StateSource,
        checkpoints: Sequence[Checkpoint] = (),
        *,
        owner: str = "",
    ) -> bool:
        """Write a state now, and queue it to be finished; return False if it can't be written."""
        try:
            unfinished = self._store.write(tokens, state, checkpoints, owner=owner)
        except OSError as error:
            self._report(error)
            return False
        if unfinished is None:
            return False
        self._unfinished.append(unfinished)
        self._queue.put(unfinished)
        if self._thread is None:
            self._thread = threading.Thread(target=self._finish, name="state saver", daemon=True)
            self._thread.start()
        return True

    def wait(self) -> None:
        self._queue.join()

    def _finish(self) -> None:
        lower_thread_priority()  # hashing a model's files takes seconds
        while True:
            unfinished = self._queue.get()
            try:
                self._store.finish(unfinished)
            except OSError as error:
                self._report(error)
            except MemoryError:
                pass  # the next one may be smaller
            self._unfinished.remove(unfinished)
            self._queue.task_done()

    def _report(self, error: OSError) -> None:
        if not self._has_failed:
            self._has_failed = True
            sys.stderr.write(f"llmrun: a KV state was not saved; older ones stay: {error}\n")


def _best(files: Iterable[Prefix], prompt: list[int], owner: str, *, cuts: bool) -> tuple[Prefix, int]:
    """Return the owner's file with the longest prefix of a prompt, and how long it is."""
    return longest(files, prompt, Salt(owner), partial(Prefix.reach, cuts=cuts))


def _check_identity(path: Path, identity: str) -> None:
    if file_identity(path) != identity:
        raise OSError(f"{path} was changed since it was loaded")


def _next_bytes(file: FileIO, n_bytes: int) -> bytes:
    """Read a file's next bytes, fewer at its end."""
    pieces = list[bytes]()
    while n_bytes and (piece := file.read(n_bytes)):
        pieces.append(piece)
        n_bytes -= len(piece)
    return b"".join(pieces)


def _mark_used(path: Path, others: Iterable[Path]) -> None:
    """Make a file the last used one of all, also after the clock was set back."""
    newest = max((_used_at(other) for other in others if other != path), default=0)
    now = max(time.time_ns(), newest + 1)
    with contextlib.suppress(OSError):
        os.utime(path, ns=(now, now))


def _used_at(path: Path) -> int:
    """Return when a file was used, in nanoseconds; 0 if it is gone."""
    with contextlib.suppress(OSError):
        return path.stat().st_mtime_ns
    return 0


def _checksum(*parts: bytes) -> int:
    value = 0
    for part in parts:
        value = zlib.crc32(part, value)
    return value


def _checksum_of_file(file: FileIO, n_bytes: int, value: int) -> int | None:
    """Return the CRC-32 of a file's first bytes after another one; None if the file is shorter."""
    file.seek(0)
    buffer = memoryview(bytearray(min(_PIECE_BYTES, n_bytes)))
    while n_bytes:
        n_read = file.readinto(buffer[:n_bytes])
        if not n_read:
            return None
        value = zlib.crc32(buffer[:n_read], value)
        n_bytes -= n_read
    return value


@contextlib.contextmanager
def _removed_on_failure(path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        _remove(path)
        raise


def _write(target: Path, content: bytes) -> None:
    temporary = target.with_name(f"{target.stem}.{threading.get_ident()}.{os.getpid()}{_UNFINISHED}")
    with _removed_on_failure(temporary):
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(content)
        temporary.replace(target)


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
