"""pull, show, run and plan name the same quant on every machine, and it fits there."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.big_repositories import BigRepository
from support.model_disk import lonely_home
from support.stand_in_hub import StandInHub, stand_in_hub

from llmrun import storage
from llmrun.cli import plan
from llmrun.cli.app import call
from llmrun.config import load_settings
from llmrun.errors import LlmrunError, OutOfMemoryError, UsageError
from llmrun.gguf import filenames
from llmrun.model import loading
from llmrun.models.download.transfer import ignore_note
from llmrun.models.registry import resolve
from llmrun.planning import estimate, hardware
from llmrun.planning.estimate import remote_candidates
from llmrun.planning.hardware import Hardware
from llmrun.planning.memory import memory
from llmrun.planning.placement import split_model
from llmrun.planning.plan import margin
from llmrun.planning.preferences import LoadPreferences
from llmrun.protocol.devices import Gpu

GB = 10**9
MACHINES = [*itertools.product((4, 8, 16, 48), (0, 12, 24))]
"""RAM and VRAM that are free, in 10^9 bytes."""
REPOSITORIES = [
    BigRepository("a/eight", "a/eight", "m", {"Q2_K": 3.2, "Q3_K_M": 4.0, "Q4_K_M": 4.9, "Q8_0": 8.5}, 32, 8),
    BigRepository("a/seventy", "a/seventy", "m", {"IQ2_XS": 21, "Q3_K_M": 34, "Q4_K_M": 42.5, "Q8_0": 75}, 80, 8),
    BigRepository("a/many-heads", "a/many-heads", "m", {"Q2_K": 2.8, "Q4_0": 3.8, "Q4_K_M": 4.1, "F16": 13.5}, 32, 32),
    BigRepository("a/split", "a/split", "m", {"Q3_K_M": 16, "Q4_K_M": 19.8, "Q5_K_M": 23}, 64, 8, parts=2),
    BigRepository(
        "gpt-oss-20b", "unsloth/gpt-oss-20b-GGUF", "gpt-oss-20b", {"Q2_K": 11.5, "Q4_K_M": 11.6, "F16": 13.8}, 24, 8
    ),
    BigRepository("a/three", "a/three", "m", {"IQ4_XS": 3.3, "Q4_K_S": 3.7, "Q5_K_M": 4.3, "Q8_0": 6}, 28, 8),
]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    """A hub whose hashes are nobody's business: nothing is downloaded."""
    lonely_home(tmp_path / "home", monkeypatch)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr(storage, "free_bytes", lambda folder: 1 << 50)
    with stand_in_hub() as server:
        server.faults.sha = "f" * 64
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.fixture
def on_machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the machine: (RAM, VRAM) -> Hardware."""

    def refuse(*_: object, **__: object) -> None:
        raise LlmrunError("speeds are not asked for here")

    def make(ram: int, vram: int) -> Hardware:
        gpus = (Gpu("CUDA0", "card", vram * GB, vram * GB),) if vram else ()
        found = Hardware("CPU", (), 4, 8, None, 64 * GB, ram * GB, gpus)
        for module in (hardware, estimate, loading, plan):
            monkeypatch.setattr(module, "this_machine", lambda *workers: found)
        return found

    monkeypatch.setattr("llmrun.cli.plan.speed_of", refuse)
    return make


class Said:
    """What commands name: a quant, or None where no quant fits."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.capsys, self.monkeypatch = capsys, monkeypatch

    def pull(self, name: str) -> str | None:
        facts = self._json("pull", name, "--dry-run")
        return facts and facts["quant"]

    def show(self, name: str) -> str | None:
        facts = self._json("show", name)
        return facts and filenames.quant_of(facts["url"])

    def plan(self, name: str) -> str | None:
        return self._json("plan", name)["chosen"]  # type: ignore[no-any-return]

    def run(self, name: str) -> str | None:
        """It says what it takes before it asks whether it may download so much."""
        self.monkeypatch.setattr("sys.stdin", io.StringIO())
        try:
            with pytest.raises(UsageError, match="to download"):
                call(["run", name, "hi"])
        except OutOfMemoryError:
            return None
        return self.capsys.readouterr().err.split()[0]

    def _json(self, *arguments: str) -> Any:
        try:
            call([*arguments, "--json"])
        except OutOfMemoryError:
            return None
        return json.loads(self.capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize("repository", REPOSITORIES, ids=lambda each: each.name)
def test_four_commands_name_one_quant_that_fits(
    hub: StandInHub,
    on_machine: Any,
    repository: BigRepository,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub.repository, hub.files = repository.id, repository.files(tmp_path)
    said = Said(capsys, monkeypatch)
    candidates = {one.quant: one for one in remote_candidates(resolve(repository.name), load_settings(), ignore_note)}
    named = set()
    for ram, vram in MACHINES:
        hardware = on_machine(ram, vram)
        quants = {command(repository.name) for command in (said.pull, said.show, said.plan, said.run)}
        assert len(quants) == 1, (ram, vram, quants)
        (quant,) = quants
        named.add(quant)
        fitting = {one: fits(candidates[one].weight_bytes, candidates[one].header, hardware) for one in candidates}
        assert fitting[quant] if quant else not any(fitting.values())
    assert len(named) > 1  # the machines make a difference


def fits(weights: int, header: Any, hardware: Hardware) -> bool:
    """Whether weights, a small KV cache and scratch memory go into RAM and VRAM, with something left."""
    sizes = _Sizes(header, weights)
    needs = memory(sizes, 512)
    ram = split_model(sizes, needs, 512, hardware, LoadPreferences()).ram  # type: ignore[arg-type]
    return ram <= hardware.memory_available - margin(hardware.memory_available)


class _Sizes:
    """A header with other weights."""

    def __init__(self, header: Any, weights: int) -> None:
        self._header, self.weight_bytes = header, weights

    def __getattr__(self, name: str) -> Any:
        return getattr(self._header, name)
