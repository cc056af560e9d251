"""Load settings of `llmrun score`; tests/engine/jobs/test_scores.py tests the computation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import gguf_writer

from llmrun.config import load_settings
from llmrun.gguf.reader import read_header
from llmrun.lab.quantize import evaluate as module
from llmrun.model import loading
from llmrun.models.registry import ModelSpec
from llmrun.planning.hardware import probe
from llmrun.planning.measurements import remember_attention
from llmrun.planning.preferences import LoadPreferences
from llmrun.protocol.jobs.evaluate import ScoreText
from llmrun.protocol.speculation import AttentionTime


@pytest.mark.parametrize("faster", ["on", "off", ""])
@pytest.mark.parametrize("preferences", [LoadPreferences(), LoadPreferences(flash_attention="on")])
def test_a_text_is_scored_with_the_attention_that_run_has(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faster: str, preferences: LoadPreferences
) -> None:
    monkeypatch.setenv("LLMRUN_KERNELS", "ggml")  # with ours, flash attention is never the slower one
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_writer.tiny_model({"llama.context_length": 4096}))
    hardware = replace(probe(), memory_total=32 << 30, memory_available=16 << 30, gpus=())
    if faster:
        times = AttentionTime(0, *((1.0, 2.0) if faster == "on" else (2.0, 1.0)))
        remember_attention((times,), read_header(path), hardware, load_settings().state_dir)
    commands: list[ScoreText] = []

    class Engine:
        def do(self, kind: Any, command: ScoreText, on_update: Any) -> None:
            commands.append(command)

        def close(self) -> None: ...

    monkeypatch.setattr(module, "this_machine", lambda: hardware)
    monkeypatch.setattr(loading, "this_machine", lambda workers: hardware)
    monkeypatch.setattr(module, "EngineClient", Engine)
    module.score(path, "Some text that is read.", n_ctx=256, preferences=preferences)
    (command,) = commands
    assert command.n_ctx < 4096
    run = loading.prepare(ModelSpec("tiny", path=path), path, preferences).load
    expected = (
        preferences.attention["flash_attention"] if faster != "off" or preferences.flash_attention == "on" else "off"
    )
    assert command.flash_attention == run.flash_attention == expected
