"""Hardware: text of ordinary and odd machines becomes facts, and this machine is looked at quickly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.effort import loops

from llmrun.planning import hardware
from llmrun.planning.hardware import (
    Hardware,
    cgroup_directories,
    parse_cpu_list,
    parse_cpuinfo,
    parse_limit,
    parse_meminfo,
    parse_quota,
    parse_statistic,
    parse_sysctl,
    probe,
)

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
