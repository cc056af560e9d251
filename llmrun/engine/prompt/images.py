"""The images of a conversation: placeholders for the chat template, and checks of image files before decoding. Pure."""

from __future__ import annotations

import base64
import io
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from llmrun.errors import UsageError
from llmrun.protocol.messages import Image, Message

_OMITTED = "[image omitted: this model has no vision]"
_NO_WEBP = "[image omitted: it is WebP, and Pillow is not installed]"
_WEBP_HEADS = "UklGR"  # base64 of RIFF
MAX_PIXELS = 64 << 20  # Of one image: it takes three bytes each while decoded, and some copies
PRIVATE = range(0xF0000, 0xFFFFE)  # plane 15, private use: no tokenizer has special tokens there
_SIZED_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # JPEG segments with the size
_WITHOUT_LENGTH = frozenset((0x01, *range(0xD0, 0xD8)))


def with_placeholders(messages: Sequence[Message]) -> tuple[Sequence[Message], dict[str, Image]]:
    """Replace each image by a private character; return the messages, and the image of each character."""
    images = [image for message in messages for image in message.pictures]
    if not images:
        return messages, {}
    used = set().union(*(text for message in messages for text in message.texts))
    free = (chr(code) for code in PRIVATE if chr(code) not in used)
    placeholders = dict(zip(free, images, strict=False))
    if len(placeholders) < len(images):
        raise UsageError("the conversation uses up all private characters of Unicode")
    characters = iter(placeholders)
    replaced = []
    for message in messages:
        content = message.content
        for image, character in reversed([*zip(message.pictures, characters, strict=False)]):
            at = min(max(image.at, 0), len(message.content))
            content = f"{content[:at]}{character}{content[at:]}"
        replaced.append(replace(message, content=content, pictures=()) if message.pictures else message)
    return replaced, placeholders


def with_omitted_images(messages: Sequence[Message], *, sees: bool) -> Sequence[Message]:
    """Replace the unreadable images in results of tools by a line each; images of users stay.

    Args:
        sees: the model has vision.
    """
    if not any(message.role == "tool" and message.pictures for message in messages):
        return messages
    return [_with_lines(message, sees=sees) if message.role == "tool" else message for message in messages]


def _with_lines(message: Message, *, sees: bool) -> Message:
    has_webp = _pillow() is not None
    kept = tuple(image for image in message.pictures if sees and (has_webp or not image.data.startswith(_WEBP_HEADS)))
    lines = [_NO_WEBP if sees else _OMITTED] * (len(message.pictures) - len(kept))
    return replace(message, content="\n".join([message.content, *lines]).lstrip("\n"), pictures=kept)


def _pillow() -> Any:
    """Return Pillow's module of images; None if it is not installed."""
    try:
        from PIL import Image as pillow  # type: ignore[import-not-found,unused-ignore]  # noqa: N813 - a module
    except ImportError:
        return None
    return pillow


def _as_png(data: bytes, name: str) -> bytes:
    """Convert a WebP image.

    Raises:
        UsageError: it is damaged or too large, or Pillow is not installed.
    """
    pillow = _pillow()
    if pillow is None:
        hint = "pip install 'llmrun[webp]', or save it as PNG"
        raise UsageError(f"{name} can't be read", why="it is WebP, and Pillow is not installed", hint=hint)
    try:
        with pillow.open(io.BytesIO(data), formats=["WEBP"]) as image:
            _check_size(image.width, image.height, name)
            png = io.BytesIO()
            image.convert("RGB").save(png, "PNG", compress_level=1)
    except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as error:
        raise UsageError(f"{name} can't be read as an image", why=str(error)[:200]) from None
    return png.getvalue()


def _check_size(width: int, height: int, name: str) -> None:
    """Raise UsageError for an image without pixels, or with too many."""
    if width * height > MAX_PIXELS:
        why = f"it has {width:,} x {height:,} pixels, the maximum is {MAX_PIXELS:,}"
        raise UsageError(f"{name} is too large", why=why)
    if width < 1 or height < 1:
        raise UsageError(f"{name} can't be read as an image", why="it has no pixels")


def image_bytes(image: Image) -> tuple[bytes, int, int]:
    """Return an image's file, width and height.

    Raises:
        UsageError: the format is not supported, or the image is too large.
    """
    name = image.name or "an image"
    try:
        data = base64.b64decode(image.data, validate=True)
    except ValueError:  # also for other than ASCII
        raise UsageError(f"{name} can't be read", why="its data are not base64") from None
    if data.startswith(b"RIFF"):
        data = _as_png(data, name)
    try:
        width, height = _size_of(data)
    except (struct.error, IndexError):
        raise UsageError(f"{name} can't be read as an image", why="its beginning is damaged") from None
    _check_size(width, height, name)
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
        raise UsageError("this image format is not supported", why="must be PNG, JPEG, GIF, BMP or WebP", hint=hint)
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
