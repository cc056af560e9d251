"""HTTP connections: invalid HTTP, and requests that arrive too slowly, close one.

Owns the only use of uvicorn and h11; must not know routes.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from llmrun.server.guard import MOST_HEADER_BYTES
from llmrun.server.http import App, Receive, Scope, Send

RECEIVE_SECONDS = 30.0  # for a whole request, headers and body
_KEEP_ALIVE_SECONDS = 75
_MOST_CONNECTIONS = 4096
_BACKLOG = 1024
_TIMEOUT = (
    b"HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n"
    b'{"error":{"message":"the request did not arrive in time","code":"request-timeout"}}\n'
)


class DeadlineProtocol(H11Protocol):
    """HTTP/1.1 on one connection, on which every request has to arrive within receive_seconds."""

    receive_seconds = RECEIVE_SECONDS

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > _MOST_CONNECTIONS:
            transport.abort()
        self._start_deadline()

    def data_received(self, data: bytes) -> None:
        if self._deadline is None:
            self._start_deadline()
        super().data_received(data)
        has_more = bool(self.conn.trailing_data[0])  # of the next request, which is read after the current response
        if self.conn.their_state is not h11.SEND_BODY and not (has_more and self.conn.their_state is h11.IDLE):
            self._clear_deadline()
        if self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) <= MOST_HEADER_BYTES:
            self.flow.resume_reading()  # uvicorn pauses it for the next request, and would not see that the client left

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_deadline()
        super().connection_lost(exc)

    def _start_deadline(self) -> None:
        self._deadline = self.loop.call_later(self.receive_seconds, self._close_late)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _close_late(self) -> None:
        if self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE} and not self.transport.is_closing():
            self.transport.write(_TIMEOUT)
        self.transport.close()


CHUNK_WRITER = "llmrun.chunk_writer"
"""Key of the ChunkWriter among the ASGI extensions of a request; absent if its response has no chunks."""


class ChunkWriter:
    """Writes chunks of a response whose headers were sent, past h11 and Starlette, which take most of the time.

    The format is that of h11, which writes everything before and after these chunks.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def is_ready(self) -> bool:
        """The client is connected and reads fast enough."""
        return not (self._cycle.flow.write_paused or self._cycle.disconnected)

    def write(self, data: bytes) -> None:
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


def _with_chunk_writer(app: App) -> App:
    async def extended(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["http_version"] == "1.1" and scope["method"] != "HEAD":
            cycle: RequestResponseCycle = send.__self__  # type: ignore[attr-defined]
            scope["extensions"] = {CHUNK_WRITER: ChunkWriter(cycle)}
        await app(scope, receive, send)

    return extended


class Listener:
    """Serves an ASGI application on one socket.

    Args:
        listening: a socket from bind().
        receive_seconds: time for a whole request.
    """

    def __init__(self, app: App, listening: socket.socket, receive_seconds: float = RECEIVE_SECONDS) -> None:
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL + 1)  # our own log has the errors
        protocol = type("Protocol", (DeadlineProtocol,), {"receive_seconds": receive_seconds})
        self._config = uvicorn.Config(
            _with_chunk_writer(app),
            http=protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,  # else any client of this machine could name another address as its own
            h11_max_incomplete_event_size=MOST_HEADER_BYTES,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        )
        self._config.load()
        self._protocol = protocol
        self._socket = listening
        self._state = ServerState()
        self._server: asyncio.base_events.Server | None = None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._connection, sock=self._socket, backlog=_BACKLOG)

    def _connection(self) -> asyncio.Protocol:
        connection: asyncio.Protocol = self._protocol(self._config, self._state, {})
        return connection

    @property
    def tasks(self) -> Iterable[asyncio.Task[None]]:
        """The running requests."""
        return tuple(self._state.tasks)

    async def stop(self) -> None:
        """Stop listening, cancel all requests, and close every connection."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._state.connections):
            with suppress(Exception):
                connection.shutdown()
        tasks = self.tasks
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in list(self._state.connections):
            connection.transport.abort()
