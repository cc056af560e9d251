"""RPC workers: machines that compute some of a model's layers, and their descriptions of themselves.

Knows the syntax of --rpc, and the few messages of ggml's RPC protocol (ggml-rpc.cpp) that need no llama.cpp; must not
know models. ggml's own client, in the engine, aborts its process at the first error: so workers are checked here before
it, and again after its death, to find the lost one.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

from llmrun.errors import LlmrunError, NetworkError, UsageError

PORT = 50052
MOST_WORKERS = 16  # GGML_RPC_MAX_SERVERS
VERSION = (7, 0, 0)  # RPC_PROTO_*_VERSION of ggml-rpc.h

_MEMORY, _HELLO, _DEVICES = 11, 14, 15  # enum rpc_cmd
_LENGTH = struct.Struct("<Q")
_GREETING = struct.Struct("<3B25x")
_NUMBER = struct.Struct("<I")
_PAIR = struct.Struct("<2Q")
_ENDPOINT = re.compile(r"([A-Za-z0-9._-]+)(?::([0-9]{1,5}))?")
_SECONDS = 3.0
_MOST_DEVICES = 64

_PLACING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")


def engine_environment() -> dict[str, str]:
    """Return the variables for the engine of a worker, and of a model over workers, which pin each thread to a core.

    While others compute, its threads sleep for so long that Linux wakes both on one core, where each waits for the
    other at every operation: 14 ms for a third of SmolLM2's layers instead of 3.
    """
    return {} if os.environ.keys() & set(_PLACING) else {"OMP_PLACES": "cores", "OMP_PROC_BIND": "spread"}


@dataclass(frozen=True, slots=True)
class RpcWorker:
    """A worker that answered."""

    endpoint: str  # "HOST:PORT"
    memory_free: tuple[int, ...]  # of each of its devices; ggml reports all memory of a CPU as free
    memory_total: int  # of all of them


def read_endpoints(text: str) -> tuple[str, ...]:
    """Parse "HOST:PORT,...".

    Raises:
        UsageError: it is something else, or names an endpoint twice.
    """
    found: list[str] = []
    for part in (part.strip() for part in text.split(",")):
        match = _ENDPOINT.fullmatch(part)
        port = int(match[2] or PORT) if match else 0
        if match is None or not 1 <= port <= 65_535:
            why = "must be HOST:PORT, a name or an IPv4 address and a port"
            raise UsageError(f"invalid --rpc {part or text!r}", why=why, hint=f"--rpc 127.0.0.1:{PORT},127.0.0.1:50053")
        found.append(f"{match[1]}:{port}")
    twice = next((endpoint for endpoint in found if found.count(endpoint) > 1), None)
    if twice is not None:
        raise UsageError(f"--rpc names {twice} twice", hint="name each worker once")
    if len(found) > MOST_WORKERS:
        raise UsageError(f"--rpc names {len(found)} workers", why=f"ggml can use {MOST_WORKERS} at most")
    return tuple(found)


def ask_all(endpoints: Sequence[str]) -> tuple[RpcWorker, ...]:
    """Return the description of each worker.

    Raises:
        NetworkError: one of them can't be used.
        UsageError: two names mean the same worker.
    """
    known: dict[tuple[str, int], str] = {}
    found = []
    for endpoint in endpoints:
        with _Connection(endpoint) as connection:
            address = connection.address
            if address in known:  # it serves one connection at a time: the second would wait forever
                raise UsageError(f"{known[address]} and {endpoint} are the same worker", hint="name each worker once")
            known[address] = endpoint
            found.append(_asked(connection, endpoint))
    return tuple(found)


def ask(endpoint: str) -> RpcWorker:
    """Return the description of a worker.

    Raises:
        NetworkError: it can't be reached, does not answer, or is not a worker that this llmrun can use.
    """
    with _Connection(endpoint) as connection:
        return _asked(connection, endpoint)


def missing(endpoints: Sequence[str]) -> tuple[str, LlmrunError] | None:
    """Return the first worker that can't be used, and the error."""
    for endpoint in endpoints:
        try:
            ask(endpoint)
        except LlmrunError as error:
            return endpoint, error
    return None


def start_hint(endpoint: str) -> str:
    """Return the hint to start a worker there."""
    port = endpoint.rpartition(":")[2]
    return "on that machine: llmrun worker" + ("" if port == str(PORT) else f" --port {port}")


def _asked(connection: _Connection, endpoint: str) -> RpcWorker:
    version = _GREETING.unpack(connection.ask(_HELLO, bytes(24), _GREETING.size))
    if version != VERSION:
        theirs, ours = (".".join(map(str, each)) for each in (version, VERSION))
        raise NetworkError(
            f"the worker {endpoint} speaks version {theirs} of ggml's RPC, this llmrun {ours}",
            hint="install the same version of llama-cpp-python on both machines",
        )
    (count,) = _NUMBER.unpack(connection.ask(_DEVICES, b"", _NUMBER.size))
    if not 1 <= count <= _MOST_DEVICES:
        raise connection.strange(f"it says that it has {count:,} devices")
    sizes = [_PAIR.unpack(connection.ask(_MEMORY, _NUMBER.pack(number), _PAIR.size)) for number in range(count)]
    return RpcWorker(endpoint, tuple(free for free, _ in sizes), sum(total for _, total in sizes))


class _Connection:
    """A connection to a worker, as a context manager.

    Raises:
        NetworkError: it can't be made.
    """

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        host, _, port = endpoint.rpartition(":")
        self._ends_at = time.monotonic() + _SECONDS
        what = f"the worker {endpoint} can't be reached"
        try:
            self._socket = socket.create_connection((host, int(port)), _SECONDS)
        except (socket.gaierror, UnicodeError):  # the latter for "a..b" and labels of over 63 characters
            raise NetworkError(what, why=f"no machine is known as {host}", hint="check the name") from None
        except ConnectionRefusedError:
            raise NetworkError(what, why="nothing listens there", hint=start_hint(endpoint)) from None
        except OSError as error:
            why = f"no answer within {_SECONDS:g} seconds" if isinstance(error, TimeoutError) else str(error.strerror)
            raise NetworkError(what, why=why, hint="check the address, the firewall and the tunnel") from None
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> _Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port as numbers."""
        host, port = self._socket.getpeername()[:2]
        return str(host), int(port)

    def ask(self, command: int, request: bytes, size: int) -> bytes:
        """Send a message, and return its answer of this many bytes.

        Raises:
            NetworkError: there is no answer, or of another size.
        """
        try:
            self._socket.settimeout(max(self._ends_at - time.monotonic(), 0.001))
            self._socket.sendall(bytes([command]) + _LENGTH.pack(len(request)) + request)
        except TimeoutError:
            raise self._silent() from None
        except OSError:
            raise self._closed() from None
        (length,) = _LENGTH.unpack(self._receive(_LENGTH.size))
        if length != size:
            raise self.strange("it answers with something else")
        return self._receive(size)

    def _receive(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                self._socket.settimeout(max(self._ends_at - time.monotonic(), 0.001))
                part = self._socket.recv(size - len(data))
            except TimeoutError:
                raise self._silent() from None
            except OSError:
                part = b""
            if not part:
                raise self._closed()
            data += part
        return bytes(data)

    def strange(self, why: str) -> NetworkError:
        """Return the error for an answer that is not a worker's, or of another version."""
        what = f"{self.endpoint} is not a worker that this llmrun can use"
        return NetworkError(what, why=why, hint=f"check the port; {start_hint(self.endpoint)}")

    def _closed(self) -> NetworkError:
        return self.strange("it closed the connection")

    def _silent(self) -> NetworkError:
        return NetworkError(
            f"the worker {self.endpoint} does not answer",
            why="it serves one program at a time, and another one may be using it",
            hint="end that one, or start another worker there with another --port",
        )
