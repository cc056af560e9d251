"""The report card on a terminal, in a pipe, as Markdown, JSON and HTML; and the progress of making it."""

from __future__ import annotations

import io
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from support.report_fake import card, row
from support.streams import Terminal

from llmrun.errors import CancelledError, ResourceError, UsageError
from llmrun.lab.quantize.card import Card, CardRow, CardSpeed, Quality
from llmrun.lab.quantize.report import ReportUpdate
from llmrun.lab.views.report import (
    checked_target,
    decode_words,
    json_text,
    markdown,
    notes,
    report_page,
    report_progress,
    show,
    wall,
    with_error,
    write,
)
from llmrun.ui.terminal.cells import width
from llmrun.ui.terminal.output import Output

HOSTILE = "evil|<script>alert(1)</script>\x1b[31m*x*`\u202e"


def output(stdout: io.StringIO, stderr: io.StringIO | None = None, *, json: bool = False, **environment: str) -> Output:
    return Output(
        json=json, stdin=io.StringIO(), stdout=stdout, stderr=stderr or io.StringIO(), environment=environment
    )


def hostile() -> Card:
    nasty = row("Q4_0", type=HOSTILE, notes=(HOSTILE,))
    failed = replace(row("Q8_0"), type="Q8_0", failure=HOSTILE, quality=Quality(), decode=CardSpeed())
    return card(row("F16"), nasty, failed, name=HOSTILE, source=HOSTILE, notes=(HOSTILE,))


# ---- terminal and pipe -----------------------------------------------------------------------------


def test_a_terminal_of_80_columns_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((80, 24)))
    stdout = Terminal()
    monkeypatch.setattr(stdout, "fileno", lambda: 1)
    show(output(stdout, TERM="xterm", NO_COLOR="1"), card())
    lines = stdout.getvalue().splitlines()
    assert max(map(width, lines)) <= 80
    assert lines[0] == "F16 270.9 MB → Q4_K_M 105.5 MB: 1.5x faster decode, KLD 0.031"
    assert lines[2].split() == [
        "TYPE",
        "SIZE",
        "MB",
        "BITS",
        "PREFILL",
        "DECODE",
        "RAM",
        "MB",
        "KLD",
        "SAME",
        "%",
        "PPL",
    ]
    assert lines[6].split()[:5] == ["Q4_K_M", "105.5", "6.25", "420", "149"]
    assert "Q4_K_M  recommended, most exact 4-bit type; a small loss" in lines
    assert "\x1b" not in stdout.getvalue()


def test_a_pipe_has_one_line_for_each_type() -> None:
    stdout, stderr = io.StringIO(), io.StringIO()
    show(output(stdout, stderr), card())
    lines = stdout.getvalue().splitlines()
    (line,) = (line for line in lines if line.startswith("Q4_1"))
    assert line.endswith("beaten by IQ4_NL, which is smaller, faster and more exact; the loss is visible")
    assert "\x1b" not in stdout.getvalue() + stderr.getvalue()
    assert "2 threads, the median of 5 rounds" in stderr.getvalue()


def test_untrusted_text_steers_no_terminal() -> None:
    stdout, stderr = Terminal(), Terminal()
    show(output(stdout, stderr, TERM="xterm", NO_COLOR="1"), hostile())
    assert "\x1b" not in stdout.getvalue() + stderr.getvalue()
    assert "\u202e" not in stdout.getvalue()


def test_what_was_not_measured_has_a_dash() -> None:
    stdout, stderr = io.StringIO(), io.StringIO()
    bare = replace(row("Q4_0"), decode=CardSpeed(), prefill=CardSpeed(), quality=Quality(), peak_memory=None)
    with pytest.raises(CancelledError):  # and yet everything is shown
        show(output(stdout, stderr), card(row("F16"), bare, is_complete=False))
    (line,) = (line for line in stdout.getvalue().splitlines() if line.startswith("Q4_0"))
    assert line.split()[1:] == ["91.7", "5.43", *"–" * 6, "not", "measured", "to", "the", "end"]
    assert "stopped before the end" in stderr.getvalue()


def test_a_busy_machine_is_told() -> None:
    quiet, busy = row("F16"), row("F16", decode=CardSpeed((50.0, 100.0)))
    assert notes(card(quiet)) == []
    assert notes(card(busy))[0].startswith("the machine was busy: the same speed was up to 2.0x higher")


def test_the_wall_says_slower_only_when_it_is_sure() -> None:
    fast, slow = row("F16", decode=CardSpeed((100.0, 101.0, 99.0))), row("Q8_0", decode=CardSpeed((50.0, 51.0, 50.5)))
    assert decode_words(slow, fast) == "2.0x slower"
    assert decode_words(fast, slow) == "2.0x faster"
    noisy = row("Q8_0", decode=CardSpeed((60.0, 150.0, 100.0)))
    assert decode_words(noisy, fast) == "equally fast"
    assert decode_words(row("Q8_0", decode=CardSpeed()), fast) == ""
    assert wall(card(row("F16"))) == ""


@pytest.mark.parametrize(
    ("value", "error", "shown"),
    [
        (0.031, 0.0021, "0.031 ± 0.002"),
        (0.00142, 0.00007, "0.0014 ± 0.0001"),
        (1.25, 0.3, "1.25 ± 0.30"),
        (0.0037, None, "0.0037"),
        (0.238, None, "0.238"),
        (None, None, "–"),
        (float("nan"), 1.0, "–"),
    ],
)
def test_numbers_have_the_digits_that_their_errors_allow(value: float, error: float, shown: str) -> None:
    assert with_error(value, error) == shown


# ---- files -----------------------------------------------------------------------------------------


def test_markdown_is_aligned_and_rectangular() -> None:
    table = [line for line in markdown(card()).splitlines() if line.startswith("|")]
    assert len({width(line) for line in table}) == 1
    assert {line.count("|") for line in table} == {11}
    assert table[1].split("|")[2].strip().endswith(":")
    assert "Q4_K_M" in markdown(card())


def test_markdown_keeps_untrusted_text_as_text() -> None:
    written = markdown(hostile())
    assert "<script>" not in written
    assert "\x1b" not in written
    table = [line for line in written.splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in table} == {11}


def test_json_says_the_same(tmp_path: Path) -> None:
    stdout = io.StringIO()
    show(output(stdout, json=True), card())
    data = json.loads(stdout.getvalue())
    assert data == json.loads(json_text(card()))
    assert data["recommended"] == "Q4_K_M"
    assert [each["type"] for each in data["types"]][:2] == ["F16", "Q8_0"]
    assert data["types"][3]["verdict"].startswith("recommended")
    assert data["machine"]["cpu"] == "Testium 3000"


def test_the_page_has_every_figure_and_no_untrusted_markup() -> None:
    html = report_page(card())
    assert all(cell in html for cell in ("Q4_K_M", "105.5", "0.031 ± 0.002", "Testium 3000", "8,192 tokens of a text"))
    assert (html.count("<svg"), html.count('<figure class="bars">')) == (1, 2)
    assert '<tr class="marked"><th scope="row">Q4_K_M</th>' in html
    assert "<script>alert" not in report_page(hostile())


@pytest.mark.parametrize("rows", [(row("F16"),), (row("F16"), replace(row("Q4_0"), quality=Quality(), n_bytes=None))])
def test_a_page_of_little_is_a_page(rows: tuple[CardRow, ...]) -> None:
    assert "</html>" in report_page(card(*rows, is_complete=False))


@pytest.mark.parametrize(("name", "start"), [("a.md", "# tiny"), ("b.JSON", "{"), ("c.html", "<!DOCTYPE html>")])
def test_the_ending_tells_the_format(tmp_path: Path, name: str, start: str) -> None:
    write(card(), tmp_path / name)
    assert (tmp_path / name).read_text(encoding="utf-8").startswith(start)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_bad_target_is_told_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="invalid report file") as caught:
        checked_target(tmp_path / "card.pdf")
    assert "card.md" in caught.value.hint
    with pytest.raises(UsageError, match="no folder"):
        checked_target(tmp_path / "nowhere" / "card.md")


def test_a_file_that_can_not_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "card.md"
    target.write_text("old")

    def fails(self: Path, other: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(ResourceError, match="can't write"):
        write(card(), target)
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


# ---- progress --------------------------------------------------------------------------------------


def test_a_pipe_gets_a_line_for_each_type_and_signs_of_life() -> None:
    now = [0.0]
    stderr = io.StringIO()
    with report_progress(output(io.StringIO(), stderr), clock=lambda: now[0]) as tell:
        tell(ReportUpdate("timing", "F16", 0.1, None, row("F16")))
        tell(ReportUpdate("timing", "F16", 0.1, 50.0, row("F16")))
        tell(ReportUpdate("judging", "Q4_0", 0.2, 40.0))
        now[0] = 25.0
        tell(ReportUpdate("judging", "Q4_0", 0.3, 40.0))
        tell(ReportUpdate("timing", "Q4_0", 0.4, 30.0, row("Q4_0")))
    assert stderr.getvalue().splitlines() == [
        "F16: 270.9 MB, decode 97.0 tokens/s",
        "Q4_0: measuring quality, 30%, 40 s left",
        "Q4_0: 91.7 MB, KLD 0.081, decode 188.0 tokens/s",
    ]


def test_a_terminal_gets_a_bar_that_leaves() -> None:
    stderr = Terminal()
    with report_progress(output(io.StringIO(), stderr, TERM="xterm", COLUMNS="80")) as tell:
        tell(ReportUpdate("judging", "Q4_0", 0.25, 40.0))
        tell(ReportUpdate("timing", "Q4_0", 0.5, 20.0, row("Q4_0")))
    assert "Q4_0: 91.7 MB, KLD 0.081, decode 188.0 tokens/s" in stderr.getvalue()
    assert "50%" in stderr.getvalue()
    assert stderr.getvalue().rstrip().endswith("\x1b[2K") or "\x1b[?25h" in stderr.getvalue()
