"""Files attached to a message: texts, laid out so that the model sees where each begins, images and audio.

Names are returned as the user gave them, not sanitized.
"""

from __future__ import annotations

import base64
import fnmatch
import glob
import hashlib
import os
import re
import shlex
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from llmrun.chat.documents import MAX_DOCUMENT_BYTES, Kind, kind_of, read_document
from llmrun.errors import UsageError
from llmrun.protocol.media import FORMATS, Media, Modality, conversion, modality_of, must_be_converted, other_audio
from llmrun.storage import decode_text
from llmrun.system import user_path

MAX_FILE_BYTES = 4 << 20
MAX_TOTAL_BYTES = 16 << 20
MAX_FILES = 200
MAX_MEDIA_BYTES = 32 << 20
"""Of all images and audio that are sent at once: in base64 they have to fit into one frame to the engine."""

_MAX_BYTES: dict[Modality, int] = {"image": 16 << 20, "audio": MAX_MEDIA_BYTES}
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_PAGE_TYPES = ("text/html", "application/xhtml+xml")
_WILDCARDS = frozenset("*?[")
_TICKS = re.compile(r"`{3,}")

# What a file begins with -> what it is, and what to do about it.
_KINDS = (
    (b"II*\0", "an image"),
    (b"MM\0*", "an image"),
    (b"PK\x03\x04", "an archive or office document"),
    (b"GGUF", "a model"),
)
_HINTS = {
    "an image": "save it as PNG",
    "an archive or office document": "save it as text or PDF first",
}
_WORDS: dict[Modality, str] = {"image": "an image", "audio": "audio"}
_FILES: dict[Modality, str] = {"image": "image", "audio": "file"}


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
class AttachedMedia:
    """An image or an audio file, read but not decoded: only the engine does that."""

    name: str  # as given
    path: str  # absolute
    sha256: str  # of the bytes
    n_bytes: int
    modality: Modality
    data: str = field(repr=False)  # base64


@dataclass(frozen=True, slots=True)
class Attachments:
    """The files attached to a message."""

    files: tuple[AttachedFile, ...] = ()  # in their order in the message
    notes: tuple[str, ...] = ()  # a line for each skipped file of a pattern, and each document without all its text
    media: tuple[AttachedMedia, ...] = ()  # images and audio; they precede the message

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
    def sent(self) -> tuple[Media, ...]:
        """The images and audio as they are sent, before the message."""
        return tuple(Media(file.data, file.name) for file in self.media)

    @property
    def modalities(self) -> frozenset[Modality]:
        """The kinds of files that a model has to read."""
        return frozenset(file.modality for file in self.media)

    def before(self, message: str) -> str:
        """Return the message as it is sent: the text files, then the user's text."""
        return "\n\n".join(part for part in (self.block, message) if part)

    @property
    def names(self) -> list[str]:
        return [*(file.name for file in self.files), *(file.name for file in self.media)]

    def without(self, pattern: str) -> Attachments:
        """Return the attachments without those whose name matches a name or pattern.

        Args:
            pattern: a name as given, its last part, or a pattern with * ? [].

        Raises:
            UsageError: nothing matches.
        """

        def others(attached: Sequence[_Named]) -> tuple[_Named, ...]:
            return tuple(file for file in attached if not _matches(file.name, pattern))

        left = replace(self, files=others(self.files), media=others(self.media))
        if left == self:
            names = ", ".join(self.names) or "nothing"
            raise UsageError(f"{pattern!r} is not attached", why=f"attached to the next message: {names}")
        return left


_Named = TypeVar("_Named", AttachedFile, AttachedMedia)


def _matches(name: str, pattern: str) -> bool:
    return pattern in (name, Path(name).name) or fnmatch.fnmatchcase(name, pattern)


def attach(
    patterns: Sequence[str],
    *,
    beside: Attachments | None = None,
    max_bytes: int = MAX_FILE_BYTES,
    max_total: int = MAX_TOTAL_BYTES,
) -> Attachments:
    """Read the files of -f, or of /file in a chat: texts and documents; images and audio by their own names.

    Args:
        patterns: paths, URLs of texts and documents, or patterns with * ? [] and **; `~` is the home folder. A file
            named twice is attached once.
        beside: attached before; files named again are read again.
        max_bytes: limit of one text file.
        max_total: limit of all texts, in bytes.

    Raises:
        UsageError: a file is missing, not readable as any of these, or too large. A file that only a pattern found is
            skipped with a note instead, a hidden file without one.
        NetworkError: a URL can't be fetched.
    """
    files: list[AttachedFile] = []
    media: list[AttachedMedia] = []
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
                if is_url(name):
                    read = read_url(name, max_bytes)
                else:
                    data = _read(name, max_bytes)
                    modality = _modality(data) if named is None else None
                    if modality is not None:
                        media.append(_attached_media(name, data, modality))
                        continue
                    read = text_of(data, name, max_bytes)
            except UsageError as error:
                if named is None:
                    raise
                notes.append(f"{error.what}: {error.why}; left out")
                continue
            files.append(AttachedFile(name, read.n_bytes, read.text))
            source = "its text without markup"
            source += "" if is_url(name) else f"; `llmrun run MODEL < {shlex.quote(name)}` sends the source"
            said = filter(None, (read.note, source if read.kind == "html" else ""))
            notes += [f"{name}: {note}" for note in said]
            _check_sum(files, max_total)
        if named and len(files) == before and len(notes) >= len(named):
            raise UsageError(f"{pattern!r} finds no text file", why=notes[-1])
    beside = beside or Attachments()
    files = [*(file for file in beside.files if os.path.realpath(file.name) not in seen), *files]
    _check_sum(files, max_total)
    return Attachments(tuple(files), tuple(notes), _joined(beside.media, media))


def attach_media(names: Sequence[str], modality: Modality, beside: Attachments | None = None) -> Attachments:
    """Read the files of --image or --audio, or of /image or /audio in a chat.

    Args:
        beside: attached before; files named again are read again.

    Raises:
        UsageError: a file is a URL, missing, of another kind, or too large.
    """
    beside = beside or Attachments()
    read = [read_media(name, modality) for name in names]
    return replace(beside, media=_joined(beside.media, read))


def read_media(name: str, expected: Modality | None = None) -> AttachedMedia:
    """Read an image or an audio file.

    Args:
        expected: its kind; None takes both.

    Raises:
        UsageError: as attach_media().
    """
    data = _read(name)
    modality = _modality(data)
    if modality is None and other_audio(data):
        raise must_be_converted(data, name, f"{name!r} can't be attached")
    if modality is None or modality != (expected or modality):
        formats = " or ".join(
            f"a {FORMATS[option]} {_FILES[option]}" for option in ([expected] if expected else FORMATS)
        )
        hint = "-f FILE takes text files" + ("; other images can be saved as PNG" if expected == "image" else "")
        hint = f"--{modality} FILE takes it" if modality else hint
        raise UsageError(f"{name!r} can't be attached", why=f"it is not {formats}", hint=hint)
    return _attached_media(name, data, modality)


def _attached_media(name: str, data: bytes, modality: Modality) -> AttachedMedia:
    path = os.path.abspath(user_path(name))  # noqa: PTH100 - the name, not where a link leads
    sha256, encoded = hashlib.sha256(data).hexdigest(), base64.b64encode(data).decode("ascii")
    return AttachedMedia(name, path, sha256, len(data), modality, encoded)


def _joined(before: Sequence[AttachedMedia], read: Sequence[AttachedMedia]) -> tuple[AttachedMedia, ...]:
    """Return images and audio together, those read again once.

    Raises:
        UsageError: they are too large.
    """
    media = {file.path: file for file in read}
    joined = (*(file for file in before if file.path not in media), *media.values())
    total = sum(file.n_bytes for file in joined)
    if total > MAX_MEDIA_BYTES:
        why = f"they have {total:,} bytes, the limit is {MAX_MEDIA_BYTES:,}"
        raise UsageError(f"{len(joined)} images and audio files are too large to attach", why=why)
    return joined


class FileText(NamedTuple):
    r"""The text of a file, with \n as the end of each line."""

    text: str
    n_bytes: int  # of a document, such as a PDF, those of its text
    note: str = ""  # what is missing, or the encoding that was guessed; "" if there is nothing to say
    kind: Kind | None = None  # of a document


def read_text(name: str, max_bytes: int = MAX_FILE_BYTES) -> FileText:
    """Return the text of a file.

    Raises:
        UsageError: it is a URL, not a file, not text, or too large.
    """
    return text_of(_read(name, max_bytes), name, max_bytes)


def is_url(name: str) -> bool:
    """Return whether a file is named by a URL."""
    return _URL.match(name) is not None


def read_url(url: str, max_bytes: int = MAX_FILE_BYTES, named: Sequence[str] | None = None) -> FileText:
    """Return the text at a URL.

    Args:
        named: hosts that the user has named, see fetch(); None: the URL itself is the user's.

    Raises:
        UsageError: it may not be fetched, is not text, or too large.
        NetworkError: it can't be fetched.
    """
    from llmrun.chat.fetching import fetch, host_of  # few messages need an HTTP client

    fetched = fetch(url, MAX_DOCUMENT_BYTES, (host_of(url),) if named is None else named)
    kind = kind_of(fetched.data, url) or ("html" if fetched.media_type in _PAGE_TYPES else None)
    if kind is None and len(fetched.data) > max_bytes:
        raise UsageError(f"{url!r} can't be attached", why=f"it is larger than {max_bytes:,} bytes")
    return text_of(fetched.data, url, max_bytes, kind)


def text_of(data: bytes, name: str, max_bytes: int = MAX_FILE_BYTES, kind: Kind | None = None) -> FileText:
    """Return the text of a file's content.

    Args:
        kind: of a document whose content and name do not say what it is.

    Raises:
        DocumentError: it is a document without a text.
        UsageError: it is not text, or too large.
    """
    kind = kind or kind_of(data, name)
    if kind:
        document = read_document(data, name, max_bytes, kind)
        return FileText(document.text, len(document.text.encode()), document.note, kind)
    if b"\0" in data and other_audio(data):
        raise must_be_converted(data, name, f"{name!r} can't be attached")
    modality = _modality(data)
    other = _WORDS[modality] if modality else next((each for start, each in _KINDS if data.startswith(start)), "")
    if other:
        hint = f"-f {shlex.quote(name)} attaches it" if modality else _HINTS.get(other, "")
        hint = "download it, then name the file" if modality and is_url(name) else hint
        raise UsageError(f"{name!r} can't be attached", why=f"it is {other}, not text", hint=hint)
    decoded = decode_text(data, f"{name!r} can't be attached")
    return FileText(decoded.text.replace("\r\n", "\n").replace("\r", "\n"), len(data), decoded.note)


def _modality(data: bytes) -> Modality | None:
    """Return the kind of an image or an audio file; None for a text that only begins like one."""
    is_text = data.startswith((b"BM", b"ID3")) and b"\0" not in data
    return None if is_text else modality_of(data)


def estimated_tokens(text: str) -> int:
    """Estimate the tokens of a text: 3.5 characters each, outside ASCII one character each."""
    ascii_characters = len(text.encode("ascii", "ignore"))
    return round(ascii_characters / 3.5) + len(text) - ascii_characters


def _names(pattern: str) -> list[str] | None:
    """Return the files that match a pattern, sorted; None for a plain path or a URL."""
    if is_url(pattern):
        return None
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
    if is_url(name):
        why = "only texts and documents are fetched, with -f"
        raise UsageError(f"{name!r} can't be attached", why=why, hint="download it, then name the file")


def _read(name: str, max_text: int = MAX_FILE_BYTES) -> bytes:
    """Read a file of at most max_text bytes; documents, images and audio may be larger."""
    _refuse_names_of_no_file(name)
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
            data = file.read(MAX_DOCUMENT_BYTES + 1)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError(f"{name!r} can't be attached", why=why.lower()) from None
    modality = _modality(data)
    limit = _MAX_BYTES[modality] if modality else MAX_DOCUMENT_BYTES if kind_of(data, name) else max_text
    if len(data) > limit:
        hint = conversion(name) if modality == "audio" else ""
        raise UsageError(f"{name!r} can't be attached", why=f"it is larger than {limit:,} bytes", hint=hint)
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
