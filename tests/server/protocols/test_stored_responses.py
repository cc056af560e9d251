"""Responses kept in memory: continued, read, removed, and dropped in time."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from support.served import LiveServer, parse, read_all

from llmrun.errors import UsageError
from llmrun.server.http import ResponseNotFoundError
from llmrun.server.protocols import stored_responses
from llmrun.server.protocols.stored_responses import ResponseStore, kept_items

SAID = {"type": "message", "role": "assistant", "id": "msg_1", "content": [{"type": "output_text", "text": "Hi"}]}


HELLO = {"type": "message", "role": "user", "content": "Hello"}


def response(name: str) -> dict[str, Any]:
    return {"id": name, "object": "response", "output": [SAID]}


def test_a_request_goes_on_from_a_kept_response() -> None:
    store = ResponseStore()
    store.add("", [HELLO], response("r1"))
    second = store.expanded("", {"input": [{"role": "user", "content": "And?"}], "previous_response_id": "r1"})
    assert second["input"] == [HELLO, SAID, {"role": "user", "content": "And?"}]
    store.add("", second["input"], response("r2"))
    third = store.expanded("", {"input": "So?", "previous_response_id": "r2"})
    assert third["input"] == [*second["input"], SAID, {**HELLO, "content": "So?"}]


def test_a_reference_becomes_its_item() -> None:
    store = ResponseStore()
    store.add("", [HELLO], response("r1"))
    assert store.expanded("", {"input": [{"type": "item_reference", "id": "msg_1"}]})["input"] == [SAID]
    with pytest.raises(ResponseNotFoundError, match="msg_2"):
        store.expanded("", {"input": [{"type": "item_reference", "id": "msg_2"}]})


def test_what_is_unknown_or_not_to_be_kept_is_refused() -> None:
    store = ResponseStore()
    assert kept_items({"input": "Hello"}) == [HELLO]
    assert kept_items({"input": "Hello", "store": False}) is None
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
        store.add("", [], response(f"r{number}"))
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
    listed = server.get(f"{path}/input_items").json
    assert listed["data"][0]["content"] == [{"type": "input_text", "text": "Hello"}]
    assert listed["first_id"] == listed["last_id"] == listed["data"][0]["id"]
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


@pytest.mark.usefixtures("package_on_path")
@pytest.mark.parametrize("keeps", [True, False])
def test_a_response_that_is_being_written_is_cancelled(tmp_path: Path, keeps: bool) -> None:
    with LiveServer(tmp_path, ("held",)) as server, closing(server.connect()) as stream:
        body = json.dumps({"input": "Hi", "stream": True, "store": keeps})
        stream.sendall(server.request("POST", "/v1/responses", body.encode()))
        data = b""
        while b"output_text.delta" not in data:
            data += stream.recv(65536)
        (name,) = {event["response"]["id"] for event in events_of(data) if "response" in event}
        cancelled = server.post(f"/v1/responses/{name}/cancel").json
        assert (cancelled["id"], cancelled["status"], cancelled["completed_at"]) == (name, "cancelled", None)
        (message,) = cancelled["output"]
        assert (message["status"], message["content"][0]["text"]) == ("incomplete", "Hel")
        last = parse(data + read_all(stream)).events[-1]
        assert (last["type"], last["response"]) == ("response.incomplete", cancelled)
        kept, again = server.get(f"/v1/responses/{name}"), server.post(f"/v1/responses/{name}/cancel")
        assert (kept.status, again.status) == ((200, 200) if keeps else (404, 404))
        assert not keeps or kept.json == again.json == cancelled


def events_of(data: bytes) -> list[Any]:
    """The whole events of a part of a stream."""
    lines = re.findall(rb"^data: (.*)\n\n", data, re.MULTILINE)
    return [json.loads(line) for line in lines]


@pytest.mark.usefixtures("package_on_path")
def test_chats_with_store_are_kept_and_others_are_not(server: LiveServer) -> None:
    with OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as client:
        chats = client.chat.completions
        said: Any = [{"role": "user", "content": "Hello"}]
        chats.create(model="tiny", messages=said)
        made = [chats.create(model="tiny", messages=said, store=True, metadata={"n": str(n)}) for n in range(3)]
        names = [each.id for each in made]
        assert [each.id for each in chats.list(limit=2)] == names  # in two pages
        assert [each.id for each in chats.list(order="desc")] == names[::-1]
        assert [each.id for each in chats.list(metadata={"n": "1"})] == names[1:2]
        assert not list(chats.list(model="other"))
        assert chats.retrieve(names[0]).choices == made[0].choices
        assert [each.content for each in chats.messages.list(names[0])] == ["Hello"]
        chats.update(names[0], metadata={"n": "1"})
        assert [each.id for each in chats.list(metadata={"n": "1"})] == names[:2]
        assert chats.delete(names[0]).deleted
        assert [each.id for each in chats.list()] == names[1:]
    assert server.get(f"/v1/chat/completions/{names[0]}").code == "response-not-found"
    assert server.get(f"/v1/responses/{names[1]}").code == "response-not-found"
    assert server.get("/v1/chat/completions?limit=0").status == 400


@pytest.mark.usefixtures("package_on_path")
def test_a_streamed_chat_is_kept_and_store_is_not_named_as_ignored(server: LiveServer) -> None:
    asked = {"messages": [{"role": "user", "content": "Hello"}], "store": True, "stream": True}
    answer = server.post("/v1/chat/completions", asked)
    assert "x-llmrun-ignored" not in answer.headers
    (kept,) = server.get("/v1/chat/completions").json["data"]
    assert (kept["id"], kept["object"]) == (answer.events[0]["id"], "chat.completion")
    assert kept["choices"][0]["message"]["content"] == "Hello"


@pytest.mark.usefixtures("package_on_path")
def test_a_kept_conversation_is_compacted(tmp_path: Path) -> None:
    with LiveServer(tmp_path, ("echo",)) as server:
        first = server.post("/v1/responses", {"input": "Hello"}).json
        asked = {"model": "tiny", "previous_response_id": first["id"]}
        compacted = server.post("/v1/responses/compact", asked).json
        said, summary = compacted["output"]
        assert (said["content"][0]["text"], summary["type"]) == ("Hello", "compaction")
        assert "Summarize our conversation" in summary["encrypted_content"]  # what the engine was asked last
        assert server.get(f"/v1/responses/{compacted['id']}").status == 404
        going_on = {"input": [*compacted["output"], {"role": "user", "content": "And?"}]}
        assert server.post("/v1/responses", going_on).json["output"][0]["content"][0]["text"] == "And?"


def test_a_thread_reads_while_another_adds() -> None:
    """Long bodies are expanded in a thread; before, it said that the dictionary changed."""
    store = ResponseStore()
    for number in range(900):
        store.add("", [], {**response(f"r{number}"), "output": []})
    store.add("", [HELLO], response("old"))
    added = threading.Event()

    def add() -> None:
        for number in range(3000):
            store.add("", [], {**response(f"n{number}"), "output": []})
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
