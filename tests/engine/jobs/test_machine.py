"""Jobs that need no model: what llama.cpp says of itself."""

from __future__ import annotations

import math
from contextlib import closing

import pytest

from llmrun.engine.jobs import machine
from llmrun.engine.jobs.machine import compare_variants, parse_system_info
from llmrun.engine.llama.library import start
from llmrun.protocol.jobs import Empty
from llmrun.protocol.jobs.machine import BUILD, CPU_VARIANTS
from llmrun.protocol.llama_folder import has_variants
from llmrun.runner.client import EngineClient
from llmrun.runner.launch import launch


def test_what_llama_cpp_was_built_with() -> None:
    with closing(EngineClient()) as engine:
        build = engine.do(BUILD, Empty())
    assert build.features["CPU"]


@pytest.mark.skipif(not has_variants(), reason="only the wheel of a release has variants of the processor's backend")
def test_each_variant_can_be_forced() -> None:
    """Also the one that ggml chooses."""
    with closing(EngineClient()) as engine:
        names = engine.do(CPU_VARIANTS, Empty()).names
    for name in names:
        with closing(EngineClient(launch(environment={"LLMRUN_CPU": name}))) as engine:
            build = engine.do(BUILD, Empty())
        assert (build.cpu_variant, build.backends.count("CPU")) == (name, 1)


def test_system_info() -> None:
    text = "CUDA : ARCHS = 500,610 | USE_GRAPHS = 1 | CPU : SSE3 = 1 | AVX512 = 0 | REPACK = 1 | "
    assert parse_system_info(text) == {"CUDA": ("ARCHS", "USE_GRAPHS"), "CPU": ("SSE3", "REPACK")}
    assert parse_system_info("") == {}


# ---- the variants of the processor's backend; a linked one stands for two of them


@pytest.fixture
def two_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    start()
    monkeypatch.setattr(machine, "distinct_variants", lambda: {"zen4": 0, "haswell": 0})
    monkeypatch.setattr(machine, "_MAX_SPREAD", math.inf)  # other programs may run beside the tests


def test_variants_are_compared(two_variants: None) -> None:
    times = compare_variants(("Q4_0", "F16"), 1, lambda: False)
    pairs = [(time.type, time.variant) for time in times]
    assert pairs == [("Q4_0", "zen4"), ("Q4_0", "haswell"), ("F16", "zen4"), ("F16", "haswell")]
    assert all(0 < time.prefill < time.decode * 10 for time in times)


def test_an_answer_interrupts_the_comparison(two_variants: None) -> None:
    """What is complete is kept."""
    calls = iter([*[False] * 8, True])
    assert [time.type for time in compare_variants(("Q4_0", "F16"), 1, lambda: next(calls))] == ["Q4_0", "Q4_0"]


def test_other_programs_spoil_the_comparison(two_variants: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_MAX_SPREAD", 1.15)
    rates = iter([(1.0, 1.0), (1.0, 1.0), (1.0, 1.0), (1.2, 1.0), (1.0, 1.0), (1.0, 1.0)])
    monkeypatch.setattr(machine, "_variant_rates", lambda ggml, number: next(rates))
    assert compare_variants(("Q4_0", "F16"), 1, lambda: False) == ()
