"""The content of a URL, fetched within limits and only from addresses that were checked.

A model may be talked into naming any URL, so a name is resolved once, each of its addresses is checked, and the
connection goes to a checked address: a name that leads elsewhere a moment later (DNS rebinding) gains nothing. Each
redirect is checked like the first URL. Proxies are not used: they would resolve the name again.
"""

from __future__ import annotations

import codecs
import http.client
import ipaddress
import socket
import ssl
import threading
import time
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from llmrun.config import load_settings
from llmrun.errors import NetworkError, UsageError

MAX_SECONDS = 30
"""Limit of the time that passes until all is there, with redirects."""
_MOST_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_HEADERS = {"User-Agent": "llmrun", "Accept": "text/html,application/xhtml+xml,text/*;q=0.9,*/*;q=0.8"}
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_SAFE = "/:?#[]@!$&'()*+,;=%~"  # in a URL; all else is quoted


class Fetched(NamedTuple):
    """The content of a URL, with text in UTF-8 if the server has named another encoding."""

    url: str  # after redirects
    data: bytes
    media_type: str  # as "text/html"; "" if the server names none


def host_of(url: str) -> str:
    """Return host and port of a URL, as fetch() takes them in `named`."""
    return _host(_split(url))


def is_public(address: str) -> bool:
    """Return whether an IP address is one of the public internet, also the IPv4 address inside an IPv6 address."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        inner = inner or (ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF) if ip in _NAT64 else None)
        if inner is not None:
            return is_public(str(inner))
        return ip.is_global and ip in _GLOBAL_UNICAST
    return ip.is_global and not ip.is_multicast


def fetch(url: str, max_bytes: int, named: Collection[str] = ()) -> Fetched:
    """Return the content of a URL.

    Args:
        max_bytes: limit of the content.
        named: hosts that the user has named, as HOST or HOST:PORT: only these may have private addresses.

    Raises:
        UsageError: it is not a URL of the web, leads to a private address, or is too large.
        NetworkError: it can't be reached, or answers with an error.
    """
    ends = time.monotonic() + MAX_SECONDS
    next_url = url
    for _ in range(_MOST_REDIRECTS + 1):
        parts = _split(next_url)
        try:
            found = _get(parts, _addresses(parts, named), max_bytes, ends)
        except (OSError, http.client.HTTPException, zlib.error) as error:
            raise _unreachable(next_url, error, ends) from None
        if isinstance(found, Fetched):
            return found
        next_url = urljoin(next_url, found)
    raise NetworkError(f"{url!r} can't be fetched", why=f"it leads to more than {_MOST_REDIRECTS} other URLs")


def _unreachable(url: str, error: Exception, ends: float) -> NetworkError:
    why = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return NetworkError(f"{url!r} can't be fetched", why=_too_slow() if time.monotonic() >= ends else why)


def _too_slow() -> str:
    return f"it took longer than {MAX_SECONDS} seconds"


def _split(url: str) -> SplitResult:
    """Return the parts of a URL. Raises UsageError."""
    try:
        parts = urlsplit(url)
        port_is_valid = parts.port != 0
    except ValueError as error:
        raise UsageError(f"invalid URL {url!r:.200}", why=str(error)) from None
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_valid:
        why = "only addresses with http:// or https:// are fetched"
        raise UsageError(f"{url!r:.200} can't be fetched", why=why)
    if parts.username is not None or parts.password is not None:
        raise UsageError(f"{parts.hostname!r} can't be fetched", why="its URL has a user name or a password")
    return parts


def _port(parts: SplitResult) -> int:
    return parts.port or (443 if parts.scheme == "https" else 80)


def _host(parts: SplitResult) -> str:
    return f"{parts.hostname}:{_port(parts)}"


def _addresses(parts: SplitResult, named: Collection[str]) -> list[str]:
    """Return the addresses of a URL's host. Raises UsageError if one of them may not be used."""
    host = parts.hostname or ""
    try:
        found = socket.getaddrinfo(host, _port(parts), type=socket.SOCK_STREAM)
    except UnicodeError:
        raise UsageError(f"invalid URL {parts.geturl()!r:.200}", why="its host is not a name") from None
    addresses = list(dict.fromkeys(str(address[4][0]) for address in found))
    private = [address for address in addresses if not is_public(address)]
    if private and not {host, _host(parts)} & {each.lower() for each in named}:
        why = f"{host} is {private[0]}, a private address" if host != private[0] else f"{host} is a private address"
        raise UsageError(f"{parts.geturl()!r:.200} can't be fetched", why=why)
    is_local = all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses)
    if load_settings().offline and not is_local:
        raise NetworkError(f"{parts.geturl()!r:.200} can't be fetched", why="HF_HUB_OFFLINE forbids the network")
    return addresses


def _get(parts: SplitResult, addresses: list[str], max_bytes: int, ends: float) -> Fetched | str:
    """Return the content of a URL, or where it redirects to."""
    host, target = parts.hostname or "", (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    with _connected(parts, addresses, ends) as connected:
        connection = http.client.HTTPConnection(host, _port(parts))
        connection.sock = connected
        literal = f"[{host}]" if ":" in host else host.encode("idna").decode()
        headers = {**_HEADERS, "Host": literal if parts.port is None else f"{literal}:{parts.port}"}
        connection.request("GET", quote(target, safe=_SAFE), headers=headers)
        response = connection.getresponse()
        location = response.headers.get("Location")
        if response.status in _REDIRECTS and location:
            return location
        if response.status != http.client.OK:
            why = f"the server answers {response.status} {response.reason}".rstrip()
            raise NetworkError(f"{parts.geturl()!r:.200} can't be fetched", why=why)
        data = response.read(max_bytes + 1)
        if response.headers.get("Content-Encoding", "identity") != "identity":
            data = zlib.decompressobj(zlib.MAX_WBITS | 32).decompress(data, max_bytes + 1)
    if time.monotonic() >= ends:  # the end of the connection may be the clock's
        raise TimeoutError
    if len(data) > max_bytes:
        raise UsageError(f"{parts.geturl()!r:.200} can't be fetched", why=f"it is larger than {max_bytes:,} bytes")
    charset = response.headers.get_content_charset("")
    media_type = response.headers.get_content_type() if "Content-Type" in response.headers else ""
    return Fetched(parts.geturl(), _in_utf8(data, charset), media_type)


def _in_utf8(data: bytes, charset: str) -> bytes:
    with suppress(LookupError, ValueError):  # as all that a codec raises
        if charset and codecs.lookup(charset).name != "utf-8":
            return data.decode(charset).encode()
    return data


@contextmanager
def _connected(parts: SplitResult, addresses: list[str], ends: float) -> Iterator[socket.socket]:
    """Connect to one of the addresses; the connection ends when the time is over, whatever it is doing."""
    connected = _connect(addresses, _port(parts), ends)
    with connected:
        connected.settimeout(max(0.1, ends - time.monotonic()))
        if parts.scheme == "https":
            connected = _trusting().wrap_socket(
                connected, server_hostname=parts.hostname, do_handshake_on_connect=False
            )
        # Not SSLSocket.shutdown(), which changes what another thread reads from.
        timer = threading.Timer(max(0.0, ends - time.monotonic()), _shut, (connected,))
        timer.daemon = True
        timer.start()
        try:
            with connected:
                if isinstance(connected, ssl.SSLSocket):
                    connected.do_handshake()
                yield connected
        finally:
            timer.cancel()


def _shut(connected: socket.socket) -> None:
    with suppress(OSError):
        socket.socket.shutdown(connected, socket.SHUT_RDWR)


def _connect(addresses: list[str], port: int, ends: float) -> socket.socket:
    """Return a connection to the first address that takes one."""
    for address in addresses[:-1]:
        with suppress(OSError):
            return socket.create_connection((address, port), max(0.1, (ends - time.monotonic()) / 2))
    return socket.create_connection((addresses[-1], port), max(0.1, ends - time.monotonic()))


def _trusting() -> ssl.SSLContext:
    from llmrun.models.download.transfer import trusted_certificates  # imports an HTTP client

    return trusted_certificates()
