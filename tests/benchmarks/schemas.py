"""JSON schemas of MaskBench: how many are refused, or not followed as its tests say, and what a mask costs.

    git clone --depth 1 https://github.com/guidance-ai/jsonschemabench
    python tests/benchmarks/schemas.py jsonschemabench/maskbench/data MODEL.gguf --every 24

Of each schema: whether a valid test is rejected (narrowed), or an invalid one accepted (widened). Times are processor
time: from the schema's text to the mask of the first token, and of each later mask. A forced token costs no step of the
model. Uses only what older commits have too, so that two can be compared: run it by turns in both environments.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from llmrun import _native
from llmrun.engine.constraint.matcher import Matcher, compile_grammar, tokens_of
from llmrun.engine.llama.base import Vocabulary
from llmrun.engine.llama.model import LlamaModel
from llmrun.errors import BadGrammarError
from llmrun.grammar import read_json_schema


class Followed(NamedTuple):
    is_accepted: bool
    n_sampled: int = 0
    n_forced: int = 0
    seconds: float = 0.0  # of masks


def follow(constraint: Matcher, tokens: Sequence[int], ends: Sequence[int]) -> Followed:
    """Write a whole answer as the loop does: forced tokens at once, a mask before each other one."""
    began, n_forced, at = time.process_time(), 0, 0
    while at < len(tokens):
        forced = constraint.forced()
        n_equal = len([*takewhile(lambda pair: pair[0] == pair[1], zip(forced, tokens[at:], strict=False))])
        if n_equal == 0:
            constraint.mask()
        if constraint.allowed([tokens[at]]) == 0:
            return Followed(False)
        for token in tokens[at : at + max(1, n_equal)]:
            constraint.accept(token)
        n_forced += n_equal
        at += max(1, n_equal)
    return Followed(constraint.allowed([ends[0]]) == 1, len(tokens) - n_forced, n_forced, time.process_time() - began)


def measure(case: dict[str, Any], vocabulary: Vocabulary, counts: Counter[str], sums: Counter[str]) -> str:
    """Add to the counts of one schema; return what is wrong with it."""
    text = json.dumps(case["schema"])
    began = time.process_time()
    try:
        constraint = compile_grammar(read_json_schema(text), vocabulary)
        constraint.mask()
    except BadGrammarError as error:
        counts["refused"] += 1
        return f"refused: {error.why}"
    counts["followed"] += 1
    sums["first"] += time.process_time() - began
    wrong = set[str]()
    for test in case["tests"]:
        answer = json.dumps(test["data"], ensure_ascii=False)
        tokens = vocabulary.tokenize(answer, special=False, begins=False)
        followed = follow(constraint.copy(), tokens, vocabulary.ends)
        if followed.is_accepted != test["valid"]:
            wrong.add("narrowed" if test["valid"] else "widened")
        if followed.is_accepted:
            sums.update(answers=1, sampled=followed.n_sampled, forced=followed.n_forced, masks=followed.seconds)
    counts.update(wrong)
    return ", ".join(sorted(wrong))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("model", help="a GGUF file, of which the vocabulary is read")
    parser.add_argument("--every", type=int, default=24)
    arguments = parser.parse_args()
    model = LlamaModel(arguments.model, 0, _native.CancelFlag(), vocabulary_only=True)
    tokens_of(model.vocabulary)  # read once, before anything is measured
    counts, sums = Counter[str](), Counter[str]()
    for path in sorted(arguments.folder.iterdir())[:: arguments.every]:
        wrong = measure(json.loads(path.read_text()), model.vocabulary, counts, sums)
        if wrong:
            print(f"{path.stem}: {wrong}")
    print(", ".join(f"{counts[name]} {name}" for name in ("followed", "refused", "narrowed", "widened")))
    first, mask = sums["first"] / counts["followed"], sums["masks"] / max(1, sums["sampled"])
    print(f"schema to first mask {first * 1e3:.2f} ms, a later mask {mask * 1e6:.0f} us (processor time)")
    print(f"{sums['answers']} answers: {sums['sampled']} tokens sampled, {sums['forced']} forced")


if __name__ == "__main__":
    main()
