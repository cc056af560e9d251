"""Finished responses kept in memory, so that later requests can continue or read them. Pure; nothing reaches a disk.

A client without this store sends the whole conversation each time.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

from llmrun.server.http import response_not_found
from llmrun.server.protocols.fields import Fields

_MOST_BYTES = 64 << 20
_MOST_RESPONSES = 1000


class StoredResponse(NamedTuple):
    """A finished response, with all items before it."""

    input: list[Any]
    response: dict[str, Any]
    n_bytes: int


class ResponseStore:
    """The last responses of a server; the oldest are dropped. Long bodies are expanded in other threads.

    Each has an owner, see AnswerRequest: for all others it is unknown.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._responses: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self._n_bytes = 0

    def add(self, owner: str, body: Mapping[str, Any], response: dict[str, Any]) -> None:
        """Keep the response to an expanded body, unless the client refuses that."""
        if body.get("store") is False:
            return
        items = _items(body)
        n_bytes = len(json.dumps([items, response]))
        with self._lock:
            self._responses[owner, response["id"]] = StoredResponse(items, response, n_bytes)
            self._n_bytes += n_bytes
            while self._n_bytes > _MOST_BYTES or len(self._responses) > _MOST_RESPONSES:
                self._n_bytes -= self._responses.popitem(last=False)[1].n_bytes

    def get(self, owner: str, name: str) -> StoredResponse:
        """Return a response.

        Raises:
            ResponseNotFoundError: it was never kept, or dropped.
        """
        with self._lock:
            found = self._responses.get((owner, name))
        if found is None:
            raise response_not_found(name)
        return found

    def remove(self, owner: str, name: str) -> None:
        """Forget a response. Raises as get()."""
        with self._lock:
            found = self._responses.pop((owner, name), None)
            self._n_bytes -= found.n_bytes if found is not None else 0
        if found is None:
            raise response_not_found(name)

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
        with self._lock:
            newest_first = [stored for key, stored in reversed(self._responses.items()) if key[0] == owner]
        for stored in newest_first:
            for item in (*stored.response["output"], *stored.input):
                if isinstance(item, Mapping) and item.get("id") == name:
                    return item
        raise response_not_found(name)


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
