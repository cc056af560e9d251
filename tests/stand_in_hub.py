"""A local server that answers as the Hugging Face hub, its CDN and a package index do, with faults on demand.

Listens on 127.0.0.1 only. Large files are redirected to the name "localhost", so that a client sees another
host, as with the real hub and its CDN.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass
class Faults:
    """What goes wrong.

    Attributes:
        cut_after: for each transfer in turn, how many bytes are sent before the connection breaks.
        stall_after: send so many bytes, then nothing until the server closes.
        ignore_range: answer 200 with everything.
        content_range: lie about the range.
        content: serve other bytes.
        encoding: claim this Content-Encoding.
        statuses: for each transfer in turn, a status in place of the file, with the headers below.
        headers: of these answers.
        metadata: (status, X-Error-Code) of the metadata call.
        metadata_headers: of that answer.
        body: of the metadata call in place of JSON.
        commit, name, sha, size: in place of the right ones in metadata.
        circle: redirect for ever.
        same_host: redirect to the same host.
    """

    cut_after: list[int] = field(default_factory=list)
    stall_after: int | None = None
    ignore_range: bool = False
    content_range: str | None = None
    content: bytes | None = None
    encoding: str | None = None
    statuses: list[int] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    metadata: tuple[int, str] | None = None
    metadata_headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None
    commit: Any = COMMIT
    name: str | None = None
    sha: str | None = None
    size: Any = None
    circle: bool = False
    same_host: bool = False


@dataclass(frozen=True)
class Request:
    """What a client asked for. host is the name it used, headers have lower-case names."""

    host: str
    path: str
    headers: dict[str, str]


class StandInHub:
    """One repository, one package index.

    Attributes:
        files: name -> bytes, of the repository.
        pages: path -> (content type, bytes), anything else, such as an index's pages and wheels.
        faults: to be changed at any time.
        requests: everything that was asked, in order.
        sent: bytes of files sent so far.
    """

    def __init__(self, port: int, repository: str) -> None:
        self.port = port
        self.repository = repository
        self.files: dict[str, bytes] = {}
        self.pages: dict[str, tuple[str, bytes]] = {}
        self.faults = Faults()
        self.requests: list[Request] = []
        self.sent = 0
        self.closing = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def transfers(self) -> list[Request]:
        """Requests for bytes of files."""
        return [request for request in self.requests if request.path.startswith("/cdn/")]

    def metadata(self) -> bytes:
        faults = self.faults
        if faults.body is not None:
            return faults.body
        siblings = [
            {
                "rfilename": faults.name or name,
                "size": len(content) if faults.size is None else faults.size,
                "blobId": "0" * 40,
                "lfs": {"sha256": faults.sha or sha256(content), "size": len(content), "pointerSize": 134},
            }
            for name, content in self.files.items()
        ]
        siblings.append({"rfilename": "README.md", "size": 10, "blobId": "0" * 40})  # type: ignore[dict-item]
        return json.dumps(
            {
                "id": self.repository,
                "modelId": self.repository,
                "sha": faults.commit,
                "siblings": siblings,
                "gated": False,
            }
        ).encode()


class _Handler(BaseHTTPRequestHandler):
    hub: StandInHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        host = self.headers.get("host", "").partition(":")[0]
        path = unquote(urlsplit(self.path).path)
        names = {name.lower(): value for name, value in self.headers.items()}
        self.hub.requests.append(Request(host, path, names))
        repository = self.hub.repository
        if path.startswith(f"/api/models/{repository}"):
            self.answer_metadata()
        elif path.startswith(f"/{repository}/resolve/"):
            self.answer_resolve(path.removeprefix(f"/{repository}/resolve/").partition("/")[2])
        elif path.startswith("/cdn/"):
            self.answer_file(path.removeprefix("/cdn/"))
        elif path in self.hub.pages:
            self.answer(200, self.hub.pages[path][1], {"Content-Type": self.hub.pages[path][0]})
        else:
            self.answer(404, b"no such page", {"X-Error-Code": "RepoNotFound"})

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def answer_metadata(self) -> None:
        faults = self.hub.faults
        if faults.metadata:
            status, code = faults.metadata
            self.answer(status, b"{}", {"X-Error-Code": code, **faults.metadata_headers})
        else:
            self.answer(200, self.hub.metadata(), {"Content-Type": "application/json"})

    def answer_resolve(self, name: str) -> None:
        host = "127.0.0.1" if self.hub.faults.same_host else "localhost"
        link = f"http://{host}:{self.hub.port}/cdn/{name}"
        if self.hub.faults.circle:
            link = self.path
        self.answer(302, b"", {"Location": link, "X-Repo-Commit": COMMIT})

    def answer_file(self, name: str) -> None:
        faults = self.hub.faults
        if faults.statuses:
            self.answer(faults.statuses.pop(0), b"not now", faults.headers)
            return
        content = self.hub.files.get(name)
        if content is None:
            self.answer(404, b"", {})
            return
        content = faults.content if faults.content is not None else content
        start = self.asked_start()
        if start >= len(content):
            self.answer(416, b"", {"Content-Range": f"bytes */{len(content)}"})
            return
        body = content[start:]
        self.send_response(206 if start else 200)
        if start:
            right = f"bytes {start}-{len(content) - 1}/{len(content)}"
            self.send_header("Content-Range", faults.content_range or right)
        if faults.encoding:
            self.send_header("Content-Encoding", faults.encoding)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.send_slowly(body)

    def asked_start(self) -> int:
        asked = self.headers.get("range", "")
        if self.hub.faults.ignore_range or not asked.startswith("bytes="):
            return 0
        return int(asked.removeprefix("bytes=").rstrip("-"))

    def send_slowly(self, body: bytes) -> None:
        faults = self.hub.faults
        limit = faults.cut_after.pop(0) if faults.cut_after else len(body)
        if faults.stall_after is not None:
            limit = faults.stall_after
        piece = body[:limit]
        self.hub.sent += len(piece)
        self.wfile.write(piece)
        if faults.stall_after is not None:
            self.wfile.flush()
            self.hub.closing.wait(20)
        if len(piece) < len(body):
            self.close_connection = True


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Clients of these tests hang up all the time."""


@contextmanager
def stand_in_hub(repository: str = "maker/tiny-GGUF") -> Iterator[StandInHub]:
    """A running server."""
    handler = type("Handler", (_Handler,), {})
    server = _Server(("127.0.0.1", 0), handler)
    handler.hub = hub = StandInHub(server.server_address[1], repository)  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()
