"""llmrun on a GPU, beside llama-bench and llama-server where they are on PATH.

    python tests/benchmarks/gpu.py [--model smollm2 | --random 8b] [--parts bench serve ...] [--runs 3]

The llama.cpp tools should be built for the same GPU, from the same commit. The parts:

    bench    in turns: prefill and decode as in llama-bench; load time
    experts  the same with the experts of half of the layers on the processor (--random mixture)
    run      a whole `run`, and its decode beside llama-bench's at that depth
    long     a prompt of 30,000 tokens beside llama-bench's, with micro-batches of 512 and 2,048
    drafts   a long answer with and without speculation
    serve    in turns: both servers under 1, 8 and 32 clients, short prompts and ones of 1,000 tokens
    logits   the copy of logits from the GPU beside the sampler's time on the processor: all that sampling on the GPU
             could save

--random writes a model of random weights: 8b has the shape of Llama 3.1 8B, mixture that of half of Qwen3-30B-A3B;
tiny shows only that everything runs.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import peers
import server
import serving
from random_model import Shape, write_model

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support.sampler_cases import native_sampler

from llmrun.errors import LlmrunError
from llmrun.protocol.params import SamplingParams

SHAPES = {
    "tiny": Shape(width=256, layers=4, feed_forward=1024, heads=4, kv_heads=4, head_length=64, vocabulary=8192),
    "8b": Shape(
        width=4096, layers=32, feed_forward=14_336, heads=32, kv_heads=8, head_length=128, vocabulary=128_256
    ),
    "mixture": Shape(
        width=2048, layers=24, feed_forward=768, heads=32, kv_heads=4, head_length=128, vocabulary=151_936,
        experts=128, experts_used=8,
    ),
}  # fmt: skip
SAMPLERS = {
    "default": SamplingParams(),
    "top-k 40": SamplingParams(top_k=40, top_p=1.0, min_p=0.0),
    "greedy": SamplingParams(temperature=0.0),
}
PROMPT = "Write the numbers from 1 to 1000 in words, one a line."
N_LONG, N_LONG_ANSWER = 30_000, 1500  # tokens
PARTS = ("bench", "experts", "run", "long", "drafts", "serve", "logits")
_REPEATS = 50


def attempt(part: Callable[[], None]) -> None:
    """Add figures; where a program or a driver dies, say so and go on."""
    try:
        part()
    except (LlmrunError, OSError, SystemExit, subprocess.SubprocessError) as error:
        print(f"{part.__name__} is not measured: {error}", file=sys.stderr)


def type_of(name: str) -> str:
    """Return the type of a matrix of a random model, about as in a Q4_K_M file."""
    if "_inp" in name:
        return "F32"
    return "Q6_K" if name.startswith(("output.", "ffn_down", "attn_v")) else "Q4_K"


def bench(command: list[str]) -> dict[str, float]:
    """Return the tokens/s of prefill and decode, by llmrun bench or llama-bench, and the load time of llmrun."""
    done = subprocess.run([*command, "-o", "json"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    rows = json.loads(done.stdout)
    speeds = {"prefill" if row["n_prompt"] else "decode": float(row["avg_ts"]) for row in rows}
    return speeds | {"load": rows[0].get("load_ns", 0) / 1e9}


def answer(command: list[str]) -> dict[str, float]:
    """Return the figures of one `llmrun run`, and the seconds of the whole command."""
    began = time.perf_counter()
    done = subprocess.run([*command, "--json"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True)
    seconds = time.perf_counter() - began
    return {**json.loads(done.stdout.splitlines()[-1])["stats"], "seconds": seconds}


class Benchmark:
    """The parts, by name, on one model."""

    def __init__(self, llmrun: str, path: str, options: Any) -> None:
        self.llmrun, self.path, self.options = llmrun, path, options
        self.report = peers.Report()
        self.llama_bench = shutil.which(options.llama_bench)
        self.llama_server = shutil.which(options.llama_server)

    def theirs(self, *arguments: str) -> dict[str, Callable[[], dict[str, float]]]:
        """Return llama-bench as a side, if there is one."""
        command = [str(self.llama_bench), "-m", self.path, "-ngl", "99", "-r", "1", *arguments]
        return {"llama-bench": lambda: bench(command)} if self.llama_bench else {}

    def bench(self, *arguments: str, name: str = "") -> None:
        """Add prefill, decode and load time."""
        tests = ["-p", str(self.options.prefill), "-n", str(self.options.decode), *arguments]
        command = [self.llmrun, "bench", self.path, *tests, "-r", "1"]
        sides = {"llmrun": lambda: bench(command), **self.theirs(*tests)}
        results = peers.take_turns(self.options.runs, sides)
        for figure in ("prefill", "decode"):
            rates = {side: [result[figure] for result in values] for side, values in results.items()}
            for side, values in rates.items():
                self.report.add(f"{figure}{name}", values, "t/s", side)
            if len(rates) > 1:
                self.compare(f"{figure}{name}", *rates.values())
        self.report.add(f"load{name}", [result["load"] for result in results["llmrun"]], "s")

    def compare(self, figure: str, ours: Sequence[float], theirs: Sequence[float], bound: float = 0.98) -> None:
        """Add the ratio of ours and llama-bench's, and what is wanted."""
        ratio = self.report.ratio(f"{figure}, llmrun / llama-bench", ours, theirs)
        self.report.bound(f"{figure}, llmrun / llama-bench, median", ratio, bound, at_most=False)

    def experts(self) -> None:
        """Add the same with the experts of half of the layers on the processor."""
        self.bench("-ncmoe", str(SHAPES["mixture"].layers // 2), name=", half of the experts on the processor")

    def run(self) -> None:
        """Add what a whole `llmrun run` takes, the parts of its answer, and its decode beside llama-bench's."""
        command = [self.llmrun, "run", self.path, PROMPT, "-n", str(self.options.decode), "--temp", "0"]
        command += ["--speculate", "off"]
        sides = {
            "llmrun": lambda: answer(command),
            **self.theirs("-p", "0", "-n", str(self.options.decode), "-d", "64"),
        }
        results = peers.take_turns(self.options.runs, sides)
        ours = results["llmrun"]
        self.report.add("run, the whole command", [stats["seconds"] for stats in ours], "s")
        for name, part in (("time to first token", "ttft_seconds"), ("a token outside the decode", "overhead_seconds")):
            self.report.add(f"run, {name}", [1e3 * stats[part] for stats in ours], "ms")
        rates = [(stats["completion_tokens"] - 1) / stats["decode_seconds"] for stats in ours]
        self.report.add("run, decode", rates, "t/s")
        if others := results.get("llama-bench"):
            self.compare("run, decode", rates, [result["decode"] for result in others], 0.99)

    def long(self) -> None:
        """Add the prefill of a long prompt."""
        numbers = np.random.default_rng(1).integers(0, 5000, N_LONG)
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write(" ".join(map(str, numbers)))
            file.flush()
            command = [self.llmrun, "run", self.path, "-f", file.name, "Go on.", "-n", "4", "--temp", "0"]
            sides = {"llmrun": lambda: answer([*command, "--ctx", str(N_LONG + 2048)])}
            tests = ("-p", str(N_LONG), "-n", "0")
            for size in ("512", "2048"):
                for side in self.theirs(*tests, "-b", "2048", "-ub", size).values():
                    sides[f"llama-bench -ub {size}"] = side
            results = peers.take_turns(self.options.runs, sides)
        for side, values in results.items():
            rates = [value.get("prefill") or value["prompt_tokens"] / value["prefill_seconds"] for value in values]
            self.report.add(f"prefill of {N_LONG:,} tokens", rates, "t/s", side)
        if len(results) > 1:
            ours, *others = (row["median"] for row in self.report.rows[-3:])
            self.report.bound(
                f"prefill of {N_LONG:,} tokens / llama-bench's best", ours / max(others), 0.97, at_most=False
            )

    def drafts(self) -> None:
        """Add a long answer with and without speculation."""
        tokens = str(N_LONG_ANSWER)
        sides = {
            name: partial(answer, [self.llmrun, "run", self.path, PROMPT, "-n", tokens, "--speculate", name])
            for name in ("auto", "off")
        }
        results = {name: [side()] for name, side in sides.items()}  # the first ever of this model
        for name, values in results.items():
            values += [sides[name]() for _ in range(self.options.runs - 1)]
            self.report.add(f"answer of {tokens} tokens", [value["decode_seconds"] for value in values], "s", name)
            counts = [int(value.get(key, 0)) for value in values for key in ("drafted_tokens", "accepted_tokens")]
            print(f"  {name}: drafted and accepted {counts}", file=sys.stderr)
        first, plain = results["auto"][0]["decode_seconds"], min(value["decode_seconds"] for value in results["off"])
        self.report.bound("first answer with speculation, speed / without", plain / first, 0.98, at_most=False)

    def serve(self) -> None:
        """Add the figures of clients of both servers; neither drafts."""
        numbers, n_parallel = itertools.count(), max(self.options.clients)
        commands = {
            "llmrun": [self.llmrun, "serve", self.path, "--parallel", str(n_parallel), "--ctx", str(self.options.ctx)]
        }
        commands["llmrun"] += ["--speculate", "off"]
        if self.llama_server:
            slots = ["-np", str(n_parallel), "-c", str(self.options.ctx * n_parallel), "--jinja", "-ngl", "99"]
            commands["llama-server"] = [self.llama_server, "-m", self.path, *slots]
        with ExitStack() as stack:
            ports = {}
            for side, command in commands.items():
                began = time.perf_counter()
                ports[side] = stack.enter_context(server.running(command))
                self.report.add("serve, start until ready", [time.perf_counter() - began], "s", side)
            for n_before in self.options.before:
                for n_clients in self.options.clients:
                    size = n_clients, self.options.tokens, n_before, numbers
                    sides = {side: partial(load_of, port, *size) for side, port in ports.items()}
                    print(f"{n_before:,} tokens before:", file=sys.stderr)
                    serving.add_load(self.report, n_clients, peers.take_turns(self.options.runs, sides))

    def logits(self) -> None:
        """Add the copy of logits and the sampler's time."""
        add_logits(self.report, self.options.vocabulary, self.options.clients)


def question_of_numbers(number: int, n_before: int = 0) -> list[dict[str, str]]:
    """Return a conversation of its own for a random model, to which a number is a token and a letter another."""
    numbers = np.random.default_rng(number).integers(0, 5000, n_before)
    return [{"role": "user", "content": f"{' '.join(map(str, numbers))} Go on from {number}."}]


def load_of(port: int, *size: Any) -> serving.Served:
    """Measure a server under clients; see serving.load_from()."""
    return asyncio.run(serving.load_from(port, *size))


def add_logits(report: peers.Report, n_vocab: int, n_rows: Sequence[int]) -> None:
    """Add the copy of rows of logits from the first GPU to pinned memory, and the sampler's time."""
    from llmrun.engine import environment
    from llmrun.engine.llama.devices import devices
    from llmrun.engine.llama.ggml import Operations
    from llmrun.engine.llama.library import function, start
    from llmrun.gguf.types import TENSOR_TYPES

    environment.set_environment()
    start()
    pointer = ctypes.c_void_p
    host_memory = function("ggml_backend_dev_host_buffer_type", pointer, pointer)
    allocate = function("ggml_backend_buft_alloc_buffer", pointer, pointer, ctypes.c_size_t)
    base_of = function("ggml_backend_buffer_get_base", pointer, pointer)
    gpu = next((device for device in devices() if not device.is_processor), None)
    if gpu is None:
        print("no GPU: the copy of logits is not measured", file=sys.stderr)
    for rows in n_rows if gpu else ():
        ggml, n_bytes = Operations(1, gpu.pointer), 4 * n_vocab * rows
        with ggml.tensors() as context:
            logits = ggml.tensor(context, TENSOR_TYPES["F32"].number, n_vocab, rows)
            with ggml.memory(context, ggml.plain):
                buffer = allocate(host_memory(gpu.pointer), n_bytes)
                copy = partial(ggml.backend_tensor_get, logits, base_of(buffer), 0, n_bytes)
                report.add(f"copy of {rows} x {n_vocab:,} logits", timed(copy), "µs")
                ggml.backend_buffer_free(buffer)
    row = np.random.default_rng(1).standard_normal(n_vocab, dtype=np.float32) * np.float32(3)
    for name, params in SAMPLERS.items():
        sampler = native_sampler(n_vocab, params, 42)
        report.add(f"sampling of {n_vocab:,} logits, {name}", timed(partial(sampler.sample, row.ctypes.data)), "µs")


def timed(work: Callable[[], Any]) -> list[float]:
    """Return the microseconds of some calls."""
    times = []
    for _ in range(1 + _REPEATS):
        began = time.perf_counter()
        work()
        times.append(1e6 * (time.perf_counter() - began))
    return times[1:]


def main() -> int:
    """Measure and print."""
    parser = peers.parser(__doc__)
    parser.add_argument("--random", choices=SHAPES, help="a model of random weights instead of --model")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[part for part in PARTS if part != "experts"])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--before", type=int, nargs="+", default=[0, 1000], help="tokens of each client's prompt")
    parser.add_argument("--ctx", type=int, default=2048, help="of each client; too long a one for all makes them share")
    parser.add_argument("--tokens", type=int, default=128, help="of each client's answer (default: %(default)s)")
    parser.add_argument("--prefill", type=int, default=512, help="tokens (default: %(default)s)")
    parser.add_argument("--decode", type=int, default=128, help="tokens (default: %(default)s)")
    parser.add_argument("--vocabulary", type=int, default=262_144, help="of the copied logits (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--llama-bench", default="llama-bench", metavar="PATH", help="default: on PATH")
    parser.add_argument("--llama-server", default="llama-server", metavar="PATH", help="default: on PATH")
    options = parser.parse_args()
    llmrun = peers.find_llmrun(options.llmrun)
    peers.warn_if_busy()
    with tempfile.TemporaryDirectory() as folder:
        if options.random:
            # The likeliest token of random weights may be one without text.
            serving.OPTIONS["logit_bias"] = {str(token): -100 for token in range(3)}
            serving.question = question_of_numbers
            path = str(write_model(Path(folder) / f"{options.random}.gguf", SHAPES[options.random], type_of))
        else:
            path = peers.model_file(llmrun, options.model)
        benchmark = Benchmark(llmrun, path, options)
        for part in options.parts:
            attempt(getattr(benchmark, part))
    return benchmark.report.finish()


if __name__ == "__main__":
    sys.exit(main())
