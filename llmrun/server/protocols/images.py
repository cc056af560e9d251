"""Images in a client's JSON body. Pure; nothing is fetched, and only the engine decodes images."""

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
