"""A server that answers as Ollama's does, for the tests of `bench --vs ollama`: it counts words as tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


class StandInOllama:
    """What it has, what it was asked, and how it should behave.

    Attributes:
        prefill, decode: tokens/s.
        tokens_a_word: of its tokenizer.
        ends_after: tokens after which every answer ends.
        refuses: path -> error that it answers with.
        asked: method, path and body of each request.
    """

    def __init__(self) -> None:
        self.prefill, self.decode = 100.0, 20.0
        self.tokens_a_word = 1.0
        self.ends_after = 1 << 30
        self.refuses: dict[str, str] = {}
        self.version = "0.13.0"
        self.blobs: set[str] = set()
        self.models: set[str] = set()
        self.asked: list[tuple[str, str, Any]] = []
        self.port = 0

    @property
    def environment(self) -> dict[str, str]:
        return {"OLLAMA_HOST": f"127.0.0.1:{self.port}", "PATH": ""}

    def generated(self) -> list[dict[str, Any]]:
        """Bodies of all requests for answers."""
        return [body for _, path, body in self.asked if path == "/api/generate"]

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        if path in self.refuses:
            return 400, {"error": self.refuses[path]}
        if path == "/api/version":
            return 200, {"version": self.version}
        if path == "/api/create":
            if not set(body["files"].values()) <= self.blobs:
                return 400, {"error": "blob not found"}
            self.models.add(body["model"])
            return 200, {"status": "success"}
        if path == "/api/delete" and body["model"] in self.models:
            self.models.remove(body["model"])
            return 200, None
        if path == "/api/generate" and body["model"] in self.models:
            return 200, self._generate(body)
        return 404, {"error": f"{method} {path} not found"}

    def _generate(self, body: dict[str, Any]) -> dict[str, Any]:
        assert body["raw"]
        assert body["stream"] is False
        prompt = max(1, round(self.tokens_a_word * len(body["prompt"].split())))
        made = min(body["options"]["num_predict"], self.ends_after)
        assert body["options"]["num_ctx"] >= made
        return {
            "response": "word " * made,
            "prompt_eval_count": prompt,
            "prompt_eval_duration": round(1e9 * prompt / self.prefill),
            "eval_count": made,
            "eval_duration": round(1e9 * made / self.decode),
        }


@contextmanager
def serving() -> Iterator[StandInOllama]:
    """The server, on a port of its own."""
    ollama = StandInOllama()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def _send(self, status: int, body: Any) -> None:
            text = b"" if body is None else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(text)

        def _any(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.path.startswith("/api/blobs/"):
                digest = self.path.removeprefix("/api/blobs/")
                ollama.asked.append((self.command, "/api/blobs", digest))
                if self.command == "HEAD":
                    self._send(200 if digest in ollama.blobs else 404, None)
                elif digest == f"sha256:{hashlib.sha256(data).hexdigest()}":
                    ollama.blobs.add(digest)
                    self._send(201, None)
                else:
                    self._send(400, {"error": "digest mismatch"})
                return
            body = json.loads(data) if data else None
            ollama.asked.append((self.command, self.path, body))
            self._send(*ollama.answer(self.command, self.path, body))

        do_GET = do_POST = do_DELETE = do_HEAD = _any  # noqa: N815 - http.server's names

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    ollama.port = server.server_port
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield ollama
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
