"""Requests of the page without a browser."""

from __future__ import annotations

from typing import Any

from llmrun.chat.store.store import Sessions, folder_in
from llmrun.config import load_settings
from support.served import LiveServer, RawResponse


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
