"""Pictures in a client's JSON body. Pure; nothing is fetched, and only the engine decodes them."""

from __future__ import annotations

import base64
import binascii
import re

from llmrun.errors import UsageError
from llmrun.protocol.messages import PICTURE_BEGINNINGS, Image
from llmrun.server.protocols.fields import Fields

_DATA_URL = re.compile(r"data:image/[\w.+-]{1,80};base64,")
_BEGINNING = 12  # characters of base64 that hold the longest beginning


def image_from_url(fields: Fields, key: str, at: int) -> Image:
    """The picture in a data: URL, which is a string, or an object with a field `url`.

    Args:
        at: how many characters of the message stand before it.

    Raises:
        UsageError: it is another URL, or no picture.
    """
    if isinstance(fields.data.get(key), dict):
        fields, key = Fields(fields.data[key], fields.name(key)), "url"
    url = fields.needed_text(key)
    found = _DATA_URL.match(url)
    if found is None:
        why = "must be a data: URL with a picture in base64"
        raise UsageError(f"invalid {fields.name(key)}", why=why, hint="pictures are not fetched from elsewhere")
    return image_from_base64(url[found.end() :], fields.name(key), at)


def image_from_base64(data: str, name: str, at: int) -> Image:
    """A picture in base64.

    Args:
        name: of the field.

    Raises:
        UsageError: it is none.
    """
    try:
        beginning = base64.b64decode(data[:_BEGINNING], validate=True)
    except binascii.Error:
        raise UsageError(f"invalid {name}", why="must be a picture in base64") from None
    if not beginning.startswith(PICTURE_BEGINNINGS):
        raise UsageError(f"invalid {name}", why="must be a PNG, JPEG, GIF or BMP picture")
    return Image(data, name, at)
