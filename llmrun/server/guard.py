"""Access control and size limits, before the body of a request is parsed: hosts, origins, keys and lengths.

Must not know protocols or models. An open web page, or a name that was rebound to this machine, can reach a server on
loopback: every request is untrusted.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import zlib
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from email.utils import formatdate
from functools import partial
from pathlib import Path
from typing import Any

from llmrun.errors import LlmrunError, UsageError
from llmrun.server.http import (
    App,
    BodyTooLargeError,
    Headers,
    HeadersTooLargeError,
    HostRejectedError,
    InvalidKeyError,
    MalformedRequestError,
    NotJsonError,
    OriginRejectedError,
    Receive,
    Scope,
    Send,
    UnknownEncodingError,
)
from llmrun.storage import write_whole

MOST_BODY_BYTES = 16 << 20
MOST_HEADER_BYTES = 64 << 10
LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
"""Names that always mean this machine."""
_SHORTEST_KEY = 8
_OWNERS_FILE = "owners.secret"
_SECRET_BYTES = 32
_OWNER_DIGITS = 32
_HEALTH = ("/health", "/v1/health")
_OPEN_PATHS = (*_HEALTH, "/")  # need no key; the page asks for it
_OPEN_FOLDERS = ("/ui/files/", "/ui/explained/")  # the page's own files, and pages whose names nobody can guess
MANAGE_PATHS = ("/api/pull", "/api/copy", "/api/delete")
_SHARED_PATHS = ("/v1/", "/api/")  # open to pages of other programs of this machine, but for MANAGE_PATHS
_COMPRESSED = frozenset({b"gzip", b"x-gzip", b"deflate"})
_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS
_UNDECLARED = frozenset({b"", b"application/x-www-form-urlencoded"})
_VARY = (b"vary", b"origin")


@dataclass(frozen=True, slots=True)
class Policy:
    """The allowed clients."""

    hosts: frozenset[str] = LOOPBACK  # allowed in the Host header, without a port; "*": all
    origins: frozenset[str] = frozenset()  # of pages: "https://example.org", "app://" for a whole scheme, or "*"
    keys: tuple[bytes, ...] = field(default=(), repr=False)  # if there are any, a client must send one
    any_address: bool = False  # the Host header may be any IP address, which can't be rebound
    is_own: bool = False  # the key is that of the user who runs this server: it opens the chats, see PhoneAccess
    secret: bytes = field(default_factory=partial(secrets.token_bytes, _SECRET_BYTES), repr=False)  # of owner()

    def allows_host(self, host: str) -> bool:
        """Return whether a Host header names this server."""
        name = host.lower()
        if name.rpartition(":")[2].isdecimal() and not name.endswith("]"):
            name = name.rpartition(":")[0]
        return bool(name) and ("*" in self.hosts or name in self.hosts or (self.any_address and _is_address(name)))

    def allows_origin(self, origin: str, host: str) -> bool:
        """Return whether a page may send requests: a page of this server, or of a listed origin."""
        if origin.lower() == f"http://{host.lower()}" or "*" in self.origins:
            return True
        scheme, separator, _ = origin.partition("://")
        return origin in self.origins or bool(separator and scheme + separator in self.origins)

    def owner(self, given: bytes) -> str | None:
        """Return whose requests a key's are, see AnswerRequest; None if the key is not valid. In constant time.

        With one key or none, they are those of the user of this machine.
        """
        is_known = any([hmac.compare_digest(given, key) for key in self.keys])  # noqa: C419 - always compare all
        if self.keys and not is_known:
            return None
        return hmac.digest(self.secret, given, "sha256").hex()[:_OWNER_DIGITS] if len(self.keys) > 1 else ""


def _is_loopback(origin: str) -> bool:
    """Return whether an origin is a page of this machine, which only its own programs serve."""
    scheme, _, host = origin.lower().partition("://")
    name, separator, port = host.rpartition(":")
    name = name if separator and port.isdecimal() else host
    return scheme in ("http", "https") and name in LOOPBACK


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def read_keys(path: Path) -> tuple[bytes, ...]:
    """Read API keys, one per line; # begins a comment.

    Raises:
        UsageError: the file can't be read, has no key, or a key is too short.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError(f"--key-file {path} can't be read", why=why) from None
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys or min(map(len, keys)) < _SHORTEST_KEY:
        raise UsageError(
            f"invalid --key-file {path}",
            why=f"it needs one key per line, each of at least {_SHORTEST_KEY} characters",
            hint=f"openssl rand -hex 16 > {path}",
        )
    return tuple(key.encode() for key in dict.fromkeys(keys))


def with_saved_secret(policy: Policy, folder: Path) -> Policy:
    """Return the policy with a saved secret, so that each of several keys has the same owner after a restart.

    Owners stand in saved states: without the secret, a reader of one can't try keys on it.

    Args:
        folder: config.Settings.state_dir. If nothing can be kept there, the owners are new ones each time.
    """
    if len(policy.keys) < 2:
        return policy
    path = folder / _OWNERS_FILE
    with suppress(OSError):
        if len(secret := path.read_bytes()) == _SECRET_BYTES:
            return replace(policy, secret=secret)
    with suppress(LlmrunError):
        write_whole(path, policy.secret, makes_folder=True, is_private=True)
    return policy


class Guard:
    """ASGI middleware that rejects requests; the others get scope["owner"], see Policy.owner(), and scope["is_own"].

    Args:
        reject: sends an error.
    """

    def __init__(self, app: App, policy: Policy, reject: Callable[[Scope, Send, LlmrunError], Awaitable[None]]) -> None:
        self._app, self._policy, self._reject = app, policy, reject

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: Headers = scope["headers"]
        origin = (header(headers, b"origin") or b"").decode("latin-1")
        send = _with_headers(send, _common_headers())
        try:
            self._check_sender(scope, headers, origin)
            if origin:
                send = _with_headers(send, [(b"access-control-allow-origin", origin.encode("latin-1")), _VARY])
            if origin and scope["method"] == "OPTIONS":
                await _allow_preflight(headers, send)
                return
            self._check_request(scope, headers)
        except LlmrunError as error:
            await self._reject(scope, send, error)
            return
        receive = _counted(receive)
        if header(headers, b"content-encoding") in _COMPRESSED:
            receive = _counted(_decompressed(receive))
        await self._app(scope, receive, send)

    def _check_sender(self, scope: Scope, headers: Headers, origin: str) -> None:
        if sum(len(name) + len(value) for name, value in headers) > MOST_HEADER_BYTES:
            raise HeadersTooLargeError("the headers are too large", why=f"{MOST_HEADER_BYTES:,} bytes at most")
        hosts = [value for name, value in headers if name == b"host"]
        host = hosts[0].decode("latin-1") if len(hosts) == 1 else ""
        is_probe = not hosts and scope["http_version"] == "1.0" and scope["path"] in _HEALTH  # by a load balancer
        if not is_probe and not self._policy.allows_host(host):
            raise HostRejectedError(
                f"the Host header {host[:200]!r} is not this server",
                hint="if it is, start llmrun serve with --allow-host NAME",
            )
        is_shared = scope["path"].startswith(_SHARED_PATHS) and scope["path"] not in MANAGE_PATHS
        is_local = is_shared and _is_loopback(origin)
        if origin and not is_local and not self._policy.allows_origin(origin, host):
            raise OriginRejectedError(
                f"pages of {origin[:200]!r} may not send requests",
                hint="to allow them, start llmrun serve with --allow-origin ORIGIN",
            )

    def _check_request(self, scope: Scope, headers: Headers) -> None:
        is_open = scope["path"] in _OPEN_PATHS or scope["path"].startswith(_OPEN_FOLDERS)
        owner = self._policy.owner(_key(headers))
        if owner is None and not is_open:
            hint = "Authorization: Bearer KEY, or x-api-key: KEY"
            raise InvalidKeyError("the API key is missing or wrong", hint=hint)
        scope["owner"] = owner or ""
        scope["is_own"] = self._policy.is_own and owner is not None
        lengths = [value for name, value in headers if name == b"content-length"]
        if len(lengths) > 1 or (lengths and header(headers, b"transfer-encoding") is not None):
            raise MalformedRequestError("the request has two body lengths")
        if lengths and int(lengths[0]) > MOST_BODY_BYTES:
            raise _too_large()
        encoding = header(headers, b"content-encoding")
        if encoding not in (None, b"identity", *_COMPRESSED):
            raise UnknownEncodingError("the body is compressed in an unknown way", hint="Content-Encoding: gzip")
        if scope["method"] == "POST" and not _is_json(headers):
            raise NotJsonError("the body must be JSON", hint="Content-Type: application/json")


def _is_json(headers: Headers) -> bool:
    """Return whether a body is JSON. Clients other than browsers may omit the type, as LiteLLM and `curl -d` do."""
    kind = (header(headers, b"content-type") or b"").split(b";")[0].strip().lower()
    if kind in _UNDECLARED:
        return not any(name == b"origin" or name.startswith(b"sec-fetch-") for name, _ in headers)
    return kind == b"application/json"


def _too_large() -> BodyTooLargeError:
    return BodyTooLargeError("the body is too large", why=f"{MOST_BODY_BYTES:,} bytes at most")


def header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    """Return the first header of a name."""
    return next((value for key, value in headers if key == name), None)


def _key(headers: Headers) -> bytes:
    scheme, _, key = (header(headers, b"authorization") or b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else header(headers, b"x-api-key") or b""


def _common_headers() -> Headers:
    return [
        (b"date", formatdate(usegmt=True).encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"cache-control", b"no-store"),
    ]


def _with_headers(send: Send, added: Headers) -> Send:
    async def extended(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *added]
        await send(message)

    return extended


def _counted(receive: Receive) -> Receive:
    """Limit the length of a body, which may be sent in chunks without a total."""
    count = 0

    async def counting() -> MutableMapping[str, Any]:
        nonlocal count
        message = await receive()
        count += len(message.get("body", b""))
        if count > MOST_BODY_BYTES:
            raise _too_large()
        return message

    return counting


def _decompressed(receive: Receive) -> Receive:
    """Decompress a body, piece by piece and never beyond the limit.

    Raises:
        MalformedRequestError: it is not gzip or zlib data, or not complete.
        BodyTooLargeError: it exceeds the limit.
    """
    decompressor = zlib.decompressobj(_GZIP_OR_ZLIB)

    async def decompressing() -> MutableMapping[str, Any]:
        message = await receive()
        if message["type"] != "http.request":
            return message
        try:
            body = decompressor.decompress(message.get("body", b""), MOST_BODY_BYTES + 1)
        except zlib.error as error:
            raise MalformedRequestError("the body can't be decompressed", why=str(error)) from None
        if decompressor.unconsumed_tail:
            raise _too_large()
        if not message.get("more_body", False) and not decompressor.eof:
            raise MalformedRequestError("the compressed body is not complete")
        return {**message, "body": body}

    return decompressing


async def _allow_preflight(headers: Headers, send: Send) -> None:
    requested = header(headers, b"access-control-request-headers") or b""
    allowed = [
        (b"access-control-allow-methods", b"GET, POST, HEAD, OPTIONS, DELETE"),
        (b"access-control-allow-headers", requested),
        (b"access-control-allow-private-network", b"true"),
        (b"access-control-max-age", b"600"),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": allowed})
    await send({"type": "http.response.body", "body": b""})
