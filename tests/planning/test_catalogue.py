"""Estimates of the catalogue's models without their headers, and the few that are proposed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.gguf_writer import tiny_model, write

from llmrun.models.registry import load_catalogue
from llmrun.models.store.installed import InstalledModel
from llmrun.planning.catalogue import (
    PURPOSES,
    SLOW,
    Estimates,
    active_share,
    estimate_entry,
    estimate_file,
    propose,
    size_of_file,
)
from llmrun.planning.hardware import Hardware
from llmrun.protocol.devices import Gpu
from llmrun.protocol.jobs.machine import STAND_IN, MachineSpeed, Rates

ENTRIES = load_catalogue().entries
HARDWARE = Hardware("CPU", ("avx2",), 4, 8, None, 24 << 30, 24 << 30, ())


def speed(rate: float) -> MachineSpeed:
    return MachineSpeed(rate, 1e-6, {}, {}, {STAND_IN: Rates(((100.0, rate),), 1e11)})


@pytest.mark.parametrize(
    ("parameters", "share"), [("8B", 1.0), ("135M", 1.0), ("30B, 3B active", 0.1), ("7.5B, 4B effective", 4 / 7.5)]
)
def test_share_of_the_weights_that_a_token_reads(parameters: str, share: float) -> None:
    assert active_share(parameters) == pytest.approx(share)


def test_a_mixture_of_experts_is_faster_than_its_size_says() -> None:
    names = "granite4.1-30b", "qwen3-30b-a3b"
    dense, mixed = (estimate_entry(ENTRIES[name], HARDWARE, speed(2e10)) for name in names)
    assert mixed.memory_bytes > dense.memory_bytes
    assert mixed.decode_rate is not None
    assert dense.decode_rate is not None
    assert mixed.decode_rate > 5 * dense.decode_rate
    assert dense.decode_rate == pytest.approx(2e10 / 17.5e9, rel=0.1)


def test_memory_is_more_than_the_file_and_decides_what_fits() -> None:
    for entry in ENTRIES.values():
        found = estimate_entry(entry, HARDWARE, None)
        assert found.memory_bytes > entry.size_mb * 10**6
        assert found.decode_rate is None
    largest = ENTRIES["qwen3.6-35b-a3b"]
    assert not estimate_entry(largest, HARDWARE, None).fits
    gpu = Gpu("CUDA0", "GPU", 24 << 30, 23 << 30)
    assert estimate_entry(largest, replace(HARDWARE, gpus=(gpu,)), speed(1e10)).fits


def test_embeddings_are_not_decoded() -> None:
    assert estimate_entry(ENTRIES["bge-small"], HARDWARE, speed(1e10)).decode_rate is None


def test_a_file_here_is_estimated_by_its_header(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write(path, tiny_model())
    found = estimate_file(path, HARDWARE, speed(1e10))
    assert found is not None
    assert found.fits
    assert found.decode_rate
    path.write_bytes(b"GGUF")
    assert estimate_file(path, HARDWARE, None) is None


@pytest.mark.parametrize("rate", [1e9, 1e10, 1e11, 1e12])
def test_each_proposal_fits_and_is_as_fast_as_its_purpose_says(rate: float) -> None:
    found = propose(ENTRIES.values(), Estimates((), HARDWARE, speed(rate)))
    assert found
    assert len({each.entry.alias for each in found}) == len(found)
    for each in found:
        assert each.entry.kind == "chat"
        assert each.estimate.fits
        assert (each.estimate.decode_rate or 0) >= PURPOSES.get(each.purpose, 0.0)


def test_none_is_proposed_below_the_speed_of_reading_without_saying_so() -> None:
    for rate in (1e7, 1e8, 1e9, 3e10):
        for each in propose(ENTRIES.values(), Estimates((), HARDWARE, speed(rate))):
            assert (each.estimate.decode_rate or 0) >= SLOW or each.purpose == "the fastest"


def test_what_other_programs_take_at_the_moment_changes_a_second_figure_only() -> None:
    entry = ENTRIES["qwen3-8b"]
    idle, busy = (
        estimate_entry(entry, replace(HARDWARE, memory_available=free), speed(1e10)) for free in (24 << 30, 1 << 30)
    )
    assert idle.fits_now
    assert busy == replace(idle, fits_now=False)


def test_a_file_on_this_disk_is_proposed_with_its_own_figures(tmp_path: Path) -> None:
    entry = ENTRIES["smollm2"]
    path = tmp_path / entry.filename("Q8_0")
    write(path, tiny_model())
    model = InstalledModel("smollm2", entry.repository, path.name, "", path.stat().st_size, "Q8_0", path)
    estimates = Estimates((model,), HARDWARE, speed(1e10))
    (one,) = propose([entry], estimates)
    assert one.size.n_bytes == path.stat().st_size
    assert one.size == estimates.size_of(entry) == size_of_file(path)
    assert one.estimate == estimates.of_file(path)
    assert one.estimate.is_exact
    assert Estimates((), HARDWARE, None).size_of(entry) == ("135M", "Q4_1", entry.mirror.size if entry.mirror else 0)


def test_without_speeds_a_small_a_middle_and_a_large_one() -> None:
    sizes = [each.entry.size_mb for each in propose(ENTRIES.values(), Estimates((), HARDWARE, None))]
    assert len(sizes) == 3
    purposes = [each.purpose for each in propose(ENTRIES.values(), Estimates((), HARDWARE, None))]
    assert purposes == ["small", "medium", "large"], "nothing is said of unknown speeds"
    assert sizes == sorted(sizes)


def test_the_smallest_if_none_fits() -> None:
    (one,) = propose(ENTRIES.values(), Estimates((), replace(HARDWARE, memory_total=1 << 20), None))
    assert one.entry.alias == "smollm2"
    assert not one.estimate.fits
