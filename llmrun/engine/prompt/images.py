"""Pictures in a conversation: where they stand in what a template writes, and what their files say of themselves.

Owns the limits that hold before a decoder sees a file; must not know llama.cpp. Pure.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Sequence
from dataclasses import replace

from llmrun.errors import UsageError
from llmrun.protocol.messages import Image, Message

MOST_PIXELS = 64 << 20
"""Of one picture: three bytes each while it is decoded, and some copies."""
_PRIVATE = range(0xF0000, 0xFFFFE)  # plane 15, private use: no tokenizer gives it a meaning
_SIZED_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # JPEG segments that tell the size
_WITHOUT_LENGTH = frozenset((0x01, *range(0xD0, 0xD8)))


def marked(messages: Sequence[Message]) -> tuple[Sequence[Message], dict[str, Image]]:
    """The messages with a private character in place of each picture, and which picture each stands for."""
    pictures = [picture for message in messages for picture in message.pictures]
    if not pictures:
        return messages, {}
    used = set().union(*(text for message in messages for text in message.texts))
    free = (chr(code) for code in _PRIVATE if chr(code) not in used)
    characters = dict(zip(free, pictures, strict=False))
    if len(characters) < len(pictures):
        raise UsageError("the conversation uses up all private characters of Unicode")
    names = iter(characters)
    told = []
    for message in messages:
        content = message.content
        for picture in reversed(message.pictures):
            at = min(max(picture.at, 0), len(content))
            content = f"{content[:at]}\0{content[at:]}"
        for _ in message.pictures:
            content = content.replace("\0", next(names), 1)
        told.append(replace(message, content=content, pictures=()) if message.pictures else message)
    return told, characters


def image_bytes(picture: Image) -> tuple[bytes, int, int]:
    """A picture's file, its width and its height.

    Raises:
        UsageError: it is no picture that is taken, or too large.
    """
    name = picture.name or "a picture"
    try:
        data = base64.b64decode(picture.data, validate=True)
    except binascii.Error:
        raise UsageError(f"{name} can't be read", why="its data are not base64") from None
    try:
        width, height = _size_of(data)
    except (struct.error, IndexError):
        raise UsageError(f"{name} can't be read as a picture", why="its beginning is damaged") from None
    if width * height > MOST_PIXELS:
        why = f"it has {width:,} x {height:,} pixels, at most {MOST_PIXELS:,} are taken"
        raise UsageError(f"{name} is too large", why=why)
    if width < 1 or height < 1:
        raise UsageError(f"{name} can't be read as a picture", why="it has no pixels")
    return data, width, height


def _size_of(data: bytes) -> tuple[int, int]:
    """Width and height by a file's beginning, so that no decoder allocates what a few bytes ask for.

    Raises:
        struct.error, IndexError: the file ends before it has told.
        UsageError: it is of no kind that is taken.
    """
    width: int
    height: int
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        width, height = struct.unpack_from(">II", data, 16)
    elif data.startswith(b"GIF8"):
        width, height = struct.unpack_from("<HH", data, 6)
    elif data.startswith(b"BM"):
        width, height = struct.unpack_from("<ii", data, 18)
    elif data.startswith(b"\xff\xd8"):
        return _jpeg_size(data)
    else:
        hint = "save it as PNG or JPEG"
        raise UsageError("this is not a picture that can be read", why="must be PNG, JPEG, GIF or BMP", hint=hint)
    return width, abs(height)


def _jpeg_size(data: bytes) -> tuple[int, int]:
    place = 2
    while True:
        while data[place] != 0xFF:
            place += 1
        while data[place] == 0xFF:
            place += 1
        kind = data[place]
        if kind in _SIZED_FRAMES:
            height, width = struct.unpack_from(">HH", data, place + 4)
            return width, height
        place += 1 if kind in _WITHOUT_LENGTH else 1 + struct.unpack_from(">H", data, place + 1)[0]
