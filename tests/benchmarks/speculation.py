"""What speculation gains on prompts of several kinds, in seconds of processor time, against what step times promise.

    python tests/benchmarks/speculation.py MODEL.gguf [--draft SMALLER.gguf] [--tokens N] [--rounds N] [--seeds N]

`llmrun bench --speculate` says how much faster answers come; this says where that comes from, also on a machine that
does other things at the same time: one thread computes, and only its own time counts. With and without drafts take
turns. "gain" is the median of all pairs, "worst" the pair that lost most, "predicted" the gain by the table of step
times, "always", with a draft model, the gain where the gate is left out. "loop" is a token's time outside of the model
that answers. Several seeds are several answers to the prompts with a temperature: text that does not repeat.
draft_pairs.py makes pairs of models one of which can draft for the other.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import NamedTuple

from llmrun import _native
from llmrun.bench.speculation import PROMPTS
from llmrun.engine.core.draft_model import DraftModel
from llmrun.engine.core.loop import Engine
from llmrun.engine.environment import set_environment
from llmrun.engine.llama.context import LlamaContext
from llmrun.engine.llama.model import LlamaModel
from llmrun.engine.service import Preparer
from llmrun.planning.speculation import expected_gain, tokens_a_step
from llmrun.protocol.loading import Load
from llmrun.protocol.messages import AnswerRequest, Failed, Finished, Generate, Message, Stats
from llmrun.protocol.params import Limits, SamplingParams
from llmrun.protocol.speculation import Speculation, StepTables, StepTime, StepTimes

MOST = 15
N_CTX = 4096
_SHORT = 200  # characters for a model of random weights, each of which may be a token


class Bench:
    """One model, and the loop over it."""

    def __init__(self, path: Path, draft: Path | None, tokens: int) -> None:
        model, context = _loaded(path)
        draft_model = DraftModel(_loaded(draft)[1], model.vocabulary.n_tokens) if draft is not None else None
        self._preparer = Preparer(model.vocabulary, model.chat_template, N_CTX, draft_model)
        self._engine = Engine(context, clock=time.thread_time, draft_model=draft_model)
        self._tokens, self._talks = tokens, model.chat_template is not None

    def step_times(self) -> StepTables:
        """Behind what was answered last, and behind nothing; again where something disturbed it."""
        while True:
            found = self._engine.measure_steps(lambda: False)
            if found.times:
                return found

    def answer(self, kind: str, speculation: Speculation | None, seed: int) -> Stats:
        prompt = PROMPTS[kind]
        sampling = SamplingParams(temperature=prompt.temperature, seed=seed)
        asked = AnswerRequest(
            (Message("user", prompt.question),) if self._talks else (),
            None if self._talks else prompt.question[:_SHORT],
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


def _loaded(path: Path) -> tuple[LlamaModel, LlamaContext]:
    model = LlamaModel(str(path), 0, _native.CancelFlag())
    return model, LlamaContext(model, Load(str(path), N_CTX, N_CTX, flash_attention="off"))


class Answers(NamedTuple):
    """What an answer cost without drafts, with those of the gate, and with as many as can be had."""

    plain: Stats
    drafted: Stats
    always: Stats | None = None

    @property
    def gain(self) -> float:
        return self.drafted.decode_rate / self.plain.decode_rate


def answers(bench: Bench, kind: str, tables: StepTables, arguments: argparse.Namespace) -> list[Answers]:
    """All pairs of one kind."""
    found = []
    modes = [None, Speculation(MOST, *tables), *([Speculation(7)] if arguments.draft else [])]
    seeds = range(arguments.seeds if PROMPTS[kind].temperature else 1)
    for number, seed in enumerate([seed for seed in seeds for _ in range(arguments.rounds)]):
        costs = {mode: bench.answer(kind, mode, seed) for mode in (modes if number % 2 else reversed(modes))}
        found.append(Answers(*(costs[mode] for mode in modes)))
    return found


def report(kind: str, found: list[Answers], tables: StepTables) -> float:
    """One line; the gain."""
    gain = statistics.median(each.gain for each in found)
    rates = [each.always.decode_rate / each.plain.decode_rate for each in found if each.always is not None]
    always = f"{statistics.median(rates):.2f}x" if rates else "-"
    plain, stats, _ = found[-1]
    acceptance = f"{stats.accepted_tokens / stats.drafted_tokens:.0%}" if stats.drafted_tokens else "-"
    figures = [
        f"{stats.completion_tokens:>7}{plain.decode_rate:>9.1f}{stats.decode_rate:>9.1f}{gain:>7.2f}x",
        f"{min(each.gain for each in found):>7.2f}x{always:>8}{expected_gain(stats, tables) or 1:>10.2f}x",
        f"{acceptance:>8}{tokens_a_step(stats):>7.2f}",
        f"{plain.overhead_seconds * 1e6:>10.0f}{stats.overhead_seconds * 1e6:>7.0f}",
    ]
    print(f"{kind:<11}{''.join(figures)}", flush=True)
    return gain


def print_times(name: str, times: tuple[StepTime, ...]) -> None:
    for each in times:
        alone = StepTimes(times).seconds(1, each.depth)
        seconds = f"{each.seconds * 1e3:7.2f} ms, {each.seconds / alone:.2f}x"
        print(f"{name} step of {each.width:>2} at {each.depth:>4}: {seconds}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--tokens", type=int, default=250)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--kinds", default=",".join(PROMPTS))
    arguments = parser.parse_args()
    set_environment()
    bench = Bench(arguments.model, arguments.draft, arguments.tokens)
    bench.answer("summarise", Speculation(MOST), 7)
    tables = bench.step_times()
    print_times("model", tables.times)
    print_times("draft", tables.draft_times)
    print("kind        tokens  off t/s   on t/s    gain   worst  always  predicted  accept  /step  loop, µs: off  on")
    gains: list[float] = []
    for kind in arguments.kinds.split(","):
        gain = report(kind, answers(bench, kind, tables, arguments), tables)
        gains += [gain] if PROMPTS[kind].repeats else []
    if gains:
        print(f"geometric mean of what repeats: {statistics.geometric_mean(gains):.2f}x")


if __name__ == "__main__":
    main()
