"""What Markdown on a terminal costs: decode speed beside that of plain text into a pipe, with the same tokens.

    python tests/benchmarks/markdown.py [--runs 5] [--tokens 1000]

The two take turns; each is a process of its own that loads the model and continues the same text greedily, its end
token forbidden. Speed is the engine's own figure, so it tells whether drawing held decoding up. Beside it stands the
processor time that the front took per token. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import json
import os
import pty
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import peers

TEXT = """\
# Baking bread

Bread needs **four** things: *flour*, water, salt and `yeast`.

## What to buy

- **Flour**: 500 g of it
  - the stronger the better
- **Water**: 300 g, lukewarm

| what | grams | why |
|------|------:|-----|
| salt | 10 | taste |
| yeast | 7 | it rises |

```python
def bake(minutes: int) -> str:
    return "bread" if minutes > 40 else "dough"
```

## What to do

1. **Mix** the flour
"""


class Shown(NamedTuple):
    """One answer: tokens/s, microseconds of processor time that the front took per token, and bytes written."""

    rate: float
    front: float
    n_bytes: int


def show(model: str, tokens: int, threads: int | None, markdown: bool) -> None:
    """In a process of its own: show the text on stdout, then tell the figures on file descriptor 3."""
    import llmrun
    from llmrun.protocol.messages import Finished, TextDelta
    from llmrun.ui.answer.view import answer_view
    from llmrun.ui.terminal.output import Output

    output = Output()
    began = ended = 0.0
    with llmrun.load(model, threads=threads) as loaded:
        end = int(loaded.header.metadata.get("tokenizer.ggml.eos_token_id", 2))
        sampling = llmrun.SamplingParams(temperature=0.0, repeat_penalty=1.1, logit_bias=((end, -1000.0), (0, -1000.0)))
        with answer_view(output, stats=True, markdown=markdown) as view:
            for event in loaded.generate(TEXT, sampling=sampling, limits=llmrun.Limits(max_tokens=tokens)):
                if isinstance(event, TextDelta) and not began:
                    began = time.process_time()
                view.show(event)
                if isinstance(event, Finished):
                    ended = time.process_time()
                    stats = event.stats
    figures = {"rate": stats.decode_rate, "front": (ended - began) / stats.completion_tokens * 1e6}
    os.write(3, json.dumps({**figures, "tokens": stats.completion_tokens}).encode())


def measure(options: peers.argparse.Namespace, *, markdown: bool) -> Shown:
    """One run: Markdown goes to a pseudo-terminal, plain text into a pipe; both are read as fast as they come."""
    command = [sys.executable, str(Path(__file__)), "--model", options.model, "--tokens", str(options.tokens)]
    command += ["--threads", str(options.threads)] if options.threads else []
    command += ["--show", "markdown" if markdown else "plain"]
    shown_from, shown_to = pty.openpty() if markdown else os.pipe()
    told_from, told_to = os.pipe()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}

    process = subprocess.Popen(
        ["bash", "-c", f'exec "$@" 3>&{told_to}', "bash", *command],
        stdin=subprocess.DEVNULL,
        stdout=shown_to,
        stderr=subprocess.DEVNULL,
        env=environment,
        pass_fds=(told_to,),
    )
    os.close(shown_to)
    os.close(told_to)
    n_bytes = 0
    while data := _read(shown_from):
        n_bytes += len(data)
    told = os.read(told_from, 4096)
    os.close(shown_from)
    os.close(told_from)
    if process.wait() != 0 or not told:
        sys.exit(f"this failed with status {process.returncode}: {' '.join(command)}")
    figures = json.loads(told)
    if figures["tokens"] < options.tokens:
        print(f"warning: only {figures['tokens']} tokens", file=sys.stderr)
    return Shown(figures["rate"], figures["front"], n_bytes)


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:  # the other side of a pseudo-terminal is gone
        return b""


def main() -> int:
    """Measure and print."""
    parser = peers.parser(__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--show", choices=("markdown", "plain"), help=peers.argparse.SUPPRESS)
    options = parser.parse_args()
    if options.show:
        show(options.model, options.tokens, options.threads, options.show == "markdown")
        return 0
    peers.warn_if_busy()
    results = peers.take_turns(
        options.runs,
        {
            "markdown": lambda: measure(options, markdown=True),
            "plain": lambda: measure(options, markdown=False),
        },
    )
    for label, runs in results.items():
        rates, front, n_bytes = zip(*runs, strict=True)
        print(
            f"{label:9} {peers.spread(rates, 't/s', 1)}  front {peers.spread(front, 'µs/token', 1)}  {n_bytes[0]} bytes"
        )
    pairs = zip(results["markdown"], results["plain"], strict=True)
    ratio = statistics.median(markdown.rate / plain.rate for markdown, plain in pairs)
    return 0 if peers.verdict("decode, Markdown / plain, median of pairs", ratio, 0.97, at_most=False) else 1


if __name__ == "__main__":
    sys.exit(main())
