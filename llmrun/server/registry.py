"""The addresses of servers: the socket of a new one, and a small file for each that runs, locked meanwhile.

Must not know HTTP. The system drops a lock when its process ends for any reason; a process id without a lock is stale.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from llmrun.config import load_settings
from llmrun.errors import LlmrunError, UsageError
from llmrun.protocol.codec import load_json
from llmrun.system import lock

END_NOW = getattr(signal, "SIGUSR1", signal.SIGTERM)
"""Signal that ends a server without waiting for its answers. SIGTERM waits; Windows has no other."""
LOADING = "Loading model"
"""What GET /health says until the models of the command line are loaded, in llama-server's words."""
_FOLDER = "servers"
_MOST_BYTES = 64 * 1024
_CLAIMS, _CLAIM_SECONDS = 100, 0.01  # readers hold a lock for less than a millisecond


class ServedRequest(NamedTuple):
    """The figures of an answered request."""

    path: str
    prompt_tokens: int
    cached_tokens: int  # of them
    rate: float  # tokens/s of the answer; 0 is not known
    difference: tuple[int, str, str] | None = None  # see protocol.messages.PromptDifference
    ttft: float = 0.0  # seconds; 0 is not known

    @classmethod
    def of(cls, path: str, facts: Mapping[str, Any]) -> ServedRequest:
        """Return the figures of a request whose prompt was accepted, from its facts in the log."""
        seconds = facts.get("decode_seconds", 0.0)
        rate = round(facts.get("completion_tokens", 0) / seconds, 1) if seconds else 0.0
        cached, ttft = facts.get("cached_tokens", 0), facts.get("ttft_seconds", 0.0)
        return cls(path, facts["prompt_tokens"], cached, rate, facts.get("difference"), ttft)


class ServedDrafts(NamedTuple):
    """The drafts of one source for a loaded model."""

    model: str
    source: str  # "heads", "draft model" or "text"
    n_bytes: int  # of memory for the source; 0 for text
    drafted: int  # tokens since the server's start
    accepted: int  # of these


class RunningServer(NamedTuple):
    """A server of this user."""

    pid: int
    address: str  # "http://127.0.0.1:8080"
    port: int
    since: float  # Unix time of its start
    models: tuple[str, ...] = ()  # names of the loaded models
    grace_seconds: float | None = None  # time for running answers at shutdown; None: no limit
    is_ending: bool = False  # waits for running answers at shutdown
    log: str = ""  # file of its log; "" if it writes to its terminal
    checkpoint_bytes: int = 0  # of the loaded models, see engine/core/checkpoints.py
    threads: tuple[int, int] = (0, 0)  # as in protocol.messages.Stats, of the model that has the fewest
    requests: tuple[ServedRequest, ...] = ()  # the last ones
    drafts: tuple[ServedDrafts, ...] = ()  # of the loaded models
    files: tuple[str, ...] = ()  # paths of the loaded models, in the order of their names

    def stop(self, *, now: bool = False) -> None:
        """Ask the server to end after running answers, or now."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, END_NOW if now else signal.SIGTERM)


class ServerFile:
    """The file of a server that runs in this process."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, server: RunningServer) -> None:
        data = json.dumps(server._asdict()).encode()
        with suppress(OSError):  # only `llmrun ps` needs it
            os.lseek(self._descriptor, 0, os.SEEK_SET)
            os.write(self._descriptor, data)
            os.ftruncate(self._descriptor, len(data))


@contextmanager
def registered(state_dir: Path, address: str) -> Iterator[ServerFile | None]:
    """Keep the file of a server until the block ends; None if it can't be written."""
    path = state_dir / _FOLDER / f"{quote(address, safe='')}.json"
    descriptor = -1
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = _claim(path)
    if descriptor < 0:
        yield None
        return
    try:
        yield ServerFile(descriptor)
    finally:
        if sys.platform == "win32":  # which does not remove open files
            os.close(descriptor)
            path.unlink(missing_ok=True)
        else:
            path.unlink(missing_ok=True)
            os.close(descriptor)


def _claim(path: Path) -> int:
    """Create and lock a server's file, while other processes may read or remove the file of a dead server.

    Raises:
        OSError: it can't be written, or another server holds the lock.
    """
    for _ in range(_CLAIMS):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        with suppress(FileNotFoundError):
            if lock(descriptor) is not False and os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        os.close(descriptor)
        time.sleep(_CLAIM_SECONDS)
    raise OSError(f"{path} is locked")


def running_servers(state_dir: Path) -> list[RunningServer]:
    """Return the running servers, sorted by port; remove the files of dead ones."""
    found = [server for path in (state_dir / _FOLDER).glob("*.json") if (server := _read(path)) is not None]
    return sorted(found, key=lambda server: server.port)


def _read(path: Path) -> RunningServer | None:
    """Return the server of a file; None for a dead one, whose file is removed."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        if lock(descriptor, shared=True):
            # By now the path may be the file of a new server at the same address; with this lock, it stays what it is.
            if lock(descriptor) and os.path.samestat(os.fstat(descriptor), path.stat()):
                path.unlink()
            return None
        facts: dict[str, Any] = load_json(os.read(descriptor, _MOST_BYTES), has_paths=True)
        requests = tuple(ServedRequest(*each) for each in facts.get("requests", ()))
        drafts = tuple(ServedDrafts(*each) for each in facts.get("drafts", ()))
        threads = tuple(facts.get("threads", (0, 0)))
        models, files = tuple(facts["models"]), tuple(facts.get("files", ()))
        lists = {"models": models, "files": files, "threads": threads, "requests": requests, "drafts": drafts}
        return RunningServer(**{**facts, **lists})
    except (OSError, ValueError, TypeError, KeyError):
        return None  # incomplete: the server writes it now
    finally:
        os.close(descriptor)


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
