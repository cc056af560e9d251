"""A proxy between a client and `llmrun serve` that makes a model of random weights play a script.

A request is changed so that its answer can only be the script's next call: the tool is forced, and its schema allows
one value for each argument. When the script is over, the answer is forced too. The server and the client are real.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from scripted_serve import Call

DONE = {"done": "llmrun answered"}
PROTOCOLS = {"/v1/messages": "messages", "/v1/chat/completions": "chat", "/v1/responses": "responses"}


class Seen(NamedTuple):
    """A request of the client, and how it was answered."""

    method: str
    path: str
    status: int
    ignored: str  # x-llmrun-ignored
    results: tuple[str, ...]  # of calls, as JSON


def exactly(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema that only these values match."""
    properties = {name: {"const": value} for name, value in values.items()}
    return {"type": "object", "properties": properties, "required": list(values), "additionalProperties": False}


def results(protocol: str, body: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the results of calls in a request."""
    if protocol == "messages":
        blocks = [
            each for message in body["messages"] if isinstance(message["content"], list) for each in message["content"]
        ]
        found = [each for each in blocks if each.get("type") == "tool_result"]
    elif protocol == "chat":
        found = [message for message in body["messages"] if message["role"] == "tool"]
    else:
        items = body["input"] if isinstance(body["input"], list) else []
        found = [each for each in items if each.get("type", "").endswith("_call_output")]
    return tuple(map(json.dumps, found))


def force(protocol: str, body: dict[str, Any], call: Call) -> bool:
    """Change a request so that it is answered by this call; return False if it does not have the tool."""
    for tool in body.get("tools") or ():
        namespace = {"namespace": tool["name"]} if tool.get("type") == "namespace" else {}
        for each in tool["tools"] if namespace else (tool,):
            facts = each.get("function", each)
            if facts.get("name") != call.name:
                continue
            facts["input_schema" if protocol == "messages" else "parameters"] = exactly(call.arguments)
            named = {"name": call.name}
            body["tool_choice"] = {
                "messages": {"type": "tool", **named},
                "chat": {"type": "function", "function": named},
                "responses": {"type": "function", **named, **namespace},
            }[protocol]
            return True
    return False


def finish(protocol: str, body: dict[str, Any]) -> None:
    """Change a request so that it is answered by DONE."""
    schema = exactly(DONE)
    if body.get("tools"):
        body["tool_choice"] = {"type": "none"} if protocol == "messages" else "none"
    if protocol == "messages":
        body["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
        body.pop("thinking", None)
    elif protocol == "chat":
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "done", "schema": schema}}
    else:
        body["text"] = {"format": {"type": "json_schema", "name": "done", "schema": schema}}


@contextmanager
def forcing(port: int, script: Sequence[Sequence[Call]]) -> Iterator[tuple[str, list[Seen]]]:
    """Yield the address of a proxy of the server at a port, and the list of requests, which grows.

    Args:
        script: the calls one after the other, each with other names that versions of the client have for the tool.
    """

    def change(protocol: str, body: dict[str, Any]) -> None:
        n_called = len(results(protocol, body))
        calls = script[n_called] if n_called < len(script) else ()
        if not any(force(protocol, body, call) for call in calls):
            finish(protocol, body)

    with changing(port, change) as (address, seen):
        yield address, seen


@contextmanager
def changing(
    port: int, change: Callable[[str, dict[str, Any]], None], answered: Callable[[Seen], None] = lambda seen: None
) -> Iterator[tuple[str, list[Seen]]]:
    """Yield the address of a proxy that changes the bodies of requests for answers, and the list of all requests.

    Args:
        answered: called after each response.
    """
    seen: list[Seen] = []

    class Handler(BaseHTTPRequestHandler):
        """One connection."""

        def log_message(self, *arguments: Any) -> None:
            """Log nothing."""

        def _pass_on(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            content = self.rfile.read(length) if length else b""
            found: tuple[str, ...] = ()
            protocol = PROTOCOLS.get(self.path.partition("?")[0])
            if protocol and content:
                body = json.loads(content)
                found = results(protocol, body)
                change(protocol, body)
                content = json.dumps(body).encode()
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
            dropped = ("host", "content-length", "connection", "accept-encoding", "transfer-encoding")
            headers = {name: value for name, value in self.headers.items() if name.lower() not in dropped}
            connection.request(self.command, self.path, content or None, headers)
            answer = connection.getresponse()
            ignored = answer.headers.get("x-llmrun-ignored", "")
            seen.append(Seen(self.command, self.path, answer.status, ignored, found))
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                    self.send_header(name, value)
            self.send_header("Connection", "close")
            self.end_headers()
            with suppress(ConnectionError):  # the client left
                while piece := answer.read1(65_536):
                    self.wfile.write(piece)
                    self.wfile.flush()
            connection.close()
            self.close_connection = True
            answered(seen[-1])

        do_GET = do_POST = do_HEAD = _pass_on  # noqa: N815 - names that http.server calls

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", seen
        finally:
            server.shutdown()
