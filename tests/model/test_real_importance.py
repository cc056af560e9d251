"""The importance matrix of the real model: sums beside llama.cpp's own, and a text that the model writes itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support import plain_llama

from llmrun.gguf.imatrix import read_imatrix
from llmrun.lab.quantize.calibration import OPENINGS, QUESTIONS, collect
from llmrun.protocol.jobs.importance import ImportanceUpdate

TEXT = "\n".join(f"Number {i} comes before {i + 1}, and {i * i} is its square." for i in range(33)) + "\n"
NAMES = ("blk.0.attn_q.weight", "blk.14.attn_output.weight", "blk.29.ffn_down.weight", "blk.29.ffn_up.weight")


@pytest.mark.slow
def test_sums_are_those_of_llama_imatrix(model_path: Path, tmp_path: Path) -> None:
    text = tmp_path / "numbers.txt"
    text.write_text(TEXT, encoding="utf-8")
    collected, _ = collect(model_path, tmp_path / "im.gguf", text=text, threads=2)
    assert (len(collected.tensors), collected.n_tokens, collected.written_tokens) == (210, 512, 0)
    found = read_imatrix(tmp_path / "im.gguf")
    assert (found.n_chunks, found.chunk_size) == (1, 512)
    for name, expected in plain_llama.column_sums(model_path, TEXT, 512, 1, NAMES).items():
        assert found.entries[name].counts.tolist() == [512]
        assert found.entries[name].sums[0] == pytest.approx(np.array(expected), rel=1e-5)


@pytest.mark.slow
def test_it_writes_its_own_text(model_path: Path, tmp_path: Path) -> None:
    updates: list[ImportanceUpdate] = []
    target = tmp_path / "im.gguf"
    collected, notes = collect(model_path, target, text=None, threads=2, n_tokens=1024, on_update=updates.append)
    assert collected.n_tokens >= 1024
    assert collected.written_tokens >= 1024
    assert not notes
    text = collected.text
    assert any(question in text for question in QUESTIONS)
    assert any(opening in text for opening in OPENINGS)
    assert len(text) > 2000
    assert "<|im_end|>" not in text
    phases = [update.phase for update in updates]
    assert sorted(set(phases), key=phases.index) == ["loading", "writing", "reading"]
    shares = [update.share for update in updates if update.phase == "writing"]
    assert shares == sorted(shares)
    assert len(read_imatrix(target).entries) == 210
