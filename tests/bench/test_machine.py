"""The machine beside a result: what it has, and nothing of who uses it."""

from __future__ import annotations

import platform
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from llmrun.bench.machine import describe, fingerprint, label
from llmrun.bench.results import Machine
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
