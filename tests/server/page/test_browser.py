"""The page in a real browser, over fake engines: streaming, keys alone, files, a narrow window, a key."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from support.chromium import Chromium
from support.page import ACTIVE, IDLE, LAST, Page
from support.served import LiveServer
from support.tiny_projector import png, tone, wav

from llmrun.chat.passages import FolderIndex
from llmrun.chat.store.store import Sessions, folder_in
from llmrun.chat.store.turns import Answer, Question
from llmrun.config import load_settings
from llmrun.errors import NetworkError
from llmrun.models.fingerprint import ModelFingerprint
from llmrun.models.hub import Match
from llmrun.server.guard import Policy
from llmrun.server.page import catalogue

pytestmark = pytest.mark.usefixtures("package_on_path")
RING = 3  # pixels around what has the focus, which must not be cut off


def test_an_answer_streams_as_markdown(browser: Chromium, serve: Callable[..., LiveServer]) -> None:
    page = Page(browser, serve())
    page.ask("Some *words*.\n\n```python\nx = 1\n```\n\n| | b |\n| - | -: |\n| 1 | 2 |\n\n[web](https://example.org)")
    assert page.see(f"{LAST}.querySelector('em').textContent") == "words"
    assert page.see(f"{LAST}.querySelector('pre code').textContent") == "x = 1\n"
    assert page.see(f"{LAST}.querySelector('td.align-right').textContent") == "2"
    assert page.see(f"[...{LAST}.querySelectorAll('th')].map(each => each.textContent)") == ["b"], "no heading is empty"
    assert page.see(f"{LAST}.querySelector('a').rel") == "noopener noreferrer nofollow"
    assert "tokens/s" in page.see("document.querySelector('.answer .figures').textContent")
    assert page.see("document.querySelector('#context-text').textContent") == "context 9 of 256"
    page.check()


def test_a_growing_answer_is_drawn_seldom_and_only_where_it_changes(
    browser: Chromium, serve: Callable[..., LiveServer]
) -> None:
    page = Page(browser, serve())
    grow = """(async () => {
        const { LiveMarkdown } = await import("/ui/files/markdown.js");
        let drawn = 0;
        const text = new LiveMarkdown(document.createElement("div"), () => drawn += 1);
        text.add("A *first* one.\\n\\n```\\ncode\\n```\\n\\n| a |\\n| - |\\n| b |\\n\\n");
        text.draw();
        drawn = 0;
        const before = [...text.element.children], began = performance.now();
        for (let at = 0; at < 100; at += 1) {
            text.add(`word${at} `);
            await new Promise((done) => setTimeout(done, 5));
        }
        text.draw();
        const isKept = before.length === 3 && before.every((each, at) => text.element.children[at] === each);
        const rate = drawn / (performance.now() - began);
        return [isKept, rate, text.element.lastElementChild.textContent.endsWith("word99")];
    })()"""
    found = browser.ask("Runtime.evaluate", expression=grow, returnByValue=True, awaitPromise=True)
    is_kept, draws_per_ms, is_whole = found["result"]["value"]
    assert (is_kept, is_whole) == (True, True)
    assert draws_per_ms < 16 / 1000, "about ten times a second"
    page.check()


PIECES = """Some *words*
in two lines with `code` and a [link].

# A heading
- one

- two
  1. three

     a paragraph of it
* another list

```python
def f():

    return "- x"
```
| a | b |
| - | -: |
| 1 | 2 |
> a quote
still in it

    indented

    code
underlined
---
***
The end"""


def test_only_the_last_block_of_a_growing_answer_is_drawn_and_nothing_else_changes(
    browser: Chromium, serve: Callable[..., LiveServer]
) -> None:
    page = Page(browser, serve())
    grow = f"""(async () => {{
        const {{ LiveMarkdown, render }} = await import("/ui/files/markdown.js");
        const live = new LiveMarkdown(document.createElement("div")), whole = document.createElement("div");
        const different = [];
        for (const each of {json.dumps(PIECES)}) {{
            live.add(each);
            live.draw();
            render(whole, live.text);
            if (live.element.innerHTML.trim() !== whole.innerHTML.trim()) different.push(live.text);
        }}
        const first = live.element.firstElementChild;
        first.textContent = "drawn before";
        live.add(" of it");
        live.draw();
        const kept = first.textContent;
        live.add("\\n\\n[link]: https://example.org");
        live.end();
        const links = live.element.querySelectorAll("a").length;
        live.clear();
        return [different, kept, links, live.element.childNodes.length];
    }})()"""
    found = browser.ask("Runtime.evaluate", expression=grow, returnByValue=True, awaitPromise=True)
    assert found["result"]["value"] == [[], "drawn before", 2, 0], "the definition shows its address too"
    page.check()


def test_formulas_are_drawn(browser: Chromium, serve: Callable[..., LiveServer]) -> None:
    page = Page(browser, serve())
    page.ask("No formula costs $5 or $6")
    assert not [address for address in browser.requests if "temml" in address], "it is loaded for formulas only"
    page.ask(
        r"Let $a_1*b*c_2$ cost $5 or $6, \(x_i\) and"
        + "\n$$\n\\int_0^1 x\n- y_1 * z_1\n$$\n"
        + r"\[ \mathbf{v} = \begin{cases} e^{i\pi} & x \\ 0 \end{cases} \]"
        + "\nend *it* and $\\nonsense{$"
    )
    page.until(f"{LAST}.querySelectorAll('math').length === 4")
    titles = page.see(f"[...{LAST}.querySelectorAll('math')].map(each => each.getAttribute('title'))")
    assert titles[:3] == ["a_1*b*c_2", "x_i", "\\int_0^1 x\n- y_1 * z_1"]
    assert page.see(f"{LAST}.querySelectorAll('math[display=block]').length") == 2
    assert page.see(f"{LAST}.querySelector('code').textContent") == "\\nonsense{"
    assert page.see(f"[...{LAST}.querySelectorAll('em')].map(each => each.textContent)") == ["it"]
    assert "cost $5 or $6" in page.see(f"{LAST}.textContent")
    page.ask("$" + "x+" * 300 + "1$")
    page.until(f"{LAST}.querySelector('math')")
    assert page.see("(each => each.scrollWidth - each.clientWidth)(document.querySelector('#scroller'))") == 0
    page.check()


def test_code_has_its_language_and_colours(browser: Chromium, serve: Callable[..., LiveServer]) -> None:
    page = Page(browser, serve())
    code = {
        "python": 'def f(x):\n    return "<b>" + x  # why',
        "bash": 'for f in *.txt; do\n  echo "$f" | wc -l  # count\ndone',
        "sql": "select name, count(*) from users where age > 3 -- all",
        "html": '<a href="x">&amp;</a>',
        "json": '{"a": [1, true, "x"]}',
        "constructor": "__proto__ toString",
    }
    page.ask("\n\n".join(f"```{name}\n{text}\n```" for name, text in code.items()))
    shown = page.see(f"[...{LAST}.querySelectorAll('pre code')].map(each => each.textContent.trimEnd())")
    assert shown == list(code.values())
    assert page.see(f"[...{LAST}.querySelectorAll('.code-head span')].map(each => each.textContent)") == list(code)
    kinds = page.see(f"[...{LAST}.querySelectorAll('pre')].map(each => each.querySelectorAll('span').length)")
    assert all(kinds[:-1])
    assert kinds[-1] == 0
    assert page.see(f"{LAST}.querySelector('.code-comment').textContent") == "# why"
    page.check()


def test_chats_are_named_searched_renamed_and_deleted(browser: Chromium, serve: Callable[..., LiveServer]) -> None:
    page = Page(browser, serve())
    row = "document.querySelector('#chat-list li')"
    page.ask("What is the difference between <b>bread</b> and a cake that was baked for too long?")
    page.until(f"{row}?.querySelector('.open')")
    title = "What is the difference between <b>bread</b> and a cake that…"
    assert page.see(f"{row}.querySelector('.open').textContent") == page.see("title.textContent") == title
    assert page.see("document.querySelector('#chat-list h2').textContent") == "Today"
    page.see("document.querySelector('#new').click()")
    page.ask("Something else")
    page.see("document.querySelector('#search').focus()")
    page.write("cake")
    page.until(f"{row}.querySelector('.hint')?.textContent.includes('cake')")
    page.key("Escape")
    page.until("document.querySelectorAll('#chat-list li').length === 2")
    page.see(f"{row}.querySelector('[title=Rename]').click()")
    page.write("Bakery")
    page.key("Enter")
    page.until("title.textContent === 'Bakery'")
    page.see(f"{row}.querySelector('[title=Delete]').click()")
    assert "Bakery" in page.see(f"{row}.textContent")
    page.key("Escape")
    assert page.see(f"{row}.querySelector('.open').textContent") == "Bakery", "it takes the question back"
    assert page.see(f"{ACTIVE}.textContent") == "Bakery"
    page.see(f"{row}.querySelector('[title=Delete]').click()")
    page.see(f"{row}.querySelector('.bad').click()")
    page.until("document.querySelectorAll('#chat-list li').length === 1 && title.textContent === 'New chat'")
    assert [each["title"] for each in page.server.get("/ui/chats").json["chats"]] == [title]
    page.check()


class Pulling:
    """Stands in for a download, which ends when `goes_on` is set."""

    goes_on = threading.Event()

    def __init__(self, name: str, settings: object) -> None:
        self._name = name

    async def lines(self) -> AsyncIterator[dict[str, Any]]:
        if self._name != "smollm2":
            raise NetworkError("the hub can't be reached")
        yield {"status": "pulling manifest"}
        yield {"status": "pulling smollm2", "total": 98_362_432, "completed": 49_181_216}
        await asyncio.to_thread(self.goes_on.wait)
        yield {"status": "success"}


def test_models_of_the_catalogue_are_downloaded(
    browser: Chromium, serve: Callable[..., LiveServer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(catalogue, "PullJob", Pulling)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    Pulling.goes_on.clear()
    page = Page(browser, serve())
    page.see("document.querySelector('#model').click()")
    row = "[...document.querySelectorAll('.catalogue li')].find(each => each.querySelector('b').textContent === '%s')"
    page.until(row % "smollm2")
    assert page.see("document.querySelector('#model').value") == "tiny"
    titles = page.see(
        "[...document.querySelectorAll('#catalogue section h3')].map(each => each.firstChild.textContent)"
    )
    assert titles[:2] == ["On this disk", "Recommended for this machine"]
    facts = page.see(f"({row % 'smollm2'}).textContent")
    assert "135M · Q4_1 · 98.4 MB" in facts
    assert "MB memory" in facts
    assert "Apache-2.0" in facts
    page.see(f"({row % 'smollm2'}).querySelector('button').click()")
    page.until(f"({row % 'smollm2'}).textContent.includes('49.2 MB of 98.4 MB')")
    page.key("Escape")
    page.until("document.querySelector('#downloads').textContent === 'Downloading smollm2, 50 %'")
    browser.ask("Page.reload")
    page.until("document.querySelector('#downloads')?.textContent === 'Downloading smollm2, 50 %'")
    Pulling.goes_on.set()
    page.until("document.querySelector('#downloads').hidden")
    page.see("document.querySelector('#model').click()")
    page.until(f"({row % 'smollm2'})?.querySelector('button')?.textContent === 'Use'")
    page.see(f"({row % 'qwen3-8b'}).querySelector('button').click()")
    page.until(f"({row % 'qwen3-8b'}).textContent.includes('the hub can')")
    assert page.see(f"({row % 'qwen3-8b'}).querySelector('button').textContent") == "Download"
    page.see("document.querySelector('#catalogue input').focus()")
    page.write("qwen3-8")
    assert page.see("document.querySelectorAll('.catalogue li').length") == 1
    page.key("Escape")
    assert page.server.post("/ui/download", {"model": "../etc"}).status == 400
    page.check()


def test_repositories_of_the_hub_are_found_and_a_download_is_stopped(
    browser: Chromium, serve: Callable[..., LiveServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def search(words: list[str], settings: object, limit: int) -> list[Match]:
        asked.append((words, limit))
        return [Match("somebody/Small-GGUF", 12_345, 6, "2026-10-01", gated=True)]

    class Endless:
        def __init__(self, name: str, settings: object) -> None:
            assert name == "somebody/Small-GGUF"

        async def lines(self) -> AsyncIterator[dict[str, Any]]:
            yield {"status": "pulling", "total": 100, "completed": 25}
            await asyncio.Event().wait()

    monkeypatch.setattr(catalogue.hub, "search", search)
    monkeypatch.setattr(catalogue, "PullJob", Endless)
    page = Page(browser, serve())
    page.see("document.querySelector('#model').click()")
    page.until("document.querySelector('#catalogue').open")
    page.write("small gguf")
    page.key("Enter")
    row = "document.querySelector('section[aria-label=\"On the hub\"] li')"
    page.until(row)
    assert asked == [(["small", "gguf"], 20)]
    assert "12,345 downloads · changed 2026-10-01 · terms to accept on the hub" in page.see(f"{row}.textContent")
    page.see(f"{row}.querySelector('button').click()")
    page.until(f"{row}.querySelector('progress')?.value === 0.25")
    page.see(f"{row}.querySelector('button').click()")
    page.until(
        f"{row}.querySelector('button').textContent === 'Download' && document.querySelector('#downloads').hidden"
    )
    assert page.server.get("/ui/models").json["downloads"] == []
    page.check()


def test_the_arrow_up_brings_the_last_question(browser: Chromium, serve: Callable[..., LiveServer]) -> None:
    page = Page(browser, serve())
    page.ask("Once")
    page.key("ArrowUp")
    assert page.see("document.querySelector('#question').value") == "Once"
    page.write(" more")
    page.key("Enter")
    page.until(f"document.querySelectorAll('.answer').length === 2 && {IDLE}")
    assert page.see(f"{LAST}.textContent").strip() == "Once more"
    page.check()


def test_days_of_chats(browser: Chromium, serve: Callable[..., LiveServer]) -> None:
    Page(browser, serve())
    days = """(async () => {
        const { dayOf } = await import("/ui/files/chats.js");
        const now = new Date(2026, 10, 26, 0, 30);
        const at = (...when) => dayOf(new Date(...when) / 1000, now);
        return [at(2026, 10, 26), at(2026, 10, 25, 23, 59), at(2026, 10, 23, 5), at(2026, 9, 2), at(2025, 9, 2)];
    })()"""
    found = browser.ask("Runtime.evaluate", expression=days, returnByValue=True, awaitPromise=True)
    assert found["result"]["value"] == ["Today", "Yesterday", "Monday", "October", "October 2025"]


def test_a_chat_of_the_terminal_is_shown_and_survives_a_reload(
    browser: Chromium, serve: Callable[..., LiveServer]
) -> None:
    server = serve()
    with Sessions(folder_in(load_settings().state_dir)) as store:
        chat = store.new("from-a-terminal")
        chat.add_question(Question("Hi"))
        chat.add_answer(Answer("**Hello**", "Let me think.", model=ModelFingerprint("tiny")))
        chat.release()
    page = Page(browser, server, path="/#chat=1")
    assert page.see("document.querySelector('#title').textContent") == "from-a-terminal"
    assert page.see(f"{LAST}.querySelector('strong').textContent") == "Hello"
    assert page.see("document.querySelector('details.reasoning').open") is False
    page.ask("And now?")
    page.browser.ask("Page.reload")
    page.until(f"{IDLE} && document.querySelectorAll('article').length === 4")
    page.check()


def test_undo_and_branches_by_keys_and_by_mouse(browser: Chromium, serve: Callable[..., LiveServer]) -> None:
    page = Page(browser, serve())
    page.ask("first")
    page.ask("second")
    page.key("u", alt=True)
    page.until("document.querySelectorAll('article').length === 2")
    assert page.see("document.querySelector('#question').value") == "second"
    page.see("document.querySelector('#undo').click()")
    page.until("document.querySelectorAll('article').length === 0")
    assert page.see("document.querySelector('#undo').disabled")
    page.key("b", alt=True)
    page.until("document.querySelector('#branches').open")
    assert page.see("document.querySelector('#branches button:disabled').textContent") == "main"
    assert "differs in turn 1: first" in page.see("document.querySelector('#branches').textContent")
    page.see("document.querySelector('#branches li button:not(:disabled)').focus()")
    page.key("Enter")
    page.until("document.querySelectorAll('article').length === 4")
    page.see("document.querySelector('#go').click()")
    page.until("document.querySelector('#branches').open")
    page.key("Escape")
    page.until("!document.querySelector('#branches').open")
    page.check()


def test_files_are_dropped_and_chosen(browser: Chromium, serve: Callable[..., LiveServer], tmp_path: Path) -> None:
    page = Page(browser, serve())
    (tmp_path / "notes.txt").write_text("from a file")
    (tmp_path / "red.png").write_bytes(png(8, 8))
    (tmp_path / "dump.bin").write_bytes(bytes(range(256)))
    (tmp_path / "low.wav").write_bytes(wav(tone(0.2)))
    (tmp_path / "talk.ogg").write_bytes(b"OggS")
    dropped = {
        "items": [],
        "files": [str(tmp_path / name) for name in ("red.png", "dump.bin")],
        "dragOperationsMask": 1,
    }
    for kind in ("dragEnter", "dragOver", "drop"):
        browser.ask("Input.dispatchDragEvent", type=kind, x=600, y=300, data=dropped)
    page.until("document.querySelector('#problem').textContent.includes('is binary, not text')")
    browser.errors.clear()  # the server's refusal
    assert "red.png, 1 kB" in page.see("document.querySelector('#attached').textContent")
    page.until("document.querySelector('#attached img')?.naturalWidth === 8")
    dropped["files"] = [str(tmp_path / name) for name in ("low.wav", "talk.ogg")]
    for kind in ("dragEnter", "dragOver", "drop"):
        browser.ask("Input.dispatchDragEvent", type=kind, x=600, y=300, data=dropped)
    page.until("document.querySelector('#problem').textContent.includes('only WAV, MP3 and FLAC audio can')")
    assert "low.wav, 7 kB" in page.see("document.querySelector('#attached').textContent")
    page.see("document.querySelector('#attach').focus()")
    browser.ask("Page.setInterceptFileChooserDialog", enabled=True)
    page.key("Space")
    chosen = browser.until_event("Page.fileChooserOpened")
    browser.ask("DOM.setFileInputFiles", files=[str(tmp_path / "notes.txt")], backendNodeId=chosen["backendNodeId"])
    browser.ask("Page.setInterceptFileChooserDialog", enabled=False)
    page.until("document.querySelectorAll('#attached button').length === 3")
    page.ask("What is it?")
    page.until("document.querySelector('#problem').textContent.includes('read images: red.png is left out')")
    shown = page.see(f"{LAST}.textContent")
    assert "The image red.png can't be read." in shown
    page.until("document.querySelector('.question img[alt=\"red.png\"]')?.naturalWidth === 8")
    (stored,) = folder_in(load_settings().state_dir).rglob("red.png")
    stored.write_bytes(png(9, 9))
    assert page.server.get("/ui/chats/1/media/1/0").status == 400, "another file than the one that was sent"
    page.browser.ask("Page.reload")
    page.until("document.querySelector('.question')?.textContent.includes('red.png (not there any more)')")
    browser.errors.clear()  # the server's refusal
    assert "The audio low.wav can't be read." in shown
    assert "from a file" in shown
    assert page.see("document.querySelector('.question').textContent.includes('Attached: red.png')")
    assert "from a file" in page.see("document.querySelector('.question details pre').textContent")
    assert page.see("document.querySelector('#attached').children.length") == 0
    dropped["files"] = [str(tmp_path / "low.wav")]
    for kind in ("dragEnter", "dragOver", "drop"):
        browser.ask("Input.dispatchDragEvent", type=kind, x=600, y=300, data=dropped)
    page.until("document.querySelector('#attached').textContent.includes(\"can't read audio: it gets a line\")")
    page.check()


def test_passages_stand_below_their_question(
    browser: Chromium, serve: Callable[..., LiveServer], tmp_path: Path
) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/tea.md").write_text("# Kitchen\nTea is <b>here</b>.\n")
    index = FolderIndex(tmp_path / "notes", tmp_path / "index")
    index.refresh()
    page = Page(browser, serve(index=index))
    page.ask("Where is the tea?")
    shown = "document.querySelector('.question .passages')"
    assert page.see(f"{shown}.querySelector('summary').textContent") == "1 passage of 1 file"
    words = page.see(f"{shown}.querySelector('li summary').textContent")
    assert words == "tea.md, lines 1-2 · Kitchen", "a score of 0.00 says nothing"
    assert page.see(f"{shown}.querySelector('pre').textContent") == "# Kitchen\nTea is <b>here</b>."
    assert page.see("document.querySelector('.question .text').textContent") == "Where is the tea?"
    page.check()


def test_the_empty_chat_names_the_model_and_has_examples(browser: Chromium, serve: Callable[..., LiveServer]) -> None:
    page = Page(browser, serve())
    assert page.see("document.querySelector('.empty h2').textContent") == "Ask tiny"
    assert "kB · " in page.see("document.querySelector('.empty').textContent")
    page.see("document.querySelector('.example').click()")
    assert "rainbow" in page.see("document.querySelector('#question').value")
    assert page.see(f"{ACTIVE}.id") == "question"
    page.key("Enter")
    page.until(f"{IDLE} && document.querySelector('.answer .figures')")
    assert page.see("document.querySelector('.answer .author').textContent") == "tiny", "as the header has it"
    page.check()


def test_the_empty_chat_says_that_none_can_be_saved(
    browser: Chromium, serve: Callable[..., LiveServer], tmp_path: Path
) -> None:
    server = serve()
    folder = folder_in(load_settings().state_dir)
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.write_bytes(b"")  # a file where the folder should be
    assert server.get("/ui/chats").status == 507
    page = Page(browser, server)
    assert page.see("document.querySelector('.empty').textContent").startswith("No chat can be saved or shown: can't ")
    folder.unlink()
    page.browser.ask("Page.reload")
    page.until(f"{IDLE} && document.querySelector('.empty')?.textContent.startsWith('Ask tiny')")


def test_a_question_without_a_model_stays_and_the_models_are_shown(
    browser: Chromium, serve: Callable[..., LiveServer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "none"))
    page = Page(browser, serve(names=()))
    page.write_question("Hello?")
    page.until("document.querySelector('#catalogue').open")
    page.key("Escape")
    assert page.see("document.querySelector('#question').value") == "Hello?"
    assert page.see("document.querySelector('#problem').textContent") == ""
    assert page.server.get("/ui/chats").json["chats"] == []
    page.check()


def test_another_chat_stays_open_though_a_question_is_saved_meanwhile(
    browser: Chromium, serve: Callable[..., LiveServer]
) -> None:
    page = Page(browser, serve())
    page.see("""{
        const { fetch } = window;
        window.fetch = async (path, ...rest) => {
            if (path === "/ui/ask") await new Promise((done) => (window.goOn = done));
            return fetch(path, ...rest);
        };
    }""")
    page.write_question("Slow")
    page.until("window.goOn")
    page.see("document.querySelector('#new').click()")
    page.see("goOn()")
    page.until("document.querySelector('[data-chat=\"1\"]')")
    page.until(f"{IDLE} && document.querySelector('[data-chat=\"1\"]').ariaBusy !== 'true'")
    assert page.see("document.querySelectorAll('article').length") == 0
    page.see("document.querySelector('[data-chat=\"1\"]').click()")
    page.until(f"{LAST}?.textContent.trim() === 'Slow'")
    page.check()


def test_a_server_that_is_back_is_noticed(browser: Chromium, serve: Callable[..., LiveServer], tmp_path: Path) -> None:
    server = serve()
    page = Page(browser, server)
    page.ask("Hi")
    server.end()
    server.wait()
    page.write_question("Are you there?")
    page.until("document.querySelector('#problem').textContent.includes('be reached')")
    with LiveServer(tmp_path, ("echo",), port=server.port, n_ctx=2_000_000):
        page.until("!document.querySelector('#problem').textContent")
        assert page.see("document.querySelector('#question').value") == "Are you there?"
        page.key("Enter")
        page.until(f"{IDLE} && {LAST}.textContent.trim() === 'Are you there?'")


def test_each_paragraph_has_its_own_direction(browser: Chromium, serve: Callable[..., LiveServer]) -> None:
    page = Page(browser, serve())
    page.ask("English first\n\nשלום\n\n- one\n- שלום")
    starts = page.see(f"""[...{LAST}.querySelectorAll('p, li')].map(each => {{
        const range = document.createRange();
        range.selectNodeContents(each);
        const [text, box] = [range, each].map(one => one.getBoundingClientRect());
        return text.left - box.left < box.right - text.right ? 'left' : 'right';
    }})""")
    assert starts == ["left", "right", "left", "right"]
    page.check()


def test_figures_can_be_switched_off_and_stay_so(browser: Chromium, serve: Callable[..., LiveServer]) -> None:
    page = Page(browser, serve())
    page.ask("Hi")
    shown = "getComputedStyle(document.querySelector('.answer .figures .numbers')).display"
    page.until("document.querySelector('.answer .figures .numbers')")
    assert page.see(shown) == "inline"
    page.see("document.querySelector('#show-figures').click()")
    assert page.see(shown) == "none"
    page.browser.ask("Page.reload")
    page.until(f"{IDLE} && document.querySelector('.answer .figures .numbers')")
    assert (page.see(shown), page.see("document.querySelector('#show-figures').checked")) == ("none", False)
    page.see("document.querySelector('#show-figures').click()")
    assert page.see(shown) == "inline"
    page.check()


def test_the_key_is_asked_for_once_and_kept_in_the_tab(browser: Chromium, serve: Callable[..., LiveServer]) -> None:
    server = serve("echo", policy=Policy(keys=(b"0123456789abcdef",)))
    page = Page(browser, server, until="document.querySelector('#key')?.open")
    page.write("wrong key")
    page.key("Enter")
    page.until("document.querySelector('#key').open && !document.querySelector('#key-input').value")
    assert "The server refused that key." in page.see("document.querySelector('#key').textContent")
    page.write("0123456789abcdef")
    page.key("Enter")
    page.until(IDLE)
    page.ask("Hello")
    browser.ask("Page.setDownloadBehavior", behavior="deny")
    browser.ask("Page.reload")
    page.until(f"{IDLE} && document.querySelectorAll('article').length === 2")
    assert page.see("Object.values(localStorage).join().includes('0123')") is False
    assert page.see("document.querySelector('#key').open") is False
    page.see("sessionStorage.clear()")


def test_a_chat_that_goes_on_elsewhere_is_said(browser: Chromium, serve: Callable[..., LiveServer]) -> None:
    page = Page(browser, serve())
    page.ask("first")
    with Sessions(folder_in(load_settings().state_dir)) as store:
        chat = store.open("1")
        chat.add_question(Question("From the terminal"))
        chat.add_answer(Answer("Hello", model=ModelFingerprint("tiny")))
        chat.release()
    page.until("document.querySelector('#elsewhere').textContent.includes('gone on in another window')")
    page.tab_to("Show it as it is now")
    page.key("Enter")
    page.until("document.querySelectorAll('article').length === 4 && !document.querySelector('#elsewhere').textContent")
    page.check()


def test_escape_stops_an_answer_and_what_came_stays(browser: Chromium, serve: Callable[..., LiveServer]) -> None:
    page = Page(browser, serve("obedient"))
    page.write("Go on for ever")
    page.key("Enter")
    page.until(f"!document.querySelector('#stop').hidden && {LAST}?.textContent.includes('Hel')")
    assert page.see("document.documentElement.scrollHeight") == page.see("innerHeight"), "only the conversation scrolls"
    shown = "[...document.querySelectorAll('%s')].filter(e => e.checkVisibility({ visibilityProperty: true }))"
    assert page.see(f"{shown % 'article button'}.length") == 0, "what can't be done now is not offered"
    assert page.see("document.querySelectorAll(':is(#undo, #go, #new, #chats .open):disabled').length") == 2
    page.key("Escape")
    page.until(f"{IDLE} && document.querySelector('.answer .figures')")
    assert "stopped" in page.see("document.querySelector('.answer .figures').textContent")
    assert page.see("document.querySelectorAll('button:disabled').length") == 0
    names = page.see(f"{shown % 'article button'}.map(each => each.textContent)")
    assert names == ["Edit", "Copy", "Retry", "Continue", "Explain"]
    page.check()


def test_another_chat_is_read_while_an_answer_runs(browser: Chromium, serve: Callable[..., LiveServer]) -> None:
    server = serve("obedient")
    with Sessions(folder_in(load_settings().state_dir)) as store:
        chat = store.new("another")
        chat.add_question(Question("Hi"))
        chat.add_answer(Answer("Hello", model=ModelFingerprint("tiny")))
        chat.release()
    page = Page(browser, server)
    page.write("Go on for ever")
    page.key("Enter")
    page.until(f"!document.querySelector('#stop').hidden && {LAST}?.textContent.includes('Hel')")
    page.see("document.querySelector('#new').click()")
    page.until(f"{IDLE} && !document.querySelector('article')")
    page.see("document.querySelector('[data-chat=\"1\"]').click()")
    page.until(f"title.textContent === 'another' && {LAST}?.textContent.trim() === 'Hello' && {IDLE}")
    page.until("document.querySelector('[data-chat=\"2\"]').ariaBusy === 'true'")
    assert page.see("document.querySelectorAll('#chats [aria-busy=true]').length") == 1
    page.key("Escape")
    assert server.get("/ui/chats/2").json["is_answering"], "what another chat shows is not stopped"
    page.see("document.querySelector('[data-chat=\"2\"]').click()")
    page.until(f"title.textContent === 'Go on for ever' && {LAST}?.textContent.includes('Hel')")
    assert page.see("document.querySelectorAll('.answer').length") == 1
    page.key("Escape")
    page.until(f"{IDLE} && document.querySelector('.answer .figures')?.textContent.includes('stopped')")
    page.check()


def test_a_question_waits_for_the_end_of_the_answer(browser: Chromium, serve: Callable[..., LiveServer]) -> None:
    page = Page(browser, serve("together"))  # which answers when two ask
    page.write("first")
    page.key("Enter")
    page.until("!document.querySelector('#stop').hidden")
    for text in ("second", "third"):
        page.write_question(text)
        page.until(f"document.querySelector('#queued').textContent.includes('{text}')")
    assert page.see("document.querySelector('#question').value") == ""
    page.see("[...document.querySelectorAll('#queued button')].at(-1).click()")
    assert page.see("document.querySelector('#question').value") == "third", "it can be taken back"
    page.see("document.querySelector('#new').click()")
    page.write_question("")
    page.until(f"title.textContent === 'third' && {LAST}?.textContent.includes('Hello') && {IDLE}")
    page.see("document.querySelector('[data-chat=\"1\"]').click()")
    page.until("title.textContent === 'first' && document.querySelectorAll('.question').length === 2")
    assert page.see("[...document.querySelectorAll('.question .text')].at(-1).textContent") == "second"
    page.see("document.querySelector('[data-chat=\"2\"]').click()")
    page.until(f"title.textContent === 'third' && {IDLE}")
    page.write_question("more")
    page.until(
        "!document.querySelector('#chats [aria-busy=true]') && document.querySelectorAll('.answer').length === 2"
    )
    page.check()


def test_a_file_is_shown_while_it_is_read_and_its_question_waits(
    browser: Chromium, serve: Callable[..., LiveServer]
) -> None:
    page = Page(browser, serve())
    page.see("""(async () => {
        const { Attachments } = await import("/ui/files/attachments.js");
        const files = new Attachments(document.createElement("ul"), () => null, () => {});
        let done = null;
        const slow = new File(["slow text"], "slow.txt");
        slow.text = () => new Promise((found) => (done = () => found("slow text")));
        files.add([slow, new File(["quick"], "quick.txt")]);
        const before = [...files.element.children].map((each) => each.textContent);
        await new Promise((later) => setTimeout(later));
        done();
        await files.ready;
        window.seen = [before, files.fields.files.map((each) => each.text)];
    })()""")
    page.until("window.seen")
    before, texts = page.see("window.seen")
    assert [each.partition(",")[0] for each in before] == ["slow.txt", "quick.txt"]
    assert all("reading" in each for each in before)
    assert texts == ["slow text", "quick"]
    page.check()


def test_a_reload_in_mid_answer_goes_on_and_a_stop_keeps_the_figures(
    browser: Chromium, serve: Callable[..., LiveServer]
) -> None:
    page = Page(browser, serve("obedient"))
    page.write("Go on for ever")
    page.key("Enter")
    page.until(f"!document.querySelector('#stop').hidden && {LAST}?.textContent.includes('Hel')")
    page.browser.ask("Page.reload")
    is_answering = "document.body?.dataset.ready && document.querySelector('#stop')?.hidden === false"
    page.until(f"{is_answering} && {LAST}?.textContent.includes('Hel')")
    assert page.see("document.querySelectorAll('.answer').length") == 1
    assert page.see("document.querySelector('#speed').textContent") == "0 of 3 prompt tokens reused", (
        "no rate of a replay"
    )
    page.see("document.querySelector('#stop').click()")
    page.until(f"{IDLE} && document.querySelector('.answer .figures')")
    figures = page.see("document.querySelector('.answer .figures').textContent")
    assert "stopped" in figures
    assert "first token" in figures
    (saved,) = [each for each in page.server.get("/ui/chats/1").json["entries"] if each["role"] == "assistant"]
    stats = saved["stats"]
    assert stats["completion_tokens"] > 0
    assert stats["context_used"] == stats["prompt_tokens"] + stats["completion_tokens"]
    assert stats["n_ctx"] > 0
    page.check()


def test_an_engine_that_dies_is_said_and_the_next_answer_comes(
    browser: Chromium, serve: Callable[..., LiveServer]
) -> None:
    page = Page(browser, serve("die:decode:SIGSEGV", "echo"))
    page.ask("Hello")
    page.until("document.querySelector('#problem').textContent.includes('engine')")
    assert "interrupted" in page.see("document.querySelector('.answer .figures').textContent")
    page.ask("Again")
    assert page.see(f"{LAST}.textContent").strip() == "Again"
    assert page.see("document.querySelector('#problem').textContent") == ""


@pytest.mark.parametrize("width", [360, 400, 1200, 2500])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_width_holds_all_of_it(
    browser: Chromium, serve: Callable[..., LiveServer], width: int, scheme: str
) -> None:
    browser.ask("Emulation.setEmulatedMedia", media="", features=[{"name": "prefers-color-scheme", "value": scheme}])
    page = Page(browser, serve(), width)
    page.browser.resize(width, 420)
    assert page.see("document.querySelector('#scroller').scrollTop") == 0, "the name of the model is to be seen"
    page.ask("w" * 300 + "\n\n```\n" + "c" * 300 + "\n```\n\n|" + " column |" * 30 + "\n|" + " - |" * 30)
    assert page.see("document.documentElement.scrollWidth") <= width
    page.see("document.querySelector('#model').click()")
    page.until("document.querySelector('#catalogue section:nth-of-type(2) li')")
    assert page.see("(each => each.scrollWidth - each.clientWidth)(document.querySelector('#catalogue'))") == 0
    page.key("Escape")
    outside = "each => each.checkVisibility() && (each.getBoundingClientRect().right > innerWidth + 1)"
    assert page.see(f"[...document.querySelectorAll('header *, form *')].filter({outside}).length") == 0
    colours = "(style => [style.backgroundColor, style.color])(getComputedStyle(document.body))"
    paper, ink = page.see(colours)
    assert (int(paper[4:].split(",")[0]) > int(ink[4:].split(",")[0])) == (scheme == "light")
    height = "document.querySelector('header').offsetHeight"
    before = page.see(height)
    page.see("document.querySelector('#loading').textContent = 'loading … 9 s'")
    assert page.see(height) == before
    page.key("Escape")
    page.see("document.querySelector('#toggle-settings').click()")
    assert page.see("document.querySelector('#settings').getBoundingClientRect().right") <= width
    page.see("document.querySelector('#toggle-settings').click()")
    page.see("document.querySelector('.question button').click()")
    inside = "document.querySelector('.question textarea').getBoundingClientRect()"
    assert page.see(f"{inside}.left - document.querySelector('.question').getBoundingClientRect().left") >= RING
    page.check()


def test_every_control_has_a_name(browser: Chromium, serve: Callable[..., LiveServer]) -> None:
    page = Page(browser, serve())
    page.ask("Hello")
    page.see("document.querySelector('#toggle-settings').click()")
    nodes = page.browser.ask("Accessibility.getFullAXTree")["nodes"]
    controls = {"button", "textbox", "combobox", "spinbutton", "link", "meter"}
    nameless = [
        node["role"]["value"]
        for node in nodes
        if not node.get("ignored") and node["role"]["value"] in controls and not node.get("name", {}).get("value")
    ]
    assert not nameless
    assert len([node for node in nodes if node["role"]["value"] in controls]) > 15


def test_a_narrow_page_has_a_button_that_closes_the_settings(
    browser: Chromium, serve: Callable[..., LiveServer]
) -> None:
    page = Page(browser, serve(), width=400)
    page.see("document.querySelector('#toggle-settings').click()")
    assert page.see(f"{ACTIVE}.title") == "Close the settings"
    page.key("Enter")
    assert page.see("document.querySelector('#settings').hidden")
    assert page.see(f"{ACTIVE}.id") == "toggle-settings"
    page.check()
