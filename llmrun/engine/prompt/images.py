"""The images of a conversation: placeholders for the chat template, and checks of image files before decoding. Pure."""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Sequence
from dataclasses import replace

from llmrun.errors import UsageError
from llmrun.protocol.messages import Image, Message

_OMITTED = "[image omitted: this model has no vision]"
MAX_PIXELS = 64 << 20  # Of one image: it takes three bytes each while decoded, and some copies
_PRIVATE = range(0xF0000, 0xFFFFE)  # plane 15, private use: no tokenizer has special tokens there
_SIZED_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # JPEG segments with the size
_WITHOUT_LENGTH = frozenset((0x01, *range(0xD0, 0xD8)))


def with_placeholders(messages: Sequence[Message]) -> tuple[Sequence[Message], dict[str, Image]]:
    """Replace each image by a private character; return the messages, and the image of each character."""
    images = [image for message in messages for image in message.pictures]
    if not images:
        return messages, {}
    used = set().union(*(text for message in messages for text in message.texts))
    free = (chr(code) for code in _PRIVATE if chr(code) not in used)
    placeholders = dict(zip(free, images, strict=False))
    if len(placeholders) < len(images):
        raise UsageError("the conversation uses up all private characters of Unicode")
    characters = iter(placeholders)
    replaced = []
    for message in messages:
        content = message.content
        for image in reversed(message.pictures):
            at = min(max(image.at, 0), len(content))
            content = f"{content[:at]}\0{content[at:]}"
        for _ in message.pictures:
            content = content.replace("\0", next(characters), 1)
        replaced.append(replace(message, content=content, pictures=()) if message.pictures else message)
    return replaced, placeholders


def with_omitted_images(messages: Sequence[Message]) -> list[Message]:
    """Replace the images in results of tools by a line, for a model without vision; images of users stay."""
    rewritten = []
    for message in messages:
        if message.role == "tool" and message.pictures:
            lines = "\n".join([_OMITTED] * len(message.pictures))
            message = replace(message, content=f"{message.content}\n{lines}".lstrip("\n"), pictures=())
        rewritten.append(message)
    return rewritten


def image_bytes(image: Image) -> tuple[bytes, int, int]:
    """Return an image's file, width and height.

    Raises:
        UsageError: the format is not supported, or the image is too large.
    """
    name = image.name or "an image"
    try:
        data = base64.b64decode(image.data, validate=True)
    except binascii.Error:
        raise UsageError(f"{name} can't be read", why="its data are not base64") from None
    try:
        width, height = _size_of(data)
    except (struct.error, IndexError):
        raise UsageError(f"{name} can't be read as an image", why="its beginning is damaged") from None
    if width * height > MAX_PIXELS:
        why = f"it has {width:,} x {height:,} pixels, the maximum is {MAX_PIXELS:,}"
        raise UsageError(f"{name} is too large", why=why)
    if width < 1 or height < 1:
        raise UsageError(f"{name} can't be read as an image", why="it has no pixels")
    return data, width, height


def _size_of(data: bytes) -> tuple[int, int]:
    """Return width and height from the header, so that no decoder allocates memory for a hostile one.

    Raises:
        struct.error, IndexError: the file is truncated.
        UsageError: the format is not supported.
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
        raise UsageError("this image format is not supported", why="must be PNG, JPEG, GIF or BMP", hint=hint)
    return width, abs(height)


def _jpeg_size(data: bytes) -> tuple[int, int]:
    offset = 2
    while True:
        while data[offset] != 0xFF:
            offset += 1
        while data[offset] == 0xFF:
            offset += 1
        kind = data[offset]
        if kind in _SIZED_FRAMES:
            height, width = struct.unpack_from(">HH", data, offset + 4)
            return width, height
        offset += 1 if kind in _WITHOUT_LENGTH else 1 + struct.unpack_from(">H", data, offset + 1)[0]
