"""Files are there whole or not at all, and databases say in our words what is wrong with them."""

from __future__ import annotations

import codecs
import errno
import os
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmrun.errors import DiskFullError, LlmrunError, ResourceError, UsageError
from llmrun.storage import Database, SqliteSchema, arriving, check_target, decode_text, write_whole

OLD, NEW = "what was there", "what is new, é"
SCHEMA = SqliteSchema("some notes", (("CREATE TABLE notes(text TEXT)",),), probes=("SELECT max(rowid) FROM notes",))

pytestmark = pytest.mark.usefixtures("package_on_path")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "file.json"
    path.write_text(OLD)
    return path


def test_text_and_bytes_are_written(tmp_path: Path, target: Path) -> None:
    write_whole(target, NEW)
    assert target.read_text(encoding="utf-8") == NEW
    write_whole(target, b"\0\xff")
    assert target.read_bytes() == b"\0\xff"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.skipif(os.name == "nt", reason="no POSIX modes")
def test_the_mode_stays_and_a_new_file_has_the_usual_one(tmp_path: Path, target: Path) -> None:
    target.chmod(0o640)
    write_whole(target, NEW)
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "new", NEW)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640


def test_what_a_link_leads_to_is_replaced(tmp_path: Path, target: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(target)
    write_whole(link, NEW)
    assert link.is_symlink()
    assert target.read_text(encoding="utf-8") == NEW


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE) as reader:
        write_whole(pipe, "through")
        assert reader.communicate(timeout=30)[0] == b"through"
    assert pipe.is_fifo()
    with pytest.raises(DiskFullError):
        write_whole(Path("/dev/full"), NEW)


def test_a_folder_is_made_where_that_is_meant(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file"
    with pytest.raises(UsageError, match="there is no folder"):
        write_whole(path, NEW)
    write_whole(path, NEW, makes_folder=True)
    assert path.read_text(encoding="utf-8") == NEW
    with pytest.raises(UsageError, match="is a folder"):
        write_whole(path.parent, NEW)
    with pytest.raises(ResourceError, match="can't write"):
        write_whole(path / "below a file", NEW, makes_folder=True)


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ENOSPC, DiskFullError), (errno.EDQUOT, DiskFullError), (errno.EFBIG, DiskFullError),
     (errno.EIO, ResourceError), (errno.EACCES, ResourceError), (errno.EROFS, ResourceError)],
)  # fmt: skip
@pytest.mark.parametrize("step", ["open", "write_bytes", "fsync", "replace"])
def test_every_step_can_fail(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch, step: str, number: int, kind: type[LlmrunError]
) -> None:
    def fail(*arguments: Any, **others: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(*((Path, step) if hasattr(Path, step) and step != "open" else (os, step)), fail)
    with pytest.raises(kind) as raised:
        write_whole(target, NEW)
    monkeypatch.undo()
    assert raised.value.exit_status == 6
    assert isinstance(raised.value, DiskFullError) == (kind is DiskFullError)
    assert target.read_text() == OLD
    assert list(tmp_path.iterdir()) == [target]


def test_a_file_that_may_not_grow_so_large(target: Path) -> None:
    code = (
        "import resource, sys; from pathlib import Path; from llmrun.storage import write_whole\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "from llmrun.errors import DiskFullError\n"
        "try:\n    write_whole(Path(sys.argv[1]), 'x' * 2000)\n"
        "except DiskFullError as error:\n    print(error.hint)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(target)], capture_output=True, check=True, cwd="/")
    assert b"ulimit -f" in done.stdout
    assert target.read_text() == OLD


@pytest.mark.parametrize("error", [KeyboardInterrupt(), UsageError("no"), RuntimeError()])
def test_whatever_happens_meanwhile_leaves_what_was_there(tmp_path: Path, target: Path, error: BaseException) -> None:
    def interrupted() -> None:
        with arriving(target) as path:
            path.write_text(NEW)
            assert target.read_text() == OLD
            raise error

    with pytest.raises(type(error)):
        interrupted()
    assert target.read_text() == OLD
    assert list(tmp_path.iterdir()) == [target]


def test_the_file_being_written_is_locked(target: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    with arriving(target) as path, path.open("rb") as other, pytest.raises(OSError, match="unavailable"):
        fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)


# ---- databases -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (sqlite3.OperationalError("database or disk is full"), DiskFullError, "the disk is full"),
        (OSError(errno.ENOSPC, "No space left on device"), DiskFullError, "the disk is full"),
        (sqlite3.OperationalError("database is locked"), UsageError, "busy"),
        (sqlite3.DatabaseError("database disk image is malformed"), ResourceError, "is damaged"),
        (sqlite3.OperationalError("no such table: notes"), ResourceError, "is damaged"),
        (sqlite3.OperationalError("attempt to write a readonly database"), ResourceError, "can't read or write"),
        (OSError(errno.EROFS, "Read-only file system"), ResourceError, "can't read or write"),
    ],
)
def test_the_words_of_sqlite_become_ours(tmp_path: Path, error: Exception, kind: type[LlmrunError], words: str) -> None:
    database = Database(tmp_path / "notes.db", SCHEMA)
    with pytest.raises(kind, match=words) as raised, database.explained():
        raise error
    database.close()
    assert raised.value.exit_status in (2, 6)
    assert raised.value.hint


def test_a_transaction_is_whole(tmp_path: Path) -> None:
    database = Database(tmp_path / "home" / "notes.db", SCHEMA)

    def interrupted() -> None:
        with database.writing():
            database.connection.execute("INSERT INTO notes VALUES('lost')")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        interrupted()
    with database.writing():
        database.connection.execute("INSERT INTO notes VALUES('kept')")
    database.close()
    again = Database(tmp_path / "home" / "notes.db", SCHEMA)
    assert again.connection.execute("SELECT text FROM notes").fetchall() == [("kept",)]
    assert again.note == ""
    again.close()


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "home").touch()
    with pytest.raises(ResourceError, match="can't read or write some notes") as raised:
        Database(tmp_path / "home" / "notes.db", SCHEMA)
    assert "LLMRUN_HOME" in raised.value.hint


def test_memory_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    database = Database(None, SCHEMA)
    with database.writing():
        database.connection.execute("INSERT INTO notes VALUES('secret')")
    database.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a named pipe")
def test_a_pipe_needs_no_file_beside_it_and_a_write_tries_its_folder_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**anything: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    os.mkfifo(tmp_path / "pipe")
    check_target(tmp_path / "pipe")  # such as /dev/stdout, whose folder mostly only root may write to
    with pytest.raises(ResourceError):
        check_target(tmp_path / "file")
    write_whole(tmp_path / "file", "text")
    assert (tmp_path / "file").read_text() == "text"


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("windows-1252", "Größe"),
        ("windows-1252", "L'été dernier, à la plage: 5 €"),
        ("windows-1250", "Žluťoučký kůň úpěl ďábelské ódy"),
        ("windows-1251", "Это русский текст про маяк и пароль."),
        ("windows-1251", "Пароль от Windowsа и от iPhoneа хранится у сторожа."),
        ("koi8-r", "Пароль маяка. Если вы забыли пароль, обратитесь к сторожу."),
        ("windows-1253", "Καλημέρα κόσμε, αυτό είναι ένα κείμενο"),
        ("windows-1255", "שלום עולם, זה טקסט בעברית"),
        ("windows-1256", "مرحبا بالعالم هذا نص عربي"),
        ("cp932", "灯台のパスワードはジャムです。"),
        ("gb18030", "灯塔的密码是果酱。"),
        ("big5", "燈塔的密碼是果醬。"),
        ("cp949", "등대의 비밀번호는 잼입니다."),
        ("UTF-16LE", "Hello Größe"),
        ("UTF-16BE", "Hello Größe"),
    ],
)
def test_encodings_are_guessed(encoding: str, text: str) -> None:
    decoded = decode_text(text.encode(encoding), "")
    assert (decoded.text, decoded.note) == (text, f"read as {decoded.encoding}")
    assert codecs.lookup(decoded.encoding) == codecs.lookup(encoding)
    ascii_text = "id;name;street\n" * 20_000
    if not encoding.startswith("UTF-16"):
        assert decode_text((ascii_text + text).encode(encoding), "").text == ascii_text + text


def test_damaged_utf8_stays_utf8() -> None:
    decoded = decode_text("naïve café größer".encode() + b"\xff\n\xfe", "")
    assert (decoded.text, decoded.encoding, decoded.n_invalid) == ("naïve café größer\ufffd\n\ufffd", "", 2)
    assert decoded.note == "read as UTF-8; 2 invalid byte sequences shown as \ufffd"
    assert decode_text("a legitimate \ufffd".encode(), "").note == ""


@pytest.mark.parametrize(
    "data", [b"a\0b", b"\x80\0", b"\x80\x01\x02\x03\x04", b"\x89PNG\r\n\x1a\n\0\0", bytes(range(128, 256))]
)
def test_what_is_binary_is_no_text(data: bytes) -> None:
    with pytest.raises(UsageError, match="it is binary, not text"):
        decode_text(data, "x")
