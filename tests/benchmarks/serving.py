"""`llmrun serve` beside llama-server: several clients at once, streaming over HTTP.

    python tests/benchmarks/serving.py [--llama-server PATH] [--clients 1 2 4 8] [--tokens 64] [--prompt 0] [--runs 3]

Both serve the same file on the same threads with 8 sequences, and take turns. Every client asks /v1/chat/completions
for an answer of --tokens tokens, greedy, to a question of its own after --prompt tokens of its own. The figures are
tokens/s of all clients together, time to first token, and inter-token latency as the clients see it, between events
with text. With --prompt that is all.

Then, on each: what 3 streaming clients notice of a prompt of 6,000 tokens (their longest silence); how long a short
request takes after clients left in the middle of such a prompt; and the time to first token of 8 clients whose
conversations begin with one system prompt of 1,500 tokens, the first beside the others. Run it on a machine that does
nothing else.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import peers
import server

SENTENCE, SENTENCE_TOKENS = "The quick brown fox jumps over the lazy dog. ", 10
QUESTIONS = ("the sea", "a city", "winter", "bread", "the moon", "trains", "a garden", "music")
N_PARALLEL, N_CTX = 8, 8192
LONG = 6000  # tokens of a long prompt


class Stream(NamedTuple):
    """When a request was sent, when each piece of its answer came, and how many tokens that was."""

    began: float
    times: list[float]
    n_tokens: int

    @property
    def ttft(self) -> float:
        """Seconds."""
        return self.times[0] - self.began

    @property
    def gaps(self) -> list[float]:
        """Seconds between pieces."""
        return [after - before for before, after in pairwise(self.times)]


class Served(NamedTuple):
    """The figures of N concurrent clients: tokens/s together, and seconds."""

    rate: float
    ttft: float
    itl_p50: float
    itl_p95: float


async def ask(port: int, messages: list[dict[str, str]], n_tokens: int, leaves: float | None = None) -> Stream:
    """Stream one answer, to its end or until the client leaves after some seconds."""
    options = {"temperature": 0, "max_tokens": n_tokens, "stream": True, "stream_options": {"include_usage": True}}
    options["ignore_eos"] = True  # both sides have the same work
    body = json.dumps({"messages": messages, **options}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    began, times, n_tokens_reported = time.perf_counter(), [], 0
    writer.write(head.encode() + body)
    try:
        async with asyncio.timeout(leaves):
            status = await reader.readline()
            while line := await reader.readline():
                if line.startswith(b"data: {"):
                    now, event = time.perf_counter(), json.loads(line[6:])
                    times += [now] if _has_text(event) else []
                    n_tokens_reported = (event.get("usage") or {}).get("completion_tokens", n_tokens_reported)
            if b" 200 " not in status or not times:
                sys.exit(f"no answer: {status!r}")
    except TimeoutError:
        pass
    finally:
        writer.close()
    return Stream(began, times, n_tokens_reported)


def _has_text(event: dict[str, Any]) -> bool:
    """Whether an event carries a piece of the answer."""
    choices = event.get("choices")
    return bool(choices and choices[0].get("delta", {}).get("content"))


def question(number: int, n_before: int = 0) -> list[dict[str, str]]:
    """Return a new conversation: about n_before tokens, then a short question."""
    before = f"{number}. {SENTENCE * (n_before // SENTENCE_TOKENS)}" if n_before else ""
    text = f"{before}Tell me a long story about {QUESTIONS[number % 8]}, number {number}."
    return [{"role": "user", "content": text}]


async def load_from(port: int, n_clients: int, n_tokens: int, n_before: int, numbers: Iterator[int]) -> Served:
    """Measure n_clients concurrent clients."""
    questions = [question(next(numbers), n_before) for _ in range(n_clients)]
    streams = await asyncio.gather(*(ask(port, each, n_tokens) for each in questions))
    first, last = min(each.began for each in streams), max(each.times[-1] for each in streams)
    gaps = [gap for each in streams for gap in each.gaps]
    ttft = statistics.median(each.ttft for each in streams)
    p95 = statistics.quantiles(gaps, n=20)[-1]
    n_answered = sum(each.n_tokens for each in streams)
    return Served(n_answered / (last - first), ttft, statistics.median(gaps), p95)


async def silence(port: int, n_tokens: int, numbers: Iterator[int]) -> float:
    """The longest silence of three streams while a long prompt arrives, in seconds."""
    others = [asyncio.create_task(ask(port, question(next(numbers)), n_tokens)) for _ in range(3)]
    await asyncio.sleep(1)
    await ask(port, question(next(numbers), LONG), 1, leaves=60)
    return max(max(each.gaps) for each in await asyncio.gather(*others))


async def after_leaving(port: int, numbers: Iterator[int]) -> float:
    """Seconds to the first token of a short request, after three clients left in the middle of long prompts."""
    await asyncio.gather(*(ask(port, question(next(numbers), LONG), 8, leaves=1.0) for _ in range(3)))
    return (await ask(port, question(next(numbers)), 8)).ttft


async def shared(port: int, numbers: Iterator[int]) -> float:
    """Time to first token of clients 2 to 8, as a share of the first's: all have the same long system prompt."""
    system = {"role": "system", "content": f"{next(numbers)}. " + SENTENCE * (1500 // SENTENCE_TOKENS)}
    first = await ask(port, [system, *question(next(numbers))], 8)
    others = [(await ask(port, [system, *question(next(numbers))], 8)).ttft for _ in range(7)]
    return statistics.median(others) / first.ttft


@contextmanager
def serving(llmrun: str, model: str, threads: int) -> Iterator[int]:
    """`llmrun serve`; its port."""
    options = ["--parallel", str(N_PARALLEL), "--ctx", str(N_CTX), "-t", str(threads)]
    with server.running([llmrun, "serve", model, *options]) as port:
        yield port


@contextmanager
def llama_serving(program: str, model: str, threads: int) -> Iterator[int]:
    """llama-server; its port."""
    options = ["-t", str(threads), "-np", str(N_PARALLEL), "-c", str(N_CTX * N_PARALLEL), "--jinja", "--no-webui"]
    with server.running([program, "-m", model, *options]) as port:
        yield port


def main() -> int:
    """Measure and print."""
    parser = peers.parser(__doc__)
    parser.add_argument("--llama-server", metavar="PATH", help="default: on PATH")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=0)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    llmrun = peers.find_llmrun(options.llmrun)
    path, threads = peers.model_file(llmrun, options.model), options.threads or peers.cores()
    theirs = peers.find_tool("llama-server", options.llama_server)
    peers.warn_if_busy()
    numbers, report = itertools.count(), peers.Report()
    with serving(llmrun, path, threads) as ours, llama_serving(theirs, path, threads) as other:
        ports = {"llmrun": ours, "llama-server": other}

        def turns(work: Callable[[int], Awaitable[Any]], runs: int) -> dict[str, list[Any]]:
            sides = {name: lambda port=port: asyncio.run(work(port)) for name, port in ports.items()}
            return peers.take_turns(runs, sides)

        for n_clients in options.clients:
            sizes = n_clients, options.tokens, options.prompt
            add_load(report, n_clients, turns(lambda port, sizes=sizes: load_from(port, *sizes, numbers), options.runs))
        if options.prompt:
            return report.finish()
        for name, unit, work in (
            (
                "longest silence of 3 streams beside a prompt of 6,000 tokens",
                "s",
                lambda port: silence(port, 128, numbers),
            ),
            ("TTFT after 3 clients left long prompts", "s", lambda port: after_leaving(port, numbers)),
            ("TTFT with a known system prompt / the first's", "x", lambda port: shared(port, numbers)),
        ):
            found = turns(work, 1)
            for side, values in found.items():
                report.add(name, values, unit, side)
    return report.finish()


def add_load(report: peers.Report, n_clients: int, results: dict[str, list[Served]]) -> None:
    """Add the figures of one number of clients, and tokens/s as a ratio."""
    for side, values in results.items():
        rate, ttft, p50, p95 = zip(*values, strict=True)
        report.add(f"{n_clients} clients, all together", rate, "t/s", side)
        for name, seconds in (("TTFT", ttft), ("inter-token p50", p50), ("inter-token p95", p95)):
            report.add(f"{n_clients} clients, {name}", [1000 * each for each in seconds], "ms", side)
    ours, theirs = ([each.rate for each in values] for values in results.values())
    report.ratio(f"{n_clients} clients, llmrun / llama-server", ours, theirs)


if __name__ == "__main__":
    sys.exit(main())
