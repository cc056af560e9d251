"""The commands of a report card's measurements, without a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.gguf_writer import runnable_model, write

from llmrun.errors import LlmrunError
from llmrun.planning.plan import LoadPreferences
from llmrun.protocol.jobs.bench import Bench, BenchModel, BenchResult, Repetition
from llmrun.protocol.jobs.evaluate import Divergence, EvaluateResult, Figure
from llmrun.quantize.evaluate import EvaluatedText
from llmrun.quantize.report import local_measurements
from llmrun.quantize.report.local_measurements import LocalMeasurements, chunks_for
from llmrun.quantize.source import model_stem

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
def source(tmp_path: Path) -> Path:
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


def test_speed_is_measured_in_an_engine_of_its_own(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_measurements, "EngineClient", Engine)
    Engine.started = 0
    measures = LocalMeasurements(source)
    first, second = measures.time(source, lambda share: None), measures.time(source, lambda share: None)
    assert (first.prefill, first.decode, first.peak_memory) == (2000.0, 1000.0, 1032)
    assert second.peak_memory == 2032
    assert measures.machine().build_commit == "abc1234"


def test_quality_is_measured_beside_the_source(source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def evaluate(model: Path, **options: Any) -> EvaluateResult:
        asked.update(options, model=model)
        return EvaluateResult(3, 9, 512, 768, figure(21.0, 0.9), 1.0, divergence())

    monkeypatch.setattr(local_measurements, "evaluate", evaluate)
    text = EvaluatedText("text.txt", "Once upon a time")
    judged = LocalMeasurements(source, text=text, preferences=LoadPreferences(threads=3), chunks=5).judge(
        tmp_path / "q.gguf", lambda share: None
    )
    assert asked["reference"] == source
    assert asked["text"] == text
    assert (asked["preferences"], asked["chunks"]) == (LoadPreferences(threads=3), 5)
    assert judged.quality.kld == 0.03
    assert judged.quality.kld_error == pytest.approx(0.002)
    assert judged.quality.same_top_error == pytest.approx(0.01)
    assert judged.source.perplexity == 20.0
    assert (judged.text, judged.n_tokens) == ("text.txt", 1536)


def test_nothing_evaluated_is_an_error(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_measurements, "evaluate", lambda model, **options: EvaluateResult(0, 0, 512, 0))
    with pytest.raises(LlmrunError, match="nothing was evaluated"):
        LocalMeasurements(source).judge(source, lambda share: None)


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("Tiny-Model-F32.gguf", "Tiny-Model"),
        ("tiny.Q4_K_M.gguf", "tiny"),
        ("tiny.gguf", "tiny"),
        ("Tiny-BF16-00001-of-00002.gguf", "Tiny"),
    ],
)
def test_files_are_called_after_the_model(source: Path, name: str, stem: str) -> None:
    assert model_stem(source.with_name(name)) == stem
    assert LocalMeasurements(source, name="other").original().name == "other"


def test_slow_models_read_less() -> None:
    assert [chunks_for(prefill, 16) for prefill in (1000.0, 30.0, 1.0)] == [16, 7, 4]
    assert chunks_for(1.0, 2) == 2
