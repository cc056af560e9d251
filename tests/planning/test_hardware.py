"""Hardware: text of ordinary and odd machines becomes facts, and this machine is looked at quickly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.effort import loops

from llmrun.planning import hardware
from llmrun.planning.hardware import (
    Details,
    Hardware,
    cgroup_directories,
    parse_cache_size,
    parse_cpu_list,
    parse_cpuinfo,
    parse_limit,
    parse_meminfo,
    parse_quota,
    parse_statistic,
    parse_sysctl,
    probe,
    probe_details,
    this_machine,
)
from llmrun.protocol.devices import Gpu
from llmrun.protocol.jobs.machine import Build
from llmrun.runner import client, launch

GIB = 1 << 30
X86 = """processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Some(R) CPU @ 2.60GHz
flags\t\t: fpu sse4_2 avx avx2 fma f16c avx512f avx512_vnni hypervisor

processor\t: 1
model name\t: another
flags\t\t: fpu
"""
ARM = """processor\t: 0
BogoMIPS\t: 50.00
Features\t: fp asimd evtstrm aes asimddp i8mm bf16
CPU implementer\t: 0x41
"""
MEMINFO = "MemTotal:       16000000 kB\nMemFree:         1000000 kB\nMemAvailable:    8000000 kB\n"


def machine(physical: int = 4, logical: int = 8, quota: float | None = None, available: int = 8 * GIB) -> Hardware:
    return Hardware("CPU", (), physical, logical, quota, 16 * GIB, available)


class Tree:
    """A root directory with the samples of one machine."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> Tree:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return self

    def cpus(self, siblings: dict[int, str], name: str = "core_cpus_list") -> Tree:
        for cpu, text in siblings.items():
            self.write(f"sys/devices/system/cpu/cpu{cpu}/topology/{name}", text + "\n")
        online = ",".join(map(str, siblings))
        return self.write("sys/devices/system/cpu/online", online + "\n")

    def probe(self, allowed: set[int]) -> Hardware:
        return hardware._probe_linux(self.root, frozenset(allowed))


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path).write("proc/cpuinfo", X86).write("proc/meminfo", MEMINFO)


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("0-3,8,10-11\n", {0, 1, 2, 3, 8, 10, 11}),
        ("0", {0}),
        ("", set()),
        ("\n", set()),
        ("nonsense,2,-3,4-x", {2}),
    ],
)
def test_cpu_list(text: str, cpus: set[int]) -> None:
    assert parse_cpu_list(text) == cpus


def test_cpuinfo() -> None:
    flags = ("sse4_2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512_vnni")
    assert parse_cpuinfo(X86) == ("Some(R) CPU @ 2.60GHz", flags)
    assert parse_cpuinfo(ARM) == ("", ("asimd", "asimddp", "i8mm", "bf16"))
    assert parse_cpuinfo("") == ("", ())


def test_meminfo() -> None:
    assert parse_meminfo(MEMINFO) == (16_000_000 * 1024, 8_000_000 * 1024)
    without = "MemTotal: 100 kB\nMemFree: 10 kB\nBuffers: 5 kB\nCached: 20 kB\nHugePages_Total: 0\n"
    assert parse_meminfo(without) == (100 * 1024, 35 * 1024)
    assert parse_meminfo("garbage\nMemTotal: lots\n") == (0, 0)


@pytest.mark.parametrize(
    ("text", "quota"),
    [
        ("max 100000", None),
        ("150000 100000\n", 1.5),
        ("-1 100000", None),
        ("50000 100000", 0.5),
        ("", None),
        ("100000", None),
        ("0 100000", None),
        ("100000 0", None),
    ],
)
def test_quota(text: str, quota: float | None) -> None:
    assert parse_quota(text) == quota


@pytest.mark.parametrize(
    ("text", "limit"),
    [("max\n", None), ("1073741824\n", GIB), ("9223372036854771712", None), ("", None), ("-1", None)],
)
def test_limit(text: str, limit: int | None) -> None:
    assert parse_limit(text) == limit


def test_statistic() -> None:
    text = "anon 5\ninactive_file 7\ntotal_inactive_file 9\n"
    assert parse_statistic(text, "inactive_file") == 7
    assert parse_statistic(text, "file") == 0


def test_cgroup_directories_go_up_to_the_root() -> None:
    root = Path("/cg")
    assert cgroup_directories("0::/a/b\n", root) == {"": [root / "a/b", root / "a", root]}
    text = "4:memory:/box\n2:cpu,cpuacct:/../other\n1:name=systemd:/\n0::/\n"
    assert cgroup_directories(text, root) == {
        "memory": [root / "memory/box", root / "memory"],
        "cpu": [root / "cpu/other", root / "cpu"],
        "": [root],
    }


@pytest.mark.parametrize(
    ("physical", "quota", "usable"),
    [(4, None, 4), (4, 2.0, 2), (4, 2.9, 2), (4, 0.5, 1), (4, 16.0, 4), (1, None, 1), (4, 3.999, 3)],
)
def test_usable_cores(physical: int, quota: float | None, usable: int) -> None:
    assert machine(physical=physical, quota=quota).usable_cores == usable


def test_hyperthreads_share_a_core(tree: Tree) -> None:
    tree.cpus({0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"})
    found = tree.probe({0, 1, 2, 3})
    assert (found.physical_cores, found.logical_cores) == (2, 4)
    assert found.cpu_name == "Some(R) CPU @ 2.60GHz"
    assert found.cpu_quota is None
    assert (found.memory_total, found.memory_available) == (16_000_000 * 1024, 8_000_000 * 1024)


def test_old_kernel_names_siblings_differently(tree: Tree) -> None:
    tree.cpus({0: "0-1", 1: "0-1"}, name="thread_siblings_list")
    assert tree.probe({0, 1}).physical_cores == 1


def test_affinity_counts_only_allowed_cores(tree: Tree) -> None:
    tree.cpus({0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"})
    assert tree.probe({0, 2}).physical_cores == 1
    assert tree.probe({0, 1}).physical_cores == 2
    assert tree.probe({0, 1}).logical_cores == 2


def test_hybrid_counts_performance_cores(tree: Tree) -> None:
    tree.cpus({0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3", 4: "4", 5: "5", 6: "6", 7: "7"})
    tree.write("sys/devices/cpu_core/cpus", "0-3\n").write("sys/devices/cpu_atom/cpus", "4-7\n")
    found = tree.probe(set(range(8)))
    assert (found.physical_cores, found.logical_cores) == (2, 8)
    assert tree.probe({4, 5, 6}).physical_cores == 3  # pinned to the efficient ones: they are all there is


def test_offline_processors_do_not_count(tree: Tree) -> None:
    tree.cpus({0: "0", 1: "1", 2: "2", 3: "3"}).write("sys/devices/system/cpu/online", "0,2-3\n")
    found = tree.probe({0, 1, 2, 3})
    assert (found.physical_cores, found.logical_cores) == (3, 3)


def test_nothing_mounted_still_gives_an_answer(tmp_path: Path) -> None:
    found = Tree(tmp_path).probe({0, 1, 2})
    assert (found.physical_cores, found.logical_cores, found.cpu_quota) == (3, 3, None)
    assert (found.memory_total, found.memory_available) == (0, 0)
    assert found.cpu_name
    assert Tree(tmp_path).probe(set()).usable_cores == 1


def test_container_of_version_2(tree: Tree) -> None:
    tree.write("proc/self/cgroup", "0::/\n")
    tree.write("sys/fs/cgroup/cpu.max", "250000 100000\n")
    tree.write("sys/fs/cgroup/memory.max", f"{4 * GIB}\n").write("sys/fs/cgroup/memory.current", f"{3 * GIB}\n")
    tree.write("sys/fs/cgroup/memory.stat", f"active_file {GIB // 2}\ninactive_file {GIB // 2}\n")
    found = tree.probe({0, 1, 2, 3})
    assert (found.cpu_quota, found.usable_cores) == (2.5, 2)
    assert (found.memory_total, found.memory_available) == (4 * GIB, 2 * GIB)  # cached pages can be had back


def test_limit_of_a_parent_holds(tree: Tree) -> None:
    tree.write("proc/self/cgroup", "0::/parent/child\n")
    tree.write("sys/fs/cgroup/parent/child/cpu.max", "max 100000\n")
    tree.write("sys/fs/cgroup/parent/cpu.max", "100000 100000\n")
    tree.write("sys/fs/cgroup/parent/child/memory.max", f"{3 * GIB}\n")
    tree.write("sys/fs/cgroup/parent/memory.max", f"{2 * GIB}\n")
    found = tree.probe({0, 1})
    assert (found.cpu_quota, found.memory_total, found.memory_available) == (1.0, 2 * GIB, 2 * GIB)


def test_container_of_version_1_that_sees_only_the_root(tree: Tree) -> None:
    tree.write("proc/self/cgroup", "4:memory:/docker/0123\n2:cpu,cpuacct:/docker/0123\n")
    tree.write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "50000\n")
    tree.write("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    tree.write("sys/fs/cgroup/memory/memory.limit_in_bytes", f"{GIB}\n")
    tree.write("sys/fs/cgroup/memory/memory.usage_in_bytes", f"{2 * GIB}\n")
    found = tree.probe({0, 1})
    assert (found.cpu_quota, found.usable_cores) == (0.5, 1)
    assert (found.memory_total, found.memory_available) == (GIB, 0)


def test_version_1_without_limits(tree: Tree) -> None:
    tree.write("proc/self/cgroup", "4:memory:/\n2:cpu:/\n")
    tree.write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n")
    tree.write("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    tree.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    found = tree.probe({0, 1})
    assert found.cpu_quota is None
    assert found.memory_total == 16_000_000 * 1024


def test_limit_above_the_machine_changes_nothing(tree: Tree) -> None:
    tree.write("proc/self/cgroup", "0::/\n").write("sys/fs/cgroup/memory.max", f"{64 * GIB}\n")
    found = tree.probe({0})
    assert (found.memory_total, found.memory_available) == (16_000_000 * 1024, 8_000_000 * 1024)


def test_apple() -> None:
    text = (
        "machdep.cpu.brand_string: Apple M2 Pro\nhw.perflevel0.physicalcpu: 8\nhw.physicalcpu: 12\n"
        "hw.logicalcpu: 12\nhw.memsize: 17179869184\n"
    )
    found = parse_sysctl(text, "arm64", 5 * GIB)
    assert found == Hardware("Apple M2 Pro", ("neon",), 8, 12, None, 16 * GIB, 5 * GIB)


def test_intel_mac_has_no_performance_levels() -> None:
    text = "machdep.cpu.brand_string: Intel\nhw.physicalcpu: 4\nhw.logicalcpu: 8\nhw.memsize: 8589934592\n"
    found = parse_sysctl(text, "x86_64", GIB)
    assert (found.physical_cores, found.logical_cores, found.cpu_flags) == (4, 8, ())
    assert parse_sysctl("", "x86_64", GIB).physical_cores >= 1


def test_elsewhere_psutil_answers() -> None:
    found = hardware._probe_elsewhere()
    assert 1 <= found.physical_cores <= found.logical_cores
    assert 0 < found.memory_available <= found.memory_total


def test_this_machine() -> None:
    found = probe()
    assert 1 <= found.usable_cores <= found.physical_cores <= found.logical_cores
    assert 0 < found.memory_available <= found.memory_total


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere psutil is asked")
def test_linux_is_quick_and_needs_no_psutil() -> None:
    code = "import sys; from llmrun.planning.hardware import probe; probe(); sys.exit('psutil' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True)
    assert loops(probe, times=10) < 2


# ---- details of the machine: sysfs of ordinary and odd machines, and of none


CPU = "sys/devices/system/cpu/cpu0"
POWER = "sys/class/power_supply"


class SysTree:
    """A root directory with samples."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, folder: str, **files: str) -> SysTree:
        for name, text in files.items():
            path = self.root / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
        return self

    def probe(self) -> Details:
        return probe_details(self.root)


@pytest.fixture
def sys_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SysTree:
    monkeypatch.setattr("sys.platform", "linux")
    return SysTree(tmp_path)


def test_nothing_there(sys_tree: SysTree) -> None:
    assert sys_tree.probe() == Details()


def test_elsewhere(sys_tree: SysTree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    sys_tree.write(f"{CPU}/cpufreq", scaling_governor="powersave")
    assert sys_tree.probe() == Details()


def test_caches(sys_tree: SysTree) -> None:
    sys_tree.write(f"{CPU}/cache/index0", level="1", type="Data", size="48K")
    sys_tree.write(f"{CPU}/cache/index1", level="1", type="Instruction", size="64K")
    sys_tree.write(f"{CPU}/cache/index2", level="2", type="Unified", size="2048K")
    sys_tree.write(f"{CPU}/cache/index3", level="3", type="Unified", size="32M")
    sys_tree.write(f"{CPU}/cache/index4", level="", type="Unified", size="lots")
    assert sys_tree.probe().last_cache == 32 << 20


@pytest.mark.parametrize(("text", "size"), [("480K", 480 << 10), ("1G", 1 << 30), ("7", 7), ("", 0), ("-1K", 0)])
def test_cache_size(text: str, size: int) -> None:
    assert parse_cache_size(text) == size


def test_numa_and_memory(sys_tree: SysTree) -> None:
    sys_tree.write("sys/devices/system/node/node0", cpulist="0-3").write("sys/devices/system/node/node1", cpulist="4-7")
    sys_tree.write("sys/devices/system/node", possible="0-1")
    sys_tree.write("sys/devices/system/edac/mc/mc0/dimm0", dimm_mem_type="Unknown")
    sys_tree.write("sys/devices/system/edac/mc/mc0/dimm1", dimm_mem_type="Unbuffered-DDR5")
    assert (sys_tree.probe().numa_nodes, sys_tree.probe().memory_kind) == (2, "DDR5")


def test_clock(sys_tree: SysTree) -> None:
    sys_tree.write(f"{CPU}/cpufreq", scaling_governor="powersave")
    sys_tree.write(f"{CPU}/thermal_throttle", core_throttle_count="17")
    assert (sys_tree.probe().governor, sys_tree.probe().throttled) == ("powersave", 17)


@pytest.mark.parametrize(
    ("status", "online", "on_battery"),
    [("Discharging", "0", True), ("Charging", "1", False), ("Discharging", "1", False), ("Full", "0", False)],
)
def test_battery(sys_tree: SysTree, status: str, online: str, on_battery: bool) -> None:
    sys_tree.write(f"{POWER}/BAT0", type="Battery", status=status).write(f"{POWER}/AC", type="Mains", online=online)
    assert sys_tree.probe().on_battery is on_battery


def test_a_mouse_is_no_laptop(sys_tree: SysTree) -> None:
    sys_tree.write(f"{POWER}/hid", type="Battery", status="Discharging", scope="Device")
    assert sys_tree.probe().on_battery is None


def test_graphics(sys_tree: SysTree) -> None:
    devices = "sys/bus/pci/devices"
    sys_tree.write(f"{devices}/0000:01:00.0", vendor="0x10de", **{"class": "0x030200"})
    sys_tree.write(f"{devices}/0000:01:00.1", vendor="0x10de", **{"class": "0x040300"})  # its sound
    sys_tree.write(f"{devices}/0000:00:02.0", vendor="0x8086", **{"class": "0x030000"})
    sys_tree.write(f"{devices}/0000:00:03.0", vendor="0xbeef", **{"class": "0x030000"})
    assert sys_tree.probe().graphics == ("Intel", "NVIDIA")


def test_this_machine_is_looked_at_quickly() -> None:
    assert loops(probe_details, times=5) < 4


# ---- which engine is asked for GPUs


CARD = Gpu("CUDA0", "a card", 24 << 30, 20 << 30, shared=False)


class FakeEngine:
    """Sees one GPU by default."""

    def __init__(self, *, alive: bool = True, gpus: tuple[Gpu, ...] = (CARD,)) -> None:
        self.alive, self.gpus, self.asked, self.closed = alive, gpus, 0, False

    def do(self, *command: Any, seconds: float | None) -> Build:
        self.asked += 1
        return Build({}, self.gpus, offload=True)

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def with_cuda(home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """llama.cpp was built for it."""
    (tmp_path / "libggml-cuda.so").touch()
    monkeypatch.setattr(hardware, "backend_folders", lambda: [tmp_path])


@pytest.mark.parametrize("alive", [True, False])
def test_the_commands_own_engine_is_asked_and_kept(monkeypatch: pytest.MonkeyPatch, alive: bool) -> None:
    """It knows what was free before it began to load weights ahead; another one would find them in the memory."""
    prestarted, another = FakeEngine(alive=alive), FakeEngine()
    monkeypatch.setattr(launch, "has_prestarted", True)
    monkeypatch.setattr(client, "prestarted", lambda: prestarted)
    monkeypatch.setattr(client, "EngineClient", lambda: another)
    assert this_machine().gpus == (CARD,)
    assert (prestarted.asked, another.asked) == ((1, 0) if alive else (0, 1))
    assert not prestarted.closed


def test_an_engine_that_was_started_to_ask_it_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    monkeypatch.setattr(launch, "has_prestarted", False)
    monkeypatch.setattr(client, "EngineClient", lambda: engine)
    assert this_machine().gpus == (CARD,)
    assert engine.closed


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere an engine looks each time")
def test_that_there_is_no_gpu_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The wheel of a release has Vulkan on every machine: only the first command starts an engine to learn that."""
    engine = FakeEngine(gpus=())
    monkeypatch.setattr(launch, "has_prestarted", False)
    monkeypatch.setattr(client, "EngineClient", lambda: engine)
    monkeypatch.setattr(hardware, "_DRIVER_PATHS", (str(tmp_path / "home/drivers"),))
    for _ in range(2):
        assert this_machine().gpus == ()
        assert engine.asked == 1
    (tmp_path / "home/drivers").mkdir()  # a driver is installed, without a card
    assert this_machine().gpus == ()
    monkeypatch.setenv("VK_DRIVER_FILES", "another.json")
    engine.gpus = (CARD,)
    for n_asked in (3, 4):  # how much memory is free has to be asked each time
        assert this_machine().gpus == (CARD,)
        assert engine.asked == n_asked


def test_a_llama_cpp_for_processors_is_not_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "libggml-cuda.so").unlink()
    engine = FakeEngine()
    monkeypatch.setattr(client, "EngineClient", lambda: engine)
    assert this_machine().gpus == ()
    assert not engine.asked
