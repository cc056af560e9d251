"""Requests of the page: their sender, and the fields of their bodies.

The chats are for their owner only, and other users of this machine can connect to loopback too: Linux's tables of
sockets name the user at the other end.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import sys
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from llmrun.errors import UsageError
from llmrun.server.guard import header
from llmrun.server.http import OriginRejectedError, Scope, read_json
from llmrun.server.page.files import HEADERS
from llmrun.server.protocols.fields import Fields

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LOCAL, _REMOTE, _STATE, _USER = 1, 2, 3, 7  # columns, see Documentation/networking/proc_net_tcp.rst of Linux
_FORWARDED = (b"forwarded", b"x-forwarded-for", b"x-real-ip")
_TIME_WAIT = "06"  # a closed connection, which belongs to no process

SocketAddress = tuple[str, int]
"""An address and a port."""


def is_forwarded(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return whether a proxy passed a request on: its own address says nothing about the client's."""
    return any(name.lower() in _FORWARDED for name, _ in headers)


def is_same_user(client: SocketAddress, server: SocketAddress) -> bool:
    """Return whether the client's process runs on this machine as this user.

    Where the system has no such tables, every process of this machine counts.
    """
    if not _address(client[0]).is_loopback:
        return False
    if sys.platform != "linux" or not _TABLES[0].exists():
        return True
    wanted, port = ((_LOCAL, client), (_REMOTE, server)), f":{client[1]:04X} "
    users: set[int] = set()
    for table in _TABLES:
        # The system writes the tables of all sockets in milliseconds; a socket stands in one of them.
        text = table.read_text(encoding="ascii") if not users and table.exists() else ""
        for columns in (line.split() for line in text.splitlines()[1:] if port in line):
            if columns[_STATE] != _TIME_WAIT and all(_is_end(columns[column], end) for column, end in wanted):
                users.add(int(columns[_USER]))
    return users == {os.getuid()}


def _is_end(column: str, end: SocketAddress) -> bool:
    """Return whether a column names an endpoint: words of four bytes in this machine's order, and a port."""
    address, _, port = column.partition(":")
    if int(port, 16) != end[1]:
        return False
    data = bytes.fromhex(address)
    words = [data[start : start + 4] for start in range(0, len(data), 4)]
    packed = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)
    return _address(packed) == _address(end[0])


def _address(address: str | bytes) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    found = ipaddress.ip_address(address)
    return getattr(found, "ipv4_mapped", None) or found


Endpoint = Callable[[Request], Awaitable[Response]]
_HIGHEST_ID = 2**53
_OWN_SITES = frozenset({None, b"same-origin", b"none"})


def own(endpoint: Endpoint) -> Endpoint:
    """Return the endpoint, for requests of this user's own page only: whatever its key, they are of their user."""

    async def checked(request: Request) -> Response:
        await _check_sender(request.scope)
        request.scope["owner"] = ""
        response = await endpoint(request)
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    return checked


async def _check_sender(scope: Scope) -> None:
    """Raise OriginRejectedError unless a request comes from this server's page, or a program, of this user.

    Pages of other ports are of the same site, and other users of this machine reach loopback too. The origins of
    --allow-origin may use models, but read no chats; older browsers send no Sec-Fetch-Site. The key of the user's phone
    stands for the user.
    """
    headers = scope["headers"]
    origin, host = (header(headers, name) or b"" for name in (b"origin", b"host"))
    is_foreign = bool(origin) and origin.partition(b"://")[2].lower() != host.lower()
    if is_foreign or header(headers, b"sec-fetch-site") not in _OWN_SITES:
        raise OriginRejectedError("another page may not ask this", hint="open the page of this server itself")
    if scope.get("is_own"):
        return
    client, server = scope.get("client"), scope.get("server")
    if is_forwarded(headers) or not client or not server or not await asyncio.to_thread(is_same_user, client, server):
        raise OriginRejectedError(
            "the saved chats are only for the user who runs this server, on the same machine",
            hint="start llmrun serve of your own; a phone gets in by the code of the page's settings",
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
