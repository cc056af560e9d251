"""Tokens per step, and the time of steps, with the prediction heads (MTP) of a model against their acceptance.

    heads.py [FOLDER]

Writes tiny models whose heads are right for a chosen share of the tokens, answers greedily with 1, 4 and 8 sequences,
and checks that each text is the one without heads. The last columns say what the gate expects of a real shape: a step
of W rows takes W ** 0.2 times one row's time (a memory-bound processor), a head 4 % of it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.mtp_models import write_mtp_model

from llmrun import _native
from llmrun._native import SuffixAutomaton
from llmrun.engine.core.drafts import Drafting
from llmrun.engine.core.loop import Engine
from llmrun.engine.core.mtp_model import HeadModel
from llmrun.engine.core.sampler import SequenceSampler
from llmrun.engine.core.sequence import Extras
from llmrun.engine.llama.context import LlamaContext
from llmrun.engine.llama.model import LlamaModel
from llmrun.protocol.loading import Load
from llmrun.protocol.messages import Finished, Stats
from llmrun.protocol.params import Limits, SamplingParams
from llmrun.protocol.speculation import Speculation, StepTime, StepTimes

N_CTX, N_TOKENS = 1024, 90  # after about 100 tokens, the texts repeat themselves
WIDTHS = (1, 2, 3, 4, 8, 16)
SHAPE = Speculation(
    7, tuple(StepTime(width, 0, width**0.2) for width in WIDTHS), tuple(StepTime(width, 0, 0.04) for width in WIDTHS)
)
PROMPTS = ("the cat sat on a mat. ", "no, we go to rome ", "a b c d e f g h ", "lorem ipsum ", "one two ", "she sells ",
           "how much wood ", "peter piper ")  # fmt: skip


def answered(model: LlamaModel, count: int, speculation: Speculation | None) -> tuple[list[list[int]], list[Stats]]:
    """Return the texts of `count` answers at the same time, and their statistics; drafts only come from the heads."""
    load = Load(model.path, N_CTX, N_CTX, n_batch=64, n_seq_max=count, n_cells=N_CTX * count, n_rollback=7)
    context = LlamaContext(model, load)
    heads = HeadModel(context, context.open_heads()) if speculation is not None else None
    engine, sequences, stats = Engine(context, draft_model=heads), [], list[Stats]()
    for number, text in enumerate(PROMPTS[:count]):
        prompt = context.vocabulary.tokenize(text, special=False)
        extras = Extras()
        if heads is not None and speculation is not None:
            extras = Extras(drafting=Drafting(speculation, SuffixAutomaton(), prompt, heads.drafter()))
        sampler = SequenceSampler(SamplingParams(temperature=0), context.vocabulary, prompt)
        engine.add(number, prompt, sampler, Limits(N_TOKENS), extras)
        sequences.append(engine._waiting[-1])
    while engine.busy:
        stats += [event.stats for event in engine.step() if isinstance(event, Finished)]
    context.close()
    return [sequence.tokens for sequence in sequences], stats


def gain(stats: list[Stats], count: int) -> float:
    """Return the speedup by the shape's table, from mean widths."""
    times, heads = (StepTimes(table) for table in (SHAPE.times, SHAPE.draft_times))
    steps = max(each.decode_steps for each in stats)
    rows = count + sum(each.drafted_tokens for each in stats) / steps
    drafting = max(each.draft_steps for each in stats) * heads.seconds(count, 0)
    seconds = steps * times.seconds(rows, 0) + drafting
    return max(each.completion_tokens for each in stats) * times.seconds(count, 0) / seconds


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp())
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
                print(f"{arch:<10}{rate:>6}{count:>9}{drafted:>9}{share:>10}{a_step:>8.2f}{gain(stats, count):>7.2f}  "
                      f"{'equal' if found == plain else 'DIFFERENT'}")  # fmt: skip
            model.close()


if __name__ == "__main__":
    main()
