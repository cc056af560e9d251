"""The cost of the page in the browser: `python tests/benchmarks/page.py MODEL`, beside an answer in a terminal.

Prints the bytes of the page, the time from `llmrun chat MODEL --web` to a page that takes a question, the decode rates
of the same answer on the page and with `llmrun run`, in turns, and the memory of the tab after 20,000 tokens.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.chromium import Chromium
from support.page import IDLE, Page
from support.served import LiveServer

from llmrun.server.page.files import FOLDER, MEDIA_TYPES

PROMPT, TOKENS, TURNS = "Tell me about the sea.", 128, 3
PIECE = 7  # characters of a token of the fake engine's echo
LLMRUN = (sys.executable, "-m", "llmrun")


def rate(stats: dict[str, float]) -> float:
    """Decoded tokens per second."""
    return (stats["completion_tokens"] - 1) / stats["decode_seconds"]


def in_terminal(model: str) -> float:
    """The rate of `llmrun run`, which draws nothing in a pipe."""
    words = (*LLMRUN, "run", model, PROMPT, "--max-tokens", str(TOKENS), "--seed", "1", "--json")
    lines = subprocess.run(words, capture_output=True, check=True, text=True).stdout.splitlines()
    return rate(json.loads(lines[-1])["stats"])


def on_page(page: Page) -> float:
    """The rate of an answer in a new chat."""
    page.see("document.querySelector('#new').click()")
    page.ask(PROMPT)
    entries = "fetch('/ui/chats/' + location.hash.slice(6)).then(each => each.json())"
    found = page.browser.ask("Runtime.evaluate", expression=entries, returnByValue=True, awaitPromise=True)
    return rate(found["result"]["value"]["entries"][-1]["stats"])


def heap(browser: Chromium) -> float:
    """Megabytes of the page's own objects."""
    browser.ask("HeapProfiler.collectGarbage")
    used: float = browser.ask("Runtime.getHeapUsage")["usedSize"]
    return used / 1e6


def main(model: str) -> None:
    folder = Path(tempfile.mkdtemp())
    os.environ["LLMRUN_HOME"] = str(folder / "home")  # the saved chats of the user stay as they are
    n_bytes = sum((FOLDER / name).stat().st_size for name in MEDIA_TYPES)
    print(f"bytes of the page: {n_bytes:,} in {len(MEDIA_TYPES)} files")
    browser = Chromium(folder / "profile")
    began = time.monotonic()
    server = subprocess.Popen((*LLMRUN, "chat", model, "--web"), stderr=subprocess.PIPE, text=True)
    assert server.stderr
    address = re.search(r"http://127\.0\.0\.1:(\d+)", server.stderr.readline())
    assert address
    try:
        page = Page(browser, _Port(int(address[1])))  # type: ignore[arg-type]
        print(f"chat --web to a page that takes a question: {time.monotonic() - began:.2f} s")
        page.set("Maximum tokens", str(TOKENS))
        page.set("Seed", "1")
        on_page(page)  # the first one loads the model
        pairs = [(on_page(page), in_terminal(model)) for _ in range(TURNS)]
        shown, plain = (max(rates) for rates in zip(*pairs, strict=True))
        print(f"decode on the page {shown:.1f} tokens/s, in a pipe {plain:.1f} tokens/s: {shown / plain:.3f}x")
    finally:
        server.send_signal(signal.SIGINT)
        server.wait()
    with LiveServer(folder, ("echo",), n_ctx=2_000_000) as fake:
        page = Page(browser, fake)
        before = heap(browser)
        for _ in range(10):
            page.ask("words. " * 2000)
        page.until(IDLE)
        print(f"heap of the tab: {before:.1f} MB empty, {heap(browser):.1f} MB after 20,000 tokens")
    browser.close()


class _Port:
    """The part of a LiveServer that a Page needs."""

    def __init__(self, port: int) -> None:
        self.port = port


if __name__ == "__main__":
    main(sys.argv[1])
