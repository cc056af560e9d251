"""Shares of layers, by the names of their tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.gguf_writer import TensorSpec, runnable_model, runnable_tensors, write

from llmrun.gguf.header import Header
from llmrun.gguf.reader import read_header


def read(folder: Path, *more: TensorSpec) -> Header:
    return read_header(write(folder / "tiny.gguf", runnable_model(tensors=[*runnable_tensors(), *more])))


def test_embeddings_that_are_also_the_output_matrix_are_copied(tmp_path: Path) -> None:
    header = read(tmp_path)
    sizes = {tensor.name: tensor.n_bytes for tensor in header.tensors}
    block, output = (round(share * header.weight_bytes) for share in header.layer_shares.weights)
    assert block == sum(size for name, size in sizes.items() if name.startswith("blk.0."))
    assert output == sizes["token_embd.weight"] + sizes["output_norm.weight"]
    assert header.layer_shares.copied == pytest.approx(sizes["token_embd.weight"] / header.weight_bytes)
    assert header.cache_shares(512, ubatch=512) == (1.0,)
    assert header.layer_shares.largest == max(sizes["blk.0.ffn_down.weight"] / header.weight_bytes, 0)


def test_embeddings_beside_an_output_matrix_stay_in_ram(tmp_path: Path) -> None:
    header = read(tmp_path, TensorSpec("output.weight", (32, 261), 0, 4 * 32 * 261))
    assert header.layer_shares.copied == 0
    output = round(header.layer_shares.weights[-1] * header.weight_bytes)
    assert output == 4 * 32 * 261 + 4 * 32


def test_a_file_that_states_too_many_layers_takes_no_memory(tmp_path: Path) -> None:
    header = read_header(write(tmp_path / "tiny.gguf", runnable_model({"llama.block_count": 1 << 30})))
    assert len(header.layer_shares.weights) == 513


@pytest.mark.parametrize(
    ("changes", "width"),
    [({}, 64), ({"llama.expert_feed_forward_length": 48, "llama.expert_used_count": 4}, 192)],
)
def test_the_widest_feed_forward_part(tmp_path: Path, changes: dict[str, int], width: int) -> None:
    header = read_header(write(tmp_path / "tiny.gguf", runnable_model(changes)))
    assert header.most_feed_forward == width
