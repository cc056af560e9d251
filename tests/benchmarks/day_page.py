"""A day with the page, by keys and mouse in Chromium: `python tests/benchmarks/day_page.py FOLDER`.

Not a benchmark. Drives `llmrun serve` with the real SmolLM2 (`llmrun pull smollm2`), and fake engines where a text or a
call of a tool has to come for sure. Prints a line for each step, and writes images of the page into FOLDER for somebody
to look at. `--axe FILE` is axe.min.js of the npm package axe-core, which is run in each dialog. Takes minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import support.page
from support.chromium import Chromium
from support.hf_writer import WIDTH
from support.page import ACTIVE, IDLE, LAST, Page
from support.served import LiveServer
from support.stand_in_hub import StandInHub, stand_in_hub
from support.tiny_projector import png, projector, text_model

from llmrun.chat.tools.toolbox import Toolbox
from llmrun.config import load_settings
from llmrun.models.registry import load_catalogue
from llmrun.models.store.store import all_models
from llmrun.server.page.tools import PageTools

HEIGHTS = {400: 800, 1280: 800, 1920: 1080}
NO_HUB = "http://127.0.0.1:9"  # where nothing listens
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
BUSY = "!document.querySelector('#stop').hidden"
WRITTEN = f"{LAST}?.textContent.trim().length > 20"
FACTS = [
    ("glacier.md", "# Ice\nThe Aletsch glacier is 22 kilometres long.\n"),
    ("tea.txt", "Tea is in the left cupboard.\n"),
]
TEXT = r"""# Water

Some *words*, a formula $E = mc^2$ and a larger one:

$$\int_0^1 x^2\,dx = \frac{1}{3}$$

```python
def area(radius: float) -> float:
    return 3.14159 * radius ** 2  # a circle, and a comment that is long enough to leave the line of a narrow window
```

| Name | Length | Country | Flows into |
| --- | ---: | --- | --- |
| Rhine | 1,230 km | Germany | North Sea |
| 長江 | 6,300 km | 中国 | East China Sea |

שלום עולם, זה טקסט מימין לשמאל.

日本語の長い文章がここにあります。折り返しが正しく行われるかどうかを確認するための文章です。

> a quote

1. one
2. two
   - three
"""
CHANGE = "(each => { each.value = %s; each.dispatchEvent(new Event('change')); })(document.querySelector('%s'))"
CUT = """[...document.querySelectorAll('body > header *, form *, dialog[open] *, aside *')].filter(each => {
    const { overflow, overflowX } = getComputedStyle(each), box = each.getBoundingClientRect();
    const isShown = each.checkVisibility({ visibilityProperty: true }) && box.width >= 3;
    if (!isShown || each.closest('.hidden, .words, .excerpt, .wide, #title')) return false;
    const isWide = each.scrollWidth > each.clientWidth + 1 && each.textContent.trim();
    const isBelow = each.matches('dialog .buttons:last-child *, #composer *') && box.bottom > innerHeight + 1;
    return (isWide && overflow !== 'visible' && overflowX !== 'auto') || box.right > innerWidth + 1 || isBelow;
}).map(each => each.id || each.textContent.trim().slice(0, 30))"""


class Server:
    """`llmrun serve` in a process of its own."""

    def __init__(self, home: Path, *words: str, **environment: str) -> None:
        self.log, self.port = home.with_suffix(".log"), _free_port()
        self.environment = {**os.environ, "LLMRUN_HOME": str(home), **environment}
        self._command = (sys.executable, "-m", "llmrun", "serve", *words, "--port", str(self.port))
        self.begin()

    def begin(self) -> None:
        """Start it, also after its end."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, env=self.environment)
        while not _answers(self.port):
            assert self._process.poll() is None, self.log.read_text()
            time.sleep(0.05)

    def end(self) -> None:
        """As Ctrl-C does."""
        self._process.terminate()
        self._process.wait()

    def ps(self) -> Any:
        """What `llmrun ps` says of it."""
        words = (sys.executable, "-m", "llmrun", "ps", "--json")
        return json.loads(subprocess.run(words, env=self.environment, capture_output=True, check=True).stdout)[0]

    def last_line(self) -> str:
        """Of its log, about an answer."""
        return [line for line in self.log.read_text().splitlines() if "TTFT" in line][-1]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def _answers(port: int) -> bool:
    with socket.socket() as asked:
        return asked.connect_ex(("127.0.0.1", port)) == 0


class Day:
    """The page in a window of a width, and what a step needs of it."""

    def __init__(
        self, browser: Chromium, server: Any, folder: Path, images: Path, width: int, axe: str, until: str = IDLE
    ) -> None:
        self.browser, self.server, self.folder, self.width = browser, server, folder, width
        self._images, self._axe = images, axe
        self.page = Page(browser, server, width, until=until)
        self.resize()

    def resize(self) -> None:
        """Give the window its height."""
        self.browser.resize(self.width, HEIGHTS.get(self.width, 800))

    def shoot(self, name: str) -> None:
        """Write an image of the window."""
        time.sleep(0.2)  # for what fades in
        (self._images / f"{name}-{self.width}.png").write_bytes(self.browser.picture())

    def see(self, script: str) -> Any:
        """See Chromium.evaluate()."""
        return self.browser.evaluate(script)

    def text(self, selector: str) -> str:
        """Of an element."""
        return str(self.see(f"document.querySelector({json.dumps(selector)})?.textContent ?? ''")).strip()

    def click(self, selector: str, words: str = "") -> None:
        """Press an element, or the last one with these words."""
        all_of = f"[...document.querySelectorAll({json.dumps(selector)})]"
        found = f"{all_of}.filter(each => each.textContent.includes({json.dumps(words)}))"
        self.page.until(f"{found}.length")
        self.see(f"{found}.at(-1).click()")

    def open(self, words: str) -> None:
        """Open a dialog or a panel by its button, unless it is open."""
        if self.see(f"document.querySelector('#{words}').hidden"):
            self.click(f"#toggle-{words}")

    def narrow(self) -> None:
        """Close the panels where they lie over the conversation."""
        if self.width < 960:
            for each in ("chats", "settings"):
                self.see(
                    f"document.querySelector('#{each}').hidden || document.querySelector('#toggle-{each}').click()"
                )

    def new(self, limit: int = 48) -> None:
        """Begin a chat, whose answers have at most a number of tokens."""
        self.see("document.querySelector('#new').click()")
        self.page.set("Maximum tokens", str(limit))
        self.narrow()

    def close(self) -> None:
        """Close a dialog as a user does; the first Escape may only clear a search."""
        for _ in range(3):
            if self.see("Boolean(document.querySelector('dialog[open]'))"):
                self.page.key("Escape")
        assert not self.see("Boolean(document.querySelector('dialog[open]'))"), "Escape closes no dialog"

    def faults(self) -> str:
        """What is cut or outside the window, and what axe-core finds."""
        said = [f"cut: {', '.join(cut)}"] if (cut := self.see(CUT)) else []
        if self._axe:
            found = self.browser.accessibility_faults(self._axe)
            said.append(f"axe {len(found)} {', '.join(found)}".strip())
        return "; ".join(said) or "nothing cut"

    def drop(self, *files: Path) -> None:
        """Drop files on the page."""
        data = {"items": [], "files": [str(file) for file in files], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            self.browser.ask("Input.dispatchDragEvent", type=kind, x=self.width // 2, y=300, data=data)


Step = Callable[[Day], str]

# ---- the real model ----


def empty(day: Day) -> str:
    day.shoot("01-empty")
    return f"{day.text('.empty')[:60]!r}; {day.faults()}"


def sign_of_life(day: Day) -> str:
    """A8: how long nothing moves after Enter."""
    day.see("""new MutationObserver((_, looking) => {
        if (!document.querySelector('.waiting')) return;
        window.life = performance.now() - window.began;
        looking.disconnect();
    }).observe(document.body, { subtree: true, childList: true })""")
    day.page.set("Maximum tokens", "120")
    day.see("window.began = performance.now()")
    day.page.write_question("Name three rivers of Europe, and say something about each.")
    day.page.until("window.life")
    day.shoot("02-waiting")
    return f"something moves {day.see('window.life'):.0f} ms after Enter"


def one_figure(day: Day) -> str:
    """A4: the time to the first token and the context, wherever they are said."""
    live = ""
    while day.see(BUSY):
        live = day.text("#speed") or live
        time.sleep(0.1)
    day.page.until(f"{IDLE} && document.querySelector('.figures')")
    day.shoot("03-answer")
    bar = day.text("#context-text")
    day.click("#context")
    day.page.until("document.querySelector('#window').open")
    dialog = day.text("#window-title")
    day.shoot("04-context")
    found = day.faults()
    day.close()
    log = re.search(r"TTFT [\d.,]+ s", day.server.last_line())
    ps = day.server.ps()["requests"][-1]
    final = day.text(".figures .numbers")
    bars = f"bar {bar!r}, then {day.text('#context-text')!r}; dialog {dialog!r}"
    return f"live {live!r}; final {final!r}; log {log and log[0]}; ps {ps}; {bars}; {found}"


def free_while_it_answers(day: Day) -> str:
    """A7: another chat, a queue, a stop."""
    day.new(2000)
    day.page.write_question("Write a long story about a lighthouse keeper.")
    day.page.until(f"{BUSY} && {WRITTEN}")
    day.page.write_question("And how does it end?")
    day.page.until("document.querySelector('#queued li')")
    day.shoot("05-queue")
    found = day.faults()
    day.open("chats")
    day.shoot("06-chats-while-answering")
    day.click("#chat-list .open", "Name three rivers")
    day.page.until(f"title.textContent.startsWith('Name') && {IDLE}")
    day.narrow()
    day.shoot("07-another-chat")
    day.open("chats")
    day.click("#chat-list .open", "Write a long story")
    day.page.until(f"title.textContent.startsWith('Write') && {BUSY}")
    day.narrow()
    day.page.key("Escape")
    day.page.until(IDLE)
    back = day.see("document.querySelector('#question').value")
    day.shoot("08-stopped")
    day.see("document.querySelector('#question').value = ''")
    return f"another chat is read, back it still answers; after Escape the queued question is {back!r}; {found}"


def reload(day: Day) -> str:
    """B20: an answer goes on after a reload."""
    day.new(200)
    day.page.write_question("Count from one to forty in words.")
    day.page.until(f"{BUSY} && {WRITTEN}")
    before = day.see(f"{LAST}.textContent.length")
    day.browser.ask("Page.reload")
    day.page.until(f"document.body?.dataset.ready && {WRITTEN}")
    after = day.see(f"{LAST}.textContent.length")
    day.page.until(f"{IDLE} && document.querySelector('.figures')")
    return f"{before} characters before, {after} after; log: {day.server.last_line()[-60:]!r}"


def branches(day: Day) -> str:
    """Edit, regenerate, branches, undo."""
    day.page.see("document.querySelector('.question .buttons .change[title=Edit]').click()")
    day.shoot("09-edit")
    day.see("document.querySelector('.question textarea').value = 'Count from one to five in words.'")
    day.page.key("Enter")
    day.page.until(f"{IDLE} && document.querySelector('.question .alternatives')")
    day.see("[...document.querySelectorAll('.answer [title^=Retry]')].at(-1).click()")
    day.page.until(f"{IDLE} && document.querySelector('.answer .alternatives')")
    day.shoot("10-versions")
    versions = day.text(".question .alternatives"), day.text(".answer .alternatives")
    day.page.key("b", alt=True)
    day.page.until("document.querySelector('#branches').open")
    day.shoot("11-branches")
    found = day.faults()
    day.close()
    day.page.key("u", alt=True)
    day.page.until("!document.querySelector('article')")
    field = day.see("document.querySelector('#question').value")
    day.see("document.querySelector('#question').value = ''")
    return f"versions {versions}; after undo the field has {field!r}; {found}"


def tokens(day: Day) -> str:
    """B13: the dialog of a token, its steps, another candidate, and the explanation."""
    day.new()
    day.click("#toggle-tokens")
    day.page.ask("The capital of France is")
    day.page.until("document.querySelector('.answer .token')")
    day.shoot("12-tokens")
    day.see("document.querySelectorAll('.answer .token')[2].click()")
    day.page.until("document.querySelector('#token').open")
    day.shoot("13-token")
    first = day.faults()
    day.click("#token button", "Steps and sliders")
    day.page.until("document.querySelector('#token .sliders')")
    day.shoot("14-steps")
    second = day.faults()
    day.see("document.querySelector('#token td button').click()")
    day.page.until(f"{IDLE} && document.querySelector('.answer .alternatives')")
    day.click("#toggle-tokens")
    began = time.monotonic()
    day.see("document.querySelector('.answer [title^=Explain]').click()")
    day.page.until("document.querySelector('.answer a[target=_blank]')")
    day.shoot("15-explained")
    return f"{first}; steps: {second}; explained in {time.monotonic() - began:.1f} s"


def settings(day: Day) -> str:
    """B14: what applies is seen; export."""
    day.open("settings")
    day.shoot("16-settings")
    found = day.faults()
    empty = day.see(
        "[...document.querySelectorAll('#settings input[type=number]')]"
        ".filter(each => !each.placeholder && each.checkVisibility())"
        ".map(each => each.closest('label').firstChild.textContent)"
    )
    saved = day.folder / "saved"
    saved.mkdir(exist_ok=True)
    day.browser.ask("Page.setDownloadBehavior", behavior="allow", downloadPath=str(saved))
    for form in ("Markdown", "JSON", "HTML"):
        day.click("#settings .buttons button", form)
        time.sleep(0.5)
    sizes = {file.suffix: file.stat().st_size for file in saved.iterdir()}
    day.see("document.querySelector('#settings').scrollTop = 1e6")
    day.shoot("17-settings-below")
    day.narrow()
    return f"fields without a value that applies: {empty}; exported {sizes}; {found}"


def catalogue(day: Day) -> str:
    """B15: the dialog of models."""
    day.click("#model")
    day.page.until("document.querySelectorAll('#catalogue section li').length > 3")
    day.shoot("18-catalogue")
    found = day.faults()
    day.page.write("qwen coder")
    day.shoot("19-catalogue-search")
    day.page.key("Enter")
    told = "document.querySelector('#catalogue > [role=status]').textContent"
    day.page.until(f"{told} && !{told}.includes('Searching')")
    said = day.text("#catalogue > [role=status]")
    day.close()
    return f"{found}; the hub can't be reached: {said!r}"


def attach(day: Day) -> str:
    """B16: chips at once, files in time, Latin-1."""
    day.new()
    folder = day.folder / "files"
    folder.mkdir(exist_ok=True)
    (folder / "latin1.txt").write_bytes("Der Fluß heißt Rhein, Größe 1230 km, über Köln.".encode("latin-1"))
    (folder / "page.html").write_text("<script>x</script><nav>menu</nav><p>The key is under the mat.</p>")
    (folder / "notes.md").write_text("# Notes\nBuy bread.\n")
    (folder / "data.bin").write_bytes(bytes(range(256)) * 40)
    (folder / "red.png").write_bytes(png(64, 64))
    began = time.monotonic()
    day.drop(*sorted(folder.iterdir()))
    at_once = day.see("document.querySelectorAll('#attached li').length")
    day.page.until("!document.querySelector('#attached [aria-busy]')")
    took = time.monotonic() - began
    day.shoot("20-attached")
    found, problem = day.faults(), day.text("#problem")
    day.browser.errors.clear()
    day.page.ask("Where is the key?")
    day.shoot("21-files")
    return f"{at_once} chips at once, all read after {took:.1f} s; {problem!r}; {found}"


def documents(day: Day) -> str:
    """A folder of documents for a chat."""
    folder = day.folder / "documents"
    folder.mkdir(exist_ok=True)
    for name, text in FACTS:
        (folder / name).write_text(text)
    day.new()
    day.open("settings")
    day.see(CHANGE % (json.dumps(str(folder)), "#documents"))
    day.page.until("/\\d passage/.test(document.querySelector('#documents-told').textContent)")
    told = day.text("#documents-told")
    day.narrow()
    day.page.ask("How long is the Aletsch glacier?")
    day.see("document.querySelector('.passages')?.setAttribute('open', '')")
    day.shoot("22-documents")
    return f"{told!r}; below the question: {day.text('.passages summary')!r}"


def side_by_side(day: Day) -> str:
    """Three answers at once."""
    day.new()
    day.open("settings")
    day.see(CHANGE % (3, "#answers"))
    day.narrow()
    day.page.write_question("Give me a name for a cat.")
    day.page.until("document.querySelector('.columns')")
    day.shoot("23-columns-begin")
    day.page.until(f"{IDLE} && document.querySelector('.columns button')")
    day.shoot("24-columns")
    found = day.faults()
    day.click(".columns button", "Go on with this one")
    day.page.until("!document.querySelector('.columns') && document.querySelector('.answer .alternatives')")
    day.see(CHANGE % (1, "#answers"))
    return f"{day.text('.answer .alternatives')!r} versions; {found}"


def search_and_delete(day: Day) -> str:
    """B6, B20: search finds what was typed; Escape keeps a chat."""
    day.open("chats")
    day.see("document.querySelector('#search').focus()")
    day.page.write("glacier")
    day.page.until("document.querySelector('#chat-list .hint')")
    excerpt = day.text("#chat-list .hint")
    day.shoot("25-search")
    day.page.key("Escape")
    day.page.until("document.querySelectorAll('#chat-list li').length > 2")
    count = day.see("document.querySelectorAll('#chat-list li').length")
    day.see("document.querySelector('#chat-list [title=Delete]').click()")
    day.shoot("26-delete")
    day.page.key("Escape")
    kept = day.see("document.querySelectorAll('#chat-list li').length")
    focus = day.see(f"{ACTIVE}.className")
    day.see("document.querySelector('#chat-list [title=Delete]').click()")
    day.click("#chat-list button.bad")
    day.page.until(f"document.querySelectorAll('#chat-list li').length === {count - 1}")
    day.narrow()
    return f"excerpt {excerpt!r}; Escape keeps {kept} of {count}, focus on {focus!r}; then {count - 1}"


def by_keys(day: Day) -> str:
    """Without a mouse: from the model to a question and back."""
    day.see("document.querySelector('.skip').focus()")
    stops: list[str] = []
    for _ in range(60):
        day.page.key("Tab")
        stops.append(day.see(f"{ACTIVE}.id || {ACTIVE}.title || {ACTIVE}.textContent.slice(0, 20)"))
        if stops[-1] == "send":
            break
    return f"{len(stops)} times Tab to Send: {', '.join(stops[:4])} … {', '.join(stops[-6:])}"


def two_tabs(day: Day) -> str:
    """Another window goes on with the same chat."""
    day.new()
    day.page.ask("Say hello.")
    chat = day.see("location.hash")
    other = Chromium(day.folder / f"second-{day.width}")
    try:
        second = Page(other, day.server, day.width, path=f"/{chat}")
        second.set("Maximum tokens", "80")
        second.write_question("Write a story of ten sentences.")
        second.until(BUSY)
        day.page.until("document.querySelector('#elsewhere').textContent")
        said = day.text("#elsewhere span")
        day.shoot("27-elsewhere")
        second.until(IDLE)
        day.page.until("document.querySelector('#elsewhere').textContent.includes('gone on')")
        later = day.text("#elsewhere span")
        day.page.write_question("And mine?")
        day.page.until(
            f"{IDLE} && (document.querySelectorAll('.question').length === 3"
            " || document.querySelector('#problem').textContent)"
        )
        questions, problem = day.see("document.querySelectorAll('.question').length"), day.text("#problem")
    finally:
        other.close()
    return f"{said!r}, {later!r}; my question then: {questions} questions shown, problem {problem!r}"


def server_restarts(day: Day) -> str:
    """The server ends and begins again while the page is open."""
    day.new()
    day.page.ask("Say hello.")
    day.page.set("Maximum tokens", "2000")
    day.page.write_question("Write a long story about a ship.")
    day.page.until(f"{BUSY} && {WRITTEN}")
    day.server.end()
    day.page.until(f"{IDLE} && document.querySelector('#problem').textContent")
    gone, kept = day.text("#problem"), len(day.see(f"{LAST}?.textContent ?? ''"))
    day.shoot("28-server-gone")
    day.page.write_question("Are you there?")
    day.page.until("document.querySelector('#problem').textContent")
    field, asked = day.see("document.querySelector('#question').value"), day.text("#problem")
    day.server.begin()
    began = time.monotonic()
    day.page.until("!document.querySelector('#problem').textContent")
    noticed = time.monotonic() - began
    day.shoot("29-server-back")
    day.page.set("Maximum tokens", "48")
    day.see("document.querySelector('#question').focus()")
    day.page.key("Enter")
    day.page.until(f"{IDLE} && document.querySelectorAll('.answer').length >= 3")
    left = day.text("#problem")
    day.shoot("30-goes-on")
    day.browser.errors.clear()
    first = f"{gone!r} with {kept} characters shown; then {asked!r}, field {field!r}"
    return f"{first}; back is noticed after {noticed:.1f} s; {left!r}"


REAL: tuple[Step, ...] = (empty, sign_of_life, one_figure, free_while_it_answers, reload, branches, tokens, settings)
REAL += (catalogue, attach, documents, side_by_side, search_and_delete, by_keys, two_tabs, server_restarts)

# ---- fake engines, which say what they are told ----


def rendering(day: Day) -> str:
    """Code with a copy button, a table, formulas, texts in other scripts, and a very long answer."""
    day.page.ask(TEXT)
    day.see("document.querySelector('#scroller').scrollTop = 0")
    day.see("document.querySelector('.answer').scrollIntoView()")
    day.shoot("31-markdown")
    day.browser.ask("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    day.see("document.querySelector('.code-head button').click()")
    time.sleep(0.2)
    copied = day.see("navigator.clipboard.readText().catch(String)")
    began = time.monotonic()
    day.page.ask("\n\n".join(f"Paragraph {number} of a long answer, with words." for number in range(1500)))
    took = time.monotonic() - began
    day.shoot("32-long")
    at_end = day.see(
        "(each => each.scrollHeight - each.scrollTop - each.clientHeight)(document.querySelector('#scroller'))"
    )
    return f"copied {copied[:30]!r}; 1,500 paragraphs in {took:.1f} s, {at_end:.0f} from the end; {day.faults()}"


def consent(day: Day) -> str:
    """Each call of a tool is asked about."""
    decisions = []
    for number, decision in enumerate(("Allow once", "Always in this chat", "", "No")):
        if decision == "No":
            day.new()
        question = json.dumps({"path": "tea.txt" if number else "nothing.txt"})
        if not decision:
            day.page.ask(question)
        else:
            day.page.write_question(question)
            day.page.until("document.querySelector('.call .buttons button')")
            day.shoot(f"33-consent-{number}")
            focus = day.see(f"{ACTIVE}.textContent")
            decisions.append(f"asked (focus on {focus!r}), {decision}")
            day.click(".call .buttons button", decision)
        day.page.until(f"{IDLE} && document.querySelectorAll('.answer').length")
        heard = day.see(f"{LAST}.textContent").strip()[:50]
        decisions.append(heard if decision else f"not asked, {heard}")
    day.shoot("34-called")
    return f"{'; '.join(decisions)}; {day.faults()}"


def key_dialog(day: Day) -> str:
    """A server with a key."""
    day.shoot("35-key")
    found = day.faults()
    day.page.write("wrong")
    day.page.key("Enter")
    day.page.until("document.querySelector('#key').open && !document.querySelector('#key-input').value")
    wrong = day.text("#key")
    day.page.write("0123456789abcdef")
    day.page.key("Enter")
    day.page.until(IDLE)
    return f"{found}; after a wrong key: {wrong!r}"


# ---- without a model, without and with a hub ----


def no_model(day: Day) -> str:
    """First use without a model and without a hub."""
    day.shoot("36-no-model")
    said, found = day.text(".empty"), day.faults()
    day.page.write_question("Hello?")
    time.sleep(1)
    after = day.text("#problem") or day.text("dialog[open] h2") or "nothing said"
    if day.see("Boolean(document.querySelector('dialog[open]'))"):
        day.close()
    day.see("document.querySelector('#question').value = ''")
    day.click(".empty button", "Choose a model")
    day.page.until("document.querySelectorAll('#catalogue section li').length > 1")
    day.shoot("37-first-catalogue")
    return f"{said[:80]!r}; a question without a model: {after!r}; {found}; catalogue {day.faults()}"


def download(day: Day) -> str:
    """A download goes on when the dialog is closed, and its model answers."""
    rows = "[...document.querySelectorAll('.catalogue li')]"
    row = f"{rows}.find(each => each.querySelector('b').textContent === 'smollm2')"
    day.see(f"{row}.querySelector('button').click()")
    day.page.until(
        f"{row}.querySelector('progress')?.value > 0.05 || {row}.textContent.includes('Use')"
        f" || {row}.querySelector('[role=status]').textContent.length > 60"
    )
    day.shoot("38-downloading")
    problem = day.text(".catalogue li [role=status]:not(:empty)")
    day.close()
    day.shoot("39-download-closed")
    small = day.text("#downloads")
    day.page.until("document.querySelector('#model-name').textContent === 'smollm2'")
    day.shoot("40-downloaded")
    day.page.ask("Say hello.")
    return f"{problem!r}; closed: {small!r}; then {day.text('.answer .markdown')[:40]!r}"


def hub_search(day: Day) -> str:
    """The hub is searched."""
    day.click("#model")
    day.page.until("document.querySelector('#catalogue section li')")
    day.page.write("smollm instruct")
    day.page.key("Enter")
    day.page.until("document.querySelector('section[aria-label=\"On the hub\"] li')")
    day.shoot("41-hub")
    found = day.text('section[aria-label="On the hub"] li'), day.faults()
    day.close()
    return str(found)


def image(day: Day) -> str:
    """An image, with a model that sees."""
    file = day.folder / "squares.png"
    file.write_bytes(png(96, 64))
    day.drop(file)
    day.page.until("document.querySelector('#attached li') && !document.querySelector('#attached [aria-busy]')")
    day.shoot("42-image")
    day.page.ask("What is it?")
    day.shoot("43-image-answered")
    return f"{day.text('.question .hint')!r}; problem {day.text('#problem')!r}"


@contextmanager
def hub_of(model: Path) -> Iterator[StandInHub]:
    """A hub with SmolLM2, which sends no more than 12 MB a second on a connection."""
    with stand_in_hub(load_catalogue().entries["smollm2"].repository) as hub:
        hub.files[model.name] = model.read_bytes()
        hub.faults.bytes_per_second = 12e6
        row = {"id": hub.repository, "downloads": 54321, "likes": 7, "lastModified": "2026-10-01T00:00:00.000Z"}
        hub.pages["/api/models"] = ("application/json", json.dumps([row]).encode())
        yield hub


def show(day: Day, steps: tuple[Step, ...], wanted: list[str]) -> None:
    """Take steps, and print what each of them has seen."""
    for step in steps:
        if wanted and step.__name__ not in wanted:
            continue
        began = time.monotonic()
        try:
            said = step(day)
        except AssertionError as error:
            day.shoot(f"failed-{step.__name__}")
            said = f"FAILED {str(error)[:400]}"
        complaints = [str(each)[:200] for each in day.browser.errors]
        day.browser.errors.clear()
        errors = f"; the browser's console: {complaints}" if complaints else ""
        print(f"{day.width} {step.__name__} ({time.monotonic() - began:.1f} s): {said}{errors}", flush=True)


def main() -> None:
    """Take all steps at all widths; chats and models of the user stay as they are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--width", type=int, nargs="+", default=[400, 1280, 1920])
    parser.add_argument("--steps", nargs="+", default=[], help="names of functions; all by default")
    parser.add_argument("--axe", type=Path)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    axe = arguments.axe.read_text() if arguments.axe else ""
    support.page.SECONDS = 60  # for what a step waits for
    for width in arguments.width:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
            folder = Path(home)
            browser = Chromium(folder / "profile")
            day = partial(Day, browser, folder=folder, images=arguments.folder, width=width, axe=axe)
            try:
                take(day, folder, width, arguments.steps)
            finally:
                browser.close()


def take(day: Callable[..., Day], folder: Path, width: int, steps: list[str]) -> None:
    """A day at one width."""
    begin_home = partial(serving, folder)
    if _wants(steps, *REAL):
        with begin_home("home", "smollm2", HF_ENDPOINT=NO_HUB) as server:
            one = day(server)
            show(one, REAL, steps)
    if _wants(steps, rendering):
        (folder / "echo").mkdir()
        with LiveServer(folder / "echo", ("echo",), n_ctx=2_000_000) as fake:
            show(day(fake), (rendering,), steps)
    if _wants(steps, consent):
        (folder / "desk").mkdir()
        (folder / "desk" / "tea.txt").write_text(FACTS[1][1])
        with (
            Toolbox((f"files:{folder / 'desk'}",), 600) as box,
            LiveServer(folder, ("calling",), tools=PageTools(box)) as fake,
        ):
            show(day(fake), (consent,), steps)
    if _wants(steps, key_dialog):
        (folder / "keys").write_text("0123456789abcdef\n")
        with begin_home("keyed", "smollm2", "--key-file", str(folder / "keys")) as server:
            show(day(server, until="document.querySelector('#key')?.open"), (key_dialog,), steps)
    if _wants(steps, image):
        text_model(folder / "sees.gguf", "idefics3", CHATML)
        projector(folder / "mmproj-sees.gguf", WIDTH)
        with begin_home("seeing", str(folder / "sees.gguf"), "--mmproj", str(folder / "mmproj-sees.gguf")) as server:
            show(day(server), (image,), steps)
    first_use(day, folder, steps)


def first_use(day: Callable[..., Day], folder: Path, steps: list[str]) -> None:
    """The page where there is no model, without a hub and with one."""
    (model,) = [each.path for each in all_models(load_settings()) if each.name == "smollm2"]
    if _wants(steps, no_model):
        with serving(folder, "alone", HF_HOME=str(folder / "none"), HF_ENDPOINT=NO_HUB) as server:
            show(day(server), (no_model, download), steps)
    if _wants(steps, hub_search):
        with (
            hub_of(model) as hub,
            serving(folder, "first", HF_HOME=str(folder / "first-hub"), HF_ENDPOINT=hub.url) as server,
        ):
            show(day(server), (no_model, download, hub_search), steps)


@contextmanager
def serving(folder: Path, name: str, *words: str, **environment: str) -> Iterator[Server]:
    """A server until the block ends, which may begin it again."""
    server = Server(folder / name, *words, **environment)
    try:
        yield server
    finally:
        server.end()


def _wants(names: list[str], *steps: Step) -> bool:
    return not names or any(step.__name__ in names for step in steps)


if __name__ == "__main__":
    main()
