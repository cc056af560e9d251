"""Files that go along with a message: texts, set so that the model sees where each begins, and pictures as they are.

Owns the reading and the layout; must not know models or terminals. Names in what it returns are as they were given:
who shows them cleans them.
"""

from __future__ import annotations

import base64
import codecs
import fnmatch
import glob
import hashlib
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from llmrun.errors import UsageError
from llmrun.protocol.messages import PICTURE_BEGINNINGS, Image

MAX_FILE_BYTES = 4 << 20
MAX_TOTAL_BYTES = 16 << 20
MAX_FILES = 200
MAX_PICTURE_BYTES = 16 << 20
MAX_PICTURES_BYTES = 32 << 20
"""Of all pictures that are sent at once: in base64 they have to fit into one frame to the engine."""

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_WILDCARDS = frozenset("*?[")
_TICKS = re.compile(r"`{3,}")
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

# What a file begins with -> what it is, and what to do about it.
_KINDS = (
    (b"\x89PNG\r\n\x1a\n", "an image"),
    (b"\xff\xd8\xff", "an image"),
    (b"GIF8", "an image"),
    (b"BM", "an image"),
    (b"II*\0", "an image"),
    (b"MM\0*", "an image"),
    (b"%PDF-", "a PDF"),
    (b"PK\x03\x04", "an archive or office document"),
    (b"GGUF", "a model"),
)
_HINTS = {
    "an image": "--image FILE, or /image FILE in a chat, shows it to a model that can see",
    "a PDF": "pdftotext FILE turns it into text",
    "an archive or office document": "save it as text first",
}


@dataclass(frozen=True, slots=True)
class AttachedFile:
    """What is to be said of a file before it is sent.

    Attributes:
        name: as it was given, or as the pattern found it.
        n_bytes: of the file.
        text: in it.
    """

    name: str
    n_bytes: int
    text: str = field(repr=False)

    @property
    def tokens(self) -> int:
        """An estimate; the model's tokenizer knows better."""
        return estimated_tokens(self.text)


@dataclass(frozen=True, slots=True)
class AttachedImage:
    """A picture that was read, as it is: only the engine decodes it.

    Attributes:
        name: as it was given.
        path: absolute.
        sha256: of its bytes.
        n_bytes: how many there are.
        data: its bytes in base64.
    """

    name: str
    path: str
    sha256: str
    n_bytes: int
    data: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Attachments:
    """Files that were read.

    Attributes:
        files: the texts, in their order in the message.
        notes: a line for each file that a pattern found and that was left out.
        pictures: they stand before the message.
    """

    files: tuple[AttachedFile, ...] = ()
    notes: tuple[str, ...] = ()
    pictures: tuple[AttachedImage, ...] = ()

    @property
    def block(self) -> str:
        """All files, as they go into the message; "" without any."""
        return "\n\n".join(_block(file.name, file.text) for file in self.files)

    @property
    def n_bytes(self) -> int:
        """Of all files together."""
        return sum(file.n_bytes for file in self.files)

    @property
    def tokens(self) -> int:
        """Of all files together, estimated."""
        return sum(file.tokens for file in self.files)

    @property
    def sent(self) -> tuple[Image, ...]:
        """The pictures as they are sent, before the message."""
        return tuple(Image(picture.data, picture.name) for picture in self.pictures)

    def before(self, message: str) -> str:
        """The message as it is sent: the files, then what the user wrote."""
        return "\n\n".join(part for part in (self.block, message) if part)


_Named = TypeVar("_Named", AttachedFile, AttachedImage)


def without(attached: Sequence[_Named], pattern: str) -> tuple[_Named, ...]:
    """Return the files or pictures but those that a name or a pattern means.

    Args:
        pattern: a name as it was given, its last part, or a pattern with * ? [].

    Raises:
        UsageError: it means none of them.
    """
    kept = tuple(
        each
        for each in attached
        if pattern not in (each.name, Path(each.name).name) and not fnmatch.fnmatchcase(each.name, pattern)
    )
    if len(kept) == len(attached):
        names = ", ".join(each.name for each in attached) or "nothing"
        raise UsageError(f"{pattern!r} does not go along", why=f"with the next message: {names}")
    return kept


def attach(
    patterns: Sequence[str],
    *,
    beside: Sequence[AttachedFile] = (),
    most_bytes: int = MAX_FILE_BYTES,
    most_in_all: int = MAX_TOTAL_BYTES,
) -> Attachments:
    """Read what -f names, or /file in a chat.

    Args:
        patterns: paths, or patterns with * ? [] and **; `~` is the home folder. A file named twice comes once.
        beside: files that were read before and go along too, but for those that are read again.
        most_bytes: of one file.
        most_in_all: bytes of all files.

    Raises:
        UsageError: one is a URL, is not there, is not text, or is too large. What only a pattern found is left out
            with a note instead, hidden files without one.
    """
    files: list[AttachedFile] = []
    notes: list[str] = []
    seen: set[str] = set()
    for pattern in patterns:
        named = _names(pattern)
        before = len(files)
        for name in named or [pattern]:
            if os.path.realpath(name) in seen:
                continue
            seen.add(os.path.realpath(name))
            try:
                text, n_bytes = read_text(name, most_bytes)
            except UsageError as error:
                if named is None:
                    raise
                notes.append(f"{error.what}: {error.why}; left out")
                continue
            files.append(AttachedFile(name, n_bytes, text))
            _check_sum(files, most_in_all)
        if named and len(files) == before and len(notes) >= len(named):
            raise UsageError(f"{pattern!r} finds no text file", why=notes[-1])
    files = [*(file for file in beside if os.path.realpath(file.name) not in seen), *files]
    _check_sum(files, most_in_all)
    return Attachments(tuple(files), tuple(notes))


def attach_image_files(names: Sequence[str], *, beside: Sequence[AttachedImage] = ()) -> tuple[AttachedImage, ...]:
    """Read what --image names, or /image in a chat.

    Args:
        names: paths.
        beside: pictures that were read before and go along too, but for those that are read again.

    Raises:
        UsageError: one is a URL, is not there, is no picture, or is too large.
    """
    read = tuple(map(read_image, names))
    paths = {picture.path for picture in read}
    pictures = (*(picture for picture in beside if picture.path not in paths), *read)
    total = sum(picture.n_bytes for picture in pictures)
    if total > MAX_PICTURES_BYTES:
        why = f"they have {total:,} bytes, {MAX_PICTURES_BYTES:,} are the most"
        raise UsageError(f"{len(pictures)} pictures are too much to attach", why=why)
    return pictures


def read_image(name: str) -> AttachedImage:
    """A picture's bytes.

    Raises:
        UsageError: as attach_pictures().
    """
    _refuse_names_of_no_file(name)
    data = _read(name, MAX_PICTURE_BYTES)
    if not data.startswith(PICTURE_BEGINNINGS):
        raise UsageError(
            f"{name!r} can't be attached",
            why="it is not a PNG, JPEG, GIF or BMP picture",
            hint="-f FILE takes text files; other pictures can be saved as PNG",
        )
    path = os.path.abspath(Path(name).expanduser())  # noqa: PTH100 - the name, not where a link leads
    sha256 = hashlib.sha256(data).hexdigest()
    return AttachedImage(name, path, sha256, len(data), base64.b64encode(data).decode("ascii"))


def read_text(name: str, most_bytes: int = MAX_FILE_BYTES) -> tuple[str, int]:
    """A file's text, its lines ending in a newline each way they may end, and how many bytes the file has.

    Raises:
        UsageError: it is a URL, no file, no text, or too large.
    """
    _refuse_names_of_no_file(name)
    data = _read(name, most_bytes)
    kind = next((kind for start, kind in _KINDS if data.startswith(start)), "")
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        kind = "an image"
    if kind == "an image" and data.startswith(b"BM") and b"\0" not in data:
        kind = ""  # two letters may begin a text, too
    if kind:
        raise UsageError(f"{name!r} can't be attached", why=f"it is {kind}, not text", hint=_HINTS.get(kind, ""))
    text = _decode(name, data)
    return text.replace("\r\n", "\n").replace("\r", "\n"), len(data)


def estimated_tokens(text: str) -> int:
    """About how many tokens a text has: 3.5 characters each, outside ASCII one character each."""
    ascii_characters = len(text.encode("ascii", "ignore"))
    return round(ascii_characters / 3.5) + len(text) - ascii_characters


def _names(pattern: str) -> list[str] | None:
    """What a pattern finds, sorted; None if it is a plain path."""
    _refuse_names_of_no_file(pattern)
    expanded = os.path.expanduser(pattern)  # noqa: PTH111 - a Path would lose a slash at the end
    if not _WILDCARDS & set(expanded) or os.path.lexists(expanded):
        return None
    found = [name for name in glob.iglob(expanded, recursive=True) if not Path(name).is_dir()]  # noqa: PTH207 - skips hidden files
    if not found:
        raise UsageError(f"{pattern!r} finds no file", hint="hidden files are left out; name them one by one")
    if len(found) > MAX_FILES:
        raise UsageError(f"{pattern!r} finds {len(found):,} files", why=f"at most {MAX_FILES} can be attached")
    return sorted(found)


def _refuse_names_of_no_file(name: str) -> None:
    if "\0" in name:
        raise UsageError(f"{name!r} can't be attached", why="no file can have that name")
    if _URL.match(name):
        raise UsageError(f"{name!r} can't be attached", why="URLs are not fetched", hint="download it, then -f FILE")


def _read(name: str, most_bytes: int) -> bytes:
    path = Path(name).expanduser()
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise UsageError(
                f"{name!r} can't be attached",
                why="it is a folder",
                hint=f"'{name.rstrip('/')}/*' names its files",
            )
        # A pipe is what the shell makes of <(command).
        if not stat.S_ISREG(mode) and not stat.S_ISFIFO(mode):
            raise UsageError(f"{name!r} can't be attached", why="it is not a file")
        with path.open("rb") as file:
            data = file.read(most_bytes + 1)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError(f"{name!r} can't be attached", why=why.lower()) from None
    if len(data) > most_bytes:
        raise UsageError(f"{name!r} can't be attached", why=f"it is larger than {most_bytes:,} bytes")
    return data


def _decode(name: str, data: bytes) -> str:
    encoding = "utf-16" if data.startswith(_UTF16) else "utf-8-sig"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        binary = b"\0" in data and encoding != "utf-16"
        name_of_it = "UTF-16" if encoding == "utf-16" else "UTF-8"
        why = "it is binary, not text" if binary else f"it is not {name_of_it} text, see byte {error.start:,}"
        hint = "" if binary else "iconv -t UTF-8 FILE turns other encodings into UTF-8"
        raise UsageError(f"{name!r} can't be attached", why=why, hint=hint) from None
    if "\0" in text or (encoding == "utf-16" and not _is_readable(text)):
        halves = data[::2], data[1::2]
        if len(data) % 2 == 0 and any(len(half.replace(b"\0", b"")) < len(half) / 10 for half in halves):
            why, hint = "it is UTF-16 without a byte order mark", "iconv -f UTF-16LE -t UTF-8 FILE turns it into UTF-8"
            raise UsageError(f"{name!r} can't be attached", why=why, hint=hint)
        raise UsageError(f"{name!r} can't be attached", why="it is binary, not text")
    return text


def _is_readable(text: str) -> bool:
    """Whether nearly all of it are characters that somebody could have written: any two bytes are UTF-16."""
    import unicodedata

    written = [character for character in text if character not in "\t\n\r\f"]
    strange = sum(unicodedata.category(character) in ("Cc", "Cn", "Co") for character in written)
    return strange * 100 <= len(text)


def _check_sum(files: Sequence[AttachedFile], most: int) -> None:
    total = sum(file.n_bytes for file in files)
    if total > most:
        raise UsageError(
            f"{len(files)} files are too much to attach", why=f"they have {total:,} bytes, {most:,} are the most"
        )


def _block(name: str, text: str) -> str:
    """A file between fences that are longer than any in it, under its name."""
    longest = max(map(len, _TICKS.findall(text)), default=2)
    fence = "`" * (longest + 1)
    shown = "".join(character if character.isprintable() and character != "`" else "?" for character in name)
    end = "" if text.endswith("\n") or not text else "\n"
    return f"{shown}:\n{fence}\n{text}{end}{fence}"
