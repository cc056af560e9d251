"""What speculation gains on prompts of several kinds, in seconds of processor time, against what step times promise.

    python tests/benchmarks/speculation.py MODEL.gguf [--tokens N] [--rounds N]

`llmrun bench --speculate` says how much faster answers come; this says where that comes from, also on a machine that
does other things at the same time: one thread computes, and only its own time counts. With and without drafts take
turns. "predicted" is the gain by the table of step times; "loop" is a token's time outside of llama.cpp.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from llmrun import _native
from llmrun.bench.speculation import PROMPTS
from llmrun.engine.core.loop import Engine
from llmrun.engine.environment import set_environment
from llmrun.engine.llama.context import LlamaContext
from llmrun.engine.llama.model import LlamaModel
from llmrun.engine.service import Preparer
from llmrun.planning.speculation import expected_gain, tokens_a_step
from llmrun.protocol.messages import AnswerRequest, Failed, Finished, Generate, Load, Message, Stats
from llmrun.protocol.params import Limits, SamplingParams
from llmrun.protocol.speculation import Speculation, StepTime, StepTimes

MOST = 15
N_CTX = 4096


class Bench:
    """One model, and the loop over it."""

    def __init__(self, path: Path, tokens: int) -> None:
        model = LlamaModel(str(path), 0, _native.CancelFlag())
        self._context = LlamaContext(model, Load(str(path), N_CTX, N_CTX))
        self._preparer = Preparer(model.vocabulary, model.chat_template, N_CTX)
        self._engine = Engine(self._context, clock=time.thread_time)
        self._tokens = tokens

    def step_times(self) -> tuple[StepTime, ...]:
        """Behind what was answered last, and behind nothing."""
        return self._engine.measure_steps(lambda: False)

    def answer(self, kind: str, speculation: Speculation | None) -> Stats:
        prompt = PROMPTS[kind]
        sampling = SamplingParams(temperature=prompt.temperature, seed=7)
        asked = AnswerRequest(
            (Message("user", prompt.question),),
            sampling=sampling,
            limits=Limits(self._tokens),
            thinking=False,
            speculation=speculation,
        )
        self._engine.add(*self._preparer.prepare(Generate(1, asked), lambda event: None))
        while True:
            for event in self._engine.step():
                assert not isinstance(event, Failed), event
                if isinstance(event, Finished):
                    return event.stats


def report(kind: str, plain: list[Stats], drafted: list[Stats], times: tuple[StepTime, ...]) -> float:
    """One line; the gain."""
    gains = [with_.decode_rate / without.decode_rate for without, with_ in zip(plain, drafted, strict=True)]
    gain, stats = statistics.median(gains), drafted[-1]
    acceptance = f"{stats.accepted_tokens / stats.drafted_tokens:.0%}" if stats.drafted_tokens else "-"
    figures = [
        f"{stats.completion_tokens:>7}{plain[-1].decode_rate:>9.1f}{stats.decode_rate:>9.1f}{gain:>9.2f}x",
        f"{expected_gain(stats, times) or 1:>10.2f}x{acceptance:>8}{tokens_a_step(stats):>7.2f}",
        f"{plain[-1].overhead_seconds * 1e6:>10.0f}{stats.overhead_seconds * 1e6:>7.0f}",
    ]
    print(f"{kind:<11}{''.join(figures)}", flush=True)
    return gain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=250)
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    set_environment()
    bench = Bench(arguments.model, arguments.tokens)
    bench.answer("summarise", None)
    times = bench.step_times()
    for each in times:
        alone = StepTimes(times).seconds(1, each.depth)
        print(f"step of {each.width:>2} at {each.depth:>4}: {each.seconds * 1e3:7.2f} ms, {each.seconds / alone:.2f}x")
    print("kind        tokens  off t/s   on t/s      gain  predicted  accept  /step  loop, µs: off  on")
    gains: list[float] = []
    for kind, prompt in PROMPTS.items():
        plain: list[Stats] = []
        drafted: list[Stats] = []
        for _ in range(arguments.rounds):
            plain.append(bench.answer(kind, None))
            drafted.append(bench.answer(kind, Speculation(MOST, times)))
        gain = report(kind, plain, drafted, times)
        gains += [gain] if prompt.repeats else []
    print(f"geometric mean of what repeats: {statistics.geometric_mean(gains):.2f}x")


if __name__ == "__main__":
    main()
