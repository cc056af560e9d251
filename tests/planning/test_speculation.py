"""What may be wished of drafts, and what a model allows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.gguf_writer import TensorSpec, tiny_model, write

from llmrun.errors import UsageError
from llmrun.gguf.reader import read_header
from llmrun.planning.speculation import AUTO, OFF, DraftPolicy, read_speculate
from llmrun.protocol.loading import Load
from llmrun.protocol.speculation import Speculation

LOAD = Load("/tiny.gguf", 512, threads=4)
HYBRID = {
    "general.architecture": "qwen35",
    "qwen35.block_count": 4,
    "qwen35.embedding_length": 64,
    "qwen35.attention.head_count": 4,
    "qwen35.ssm.conv_kernel": 4,
    "qwen35.ssm.inner_size": 64,
    "qwen35.ssm.state_size": 16,
    "qwen35.ssm.group_count": 4,
}
PAYING = Speculation(15, only_if_it_pays=True)


def drafting(folder: Path, most: int = AUTO) -> DraftPolicy:
    return DraftPolicy(read_header(write(folder / "tiny.gguf", tiny_model())), LOAD, most)


def test_what_may_be_wished() -> None:
    wished = [read_speculate(value) for value in ("auto", "off", "3", "15", 7)]
    assert wished == [AUTO, OFF, 3, 15, 7]


@pytest.mark.parametrize("value", ["2", "16", "-1", "on", "", "3.5", "٣", 0, True, 10**30, "1" * 5000], ids=repr)
def test_all_else_is_refused_with_what_may_be(value: str | int) -> None:
    with pytest.raises(UsageError, match=r"invalid --speculate .*: must be auto, off, or a number .* 3 to 15"):
        read_speculate(value)


def test_what_is_wished_of_one_answer(tmp_path: Path) -> None:
    assert drafting(tmp_path).speculation() == PAYING
    assert drafting(tmp_path, 7).speculation() == Speculation(7)
    assert drafting(tmp_path, OFF).speculation() is None
    assert drafting(tmp_path, OFF).speculation(7) == Speculation(7), "for one answer"
    assert drafting(tmp_path).speculation(OFF) is None


def test_a_recurrent_model_drafts_as_many_as_it_can_take_back(tmp_path: Path) -> None:
    header = read_header(write(tmp_path / "hybrid.gguf", tiny_model(HYBRID)))

    def policy(n_rollback: int, most: int = AUTO) -> DraftPolicy:
        return DraftPolicy(header, replace(LOAD, n_rollback=n_rollback), most)

    assert policy(0).words == "none, because they don't pay here"
    assert policy(0).speculation() is policy(0).speculation(7) is None
    assert policy(3).speculation() == PAYING._replace(most=3)
    assert policy(3, 15).speculation() == Speculation(3)


def test_words(tmp_path: Path) -> None:
    assert drafting(tmp_path).words == "as many as are expected to pay"
    assert drafting(tmp_path, 7).words == "up to 7 per step"
    assert drafting(tmp_path, OFF).words == "none"


def test_a_draft_models_steps_cost_its_share_of_the_weights(tmp_path: Path) -> None:
    tensor = TensorSpec("token_embd.weight", (64, 16 * 4), 0, 64 * 16 * 4 * 4)
    large = read_header(write(tmp_path / "large.gguf", tiny_model(tensors=[tensor])))
    small = read_header(write(tmp_path / "small.gguf", tiny_model()))
    for most in (AUTO, 7):
        found = DraftPolicy(large, replace(LOAD, draft=LOAD), most, small).speculation()
        assert found is not None
        assert found.draft_cost == pytest.approx(small.weight_bytes / large.weight_bytes)
