"""KV states on disk, so that a repeated conversation or long prompt needs no prefill, and their background writer.

Owns the files: format, lookup by token prefix, checks, size limit and eviction. Must not know llama.cpp or the loop. A
file is only a cache: a damaged one, or one of another model or build, is ignored, and any may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import struct
import threading
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path
from queue import Full, Queue
from typing import BinaryIO, NamedTuple

from llmrun.engine.core.prefix import common_prefix
from llmrun.engine.environment import lower_thread_priority
from llmrun.system import file_identity

_MAGIC = b"LLMRUNKV"
_VERSION = 5
# Magic, version, bytes of key and owner, tokens, checkpoints, bytes of the turns, bytes of state and checkpoints,
# CRC-32 of what stands before the state, CRC-32 of all.
_HEAD = struct.Struct("<8sIIIQQQQII")
_CHECKPOINT = struct.Struct("<QQ")  # tokens, bytes
_TOKEN_BYTES = array("i").itemsize
_SUFFIX, _UNFINISHED = ".kv", ".tmp"
_PIECE_BYTES = 1 << 22
_HASHES = "hashes"  # folder of the model files' hashes
_MAX_HASHES = 1000
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MIN_NEW = 256  # tokens that are not on disk yet, for the saver
_MAX_REMEMBERED = 64  # saved states
_MAX_QUEUED = 2  # states: they take as much memory as their cells
_MAX_AHEAD = 2


@dataclass(frozen=True, slots=True)
class SavedState:
    """A state that shares a prefix with a prompt."""

    tokens: list[int]  # with keys and values in the state
    state: bytes | bytearray  # from llama.cpp
    checkpoints: tuple[tuple[int, bytearray], ...] = ()  # numbers of first tokens, and the memory that can't be cut


class _Index(NamedTuple):
    """The part of a file before its state."""

    owner: str  # only requests of theirs find the state
    tokens: array[int]
    checkpoints: tuple[tuple[int, int], ...]  # numbers of tokens, and bytes
    turns: bytes  # of the conversation, see KVStore
    checksum: int

    @property
    def head(self) -> tuple[bytes, bytes, bytes, bytes]:
        return (
            self.owner.encode(),
            self.tokens.tobytes(),
            b"".join(_CHECKPOINT.pack(*checkpoint) for checkpoint in self.checkpoints),
            self.turns,
        )

    def reach(self, prompt: array[int], *, cuts: bool) -> int:
        """Return how many first tokens of a prompt the state is of use for."""
        shared = common_prefix(self.tokens, prompt)
        if cuts or shared == len(self.tokens):
            return shared
        return max((length for length, _ in self.checkpoints if length <= shared), default=0)


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
        self._opened: dict[_Identity, _Index | None] = {}  # of the files in the folder
        self._ahead: dict[_Identity, SavedState] = {}  # read before they are asked for
        self._is_known = False
        self._is_open()

    def _is_open(self) -> bool:
        """Return whether the key is known; before, the model has no states, since each was saved under its key."""
        if not self._is_known and (key := self._state_key.known()) is not None:
            self._folder = self._root / hashlib.sha256(key.encode()).hexdigest()[:16]
            self._key, self._is_known = key.encode(), True
        return self._is_known

    def find(self, prompt: list[int], *, longer_than: int, cuts: bool = True, owner: str = "") -> SavedState | None:
        """Return the owner's state with the longest prefix of a prompt, if it is longer than this.

        Args:
            cuts: a state can be cut to any length, not only to its checkpoints.
        """
        for path, identity in self._candidates(prompt, longer_than, cuts=cuts, owner=owner):
            with self._lock:
                saved = self._ahead.pop(identity, None)
            saved = saved or self._read(path)
            if saved is not None:
                with contextlib.suppress(OSError):
                    os.utime(path)
                return saved
            _remove(path)
        return None

    def read_ahead(self, prompt: list[int], *, longer_than: int, cuts: bool = True, owner: str = "") -> None:
        """Read the state that find() will return, in a thread that holds nothing up."""
        for path, identity in self._candidates(prompt, longer_than, cuts=cuts, owner=owner):
            if identity not in self._ahead and (saved := self._read(path)) is not None:
                with self._lock:
                    self._ahead[identity] = saved
                    while len(self._ahead) > _MAX_AHEAD:
                        del self._ahead[next(iter(self._ahead))]
            return

    def forget_ahead(self) -> None:
        """Free the states that nobody asked for, since their requests were cancelled."""
        with self._lock:
            self._ahead.clear()

    def _candidates(
        self, prompt: list[int], longer_than: int, *, cuts: bool, owner: str
    ) -> list[tuple[Path, _Identity]]:
        """Return the owner's files with more than these first tokens of a prompt, the longest first."""
        wanted, owned = array("i", prompt), (each for each in self._indexes() if each[2].owner == owner)
        reach = [(index.reach(wanted, cuts=cuts), path, identity) for path, identity, index in owned]
        return [(path, identity) for length, path, identity in sorted(reach, reverse=True) if length > longer_than]

    def save(
        self,
        tokens: list[int],
        state: bytes | bytearray,
        checkpoints: Sequence[tuple[int, bytes | bytearray]] = (),
        *,
        owner: str = "",
    ) -> int:
        """Write an owner's state and delete those of its prefixes; return its bytes, 0 if it is larger than the limit.

        The first time, the model's files are hashed, which takes a second for each few gigabytes.

        Raises:
            OSError: the file can't be written; no part of it remains. Or a model file was changed since it was loaded.
        """
        self._state_key.compute()
        self._is_open()
        sizes = tuple((length, len(state_bytes)) for length, state_bytes in checkpoints)
        whole = _Index(owner, array("i", tokens), sizes, self.turns_of(tokens), 0)
        described = self._key, *whole.head
        content = state, *(each for _, each in checkpoints)
        checksums, n_bytes = (_checksum(*described), _checksum(*described, *content)), sum(map(len, content))
        head = _HEAD.pack(
            _MAGIC,
            _VERSION,
            len(self._key),
            len(described[1]),
            len(tokens),
            len(sizes),
            len(described[-1]),
            n_bytes,
            *checksums,
        )
        size = len(head) + sum(map(len, described)) + n_bytes
        if size > self._cap:
            return 0
        kept = {length for length, _ in sizes} | {len(tokens)}
        for path, _, index in self._indexes():
            is_prefix = index.owner == owner and common_prefix(index.tokens, whole.tokens) == len(index.tokens)
            if is_prefix and (not sizes or len(index.tokens) in kept):
                _remove(path)
        self._make_room(size)
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self._folder / (hashlib.sha256(b"|".join(described[1:3])).hexdigest()[:32] + _SUFFIX)
        _write(path, (head, *described, *content))
        return size

    def saved_turns(self) -> Iterator[tuple[list[int], bytes]]:
        """Yield the tokens of each state and what turns_of() returned for them, the least recently used one first."""
        for _, _, index in sorted(self._indexes(), key=lambda entry: _used_at(entry[0])):
            yield list(index.tokens), index.turns

    def background_saver(self) -> StateSaver:
        return StateSaver(self)

    def _indexes(self) -> list[tuple[Path, _Identity, _Index]]:
        """Return this model's files and their indexes; only new files are opened."""
        with self._lock:
            before, self._opened, found = self._opened, {}, []
            for entry in sorted(self._entries(), key=lambda entry: entry.name):
                with contextlib.suppress(OSError):
                    path, status = Path(entry.path), entry.stat()
                    identity = entry.name, status.st_ino, status.st_size
                    if identity in before:
                        index = before[identity]
                    else:
                        with path.open("rb") as file:
                            index = self._open(file)
                    self._opened[identity] = index
                    if index is not None:
                        found.append((path, identity, index))
            return found

    def _entries(self) -> list[os.DirEntry[str]]:
        if not self._is_open():
            return []
        with contextlib.suppress(OSError), os.scandir(self._folder) as entries:
            return [entry for entry in entries if entry.name.endswith(_SUFFIX)]
        return []

    def _open(self, file: BinaryIO | FileIO) -> _Index | None:
        """Return the index of a valid file, which is left open at its state; None for any other."""
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            return None
        magic, version, key_bytes, owner_bytes, n_tokens, n_checkpoints, n_turns, n_bytes, of_index, checksum = (
            _HEAD.unpack(head)
        )
        if (magic, version, key_bytes) != (_MAGIC, _VERSION, len(self._key)):
            return None
        index_bytes = key_bytes + owner_bytes + n_tokens * _TOKEN_BYTES + n_checkpoints * _CHECKPOINT.size + n_turns
        if _HEAD.size + index_bytes + n_bytes != os.fstat(file.fileno()).st_size:
            return None
        if file.read(key_bytes) != self._key:
            return None
        owner, tokens = file.read(owner_bytes).decode(errors="replace"), array("i")
        tokens.frombytes(file.read(n_tokens * _TOKEN_BYTES))
        checkpoints = _CHECKPOINT.iter_unpack(file.read(n_checkpoints * _CHECKPOINT.size))
        sizes = tuple((length, size) for length, size in checkpoints)
        index = _Index(owner, tokens, sizes, file.read(n_turns), checksum)
        return index if _checksum(self._key, *index.head) == of_index else None

    def _read(self, path: Path) -> SavedState | None:
        with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:
            index = self._open(file)
            if index is None:
                return None
            n_bytes = os.fstat(file.fileno()).st_size - file.tell()
            sizes = [size for _, size in index.checkpoints]
            if n_bytes < sum(sizes):
                return None
            contents = [bytearray(size) for size in (n_bytes - sum(sizes), *sizes)]
            is_whole = all(map(partial(_fill, file), contents))
            if is_whole and _checksum(self._key, *index.head, *contents) == index.checksum:
                lengths = (length for length, _ in index.checkpoints)
                return SavedState(list(index.tokens), contents[0], tuple(zip(lengths, contents[1:], strict=True)))
        return None

    def _make_room(self, needed: int) -> None:
        """Delete the least recently used states of any model, and unfinished files of dead processes."""
        files: list[tuple[float, int, Path]] = []
        for path in self._root.glob("*/*"):
            if path.suffix == _UNFINISHED and not _is_alive(path):
                _remove(path)
            if path.parent.name == _HASHES:  # without its hash, a model has no states
                continue
            with contextlib.suppress(OSError):
                status = path.stat()
                files.append((status.st_mtime, status.st_size, path))
        used = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if used + needed <= self._cap:
                return
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
        """Hash the files that were never hashed.

        Raises:
            OSError: a file can't be read, or was changed since it was loaded.
        """
        for path, identity in self._files:
            if self._known(path, identity) is not None:
                continue
            digest = hashlib.sha256()
            with path.open("rb") as file:
                while piece := file.read(_PIECE_BYTES):
                    digest.update(piece)
            if file_identity(path) != identity:
                raise OSError(f"{path} was changed since it was loaded")
            self._hashes[identity] = digest.hexdigest()
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with contextlib.suppress(OSError):
                _write(self._remembered(identity), (digest.hexdigest().encode(),))
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
                    os.utime(self._remembered(identity))
        return self._hashes.get(identity)

    def _remembered(self, identity: str) -> Path:
        return self._folder / (hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()[:32] + _SUFFIX)


class StateSaver:
    """A background thread that writes states into a store, so that the loop does not wait for files."""

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self._saved = deque[tuple[str, list[int]]](maxlen=_MAX_REMEMBERED)  # owners, and tokens
        self._queue = Queue[Callable[[], int]](_MAX_QUEUED)
        self._thread: threading.Thread | None = None

    def accepts(self, tokens: list[int], most_saved: float = 1.0, *, owner: str = "") -> bool:
        """Return whether enough of these tokens of an owner are not on disk yet, and the queue has space.

        Args:
            most_saved: share of the tokens that may be on disk.
        """
        own = (saved for each, saved in self._saved if each == owner)
        shared = max((common_prefix(saved, tokens) for saved in own), default=0)
        is_new = len(tokens) - shared >= _MIN_NEW and shared <= most_saved * len(tokens)
        return is_new and not self._queue.full()

    def save(
        self,
        tokens: list[int],
        state: bytearray,
        checkpoints: Sequence[tuple[int, bytearray]] = (),
        *,
        owner: str = "",
    ) -> None:
        """Queue a state for writing; discard it if the queue is full."""
        self.note_saved(tokens, owner=owner)
        with contextlib.suppress(Full):
            self._queue.put_nowait(partial(self._store.save, list(tokens), state, checkpoints, owner=owner))
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, name="state saver", daemon=True)
            self._thread.start()

    def note_saved(self, tokens: list[int], *, owner: str = "") -> None:
        """Remember that the state of these tokens is on disk."""
        self._saved.append((owner, list(tokens)))

    def wait(self) -> None:
        self._queue.join()

    def _write(self) -> None:
        lower_thread_priority()  # hashing a model's files takes seconds
        while True:
            save = self._queue.get()
            with contextlib.suppress(OSError, MemoryError):  # the next one may be smaller
                save()
            del save  # with its state, before the thread waits for the next one
            self._queue.task_done()


def _fill(file: FileIO, content: bytearray) -> bool:
    """Read a file's next bytes; return False if it ends before."""
    view = memoryview(content)
    while view and (n_bytes := file.readinto(view)):
        view = view[n_bytes:]
    return not view


def _used_at(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _checksum(*parts: bytes | bytearray) -> int:
    value = 0
    for part in parts:
        value = zlib.crc32(part, value)
    return value


def _write(target: Path, parts: Sequence[bytes | bytearray]) -> None:
    temporary = target.with_name(f"{target.stem}.{threading.get_ident()}.{os.getpid()}{_UNFINISHED}")
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
