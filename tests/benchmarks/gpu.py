"""llmrun on a GPU, beside llama-bench and llama-server where they are on PATH.

    python tests/benchmarks/gpu.py [--model smollm2] [--clients 1 8 32] [--runs 3] [--tiny]

The llama.cpp tools should be built for the same GPU, from the same commit. In turns: prefill and decode as in
llama-bench, then `serve` under clients. Alone: load time, a whole `run`, the step table of speculation, and the copy
of logits from the GPU beside the sampler's time on the processor, all that sampling on the GPU could save.
--tiny measures a tiny model of random weights, which shows only that everything runs.
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
from collections.abc import Callable, Iterator, Sequence
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

TINY = Shape(width=256, layers=4, feed_forward=1024, heads=4, kv_heads=4, head_length=64, vocabulary=8192)
SAMPLERS = {
    "default": SamplingParams(),
    "top-k 40": SamplingParams(top_k=40, top_p=1.0, min_p=0.0),
    "greedy": SamplingParams(temperature=0.0),
}
PROMPT = "Write the numbers from 1 to 1000 in words, one a line."
N_CTX = 1024  # of each client
_REPEATS = 50


def attempt(add: Callable[..., None], *arguments: Any) -> None:
    """Add figures; where a program or a driver dies, say so and go on."""
    try:
        add(*arguments)
    except (LlmrunError, OSError, SystemExit, subprocess.SubprocessError) as error:
        print(f"{add.__name__.removeprefix('add_')} is not measured: {error}", file=sys.stderr)


def bench(command: list[str]) -> dict[str, float]:
    """Return the tokens/s of prefill and decode, by llmrun bench or llama-bench, and the load time of llmrun."""
    done = subprocess.run([*command, "-o", "json"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    rows = json.loads(done.stdout)
    found = {"prefill" if row["n_prompt"] else "decode": float(row["avg_ts"]) for row in rows}
    return found | {"load": rows[0].get("load_ns", 0) / 1e9}


def add_bench(report: peers.Report, commands: dict[str, list[str]], runs: int) -> None:
    """Add prefill, decode and load time."""
    found = peers.take_turns(runs, {name: lambda each=each: bench(each) for name, each in commands.items()})
    for figure in ("prefill", "decode"):
        rates = {side: [each[figure] for each in values] for side, values in found.items()}
        for side, values in rates.items():
            report.add(figure, values, "t/s", side)
        if len(rates) > 1:
            ratio = report.ratio(f"{figure}, llmrun / llama-bench", *rates.values())
            report.bound(f"{figure}, llmrun / llama-bench, median", ratio, 0.98, at_most=False)
    report.add("load", [each["load"] for each in found["llmrun"]], "s")


def add_run(report: peers.Report, command: list[str], runs: int) -> None:
    """Add what a whole `llmrun run` takes, and the parts of its answer."""
    seconds, stats = [], []
    for _ in range(1 + runs):
        began = time.perf_counter()
        done = subprocess.run([*command, "--json"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True)
        seconds.append(time.perf_counter() - began)
        stats.append(json.loads(done.stdout.splitlines()[-1])["stats"])
    report.add("run, the whole command", seconds[1:], "s")
    for name, part in (("time to first token", "ttft_seconds"), ("a token outside the decode", "overhead_seconds")):
        report.add(f"run, {name}", [1e3 * each[part] for each in stats[1:]], "ms")
    rates = [(each["completion_tokens"] - 1) / each["decode_seconds"] for each in stats[1:]]
    report.add("run, decode", rates, "t/s")


def add_serve(report: peers.Report, commands: dict[str, list[str]], options: Any) -> None:
    """Add the figures of clients of both servers."""
    numbers = itertools.count()
    with ExitStack() as stack:
        ports = {}
        for side, command in commands.items():
            began = time.perf_counter()
            ports[side] = stack.enter_context(server.running(command))
            report.add("serve, start until ready", [time.perf_counter() - began], "s", side)
        for n_clients in options.clients:
            sides = {name: load_of(port, n_clients, options.tokens, numbers) for name, port in ports.items()}
            serving.add_load(report, n_clients, peers.take_turns(options.runs, sides))


def load_of(port: int, n_clients: int, n_tokens: int, numbers: Iterator[int]) -> Callable[[], serving.Served]:
    """Return what measures a server under clients."""
    return lambda: asyncio.run(serving.load_from(port, n_clients, n_tokens, 0, numbers))


def add_steps(report: peers.Report, path: str) -> None:
    """Add the time of decode steps by their width, relative to one token."""
    from llmrun.config import load_settings
    from llmrun.model.load_plan import prepare
    from llmrun.models.location import locate
    from llmrun.planning.plan import LoadPreferences

    with prepare(locate(path, load_settings()).spec, Path(path), LoadPreferences(n_ctx=4096)) as model:
        model.start(model.new_engine())
        _ = model.generate(PROMPT, max_tokens=8).text  # compiles kernels
        steps = model.measure_steps()
    if not steps:
        print("the step table is not measured: other programs disturbed it, or drafts can't pay", file=sys.stderr)
    plain = {step.depth: step.seconds for step in steps if step.width == 1}
    for step in steps:
        name = f"step of {step.width} after {step.depth:,} tokens"
        report.add(name, [1e3 * step.seconds], "ms")
        if step.width > 1 and step.depth in plain:
            report.add(f"{name}, relative to one", [step.seconds / plain[step.depth]], "x")


def add_logits(report: peers.Report, n_vocab: int, n_rows: Sequence[int]) -> None:
    """Add the copy of rows of logits from the first GPU to pinned memory, and the sampler's time."""
    from llmrun.engine import environment
    from llmrun.engine.llama.devices import devices
    from llmrun.engine.llama.library import function, start
    from llmrun.engine.llama.operations import Operations
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
    parser.add_argument("--tiny", action="store_true", help="a tiny model of random weights instead of --model")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=64, help="of each client's answer (default: %(default)s)")
    parser.add_argument("--prefill", type=int, default=512, help="tokens (default: %(default)s)")
    parser.add_argument("--decode", type=int, default=128, help="tokens (default: %(default)s)")
    parser.add_argument("--vocabulary", type=int, default=262_144, help="of the copied logits (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--llama-bench", default="llama-bench", metavar="PATH", help="default: on PATH")
    parser.add_argument("--llama-server", default="llama-server", metavar="PATH", help="default: on PATH")
    options = parser.parse_args()
    llmrun, report, n_parallel = peers.find_llmrun(options.llmrun), peers.Report(), max(options.clients)
    peers.warn_if_busy()
    with tempfile.TemporaryDirectory() as folder:
        tiny = Path(folder) / "tiny.gguf"
        path = (
            str(write_model(tiny, TINY, lambda _: "F32")) if options.tiny else peers.model_file(llmrun, options.model)
        )
        if options.tiny:  # its likeliest token may be one without text
            serving.OPTIONS["logit_bias"] = {str(token): -100 for token in range(3)}
        tests = ["-p", str(options.prefill), "-n", str(options.decode), "-r", "1"]
        n_ctx = N_CTX * n_parallel
        bench = {"llmrun": [llmrun, "bench", path, *tests]}
        serve = {"llmrun": [llmrun, "serve", path, "--parallel", str(n_parallel), "--ctx", str(N_CTX)]}
        if found := shutil.which(options.llama_bench):
            bench["llama-bench"] = [found, "-m", path, *tests, "-ngl", "99"]
        if found := shutil.which(options.llama_server):
            serve["llama-server"] = [
                found,
                "-m",
                path,
                "-ngl",
                "99",
                "-np",
                str(n_parallel),
                "-c",
                str(n_ctx),
                "--jinja",
            ]
        attempt(add_bench, report, bench, options.runs)
        run = [llmrun, "run", path, PROMPT, "-n", str(options.decode), "--temp", "0"]
        attempt(add_run, report, run, options.runs)
        attempt(add_serve, report, serve, options)
        attempt(add_steps, report, path)
    attempt(add_logits, report, options.vocabulary, options.clients)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
