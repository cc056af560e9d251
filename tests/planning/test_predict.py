"""Predictions: which bytes a token reads, and times that add up from what was measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import gguf_writer
from support.gguf_writer import TensorSpec

from llmrun.gguf.header import Header
from llmrun.gguf.reader import read_header
from llmrun.planning.predict import (
    Prediction,
    Work,
    main_type,
    part_of,
    predict,
    step_seconds,
    tensor_types,
    work_of,
    work_of_quant,
)
from llmrun.protocol.jobs.machine import MachineSpeed, Rates

F32, Q4_1, Q8_0 = 0, 3, 8
EMBEDDING = TensorSpec("token_embd.weight", (64, 16), Q8_0, 64 * 16 // 32 * 34)
OUTPUT = TensorSpec("output.weight", (64, 16), F32, 64 * 16 * 4)
QUERY = TensorSpec("blk.0.attn_q.weight", (64, 64), Q4_1, 64 * 64 // 32 * 20)
NORM = TensorSpec("output_norm.weight", (64,), F32, 64 * 4)
EXPERTS = TensorSpec("blk.0.ffn_up_exps.weight", (64, 32, 8), Q4_1, 64 * 32 * 8 // 32 * 20)
SPEED = MachineSpeed(
    read=1e9,
    operation=1e-6,
    attention_seconds={"F16": {64: 1e-8, 128: 4e-8}, "Q8_0": {64: 2e-8}},
    prefill_attention_seconds={"F16": {64: 1e-9}},
    types={"Q4_K": Rates(((100.0, 2e9),), 1e11), "Q8_0": Rates(((100.0, 4e9), (400.0, 1e9)), 2e11), "IQ9": Rates()},
)
WORK = Work(
    decode_bytes={"Q4_K": 2e6},
    prefill_weights={"Q4_K": 4e6},
    layers=10,
    full_layers=10,
    window_layers=0,
    window=0,
    kv_elements=1000,
    window_kv_elements=0,
    heads=8.0,
    head_length=64,
    vocabulary=1000,
    file_bytes={"Q4_K": 2e6, "Q6_K": 1e6},
)


def header(tmp_path: Path, *tensors: TensorSpec, **changes: Any) -> Header:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_writer.tiny_model(changes, tensors))
    return read_header(path)


def test_an_untied_embedding_is_not_read(tmp_path: Path) -> None:
    work = work_of(header(tmp_path, EMBEDDING, OUTPUT, QUERY, NORM))
    assert work.decode_bytes == {"F32": OUTPUT.n_bytes, "Q4_1": QUERY.n_bytes}
    assert work.prefill_weights == {"Q4_1": 64 * 64}
    assert work.row_lengths == {"F32": 64, "Q4_1": 64}


def test_rows_of_one_type_that_differ_in_length_count_by_their_number(tmp_path: Path) -> None:
    long = TensorSpec("blk.0.ffn_down.weight", (256, 64), Q4_1, 256 * 64 // 32 * 20)
    work = work_of(header(tmp_path, EMBEDDING, OUTPUT, QUERY, long))
    assert work.row_lengths["Q4_1"] == (64 * 64 + 64 * 256) / (64 + 64)
    two = header(tmp_path, QUERY, long)
    assert work_of_quant(two, "Q8_0", two.weight_bytes).row_lengths == {"Q8_0": work.row_lengths["Q4_1"]}


def test_a_tied_embedding_is_the_output_matrix(tmp_path: Path) -> None:
    work = work_of(header(tmp_path, EMBEDDING, QUERY, NORM))
    assert work.decode_bytes == {"Q8_0": EMBEDDING.n_bytes, "Q4_1": QUERY.n_bytes}
    assert work.copies({"Q8_0"}) == EMBEDDING.n_bytes


def test_of_experts_only_those_used_are_read(tmp_path: Path) -> None:
    changes = {"llama.expert_count": 8, "llama.expert_used_count": 2}
    work = work_of(header(tmp_path, EMBEDDING, OUTPUT, EXPERTS, **changes))
    assert work.decode_bytes["Q4_1"] == EXPERTS.n_bytes / 4
    assert work.prefill_weights["Q4_1"] == 64 * 32 * 8 / 4
    assert work.copies({"Q4_1"}) == EXPERTS.n_bytes


def test_shape(tmp_path: Path) -> None:
    work = work_of(header(tmp_path, EMBEDDING, QUERY))
    assert (work.layers, work.full_layers, work.heads, work.head_length, work.vocabulary) == (2, 2, 4.0, 16, 16)
    assert (work.kv_elements, work.window_kv_elements) == (2 * 2 * (16 + 16), 0)


def test_another_quant_is_scaled_by_its_size(tmp_path: Path) -> None:
    found = header(tmp_path, EMBEDDING, OUTPUT, QUERY)
    work = work_of_quant(found, "Q5_K_M", 2 * found.weight_bytes)
    assert work.decode_bytes == {"Q5_K": 2 * (OUTPUT.n_bytes + QUERY.n_bytes)}
    assert work.prefill_weights == {"Q5_K": 64 * 64}


def test_tensor_types(tmp_path: Path) -> None:
    assert tensor_types(header(tmp_path, EMBEDDING, QUERY, NORM).tensors) == {"Q8_0", "Q4_1"}


@pytest.mark.parametrize(
    ("quant", "kind"),
    [
        ("Q4_K_M", "Q4_K"), ("UD-Q4_K_XL", "Q4_K"), ("Q6_K", "Q6_K"), ("Q4_0", "Q4_0"), ("q8_0", "Q8_0"),
        ("IQ3_M", "IQ3_S"), ("IQ4_XS", "IQ4_XS"), ("MXFP4_MOE", "MXFP4"), ("BF16", "BF16"),
    ],
)  # fmt: skip
def test_main_type(quant: str, kind: str) -> None:
    assert main_type(quant) == kind


def seconds(prediction: Prediction) -> float:
    return 1 / prediction.decode_rate


def test_decode_is_a_sum() -> None:
    start = seconds(predict(WORK, SPEED))
    assert start == pytest.approx(2e6 / 2e9 + 10 * 30 * 1e-6 + 60e-6)
    deep = seconds(predict(WORK, SPEED, depth=1000))
    looking, reading = 10 * 8 * 1000, 1000 * 1000 / 0.5e9
    assert deep - start == pytest.approx(looking * 1e-8 + 2 * reading)
    small = seconds(predict(WORK, SPEED, depth=1000, kv_type="q8_0"))
    assert small - start == pytest.approx(looking * 2e-8 + 34 / 32 * reading)


def test_a_sliding_window_bounds_attention() -> None:
    work = Work({}, {}, 10, 4, 6, 100, 10, 7, 8.0, 64, 1000, {})
    assert work.attention_reads(50) == 8 * 10 * 50
    assert work.attention_reads(1000) == 8 * (4 * 1000 + 6 * 100)
    assert (work.kv_read(50), work.kv_read(1000)) == (17 * 50, 10 * 1000 + 7 * 100)


def test_prefill_is_a_sum() -> None:
    assert 1 / predict(WORK, SPEED, prompt=512).prefill_rate == pytest.approx(4e6 / 1e11 + 10 * 8 * 256 * 1e-9)


def test_a_step_of_many_rows_reads_the_weights_once_and_multiplies_them_for_each() -> None:
    assert step_seconds(WORK, SPEED, 1, depth=100) == seconds(predict(WORK, SPEED, depth=100))
    each = 2e6 / 144 * 256 / 1e11 + 60e-6 + 8 * 10 * 100 * 1e-8
    assert step_seconds(WORK, SPEED, 64, depth=100) == pytest.approx(64 * each)


def test_repacking_takes_time_at_load() -> None:
    plain, repacked = predict(WORK, SPEED).load_seconds, predict(WORK, SPEED, copies=700_000_000).load_seconds
    assert repacked - plain == pytest.approx(1.0)


def test_rates_between_measured_sizes() -> None:
    assert SPEED.decode("Q8_0", 50) == SPEED.decode("Q8_0", 100) == 4e9
    assert SPEED.decode("Q8_0", 200) == pytest.approx(2.5e9)
    assert SPEED.decode("Q8_0", 400) == SPEED.decode("Q8_0", 10_000) == 1e9


def test_short_rows_are_slower() -> None:
    speed = replace(SPEED, types={"Q4_K": Rates(((100.0, 2e9),), 1e11, short_rows=1.6)})
    assert speed.decode("Q4_K", 100) == speed.decode("Q4_K", 100, 2048) == speed.decode("Q4_K", 100, 8192) == 2e9
    assert speed.decode("Q4_K", 100, 512) == pytest.approx(2e9 / 1.6)
    assert speed.decode("Q4_K", 100, 1024) == pytest.approx(2e9 / 1.2)  # the time of a row is spread over twice as much
    assert seconds(predict(replace(WORK, row_lengths={"Q4_K": 512}), speed)) - seconds(
        predict(WORK, speed)
    ) == pytest.approx(0.6 * 2e6 / 2e9)


@pytest.mark.parametrize("kind", ["IQ9", "never seen"])
def test_what_can_not_be_measured_is_taken_for_q4_k(kind: str) -> None:
    assert SPEED.decode(kind, 100) == 2e9
    assert SPEED.prefill(kind) == 1e11


def test_nothing_measured_at_all() -> None:
    empty = MachineSpeed(1e9, 1e-6, {}, {}, {})
    assert empty.decode("Q4_0", 100) == empty.prefill("Q4_0") == 1e9
    assert empty.attention("f16", 64) == 0.0


def test_head_lengths_between() -> None:
    assert SPEED.attention("f16", 64) == 1e-8
    assert SPEED.attention("f16", 32) == pytest.approx(0.5e-8)
    assert SPEED.attention("f16", 256) == pytest.approx(8e-8)
    assert SPEED.attention("f16", 64, prefill=True) == 1e-9


LAYERED = replace(
    WORK,
    decode_bytes={"Q4_K": 2e8, "Q6_K": 4e7},
    layers=30,
    full_layers=30,
    file_bytes={"Q4_K": 2e8, "Q6_K": 4e7},
    output_bytes={"Q6_K": 4e7},
)


def test_the_parts_of_the_work_are_the_whole() -> None:
    first, last = part_of(LAYERED, 1 / 3, with_output=False), part_of(LAYERED, 2 / 3, with_output=True)
    for kind, size in LAYERED.decode_bytes.items():
        assert first.decode_bytes[kind] + last.decode_bytes[kind] == pytest.approx(size)
    assert first.decode_bytes["Q6_K"] == 0
    assert first.kv_read(100) + last.kv_read(100) == pytest.approx(LAYERED.kv_read(100))


def test_layers_on_like_devices_are_as_fast_as_on_one() -> None:
    over = predict(LAYERED, SPEED, (SPEED, SPEED), (10, 10), depth=100)
    assert over.decode_rate == pytest.approx(predict(LAYERED, SPEED, depth=100).decode_rate)


def test_a_slow_gpu_makes_it_slow_by_its_share() -> None:
    slow = replace(SPEED, read=1e8, types={kind: Rates(((100.0, 1e8),), 1e9) for kind in SPEED.types})
    rates = [predict(LAYERED, SPEED, (slow,), (count,)).decode_rate for count in (0, 1, 10, 20, 30)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > 5 * rates[-1]
