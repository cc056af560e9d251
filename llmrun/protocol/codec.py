"""Dataclasses and named tuples <-> plain JSON data, by the annotations of their fields: for the pipe, and for files.

Must not know the purpose of the data. Input is untrusted: only classes named by annotations are created, and every
value has the type of its annotation.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from llmrun.errors import LlmrunError, UsageError, brief

Value = TypeVar("Value")

MAX_DEPTH = 100
"""Maximum nesting of untrusted JSON, which recursive code can bear."""
_SURROGATE = re.compile("[\ud800-\udfff]")


def load_json(text: str | bytes | bytearray, *, has_paths: bool = False, **hooks: Any) -> Any:
    """Parse untrusted JSON text. Lone surrogates, which UTF-8 can't express, become U+FFFD.

    Args:
        has_paths: keep them: in the path of a file they stand for bytes that are not UTF-8.
        hooks: as for json.loads().

    Raises:
        ValueError: it is not JSON, or has more than MAX_DEPTH levels.
    """
    if not isinstance(text, str):
        text = text.decode(json.detect_encoding(text), "surrogatepass")
    try:
        value = json.loads(text, **hooks)
    except RecursionError:
        raise _too_deep() from None
    # Few texts have so many brackets that their levels must be counted.
    if text.count("[") + text.count("{") > MAX_DEPTH and _is_too_deep(value):
        raise _too_deep()
    if not has_paths and ("\\ud" in text or "\\uD" in text or not is_unicode(text)):
        return with_whole_texts(value)
    return value


def is_unicode(text: str) -> bool:
    """Return whether a text has no lone surrogate, so that it can be encoded."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def without_surrogates(text: str) -> str:
    """Return a text with U+FFFD instead of lone surrogates."""
    return text if is_unicode(text) else _SURROGATE.sub("\ufffd", text)


def with_whole_texts(value: Any) -> Any:
    """Return JSON data with U+FFFD instead of lone surrogates."""
    if isinstance(value, str):
        return without_surrogates(value)
    if isinstance(value, list):
        return [with_whole_texts(item) for item in value]
    if isinstance(value, dict):
        return {without_surrogates(name): with_whole_texts(item) for name, item in value.items()}
    return value


def _is_too_deep(value: Any) -> bool:
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MAX_DEPTH):
        level = [
            child
            for each in level
            for child in (each.values() if isinstance(each, dict) else each)
            if isinstance(child, (dict, list))
        ]
    return bool(level)


def _too_deep() -> ValueError:
    return ValueError(f"it is nested more than {MAX_DEPTH} levels deep")


def as_dict(value: Any) -> dict[str, Any]:
    """Return a dataclass or named tuple as plain JSON data, nested ones included."""
    names = _names(value.__class__)
    found = value if isinstance(value, tuple) else [getattr(value, name) for name in names]
    return {name: item if type(item) in _PLAIN else _plain(item) for name, item in zip(names, found, strict=True)}


def from_json(cls: type[Value], data: Any, *, newer: bool = False) -> Value:
    """Return a dataclass or named tuple from the data made by as_dict(); missing fields get their defaults.

    Args:
        cls: or another annotation, such as tuple[int, ...], for data that are only such a value.
        newer: the data may be of a newer llmrun, whose unknown fields are ignored.

    Raises:
        TypeError, ValueError: the data are of something else; names the field.
        LlmrunError: the dataclass itself refuses a value.
    """
    kind: Any = cls  # mypy takes a class for something that has no hash
    if not _is_ours(kind):
        value = _field(kind, "the value", newer)
        is_exact = type(data) is value.exact
        read: Value = data if is_exact else value.convert(data)
        return read
    if type(data) is not dict:
        _refuse(data, cls.__name__)
    known = _fields(kind, newer)
    values = {}
    for name, value in data.items():
        field = known.get(name)
        if field is not None:
            values[name] = value if type(value) is field.exact else field.convert(value)
        elif not newer:
            raise ValueError(f"{cls.__name__} has no {name!r:.40}")
    return cls(**values)


def refusal(error: Exception) -> LlmrunError:
    """Return the error for the sender of a command that from_json() could not read."""
    return error if isinstance(error, LlmrunError) else UsageError("the engine can't read the request", why=str(error))


_PLAIN = frozenset((str, int, float, bool, NoneType))

# Evaluating an annotation takes longer than reading a frame, and every start waits for it.
_FREQUENT: dict[Any, Any] = {
    "str": str,
    "int": int,
    "bool": bool,
    "float": float,
    "str | None": str | None,
    "int | None": int | None,
    "bool | None": bool | None,
    "float | None": float | None,
    "tuple[int, ...]": tuple[int, ...],
    "tuple[str, ...]": tuple[str, ...],
    "tuple[float, ...]": tuple[float, ...],
}


class _Field(NamedTuple):
    """The reader of a field's values; a value of the exact type is taken unchanged, which is fast."""

    exact: type | None
    convert: Callable[[Any], Any]


@functools.cache
def _names(cls: Any) -> tuple[str, ...]:
    return tuple(_annotations(cls))


def _annotations(cls: Any) -> dict[str, str]:
    """Return the fields' annotations as written."""
    if is_dataclass(cls):
        return {field.name: str(field.type) for field in fields(cls)}
    return {name: kind.__forward_arg__ for name, kind in cls.__annotations__.items()}


def _is_ours(kind: Any) -> bool:
    return is_dataclass(kind) or hasattr(kind, "_fields")


@functools.cache
def _fields(cls: Any, newer: bool) -> dict[str, _Field]:
    written = _annotations(cls)
    others = SimpleNamespace(__annotations__={name: kind for name, kind in written.items() if kind not in _FREQUENT})
    hints = get_type_hints(others, vars(sys.modules[cls.__module__]))
    kinds = {name: hints[name] if name in hints else _FREQUENT[kind] for name, kind in written.items()}
    return {name: _field(kind, f"{name} of {cls.__name__}", newer) for name, kind in kinds.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, (str, int, float, NoneType)):
        return value
    if isinstance(value, (tuple, list)) and not _is_ours(value):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if not _is_ours(value.__class__):
        raise UsageError(f"invalid value {brief(value)}", why="it can't be written as JSON")
    return as_dict(value)


def _field(kind: Any, what: str, newer: bool) -> _Field:
    """Return the reader of an annotation's values; `what` names them in errors."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return _Field(None, lambda value: value)
    if kind in (str, int, bool):
        return _Field(kind, lambda value: _refuse(value, what))
    if kind is float:
        return _Field(float, lambda value: _float(value, what))
    if origin is Literal:
        return _Field(None, lambda value: value if value in arguments else _refuse(value, what))
    if _is_ours(kind):
        return _Field(None, lambda value: from_json(kind, value, newer=newer))
    inner = [_field(argument, what, newer) for argument in arguments if argument not in (NoneType, Ellipsis)]
    if origin in (Union, UnionType) and NoneType not in arguments:  # of several plain types
        return _Field(None, lambda value: value if type(value) in arguments else _refuse(value, what))
    if origin in (Union, UnionType) and len(inner) == 1:
        return _Field(inner[0].exact, lambda value: None if value is None else inner[0].convert(value))
    if origin is tuple:
        return _Field(None, lambda value: _tuple(value, inner, what, is_open=Ellipsis in arguments))
    if origin in (dict, Mapping):
        return _Field(None, lambda value: _dict(value, arguments[0], inner[1], what))
    raise AssertionError(f"{what} can't be told from JSON")


def _float(value: Any, what: str) -> float:
    if type(value) is not int:
        _refuse(value, what)
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{what} is too large") from None


def _tuple(data: Any, inner: list[_Field], what: str, *, is_open: bool) -> tuple[Any, ...]:
    """Read a list, of any length if open."""
    if type(data) is not list:
        _refuse(data, what)
    kinds = inner * len(data) if is_open else inner
    return tuple(
        item if type(item) is field.exact else field.convert(item) for field, item in zip(kinds, data, strict=True)
    )


def _dict(data: Any, key: type[str | int], field: _Field, what: str) -> dict[Any, Any]:
    """Read an object; JSON has its keys as text."""
    if type(data) is not dict:
        _refuse(data, what)
    return {key(name): item if type(item) is field.exact else field.convert(item) for name, item in data.items()}


def _refuse(value: Any, what: str) -> NoReturn:
    raise TypeError(f"{what} is {value!r:.40}")
