"""A report card of the real model: small, but made and measured with llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmrun.lab.quantize.report import LocalMeasurements, make_report
from llmrun.lab.views.report import json_text, write

pytestmark = pytest.mark.model


@pytest.mark.slow
def test_a_type_is_made_measured_and_judged(model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    measures = LocalMeasurements(model_path, name="smol", chunks=1)
    card = make_report(measures, ["Q4_0", "Q5_1"], rounds=1, keep=tmp_path / "kept")
    source, failed, made = card.rows[0], card.rows[-1], card.rows[1]
    assert source.is_source
    assert source.type == "Q4_1"
    assert "larger" in failed.failure  # Q5_1 of a file in 4 bits makes no sense
    assert made.n_bytes == (tmp_path / "kept" / "smol-Q4_0.gguf").stat().st_size
    assert made.bits_per_weight == pytest.approx(5.35, abs=0.3)
    assert made.peak_memory is not None
    assert made.peak_memory > made.n_bytes / 2
    assert (made.decode.median or 0) > 0
    assert (made.prefill.median or 0) > 0
    quality = made.quality
    assert quality.kld is not None
    assert 0.005 < quality.kld < 2.0
    assert 0.3 < (quality.same_top or 0) < 1.0
    assert (source.quality.perplexity or 0) > 1
    assert card.method.n_tokens == 512
    assert json.loads(json_text(card))["machine"]["build_commit"]
    write(card, tmp_path / "card.html")
    assert "smol, quantized" in (tmp_path / "card.html").read_text(encoding="utf-8")
