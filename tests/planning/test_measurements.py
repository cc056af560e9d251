"""What was measured is remembered for this machine, build and model, and forgotten where it was wrong."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.gguf_writer import tiny_model, write
from support.random_model import write_random_model

from llmrun.config import ATTENTION_FILE
from llmrun.gguf.header import Header
from llmrun.gguf.reader import read_header
from llmrun.planning import measurements
from llmrun.planning.hardware import Hardware
from llmrun.planning.measurements import (
    can_compare_attention,
    compare_allocated,
    known_excess,
    measured_attention,
    remember_attention,
)
from llmrun.planning.plan import Measured, Plan, make_plan
from llmrun.planning.preferences import LoadPreferences
from llmrun.planning.speculation import OFF, DraftPolicy
from llmrun.protocol.devices import Gpu
from llmrun.protocol.loading import DeviceBuffer, Load
from llmrun.protocol.speculation import AttentionTime


def test_no_thread_loses_what_another_one_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = measurements.read_entries

    def slowly(path: Path) -> list[dict[str, Any]]:
        found = read(path)
        time.sleep(0.01)
        return found

    path = tmp_path / "new folder" / "steps.json"
    with monkeypatch.context() as patched:
        patched.setattr(measurements, "read_entries", slowly)
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda number: measurements.keep_entry(path, {"n": number}, {"of": number}), range(16)))
            list(threads.map(lambda number: measurements.drop_entry(path, {"n": number}), range(8)))
    assert sorted(entry["of"] for entry in read(path)) == list(range(8, 16))


# ---- the flash attention setting that was measured is remembered for this machine, build and model


GIB = 1 << 30
MACHINE = Hardware("Some CPU", ("avx2",), 4, 8, None, 16 * GIB, 12 * GIB)
LOAD = Load("/tiny.gguf", 512, 512, threads=4)


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
    (tmp_path / ATTENTION_FILE).write_text(text)
    assert measured_attention(header, MACHINE, tmp_path) == ""


def test_it_is_measured_on_processors_once(tmp_path: Path) -> None:
    header = read_header(write(tmp_path / "tiny.gguf", tiny_model({})))
    policy = DraftPolicy(header, MACHINE, LOAD, tmp_path, OFF)
    assert policy.lacks_attention
    policy.remember((), (), (AttentionTime(0, 1.0, 1.0),))
    assert not policy.lacks_attention
    assert not DraftPolicy(header, MACHINE, LOAD, tmp_path).lacks_attention
    assert not can_compare_attention(replace(MACHINE, gpus=(Gpu("CUDA0", "GPU", GIB, GIB),)), LOAD)
    assert not can_compare_attention(MACHINE, replace(LOAD, kv_type_k="q8_0"))
    assert not can_compare_attention(MACHINE, replace(LOAD, workers=("host:1",)))


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
        measured=Measured(gpu_excess=known_excess(header, GPU_MEMORY_MACHINE, folder)),
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
    careful = make_plan(header, small, LoadPreferences(), measured=Measured(gpu_excess=(("CUDA0", 80 << 20),)))
    assert plain.gpu_layers == -1
    assert 0 < careful.gpu_layers < 20


def test_a_damaged_file_is_no_difference(header: Header, tmp_path: Path) -> None:
    (tmp_path / measurements.FILE).write_text("{", encoding="utf-8")
    assert known_excess(header, GPU_MEMORY_MACHINE, tmp_path) == ()
