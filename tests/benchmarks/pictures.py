"""Take pictures of the page in all its states: `python tests/benchmarks/pictures.py FOLDER [STATE ...] [--axe FILE]`.

Not a benchmark. A browser shows the page over fake engines with chats that are made up, at 400, 1,280 and 1,920 pixels,
light and dark; a file is FOLDER/STATE-WIDTH-SCHEME.png. With a copy of axe-core (`npm pack axe-core`, axe.min.js in
it), what it finds in a state is printed. `--readme MODEL` makes the README's picture of the page instead.
"""

from __future__ import annotations

import argparse
import base64
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.chromium import Chromium
from support.gguf_writer import runnable_model, write
from support.page import IDLE, Page
from support.served import LiveServer

from llmrun.chat.store.store import Sessions, folder_in
from llmrun.chat.store.turns import Answer, CallRound, Question
from llmrun.chat.tools.toolbox import Toolbox
from llmrun.config import load_settings
from llmrun.models.fingerprint import ModelFingerprint
from llmrun.protocol.messages import Stats, ToolCall
from llmrun.server.guard import Policy
from llmrun.server.page.tools import PageTools

SCREENS = Path(__file__).parents[1] / "screens"
SIZES = {400: 860, 1280: 800, 1920: 1080}
MODEL = "qwen3-4b-q4_k_m"
QUESTION = "Compare trains and planes for a trip of 600 km. Make a table."
ANSWER = """For about **600 km**, a fast train usually wins once the way to the airport is counted.

| | Train | Plane |
| :- | -: | -: |
| Travel time, door to door | 4 h 10 min | 4 h 30 min |
| Price, booked a week before | 79 € | 118 € |
| CO₂ per person | 19 kg | 126 kg |

## What decides it

1. **Where you begin.** A station is in the middle of a town, an airport is not.
2. **How much you carry.** Trains take large bags without a fee:
   - two suitcases and a folded bicycle
   - a dog, with a ticket of its own
3. **What you do meanwhile.** Four hours at a table are four hours of `work.md`.

> The time in the air is short; everything around it is not.

To compare other trips, change the distance:

```python
def hours(km: float, speed: float, around: float) -> float:
    \"\"\"Time from door to door.\"\"\"
    return km / speed + around  # in hours

print(f"train {hours(600, 180, 0.8):.1f} h, plane {hours(600, 700, 3.6):.1f} h")
```

If you like, I can add the car, or a night train."""
REASONING = "They want a table. Door to door matters more than the speed alone, so I count the way to the airport."
STATS = Stats(
    prompt_tokens=412, reused_tokens=388, prefill_seconds=0.21, completion_tokens=318, decode_seconds=24.1,
    ttft_seconds=0.34, itl_p50_seconds=0.074, itl_p95_seconds=0.091, context_used=730, n_ctx=8192,
)  # fmt: skip
TITLES = (
    "Names for a small bakery", "Why is the sky blue?", "A letter to the landlord", "Regular expressions for dates",
    "What to cook with fennel and white beans", "SQL: the newest row of each group", "Packing list for a week",
)  # fmt: skip
TOOL = "def weather(city: str) -> str:\n    '''Tell the weather of a city.'''\n    return 'sunny'\n"
LOOK = "(async () => (await axe.run()).violations.map(each => `${each.id}: ${each.nodes.map(n => n.target)}`))()"


def answer(text: str, reasoning: str = "", rounds: tuple[CallRound, ...] = ()) -> Answer:
    """Return an answer with figures."""
    return Answer(text, reasoning, model=ModelFingerprint(MODEL), stats=STATS, rounds=rounds)


def write_chats() -> None:
    """Save the chats that the pictures show; the one with a long conversation comes first."""
    with Sessions(folder_in(load_settings().state_dir)) as store:
        for title in TITLES:
            chat = store.new(title)
            chat.add_question(Question(title))
            chat.add_answer(answer("A short one."))
            chat.release()
        chat = store.new("Trains and planes for 600 km")
        chat.add_question(Question("Which is greener for a short trip, a train or a plane?"))
        chat.add_answer(answer("A train, nearly always: it takes about a seventh of the energy for each person."))
        chat.add_question(Question(QUESTION))
        call = CallRound("", (ToolCall("1", "distance", '{"from": "Bern", "to": "Paris"}'),), ("596 km",))
        chat.add_answer(answer(ANSWER, REASONING, (call,)))
        chat.release()


CHAT = len(TITLES) + 1
AT_CHAT = f"/#chat={CHAT}"


def press(page: Page, selector: str, until: str = "true") -> None:
    """Press a button, and wait."""
    page.see(f"document.querySelector({selector!r}).click()")
    page.until(until)


def at_chat(page: Page) -> None:
    """Show the long conversation."""
    page.see(f"location.hash = '#chat={CHAT}'")
    page.browser.ask("Page.reload")
    page.until("document.body?.dataset.ready && document.querySelectorAll('article').length === 4")


def settings_open(page: Page) -> None:
    """Open the settings where they are not."""
    page.see("settings.hidden && document.querySelector('#toggle-settings').click()")


def attach(page: Page) -> None:
    """Attach two files, and write a question of three lines."""
    page.see("""(async () => {
        const dropped = new DataTransfer();
        dropped.items.add(new File(["a,b\\n1,2\\n".repeat(900)], "timetable-2026.csv"));
        dropped.items.add(new File(["x ".repeat(90)], "notes.md"));
        document.dispatchEvent(new DragEvent("drop", { dataTransfer: dropped }));
    })()""")
    page.until("document.querySelectorAll('#attached li').length === 2")
    page.see("document.querySelector('#question').focus()")
    page.write("Which of these trips is the shortest,\nwhich one the cheapest,\nand what did I write about them?")


def tokens(page: Page) -> None:
    """Show an answer with its tokens."""
    press(page, "#toggle-tokens")
    page.ask("A good cup of tea begins with fresh water, **just** off the boil.")
    page.until("document.querySelector('.answer .token')")


def token(page: Page) -> None:
    """Open a token."""
    tokens(page)
    page.see("document.querySelectorAll('.answer .token')[1].click()")
    page.until("document.querySelector('#token').open")


def columns(page: Page) -> None:
    """Answer three times."""
    page.see("answers.value = 3; answers.dispatchEvent(new Event('change'))")
    page.ask(ANSWER[: ANSWER.index("##")])
    page.see("answers.value = 1; answers.dispatchEvent(new Event('change'))")


def queue(page: Page) -> None:
    """Ask more while an answer runs."""
    page.write_question("Write the letter to my landlord.")
    page.until("document.querySelector('.answer:last-child')?.textContent.includes('Hel')")
    page.write_question("And shorter, please")
    page.until("document.querySelectorAll('#queued li').length === 1")


def call(page: Page) -> None:
    """Let the model ask for a tool."""
    page.write_question('{"city": "Rome"}')
    page.until("document.querySelector('.call button')")


def row(page: Page, words: str) -> None:
    """Press a button of a chat in the list, which a narrow window opens first."""
    page.see("chats.hidden && document.querySelector('#toggle-chats').click()")
    page.see(f"document.querySelectorAll('#chat-list li')[1].querySelector('[title={words}]').click()")


def problem(page: Page) -> None:
    """Attach what can't be read."""
    page.see("""(async () => {
        const dropped = new DataTransfer();
        dropped.items.add(new File(["x"], "talk.ogg"));
        document.dispatchEvent(new DragEvent("drop", { dataTransfer: dropped }));
    })()""")
    page.until("document.querySelector('#problem').textContent")


STATES: dict[str, tuple[str, Callable[[Page], Any]]] = {
    "empty": ("echo", lambda page: None),
    "chats": ("echo", lambda page: page.see("chats.hidden && document.querySelector('#toggle-chats').click()")),
    "chat": ("echo", at_chat),
    "chat-top": ("echo", lambda page: (at_chat(page), page.see("document.querySelector('#scroller').scrollTo(0, 0)"))),
    "edit": ("echo", lambda page: (at_chat(page), page.see("document.querySelectorAll('[title=Edit]')[1].click()"))),
    "figures": ("echo", lambda page: (at_chat(page), press(page, ".answer:last-child .figures summary"))),
    "settings": ("echo", lambda page: (at_chat(page), settings_open(page))),
    "attached": ("echo", attach),
    "problem": ("echo", problem),
    "rename": ("echo", lambda page: row(page, "Rename")),
    "delete": ("echo", lambda page: row(page, "Delete")),
    "models": ("echo", lambda page: press(page, "#model", "document.querySelectorAll('.catalogue').length > 2")),
    "window": ("echo", lambda page: (page.ask("Hi"), press(page, "#context", "document.querySelector('#window').open"))),
    "branches": ("echo", lambda page: (at_chat(page), press(page, "#go", "document.querySelector('#branches').open"))),
    "tokens": ("echo", tokens),
    "token": ("echo", token),
    "columns": ("echo", columns),
    "answering": ("obedient", queue),
    "call": ("calling", call),
    "none": ("none", lambda page: None),
    "key": ("key", lambda page: None),
}


@contextmanager
def served(mode: str) -> Iterator[LiveServer]:
    """A server in a mode of the fake engines, or without models ("none"), or with a key ("key")."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        model = write(folder / f"{MODEL}.gguf", runnable_model())
        options: dict[str, Any] = {"model": model, "n_ctx": 8192}
        if mode == "calling":
            (folder / "tools.py").write_text(TOOL)
            options["tools"] = PageTools(stack.enter_context(Toolbox((str(folder / "tools.py"),), 60)))
        if mode == "key":
            options["policy"] = Policy(keys=(b"0123456789abcdef",))
        if mode == "none":
            options["names"] = ()
        os.environ["HF_HUB_CACHE"] = str(folder / "hub")
        server = LiveServer(folder, ("echo" if mode in {"key", "none"} else mode,), **options)
        if mode not in {"key", "none"}:
            write_chats()
        yield stack.enter_context(server)


def take(page: Page, target: Path, height: int | None = None) -> None:
    """Save what a page shows, its topmost part if there is a height."""
    clip = {"clip": {"x": 0, "y": 0, "width": page.see("innerWidth"), "height": height, "scale": 1}} if height else {}
    target.write_bytes(base64.b64decode(page.browser.ask("Page.captureScreenshot", **clip)["data"]))


def show(browser: Chromium, server: LiveServer, width: int, scheme: str) -> Page:
    """Open the page as new."""
    browser.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    browser.ask("Emulation.setEmulatedMedia", features=[
        {"name": "prefers-color-scheme", "value": scheme}, {"name": "prefers-reduced-motion", "value": "reduce"},
    ])  # fmt: skip
    ready = "document.body?.dataset.ready || document.querySelector('#key')?.open"
    Page(browser, server, width, until=ready).see("localStorage.clear()")
    page = Page(browser, server, width, until=ready)
    page.browser.ask(
        "Emulation.setDeviceMetricsOverride", width=width, height=SIZES[width], deviceScaleFactor=1, mobile=False
    )
    return page


def check(page: Page, axe: str, name: str) -> None:
    """Print what axe-core finds."""
    page.see(axe)
    found = page.browser.ask("Runtime.evaluate", expression=LOOK, returnByValue=True, awaitPromise=True)
    for each in found["result"]["value"]:
        print(f"{name}: {each}", flush=True)


def main() -> None:
    """Take the pictures that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    parser.add_argument("states", metavar="STATE", nargs="*", help=", ".join(STATES))
    parser.add_argument("--widths", metavar="PIXELS", type=int, nargs="+", default=[*SIZES], choices=[*SIZES])
    parser.add_argument("--schemes", nargs="+", default=["light", "dark"], choices=["light", "dark"])
    parser.add_argument("--axe", metavar="FILE", type=Path)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    axe = arguments.axe.read_text() if arguments.axe else ""
    wanted = arguments.states or [*STATES]
    with ExitStack() as stack:
        profile = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        browser = Chromium(Path(profile))
        stack.callback(browser.close)
        for name in wanted:
            mode, act = STATES[name]
            for width in arguments.widths:
                for scheme in arguments.schemes:
                    with served(mode) as server:
                        page = show(browser, server, width, scheme)
                        act(page)
                        target = arguments.folder / f"{name}-{width}-{scheme}.png"
                        take(page, target)
                        if axe:
                            check(page, axe, target.stem)
    print(arguments.folder)


if __name__ == "__main__":
    main()
