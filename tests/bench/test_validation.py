"""What can't be measured is refused by name before anything runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.gguf_writer import runnable_model, write

from llmrun.bench.parameters import Case, bench_settings
from llmrun.bench.validation import (
    NamedModel,
    check_cases,
    check_models,
    fit_together,
    needed_memory,
)
from llmrun.errors import LlmrunError, OutOfMemoryError, UsageError
from llmrun.gguf.header import Header
from llmrun.gguf.reader import read_header
from llmrun.planning.hardware import Hardware
from llmrun.protocol.devices import Gpu
from llmrun.protocol.jobs.bench import BenchTest
from llmrun.protocol.settings import KV_TYPES, EngineSettings

GIB = 1 << 30
MACHINE = Hardware("CPU", (), 4, 8, None, 16 * GIB, 8 * GIB)
SETTINGS = bench_settings(threads=4)


@pytest.fixture
def header(tmp_path: Path) -> Header:
    """Of a model with heads of 16 elements, trained on 64 tokens."""
    return read_header(write(tmp_path / "m.gguf", runnable_model()))


def refuse(cases: list[Case], subjects: list[NamedModel], hardware: Hardware, repetitions: int) -> list[str]:
    return [*check_cases(cases, hardware, repetitions), *check_models(cases, subjects, hardware)]


def refused(
    header: Header,
    test: BenchTest,
    settings: EngineSettings = SETTINGS,
    hardware: Hardware = MACHINE,
    repetitions: int = 1,
) -> LlmrunError:
    with pytest.raises(LlmrunError) as caught:
        refuse([Case(settings, test)], [NamedModel("tiny", header)], hardware, repetitions)
    return caught.value


def test_what_is_possible_passes(header: Header) -> None:
    assert refuse([Case(SETTINGS, BenchTest(32))], [NamedModel("tiny", header)], MACHINE, 5) == []


def test_nothing_at_all(header: Header) -> None:
    with pytest.raises(UsageError, match="nothing to measure"):
        refuse([], [NamedModel("tiny", header)], MACHINE, 5)


@pytest.mark.parametrize(
    ("test", "words"),
    [
        (BenchTest(10**9), "pp1000000000"),
        (BenchTest(0, 10**9), "tg1000000000"),
        (BenchTest(1, 0, 10**9), "d1000000000"),
        (BenchTest(0, 8, chat=True), "chat0+8"),
        (BenchTest(8, 0, chat=True), "chat8+0"),
    ],
)
def test_impossible_tests(header: Header, test: BenchTest, words: str) -> None:
    error = refused(header, test)
    assert isinstance(error, UsageError)
    assert words in error.what


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (replace(SETTINGS, threads=9), "-t 9"),
        (replace(SETTINGS, threads=0), "-t 0"),
        (replace(SETTINGS, n_batch=0), "-b 0"),
        (replace(SETTINGS, n_ubatch=1 << 30), "-ub 1073741824"),
        (replace(SETTINGS, flash_attention="off", kv_type_v="q8_0"), "-ctv q8_0"),
        (replace(SETTINGS, kv_type_k="q8_0"), "-ctk q8_0"),  # heads of 16 elements
        (replace(SETTINGS, gpu_layers=-2), "-ngl -2"),
    ],
)
def test_impossible_settings(header: Header, settings: EngineSettings, words: str) -> None:
    error = refused(header, BenchTest(8), settings)
    assert isinstance(error, UsageError)
    assert words in error.what


@pytest.mark.parametrize("repetitions", [0, -1, 1001])
def test_impossible_repetitions(header: Header, repetitions: int) -> None:
    assert f"--repetitions {repetitions}" in refused(header, BenchTest(8), repetitions=repetitions).what


def test_what_does_not_fit_is_refused_with_its_size(header: Header) -> None:
    small = replace(MACHINE, memory_total=GIB, memory_available=30 << 20)
    error = refused(header, BenchTest(1 << 20), hardware=small)
    assert isinstance(error, OutOfMemoryError)
    assert error.what == "tiny does not fit into memory for pp1048576"
    assert "31.5 MB are free" in error.why


def test_memory_of_a_gpu_or_of_a_machine_that_does_not_tell_is_not_judged(header: Header) -> None:
    small = replace(MACHINE, memory_available=30 << 20)
    with_gpu = replace(small, gpus=(Gpu("CUDA0", "GPU", 80 * GIB, 80 * GIB),))
    case = Case(SETTINGS, BenchTest(1 << 20))
    refuse([case], [NamedModel("tiny", header)], with_gpu, 1)
    refuse([case], [NamedModel("tiny", header)], replace(small, memory_total=0), 1)
    on_cpu = Case(replace(SETTINGS, gpu_layers=0), BenchTest(1 << 20))
    with pytest.raises(OutOfMemoryError):
        refuse([on_cpu], [NamedModel("tiny", header)], with_gpu, 1)


def test_memory_counts_the_kv_type_and_the_state_that_is_kept(header: Header) -> None:
    def needed(test: BenchTest, **settings: str) -> int:
        return needed_memory(Case(replace(SETTINGS, **settings), test), header)  # type: ignore[arg-type]

    plain = needed(BenchTest(1 << 20))
    kv = 2.0 * (1 << 20) * sum(layer.elements for layer in header.kv_layers)
    assert needed(BenchTest(1 << 20), kv_type_k="f32", kv_type_v="f32") - plain == pytest.approx(kv, rel=0.01)
    deep = needed(BenchTest(1, 0, (1 << 20) - 1))
    assert deep - plain == pytest.approx(kv, rel=0.01)
    assert needed(BenchTest(1, 1, (1 << 20) - 2)) == pytest.approx(deep, rel=0.01)


def test_every_kv_type_has_a_size() -> None:
    sizes = [replace(SETTINGS, kv_type_k=kind, kv_type_v=kind).kv_element_bytes for kind in KV_TYPES]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 4.0


def test_what_is_odd_is_said(header: Header) -> None:
    cases = [Case(replace(SETTINGS, threads=8), BenchTest(8)), Case(SETTINGS, BenchTest(8, 0, 60))]
    notes = refuse(cases, [NamedModel("tiny", header)], MACHINE, 5)
    assert "8 threads are more than physical cores can compute at once (4)" in notes[0]
    assert notes[1].startswith("pp8 @ d60: beyond the 64 tokens that tiny was trained on")


def test_fit_together(header: Header) -> None:
    case = Case(SETTINGS, BenchTest(64))
    one = needed_memory(case, header)
    for count, fits in ((1, True), (2, True), (3, False)):
        machine = replace(MACHINE, memory_available=int(2.5 * one))
        assert fit_together([case], [header] * count, machine) is fits
