"""Lists and ranges of the bench: what llama-bench takes, and nothing that would never end."""

from __future__ import annotations

import itertools
import re

import pytest

from llmrun.bench.parameters import SWITCH, BenchGrid, Case, bench_settings, numbers, pairs, setting_values, words
from llmrun.errors import UsageError
from llmrun.protocol.jobs.bench import BenchTest
from llmrun.protocol.loading import Load
from llmrun.protocol.settings import common_fields


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
    load = Load.of(settings, "/m.gguf", n_ctx=0, n_ctx_start=0)
    assert common_fields(load) == common_fields(settings)
    assert (load.path, load.threads, load.n_batch, load.n_ubatch, load.gpu_layers) == ("/m.gguf", 3, 64, 32, 7)
    assert (load.flash_attention, load.kv_type_k, load.kv_type_v, load.repack) == ("on", "q8_0", "q4_0", False)


def test_layers_whose_experts_stay_with_the_processor_are_bounded_before_they_are_counted() -> None:
    assert setting_values("cpu_experts", ["0,2"]) == ((), (0, 1))
    with pytest.raises(UsageError, match="invalid -ncmoe"):
        setting_values("cpu_experts", ["999999999999999999"])
