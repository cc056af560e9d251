"""Work for clients that leave, that takes too long, and at the end of the server: a table of all routes.

The engines never end anything by themselves, so that each test ends only if the server stops the work.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.installed import eventually
from support.served import CHAT, HI, SECONDS, LiveServer, read_all

from llmrun.server import exchange
from llmrun.server.app import COMPLETION_APIS

pytestmark = pytest.mark.usefixtures("package_on_path")
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgoAAAANSUhEUg=="}}
RESPONSE, MESSAGE, TEXT = {"input": "Hi"}, {**HI, "max_tokens": 5}, {"prompt": "Hi"}
COMPACT = {"input": "Hi", "model": "tiny"}
ECHO = {"prompt": ["Hi", "there"], "echo": True, "logprobs": 1, "max_tokens": 5}
ANSWERS: dict[str, Any] = {
    "/v1/chat/completions": HI, "/chat/completions": HI, "/v1/completions": TEXT, "/v1/responses": RESPONSE,
    "/responses": RESPONSE, "/v1/responses/compact": COMPACT, "/responses/compact": COMPACT, "/completion": TEXT,
    "/completions": TEXT, "/v1/messages": MESSAGE, "/api/chat": HI,
    "/api/generate": TEXT, "/infill": {"input_prefix": "a", "input_suffix": "b"},
}  # fmt: skip
PAGE: dict[str, Any] = {
    "/ui/answer": {"question": 1}, "/ui/explain": {"answer": 2}, "/ui/tokens": {"answer": 2}, "/ui/why": {"answer": 2},
    "/ui/context": {},
}  # fmt: skip
JOBS: dict[str, Any] = {
    "/tokenize": {"content": "Hi"}, "/detokenize": {"tokens": [72]}, "/apply-template": HI,
    "/v1/messages/count_tokens": HI, "/v1/chat/completions/input_tokens": HI, "/chat/completions/input_tokens": HI,
    "/v1/responses/input_tokens": RESPONSE, "/responses/input_tokens": RESPONSE,
    **{path: {"chat": 1, **fields} for path, fields in PAGE.items()},
}  # fmt: skip
EMBED, RANK = {"input": ["Hi", "there"]}, {"query": "Hi", "documents": ["there", "here"]}
VECTORS: dict[str, Any] = {
    "/v1/embeddings": EMBED, "/api/embed": EMBED, "/api/embeddings": TEXT, "/embedding": {"content": "Hi"},
    "/embeddings": {"content": "Hi"}, "/v1/rerank": RANK, "/v2/rerank": RANK, "/rerank": RANK,
    "/v1/reranking": RANK, "/reranking": RANK,
}  # fmt: skip
OTHERS: list[tuple[str, Any]] = [
    ("/v1/completions", ECHO), ("/v1/completions", {**ECHO, "stream": True}), (CHAT, {**HI, "n": 2}),
    (CHAT, {**HI, "stream": True}), (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}),
    ("/api/chat", {**HI, "stream": False}), ("/v1/responses", {**RESPONSE, "stream": True}),
    ("/ui/answer", {"chat": 1, "question": 1, "together": True}),
    ("/ui/answer", {"chat": 1, "question": 1, "overflow": "summarize"}),
]  # fmt: skip
WORK: list[tuple[str, Any]] = [*ANSWERS.items(), *JOBS.items(), *VECTORS.items(), *OTHERS]
NO_WORK = {
    "/api/show", "/api/pull", "/api/copy", "/api/delete", "/lora-adapters", "/ui/download", "/ui/load", "/ui/search",
    "/ui/download/stop", "/ui/hub", "/ui/rename", "/v1/responses/{name}/cancel", "/v1/chat/completions/{name}",
    "/ui/applies", "/ui/folder", "/ui/delete", "/ui/ask", "/ui/documents", "/ui/go", "/ui/undo", "/ui/system",
    "/ui/stop", "/ui/decide", "/ui/speed", "/ui/servers/start",
    "/ui/phone",
}  # fmt: skip
"""Routes that ask no loaded model: files, downloads, saved chats, what is kept in memory; /ui/speed has its own."""


def serve(folder: Path, **options: Any) -> LiveServer:
    """A server with a chat of one answer, whose next engine ends nothing."""
    return LiveServer(folder, ("echo", "unending"), n_ctx=4096, **{"parallel": 64, "queue": 64, **options})


def prepare(server: LiveServer) -> None:
    chat = server.post("/ui/ask", {"text": "Hi"}).json
    assert server.post("/ui/answer", {"chat": chat["id"], "question": 1}).status == 200
    assert server.post("/api/generate", {"model": server.model, "keep_alive": 0}).status == 200
    assert eventually(lambda: not server.loaded, SECONDS)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serve(tmp_path_factory.mktemp("leaving")) as live:
        prepare(live)
        yield live


def test_every_route_is_in_the_tables(server: LiveServer) -> None:
    assert {path for path, _ in WORK} | NO_WORK == server.posted_paths
    assert set(ANSWERS) == set(COMPLETION_APIS)


@pytest.mark.parametrize(("path", "body"), WORK)
def test_work_stops_when_its_client_leaves(server: LiveServer, path: str, body: Any) -> None:
    n_before = len(server.served)
    with server.connect() as connection:
        connection.sendall(server.request("POST", path, json.dumps(body).encode()))
        assert eventually(lambda: server.running > 0, SECONDS)
    if path == "/ui/answer" and not body.get("together"):  # goes on without its client, see RunningAnswer
        assert server.post("/ui/stop", {"chat": 1}).status == 200
    assert eventually(lambda: server.running == 0, SECONDS)
    assert eventually(lambda: any(each.path == path for each in server.served[n_before:]), SECONDS)


def responses_at_once(server: LiveServer, stack: ExitStack) -> Any:
    """Send all of the table, one answer of the page among them; return what gives the responses, by path and body."""
    sent = []
    asked = [(path, body) for path, body in WORK if path != "/ui/answer" or body.get("together")]
    for path, body in asked:
        connection = stack.enter_context(server.connect())
        connection.sendall(server.request("POST", path, json.dumps(body).encode()))
        sent.append((path, body, connection))
    return lambda: [(path, body, read_all(connection)) for path, body, connection in sent]


def test_work_stops_at_the_end_of_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is deaf for the end holds it up: the time for errors is as good as endless."""
    monkeypatch.setattr(exchange, "_ERROR_SECONDS", SECONDS)
    with serve(tmp_path, grace_seconds=0.0) as server, ExitStack() as stack:
        prepare(server)
        responses = responses_at_once(server, stack)
        n_together = len(VECTORS) - 1  # of one job after the other
        assert eventually(lambda: server.running >= len(WORK) - 2 - n_together, SECONDS)
        server.end()
        for path, body, response in responses():
            assert b"shutting" in response, (path, body, response)
        server.wait()


def test_work_stops_when_its_time_is_over(tmp_path: Path) -> None:
    with serve(tmp_path, answer_seconds=2.0) as server, ExitStack() as stack:
        prepare(server)
        for path, body, response in responses_at_once(server, stack)():
            assert b"longer than 2 seconds" in response, (path, body, response)
        assert eventually(lambda: server.running == 0, SECONDS)
