"""Where cameras write how an image is shown, and files whose tags are damaged."""

from __future__ import annotations

import struct

import pytest

from llmrun.engine.prompt.orientation import orientation_of

JFIF = b"\xff\xe0\x00\x04JF"
START = b"\xff\xda\x00\x04ab"


def exif(orientation: int, order: str = ">", kind: int = 3, tag: int = 0x0112) -> bytes:
    """Return a TIFF with two tags."""
    value = struct.pack(f"{order}{'H2x' if kind == 3 else 'I'}", orientation)
    entries = struct.pack(f"{order}HHI4x", 0x010F, 2, 1) + struct.pack(f"{order}HHI", tag, kind, 1) + value
    mark = b"MM\0*" if order == ">" else b"II*\0"
    return mark + struct.pack(f"{order}IH", 8, 2) + entries + b"\0\0\0\0"


def jpeg(block: bytes, before: bytes = JFIF, name: bytes = b"Exif\0\0") -> bytes:
    segment = name + block
    return b"\xff\xd8" + before + b"\xff\xe1" + struct.pack(">H", len(segment) + 2) + segment + START


def png(block: bytes) -> bytes:
    header = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4s13x4x", 13, b"IHDR")
    return header + struct.pack(">I", len(block)) + b"eXIf" + block + b"\0\0\0\0"


def webp(block: bytes) -> bytes:
    return (
        b"RIFF\0\0\0\0WEBP"
        + struct.pack("<4sI", b"VP8 ", 3)
        + b"odd\0"
        + struct.pack("<4sI", b"EXIF", len(block))
        + block
    )


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("kind", [3, 4])
def test_the_tag_is_found(orientation: int, order: str, kind: int) -> None:
    block = exif(orientation, order, kind)
    for file in (
        jpeg(block),
        jpeg(block, b""),
        jpeg(block, b"\xff" + JFIF),
        png(block),
        webp(block),
        webp(b"Exif\0\0" + block),
    ):
        assert orientation_of(file) == orientation


def test_other_segments_stand_before_it() -> None:
    xmp = b"\xff\xe1\x00\x0chttp://x\0\0"
    assert orientation_of(jpeg(exif(6), xmp)) == 6


@pytest.mark.parametrize(
    "data",
    [
        jpeg(exif(0)),
        jpeg(exif(9)),
        jpeg(exif(6, tag=0x0113)),
        jpeg(exif(6, kind=5)),
        jpeg(exif(6), START),
        jpeg(b"XX*\0"),
        jpeg(exif(6)[:14]),
        jpeg(b"MM\0*\xff\xff\xff\xff"),
        jpeg(exif(6))[:30],
        jpeg(exif(6), b"\xff\xe0\x00\x00"),
        png(exif(6))[:40],
        b"GIF89a",
        b"BM",
        b"\xff\xd8\xff",
        b"",
    ],
)
def test_without_a_valid_tag_an_image_is_shown_as_it_is_stored(data: bytes) -> None:
    assert orientation_of(data) == 1
