"""The bench as it is shown: rows in a pipe and on a terminal, the live line, and what stands below."""

from __future__ import annotations

import io
from dataclasses import replace

from support.streams import Terminal

from llmrun.lab.bench.cases import BenchGrid, Case, bench_settings
from llmrun.lab.bench.results import BenchRow, BenchWarning, ChatTimes, Limit, Machine, Result
from llmrun.lab.bench.run import Progress
from llmrun.lab.views.bench import BenchView, details, disturbances
from llmrun.protocol.jobs.bench import BenchTest
from llmrun.ui.terminal.cells import width
from llmrun.ui.terminal.output import Output

LIMIT = Limit(200.0, "memory", 200.0, 2000.0, 2e10, 4e11, 1e8, 1e6, 1e8)
ROW = BenchRow(
    n_gen=128,
    test="tg128",
    model="smollm2",
    model_type="llama 256M Q4_1",
    model_size=96_576_768,
    model_n_params=134_515_008,
    n_threads=2,
    samples_ns=(1_000_000_000, 1_010_000_000, 1_020_000_000),
    repetitions=3,
    limit=LIMIT,
    load_ns=70_000_000,
    peak_bytes=150_000_000,
)
NOISY = BenchWarning("noisy", "too noisy: ±20%")
SWAPPED = BenchWarning("swapped", "memory was swapped: 5 MB")
CASES = (Case(bench_settings(threads=2), BenchTest(512)), Case(bench_settings(threads=2), BenchTest(0, 128)))
PROGRESS = Progress("smollm2", "tg128", 3, 10, "warming up", 1, 5)


def pipe() -> Output:
    return Output(stdout=io.StringIO(), stderr=io.StringIO(), environment={"TERM": "xterm"})


def written(output: Output) -> tuple[str, str]:
    assert isinstance(output.stdout, io.StringIO)
    assert isinstance(output.stderr, io.StringIO)
    return output.stdout.getvalue(), output.stderr.getvalue()


def test_rows_come_as_they_are_measured_with_one_heading() -> None:
    output = pipe()
    view = BenchView(output, ["smollm2"], CASES, shows_rows=True)
    view.progress(PROGRESS)
    view.row(ROW)
    view.row(replace(ROW, test="pp512", limit=None))
    lines, notes = written(output)
    heading, first, second = lines.splitlines()
    assert heading.split() == ["TEST", "TOKENS/S", "±", "95", "%", "OF", "LIMIT"]
    assert first.split() == ["tg128", "126.74", "1.25", "±2.5%", "63%", "memory"]
    assert second.split()[:3] == ["pp512", "126.74", "1.25"]
    assert "memory" not in second
    assert notes == "", "a pipe gets no live line"


def test_columns_show_what_varies_and_nothing_else() -> None:
    output = pipe()
    lists = BenchGrid(
        {"threads": (1, 2), "n_batch": (64, 128), "flash_attention": ("on", "off"), "kv_type_k": ("f16", "q8_0"),
         "kv_type_v": ("f16", "bf16"), "repack": (True, False), "gpu_layers": (0, -1), "n_ubatch": (32, 64)},
        prompts=(8,), answers=(),
    )  # fmt: skip
    view = BenchView(output, ["a", "b"], lists.cases(), shows_rows=True)
    view.row(replace(ROW, model="b", n_batch=64, n_ubatch=32, flash_attn=1, type_k="q8_0", type_v="bf16", repack=False))
    heading, row = written(output)[0].splitlines()
    columns = ["MODEL", "THREADS", "BATCH", "UBATCH", "FA", "K", "V", "REPACK", "NGL", "TEST", "TOKENS/S", "±"]
    assert heading.split()[: len(columns)] == columns
    assert row.split()[:10] == ["b", "2", "64", "32", "on", "q8_0", "bf16", "off", "-1", "tg128"]


def test_a_usual_table_fits_into_eighty_columns() -> None:
    output = pipe()
    cases = BenchGrid({"threads": (1, 2)}, prompts=(512,), depths=(0, 16384)).cases()
    view = BenchView(output, ["smollm2", "a-name-that-is-much-longer-than-anything-has-to-be"], cases, shows_rows=True)
    view.row(replace(ROW, test="tg128 @ d16384", warnings=(NOISY,), model="日本語" * 9))
    view.row(ROW)
    for line in written(output)[0].splitlines():
        assert width(line) <= 100
    narrow = pipe()
    view = BenchView(narrow, ["smollm2"], CASES, shows_rows=True)
    view.row(replace(ROW, warnings=(NOISY,)))
    assert all(width(line) <= 80 for line in written(narrow)[0].splitlines())


def test_doubtful_rows_are_marked_and_explained_not_hidden() -> None:
    noisy = replace(ROW, warnings=(BenchWarning("load", "other programs used 1.0 of 2 cores"), NOISY))
    disturbed = replace(ROW, test="pp512", n_prompt=512, n_gen=0, warnings=(SWAPPED,))
    output = pipe()
    view = BenchView(output, ["smollm2"], CASES, shows_rows=True)
    view.row(noisy)
    view.row(disturbed)
    view.end(Result((noisy, disturbed)))
    lines, notes = written(output)
    assert lines.splitlines()[1].endswith("too noisy")
    assert lines.splitlines()[2].endswith("disturbed")
    assert "tg128: other programs used 1.0 of 2 cores; too noisy: ±20%" in notes
    assert "pp512: memory was swapped: 5 MB" in notes


def test_what_was_measured_before_ctrl_c_is_shown_and_called_so() -> None:
    output = pipe()
    view = BenchView(output, ["smollm2"], CASES, shows_rows=True)
    view.row(ROW)
    stopped = replace(ROW, test="pp512", samples_ns=(1_000_000_000,), repetitions=5)
    view.end(Result((ROW, stopped), is_partial=True))
    lines, notes = written(output)
    assert "stopped at 1/5" in lines
    assert lines.count("tg128") == 1
    assert "stopped before the end: 1 row complete" in notes


def test_other_formats_tell_their_rows_on_stderr() -> None:
    output = pipe()
    view = BenchView(output, ["smollm2"], CASES, shows_rows=False)
    view.row(ROW)
    view.end(Result((ROW,)))
    lines, notes = written(output)
    assert lines == ""
    assert "smollm2 tg128: 126.74 ± 1.25 tokens/s, 63% memory" in notes


def test_the_live_line_is_overwritten_and_gone_before_a_row() -> None:
    output = Output(stdout=Terminal(), stderr=Terminal(), environment={"TERM": "xterm"})
    view = BenchView(output, ["smollm2"], CASES, shows_rows=True)
    view.progress(PROGRESS)
    view.progress(PROGRESS)
    view.progress(replace(PROGRESS, done=4, phase="answering"))
    view.row(ROW)
    view.clear()
    _, notes = written(output)
    assert notes.count("30%  smollm2  tg128  1/5  warming up") == 1
    assert "40%  smollm2  tg128  1/5  measuring" in notes
    assert notes.endswith("\r\x1b[2K")
    assert notes.count("\n") == 0


def test_names_from_elsewhere_can_not_steer_the_terminal() -> None:
    hostile = "evil\x1b[31m\nname"
    for output in (
        pipe(),
        Output(stdout=Terminal(), stderr=Terminal(), environment={"TERM": "xterm", "NO_COLOR": "1"}),
    ):
        view = BenchView(output, [hostile, "b"], CASES, shows_rows=True)
        row = replace(ROW, model=hostile, model_type=hostile, warnings=(BenchWarning("noisy", hostile),))
        view.progress(replace(PROGRESS, model=hostile))
        view.row(row)
        view.end(Result((row,), Machine(), is_partial=True))
        for text in written(output):
            assert "\x1b[31m" not in text


def test_details_of_chats_models_and_limits() -> None:
    chat = ChatTimes((310_000_000, 330_000_000), 7_500_000, 9_000_000, 12_000_000, 0.002, 0.009, (130.0, 134.0))
    rows = (ROW, replace(ROW, test="chat128+64", n_prompt=128, n_gen=64, chat=chat))
    text = "\n".join(details(Result(rows)))
    assert "chat128+64: first text after 0.32 s, then 132.0 tokens/s (2 threads)" in text
    assert "a token every 7.5 ms, p95 9.0 ms, p99 12.0 ms; sampling 0.2% of it, text 0.9%" in text
    assert "llama 135M Q4_1, 96.6 MB, CPU; loaded in 0.07 s; peak memory 150.0 MB" in text
    assert "limit with 2 threads: 20.0 GB/s read, 400 billion multiply-adds/s, as measured" in text


def test_details_name_models_where_there_are_several() -> None:
    rows = (
        ROW,
        replace(
            ROW,
            model="other",
            model_n_params=8_030_000_000,
            file_bytes=98_362_432,
            load_ns=None,
            peak_bytes=None,
            limit=None,
        ),
    )
    lines = details(Result(rows))
    assert lines[1].startswith("smollm2: llama 135M Q4_1,")
    assert lines[2] == "other: llama 8.03B Q4_1, 98.4 MB, CPU"
    assert details(Result(())) == []
    assert disturbances(Result(rows)) == []
