"""Routes of what is kept in memory: responses, and chat completions with `store`; each for its owner only."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from llmrun.errors import UsageError
from llmrun.server.http import read_json
from llmrun.server.protocols.fields import Fields
from llmrun.server.protocols.stored_responses import CHAT, ResponseStore, StoredResponse, listed_items

_CHATS = "/v1/chat/completions"
_MOST = 100  # entries of a list that a client may ask for


class StoredRoutes:
    """OpenAI's routes below /v1/responses/ID and /v1/chat/completions."""

    def __init__(self, responses: ResponseStore) -> None:
        self._responses = responses

    @property
    def routes(self) -> list[Route]:
        get, post, delete = ["GET"], ["POST"], ["DELETE"]
        return [
            Route("/v1/responses/{name}", self._get, methods=get),
            Route("/v1/responses/{name}", self._delete, methods=delete),
            Route("/v1/responses/{name}/input_items", self._items, methods=get),
            Route("/v1/responses/{name}/cancel", self._cancel, methods=post),
            Route(_CHATS, self._list_chats, methods=get),
            Route(f"{_CHATS}/{{name}}", self._get_chat, methods=get),
            Route(f"{_CHATS}/{{name}}", self._update_chat, methods=post),
            Route(f"{_CHATS}/{{name}}", self._delete_chat, methods=delete),
            Route(f"{_CHATS}/{{name}}/messages", self._messages, methods=get),
        ]

    # ---- responses ----

    async def _get(self, request: Request) -> Response:
        return JSONResponse(self._responses.get(*_key(request)).response)

    async def _delete(self, request: Request) -> Response:
        owner, name = _key(request)
        self._responses.remove(owner, name)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    async def _items(self, request: Request) -> Response:
        owner, name = _key(request)
        return JSONResponse(_page(request, listed_items(name, self._responses.get(owner, name).input)))

    async def _cancel(self, request: Request) -> Response:
        return JSONResponse(await self._responses.cancel(*_key(request)))

    # ---- chat completions ----

    def _chat(self, request: Request) -> StoredResponse:
        return self._responses.get(*_key(request), CHAT)

    async def _list_chats(self, request: Request) -> Response:
        """List completions: ?model=, ?metadata[KEY]= choose, ?order=, ?after= and ?limit= cut."""
        query = request.query_params
        wanted = {key[9:-1]: value for key, value in query.items() if key.startswith("metadata[") and key[-1] == "]"}
        chats = [stored.response for stored in self._responses.all_of(request.scope["owner"], CHAT)]
        chosen = [
            chat
            for chat in chats
            if query.get("model") in (None, chat["model"]) and wanted.items() <= chat["metadata"].items()
        ]
        return JSONResponse(_page(request, chosen))

    async def _get_chat(self, request: Request) -> Response:
        return JSONResponse(self._chat(request).response)

    async def _update_chat(self, request: Request) -> Response:
        """Replace the metadata of a completion: {"metadata"}."""
        metadata = Fields(await read_json(request.receive)).mapping("metadata") or {}
        stored = self._chat(request)
        changed = {**stored.response, "metadata": metadata}
        self._responses.add(request.scope["owner"], stored.input, changed)
        return JSONResponse(changed)

    async def _delete_chat(self, request: Request) -> Response:
        owner, name = _key(request)
        self._responses.remove(owner, name, CHAT)
        return JSONResponse({"id": name, "object": "chat.completion.deleted", "deleted": True})

    async def _messages(self, request: Request) -> Response:
        stored = self._chat(request)
        name = stored.response["id"]
        messages = [{**message, "id": f"{name}-{number}"} for number, message in enumerate(stored.input)]
        return JSONResponse(_page(request, messages))


def _key(request: Request) -> tuple[str, str]:
    """Return the owner and the name of what is meant."""
    return request.scope["owner"], request.path_params["name"]


def _page(request: Request, found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a list, or the part of it that ?limit= and ?after= say, the oldest first unless ?order=desc.

    Raises:
        UsageError: the limit is invalid.
    """
    query = request.query_params
    limit = query.get("limit")
    if limit is not None and not (limit.isascii() and limit.isdecimal() and 1 <= int(limit[:9]) <= _MOST):
        raise UsageError(f"invalid limit {limit[:80]!r}", why=f"must be a number from 1 to {_MOST}")
    if query.get("order") == "desc":
        found = found[::-1]
    names = [each["id"] for each in found]
    start = names.index(query["after"]) + 1 if query.get("after") in names else 0
    part = found[start : start + int(limit)] if limit is not None else found[start:]
    ends = {"first_id": part[0]["id"], "last_id": part[-1]["id"]} if part else {"first_id": None, "last_id": None}
    return {"object": "list", "data": part, **ends, "has_more": start + len(part) < len(found)}
