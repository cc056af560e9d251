"""The view of a quantization: a bar or lines, a preview, a result."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.clock import Clock
from support.gguf_writer import tiny_model, write
from support.streams import Terminal

from llmrun.gguf.reader import read_header
from llmrun.lab.quantize.job import Preview, QuantizedFile
from llmrun.lab.views.quantize import show_done, show_preview, stages
from llmrun.ui.terminal.output import Output


def output(stderr: io.StringIO, *, as_json: bool = False) -> tuple[Output, io.StringIO]:
    stdout = io.StringIO()
    environment = {"TERM": "xterm", "COLUMNS": "100", "NO_COLOR": "1"}
    return Output(json=as_json, stdin=io.StringIO(), stdout=stdout, stderr=stderr, environment=environment), stdout


@pytest.fixture
def clock() -> Clock:
    return Clock(0)


def test_lines_where_there_is_no_terminal(clock: Clock) -> None:
    stderr = io.StringIO()
    with stages(output(stderr)[0], "model\x1b[2J", clock=clock) as progress:
        for step in range(41):
            clock.now = step
            progress("quantizing", step / 40)
        progress.say("by the way")
        progress("another", 0.0)
    assert stderr.getvalue().splitlines() == [
        "model: quantizing",
        "model: quantizing, 25%, 30 s left",
        "model: quantizing, 50%, 20 s left",
        "model: quantizing, 75%, 10 s left",
        "model: quantizing, 100%, checking",
        "by the way",
        "model: another",
    ]


def test_no_lines_beside_json(clock: Clock) -> None:
    stderr = io.StringIO()
    with stages(output(stderr, as_json=True)[0], "model", clock=clock) as progress:
        progress("quantizing", 0.5)
    assert stderr.getvalue() == ""


def test_a_bar_on_a_terminal(clock: Clock) -> None:
    stderr = Terminal()
    with stages(output(stderr)[0], "model", clock=clock) as progress:
        for step in range(21):
            clock.now = step
            progress("quantizing", step / 40)
        progress.say("by the way")
        progress("quantizing", 0.5)
    text = stderr.getvalue()
    assert "model: quantizing" in text
    assert "50%" in text
    assert "20 s left" in text
    assert "by the way\n" in text
    assert text.endswith(("\x1b[?25h", "\x1b[2K"))  # the cursor is back, the bar is gone


def test_shares_out_of_bounds_are_none(clock: Clock) -> None:
    stderr = io.StringIO()
    with stages(output(stderr)[0], "model", clock=clock) as progress:
        for now, share in ((0, -1.0), (20, 2.0)):
            clock.now = now
            progress("quantizing", share)
    assert stderr.getvalue().splitlines()[1] == "model: quantizing, 100%, checking"


DONE = QuantizedFile(
    Path("out.gguf"), "Q4_0", "F16", 270_885_952, 91_726_912, 134_515_008, 5.346, {"Q4_0": 9}, 1.23, ("a note",)
)


def test_a_result_is_one_line() -> None:
    stderr = io.StringIO()
    out, stdout = output(stderr)
    show_done(out, DONE)
    assert stderr.getvalue() == "F16 270.9 MB -> Q4_0 91.7 MB, 5.35 bits per weight, in 1.2 s: out.gguf\n"
    assert stdout.getvalue() == ""


def test_a_mix_has_no_type() -> None:
    stderr = io.StringIO()
    show_done(output(stderr)[0], replace(DONE, n_overrides=9))
    assert stderr.getvalue().startswith("F16 270.9 MB -> a mix of 91.7 MB, ")


def test_a_result_as_json() -> None:
    out, stdout = output(io.StringIO(), as_json=True)
    show_done(out, DONE)
    found = json.loads(stdout.getvalue())
    assert (found["path"], found["n_bytes"], found["bits_per_weight"]) == ("out.gguf", 91_726_912, 5.346)
    assert (found["bytes_per_type"], found["notes"]) == ({"Q4_0": 9}, ["a note"])


@pytest.fixture
def preview(tmp_path: Path) -> Preview:
    header = read_header(write(tmp_path / "model.gguf", tiny_model()))
    return Preview(
        header, {"token_embd.weight": "Q8_0", "output_norm.weight": "F32", "blk.0.attn_q.weight": "Q8_0"}, 9000, ()
    )


def test_a_preview(preview: Preview) -> None:
    stderr = io.StringIO()
    show_preview(output(stderr)[0], preview, "Q8_0", "out.gguf")
    line = stderr.getvalue()
    assert line.startswith("out.gguf would have 9.0 kB, ")
    assert line.endswith("tensors: 2 Q8_0, 1 F32\n")


def test_a_preview_as_json(preview: Preview) -> None:
    out, stdout = output(io.StringIO(), as_json=True)
    show_preview(out, preview, "Q8_0", "out.gguf")
    found = json.loads(stdout.getvalue())
    assert found["types"]["output_norm.weight"] == "F32"
    assert (found["type"], found["n_bytes"]) == ("Q8_0", 9000)
