"""The orientation of an image: by the Exif tag that cameras write, an image is turned or mirrored when it is shown.

Pure. The files are untrusted: a damaged tag is no tag.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

_EXIF = b"Exif\0\0"
_TAG, _SHORT, _LONG = 0x0112, 3, 4
_ORIENTATIONS = range(1, 9)
_START_OF_SCAN = 0xDA
_WITHOUT_LENGTH = frozenset((0x01, *range(0xD0, 0xD9)))
_MOST_ENTRIES = 512


def orientation_of(data: bytes) -> int:
    """Return the orientation of a JPEG, PNG or WebP image, 1 to 8 as Exif numbers them; 1 is as it is stored."""
    try:
        return next(filter(None, map(_in_tiff, _exif_blocks(data))), 1)
    except (struct.error, IndexError):
        return 1


def _exif_blocks(data: bytes) -> Iterator[bytes]:
    """Yield the blocks of Exif in a file: TIFF, whose first bytes tell its byte order."""
    if data.startswith(b"\x89PNG"):
        blocks = (content for kind, content in _chunks(data, 8, ">", 4) if kind == b"eXIf")
    elif data.startswith(b"RIFF"):
        blocks = (content for kind, content in _chunks(data, 12, "<", 0) if kind == b"EXIF")
    elif data.startswith(b"\xff\xd8"):
        blocks = (content for content in _app1_segments(data) if content.startswith(_EXIF))
    else:
        return
    yield from (block.removeprefix(_EXIF) for block in blocks)


def _chunks(data: bytes, offset: int, order: str, checksum: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield the kind and the content of each chunk of a PNG or WebP file.

    Args:
        order: of the bytes of its length, "<" or ">"; in a WebP file the kind stands before it, and sizes are even.
        checksum: bytes after the content.
    """
    while offset + 8 <= len(data):
        first, second = data[offset : offset + 4], data[offset + 4 : offset + 8]
        kind, length = (second, first) if order == ">" else (first, second)
        (size,) = struct.unpack(f"{order}I", length)
        yield kind, data[offset + 8 : offset + 8 + size]
        offset += 8 + size + checksum + (size % 2 if order == "<" else 0)


def _app1_segments(data: bytes) -> Iterator[bytes]:
    """Yield the APP1 segments of a JPEG before its image."""
    offset = 2
    while data[offset] == 0xFF:
        kind = data[offset + 1]
        if kind == _START_OF_SCAN:
            return
        if kind == 0xFF:  # fill byte
            offset += 1
            continue
        if kind in _WITHOUT_LENGTH:
            offset += 2
            continue
        (size,) = struct.unpack_from(">H", data, offset + 2)
        if kind == 0xE1:
            yield data[offset + 4 : offset + 2 + size]
        offset += 2 + size


def _in_tiff(block: bytes) -> int:
    """Return the orientation in the first directory of a TIFF; 0 without one."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(block[:4])
    if order is None:
        return 0
    (start,) = struct.unpack_from(f"{order}I", block, 4)
    (count,) = struct.unpack_from(f"{order}H", block, start)
    for number in range(min(count, _MOST_ENTRIES)):
        tag, kind = struct.unpack_from(f"{order}HH", block, start + 2 + 12 * number)
        if tag == _TAG and kind in (_SHORT, _LONG):
            (value,) = struct.unpack_from(f"{order}{'H' if kind == _SHORT else 'I'}", block, start + 10 + 12 * number)
            return int(value) if value in _ORIENTATIONS else 0
    return 0
