"""`llmrun evaluate --lora`, with real engines. The judge is the model with its adapter merged into it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.peft_writer import LINEAR, AdaptedModel, adapted_model
from typer.testing import CliRunner

from llmrun.cli.app import app

WORDS = "the storm follows the river near the sea and the clock repairs a shadow in the old town "

pytestmark = pytest.mark.usefixtures("package_on_path")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> AdaptedModel:
    return adapted_model(tmp_path_factory.mktemp("adapted"), "LlamaForCausalLM", *LINEAR)


@pytest.fixture
def llmrun(own_engines: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setenv("LLMRUN_HOME", str(tmp_path / "home"))
    return lambda *arguments: json.loads(CliRunner().invoke(app, [*map(str, arguments), "--json"]).stdout)


def test_a_model_is_evaluated_with_its_adapter(llmrun: Callable[..., Any], model: AdaptedModel, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(WORDS * 20)
    sample = ("--text", tmp_path / "text.txt", "--ctx", 128, "--chunks", 2)
    plain, merged = (llmrun("evaluate", path, *sample)["perplexity"]["value"] for path in (model.base, model.merged))
    found = llmrun("evaluate", model.base, *sample, "--lora", model.adapter)
    assert found["perplexity"]["value"] == pytest.approx(merged, rel=1e-3)
    assert abs(plain - merged) > 0.01 * merged, "the adapter changes something"
    assert "base.gguf + style" in found["model"]


def test_an_adapter_is_compared_with_its_model(llmrun: Callable[..., Any], model: AdaptedModel, tmp_path: Path) -> None:
    """--lora is not for the reference."""
    (tmp_path / "text.txt").write_text(WORDS * 20)
    sample = ("--text", tmp_path / "text.txt", "--ctx", 128, "--chunks", 2, "--reference", model.base)
    assert llmrun("evaluate", model.base, *sample)["divergence"]["mean"]["value"] == pytest.approx(0.0, abs=1e-5)
    adapted = llmrun("evaluate", model.base, *sample, "--lora", model.adapter)["divergence"]["mean"]["value"]
    merged = llmrun("evaluate", model.merged, *sample)["divergence"]["mean"]["value"]
    assert adapted == pytest.approx(merged, rel=0.02)
    assert adapted > 1e-3
