"""Responses kept in memory: continued, read, removed, and dropped in time."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.served import LiveServer

from llmrun.errors import UsageError
from llmrun.server.http import ResponseNotFoundError
from llmrun.server.protocols import stored_responses
from llmrun.server.protocols.stored_responses import ResponseStore

SAID = {"type": "message", "role": "assistant", "id": "msg_1", "content": [{"type": "output_text", "text": "Hi"}]}


def response(name: str) -> dict[str, Any]:
    return {"id": name, "output": [SAID]}


def test_a_request_goes_on_from_a_kept_response() -> None:
    store = ResponseStore()
    store.add("", {"input": "Hello"}, response("r1"))
    first = {"type": "message", "role": "user", "content": "Hello"}
    second = store.expanded("", {"input": [{"role": "user", "content": "And?"}], "previous_response_id": "r1"})
    assert second["input"] == [first, SAID, {"role": "user", "content": "And?"}]
    store.add("", second, response("r2"))
    third = store.expanded("", {"input": "So?", "previous_response_id": "r2"})
    assert third["input"] == [*second["input"], SAID, {**first, "content": "So?"}]


def test_a_reference_becomes_its_item() -> None:
    store = ResponseStore()
    store.add("", {"input": "Hello"}, response("r1"))
    assert store.expanded("", {"input": [{"type": "item_reference", "id": "msg_1"}]})["input"] == [SAID]
    with pytest.raises(ResponseNotFoundError, match="msg_2"):
        store.expanded("", {"input": [{"type": "item_reference", "id": "msg_2"}]})


def test_what_is_unknown_or_not_to_be_kept_is_refused() -> None:
    store = ResponseStore()
    store.add("", {"input": "Hello", "store": False}, response("r1"))
    for wrong in (
        lambda: store.get("", "r1"),
        lambda: store.remove("", "r1"),
        lambda: store.expanded("", {"previous_response_id": "r1"}),
    ):
        with pytest.raises(ResponseNotFoundError, match="r1"):
            wrong()
    with pytest.raises(UsageError, match="previous_response_id must be a string"):
        store.expanded("", {"previous_response_id": 5})


def test_the_oldest_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_responses, "_MOST_BYTES", 3 * len(json.dumps([[], response("r0")])))
    store = ResponseStore()
    for number in range(9):
        store.add("", {"input": []}, response(f"r{number}"))
    assert store.get("", "r8")
    assert store.get("", "r6")
    with pytest.raises(ResponseNotFoundError, match="r5"):
        store.get("", "r5")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    with LiveServer(tmp_path) as live:
        yield live


@pytest.mark.usefixtures("package_on_path")
def test_a_kept_response_is_read_continued_and_deleted(server: LiveServer) -> None:
    first = server.post("/v1/responses", {"input": "Hello"}).json
    path = f"/v1/responses/{first['id']}"
    assert server.get(path).json == first
    assert server.get(f"{path}/input_items").json["data"][0]["content"] == "Hello"
    second = server.post("/v1/responses", {"input": "And?", "previous_response_id": first["id"], "stream": True})
    assert second.events[-1]["response"]["previous_response_id"] == first["id"]
    assert len(server.get(f"/v1/responses/{second.events[-1]['response']['id']}/input_items").json["data"]) == 3
    deleted = server.raw(server.request("DELETE", path))
    assert b'"deleted":true' in deleted
    missing = server.get(path)
    assert (missing.status, missing.code) == (404, "response-not-found")


@pytest.mark.usefixtures("package_on_path")
def test_input_tokens_are_counted(server: LiveServer) -> None:
    assert server.post("/v1/responses/input_tokens", {"input": "Hello"}).json["input_tokens"] > 0


def test_a_thread_reads_while_another_adds() -> None:
    """Long bodies are expanded in a thread; before, it said that the dictionary changed."""
    store = ResponseStore()
    for number in range(900):
        store.add("", {"input": []}, {"id": f"r{number}", "output": []})
    store.add("", {"input": "Hello"}, {**response("old")})
    added = threading.Event()

    def add() -> None:
        for number in range(3000):
            store.add("", {"input": []}, {"id": f"n{number}", "output": []})
        added.set()

    adding = threading.Thread(target=add)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        adding.start()
        while not added.is_set():
            with pytest.raises(ResponseNotFoundError):
                store.expanded("", {"input": [{"type": "item_reference", "id": "nothing"}]})
    finally:
        sys.setswitchinterval(interval)
        adding.join()
