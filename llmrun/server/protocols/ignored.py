"""The parts of a request that are read and not honoured, by name, for a response header and the log. Pure."""

from __future__ import annotations

import re

from llmrun.server.protocols.fields import Fields

_UNSAFE = re.compile(r"[^\x21-\x2b\x2d-\x7e]")  # in a header's list
_MOST_CHARACTERS = 40


def ignored_fields(fields: Fields, *keys: str) -> tuple[str, ...]:
    """Return the paths of those of the fields that have a value other than false or empty."""
    return tuple(fields.name(key) for key in keys if fields.data.get(key))


def ignored_tools(fields: Fields, *kinds: str) -> tuple[str, ...]:
    """Return the tools of other kinds, e.g. "tools[8].type=web_search"."""
    found = ((each.name("type"), each.text("type")) for each in fields.objects("tools"))
    return tuple(f"{name}={header_safe(kind[:_MOST_CHARACTERS])}" for name, kind in found if kind and kind not in kinds)


def header_safe(path: str) -> str:
    """Return a path for a header's list."""
    return _UNSAFE.sub("?", path)
