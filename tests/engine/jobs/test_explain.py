"""The job `explain`, beside a forward pass in numpy."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.hf_writer import (
    HEAD,
    HEADS,
    LAYERS,
    N_BYTE_LEVEL,
    byte_level,
    config,
    files_of,
    llama_like,
    safetensors,
    write,
)
from support.numpy_llama import Forward, forward

from llmrun import _native
from llmrun.convert.job import convert_folder
from llmrun.engine.core.sampler import SequenceSampler
from llmrun.engine.jobs.explain import explain
from llmrun.engine.jobs.explain.explain import run
from llmrun.engine.llama.context import LlamaContext
from llmrun.engine.llama.model import LlamaModel
from llmrun.engine.service import LoadedModel
from llmrun.errors import UsageError
from llmrun.protocol.jobs.explain import ExplainRun, RunCollected
from llmrun.protocol.messages import Load
from llmrun.protocol.params import Limits, SamplingParams

PROMPT, ANSWER = [5, 260, 17, 99, 42, 7, 130], 3
SETTINGS: dict[str, Any] = config("LlamaForCausalLM", N_BYTE_LEVEL, head_dim=HEAD, tie_word_embeddings=False)
TENSORS = llama_like(N_BYTE_LEVEL)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("explain")
    source = folder / "hf"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(SETTINGS))
    (source / "tokenizer.json").write_text(json.dumps(byte_level()))
    (source / "model.safetensors").write_bytes(safetensors(TENSORS))
    return convert_folder(source, folder / "tiny.gguf", type="f32").path


@pytest.fixture
def answered(path: Path) -> Iterator[Callable[..., LoadedModel]]:
    """A model that gave an answer, as request 1."""
    opened: list[Any] = []

    def answer(prompt: list[int] = PROMPT, path: Path = path, **changes: Any) -> LoadedModel:
        weights = LlamaModel(str(path), 0, _native.CancelFlag())
        opened.insert(0, weights)
        load = replace(Load(str(path), 128, 128, threads=1, kv_type_k="f32", kv_type_v="f32"), **changes)
        context = LlamaContext(weights, load)
        opened.insert(0, context)
        loaded = LoadedModel(weights, context, load)
        sampler = SequenceSampler(SamplingParams(temperature=0.0), weights.vocabulary, prompt)
        loaded.engine.add(1, list(prompt), sampler, Limits(ANSWER, ignores_end=True))
        while loaded.engine.busy:
            loaded.engine.step()
        return loaded

    yield answer
    for each in opened:
        each.close()


def looked_at(loaded: LoadedModel, **changes: Any) -> RunCollected:
    return run(ExplainRun(1, **changes), lambda update: None, _native.CancelFlag(), loaded)


def norms(rows: Any) -> Any:
    return pytest.approx(list(np.linalg.norm(rows, axis=-1)), rel=1e-3)


def twin(found: RunCollected) -> Forward:
    return forward(SETTINGS, TENSORS, list(found.tokens))


def test_norms_and_what_each_part_adds_are_those_of_numpy(answered: Callable[..., LoadedModel]) -> None:
    found = looked_at(answered())
    expected = twin(found)
    assert (found.tokens[: len(PROMPT)], found.n_prompt, found.first) == (tuple(PROMPT), len(PROMPT), 0)
    assert len(found.tokens) == len(PROMPT) + ANSWER
    assert found.embedding == norms(expected.embedded)
    before = expected.embedded
    for layer, between, behind in zip(found.layers, expected.between, expected.behind, strict=True):
        assert layer.residual == norms(behind)
        assert layer.attention == norms(between - before)
        assert layer.feed_forward == norms(behind - between)
        before = behind


def test_attention_is_that_of_numpy_and_each_row_sums_to_one(answered: Callable[..., LoadedModel]) -> None:
    found = looked_at(answered())
    expected = twin(found)
    for shares, layer in zip(expected.shares, found.layers, strict=True):
        at = np.arange(1, len(found.tokens))
        assert [head.previous for head in layer.heads] == pytest.approx(shares[:, at, at - 1].mean(1), abs=1e-3)
        assert [head.first for head in layer.heads] == pytest.approx(shares[:, at, 0].mean(1), abs=1e-3)
        entropy = -np.where(shares > 0, shares * np.log(np.maximum(shares, 1e-300)), 0).sum(-1)[:, at] / np.log(at + 1)
        assert [head.spread for head in layer.heads] == pytest.approx(entropy.mean(1), abs=1e-3)
    assert len({(picture.layer, picture.head) for picture in found.pictures}) == len(found.pictures) > 1
    for picture in found.pictures:
        own = expected.shares[picture.layer][picture.head]
        for position, row in enumerate(picture.rows):
            assert np.abs(np.array(row) - own[position, : position + 1]).max() < 1e-3
            assert sum(row) == pytest.approx(1, abs=1e-3)


def test_pictures_are_of_the_heads_that_fit_best(answered: Callable[..., LoadedModel]) -> None:
    found = looked_at(answered())
    roles = {picture.role: found.layers[picture.layer].heads[picture.head] for picture in found.pictures}
    heads = [head for layer in found.layers for head in layer.heads]
    assert len(heads) == LAYERS * HEADS
    assert roles["previous"].previous == max(head.previous for head in heads)


def test_the_lens_is_that_of_numpy_and_ends_at_the_models_own_logits(answered: Callable[..., LoadedModel]) -> None:
    found = looked_at(answered(), everywhere=True)
    expected = twin(found)
    assert (found.lens_refused, len(found.lens)) == ("", len(found.tokens))
    assert found.lens_difference < 1e-3
    for column in found.lens:
        for cell in column.cells:
            logits = expected.read(expected.behind[cell.layer])[column.position]
            shares = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
            assert cell.probabilities == pytest.approx(shares[list(cell.candidates)], abs=1e-3)
            assert cell.probabilities == pytest.approx(np.sort(shares)[::-1][:5], abs=1e-3)
            if column.position + 1 < len(found.tokens):
                assert cell.next == pytest.approx(shares[found.tokens[column.position + 1]], abs=1e-3)
        assert column.next == pytest.approx(column.cells[-1].next, abs=1e-3)
    assert found.lens[-1].cells[-1].rank == -1
    known = {piece.token for piece in found.pieces}
    assert known >= {token for column in found.lens for cell in column.cells for token in cell.candidates}


def test_by_default_the_lens_is_of_the_positions_that_chose_a_token(answered: Callable[..., LoadedModel]) -> None:
    found = looked_at(answered())
    assert [column.position for column in found.lens] == list(range(len(PROMPT) - 1, len(found.tokens)))
    assert all(column.cells[-1].rank == 0 for column in found.lens[:-1]), "greedy: the likeliest came"


def test_a_lens_that_does_not_give_the_models_own_logits_is_refused(
    answered: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmrun.engine.jobs.explain.lens._MOST_DIFFERENCE", -1.0)
    found = looked_at(answered())
    assert (found.lens, found.lens_refused) == ((), "differs")


def test_only_the_end_of_a_long_sequence_is_watched(
    answered: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explain, "WATCHED", 4)
    found = looked_at(answered())
    expected = twin(found)
    size = len(PROMPT) + ANSWER
    assert found.first == size - 4
    assert found.layers[-1].residual == norms(expected.behind[-1][-4:])
    for picture in found.pictures:
        assert list(map(len, picture.rows)) == list(range(size - 3, size + 1))
        own = expected.shares[picture.layer][picture.head]
        assert np.abs(np.array(picture.rows[0]) - own[size - 4, : size - 3]).max() < 1e-3


def test_every_layer_takes_time(answered: Callable[..., LoadedModel]) -> None:
    found = looked_at(answered())
    assert found.prefill_seconds > sum(layer.prefill_seconds for layer in found.layers) > 0
    assert found.decode_seconds > sum(layer.decode_seconds for layer in found.layers) > 0
    assert all(layer.prefill_seconds > 0 < layer.decode_seconds for layer in found.layers)


def test_attention_is_seen_of_answers_with_flash_attention_too(answered: Callable[..., LoadedModel]) -> None:
    found = looked_at(answered(kv_type_k="f16", kv_type_v="f16", flash_attention="on"))
    assert all(len(layer.heads) == HEADS for layer in found.layers)


def test_an_answer_that_nobody_remembers(answered: Callable[..., LoadedModel]) -> None:
    with pytest.raises(UsageError):
        run(ExplainRun(7), lambda update: None, _native.CancelFlag(), answered())


def test_a_single_token_can_be_looked_at(answered: Callable[..., LoadedModel]) -> None:
    found = looked_at(answered([5]))
    assert found.n_prompt == 1
    assert found.lens[0].position == 0


@pytest.mark.parametrize(
    "architecture",
    ["MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "SmolLM3ForCausalLM", "Gemma2ForCausalLM",
     "Gemma3ForCausalLM", "Phi3ForCausalLM"],
)  # fmt: skip
def test_other_architectures(architecture: str, answered: Callable[..., LoadedModel], tmp_path: Path) -> None:
    source = write(tmp_path / "hf", files_of(architecture))
    loaded = answered(path=convert_folder(source, tmp_path / "tiny.gguf", type="f32").path)
    found = looked_at(loaded)
    assert all(layer.residual and layer.attention and layer.feed_forward for layer in found.layers)
    assert all(len(layer.heads) == HEADS for layer in found.layers)
    assert all(abs(sum(row) - 1) < 1e-3 for picture in found.pictures for row in picture.rows)
    # Gemma 2 squeezes its logits, which the lens knows nothing of; where they are small that can't be seen.
    assert found.lens_refused == "" or (architecture == "Gemma2ForCausalLM" and found.lens_refused == "differs")
