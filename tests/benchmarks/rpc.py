"""A model's layers over workers: what comes out, what `llmrun plan --rpc` predicts and what happens, and deaths.

    python tests/benchmarks/rpc.py [MODEL...] [--rounds 3] [--delays 0 1 10] [--tokens 48] [--threads N]

Needs a llama.cpp with RPC (`llmrun doctor` says how to get it), or GGML_BACKEND_PATH, see
tests/support/rpc_module.py. Two workers run on this machine; a delay is one-way, in milliseconds, made by a proxy
before each worker, so that a round trip takes twice that. Greedy texts are compared with a local run whose weights are
not repacked, because workers do not repack. Of each figure the best of the rounds counts, predicted and measured in
turns: run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.delaying_proxy import delayed
from support.rpc_workers import RealWorker, real_workers
from support.stand_in_worker import good, worker

from llmrun.config import load_settings
from llmrun.errors import LlmrunError
from llmrun.gguf.reader import read_header
from llmrun.model import Model
from llmrun.model.load_plan import prepare
from llmrun.models.location import ModelLocation, locate
from llmrun.planning.estimate import local_candidate, look_ahead, types_of
from llmrun.planning.hardware_details import probe_details
from llmrun.planning.machine import this_machine
from llmrun.planning.plan import LoadPreferences
from llmrun.planning.speculation import OFF
from llmrun.planning.speed import measure, worker_speeds
from llmrun.protocol.loading import LoadProgress
from llmrun.protocol.messages import Finished, Started, TextDelta
from llmrun.protocol.params import Limits
from llmrun.runner.workers import ask

N_CTX = 2048
PROMPT = "Once upon a time there was a lighthouse keeper who found a message in a bottle. It said:"
LONG = PROMPT * 6  # some 130 tokens; each letter is one to models of random weights


@dataclass(frozen=True)
class Rates:
    """Tokens/s."""

    prefill: float
    decode: float

    def best(self, other: Rates) -> Rates:
        """The higher ones."""
        return Rates(max(self.prefill, other.prefill), max(self.decode, other.decode))


@dataclass(frozen=True)
class Setup:
    """A model, what its answers are, and with how many threads each process computes; 0 is as many as cores."""

    located: ModelLocation
    tokens: int
    threads: int

    def prepared(self, workers: Sequence[str], **changes: object) -> Model:
        """The model over these workers, its Load changed."""
        assert self.located.path is not None
        wishes = LoadPreferences(
            n_ctx=N_CTX, threads=self.threads or None, workers=tuple(workers), flash_attention="on"
        )
        model = prepare(self.located.spec, self.located.path, wishes, warm_up=True, speculate=OFF)
        model.load = replace(model.load, **changes)  # type: ignore[arg-type]
        return model

    def loaded(self, workers: Sequence[str], **changes: object) -> Model:
        """The same, loaded."""
        model = self.prepared(workers, **changes)
        model.start(model.new_engine())
        return model

    @property
    def limits(self) -> Limits:
        """An answer of that length, whatever it says."""
        return Limits(self.tokens, ignores_end=True)


def text(setup: Setup, workers: Sequence[str], **changes: object) -> str:
    """A greedy answer."""
    with setup.loaded(workers, **changes) as model:
        return model.generate(PROMPT, temperature=0, limits=setup.limits).text


def measured(setup: Setup, workers: Sequence[str]) -> Rates:
    """Of a long prompt and an answer."""
    with setup.loaded(workers) as model:
        stats = [
            event.stats
            for prompt in (LONG, PROMPT)
            for event in model.generate(prompt, temperature=0, limits=setup.limits)
            if isinstance(event, Finished)
        ]
    return Rates(stats[0].prefill_rate, stats[1].decode_rate)


def predicted(setup: Setup, workers: Sequence[str]) -> tuple[Rates, float]:
    """What `llmrun plan` says, and how many milliseconds of a token are the network's."""
    assert setup.located.path is not None
    candidate = local_candidate(setup.located.path, read_header(setup.located.path))
    hardware, cache = this_machine(workers, measures_links=True), probe_details().last_cache
    speed = measure(setup.threads or hardware.usable_cores, types_of([candidate]), cache=cache)
    remote = worker_speeds(speed, hardware.workers, cache)
    row = look_ahead(candidate, hardware, speed, (), remote=remote)
    assert row.prefill_rate
    assert row.decode_rate
    return Rates(row.prefill_rate, row.decode_rate), 1000 * row.network.seconds if row.network else 0.0


def show_texts(setup: Setup, workers: Sequence[str]) -> None:
    """Whether greedy texts are the same."""
    plain = text(setup, (), repack=False)
    print(f"  greedy, {setup.tokens} tokens, two workers: equal to a local run without repacking:", end=" ")
    print(text(setup, workers, repack=False) == plain, end="; ")
    print("with repacked weights:", text(setup, workers) == text(setup, ()), flush=True)


def show_rates(setup: Setup, workers: Sequence[str], delay: float | None, rounds: int) -> None:
    """Predicted beside measured; without a delay, of this machine alone."""
    with ExitStack() as stack:
        ends = [stack.enter_context(delayed(each, delay / 1000)) if delay else each for each in workers]
        ends = ends if delay is not None else []
        guess, real, network = Rates(0, 0), Rates(0, 0), float("inf")
        for _ in range(rounds):
            rates, cost = predicted(setup, ends)
            guess, network = guess.best(rates), min(network, cost)
            real = real.best(measured(setup, ends))
    where = "no workers" if delay is None else f"delay {delay:4g} ms, network {network:.1f} ms a token"
    print(f"  {where}:", end="")
    for name in ("decode", "prefill"):
        said, was = getattr(guess, name), getattr(real, name)
        print(f" {name} predicted {said:.1f} t/s, measured {was:.1f} ({said / was - 1:+.0%});", end="")
    print(flush=True)


def show_deaths(setup: Setup) -> None:
    """What is said when a worker dies, how soon, and whether the same model answers again once the worker is back."""
    for phase, moment in (("load", LoadProgress), ("prefill", Started), ("decode", TextDelta)):
        with real_workers(2, setup.threads) as workers:
            first, second = workers
            model = setup.prepared([first.endpoint, second.endpoint])
            try:
                died = die(model, second, moment, setup.tokens)
                workers[1] = RealWorker(int(second.endpoint.rpartition(":")[2]))
                again = model.generate(PROMPT, temperature=0, max_tokens=setup.tokens).text
            finally:
                model.close()
        print(f"  killed in {phase}: {died}; then it answers again: {bool(again)}", flush=True)


def die(model: Model, worker: RealWorker, moment: type[object], tokens: int) -> str:
    """The error in words, and how long after the death it came."""
    killed: list[float] = []

    def kill() -> None:
        if not killed:
            worker.kill()
            killed.append(time.perf_counter())

    try:
        model.start(model.new_engine(), lambda fraction: kill() if moment is LoadProgress and fraction else None)
        for event in model.generate(LONG, temperature=0, max_tokens=tokens):
            if isinstance(event, moment):
                kill()
    except LlmrunError as error:
        return f"{error} ({time.perf_counter() - killed[0]:.1f} s later)"
    return "nothing happened"


def show_wrong_version() -> None:
    """What is said of a worker of another version."""
    with worker(good((6, 0, 0))) as endpoint:
        try:
            ask(endpoint)
        except LlmrunError as error:
            print(f"another version: {error}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["smollm2"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--delays", type=float, nargs="+", default=[0, 1, 10])
    parser.add_argument("--threads", type=int, default=0, help="of each process; 0 is as many as there are cores")
    options = parser.parse_args()
    show_wrong_version()
    for name in options.models:
        print(name, flush=True)
        setup = Setup(locate(name, load_settings()), options.tokens, options.threads)
        with real_workers(2, options.threads) as workers:
            ends = [each.endpoint for each in workers]
            show_texts(setup, ends)
            for delay in (None, *options.delays):
                show_rates(setup, ends, delay, options.rounds)
        show_deaths(setup)


if __name__ == "__main__":
    main()
