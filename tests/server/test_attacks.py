"""Who means harm, or is merely broken: refused or given up, in the shape of its protocol, and nobody else notices."""

from __future__ import annotations

import hmac
import json
import random
import select
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.installed import eventually
from support.served import CHAT, HI, SECONDS, LiveServer, parse, read_all

from llmrun.runner import hang
from llmrun.server import exchange
from llmrun.server.guard import Policy
from llmrun.server.protocols.fields import MOST_OBJECTS, Fields
from llmrun.server.registry import allow_many_connections

pytestmark = pytest.mark.usefixtures("package_on_path")
KEY = "a key of the test"
STREAM = {**HI, "stream": True}
OPENAI = {"error": {"message", "type", "param", "code"}}
SHAPES: dict[str, Any] = {
    CHAT: OPENAI,
    "/v1/completions": OPENAI,
    "/v1/responses": OPENAI,
    "/v1/models": OPENAI,
    "/tokenize": OPENAI,
    "/v1/messages": {"type": None, "error": {"type", "message", "code"}},
    "/v1/messages/count_tokens": {"type": None, "error": {"type", "message", "code"}},
    "/api/chat": {"error": None, "code": None},
    "/api/generate": {"error": None, "code": None},
    "/api/show": {"error": None, "code": None},
}
"""Path -> the keys of an error there, and of what is in it."""
Serve = Callable[..., LiveServer]


def shape(body: dict[str, Any]) -> dict[str, Any]:
    return {key: set(value) if isinstance(value, dict) else None for key, value in body.items()}


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """serve(*modes, **options): a server over engines of these modes, ended afterwards."""
    with ExitStack() as stack:
        yield lambda *modes, **options: stack.enter_context(LiveServer(tmp_path, modes or ("normal",), **options))


def test_a_wrong_key_is_refused_in_the_shape_of_the_protocol(
    serve: Serve, eventually: Callable[[Callable[[], bool], float], bool]
) -> None:
    server = serve(policy=Policy(keys=(KEY.encode(),)))
    for path, expected in SHAPES.items():
        for headers in ({}, {"authorization": "Bearer wrong"}, {"x_api_key": KEY[:-1]}):
            refused = server.get(path, **headers) if path == "/v1/models" else server.post(path, **headers)
            assert (refused.status, shape(refused.json)) == (401, expected), path
            assert refused.headers["www-authenticate"] == "Bearer"
    # A wheel with Vulkan looks for GPUs before the model is loaded.
    assert eventually(lambda: server.engines == 1, 30.0), "and nothing was computed"


def test_a_key_is_compared_with_all_of_them_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[Any, Any]] = []
    original = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)) or original(a, b))
    keys = (b"the first key", b"the second key", b"the third key")
    for given in (*keys, b"wrong", b""):
        compared.clear()
        assert (Policy(keys=keys).owner(given) is not None) == (given in keys)
        assert compared == [(given, key) for key in keys]


def test_ten_thousand_stop_strings_are_refused_in_shape(serve: Serve) -> None:
    server, stops = serve(), [f"stop {number}" for number in range(10_000)]
    fields = {"stop": stops, "stop_sequences": stops, "options": {"stop": stops}, "prompt": "Hi"}
    for path in (CHAT, "/v1/completions", "/v1/messages", "/v1/messages/count_tokens", "/api/chat", "/api/generate"):
        refused = server.post(path, {**HI, **fields})
        assert (refused.status, shape(refused.json)) == (400, SHAPES[path])
    assert server.post("/v1/responses", {"input": "Hi", "stop": stops}).status == 400


MESSAGES = (CHAT, "/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/api/chat")


@pytest.mark.parametrize("path", MESSAGES)
def test_a_hundred_thousand_messages_are_refused_before_they_are_read(
    serve: Serve, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each costs a tenth of a millisecond before the chat template's time begins."""
    server = serve()
    many = [{"role": "user", "content": "x"}] * 100_000
    read: list[Any] = []
    init = Fields.__init__
    monkeypatch.setattr(Fields, "__init__", lambda self, *given: (read.append(given), init(self, *given))[1])
    refused = server.post(path, {"messages": many, "input": many, "max_tokens": 1})
    assert (refused.status, shape(refused.json)) == (400, SHAPES[path])
    assert b"at most" in refused.body
    assert len(read) < 100


def test_as_many_messages_as_may_be_are_answered(serve: Serve) -> None:
    server = serve()
    most = [{"role": "user", "content": "x"}] * MOST_OBJECTS
    assert server.post(CHAT, {"messages": most}).status == 200
    refused = server.post(CHAT, {"messages": [*most, most[0]]})
    assert (refused.status, "messages has 10,001 entries" in refused.json["error"]["message"]) == (400, True)


@pytest.mark.parametrize("value", [[[]] * 100_000, [{"a": [{}] * 30_000}, {"b": [[]] * 40_000}]], ids=["flat", "deep"])
def test_a_body_of_many_objects_is_refused(serve: Serve, value: Any) -> None:
    refused = serve().post(CHAT, {**HI, "metadata": value})
    assert (refused.status, "too complex" in refused.json["error"]["message"]) == (400, True)


@pytest.mark.parametrize("headers", [{"x_long": "x" * 2**20}, {f"x_{number}": "x" * 100 for number in range(10_000)}])
def test_a_megabyte_of_headers_is_refused_or_dropped(serve: Serve, headers: dict[str, str]) -> None:
    server = serve().once_loaded()
    answer = b""
    with server.connect() as connection, suppress(ConnectionError):
        connection.sendall(server.request("GET", "/health", **headers))
        answer = read_all(connection)
    assert not answer or parse(answer).status in {400, 431}
    assert server.get("/health").status == 200


@pytest.mark.parametrize(
    ("header", "piece"), [({"content_length": "1000000"}, b" "), ({"transfer_encoding": "chunked"}, b"1\r\n \r\n")]
)
def test_a_body_that_comes_piece_by_piece_without_end_is_given_up(
    serve: Serve, header: dict[str, str], piece: bytes
) -> None:
    server = serve(receive_seconds=0.5)
    head = server.request("POST", CHAT, content_type="application/json", **header)
    with server.connect() as connection, suppress(ConnectionError):
        connection.sendall(head)
        while not select.select([connection], [], [], 0.01)[0]:
            connection.sendall(piece)
        assert parse(read_all(connection)).status == 408


def test_a_request_sent_before_the_answer_to_the_one_before_waits_for_it(serve: Serve) -> None:
    server = serve("held", receive_seconds=1.0)
    first = server.request("POST", CHAT, json.dumps(HI).encode(), connection="keep-alive")
    with server.connect() as connection:
        connection.sendall(first + server.request("GET", "/health"))
        time.sleep(1.5)
        while not select.select([connection], [], [], 0.05)[0]:
            server.get("/metrics")  # ends the answer
        assert read_all(connection).count(b"HTTP/1.1 200 OK") == 2


def test_a_client_that_reads_nothing_is_given_up(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "KEEP_ALIVE_SECONDS", 0.05)
    monkeypatch.setattr(exchange, "STALL_SECONDS", 0.2)
    server = serve("chatty")
    with server.connect() as connection:
        connection.sendall(server.request("POST", CHAT, json.dumps(STREAM).encode()))
        assert eventually(lambda: bool(server.served), SECONDS)
        with suppress(ConnectionError):
            assert not read_all(connection).endswith(b"0\r\n\r\n"), "it was cut off"
    assert server.served[0].facts["reason"] == "left"


def test_streams_side_by_side_all_hear_that_the_engine_died(serve: Serve) -> None:
    """Two streams of several protocols: neither begins before both are asked for, and then it dies."""
    for path, told in ((CHAT, b'data: {"error"'), ("/v1/messages", b"event: error"), ("/api/chat", b'{"error"')):
        server = serve("die:together:SIGSEGV", "normal")
        with server.connect() as first, server.connect() as second:
            for connection, text in ((first, "one"), (second, "two")):
                body = {"messages": [{"role": "user", "content": text}], "stream": True, "max_tokens": 99}
                connection.sendall(server.request("POST", path, json.dumps(body).encode()))
            for connection in (first, second):
                answer = read_all(connection)
                assert told in answer
                assert b"engine-crashed" in answer
                assert answer.endswith(b"0\r\n\r\n")
        assert server.post(path, {**HI, "stream": False, "max_tokens": 9}).status == 200


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses", "/api/chat"])
def test_a_chat_template_without_end_is_refused_in_shape_and_the_next_request_is_answered(
    serve: Serve, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang, "SILENT_SECONDS", 0.2)
    server = serve("hang_in_render", "normal")
    body = {**HI, "input": "Hi", "stream": False, "max_tokens": 9}
    refused = server.post(path, body)
    assert (refused.status, shape(refused.json)) == (422, SHAPES[path])
    assert "bad-template" in refused.body.decode()
    assert server.post(path, body).status == 200


def test_a_thousand_idle_connections_keep_nobody_waiting(serve: Serve) -> None:
    allow_many_connections()
    server = serve()
    assert server.post(CHAT).status == 200
    with ExitStack() as stack:
        for _ in range(1000):
            stack.enter_context(server.connect())
        assert server.post(CHAT).status == 200
        assert server.get("/health").status == 200


# ---- many clients at once, some of whom leave, lie or lose their engine: all are answered, and nothing is left over


N_REQUESTS = 120
N_CLIENTS = 12


def ask(server: LiveServer, number: int) -> str:
    """What became of a request: "left", or how it was answered."""
    chance = random.Random(number)
    body = {"messages": [{"role": "user", "content": f"Question {number}"}], "stream": chance.random() < 0.5}
    data = server.request("POST", CHAT, json.dumps(body).encode())
    if number % 20 == 3:
        return str(parse(server.raw(server.request("POST", CHAT, b"{"))).status)
    if number % 5 == 1:
        with server.connect() as connection:
            connection.sendall(data[: chance.randrange(1, len(data) + 1)])
        return "left"
    answer = parse(server.raw(data))
    if answer.headers["content-type"] != "text/event-stream":
        return "error" if "error" in answer.json else "answer"
    if answer.body.endswith(b"data: [DONE]\n\n"):
        return "answer"
    assert "error" in answer.events[-1]
    return "error"


def test_everybody_is_answered_and_nothing_is_left(tmp_path: Path) -> None:
    with LiveServer(tmp_path, parallel=4, queue=N_REQUESTS) as server, ThreadPoolExecutor(N_CLIENTS) as clients:
        asked = []
        for number in range(N_REQUESTS):
            asked.append(clients.submit(ask, server, number))
            if number % 40 == 39:
                asked[-1].result(SECONDS)
                for engine in psutil.Process().children():
                    engine.kill()
        results = [each.result(SECONDS) for each in asked]
        assert results.count("left") == N_REQUESTS // 5
        assert results.count("400") == N_REQUESTS // 20
        assert results.count("answer") > N_REQUESTS // 2
        quiet = 'num_requests_running{model_name="' + server.model + '"} 0'
        assert eventually(lambda: quiet in server.get("/metrics").body.decode(), SECONDS)
        metrics = server.get("/metrics").body.decode()
        assert f'num_requests_waiting{{model_name="{server.model}"}} 0' in metrics
        assert server.post(CHAT, {"messages": [{"role": "user", "content": "The last"}]}).status == 200
        assert server.engines <= 5
