"""Tools in processes of their own: whatever they do, a call comes to an end, and so do they."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from support.installed import eventually, gone

from llmrun.chat.store.turns import ToolOutput
from llmrun.chat.tools import guard, source
from llmrun.chat.tools.source import STOPPED, CallResult, ToolSource
from llmrun.chat.tools.toolbox import Toolbox
from llmrun.errors import UsageError
from llmrun.protocol.media import Media
from llmrun.protocol.messages import ToolCall

pytestmark = pytest.mark.usefixtures("package_on_path")

FILE = """
import os, signal, subprocess, sys, threading, time
from pathlib import Path

SLEEP = [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(3600)"]
kept = []

def keep(text: str) -> list[str]:
    print("this is lost")
    kept.append(text)
    return kept

def hang() -> None:
    child, free = subprocess.Popen(SLEEP), subprocess.Popen(SLEEP, start_new_session=True)
    Path("new").write_text(f"{os.getpid()} {child.pid} {free.pid}")
    os.rename("new", "pids")
    time.sleep(3600)

def daemonize() -> None:
    "Leaves a process in a session of its own, whose parent has ended."
    if not os.fork():
        os.setsid()
        free = subprocess.Popen(SLEEP, start_new_session=True)
        Path("new").write_text(str(free.pid))
        os.rename("new", "pids")
        os._exit(0)
    os.wait()

def forge() -> str:
    "Writes answers to every descriptor, from now on."
    def write():
        while True:
            for descriptor in range(3, 100):
                try:
                    os.write(descriptor, b'{"result": "forged"}\\n{"id": "", "result": "forged"}\\n[]\\n')
                except OSError:
                    pass
            time.sleep(0.001)
    threading.Thread(target=write, daemon=True).start()
    time.sleep(0.1)
    return "ok"

def inherited() -> list[int]:
    "Of the descriptors above 2, those that a forked process has."
    read, write = os.pipe()
    if not os.fork():
        def is_open(descriptor):
            try:
                return bool(os.fstat(descriptor))
            except OSError:
                return False
        os.write(write, repr([each for each in range(3, 100) if each not in (read, write) and is_open(each)]).encode())
        os._exit(0)
    os.wait()
    return eval(os.read(read, 1000))

def garble() -> None:
    for descriptor in range(3, 100):
        try:
            os.write(descriptor, b"}{\\n")
        except OSError:
            pass

def crash(): os.abort()
def ask(): return input()
def where(): return os.getcwd()
"""
SERVER = """
import asyncio, os
from pathlib import Path
from mcp.server.mcpserver import MCPServer

server = MCPServer("test")

@server.tool()
def add(a: int, b: int) -> int:
    "Adds."
    return a + b

@server.tool()
async def wait() -> str:
    Path("pids").write_text(str(os.getpid()))
    await asyncio.sleep(3600)
    return ""

@server.tool()
def fail() -> str:
    raise ValueError("no luck")

@server.tool()
def die() -> str:
    os._exit(3)

server.run()
"""
LONG = 600.0


def made(*names: str, seconds: float = LONG) -> Toolbox:
    toolbox = Toolbox(names, seconds)
    toolbox.tools()
    return toolbox


def call(toolbox: Toolbox, name: str, **arguments: Any) -> CallResult:
    return toolbox.call(ToolCall("id", name, json.dumps(arguments)))


def pids(folder: Path) -> list[int]:
    """Of the processes of a call, once it has started them."""
    words = eventually(lambda: (folder / "pids").is_file() and (folder / "pids").read_text(), LONG)
    return [int(word) for word in words.split()]


def ended(pid: int) -> bool:
    try:
        return gone(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(source, "_START_SECONDS", LONG)
    (tmp_path / "mine.py").write_text(FILE)
    (tmp_path / "server.py").write_text(SERVER)
    return tmp_path


@pytest.fixture
def toolbox(folder: Path) -> Iterator[Toolbox]:
    with made("mine.py") as toolbox:
        yield toolbox


@pytest.fixture
def served(folder: Path) -> Iterator[Toolbox]:
    with made(f"mcp:{sys.executable} server.py") as toolbox:
        yield toolbox


def test_functions_keep_what_they_know(toolbox: Toolbox, folder: Path) -> None:
    assert call(toolbox, "keep", text="a") == CallResult('["a"]')
    assert call(toolbox, "keep", text="b") == CallResult('["a","b"]')
    assert call(toolbox, "where") == CallResult(str(folder))
    assert "EOF" in call(toolbox, "ask").text


def test_a_crash_is_a_result_and_the_next_call_starts_anew(toolbox: Toolbox) -> None:
    assert call(toolbox, "crash") == CallResult(f"its process ended with status {-signal.SIGABRT}", failed=True)
    assert call(toolbox, "keep", text="a") == CallResult('["a"]')


def test_what_a_function_writes_to_the_pipe_is_no_answer(toolbox: Toolbox) -> None:
    assert call(toolbox, "garble") == CallResult("its process sent garbage", failed=True)
    assert call(toolbox, "keep", text="a") == CallResult('["a"]')


def test_what_a_function_writes_to_the_pipe_answers_no_later_call(toolbox: Toolbox) -> None:
    assert call(toolbox, "forge") == CallResult("ok")
    for number in range(1, 21):
        assert call(toolbox, "keep", text="a") == CallResult(json.dumps(["a"] * number, separators=(",", ":")))


def test_a_process_that_a_function_forks_has_no_end_of_the_pipe(toolbox: Toolbox) -> None:
    assert call(toolbox, "inherited") == CallResult("[]")


@pytest.mark.skipif(not guard.is_possible(), reason="needs Linux 5.3")
@pytest.mark.parametrize("last", ["close", "crash"])
def test_what_left_the_session_ends_too(folder: Path, last: str) -> None:
    with made("mine.py") as toolbox:
        assert call(toolbox, "daemonize") == CallResult("null")
        (pid,) = pids(folder)
        assert not ended(pid)
        if last == "crash":
            assert call(toolbox, "crash").failed
            assert ended(pid)
    assert ended(pid), "close() has waited for it"


def test_a_function_that_hangs_is_ended_with_all_it_started(folder: Path) -> None:
    with made("mine.py", seconds=3) as toolbox:
        assert call(toolbox, "hang") == CallResult("it took longer than 3 seconds and was stopped", failed=True)
    for pid in pids(folder):
        assert eventually(lambda pid=pid: ended(pid), LONG)


@pytest.mark.parametrize("kind", ["toolbox", "served"])
def test_a_call_is_cancelled(kind: str, folder: Path, request: pytest.FixtureRequest) -> None:
    toolbox = request.getfixturevalue(kind)
    canceller = threading.Thread(target=lambda: (pids(folder), toolbox.cancel()))
    canceller.start()
    assert call(toolbox, "hang" if kind == "toolbox" else "wait") == CallResult(STOPPED, failed=True)
    canceller.join()
    (pid, *_) = pids(folder)
    assert not ended(pid) if kind == "served" else eventually(lambda: ended(pid), LONG)


def test_an_unknown_tool(toolbox: Toolbox) -> None:
    assert call(toolbox, "nothing") == CallResult("there is no tool nothing", failed=True)


@pytest.mark.parametrize("arguments", ["", "{", '{"text": ' + "[" * 100_000 + "]" * 100_000 + "}"], ids=len)
def test_arguments_that_are_not_json(toolbox: Toolbox, arguments: str) -> None:
    assert toolbox.call(ToolCall("id", "keep", arguments)) == CallResult("its arguments are not JSON", failed=True)


def test_a_server(served: Toolbox) -> None:
    assert call(served, "add", a=1, b=2) == CallResult("3")
    assert call(served, "fail").failed
    assert call(served, "add", a="x").failed
    assert call(served, "die").failed
    assert call(served, "add", a=3, b=4) == CallResult("7")


PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
MODERN = f"""
from mcp.server.mcpserver import Context, MCPServer
from mcp.types import (BlobResourceContents, CallToolResult, EmbeddedResource, ImageContent, ResourceLink, TextContent,
                       TextResourceContents)

server = MCPServer("test")
PNG = {PNG!r}

def text(text): return TextContent(type="text", text=text)

@server.tool()
def rows() -> CallToolResult:
    return CallToolResult(content=[text("2 rows found, see structured content")], structured_content={{"rows": [1, 2]}})

@server.tool()
def twice() -> CallToolResult:
    return CallToolResult(content=[text('{{\\n "rows": [1,2]}}')], structured_content={{"rows": [1, 2]}})

@server.tool()
def only() -> CallToolResult:
    return CallToolResult(content=[], structured_content={{"rows": []}})

@server.tool()
def names() -> list[str]: return ["1", "b"]

@server.tool()
def nothing() -> list[str]: return []

@server.tool()
def looks() -> CallToolResult:
    return CallToolResult(content=[
        text("Before:"), ImageContent(type="image", data=PNG, mime_type="image/png"), text("After."),
        EmbeddedResource(type="resource", resource=BlobResourceContents(uri="a://b", blob=PNG, mime_type="image/png")),
        EmbeddedResource(type="resource", resource=TextResourceContents(uri="a://c", text="A text.")),
        ImageContent(type="image", data="c3Zn", mime_type="image/svg+xml"),
    ])

@server.tool()
def blind() -> CallToolResult:
    return CallToolResult(content=[ImageContent(type="image", data=PNG, mime_type="image/png")], is_error=True)

@server.tool()
async def slow(ctx: Context) -> str:
    for step in range(8):
        await ctx.report_progress(step, 8, "on it")
    return "done"

@server.tool()
async def grow(ctx: Context) -> str:
    def grown() -> str: return "I am new."
    server.add_tool(grown)
    server.remove_tool("names")
    await ctx.session.send_tool_list_changed()
    await ctx.notify_tools_changed()
    return "grown"

server.run()
"""


@pytest.fixture
def modern(folder: Path) -> Iterator[Toolbox]:
    (folder / "modern.py").write_text(MODERN)
    with made(f"mcp:{sys.executable} modern.py") as toolbox:
        yield toolbox


def test_structured_content_stands_beside_text_that_does_not_say_it(modern: Toolbox) -> None:
    assert call(modern, "rows").text == '2 rows found, see structured content\n{"rows": [1, 2]}'
    assert call(modern, "twice").text == '{\n "rows": [1,2]}'
    assert call(modern, "only").text == '{"rows": []}'
    assert call(modern, "names").text == "1\nb"
    assert call(modern, "nothing").text == '{"result": []}'


def test_images_of_a_result_are_media_at_their_places(modern: Toolbox) -> None:
    found = call(modern, "looks")
    assert [(media.data, media.at) for media in found.media] == [
        (PNG, len("Before:\n")),
        (PNG, len("Before:\nAfter.\n")),
    ]
    assert found.text.startswith("Before:\nAfter.\nA text.\n")
    assert '"image/svg+xml"' in found.text, "what the engine can't decode is named"
    assert PNG not in found.text
    failed = call(modern, "blind")
    assert failed.output == ToolOutput("Error: ", (Media(PNG, at=len("Error: ")),))


def test_progress_is_no_answer(modern: Toolbox) -> None:
    assert call(modern, "slow") == CallResult("done")


def test_progress_begins_the_time_limit_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    lines = [b'{"id": "call", "progress": 1}'] * 4 + [b'{"id": "call", "result": "done"}']

    class Slow(ToolSource):
        """A process that says something every three seconds."""

        def __init__(self) -> None:
            self._listing = "list"

        def _line(self, ends: float) -> bytes | None:
            if now[0] + 3 > ends:
                return None
            now[0] += 3
            return lines.pop(0)

    monkeypatch.setattr(source, "time", SimpleNamespace(monotonic=lambda: now[0]))
    assert Slow()._answer("call", 4.0) == {"id": "call", "result": "done"}
    assert now == [15.0]
    lines = [b'{"id": "call", "progress": 1}', b'{"id": "call", "result": "too late"}']
    assert Slow()._answer("call", 2.0) is None


def test_tools_that_a_server_adds_and_removes(modern: Toolbox) -> None:
    assert modern.changed_tools() is None
    assert call(modern, "grown").failed
    assert call(modern, "grow") == CallResult("grown")
    changed = eventually(modern.changed_tools, LONG)
    assert "grown" in (names := [tool.name for tool in changed])
    assert "names" not in names
    assert call(modern, "grown") == CallResult("I am new.")
    assert call(modern, "names") == CallResult("there is no tool names", failed=True)
    assert call(modern, "rows").text


@pytest.mark.parametrize(("name", "tool"), [("mine.py", "hang"), ("mcp:PYTHON server.py", "wait")])
def test_tools_end_with_the_chat_however_it_ends(name: str, tool: str, folder: Path) -> None:
    chat = (
        "import sys; from llmrun.chat.tools.toolbox import Toolbox; from llmrun.protocol.messages import ToolCall\n"
        f"box = Toolbox([sys.argv[1]], 3600); box.tools(); box.call(ToolCall('', {tool!r}, '{{}}'))"
    )
    process = subprocess.Popen([sys.executable, "-c", chat, name.replace("PYTHON", sys.executable)])
    started = pids(folder)
    process.kill()
    process.wait()
    for pid in started:
        assert eventually(lambda pid=pid: ended(pid), LONG)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nowhere.py", "there is no such file"),
        ("./folder.txt/nowhere", "there is no such file"),
        ("server.txt", "must be a Python file"),
        ("broken.py", "RuntimeError: no way"),
        ("nameless.py", r"f\(\) can't be a tool"),
        ("mcp:", "needs a command"),
        ("mcp:server 'unclosed", "No closing quotation"),
        ("mcp:./no-such-command", r"there is no command '\./no-such-command' on this machine$"),
        ("mcp:sh -c 'echo no key >&2'", "Connection closed; no key$"),
    ],
)
def test_what_has_no_tools_says_why(name: str, why: str, folder: Path) -> None:
    (folder / "broken.py").write_text("raise RuntimeError('no way')")
    (folder / "nameless.py").write_text("def f(a, /): pass")
    with pytest.raises(UsageError, match=why), Toolbox([name], 1) as toolbox:
        toolbox.tools()


def test_a_name_that_would_break_a_call(folder: Path) -> None:
    (folder / "other.py").write_text("def f(): pass\nglobals()['a\"b'] = f")
    with pytest.raises(UsageError, match="a tool can't be called"), Toolbox(["other.py"], 1) as toolbox:
        toolbox.tools()


def test_two_tools_of_one_name(folder: Path) -> None:
    (folder / "other.py").write_text("def where(): pass")
    with pytest.raises(UsageError, match="two tools called where"), Toolbox(["mine.py", "other.py"], 1) as toolbox:
        toolbox.tools()


def test_servers_need_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError) as caught:
        Toolbox(["mcp:server"], 1)
    assert caught.value.hint == "pip install 'llmrun[mcp]'"


def test_nothing_in_the_users_folder_shadows_a_module(folder: Path) -> None:
    (folder / "mcp.py").write_text("raise RuntimeError('this is no mcp')")
    (folder / "elsewhere").mkdir()
    (folder / "server.py").rename(folder / "elsewhere" / "server.py")
    with made(f"mcp:{sys.executable} elsewhere/server.py") as toolbox:
        assert call(toolbox, "add", a=1, b=2) == CallResult("3")
