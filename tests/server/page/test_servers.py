"""MCP servers of the user's own mcp.json on the page: a chat switches each on, and each call is asked about."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.chromium import Chromium
from support.page import IDLE, LAST, Page
from support.page_client import ask, call_stream, read, texts
from support.served import LiveServer

from llmrun.chat.tools.toolbox import Toolbox
from llmrun.server.page.tools import PageTools

pytestmark = pytest.mark.usefixtures("package_on_path")
Serve = Callable[..., LiveServer]
SERVER = """
from pathlib import Path
from mcp.server.mcpserver import MCPServer

Path(__file__).with_suffix(".started").touch()
server = MCPServer("test")

@server.tool()
def time(city: str) -> str:
    return f"noon in {city}"

@server.tool()
def moon() -> str:
    return "full"

server.run()
"""
ROME = '{"city": "Rome"}'
BOX = "document.querySelector('#settings input[value=%s]')"


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that appears when the server "clock" of the user's own file starts; "broken" does not start."""
    monkeypatch.setenv("LLMRUN_CONFIG", str(tmp_path / "config.toml"))
    (tmp_path / "clock.py").write_text(SERVER)
    clock = {"command": sys.executable, "args": [str(tmp_path / "clock.py"), "${TOKEN:-a secret}"]}
    write(tmp_path, clock=clock, broken={"command": str(tmp_path / "nowhere")})
    return tmp_path / "clock.started"


def write(folder: Path, **servers: object) -> None:
    (folder / "mcp.json").write_text(json.dumps({"mcpServers": servers}))


def test_a_server_runs_only_after_it_was_switched_on(serve: Serve, started: Path) -> None:
    server = serve("calling")
    listed = server.get("/ui/servers")
    assert listed.json == {
        "path": str(started.with_name("mcp.json")),
        "servers": [
            {"name": "clock", "about": Path(sys.executable).name, "tools": None},
            {"name": "broken", "about": "nowhere", "tools": None},
        ],
    }, "without arguments, which may hold keys"
    assert server.post("/ui/load", {"model": ""}).json["tools"] == []
    assert not started.exists(), "nothing runs by default"
    assert server.post("/ui/servers/start", {"server": "clock"}).json == {"tools": ["time", "moon"]}
    assert server.get("/ui/servers").json["servers"][0]["tools"] == ["time", "moon"]
    assert server.post("/ui/load", {"model": ""}).json["tools"] == [], "other chats are not offered them"
    chat, asked = ask(server, ROME), list[str]()

    def allow(call: dict[str, str]) -> None:
        asked.append(call["name"])
        server.post("/ui/decide", {"call": call["id"], "decision": "once"})

    call_stream(server, chat, allow, servers=["clock"])
    assert (asked, texts(read(server, chat))[1]) == (["time"], "I heard: noon in Rome")


def test_a_tool_that_is_not_offered_is_not_run(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text("def time(city: str) -> str:\n    return 'ran'\ndef moon() -> str: ...\n")
    with Toolbox((str(tmp_path / "tools.py"),), 60) as box:
        server = serve("calling", tools=PageTools(box, ("time",)))
        chat = ask(server, json.dumps({"tool": "time", "city": "Rome"}))
        call_stream(server, chat, lambda call: pytest.fail("asked"), without_tools=["time"])
        assert texts(read(server, chat))[1] == "I heard: Error: there is no tool time"


def test_what_is_wrong_with_a_server_is_said(serve: Serve, started: Path) -> None:
    server = serve()
    refused = server.post("/ui/servers/start", {"server": "broken"})
    assert refused.status == 400
    assert "there are no tools in broken: there is no command" in refused.json["error"]["message"]
    assert "mcp.json, then switch it on again" in refused.json["error"]["message"]
    unknown = server.post("/ui/servers/start", {"server": "clocks"}).json["error"]["message"]
    assert "there is no MCP server 'clocks'" in unknown
    foreign = {"origin": "http://localhost:3000"}
    assert server.post("/ui/servers/start", {"server": "clock"}, **foreign).status == 403
    assert not started.exists()
    write(started.parent, clock={})
    assert 'needs either "command" or "url"' in server.get("/ui/servers").json["error"]["message"]
    started.with_name("mcp.json").unlink()
    assert server.get("/ui/servers").json["servers"] == []


def test_a_server_that_an_option_names_is_no_choice(serve: Serve, started: Path) -> None:
    clock = {"command": sys.executable, "args": [str(started.with_suffix(".py"))]}
    write(started.parent, clock=clock)
    with Toolbox(("mcp",), 60) as box:
        server = serve(tools=PageTools(box))
        assert server.get("/ui/servers").json["servers"] == []
        assert server.post("/ui/load", {"model": ""}).json["tools"] == ["time", "moon"]


def test_a_server_may_be_called_as_ready_made_tools_are(serve: Serve, started: Path) -> None:
    clock = {"command": sys.executable, "args": [str(started.with_suffix(".py"))]}
    write(started.parent, files=clock)
    with Toolbox((f"files:{started.parent}",), 60) as box:
        server = serve(tools=PageTools(box))
        assert [each["name"] for each in server.get("/ui/servers").json["servers"]] == ["files"]
        assert server.post("/ui/servers/start", {"server": "files"}).json == {"tools": ["time", "moon"]}
        assert server.post("/ui/load", {"model": ""}).json["tools"] == ["read_file", "list_files"]


def test_each_chat_switches_its_own_servers_on(browser: Chromium, serve: Serve, started: Path) -> None:
    page = Page(browser, serve("calling"))
    page.see("document.querySelector('#toggle-settings').click()")
    page.until(BOX % "broken")
    page.see(f"({BOX % 'broken'}).click()")
    page.until("document.querySelector('#settings').textContent.includes('there is no command')")
    assert page.see(f"({BOX % 'broken'}).checked") is False
    browser.errors.clear()  # the browser notes each refusal
    page.see(f"({BOX % 'clock'}).click()")
    page.until(BOX % "moon")
    page.see(f"({BOX % 'moon'}).click()")
    page.write_question(ROME)
    page.until("document.querySelector('.call button')")
    page.key("Enter")
    page.until(f"{IDLE} && {LAST}?.textContent.includes('I heard: noon in Rome')")
    assert page.see(f"({BOX % 'clock'}).checked")
    page.see("document.querySelector('#new').click()")
    assert page.see(f"({BOX % 'clock'}).checked") is False, "nothing is on in a new chat"
    page.see("document.querySelector('#chat-list .open').click()")
    page.until("document.querySelector('.question')")
    assert page.see(f"[({BOX % 'clock'}).checked, ({BOX % 'moon'}).checked]") == [True, False]
    page.browser.ask("Page.reload")
    page.until(f"{IDLE} && document.querySelector('.question')")
    page.see("document.querySelector('#toggle-settings').click()")
    page.until(f"({BOX % 'clock'})?.checked")
    page.check()
