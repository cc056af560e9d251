"""Rows and results: llama-bench's names and arithmetic, and JSON that comes back as it was."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from typing import Any

import pytest

from llmrun.errors import LlmrunError
from llmrun.lab.bench.results import SCHEMA, BenchRow, BenchWarning, ChatTimes, Limit, Machine, Result

LIMIT = Limit(1000.0, "memory", 1000.0, 2000.0, 3e10, 4e11, 1e8, 1e6, 1e8)
CHAT = ChatTimes((5, 6), 1, 2, 3, 0.25, 0.5, (100.0, 101.0))
MACHINE = Machine(name="here", cpu="CPU", cpu_flags=("avx2",), cores=2, gpus=("GPU",), cpu_quota=1.5)
ROW = BenchRow(
    model_filename="m.gguf",
    n_prompt=512,
    samples_ns=(10**9, 2 * 10**9, 3 * 10**9),
    test="pp512",
    model="m",
    repetitions=3,
    limit=LIMIT,
    chat=CHAT,
    warnings=(BenchWarning("noisy", "too noisy: ± 50%"),),
    environment={"GOMP_SPINCOUNT": "1"},
    machine=MACHINE,
)
# As llama-bench of the same llama.cpp writes it, with `-o json`.
LLAMA_BENCH: dict[str, Any] = {
    "build_commit": "0c1e570", "build_number": 1, "cpu_info": "CPU", "gpu_info": "", "backends": "CPU",
    "model_filename": "m.gguf", "model_type": "llama 256M Q4_1", "model_size": 96576768, "model_n_params": 134515008,
    "n_batch": 2048, "n_ubatch": 512, "n_threads": 2, "cpu_mask": "0x0", "cpu_strict": False, "poll": 50,
    "type_k": "f16", "type_v": "f16", "n_gpu_layers": -1, "n_cpu_moe": 0, "split_mode": "layer", "main_gpu": 0,
    "no_kv_offload": False, "flash_attn": -1, "devices": "auto", "tensor_split": "0.00",
    "tensor_buft_overrides": "none", "load_mode": "auto", "lazy_mode": "auto", "embeddings": False, "no_op_offload": 0,
    "no_host": False, "repack": True, "fit_target": 0, "fit_min_ctx": 0, "n_prompt": 0, "n_gen": 16, "n_depth": 64,
    "test_time": "2026-11-21T09:00:00Z", "avg_ns": 150000000, "stddev_ns": 70710678, "avg_ts": 120.0,
    "stddev_ts": 56.568542, "samples_ns": [100000000, 200000000], "samples_ts": [160.0, 80.0],
}  # fmt: skip


def test_figures_are_llama_benchs() -> None:
    row = BenchRow(n_gen=16, samples_ns=(100_000_000, 200_000_000))
    assert row.samples_ts == (160.0, 80.0)
    assert (row.avg_ns, row.stddev_ns) == (LLAMA_BENCH["avg_ns"], LLAMA_BENCH["stddev_ns"])
    assert row.avg_ts == pytest.approx(LLAMA_BENCH["avg_ts"])
    assert row.stddev_ts == pytest.approx(LLAMA_BENCH["stddev_ts"])


def test_one_sample_has_no_deviation_and_none_no_mean() -> None:
    assert (BenchRow(n_gen=1, samples_ns=(5,)).stddev_ts, BenchRow(n_gen=1, samples_ns=(5,)).stddev_ns) == (0.0, 0)
    assert (BenchRow(n_gen=1).avg_ts, BenchRow(n_gen=1).avg_ns) == (0.0, 0)


def test_json_begins_as_llama_benchs_does_with_the_same_kinds_of_values() -> None:
    written = ROW.to_json()
    assert list(written)[: len(LLAMA_BENCH)] == list(LLAMA_BENCH)
    for name, value in LLAMA_BENCH.items():
        assert type(written[name]) is type(value), name


def test_json_comes_back_as_it_was() -> None:
    result = Result((ROW, replace(ROW, limit=None, chat=None)), MACHINE)
    assert Result.from_json(json.loads(json.dumps(result.to_json()))) == result


def test_what_is_computed_is_in_the_json() -> None:
    written = ROW.to_json()
    assert written["share_of_limit"] == pytest.approx(statistics.fmean(ROW.samples_ts) / 1000)


def test_a_file_of_llama_benchs_can_be_read() -> None:
    result = Result.from_json([LLAMA_BENCH])
    (row,) = result.rows
    assert (row.test, row.program, row.model, row.repetitions) == ("tg16 @ d64", "llama-bench", "llama 256M Q4_1", 2)
    assert (result.machine.cpu, result.machine.build_commit, result.is_partial) == ("CPU", "0c1e570", False)


def test_rows_that_were_stopped_make_the_result_partial() -> None:
    stopped = replace(ROW, repetitions=5)
    assert stopped.is_partial
    assert Result.from_json(Result((stopped,)).to_json()).is_partial


def test_fields_of_later_are_passed_over_but_not_a_later_schema() -> None:
    written = ROW.to_json()
    assert BenchRow.from_json({**written, "colour": "red"}) == ROW
    with pytest.raises(LlmrunError, match="newer llmrun"):
        BenchRow.from_json({**written, "schema": SCHEMA + 1})


@pytest.mark.parametrize(
    "data",
    [
        [], {}, [1], "text", 5, None, [{}], [{"schema": 1}], [{**LLAMA_BENCH, "samples_ns": []}],
        [{**LLAMA_BENCH, "samples_ns": 5}], [{**LLAMA_BENCH, "n_gen": 0}], [{**LLAMA_BENCH, "schema": "x"}],
        [{**LLAMA_BENCH, "machine": 5}], [{**LLAMA_BENCH, "n_threads": "2"}],
        [{**LLAMA_BENCH, "samples_ns": [0]}], [{**LLAMA_BENCH, "samples_ns": ["1"]}],
        [{**LLAMA_BENCH, "warnings": [1]}],
        [{**LLAMA_BENCH, "warnings": [{"kind": "colour", "text": "red"}]}],
        [{**LLAMA_BENCH, "model_type": None}],
        [{**LLAMA_BENCH, "limit": {"colour": 1}}],
    ],
)  # fmt: skip
def test_garbage_is_refused(data: Any) -> None:
    with pytest.raises(LlmrunError, match="not a bench result"):
        Result.from_json(data)
