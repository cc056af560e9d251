"""The one way to write a file whole, and the one way to open an SQLite file.

Owns temporary files, what is synced when, what is said when a disk refuses, and how a database knows its version and is
replaced when it is damaged; must not know what is in the files.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.errors import DiskFullError, LlmrunError, ResourceError, UsageError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    import sqlite3

MAKE_ROOM = "free some space and run the same command again"

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_BUSY_SECONDS = 5.0
_COMPANIONS = ("", "-wal", "-shm")

# ---- files -----------------------------------------------------------------------------------------


def write_whole(target: Path, content: str | bytes, *, makes_folder: bool = False) -> None:
    """Write a file that is there whole or not at all; what was there before stays until then.

    Args:
        makes_folder: the folder is made where it is missing.

    Raises:
        DiskFullError: there is no room.
        ResourceError: it can't be written there.
        UsageError: there is no such folder, or it is one itself.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    if makes_folder:
        with disk_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
    _check_folder(target)
    if _is_written_in_place(target):
        with disk_errors(target), target.open("wb") as file:
            file.write(data)
        return
    with arriving(target) as path:
        path.write_bytes(data)


def check_target(target: Path) -> None:
    """See that a file could be written there, before hours of work.

    Raises:
        UsageError: there is no such folder, or it is one itself.
        ResourceError: nothing can be written in the folder.
    """
    _check_folder(target)
    if _is_written_in_place(target):
        return
    import tempfile

    with disk_errors(target), tempfile.TemporaryFile(dir=target.parent):
        pass


def require_regular(path: Path) -> None:
    """Raise if a path exists and is not a regular file: a pipe or a device may block, or never end.

    Raises:
        UsageError: it is a folder, a pipe or a device.
    """
    if _is_written_in_place(path):
        kind = "a folder" if path.is_dir() else "not a regular file"
        raise UsageError(f"{str(path)!r} is {kind}", hint="name a file")


def _check_folder(target: Path) -> None:
    if target.is_dir():
        raise UsageError(f"{str(target)!r} is a folder", hint="name a file in it")
    if not target.parent.is_dir():
        import shlex

        raise UsageError(
            f"there is no folder {str(target.parent)!r}", hint=f"mkdir -p {shlex.quote(str(target.parent))}"
        )


def _is_written_in_place(target: Path) -> bool:
    """Whether it is a pipe or a device, which must not be replaced; nothing is made in its folder."""
    return target.exists() and not target.is_file()


@contextmanager
def arriving(
    target: Path, temporary: Path | None = None, *, needed: Callable[[], int] = lambda: 0, hint: str = MAKE_ROOM
) -> Iterator[Path]:
    """A temporary file, empty at first, that gets the target's name when the block ends well.

    It is on the disk by then, and so is its name when this returns. If anything is raised it is gone, and the target
    is as it was. It is locked, so that nobody takes it for what a dead process left.

    Args:
        target: keeps its mode. What a symbolic link leads to is replaced, where nothing is said about temporary.
        temporary: another name than the usual one, in the target's folder.
        needed: see disk_errors().
        hint: see disk_errors().

    Raises:
        DiskFullError: there is no room.
        ResourceError: it can't be written there.
    """
    with disk_errors(target, needed, hint=hint):
        if temporary is None:
            target = target.resolve()
        path = temporary or target.with_name(f".{target.name}.{os.getpid()}.tmp")
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
        try:
            with suppress(FileNotFoundError):
                path.chmod(target.stat().st_mode & 0o777)
            lock_file(descriptor)
            yield path
            os.fsync(descriptor)
            path.replace(target)
            sync_folder(target.parent)
        finally:
            os.close(descriptor)
            path.unlink(missing_ok=True)


def lock_file(descriptor: int, *, wait: bool = False) -> bool:
    """Lock a file until it is closed; False where another process has it, if that can be told."""
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:  # some network disks can't
        pass
    return True


def sync_folder(folder: Path) -> None:
    """Make a rename in this folder survive a power cut, where folders can be synced."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def free_bytes(folder: Path) -> int:
    """Free bytes of the disk that a folder is on, or will be on."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    import shutil  # 3 ms: it brings every kind of compression

    return shutil.disk_usage(folder).free


def require_room(folder: Path, needed: int, hint: str = MAKE_ROOM) -> None:
    """Raises DiskFullError unless the folder's disk has so many free bytes."""
    free = free_bytes(folder)
    if needed > free:
        why = f"{needed:,} bytes are needed, {free:,} are free"
        raise DiskFullError(f"the disk of {str(folder)!r} is too full", why=why, hint=hint)


@contextmanager
def disk_errors(path: Path, needed: Callable[[], int] = lambda: 0, *, hint: str = MAKE_ROOM) -> Iterator[None]:
    """Turn what the file system says while `path` is written into our errors.

    Args:
        needed: how many more bytes would have been written, 0 when nobody knows.
        hint: what to do when the disk is full.

    Raises:
        DiskFullError: there is no room, or the file is too large for this disk.
        ResourceError: anything else.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            what = f"no space is left on the disk for {str(path)!r}"
            raise DiskFullError(what, why=_room(path, needed()), hint=hint) from error
        if error.errno == errno.EFBIG:
            raise DiskFullError(
                f"a file as large as {str(path)!r} is not allowed there",
                why=f"{_room(path, needed())}, but `ulimit -f` or the file system (FAT32: 4 GB) has a limit of its own",
                hint="raise `ulimit -f`, or use another disk",
            ) from error
        raise ResourceError(f"can't write {str(path)!r}", why=error.strerror or str(error)) from error


def _room(path: Path, needed: int) -> str:
    free = f"{free_bytes(path.parent):,}"
    return f"{needed:,} more bytes are needed, {free} are free" if needed > 0 else f"{free} bytes are free"


# ---- databases -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SqliteSchema:
    """What an SQLite file has to have.

    Attributes:
        what: is in it, for messages, e.g. "the saved chats".
        migrations: number n, counted from 1, makes version n of version n - 1; each is its statements.
        probes: queries that read where damage shows.
        repair: what to type about damage that is found later; "" moves the file away by hand.
    """

    what: str
    migrations: Sequence[Sequence[str]]
    probes: Sequence[str] = ()
    repair: str = ""


Rescue = Callable[["sqlite3.Connection", "sqlite3.Connection"], str]
"""Copies what can be read of a damaged file into a new one; gives in words what that was, "" for nothing."""


class Database:
    """An open SQLite file that only its owner can read, brought up to date; or one in memory.

    A commit is on the disk (WAL, synchronous=FULL) before it returns, and what is deleted is overwritten. A damaged
    file is moved aside, never deleted, and a new one begins with what could be rescued.

    Args:
        path: of the file; it and its folder are made where needed. None keeps everything in memory.
        rescue: called when a damaged file is replaced.

    Attributes:
        connection: in autocommit mode; see writing().
        note: what has to be told about the opening, "" for nothing.

    Raises:
        UsageError: the file is of a newer llmrun, or another process keeps it busy.
        ResourceError: it can't be read or written.
    """

    connection: sqlite3.Connection

    def __init__(self, path: Path | None, schema: SqliteSchema, rescue: Rescue = lambda old, new: "") -> None:
        self._path, self._schema, self._rescue = path or Path(":memory:"), schema, rescue
        self.note = ""
        with self.explained():
            if path is None:
                self._open()
                return
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            _make_file(path)
            if not self._is_ready():
                with _alone_in(path.parent):
                    self._set_up()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A transaction: on the disk when the block has ended, and undone if it fails.

        Raises:
            DiskFullError: the disk is full.
            ResourceError: the file can't be written.
        """
        with self.explained():
            self.connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self.connection.execute("COMMIT")
            except BaseException:
                if self.connection.in_transaction:
                    self.connection.execute("ROLLBACK")
                raise

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Errors of SQLite and of the disk inside become ours.

        Raises:
            LlmrunError: says which file, why, and what to do.
        """
        try:
            yield
        except sqlite_errors(OSError) as error:
            raise self._in_words(error) from error

    def replace(self) -> None:
        """Move the file aside, and go on in a new one with what can be read of it. Nobody else may have it open.

        Raises:
            LlmrunError: as when it is opened.
        """
        self.connection.close()
        with self.explained(), _alone_in(self._path.parent):
            self._replace()

    def close(self) -> None:
        """Close the file."""
        self.connection.close()

    def _is_ready(self) -> bool:
        """Open the file if it is as it should be; the fast way that nearly every start takes."""
        try:
            return self._open(migrates=False)
        except sqlite_errors() as error:
            if is_damage(error):
                return False
            raise

    def _set_up(self) -> None:
        """Make, migrate or replace the file. Other processes wait, or have just done it."""
        try:
            self._open()
        except sqlite_errors() as error:
            if not is_damage(error):
                raise
            self._replace()

    def _replace(self) -> None:
        """Replace a damaged file, which is kept, by a new one with what could be rescued."""
        old, new = self._path, self._path.with_suffix(".new")
        for companion in _COMPANIONS:
            Path(f"{new}{companion}").unlink(missing_ok=True)  # of a repair that was killed
        _make_file(new)
        self._path = new
        try:
            self._open()
        finally:
            self._path = old
        with closing(self.connection) as connection:
            rescued = _rescued(old, connection, self._rescue)
        aside = _move_aside(old)
        new.rename(old)
        sync_folder(old.parent)
        self._open()
        self.note = f"{old} was damaged. It is kept as {aside}; {rescued or 'a new one begins'}."

    def _open(self, *, migrates: bool = True) -> bool:
        """Connect; False if the file is of an older version and is to stay so."""
        import sqlite3

        connection = sqlite3.connect(self._path, timeout=_BUSY_SECONDS, isolation_level=None)
        try:
            # macOS's disks need to be told twice to write.
            for pragma in ("synchronous=FULL", "fullfsync=1", "foreign_keys=ON", "secure_delete=ON"):
                connection.execute(f"PRAGMA {pragma}")
            version, newest = _version(connection), len(self._schema.migrations)
            if version > newest:
                raise UsageError(
                    f"a newer llmrun wrote {self._schema.what} in {str(self._path)!r}",
                    why=f"its version is {version}, this llmrun knows {newest}",
                    hint="pip install --upgrade llmrun, or set LLMRUN_HOME to another folder",
                )
            if version < newest:
                if not migrates:
                    connection.close()
                    return False
                _migrate(connection, self._schema.migrations)
            for query in self._schema.probes:
                connection.execute(query).fetchone()
        except BaseException:
            connection.close()
            raise
        self.connection = connection
        return True

    def _in_words(self, error: Exception) -> LlmrunError:
        what, path, text = self._schema.what, str(self._path), getattr(error, "strerror", None) or str(error)
        if "disk is full" in text or getattr(error, "errno", None) in _FULL:
            return DiskFullError(f"can't write {what} in {path!r}", why="the disk is full", hint=MAKE_ROOM)
        if "locked" in text:
            return UsageError(f"{path!r} is busy", why="another llmrun is writing to it", hint="try again")
        if is_damage(error):
            return ResourceError(
                f"{path!r} is damaged", why=text, hint=self._schema.repair or f"mv {path} {path}.damaged"
            )
        hint = "check the rights to that folder, or set LLMRUN_HOME to another one"
        return ResourceError(f"can't read or write {what} in {path!r}", why=text, hint=hint)


def _version(connection: sqlite3.Connection) -> int:
    """How many migrations a file has had."""
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _migrate(connection: sqlite3.Connection, migrations: Sequence[Sequence[str]]) -> None:
    """Apply those that are missing, all or none."""
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("BEGIN IMMEDIATE")
    try:
        for statements in migrations[_version(connection) :]:  # another process may have done it while we waited
            for statement in statements:
                connection.execute(statement)
        connection.execute(f"PRAGMA user_version={len(migrations)}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def sqlite_errors(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """Return sqlite3's errors and others. A damaged name in SQLite's own message raises UnicodeDecodeError."""
    import sqlite3

    return sqlite3.Error, UnicodeDecodeError, *others


def is_damage(error: BaseException | None) -> bool:
    """Whether SQLite found the file itself to be wrong: "not a database" or "malformed"."""
    import sqlite3

    # All other troubles, such as a full disk or a lock, are of a subclass. A table may have gone with a page.
    lost = re.match("no such (table|column)", str(error))
    return type(error) in (sqlite3.DatabaseError, UnicodeDecodeError) or lost is not None


def _rescued(old: Path, new: sqlite3.Connection, rescue: Rescue) -> str:
    """Copy what can be read of a damaged file, all in one transaction; returns what that was, in words."""
    import sqlite3

    new.execute("BEGIN IMMEDIATE")
    try:
        with closing(sqlite3.connect(f"{old.absolute().as_uri()}?mode=ro", uri=True)) as damaged:
            said = rescue(damaged, new)
    except sqlite_errors() as error:
        if not is_damage(error):
            raise
        new.execute("ROLLBACK")
        return ""
    new.execute("COMMIT")
    return said


def _move_aside(path: Path) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    aside = path.with_name(f"{path.stem}.damaged-{stamp}{path.suffix}")
    number = 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.stem}.damaged-{stamp}-{number}{path.suffix}")
    for companion in _COMPANIONS:
        with suppress(FileNotFoundError):
            Path(f"{path}{companion}").rename(f"{aside}{companion}")
    return aside


def _make_file(path: Path) -> None:
    """An empty file that only its owner can read; what SQLite puts beside it gets the same rights."""
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        sync_folder(path.parent)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Only one process at a time is inside, where the disk has locks."""
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        lock_file(descriptor, wait=True)
        yield
    finally:
        os.close(descriptor)
