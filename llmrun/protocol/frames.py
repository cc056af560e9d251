"""How messages are written to the pipe: a 4-byte big-endian length and that many bytes of UTF-8 JSON with a "kind".

Owns the wire format; must not know what the messages are for. Never pickle, so that a hijacked engine can't run code
in the front.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from typing import Any

from llmrun.errors import LlmrunError
from llmrun.grammar import Grammar
from llmrun.protocol.messages import (
    Cancel,
    ChainStep,
    Choice,
    Count,
    Counted,
    Explain,
    Explained,
    Failed,
    Finished,
    Frame,
    Generate,
    Job,
    JobDone,
    JobUpdate,
    Load,
    Loaded,
    LoadProgress,
    Message,
    Open,
    PrefillProgress,
    Rendered,
    Rendering,
    SaveState,
    Started,
    StateSaved,
    Stats,
    TextDelta,
    as_dict,
)
from llmrun.protocol.params import Limits, SamplingParams

MAX_FRAME_BYTES = 64 * 1024 * 1024
_LENGTH = struct.Struct(">I")
PREFIX_BYTES = _LENGTH.size


class FrameError(Exception):
    """The other side sent bytes that are no frame of ours."""


_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        Open, Load, Generate, Count, Cancel, Explain, SaveState, Job, LoadProgress, Loaded, Rendering,
        Rendered, Started, PrefillProgress, TextDelta, Finished, Counted, Explained, StateSaved, JobUpdate, JobDone,
        Failed,
    )
}  # fmt: skip


def _sampling(value: Mapping[str, Any]) -> SamplingParams:
    pairs = tuple((int(token), float(bias)) for token, bias in value["logit_bias"])
    texts = {name: tuple(value[name]) for name in ("dry_breakers", "order")}
    return SamplingParams(**{**value, **texts, "logit_bias": pairs})


def _messages(value: list[dict[str, str]]) -> tuple[Message, ...]:
    return tuple(Message(**item) for item in value)


def _choice(value: Mapping[str, Any]) -> Choice:
    steps = tuple(ChainStep(step["name"], step["remaining"], tuple(step["probabilities"])) for step in value["steps"])
    return Choice(value["text"], value["forced"], tuple(value["candidates"]), value["chosen"], steps)


# Fields that JSON can't give back as they were.
_FROM_JSON: dict[tuple[str, str], Callable[[Any], Any]] = {
    ("Generate", "messages"): _messages,
    ("Count", "messages"): _messages,
    ("Counted", "each"): tuple,
    ("Loaded", "thinking_tags"): tuple,
    ("Generate", "sampling"): _sampling,
    ("Generate", "limits"): lambda value: Limits(value["max_tokens"], tuple(value["stop"]), tuple(value["ban"])),
    ("Generate", "grammar"): lambda value: Grammar(**value) if value else None,
    ("Loaded", "devices"): tuple,
    ("Finished", "stats"): lambda value: Stats(**value),
    ("Explained", "choices"): lambda value: tuple(_choice(item) for item in value),
}


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
        FrameError: it is no frame of ours.
    """
    try:
        data = json.loads(body)
        kind = data.pop("kind")
        for name in data:
            convert = _FROM_JSON.get((kind, name))
            if convert:
                data[name] = convert(data[name])
        frame: Frame = _KINDS[kind](**data)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, LlmrunError) as error:
        raise FrameError(f"not a frame: {error!r}") from error
    return frame


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
