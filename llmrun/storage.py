"""Atomic writes of files, and SQLite files with versions, migration and repair."""

from __future__ import annotations

import codecs
import errno
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from llmrun.errors import DiskFullError, LlmrunError, ResourceError, UsageError
from llmrun.system import lock

if TYPE_CHECKING:
    import sqlite3

MAKE_ROOM = "free some space and run the same command again"

_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_LATIN_TENTHS = 7  # of the high bytes of UTF-16 without a mark that are 0 at least
_VALID_UTF8 = 2  # characters for each invalid place, in UTF-8 that is only damaged
_LINES = re.compile(rb"[\r\n]+")
_MOST_TELLING = 200_000  # bytes by which an encoding is guessed
_LEAST_TELLING = 16  # bytes outside ASCII, for a guess among all encodings
# Greek, Cyrillic, Hebrew or Arabic letters beside Latin ones, and beside each other.
_MIXED, _UNMIXED = re.compile(r"[a-zA-Z][\u0370-\u06ff]|[\u0370-\u06ff][a-zA-Z]"), re.compile(r"[\u0370-\u06ff]{2}")
_LATIN = ("windows-1252", "windows-1250", "windows-1254", "windows-1257", "iso-8859-2", "iso-8859-15", "mac-roman")
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_BUSY_SECONDS = 5.0
_COMPANIONS = ("", "-wal", "-shm")

# ---- files -----------------------------------------------------------------------------------------


def write_whole(target: Path, content: str | bytes, *, makes_folder: bool = False, is_private: bool = False) -> None:
    """Write a file atomically: the old content stays until the new one is complete.

    Args:
        makes_folder: create the folder if it is missing.
        is_private: see arriving().

    Raises:
        DiskFullError: the disk is full.
        ResourceError: the file can't be written.
        UsageError: the folder does not exist, or the target is a folder.
    """
    data = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
    if makes_folder:
        with disk_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
    _check_folder(target)
    if _is_written_in_place(target):
        with disk_errors(target), target.open("wb") as file:
            file.write(data)
        return
    with arriving(target, is_private=is_private) as path:
        path.write_bytes(data)


class DecodedText(NamedTuple):
    """The text of a file or a pipe.

    Attributes:
        encoding: that was guessed, as users know it; empty for UTF-8, and for UTF-16 with its mark.
        n_invalid: places with bytes that are no text, each replaced by U+FFFD.
    """

    text: str
    encoding: str = ""
    n_invalid: int = 0

    @property
    def note(self) -> str:
        """How it was read; "" if there is nothing to say."""
        if not self.encoding and not self.n_invalid:
            return ""
        sequences = f"{self.n_invalid:,} invalid byte sequence{'s' * (self.n_invalid > 1)}"
        replaced = f"; {sequences} shown as \ufffd" if self.n_invalid else ""
        return f"read as {self.encoding or 'UTF-8'}{replaced}"


def decode_text(data: bytes, refusal: str) -> DecodedText:
    """Return the text of a file or a pipe: in UTF-8, in UTF-16 with its mark, or in the encoding that it seems to have.

    Args:
        refusal: what can't be done with what is not text.

    Raises:
        UsageError: it is binary, or damaged UTF-16.
    """
    has_mark = data.startswith(_UTF16)
    try:
        decoded = DecodedText(data.decode("utf-16" if has_mark else "utf-8-sig"))
    except UnicodeDecodeError as error:
        if has_mark:
            raise UsageError(refusal, why=f"it is not UTF-16 text, see byte {error.start:,}") from None
        decoded = DecodedText("\0") if b"\0" in data else _guessed(data)
    if b"\0" in data and not has_mark:
        decoded = _utf16_without_mark(data)
    if "\0" in decoded.text or ((has_mark or decoded.encoding) and not _is_readable(decoded.text)):
        raise UsageError(refusal, why="it is binary, not text")
    return decoded


def _utf16_without_mark(data: bytes) -> DecodedText:
    """Return data with NUL bytes as text if every second byte is one for the most part; else as text with a NUL."""
    for encoding, low, high in (("UTF-16LE", data[::2], data[1::2]), ("UTF-16BE", data[1::2], data[::2])):
        if len(data) % 2 == 0 and 0 not in low and high.count(0) * 10 > len(high) * _LATIN_TENTHS:
            with suppress(UnicodeDecodeError):
                return DecodedText(data.decode(encoding), encoding)
    return DecodedText("\0")


def _guessed(data: bytes) -> DecodedText:
    """Return the text of data that are not UTF-8, in the likeliest encoding."""
    text = data.decode("utf-8-sig", "replace")
    n_invalid = text.count("\ufffd")
    n_valid = sum(not character.isascii() for character in text) - n_invalid
    if n_valid >= _VALID_UTF8 * n_invalid:  # by chance, bytes of other encodings are seldom UTF-8
        return DecodedText(text, "", n_invalid)
    from chardet import EncodingEra, detect  # 10 ms, for few files

    telling = b"\n".join(line for line in _LINES.split(data) if not line.isascii())[:_MOST_TELLING]
    n_telling = sum(byte > 0x7F for byte in telling)
    # In a short text, encodings of old computers look as likely as those that are common.
    era = EncodingEra.ALL if n_telling >= _LEAST_TELLING else EncodingEra.MODERN_WEB
    encoding = detect(telling, encoding_era=era, prefer_superset=True)["encoding"] or "windows-1252"
    text = telling.decode(encoding, "replace")
    if len(_MIXED.findall(text)) > len(_UNMIXED.findall(text)):  # they stand for letters with accents in Latin words
        encoding = detect(telling, include_encodings=_LATIN, prefer_superset=True)["encoding"] or "windows-1252"
    text = data.decode(encoding, "replace")
    if text == data.decode("windows-1252", "replace"):  # the commonest of those that are alike for this text
        encoding = "windows-1252"
    return DecodedText(text, encoding.lower(), text.count("\ufffd"))


def _is_readable(text: str) -> bool:
    """Return whether at most 1 % of the characters are control or unassigned: any two bytes are valid UTF-16."""
    import unicodedata

    written = [character for character in text if character not in "\t\n\r\f"]
    strange = sum(unicodedata.category(character) in ("Cc", "Cn", "Co") for character in written)
    return strange * 100 <= len(text)


def check_target(target: Path) -> None:
    """Raise if a file can't be written there, before hours of work.

    Raises:
        UsageError: the folder does not exist, or the target is a folder.
        ResourceError: nothing can be written in the folder.
    """
    _check_folder(target)
    if _is_written_in_place(target):
        return
    import tempfile

    with disk_errors(target), tempfile.TemporaryFile(dir=target.parent):
        pass


def require_regular(path: Path) -> None:
    """Raise UsageError if a path exists and is not a regular file: a pipe or a device may block, or never end."""
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
    """Return whether the target is a pipe or a device, which must not be replaced."""
    return target.exists() and not target.is_file()


@contextmanager
def arriving(
    target: Path,
    temporary: Path | None = None,
    *,
    needed: Callable[[], int] = lambda: 0,
    hint: str = MAKE_ROOM,
    is_private: bool = False,
) -> Iterator[Path]:
    """Yield an empty temporary file, which replaces the target when the block ends well.

    The file and its name are synced to the disk by then. After an exception the temporary file is deleted, and the
    target unchanged. The file is locked, so that no other process takes it for the remains of a dead one.

    Args:
        target: keeps its mode, unless it is private. Without `temporary`, the target of a symbolic link is replaced.
        temporary: another name than the usual one, in the target's folder.
        needed: see disk_errors().
        hint: see disk_errors().
        is_private: no other user can ever read the file.

    Raises:
        DiskFullError: the disk is full.
        ResourceError: the file can't be written.
    """
    with disk_errors(target, needed, hint=hint):
        if temporary is None:
            target = target.resolve()
        path = temporary or target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}.tmp")
        path.unlink(missing_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        file = os.fdopen(os.open(path, flags, 0o600 if is_private else 0o666), "rb+", buffering=0)
        try:
            if not is_private:
                with suppress(FileNotFoundError):
                    path.chmod(target.stat().st_mode & 0o777)
            lock(file.fileno())
            yield path
            os.fsync(file.fileno())
            if sys.platform == "win32":  # which does not rename open files
                file.close()
            path.replace(target)
            sync_folder(target.parent)
        finally:
            file.close()
            path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make a rename in this folder survive a power cut, if folders can be synced."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def free_bytes(folder: Path) -> int:
    """Return the free bytes of the disk of a folder, which need not exist yet."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    import shutil  # 3 ms: it brings every kind of compression

    return shutil.disk_usage(folder).free


def require_room(folder: Path, needed: int, hint: str = MAKE_ROOM) -> None:
    """Raise DiskFullError unless the folder's disk has this many free bytes."""
    free = free_bytes(folder)
    if needed > free:
        why = f"{needed:,} bytes are needed, {free:,} are free"
        raise DiskFullError(f"the disk of {str(folder)!r} is too full", why=why, hint=hint)


@contextmanager
def disk_errors(path: Path, needed: Callable[[], int] = lambda: 0, *, hint: str = MAKE_ROOM) -> Iterator[None]:
    """Turn errors of the file system into ours while `path` is written.

    Args:
        needed: returns the number of bytes still to write, 0 if unknown.
        hint: for a full disk.

    Raises:
        DiskFullError: the disk is full, or the file too large for it.
        ResourceError: any other error.
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
    """The schema of an SQLite file."""

    what: str  # its content, for messages, e.g. "the saved chats"
    migrations: Sequence[Sequence[str]]  # number n, from 1, turns version n - 1 into n; a list of statements each
    probes: Sequence[str] = ()  # queries that read the parts where damage shows


Rescue = Callable[["sqlite3.Connection", "sqlite3.Connection"], str]
"""Copies the readable part of a damaged file into a new one; returns a description of it, "" for nothing."""


class Database:
    """An open SQLite file with the newest schema, readable by its owner only; or a database in memory.

    A commit is on the disk (WAL, synchronous=FULL) before it returns, and deleted data are overwritten. A damaged file
    is moved aside, never deleted, and replaced by a new one with the rescued data.

    Args:
        path: of the file, created with its folder if needed; None is in memory.
        rescue: called when a damaged file is replaced.

    Attributes:
        connection: in autocommit mode; see writing().
        note: message to the user about the opening, "" for none.

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
            if not self._opened(migrates=False):  # intact and of the newest version, as at nearly every start
                with alone_in(path.parent):
                    if not self._opened():  # other processes wait, or have just set it up
                        self._replace()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Run the block in a transaction: committed to disk at its end, rolled back if it fails.

        Raises:
            DiskFullError: the disk is full.
            ResourceError: the file can't be written.
        """
        with self.explained(), _transaction(self.connection):
            yield

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn errors of SQLite and of the file system into ours, with the file, the cause and a hint."""
        try:
            yield
        except sqlite_errors(OSError) as error:
            raise self._in_words(error) from error

    def close(self) -> None:
        self.connection.close()

    def _opened(self, *, migrates: bool = True) -> bool:
        """Connect; return False if the file is damaged, or of an older version that must not be migrated."""
        try:
            return self._open(migrates=migrates)
        except sqlite_errors() as error:
            if is_damage(error):
                return False
            raise

    def _replace(self) -> None:
        """Replace a damaged file by a new one with its rescued data, and keep it aside."""
        old, new = self._path, self._path.with_suffix(".new")
        for companion in _COMPANIONS:
            Path(f"{new}{companion}").unlink(missing_ok=True)  # left by a killed repair
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
        """Connect; return False if the file is of an older version that must not be migrated."""
        import sqlite3

        connection = sqlite3.connect(self._path, timeout=_BUSY_SECONDS, isolation_level=None)
        try:
            # fullfsync: macOS's disks ignore a plain fsync.
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
            return ResourceError(f"{path!r} is damaged", why=text, hint=f"mv {path} {path}.damaged")
        hint = "check the rights to that folder, or set LLMRUN_HOME to another one"
        return ResourceError(f"can't read or write {what} in {path!r}", why=text, hint=hint)


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _version(connection: sqlite3.Connection) -> int:
    """Return the number of migrations applied to a file."""
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _migrate(connection: sqlite3.Connection, migrations: Sequence[Sequence[str]]) -> None:
    """Apply the missing migrations, all or none."""
    connection.execute("PRAGMA journal_mode=WAL")
    with _transaction(connection):
        # Another process may have applied some while this one waited.
        for statements in migrations[_version(connection) :]:
            for statement in statements:
                connection.execute(statement)
        connection.execute(f"PRAGMA user_version={len(migrations)}")


def sqlite_errors(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """Return sqlite3's errors and others. A damaged name in SQLite's own message raises UnicodeDecodeError."""
    import sqlite3

    return sqlite3.Error, UnicodeDecodeError, *others


def is_damage(error: BaseException | None) -> bool:
    """Return whether SQLite found the file itself damaged: "not a database" or "malformed"."""
    import sqlite3

    # All other errors, such as a full disk or a lock, are of a subclass. A damaged page may have held a table.
    lost = re.match("no such (table|column)", str(error))
    return type(error) in (sqlite3.DatabaseError, UnicodeDecodeError) or lost is not None


def _rescued(old: Path, new: sqlite3.Connection, rescue: Rescue) -> str:
    """Copy the readable part of a damaged file in one transaction; return its description."""
    import sqlite3

    try:
        with _transaction(new), closing(sqlite3.connect(f"{old.absolute().as_uri()}?mode=ro", uri=True)) as damaged:
            return rescue(damaged, new)
    except sqlite_errors() as error:
        if not is_damage(error):
            raise
        return ""


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
    """Create an empty file readable by its owner only, whose mode SQLite gives to the files beside it."""
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        sync_folder(path.parent)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Hold a lock on a folder, so that only one process at a time is in the block."""
    if sys.platform == "win32":  # which does not open folders
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        lock(descriptor, wait=True)
        yield
    finally:
        os.close(descriptor)
