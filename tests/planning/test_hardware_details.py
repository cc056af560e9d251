"""Details of the machine: sysfs of ordinary and odd machines, and of none."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.effort import loops

from llmrun.planning.hardware_details import Details, parse_cache_size, probe_details

CPU = "sys/devices/system/cpu/cpu0"
POWER = "sys/class/power_supply"


class Tree:
    """A root directory with samples."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, folder: str, **files: str) -> Tree:
        for name, text in files.items():
            path = self.root / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
        return self

    def probe(self) -> Details:
        return probe_details(self.root)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    monkeypatch.setattr("sys.platform", "linux")
    return Tree(tmp_path)


def test_nothing_there(tree: Tree) -> None:
    assert tree.probe() == Details()


def test_elsewhere(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    tree.write(f"{CPU}/cpufreq", scaling_governor="powersave")
    assert tree.probe() == Details()


def test_caches(tree: Tree) -> None:
    tree.write(f"{CPU}/cache/index0", level="1", type="Data", size="48K")
    tree.write(f"{CPU}/cache/index1", level="1", type="Instruction", size="64K")
    tree.write(f"{CPU}/cache/index2", level="2", type="Unified", size="2048K")
    tree.write(f"{CPU}/cache/index3", level="3", type="Unified", size="32M")
    tree.write(f"{CPU}/cache/index4", level="", type="Unified", size="lots")
    found = tree.probe()
    assert (found.l2_cache, found.last_cache) == (2 << 20, 32 << 20)


@pytest.mark.parametrize(("text", "size"), [("480K", 480 << 10), ("1G", 1 << 30), ("7", 7), ("", 0), ("-1K", 0)])
def test_cache_size(text: str, size: int) -> None:
    assert parse_cache_size(text) == size


def test_numa_and_memory(tree: Tree) -> None:
    tree.write("sys/devices/system/node/node0", cpulist="0-3").write("sys/devices/system/node/node1", cpulist="4-7")
    tree.write("sys/devices/system/node", possible="0-1")
    tree.write("sys/devices/system/edac/mc/mc0/dimm0", dimm_mem_type="Unknown")
    tree.write("sys/devices/system/edac/mc/mc0/dimm1", dimm_mem_type="Unbuffered-DDR5")
    assert (tree.probe().numa_nodes, tree.probe().memory_kind) == (2, "DDR5")


def test_clock(tree: Tree) -> None:
    tree.write(f"{CPU}/cpufreq", scaling_governor="powersave")
    tree.write(f"{CPU}/thermal_throttle", core_throttle_count="17")
    assert (tree.probe().governor, tree.probe().throttled) == ("powersave", 17)


@pytest.mark.parametrize(
    ("status", "online", "on_battery"),
    [("Discharging", "0", True), ("Charging", "1", False), ("Discharging", "1", False), ("Full", "0", False)],
)
def test_battery(tree: Tree, status: str, online: str, on_battery: bool) -> None:
    tree.write(f"{POWER}/BAT0", type="Battery", status=status).write(f"{POWER}/AC", type="Mains", online=online)
    assert tree.probe().on_battery is on_battery


def test_a_mouse_is_no_laptop(tree: Tree) -> None:
    tree.write(f"{POWER}/hid", type="Battery", status="Discharging", scope="Device")
    assert tree.probe().on_battery is None


def test_graphics(tree: Tree) -> None:
    devices = "sys/bus/pci/devices"
    tree.write(f"{devices}/0000:01:00.0", vendor="0x10de", **{"class": "0x030200"})
    tree.write(f"{devices}/0000:01:00.1", vendor="0x10de", **{"class": "0x040300"})  # its sound
    tree.write(f"{devices}/0000:00:02.0", vendor="0x8086", **{"class": "0x030000"})
    tree.write(f"{devices}/0000:00:03.0", vendor="0xbeef", **{"class": "0x030000"})
    assert tree.probe().graphics == ("Intel", "NVIDIA")


def test_this_machine_is_looked_at_quickly() -> None:
    assert loops(probe_details, times=5) < 4
