"""Lists and ranges of the bench: what llama-bench takes, and nothing that would never end."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
from support.gguf_writer import runnable_model, write

from llmrun.errors import LlmrunError, OutOfMemoryError, UsageError
from llmrun.gguf.header import Header
from llmrun.gguf.reader import read_header
from llmrun.lab.bench.cases import (
    SWITCH,
    BenchGrid,
    Case,
    NamedModel,
    bench_settings,
    check_cases,
    check_models,
    fit_together,
    needed_memory,
    numbers,
    pairs,
    setting_values,
    words,
)
from llmrun.planning.hardware import Hardware
from llmrun.protocol.devices import Gpu
from llmrun.protocol.jobs.bench import BenchTest
from llmrun.protocol.loading import Load
from llmrun.protocol.settings import KV_TYPES, EngineSettings, common_fields


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        (["512"], (512,)),
        (["512,1024", "7"], (512, 1024, 7)),
        (["128-512+128"], (128, 256, 384, 512)),
        (["128-500+128"], (128, 256, 384)),
        (["128-1024*2"], (128, 256, 512, 1024)),
        (["3-5"], (3, 4, 5)),
        (["5-5"], (5,)),
        ([" 1 , 2"], (1, 2)),
        (["0"], (0,)),
        (["1-2,8-32*4"], (1, 2, 8, 32)),
    ],
)
def test_numbers(texts: list[str], found: tuple[int, ...]) -> None:
    assert numbers(texts, "-p") == found


@pytest.mark.parametrize(
    ("text", "words_of_error"),
    [
        ("", "invalid"),
        ("abc", "abc"),
        ("1,,2", "invalid"),
        ("1-", "1-"),
        ("1.5", "1.5"),
        ("5-1", "5-1"),
        ("1-5+0", "invalid"),
        ("1-5*1", "invalid"),
        ("0-5*2", "invalid"),
        ("1-1000000000", "is too long"),
        ("-1", "-1"),
        ("9" * 5000, "invalid"),
        ("1-3-5", "invalid"),
    ],
)
def test_what_is_invalid_is_named(text: str, words_of_error: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words_of_error)) as caught:
        numbers([text], "-p")
    assert "-p " in caught.value.what


def test_a_number_may_be_negative_where_that_means_something() -> None:
    assert numbers(["-1,5"], "-ngl", least=-1) == (-1, 5)
    with pytest.raises(UsageError, match="-ngl -2"):
        numbers(["-2"], "-ngl", least=-1)


def test_ranges_are_what_a_slow_loop_makes() -> None:
    for first, last, step in itertools.product(range(1, 6), range(1, 40, 7), range(1, 5)):
        if last < first:
            continue
        assert numbers([f"{first}-{last}+{step}"], "-p") == tuple(range(first, last + 1, step))
        if step > 1:
            slow, value = [], first
            while value <= last:
                slow.append(value)
                value *= step
            assert numbers([f"{first}-{last}*{step}"], "-p") == tuple(slow)


def test_pairs() -> None:
    assert pairs(["512,128", " 1, 2"], "-pg") == ((512, 128), (1, 2))
    for text in ("512", "1,2,3", "a,b", "", "-1,2"):
        with pytest.raises(UsageError, match="-pg"):
            pairs([text], "-pg")


def test_words_are_known_and_come_once() -> None:
    assert words(["on,0", "1"], "--repack", SWITCH) == (True, False)
    with pytest.raises(UsageError, match="--repack maybe") as caught:
        words(["maybe"], "--repack", SWITCH)
    assert "on" in caught.value.why


def test_tests_have_llama_benchs_names() -> None:
    names = [
        test.name
        for test in (
            BenchTest(512),
            BenchTest(0, 128),
            BenchTest(512, 128),
            BenchTest(512, 0, 4096),
            BenchTest(0, 128, 4096),
            BenchTest(512, 128, chat=True),
        )
    ]
    assert names == ["pp512", "tg128", "pp512+tg128", "pp512 @ d4096", "tg128 @ d4096", "chat512+128"]


def test_cases_are_all_combinations_in_llama_benchs_order() -> None:
    wanted = BenchGrid(
        {"threads": (1, 2), "repack": (True, False)}, (8, 0), answers=(4,), pairs=((2, 3),), depths=(0, 16)
    )
    cases = wanted.cases()
    assert len(cases) == 2 * 2 * 2 * 3
    assert [case.test.name for case in cases[:6]] == [
        "pp8", "tg4", "pp2+tg3", "pp8 @ d16", "tg4 @ d16", "pp2+tg3 @ d16",
    ]  # fmt: skip
    weights = [(case.settings.gpu_layers, case.settings.repack) for case in cases]
    assert len(list(itertools.groupby(weights))) == 2, "weights are loaded no more often than needed"


def test_nothing_is_measured_twice_and_nothing_is_no_test() -> None:
    assert BenchGrid({"threads": (1,)}, prompts=(0,), answers=(0,), pairs=((0, 0),)).cases() == ()
    assert BenchGrid({"threads": (1, 1)}, prompts=(8, 8), answers=()).cases() == (
        Case(bench_settings(threads=1), BenchTest(8)),
    )


def test_too_many_tests_are_refused_before_they_are_made() -> None:
    many = tuple(range(1, 1001))
    with pytest.raises(UsageError, match=re.escape("1,000,000 tests")):
        BenchGrid({"threads": (1,)}, prompts=many, answers=(), depths=many).cases()


def test_settings_become_a_load() -> None:
    settings = bench_settings(
        threads=3, n_batch=64, n_ubatch=32, flash_attention="on", kv_type_k="q8_0", kv_type_v="q4_0", repack=False,
        gpu_layers=7, cpu_experts=(0, 1),
    )  # fmt: skip
    load = Load.of(settings, "/m.gguf", n_ctx=0)
    assert common_fields(load) == common_fields(settings)
    assert (load.path, load.threads, load.n_batch, load.n_ubatch, load.gpu_layers) == ("/m.gguf", 3, 64, 32, 7)
    assert (load.flash_attention, load.kv_type_k, load.kv_type_v, load.repack) == ("on", "q8_0", "q4_0", False)


def test_layers_whose_experts_stay_with_the_processor_are_bounded_before_they_are_counted() -> None:
    assert setting_values("cpu_experts", ["0,2"]) == ((), (0, 1))
    with pytest.raises(UsageError, match="invalid -ncmoe"):
        setting_values("cpu_experts", ["999999999999999999"])


# ---- what can't be measured is refused by name before anything runs


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
