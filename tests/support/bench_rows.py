"""Rows as a bench would have measured them, for the tests of history, comparison and formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmrun.lab.bench.results import BenchRow, ChatTimes, Limit, Machine, Result

XEON = Machine(
    name="xeon-a42d42", cpu="Intel(R) Xeon(R) Processor", cpu_flags=("avx2", "avx512f"), cores=2, threads=2,
    memory_total=24 << 30, os="Debian GNU/Linux 12", kernel="Linux 6.1", python="3.11.7", llmrun="0.1.0",
    llama="0.3.36", build_commit="0c1e570",
)  # fmt: skip
STEADY = (1.0, 1.002, 0.998, 1.001, 0.999)


def row(
    test: str = "tg128", rate: float = 40.0, *, spread: Sequence[float] = STEADY, machine: Machine = XEON, **more: Any
) -> BenchRow:
    """A row with as many samples as spread has, around this many tokens/s."""
    n_prompt, n_gen = (512, 0) if test.startswith("pp") else (0, 128)
    facts: dict[str, Any] = {
        "build_commit": "0c1e570",
        "cpu_info": machine.cpu,
        "model_filename": "/home/alice/models/llama-1b-Q4_K_M.gguf",
        "model_type": "llama 1B Q4_K - Medium",
        "model_size": 799_862_912,
        "model_n_params": 1_235_814_432,
        "n_threads": 2,
        "test_time": "2026-11-21T10:00:00Z",
        "model": "llama:1b",
        "version": "0.1.0",
        "repetitions": len(spread),
        "load_ns": 300_000_000,
        "peak_bytes": 1_200_000_000,
        "machine": machine,
        "limit": Limit(45.0, "memory", 45.0, 900.0, 33e9, 9e11, 8e8, 1e6, 1.2e9),
    }
    samples = tuple(round(1e9 * (n_prompt + n_gen) / (rate * factor)) for factor in spread)
    return BenchRow(n_prompt=n_prompt, n_gen=n_gen, test=test, samples_ns=samples, **{**facts, **more})


def chat() -> ChatTimes:
    return ChatTimes((250_000_000, 260_000_000), 25_000_000, 27_000_000, 40_000_000, 0.012, 0.004, (39.0, 40.0))


def result(*rows: BenchRow, machine: Machine = XEON) -> Result:
    return Result(rows or (row("pp512", 120.0, machine=machine), row(machine=machine)), machine)
