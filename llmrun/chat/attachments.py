"""Files attached to a message: text files, laid out so that the model sees where each begins, and image files.

Names are returned as the user gave them, not sanitized.
"""

from __future__ import annotations

import base64
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

from llmrun.chat.documents import MAX_DOCUMENT_BYTES, is_document, read_document
from llmrun.errors import UsageError
from llmrun.protocol.messages import PICTURE_BEGINNINGS, Image
from llmrun.storage import decode_text
from llmrun.system import user_path

MAX_FILE_BYTES = 4 << 20
MAX_TOTAL_BYTES = 16 << 20
MAX_FILES = 200
MAX_IMAGE_BYTES = 16 << 20
MAX_IMAGES_BYTES = 32 << 20
"""Of all images that are sent at once: in base64 they have to fit into one frame to the engine."""

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_WILDCARDS = frozenset("*?[")
_TICKS = re.compile(r"`{3,}")

# What a file begins with -> what it is, and what to do about it.
_KINDS = (
    (b"\x89PNG\r\n\x1a\n", "an image"),
    (b"\xff\xd8\xff", "an image"),
    (b"GIF8", "an image"),
    (b"BM", "an image"),
    (b"II*\0", "an image"),
    (b"MM\0*", "an image"),
    (b"PK\x03\x04", "an archive or office document"),
    (b"GGUF", "a model"),
)
_HINTS = {
    "an image": "--image FILE, or /image FILE in a chat, shows it to a model that can see",
    "an archive or office document": "save it as text or PDF first",
}


@dataclass(frozen=True, slots=True)
class AttachedFile:
    """A text file, read but not yet sent."""

    name: str  # as given, or as the pattern found it
    n_bytes: int
    text: str = field(repr=False)

    @property
    def tokens(self) -> int:
        """Tokens, estimated without a tokenizer."""
        return estimated_tokens(self.text)


@dataclass(frozen=True, slots=True)
class AttachedImage:
    """An image file, read but not decoded: only the engine decodes images."""

    name: str  # as given
    path: str  # absolute
    sha256: str  # of the bytes
    n_bytes: int
    data: str = field(repr=False)  # base64


@dataclass(frozen=True, slots=True)
class Attachments:
    """The files attached to a message."""

    files: tuple[AttachedFile, ...] = ()  # in their order in the message
    notes: tuple[str, ...] = ()  # a line for each skipped file of a pattern, and each document without all its text
    images: tuple[AttachedImage, ...] = ()  # they precede the message

    @property
    def block(self) -> str:
        """The text files as they are written into the message."""
        return "\n\n".join(_block(file.name, file.text) for file in self.files)

    @property
    def n_bytes(self) -> int:
        return sum(file.n_bytes for file in self.files)

    @property
    def tokens(self) -> int:
        """Tokens of all text files, estimated."""
        return sum(file.tokens for file in self.files)

    @property
    def sent(self) -> tuple[Image, ...]:
        """The images as they are sent, before the message."""
        return tuple(Image(image.data, image.name) for image in self.images)

    def before(self, message: str) -> str:
        """Return the message as it is sent: the text files, then the user's text."""
        return "\n\n".join(part for part in (self.block, message) if part)


_Named = TypeVar("_Named", AttachedFile, AttachedImage)


def without(attached: Sequence[_Named], pattern: str) -> tuple[_Named, ...]:
    """Return the attachments whose name does not match a name or pattern.

    Args:
        pattern: a name as given, its last part, or a pattern with * ? [].

    Raises:
        UsageError: nothing matches.
    """
    others = tuple(
        each
        for each in attached
        if pattern not in (each.name, Path(each.name).name) and not fnmatch.fnmatchcase(each.name, pattern)
    )
    if len(others) == len(attached):
        names = ", ".join(each.name for each in attached) or "nothing"
        raise UsageError(f"{pattern!r} is not attached", why=f"attached to the next message: {names}")
    return others


def attach(
    patterns: Sequence[str],
    *,
    beside: Sequence[AttachedFile] = (),
    max_bytes: int = MAX_FILE_BYTES,
    max_total: int = MAX_TOTAL_BYTES,
) -> Attachments:
    """Read the text files of -f, or of /file in a chat.

    Args:
        patterns: paths, or patterns with * ? [] and **; `~` is the home folder. A file named twice is attached once.
        beside: files attached before; those named again are read again.
        max_bytes: limit of one file.
        max_total: limit of all files, in bytes.

    Raises:
        UsageError: a file is a URL, missing, not text, or too large. A file that only a pattern found is skipped with a
            note instead, a hidden file without one.
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
                text, n_bytes, note = read_text(name, max_bytes)
            except UsageError as error:
                if named is None:
                    raise
                notes.append(f"{error.what}: {error.why}; left out")
                continue
            files.append(AttachedFile(name, n_bytes, text))
            notes += [f"{name}: {note}"] if note else []
            _check_sum(files, max_total)
        if named and len(files) == before and len(notes) >= len(named):
            raise UsageError(f"{pattern!r} finds no text file", why=notes[-1])
    files = [*(file for file in beside if os.path.realpath(file.name) not in seen), *files]
    _check_sum(files, max_total)
    return Attachments(tuple(files), tuple(notes))


def attach_image_files(names: Sequence[str], *, beside: Sequence[AttachedImage] = ()) -> tuple[AttachedImage, ...]:
    """Read the images of --image, or of /image in a chat.

    Args:
        beside: images attached before; those named again are read again.

    Raises:
        UsageError: a file is a URL, missing, not an image, or too large.
    """
    read = tuple(map(read_image, names))
    paths = {image.path for image in read}
    images = (*(image for image in beside if image.path not in paths), *read)
    total = sum(image.n_bytes for image in images)
    if total > MAX_IMAGES_BYTES:
        why = f"they have {total:,} bytes, the limit is {MAX_IMAGES_BYTES:,}"
        raise UsageError(f"{len(images)} images are too large to attach", why=why)
    return images


def read_image(name: str) -> AttachedImage:
    """Read an image file. Raises as attach_image_files()."""
    _refuse_names_of_no_file(name)
    data = _read(name, MAX_IMAGE_BYTES)
    if not data.startswith(PICTURE_BEGINNINGS):
        raise UsageError(
            f"{name!r} can't be attached",
            why="it is not a PNG, JPEG, GIF, BMP or WebP image",
            hint="-f FILE takes text files; other images can be saved as PNG",
        )
    path = os.path.abspath(user_path(name))  # noqa: PTH100 - the name, not where a link leads
    sha256 = hashlib.sha256(data).hexdigest()
    return AttachedImage(name, path, sha256, len(data), base64.b64encode(data).decode("ascii"))


def read_text(name: str, max_bytes: int = MAX_FILE_BYTES) -> tuple[str, int, str]:
    r"""Return the text of a file, with \n as the end of each line, its size in bytes, and a note about what is missing.

    The size of a document, such as a PDF, is that of its text.

    Raises:
        UsageError: it is a URL, not a file, not text, or too large.
    """
    _refuse_names_of_no_file(name)
    data = _read(name, MAX_DOCUMENT_BYTES, max_bytes)
    if is_document(data):
        document = read_document(data, name, max_bytes)
        return document.text, len(document.text.encode()), document.note
    kind = next((kind for start, kind in _KINDS if data.startswith(start)), "")
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        kind = "an image"
    if kind == "an image" and data.startswith(b"BM") and b"\0" not in data:
        kind = ""  # two letters may begin a text, too
    if kind:
        raise UsageError(f"{name!r} can't be attached", why=f"it is {kind}, not text", hint=_HINTS.get(kind, ""))
    text = decode_text(data, f"{name!r} can't be attached")
    return text.replace("\r\n", "\n").replace("\r", "\n"), len(data), ""


def estimated_tokens(text: str) -> int:
    """Estimate the tokens of a text: 3.5 characters each, outside ASCII one character each."""
    ascii_characters = len(text.encode("ascii", "ignore"))
    return round(ascii_characters / 3.5) + len(text) - ascii_characters


def _names(pattern: str) -> list[str] | None:
    """Return the files that match a pattern, sorted; None for a plain path."""
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


def _read(name: str, max_bytes: int, max_text: int | None = None) -> bytes:
    """Read a file of at most max_bytes; at most max_text unless it is a document."""
    path = user_path(name)
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
            data = file.read(max_bytes + 1)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError(f"{name!r} can't be attached", why=why.lower()) from None
    limit = max_bytes if max_text is None or is_document(data) else max_text
    if len(data) > limit:
        raise UsageError(f"{name!r} can't be attached", why=f"it is larger than {limit:,} bytes")
    return data


def _check_sum(files: Sequence[AttachedFile], limit: int) -> None:
    total = sum(file.n_bytes for file in files)
    if total > limit:
        raise UsageError(
            f"{len(files)} files are too large to attach", why=f"they have {total:,} bytes, the limit is {limit:,}"
        )


def _block(name: str, text: str) -> str:
    """Return a file between fences that are longer than any fence in it, under its name."""
    longest = max(map(len, _TICKS.findall(text)), default=2)
    fence = "`" * (longest + 1)
    printable = "".join(character if character.isprintable() and character != "`" else "?" for character in name)
    end = "" if text.endswith("\n") or not text else "\n"
    return f"{printable}:\n{fence}\n{text}{end}{fence}"
