"""The page in a real browser, over fake engines: streaming, hostile answers, keys alone, a narrow window, tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.chromium import PROGRAM, Chromium
from support.gguf_writer import runnable_model, write
from support.installed import eventually
from support.served import SECONDS, LiveServer
from support.tiny_projector import png

from llmrun.chat.store.store import Sessions, folder_in
from llmrun.chat.store.turns import Answer, Question
from llmrun.config import load_settings
from llmrun.models.fingerprint import ModelFingerprint

pytestmark = [
    pytest.mark.usefixtures("package_on_path"),
    pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium"),
]
KEYS = {"Enter": ("Enter", 13, "\r"), "Tab": ("Tab", 9, ""), "Escape": ("Escape", 27, ""), "Space": (" ", 32, " ")}
LAST = "[...document.querySelectorAll('.answer .text.markdown')].at(-1)"
IDLE = "document.body?.dataset.ready && document.querySelector('#stop').hidden"
ACTIVE = "document.activeElement"
FOREIGN = "http://evil.example"
HOSTILE = [
    "<script>document.title='pwned'</script>",
    "<img src=x onerror=\"document.title='pwned'\">",
    f"<img src={FOREIGN}/a.png>",
    f"![picture]({FOREIGN}/b.png)",
    f'![picture][1]\n\n[1]: {FOREIGN}/c.png "title"',
    "[click](javascript:document.title='pwned')",
    "[click](JaVaScRiPt&colon;document.title='pwned')",
    "[click](java\tscript:document.title='pwned')",
    "[click](data:text/html,<script>document.title='pwned'</script>)",
    "![x](data:image/svg+xml,<svg onload=document.title='pwned'>)",
    "[click](vbscript:x) [click](file:///etc/passwd) [click](/ui/chats) [click](//evil.example/x)",
    "<a href=javascript:document.title='pwned'>click</a>",
    f"<iframe src={FOREIGN}></iframe>",
    "<svg onload=\"document.title='pwned'\"><circle/></svg>",
    f"<link rel=stylesheet href={FOREIGN}/d.css><style>@import '{FOREIGN}/e.css'</style>",
    f"<meta http-equiv=refresh content='0;url={FOREIGN}'>",
    f"<base href={FOREIGN}><form action={FOREIGN}><input autofocus onfocus=document.title='pwned'></form>",
    "<details open ontoggle=document.title='pwned'>x</details>",
    "<math><mtext><table><mglyph><style><img src=x onerror=document.title='pwned'>",
    "```html\"onmouseover=document.title='pwned'\n<script>document.title='pwned'</script>\n```",
    "`<script>document.title='pwned'</script>`",
    '[a](http://x.example "\\" onmouseover=document.title=1 ")',
    "| a | b |\n| :-: | --: |\n| <b onclick=document.title='pwned'>x</b> | y |",
    "</div></article></main><h1 id=title>pwned</h1>",
    "*" * 3000 + "[" * 3000 + "`" * 2999 + "> " * 300,
    "\n".join("  " * depth + "- x" for depth in range(120)),
    "A" * 150_000,
    "x [" * 80_000,
    "\u202etxt.exe\u202c \u2066\u2067 \x1b[31m \x1b]0;pwned\x07 \x00 \x9b \ufeff \u0085",
    "\U000e0041\u200b\u0301" * 500 + "\ufdd0\uffff",
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    found = Chromium(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


@pytest.fixture
def real(tmp_path: Path) -> Iterator[LiveServer]:
    """A server over a real engine, with a model that says anything."""
    model = write(tmp_path / "real.gguf", runnable_model({"llama.context_length": 2048}))
    with LiveServer(tmp_path, ("real",), model=model, n_ctx=2048) as server:
        yield server


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., LiveServer]]:
    with ExitStack() as stack:
        yield lambda *modes: stack.enter_context(LiveServer(tmp_path, modes or ("echo",), n_ctx=2_000_000))


class Page:
    """The page of a server, in a window of a width."""

    def __init__(self, browser: Chromium, server: LiveServer, width: int = 1200, path: str = "/") -> None:
        self.browser, self.server = browser, server
        browser.ask("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)
        browser.open("about:blank")
        browser.errors.clear()
        browser.requests.clear()
        browser.open(f"http://127.0.0.1:{server.port}{path}")
        self.until(IDLE)

    def see(self, script: str) -> Any:
        return self.browser.evaluate(script)

    def until(self, script: str) -> None:
        ends_at = time.monotonic() + SECONDS
        while not self.see(f"Boolean({script})"):
            assert time.monotonic() < ends_at, (script, self.browser.errors, self.see("document.body.innerText"))
            time.sleep(0.05)

    def key(self, name: str, *, alt: bool = False) -> None:
        """Press a key; the Alt key is held by modifier 1."""
        key, code, text = KEYS.get(name, (name, 0, ""))
        pressed = {"key": key, "windowsVirtualKeyCode": code, "text": text}
        if alt:
            pressed = {"key": name, "code": f"Key{name.upper()}", "modifiers": 1}
        self.browser.ask("Input.dispatchKeyEvent", type="keyDown", **pressed)
        self.browser.ask("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def write(self, text: str) -> None:
        self.browser.ask("Input.insertText", text=text)

    def set(self, label: str, value: str) -> None:
        """Give a setting a value."""
        labels = "[...document.querySelectorAll('#settings label')]"
        self.see(
            f"{labels}.find(each => each.textContent.startsWith('{label}')).querySelector('input').value = '{value}'"
        )

    def tab_to(self, words: str) -> None:
        """Go to a control by the Tab key alone."""
        for _ in range(60):
            if self.see(f"{ACTIVE}.getAttribute('aria-label') === {words!r} || {ACTIVE}.textContent === {words!r}"):
                return
            self.key("Tab")
        raise AssertionError(f"the Tab key never comes to {words}, but to {self.see(f'{ACTIVE}.outerHTML')}")

    def write_question(self, text: str) -> None:
        """Ask by keys."""
        self.see("document.querySelector('#question').focus()")
        self.write(text)
        self.key("Enter")

    def ask(self, text: str) -> None:
        """Ask by keys, and wait for the end of the answer."""
        n_answers = self.see("document.querySelectorAll('.answer').length")
        self.write_question(text)
        self.until(f"document.querySelectorAll('.answer').length > {n_answers} && {IDLE}")

    def check(self) -> None:
        """Nothing was complained of, and nothing foreign asked for."""
        assert not self.browser.errors
        own = (f"http://127.0.0.1:{self.server.port}/", "about:blank")
        assert not [address for address in self.browser.requests if not address.startswith(own)]


def test_an_answer_streams_as_markdown(browser: Chromium, serve: Callable[..., LiveServer]) -> None:
    page = Page(browser, serve())
    page.ask("Some *words*.\n\n```python\nx = 1\n```\n\n| a | b |\n| - | -: |\n| 1 | 2 |\n\n[web](https://example.org)")
    assert page.see(f"{LAST}.querySelector('em').textContent") == "words"
    assert page.see(f"{LAST}.querySelector('pre code').textContent") == "x = 1\n"
    assert page.see(f"{LAST}.querySelector('td.align-right').textContent") == "2"
    assert page.see(f"{LAST}.querySelector('a').rel") == "noopener noreferrer nofollow"
    assert "tokens/s" in page.see("document.querySelector('.answer .below .hint').textContent")
    assert page.see("document.querySelector('#context-text').textContent") == "context 9 of 256"
    page.check()


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


def test_hostile_answers_run_and_fetch_nothing(browser: Chromium, serve: Callable[..., LiveServer]) -> None:
    server = serve()
    with Sessions(folder_in(load_settings().state_dir)) as store:
        chat = store.new("hostile")
        for text in (*HOSTILE, "x" * 1_000_000):
            chat.add_question(Question(text[:1000]))
            chat.add_answer(Answer(text, text[:1000], model=ModelFingerprint(text[:50])))
        chat.release()
    page = Page(browser, server, path="/#chat=1")
    page.until("document.querySelectorAll('.answer').length === 31")
    for text in HOSTILE[:24]:
        page.ask(text)
    page.see("document.querySelectorAll('.text a').forEach(each => each.dispatchEvent(new MouseEvent('mouseover')))")
    page.see("document.querySelectorAll('details').forEach(each => { each.open = true })")
    assert page.see("document.title") == "hostile – llmrun"
    assert (
        page.see("document.querySelectorAll('.text :is(script, img, iframe, svg, form, style, link, base)').length")
        == 0
    )
    addresses = page.see("[...document.querySelectorAll('.text a')].map(each => each.getAttribute('href'))")
    assert addresses
    assert all(address.startswith(("http://", "https://", "mailto:")) for address in addresses)
    assert page.see(
        "[...document.querySelectorAll('.text *')].every("
        "each => !each.getAttributeNames().some(name => /^on|^style$/.test(name)))"
    )
    shown = page.see("document.querySelector('#turns').textContent")
    assert not {"\u202e", "\u2066", "\x1b", "\x00", "\x9b"} & set(shown)
    page.ask("still alive")
    assert page.see(f"{LAST}.textContent").strip() == "still alive"
    page.check()


def test_keys_alone_ask_edit_retry_stop_and_take_another_token(
    browser: Chromium, serve: Callable[..., LiveServer]
) -> None:
    page = Page(browser, serve())
    page.tab_to("Tokens")
    page.key("Space")
    page.ask("one two three")
    assert page.see("document.querySelectorAll('.answer .token').length") == 2
    page.see("document.querySelector('#turns').focus()")
    page.tab_to("one two")
    page.key("ArrowRight")
    assert page.see(f"{ACTIVE}.textContent") == " three"
    page.key("Enter")
    page.until("document.querySelector('#token').open")
    assert "60.7%" in page.see("document.querySelector('#token-title').textContent")
    page.tab_to("Take “ other” instead")
    page.key("Enter")
    page.until(f"{IDLE} && document.querySelector('.answer .alternatives')")
    texts = "[...document.querySelectorAll('.answer .token')].map(each => each.textContent).join('')"
    assert page.see(texts) == "one two otherone two three", "the echo goes on behind the beginning"
    page.see("document.querySelector('#turns').focus()")
    page.tab_to("Version before")
    page.key("Enter")
    page.until(f"{texts} === 'one two three'")
    page.see("document.querySelector('#turns').focus()")
    page.tab_to("Edit")
    page.key("Enter")
    page.write("Changed: ")
    page.key("Enter")
    page.until(f"{IDLE} && {texts} === 'one two threeChanged: '")
    page.tab_to("Tokens")
    page.key("Space")
    page.until("!document.querySelector('.token')")
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
    dropped = {
        "items": [],
        "files": [str(tmp_path / name) for name in ("red.png", "dump.bin")],
        "dragOperationsMask": 1,
    }
    for kind in ("dragEnter", "dragOver", "drop"):
        browser.ask("Input.dispatchDragEvent", type=kind, x=600, y=300, data=dropped)
    page.until("document.querySelector('#problem').textContent.includes('dump.bin can')")
    assert "red.png, 1 kB" in page.see("document.querySelector('#attached').textContent")
    page.see("document.querySelector('#attach').focus()")
    browser.ask("Page.setInterceptFileChooserDialog", enabled=True)
    page.key("Space")
    chosen = browser.until_event("Page.fileChooserOpened")
    browser.ask("DOM.setFileInputFiles", files=[str(tmp_path / "notes.txt")], backendNodeId=chosen["backendNodeId"])
    browser.ask("Page.setInterceptFileChooserDialog", enabled=False)
    page.until("document.querySelectorAll('#attached button').length === 2")
    page.ask("What is it?")
    page.until("document.querySelector('#problem').textContent.includes('see images: red.png is left out')")
    shown = page.see(f"{LAST}.textContent")
    assert "The image red.png can't be seen." in shown
    assert "from a file" in shown
    assert page.see("document.querySelector('.question').textContent.includes('Image: red.png')")
    assert page.see("document.querySelector('#attached').children.length") == 0
    page.check()


def test_a_chat_is_exported_as_a_page_that_runs_nothing(
    browser: Chromium, serve: Callable[..., LiveServer], tmp_path: Path
) -> None:
    page = Page(browser, serve())
    page.ask("Some *words*")
    page.ask("<script>document.title='pwned'</script>")
    browser.ask("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path / "saved"))
    for form, words in (("Markdown", "## You"), ("JSON", "llmrun-chat"), ("HTML", "<em>words</em>")):
        page.see(f"[...document.querySelectorAll('#settings button')].find(e => e.textContent === '{form}').click()")
        suffix = {"Markdown": "md"}.get(form, form.lower())
        saved = tmp_path / "saved" / f"chat-1.{suffix}"
        assert eventually(lambda saved=saved, words=words: saved.exists() and words in saved.read_text(), SECONDS)  # type: ignore[misc]
    page.check()
    browser.requests.clear()
    browser.open(saved)
    assert page.see("document.title") == "some-words – llmrun"
    assert page.see("document.querySelectorAll('button, script').length") == 0
    assert page.see("getComputedStyle(document.querySelector('.question .text')).whiteSpace") == "pre-wrap"
    assert browser.requests == [saved.as_uri()]


def test_an_answer_is_explained_on_a_page_of_its_own(browser: Chromium, real: LiveServer) -> None:
    page = Page(browser, real)
    page.set("Maximum tokens", "5")
    page.ask("Hello")
    page.see("document.querySelector('#turns').focus()")
    page.tab_to("Explain")
    page.key("Enter")
    page.until("document.querySelector('.answer a[href^=\"/ui/explained/\"]')")
    assert page.see(f"{ACTIVE}.textContent") == "Open the explanation"
    page.check()
    browser.open(page.see(f"{ACTIVE}.href"))
    assert page.see("document.title") == "Inference, token by token"
    page.until("document.querySelector('[data-view=token]').textContent.includes(' is token ')")
    page.check()


def test_the_steps_of_a_token_and_its_sliders(browser: Chromium, real: LiveServer) -> None:
    page = Page(browser, real)
    page.set("Maximum tokens", "5")
    page.set("Seed", "3")
    page.see("document.querySelector('#toggle-tokens').click()")
    page.ask("Hello")
    assert page.see("document.querySelectorAll('.answer .token').length") == 5, "all logits of this model are equal"
    page.see("document.querySelectorAll('.answer .token')[1].click()")
    page.tab_to("Steps and sliders")
    page.key("Enter")
    page.until("document.querySelector('#token .sliders')")
    heads = page.see("[...document.querySelectorAll('#token thead th')].map(each => each.textContent)")
    assert heads[:2] == ["candidate", "model"]
    assert heads[-2:] == ["by the sliders", ""]
    last = "document.querySelector('#token tbody tr:last-child td.result').textContent"
    as_it_was = page.see(last)
    page.see("(e => { e.value = 1; e.dispatchEvent(new Event('input')) })(document.querySelector('[name=top_k]'))")
    assert page.see(last) == "1"
    page.tab_to("As it was")
    page.key("Enter")
    assert page.see(last) == as_it_was
    page.see("[...document.querySelectorAll('#token td button')].find(e => e.textContent.startsWith('Take')).click()")
    page.until(f"{IDLE} && document.querySelector('.answer .alternatives')")
    page.see("document.querySelectorAll('.answer .token')[0].click()")
    page.key("ArrowRight")
    assert page.see("document.querySelector('#token-title').textContent.startsWith('Token 2')")
    page.key("Escape")
    page.see("document.querySelector('#toggle-tokens').click()")
    page.check()


def test_two_answers_side_by_side(browser: Chromium, real: LiveServer) -> None:
    page = Page(browser, real)
    page.set("Maximum tokens", "6")
    page.set("Seed", "3")
    page.see("document.querySelector('#toggle-settings').click()")
    page.see("document.querySelector('#double').focus()")
    page.key("Space")
    page.see("document.querySelector('#second-origin-seed').previousElementSibling.value = 4")
    page.write_question("Hello")
    page.until(f"{IDLE} && document.querySelectorAll('.columns article').length === 2")
    page.until("document.querySelector('.columns + .hint').textContent.startsWith('They part at token ')")
    hints = page.see("[...document.querySelectorAll('.columns .hint')].map(each => each.textContent)")
    assert all("tokens/s" in hint and " s · " in hint for hint in hints)
    assert ["seed 3" in hints[0], "seed 4" in hints[1]] == [True, True]
    other = "[...document.querySelectorAll('.columns button')].find(e => e.textContent === 'Go on with this one')"
    words = page.see(f"{other}.closest('article').querySelector('.markdown').textContent")
    page.see(f"{other}.focus()")
    page.key("Enter")
    page.until("!document.querySelector('.columns')")
    assert page.see(f"{LAST}.textContent") == words
    assert page.see("document.querySelector('.answer .alternatives').textContent.includes('of 2')")
    page.see("document.querySelector('#double').click()")
    page.ask("And now?")
    assert page.see("document.querySelectorAll('article').length") == 4
    page.check()


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
    page.key("Escape")
    page.until(f"{IDLE} && document.querySelector('.answer .below .hint')")
    assert "stopped" in page.see("document.querySelector('.answer .below .hint').textContent")
    page.check()


def test_an_engine_that_dies_is_said_and_the_next_answer_comes(
    browser: Chromium, serve: Callable[..., LiveServer]
) -> None:
    page = Page(browser, serve("die:decode:SIGSEGV", "echo"))
    page.ask("Hello")
    page.until("document.querySelector('#problem').textContent.includes('engine')")
    assert "interrupted" in page.see("document.querySelector('.answer .below .hint').textContent")
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
    page.ask("w" * 300 + "\n\n```\n" + "c" * 300 + "\n```\n\n|" + " column |" * 30 + "\n|" + " - |" * 30)
    assert page.see("document.documentElement.scrollWidth") <= width
    outside = "each => each.checkVisibility() && (each.getBoundingClientRect().right > innerWidth + 1)"
    assert page.see(f"[...document.querySelectorAll('header *, form *')].filter({outside}).length") == 0
    colours = "(style => [style.backgroundColor, style.color])(getComputedStyle(document.body))"
    paper, ink = page.see(colours)
    assert (int(paper[4:].split(",")[0]) > int(ink[4:].split(",")[0])) == (scheme == "light")
    page.key("Escape")
    page.see("document.querySelector('#toggle-settings').click()")
    assert page.see("document.querySelector('#settings').getBoundingClientRect().right") <= width
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
