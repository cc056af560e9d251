"""HTTP as this server uses it: types of ASGI, the server's own errors, and bodies of requests and responses.

Owns the limits of a body; must not know fields or routes. All errors that are not of HTTP are in llmrun.errors.
"""

from __future__ import annotations

import asyncio
import math
import sys
import traceback
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, NoReturn, TypeVar

from llmrun.errors import InternalError, LlmrunError, ModelNotFoundError, UsageError
from llmrun.protocol.codec import load_json
from llmrun.server.answer import to_json

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]
"""Names and values, as bytes."""


def model_not_found(name: str, listing: str = "/v1/models", hint: str = "") -> ModelNotFoundError:
    """Return the error for an unknown name; `listing` is the path that lists all names."""
    return ModelNotFoundError(f"there is no model {name[:200]!r}", hint=f"GET {listing} lists all models{hint}")


def response_not_found(name: str) -> ResponseNotFoundError:
    return ResponseNotFoundError(
        f"no response or item is called {name[:200]!r}",
        why="only the last ones are kept, until the server ends",
        hint="send the whole conversation",
    )


class HostRejectedError(LlmrunError):
    """The Host header names another machine: a page may have rebound its name to this one (DNS rebinding)."""

    code = "host-refused"
    http_status = 403


class OriginRejectedError(LlmrunError):
    """The request is from a page of another origin."""

    code = "origin-refused"
    http_status = 403


class InvalidKeyError(LlmrunError):
    """No API key, or a wrong one."""

    code = "wrong-key"
    http_status = 401


class RouteNotFoundError(LlmrunError):
    """The path has no route."""

    code = "no-route"
    http_status = 404


class ResponseNotFoundError(LlmrunError):
    """No response with this id is kept."""

    code = "response-not-found"
    http_status = 404


class MethodNotAllowedError(LlmrunError):
    """The route has other methods."""

    code = "method-not-allowed"
    http_status = 405


class BodyTooLargeError(LlmrunError):
    """The body exceeds the limit."""

    code = "body-too-large"
    http_status = 413


class HeadersTooLargeError(LlmrunError):
    """The headers exceed the limit."""

    code = "headers-too-large"
    http_status = 431


class NotJsonError(LlmrunError):
    """The body is not declared as JSON; pages can send other types to any address without permission."""

    code = "not-json"
    http_status = 415


class UnknownEncodingError(LlmrunError):
    """The body is compressed in a way that is not read."""

    code = "unknown-encoding"
    http_status = 415


class MalformedRequestError(UsageError):
    """The request is not valid HTTP, or its body not valid JSON."""

    code = "malformed"


class CrashingPromptError(LlmrunError):
    """Two engines died while this prompt was in them."""

    code = "deadly-prompt"
    http_status = 422


class BusyError(LlmrunError):
    """The queue is full."""

    code = "busy"
    http_status = 503


class DrainingError(LlmrunError):
    """The server is shutting down."""

    code = "shutting-down"
    http_status = 503


class ClientLeftError(LlmrunError):
    """The client disconnected before its answer was complete."""

    code = "left"
    http_status = 499  # nginx's, in the log only


class AnswerTimeoutError(LlmrunError):
    """The answer exceeds the time limit."""

    code = "timeout"
    http_status = 504


ErrorBody = Callable[[LlmrunError, int], dict[str, Any]]
"""Returns the JSON body of an error with this HTTP status."""

MOST_CONTAINERS = 65_536
"""Objects and lists of one body, several times those of the longest real ones: each is copied a few times."""
LONG_BODY = 16 * 1024
"""Bytes; a longer body is parsed in another thread, which holds up no stream."""
_RETRY_SECONDS = b"2"
_Body = TypeVar("_Body")


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


async def read_json_list(receive: Receive) -> list[Any]:
    """Receive a body, and return its JSON list. Raises as read_body() and parse_json()."""
    return _parsed(await read_body(receive), list, "a JSON list")


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
    return _parsed(data, dict, "a JSON object")


def _parsed(data: bytes, kind: type[_Body], words: str) -> _Body:
    try:
        body = load_json(data, parse_float=_finite, parse_constant=_refuse_constant)
    except ValueError as error:
        raise MalformedRequestError("the body is not JSON", why=str(error)) from None
    if not isinstance(body, kind):
        raise MalformedRequestError(f"the body must be {words}")
    _require_few_containers(body)
    return body


def _require_few_containers(body: Any) -> None:
    level: list[Any] = [body]
    count = 0
    while level:
        count += len(level)
        if count > MOST_CONTAINERS:
            raise MalformedRequestError("the body is too complex", why=f"{MOST_CONTAINERS:,} objects and lists at most")
        children = (each.values() if isinstance(each, dict) else each for each in level)
        level = [child for each in children for child in each if isinstance(child, (dict, list))]


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is too large for a number")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


async def send_json(send: Send, status: int, body: Any, extra: Headers | None = None) -> None:
    """Send a whole JSON response."""
    data = to_json(body)
    headers: Headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*headers, *(extra or ())]})
    await send({"type": "http.response.body", "body": data})


def log_internal(error: LlmrunError) -> None:
    """Write the traceback of a bug to stderr, with the number that the client gets."""
    if isinstance(error, InternalError):
        sys.stderr.write("".join(traceback.format_exception(type(error), error, error.__traceback__)))


async def send_error(send: Send, error: LlmrunError, error_body: ErrorBody) -> None:
    """Send an error as a JSON response."""
    extra: Headers = [(b"retry-after", _RETRY_SECONDS)] if error.http_status == 503 else []
    if error.http_status == 401:
        extra.append((b"www-authenticate", b"Bearer"))
    if error.http_status == 400:
        extra.append((b"connection", b"close"))  # the next request's beginning is unknown
    await send_json(send, error.http_status, error_body(error, error.http_status), extra)
