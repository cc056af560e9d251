"""Requests of the page: their sender, and the fields of their bodies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from llmrun.errors import UsageError
from llmrun.server.guard import Scope, header
from llmrun.server.http_errors import OriginRejectedError
from llmrun.server.http_messages import read_json
from llmrun.server.page.files import HEADERS
from llmrun.server.page.peer import is_forwarded, is_same_user
from llmrun.server.protocols.fields import Fields

Endpoint = Callable[[Request], Awaitable[Response]]
_HIGHEST_ID = 2**53
_OWN_SITES = frozenset({None, b"same-origin", b"none"})


def own(endpoint: Endpoint) -> Endpoint:
    """Return the endpoint, for requests of this user's own page only."""

    async def checked(request: Request) -> Response:
        await _check_sender(request.scope)
        response = await endpoint(request)
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    return checked


async def _check_sender(scope: Scope) -> None:
    """Raise OriginRejectedError unless a request comes from this server's page, or a program, of this user.

    Pages of other ports are of the same site, and other users of this machine reach loopback too. The origins of
    --allow-origin may use models, but read no chats; older browsers send no Sec-Fetch-Site.
    """
    headers = scope["headers"]
    origin, host = (header(headers, name) or b"" for name in (b"origin", b"host"))
    is_foreign = bool(origin) and origin.partition(b"://")[2].lower() != host.lower()
    if is_foreign or header(headers, b"sec-fetch-site") not in _OWN_SITES:
        raise OriginRejectedError("another page may not ask this", hint="open the page of this server itself")
    client, server = scope.get("client"), scope.get("server")
    if is_forwarded(headers) or not client or not server or not await asyncio.to_thread(is_same_user, client, server):
        raise OriginRejectedError(
            "the saved chats are only for the user who runs this server, on the same machine",
            hint="start llmrun serve of your own",
        )


async def read_fields(request: Request) -> Fields:
    """Return the fields of a request's JSON body."""
    return Fields(await read_json(request.receive))


def read_id(fields: Fields, name: str) -> int | None:
    """Return the id of a chat or an entry, None without one."""
    return fields.whole(name, 1, _HIGHEST_ID)


def needed_id(fields: Fields, name: str) -> int:
    """Return the id of a chat or an entry. Raises UsageError without one."""
    found = read_id(fields, name)
    if found is None:
        raise UsageError(f"{name} is missing")
    return found
