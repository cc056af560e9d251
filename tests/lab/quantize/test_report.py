"""Report cards: the order of measurements, interruptions, failures, and the verdicts."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.gguf_writer import runnable_model, write
from support.report_fake import FIGURES, FakeMeasures, card, row

from llmrun.errors import CancelledError, DiskFullError, LlmrunError, TerminatedError, UsageError
from llmrun.lab.quantize import report
from llmrun.lab.quantize.card import (
    CardRow,
    CardSpeed,
    Quality,
    beaten_by,
    compare,
    contenders,
    front,
    loss_in_words,
    recommended,
    to_json,
    verdict,
    verdicts,
)
from llmrun.lab.quantize.evaluate import EvaluatedText
from llmrun.lab.quantize.report import (
    Card,
    LocalMeasurements,
    ReportStep,
    ReportUpdate,
    Timetable,
    chunks_for,
    make_report,
)
from llmrun.lab.quantize.request import model_stem
from llmrun.planning.preferences import LoadPreferences
from llmrun.protocol.jobs.bench import Bench, BenchModel, BenchResult, Repetition
from llmrun.protocol.jobs.evaluate import Divergence, EvaluateResult, Figure

KINDS = ["Q8_0", "Q4_K_M", "Q4_0"]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF")
    return path


def made(source: Path, measures: FakeMeasures, **options: object) -> Card:
    measures.source = source
    return make_report(measures, KINDS, **({"rounds": 3} | options))  # type: ignore[arg-type]


# ---- making ----------------------------------------------------------------------------------------


def test_every_type_is_complete_before_the_next_begins_and_then_all_take_turns(source: Path) -> None:
    measures = FakeMeasures()
    found = made(source, measures)
    done = [call for call in measures.calls if call[0] != "expect"]
    turns = [("time", kind) for kind in ("F16", *KINDS)]
    first = [(what, kind) for kind in KINDS for what in ("make", "judge", "time")]
    assert done == [("time", "F16"), *first, *turns, *turns]
    assert [row.type for row in found.rows] == ["F16", "Q8_0", "Q4_K_M", "Q4_0"]
    assert all(len(row.decode.samples) == 3 and row.peak_memory for row in found.rows)
    assert found.source_row is not None
    assert found.source_row.quality.perplexity == 21.34
    assert found.is_complete
    assert found.method.n_tokens == 8192


def test_nothing_stays_on_the_disk(source: Path) -> None:
    made(source, FakeMeasures())
    assert list(source.parent.iterdir()) == [source]


def test_kept_files_stay_and_replace_nothing(source: Path, tmp_path: Path) -> None:
    keep = tmp_path / "kept" / "here"
    found = made(source, FakeMeasures(), keep=keep)
    assert {path.name for path in keep.iterdir()} == {f"tiny-{kind}.gguf" for kind in KINDS}
    assert [Path(row.path).name for row in found.rows if not row.is_source] == [f"tiny-{kind}.gguf" for kind in KINDS]
    with pytest.raises(UsageError, match="there already"):
        made(source, FakeMeasures(), keep=keep)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, lambda: CancelledError("stopped")])
def test_ctrl_c_keeps_what_was_measured(source: Path, stop: Callable[[], BaseException]) -> None:
    def on_call(what: str, kind: str) -> None:
        if (what, kind) == ("judge", "Q4_K_M"):
            raise stop()

    found = made(source, FakeMeasures(on_call))
    rows = {row.type: row for row in found.rows}
    assert not found.is_complete
    assert rows["Q8_0"].quality.kld == 0.0014
    assert len(rows["Q8_0"].decode.samples) == 1
    assert rows["Q4_K_M"].n_bytes
    assert rows["Q4_K_M"].quality.kld is None
    assert rows["Q4_0"].n_bytes is None
    assert list(source.parent.iterdir()) == [source]
    assert "not measured to the end" in verdicts(found.rows)


def test_termination_is_no_ctrl_c(source: Path) -> None:
    def on_call(what: str, kind: str) -> None:
        if what == "judge":
            raise TerminatedError("told to end")

    with pytest.raises(TerminatedError):
        made(source, FakeMeasures(on_call))
    assert list(source.parent.iterdir()) == [source]


def test_a_type_that_fails_has_its_reason_and_the_others_go_on(source: Path) -> None:
    def on_call(what: str, kind: str) -> None:
        if (what, kind) == ("make", "Q4_K_M"):
            raise LlmrunError("llama.cpp does not like it")

    measures = FakeMeasures(on_call, source)
    updates: list[ReportUpdate] = []
    found = make_report(measures, [*KINDS, "IQ1_M"], rounds=2, on_update=updates.append)
    failures = {row.type: row.failure for row in found.rows if row.failure}
    assert failures == {"Q4_K_M": "llama.cpp does not like it", "IQ1_M": "IQ1_M needs an importance matrix"}
    assert ("judge", "Q4_K_M") not in measures.calls
    assert [row.type for row in found.rows][:3] == ["F16", "Q8_0", "Q4_0"]
    assert updates[-1].share == pytest.approx(1.0)
    assert verdict(found.rows[-1], found.rows).startswith("not measured: ")


def test_a_report_without_any_type_that_could_be_measured_is_an_error(source: Path) -> None:
    def on_call(what: str, kind: str) -> None:
        if what == "judge":
            raise UsageError("the text is too short")

    measures = FakeMeasures(on_call)
    with pytest.raises(UsageError, match="the text is too short"):
        made(source, measures)
    assert list(source.parent.iterdir()) == [source]


def test_without_an_interval_no_type_is_more_exact_than_another() -> None:
    one, other = row("Q8_0", quality=Quality(kld=0.001)), row("Q4_0", quality=Quality(kld=0.5))
    assert not compare(one, other).exacter
    sure = [replace(each, quality=replace(each.quality, kld_error=0.0001)) for each in (one, other)]
    assert compare(*sure).exacter


def test_a_source_that_fails_ends_it(source: Path) -> None:
    def on_call(what: str, kind: str) -> None:
        if (what, kind) == ("time", "F16"):
            raise LlmrunError("the source is broken")

    with pytest.raises(LlmrunError, match="the source is broken"):
        made(source, FakeMeasures(on_call))


def test_nothing_to_do_is_refused(source: Path) -> None:
    with pytest.raises(UsageError, match="at least one type"):
        make_report(FakeMeasures(), [])
    with pytest.raises(UsageError, match="importance matrix"):
        make_report(FakeMeasures(), ["IQ1_M", "IQ1_S"])


def test_progress_only_grows_and_says_what_is_done(source: Path) -> None:
    updates: list[ReportUpdate] = []
    made(source, FakeMeasures(), on_update=updates.append)
    shares = [update.share for update in updates]
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1.0)
    assert updates[-1].seconds_left == 0.0
    assert {update.doing for update in updates} == {"quantizing", "judging", "timing"}
    assert {update.type for update in updates} == {"F16", *KINDS}


def test_a_full_disk_is_reported_before_anything_is_measured(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "free_bytes", lambda place: 1_000_000)
    measures = FakeMeasures()
    with pytest.raises(DiskFullError, match="too full"):
        made(source, measures)
    assert {what for what, _ in measures.calls} == {"expect"}


def test_leftovers_of_killed_processes_are_removed_but_not_used_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    dead = tmp_path / ".llmrun-report-dead"
    dead.mkdir()
    (dead / ".lock").touch()
    (dead / "large.gguf").touch()
    with report.working_folder(None, 10) as mine:
        assert not dead.exists()
        with report.working_folder(None, 10):
            assert mine.is_dir()
    assert not list(tmp_path.iterdir())


# ---- how long it takes -----------------------------------------------------------------------------


def test_a_timetable_learns_from_what_is_done() -> None:
    table = Timetable(
        [ReportStep("timing", "A", 1.0), ReportStep("judging", "A", 10.0), ReportStep("timing", "B", 1.0)]
    )
    assert table.seconds_left() is None
    table.finish(2.0)
    assert table.seconds_left() == pytest.approx(22.0)
    table.finish(50.0)
    assert table.seconds_left() == pytest.approx(2.0)
    assert table.share_done() == pytest.approx(52 / 54)
    table.drop("B")
    assert table.seconds_left() == 0.0
    assert table.share_done() == 1.0


def test_the_first_step_tells_by_its_own_pace() -> None:
    table = Timetable([ReportStep("timing", "A", 1.0)])
    assert table.seconds_left(0.25, 10.0) == pytest.approx(30.0)


# ---- verdicts --------------------------------------------------------------------------------------


def test_a_type_that_is_worse_at_everything_is_named() -> None:
    rows = card().rows
    by_type = dict(zip((row.type for row in rows), verdicts(rows), strict=True))
    assert by_type["F16"] == "the source of the others"
    assert by_type["Q4_1"] == "beaten by IQ4_NL, which is smaller, faster and more exact; the loss is visible"
    assert by_type["Q8_0"] == "closest to the source; no loss to speak of"
    assert by_type["Q4_K_M"] == "recommended, most exact 4-bit type; a small loss"
    assert by_type["Q4_0"] == "fastest here, smallest; the loss is visible"


def test_noise_beats_no_type() -> None:
    one = row("Q4_0", decode=CardSpeed((100.0, 130.0, 90.0)), quality=Quality(kld=0.05, kld_error=0.01))
    other = row(
        "IQ4_NL",
        n_bytes=91_700_000,
        decode=CardSpeed((140.0, 110.0, 110.0)),
        quality=Quality(kld=0.053, kld_error=0.01),
    )
    assert beaten_by(one, [one, other]) is None
    assert beaten_by(other, [one, other]) is None
    assert contenders([one, other]) == [one, other]


def test_types_do_not_beat_each_other_in_a_circle() -> None:
    rows = card().rows
    for one in rows:
        better = beaten_by(one, rows)
        assert better is None or beaten_by(better[0], [one, better[0]]) is None


def test_the_recommended_type_loses_little_and_is_fast() -> None:
    rows = card().rows
    best = recommended(rows)
    assert best is not None
    assert best.type == "Q4_K_M"
    lossy = [
        row(kind, quality=Quality(kld=kld, kld_error=0.01))
        for kind, kld in (("Q4_0", 0.9), ("IQ4_NL", 0.7), ("Q8_0", 0.8))
    ]
    best = recommended(lossy)
    assert best is not None
    assert best.type == "IQ4_NL"  # as little as possible
    assert verdict(best, lossy) == "loses least, closest to the source; broken: it answers differently"
    assert recommended([row("F16")]) is None


def test_any_card_has_its_verdicts() -> None:
    draw = random.Random(11)
    for _ in range(300):
        rows = [row("F16")]
        for number in range(draw.randrange(6)):
            decode = CardSpeed(tuple(draw.uniform(50, 60) for _ in range(draw.randrange(5))))
            quality = Quality(kld=draw.choice([None, 0.0, draw.uniform(0, 0.3)]), kld_error=draw.choice([None, 0.01]))
            n_bytes = draw.choice([None, 90, 91, 100])
            rows.append(row("Q4_0", type=f"Q{number}_0", n_bytes=n_bytes, decode=decode, quality=quality))
        best = recommended(rows)
        measured = [one for one in rows[1:] if one.n_bytes is not None and one.quality.kld is not None]
        assert (best is None) == (not measured)
        assert best is None or best in measured
        assert all(verdicts(rows))
        front(rows)


def test_losses_in_words_get_worse() -> None:
    said = [loss_in_words(kld) for kld in (0.0, 0.01, 0.05, 0.1, 0.5, 3.0)]
    assert len(set(said)) == len(said)
    assert said[0] == "no loss to speak of"
    assert said[-1].startswith("broken")


def test_the_front_is_smaller_or_more_exact() -> None:
    assert [row.type for row in front(card().rows)] == ["Q4_0", "IQ4_NL", "Q4_K_M", "Q5_K_M", "Q8_0", "F16"]


def test_json_has_units_and_nulls() -> None:
    partial = card(row("F16"), row("Q4_0", decode=CardSpeed(), peak_memory=None), is_complete=False)
    data = to_json(partial, verdicts(partial.rows), "Q4_0")
    assert data["types"][1]["decode_tokens_per_second"] is None
    assert data["types"][1]["peak_memory_bytes"] is None
    assert data["types"][1]["n_bytes"] == FIGURES["Q4_0"][0]
    assert data["types"][1]["same_top_percent"] == pytest.approx(83.8)
    assert data["is_complete"] is False
    assert data["started"] == "2025-11-21T10:00:00Z"


# ---- the commands of a report card's measurements, without a model


MODEL = BenchModel("llama 1M F32", 1000, 500, 1, 128, "abc1234", "0.1", "CPU", "Testium", "")


def figure(value: float, half: float) -> Figure:
    return Figure(value, half / 2, value - half, value + half)


def divergence() -> Divergence:
    some = figure(0.5, 0.1)
    return Divergence(
        figure(0.03, 0.002), some, some, some, some, some, 1.0, figure(0.9, 0.01), some, some, some, some,
        figure(20.0, 0.8), 0.99,
    )  # fmt: skip


@pytest.fixture
def source_file(tmp_path: Path) -> Path:
    return write(tmp_path / "Tiny-Model-F32.gguf", runnable_model())


class Engine:
    """A fake engine: 1 ms per token, half of that in prefill; a later engine takes twice the memory."""

    started = 0

    def __init__(self) -> None:
        Engine.started += 1

    def do(self, kind: Any, command: Bench) -> BenchResult:
        test = command.test
        ns = test.n_prompt * 500_000 + test.n_gen * 1_000_000
        return BenchResult(MODEL, (Repetition(ns),), 5, 1000 * Engine.started + test.n_gen)

    def close(self) -> None:
        pass


def test_speed_is_measured_in_an_engine_of_its_own(source_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "EngineClient", Engine)
    Engine.started = 0
    measures = LocalMeasurements(source_file)
    first = measures.time(CardRow("F32"), source_file, lambda share: None)
    assert (first.prefill.samples, first.decode.samples, first.peak_memory) == ((2000.0,), (1000.0,), 1032)
    second = measures.time(first, source_file, lambda share: None)
    assert (second.prefill.samples, second.peak_memory) == ((2000.0, 2000.0), 2032)
    assert measures.machine().build_commit == "abc1234"


def test_quality_is_measured_beside_the_source(
    source_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: dict[str, Any] = {}

    def evaluate(model: Path, **options: Any) -> EvaluateResult:
        asked.update(options, model=model)
        return EvaluateResult(3, 9, 512, 768, figure(21.0, 0.9), 1.0, divergence())

    monkeypatch.setattr(report, "evaluate", evaluate)
    text = EvaluatedText("text.txt", "Once upon a time")
    measures = LocalMeasurements(source_file, text=text, preferences=LoadPreferences(threads=3), chunks=5)
    judged, of_source = measures.judge(CardRow("Q4_0"), tmp_path / "q.gguf", lambda share: None)
    assert asked["reference"] == source_file
    assert asked["text"] == text
    assert (asked["preferences"], asked["chunks"]) == (LoadPreferences(threads=3), 5)
    assert judged.quality.kld == 0.03
    assert judged.quality.kld_error == pytest.approx(0.002)
    assert judged.quality.same_top_error == pytest.approx(0.01)
    assert of_source.perplexity == 20.0
    assert (measures.method.text, measures.method.n_tokens) == ("text.txt", 1536)


def test_nothing_evaluated_is_an_error(source_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "evaluate", lambda model, **options: EvaluateResult(0, 0, 512, 0))
    with pytest.raises(LlmrunError, match="nothing was evaluated"):
        LocalMeasurements(source_file).judge(CardRow("F32"), source_file, lambda share: None)


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("Tiny-Model-F32.gguf", "Tiny-Model"),
        ("tiny.Q4_K_M.gguf", "tiny"),
        ("tiny.gguf", "tiny"),
        ("Tiny-BF16-00001-of-00002.gguf", "Tiny"),
    ],
)
def test_files_are_called_after_the_model(source_file: Path, name: str, stem: str) -> None:
    assert model_stem(source_file.with_name(name)) == stem
    assert LocalMeasurements(source_file, name="other").name == "other"


def test_slow_models_read_less() -> None:
    assert [chunks_for(prefill, 16) for prefill in (1000.0, 30.0, 1.0)] == [16, 7, 4]
    assert chunks_for(1.0, 2) == 2
