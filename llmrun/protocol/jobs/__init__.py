"""What the engine process does besides answering: one module a job, with its command, its updates and its result.

Owns how these dataclasses travel inside Job, JobUpdate and JobDone; must not know what a job does. Only the job that
is wanted is imported, so that an answer does not wait for all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

Command = TypeVar("Command")
Update = TypeVar("Update")
Result = TypeVar("Result")
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class JobKind(Generic[Command, Update, Result]):
    """One kind of job.

    Attributes:
        name: of the module of protocol/jobs/ that describes it, and of the one of engine/jobs/ whose run() does it.
        command: dataclass that says what is to be done.
        update: dataclass of what is told meanwhile.
        result: dataclass of what comes out.
    """

    name: str
    command: type[Command]
    update: type[Update]
    result: type[Result]


def from_json(cls: type[Value], data: Mapping[str, Any]) -> Value:
    """A dataclass from what messages.as_dict() made of it, by the annotations of its fields.

    Raises:
        TypeError, ValueError, KeyError, AttributeError: the data are of something else.
    """
    kind: Any = cls  # mypy takes a class for something that has no hash
    hints = _hints(kind)
    return cls(**{name: _value(hints[name], value) for name, value in data.items()})


@functools.cache
def _hints(cls: type[Any]) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls)}


def _value(kind: Any, value: Any) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        if value is None and NoneType in arguments:
            return None
        (kind,) = (argument for argument in arguments if argument is not NoneType)
        return _value(kind, value)
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(_value(arguments[0], item) for item in value)
        return tuple(_value(each, item) for each, item in zip(arguments, value, strict=True))
    if origin is dict:
        return {name: _value(arguments[1], item) for name, item in value.items()}
    if is_dataclass(kind) and isinstance(kind, type):
        return from_json(kind, value)
    return value
