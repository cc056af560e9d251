"""10,000 requests to `llmrun serve`, many of which go wrong: whether all are answered, and what is left afterwards.

    python tests/benchmarks/load.py [--requests 10000] [--clients 24] [--parallel 8] [--kill-every 450]

A tiny model with random weights is served. Requests are of mixed length in all protocols, streamed or not; 20 % of the
clients leave early, 5 % send what is malformed, and now and then the engine is killed, so that about 1 % of the
requests see it. The first tenth and the last third run without kills: memory, descriptors and threads of both
processes are compared between the ends of them, while no request is running. Then a prompt for each sequence
fills the KV cache at once, which only works if no sequence and no cell was lost.

The wait of a streamed request is the time to its first text. Requests of one length are compared, those that waited
while an engine was replaced left out, in turns: how many others got their first text meanwhile, which is the same
whatever else the machine does.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import peers
import psutil
import server
from load_requests import PROTOCOLS, Answer, LoadRequest, judged, make_request, question
from random_model import Shape, write_model

TINY = Shape(width=64, layers=1, feed_forward=128, heads=4, kv_heads=4, head_length=16, vocabulary=512)
N_CTX = 512
_SIGNALS = (signal.SIGKILL, signal.SIGSEGV)
_ERRORS = {"malformed", "usage", "model_not_found", "model-not-found", "engine-crashed"}
"""Which may come of it all."""
_GROWTH, _SPARE_BYTES = 1.1, 8 << 20  # memory may grow so much: allocators keep some
_SPARE_THREADS = 8  # of a pool, which has some more when it first needs them
_STARVES = 3.0
_PATIENCE_SECONDS = 120.0  # who is not answered by then never is


class Outcome(NamedTuple):
    """What became of a request: when it was sent, when its first text came, if it did, and its end. Seconds."""

    asked: LoadRequest
    answer: Answer
    began: float
    spoken: float | None
    ended: float


class Usage(NamedTuple):
    """What a process holds."""

    rss: int
    descriptors: int
    threads: int


async def ask(port: int, asked: LoadRequest) -> Outcome:
    """Send a request, and stay as long as its client does."""
    began, spoken = time.monotonic(), None
    data, most = bytearray(), math.inf
    head = f"POST {asked.protocol.path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    sent = f"{head}Content-Length: {len(asked.body)}\r\nConnection: close\r\n\r\n".encode() + asked.body
    if asked.leaves_at is not None:
        sent, most = sent[: int(asked.leaves_at * len(sent))], asked.leaves_at - 1
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    with suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(_PATIENCE_SECONDS):
            while most > 0 and (piece := await reader.read(1 << 16)):
                data += piece
                most -= 1
                if spoken is None and asked.protocol.piece in data:
                    spoken = time.monotonic()
    writer.close()
    answer = Answer("left") if asked.leaves_at is not None else judged(asked, bytes(data))
    return Outcome(asked, answer, began, spoken, time.monotonic())


@dataclass
class Load:
    """A run.

    Attributes:
        front: the server's process; the engine is its child.
        kills: when an engine was killed, and when the next one had answered.
    """

    port: int
    front: psutil.Process
    outcomes: list[Outcome] = field(default_factory=list)
    kills: list[tuple[float, float]] = field(default_factory=list)

    async def run(self, numbers: range, n_clients: int, kill_every: int = 0) -> None:
        """Send these requests from concurrent clients, and kill the engine after each kill_every answers."""
        left = iter(numbers)
        killing: list[asyncio.Task[None]] = []

        async def client() -> None:
            for number in left:
                self.outcomes.append(await ask(self.port, make_request(number)))
                if kill_every and len(self.outcomes) % kill_every == 0:
                    killing.append(asyncio.create_task(self._kill()))

        await asyncio.gather(*(client() for _ in range(n_clients)))
        await asyncio.gather(*killing)

    async def _kill(self) -> None:
        began = time.monotonic()
        for engine in self.front.children():
            engine.send_signal(_SIGNALS[len(self.kills) % len(_SIGNALS)])
        self.kills.append((began, math.inf))
        index = len(self.kills) - 1
        await ask(self.port, question(f"Who lives after kill {index}?"))
        self.kills[index] = began, time.monotonic()

    async def usages(self) -> list[Usage]:
        """Return the usages of front and engine once no request is running."""
        while busy := await self._busy():
            print(f"waiting for {busy}")
            await asyncio.sleep(1.0)
        return [
            Usage(process.memory_info().rss, process.num_fds(), process.num_threads())
            for process in (self.front, *self.front.children())
        ]

    async def _busy(self) -> list[str]:
        """Return the lines of /metrics with running or waiting requests."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        lines = (await reader.read()).decode().splitlines()
        writer.close()
        return [line for line in lines if line.startswith("vllm:num_requests_") and not line.endswith(" 0")]

    async def fills(self, n_parallel: int) -> bool:
        """Return whether N prompts that together fill the KV cache are answered side by side."""
        text = "x" * (N_CTX * 3 // 4)
        found = await asyncio.gather(
            *(ask(self.port, question(f"{number} {text}", 256)) for number in range(n_parallel))
        )
        return max(each.spoken or math.inf for each in found) < min(each.ended for each in found)


def tell_answers(load: Load, seconds: float) -> bool:
    """A line for each protocol; whether everything ended in shape."""
    outcomes = load.outcomes
    print(
        f"{len(outcomes):,} requests in {seconds:.0f} s\n\n{'':22}{'answered':>10}{'error':>8}{'left':>8}{'broken':>8}"
    )
    for protocol in PROTOCOLS:
        kinds = Counter(each.answer.kind for each in outcomes if each.asked.protocol is protocol)
        counts = [kinds[kind] for kind in ("answer", "error", "left", "broken")]
        print(f"{protocol.path:22}{counts[0]:>10,}{counts[1]:>8,}{counts[2]:>8,}{counts[3]:>8,}")
    codes = Counter(each.answer.code for each in outcomes if each.answer.kind == "error")
    print("\nerrors: " + ", ".join(f"{code} {count:,}" for code, count in codes.most_common()))
    print(
        f"engines killed: {len(load.kills)}, which ended {codes['engine-crashed'] / len(outcomes):.1%} of the requests"
    )
    broken = [each for each in outcomes if each.answer.kind == "broken"]
    for each in broken[:10]:
        print(f"BROKEN {each.asked.protocol.path}: {each.answer.code}\n    {each.asked.body[:200]!r}")
    unforeseen = {*codes} - _ERRORS
    return not broken and not unforeseen


def tell_waits(load: Load) -> bool:
    """Print a line for each length, and return whether no request waited much longer than others."""
    spoken = sorted(each.spoken for each in load.outcomes if each.spoken is not None)
    print(f"\n{'wait for first text':22}{'requests':>10}{'median':>10}{'longest':>10}{'in turns':>12}{'longest':>10}")
    report = peers.Report()
    for name, is_long in (("short prompts", False), ("long prompts", True)):
        waits = [
            (each.spoken - each.began, bisect_left(spoken, each.spoken) - bisect_left(spoken, each.began))
            for each in load.outcomes
            if each.spoken is not None and each.asked.is_long is is_long and not _saw_a_kill(each, load.kills)
        ]
        seconds, turns = zip(*waits, strict=True)
        middle, middle_turn = 1000 * statistics.median(seconds), statistics.median(turns)
        line = f"{name:22}{len(waits):>10,}{middle:>7.0f} ms{1000 * max(seconds):>7.0f} ms"
        print(f"{line}{middle_turn:>12}{max(turns):>10}")
        report.bound(f"longest wait in turns / median, {name}", max(turns) / middle_turn, _STARVES, at_most=True)
    return report.finish() == 0


def _saw_a_kill(outcome: Outcome, kills: Sequence[tuple[float, float]]) -> bool:
    return any(outcome.began < after and outcome.ended > before for before, after in kills)


def tell_usages(before: Sequence[Usage], after: Sequence[Usage]) -> bool:
    """A line for each process and figure; whether none has grown."""
    held = [len(before) == len(after) == 2]
    print(f"\n{'':22}{'before':>12}{'after':>12}")
    for name, first, last in zip(("front", "engine"), before, after, strict=False):
        print(f"{name + ' memory':22}{first.rss / 1e6:>9.1f} MB{last.rss / 1e6:>9.1f} MB")
        print(f"{name + ' descriptors':22}{first.descriptors:>12}{last.descriptors:>12}")
        print(f"{name + ' threads':22}{first.threads:>12}{last.threads:>12}")
        held.append(last.rss <= first.rss * _GROWTH + _SPARE_BYTES)
        held.append(last.descriptors <= first.descriptors and last.threads <= first.threads + _SPARE_THREADS)
    return all(held)


async def measure(load: Load, options: argparse.Namespace) -> bool:
    """Run, and print."""
    count, clients = options.requests, options.clients
    began = time.monotonic()
    await load.run(range(count // 10), clients)
    before = await load.usages()
    await load.run(range(count // 10, count * 2 // 3), clients, options.kill_every)
    await load.run(range(count * 2 // 3, count), clients)
    after = await load.usages()
    held = [tell_answers(load, time.monotonic() - began), tell_usages(before, after)]
    fills = await load.fills(options.parallel)
    print(f"\n{options.parallel} prompts that fill the KV cache: {'side by side' if fills else 'NOT SIDE BY SIDE'}\n")
    return all([*held, fills, tell_waits(load)])


def main() -> int:
    """Serve a model of a temporary folder, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llmrun", metavar="PATH", help="the command; default: beside this Python, or PATH")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--parallel", type=int, default=8)
    parser.add_argument("--kill-every", type=int, default=450, metavar="REQUESTS")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LLMRUN_HOME"] = folder  # KV states go there
        model = write_model(Path(folder, "tiny.gguf"), TINY, lambda name: "F16", N_CTX)
        arguments = ["serve", str(model), "--parallel", str(options.parallel), "--ctx", str(N_CTX), "-t", "1"]
        with server.process([peers.find_llmrun(options.llmrun), *arguments]) as (port, pid):
            return 0 if asyncio.run(measure(Load(port, psutil.Process(pid)), options)) else 1


if __name__ == "__main__":
    sys.exit(main())
