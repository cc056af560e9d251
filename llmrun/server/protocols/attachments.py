"""Images, audio and documents in a client's JSON body. Nothing is fetched; only the engine decodes media.

PDFs, Word documents and web pages are read by a process each, which takes seconds: a body that has_documents() is read
in DOCUMENT_THREADS. A document without text becomes a line that names it, so that a conversation with it can go on.
"""

from __future__ import annotations

import base64
import hashlib
import re
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

from llmrun.chat.attachments import FileText, text_of
from llmrun.errors import UsageError
from llmrun.protocol.media import FORMATS, Media, Modality, beginning_of, modality_of, must_be_converted, other_audio
from llmrun.server.protocols.fields import Fields

_MEDIA_URL = re.compile(r"data:(image|audio)/[\w.+-]{1,80};base64,")


def media_from_url(fields: Fields, key: str, at: int, expected: Modality) -> Media:
    """Return the file of a data: URL, which is a string, or an object with a field `url`.

    Args:
        at: number of characters of the message before it.

    Raises:
        UsageError: it is another URL, or not of the expected kind.
    """
    if isinstance(fields.value(key), dict):
        fields, key = fields.object(key) or fields, "url"
    url = fields.needed_text(key)
    found = _MEDIA_URL.match(url)
    if found is None or found[1] != expected:
        why = f"must be a data: URL with {_with_article(expected)} in base64"
        hint = "images and audio are not fetched from other addresses"
        raise UsageError(f"invalid {fields.name(key)}", why=why, hint=hint)
    return media_from_base64(url[found.end() :], fields.name(key), at, expected)


def media_from_base64(data: str, name: str, at: int, *expected: Modality) -> Media:
    """Return a file in base64.

    Args:
        name: of the field.

    Raises:
        UsageError: it is of another kind.
    """
    beginning = beginning_of(data) if _is_base64(data) else b""
    if not beginning:
        raise UsageError(f"invalid {name}", why=f"must be {_with_article(expected[0])} in base64")
    if "audio" in expected and other_audio(beginning):
        raise must_be_converted(beginning, "FILE", f"invalid {name}")
    if modality_of(beginning) not in expected:
        formats = ", or ".join(f"a {FORMATS[modality]} {_FILES[modality]}" for modality in expected)
        raise UsageError(f"invalid {name}", why=f"must be {formats}")
    return Media(data, name, at)


def _is_base64(data: str) -> bool:
    try:
        base64.b64decode(data, validate=True)
    except ValueError:  # also for other than ASCII
        return False
    return True


def input_audio(part: Fields, at: int) -> Media:
    """Return the file of an `input_audio` part: {"data": in base64, "format"}. The data tell the format, too.

    Raises:
        UsageError: it is not audio that can be decoded.
    """
    inner = part.object("input_audio") or Fields({}, part.name("input_audio"))
    inner.text("format")
    return media_from_base64(inner.needed_text("data"), inner.name("data"), at, "audio")


_FILES: dict[Modality, str] = {"image": "image", "audio": "file"}


def _with_article(modality: Modality) -> str:
    return "an image" if modality == "image" else "audio"


def refuse_media(name: str) -> NoReturn:
    why = "only text, images, audio and documents are"
    raise UsageError(f"{name} can't be read", why=why, hint="leave it out")


_DOCUMENT_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)?[^,]{0,200};base64,")
_MOST_TEXTS = 32  # that are remembered
DOCUMENT_THREADS = ThreadPoolExecutor(2, "documents")
"""Threads for bodies for which has_documents() is true, so that slow ones hold up each other alone."""


def anthropic_document(block: Fields) -> str:
    """Return the text of a `document` block.

    Raises:
        UsageError: it is a reference to a file or URL, or invalid.
    """
    source = block.object("source") or Fields({}, block.name("source"))
    kind = source.choice("type", "text", "base64", "content", "url", "file")
    title = block.text("title") or ""
    if kind == "text":
        return _titled(title, source.needed_text("data"))
    if kind == "content":
        if isinstance(source.value("content"), str):
            return _titled(title, source.needed_text("content"))
        parts = (part.text("text") or "" for part in source.objects("content"))
        return _titled(title, "\n".join(filter(None, parts)))
    if kind != "base64":
        refuse_media(f"{block.name('source')} {kind!r}")
    return _decoded(source, "data", source.needed_text("data"), source.text("media_type") or "", title)


def openai_file(part: Fields) -> str:
    """Return the text of a `file` or `input_file` part. Raises as anthropic_document()."""
    inner = part.object("file") or part
    data = inner.text("file_data")
    if data is None:
        refuse_media(f"{part.name('type')} {part.text('type')!r} without file_data")
    found = _DOCUMENT_URL.match(data)
    kind, text = (found[1] or "", data[found.end() :]) if found else ("", data)
    return _decoded(inner, "file_data", text, kind, inner.text("filename") or "")


def has_documents(body: bytes) -> bool:
    """Return whether a request may hold documents."""
    return b'"file_data"' in body or b'"document"' in body


def _decoded(fields: Fields, key: str, data: str, kind: str, title: str) -> str:
    """Return the text of a file in base64; of one that has none, a line that says so."""
    try:
        raw = base64.b64decode(data, validate=True)
    except ValueError:  # also for other than ASCII
        raise UsageError(f"invalid {fields.name(key)}", why="must be base64") from None
    try:
        read = _DOCUMENTS.text_of(raw, title or kind or "a file")
    except UsageError as error:
        what = title or kind or "a file"
        return f"[document omitted: {what}: {error.why}]"
    said = f"{title} ({read.note})" if title and read.note else title or read.note
    return _titled(said, read.text)


class _Documents:
    """The texts of the last documents: a client sends its documents again with every question."""

    def __init__(self) -> None:
        self._texts: OrderedDict[str, FileText] = OrderedDict()
        self._lock = threading.Lock()

    def text_of(self, data: bytes, name: str) -> FileText:
        """Return the text of a file. Raises UsageError as chat.attachments.text_of()."""
        key = hashlib.sha256(data + name.encode("utf-8", "surrogatepass")).hexdigest()
        with self._lock:
            if key in self._texts:
                self._texts.move_to_end(key)
                return self._texts[key]
        read = text_of(data, name)
        with self._lock:
            self._texts[key] = read
            if len(self._texts) > _MOST_TEXTS:
                self._texts.popitem(last=False)
        return read


_DOCUMENTS = _Documents()


def _titled(title: str, text: str) -> str:
    return f"{title}\n\n{text}" if title else text
