"""Energy: counters of the system as files, their turn-over, and systems that tell nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmrun.protocol import energy
from llmrun.protocol.energy import Energy


def zone(folder: Path, name: str, what: str, microjoules: int | str, most: int = 1000_000_000) -> Path:
    path = folder / name
    path.mkdir(parents=True)
    (path / "name").write_text(f"{what}\n")
    (path / "energy_uj").write_text(f"{microjoules}\n")
    (path / "max_energy_range_uj").write_text(f"{most}\n")
    return path / "energy_uj"


def test_packages_and_memory_are_added_and_what_is_inside_a_package_is_not(tmp_path: Path) -> None:
    first = zone(tmp_path, "intel-rapl:0", "package-0", 1_000_000)
    zone(tmp_path, "intel-rapl:0:0", "core", 500_000)
    memory = zone(tmp_path, "intel-rapl:0:1", "dram", 7_000_000)
    zone(tmp_path, "intel-rapl:1", "psys", 9_000_000)
    second = zone(tmp_path, "intel-rapl:2", "package-1", 0)
    counters = Energy(False, tmp_path)
    before = counters.read()
    for path, value in ((first, 3_000_000), (memory, 7_500_000), (second, 250_000)):
        path.write_text(str(value))
    assert counters.since(before) == pytest.approx(2 + 0.5 + 0.25)


def test_a_counter_that_began_again(tmp_path: Path) -> None:
    path = zone(tmp_path, "intel-rapl:0", "package-0", 900_000_000)
    counters = Energy(False, tmp_path)
    before = counters.read()
    path.write_text("100000000")
    assert counters.since(before) == pytest.approx(200)


def test_what_can_not_be_read_is_none(tmp_path: Path) -> None:
    assert Energy(False, tmp_path / "missing").since({}) is None
    zone(tmp_path, "intel-rapl:0", "package-0", "garbage")
    counters = Energy(False, tmp_path)
    assert counters.since(counters.read()) is None


def test_a_counter_that_vanishes_is_left_out(tmp_path: Path) -> None:
    gone = zone(tmp_path, "intel-rapl:0", "package-0", 5)
    stays = zone(tmp_path, "intel-rapl:1", "package-1", 5)
    counters = Energy(False, tmp_path)
    before = counters.read()
    gone.unlink()
    stays.write_text("1000005")
    assert counters.since(before) == pytest.approx(1)


def test_gpus_count_where_they_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([[10.0, 20.0], [11.5, 20.5]])

    class Nvml:
        def joules(self) -> list[float]:
            return next(readings)

    monkeypatch.setattr(energy, "_Nvml", Nvml)
    counters = Energy(True, tmp_path)
    before = counters.read()
    assert counters.since(before) == pytest.approx(2)
    assert Energy(False, tmp_path).read() == {}


def test_a_machine_without_nvidias_library_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(energy.ctypes, "CDLL", missing)
    assert energy._Nvml().joules() == []
