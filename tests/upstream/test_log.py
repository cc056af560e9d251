"""What is recognised in llama.cpp's log, against what the installed one really says of files that provoke it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.architectures import load
from support.gguf_writer import TensorSpec, runnable_model, runnable_tensors, write

from llmrun import _native
from llmrun.engine.jobs.quantize import run_quantize
from llmrun.errors import BadModelError, ResourceError, UsageError
from llmrun.gguf.imatrix import ImatrixEntry, ImatrixFile
from llmrun.gguf.reader import read_header
from llmrun.lab.convert.vocabulary import _NAMES
from llmrun.lab.quantize.calibration import write_imatrix
from llmrun.lab.quantize.types import FILE_TYPES, NEED_IMATRIX
from llmrun.protocol.jobs.quantize import Quantize, Quantized
from llmrun.protocol.loading import Load
from llmrun.runner.client import EngineClient

pytestmark = [pytest.mark.upstream, pytest.mark.usefixtures("package_on_path")]

WIDTH, EVEN, UNEVEN = 256, 512, 288  # rows of 288 don't divide into K-quants' blocks
NARROW = "blk.0.ffn_down.weight"
UNSEEN = "blk.0.attn_q.weight"  # the importance matrix has nothing on it


def wide_model(path: Path, feed_forward: int) -> Path:
    """A model in F32 that llama.cpp quantizes in no time."""
    wider = {32: WIDTH, 16: WIDTH // 2, 64: feed_forward}
    shapes = {tensor.name: tuple(wider.get(n, n) for n in tensor.shape) for tensor in runnable_tensors()}
    tensors = [TensorSpec(name, shape, 0, 4 * math.prod(shape)) for name, shape in shapes.items()]
    lengths = {"embedding_length": WIDTH, "feed_forward_length": feed_forward, "rope.dimension_count": WIDTH // 2}
    return write(path, runnable_model({f"llama.{key}": length for key, length in lengths.items()}, tensors))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model of which one matrix has rows that don't divide."""
    return wide_model(tmp_path / "source.gguf", UNEVEN)


def quantize(source: Path, target: Path | str, kind: str, **more: Any) -> Quantized:
    command = Quantize(str(source), str(target), FILE_TYPES[kind], **more)
    return run_quantize(command, lambda update: None, _native.CancelFlag())


def test_types_that_need_an_importance_matrix(tmp_path: Path) -> None:
    source = wide_model(tmp_path / "even.gguf", EVEN)
    found = {kind for kind in FILE_TYPES if quantize(source, "", kind).needs_imatrix}
    assert found == NEED_IMATRIX


@pytest.mark.parametrize("written", [False, True], ids=["planned", "written"])
def test_what_is_said_while_quantizing(source: Path, tmp_path: Path, written: bool) -> None:
    target = tmp_path / "out.gguf"
    matrices = [tensor for tensor in read_header(source).tensors if ".weight" in tensor.name and len(tensor.shape) > 1]
    entries = {
        tensor.name: ImatrixEntry(np.ones((1, tensor.shape[0]), np.float32), np.ones(1, np.float32))
        for tensor in matrices
        if tensor.name not in (UNSEEN, "token_embd.weight")
    }
    write_imatrix(tmp_path / "matrix.gguf", ImatrixFile(entries, ("noise",), 1, 512))
    said = quantize(source, target if written else "", "Q4_K_M", imatrix=str(tmp_path / "matrix.gguf"))
    assert set(said.types) == {tensor.name for tensor in read_header(source).tensors}
    assert said.types["blk.0.attn_k.weight"] == "Q4_K"
    assert said.types["output_norm.weight"] == "F32"
    assert said.wanted.keys() == {NARROW}
    assert said.types[NARROW] != said.wanted[NARROW] in ("Q4_K", "Q6_K")
    if written:
        assert UNSEEN in said.unimportant
        assert {tensor.name: tensor.type for tensor in read_header(target).tensors} == said.types


def test_a_pattern_and_a_disk_that_it_cannot_use(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--tensor-type pattern"):
        quantize(source, tmp_path / "out.gguf", "Q8_0", overrides=(("(", 8),))
    if Path("/dev/full").exists():
        with pytest.raises(ResourceError, match="can't be written"):
            quantize(source, "/dev/full", "Q8_0")


# What is wrong with a file -> its bytes, and what the reason that llmrun tells has to name.
BAD_FILES: dict[str, tuple[Callable[[], bytes], str]] = {
    "an unknown architecture": (lambda: runnable_model({"general.architecture": "nonsense"}), "nonsense"),
    "a missing key": (lambda: runnable_model({"llama.block_count": None}), "llama.block_count"),
    "a missing tensor": (lambda: runnable_model(tensors=runnable_tensors()[:-1]), NARROW),
    "a tensor of another shape": (
        lambda: runnable_model(tensors=[*runnable_tensors()[:-1], TensorSpec(NARROW, (32, 32), 0, 4096)]),
        NARROW,
    ),
    "an unknown tokenizer": (lambda: runnable_model({"tokenizer.ggml.model": "nonsense"}), "nonsense"),
    "too short": (lambda: runnable_model()[:-5000], "not within"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_FILES)
def test_the_line_that_says_why_is_found(tmp_path: Path, name: str) -> None:
    content, words = BAD_FILES[name]
    runner = EngineClient()
    try:
        with pytest.raises(BadModelError) as caught:
            runner.load(Load(str(write(tmp_path / "bad.gguf", content())), n_ctx=64))
    finally:
        runner.close()
    assert words in caught.value.why


def loads(path: Path, model: str, pre: str) -> str:
    """What llama.cpp holds against a vocabulary with these names; "" for nothing."""
    changes: dict[str, Any] = {f"tokenizer.ggml.{key}": name for key, name in (("model", model), ("pre", pre))}
    changes["tokenizer.ggml.merges"] = ["t 1"]
    loaded, log = load(write(path, runnable_model(changes)), only_vocabulary=True)
    return "" if loaded else log


def test_tokenizers(tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.gguf"
    assert "unknown tokenizer" in loads(path, "nonsense", "default")


def test_pre_tokenizers(tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.gguf"
    assert {name for name in _NAMES.values() if loads(path, "gpt2", name)} == set()
    assert "unknown pre-tokenizer type" in loads(path, "gpt2", "nonsense")
