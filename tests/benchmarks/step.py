"""The cost of a token outside llama_decode: the engine's loop for one user and for eight, and the HTTP front of serve.

    python tests/benchmarks/step.py [--clients 1 8] [--tokens 256] [--runs 5] [--greedy]

First the generation loop of this process, with the events of each step written to a pipe: the median time of a step
without llama_decode, a row. Then the front process of `llmrun serve` while clients stream: its processor time a token.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peers
import server
import serving

PROMPT = "Write the numbers from 1 to 1000 in words, one a line. Client {}."


class DecodeTimer:
    """Measures, for each step, the time since the end of the last one's llama_decode without that of its own.

    Of a run of steps only the mean is known.
    """

    def __init__(self, batch: Any) -> None:
        self.outside = list[float]()
        self._ended = time.perf_counter()
        self._decode, self._run = batch._decode, batch.run
        batch._decode, batch.run = self._timed_decode, self._timed_run

    def _timed_decode(self, *arguments: Any) -> int:
        began = time.perf_counter()
        status: int = self._decode(*arguments)
        self._add([time.perf_counter() - began])
        return status

    def _timed_run(self, *arguments: Any) -> Any:
        *others, limit = arguments
        decode_seconds = list[float]()

        def take(steps: Any) -> float:
            decode_seconds.extend(seconds for _, seconds, _ in steps)
            return float(limit.take(steps))

        run = self._run(*others, limit._replace(take=take))
        self._add([*decode_seconds, *(seconds for _, seconds, _ in run[-1])])
        return run

    def _add(self, decode_seconds: list[float]) -> None:
        now = time.perf_counter()
        if decode_seconds:
            self.outside.append((now - self._ended - sum(decode_seconds)) / len(decode_seconds))
        self._ended = now

    def take(self) -> float:
        """Return the median since the last call, in seconds a step."""
        seconds = statistics.median(self.outside)
        self.outside = []
        return seconds


@contextmanager
def loaded(path: str, n_seq_max: int, threads: int) -> Iterator[tuple[Any, Any]]:
    """Yield a loaded model of this process, and its context."""
    from llmrun import _native
    from llmrun.engine import environment
    from llmrun.engine.llama.context import LlamaContext
    from llmrun.engine.llama.model import LlamaModel
    from llmrun.engine.loaded import LoadedModel
    from llmrun.protocol.loading import Load

    environment.set_environment()
    load = Load(path, 2048, n_seq_max=n_seq_max, threads=threads)
    weights = LlamaModel.of(load, _native.CancelFlag())
    context = LlamaContext(weights, load)
    yield LoadedModel(weights, context, load), context
    context.close()
    weights.close()


def outside_decode(model: Any, timer: DecodeTimer, n_clients: int, n_tokens: int, *, greedy: bool) -> float:
    """Return microseconds a row that the loop takes besides llama_decode, with its events sent."""
    from llmrun import _native
    from llmrun.engine.channel import Channel, Outbox
    from llmrun.engine.llama.base import RunLimit
    from llmrun.protocol.messages import AnswerRequest, Generate, Message
    from llmrun.protocol.params import Limits, SamplingParams

    interrupted = _native.CancelFlag()
    end, start = os.pipe()
    reader = threading.Thread(target=lambda: [None for _ in iter(lambda: os.read(end, 1 << 16), b"")])
    reader.start()
    with Path(os.devnull).open("rb") as nothing, os.fdopen(start, "wb") as events:
        outbox = Outbox(Channel(nothing, events).send)
        outbox.set_joining(model.load.n_seq_max == 1)

        def emit(more: Any) -> float:
            outbox.add(more)
            return max(0.0, outbox.due - time.perf_counter())

        for number in range(1, n_clients + 1):
            messages = (Message("user", PROMPT.format(number)),)
            sampling = SamplingParams(temperature=0.0 if greedy else 0.8, seed=number)
            limits = Limits(max_tokens=n_tokens, ignores_end=True)
            asked = AnswerRequest(messages=messages, sampling=sampling, limits=limits)
            model.engine.add(model.preparer.prepare(Generate(number, asked), lambda event: None))
        while model.engine._waiting or any(each.n_completion < 2 for each in model.engine._active):
            outbox.add(model.engine.step())
        timer.take()
        while len(model.engine._active) == n_clients:
            outbox.add(model.engine.step(RunLimit(64, outbox.due - time.perf_counter(), interrupted), emit))
        seconds = timer.take()
        while model.engine.busy:
            outbox.add(model.engine.step())
    reader.join()
    os.close(end)
    return 1e6 * seconds / n_clients


def front(port: int, pid: int, n_clients: int, n_tokens: int, numbers: Iterator[int]) -> float:
    """Return microseconds a token of the HTTP process."""
    clock = ~pid << 3 | 2  # Linux's clock of another process's processor time, see clock_getcpuclockid()

    async def stream() -> int:
        clients = (serving.ask(port, serving.question(next(numbers)), n_tokens) for _ in range(n_clients))
        return sum(each.n_tokens for each in await asyncio.gather(*clients))

    began = time.clock_gettime(clock)
    n_streamed = asyncio.run(stream())
    return 1e6 * (time.clock_gettime(clock) - began) / n_streamed


def main() -> int:
    """Measure and print."""
    parser = peers.parser(__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--greedy", action="store_true", help="temperature 0, not the default sampling")
    parser.add_argument("--only", choices=["loop", "front"], help="measure one of the two")
    options = parser.parse_args()
    llmrun = peers.find_llmrun(options.llmrun)
    path, threads = peers.model_file(llmrun, options.model), options.threads or peers.cores()
    report, wanted = peers.Report(), {"loop": {1: 90, 8: 30}, "front": {1: 120, 8: 60}}

    def add(part: str, n_clients: int, what: str, values: list[float]) -> None:
        name = f"{n_clients} clients, {what}"
        report.add(name, values, "µs")
        if n_clients in wanted[part]:
            report.bound(name, statistics.median(values), wanted[part][n_clients], at_most=True)

    for n_clients in options.clients if options.only != "front" else ():
        with loaded(path, n_clients, threads) as (model, context):
            timer = DecodeTimer(context._batch)
            costs = [
                outside_decode(model, timer, n_clients, options.tokens, greedy=options.greedy)
                for _ in range(1 + options.runs)
            ]
        add("loop", n_clients, "a row outside llama_decode", costs[1:])
    if options.only != "loop":
        command = [llmrun, "serve", path, "--parallel", "8", "--ctx", "8192", "-t", str(threads), "--speculate", "off"]
        numbers = itertools.count()
        with server.process(command) as (port, pid):
            for n_clients in options.clients:
                costs = [front(port, pid, n_clients, options.tokens, numbers) for _ in range(1 + options.runs)]
                add("front", n_clients, "a token in the HTTP process", costs[1:])
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
