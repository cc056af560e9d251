"""Allocated GPU memory that differs from the plan is said once, and is part of the next plan."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.random_model import write_random_model

from llmrun.gguf.header import Header
from llmrun.gguf.reader import read_header
from llmrun.planning import gpu_memory
from llmrun.planning.gpu_memory import compare_allocated, known_excess
from llmrun.planning.hardware import Hardware
from llmrun.planning.plan import LoadPreferences, Measured, Plan, make_plan
from llmrun.protocol.devices import Gpu
from llmrun.protocol.loading import DeviceBuffer

GIB = 1 << 30
MACHINE = Hardware("CPU", (), 4, 8, None, 64 * GIB, 60 * GIB, (Gpu("CUDA0", "Card", 8 * GIB, 8 * GIB),))


@pytest.fixture(autouse=True)
def this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_memory, "probe", lambda: MACHINE)


@pytest.fixture(scope="module")
def header(tmp_path_factory: pytest.TempPathFactory) -> Header:
    return read_header(write_random_model(tmp_path_factory.mktemp("model") / "random.gguf", layers=20))


def planned(header: Header, folder: Path) -> Plan:
    return make_plan(
        header, MACHINE, LoadPreferences(), measured=Measured(gpu_excess=known_excess(header, MACHINE, folder))
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
    (tmp_path / gpu_memory.FILE).write_text("{", encoding="utf-8")
    assert known_excess(header, MACHINE, tmp_path) == ()
