"""A server over fake engines, in a thread of its own, and raw sockets to ask it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import pytest

from llmrun.chat.passages import FolderIndex
from llmrun.chat.tools.toolbox import Toolbox
from llmrun.config import load_settings
from llmrun.lab.cli.explain import explain_for_page
from llmrun.model import Model
from llmrun.planning.preferences import LoadPreferences
from llmrun.protocol.questions import EngineStatus
from llmrun.runner.launch import EngineHandle
from llmrun.server.app import AccessRecord
from llmrun.server.guard import Policy
from llmrun.server.page.tools import PageTools
from llmrun.server.registry import ServedDrafts, bind
from llmrun.server.serving import ServeOptions, Serving, run_in_event_loop
from support.engines import fake_engine
from support.gguf_writer import runnable_model, write
from support.installed import eventually

SECONDS = 120.0
"""A server that takes longer hangs."""
CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "Hi"}]}


class RawResponse(NamedTuple):
    """What came over a socket: the status, headers in lower case, and the body, chunks put together."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body."""
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """Of an error in OpenAI's shape."""
        return str(self.json["error"]["code"])

    @property
    def events(self) -> list[Any]:
        """The data of its server-sent events, without the last line of OpenAI's."""
        lines = self.body.decode().splitlines()
        return [json.loads(line[6:]) for line in lines if line.startswith("data: ") and line != "data: [DONE]"]


class LiveServer:
    """A server on a free port of loopback, until the block ends.

    What it measures while nobody asks it stays with it: LLMRUN_HOME is its own.

    Args:
        folder: for its model's file.
        modes: of its engines, see fake_engine; the last one goes on. "real" is the real one.
        tools, index: of the page.
        model: the file; by default one that only the fake engines can load.
        port: by default a free one.
        options: of ServeOptions.
    """

    def __init__(
        self,
        folder: Path,
        modes: Sequence[str] = ("normal",),
        *,
        model: Path | None = None,
        tools: PageTools | None = None,
        index: FolderIndex | None = None,
        port: int = 0,
        **options: Any,
    ) -> None:
        self.model = Path(model or write(folder / "tiny.gguf", runnable_model())).stem
        self.served: list[AccessRecord] = []
        self.engines = 0
        self._toolbox = Toolbox((), SECONDS)
        self._modes, self._tools, self._index = list(modes), tools or PageTools(self._toolbox), index
        wishes = LoadPreferences(n_ctx=options.pop("n_ctx", 256), parallel=options.pop("parallel", 2))
        options = {"policy": Policy(), "queue": 8, "grace_seconds": 0.0, **options}
        names = options.pop("names", (str(model or folder / "tiny.gguf"),))
        self._options = ServeOptions(names, preferences=wishes, **options)
        self._listening = bind("127.0.0.1", port)
        self.port: int = self._listening.getsockname()[1]
        self._is_up = threading.Event()
        self._environment = pytest.MonkeyPatch()
        self._environment.setenv("LLMRUN_HOME", str(folder / "home"))
        self._thread = threading.Thread(target=lambda: run_in_event_loop(self._run()))

    def __enter__(self) -> LiveServer:
        self._thread.start()
        assert self._is_up.wait(SECONDS)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._thread.is_alive():
            self.end()
            self.wait()
        self._toolbox.close()
        self._environment.undo()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._serving = Serving(
            self._options,
            load_settings(),
            explain=explain_for_page,
            tools=self._tools,
            index=self._index,
            on_served=self.served.append,
            start=self._start,
        )
        self._loop.call_soon(self._is_up.set)
        await self._serving.run(self._listening)

    def _start(self, model: Model) -> EngineHandle:
        mode = self._modes.pop(0) if len(self._modes) > 1 else self._modes[0]
        self.engines += 1
        if mode == "real":
            return model.launch_engine()
        return fake_engine(mode)

    @property
    def page_paths(self) -> list[str]:
        """Of the page's routes."""
        return [route.path for route in self._serving._page.routes]

    @property
    def posted_paths(self) -> set[str]:
        """Of all routes that take a POST."""
        return {route.path for route in self._serving._http.routes if "POST" in (route.methods or ())}

    @property
    def running(self) -> int:
        """What its engines are doing, as they say."""
        return sum(status.running for status in self._statuses())

    @property
    def computed(self) -> tuple[int, int]:
        """The tokens that its engines have prefilled and decoded, as they say."""
        statuses = self._statuses()
        return sum(status.prefilled for status in statuses), sum(status.decoded for status in statuses)

    def _statuses(self) -> list[EngineStatus]:
        found = asyncio.run_coroutine_threadsafe(self._serving.statuses(), self._loop).result(SECONDS)
        return [*found.values()]

    @property
    def loaded(self) -> list[str]:
        """Its models in memory."""
        return self._serving.loaded

    @property
    def drafts(self) -> tuple[ServedDrafts, ...]:
        """What drafts for its models, as `llmrun ps` shows it."""
        return self._serving.drafts

    def once_loaded(self) -> LiveServer:
        """Itself, once its models are loaded."""
        assert eventually(lambda: self.get("/health").status == 200, SECONDS)
        return self

    def end(self) -> None:
        """As a signal does."""
        self._loop.call_soon_threadsafe(self._serving.end)

    def wait(self) -> None:
        """Until it has ended."""
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()

    def connect(self) -> socket.socket:
        """A connection."""
        return socket.create_connection(("127.0.0.1", self.port), SECONDS)

    def raw(self, data: bytes) -> bytes:
        """Send bytes, and give all that comes until the server closes."""
        with closing(self.connect()) as connection:
            connection.sendall(data)
            return read_all(connection)

    def request(self, method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
        """The bytes of a request; a header that is "" is left out, underscores stand for dashes."""
        lines = {"host": f"127.0.0.1:{self.port}", "connection": "close"}
        if body:
            lines |= {"content-type": "application/json", "content-length": str(len(body))}
        lines |= {name.replace("_", "-"): value for name, value in headers.items()}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value)
        return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body

    def get(self, path: str, **headers: str) -> RawResponse:
        """Ask for a path."""
        return parse(self.raw(self.request("GET", path, **headers)))

    def post(self, path: str, body: Any = None, **headers: str) -> RawResponse:
        """Send JSON."""
        return parse(self.raw(self.request("POST", path, json.dumps(HI if body is None else body).encode(), **headers)))


def read_all(connection: socket.socket) -> bytes:
    """Everything that comes until the other side closes."""
    data = bytearray()
    while piece := connection.recv(65536):
        data += piece
    return bytes(data)


def parse(data: bytes) -> RawResponse:
    """One response."""
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = _joined(body)
    return RawResponse(int(first.split()[1]), headers, body)


def _joined(chunked: bytes) -> bytes:
    data = bytearray()
    while chunked:
        size, _, rest = chunked.partition(b"\r\n")
        length = int(size, 16)
        data += rest[:length]
        chunked = rest[length + 2 :]
    return bytes(data)
