"""Passages of a folder's documents that go along with a question: cut, indexed, and found by meaning and by words.

A file is read again only if its size or time changed, and embedded again only if its bytes did. One that could not be
read is tried again at every start if something around it was the cause, else with other versions of the readers.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from llmrun.chat.attachments import AttachedFile, Attachments, estimated_tokens, read_text
from llmrun.chat.documents import MAX_DOCUMENT_BYTES, DocumentError, readers
from llmrun.errors import UsageError
from llmrun.storage import Database, SqliteSchema

if TYPE_CHECKING:
    import sqlite3

    import numpy
    from numpy.typing import NDArray

FOLDER = "docs"
"""Folder of the indexes, in Settings.state_dir."""
MOST_FILES = 20_000
MOST_FOUND = 5  # passages that go along with a question
MOST_TOKENS = 1500  # of them, estimated; at most a quarter of the context window
PASSAGE_TOKENS = 240  # of one, estimated: embedding models have small windows, and blur long texts
_LEAST_TOKENS = 60  # of a passage before a heading begins the next one
_OVERLAP_TOKENS = 40  # repeated at the start of a passage whose predecessor ends inside a paragraph
_COMMIT_PASSAGES = 64  # computed in one transaction: an interrupted indexing goes on from there
_CANDIDATES = 50  # of each of the two rankings
_LEAST_SHARE = 0.5  # of the best cosine or the best BM25 value that a passage must have
_MEANING_WEIGHT = 0.6  # against that of the words
_MOST_WORDS = 128  # of a question, for the search by words
_QUESTION_CHARACTERS = 1000  # at the end of a long one, which may follow a pasted text
_FOLLOW_UP_WORDS = 4  # a shorter question is searched for together with the one before it
_LEFT_OUT_FOLDERS = frozenset({"__pycache__", "node_modules"})  # and hidden ones
_HEADING = re.compile(
    r"#{1,6} \S|(?:export |public |pub )?(?:async )?(?:def|class|func|function|fn|interface|struct) \w"
)
_PAGE = re.compile(r"\[page (\d+)\]")
# Letters of scripts that are written without blanks between words, or with endings and particles at them: Thai, Lao,
# Tibetan, Myanmar, Khmer, Hangul, kana, bopomofo, Yi and Han.
_UNSPACED = "\u0e00-\u0eff\u0f00-\u0fff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u3005-\u3007\u3040-\u31ff\ua000-\ua4cf"
_UNSPACED += "\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff"
_RUN = re.compile(f"([{_UNSPACED}]+)|[^\\W{_UNSPACED}]+")
_INTRODUCTION = "Passages of my documents, which may help to answer:"

Embed = Callable[[Iterable[str], Literal["query", "document"]], "Iterator[NDArray[numpy.float32]]"]
"""Yields the vectors of some texts at a time, each of length 1."""


class Passage(NamedTuple):
    """A part of a document, and how well it fits a question."""

    file: str  # path inside the folder, with slashes
    first: int  # its first line, from 1 on; without meaning in a PDF
    last: int
    page: int  # of a PDF, from 1 on; 0 in others
    heading: str  # above it; "" if unknown
    text: str
    score: float = 0.0  # cosine with a question, see FolderIndex.search()

    @property
    def place(self) -> str:
        """The file, and the lines or the page."""
        if self.page:
            return f"{self.file}, page {self.page}"
        lines = f"line {self.first}" if self.first == self.last else f"lines {self.first}-{self.last}"
        return f"{self.file}, {lines}"


def passages_block(passages: Sequence[Passage]) -> str:
    """Return passages as they stand before a question; "" for none."""
    if not passages:
        return ""
    files = tuple(
        AttachedFile(f"[{number}] {passage.place}", 0, passage.text) for number, passage in enumerate(passages, 1)
    )
    return f"{_INTRODUCTION}\n\n{Attachments(files).block}\n\n"


def passages_line(passages: Sequence[Passage]) -> str:
    """Return the numbers of passages and of their files in words."""
    n_passages, n_files = len(passages), len({passage.file for passage in passages})
    return f"{n_passages} passage{'s' * (n_passages != 1)} of {n_files} file{'s' * (n_files != 1)}"


# ---- cutting ---------------------------------------------------------------------------------------


class _Line(NamedTuple):
    number: int
    page: int
    heading: str
    text: str
    tokens: int
    starts: bool  # with a heading


def cut(text: str, file: str) -> Iterator[Passage]:
    """Yield the passages of a document: whole paragraphs where possible, each under one heading and on one page."""
    open_lines: list[_Line] = []
    for line in _lines(text):
        size = sum(open_line.tokens for open_line in open_lines)
        turns = bool(open_lines) and line.page != open_lines[-1].page
        if turns or (line.starts and size >= _LEAST_TOKENS):
            yield from _passage(file, open_lines)
            open_lines = []
        elif open_lines and size + line.tokens > PASSAGE_TOKENS:
            end = _paragraph_end(open_lines)
            yield from _passage(file, open_lines[:end] if end else open_lines)
            open_lines = open_lines[end:] if end else _overlap(open_lines)
        open_lines.append(line)
    yield from _passage(file, open_lines)


def _lines(text: str) -> Iterator[_Line]:
    """Yield the lines of a text, with too long ones in several parts."""
    page, heading = 0, ""
    is_paged = _PAGE.match(text) is not None
    for number, line in enumerate(text.split("\n"), 1):
        if is_paged and (match := _PAGE.fullmatch(line)):
            page = int(match[1])
            continue
        starts = _HEADING.match(line) is not None
        if starts:
            heading = line.strip("#{: ")
        for part in _parts(line):
            yield _Line(number, page, heading, part, estimated_tokens(part) + 1, starts)


def _parts(line: str) -> Iterator[str]:
    """Yield a line in parts of at most PASSAGE_TOKENS, cut after a sentence or between words where possible."""
    while estimated_tokens(line) > PASSAGE_TOKENS:
        end = PASSAGE_TOKENS
        while estimated_tokens(line[: 2 * end]) < PASSAGE_TOKENS:  # ASCII has several characters a token
            end *= 2
        head = line[:end]
        at = max(head.rfind(mark, end // 2) + len(mark) for mark in (". ", "? ", "! ", "。"))
        at = at if at > end // 2 else head.rfind(" ", end // 2) + 1 or end
        yield line[:at]
        line = line[at:]
    yield line


def _paragraph_end(lines: Sequence[_Line]) -> int:
    """Return the number of lines up to the last blank one in the second half; 0 without one."""
    return next((at + 1 for at in range(len(lines) - 1, len(lines) // 2, -1) if not lines[at].text.strip()), 0)


def _overlap(lines: list[_Line]) -> list[_Line]:
    """Return the last lines, as many as the next passage repeats."""
    at, size = len(lines), 0
    while at > 1 and size + lines[at - 1].tokens <= _OVERLAP_TOKENS:
        at -= 1
        size += lines[at].tokens
    return lines[at:]


def _passage(file: str, lines: Sequence[_Line]) -> Iterator[Passage]:
    """Yield the passage of some lines, without blank ones at the ends; none if all are."""
    full = [at for at, line in enumerate(lines) if line.text.strip()]
    if full:
        lines = lines[full[0] : full[-1] + 1]
        first, last = lines[0], lines[-1]
        text = "\n".join(line.text.rstrip() for line in lines)
        yield Passage(file, first.number, last.number, first.page, first.heading, text)


# ---- the index -------------------------------------------------------------------------------------

_SCHEMA = SqliteSchema(
    "the index of your documents",
    (
        ("CREATE TABLE facts(name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",),
        (  # all is made anew: it holds nothing but what is in the files
            *(f"DROP TABLE IF EXISTS {table}" for table in ("words", "passages", "files")),
            "DELETE FROM facts",
            """CREATE TABLE files(
                id INTEGER PRIMARY KEY, path TEXT NOT NULL UNIQUE, size INTEGER NOT NULL, modified INTEGER NOT NULL,
                sha256 TEXT NOT NULL, note TEXT NOT NULL, failed_with TEXT)""",
            """CREATE TABLE passages(
                id INTEGER PRIMARY KEY, file INTEGER NOT NULL REFERENCES files ON DELETE CASCADE,
                first INTEGER NOT NULL, last INTEGER NOT NULL, page INTEGER NOT NULL,
                heading TEXT NOT NULL, text TEXT NOT NULL, name TEXT NOT NULL, letters TEXT NOT NULL,
                vector BLOB NOT NULL)""",
            "CREATE INDEX passages_by_file ON passages(file)",
            # Words of the name and the heading find a passage, too; `letters` has those of scripts without blanks.
            """CREATE VIRTUAL TABLE words USING fts5(name, heading, text, letters, content='passages',
                content_rowid='id', tokenize='porter unicode61 remove_diacritics 2')""",
            """CREATE TRIGGER passage_added AFTER INSERT ON passages BEGIN
                INSERT INTO words(rowid, name, heading, text, letters)
                VALUES(new.id, new.name, new.heading, new.text, new.letters); END""",
            """CREATE TRIGGER passage_removed AFTER DELETE ON passages BEGIN
                INSERT INTO words(words, rowid, name, heading, text, letters)
                VALUES('delete', old.id, old.name, old.heading, old.text, old.letters); END""",
        ),
    ),
    probes=("SELECT max(id) FROM passages", "SELECT value FROM facts LIMIT 1"),
)
_CUT_VERSION = 2  # of cut(), and of the texts that are read and embedded: with another one, all is done again
_VECTOR = "<f2"  # half the file of float32; ranks alike


class FolderState(NamedTuple):
    """A folder's documents after FolderIndex.refresh()."""

    files: int  # with passages
    passages: int
    read: int  # new or changed files
    left_out: tuple[str, ...]  # a line for each file that is not searched, with the reason
    notes: tuple[str, ...] = ()  # a line for each file of which some is missing, or whose encoding was guessed


class _Document(NamedTuple):
    """A file that was read."""

    path: str
    size: int
    modified: int  # nanoseconds since 1970
    sha256: str
    note: str = ""  # why it, or some of it, is missing, or how it was read
    failed_with: str | None = None  # the readers() that could not read it; "" if something else is the cause
    passages: tuple[Passage, ...] = ()
    is_known: bool = False  # its bytes are as before


class FolderIndex:
    """The passages of a folder's documents, with their vectors. Safe in any thread after refresh().

    Args:
        folder: of the documents; hidden files and folders in it are left out.
        state_dir: parent of the folder of all indexes.

    Attributes:
        state: after the last refresh().

    Raises:
        UsageError: it is not a folder.
    """

    def __init__(self, folder: Path, state_dir: Path) -> None:
        if not folder.is_dir():
            why = "it is a file" if folder.exists() else "it does not exist"
            raise UsageError(f"{str(folder)!r} is not a folder", why=why, hint="--docs FOLDER, or -f FILE for one file")
        self._folder = folder.resolve()
        self._embed: Embed | None = None
        self._path = state_dir / FOLDER / f"{hashlib.sha256(os.fsencode(self._folder)).hexdigest()[:16]}.db"
        self.state = FolderState(0, 0, 0, ())
        self._ids: list[int] = []
        self._vectors: NDArray[numpy.float32] | None = None  # a row for each id

    def refresh(
        self,
        embed: Embed | None = None,
        model: str = "",
        on_progress: Callable[[str, int, int], None] = lambda file, done, total: None,
    ) -> FolderState:
        """Bring the index up to date: read new and changed files, forget removed ones.

        Args:
            embed: computes vectors; None finds passages by their words alone.
            model: identity of the embedding model; with another one, all is embedded again.
            on_progress: called with a file, the number of files done, and of those to do.

        Raises:
            UsageError: there are too many files.
            ResourceError: the index can't be read or written.
            LlmrunError: the embedding failed; what was computed before stays.
        """
        self._embed, (on_disk, unreadable) = embed, self._on_disk()
        with closing(Database(self._path, _SCHEMA)) as database:
            connection = database.connection
            with database.writing():
                self._begin(connection, model)
                rows = connection.execute("SELECT path, size, modified, sha256, failed_with FROM files")
                known = {row[0]: row[1:] for row in rows}
                gone = [(path,) for path in known if path not in on_disk]
                connection.executemany("DELETE FROM files WHERE path = ?", gone)
            with_these = readers()
            failed = {path for path, row in known.items() if row[3] not in (None, with_these)}
            changed = [path for path, status in on_disk.items() if known.get(path, ())[:2] != status or path in failed]
            waiting: list[_Document] = []
            for number, path in enumerate(changed, 1):
                on_progress(path, number - 1, len(changed))
                sha256 = known[path][2] if path in known and path not in failed else ""
                waiting.append(self._read(path, *on_disk[path], sha256, with_these))
                n_passages = sum(len(document.passages) for document in waiting)
                if n_passages >= _COMMIT_PASSAGES or number == len(changed):
                    self._add(database, waiting)
                    waiting = []
            with database.explained():
                self._load(connection)
                query = "SELECT path FROM files WHERE failed_with IS NOT NULL"
                again = failed & {row[0] for row in connection.execute(query)}
                n_new = sum(path not in again or known[path][:2] != on_disk[path] for path in changed)
                self.state = _state(connection, n_new, unreadable)
        return self.state

    def search(self, question: str, most: int = MOST_FOUND) -> list[Passage]:
        """Return the passages that fit a question best, by their meaning and by their words.

        Both rankings are fused by a convex combination of values between 0, the worst candidate's, and 1, the best
        one's (Bruch et al. 2022, An Analysis of Fusion Functions for Hybrid Retrieval). The score of a passage is its
        cosine; without an embedding model it is its BM25 value.
        """
        meaning = self._by_meaning(question)
        with closing(Database(self._path, _SCHEMA)) as database, database.explained():
            words = _by_words(database.connection, question)
            nearest = dict(sorted(meaning.items(), key=lambda pair: -pair[1])[:_CANDIDATES])
            values = _fused(nearest, {one: value for one, value in words.items() if not meaning or one in meaning})
            near = _near(nearest) | _near(words)
            best = sorted(near & values.keys(), key=lambda one: (-values[one], one))[:most]
            scores = meaning or words
            return [passage for one in best for passage in _stored(database.connection, one, scores[one])]

    def _on_disk(self) -> tuple[dict[str, tuple[int, int]], dict[str, str]]:
        """Return the path inside the folder of each file, with its size and time; and of what can't be read, with why.

        Raises:
            UsageError: there are too many.
        """
        found, unreadable = dict[str, tuple[int, int]](), dict[str, str]()

        def note(error: OSError) -> None:
            unreadable[self._shown(Path(error.filename))] = (error.strerror or str(error)).lower()

        for parent, folders, names in os.walk(self._folder, onerror=note):
            folders[:] = sorted(name for name in folders if name[0] != "." and name not in _LEFT_OUT_FOLDERS)
            for path in (Path(parent, name) for name in sorted(names) if name[0] != "."):
                try:
                    status = path.stat()
                except OSError as error:  # a link that leads nowhere, or a file that was just removed
                    note(error)
                    continue
                if stat.S_ISREG(status.st_mode):
                    found[self._shown(path)] = (status.st_size, status.st_mtime_ns)
                else:  # reading a pipe may never end
                    unreadable[self._shown(path)] = "it is not a file"
            if len(found) > MOST_FILES:
                what = f"{str(self._folder)!r} has more than {MOST_FILES:,} files"
                raise UsageError(what, hint="name a folder inside it")
        return found, unreadable

    def _shown(self, path: Path) -> str:
        """Return a path inside the folder as it is shown and stored."""
        return os.fsencode(path.relative_to(self._folder).as_posix()).decode("utf-8", "replace")

    def _begin(self, connection: sqlite3.Connection, model: str) -> None:
        """Forget everything if another model computed it."""
        facts = {"folder": str(self._folder), "model": model, "passages": str(_CUT_VERSION)}
        stored = dict(connection.execute("SELECT name, value FROM facts"))
        if stored != facts:
            connection.execute("DELETE FROM files")
            connection.executemany("INSERT OR REPLACE INTO facts VALUES(?, ?)", facts.items())

    def _read(self, path: str, size: int, modified: int, sha256: str, with_these: str) -> _Document:
        """Read a file and cut it, unless it has the hash that is known.

        Args:
            with_these: the readers().
        """
        file = self._folder / path
        if size > MAX_DOCUMENT_BYTES:
            return _Document(path, size, modified, "", f"it is larger than {MAX_DOCUMENT_BYTES:,} bytes", with_these)
        try:
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            if digest == sha256:
                return _Document(path, size, modified, digest, is_known=True)
            read = read_text(str(file))
        except UsageError as error:
            is_lasting = not isinstance(error, DocumentError) or error.is_lasting
            why = f"{error.why} ({error.hint})" if error.hint and not is_lasting else error.why
            return _Document(path, size, modified, digest, why, with_these if is_lasting else "")
        except OSError as error:
            return _Document(path, size, modified, "", (error.strerror or str(error)).lower(), "")
        return _Document(path, size, modified, digest, read.note, passages=tuple(cut(read.text, path)))

    def _add(self, database: Database, documents: Sequence[_Document]) -> None:
        """Embed the passages of documents, and put them into the index in the place of earlier ones."""
        passages = [passage for document in documents for passage in document.passages]
        vectors = iter(self._vectors_of(passages))
        with database.writing():
            for path, size, modified, sha256, note, failed_with, own, is_known in documents:
                connection = database.connection
                if is_known:
                    connection.execute("UPDATE files SET size = ?, modified = ? WHERE path = ?", (size, modified, path))
                    continue
                connection.execute("DELETE FROM files WHERE path = ?", (path,))
                values = (path, size, modified, sha256, note, failed_with)
                query = "INSERT INTO files(path, size, modified, sha256, note, failed_with) VALUES(?, ?, ?, ?, ?, ?)"
                file = connection.execute(query, values).lastrowid
                connection.executemany(
                    "INSERT INTO passages(file, name, first, last, page, heading, text, letters, vector) "
                    "VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    ((file, *passage[:-1], _letters(passage), next(vectors)) for passage in own),
                )

    def _vectors_of(self, passages: Sequence[Passage]) -> list[bytes]:
        if self._embed is None:
            return [b""] * len(passages)
        texts = (f"{passage.file}: {passage.heading}\n{passage.text}" for passage in passages)
        return [row.astype(_VECTOR).tobytes() for part in self._embed(texts, "document") for row in part]

    def _load(self, connection: sqlite3.Connection) -> None:
        """Read the vectors into memory."""
        import numpy as np

        rows = connection.execute("SELECT id, vector FROM passages ORDER BY id").fetchall()
        self._ids = [row[0] for row in rows]
        if self._embed is not None:
            data = np.frombuffer(b"".join(row[1] for row in rows), _VECTOR)
            self._vectors = data.astype(np.float32).reshape(len(rows), -1) if rows else None

    def _by_meaning(self, question: str) -> dict[int, float]:
        """Return the cosine of each passage and a question, by id."""
        if self._embed is None or self._vectors is None:
            return {}
        (query,) = (row for part in self._embed([question], "query") for row in part)
        return dict(zip(self._ids, map(float, self._vectors @ query), strict=True))


def _by_words(connection: sqlite3.Connection, question: str) -> dict[int, float]:
    """Return the BM25 values of the best passages that have a word of the question, by id."""
    words = list(dict.fromkeys(_terms(question)))[:_MOST_WORDS]
    if not words:
        return {}
    query = "SELECT rowid, -rank FROM words WHERE words MATCH ? ORDER BY rank LIMIT ?"
    return dict(connection.execute(query, (" OR ".join(f'"{word}"' for word in words), _CANDIDATES)))


def _runs(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the words of a text, where a word ends at another script, and whether no blanks end it in this one."""
    for run in _RUN.finditer(unicodedata.normalize("NFKC", text.lower())):
        if run[1] is None:
            yield run[0], False
        elif letters := "".join(filter(str.isalnum, run[1])):  # signs of vowels and tones are no letters for SQLite
            yield letters, True


def _letters(passage: Passage) -> str:
    """Return the letters of scripts without blanks, each a word, and the other words in a text that has some."""
    runs = [*_runs(f"{passage.file} {passage.heading}\n{passage.text}")]
    if not any(unspaced for _, unspaced in runs):
        return ""
    return " ".join(" ".join(run) if unspaced else run for run, unspaced in runs)


def _terms(question: str) -> Iterator[str]:
    """Yield what a question is searched for: words, and pairs of letters in scripts without blanks."""
    for run, unspaced in _runs(question):
        if unspaced and len(run) > 1:
            yield from (" ".join(run[at : at + 2]) for at in range(len(run) - 1))
        else:
            yield run


def _fused(meaning: Mapping[int, float], words: Mapping[int, float]) -> dict[int, float]:
    """Return the value of each candidate of two rankings."""
    by_meaning, by_words = _scaled(meaning), _scaled(words)
    return {
        one: _MEANING_WEIGHT * by_meaning.get(one, 0.0) + (1 - _MEANING_WEIGHT) * by_words.get(one, 0.0)
        for one in (*by_meaning, *by_words)
    }


def _near(values: Mapping[int, float]) -> set[int]:
    """Return the candidates of a ranking that are not far behind its best."""
    least = _LEAST_SHARE * max(values.values(), default=0.0)
    return {one for one, value in values.items() if value >= least}


def _scaled(values: Mapping[int, float]) -> dict[int, float]:
    """Return values between 0 and 1."""
    least, most = min(values.values(), default=0.0), max(values.values(), default=0.0)
    return {one: (value - least) / (most - least) if most > least else 1.0 for one, value in values.items()}


def _stored(connection: sqlite3.Connection, one: int, score: float) -> Iterator[Passage]:
    """Yield a passage by its id; another process may have removed it."""
    query = "SELECT name, first, last, page, heading, text FROM passages WHERE id = ?"
    for row in connection.execute(query, (one,)):
        yield Passage(*row)._replace(score=score)


def _state(connection: sqlite3.Connection, n_read: int, unreadable: Mapping[str, str]) -> FolderState:
    n_files, n_passages = connection.execute("SELECT count(DISTINCT file), count(*) FROM passages").fetchone()
    noted = connection.execute("SELECT path, note, failed_with IS NULL FROM files WHERE note != ''").fetchall()
    left_out = {**unreadable, **{path: note for path, note, is_read in noted if not is_read}}
    notes = {path: note for path, note, is_read in noted if is_read}
    lines = (tuple(f"{path}: {note}" for path, note in sorted(each.items())) for each in (left_out, notes))
    return FolderState(n_files, n_passages, n_read, *lines)


# ---- a question ------------------------------------------------------------------------------------


def passages_for(index: FolderIndex, question: str, before: str, n_ctx: int) -> tuple[Passage, ...]:
    """Return the passages that go along with a question, the best first.

    Args:
        before: the question before it in the conversation; "" if there is none.
        n_ctx: context window in tokens; 0 if unknown.
    """
    n_words = sum(max(1, len(run) // 2) if unspaced else 1 for run, unspaced in _runs(question))
    follows = before and n_words < _FOLLOW_UP_WORDS
    searched = f"{before}\n{question}" if follows else question
    left = min(MOST_TOKENS, n_ctx // 4) if n_ctx else MOST_TOKENS
    chosen: list[Passage] = []
    for passage in index.search(searched[-_QUESTION_CHARACTERS:]):
        size = estimated_tokens(passage.text)
        if size <= left:
            left -= size
            chosen.append(passage)
    return tuple(chosen)
