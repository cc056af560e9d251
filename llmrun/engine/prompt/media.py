"""The images and audio of a conversation: checks of files before decoding.

Pure. Sizes and lengths are read from the headers, so that no decoder allocates memory for a hostile file.
"""

from __future__ import annotations

import base64
import io
import re
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from llmrun.engine.llama.base import MAX_SECONDS, CheckedFile, check_seconds
from llmrun.engine.prompt.orientation import orientation_of
from llmrun.errors import UsageError
from llmrun.protocol.media import FORMATS, Media, Modality, conversion, modality_of, must_be_converted, other_audio
from llmrun.protocol.messages import Message

_OMITTED = "[image omitted: this model has no vision]"
_OMITTED_AUDIO = "[audio omitted: this model can't hear]"
_NO_WEBP = "[image omitted: it is WebP, and Pillow is not installed]"
_RIFF = "UklGR"  # base64 of RIFF
MAX_PIXELS = 64 << 20  # Of one image: it takes three bytes each while decoded, and some copies
_TURNED = 5  # the first orientation whose sides are exchanged
_SIZED_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # JPEG segments with the size
_WITHOUT_LENGTH = frozenset((0x01, *range(0xD0, 0xD8)))
# Of WAV files, by their format tag: integers, floats, A-law, µ-law, and one whose tag stands in its extension.
_WITHOUT_COMPRESSION = frozenset((1, 3, 6, 7))
_EXTENSIBLE = 0xFFFE
# A frame of an MP3 file that counts all frames: its header, side information by version, channels and checksum, and a
# tag where the samples would stand.
_MP3_COUNT = re.compile(
    rb"\xff([\xe2\xe3\xf2\xf3\xfa\xfb])(.).(?:.{9}|.{11}|.{17}|.{19}|.{32}|.{34})(?:Xing|Info)....(.{4})", re.DOTALL
)
_MP3_RATES = ((11_025, 12_000, 8_000), (), (22_050, 24_000, 16_000), (44_100, 48_000, 32_000))  # of each version


def without_unreadable(messages: Sequence[Message], modalities: frozenset[Modality]) -> Sequence[Message]:
    """Replace what the model can't read in results of tools by a line each; other files of users stay.

    A result's image may stand in the user's message after it, because many servers take none in a result (Cline).

    Args:
        modalities: of the model.
    """
    if not any(message.media for message in messages):
        return messages
    found, before = list[Message](), ""
    for message in messages:
        is_result = message.role == "tool" or (before, message.role) == ("tool", "user")
        found.append(_with_lines(message, modalities) if is_result and message.media else message)
        before = message.role
    return found


def _with_lines(message: Message, modalities: frozenset[Modality]) -> Message:
    found = [(media, _why_omitted(media, modalities)) for media in message.media]
    lines = [why for _, why in found if why]
    kept = tuple(media for media, why in found if not why)
    return replace(message, content="\n".join([message.content, *lines]).lstrip("\n"), media=kept)


def _why_omitted(media: Media, modalities: frozenset[Modality]) -> str:
    modality = media.modality
    if modality == "audio":
        return "" if "audio" in modalities else _OMITTED_AUDIO
    if "image" not in modalities:
        return _OMITTED
    return _NO_WEBP if media.data.startswith(_RIFF) and _pillow() is None else ""


def _pillow() -> Any:
    """Return Pillow's module of images; None if it is not installed."""
    try:
        from PIL import Image as pillow  # type: ignore[import-not-found,unused-ignore]  # noqa: N813 - a module
    except ImportError:
        return None
    return pillow


def checked_file(media: Media) -> CheckedFile:
    """Return an image or an audio file, decoded from base64 and checked by its header.

    Raises:
        UsageError: the format is not supported, or it is too large, too long or too short.
    """
    name = media.name or "a file"
    try:
        data = base64.b64decode(media.data, validate=True)
    except ValueError:  # also for other than ASCII
        raise UsageError(f"{name} can't be read", why="its data are not base64") from None
    modality = modality_of(data)
    if modality is None:
        if other_audio(data):
            raise must_be_converted(data, name, f"{name} can't be read")
        why = f"images must be {FORMATS['image']}, audio {FORMATS['audio']}"
        raise UsageError(f"{name} can't be read", why=why, hint="save it in one of these")
    try:
        if modality == "audio":
            _check_length(data, name)
            return CheckedFile(modality, data)
        orientation = orientation_of(data)
        if data.startswith(b"RIFF"):
            data = _as_png(data, name)
        width, height = _size_of(data)
    except (struct.error, IndexError):
        raise UsageError(f"{name} can't be read as {modality}", why="its beginning is damaged") from None
    _check_size(width, height, name)
    if orientation >= _TURNED:
        width, height = height, width
    return CheckedFile(modality, data, width, height, orientation)


# ---- images ----------------------------------------------------------------------------------------


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


def _size_of(data: bytes) -> tuple[int, int]:
    """Return width and height of an image from its header.

    Raises:
        struct.error, IndexError: the file is truncated.
    """
    width: int
    height: int
    if data.startswith(b"\x89PNG"):
        width, height = struct.unpack_from(">II", data, 16)
    elif data.startswith(b"GIF8"):
        width, height = struct.unpack_from("<HH", data, 6)
    elif data.startswith(b"BM"):
        width, height = struct.unpack_from("<ii", data, 18)
    else:
        return _jpeg_size(data)
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


# ---- audio -----------------------------------------------------------------------------------------


def _check_length(data: bytes, name: str) -> None:
    """Check the length that an audio file states. Decoders allocate it; the real one may be shorter.

    Raises:
        struct.error, IndexError: the file is truncated.
        UsageError: it is too long, too short, or its samples can't be decoded.
    """
    data = _after_tags(data)
    if data.startswith(b"fLaC"):
        seconds = _flac_seconds(data)
    elif data.startswith(b"RIFF"):
        seconds = _wav_seconds(data)
    else:
        seconds = _mp3_seconds(data)
    if seconds is None:
        raise UsageError(f"{name} can't be read", why="its header does not state its length", hint=conversion(name))
    check_seconds(seconds, name)


def _after_tags(data: bytes) -> bytes:
    """Return a file without the ID3v2 tags before it (https://id3.org/id3v2.4.0-structure)."""
    offset = 0
    while data[offset : offset + 3] == b"ID3":
        flags, a, b, c, d = struct.unpack_from(">5B", data, offset + 5)
        offset += 10 + (a << 21 | b << 14 | c << 7 | d) + (10 if flags & 0x10 else 0)
    return data[offset:] if offset else data


def _wav_seconds(data: bytes) -> float | None:
    """Return the length of a WAV file; None if its samples are compressed, or there are none."""
    offset, frame, rate = 12, 0, 0
    while offset + 8 <= len(data):
        kind, size = struct.unpack_from("<4sI", data, offset)
        if kind == b"fmt ":
            tag, channels, rate, _, block, bits = struct.unpack_from("<HHIIHH", data, offset + 8)
            if tag == _EXTENSIBLE:
                (tag,) = struct.unpack_from("<H", data, offset + 32)
            if tag not in _WITHOUT_COMPRESSION:
                return None
            frame = block if bits % 8 else channels * bits // 8
        elif kind == b"data":
            if not frame or not rate:
                return None
            return float(min(size, len(data) - offset - 8) / frame / rate)
        offset += 8 + size + size % 2
    return None


def _flac_seconds(data: bytes) -> float | None:
    """Return the length of a FLAC file, by its first block (RFC 9639, section 8.2)."""
    numbers = int(struct.unpack_from(">Q", data, 18)[0])
    rate, n_samples = numbers >> 44, numbers & (1 << 36) - 1
    return n_samples / rate if rate and n_samples else None


def _mp3_seconds(data: bytes) -> float | None:
    """Return the length that an MP3 file states; else a bound, as long as its bytes last at 8 kbit/s.

    The decoder looks for the first frame anywhere, so that every frame may be the one that states it.
    """
    if data.startswith(b"OggS"):
        return None
    stated: list[float] = []
    for frame in _MP3_COUNT.finditer(data):
        (second,), (third,), number = frame.groups()
        version, rate = second >> 3 & 3, third >> 2 & 3
        n_samples = int.from_bytes(number, "big") * (1152 if version == 3 else 576)
        stated.append(n_samples / _MP3_RATES[version][rate])
    return max(stated, default=min(len(data) / 1000, MAX_SECONDS))
