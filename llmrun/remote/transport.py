"""HTTP requests to a remote server, and its statuses and errors as ours.

Must not know prompts or answers. A redirect is never followed, so that the key stays with its server, and no compressed
body is read, so that no answer is larger than it looks.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Mapping
from typing import Any

import httpx2

import llmrun
from llmrun.errors import (
    ContextOverflowError,
    LlmrunError,
    LoginRequiredError,
    ModelNotFoundError,
    NetworkError,
    UnavailableError,
    UsageError,
)
from llmrun.models.download.transfer import trusted_certificates
from llmrun.protocol.codec import load_json
from llmrun.protocol.sizes import readable_size
from llmrun.remote.server import ServedModel, Server

CONNECT_SECONDS = 10.0
TROUBLES = (httpx2.HTTPError, httpx2.InvalidURL, ValueError, OSError, ImportError, asyncio.TimeoutError)
"""Errors raised by httpx2; see unreachable()."""
LONGEST_BODY = 16 * 2**20
"""Maximum bytes of an answer in one piece, and of a line of a stream."""
LISTING_SECONDS = 30.0
"""Time limit of a whole answer in one piece, even if bytes keep coming."""
_LONGEST_MESSAGE = 500  # characters of a server's error message
_OVERFLOWS = frozenset({"context_length_exceeded", "exceed_context_size_error", "context-overflow"})
_UNAVAILABLE = frozenset({429, 502, 503, 504})
_STATUSES = {
    413: "the request is too large for it",
    429: "it got too many requests",
    502: "its proxy can't reach it",
    503: "it is overloaded, or still loading",
    504: "its proxy waited too long for it",
}


def client_settings(server: Server) -> dict[str, Any]:
    """Return the arguments of httpx2.Client and AsyncClient.

    Raises:
        NetworkError: the certificates named by the environment can't be read.
    """
    headers = {"User-Agent": f"llmrun/{llmrun.__version__}", "Accept-Encoding": "identity"}
    if server.key:
        headers["Authorization"] = f"Bearer {server.key}"
    return {
        "headers": headers,
        "verify": server.url.startswith("https:") and trusted_certificates(),  # certificates take a while to be read
        "trust_env": not server.is_loopback,  # a proxy of the environment is not for a server on this machine
    }


def models(server: Server, seconds: float = LISTING_SECONDS) -> tuple[ServedModel, ...]:
    """Return the models of a server.

    Args:
        seconds: for the whole answer.

    Raises:
        NetworkError: it can't be reached, or its answer is unusable.
        LoginRequiredError: it requires a key, or another one.
    """
    listed = ask(server, f"{server.url}/models", seconds=seconds).get("data")
    entries = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else None
    if entries is None:
        raise not_compatible(server, "its list of models has another shape")
    return tuple(_served(entry) for entry in entries if isinstance(entry.get("id"), str))


def ask(
    server: Server, url: str, body: Mapping[str, Any] | None = None, seconds: float = LISTING_SECONDS
) -> dict[str, Any]:
    """Return a server's answer that is one JSON object; raises as models().

    Args:
        url: of the same server.
        body: makes it a POST.
        seconds: for the whole answer.
    """
    try:  # httpx2's own time begins again with every byte
        response, found = asyncio.run(asyncio.wait_for(_ask(server, url, body, seconds), seconds))
    except TROUBLES as error:
        raise unreachable(server, error) from None
    refuse_errors(server, response, found)
    return read_json(server, found)


async def _ask(
    server: Server, url: str, body: Mapping[str, Any] | None, seconds: float
) -> tuple[httpx2.Response, bytes]:
    timeout = httpx2.Timeout(seconds, connect=min(CONNECT_SECONDS, seconds))
    method, headers = "GET" if body is None else "POST", {"Accept": "application/json"}
    async with (
        httpx2.AsyncClient(**client_settings(server), timeout=timeout) as client,
        client.stream(method, url, headers=headers, json=body) as response,
    ):
        return response, await read_body(server, response)


async def read_body(server: Server, response: httpx2.Response) -> bytes:
    """Return a response's whole body. Raises NetworkError if it is too long."""
    found = bytearray()
    async for piece in response.aiter_raw():
        found += piece
        require_short(server, found)
    return bytes(found)


def _served(entry: Mapping[str, Any]) -> ServedModel:
    meta = entry.get("meta")
    lengths = (entry.get("max_model_len"), meta.get("n_ctx") if isinstance(meta, dict) else None)
    owner = entry.get("owned_by")
    n_ctx = next((each for each in lengths if isinstance(each, int) and each > 0), None)
    alias_of = entry.get("alias_of")
    texts = (each if isinstance(each, str) else "" for each in (owner, alias_of))
    return ServedModel(entry["id"], next(texts), n_ctx, next(texts))


def require_short(server: Server, body: bytes | bytearray) -> None:
    """Raise NetworkError if a piece of JSON is too long."""
    if len(body) > LONGEST_BODY:
        raise endless(server, "in one piece")


def endless(server: Server, how: str = "in one answer") -> NetworkError:
    """Return the error for too long an answer."""
    return NetworkError(f"{server.host} sends too much", why=f"more than {readable_size(LONGEST_BODY)} {how}")


def read_json(server: Server, body: bytes | bytearray) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        NetworkError: it is something else.
    """
    try:
        data = load_json(body.decode())
    except UnicodeDecodeError:
        raise not_compatible(server, "it sent bytes that are not UTF-8") from None
    except ValueError:
        raise not_compatible(server, "it sent something that is not JSON") from None
    if not isinstance(data, dict):
        raise not_compatible(server, "it sent JSON that is not an object")
    return data


def not_compatible(server: Server, why: str) -> NetworkError:
    """Return the error for an answer that can't be read."""
    return NetworkError(
        f"the answer of {server.host} can't be read", why=why, hint=f"is {server.url} an OpenAI-compatible server?"
    )


def unreachable(server: Server, error: Exception) -> NetworkError:
    """Return the error for a failed connection."""
    host, why = server.host, server.without_key(str(error)) or type(error).__name__
    if isinstance(error, httpx2.ConnectTimeout):
        return UnavailableError(f"can't reach {host}", why="it did not answer in time", hint=_right_place(server))
    if (trouble := _tls_trouble(error)) is not None:
        return _untrusted(server, trouble)
    if isinstance(error, httpx2.ConnectError):
        return UnavailableError(f"can't reach {host}", why=why, hint=_right_place(server))
    if isinstance(error, asyncio.TimeoutError):  # bytes may have come, but no end of them
        return UnavailableError(
            f"{host} stopped answering", why="the answer was not complete in time", hint="try again"
        )
    if isinstance(error, httpx2.TimeoutException):
        return UnavailableError(f"{host} stopped answering", why="it sent nothing for too long", hint="try again")
    if isinstance(error, (httpx2.ProxyError, ImportError)):
        return UnavailableError("the proxy can't be used", why=why, hint="check HTTPS_PROXY, ALL_PROXY and NO_PROXY")
    if isinstance(error, httpx2.RemoteProtocolError) and "status line" in why:
        return not_compatible(server, "it does not speak HTTP")
    return UnavailableError(f"the connection to {host} broke off", why=why, hint="try again")


def _right_place(server: Server) -> str:
    return f"does the server run, and is {server.url} its address?"


def _tls_trouble(error: BaseException | None) -> ssl.SSLError | None:
    """Return the failed handshake that caused an error; None if there was none."""
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    return error


def _untrusted(server: Server, trouble: ssl.SSLError) -> NetworkError:
    if isinstance(trouble, ssl.SSLCertVerificationError):
        hint = "a private authority's certificate goes with SSL_CERT_FILE=ca.pem"
        return UnavailableError(
            f"the certificate of {server.host} is not trusted", why=trouble.verify_message, hint=hint
        )
    plain = server.url.replace("https:", "http:", 1)
    return UnavailableError(
        f"no TLS with {server.host}", why=trouble.reason or str(trouble), hint=f"does it speak {plain}?"
    )


def refuse_errors(server: Server, response: httpx2.Response, body: bytes, model: str = "") -> None:
    """Raise for every status but 200, and for a compressed body or a web page.

    Args:
        body: of an error.
        model: the requested one.
    """
    status = response.status_code
    if response.is_redirect:
        raise _sent_elsewhere(server, response)
    kind = media_type(response)
    if kind in ("text/html", "application/xhtml+xml") and status not in _UNAVAILABLE:
        raise not_compatible(server, f"it sent a web page, with status {status}")
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", ""):
        raise not_compatible(server, f"it sent {encoding[:40]}, though it was asked not to compress")
    if status != 200:
        raise refusal(server, status, _error_of(body) if kind != "text/html" else {}, model)


def media_type(response: httpx2.Response) -> str:
    """Return the media type, without parameters."""
    return str(response.headers.get("content-type", "")).partition(";")[0].strip().lower()


def _sent_elsewhere(server: Server, response: httpx2.Response) -> NetworkError:
    try:
        place = response.url.join(response.headers.get("location", ""))
        found = f"{place.scheme}://{place.host}{f':{place.port}' if place.port else ''}"
    except (httpx2.InvalidURL, ValueError):
        found = "nowhere"
    hint = f"--at {found}, if that is meant: neither key nor prompt is sent on by itself"
    return NetworkError(f"{server.host} redirects to {found}", why=f"status {response.status_code}", hint=hint)


def _error_of(body: bytes) -> dict[str, Any]:
    """Return the error in a body, as the present ones of {"message", "code", "type"}."""
    try:
        data = load_json(body.decode())
    except ValueError:
        return {"message": body[:_LONGEST_MESSAGE].decode("utf-8", "replace")}
    return error_in(data) or {}


def error_in(data: Any) -> dict[str, Any] | None:
    """Return the error in JSON data, in the shapes that servers have; None if there is none."""
    if not isinstance(data, dict):
        return None
    error = data.get("error") or (data if data.get("object") == "error" else data.get("detail"))
    if not error:
        return None
    return error if isinstance(error, dict) else {"message": error if isinstance(error, str) else json.dumps(error)}


def refusal(server: Server, status: int, error: Mapping[str, Any], model: str = "") -> LlmrunError:
    """Return our error for a status and the error that came with it."""
    host, why = server.host, _message(server, error)
    codes = {str(error.get(name)) for name in ("code", "type")}
    if status in (401, 403):
        if server.key:
            return LoginRequiredError(f"{host} refuses the key", why=why or f"status {status}", hint=_KEY_HINT)
        return LoginRequiredError(f"{host} wants a key", why=why or f"status {status}", hint=_KEY_HINT)
    if codes & _OVERFLOWS or "maximum context length" in why:  # vLLM has no code for it
        return ContextOverflowError(f"the prompt is too long for {model or host}", why=why)
    if status == 404 and ("model" in why.lower() or any("model" in code for code in codes)):
        return ModelNotFoundError(
            f"{host} has no model {model!r}", why=why, hint=f"it lists its models at {server.url}/models"
        )
    if status in (404, 405):
        hint = f"is {server.url} an OpenAI-compatible server?"
        return NetworkError(f"{host} does not have what was requested", why=why or f"status {status}", hint=hint)
    if status in (400, 413, 422):
        return UsageError(f"{host} refuses the request", why=why or _STATUSES.get(status, f"status {status}"))
    kind = UnavailableError if status in _UNAVAILABLE else NetworkError
    hint = "try again later" if status == 429 or status >= 500 else ""
    return kind(f"{host} answered {status}", why=why or _STATUSES.get(status, ""), hint=hint)


_KEY_HINT = "set LLMRUN_SERVER_KEY, or name a file with the key: --key-file FILE"


def _message(server: Server, error: Mapping[str, Any]) -> str:
    """Return the server's message, on one line and without the key."""
    text = str(error.get("message") or "")
    line = " ".join("".join(each if each.isprintable() else " " for each in text).split())
    return server.without_key(line)[:_LONGEST_MESSAGE]
