"""How much sooner a chat of thousands of tokens answers again when its KV state was saved.

    python tests/benchmarks/resume.py [MODEL] [TOKENS]

Three engines answer the same last question at temperature 0: the one that held the whole chat, a new one that reads
the saved state, and a new one that has to prefill. Prints TTFT and whether the answers are equal.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from llmrun.config import load_settings
from llmrun.model import Model
from llmrun.model.load_plan import prepare
from llmrun.models.location import locate
from llmrun.protocol.messages import Finished, Message, TextDelta
from llmrun.protocol.params import Limits, SamplingParams
from llmrun.runner.runner import Runner

GREEDY = SamplingParams(temperature=0)
LAST = "And which line was the last one?"


def loaded(name: str, states: Path | None) -> Model:
    """The model in a new engine, with a folder for saved states or without."""
    located = locate(name, load_settings())
    if located.path is None:
        sys.exit(f"{name} is not on this disk: llmrun pull {name}")
    model = prepare(located.spec, located.path, warm_up=True)
    model.load = replace(model.load, states=str(states or ""), states_bytes=1 << 40)
    model.start(Runner())
    return model


def answer(model: Model, messages: list[Message]) -> tuple[str, Finished]:
    text = ""
    for event in model.chat(messages, sampling=GREEDY, limits=Limits(24)):
        if isinstance(event, TextDelta):
            text += event.text
        if isinstance(event, Finished):
            return text, event
    raise AssertionError("no end")


def conversation(tokens: int) -> list[Message]:
    lines = "".join(f"Line {number} of the log says that all is well.\n" for number in range(tokens // 14))
    return [Message("user", lines + "How many lines are there?")]


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    messages = conversation(int(sys.argv[2]) if len(sys.argv) > 2 else 4000)
    with tempfile.TemporaryDirectory() as folder:
        with loaded(name, Path(folder)) as model:
            text, _ = answer(model, messages)
            saved = model.save_state()
            asked = [*messages, Message("assistant", text), Message("user", LAST)]
            whole, _ = answer(model, asked)
        again, anew, equal = [], [], True
        for _ in range(3):
            for states, times in ((Path(folder), again), (None, anew)):
                with loaded(name, states) as model:
                    said, end = answer(model, asked)
                    times.append(end.stats.ttft_seconds)
                    if states:
                        equal = equal and said == whole
                        reused = end.stats.reused_tokens
    prefilled, resumed = statistics.median(anew), statistics.median(again)
    print(f"state: {saved.tokens:,} tokens, {saved.n_bytes / 1e6:.1f} MB")
    print(f"reused: {reused:,} of {end.stats.prompt_tokens:,} tokens")
    print(f"TTFT: prefilled {prefilled:.3f} s, resumed {resumed:.3f} s: {prefilled / resumed:.1f}x sooner")
    print(f"answers equal to the uninterrupted chat's: {equal}")


if __name__ == "__main__":
    main()
