"""Images and documents in a client's JSON body. Pure; nothing is fetched, and only the engine decodes images.

Documents that are not text become a line that names what was left out.
"""

from __future__ import annotations

import base64
import re
from typing import NoReturn

from llmrun.errors import UsageError
from llmrun.protocol.messages import PICTURE_BEGINNINGS, Image
from llmrun.server.protocols.fields import Fields

_DATA_URL = re.compile(r"data:image/[\w.+-]{1,80};base64,")
_MAGIC_LENGTH = 12  # characters of base64 that hold the longest magic number


def image_from_url(fields: Fields, key: str, at: int) -> Image:
    """Return the image of a data: URL, which is a string, or an object with a field `url`.

    Args:
        at: number of characters of the message before the image.

    Raises:
        UsageError: it is another URL, or not an image.
    """
    if isinstance(fields.value(key), dict):
        fields, key = fields.object(key) or fields, "url"
    url = fields.needed_text(key)
    found = _DATA_URL.match(url)
    if found is None:
        why = "must be a data: URL with an image in base64"
        raise UsageError(f"invalid {fields.name(key)}", why=why, hint="images are not fetched from other addresses")
    return image_from_base64(url[found.end() :], fields.name(key), at)


def image_from_base64(data: str, name: str, at: int) -> Image:
    """Return an image in base64.

    Args:
        name: of the field.

    Raises:
        UsageError: it is not an image.
    """
    try:
        magic = base64.b64decode(data[:_MAGIC_LENGTH], validate=True)
    except ValueError:  # also for other than ASCII
        raise UsageError(f"invalid {name}", why="must be an image in base64") from None
    if not magic.startswith(PICTURE_BEGINNINGS):
        raise UsageError(f"invalid {name}", why="must be a PNG, JPEG, GIF, BMP or WebP image")
    return Image(data, name, at)


def refuse_media(name: str) -> NoReturn:
    raise UsageError(f"{name} can't be read", why="only text, images and documents of text are", hint="leave it out")


_DOCUMENT_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)?[^,]{0,200};base64,")
_TEXT_TYPES = ("text/", "application/json", "application/xml", "application/x-yaml", "application/javascript")


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


def _decoded(fields: Fields, key: str, data: str, kind: str, title: str) -> str:
    """Return base64 data as text if they are text; without a type, if they are UTF-8."""
    try:
        raw = base64.b64decode(data, validate=True)
    except ValueError:  # also for other than ASCII
        raise UsageError(f"invalid {fields.name(key)}", why="must be base64") from None
    if not kind or kind.startswith(_TEXT_TYPES):
        try:
            return _titled(title, raw.decode("utf-8-sig"))
        except UnicodeDecodeError:
            kind = kind or "data"
    kind = "PDF" if raw.startswith(b"%PDF") else kind
    return f"[document omitted: {title + ' is ' if title else ''}{kind}, and only text is read]"


def _titled(title: str, text: str) -> str:
    return f"{title}\n\n{text}" if title else text
