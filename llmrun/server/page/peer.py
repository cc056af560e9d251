"""The user at the other end of a loopback connection, as Linux's tables of sockets have it.

Other users of this machine can connect to loopback too. The saved chats are for their owner only.
"""

from __future__ import annotations

import ipaddress
import os
import sys
from pathlib import Path

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LOCAL, _REMOTE, _UID = 1, 2, 7  # columns, see proc_net_tcp.txt of Linux's documentation


def is_same_user(client: tuple[str, int], server: tuple[str, int]) -> bool:
    """Return whether the process at the client's end runs as this user; True where the system has no such tables."""
    if not _TABLES[0].exists():
        return True
    ends = {(_LOCAL, _port(client)), (_REMOTE, _port(server))}
    users = set()
    for table in _TABLES:
        for line in table.read_text(encoding="ascii").splitlines()[1:] if table.exists() else ():
            columns = line.split()
            if all(columns[column].endswith(port) for column, port in ends) and _is_address(columns[_LOCAL], client[0]):
                users.add(int(columns[_UID]))
    return users == {os.getuid()}


def _port(end: tuple[str, int]) -> str:
    return f":{end[1]:04X}"


def _is_address(column: str, address: str) -> bool:
    """Return whether a column holds an address: words of four bytes in this machine's order, and a port."""
    data = bytes.fromhex(column.rpartition(":")[0])
    words = [data[start : start + 4] for start in range(0, len(data), 4)]
    packed = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)
    found = ipaddress.ip_address(packed)
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found) == ipaddress.ip_address(address)
