"""What several sequences at once give: tokens/s and ubatches a step, a KV cache per stream against a unified one.

    python batching.py [MODEL ...] [--sequences 1 2 4 8 16] [--depths 0 2048] [--tokens 64] [--runs 3]
                       [--llama-server PATH]

The engine's own loop runs in this process, over the real model. A row is a layout of the KV cache, flash attention on
or off, and a depth: so many tokens are in each sequence's cache before the clock starts. t/s is what all sequences get
together while none ends; in brackets, while they end one by one in random order. "ubatches" is how often the weights
are read in a step of the latter, at most and on average, counted by llama.cpp's eval callback in a run of its own.

The last lines tell what becomes of 12 sequences in a cache that has cells for 6, and what a prompt of 6,000 tokens
does to the inter-token latency of three others. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import peers
import server

from llmrun import _native
from llmrun.engine.core.loop import Engine
from llmrun.engine.core.sampler import SequenceSampler
from llmrun.engine.environment import set_environment
from llmrun.engine.llama.context import LlamaContext
from llmrun.engine.llama.model import LlamaModel
from llmrun.protocol.loading import Load
from llmrun.protocol.messages import Event, Failed, Finished, TextDelta
from llmrun.protocol.params import Limits, SamplingParams


class Layout(NamedTuple):
    """How a context is made."""

    unified: bool
    flash: str
    n_ctx: int
    n_seq_max: int
    n_cells: int = 0

    def __str__(self) -> str:
        return f"{'unified' if self.unified else 'per stream':10} flash {self.flash:3}"


class Bench:
    """A model, and the loop over it."""

    def __init__(self, path: Path, threads: int) -> None:
        self.threads = threads
        self.model = LlamaModel(str(path), 0, _native.CancelFlag())
        vocabulary = self.model.vocabulary
        ends = [token for token in range(vocabulary.n_tokens) if vocabulary.is_end(token)]
        self.sampling = SamplingParams(temperature=0, seed=1, logit_bias=tuple((token, -math.inf) for token in ends))

    @contextmanager
    def context(self, layout: Layout, watch: Callable[[Any, bool], bool] | None = None) -> Iterator[LlamaContext]:
        """A context with this layout."""
        self.model.__dict__["rope_depends_on_window"] = not layout.unified  # which is what keeps streams apart
        load = Load(
            self.model.path, layout.n_ctx, layout.n_ctx, n_seq_max=layout.n_seq_max, n_cells=layout.n_cells,
            threads=self.threads, flash_attention=layout.flash,
        )  # fmt: skip
        context = LlamaContext(self.model, load, watch=watch)
        try:
            yield context
        finally:
            context.close()

    def prompt(self, number: int, length: int) -> list[int]:
        """Words that no other prompt has in this order."""
        chance = random.Random(number)
        text = " ".join(str(chance.randrange(1000)) for _ in range(length))
        return [*self.model.vocabulary.with_bos([]), *self.model.vocabulary.tokenize(text, special=False)][:length]

    def add(self, engine: Engine, number: int, prompt: list[int], n_tokens: int) -> None:
        """A request for exactly so many tokens."""
        sampler = SequenceSampler(self.sampling, self.model.vocabulary, prompt)
        engine.add(number, prompt, sampler, Limits(max_tokens=n_tokens))

    def rates(self, context: LlamaContext, layout: Layout, depth: int, lengths: Sequence[Sequence[int]]) -> list[float]:
        """Tokens/s of all sequences together, for each list of their lengths."""
        engine = Engine(context)
        prompts = [self.prompt(number, depth) for number in range(layout.n_seq_max)]
        found: list[float] = []
        for some in lengths:
            for number, prompt in enumerate(prompts):
                self.add(engine, number, prompt, 1)
            run(engine)
            for number, (prompt, length) in enumerate(zip(prompts, some, strict=True)):
                self.add(engine, number, prompt, length)
            began = time.perf_counter()
            run(engine)
            found.append(sum(some) / (time.perf_counter() - began))
        return found

    def ubatches(self, layout: Layout, lengths: Sequence[int]) -> list[int]:
        """How often the weights are read in each step, while sequences end in random order."""
        outputs = 0

        def watch(tensor: Any, ask: bool) -> bool:
            nonlocal outputs
            outputs += tensor.plain_name == "result_output"
            return False

        counts: list[int] = []
        with self.context(layout, watch) as context:
            engine = Engine(context)
            for number, length in enumerate(lengths):
                self.add(engine, number, self.prompt(number, 16), length)
            while engine.busy:
                outputs = 0
                engine.step()
                counts += [outputs] if outputs else []
        return counts[len(lengths) :]  # first of all come the prompts


def run(engine: Engine) -> list[Event]:
    """Step until all is answered."""
    events: list[Event] = []
    while engine.busy:
        events += engine.step()
    for event in events:
        if isinstance(event, Failed):
            raise event.error()
    return events


def random_lengths(n_sequences: int, n_tokens: int, seed: int) -> list[int]:
    """Around so many tokens."""
    chance = random.Random(seed)
    return [chance.randint(n_tokens // 2, 3 * n_tokens // 2) for _ in range(n_sequences)]


def table(bench: Bench, path: Path, options: argparse.Namespace) -> None:
    """A row for each layout and depth, a column for each number of sequences."""
    counts, tokens, runs = options.sequences, options.tokens, options.runs
    print(f"\n{path.name}, {bench.threads} threads, tokens/s (in brackets: ending in random order)\n")
    print_row("", counts)
    for depth in options.depths:
        n_ctx = -(-(max(depth, 16) + 2 * tokens) // 256) * 256
        for unified, flash in itertools.product((False, True), ("on", "off")):
            layouts = [Layout(unified, flash, n_ctx, count) for count in counts]
            cells = [measured(bench, layout, depth, tokens, runs) for layout in layouts]
            print_row(f"{layouts[0]!s:21}depth {depth:>5}", cells)
        if options.llama_server:
            cells = [theirs(bench, options.llama_server, n_ctx, count, depth, tokens, runs) for count in counts]
            print_row(f"{'llama-server':21}depth {depth:>5}", cells)
    for unified in (False, True):
        steps = [bench.ubatches(Layout(unified, "on", 512, n), random_lengths(n, tokens, n)) for n in counts]
        cells = [f"{max(each)} ({statistics.mean(each):.2f})" for each in steps]
        print_row(f"ubatches {'unified' if unified else 'per stream'}", cells)


def print_row(label: str, cells: Sequence[object]) -> None:
    """One line of the table."""
    print(f"{label:32}" + "".join(f"{cell:>18}" for cell in cells), flush=True)


def measured(bench: Bench, layout: Layout, depth: int, tokens: int, runs: int) -> str:
    """One cell of the table."""
    count = layout.n_seq_max
    lengths = [[tokens] * count, random_lengths(count, tokens, count)]
    with bench.context(layout) as context:
        found = [bench.rates(context, layout, max(depth, 16), lengths) for _ in range(runs)]
    steady, ending = (statistics.median(each) for each in zip(*found, strict=True))
    return f"{steady:.1f} ({ending:.1f})"


def theirs(bench: Bench, program: str, n_ctx: int, count: int, depth: int, tokens: int, runs: int) -> str:
    """The same of llama-server."""
    prompts = [bench.prompt(number, max(depth, 16)) for number in range(count)]
    with server.started(program, bench.model.path, bench.threads, count, n_ctx) as ask:
        server.all_at_once(ask, prompts, 1)
        rates = []
        for _ in range(runs):
            began = time.perf_counter()
            server.all_at_once(ask, prompts, tokens)
            rates.append(count * tokens / (time.perf_counter() - began))
    return f"{statistics.median(rates):.1f}"


def crowd(bench: Bench, tokens: int) -> None:
    """12 sequences in cells for 6: whether all finish, and how many of the answers are those that each gives alone."""
    each = 256
    prompts = [bench.prompt(number, each - tokens) for number in range(12)]
    answers: list[dict[int, str]] = []
    for n_seq_max, n_cells in ((1, 0), (12, 6 * each)):
        with bench.context(Layout(True, "on", each, n_seq_max, n_cells)) as context:
            engine = Engine(context)
            for number, prompt in enumerate(prompts):
                bench.add(engine, number, prompt, tokens)
            events = run(engine)
        finished = [event for event in events if isinstance(event, Finished) and event.reason == "length"]
        answers.append({number: text(events, number) for number in range(12)})
    same = sum(answers[0][number] == answers[1][number] for number in range(12))
    print(f"12 sequences in cells for 6: {len(finished)} finish, {same} with their solo answer")


def text(events: list[Event], number: int) -> str:
    """The answer of a request."""
    return "".join(event.text for event in events if isinstance(event, TextDelta) and event.request == number)


def long_prompt(bench: Bench) -> None:
    """What a prompt of 6,000 tokens costs three others that decode: their inter-token latency without and with it."""
    latencies: list[list[float]] = []
    for long in (0, 6000):
        with bench.context(Layout(True, "on", 8192, 4, 12_000)) as context:
            engine = Engine(context)
            for number in range(3):
                bench.add(engine, number, bench.prompt(number, 16), 600)
            times: list[float] = []
            while engine.busy:
                events = engine.step()
                if any(isinstance(event, TextDelta) and event.request == 0 for event in events):
                    times.append(time.perf_counter())
                if long and len(times) == 100:
                    bench.add(engine, 3, bench.prompt(3, long), 1)
                    long = 0
        latencies.append(sorted(1e3 * (after - before) for before, after in pairwise(times)))
    for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
        before, beside = (gaps[int(share * len(gaps))] for gaps in latencies)
        print(
            f"three beside a prompt of 6,000 tokens: {name} {before:.1f} -> {beside:.1f} ms ({beside / before:.2f} x)"
        )


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", metavar="MODEL", nargs="*", default=["smollm2"], help="names or paths")
    parser.add_argument("--llmrun", metavar="PATH")
    parser.add_argument("--llama-server", metavar="PATH", help="measure it beside")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--depths", type=int, nargs="+", default=[0, 2048])
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=peers.cores())
    options = parser.parse_args()
    set_environment()
    peers.warn_if_busy()
    for model in options.models:
        path = (
            Path(model) if Path(model).is_file() else Path(peers.model_file(peers.find_llmrun(options.llmrun), model))
        )
        bench = Bench(path, options.threads)
        table(bench, path, options)
        crowd(bench, options.tokens)
        long_prompt(bench)
        bench.model.close()


if __name__ == "__main__":
    main()
