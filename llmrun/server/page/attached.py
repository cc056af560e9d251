"""Files that come with a question of the page: texts for its message, and images, which a saved chat has by their path.

Must not know chats or models.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import NamedTuple

from llmrun.errors import UsageError
from llmrun.protocol.messages import PICTURE_BEGINNINGS
from llmrun.server.protocols.fields import Fields
from llmrun.storage import write_whole

_UNSAFE = re.compile(r"[^\w.() -]|^\.+")
_LONGEST_NAME = 200  # bytes; a file system has 255, and a file being written a few more in its name


class Upload(NamedTuple):
    """One file."""

    name: str
    data: bytes


class Uploads(NamedTuple):
    """The files of one question."""

    texts: tuple[Upload, ...] = ()  # in UTF-8
    images: tuple[Upload, ...] = ()


NO_UPLOADS = Uploads()


def read_uploads(fields: Fields) -> Uploads:
    """Return the files in a request: {"files": [{"name", "text"}], "images": [{"name", "data" in base64}]}.

    Raises:
        UsageError: an image is not one that the engine can decode.
    """
    texts = [
        Upload(_name(each), each.needed_text("text").encode("utf-8", "replace")) for each in fields.objects("files")
    ]
    images = tuple(map(read_upload, fields.objects("images")))
    for image in images:
        if not image.data.startswith(PICTURE_BEGINNINGS):
            raise UsageError(f"{image.name} can't be attached", why="it is not a PNG, JPEG, GIF, BMP or WebP image")
    return Uploads(tuple(texts), images)


def read_upload(fields: Fields) -> Upload:
    """Return a file: {"name", "data" in base64}. Raises UsageError if it is not in base64."""
    try:
        data = base64.b64decode(fields.needed_text("data"), validate=True)
    except ValueError:  # also for other than ASCII
        raise UsageError(f"invalid {fields.name('data')}", why="must be a file in base64") from None
    return Upload(_name(fields), data)


def save_images(images: tuple[Upload, ...], folder: Path) -> list[Path]:
    """Write images to a folder, each in one named after its hash, and return the files."""
    files = [folder / hashlib.sha256(image.data).hexdigest() / image.name for image in images]
    for file, image in zip(files, images, strict=True):
        if not file.exists():
            write_whole(file, image.data, makes_folder=True)
    return files


def _name(upload: Fields) -> str:
    """Return the name of a file without folders."""
    name = upload.needed_text("name").replace("\\", "/").rpartition("/")[2]
    return _UNSAFE.sub("_", name).encode()[:_LONGEST_NAME].decode(errors="ignore") or "file"
