"""The machine beside a result: what it has, and nothing of who uses it."""

from __future__ import annotations

import platform
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from llmrun.lab.bench import machine
from llmrun.lab.bench.machine import (
    ClockSample,
    DisturbanceMonitor,
    SystemCounters,
    describe,
    disturbances,
    fingerprint,
    label,
    sample_warnings,
)
from llmrun.lab.bench.results import BenchWarning, Machine, WarningKind
from llmrun.planning.hardware import Hardware
from llmrun.protocol.codec import as_dict

HARDWARE = Hardware("AMD Ryzen 7 7840U w/ Radeon 780M Graphics", ("avx2",), 8, 16, 4.0, 33 << 30, 20 << 30)


def test_a_machine_is_described_from_what_the_system_tells(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/os-release").write_text('NAME="Debian"\nPRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\n')
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("flags\t\t: fpu hypervisor avx2\n")
    (tmp_path / ".dockerenv").touch()
    machine = describe(HARDWARE, build_commit="0c1e570", root=tmp_path)
    assert (machine.cores, machine.threads, machine.cpu_quota, machine.memory_total) == (8, 4, 4.0, 33 << 30)
    assert machine.build_commit == "0c1e570"
    if platform.system() == "Linux":
        assert machine.os == "Debian GNU/Linux 12 (bookworm), in a container"
        assert machine.kernel.endswith(", virtual machine")
    assert machine.llmrun
    assert machine.llama
    assert machine.name == f"ryzen-7-7840u-{fingerprint(machine)}"


def test_nobody_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "release", lambda: "6.1.0-alices-kernel")
    text = str(as_dict(describe(HARDWARE)))
    assert "alice" not in text
    assert "6.1.0" in text
    assert socket.gethostname() not in text.split("'")


def test_a_given_name_stays() -> None:
    assert describe(HARDWARE, name="the server").name == "the server"


def test_a_fingerprint_changes_with_the_machine_and_not_with_an_update() -> None:
    machine = describe(HARDWARE)
    assert fingerprint(replace(machine, kernel="Linux 9", llama="1", python="4", memory_total=33 << 30 | 5)) == (
        fingerprint(machine)
    )
    assert fingerprint(replace(machine, cores=6)) != fingerprint(machine)


@pytest.mark.parametrize(
    ("cpu", "words"),
    [
        ("Intel(R) Xeon(R) Processor @ 2.60GHz", "xeon"),
        ("13th Gen Intel(R) Core(TM) i7-1355U", "core-i7-1355u"),
        ("AMD EPYC 9R14 96-Core Processor", "epyc-9r14-96-core"),
        ("Apple M2 Pro", "apple-m2-pro"),
        ("", "machine"),
    ],
)
def test_a_label_is_short_and_of_the_processor(cpu: str, words: str) -> None:
    assert label(Machine(cpu=cpu)).rpartition("-")[0] == words


# ---- what disturbs a measurement is found and said; what a system does not tell is left out


BEFORE = SystemCounters(wall=100.0, busy=50.0, own=10.0)
QUIET = replace(BEFORE, wall=110.0, busy=70.2, own=30.0)  # 2 cores of ours, and 0.02 of others


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_quiet_machine_gets_no_warning() -> None:
    looks = [ClockSample(3.9e9, 70), ClockSample(4.0e9, 80)]
    assert disturbances(BEFORE, QUIET, looks, 2) == ()


@pytest.mark.parametrize(
    ("kind", "change", "looks", "text"),
    [
        ("load", {"busy": 83.0}, [], "other programs used 1.3 of 2 cores"),
        ("steal", {"steal": 1.0}, [], "the host took away 5% of the processor"),
        ("quota", {"throttled": 7, "throttled_seconds": 2}, [],
         "the container's quota stopped it 7 times, for 2.0 s of 10.0 s"),
        ("swapped", {"swapped": 64 << 20}, [], "memory was swapped: 67.1 MB"),
        ("reread", {"reread": 64 << 20}, [], "memory was short: 67.1 MB were read from the disk again"),
        ("heat", {"heat": 3}, [ClockSample(0, 99)], "heat slowed the processor 3 times: 99 °C"),
        ("heat", {}, [ClockSample(0, 98)], "heat slowed the processor down, probably: 98 °C"),
        ("clock", {}, [*map(ClockSample, (4.2e9, 4.1e9, 3.1e9))], "the clock went from 4.2 to 3.1 GHz"),
        ("clock", {}, [ClockSample(0.8e9), ClockSample(4.1e9)], "the clock went from 0.8 to 4.1 GHz"),
    ],
)  # fmt: skip
def test_each_disturbance_has_its_kind_and_words(
    kind: WarningKind, change: dict[str, float], looks: list[ClockSample], text: str
) -> None:
    after = replace(QUIET, **change)
    assert disturbances(BEFORE, after, looks, 2) == (BenchWarning(kind, text),)
    assert BenchWarning(kind, text).is_disturbance


def test_a_little_of_many_cores_is_no_disturbance() -> None:
    busy = replace(QUIET, busy=QUIET.busy + 10)  # one core
    assert disturbances(BEFORE, busy, [], 2)
    assert not disturbances(BEFORE, busy, [], 64)


def test_stolen_time_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.Clock, "now", classmethod(lambda cls: cls(1.0, 9.0, 0.0, steal=2.5)))
    assert machine.read().steal == 2.5


def test_stolen_time_is_not_said_twice() -> None:
    stolen = replace(QUIET, busy=QUIET.busy + 5, steal=5.0)
    assert disturbances(BEFORE, stolen, [], 2) == (BenchWarning("steal", "the host took away 25% of the processor"),)


def test_samples_speak_for_themselves() -> None:
    assert sample_warnings([100, 100.4, 99.8, 100.1, 99.9]) == ()
    slower = BenchWarning("drift", "8% slower at the end than at the beginning")
    assert sample_warnings([100, 98, 96, 94, 92.5]) == (slower,)
    assert sample_warnings([100, 99, 101, 100, 50, 100, 100.5, 99]) == (
        BenchWarning("noisy", "too noisy: ±16%"),
        BenchWarning("outliers", "repetition 5 far from the others"),
    )
    scatter = sample_warnings([100, 60, 140, 80, 120])
    assert scatter[0].kind == "noisy"
    assert not any(warning.is_disturbance for warning in scatter), "a scatter has no cause yet"
    assert sample_warnings([100]) == sample_warnings([]) == ()


def test_counters_are_read_from_proc_and_sys(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/vmstat": "pgpgin 5\npswpin 3\npswpout 2\nworkingset_refault_file 10\n",
            "proc/self/cgroup": "0::/box\n",
            "sys/fs/cgroup/box/cpu.stat": "usage_usec 9\nnr_throttled 4\nthrottled_usec 1500000\n",
            "sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count": "6\n",
            "sys/devices/system/cpu/cpu1/thermal_throttle/core_throttle_count": "1\n",
            "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": "3100000\n",
            "sys/devices/system/cpu/cpu1/cpufreq/scaling_cur_freq": "4200000\n",
            "sys/class/thermal/thermal_zone0/type": "iwlwifi_1\n",
            "sys/class/thermal/thermal_zone0/temp": "99000\n",
            "sys/class/thermal/thermal_zone1/type": "x86_pkg_temp\n",
            "sys/class/thermal/thermal_zone1/temp": "71500\n",
        },
    )
    reading = machine.read(root)
    assert (reading.throttled, reading.throttled_seconds, reading.heat) == (4, 1.5, 7)
    assert (reading.swapped, reading.reread) == (5 * 4096, 10 * 4096)
    assert machine.sample_clock(root) == ClockSample(4.2e9, 71.5)


def test_cgroups_of_version_1_and_a_processor_that_tells_megahertz(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "3:cpu,cpuacct:/box\n",
            "sys/fs/cgroup/cpu/box/cpu.stat": "nr_periods 9\nnr_throttled 2\nthrottled_time 500000000\n",
            "proc/cpuinfo": "processor : 0\ncpu MHz\t\t: 2600.000\nprocessor : 1\ncpu MHz\t\t: 2700.5\n",
        },
    )
    reading = machine.read(root)
    assert (reading.throttled, reading.throttled_seconds) == (2, 0.5)
    assert machine.sample_clock(root) == ClockSample(2700.5e6, 0)


def test_where_nothing_can_be_read_nothing_is_said(tmp_path: Path) -> None:
    reading = machine.read(tmp_path)
    assert (reading.throttled, reading.swapped, reading.heat) == (0, 0, 0)
    assert machine.sample_clock(tmp_path) == ClockSample()
    garbage = tree(tmp_path, {"proc/vmstat": "pswpin many\n", "proc/cpuinfo": "cpu MHz : fast\n"})
    assert machine.read(garbage).swapped == 0
    assert machine.sample_clock(garbage) == ClockSample()


def test_own_work_is_not_others_even_in_a_living_child() -> None:
    """The engine is a child that goes on living; psutil counts it while os.times() does not yet."""
    spin = "import time\nwhile time.process_time() < 0.3: pass\nprint(1, flush=True); input()"
    before = machine.read()
    with subprocess.Popen([sys.executable, "-c", spin], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.read(1)
        alive = machine.read().own - before.own
        assert alive > 0.2
        child.communicate(b"\n")
    tick = 0.01  # the counters are sums of clock ticks
    assert machine.read().own - before.own > alive - 2 * tick, "its time is not lost when it has ended"


def test_a_monitor_reads_before_and_after() -> None:
    with DisturbanceMonitor() as watch:
        time.sleep(0.01)
        watch.sample()
        assert watch.warnings == ()
    assert isinstance(watch.warnings, tuple)
