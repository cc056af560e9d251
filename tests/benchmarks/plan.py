"""What `llmrun plan` predicts, beside what really happens: peak memory and decode speed.

    python tests/benchmarks/plan.py [--rounds 3] [--only TEXT] [--patience 600]

Models of several shapes and quantizations are made with random weights in a temporary folder (3 GB). Each answers in
an engine of its own, and its speed is the best of the rounds; between them the machine is measured as `llmrun plan`
does, and each figure is the best of the rounds as well. A measurement during which other programs used the processor is
made again, as long as patience lasts; on a machine that does nothing else all takes two minutes.
Memory is the engine's peak resident set (VmHWM), of which the file's pages beside repacked weights could be reclaimed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import peers
from random_model import Shape, write_model

from llmrun.gguf.reader import read_header
from llmrun.model.loading import prepare
from llmrun.models.registry import ModelSpec
from llmrun.planning.hardware import probe, probe_details
from llmrun.planning.memory import memory, repacked_types, without_flash_attention
from llmrun.planning.predict import predict, tensor_types, work_of
from llmrun.planning.preferences import LoadPreferences
from llmrun.planning.speed import BUSY, Clock, measure
from llmrun.protocol.jobs.machine import MachineSpeed, Rates
from llmrun.protocol.messages import Finished, Stats
from llmrun.protocol.params import Limits, SamplingParams
from llmrun.runner import client

T = TypeVar("T")
MEMORY_BOUND, SPEED_BOUND = 0.10, 0.25
TOKENS = 48  # of an answer
_FORBIDDEN = tuple((token, float("-inf")) for token in range(259))  # an end would come too early

SHAPES = {
    "narrow": Shape(1024, 12, 2816, 16, 4, 64, 32_000),
    "wide": Shape(2048, 6, 5632, 16, 8, 128, 32_000),
    "many words": Shape(768, 20, 2048, 12, 3, 64, 128_256, tied=True),
    "large": Shape(2048, 10, 6144, 16, 4, 128, 64_000, tied=True),
}


@dataclass(frozen=True)
class Case:
    """A model, the context window it gets, and how long the prompt is."""

    shape: str
    quant: str
    n_ctx: int
    prompt: int

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.shape} {self.quant}, {self.prompt} of {self.n_ctx}"


CASES = (
    Case("narrow", "Q4_0", 2048, 64),
    Case("narrow", "Q8_0", 4096, 1024),
    Case("narrow", "F16", 2048, 64),
    Case("wide", "Q4_K_M", 2048, 64),
    Case("wide", "Q6_K", 4096, 2048),
    Case("wide", "Q3_K", 2048, 512),
    Case("many words", "Q4_1", 2048, 64),
    Case("many words", "Q8_0", 2048, 1024),
    Case("large", "Q4_0", 2048, 64),
    Case("large", "Q5_K", 4096, 1024),
    Case("large", "IQ4_XS", 2048, 64),
    Case("large", "Q4_K_M", 8192, 4096),
)


@dataclass(frozen=True)
class Measured:
    """The worst memory and the best speed so far, and whether it was with flash attention."""

    peak: int = 0
    rate: float = 0.0
    flash: bool = True


def types_of(quant: str) -> Callable[[str], str]:
    """Which type a matrix has, as llama-quantize would choose it, in broad strokes."""
    larger = {"output.weight"} if not quant.endswith("_K_M") else {"output.weight", "attn_v.weight", "ffn_down.weight"}
    main = quant.removesuffix("_M")
    output = main if main in ("F16", "Q8_0", "Q6_K", "Q4_1") else "Q6_K"
    return lambda name: output if name in larger else main


def answer(path: Path, case: Case) -> tuple[Measured, Stats]:
    """What one answer in a fresh engine took, peak memory in bytes, and its figures."""
    with prepare(ModelSpec(path.stem, path=path), path, LoadPreferences(n_ctx=case.n_ctx)) as model:
        engine = client.EngineClient()
        model.start(engine)
        prompt = "".join(f" {number % 1000}" for number in range(case.prompt))
        sampling = SamplingParams(temperature=0, logit_bias=_FORBIDDEN)
        stats = Stats()
        for event in model.generate(prompt, sampling=sampling, limits=Limits(max_tokens=TOKENS)).events():
            if isinstance(event, Finished):
                stats = event.stats
        status = Path(f"/proc/{engine.pid}/status").read_text()
        (line,) = [line for line in status.splitlines() if line.startswith("VmHWM")]
        assert model.load is not None
        return Measured(int(line.split()[1]) * 1024, stats.decode_rate, model.load.flash_attention != "off"), stats


class Patience:
    """Repeats what others disturbed, until the time is over."""

    def __init__(self, seconds: float) -> None:
        self._ends = time.monotonic() + seconds
        self.disturbed = 0

    def quietly(self, call: Callable[[], T]) -> T:
        """The result of a call during which others let the processor alone, or else of the last one."""
        while True:
            clock = Clock.now()
            result = call()
            if clock.others() < BUSY:
                return result
            if time.monotonic() > self._ends:
                self.disturbed += 1
                return result
            time.sleep(1)


def best_of(first: MachineSpeed | None, second: MachineSpeed) -> MachineSpeed:
    """The better figure of each kind."""
    if first is None:
        return second

    def quicker(one: Rates, other: Rates) -> Rates:
        decode = tuple((size, max(a, b)) for (size, a), (_, b) in zip(one.decode, other.decode, strict=True))
        return Rates(decode, max(one.prefill, other.prefill), min(one.short_rows, other.short_rows))

    def least(name: str) -> dict[str, dict[int, float]]:
        one, other = getattr(first, name), getattr(second, name)
        return {kv: {n: min(one[kv][n], other[kv][n]) for n in one[kv]} for kv in one}

    return replace(
        first,
        read=max(first.read, second.read),
        operation=min(first.operation, second.operation),
        attention_seconds=least("attention_seconds"),
        prefill_attention_seconds=least("prefill_attention_seconds"),
        types={kind: quicker(rates, second.types[kind]) for kind, rates in first.types.items()},
    )


def joined(parts: list[MachineSpeed]) -> MachineSpeed:
    """One machine's figures, measured a type at a time: short measurements are disturbed less often.

    What every part measures again is taken from the middle one, as one measurement of all types would give it.
    """
    middle = sorted(parts, key=lambda part: part.attention_seconds["F16"][64])[len(parts) // 2]
    return replace(middle, types={kind: rates for part in parts for kind, rates in part.types.items()})


def report(case: Case, path: Path, used: int, measured: Measured, speed: MachineSpeed) -> tuple[float, float]:
    """Print one line; gives both errors, as shares."""
    header = read_header(path)
    work = work_of(header)
    copies = work.copies(repacked_types(probe().cpu_flags))
    parts = memory(header, used)  # only used cells of the window take memory
    if not measured.flash:
        parts = without_flash_attention(memory(header, case.n_ctx, used=used), header, used)
    resident = parts.needed + copies
    rate = predict(work, speed, depth=used - TOKENS // 2, copies=copies).decode_rate
    off_memory, off_rate = resident / measured.peak - 1, rate / measured.rate - 1
    print(
        f"{case.name:34} memory {resident / 1e6:6.0f} / {measured.peak / 1e6:6.0f} MB {off_memory:+6.1%}   "
        f"decode {rate:6.1f} / {measured.rate:6.1f} t/s {off_rate:+6.1%}"
    )
    return abs(off_memory), abs(off_rate)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--patience", type=float, default=600, metavar="SECONDS")
    parser.add_argument("--only", default="", help="cases whose name has this text")
    options = parser.parse_args()
    cases = [case for case in CASES if options.only in case.name]
    threads, cache = probe().usable_cores, probe_details().last_cache
    patience = Patience(options.patience)
    results = {case: Measured() for case in cases}
    used: dict[Case, int] = {}
    speed: MachineSpeed | None = None
    with tempfile.TemporaryDirectory() as folder:
        paths = {
            case: write_model(Path(folder, f"{index}.gguf"), SHAPES[case.shape], types_of(case.quant))
            for index, case in enumerate(cases)
        }
        types = set().union(*(tensor_types(read_header(path).tensors) for path in paths.values()))
        for _ in range(options.rounds):
            parts = [patience.quietly(lambda kind=kind: measure(threads, [kind], cache=cache)) for kind in types]
            speed = best_of(speed, joined(parts))
            for case, path in paths.items():
                new, stats = patience.quietly(lambda path=path, case=case: answer(path, case))
                old, used[case] = results[case], stats.context_used
                results[case] = Measured(max(old.peak, new.peak), max(old.rate, new.rate), new.flash)
        assert speed is not None
        if patience.disturbed:
            print(f"warning: other programs disturbed {patience.disturbed} measurements")
        print("predicted / measured")
        errors = [report(case, path, used[case], results[case], speed) for case, path in paths.items()]
    worst_memory, worst_rate = (max(column) for column in zip(*errors, strict=True))
    bounds = peers.Report()
    bounds.bound("largest error of memory", worst_memory, MEMORY_BOUND, at_most=True)
    bounds.bound("largest error of decode speed", worst_rate, SPEED_BOUND, at_most=True)
    return bounds.finish()


if __name__ == "__main__":
    sys.exit(main())
