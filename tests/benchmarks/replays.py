"""How many recorded answers whose tokens were drafted replay byte for byte.

    python tests/benchmarks/replays.py [--model NAME] [--draft NAME] [--count N] [--tokens N]

Each is recorded by one process, and replayed by another one; half of them are drawn at a temperature.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import peers

from llmrun.bench.speculation import PROMPTS


def main() -> int:
    parser = peers.parser(__doc__)
    parser.add_argument("--draft")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=120)
    options = parser.parse_args()
    llmrun = peers.find_llmrun(options.llmrun)
    threads = ["--threads", str(options.threads or peers.cores())]
    drafts = ["--speculate", "7", *(["--draft", options.draft] if options.draft else [])]
    same = drafted = 0
    questions = [prompt.question for prompt in PROMPTS.values()]
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.count):
            file = Path(folder, f"{number}.json")
            wishes = ["--temp", "0.8" if number % 2 else "0", "--max-tokens", str(options.tokens), *threads]
            question = questions[number % len(questions)]
            record = [llmrun, "run", options.model, question, "--record", str(file), *wishes, *drafts]
            subprocess.run(record, stdin=subprocess.DEVNULL, capture_output=True, check=True)
            drafted += json.loads(file.read_text(encoding="utf-8"))["answer"]["stats"]["drafted_tokens"]
            replayed = subprocess.run([llmrun, "replay", str(file)], stdin=subprocess.DEVNULL, capture_output=True)
            same += replayed.returncode == 0
    print(f"{same} of {options.count} answers, with {drafted:,} drafted tokens, came back byte for byte")
    return 0 if same == options.count else 1


if __name__ == "__main__":
    sys.exit(main())
