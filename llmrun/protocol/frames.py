"""The wire format of the pipe: a 4-byte big-endian length and that many bytes of UTF-8 JSON with a "kind".

The text of all answers of a step has one frame, "TextDeltas", with a row for each: it is most of what is sent.

Must not know the meaning of messages. Never pickle, so that a compromised engine can't run code in the front.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, get_args

from llmrun.errors import LlmrunError
from llmrun.protocol.codec import as_dict, from_json, load_json, refusal, with_whole_texts
from llmrun.protocol.messages import AnswerPart, Command, Event, Failed, Frame, Generate, PartKind, TextDelta

MAX_FRAME_BYTES = 64 * 1024 * 1024
_LENGTH = struct.Struct(">I")
PREFIX_BYTES = _LENGTH.size


class FrameError(Exception):
    """The other side sent bytes that are not a frame."""

    # The answer to an unreadable command; later frames can be read, because its length was right.
    failed: Failed | None = None


_ROW_TYPES = (int, str, int, int)
_TEXT_BEFORE, _TEXT_AFTER = b'{"kind":"TextDeltas","rows":', b"}"
_json_text, _raw_decode = json.encoder.encode_basestring_ascii, json.JSONDecoder().raw_decode
_PART_KINDS = get_args(PartKind)
_N_PART_FIELDS = 3  # kind, text and id of a call; log-probabilities are sent with their delta


class TextDeltas(NamedTuple):
    """The text of several answers, in the order it was sampled."""

    rows: tuple[TextDelta, ...]


_KINDS: dict[str, type[Frame]] = {kind.__name__: kind for kind in (*get_args(Command), *get_args(Event))}


def encode(frame: Frame) -> bytes:
    """Return the frame's bytes, length prefix included.

    Raises:
        FrameError: it is larger than MAX_FRAME_BYTES.
        UsageError: it holds something that is not JSON data.
    """
    return _framed(json.dumps({"kind": type(frame).__name__, **as_dict(frame)}))


def encode_text(rows: Iterable[TextDelta]) -> bytes:
    """Return one frame for the text of several answers, without log-probabilities; raise as encode()."""
    written = []
    for request, text, tokens, _, drafted, parts, ids in rows:
        split = "null"
        if parts is not None and parts != (("text", text, "", ()),):  # one part that is all text is known without it
            split = json.dumps([part[:_N_PART_FIELDS] for part in parts])
        written.append(f"[{request},{_json_text(text)},{tokens},{int(drafted)},{split},{list(ids)}]")
    return _framed(f"{_TEXT_BEFORE.decode()}[{','.join(written)}]{_TEXT_AFTER.decode()}")


def _framed(text: str) -> bytes:
    body = text.encode()
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes) -> Frame | TextDeltas:
    """Return the frame in a body (without the length prefix).

    Raises:
        FrameError: it is not a frame.
    """
    data: Any = None
    try:
        if body.startswith(_TEXT_BEFORE):
            rows, end = _raw_decode(body[len(_TEXT_BEFORE) :].decode())
            if len(_TEXT_BEFORE) + end + len(_TEXT_AFTER) != len(body):  # all of it is ASCII
                raise ValueError("it has no end")
            return TextDeltas(tuple(map(_text_delta, rows)))
        data = load_json(body, has_paths=True)
        kind = _KINDS[data.pop("kind")]
        is_text = kind is Generate and b"\\ud" in body  # of prompts, arguments of the command line among them
        return from_json(kind, with_whole_texts(data) if is_text else data)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, LlmrunError) as error:
        broken = FrameError(f"not a frame: {error!r}")
        if isinstance(data, dict) and type(request := data.get("request")) is int:
            broken.failed = Failed.of(refusal(error), request)
        raise broken from error


def _text_delta(row: Any) -> TextDelta:
    """Return a row of TextDeltas; raise TypeError or ValueError if it is something else."""
    request, text, tokens, drafted, parts, ids = row
    has_types = (type(request), type(text), type(tokens), type(drafted)) == _ROW_TYPES
    if not has_types or type(ids) is not list or (ids and set(map(type, ids)) != {int}):
        raise TypeError(f"a row of TextDeltas is {row!r:.40}")
    split = None if parts is None else tuple(map(_part, parts))
    return TextDelta(request, text, tokens, (), bool(drafted), split, tuple(ids))


def _part(part: Any) -> AnswerPart:
    kind, text, call_id = part
    if kind not in _PART_KINDS or not (type(text) is type(call_id) is str):
        raise TypeError(f"a part of an answer is {part!r:.40}")
    return AnswerPart(kind, text, call_id)


def frame_length(data: bytes | bytearray) -> int | None:
    """Return the length of the first frame in the data, prefix included; None if too little of it has come.

    Raises:
        FrameError: the frame is larger than MAX_FRAME_BYTES.
    """
    if len(data) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(data)
    if length > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
    return _LENGTH.size + int(length)


def read_frame(read: Callable[[int], bytes]) -> Frame | TextDeltas | None:
    """Return the next frame of a blocking stream; None at its end.

    Args:
        read: read(n) returns n bytes, fewer only at the end of the stream.

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
