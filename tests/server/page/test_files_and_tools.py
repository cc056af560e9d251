"""Files that come with a question, and calls of tools, without a browser."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.installed import eventually
from support.page_client import answer, ask, call_stream, read, store, texts
from support.pdfs import pdf
from support.served import LiveServer
from support.tiny_projector import png

from llmrun.chat.passages import FolderIndex
from llmrun.chat.store.turns import Question
from llmrun.chat.tools.toolbox import Toolbox
from llmrun.protocol.messages import ToolCall
from llmrun.server.page import running
from llmrun.server.page.tools import PageTools

pytestmark = pytest.mark.usefixtures("package_on_path")
Serve = Callable[..., LiveServer]


TOOLS = """
def weather(city: str) -> str:
    '''Weather of a city.'''
    return f"sunny in {city}"
"""


def test_a_pdf_becomes_text(serve: Serve) -> None:
    server = serve("short")

    def post(data: bytes) -> Any:
        body = {"name": "../a.pdf", "data": base64.b64encode(data).decode()}
        return server.post("/ui/documents", body)

    assert post(pdf("A harvest.")).json == {"text": "[page 1]\nA harvest.", "note": ""}
    refused = post(b"%PDF-1.7 and nothing else")
    assert refused.status == 400
    assert "'a.pdf' can't be attached: it is damaged" in refused.json["error"]["message"]
    assert post("Größe der Straße".encode("cp1252")).json == {
        "text": "Größe der Straße",
        "note": "read as windows-1252",
    }
    page = b"<html><nav>Home</nav><script>no()</script><p>A lamp.</html>"
    assert post(page).json == {"text": "A lamp.", "note": "without markup"}
    assert "it is binary, not text" in post(b"a\0b").json["error"]["message"]


def test_passages_of_documents_go_along_with_a_question(serve: Serve, tmp_path: Path) -> None:
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "tea.md").write_text("# Kitchen\nTea is in the kitchen.\n")
    (folder / "hours.txt").write_text("The office closes at five on Fridays.\n")
    index = FolderIndex(folder, tmp_path / "index")
    index.refresh()
    server = serve(index=index)
    chat = ask(server, "Where is the tea?")
    (question,) = chat["entries"]
    (passage,) = question["passages"]
    assert (passage["place"], passage["heading"]) == ("tea.md, lines 1-2", "Kitchen")
    assert passage["text"] == "# Kitchen\nTea is in the kitchen."
    assert (question["text"], question["passages_line"], question["files"]) == (
        "Where is the tea?", "1 passage of 1 file", "",
    )  # fmt: skip
    answered = "".join(each["text"] for each in answer(server, chat).events if "text" in each)
    assert answered.startswith("Passages of my documents"), "the model saw them"
    after = read(server, chat)["entries"]
    edited = ask(server, "When does the office close?", chat=chat["id"], after=after[-1]["id"], beside=question["id"])
    assert edited["entries"][0]["passages"][0]["file"] == "hours.txt"
    files = [{"name": "own.txt", "text": "mine"}]
    (entry,) = ask(server, "the tea?", files=files)["entries"]
    assert entry["files"] == "own.txt:\n```\nmine\n```"
    plain = serve().post("/ui/ask", {"text": "the tea?"}).json["entries"][0]
    assert plain["passages"] == []


@pytest.fixture
def tools(tmp_path: Path) -> Iterator[PageTools]:
    file = tmp_path / "tools.py"
    file.write_text(TOOLS)
    with Toolbox((str(file),), 60) as toolbox:
        yield PageTools(toolbox)


def test_a_call_may_follow_one_that_was_stopped(tmp_path: Path) -> None:
    """The thread of the stopped call reads the process until that has ended: two readers at once are an error."""
    file, began = tmp_path / "tools.py", tmp_path / "began"
    sleep = (
        f"import time\nfrom pathlib import Path\ndef sleep():\n    Path({str(began)!r}).touch()\n    time.sleep(3600)\n"
    )
    file.write_text(TOOLS + sleep)

    async def stop_and_call(tools: PageTools) -> None:
        for _ in range(3):
            stopped = asyncio.ensure_future(tools.result(ToolCall("1", "sleep", "{}"), 1))
            while not began.exists():
                await asyncio.sleep(0.01)
            began.unlink()
            stopped.cancel()
            found = await tools.result(ToolCall("2", "weather", '{"city": "Rome"}'), 1)
            assert found.text == "sunny in Rome"
            with pytest.raises(asyncio.CancelledError):
                await stopped

    with Toolbox((str(file),), 60) as toolbox:
        asyncio.run(stop_and_call(PageTools(toolbox, ("sleep", "weather"))))


@pytest.mark.parametrize(
    ("decision", "heard"), [("once", "sunny in Rome"), ("no", "Error: the user does not allow it")]
)
def test_a_tool_runs_after_a_decision(serve: Serve, tools: PageTools, decision: str, heard: str) -> None:
    server = serve("calling", tools=tools)
    assert server.post("/ui/load", {"model": ""}).json["tools"] == ["weather"]
    chat = ask(server, '{"city": "Rome"}')
    asked: list[dict[str, Any]] = []

    def decide(call: dict[str, Any]) -> None:
        asked.append(call)
        assert server.post("/ui/decide", {"call": call["id"], "decision": decision}).status == 200

    events = call_stream(server, chat, decide)
    assert [(call["name"], json.loads(call["arguments"])) for call in asked] == [("weather", {"city": "Rome"})]
    assert [event for event in events if event.get("id")][-1]["text"] == heard
    last = read(server, chat)["entries"][-1]
    assert (last["text"], last["finish"]) == (f"I heard: {heard}", "stop")
    assert last["rounds"] == [
        {
            "text": "Let me see.",
            "calls": [{"name": "weather", "arguments": asked[0]["arguments"], "result": heard}],
        }
    ]
    with store() as terminal:
        saved = terminal.open(chat["name"]).last_answer
        assert saved is not None
        assert saved.rounds[0].results == (heard,)
    again = server.post("/ui/explain", {"chat": chat["id"], "answer": last["id"]})
    assert (again.status, "calls of tools" in again.json["error"]["message"]) == (400, True)
    assert server.post("/ui/decide", {"call": asked[0]["id"], "decision": "once"}).status == 400


def test_a_tool_that_is_always_allowed_asks_once_in_its_chat(serve: Serve, tools: PageTools) -> None:
    server = serve("calling", tools=tools)
    asked: list[str] = []

    def decide(call: dict[str, Any]) -> None:
        asked.append(call["id"])
        server.post("/ui/decide", {"call": call["id"], "decision": "always"})

    chat = ask(server, '{"city": "Rome"}')
    call_stream(server, chat, decide)
    last = read(server, chat)["entries"][-1]
    again = ask(server, '{"city": "Oslo"}', chat=chat["id"], after=last["id"])
    call_stream(server, again, decide)
    assert [texts(read(server, chat))[index] for index in (1, 3)] == [
        "I heard: sunny in Rome",
        "I heard: sunny in Oslo",
    ]
    assert len(asked) == 1
    call_stream(server, ask(server, '{"city": "Rome"}'), decide)
    assert len(asked) == 2, "another chat asks again"


def test_ready_made_tools_on_the_page(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "notes.txt").write_text("from the folder")
    with Toolbox((f"files:{tmp_path / 'docs'}",), 600) as toolbox:
        server = serve("calling", tools=PageTools(toolbox))
        assert server.post("/ui/load", {"model": ""}).json["tools"] == ["read_file", "list_files"]
        asked: list[dict[str, Any]] = []

        def allow(call: dict[str, Any]) -> None:
            asked.append(call)
            server.post("/ui/decide", {"call": call["id"], "decision": "once"})

        for path, heard in (("notes.txt", "from the folder"), ("../x", "Error: PermissionError: ../x is outside")):
            chat = ask(server, json.dumps({"path": path}))
            call_stream(server, chat, allow)
            assert texts(read(server, chat))[1].startswith(f"I heard: {heard}")
        assert [json.loads(call["arguments"])["path"] for call in asked] == ["notes.txt", "../x"]


def test_a_tool_that_was_left_out_is_not_offered(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(f"{TOOLS}def moon(city: str) -> str:\n    return f'full in {{city}}'\n")
    with Toolbox((str(tmp_path / "tools.py"),), 60) as box:
        server = serve("calling", tools=PageTools(box, ("weather", "moon")))
        assert server.post("/ui/load", {"model": ""}).json["tools"] == ["weather", "moon"]
        chat = ask(server, '{"city": "Rome"}')
        answer(server, chat, tools=True, without_tools=["weather"])
        assert texts(read(server, chat))[1] == "I heard: full in Rome"


def test_a_client_that_leaves_at_the_question_runs_no_tool(
    serve: Serve, tools: PageTools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "GRACE_SECONDS", 0.0)
    server = serve("calling", tools=tools)
    chat = ask(server, '{"city": "Rome"}')
    body = json.dumps({"chat": chat["id"], "question": chat["entries"][-1]["id"], "tools": True}).encode()
    with server.connect() as connection:
        connection.sendall(server.request("POST", "/ui/answer", body))
        data = b""
        while b"event: calls" not in data:
            data += connection.recv(65536)
    assert eventually(lambda: not read(server, chat)["is_answering"], 60)
    last = read(server, chat)["entries"][-1]
    assert (last["text"].strip(), last["finish"], last["rounds"]) == ("Let me see.", "cancelled", [])


def test_without_tools_nothing_is_offered(serve: Serve, tools: PageTools) -> None:
    server = serve("echo", tools=tools)
    chat = ask(server, "Hello")
    assert answer(server, chat, tools=False).events[-1]["reason"] == "stop"


def test_files_come_with_a_question_and_are_those_of_the_terminal(server: LiveServer) -> None:
    files = [{"name": "../a/notes.txt", "text": "one\ntwo"}]
    chat = ask(server, "What is this?", files=files)
    assert texts(chat) == ["What is this?"]
    assert chat["entries"][0]["files"] == "notes.txt:\n```\none\ntwo\n```"
    answer(server, chat)
    assert texts(read(server, chat))[1] == "notes.txt:\n```\none\ntwo\n```\n\nWhat is this?", (
        "the echo says what it got"
    )
    with store() as terminal:
        asked = terminal.open(chat["name"]).entries[0].part
        assert isinstance(asked, Question)
        assert (asked.typed, asked.media) == ("What is this?", ())


def test_the_beginning_of_a_long_file_is_shown(server: LiveServer) -> None:
    shown = ask(server, "What is this?", files=[{"name": "long.txt", "text": "x" * 100_000}])["entries"][0]["files"]
    assert shown.startswith("long.txt:\n```\nxxx")
    assert shown.endswith("x …")
    assert len(shown) < 10_000


def test_a_model_without_vision_gets_a_line_for_an_image_and_says_so(server: LiveServer) -> None:
    data = png(8, 8)
    chat = ask(server, "What is this?", media=[{"name": "red.png", "data": base64.b64encode(data).decode()}])
    assert chat["entries"][0]["media"] == ["red.png"]
    streamed = answer(server, chat)
    assert "can't read images: red.png is left out" in streamed.events[0]["text"]
    assert texts(read(server, chat))[1] == "[The image red.png can't be read.]\nWhat is this?"
    with store() as terminal:
        asked = terminal.open(chat["name"]).entries[0].part
        assert isinstance(asked, Question)
        saved = Path(asked.media[0].path)
        assert saved.read_bytes() == data
        terminal.delete(chat["name"])
    assert not saved.exists(), "an image of the page goes with its chat"


def test_a_long_name_in_any_script_is_cut(server: LiveServer) -> None:
    image = {"name": "画" * 200 + ".png", "data": base64.b64encode(png(8, 8)).decode()}
    (name,) = ask(server, "What is this?", media=[image])["entries"][0]["media"]
    assert set(name) == {"画"}
    assert 100 < len(name.encode()) < 255


@pytest.mark.parametrize(
    "media",
    [
        [{"name": "x.png", "data": "@"}],
        [{"name": "x.png", "data": "ÄÖÜß"}],
        [{"name": "x.tiff", "data": base64.b64encode(b"II*\0....").decode()}],
        [{"name": "x.ogg", "data": base64.b64encode(b"OggS....").decode()}],
        [{"name": "x.png"}],
        "x",
    ],
)
def test_what_is_no_image_is_refused(server: LiveServer, media: Any) -> None:
    refused = server.post("/ui/ask", {"text": "x", "media": media})
    assert (refused.status, bool(refused.json["error"]["message"])) == (400, True)
    assert server.get("/ui/chats").json["chats"] == []
