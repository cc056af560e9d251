"""The listening socket of a server."""

from __future__ import annotations

import errno
import socket
import sys
from contextlib import suppress

from llmrun.config import load_settings
from llmrun.errors import LlmrunError, UsageError
from llmrun.server.registry import running_servers

_BACKLOG = 1024
_OPEN_FILES = 16_384
_LAST_PORT = 65_535


def allow_many_connections() -> None:
    """Raise the limit of open files to the system's maximum: every connection needs one."""
    if sys.platform == "win32":  # which has no such limit
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def bind(host: str, port: int, command: str = "llmrun serve") -> socket.socket:
    """Return a listening socket.

    Args:
        command: its user, for the hint.

    Raises:
        UsageError: the address is invalid or in use.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:  # the latter for "a..b" and labels of over 63 characters
        raise UsageError(f"there is no address {host}", why=getattr(error, "strerror", "") or str(error)) from None
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(_BACKLOG)
        found.setblocking(False)
    except OSError as error:
        found.close()
        raise _cannot_listen(host, port, command, error) from None
    return found


def _cannot_listen(host: str, port: int, command: str, error: OSError) -> LlmrunError:
    if error.errno == errno.EADDRINUSE:
        what, other = f"port {port} of {host} is in use", port + 1 if port < _LAST_PORT else port - 1
        own = next((each for each in running_servers(load_settings().state_dir) if each.port == port), None)
        if own is None:
            return UsageError(what, why="another program listens there", hint=f"{command} --port {other}")
        models = f" with {', '.join(own.models)}" if own.models else ""
        return UsageError(
            what,
            why=f"llmrun serve{models} runs there, process {own.pid}",
            hint=f"llmrun stop --port {port} ends it; {command} --port {other} leaves it",
        )
    return UsageError(f"can't listen on port {port} of {host}", why=error.strerror or str(error))
