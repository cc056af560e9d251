"""Prefill and decode by llmrun's own kernels, in turns with ggml's, and with other programs if they are given.

    python tests/benchmarks/kernels.py MODEL.gguf ... [--llama-bench NAME=PATH ...] [--openvino PYTHON] [-p 128,512]

NAME=PATH is a llama-bench, of llama.cpp or of a fork (ik_llama.cpp's). PYTHON is one that has openvino-genai, whose
prompts are of about the wanted length. --set AVX2 measures that set of kernels, as LLMRUN_KERNELS does. The best of
all turns counts.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable

OPENVINO = """
import random, sys
import openvino_genai
pipeline = openvino_genai.LLMPipeline(sys.argv[1], "CPU", INFERENCE_NUM_THREADS=int(sys.argv[2]))
config = openvino_genai.GenerationConfig()
config.ignore_eos, config.do_sample = True, False
words = "river stone cloud paper garden metal light ocean winter music bread train city moon forest road".split()
def ask(n_words, n_tokens):
    config.max_new_tokens = n_tokens
    return pipeline.generate([" ".join(random.choices(words, k=n_words))], config).perf_metrics
ask(20, 2)
for n_prompt in map(int, sys.argv[4].split(",")):
    metrics = ask(n_prompt - 30 if n_prompt > 60 else n_prompt, 2)
    print(f"pp{n_prompt}", 1e3 * metrics.get_num_input_tokens() / metrics.get_ttft().mean)
for depth in map(int, sys.argv[5].split(",")):
    n_tokens = int(sys.argv[3])
    name = f"tg{n_tokens}" + (f" @ d{depth}" if depth else "")
    print(name, 1e3 / ask(max(depth - 30, 5), n_tokens).get_tpot().mean)
"""


def bench_rates(command: list[str], environment: dict[str, str]) -> dict[str, float]:
    """Return the tokens per second of each test of a llama-bench, or of `llmrun bench`."""
    environment = {**os.environ, **environment}
    text = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True).stdout
    found = {}
    for row in csv.DictReader(io.StringIO(text)):
        n_prompt, n_gen, depth = (int(row.get(name) or 0) for name in ("n_prompt", "n_gen", "n_depth"))
        name = f"tg{n_gen}" if n_gen else f"pp{n_prompt}"
        found[name + (f" @ d{depth}" if depth else "")] = float(row["avg_ts"])
    return found


def openvino_rates(command: list[str]) -> dict[str, float]:
    text = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith(("pp", "tg"))]
    return {name: float(rate) for name, rate in lines}


def sides(options: argparse.Namespace, model: str) -> dict[str, Callable[[], dict[str, float]]]:
    threads, repeats = str(options.threads), ["-r", "1", "-o", "csv"]
    tests = ["-p", options.p, "-n", str(options.n), "-t", threads]
    depths = ["-d", options.d] if options.d != "0" else []
    ours = ["llmrun", "bench", model, *tests, *depths, *repeats]
    made: dict[str, Callable[[], dict[str, float]]] = {}
    for name in [*options.set, "ggml"]:
        environment = {"LLMRUN_KERNELS": name}
        made[f"llmrun {name}".rstrip()] = lambda environment=environment: bench_rates(ours, environment)  # type: ignore[misc]
    for given in options.llama_bench:
        name, path = given.split("=", 1)
        command = [path, "-m", model, *tests, *(depths if name == "llama.cpp" else []), *repeats]
        made[name] = lambda command=command: bench_rates(command, {})  # type: ignore[misc]
    if options.openvino:
        command = [options.openvino, "-c", OPENVINO, model, threads, str(options.n), options.p, options.d]
        made["OpenVINO"] = lambda: openvino_rates(command)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--llama-bench", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--openvino", metavar="PYTHON")
    parser.add_argument("--set", action="append", metavar="NAME", help="of kernels, as in LLMRUN_KERNELS")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("-p", default="128,512,2048", help="lengths of prompts")
    parser.add_argument("-n", type=int, default=32, help="tokens to decode")
    parser.add_argument("-d", default="0", help="tokens that are there before")
    options = parser.parse_args()
    options.set = options.set or [""]
    for model in options.models:
        found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        makers = sides(options, model)
        for turn in range(options.turns):
            for side in list(makers) if turn % 2 else reversed(makers):
                try:
                    rates = makers[side]()
                except (subprocess.CalledProcessError, OSError) as error:
                    print(f"{side}: {error}", file=sys.stderr)
                    continue
                for test, rate in rates.items():
                    found[test][side].append(rate)
        for test, rates_of in found.items():
            best = {side: max(rates) for side, rates in rates_of.items()}
            first = next((best[side] for side in makers if side in best), 0.0)
            texts = [f"{side} {best[side]:.1f} (x {first / best[side]:.2f})" for side in makers if side in best]
            print(f"{os.path.basename(model):20} {test:14} {'   '.join(texts)}", flush=True)  # noqa: PTH119


if __name__ == "__main__":
    main()
