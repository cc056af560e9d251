"""Files of MCP servers, and servers over both transports."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.installed import eventually

from llmrun.chat.tools.mcp_file import Server, read_servers
from llmrun.chat.tools.toolbox import Toolbox
from llmrun.errors import UsageError
from llmrun.protocol.messages import ToolCall

LONG = 600.0
SERVER = """
import os, sys
from mcp.server.mcpserver import Context, MCPServer

server = MCPServer("test")

@server.tool()
def key() -> str:
    return os.environ.get("KEY", "none")

@server.tool()
def header(context: Context) -> str:
    request = context.request_context.request
    return request.headers.get("x-key", "none") if request is not None else "no request"

@server.resource("notes://today")
def today() -> str:
    return "buy milk"

@server.prompt()
def greet(name: str) -> str:
    "Greets."
    return f"Hello {name}"

if len(sys.argv) > 1:
    server.run(sys.argv[1], port=int(sys.argv[2]))
else:
    server.run()
"""


def read(tmp_path: Path, content: Any, **environment: str) -> dict[str, Server]:
    path = tmp_path / "mcp.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return read_servers(path, environment)


def test_the_forms_of_other_programs(tmp_path: Path) -> None:
    claude = {"mcpServers": {"a": {"command": "npx", "args": ["-y", "x"], "env": {"K": "${V}"}, "cwd": str(tmp_path)}}}
    assert read(tmp_path, claude, V="7") == {"a": Server(("npx", "-y", "x"), {"K": "7"}, str(tmp_path))}
    code = {"servers": {"b": {"type": "http", "url": "http://h/${P:-mcp}", "headers": {"A": "Bearer ${env:V}"}}}}
    assert read(tmp_path, code, V="7") == {"b": Server(url="http://h/mcp", headers={"A": "Bearer 7"}, transport="http")}
    assert read(tmp_path, {"mcpServers": {"c": {"url": "http://h/sse", "type": "sse"}}})["c"].transport == "sse"
    assert read(tmp_path, {"mcpServers": {"d": {"command": "x", "disabled": True}}}) == {}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "not JSON"),
        ({"tools": {}}, "has no MCP servers"),
        ({"mcpServers": {"a": "npx"}}, "must be an object"),
        ({"mcpServers": {"a": {}}}, "either"),
        ({"mcpServers": {"a": {"command": "x", "url": "http://h"}}}, "either"),
        ({"mcpServers": {"a": {"command": "x", "type": "http"}}}, '"type" must be "stdio"'),
        ({"mcpServers": {"a": {"url": "h:1"}}}, "must be an address"),
        ({"mcpServers": {"a": {"command": "x", "args": "y"}}}, "list of strings"),
        ({"mcpServers": {"a": {"command": "x", "env": {"A": 1}}}}, "object of strings"),
        ({"mcpServers": {"a": {"command": "${NOWHERE}"}}}, "no variable NOWHERE"),
    ],
)
def test_an_invalid_file_is_refused_by_name(tmp_path: Path, content: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why) as refused:
        read(tmp_path, content)
    assert "mcp.json" in refused.value.what


@pytest.fixture
def over_http(tmp_path: Path) -> Iterator[int]:
    """A server's port."""
    (tmp_path / "server.py").write_text(SERVER)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, "server.py", "streamable-http", str(port)]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL) as process:

        def is_up() -> bool:
            with socket.socket() as client:
                return client.connect_ex(("127.0.0.1", port)) == 0

        eventually(is_up, LONG)
        yield port
        process.kill()


def test_servers_over_both_transports(
    tmp_path: Path, over_http: int, monkeypatch: pytest.MonkeyPatch, package_on_path: None
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SECRET", "s3")
    servers = {
        "near": {"command": sys.executable, "args": ["server.py"], "env": {"KEY": "${SECRET}"}},
        "far": {"url": f"http://127.0.0.1:{over_http}/mcp", "headers": {"X-Key": "${SECRET}"}},
    }
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": servers}))
    with Toolbox(["mcp.json"], LONG) as toolbox:
        names = {tool.name for tool in toolbox.tools()}
        assert names == {f"{server}_{tool}" for server in servers for tool in ("key", "header", "read_resource")}
        assert [(offer.kind, offer.name) for offer in toolbox.offers()] == [
            ("resource", "notes://today"),
            ("prompt", "greet"),
        ] * 2

        def call(name: str, **arguments: str) -> str:
            return toolbox.call(ToolCall("id", name, json.dumps(arguments))).text

        assert call("near_key") == "s3"
        assert call("far_header") == "s3"
        assert call("near_read_resource", uri="notes://today") == "buy milk"
        assert call("far_read_resource", uri="notes://today") == "buy milk"


def test_a_server_that_fails_is_left_out_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package_on_path: None
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "server.py").write_text(SERVER)
    broken = {"command": str(tmp_path / "nowhere")}
    servers = {"broken": broken, "near": {"command": sys.executable, "args": ["server.py"]}}
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": servers}))
    with Toolbox(["mcp.json"], LONG) as toolbox:
        assert [tool.name for tool in toolbox.tools()] == ["key", "header", "read_resource"]
        assert [error.what for error in toolbox.failures] == ["there are no tools in broken"]
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": {"broken": broken}}))
    with Toolbox(["mcp.json"], LONG) as toolbox, pytest.raises(UsageError, match="no tools in broken"):
        toolbox.tools()


def test_the_users_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMRUN_CONFIG", str(tmp_path / "config.toml"))
    with pytest.raises(UsageError, match=r"mcp\.json can't be read"):
        Toolbox(["mcp"], LONG)
