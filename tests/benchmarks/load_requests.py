"""Requests of all kinds in every protocol, and whether what came back is an answer, or an error, in its shape.

Not a benchmark itself.
"""

from __future__ import annotations

import json
import random
from typing import Any, NamedTuple

LONG, SHORT = 350, 80
"""Most bytes of a long prompt and of a short one; without words of its own, a model has a token for each."""
_MOST_TOKENS = 16
_END = "2"  # the token that ends an answer
_LONG_SHARE, _STREAM_SHARE, _LEAVING_SHARE, _MALFORMED_SHARE = 0.1, 0.7, 0.20, 0.05
_WORDS = ("river", "stone", "of", "the", "seven", "green", "mountains", "and", "a", "wind", "from", "east")


class Protocol(NamedTuple):
    """A path, and the fields of its answers.

    Attributes:
        limit: the field with the token limit of an answer; after a dot, one of `options`.
        piece: in a stream, what the first piece of text has.
        end: in a stream, what the last event of an answer has; `failed` marks an error.
        whole: the keys of an answer in one.
    """

    path: str
    limit: str
    piece: bytes
    end: tuple[bytes, ...]
    failed: bytes
    whole: frozenset[str]


PROTOCOLS = (
    Protocol(
        "/v1/chat/completions", "max_tokens", b'"delta":{"content":', (b"data: [DONE]",), b'data: {"error":',
        frozenset({"id", "object", "choices", "usage"}),
    ),
    Protocol(
        "/v1/completions", "max_tokens", b'"text":"', (b"data: [DONE]",), b'data: {"error":',
        frozenset({"id", "object", "choices", "usage"}),
    ),
    Protocol(
        "/v1/responses", "max_output_tokens", b"event: response.output_text.delta",
        (b"event: response.completed", b"event: response.incomplete"), b"event: response.failed",
        frozenset({"id", "status", "output", "usage"}),
    ),
    Protocol(
        "/v1/messages", "max_tokens", b'"text_delta"', (b"event: message_stop",), b"event: error",
        frozenset({"id", "role", "content", "stop_reason", "usage"}),
    ),
    Protocol(
        "/api/chat", "options.num_predict", b'"content":"', (b'"done":true',), b'{"error":',
        frozenset({"model", "message", "done", "done_reason", "eval_count"}),
    ),
    Protocol(
        "/api/generate", "options.num_predict", b'"response":"', (b'"done":true',), b'{"error":',
        frozenset({"model", "response", "done", "done_reason", "eval_count"}),
    ),
)  # fmt: skip

_MALFORMED: tuple[dict[str, Any] | bytes, ...] = (
    b"{", b"[1, 2]", b'"text"', b"\xff", b'{"messages": NaN}', b'{"a":' * 5000, {"model": "no/such-model"},
    {"stream": 7}, {"model": ["x"]}, {"messages": 5, "prompt": [7], "input": 5},
)  # fmt: skip


class LoadRequest(NamedTuple):
    """One request.

    Attributes:
        is_malformed: it has to be refused.
        leaves_at: when its client leaves: below 1 after that share of what it sends; from 1 on, after one piece less
            of the response; None is never.
    """

    protocol: Protocol
    body: bytes
    is_stream: bool
    is_long: bool
    is_malformed: bool
    leaves_at: float | None


def make_request(number: int) -> LoadRequest:
    """The request of a number: always the same one, and like no other."""
    chance = random.Random(number)
    protocol = chance.choice(PROTOCOLS)
    is_long, is_stream = chance.random() < _LONG_SHARE, chance.random() < _STREAM_SHARE
    kind = chance.random()
    is_malformed = kind < _MALFORMED_SHARE
    leaves = _MALFORMED_SHARE <= kind < _MALFORMED_SHARE + _LEAVING_SHARE
    body = _body(protocol, _text(chance, number, LONG if is_long else SHORT), chance, is_stream=is_stream)
    data = _malformed(body, chance) if is_malformed else json.dumps(body).encode()
    leaves_at = chance.choice((chance.random(), 1.0, 1.0 + chance.randrange(1, 5))) if leaves else None
    return LoadRequest(protocol, data, is_stream, is_long, is_malformed, leaves_at)


def question(text: str, n_tokens: int = 1) -> LoadRequest:
    """A streamed request whose client stays, for an answer of N tokens."""
    protocol = PROTOCOLS[0]
    body = {"stream": True, "messages": [{"role": "user", "content": text}], "logit_bias": {_END: -100}}
    data = json.dumps({**body, protocol.limit: n_tokens}).encode()
    return LoadRequest(protocol, data, is_stream=True, is_long=True, is_malformed=False, leaves_at=None)


def _text(chance: random.Random, number: int, most: int) -> str:
    text = f"Question {number}:"
    length = chance.randint(most // 2, most)
    while len(text) < length:
        text += " " + chance.choice(_WORDS)
    return text


def _body(protocol: Protocol, text: str, chance: random.Random, *, is_stream: bool) -> dict[str, Any]:
    body: dict[str, Any] = {"stream": is_stream}
    if protocol.path == "/v1/responses":
        body["input"] = text
    elif protocol.path in ("/v1/completions", "/api/generate"):
        body["prompt"] = text
    else:
        body["messages"] = [{"role": "user", "content": text}]
    outer, _, inner = protocol.limit.partition(".")
    most = chance.randint(1, _MOST_TOKENS)
    return {**body, outer: {inner: most} if inner else most}


def _malformed(body: dict[str, Any], chance: random.Random) -> bytes:
    wrong = chance.choice(_MALFORMED)
    return wrong if isinstance(wrong, bytes) else json.dumps({**body, **wrong}).encode()


class Answer(NamedTuple):
    """What a client got.

    Attributes:
        kind: "answer", "error", "broken", which is neither, or "left": it did not stay to see.
        code: of an error; what is wrong with a broken answer.
    """

    kind: str
    code: str = ""


def judged(asked: LoadRequest, data: bytes) -> Answer:
    """What became of a request whose client stayed."""
    head, _, body = data.partition(b"\r\n\r\n")
    try:
        status = int(head.split(b" ", 2)[1])
        if status != 200:
            return Answer("error", _error_code(asked.protocol, json.loads(body)))
        if asked.is_malformed:
            return Answer("broken", "a malformed request was answered")
        if asked.is_stream:
            return _judged_stream(asked.protocol, body)
        missing = asked.protocol.whole - set(json.loads(body))
    except (ValueError, KeyError, IndexError, TypeError) as error:
        return Answer("broken", f"{type(error).__name__}: {error}: {data[-200:]!r}")
    return Answer("broken", f"without {', '.join(missing)}") if missing else Answer("answer")


def _judged_stream(protocol: Protocol, body: bytes) -> Answer:
    if not body.endswith(b"0\r\n\r\n"):
        return Answer("broken", f"the stream was cut: {body[-200:]!r}")
    tail = body[body.rfind(protocol.failed) :] if protocol.failed in body else b""
    if tail:
        line = next(line for line in tail.splitlines() if b"{" in line)
        told = json.loads(line.removeprefix(b"data: "))
        return Answer("error", _error_code(protocol, told.get("response", told)))
    if any(end in body for end in protocol.end):
        return Answer("answer")
    return Answer("broken", f"the stream has no end: {body[-200:]!r}")


def _error_code(protocol: Protocol, told: dict[str, Any]) -> str:
    """The code of an error in the protocol's shape. Raises KeyError or TypeError if it has another one."""
    if protocol.path.startswith("/api/"):
        assert isinstance(told["error"], str)
        return str(told["code"])
    if protocol.path == "/v1/messages" and told["type"] != "error":
        raise KeyError("type")
    assert told["error"]["message"]
    return str(told["error"]["code"])
