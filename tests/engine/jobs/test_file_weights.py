"""The weights of a file in chunks, which a cancel ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.gguf_writer import runnable_model, write

from llmrun import _native
from llmrun.engine.jobs import file_weights
from llmrun.engine.jobs.file_weights import FileWeights
from llmrun.engine.llama.base import Aborted
from llmrun.gguf.reader import read_header


def test_a_cancel_ends_the_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_weights, "_MAX_ELEMENTS", 1)  # of a row each
    flag = _native.CancelFlag()
    weights = FileWeights(read_header(write(tmp_path / "tiny.gguf", runnable_model())), 1, flag)
    matrix = weights.find("token_embd.weight")
    assert matrix is not None
    chunks = weights.chunks(matrix, 1)
    assert [next(chunks)[0] for _ in range(2)] == [0, 1]
    flag.set()
    with pytest.raises(Aborted):
        next(chunks)
