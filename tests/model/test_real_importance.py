"""The importance matrix of the real model: llama-imatrix's own sums, and a text that the model writes itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmrun.protocol.jobs.importance import ImportanceUpdate
from llmrun.quantize.calibration import collect
from llmrun.quantize.imatrix_file import read_imatrix
from llmrun.quantize.prompts import OPENINGS, QUESTIONS

TEXT = "\n".join(f"Number {i} comes before {i + 1}, and {i * i} is its square." for i in range(60)) + "\n"
# What llama-imatrix -b 512 -ub 512 finds on it: sum of all columns, the largest, its place.
GOLDEN = {
    "blk.0.attn_q.weight": (1157.332275390625, 103.4559326171875, 481),
    "blk.14.attn_output.weight": (131317.28125, 11120.646484375, 214),
    "blk.29.ffn_down.weight": (16360025.0, 1474233.0, 675),
    "blk.29.ffn_up.weight": (94933.4296875, 57721.890625, 17),
}


def test_sums_are_those_of_llama_imatrix(model_path: Path, tmp_path: Path) -> None:
    text = tmp_path / "numbers.txt"
    text.write_text(TEXT, encoding="utf-8")
    collected = collect(model_path, tmp_path / "im.gguf", text=text, threads=2)
    assert (collected.n_tensors, collected.n_tokens, collected.written_tokens) == (210, 1024, 0)
    found = read_imatrix(tmp_path / "im.gguf")
    assert (found.n_chunks, found.chunk_size) == (2, 512)
    for name, (total, largest, place) in GOLDEN.items():
        sums = found.entries[name].sums[0]
        assert found.entries[name].counts.tolist() == [1024]
        # Equal to six digits on the processor that the figures come from; kernels of others round in other places.
        assert float(sums.sum(dtype="f8")) == pytest.approx(total, rel=5e-3)
        assert float(sums.max()) == pytest.approx(largest, rel=5e-3)
        assert int(sums.argmax()) == place


def test_it_writes_its_own_text(model_path: Path, tmp_path: Path) -> None:
    updates: list[ImportanceUpdate] = []
    target = tmp_path / "im.gguf"
    collected = collect(model_path, target, text=None, threads=2, n_tokens=1024, on_update=updates.append)
    assert collected.n_tokens >= 1024
    assert collected.written_tokens >= 1024
    assert not collected.notes
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
