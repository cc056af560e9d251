"""`llmrun serve` with the real SmolLM2 while streams run: signals, an engine that dies, and bombs."""

from __future__ import annotations

import http.client
import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import psutil
import pytest
from support.installed import SECONDS, engine_of, eventually, gone
from support.real_server import RealServer

SAID = [{"role": "user", "content": "Tell a long story."}]
WITHOUT_END = {"stream": True, "max_tokens": 100_000, "logit_bias": {"0": -100, "2": -100}}
STREAMS: dict[str, tuple[dict[str, Any], bytes]] = {
    "/v1/chat/completions": ({"messages": SAID}, b'data: {"error":'),
    "/v1/completions": ({"prompt": "Once upon a time"}, b'data: {"error":'),
    "/v1/responses": ({"input": SAID}, b"event: response.failed"),
    "/v1/messages": ({"messages": SAID}, b"event: error"),
    "/api/chat": ({"messages": SAID, "options": WITHOUT_END}, b'{"error":'),
}
"""Path -> what is asked there, and how a stream says that it failed."""


@contextmanager
def stream(server: RealServer, path: str) -> Iterator[http.client.HTTPResponse]:
    """An answer without end, of which a piece has come. It does not repeat itself: drafts would fill the window."""
    body = {**STREAMS[path][0], **WITHOUT_END, "temperature": 1.5}
    with connected(server) as connection:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        piece = b""
        while b"text" not in piece and b"content" not in piece:
            piece = answer.readline()
        yield answer


@contextmanager
def connected(server: RealServer) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=SECONDS)
    try:
        yield connection
    finally:
        connection.close()


def status_of(server: RealServer, path: str, body: Any = None) -> int:
    with connected(server) as connection:
        data = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, data, {"content-type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        return answer.status


def test_every_stream_hears_that_the_engine_died(server: RealServer) -> None:
    with ExitStack() as stack:
        streams = {path: stack.enter_context(stream(server, path)) for path in STREAMS}
        engine_of(server.process.pid).send_signal(signal.SIGSEGV)
        for path, answer in streams.items():
            rest = answer.read()
            assert STREAMS[path][1] in rest, path
            assert b"engine-crashed" in rest
    assert status_of(server, "/v1/chat/completions", {"messages": SAID, "max_tokens": 1}) == 200


def doubling(depth: int) -> dict[str, Any]:
    """A schema that is twice as large with every level."""
    named = {f"n{level}": {"anyOf": [{"$ref": f"#/$defs/n{level + 1}"}] * 2} for level in range(depth)}
    return {"$defs": {**named, f"n{depth}": {"const": 1}}, "$ref": "#/$defs/n0"}


BOMBS: dict[str, dict[str, Any]] = {
    "repeats of repeats": {"grammar": 'root ::= (("a"{1,1000}){1,1000}){1,1000}'},
    "left recursion": {"grammar": 'root ::= root "a" | root root | ""'},
    "many brackets": {"grammar": "root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000},
    "many alternatives": {"grammar": "root ::= " + " | ".join(f'"{number}" root' for number in range(15_000))},
    "many rules": {"grammar": "\n".join(f"r{number} ::= r{number + 1} r{number + 1}" for number in range(5000))},
    "doubling": {"json_schema": doubling(40)},
    "a pattern of repeats": {"json_schema": {"type": "string", "pattern": "^((a{1,999}){1,999}){1,999}$"}},
    "many items": {"json_schema": {"type": "array", "items": {"type": "integer"}, "minItems": 10**9}},
    "a large enum": {"json_schema": {"enum": [f"word {number}" for number in range(12_000)]}},
}
ENDLESS = {"json_schema": {"allOf": [{"type": "string", "pattern": f"[a-z]{{{n}}}"} for n in range(50)]}}
"""Takes llguidance longer than anybody lives."""


@pytest.mark.parametrize("name", BOMBS)
def test_what_is_meant_to_cost_too_much_is_refused_or_bounded(server: RealServer, name: str) -> None:
    """Beside a stream that goes on, in the same engine."""
    with stream(server, "/v1/chat/completions") as running:
        engine = engine_of(server.process.pid)
        asked = {"messages": SAID, "max_tokens": 4, **BOMBS[name]}
        assert status_of(server, "/v1/chat/completions", asked) in {200, 400, 422}
        assert b"error" not in running.readline()
        assert running.readline() is not None
        assert not gone(engine)
        assert psutil.Process(engine.pid).memory_info().rss < 3 << 30


@pytest.mark.slow
def test_a_schema_that_takes_for_ever_to_read_is_refused_and_the_engine_replaced(server: RealServer) -> None:
    asked = {"messages": SAID, "max_tokens": 4}
    with stream(server, "/v1/chat/completions") as running:
        engine = engine_of(server.process.pid)
        assert status_of(server, "/v1/chat/completions", {**asked, **ENDLESS}) == 400
        assert b"error" not in running.readline()
        # As long as somebody is answered; beside busy programs the answer may have filled its window.
        assert not gone(engine) or b'"finish_reason":"length"' in running.read()
    assert eventually(lambda: gone(engine), SECONDS)
    assert status_of(server, "/v1/chat/completions", asked) == 200
