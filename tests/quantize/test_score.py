"""Load settings of `llmrun score`; tests/engine/jobs/test_score.py tests the computation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import gguf_writer

from llmrun.gguf.reader import read_header
from llmrun.planning.hardware import probe
from llmrun.planning.plan import LoadPreferences, make_plan
from llmrun.protocol.jobs.score import ScoreText
from llmrun.quantize import score as module


@pytest.mark.parametrize("flags", [("avx2",), ("neon",)])
@pytest.mark.parametrize("preferences", [LoadPreferences(), LoadPreferences(flash_attention="on")])
def test_a_text_is_scored_with_the_attention_that_run_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], preferences: LoadPreferences
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_writer.tiny_model({"llama.context_length": 4096}))
    hardware = replace(probe(), cpu_flags=flags, memory_total=32 << 30, memory_available=16 << 30, gpus=())
    commands: list[ScoreText] = []

    class Engine:
        def do(self, kind: Any, command: ScoreText, on_update: Any) -> None:
            commands.append(command)

        def close(self) -> None: ...

    monkeypatch.setattr(module, "this_machine", lambda: hardware)
    monkeypatch.setattr(module, "EngineClient", Engine)
    module.score(path, "Some text that is read.", n_ctx=256, preferences=preferences)
    (command,) = commands
    assert command.n_ctx < 4096
    assert command.flash_attention == make_plan(read_header(path), hardware, preferences).flash_attention
