"""The user at the other end of a loopback connection, as Linux's tables of sockets have it.

Other users of this machine can connect to loopback too. The saved chats are for their owner only.
"""

from __future__ import annotations

import ipaddress
import os
import sys
from collections.abc import Iterable
from pathlib import Path

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LOCAL, _REMOTE, _STATE, _USER = 1, 2, 3, 7  # columns, see Documentation/networking/proc_net_tcp.rst of Linux
_FORWARDED = (b"forwarded", b"x-forwarded-for", b"x-real-ip")
_TIME_WAIT = "06"  # a closed connection, which belongs to no process

Endpoint = tuple[str, int]
"""An address and a port."""


def is_forwarded(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return whether a proxy passed a request on: its own address says nothing about the client's."""
    return any(name.lower() in _FORWARDED for name, _ in headers)


def is_same_user(client: Endpoint, server: Endpoint) -> bool:
    """Return whether the client's process runs on this machine as this user.

    Where the system has no such tables, every process of this machine counts.
    """
    if not _address(client[0]).is_loopback:
        return False
    if sys.platform != "linux" or not _TABLES[0].exists():
        return True
    wanted = ((_LOCAL, client), (_REMOTE, server))
    users = set()
    for table in _TABLES:
        for line in table.read_text(encoding="ascii").splitlines()[1:] if table.exists() else ():
            columns = line.split()
            if columns[_STATE] != _TIME_WAIT and all(_is_end(columns[column], end) for column, end in wanted):
                users.add(int(columns[_USER]))
    return users == {os.getuid()}


def _is_end(column: str, end: Endpoint) -> bool:
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
