"""Take pictures of the page in all its states: `python tests/benchmarks/pictures.py FOLDER [STATE ...] [--axe FILE]`.

Not a benchmark. A browser shows the page over fake engines with chats that are made up, at 400, 1,280 and 1,920 pixels,
light and dark; a file is FOLDER/STATE-WIDTH-SCHEME.png. With a copy of axe-core (axe.min.js of `npm pack axe-core`),
what it finds in each state is printed. `--readme MODEL` takes the picture of the README instead, with a real engine.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.chromium import Chromium
from support.gguf_writer import runnable_model, write
from support.page import Page
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
TEA = "A good cup of tea begins with fresh water, **just** off the boil."
TOKEN_IS_OPEN = "document.querySelector('#token').open"
TOOL = "def weather(city: str) -> str:\n    '''Tell the weather of a city.'''\n    return 'sunny'\n"
Step = Callable[[Page], None]


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


def see(script: str) -> Step:
    """Run a script."""
    return lambda page: page.see(script) and None


def press(selector: str, until: str = "true") -> Step:
    """Press a button, and wait."""

    def step(page: Page) -> None:
        page.see(f"document.querySelector({selector!r}).click()")
        page.until(until)

    return step


def ask(text: str) -> Step:
    """Ask, and wait for the end of the answer."""
    return lambda page: page.ask(text)


def columns(number: int) -> Step:
    """Choose how many answers there are side by side."""
    return see(f"answers.value = {number}; answers.dispatchEvent(new Event('change'))")


def at_chat(page: Page) -> None:
    """Show the long conversation."""
    page.see(f"location.hash = '#chat={CHAT}'")
    page.browser.ask("Page.reload")
    page.until("document.body?.dataset.ready && document.querySelectorAll('article').length === 4")


def chats_open(page: Page) -> None:
    """Open the list of chats, which narrow windows begin without."""
    page.see("chats.hidden && document.querySelector('#toggle-chats').click()")


def drop(page: Page, files: dict[str, str]) -> None:
    """Drop files on the page."""
    made = "".join(f"dropped.items.add(new File([{text!r}], {name!r}));" for name, text in files.items())
    event = 'document.dispatchEvent(new DragEvent("drop", { dataTransfer: dropped }))'
    page.see(f"(() => {{ const dropped = new DataTransfer(); {made} {event}; }})()")


def attach(page: Page) -> None:
    """Attach two files, and write a question of three lines."""
    drop(page, {"timetable-2026.csv": "a,b\n1,2\n" * 900, "notes.md": "x " * 90})
    page.until("document.querySelectorAll('#attached li').length === 2")
    page.see("document.querySelector('#question').focus()")
    page.write("Which of these trips is the shortest,\nwhich one the cheapest,\nand what did I write about them?")


def problem(page: Page) -> None:
    """Attach what can't be read."""
    drop(page, {"talk.ogg": "x"})
    page.until("document.querySelector('#problem').textContent")


def token(page: Page) -> None:
    """Wait for the tokens of an answer."""
    page.until("document.querySelector('.answer .token')")


def steps(page: Page) -> None:
    """Show the steps of the sampler for the token that is open."""
    page.see("document.querySelector('#token .buttons button').click()")
    page.until("document.querySelector('#token .sliders')")


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


NO_FIGURES = see("document.querySelector('.answer .figures').remove()")  # they are those of this machine
TO_TOP = see("document.querySelector('#scroller').scrollTo(0, 0)")
STATES: dict[str, tuple[str, tuple[Step, ...]]] = {
    "empty": ("echo", ()),
    "chats": ("echo", (chats_open,)),
    "chat": ("echo", (at_chat,)),
    "chat-top": ("echo", (at_chat, TO_TOP)),
    "edit": ("echo", (at_chat, see("document.querySelectorAll('[title=Edit]')[1].click()"))),
    "figures": ("echo", (at_chat, press(".answer:last-child .figures summary"))),
    "settings": ("echo", (at_chat, see("settings.hidden && document.querySelector('#toggle-settings').click()"))),
    "attached": ("echo", (attach,)),
    "problem": ("echo", (problem,)),
    "rename": ("echo", (chats_open, press("#chat-list li:nth-child(2) [title=Rename]"))),
    "delete": ("echo", (chats_open, press("#chat-list li:nth-child(2) [title=Delete]"))),
    "models": ("echo", (press("#model", "document.querySelectorAll('.catalogue').length > 2"),)),
    "window": ("echo", (ask("Hi"), press("#context", "document.querySelector('#window').open"))),
    "branches": ("echo", (at_chat, press("#go", "document.querySelector('#branches').open"))),
    "tokens": ("echo", (press("#toggle-tokens"), ask(TEA), token)),
    "token": ("echo", (press("#toggle-tokens"), ask(TEA), token, press(".answer .token", TOKEN_IS_OPEN))),
    "steps": ("real", (press("#toggle-tokens"), ask("Hello"), token, press(".answer .token", TOKEN_IS_OPEN), steps)),
    "columns": ("echo", (columns(3), ask(ANSWER[: ANSWER.index("##")]), columns(1))),
    "answering": ("obedient", (queue,)),
    "call": ("calling", (call,)),
    "none": ("none", ()),
    "key": ("key", ()),
}


@contextmanager
def served(mode: str) -> Iterator[LiveServer]:
    """A server in a mode of the fake engines, or without models ("none"), or with a key ("key")."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        model = write(folder / f"{MODEL}.gguf", runnable_model({"llama.context_length": 8192}))
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


def take(page: Page, target: Path) -> None:
    """Save what a page shows."""
    target.write_bytes(page.browser.picture())


def show(browser: Chromium, server: LiveServer, width: int, scheme: str) -> Page:
    """Open the page as new."""
    media = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"}
    browser.ask(
        "Emulation.setEmulatedMedia", features=[{"name": name, "value": value} for name, value in media.items()]
    )
    ready = "document.body?.dataset.ready || document.querySelector('#key')?.open"
    Page(browser, server, width, until=ready).see("localStorage.clear()")
    page = Page(browser, server, width, until=ready)
    browser.resize(width, SIZES[width])
    return page


def take_for_readme(browser: Chromium, model: str, target: Path) -> None:
    """Take a picture of the tokens of an answer of a model."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        os.environ.update(LLMRUN_HOME=home, BROWSER="true")
        command = (sys.executable, "-m", "llmrun", "chat", model, "--web")
        server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            assert server.stderr
            port = next(filter(None, (re.search(r"127\.0\.0\.1:(\d+)", line) for line in server.stderr)))[1]
            page = Page(browser, SimpleNamespace(port=int(port)))
            browser.resize(1000, 540)
            for label, value in {"Maximum tokens": "60", "Seed": "1", "Temperature": "0.7"}.items():
                page.set(label, value)
            for step in (press("#toggle-tokens"), ask("What makes a good cup of tea?"), token, NO_FIGURES):
                step(page)
            take(page, target)
        finally:
            server.terminate()
            server.wait()


def main() -> None:
    """Take the pictures that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="FOLDER", type=Path, nargs="?", default=SCREENS)
    parser.add_argument("states", metavar="STATE", nargs="*", help=", ".join(STATES))
    parser.add_argument("--widths", metavar="PIXELS", type=int, nargs="+", default=[*SIZES], choices=[*SIZES])
    parser.add_argument("--schemes", nargs="+", default=["light", "dark"], choices=["light", "dark"])
    parser.add_argument("--axe", metavar="FILE", type=Path)
    parser.add_argument("--readme", metavar="MODEL")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    axe = arguments.axe.read_text() if arguments.axe else ""
    wanted = arguments.states or [*STATES]
    with ExitStack() as stack:
        profile = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        browser = Chromium(Path(profile))
        stack.callback(browser.close)
        if arguments.readme:
            take_for_readme(browser, arguments.readme, arguments.folder / "page-tokens.png")
            return
        for name, width, scheme in itertools.product(wanted, arguments.widths, arguments.schemes):
            mode, acts = STATES[name]
            with served(mode) as server:
                page = show(browser, server, width, scheme)
                for step in acts:
                    step(page)
                target = arguments.folder / f"{name}-{width}-{scheme}.png"
                take(page, target)
                for fault in browser.accessibility_faults(axe) if axe else ():
                    print(f"{target.stem}: {fault}", flush=True)
    print(arguments.folder)


if __name__ == "__main__":
    main()
