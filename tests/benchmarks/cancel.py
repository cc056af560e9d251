"""Ctrl-C in a long prefill: milliseconds until the command has ended, and its engine with it.

    python tests/benchmarks/cancel.py [--runs 20] [--tokens 6000]

Each run waits until the prefill has begun, then a little longer than the run before, so that the signal meets
different moments of a batch.
"""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import time

import peers
import psutil

SENTENCE = "The quick brown fox jumps over the lazy dog. "
SENTENCE_TOKENS = 10


def cancel_after(command: list[str], prompt: str, seconds: float, wanted_tokens: int) -> float:
    """Milliseconds from SIGINT, sent this long into the prefill, to the end of the process."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(prompt.encode())
    process.stdin.close()
    started = json.loads(process.stdout.readline())
    if started["prompt_tokens"] < wanted_tokens:
        sys.exit(f"the prompt has only {started['prompt_tokens']} tokens")
    children = psutil.Process(process.pid).children()
    time.sleep(seconds)
    sent = time.perf_counter()
    process.send_signal(signal.SIGINT)
    status = process.wait()
    took = (time.perf_counter() - sent) * 1000
    answered = b"TextDelta" in process.stdout.read()
    if answered or status != 130:
        sys.exit(f"the prefill was over before the signal, or the command did not obey it (status {status})")
    if any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children):
        sys.exit("the engine is still there")
    return took


def main() -> int:
    """Measure and print."""
    parser = peers.parser(__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--longest-wait", type=float, default=2.0, help="seconds into the prefill, at the last run")
    options = parser.parse_args()
    command = [peers.find_llmrun(options.llmrun), "run", options.model, "--json", "-"]
    if options.threads:
        command += ["-t", str(options.threads)]
    prompt = SENTENCE * (options.tokens // SENTENCE_TOKENS)
    waits = [options.longest_wait * (run + 1) / options.runs for run in range(options.runs)]
    took = sorted(cancel_after(command, prompt, wait, options.tokens) for wait in waits)
    p95 = took[min(len(took) - 1, int(0.95 * len(took)))]
    print(f"SIGINT in a prefill of {options.tokens} tokens, {len(took)} runs: ms until the process has ended")
    print(f"p50 {statistics.median(took):.0f}  p95 {p95:.0f}  max {took[-1]:.0f}")
    return 0 if peers.verdict("p95 in ms", p95, 250, at_most=True) else 1


if __name__ == "__main__":
    sys.exit(main())
