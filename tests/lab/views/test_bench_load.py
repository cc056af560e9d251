"""The table of several clients: it fits into a usual terminal, and what makes it doubtful is said."""

from __future__ import annotations

import io
from dataclasses import replace

from llmrun.lab.bench.load import LoadOutcome, LoadRequest, LoadRow
from llmrun.lab.bench.results import BenchWarning
from llmrun.lab.views.bench_load import show_outcome
from llmrun.protocol.loading import Load
from llmrun.ui.terminal.cells import width
from llmrun.ui.terminal.output import Output

S, MS = 10**9, 10**6
ROW = LoadRow(
    8, True, 487, (239.0, 240.0, 241.0), 240.0, 1.0, 30.1, 12 * S, 123 * S, 99 * MS, 1234 * MS, 2345 * MS, 0.87
)
NOISY = LoadRow(1, False, 487, (50.0, 150.0), 100.0, 70.7, 102.0, S, S, 9 * MS, 9 * MS, 9 * MS, 0.0)
REQUEST = LoadRequest("tiny", Load("/m.gguf", 2048, threads=2), (1, 8), repetitions=3)


def shown(*rows: LoadRow, request: LoadRequest = REQUEST) -> tuple[str, str]:
    output = Output(stdout=io.StringIO(), stderr=io.StringIO(), environment={})
    show_outcome(output, request, LoadOutcome(rows, (BenchWarning("load", "others computed"),), None), "")
    return output.stdout.getvalue(), output.stderr.getvalue()  # type: ignore[attr-defined]


def test_long_times_fit_into_eighty_columns() -> None:
    heading, row, *_ = shown(ROW)[0].splitlines()
    assert row.split() == ["8", "shared", "240.0", "±", "1.0", "30.1", "12.0/123", "s", "99.0/1234/2345", "ms", "87%"]
    assert max(width(heading), width(row)) <= 80


def curve(**times: int) -> tuple[LoadRow, ...]:
    """A row for 1, 2, 4 ... clients, whose answers take so many milliseconds and get 100, 200, 300 ... tokens/s."""
    return tuple(
        replace(NOISY, clients=2**n, avg_ts=100.0 * (n + 1), answer_p50_ns=time * MS)
        for n, time in enumerate(times.values())
    )


def test_the_knee_is_marked_in_a_chart() -> None:
    told, _ = shown(*curve(one=1000, two=1000, four=2500))
    chart = told.split("\n\n")[1].splitlines()
    assert [line.split()[:2] for line in chart[1:4]] == [["1", "own"], ["2", "own"], ["4", "own"]]
    assert [line.endswith("◀ knee") for line in chart[1:4]] == [False, True, False]
    assert chart[3].count("█") == 3 * chart[1].count("█") > 0
    assert max(map(width, chart[:4])) <= 80
    assert "knee: the most tokens/s for the time of an answer" in " ".join(told.split())


def test_a_knee_beyond_the_last_number_is_none() -> None:
    told, _ = shown(*curve(one=1000, two=1000, four=1000))
    assert "no knee: more clients gain more than they cost" in " ".join(told.split())
    assert "knee" not in shown(*curve(one=1000, two=1000))[0], "two numbers are no curve"


def test_what_a_far_server_does_not_tell_is_left_out() -> None:
    row = replace(NOISY, samples_ts=(1.0, 1.0, 1.0), cached_share=0.0, prompt_tokens=0, early=3)
    told, notes = shown(row, request=replace(REQUEST, load=None, server="host:1"))
    assert "CACHED" not in told
    assert "threads" not in told
    assert "prompts of about 512 tokens" in told
    assert "server: host:1" in told
    assert "3 of 3 answers ended before 64 tokens" in notes
    assert "CACHED" in shown(ROW, request=replace(REQUEST, load=None, server="host:1"))[0]


def test_what_makes_a_figure_doubtful_is_said() -> None:
    lines = shown(ROW, NOISY)[1].splitlines()
    assert [line.split(":")[0] for line in lines] == ["1 client, own prompts", "meanwhile others computed"]
    assert "too noisy" in lines[0]
