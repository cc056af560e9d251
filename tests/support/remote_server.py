"""A server that answers as OpenAI-compatible ones do, or misbehaves in a way that has a name; see WAYS.

Owns what goes over the socket, byte by byte; must not know who reads it. A reply is a sequence of pieces: bytes to be
sent, or what is done in between.
"""

from __future__ import annotations

import enum
import gzip
import json
import socket
import ssl
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from llmrun.errors import (
    ContextOverflowError,
    LlmrunError,
    LoginRequiredError,
    ModelNotFoundError,
    NetworkError,
    UnavailableError,
    UsageError,
)
from llmrun.remote.client import PATIENT

PATIENCE = replace(PATIENT, connect_seconds=30.0, stall_seconds=30.0, retries=2, backoff_seconds=0.0)
IMPATIENCE = replace(PATIENCE, stall_seconds=0.2)
KEY = "sk-nobody-may-read-this"
MODEL = "stand-in"
SECONDS = 60.0
"""A client that takes longer hangs."""
CHAT, TEXT, MODELS = "/v1/chat/completions", "/v1/completions", "/v1/models"


class Act(enum.Enum):
    """What a server can do but send."""

    SILENCE = enum.auto()  # until the client goes
    RESET = enum.auto()


class Endless(NamedTuple):
    """A piece that is sent again and again until the client goes."""

    piece: bytes
    seconds: float = 0.01


Reply = Sequence["bytes | Act | Endless"]


class FarRequest(NamedTuple):
    """What a client asked, header names in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


def response(status: int, body: bytes = b"", kind: str = "application/json", **headers: str) -> bytes:
    """A whole response; underscores of header names stand for dashes, "" leaves the type out."""
    lines = {"content-length": str(len(body)), "connection": "close", **({"content-type": kind} if kind else {})}
    lines |= {name.replace("_", "-"): value for name, value in headers.items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"HTTP/1.1 {status} Whatever\r\n{head}\r\n".encode() + body


def failed(status: int, message: str, code: Any = None, **headers: str) -> Reply:
    """An error in OpenAI's shape."""
    error = {"message": message, "type": "some_error", "code": code}
    return (response(status, json.dumps({"error": error}).encode(), **headers),)


SILENT = "stopped answering"
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\nconnection: close\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def event(data: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def chunk(content: str | None = None, finish: str | None = None, **delta: Any) -> bytes:
    """One chunk of a chat completion, which is one of a text completion too."""
    said = {"content": content, **delta}
    choice = {"index": 0, "delta": said, "text": content or "", "finish_reason": finish}
    return event({"object": "chat.completion.chunk", "model": MODEL, "choices": [choice]})


def usage(prompt: Any = 7, completion: Any = 2, **details: int) -> bytes:
    """The last chunk."""
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details or None}
    return event({"choices": [], "usage": counts})


HELLO = (chunk("Hello"), chunk(" there"))
STOP = chunk(finish="stop")
FINE: Reply = (STREAM, chunk(role="assistant"), *HELLO, STOP, usage(cached_tokens=3), DONE)


def told(*pieces: bytes) -> Reply:
    """A stream that goes well, with other events."""
    return (STREAM, *pieces, STOP, usage(), DONE)


def whole(**message: Any) -> Reply:
    """An answer in one piece, of a server that can't stream."""
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": "stop"}
    counts = {"prompt_tokens": 7, "completion_tokens": 2}
    return (response(200, json.dumps({"choices": [choice], "usage": counts}).encode()),)


def _each_byte(pieces: Iterable[bytes | Act | Endless]) -> Reply:
    return [bytes([byte]) for piece in pieces if isinstance(piece, bytes) for byte in piece]


def _called(index: int, name: str | None = None, arguments: Any = "") -> bytes:
    function = {"arguments": arguments, **({"name": name} if name else {})}
    return chunk(tool_calls=[{"index": index, "id": f"call_{index}", "type": "function", "function": function}])


class Way(NamedTuple):
    """A way to answer a question for text, and what a client has to make of it.

    Attributes:
        replies: to one request after the other; the last one goes on.
        error: that the client raises; None where there is an answer all the same.
        says: a part of the error's text, or the whole answer.
    """

    replies: tuple[Reply, ...]
    error: type[LlmrunError] | None = None
    says: str = "Hello there"


def _bad(error: type[LlmrunError], says: str, *reply: bytes | Act | Endless) -> Way:
    return Way((reply,), error, says)


def _good(*reply: bytes | Act | Endless, says: str = "Hello there") -> Way:
    return Way((reply,), None, says)


_WEB_PAGE = b"<!doctype html><title>Sign in</title>"
_BUSY = failed(429, "slow down", "rate_limit_exceeded")
_LOADING = failed(503, "Loading model", 503)

WAYS: dict[str, Way] = {
    # ---- refusals
    "wants a key": Way((failed(401, "no key"),), LoginRequiredError, "refuses the key"),
    "repeats the key": Way((failed(401, f"Incorrect API key provided: {KEY}"),), LoginRequiredError, "[key]"),
    "forbids": Way((failed(403, "not for you"),), LoginRequiredError, "not for you"),
    "has no such path": _bad(NetworkError, "does not have", response(404, b'{"detail":"Not Found"}')),
    "has no such page": _bad(NetworkError, "a web page", response(404, _WEB_PAGE, "text/html")),
    "has another model": Way((failed(404, "no such", "model_not_found"),), ModelNotFoundError, MODEL),
    "knows no POST": _bad(NetworkError, "does not have", response(405)),
    "finds it too large": _bad(UsageError, "too large for it", response(413)),
    "finds the prompt too long": Way(
        (failed(400, "too long", "context_length_exceeded"),), ContextOverflowError, "too long"
    ),
    "finds it too long in words": Way(
        (failed(400, "This model's maximum context length is 2048 tokens"),), ContextOverflowError, "2048"
    ),
    "finds a field invalid": Way((failed(400, "top_p must be under 1"),), UsageError, "top_p must be under 1"),
    "finds a shape invalid": _bad(UsageError, "no top_k", response(422, b'{"detail":[{"msg":"no top_k"}]}')),
    "is busy for ever": Way((_BUSY,), UnavailableError, "slow down"),
    "is busy for a week": Way((failed(429, "", retry_after="604800"),), UnavailableError, "busy"),
    "is busy at first": Way((_BUSY, failed(429, "", retry_after="0"), FINE)),
    "still loads": Way((_LOADING, FINE)),
    "fails": Way((failed(500, "kaboom"),), NetworkError, "kaboom"),
    "fails without a word": _bad(NetworkError, "answered 500", response(500)),
    "fails with escape codes": _bad(
        NetworkError, "answered 500: ]0;x [31mred", response(500, b"\x1b]0;x\x07\x1b[31mred", "text/plain")
    ),
    "has a broken gateway": _bad(UnavailableError, "can't reach it", response(502, _WEB_PAGE, "text/html")),
    "sends us to another host": _bad(
        NetworkError, "http://elsewhere.example", response(307, location="http://elsewhere.example/v1/x?token=1")
    ),
    "sends us to TLS": _bad(NetworkError, "https://127.0.0.1", response(308, location="https://127.0.0.1/v1")),
    "sends us nowhere": _bad(NetworkError, "redirects to", response(302, location="http://[")),
    # ---- not what was asked for
    "is a web site": _bad(NetworkError, "a web page", response(200, _WEB_PAGE, "text/html; charset=utf-8")),
    "sends plain text": _bad(NetworkError, "text/plain", response(200, b"Hello there", "text/plain")),
    "sends something without a type": _bad(NetworkError, "without a type", response(200, b"Hello there", "")),
    "sends nothing with status 204": _bad(NetworkError, "answered 204", response(204)),
    "compresses": _bad(NetworkError, "gzip", response(200, gzip.compress(b"{}"), content_encoding="gzip")),
    "sends a gzip bomb": _bad(
        NetworkError, "gzip", response(200, gzip.compress(bytes(2**24)), "text/event-stream", content_encoding="gzip")
    ),
    "does not speak HTTP": _bad(NetworkError, "HTTP", b"SSH-2.0-OpenSSH_9.6\r\n\r\n"),
    "sends JSON that is none": _bad(NetworkError, "not JSON", response(200, b"{'choices': []}")),
    "sends a list": _bad(NetworkError, "not an object", response(200, b"[1, 2]")),
    # ---- broken connections
    "hangs up at once": _bad(UnavailableError, "broke off", b""),
    "hangs up in the headers": _bad(UnavailableError, "broke off", STREAM[:40]),
    "hangs up before the answer": _bad(UnavailableError, "without an answer", STREAM),
    "hangs up in the middle": _bad(UnavailableError, "in the middle", STREAM, *HELLO),
    "hangs up in a chunk": _bad(
        UnavailableError,
        "broke off",
        STREAM.replace(b"connection: close", b"transfer-encoding: chunked"),
        b"50\r\ndata: {",
    ),
    "resets the connection": _bad(UnavailableError, "broke off", STREAM, chunk("Hello"), Act.RESET),
    "falls silent at once": _bad(UnavailableError, SILENT, Act.SILENCE),
    "falls silent behind the headers": _bad(UnavailableError, SILENT, STREAM, Act.SILENCE),
    "falls silent in the middle": _bad(UnavailableError, SILENT, STREAM, *HELLO, Act.SILENCE),
    # ---- bytes without an answer, which begin httpx2's time again
    "is silent but for comments": _bad(UnavailableError, SILENT, STREAM, Endless(b": keep-alive\n\n")),
    "is silent but for comments in the middle": _bad(
        UnavailableError, SILENT, STREAM, *HELLO, Endless(b": keep-alive\n\n")
    ),
    "is silent but for events without choices": _bad(
        UnavailableError, SILENT, STREAM, Endless(event({"choices": []}))
    ),
    "is silent but for null fields": _bad(
        UnavailableError, SILENT, STREAM, Endless(event({"choices": [{"delta": {"content": None}}]}))
    ),
    "is silent within the headers": _bad(UnavailableError, SILENT, b"HTTP/1.1 200 OK\r\n", Endless(b"x-a: b\r\n")),
    "is silent but for status 100": _bad(UnavailableError, SILENT, Endless(b"HTTP/1.1 100 Continue\r\n\r\n")),
    "is silent within an event": _bad(UnavailableError, SILENT, STREAM, b"data: ", Endless(b"x")),
    "is silent within an answer in one piece": _bad(
        UnavailableError, SILENT, response(200, content_length="1000000"), Endless(b" ")
    ),
    "is silent within an error": _bad(
        UnavailableError, SILENT, response(500, content_length="1000000"), Endless(b" ")
    ),
    # ---- broken streams
    "streams garbage": _bad(NetworkError, "not JSON", STREAM, b"data: {]\n\n"),
    "streams noise": _bad(UnavailableError, "without an answer", STREAM, bytes(range(256)) * 16),
    "streams a list": _bad(NetworkError, "not an object", STREAM, event([])),
    "streams other shapes": _bad(NetworkError, "another shape", STREAM, event({"choices": {"a": 1}})),
    "streams a deep nest": _bad(NetworkError, "not JSON", STREAM, b"data: " + b"[" * 100_000 + b"\n\n"),
    "streams what is not UTF-8": _bad(NetworkError, "UTF-8", STREAM, b'data: {"a": "\xff\xfe"}\n\n'),
    "streams a line without end": _bad(NetworkError, "too much", STREAM, b"data: ", *[b"x" * 2**20] * 17),
    "streams an event without end": _bad(NetworkError, "too much", STREAM, *[b"data: " + b"x" * 2**20 + b"\n"] * 17),
    "calls a tool without end": _bad(
        NetworkError, "sends too much", STREAM, Endless(_called(0, "add", "x" * 2**20), 0.0)
    ),
    "calls tools without end": _bad(
        NetworkError, "sends too much", STREAM, *(_called(index, "add", "{}") for index in range(1001)), Act.SILENCE
    ),
    "streams wrong types": _bad(
        NetworkError, "another shape", STREAM, event({"choices": [5, None, {"delta": {"content": 5}}, {"delta": 5}]})
    ),
    "answers an error with status 200": _bad(NetworkError, "kaboom", response(200, b'{"error": "kaboom"}')),
    "answers without choices": _bad(UnavailableError, "without an answer", response(200, b'{"choices": []}')),
    "answers null": _bad(
        UnavailableError, "without an answer", response(200, b'{"choices": null, "usage": null, "error": null}')
    ),
    "sends us in a circle": _bad(NetworkError, "redirects to", response(302, location=CHAT)),
    "streams an error": _bad(NetworkError, "out of blocks", STREAM, chunk("Hello"), event({"error": "out of blocks"})),
    "streams an overflow": _bad(
        ContextOverflowError, "", STREAM, event({"error": {"code": 400, "type": "exceed_context_size_error"}})
    ),
    "is done before it begins": _bad(UnavailableError, "without an answer", STREAM, DONE),
    "filters": _bad(LlmrunError, "withheld", STREAM, *HELLO, chunk(finish="content_filter"), DONE),
    **{
        f"ends by {word}": _bad(UnavailableError, "did not complete", STREAM, *HELLO, chunk(finish=word), DONE)
        for word in ("abort", "error", "ERROR", "cancelled", "insufficient_system_resource", "MALFORMED_FUNCTION_CALL")
    },
    "ends a call by an error": _bad(
        UnavailableError, "did not complete", STREAM, _called(0, "add", '{"a": 1}'), chunk(finish="network_error"), DONE
    ),
    "puts its error into the choice": _bad(
        NetworkError,
        "kaboom",
        STREAM,
        *HELLO,
        event({"choices": [{"delta": {"content": ""}, "finish_reason": "error", "error": {"message": "kaboom"}}]}),
    ),
    "finds it unsafe": _bad(LlmrunError, "withheld", STREAM, *HELLO, chunk(finish="SAFETY"), DONE),
    # ---- odd, but an answer
    "is fine": Way((FINE,)),
    "says no usage": _good(STREAM, *HELLO, STOP, DONE),
    "says usage that is none": _good(STREAM, *HELLO, STOP, usage("many", -1), DONE),
    "does not say that it is done": _good(STREAM, *HELLO, STOP),
    "does not say why it ended": _good(STREAM, *HELLO, DONE),
    "leaves the last line open": _good(STREAM, *HELLO, STOP, b"data: [DONE]"),
    "stays when it is done": _good(*FINE, Act.SILENCE),
    "does not stream": Way((whole(content="Hello there"),)),
    "repeats the whole message": _good(
        STREAM,
        *HELLO,
        event({"choices": [{"delta": {}, "message": {"content": "Hello there"}, "finish_reason": "stop"}]}),
    ),
    "ends by a word of its own": _good(STREAM, *HELLO, chunk(finish="whim"), DONE),
    "answers nothing": _good(STREAM, STOP, usage(7, 1), DONE, says=""),
    "trickles": _good(*_each_byte(FINE)),
    "ends lines as Windows does": _good(STREAM, *(piece.replace(b"\n", b"\r\n") for piece in (*HELLO, STOP, DONE))),
    "comments": _good(STREAM, b": ping\n\n", chunk("Hello"), b":\n\n" * 100, chunk(" there"), STOP, usage(), DONE),
    "has null fields": _good(
        STREAM,
        event({"choices": [{"index": None, "delta": {"content": None, "tool_calls": None}, "logprobs": None}]}),
        *HELLO,
        event({"choices": [{"delta": None, "finish_reason": None}], "usage": None}),
        STOP,
        DONE,
    ),
    "names its events": _good(STREAM, b"event: x\nid: 1\nretry: 5\n" + chunk("Hello"), chunk(" there"), STOP, DONE),
    "breaks lines in events": _good(STREAM, HELLO[0].replace(b", ", b",\ndata: "), HELLO[1], STOP, DONE),
    "halves a surrogate pair": _good(*told(chunk("Hello there"), chunk("\ud83d")), says="Hello there\ufffd"),
    "sends a second choice": _good(*told(*HELLO, event({"choices": [{"index": 1, "delta": {"content": "no"}}]}))),
}  # fmt: skip
"""Name -> way. Some take the end of a client's patience, which should be short."""
THOUGHTS = told(chunk(reasoning_content="Hm"), chunk(reasoning_content="m."), chunk("Yes."))
"""An answer with thoughts, as llama-server and llmrun tell them; others call them `reasoning`."""
CALLS = (
    STREAM,
    _called(0, "add", '{"a": 1'),
    _called(1, "now"),
    _called(0, None, ', "b": 2}'),
    chunk(finish="tool_calls"),
    usage(),
    DONE,
)
"""Two calls whose pieces come mixed."""


def forget_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no variable of the developer's environment name a server."""
    for name in ("LLMRUN_SERVER", "LLMRUN_SERVER_KEY", "LLMRUN_SERVER_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)


def listed(*names: str, **fields: Any) -> Reply:
    """What GET /v1/models answers."""
    entries = [{"id": name, "object": "model", **fields} for name in names]
    return (response(200, json.dumps({"object": "list", "data": entries}).encode()),)


class FarServer:
    """What it replies, and what it was asked.

    Attributes:
        replies: to questions for text, one after the other; the last one goes on.
        models: the reply to the question for its models.
        others: path of another question -> the reply to it; no such path by default.
        asked: all requests, in their order.
    """

    def __init__(self) -> None:
        self.replies: list[Reply] = [FINE]
        self.models: Reply = listed(MODEL, owned_by="llmrun")
        self.others: dict[str, Reply] = {}
        self.asked: list[FarRequest] = []
        self.url = ""
        self._lock = threading.Lock()

    def behave(self, name: str) -> Way:
        """From now on in one of WAYS."""
        self.replies = list(WAYS[name].replies)
        return WAYS[name]

    def answered(self) -> list[FarRequest]:
        """The questions for text."""
        return [request for request in self.asked if request.path in (CHAT, TEXT)]

    def reply_to(self, request: FarRequest) -> Reply:
        """What is sent, and done."""
        with self._lock:
            self.asked.append(request)
            if request.path == MODELS:
                return self.models
            if request.path not in (CHAT, TEXT):
                return self.others.get(request.path, failed(404, "no such path"))
            return self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]


@contextmanager
def serving(context: ssl.SSLContext | None = None) -> Iterator[FarServer]:
    """The server, on a port of its own.

    Args:
        context: of TLS.
    """
    server = FarServer()
    listening = socket.create_server(("127.0.0.1", 0))
    server.url = f"http{'s' if context else ''}://127.0.0.1:{listening.getsockname()[1]}"
    ended = threading.Event()
    threads: list[threading.Thread] = []

    def answer(connection: socket.socket) -> None:
        connection.settimeout(SECONDS)
        with suppress(OSError), connection:
            secured = context.wrap_socket(connection, server_side=True) if context else connection
            with secured:
                _send(secured, server.reply_to(_read(secured)), ended)

    def accept() -> None:
        while not ended.is_set():
            with suppress(OSError):
                threads.append(threading.Thread(target=answer, args=(listening.accept()[0],)))
                threads[-1].start()

    accepting = threading.Thread(target=accept)
    accepting.start()
    try:
        yield server
    finally:
        ended.set()
        with suppress(OSError):
            socket.create_connection(listening.getsockname(), SECONDS).close()
        accepting.join()
        listening.close()
        for thread in threads:
            thread.join()


def _read(connection: socket.socket) -> FarRequest:
    """A whole request."""
    data = bytearray()
    while b"\r\n\r\n" not in data:
        piece = connection.recv(65536)
        if piece.startswith(b"\x16"):  # a TLS handshake, to a server without it
            connection.sendall(response(400))
        if not piece or piece.startswith(b"\x16"):
            raise ConnectionError
        data += piece
    head, _, body = bytes(data).partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    while len(body) < int(headers.get("content-length", "0")):
        body += connection.recv(65536)
    method, path, _ = first.split()
    return FarRequest(method, path, headers, json.loads(body) if body else None)


def _send(connection: socket.socket, reply: Reply, ended: threading.Event) -> None:
    for piece in reply:
        if isinstance(piece, bytes):
            connection.sendall(piece)
        elif isinstance(piece, Endless):
            while not ended.wait(piece.seconds):
                connection.sendall(piece.piece)
        elif piece is Act.RESET:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return
        else:
            connection.settimeout(0.05)
            while not ended.is_set():
                with suppress(TimeoutError):
                    if not connection.recv(1):
                        return
    with suppress(OSError):  # else what the client sent and nobody read would reset it
        connection.shutdown(socket.SHUT_WR)
