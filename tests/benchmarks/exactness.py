"""What verifying drafts does to greedy answers: which differ from plain ones, and whether only in ties.

    python tests/benchmarks/exactness.py MODEL.gguf [--prompts N] [--tokens N]   answers of a real model
    python tests/benchmarks/exactness.py --types                                 logits, for each type of weights

A step of several rows may add up in another order than one of a single row. So logits differ by roundings, and where
the two likeliest tokens are closer than these, an answer may go on otherwise. Drafts are made without a gate here, as
many as can be had. A difference is a tie where the gap between both tokens is within twice the largest difference of
log-probabilities that was seen where the answers are still the same.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from random_model import Shape, write_model

from llmrun import _native
from llmrun.engine.core.loop import Engine
from llmrun.engine.environment import set_environment
from llmrun.engine.llama.base import Entry
from llmrun.engine.llama.context import LlamaContext
from llmrun.engine.llama.model import LlamaModel
from llmrun.engine.service import Preparer
from llmrun.protocol.loading import Load
from llmrun.protocol.messages import AnswerRequest, Finished, Generate, Message, TextDelta, TokenLogprob
from llmrun.protocol.params import Limits, SamplingParams
from llmrun.protocol.speculation import Speculation

N_CTX = 1024
TASKS = (
    "Write two sentences about {}.",
    "List five words that have to do with {}.",
    "Write a short poem about {}.",
    "Explain {} to a child.",
    "Write a JSON object with facts about {}.",
    "What is the opposite of {}?",
    "Write a question about {}, and answer it.",
    "Repeat this ten times: {}.",
    "Write a Python function about {}.",
    "Tell a joke about {}.",
)
TOPICS = ("rain", "a lighthouse", "bread", "the moon", "a bicycle", "winter", "music", "a river", "numbers", "sleep")
TYPES = (
    "F32", "F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K",
    "IQ4_NL", "IQ4_XS", "IQ3_S", "IQ2_S",
)  # fmt: skip
SHAPE = Shape(width=512, layers=2, feed_forward=1024, heads=8, kv_heads=2, head_length=64, vocabulary=2048)
WIDTHS = (4, 8, 16)
ROWS = 48  # a multiple of all widths
DEPTH = 300  # tokens before them


class Setting(NamedTuple):
    """A way to compute logits, and the tokens in the context before."""

    name: str
    depth: int = 0
    repack: bool = True
    flash_attention: str = "off"


SETTINGS = (
    Setting("as it is"),
    Setting("not repacked", repack=False),
    Setting(f"after {DEPTH} tokens", DEPTH),
    Setting("flash attention", DEPTH, flash_attention="on"),
)


class Answers:
    """Greedy ones of one model."""

    def __init__(self, path: Path, tokens: int) -> None:
        model, context = loaded(path)
        self._preparer = Preparer(model.vocabulary, model.chat_template, N_CTX)
        self._engine = Engine(context)
        self._tokens = tokens

    def answer(self, question: str, speculation: Speculation | None) -> list[TokenLogprob]:
        asked = AnswerRequest(
            (Message("user", question),),
            sampling=SamplingParams(temperature=0),
            limits=Limits(self._tokens),
            logprobs=2,
            speculation=speculation,
        )
        self._engine.add(self._preparer.prepare(Generate(1, asked), lambda event: None))
        found: list[TokenLogprob] = []
        while True:
            for event in self._engine.step():
                if isinstance(event, TextDelta):
                    found += event.logprobs
                if isinstance(event, Finished):
                    return found


def loaded(path: Path, setting: Setting = SETTINGS[0]) -> tuple[LlamaModel, LlamaContext]:
    """With two threads."""
    model = LlamaModel(str(path), 0, _native.CancelFlag(), repack=setting.repack)
    load = Load(str(path), N_CTX, threads=2, flash_attention=setting.flash_attention)
    return model, LlamaContext(model, load)


def compare_answers(path: Path, prompts: int, tokens: int) -> None:
    answers, rounding, gaps = Answers(path, tokens), 0.0, []
    questions = [task.format(topic) for task, topic in itertools.product(TASKS, TOPICS)][:prompts]
    for number, question in enumerate(questions, 1):
        plain, drafted = (answers.answer(question, each) for each in (None, Speculation(7)))
        for expected, found in zip(plain, drafted, strict=False):
            if expected.bytes != found.bytes:
                (_, _, likeliest), (_, _, second) = expected.top
                gaps.append(likeliest - second)
                print(f"{number:>4}: {question!r} differs where the gap is {gaps[-1]:.5f}", flush=True)
                break
            rounding = max(rounding, abs(expected.logprob - found.logprob))
    print(f"{len(gaps)} of {len(questions)} answers differ")
    print(f"largest rounding of a log-probability where they are the same: {rounding:.5f}")
    ties = sum(gap <= 2 * rounding for gap in gaps)
    print(f"{ties} of {len(gaps)} differences are ties; the largest gap is {max(gaps, default=0):.5f}")


def compare_types() -> None:
    print("largest difference of a logit from that of a step of one row, 0 where all bits are the same; by rows a step")
    print(f"{'':<8}" + "".join(f"{setting.name:>{9 * len(WIDTHS)}}" for setting in SETTINGS))
    print(f"{'type':<8}" + "".join(f"{width:>9}" for width in WIDTHS * len(SETTINGS)))
    with tempfile.TemporaryDirectory() as folder:
        for kind in TYPES:
            path = write_model(Path(folder, f"{kind}.gguf"), SHAPE, lambda name, kind=kind: kind)  # type: ignore[misc]
            cells = [each for setting in SETTINGS for each in differences(path, setting)]
            print(f"{kind:<8}" + "".join(f"{cell:>9.2g}" for cell in cells), flush=True)


def differences(path: Path, setting: Setting) -> list[float]:
    """Of all rows' logits, in steps of one row and of each width."""
    model, context = loaded(path, setting)
    alone = rows_of(context, 1, setting.depth)
    found = [float(np.abs(alone - rows_of(context, width, setting.depth)).max()) for width in WIDTHS]
    context.close()
    model.close()
    return found


def rows_of(context: LlamaContext, width: int, depth: int) -> Any:
    """The logits of ROWS tokens."""
    context.clear()
    if depth:
        context.decode([Entry(300 + 3 * at, at, 0, False) for at in range(depth)])
    found = []
    for start in range(depth, depth + ROWS, width):
        context.decode([Entry(300 + at, at, 0, True) for at in range(start, start + width)])
        for row in range(width):
            size = context.vocabulary.n_tokens
            found.append(np.ctypeslib.as_array((ctypes.c_float * size).from_address(context.logits(row))).copy())
    return np.array(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--types", action="store_true")
    arguments = parser.parse_args()
    set_environment()
    if arguments.types:
        compare_types()
    if arguments.model is not None:
        compare_answers(arguments.model, arguments.prompts, arguments.tokens)


if __name__ == "__main__":
    main()
