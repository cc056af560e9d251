"""The machine beside a result: what it has, and nothing of who uses it."""

from __future__ import annotations

import platform
import socket
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from llmrun.bench.machine import describe, fingerprint, label, memory_speed
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
    machine = describe(HARDWARE, gpus=("RTX",), build_commit="0c1e570", root=tmp_path)
    assert (machine.cores, machine.threads, machine.cpu_quota, machine.memory_total) == (8, 4, 4.0, 33 << 30)
    assert (machine.gpus, machine.build_commit) == (("RTX",), "0c1e570")
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


def structure(kind: int, body: bytes, strings: bytes = b"\0") -> bytes:
    return struct.pack("<BBH", kind, 4 + len(body), 7) + body + strings + b"\0"


def memory_device(kind: int, speed: int, configured: int) -> bytes:
    body = bytearray(0x22 - 4)
    body[0x12 - 4] = kind
    struct.pack_into("<H", body, 0x15 - 4, speed)
    struct.pack_into("<H", body, 0x20 - 4, configured)
    return structure(17, bytes(body), b"DIMM 0\0ACME\0")


def test_memory_speed_is_what_the_firmware_runs_it_at() -> None:
    other = structure(1, b"\x01\x02\x03", b"ACME\0Box\0")
    empty_slot = memory_device(2, 0, 0)
    assert memory_speed(other + empty_slot + memory_device(0x22, 5600, 4800)) == "DDR5-4800"
    assert memory_speed(memory_device(0x1A, 3200, 0)) == "DDR4-3200"
    assert memory_speed(other) == memory_speed(b"") == ""


@pytest.mark.parametrize("cut", range(0, 60, 3))
def test_a_table_that_is_cut_or_garbage_is_no_trouble(cut: int) -> None:
    table = structure(1, b"\x01") + memory_device(0x22, 5600, 4800)
    memory_speed(table[:cut])
    memory_speed(bytes((byte * 7 + cut) % 256 for byte in table))
    memory_speed(b"\x11\x04\0\0\0\0" + b"\x11\xff" * 5)
