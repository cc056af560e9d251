"""What a disk may hold after a power failure: every write and sync of SQLite is recorded, and replayed with losses.

A VFS of SQLite's that does what the default one does, and writes down what it was asked. It is made with ctypes from
the default one's own structures: xOpen and xDelete are replaced, and in each opened file xWrite, xTruncate and xSync
(https://www.sqlite.org/c3ref/vfs.html, https://www.sqlite.org/c3ref/io_methods.html).
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_POINTERS = 21  # of sqlite3_vfs, in words; its first two words hold three ints
_METHODS = 19  # of sqlite3_io_methods, in words; its first word is the version
_NAME, _OPEN, _DELETE = 3, 5, 6
_WRITE, _TRUNCATE, _SYNC = 3, 4, 5
_SECTOR = 512

_OPEN_TYPE = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p
)
_DELETE_TYPE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
_WRITE_TYPE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
_TRUNCATE_TYPE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int64)
_SYNC_TYPE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int)


@dataclass(frozen=True, slots=True)
class Operation:
    """What SQLite asked for. kind is "write", "truncate", "sync" or "delete", or a mark of the test's own."""

    kind: str
    name: str = ""
    offset: int = 0
    data: bytes = b""


@dataclass
class Recorder:
    """Operations in their order, on files named without their folder."""

    operations: list[Operation] = field(default_factory=list)

    def mark(self, kind: str) -> None:
        """Note that the program said something to its user here."""
        self.operations.append(Operation(kind))


@contextmanager
def recording() -> Iterator[Recorder]:
    """Inside, every database that is opened is recorded.

    Raises:
        OSError, AttributeError: this Python's SQLite is built in, and can't be reached.
    """
    import _sqlite3

    library = ctypes.CDLL(_sqlite3.__file__)
    library.sqlite3_vfs_find.restype = ctypes.c_void_p
    library.sqlite3_vfs_find.argtypes = [ctypes.c_char_p]
    for function in (library.sqlite3_vfs_register, library.sqlite3_vfs_unregister):
        function.restype = ctypes.c_int
    default = library.sqlite3_vfs_find(None)
    recorder = Recorder()
    shim, keep = _shim(default, recorder)
    library.sqlite3_vfs_register(ctypes.byref(shim), 1)
    try:
        yield recorder
    finally:
        library.sqlite3_vfs_unregister(ctypes.byref(shim))
        library.sqlite3_vfs_register(ctypes.c_void_p(default), 1)
        del keep


def _shim(default: int, recorder: Recorder) -> tuple[Any, list[Any]]:
    """A copy of the default VFS that records, and what has to live as long."""
    shim = (ctypes.c_void_p * _POINTERS).from_buffer_copy(ctypes.string_at(default, 8 * _POINTERS))
    name = ctypes.create_string_buffer(b"recording")
    real_open, real_delete = _OPEN_TYPE(shim[_OPEN]), _DELETE_TYPE(shim[_DELETE])
    files: dict[int, str] = {}
    tables: dict[int, Any] = {}
    keep: list[Any] = [name, tables]

    def opened(vfs: int, path: int | None, file: int, flags: int, out: int) -> int:
        result: int = real_open(vfs, path, file, flags, out)
        methods = ctypes.c_void_p.from_address(file)
        if result == 0 and methods.value and path:
            files[file] = Path(ctypes.string_at(path).decode()).name
            if methods.value not in tables:
                tables[methods.value] = _methods(methods.value, files, recorder, keep)
            methods.value = ctypes.addressof(tables[methods.value])
        return result

    def deleted(vfs: int, path: int, sync: int) -> int:
        result: int = real_delete(vfs, path, sync)
        if result == 0:
            recorder.operations.append(Operation("delete", Path(ctypes.string_at(path).decode()).name))
        return result

    callbacks = (_OPEN_TYPE(opened), _DELETE_TYPE(deleted))
    keep.append(callbacks)
    shim[2] = None  # the next VFS in the list
    shim[_NAME] = ctypes.addressof(name)
    shim[_OPEN], shim[_DELETE] = (ctypes.cast(callback, ctypes.c_void_p).value for callback in callbacks)
    return shim, keep


def _methods(real: int, files: dict[int, str], recorder: Recorder, keep: list[Any]) -> Any:
    """A copy of a file's methods that records."""
    table = (ctypes.c_void_p * _METHODS).from_buffer_copy(ctypes.string_at(real, 8 * _METHODS))
    real_write, real_truncate = _WRITE_TYPE(table[_WRITE]), _TRUNCATE_TYPE(table[_TRUNCATE])
    real_sync = _SYNC_TYPE(table[_SYNC])

    def write(file: int, data: int, amount: int, offset: int) -> int:
        recorder.operations.append(Operation("write", files[file], offset, ctypes.string_at(data, amount)))
        return int(real_write(file, data, amount, offset))

    def truncate(file: int, size: int) -> int:
        recorder.operations.append(Operation("truncate", files[file], size))
        return int(real_truncate(file, size))

    def sync(file: int, flags: int) -> int:
        result = int(real_sync(file, flags))
        recorder.operations.append(Operation("sync", files[file]))
        return result

    callbacks = (_WRITE_TYPE(write), _TRUNCATE_TYPE(truncate), _SYNC_TYPE(sync))
    keep.append(callbacks)
    table[_WRITE], table[_TRUNCATE], table[_SYNC] = (
        ctypes.cast(callback, ctypes.c_void_p).value for callback in callbacks
    )
    return table


def after_power_loss(operations: list[Operation], chance: random.Random) -> dict[str, bytes]:
    """What the files may hold when the power fails after these operations.

    What was written before a file's last sync is there. Of what came later, each sector of each write is there or not,
    by chance. The same goes for deletions until the folder is synced: SQLite does that with the first sync of a file
    that it has made.
    """
    durable: dict[str, bytes] = {}
    pending: dict[str, list[Operation]] = {}
    for operation in operations:
        if operation.kind == "sync":
            made_now = operation.name not in durable or _deletes(pending.get(operation.name, []))
            _settle(durable, operation.name, pending.pop(operation.name, []))
            for name in [name for name, later in pending.items() if made_now and _deletes(later)]:
                end = max(index for index, later in enumerate(pending[name]) if later.kind == "delete") + 1
                _settle(durable, name, pending[name][:end])
                pending[name] = pending[name][end:]
        elif operation.name:
            pending.setdefault(operation.name, []).append(operation)
    for name, lost in pending.items():
        _settle(durable, name, _what_arrived(lost, chance))
    return durable


def _deletes(operations: list[Operation]) -> bool:
    return any(operation.kind == "delete" for operation in operations)


def _what_arrived(operations: list[Operation], chance: random.Random) -> list[Operation]:
    """Of operations on one file that no sync followed, those that are on the disk."""
    arrived: list[Operation] = []
    for operation in operations:
        if operation.kind == "delete" and chance.random() < 0.5:
            break  # what was written afterwards went to another file, whose name is not on the disk
        if operation.kind == "delete":
            arrived = [operation]
        else:
            arrived += [part for part in _sectors(operation) if chance.random() < 0.5]
    return arrived


def _settle(durable: dict[str, bytes], name: str, operations: list[Operation]) -> None:
    for operation in operations:
        if operation.kind == "delete":
            durable.pop(name, None)
        else:
            durable[name] = _applied(durable.get(name, b""), operation)


def _applied(content: bytes, operation: Operation) -> bytes:
    content = content.ljust(operation.offset, b"\0")
    if operation.kind == "truncate":
        return content[: operation.offset]
    return content[: operation.offset] + operation.data + content[operation.offset + len(operation.data) :]


def _sectors(operation: Operation) -> list[Operation]:
    if operation.kind != "write":
        return [operation]
    return [
        Operation("write", operation.name, operation.offset + start, operation.data[start : start + _SECTOR])
        for start in range(0, len(operation.data), _SECTOR)
    ]
