"""The output of `llmrun evaluate`: running figures, tables, JSON, and the end by Ctrl-C."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from support import gguf_writer
from typer.testing import CliRunner

from llmrun.errors import CancelledError, UsageError
from llmrun.lab.cli.evaluate import evaluate
from llmrun.lab.views.evaluate import EvaluationSubject, digits, partial_figures, reading, show_evaluated
from llmrun.protocol.jobs.evaluate import Divergence, EvaluateResult, EvaluateUpdate, Figure, Needle, PositionRange
from llmrun.ui.terminal.output import Output

pytestmark = pytest.mark.usefixtures("package_on_path")


def figure(value: float) -> Figure:
    return Figure(value, value / 50, value * 0.9, value * 1.1)


ALONE = EvaluateResult(3, 534, 512, 765, figure(14.657835), 0.9897)
DIVERGENCE = Divergence(
    mean=figure(0.253947),
    median=figure(0.194775),
    p90=figure(0.523777),
    p95=figure(0.675647),
    p99=figure(1.271682),
    p999=figure(2.430869),
    maximum=2.612986,
    same_top=Figure(0.7366, 0.0113, 0.71, 0.76),
    log_ratio=figure(0.2032),
    ratio=figure(1.225336),
    probability_change=Figure(-0.03915, 0.003, -0.045, -0.033),
    rms_change=figure(0.121),
    reference_perplexity=figure(14.973207),
    correlation=0.964,
)
COMPARED = replace(ALONE, divergence=DIVERGENCE)
STRETCHES = (
    PositionRange(0, 512, 1024, figure(20.4), figure(17.83), figure(0.2932), figure(0.7188)),
    PositionRange(512, 1024, 1022, figure(10.99), figure(9.299), figure(0.218), figure(0.775)),
)
NEEDLES = tuple(
    Needle(length, depth / 2, depth != 1, 0.9 / (1 + depth), True, 0.95) for length in (512, 1024) for depth in range(3)
)
ABOUT = EvaluationSubject("m-Q4_0.gguf", "m-F16.gguf", "text.txt", "0123456789abcdef" * 4)


def output() -> tuple[Output, io.StringIO, io.StringIO]:
    out, errors = io.StringIO(), io.StringIO()
    return Output(stdin=io.StringIO(), stdout=out, stderr=errors, environment={}), out, errors


def shown(found: EvaluateResult, about: EvaluationSubject = ABOUT, verdict: str = "clearly different") -> list[str]:
    shown_on, out, errors = output()
    show_evaluated(shown_on, about, found, verdict)
    assert not errors.getvalue()
    return out.getvalue().splitlines()


def cells(lines: list[str], name: str) -> list[str]:
    (line,) = (line for line in lines if line.startswith(name))
    return line.removeprefix(name).split()


def test_a_model_alone() -> None:
    lines = shown(ALONE, replace(ABOUT, reference=""))
    assert lines[:3] == [
        "model  m-Q4_0.gguf",
        "text   text.txt (sha256 0123456789ab), 3 of 534 chunks of 512 tokens",
        "",
    ]
    assert cells(lines, "perplexity") == ["14.66", "0.2932", "13.19", "to", "16.12"]
    assert cells(lines, "bits per byte") == ["0.9897"]
    assert lines[-1] == "Clearly different."
    assert not any("KL" in line or "reference" in line for line in lines)


def test_too_few_chunks_have_no_intervals_and_say_how_many_would_do() -> None:
    few = replace(ALONE, chunks=2, perplexity=Figure(14.657835, 0.2932))
    lines = shown(few, verdict="")
    assert cells(lines, "perplexity") == ["14.66", "0.2932"]
    assert lines[-1] == "Too few chunks for an interval: at least 3 (--chunks 3)."
    assert " to " not in "".join(lines)
    assert partial_figures(few) == "2 chunks, perplexity 14.66"
    (line,) = shown(replace(few, chunks_there=2), verdict="")[-1:]
    assert line == "Too few chunks for an interval: at least 3 (a longer --text: this one has 2)."


def test_a_model_beside_its_reference() -> None:
    lines = shown(COMPARED)
    assert "reference  m-F16.gguf" in lines
    assert cells(lines, "perplexity of the reference")[0] == "14.97"
    assert cells(lines, "ratio of both")[0] == "1.225"
    assert cells(lines, "KL divergence, mean") == ["0.2539", "0.005079", "0.2286", "to", "0.2793"]
    assert cells(lines, "  99 %")[0] == "1.272"
    assert cells(lines, "  maximum") == ["2.613"]
    assert cells(lines, "same likeliest token") == ["73.66", "%", "1.13", "%", "71.00", "%", "to", "76.00", "%"]


def test_long_texts() -> None:
    lines = shown(replace(COMPARED, by_position=STRETCHES, needles=NEEDLES))
    assert cells(lines, "512 to 1,024") == ["10.99", "9.891", "to", "12.09", "9.299", "0.2180", "77.50", "%"]
    assert cells(lines, "FACTS IN") == ["0", "%", "50", "%", "100", "%", "FOUND", "REFERENCE"]
    assert cells(lines, "1,024  ") == ["90%", "45%", "30%", "2", "of", "3", "3", "of", "3"]
    alone = shown(
        replace(
            ALONE,
            by_position=tuple(PositionRange(row.start, row.end, row.positions, row.perplexity) for row in STRETCHES),
            needles=tuple(Needle(row.n_tokens, row.depth, row.found, row.probability) for row in NEEDLES),
        ),
        replace(ABOUT, reference=""),
    )
    assert cells(alone, "FACTS IN") == ["0", "%", "50", "%", "100", "%", "FOUND"]
    assert not any("REFERENCE" in line or "KLD" in line for line in alone)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (14.6578, "14.66"),
        (1234.5, "1,234"),
        (0.000123456, "0.000123"),
        (1e-9, "0.000000"),
        (99.999, "100.00"),
    ],
)
def test_digits(value: float, text: str) -> None:
    assert digits(value) == text


def test_intervals_wider_than_their_figure_are_left_out_while_it_runs() -> None:
    assert partial_figures(ALONE) == "3 chunks, perplexity 14.66 ± 1.466"
    assert (
        partial_figures(replace(ALONE, chunks=1, perplexity=Figure(12.0, 3.0, 1.0, 90.0)))
        == "1 chunk, perplexity 12.00"
    )
    words = partial_figures(replace(COMPARED, needles=NEEDLES))
    assert words.endswith("KLD 0.2539 ± 0.02539, 4 of 6 facts found")


def test_lines_now_and_then() -> None:
    shown_on, out, errors = output()
    now = [0.0]
    with reading(shown_on, clock=lambda: now[0]) as show:
        for done in range(0, 1001, 10):
            now[0] = done / 20
            show(EvaluateUpdate(done, 1000, COMPARED if done == 600 else None))
    lines = errors.getvalue().splitlines()
    assert [share for line in lines for share in line.split(", ") if share.endswith("%")] == [
        "20%", "40%", "60%", "80%", "100%"
    ]  # fmt: skip
    assert lines[0] == "reading, 20%, 40 s left"
    assert "KLD 0.2539" in lines[3]
    assert not out.getvalue()


# ---- the command -----------------------------------------------------------------------------------


@pytest.fixture
def invoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command on a tiny file; what measures is replaced, and its arguments are kept."""
    model = gguf_writer.write(tmp_path / "m.gguf", gguf_writer.runnable_model())
    text = tmp_path / "text.txt"
    text.write_text("some text", encoding="utf-8")
    asked: dict[str, Any] = {}
    app = typer.Typer()
    app.callback()(lambda: None)
    app.command()(evaluate)

    def run(*arguments: str, measure: Any = None) -> Any:
        def measured(path: Path, **options: Any) -> EvaluateResult:
            asked.update(options, model=path)
            options["on_update"](EvaluateUpdate(512, 2048, COMPARED))
            return measure() if measure else COMPARED

        monkeypatch.setattr("llmrun.lab.cli.evaluate.measure", measured)
        done = CliRunner().invoke(app, ["evaluate", str(model), "--text", str(text), *arguments])
        return done, asked

    return run


def test_json(invoke: Any) -> None:
    done, asked = invoke("--json", "--chunks", "7", "--ctx", "2048", "--long", "--threads", "1")
    found = json.loads(done.stdout)
    assert (found["model"], found["text"], found["complete"]) == ("m.gguf", "text.txt", True)
    assert found["divergence"]["mean"]["value"] == DIVERGENCE.mean.value
    assert found["verdict"].startswith("much worse")
    assert (asked["chunks"], asked["n_ctx"], asked["long"], asked["preferences"].threads) == (7, 2048, True, 1)
    assert asked["text"].content == "some text"
    assert asked["reference"] is None


def test_all_chunks(invoke: Any) -> None:
    assert invoke("--chunks", "all")[1]["chunks"] > 1_000_000
    done, _ = invoke("--chunks", "some")
    assert isinstance(done.exception, UsageError)
    assert "--chunks some" in str(done.exception)


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_ctrl_c_leaves_what_is_known(invoke: Any, options: tuple[str, ...]) -> None:
    def stop() -> EvaluateResult:
        raise CancelledError("stopped by Ctrl-C")

    done, _ = invoke(*options, measure=stop)
    assert isinstance(done.exception, CancelledError)
    if options:
        assert json.loads(done.stdout)["complete"] is False
    else:
        assert cells(done.stdout.splitlines(), "perplexity  ")[0] == "14.66"
        assert "stopped: these are the figures so far" in done.stderr
