"""Tokens per step, and the time of steps, with the prediction heads (MTP) of a model against their acceptance.

    heads.py [FOLDER]
    heads.py --random 4b-hybrid [--threads N] [FOLDER]

Writes tiny models whose heads are right for a chosen share of the tokens, answers greedily with 1, 4 and 8 sequences,
and checks that each text is the one without heads. The last columns say what the gate expects of a real shape: a step
of W rows takes W ** 0.2 times one row's time (a memory-bound processor), a head 4 % of it.

With --random, the steps of a real shape are measured on this processor instead (random weights, Q4_K, output and
embeddings Q6_K, head Q8_0; 2.6 GB in the folder), and the gain is computed from them for an acceptance of 60, 70 and
80 % of each drafted token. Steps of all widths alternate, and of each the fastest counts. With --threads 1 processor
time is measured, so that other programs disturb it only by their use of memory; else the time that passes.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).parents[1]))

from random_model import HYBRID_4B, write_model
from support.mtp_models import write_mtp_model

from llmrun import _native
from llmrun.engine.core.drafts import Drafting
from llmrun.engine.core.loop import Engine
from llmrun.engine.core.mtp_model import HeadModel
from llmrun.engine.core.sampler import SequenceSampler
from llmrun.engine.core.sequence import Sequence
from llmrun.engine.core.steps import StepCost, StepCosts, cost_of
from llmrun.engine.llama.base import Entry
from llmrun.engine.llama.context import LlamaContext
from llmrun.engine.llama.model import LlamaModel
from llmrun.protocol.loading import Load
from llmrun.protocol.messages import AnswerRequest, Finished, Stats
from llmrun.protocol.params import Limits, SamplingParams
from llmrun.protocol.speculation import Speculation

N_CTX, N_TOKENS = 1024, 90  # after about 100 tokens, the texts repeat themselves
WIDTHS = (1, 2, 3, 4, 8, 16)
SHAPE = Speculation(7, only_if_it_pays=True, draft_cost=0.04)
PROMPTS = ("the cat sat on a mat. ", "no, we go to rome ", "a b c d e f g h ", "lorem ipsum ", "one two ", "she sells ",
           "how much wood ", "peter piper ")  # fmt: skip


def answered(model: LlamaModel, count: int, speculation: Speculation | None) -> tuple[list[list[int]], list[Stats]]:
    """Return the texts of `count` answers at the same time, and their statistics; drafts only come from the heads."""
    load = Load(model.path, N_CTX, n_batch=64, n_seq_max=count, n_cells=N_CTX * count, n_rollback=7)
    context = LlamaContext(model, load)
    heads = HeadModel(context, context.open_heads()) if speculation is not None else None
    engine, sequences, stats = Engine(context, draft_model=heads), [], list[Stats]()
    costs = StepCosts([(width, width**0.2) for width in WIDTHS])
    for number, text in enumerate(PROMPTS[:count]):
        prompt = context.vocabulary.tokenize(text, special=False)
        drafting = None
        if heads is not None and speculation is not None:
            drafting = Drafting(speculation, prompt, heads, costs, is_repeatable=True)
        sampler = SequenceSampler(SamplingParams(temperature=0), context.vocabulary, prompt)
        engine.add(Sequence(number, prompt, sampler, AnswerRequest(limits=Limits(N_TOKENS)), drafting=drafting))
        sequences.append(engine._waiting[-1])
    while engine.busy:
        stats += [event.stats for event in engine.step() if isinstance(event, Finished)]
    context.close()
    return [sequence.tokens for sequence in sequences], stats


ROUNDS = 4
ACCEPTANCE = 0.6, 0.7, 0.8
SHAPES = {"4b-hybrid": HYBRID_4B}


def type_of(name: str) -> str:
    """Return the type of a matrix, as in a file of llmrun quantize Q4_K."""
    if name.startswith("nextn.") or name in ("ssm_alpha.weight", "ssm_beta.weight"):
        return "Q8_0"
    return "Q6_K" if name in ("output.weight", "token_embd.weight") else "Q4_K"


def fastest_steps(
    steps: list[Callable[[int], None]], widths: tuple[int, ...], clock: Callable[[], float]
) -> list[list[StepCost]]:
    """Return the times of several kinds of steps, which alternate."""
    best = [dict.fromkeys(widths, float("inf")) for _ in steps]
    for _ in range(ROUNDS):
        for width in widths:
            for step, found in zip(steps, best, strict=True):
                step(width)  # llama.cpp builds its graph
                began = clock()
                step(width)
                found[width] = min(found[width], clock() - began)
    return [[*found.items()] for found in best]


def measure(path: Path, threads: int) -> list[list[StepCost]]:
    """Return the step times of a model and of its head."""
    model = LlamaModel(str(path), 0, _native.CancelFlag(), draft_heads=True)
    context = LlamaContext(model, Load(model.path, N_CTX, n_batch=64, n_rollback=15, threads=threads))
    heads = context.open_heads()

    def target(width: int) -> None:
        context.decode([Entry(300 + place, place, 0, True) for place in range(width)])
        context.logits(width - 1)
        context.forget(0, 0)

    def head(width: int) -> None:
        heads.decode([Entry(300 + place, place, 0, True) for place in range(width)])
        heads.forget(0, 0)

    try:
        return fastest_steps([target, head], WIDTHS, time.process_time if threads == 1 else time.perf_counter)
    finally:
        context.close()
        model.close()


def show_random(name: str, folder: Path, threads: int) -> None:
    """Print the step table of a shape, and what drafts of each length give by it."""
    path = folder / f"{name}.gguf"
    if not path.exists():
        write_model(path, SHAPES[name], type_of)
    before = os.getloadavg()
    table, head_table = measure(path, threads)
    load = f"load {before[0]:.1f} before, {os.getloadavg()[0]:.1f} after"
    print(f"{name}, {path.stat().st_size / 1e9:.1f} GB, {threads} threads; {load}")
    print(f"{'rows':<22}" + "".join(f"{each[0]:>8}" for each in table))
    one = table[0][1]
    for kind, rows in (("a step, ms", table), ("a head's step, ms", head_table)):
        print(f"{kind:<22}" + "".join(f"{1000 * each[1]:>8.1f}" for each in rows))
        print(f"{'  to one plain step':<22}" + "".join(f"{each[1] / one:>8.2f}" for each in rows))
    for count in (1, 4):
        lengths = [length for length in range(1, 8) if count * (1 + length) <= WIDTHS[-1]]
        print(f"{f'{count} at once, tokens':<22}" + "".join(f"{length:>8}" for length in lengths))
        for share in ACCEPTANCE:
            gains = []
            for length in lengths:
                drafting = cost_of(head_table, 2 * count) + (length - 1) * cost_of(head_table, count)
                tokens = sum(share**place for place in range(length + 1))
                gains.append(tokens * cost_of(table, count) / (cost_of(table, count * (1 + length)) + drafting))
            print(f"{f'  {share:.0%} accepted':<22}" + "".join(f"{gain:>7.2f}x" for gain in gains))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--random", choices=SHAPES)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    folder = asked.folder or Path(tempfile.mkdtemp())
    if asked.random:
        show_random(asked.random, folder, asked.threads)
        return
    print(f"{'model':<10}{'rate':>6}{'answers':>9}{'drafted':>9}{'accepted':>10}{'a step':>8}{'gain':>7}  text")
    for arch in ("qwen35", "glm4moe"):
        for rate in (1.0, 0.8, 0.7, 0.6, 0.3, 0.0):
            path = write_mtp_model(folder / f"{arch}-{rate}.gguf", arch, rate)
            model = LlamaModel(str(path), 0, _native.CancelFlag(), draft_heads=True)
            for count in (1, 4, 8):
                plain, _ = answered(model, count, None)
                found, stats = answered(model, count, SHAPE)
                drafted, accepted = (
                    sum(each.drafted_tokens for each in stats),
                    sum(each.accepted_tokens for each in stats),
                )
                a_step = sum(each.completion_tokens for each in stats) / sum(each.decode_steps for each in stats)
                share = f"{accepted / drafted:.0%}" if drafted else "-"
                gain = fmean(each.draft_gain or 1 for each in stats)
                print(f"{arch:<10}{rate:>6}{count:>9}{drafted:>9}{share:>10}{a_step:>8.2f}{gain:>7.2f}  "
                      f"{'equal' if found == plain else 'DIFFERENT'}")  # fmt: skip
            model.close()


if __name__ == "__main__":
    main()
