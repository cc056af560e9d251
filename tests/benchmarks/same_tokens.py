"""Ten greedy answers of `llmrun run`, compared with llama-completion's of the same llama.cpp.

    python tests/benchmarks/same_tokens.py [--llama-completion PATH] [--max-tokens 64]

llama-completion gets --jinja: without it, it renders a built-in ChatML that leaves out the default system prompt of
SmolLM2's template, so the prompts would differ. It prints text, not token ids: text and number of tokens are compared.
Both libraries must be built alike, for the same processor: other kernels round differently, and a greedy answer
forks where two tokens are almost equally likely. No prompt holds the text of a control token: llama-completion makes
it one, llmrun never does. --raw compares plain continuations without a template.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import NamedTuple

import peers

PROMPTS = (
    "Why is the sky blue?",
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain photosynthesis to a child.",
    "List three prime numbers and say why they are prime.",
    "def fibonacci(n):",
    "Übersetze ins Englische: Der Hund schläft.",
    "请用一句话介绍你自己。",
    "Say 🙂 and nothing else.",
    "What do `code` and <b>bold</b> mean?\n\n1. first\n2. second",
)
RUNS = re.compile(r"[^t] eval time = .*?/\s*(\d+) runs")


class Answer(NamedTuple):
    """Text without blanks at its ends, and sampled tokens, the end token included."""

    text: str
    tokens: int


def ours(command: list[str]) -> Answer:
    """llmrun's answer."""
    done = subprocess.run([*command, "--json"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True)
    events = [json.loads(line) for line in done.stdout.splitlines()]
    text = "".join(event["text"] for event in events if event["event"] == "TextDelta")
    return Answer(text.strip(), events[-1]["stats"]["completion_tokens"])


def theirs(command: list[str]) -> Answer:
    """llama-completion's answer. It counts decode calls: the first token comes out of the prefill."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True)
    counted = RUNS.search(done.stderr.decode("utf-8", "replace"))
    text = done.stdout.decode("utf-8", "replace").strip().removesuffix("[end of text]").strip()
    return Answer(text, int(counted[1]) + 1 if counted else 0)


def main() -> int:
    """Compare and print."""
    parser = peers.parser(__doc__)
    parser.add_argument("--llama-completion", metavar="PATH", help="default: on PATH")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--ctx", type=int, default=2048)
    parser.add_argument("--raw", action="store_true", help="no chat template on either side")
    options = parser.parse_args()
    llmrun = peers.find_llmrun(options.llmrun)
    tool = peers.find_tool("llama-completion", options.llama_completion)
    path = peers.model_file(llmrun, options.model)
    common = ["--temp", "0", "-n", str(options.max_tokens), "-c", str(options.ctx)]
    common += ["-t", str(options.threads or peers.cores())]
    plain = ["-no-cnv"] if options.raw else ["-st", "--jinja"]
    equal = 0
    for prompt in PROMPTS:
        mine = ours([llmrun, "run", options.model, prompt, *common, *(["--raw"] if options.raw else [])])
        other = theirs(
            [tool, "-m", path, "-p", prompt, *common, *plain, "--no-display-prompt", "--no-warmup", "--perf"]
        )
        equal += mine == other
        print(f"{'same' if mine == other else 'DIFFERENT':10}{mine.tokens:4} tokens  {prompt!r}")
        if mine != other:
            print(f"  llmrun           {mine}\n  llama-completion {other}")
    print(f"{equal} of {len(PROMPTS)} answers are the same")
    return 0 if equal == len(PROMPTS) else 1


if __name__ == "__main__":
    sys.exit(main())
