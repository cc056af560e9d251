"""What it costs to hold an answer to a grammar: ours (llguidance's bit mask) and llama.cpp's own grammar sampler.

    python tests/benchmarks/grammar.py MODEL.gguf [--tokens N]

Both go along the same answer, with the model's real logits. Ours is timed with mask() and accept(). llama.cpp's is
used as common/sampling.cpp does it: check the one token that was drawn without the grammar; only if it is refused,
apply the grammar to the whole vocabulary; then accept. The last table gives broken grammars to llama.cpp, each in a
process of its own.
"""

from __future__ import annotations

import argparse
import ctypes
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support.grammar_cases import BROKEN_GRAMMARS, GRAMMARS
from support.sampler_llama import TOKEN_DATA

from llmrun import _native
from llmrun.engine.constraint.matcher import compile_grammar
from llmrun.engine.core.sampler import SequenceSampler
from llmrun.engine.llama.base import Entry
from llmrun.engine.llama.context import LlamaContext
from llmrun.engine.llama.library import import_llama
from llmrun.engine.llama.model import LlamaModel
from llmrun.grammar import Grammar, read_grammar, read_json_schema
from llmrun.protocol.loading import Load
from llmrun.protocol.params import SamplingParams

PROMPT = "<|im_start|>user\nDescribe a person in JSON.<|im_end|>\n<|im_start|>assistant\n"
SCHEMA = (
    '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 40}, "age": {"type": "integer", '
    '"minimum": 0, "maximum": 120}, "tags": {"type": "array", "items": {"enum": ["kind", "tall", "shy"]}, '
    '"minItems": 5, "maxItems": 9}}, "required": ["name", "age", "tags"], "additionalProperties": false}'
)
SCHEMA_IN_GBNF = r"""root ::= "{\"name\": " string ", \"age\": " age ", \"tags\": [" tag (", " tag){4,8} "]}"
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4})){0,40} "\""
age ::= [0-9] | [1-9] [0-9] | "1" [01] [0-9] | "120"
tag ::= "\"kind\"" | "\"tall\"" | "\"shy\""
"""
CASES: dict[str, tuple[Grammar, str]] = {
    "JSON": (read_grammar(GRAMMARS["json"][0]), GRAMMARS["json"][0]),
    "JSON schema": (read_json_schema(SCHEMA), SCHEMA_IN_GBNF),
    "list": (read_grammar(GRAMMARS["list"][0]), GRAMMARS["list"][0]),
}
BREAK = """
import sys
from llmrun import _native
from llmrun.engine.llama.model import LlamaModel
model = LlamaModel(sys.argv[1], 0, _native.CancelFlag())
sampler = model.llama.llama_sampler_init_grammar(model.vocabulary.pointer, sys.stdin.buffer.read(), b"root")
print("refused" if not sampler else "taken")
"""


class LlamaGrammar:
    """llama.cpp's grammar sampler, by check-then-resample."""

    def __init__(self, model: LlamaModel, text: str) -> None:
        self._llama = import_llama()
        self._sampler = self._llama.llama_sampler_init_grammar(model.vocabulary.pointer, text.encode(), b"root")
        assert self._sampler
        self._row = np.zeros(model.vocabulary.n_tokens, TOKEN_DATA)
        self._ids = np.arange(model.vocabulary.n_tokens, dtype=np.int32)

    def step(self, logits: np.ndarray[Any, Any], drawn: int, chosen: int) -> bool:
        """One token's work; whether the one that was drawn freely was refused."""
        refused = bool(np.isneginf(self._apply(self._ids[drawn : drawn + 1], logits[drawn : drawn + 1])[0]))
        if refused:
            self._apply(self._ids, logits)
        self._llama.llama_sampler_accept(self._sampler, chosen)
        return refused

    def _apply(self, ids: np.ndarray[Any, Any], logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        row = self._row[: len(ids)]
        row["id"], row["logit"] = ids, logits
        pointer = row.ctypes.data_as(self._llama.llama_token_data_p)
        candidates = self._llama.llama_token_data_array(pointer, len(row), -1, False)
        self._llama.llama_sampler_apply(self._sampler, ctypes.byref(candidates))
        return row["logit"]


def milliseconds(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter_ns()
    result = call()
    return (time.perf_counter_ns() - start) / 1e6, result


def walk(context: LlamaContext, grammar: Grammar, text: str, tokens: int) -> None:
    """Go along one answer with both, and print a line."""
    prompt = context.vocabulary.tokenize(PROMPT, special=True)
    context.forget(0, 0)
    context.decode([Entry(token, at, 0, at == len(prompt) - 1) for at, token in enumerate(prompt)])
    compiled, constraint = milliseconds(lambda: compile_grammar(grammar, context.vocabulary))
    made, llama = milliseconds(lambda: LlamaGrammar(context.model, text))
    free = SequenceSampler(SamplingParams(temperature=0), context.vocabulary)
    held = _native.Sampler(context.vocabulary.n_tokens, temperature=0)
    ours, theirs, refusals = [], [], 0
    for at in range(len(prompt), len(prompt) + tokens):
        address = context.logits(len(prompt) - 1 if at == len(prompt) else 0)
        logits = np.ctypeslib.as_array((ctypes.c_float * context.vocabulary.n_tokens).from_address(address))
        time_of_mask, mask = milliseconds(constraint.mask)
        chosen = held.sample(address, mask)
        time_of_llama, refused = milliseconds(partial(llama.step, logits, free.sample(address), chosen))
        refusals += refused
        ours.append(time_of_mask + milliseconds(partial(constraint.accept, chosen))[0])
        theirs.append(time_of_llama)
        if context.vocabulary.is_end(chosen):
            break
        context.decode([Entry(chosen, at, 0, True)])
    print(f"{len(ours):6} {figures(compiled, ours)}   {figures(made, theirs)} {refusals:8}")


def figures(beginning: float, times: list[float]) -> str:
    """A beginning and the tokens behind it, in milliseconds."""
    return f"{beginning:8.1f} {statistics.median(times):8.3f} {statistics.mean(times):8.3f} {max(times):8.3f}"


def break_llama(path: str) -> None:
    """Give broken grammars to llama.cpp and print what it does with each."""
    for name, case in BROKEN_GRAMMARS.items():
        if name.startswith("Lark"):
            continue
        command = [sys.executable, "-c", BREAK, path]
        try:
            done = subprocess.run(command, input=case.text.encode(), capture_output=True, timeout=60, check=False)
            death = signal.Signals(-done.returncode).name if done.returncode < 0 else f"status {done.returncode}"
            said = f"dies of {death}" if done.returncode else done.stdout.decode().strip()
        except subprocess.TimeoutExpired:
            said = "takes over a minute"
        if said != "refused":
            print(f"  {name}: {said}")


def main() -> None:
    parser = argparse.ArgumentParser(description="time grammars")
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=100)
    wanted = parser.parse_args()
    model = LlamaModel(wanted.model, 0, _native.CancelFlag())
    context = LlamaContext(model, Load(wanted.model, 1024, 1024, threads=2))
    seconds, _ = milliseconds(lambda: compile_grammar(read_grammar('root ::= "a"'), context))
    print(f"vocabulary of {context.vocabulary.n_tokens:,} looked through once: {seconds:.0f} ms\n")
    columns = f"{'begin':>8} {'median':>8} {'mean':>8} {'max':>8}"
    print(f"{'milliseconds':12} tokens {'ours':-^35}   {'llama.cpp':-^35}")
    print(f"{'':19} {columns}   {columns}  refused")
    for name, (grammar, text) in CASES.items():
        print(f"{name:12}", end=" ")
        walk(context, grammar, text, wanted.tokens)
    print("\nbroken grammars that llama.cpp does not refuse:")
    break_llama(wanted.model)


if __name__ == "__main__":
    main()
