"""What beam search costs by the number of beams: time of a step, rows and answer tokens a second, memory.

    python beams.py [MODEL] [--beams 2 4 8 16] [--tokens 64] [--runs 3]

Each search goes on for so many steps, whatever it finds, in turns with a greedy answer of the same length, which is
what it is compared with. Cells are those that the KV cache of the beams has at the end; memory is what the engine
process has more of than before. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import statistics

import psutil

import llmrun
from llmrun.planning.memory import kv_bytes
from llmrun.protocol.jobs.beams import BeamSettings, SearchBeams
from llmrun.protocol.messages import AnswerRequest
from llmrun.protocol.params import Limits, SamplingParams

PROMPT = "Once upon a time there was a lighthouse keeper who found a message in a bottle. It said:"


def memory() -> int:
    """Bytes of all engine processes of this one."""
    return sum(child.memory_info().rss for child in psutil.Process().children(recursive=True))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--beams", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    limits = Limits(options.tokens, ignores_end=True)
    asked = AnswerRequest(prompt=PROMPT, sampling=SamplingParams(), limits=limits)
    steps: dict[int, list[float]] = {beams: [] for beams in (1, *options.beams)}
    rows, grown, cells = dict.fromkeys(steps, 1.0), dict.fromkeys(steps, 0), dict.fromkeys(steps, 0)
    with llmrun.load(options.model, speculate="off") as model:
        for _ in range(options.runs):
            greedy = model.generate(PROMPT, temperature=0.0, limits=limits).stats
            steps[1].append(greedy.decode_seconds / (greedy.completion_tokens - 1))
            for beams in options.beams:
                before, most = memory(), 0

                def look(step: object) -> None:
                    nonlocal most
                    most = max(most, memory())

                found = model.beams(SearchBeams(asked, BeamSettings(beams)), look)
                steps[beams].append(found.decode_seconds / found.steps)
                rows[beams], cells[beams] = found.rows / found.steps, found.cells
                grown[beams] = max(grown[beams], most - before)
        one = statistics.median(steps[1])
        print("beams  ms/step  against greedy  rows/s  answer t/s   cells  KV cache  more memory")
        for beams, times in steps.items():
            step = statistics.median(times)
            cache = kv_bytes(model.header, cells[beams], model.load.kv_type_k) / 1e6
            print(
                f"{beams:5}  {step * 1e3:7.1f}  {step / one:13.2f}x  {rows[beams] / step:6.1f}  {1 / step:10.1f}"
                f"  {cells[beams]:6}  {cache:5.1f} MB  {grown[beams] / 1e6:8.1f} MB"
            )


if __name__ == "__main__":
    main()
