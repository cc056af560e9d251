"""How messages are written to the pipe: a 4-byte big-endian length and that many bytes of UTF-8 JSON with a "kind".

Owns the wire format; must not know what the messages are for. Never pickle, so that a hijacked engine can't run code
in the front.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import get_args

from llmrun.errors import LlmrunError
from llmrun.protocol.codec import as_dict, from_json
from llmrun.protocol.messages import Command, Event, Frame

MAX_FRAME_BYTES = 64 * 1024 * 1024
_LENGTH = struct.Struct(">I")
PREFIX_BYTES = _LENGTH.size


class FrameError(Exception):
    """The other side sent bytes that are not one of our frames.

    Attributes:
        request: the number of the command that the frame would be; None where it has none.
    """

    def __init__(self, text: str, request: int | None = None) -> None:
        super().__init__(text)
        self.request = request


_KINDS: dict[str, type[Frame]] = {kind.__name__: kind for kind in (*get_args(Command), *get_args(Event))}


def encode(frame: Frame) -> bytes:
    """The frame's bytes, length prefix included.

    Raises:
        FrameError: it is larger than MAX_FRAME_BYTES.
    """
    body = json.dumps({"kind": type(frame).__name__, **as_dict(frame)}).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes) -> Frame:
    """The frame in a body (without the length prefix).

    Raises:
        FrameError: it is not one of our frames.
    """
    request = None
    try:
        data = json.loads(body)
        request = data.get("request")
        return from_json(_KINDS[data.pop("kind")], data)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, LlmrunError) as error:
        raise FrameError(f"not a frame: {error!r}", request if type(request) is int else None) from error


def frame_length(data: bytes | bytearray) -> int | None:
    """Length of the frame that data begins with, prefix included; None if too little of it is there.

    Raises:
        FrameError: the frame is larger than MAX_FRAME_BYTES.
    """
    if len(data) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(data)
    if length > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
    return _LENGTH.size + int(length)


def read_frame(read: Callable[[int], bytes]) -> Frame | None:
    """The next frame from a blocking stream; None at its end.

    Args:
        read: read(n) gives n bytes, fewer only at the end of the stream.

    Raises:
        FrameError: the stream ended inside a frame, or holds something else.
    """
    prefix = read(_LENGTH.size)
    if not prefix:
        return None
    length = frame_length(prefix)
    body = read(length - _LENGTH.size) if length else b""
    if length is None or len(body) < length - _LENGTH.size:
        raise FrameError("the stream ended inside a frame")
    return decode(body)
