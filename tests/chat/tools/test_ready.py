"""Ready-made tools: what they do, and what they refuse."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs

import pytest
from support.installed import eventually
from support.stand_in_web import Web, stand_in_web

from llmrun.chat.tools import ready, sandbox
from llmrun.chat.tools.folder import Folder
from llmrun.chat.tools.python import Python
from llmrun.chat.tools.ready import KINDS, is_ready, notes_of, ready_sets
from llmrun.chat.tools.source import CallResult
from llmrun.chat.tools.toolbox import Toolbox
from llmrun.chat.tools.web import Search
from llmrun.chat.tools.web import Web as WebTools
from llmrun.errors import NetworkError, UsageError
from llmrun.protocol.messages import ToolCall

pytestmark = pytest.mark.usefixtures("package_on_path")
LONG = 600.0
isolated = pytest.mark.skipif(not sandbox.cuts_off(), reason="this system has no filter of system calls")


def call(toolbox: Toolbox, name: str, **arguments: Any) -> CallResult:
    return toolbox.call(ToolCall("id", name, json.dumps(arguments)))


# ---- files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with links that lead outside."""
    inside = tmp_path / "inside"
    (inside / "sub").mkdir(parents=True)
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "inside too").mkdir()  # a name that begins like the folder's
    (tmp_path / "inside too" / "x").write_text("secret")
    (inside / "a.txt").write_text("one\ntwo\n")
    (inside / "sub" / "b.py").write_text("print(1)\n")
    (inside / "binary").write_bytes(b"a\0b")
    (inside / "out").symlink_to(tmp_path / "secret.txt")
    (inside / "up").symlink_to(tmp_path)
    (inside / "in").symlink_to("sub/b.py")
    os.mkfifo(inside / "pipe")
    return inside


def test_files_below_a_folder_are_read(folder: Path) -> None:
    tools = Folder(str(folder))
    for path in ("a.txt", "./sub/../a.txt", str(folder / "a.txt")):
        assert tools.read_file(path) == "one\ntwo\n"
    assert tools.read_file("in") == "print(1)\n", "a link within the folder"
    assert tools.read_file("a.txt", line=2) == "two\n"


@pytest.mark.parametrize(
    "path",
    [
        "../secret.txt",
        "out",
        "up/secret.txt",
        "sub/../../secret.txt",
        "/etc/passwd",
        "../inside too/x",
        "up/inside/a.txt/..",
    ],
)
def test_nothing_beyond_the_folder_is_read(folder: Path, path: str) -> None:
    tools = Folder(str(folder))
    with pytest.raises((PermissionError, OSError)) as caught:
        tools.read_file(path)
    assert "secret" not in str(caught.value).replace(path, "")
    for place in ("..", "up", "/", "../inside too"):
        with pytest.raises(PermissionError, match="outside of the folder"):
            tools.list_files(place)
    with pytest.raises(PermissionError, match="outside of the folder"):
        tools.read_file("out")


@pytest.mark.parametrize(
    ("path", "words"), [("binary", "binary"), ("pipe", "not a file"), ("sub", "is a folder"), ("no", "not a file")]
)
def test_what_is_no_text_is_refused(folder: Path, path: str, words: str) -> None:
    with pytest.raises((UsageError, OSError), match=words):
        Folder(str(folder)).read_file(path)


def test_files_are_listed_with_sizes(folder: Path) -> None:
    tools = Folder(str(folder))
    assert tools.list_files().splitlines() == [
        "a.txt  8 bytes", "binary  3 bytes", "in  9 bytes", "out  [a link that leads outside]", "pipe  [not a file]",
        "sub/", "up  [a link that leads outside]",
    ]  # fmt: skip
    everything = tools.list_files(recursive=True)
    assert "sub/b.py  9 bytes" in everything
    assert "secret" not in everything
    assert tools.list_files("sub") == "sub/b.py  9 bytes"


def test_long_results_are_cut_and_can_be_read_on(tmp_path: Path) -> None:
    (tmp_path / "long").write_text("".join(f"line {number}\n" for number in range(5_000)))
    tools = Folder(str(tmp_path))
    text, line, found = tools.read_file("long"), 1, ""
    while "more lines; line=" in text:
        found += text[: text.rindex("[")]
        line = int(text.rpartition("line=")[2].partition(" ")[0])
        text = tools.read_file("long", line)
    assert found + text == (tmp_path / "long").read_text()
    for number in range(600):
        (tmp_path / f"f{number}").touch()
    assert tools.list_files().endswith("[and more than 500 entries]")


# ---- the web


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with stand_in_web() as found:
        yield found


def test_a_page_is_read(web: Web) -> None:
    web.pages["/"] = (200, {"Content-Type": "text/plain"}, b"0123456789")
    tools = WebTools((web.host,))
    assert (tools.read_url(web.url("/")), tools.read_url(web.url("/"), start=7)) == ("0123456789", "789")
    assert tools.read_url(web.url("/"), start=99) == "[its text has 10 characters]"
    with pytest.raises(UsageError, match="private address"):
        WebTools(()).read_url(web.url("/"))


def test_the_web_is_searched_through_the_users_server(web: Web) -> None:
    found = {
        "results": [{"title": "Tea", "url": "https://tea.example", "content": "Green."}, {"url": "https://x.example"}]
    }
    web.pages["/search"] = (200, {}, json.dumps(found).encode())
    text = Search((), web.url("/")).search_web("green tea & more")
    assert text == "1. Tea\nhttps://tea.example\nGreen.\n\n2. \nhttps://x.example"
    assert parse_qs(web.asked[0].partition("?")[2]) == {"q": ["green tea & more"], "format": ["json"]}
    web.pages["/search"] = (403, {}, b"")
    with pytest.raises(NetworkError, match="403"):
        Search((), web.url("/search")).search_web("tea")


def test_search_needs_a_server() -> None:
    with Toolbox(("web",), LONG) as toolbox:
        assert [tool.name for tool in toolbox.tools()] == ["read_url"]
        assert "llmrun config set tools.search" in toolbox.notes[0]
    with Toolbox(("web",), LONG, "https://search.example") as toolbox:
        assert [tool.name for tool in toolbox.tools()] == ["read_url", "search_web"]
        assert toolbox.notes == []


# ---- Python


def test_code_runs_and_says_what_it_printed() -> None:
    python = Python()
    assert python.run_python("print(6 * 7)") == "42"
    assert python.run_python("x = 1") == "[it printed nothing]"
    assert python.run_python("open('x', 'w').write('kept'); print(open('x').read())") == "kept"
    assert "No such file" in python.run_python("open('x')"), "each call has a folder of its own"
    failed = python.run_python("1 / 0")
    assert failed.startswith('Traceback (most recent call last):\n  File "code.py", line 1')
    assert failed.endswith("ZeroDivisionError: division by zero\n[it ended with status 1]")


def test_code_gets_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert "secret" not in Python().run_python("import os; print(os.environ)")


def test_processor_time_memory_and_output_are_limited() -> None:
    python = Python()
    if sys.platform != "darwin":
        assert "MemoryError" in python.run_python("bytearray(2 << 30)")
    assert python.run_python("while True: print('x' * 1000)").endswith(
        "[stopped: it printed more than 1,048,576 bytes]"
    )
    assert "File too large" in python.run_python("f = open('x', 'wb')\nwhile True: f.write(bytes(1 << 20))")
    code = "import resource; print(resource.getrlimit(resource.RLIMIT_CPU)[0])"
    assert python.run_python(code) == str(sandbox.SECONDS)
    shorter = "import resource; resource.setrlimit(resource.RLIMIT_CPU, (1, 1))\nwhile True: pass"
    assert "seconds of processor time" in python.run_python(shorter)


@isolated
@pytest.mark.parametrize(
    "code",
    [
        "import socket; socket.socket()",
        "import socket; socket.socket(socket.AF_UNIX)",
        "import os; os.fork()",
        "import subprocess; subprocess.run(['true'])",
        "import os; os.posix_spawn('/bin/true', ['true'], {})",
        "import os; os.kill(os.getppid(), 9)",
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))",
    ],
)
def test_code_has_no_network_and_no_other_processes(code: str) -> None:
    found = Python().run_python(code)
    assert "Operation not permitted" in found or "not allowed to raise" in found, found


@isolated
def test_code_may_have_threads() -> None:
    code = "from threading import Thread\nt = Thread(target=print, args=('beside',))\nt.start()\nt.join()"
    assert Python().run_python(code) == "beside"


@isolated
@pytest.mark.parametrize(
    "code", ["print(open({path!r}).read())", "open({path!r}, 'w')", "import os; os.unlink({path!r})"]
)
def test_code_has_no_files_of_the_user(tmp_path: Path, code: str) -> None:
    if not sandbox.hides_files():
        pytest.skip("this system has no Landlock")
    file = tmp_path / "mine.txt"
    file.write_text("secret")
    found = Python().run_python(code.format(path=str(file)))
    assert "Permission denied" in found
    assert file.read_text() == "secret"


def test_time_that_passes_ends_code_that_waits_and_its_folder_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with Toolbox(("python",), 3) as toolbox:
        toolbox.tools()
        found = call(toolbox, "run_python", code="import time; time.sleep(3600)")
        assert (found.text, found.failed) == ("it took longer than 3 seconds and was stopped", True)
        assert eventually(lambda: not list(tmp_path.iterdir()), LONG)
        assert call(toolbox, "run_python", code="print(1)").text == "1", "another process takes the next call"


def test_code_that_computes_goes_on_beyond_the_time_that_passes() -> None:
    """A busy machine must not end it: the chat hears of progress, and the limit is of processor time."""
    told: list[dict[str, Any]] = []
    chat: Any = SimpleNamespace(tell=lambda request, **answer: told.append(answer))
    with (
        ready._telling_progress(chat, {"id": "1"}),
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) as computing,
    ):
        assert eventually(lambda: len(told) > 1, LONG)
        computing.kill()
    assert all(each["progress"] > 0 for each in told)
    n_told = len(told)
    with ready._telling_progress(chat, {"id": "2"}):
        pass
    assert len(told) == n_told


# ---- their names


def test_names_of_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    assert [is_ready(name) for name in ("all", "files", "web:localhost", "python", "files.py", "mcp", "mcp:files")] == [
        True, True, True, True, False, False, False,
    ]  # fmt: skip
    assert [each.kind for each in ready_sets("all", "")] == [*KINDS]
    assert ready_sets("files", "")[0].value == str(tmp_path)
    assert ready_sets("files:sub", "")[0].value == str(tmp_path / "sub")
    assert ready_sets("web:localhost:8080,http://Wiki.home/x,[::1]:9", "")[0].value == "localhost:8080,wiki.home,::1:9"
    assert not [note for each in ready_sets("files", "") for note in notes_of(each)]
    for name in ("files:none", "web:http://", "web:a:b", "python:x"):
        with pytest.raises(UsageError, match="invalid --tools"):
            ready_sets(name, "")


def test_a_set_can_be_added_later(folder: Path) -> None:
    with Toolbox((), LONG) as toolbox:
        assert toolbox.tools() == ()
        tools = toolbox.add(f"files:{folder}")
        assert [tool.name for tool in tools] == ["read_file", "list_files"]
        assert toolbox.of_source("files") == ["read_file", "list_files"]
        assert call(toolbox, "read_file", path="a.txt").text == "one\ntwo\n"
        assert call(toolbox, "read_file", path="out") == CallResult(
            "PermissionError: out is outside of the folder", True
        )
        with pytest.raises(UsageError, match="two tools called read_file"):
            toolbox.add("files")
        assert call(toolbox, "read_file", path="in").text == "print(1)\n"
