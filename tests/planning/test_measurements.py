"""What was measured is remembered for this machine, build and model, and forgotten where it was wrong."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from support.gguf_writer import tiny_model, write
from support.random_model import write_random_model

from llmrun.config import FASTER_VARIANTS_FILE, MEASURED_FILE
from llmrun.gguf.header import Header
from llmrun.gguf.reader import read_header
from llmrun.planning import measurements
from llmrun.planning.hardware import Hardware, probe
from llmrun.planning.measurements import (
    Comparisons,
    can_compare_attention,
    compare_allocated,
    fastest_variants,
    known_excess,
    measured_attention,
    measured_before,
    measured_variant,
    remember_attention,
    remember_variants,
    uncompared_types,
)
from llmrun.planning.pairs import DraftFile, plan_pair
from llmrun.planning.plan import Measurements, Plan, make_plan
from llmrun.planning.preferences import LoadPreferences
from llmrun.planning.tuned import loads_as_usual
from llmrun.protocol.devices import Gpu
from llmrun.protocol.loading import DeviceBuffer, Load
from llmrun.protocol.speculation import AttentionTime, ComparisonTimes, VariantTime


def test_no_thread_loses_what_another_one_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = measurements.read_entries

    def slowly(path: Path) -> list[dict[str, Any]]:
        found = read(path)
        time.sleep(0.01)
        return found

    path = tmp_path / "new folder" / "measured.json"
    with monkeypatch.context() as patched:
        patched.setattr(measurements, "read_entries", slowly)
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda number: measurements.keep_entry(path, {"n": number}, {"of": number}), range(16)))
            list(threads.map(lambda number: measurements.drop_entry(path, {"n": number}), range(8)))
    assert sorted(entry["of"] for entry in read(path)) == list(range(8, 16))


# ---- the flash attention setting that was measured is remembered for this machine, build and model


GIB = 1 << 30
MACHINE = Hardware("Some CPU", ("avx2",), 4, 8, None, 16 * GIB, 12 * GIB)
LOAD = Load("/tiny.gguf", 512, threads=4)


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ((AttentionTime(0, 0.010, 0.010), AttentionTime(1024, 0.030, 0.020)), "off"),
        ((AttentionTime(0, 0.010, 0.012), AttentionTime(1024, 0.020, 0.020)), "on"),
        ((AttentionTime(0, 0.0102, 0.010),), "on"),
    ],
)
def test_off_has_to_gain(tmp_path: Path, times: tuple[AttentionTime, ...], expected: str) -> None:
    header = read_header(write(tmp_path / "tiny.gguf", tiny_model({})))
    assert measured_attention(header, MACHINE, tmp_path) == ""
    remember_attention(times, header, MACHINE, tmp_path)
    assert measured_attention(header, MACHINE, tmp_path) == expected
    assert measured_attention(header, replace(MACHINE, cpu_name="Another CPU"), tmp_path) == ""


@pytest.mark.parametrize("text", ["", "{", '{"schema": 1, "entries": [{}]}'])
def test_a_damaged_file_is_as_none(tmp_path: Path, text: str) -> None:
    header = read_header(write(tmp_path / "tiny.gguf", tiny_model({})))
    (tmp_path / MEASURED_FILE).write_text(text)
    assert measured_attention(header, MACHINE, tmp_path) == ""


def test_it_is_measured_on_processors_once(tmp_path: Path) -> None:
    header = read_header(write(tmp_path / "tiny.gguf", tiny_model({})))
    comparisons = Comparisons(header, MACHINE, LOAD, tmp_path)
    missing = comparisons.missing()
    assert missing is not None
    assert missing.attention
    comparisons.remember(ComparisonTimes((AttentionTime(0, 1.0, 1.0),)))
    assert comparisons.missing() is None
    assert Comparisons(header, MACHINE, LOAD, tmp_path).missing() is None
    assert not can_compare_attention(replace(MACHINE, gpus=(Gpu("CUDA0", "GPU", GIB, GIB),)), LOAD)
    assert not can_compare_attention(MACHINE, replace(LOAD, kv_type_k="q8_0"))
    assert not can_compare_attention(MACHINE, replace(LOAD, workers=("host:1",)))


# ---- the variants of the processor's backend


@pytest.fixture
def has_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements, "has_variants", lambda: True)
    monkeypatch.delenv("LLMRUN_CPU", raising=False)


def times_of(type_name: str, **seconds: float) -> tuple[VariantTime, ...]:
    return tuple(VariantTime(type_name, variant, second, second / 10) for variant, second in seconds.items())


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({"zen4": 1.0, "haswell": 0.9}, "haswell"),
        ({"zen4": 1.0, "haswell": 0.98}, ""),  # too little to lose saved KV states for
        ({"zen4": 1.0, "haswell": 1.2}, ""),
    ],
)
def test_another_variant_has_to_gain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_variants: None, seconds: dict[str, float], expected: str
) -> None:
    header = read_header(write(tmp_path / "tiny.gguf", tiny_model({})))
    types = uncompared_types(header, MACHINE, LOAD, tmp_path)
    assert measured_variant(header, MACHINE, tmp_path) == ""
    remember_variants(times_of("TQ1_0", zen4=1.0, haswell=0.1), MACHINE, tmp_path)  # another model's weights
    assert measured_variant(header, MACHINE, tmp_path) == ""
    for type_name in types:
        assert measured_variant(header, MACHINE, tmp_path) == ""
        remember_variants(times_of(type_name, **seconds), MACHINE, tmp_path)
    assert measured_before(header, MACHINE, tmp_path).cpu_variant == expected
    assert uncompared_types(header, MACHINE, LOAD, tmp_path) == ()
    fastest, gain = fastest_variants(MACHINE, tmp_path)[types[0]]
    assert (fastest, gain) == (min(seconds, key=seconds.__getitem__), pytest.approx(1 / min(seconds.values())))
    assert measured_variant(header, replace(MACHINE, cpu_name="Another CPU"), tmp_path) == ""
    monkeypatch.setenv("LLMRUN_CPU", "zen4")
    assert measured_variant(header, MACHINE, tmp_path) == ""


def test_only_a_faster_variant_keeps_a_start_from_loading_ahead(tmp_path: Path) -> None:
    remember_variants(times_of("Q4_0", zen4=1.0, haswell=1.1), MACHINE, tmp_path)
    assert not (tmp_path / FASTER_VARIANTS_FILE).exists()
    remember_variants(times_of("Q8_0", zen4=1.0, haswell=0.8), MACHINE, tmp_path)
    assert (tmp_path / FASTER_VARIANTS_FILE).exists()
    remember_variants(times_of("Q8_0", zen4=1.0, haswell=1.0), MACHINE, tmp_path)
    assert not (tmp_path / FASTER_VARIANTS_FILE).exists()


@pytest.mark.parametrize(("haswell", "is_usual"), [(1.5, True), (0.5, False)])
def test_weights_are_not_loaded_ahead_for_another_variant(
    tmp_path: Path, has_variants: None, haswell: float, is_usual: bool
) -> None:
    path = write(tmp_path / "tiny.gguf", tiny_model({}))
    assert loads_as_usual(path, tmp_path)
    for type_name in uncompared_types(read_header(path), MACHINE, LOAD, tmp_path):
        remember_variants(times_of(type_name, zen4=1.0, haswell=haswell), probe(), tmp_path)
    assert loads_as_usual(path, tmp_path) is is_usual


def test_variants_are_compared_where_they_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_variants: None
) -> None:
    header = read_header(write(tmp_path / "tiny.gguf", tiny_model({})))
    assert uncompared_types(header, replace(MACHINE, gpus=(Gpu("CUDA0", "GPU", GIB, GIB),)), LOAD, tmp_path) == ()
    assert uncompared_types(header, MACHINE, replace(LOAD, workers=("host:1",)), tmp_path) == ()
    comparisons = Comparisons(header, MACHINE, LOAD, tmp_path)
    missing = comparisons.missing()
    assert missing is not None
    times = (times_of(name, zen4=1.0, haswell=0.5) for name in missing.variant_types)
    comparisons.remember(ComparisonTimes(variants=tuple(chain(*times))))
    missing = comparisons.missing()
    assert missing is None or missing.variant_types == ()
    monkeypatch.setenv("LLMRUN_CPU", "zen4")
    assert uncompared_types(header, MACHINE, LOAD, tmp_path / "other") == ()


def test_a_variant_gets_into_the_load(tmp_path: Path) -> None:
    """A draft model's, too: an engine computes with one variant."""
    path = write(tmp_path / "tiny.gguf", tiny_model({}))
    measured = Measurements(cpu_variant="haswell")
    plan = make_plan(read_header(path), MACHINE, LoadPreferences(), measured=measured)
    assert plan.load.cpu_variant == "haswell"
    assert "processor variant haswell" in plan.summary
    draft, preferences = DraftFile("tiny", path), LoadPreferences()
    pair = plan_pair(read_header(path), draft, MACHINE, preferences, measured=measured, name="tiny", repository="")
    assert pair.load.draft is not None
    assert pair.load.draft.cpu_variant == "haswell"


@pytest.mark.parametrize("text", ["", "{", '{"schema": 1, "entries": [{}]}'])
def test_damaged_times_of_variants_are_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / MEASURED_FILE).write_text(text)
    assert fastest_variants(MACHINE, tmp_path) == {}


# ---- allocated GPU memory that differs from the plan is said once, and is part of the next plan


GPU_MEMORY_MACHINE = Hardware("CPU", (), 4, 8, None, 64 * GIB, 60 * GIB, (Gpu("CUDA0", "Card", 8 * GIB, 8 * GIB),))


@pytest.fixture(autouse=True)
def this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements, "probe", lambda: GPU_MEMORY_MACHINE)


@pytest.fixture(scope="module")
def header(tmp_path_factory: pytest.TempPathFactory) -> Header:
    return read_header(write_random_model(tmp_path_factory.mktemp("model") / "random.gguf", layers=20))


def planned(header: Header, folder: Path) -> Plan:
    return make_plan(
        header,
        GPU_MEMORY_MACHINE,
        LoadPreferences(),
        measured=Measurements(gpu_excess=known_excess(header, GPU_MEMORY_MACHINE, folder)),
    )


def test_a_difference_is_said_once_and_planned_then(header: Header, tmp_path: Path) -> None:
    before = planned(header, tmp_path)
    allocated = (
        DeviceBuffer("CUDA0", before.gpu_bytes[0][1]),
        DeviceBuffer("CUDA0", 50_000_000),
        DeviceBuffer("CPU", 7),
    )
    (note,) = compare_allocated(header, before, allocated, tmp_path)
    assert note.startswith("CUDA0 holds")
    after = planned(header, tmp_path)
    assert after.gpu_bytes[0][1] - before.gpu_bytes[0][1] == 50_000_000
    assert compare_allocated(header, after, allocated, tmp_path) == []
    fewer = (DeviceBuffer("CUDA0", before.gpu_bytes[0][1]),)  # now the plan expects too much
    assert compare_allocated(header, after, fewer, tmp_path)
    assert planned(header, tmp_path).gpu_bytes[0][1] == before.gpu_bytes[0][1]


@pytest.mark.parametrize("size", [0.91, 1.09])
def test_small_differences_are_not_said(header: Header, tmp_path: Path, size: float) -> None:
    plan = planned(header, tmp_path)
    assert compare_allocated(header, plan, (DeviceBuffer("CUDA0", int(size * plan.gpu_bytes[0][1])),), tmp_path) == []
    assert compare_allocated(header, plan, (), tmp_path) == []
    assert not list(tmp_path.iterdir())


def test_layers_stay_behind_where_the_excess_leaves_no_room(header: Header, tmp_path: Path) -> None:
    small = Hardware("CPU", (), 4, 8, None, 64 * GIB, 60 * GIB, (Gpu("CUDA0", "Card", GIB, 400 << 20),))
    plain = make_plan(header, small, LoadPreferences())
    careful = make_plan(header, small, LoadPreferences(), measured=Measurements(gpu_excess=(("CUDA0", 80 << 20),)))
    assert plain.load.gpu_layers == -1
    assert 0 < careful.load.gpu_layers < 20


def test_a_damaged_file_is_no_difference(header: Header, tmp_path: Path) -> None:
    (tmp_path / MEASURED_FILE).write_text("{", encoding="utf-8")
    assert known_excess(header, GPU_MEMORY_MACHINE, tmp_path) == ()
