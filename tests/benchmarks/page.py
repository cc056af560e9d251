"""The cost of the page in the browser: `python tests/benchmarks/page.py MODEL`, beside an answer in a terminal.

Prints the bytes of the page, the time from `llmrun chat MODEL --web` to a page that takes a question, the decode rates
of the same answer on the page and with `llmrun run` in a terminal, in turns, the processor time that either takes
beside the engine, and the memory of the tab after a long answer. Takes about a minute on two quiet cores.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import pexpect
import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.chromium import Chromium
from support.page import IDLE, Page
from support.served import LiveServer

from llmrun.server.page.files import MEDIA_TYPES, read_file

PROMPT = "Tell me about the sea."
LLMRUN = (sys.executable, "-m", "llmrun")
ALIKE = ("--speculate", "off")  # trials of drafts come at other times in another process
PATIENCE = 120  # seconds for one answer
PIECES = 20_000  # of the fake engine's echo, one a token


class Shown(NamedTuple):
    """An answer that was shown."""

    rate: float  # decoded tokens per second
    cpu: float  # milliseconds a token of processor time, without the engine's


def cpu_seconds(process: psutil.Process) -> float:
    """Processor time of a process, without its children."""
    times = process.cpu_times()
    return float(times.user + times.system)


def in_terminal(model: str, tokens: int) -> Shown:
    """An answer of `llmrun run` in a terminal."""
    words = ["run", model, PROMPT, "--max-tokens", str(tokens), "--seed", "1", "--stats", *ALIKE]
    child = pexpect.spawn(sys.executable, ["-m", "llmrun", *words], timeout=PATIENCE, dimensions=(40, 100))
    process, begun, last = psutil.Process(child.pid), 0.0, 0.0
    while (found := child.expect([rb"TTFT", rb"decode (\d+) tokens ([\d.,]+) t/s", pexpect.EOF])) == 0:
        last = cpu_seconds(process)
        begun = begun or last
    assert found == 1, child.before
    _, rate = child.match.groups()
    child.close(force=True)
    return Shown(float(rate.replace(b",", b"")), (last - begun) * 1000 / tokens)


def on_page(page: Page, front: psutil.Process) -> Shown:
    """An answer in a new chat; `front` is the server's process."""
    browser = psutil.Process(page.browser.pid)
    page.see("document.querySelector('#new').click()")
    page.write_question(PROMPT)
    page.until("document.querySelector('#speed').textContent.includes('prompt tokens reused')")
    processes = [front, browser, *browser.children(recursive=True)]
    begun = sum(map(cpu_seconds, processes))
    page.until(IDLE)
    used = sum(map(cpu_seconds, processes)) - begun
    entries = "fetch('/ui/chats/' + location.hash.slice(6)).then(each => each.json())"
    found = page.browser.ask("Runtime.evaluate", expression=entries, returnByValue=True, awaitPromise=True)
    stats = found["result"]["value"]["entries"][-1]["stats"]
    n_decoded = stats["completion_tokens"] - 1
    return Shown(n_decoded / stats["decode_seconds"], used * 1000 / stats["completion_tokens"])


def show_rates(page: Page, server: int, model: str, tokens: int, rounds: int) -> None:
    """Answer in turns on the page and in a terminal."""
    front = psutil.Process(server)
    page.set("Maximum tokens", str(tokens))
    page.set("Seed", "1")
    on_page(page, front)  # the first one loads the model
    pairs = []
    for number in range(rounds):
        first = in_terminal(model, tokens) if number % 2 else None
        shown = on_page(page, front)
        pairs.append((shown, first or in_terminal(model, tokens)))
        print("  page {:.1f} tokens/s, terminal {:.1f} tokens/s".format(*(each.rate for each in pairs[-1])), flush=True)
    ratios = [shown.rate / plain.rate for shown, plain in pairs]
    best = [max(each.rate for each in side) for side in zip(*pairs, strict=True)]
    cpu = [statistics.median(each.cpu for each in side) for side in zip(*pairs, strict=True)]
    print(f"decode: best {best[0]:.1f} on the page, {best[1]:.1f} in a terminal: {best[0] / best[1]:.3f}x")
    print(f"decode: median of the pairs {statistics.median(ratios):.3f}x, {min(ratios):.3f} to {max(ratios):.3f}")
    print(f"processor time beside the engine: page {cpu[0]:.1f} ms, terminal {cpu[1]:.1f} ms a token")


def show_memory(browser: Chromium, folder: Path) -> None:
    """Show the memory of the tab before and after one long answer of a fake engine."""
    with LiveServer(folder, ("echo",), n_ctx=2_000_000) as fake:
        page = Page(browser, fake)
        before, began = memory(browser), time.monotonic()
        page.ask("words. " * PIECES)
        seconds = time.monotonic() - began
        print(f"tab, of an answer of {PIECES:,} tokens in {seconds:.1f} s: {before} before, {memory(browser)} after")


def memory(browser: Chromium) -> str:
    """Return the size of the page's own objects, and of the process that shows them."""
    browser.ask("HeapProfiler.collectGarbage")
    used = browser.ask("Runtime.getHeapUsage")["usedSize"]
    process = max(each.memory_full_info().uss for each in psutil.Process(browser.pid).children(recursive=True))
    return f"{used / 1e6:.1f} MB of objects ({process / 1e6:.0f} MB of the process)"


def main() -> None:
    """Measure everything; the saved chats of the user stay as they are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=4)
    arguments = parser.parse_args()
    n_bytes = sum(len(read_file(name)) for name in MEDIA_TYPES)
    print(f"bytes of the page: {n_bytes:,} in {len(MEDIA_TYPES)} files")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        folder = Path(home)
        os.environ.update(LLMRUN_HOME=str(folder / "home"), BROWSER="true")
        browser = Chromium(folder / "profile")
        began = time.monotonic()
        server = subprocess.Popen(
            (*LLMRUN, "chat", arguments.model, "--web", *ALIKE), stderr=subprocess.PIPE, text=True
        )
        try:
            assert server.stderr
            address = next(filter(None, (re.search(r"127\.0\.0\.1:(\d+)", line) for line in server.stderr)))
            page = Page(browser, _Port(int(address[1])))  # type: ignore[arg-type]
            print(f"chat --web to a page that takes a question: {time.monotonic() - began:.2f} s", flush=True)
            show_rates(page, server.pid, arguments.model, arguments.tokens, arguments.rounds)
            server.send_signal(signal.SIGINT)
            server.wait(PATIENCE)
            show_memory(browser, folder)
        finally:
            server.kill()
            browser.close()


class _Port:
    """The part of a LiveServer that a Page needs."""

    def __init__(self, port: int) -> None:
        self.port = port


if __name__ == "__main__":
    main()
