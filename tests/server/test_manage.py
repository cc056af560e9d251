"""Models are pulled, copied and deleted over Ollama's routes, by programs of this user only."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.gguf_writer import runnable_model, write
from support.model_disk import lonely_home
from support.served import SECONDS, LiveServer, RawResponse, parse

from llmrun.config import load_settings
from llmrun.errors import NetworkError
from llmrun.models import pull as pulling
from llmrun.models.store.importing import import_model
from llmrun.models.store.store import Store, all_models
from llmrun.server import manage_routes

pytestmark = pytest.mark.usefixtures("package_on_path")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveServer]:
    lonely_home(tmp_path / "home", monkeypatch)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    with LiveServer(tmp_path) as live:
        import_model(write(tmp_path / "mine-Q4_1.gguf", runnable_model()), Store(load_settings()), name="mine")
        yield live


def names() -> list[str]:
    return [each.name for each in all_models(load_settings())]


def delete(server: LiveServer, name: str, **headers: str) -> RawResponse:
    return parse(server.raw(server.request("DELETE", "/api/delete", json.dumps({"model": name}).encode(), **headers)))


def test_a_model_is_copied_and_deleted(server: LiveServer) -> None:
    (mine,) = names()
    assert server.post("/api/copy", {"source": mine, "destination": "other"}).status == 200
    assert {name.partition(":")[0] for name in names()} == {"local/mine", "local/other"}
    answer = server.post("/api/chat", {"model": mine, "messages": [{"role": "user", "content": "Hi"}], "stream": False})
    assert answer.status == 200
    assert delete(server, mine).status == 200, "it is unloaded first"
    assert [name.partition(":")[0] for name in names()] == ["local/other"]
    assert delete(server, mine).status == 404
    for destination in ("a b", "", ":latest", None):
        assert server.post("/api/copy", {"source": "local/other", "destination": destination}).status == 400
    assert [name.partition(":")[0] for name in names()] == ["local/other"]


def test_a_pull_streams_its_progress(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def pull(spec: Any, settings: Any, on_progress: Any, on_note: Any, **_: Any) -> Path:
        on_note("a note")
        on_progress(5, 10)
        on_progress(10, 10)
        return Path("m.gguf")

    monkeypatch.setattr(pulling, "pull", pull)
    lines = [json.loads(line) for line in server.post("/api/pull", {"model": "smollm2"}).body.splitlines()]
    assert [line["status"] for line in (*lines[:2], lines[-1])] == ["pulling manifest", "a note", "success"]
    assert (lines[-2]["completed"], lines[-2]["total"]) == (10, 10)
    assert server.post("/api/pull", {"model": "smollm2", "stream": False}).json == {"status": "success"}


def test_a_pull_without_a_stream_ends_when_its_client_leaves(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended = threading.Event(), threading.Event()

    def pull(spec: Any, settings: Any, on_progress: Any, on_note: Any, **_: Any) -> Path:
        begun.set()
        try:
            while not ended.wait(0.01):  # longer than anybody waits
                on_note("a note")
        finally:
            ended.set()

    monkeypatch.setattr(pulling, "pull", pull)
    with server.connect() as connection:
        connection.sendall(server.request("POST", "/api/pull", b'{"model": "smollm2", "stream": false}'))
        assert begun.wait(SECONDS)
    assert ended.wait(SECONDS)


def test_a_pull_that_fails_says_so(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def pull(*_: Any, **__: Any) -> Path:
        raise NetworkError("no hub")

    monkeypatch.setattr(pulling, "pull", pull)
    last = json.loads(server.post("/api/pull", {"model": "smollm2"}).body.splitlines()[-1])
    assert last["error"] == "no hub"
    whole = server.post("/api/pull", {"model": "smollm2", "stream": False})
    assert whole.status >= 400
    assert b"not a path" in server.post("/api/pull", {"model": "/etc/passwd"}).body


@pytest.mark.parametrize("headers", [{"sec-fetch-site": "same-origin"}, {"x-forwarded-for": "10.0.0.1"}])
def test_browsers_and_proxies_are_refused(server: LiveServer, headers: dict[str, str]) -> None:
    before = names()
    assert delete(server, before[0], **headers).status == 403
    assert server.post("/api/pull", {"model": "smollm2"}, **headers).status == 403
    assert names() == before


def test_other_users_are_refused_unless_it_is_allowed(
    server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manage_routes, "is_same_user", lambda client, server: False)
    body = {"source": names()[0], "destination": "other"}
    refused = server.post("/api/copy", body)
    assert (refused.status, "--allow-manage" in json.dumps(refused.json)) == (403, True)
    with LiveServer(tmp_path, allow_manage=True) as live:
        assert live.post("/api/copy", body).status == 200
