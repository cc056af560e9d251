"""Bodies of HTTP messages: read the JSON of a request, send a response, or an error.

Owns the limits of a body; must not know fields or routes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NoReturn

from llmrun.errors import LlmrunError
from llmrun.protocol.codec import load_json
from llmrun.server.answer import to_json
from llmrun.server.guard import Headers, Receive, Send
from llmrun.server.http_errors import MalformedRequestError

ErrorBody = Callable[[LlmrunError, int], dict[str, Any]]
"""Returns the JSON body of an error with this HTTP status."""

MOST_CONTAINERS = 65_536
"""Objects and lists of one body, several times those of the longest real ones: each is copied a few times."""
LONG_BODY = 16 * 1024
"""Bytes; a longer body is parsed in another thread, which holds up no stream."""
_RETRY_SECONDS = b"2"


async def read_body(receive: Receive) -> bytes:
    """Receive the whole body of a request.

    Raises:
        BodyTooLargeError: see Guard.
        MalformedRequestError: the client disconnected before the end.
    """
    data = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise MalformedRequestError("the body is not complete")
        data += message.get("body", b"")
        if not message.get("more_body", False):
            return bytes(data)


async def read_json(receive: Receive) -> dict[str, Any]:
    """Receive a body, and return its JSON object; a long one is parsed in another thread.

    Raises as read_body() and parse_json().
    """
    data = await read_body(receive)
    return await asyncio.to_thread(parse_json, data) if len(data) > LONG_BODY else parse_json(data)


def parse_json(data: bytes) -> dict[str, Any]:
    """Return the JSON object of a body.

    Raises:
        MalformedRequestError: it is not a JSON object, nested too deeply, or has too many objects and lists.
    """
    try:
        body = load_json(data, parse_constant=_refuse_constant)
    except ValueError as error:
        raise MalformedRequestError("the body is not JSON", why=str(error)) from None
    if not isinstance(body, dict):
        raise MalformedRequestError("the body must be a JSON object")
    _require_few_containers(body)
    return body


def _require_few_containers(body: dict[str, Any]) -> None:
    level: list[Any] = [body]
    count = 0
    while level:
        count += len(level)
        if count > MOST_CONTAINERS:
            raise MalformedRequestError("the body is too complex", why=f"{MOST_CONTAINERS:,} objects and lists at most")
        children = (each.values() if isinstance(each, dict) else each for each in level)
        level = [child for each in children for child in each if isinstance(child, (dict, list))]


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


async def send_json(send: Send, status: int, body: Any, extra: Headers | None = None) -> None:
    """Send a whole JSON response."""
    data = to_json(body)
    headers: Headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*headers, *(extra or ())]})
    await send({"type": "http.response.body", "body": data})


async def send_error(send: Send, error: LlmrunError, error_body: ErrorBody) -> None:
    """Send an error as a JSON response."""
    extra: Headers = [(b"retry-after", _RETRY_SECONDS)] if error.http_status == 503 else []
    if error.http_status == 401:
        extra.append((b"www-authenticate", b"Bearer"))
    if error.http_status == 400:
        extra.append((b"connection", b"close"))  # the next request's beginning is unknown
    await send_json(send, error.http_status, error_body(error, error.http_status), extra)
