"""Images and audio in messages, as files that only the engine decodes. Must not know conversations or terminals."""

from __future__ import annotations

import base64
import shlex
from pathlib import Path
from typing import Literal, NamedTuple

from llmrun.errors import UsageError

Modality = Literal["image", "audio"]
MODALITIES: frozenset[Modality] = frozenset(("image", "audio"))
FORMATS: dict[Modality, str] = {"image": "PNG, JPEG, GIF, BMP or WebP", "audio": "WAV, MP3 or FLAC"}
"""The formats that the engine can decode."""
PLURALS: dict[Modality, str] = {"image": "images", "audio": "audio"}

_BEGINNINGS: tuple[tuple[bytes, Modality], ...] = (
    (b"\x89PNG\r\n\x1a\n", "image"),
    (b"\xff\xd8\xff", "image"),
    (b"GIF8", "image"),
    (b"BM", "image"),
    (b"fLaC", "audio"),
    (b"ID3", "audio"),
    # MPEG audio layer III; the mark of UTF-16, FF FE, would be layer I.
    *((bytes((0xFF, second)), "audio") for second in (0xFB, 0xFA, 0xF3, 0xF2, 0xE3, 0xE2)),
)
_IN_RIFF: dict[bytes, Modality] = {b"WEBP": "image", b"WAVE": "audio"}
# Recordings in other formats, by what the file begins with.
_OTHER_AUDIO = (
    (b"OggS", "Ogg"),
    (b"\xff\xf1", "AAC"),
    (b"\xff\xf9", "AAC"),
    (b"FORM", "AIFF"),
    (b"RF64", "RF64"),
    (b"#!AMR", "AMR"),
    (b"\x1aE\xdf\xa3", "WebM or Matroska"),
    (b"0&\xb2u\x8ef\xcf\x11", "WMA"),
)
_N_MAGIC = 12  # bytes in which all of these are
_MAGIC_LENGTH = 16  # characters of base64 that hold them


class Media(NamedTuple):
    """An image or an audio file in a message. Only the engine decodes it: a hostile file kills no other process."""

    data: str  # the file, in base64
    name: str = ""  # of the file, for messages to the user
    at: int = 0  # number of characters of the message's content before it

    @property
    def modality(self) -> Modality | None:
        """Its kind; None if the engine can't decode it."""
        return modality_of(beginning_of(self.data))


def beginning_of(data: str) -> bytes:
    """Return the first bytes of a file in base64; none if it is not base64."""
    try:
        return base64.b64decode(data[:_MAGIC_LENGTH], validate=True)
    except ValueError:  # also for other than ASCII
        return b""


def modality_of(data: bytes) -> Modality | None:
    """Return the kind of a file that the engine can decode, by its beginning; None if it can't."""
    if data[:4] == b"RIFF":
        return _IN_RIFF.get(data[8:_N_MAGIC])
    return next((modality for beginning, modality in _BEGINNINGS if data.startswith(beginning)), None)


def other_audio(data: bytes) -> str:
    """Return the name of the format of a recording that has to be converted first, by its beginning; "" if unknown."""
    if data[4:8] == b"ftyp":
        return "MP4"
    return next((name for beginning, name in _OTHER_AUDIO if data.startswith(beginning)), "")


def conversion(name: str) -> str:
    """Return the command that makes a recording one that the engine can decode."""
    path = Path(name)
    return shlex.join(["ffmpeg", "-i", str(path), "-ac", "1", "-ar", "16000", f"{path.stem or 'audio'}-16k.flac"])


def must_be_converted(data: bytes, name: str, what: str) -> UsageError:
    """Return the error for a recording in another format.

    Args:
        name: of the file, or of what holds it.
        what: the beginning of the message, such as "a.ogg can't be attached".
    """
    why = f"it is {other_audio(data)}; audio must be {FORMATS['audio']}"
    return UsageError(what, why=why, hint=conversion(name))
