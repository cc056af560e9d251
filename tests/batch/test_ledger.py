"""What is written and counted of rows that are done."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmrun.batch.answers import FinishedRow
from llmrun.batch.ledger import BatchProgress, Ledger
from llmrun.batch.results import ResultFile
from llmrun.batch.rows import Row
from llmrun.errors import UsageError
from llmrun.protocol.energy import Energy


@pytest.fixture
def zone(tmp_path: Path) -> Path:
    """The file of an energy counter."""
    folder = tmp_path / "powercap" / "intel-rapl:0"
    folder.mkdir(parents=True)
    (folder / "name").write_text("package-0")
    (folder / "max_energy_range_uj").write_text("1000000000")
    (folder / "energy_uj").write_text("5000000")
    return folder / "energy_uj"


def test_time_and_energy_count_from_the_first_engine_on(tmp_path: Path, zone: Path) -> None:
    times = iter([10.0, 14.0])
    tally = BatchProgress(2)
    with ResultFile(tmp_path / "out.jsonl") as results:
        ledger = Ledger(results, tally, clock=lambda: next(times))
        ledger.meter(Energy(False, zone.parents[1]))
        ledger.begin()
        zone.write_text("12000000")
        ledger.begin()
        ledger.put(FinishedRow(1, "k", {"error": None}, 10, 4, 2))
    assert (tally.seconds, tally.joules) == (4.0, pytest.approx(7.0))
    assert (tally.done, tally.prompt_tokens, tally.cached_tokens, tally.completion_tokens) == (1, 10, 4, 2)


def test_without_counters_nothing_is_said_of_joules(tmp_path: Path) -> None:
    tally = BatchProgress(1)
    with ResultFile(tmp_path / "out.jsonl") as results:
        ledger = Ledger(results, tally)
        ledger.meter(Energy(False, tmp_path / "missing"))
        ledger.begin()
        ledger.put(FinishedRow(1, "k", {"error": None}))
    assert tally.joules is None


def test_rows_that_cant_be_asked_have_their_error(tmp_path: Path) -> None:
    tally, path = BatchProgress(1), tmp_path / "out.jsonl"
    with ResultFile(path) as results:
        Ledger(results, tally).refuse([(Row(3, {"id": "x"}), UsageError("it is broken"))])
    line = json.loads(path.read_text())
    assert (line["row"], line["id"], line["error"]["message"]) == (3, "x", "it is broken")
    assert (tally.done, tally.failed) == (1, 1)
