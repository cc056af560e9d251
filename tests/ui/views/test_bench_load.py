"""The table of several clients: it fits into a usual terminal, and what makes it doubtful is said."""

from __future__ import annotations

import io

from llmrun.bench.load import LoadOutcome, LoadRequest, LoadRow
from llmrun.bench.results import BenchWarning
from llmrun.protocol.messages import Load
from llmrun.ui.terminal.cells import width
from llmrun.ui.terminal.output import Output
from llmrun.ui.views.bench_load import show_outcome

S, MS = 10**9, 10**6
ROW = LoadRow(
    8, True, 487, (239.0, 240.0, 241.0), 240.0, 1.0, 30.1, 12 * S, 123 * S, 99 * MS, 1234 * MS, 2345 * MS, 0.87
)
NOISY = LoadRow(1, False, 487, (50.0, 150.0), 100.0, 70.7, 102.0, S, S, 9 * MS, 9 * MS, 9 * MS, 0.0)
REQUEST = LoadRequest("tiny", Load("/m.gguf", 2048, 2048, threads=2), (1, 8), repetitions=3)


def shown(*rows: LoadRow) -> tuple[str, str]:
    output = Output(stdout=io.StringIO(), stderr=io.StringIO(), environment={})
    show_outcome(output, REQUEST, LoadOutcome(rows, (BenchWarning("load", "others computed"),), None), "")
    return output.stdout.getvalue(), output.stderr.getvalue()  # type: ignore[attr-defined]


def test_long_times_fit_into_eighty_columns() -> None:
    heading, row, *_ = shown(ROW)[0].splitlines()
    assert row.split() == ["8", "shared", "240.0", "±", "1.0", "30.1", "12.0/123", "s", "99.0/1234/2345", "ms", "87%"]
    assert max(width(heading), width(row)) <= 80


def test_what_makes_a_figure_doubtful_is_said() -> None:
    lines = shown(ROW, NOISY)[1].splitlines()
    assert [line.split(":")[0] for line in lines] == ["1 client, own prompts", "meanwhile others computed"]
    assert "too noisy" in lines[0]
