"""What is written and counted of rows that are done."""

from __future__ import annotations

import json
from pathlib import Path

from llmrun.batch.results import ResultFile
from llmrun.batch.rows import FinishedRow, Row
from llmrun.batch.run import BatchProgress, Ledger
from llmrun.errors import UsageError


def test_time_counts_from_the_first_engine_on(tmp_path: Path) -> None:
    times = iter([10.0, 14.0])
    tally = BatchProgress(2)
    with ResultFile(tmp_path / "out.jsonl") as results:
        ledger = Ledger(results, tally, clock=lambda: next(times))
        ledger.begin()
        ledger.begin()
        ledger.put(FinishedRow(1, "k", {"error": None}, 10, 4, 2))
    assert tally.seconds == 4.0
    assert (tally.done, tally.prompt_tokens, tally.cached_tokens, tally.completion_tokens) == (1, 10, 4, 2)


def test_rows_that_cant_be_asked_have_their_error(tmp_path: Path) -> None:
    tally, path = BatchProgress(1), tmp_path / "out.jsonl"
    with ResultFile(path) as results:
        Ledger(results, tally).refuse([(Row(3, {"id": "x"}), UsageError("it is broken"))])
    line = json.loads(path.read_text())
    assert (line["row"], line["id"], line["error"]["message"]) == (3, "x", "it is broken")
    assert (tally.done, tally.failed) == (1, 1)
