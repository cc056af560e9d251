"""Requests of the page without a browser."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from llmrun.chat.store.store import Sessions, folder_in
from llmrun.config import load_settings
from support.served import LiveServer, RawResponse, parse


def ask(server: LiveServer, text: str = "Hello there", **more: Any) -> dict[str, Any]:
    """Save a question; return the chat."""
    asked = server.post("/ui/ask", {"text": text, **more})
    assert asked.status == 200, asked.body
    found: dict[str, Any] = asked.json
    return found


def answer(server: LiveServer, chat: dict[str, Any], **more: Any) -> RawResponse:
    """Answer the last question of a chat."""
    question = next(entry["id"] for entry in reversed(chat["entries"]) if entry["role"] == "user")
    return server.post("/ui/answer", {"chat": chat["id"], "question": question, **more})


def read(server: LiveServer, chat: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = server.get(f"/ui/chats/{chat['id']}").json
    return found


def texts(chat: dict[str, Any]) -> list[str]:
    return [entry["text"] for entry in chat["entries"]]


def store() -> Sessions:
    """The store as a terminal opens it."""
    return Sessions(folder_in(load_settings().state_dir))


def call_stream(
    server: LiveServer, chat: dict[str, Any], decide: Callable[[dict[str, Any]], object], **more: Any
) -> list[Any]:
    """Answer with tools; `decide` is called with each call that waits for a decision. Return the data of the events."""
    question = chat["entries"][-1]["id"]
    body = json.dumps({"chat": chat["id"], "question": question, "tools": True, **more}).encode()
    data, n_decided = b"", 0
    with server.connect() as connection:
        connection.sendall(server.request("POST", "/ui/answer", body))
        while piece := connection.recv(65536):
            data += piece
            asked = [
                call
                for line in data.decode().splitlines()
                if line.startswith('data: {"text":') and '"calls":' in line
                for call in json.loads(line[6:])["calls"]
                if call["asks"]
            ]
            for call in asked[n_decided:]:
                decide(call)
            n_decided = len(asked)
    return parse(data).events
