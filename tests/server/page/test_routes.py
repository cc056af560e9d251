"""The page of the server without a browser: its files, and what it asks of saved chats and models."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.installed import eventually
from support.page_client import answer, ask, read, store, texts
from support.served import LiveServer

from llmrun.chat.store.store import folder_in
from llmrun.chat.store.turns import Answer
from llmrun.config import load_settings
from llmrun.protocol.layers import layer
from llmrun.protocol.params import PARAMETERS, STEPS
from llmrun.server.guard import Policy
from llmrun.server.page import requests, running
from llmrun.server.page.files import FOLDER, MEDIA_TYPES, read_file

pytestmark = pytest.mark.usefixtures("package_on_path")
MOST_BYTES = 330_000
MOST_HIGHLIGHTER_BYTES = 30_000
LOADED_LATER = {"vendor/temml.js"}  # when a formula appears
BROWSER = {"accept": "text/html,application/xhtml+xml"}
Serve = Callable[..., LiveServer]


# ---- files


def test_a_browser_gets_the_page_and_everything_else_a_line(server: LiveServer) -> None:
    page = server.get("/", **BROWSER)
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert server.get("/").body == b"llmrun is running\n"
    assert server.get("/api/hello").body == b"llmrun is running\n"


@pytest.mark.parametrize("name", MEDIA_TYPES)
def test_every_file_is_served_with_a_policy_that_runs_and_fetches_nothing_foreign(
    server: LiveServer, name: str
) -> None:
    file = server.get(f"/ui/files/{name}")
    assert (file.status, file.body) == (200, read_file(name))
    assert file.headers["content-type"] == MEDIA_TYPES[name]
    rules = dict(rule.split(" ", 1) for rule in file.headers["content-security-policy"].split("; "))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == rules["frame-ancestors"] == "'none'"
    assert {rules[f"{kind}-src"] for kind in ("script", "style", "connect")} == {"'self'"}
    assert rules["img-src"] == "'self' blob:", "blob: is what the page's own script has fetched from here"
    assert file.headers["x-content-type-options"] == "nosniff"
    assert file.headers["referrer-policy"] == "no-referrer"


def test_the_page_has_the_table_of_parameters(server: LiveServer) -> None:
    text = server.get("/ui/files/parameters.js").body.decode()
    table, steps = (json.loads(line.split(" = ", 1)[1].rstrip(";")) for line in text.splitlines())
    assert set(table) == {name for name, row in PARAMETERS.items() if row.label}
    slider = {"off": 0, "high": 200, "step": 1}
    assert table["top_k"] == {"label": "Top-k", "min": 0, "max": 2**31 - 1, "step": 1, "slider": slider}
    assert table["repeat_penalty"]["slider"] is None
    assert table["repeat_penalty"]["step"] == "any"
    assert steps == list(STEPS)


def test_only_files_of_the_page_are_served(server: LiveServer) -> None:
    for name in ("", "nothing.js", "vendor/README.md", "../files.py", "%2e%2e/files.py", "/etc/passwd"):
        assert server.get(f"/ui/files/{name}").status == 404


def test_the_page_is_small_and_complete() -> None:
    assert sum(len(read_file(name)) for name in MEDIA_TYPES if name not in LOADED_LATER) <= MOST_BYTES
    assert (FOLDER / "vendor/prism.js").stat().st_size <= MOST_HIGHLIGHTER_BYTES
    lying = {path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if path.is_file()}
    assert lying - set(MEDIA_TYPES) == {"vendor/README.md", "vendor/LICENSES.txt"}
    for name in MEDIA_TYPES:
        text = read_file(name).decode()
        named = re.findall(r'(?:from|import) "(\./[^"]+)"', text) if not name.startswith("vendor/") else []
        files = [os.path.normpath(Path(name).parent / each) for each in named]
        files += re.findall(r'(?:src|href)="/ui/files/([^"]+)"', text)
        assert set(files) <= set(MEDIA_TYPES), name


def test_nothing_is_inline_and_only_one_place_makes_html() -> None:
    index = (FOLDER / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son\w+=|https?://", index)
    own = {name: read_file(name).decode() for name in MEDIA_TYPES if not name.startswith("vendor/")}
    sinks = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|setHTMLUnsafe|srcdoc"
    assert {name for name, text in own.items() if re.search(sinks, text)} == {"markdown.js"}
    assert len(re.findall(sinks, own["markdown.js"])) == 1


def test_vendored_files_are_those_whose_hash_and_licence_are_written_down() -> None:
    readme = (FOLDER / "vendor" / "README.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `([\w.-]+)` \|.*`([0-9a-f]{64})` \|$", readme, re.MULTILINE))
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (FOLDER / "vendor").glob("*.js")}
    assert listed == found
    licences = (FOLDER / "vendor" / "LICENSES.txt").read_text(encoding="utf-8")
    for name in ("markdown-it", "entities", "linkify-it", "mdurl", "punycode.js", "uc.micro", "prismjs", "temml"):
        assert f"---- {name} " in licences


# ---- chats and answers


def test_notes_of_the_user_are_in_the_prompt_of_the_page(
    serve: Serve, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMRUN_NOTES", "on")
    server = serve("reporting")
    (load_settings().state_dir / "notes.md").write_text("- I live in Oslo")
    chat = ask(server, system="Be brief.")
    answer(server, chat)
    (system,) = json.loads(texts(read(server, chat))[-1])["system"]
    assert system.startswith("Be brief.")
    assert system.endswith("- I live in Oslo")
    assert read(server, chat)["system"] == "Be brief."


def test_an_answer_is_streamed_with_its_figures_and_saved_for_the_terminal(server: LiveServer) -> None:
    chat = ask(server, system="Be brief.")
    streamed = answer(server, chat)
    assert streamed.headers["content-type"] == "text/event-stream"
    assert [line for line in streamed.body.decode().splitlines() if line.startswith("event")] == [
        "event: started", "event: text", "event: text", "event: finished",
    ]  # fmt: skip
    assert streamed.events[0] == {"prompt_tokens": 3, "cached_tokens": 0}
    assert "".join(each.get("text", "") for each in streamed.events) == "Hello there"
    assert (streamed.events[-1]["context_used"], streamed.events[-1]["n_ctx"]) == (9, 256)
    saved = read(server, chat)
    assert (texts(saved), saved["system"], saved["is_answering"]) == (["Hello there"] * 2, "Be brief.", False)
    with store() as terminal:
        opened = terminal.open(saved["name"])
        assert isinstance(opened.last_answer, Answer)
        assert (opened.last_answer.content, opened.last_answer.stats.completion_tokens) == ("Hello there", 2)
        assert not opened.open_elsewhere, "between answers the terminal may go on with it"
    assert [each["name"] for each in server.get("/ui/chats").json["chats"]] == ["hello-there"]


def test_probabilities_cost_only_those_who_look_at_them(server: LiveServer) -> None:
    chat = ask(server)
    assert not [event for event in answer(server, chat).events if "tokens" in event]
    pieces = [event for event in answer(server, chat, candidates=2).events if "text" in event]
    assert [each["tokens"][0]["token"] for each in pieces] == ["Hello t", "here"]
    assert pieces[0]["tokens"][0]["top_logprobs"][1]["token"] == " other"


def test_a_branch_takes_another_token_and_goes_on(server: LiveServer) -> None:
    chat = ask(server)
    answer(server, chat)
    answer(server, chat, begins="Well, ")
    saved = read(server, chat)
    assert texts(saved) == ["Hello there", "Well, Hello there"], "the given beginning is part of the answer"
    first, second = saved["entries"][1]["alternatives"]
    back = server.post("/ui/go", {"chat": chat["id"], "entry": first}).json
    assert texts(back) == ["Hello there", "Hello there"]
    assert texts(server.post("/ui/go", {"chat": chat["id"], "entry": second}).json) == texts(saved)


def test_an_earlier_question_is_edited_or_answered_again_on_a_branch(server: LiveServer) -> None:
    chat = ask(server, "first")
    answer(server, chat)
    shown = read(server, chat)
    shown = ask(server, "second", chat=chat["id"], after=shown["entries"][-1]["id"])
    answer(server, shown)
    shown = read(server, chat)
    assert texts(shown) == ["first", "first", "second", "second"]
    question, end = shown["entries"][0]["id"], shown["entries"][-1]["id"]
    again = server.post("/ui/answer", {"chat": chat["id"], "question": question, "begins": "Again: "})
    assert again.status == 200
    assert texts(read(server, chat)) == ["first", "Again: first"]
    shown = server.post("/ui/go", {"chat": chat["id"], "entry": end}).json
    assert texts(shown) == ["first", "first", "second", "second"]
    edited = ask(server, "changed", chat=chat["id"], after=end, beside=question)
    assert texts(edited) == ["changed"]
    assert edited["entries"][0]["alternatives"] == [question, edited["entries"][0]["id"]]


def test_a_chat_has_the_title_of_its_edited_question_unless_it_was_renamed(server: LiveServer) -> None:
    chat = ask(server, "Count to *forty*, please")
    answer(server, chat)
    shown = read(server, chat)
    first, end = shown["entries"][0]["id"], shown["entries"][-1]["id"]
    edited = ask(server, "Count to *five*, please", chat=chat["id"], after=end, beside=first)
    listed = server.get("/ui/chats").json["chats"][0]
    assert edited["title"] == listed["title"] == "Count to *five*, please"
    server.post("/ui/rename", {"chat": chat["id"], "name": "Counting"})
    assert read(server, chat)["title"] == "Counting"


def test_undo_gives_the_question_back_and_its_branch_stays(server: LiveServer) -> None:
    chat = ask(server, "first")
    answer(server, chat)
    shown = ask(server, "second", chat=chat["id"], after=read(server, chat)["entries"][-1]["id"])
    answer(server, shown)
    end = read(server, chat)["entries"][-1]["id"]
    undone = server.post("/ui/undo", {"chat": chat["id"]}).json
    assert (texts(undone), undone["undone"]) == (["first", "first"], "second")
    assert server.get(f"/ui/chats/{chat['id']}/head").json == {
        "last": undone["entries"][-1]["id"],
        "is_answering": False,
    }
    here, other = server.get(f"/ui/chats/{chat['id']}/branches").json["branches"]
    assert (here["name"], here["current"], here["differs"]) == ("main", True, None)
    assert (other["name"], other["head"], other["turns"], other["differs"]) == ("", end, 2, [2, "second"])
    gone = server.post("/ui/go", {"chat": chat["id"], "branch": f"#{end}"}).json
    assert (texts(gone), gone["branch"]) == (["first", "first", "second", "second"], "main-2")
    assert texts(server.post("/ui/go", {"chat": chat["id"], "branch": "main"}).json) == ["first", "first"]
    assert texts(server.post("/ui/undo", {"chat": chat["id"]}).json) == []
    assert server.post("/ui/undo", {"chat": chat["id"]}).status == 400
    assert server.post("/ui/go", {"chat": chat["id"], "branch": "none"}).status == 400


def test_a_second_window_is_told(server: LiveServer) -> None:
    chat = ask(server)
    answer(server, chat)
    stale = server.post("/ui/ask", {"chat": chat["id"], "text": "more", "after": chat["entries"][-1]["id"]})
    assert (stale.status, "gone on in another window" in stale.json["error"]["message"]) == (400, True)


def test_a_chat_that_is_being_answered_is_not_changed(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "GRACE_SECONDS", 0.0)
    server = serve("obedient")
    chat = ask(server)
    body = json.dumps({"chat": chat["id"], "question": chat["entries"][0]["id"]}).encode()
    with server.connect() as connection:
        connection.sendall(server.request("POST", "/ui/answer", body))
        assert eventually(lambda: read(server, chat)["is_answering"], 60)
        refused = answer(server, chat)
        assert (refused.status, "being answered" in refused.json["error"]["message"]) == (400, True)
        assert server.post("/ui/system", {"chat": chat["id"], "system": "x"}).status == 400
    assert eventually(lambda: not read(server, chat)["is_answering"], 60), "the client has left"
    assert server.post("/ui/system", {"chat": chat["id"], "system": "x"}).json["system"] == "x"


def test_an_answer_goes_on_while_no_window_shows_it(serve: Serve) -> None:
    server = serve("obedient")
    chat = ask(server)
    body = json.dumps({"chat": chat["id"], "question": chat["entries"][0]["id"]}).encode()
    begun = []
    for request in (server.request("POST", "/ui/answer", body), server.request("GET", "/ui/answer/1", b"")):
        with server.connect() as connection:
            connection.sendall(request)
            data = b""
            while b'"Hel"' not in data:
                data += connection.recv(65536)
        begun.append(data)
        assert read(server, chat)["is_answering"]
    assert b"event: started" in begun[1], "from its beginning"
    assert [each for each in server.served if each.path == "/ui/answer"] == [], "it has no figures yet"
    assert server.post("/ui/stop", {"chat": chat["id"]}).status == 200
    assert eventually(lambda: not read(server, chat)["is_answering"], 60)
    last = read(server, chat)["entries"][-1]
    assert (last["text"], last["finish"]) == ("Hel", "cancelled")
    assert last["stats"]["completion_tokens"] == 1
    (logged,) = [each.facts for each in server.served if each.path == "/ui/answer"]
    assert (logged["prompt_tokens"], logged["completion_tokens"]) == (3, 1)
    assert logged["ttft_seconds"] == round(last["stats"]["ttft_seconds"], 4) > 0
    assert server.get("/ui/answer/1").status == 404
    assert server.post("/ui/stop", {"chat": chat["id"]}).status == 200


def test_two_answers_to_one_question_are_decoded_together(serve: Serve) -> None:
    server = serve("together")  # which answers nobody before two have asked
    chat = ask(server)
    question = chat["entries"][0]["id"]
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda seed: answer(server, chat, together=True, seed=seed), (1, 2)))
    assert [each.events[-1]["reason"] for each in both] == ["stop", "stop"]
    answers = server.get(f"/ui/chats/{chat['id']}/answers/{question}").json["answers"]
    assert [each["text"] for each in answers] == ["Hello", "Hello"]
    assert read(server, chat)["entries"][1]["alternatives"] == [each["id"] for each in answers]
    assert not read(server, chat)["is_answering"]


def test_what_came_before_a_stop_or_a_crash_is_saved(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "GRACE_SECONDS", 0.0)
    server = serve("die:decode:SIGSEGV", "obedient")
    chat = ask(server)
    failed = answer(server, chat)
    assert failed.events[-1]["code"] == "engine-crashed"
    last = read(server, chat)["entries"][-1]
    assert (last["text"], last["finish"]) == ("Hel", "interrupted")
    body = json.dumps({"chat": chat["id"], "question": chat["entries"][0]["id"]}).encode()
    with server.connect() as connection:
        connection.sendall(server.request("POST", "/ui/answer", body))
        data = b""
        while b'"Hel"' not in data:
            data += connection.recv(65536)
    assert eventually(lambda: read(server, chat)["entries"][-1]["finish"] == "cancelled", 60)
    assert read(server, chat)["entries"][-1]["text"] == "Hel"


def test_what_the_engine_refuses_leaves_the_question(serve: Serve) -> None:
    server = serve("failing")
    chat = ask(server)
    refused = answer(server, chat)
    assert (refused.status, refused.code) == (400, "context_length_exceeded")
    assert texts(read(server, chat)) == ["Hello there"]


HOLDER = """
import sys
from pathlib import Path
from llmrun.chat.store.store import Sessions
with Sessions(Path(sys.argv[1])) as store:
    chat = store.open(sys.argv[2])
    print("open", flush=True)
    sys.stdin.read()
"""


def test_a_chat_that_a_terminal_has_open_is_only_read(server: LiveServer) -> None:
    chat = ask(server)
    folder = folder_in(load_settings().state_dir)
    command = [sys.executable, "-c", HOLDER, str(folder), chat["name"]]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as terminal:
        assert terminal.stdout is not None
        assert terminal.stdout.readline() == "open\n"
        refused = answer(server, chat)
        assert (refused.status, "open in another llmrun" in refused.json["error"]["message"]) == (400, True)
        assert texts(read(server, chat)) == ["Hello there"]
        terminal.communicate("")
    assert answer(server, chat).status == 200


def test_export_is_that_of_the_terminal(server: LiveServer) -> None:
    chat = ask(server)
    answer(server, chat)
    exported = server.get(f"/ui/chats/{chat['id']}/markdown")
    assert exported.headers["content-disposition"] == f'attachment; filename="chat-{chat["id"]}.md"'
    assert "## You" in exported.body.decode()
    assert server.get(f"/ui/chats/{chat['id']}/json").json["format"] == "llmrun-chat"
    assert server.get(f"/ui/chats/{chat['id']}/exe").status == 404


def test_models_are_listed_and_loaded_with_their_sampling(serve: Serve) -> None:
    server = serve(n_ctx=256)
    model, *_ = server.get("/ui/models").json["models"]
    assert model["name"] == server.model
    loaded = server.post("/ui/load", {"model": model["name"]}).json
    assert (loaded["n_ctx"], loaded["sampling"]["temperature"]["origin"]) == (256, "default")
    assert server.get("/ui/models").json["models"][0]["n_ctx"] == 256
    assert server.post("/ui/load", {"model": "nobody/knows"}).status == 404
    for n_ctx in (1, 255):
        assert server.post("/ui/load", {"model": model["name"], "ctx": n_ctx}).status == 400
    assert server.post("/ui/load", {"model": model["name"], "ctx": 0}).json["n_ctx"] == 256


def test_the_sampling_of_a_preset_is_shown_with_its_origin(serve: Serve) -> None:
    server = serve(defaults=lambda model: layer("preset", {"temperature": 0.25}), n_ctx=256)
    shown = server.post("/ui/load", {"model": server.model}).json["sampling"]
    assert shown["temperature"] == {"value": 0.25, "origin": "preset"}
    assert shown["top_k"]["origin"] == "default"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/ui/ask", {"text": "  "}),
        ("/ui/ask", {"text": "x", "chat": 99}),
        ("/ui/answer", {"chat": 1}),
        ("/ui/answer", {"chat": 99, "question": 1}),
        ("/ui/answer", {"chat": 1, "question": 1, "temperature": "hot"}),
        ("/ui/go", {"chat": 1, "entry": 1e9}),
    ],
)
def test_what_is_wrong_is_said(server: LiveServer, path: str, body: dict[str, Any]) -> None:
    ask(server)
    refused = server.post(path, body)
    assert (refused.status, bool(refused.json["error"]["message"])) == (400, True)


# ---- who may ask


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_pages_of_other_ports_read_no_chat(server: LiveServer, site: str) -> None:
    assert server.get("/ui/chats", sec_fetch_site=site).status == 403
    assert server.post("/ui/ask", {"text": "x"}, sec_fetch_site=site).status == 403
    assert server.get("/ui/chats", sec_fetch_site="same-origin").status == 200
    assert server.get("/ui/chats", origin="http://evil.example").status == 403


@pytest.mark.parametrize("origin", ["https://evil.example", "http://127.0.0.1:1", "null", "app://"])
def test_origins_that_may_use_models_read_no_chat(serve: Serve, origin: str) -> None:
    server = serve(policy=Policy(origins=frozenset({"*"})))
    assert server.get("/v1/models", origin=origin).status == 200
    assert server.get("/ui/chats", origin=origin).status == 403
    assert server.post("/ui/ask", {"text": "x"}, origin=origin).status == 403
    assert server.get("/ui/chats", host="localhost", origin="http://localhost").status == 200


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="only Linux has the table of sockets")
def test_other_users_of_this_machine_read_no_chat(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert server.get("/ui/chats").status == 200
    monkeypatch.setattr(requests.os, "getuid", lambda: 4_000_000)  # the server's user, and the client is another one
    assert server.get("/ui/chats").status == 403
    assert server.post("/ui/ask", {"text": "x"}).status == 403
    assert server.get("/", **BROWSER).status == 200


def test_other_machines_and_unknown_connections_are_not_this_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert not requests.is_same_user(("192.0.2.1", 4000), ("192.0.2.2", 80))
    row = "   0: 0100007F:0FA0 0100007F:1F90 {} 0:0 0:0 0 {} 0 1"
    table = tmp_path / "tcp"
    monkeypatch.setattr(requests, "_TABLES", (table,))
    ends = ("127.0.0.1", 4000), ("127.0.0.1", 8080)
    assert requests.is_same_user(*ends), "the system has no tables"
    own = os.getuid()
    for rows, expected in (
        ([], False),
        ([("01", own)], True),
        ([("01", own + 1)], False),
        ([("06", own + 1), ("01", own)], True),
        ([("01", own + 1), ("01", own)], False),
    ):
        table.write_text("\n".join(["header", *(row.format(*each) for each in rows)]), encoding="ascii")
        assert requests.is_same_user(*ends) is expected, rows
    assert not requests.is_same_user(("127.0.0.1", 4001), ends[1])
    assert not requests.is_same_user(("::1", 4000), ends[1])


def test_with_a_key_only_the_files_of_the_page_are_open(serve: Serve) -> None:
    server = serve(policy=Policy(keys=(b"0123456789abcdef",)))
    key = "Bearer 0123456789abcdef"
    asked = server.post("/ui/ask", {"text": "a secret"}, authorization=key).json
    assert asked["entries"][0]["text"] == "a secret"
    paths = [re.sub(r"\{\w+:?\w*\}", "1", path) for path in server.page_paths]
    assert "/ui/chats/1" in paths
    for path in (*paths, "/ui/", "/ui/filesx", "/ui/explained", "/ui//files/page.js", "//ui/chats"):
        if path not in ("/", "/ui/files/1", "/ui/explained/1"):
            assert server.get(path, **BROWSER).status == 401, path
            assert server.post(path, {}).status == 401, path
    assert b"a secret" in server.get("/ui/chats/1", authorization=key).body
    for path in ("/", "/health", *(f"/ui/files/{name}" for name in MEDIA_TYPES)):
        found = server.once_loaded().get(path, **BROWSER)
        assert found.status == 200
        assert path.endswith("temml.js") or not re.search(rb"a secret|tiny", found.body), path
    for path in ("/ui/files/../chats", "/ui/files/%2e%2e/chats", "/ui/explained/../chats", "/ui/explained/..%2fchats"):
        refused = server.get(path)
        assert refused.status in (401, 404), path
        assert b"a secret" not in refused.body
    assert server.get("/ui/explained/x").status == 404
    assert server.get("/ui/chats", host="evil.example").status == 403


def test_a_page_that_nobody_opens_opens_no_store(server: LiveServer) -> None:
    assert server.get("/").status == server.get("/ui/models").status == 200
    assert not folder_in(load_settings().state_dir).exists()
