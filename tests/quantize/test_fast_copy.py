"""A copy for faster prompts: proposed only where the kernels of the file's type are slow, by measured rates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.gguf_writer import write
from support.quantize_engine import model

from llmrun.cli import tune
from llmrun.errors import LlmrunError
from llmrun.gguf.header import Header
from llmrun.gguf.reader import read_header
from llmrun.planning.hardware import Hardware
from llmrun.protocol.devices import Gpu
from llmrun.protocol.jobs.machine import MachineSpeed, Rates
from llmrun.quantize.fast_copy import fast_copy, has_slow_prompts

MACHINE = Hardware("Some CPU", ("avx2",), 4, 8, None, 1 << 34, 1 << 33)


def speed(prefill: float, *, others: float = 0.0) -> MachineSpeed:
    """A machine that multiplies Q8_0 this many times as fast as Q4_1 in prefill, with equal bytes/s in decode."""
    rates = {"Q4_1": Rates(((100.0, 1e9),), 1e6), "Q8_0": Rates(((100.0, 1e9),), prefill * 1e6)}
    return MachineSpeed(1e9, 0.0, {"F16": {64: 0.0}}, {"F16": {64: 0.0}}, rates, others)


@pytest.fixture
def header(tmp_path: Path) -> Header:
    return read_header(write(tmp_path / "model-Q4_1.gguf", model("Q4_1")))


def test_slow_is_a_type_on_a_processor(header: Header, tmp_path: Path) -> None:
    assert has_slow_prompts(header, MACHINE)
    assert not has_slow_prompts(header, replace(MACHINE, cpu_flags=("asimddp",)))
    assert not has_slow_prompts(header, replace(MACHINE, gpus=(Gpu("CUDA0", "", 1, 1),)))
    assert not has_slow_prompts(read_header(write(tmp_path / "fast.gguf", model("Q4_0"))), MACHINE)


def test_the_copy_has_the_measured_gain_and_its_price(header: Header) -> None:
    found = fast_copy(header, speed(4.0))
    assert found is not None
    assert found.type == "Q8_0"
    assert 3 < found.prefill <= 4
    assert found.decode < 1  # it reads more bytes
    assert found.n_bytes == read_header(write(header.path.with_name("copy.gguf"), model("Q8_0"))).weight_bytes


def test_a_small_gain_is_no_copy(header: Header) -> None:
    assert fast_copy(header, speed(1.2)) is None


def test_a_busy_machine_gives_no_figures(header: Header, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = speed(4.0)
    monkeypatch.setattr("llmrun.planning.speed.speed_of", lambda *arguments, **more: found)
    assert tune._fast_copy(header, MACHINE, tmp_path) is not None
    found = speed(4.0, others=1.0)
    assert tune._fast_copy(header, MACHINE, tmp_path) is None


def test_kernels_that_can_not_be_measured_are_no_error(
    header: Header, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def measure(*arguments: object, **more: object) -> MachineSpeed:
        raise LlmrunError("it takes too long")

    monkeypatch.setattr("llmrun.planning.speed.speed_of", measure)
    assert tune._fast_copy(header, MACHINE, tmp_path) is None
