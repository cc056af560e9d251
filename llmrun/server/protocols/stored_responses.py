"""Finished responses and chat completions kept in memory, so that later requests can continue or read them; and the
responses that are being written, so that they can be cancelled. Nothing reaches a disk.

A client without this store sends the whole conversation each time.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from llmrun.server.http import response_not_found
from llmrun.server.protocols.fields import Fields

RESPONSE, CHAT = "response", "chat.completion"
"""Kinds of what is kept."""
_PART: Mapping[str, dict[str, Any]] = {"input_image": {"detail": "auto"}, "output_text": {"annotations": []}}
"""Type of a part of a message -> fields that it has where it is listed."""
_MOST_BYTES = 64 << 20
_MOST_RESPONSES = 1000


class StoredResponse(NamedTuple):
    """A finished response with all items before it, or a chat completion with the messages before it."""

    input: list[Any]
    response: dict[str, Any]
    n_bytes: int


class _Writing(NamedTuple):
    """A response that is being written."""

    stop: Callable[[], None]
    whole: Callable[[], dict[str, Any]]
    finished: asyncio.Future[None]  # cancelled if it failed


class ResponseStore:
    """The last responses of a server; the oldest are dropped. Long bodies are expanded in other threads.

    Each has an owner, see AnswerRequest: for all others it is unknown. Its kind is the field "object".
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._responses: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self._n_bytes = 0
        self._writing: dict[tuple[str, str], _Writing] = {}

    def add(self, owner: str, items: list[Any], response: dict[str, Any]) -> None:
        """Keep a response and the items before it. Another response of this name is replaced."""
        n_bytes = len(json.dumps([items, response]))
        with self._lock:
            before = self._responses.get((owner, response["id"]))
            self._responses[owner, response["id"]] = StoredResponse(items, response, n_bytes)
            self._n_bytes += n_bytes - (before.n_bytes if before is not None else 0)
            while self._n_bytes > _MOST_BYTES or len(self._responses) > _MOST_RESPONSES:
                self._n_bytes -= self._responses.popitem(last=False)[1].n_bytes

    def get(self, owner: str, name: str, kind: str = RESPONSE) -> StoredResponse:
        """Return a response.

        Raises:
            ResponseNotFoundError: it was never kept, or dropped, or is of another kind.
        """
        with self._lock:
            found = self._responses.get((owner, name))
        if found is None or found.response["object"] != kind:
            raise response_not_found(name)
        return found

    def remove(self, owner: str, name: str, kind: str = RESPONSE) -> None:
        """Forget a response. Raises as get()."""
        found = self.get(owner, name, kind)
        with self._lock:
            if self._responses.pop((owner, name), None) is not None:
                self._n_bytes -= found.n_bytes

    def all_of(self, owner: str, kind: str) -> list[StoredResponse]:
        """Return all of a kind, the oldest first."""
        with self._lock:
            kept = [stored for key, stored in self._responses.items() if key[0] == owner]
        return [stored for stored in kept if stored.response["object"] == kind]

    @contextmanager
    def writing(
        self, owner: str, name: str, stop: Callable[[], None], whole: Callable[[], dict[str, Any]]
    ) -> Iterator[None]:
        """Let cancel() reach a response that the block writes: `stop` makes the block end, `whole` returns the rest."""
        writing = self._writing[owner, name] = _Writing(stop, whole, asyncio.get_running_loop().create_future())
        try:
            yield
            writing.finished.set_result(None)
        finally:
            del self._writing[owner, name]
            writing.finished.cancel()

    async def cancel(self, owner: str, name: str) -> dict[str, Any]:
        """Stop a response that is being written, and return it; a finished one stays as it is. Raises as get()."""
        writing = self._writing.get((owner, name))
        if writing is None:
            return self.get(owner, name).response
        writing.stop()
        await asyncio.wait((writing.finished,))
        if writing.finished.cancelled():
            raise response_not_found(name)
        return writing.whole()

    def expanded(self, owner: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return a body with the items before its own, and with items instead of references to them.

        Raises:
            UsageError: a field has the wrong type.
            ResponseNotFoundError: the previous response, or an item, is unknown.
        """
        previous = Fields(body).text("previous_response_id")
        if not previous and not any(map(_reference, _items(body))):
            return body
        items = [self._item(owner, name) if (name := _reference(each)) else each for each in _items(body)]
        before = self.get(owner, previous) if previous else None
        known = [*before.input, *before.response["output"]] if before else []
        return {**body, "input": [*known, *items]}

    def _item(self, owner: str, name: str) -> Any:
        for stored in reversed(self.all_of(owner, RESPONSE)):
            for item in (*stored.response["output"], *stored.input):
                if isinstance(item, Mapping) and item.get("id") == name:
                    return item
        raise response_not_found(name)


def kept_items(body: Mapping[str, Any]) -> list[Any] | None:
    """Return the items of an expanded body of a response, to be kept; None if the client does not want that."""
    return None if body.get("store") is False else _items(body)


def listed_items(name: str, items: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return items as they are listed: each with an id and a type, a message with its content in parts.

    Args:
        name: of their response.
    """
    return [_listed_item(f"item_{number}_{name}", item) for number, item in enumerate(items)]


def _listed_item(name: str, item: Mapping[str, Any]) -> dict[str, Any]:
    listed = {**item, "id": item.get("id") or name, "type": item.get("type") or "message"}
    if listed["type"] != "message":
        return listed
    content = item.get("content") or []
    kind = "output_text" if item.get("role") == "assistant" else "input_text"
    parts = [{"type": kind, "text": content}] if isinstance(content, str) else content
    return {**listed, "status": "completed", "content": [{**_PART.get(part["type"], {}), **part} for part in parts]}


def kept_messages(body: Mapping[str, Any]) -> list[Any] | None:
    """Return the messages of a chat completion, to be kept if the client wants that; else None."""
    return Fields(body).list("messages") if body.get("store") is True else None


def _items(body: Mapping[str, Any]) -> list[Any]:
    items = body.get("input")
    return (
        [{"type": "message", "role": "user", "content": items}]
        if isinstance(items, str)
        else Fields(body).list("input")
    )


def _reference(item: Any) -> str:
    """Return the id of the item that an item refers to; "" if it is no reference."""
    if not isinstance(item, Mapping) or item.get("type") != "item_reference":
        return ""
    return Fields(item, "input").needed_text("id")
