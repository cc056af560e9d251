"""The job `explain`, beside a forward pass in numpy."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import hf_writer
from support.convert_golden import folder_of, ids_of
from support.explain_golden import CASES, GOLDENS
from support.explained import FOUND
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
from support.peft_writer import adapted_model
from support.tiny_models import tiny_answers

from llmrun import _native
from llmrun.engine.core.sampler import SequenceSampler
from llmrun.engine.core.sequence import Sequence
from llmrun.engine.jobs import explain
from llmrun.engine.jobs.explain import Collector, run_explain
from llmrun.engine.llama.context import LlamaContext
from llmrun.engine.llama.model import LlamaModel
from llmrun.engine.loaded import LoadedModel
from llmrun.errors import UsageError
from llmrun.lab.convert.job import convert_folder
from llmrun.lab.quantize.job import QuantizeRequest, quantize
from llmrun.lab.views.explain import explain_page, show_explained
from llmrun.protocol.adapters import Adapter, AdapterScale
from llmrun.protocol.jobs.explain import ExplainRun, RunCollected
from llmrun.protocol.loading import Load
from llmrun.protocol.messages import AnswerRequest
from llmrun.protocol.params import Limits, SamplingParams
from llmrun.ui.terminal.output import Output

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
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a few rows of a matrix are in memory at a time, as with a real model."""
    monkeypatch.setattr("llmrun.engine.jobs.file_weights._MAX_ELEMENTS", 900)


@pytest.fixture
def answered(path: Path) -> Iterator[Callable[..., LoadedModel]]:
    """A model that gave an answer, as request 1."""
    opened: list[Any] = []

    def answer(
        prompt: list[int] = PROMPT,
        path: Path = path,
        *,
        repack: bool = True,
        chosen: tuple[AdapterScale, ...] = (),
        **changes: Any,
    ) -> LoadedModel:
        weights = LlamaModel(str(path), 0, _native.CancelFlag(), repack=repack)
        opened.insert(0, weights)
        load = replace(Load(str(path), 128, threads=1, kv_type_k="f32", kv_type_v="f32"), **changes)
        context = LlamaContext(weights, load)
        opened.insert(0, context)
        loaded = LoadedModel(weights, context, load)
        sampler = SequenceSampler(SamplingParams(temperature=0.0), weights.vocabulary, prompt)
        asked = AnswerRequest(limits=Limits(ANSWER, ignores_end=True))
        loaded.engine.add(Sequence(1, list(prompt), sampler, asked, adapters=chosen))
        while loaded.engine.busy:
            loaded.engine.step()
        return loaded

    yield answer
    for each in opened:
        each.close()


def looked_at(loaded: LoadedModel, **changes: Any) -> RunCollected:
    return run_explain(ExplainRun(1, **changes), lambda update: None, _native.CancelFlag(), loaded)


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
    assert len({(example.layer, example.head) for example in found.pictures}) == len(found.pictures) > 1
    for example in found.pictures:
        own = expected.shares[example.layer][example.head]
        for position, row in enumerate(example.rows):
            assert np.abs(np.array(row) - own[position, : position + 1]).max() < 1e-3
            assert sum(row) == pytest.approx(1, abs=1e-3)


def test_examples_are_of_the_heads_that_fit_best(answered: Callable[..., LoadedModel]) -> None:
    found = looked_at(answered())
    roles = {example.role: found.layers[example.layer].heads[example.head] for example in found.pictures}
    heads = [head for layer in found.layers for head in layer.heads]
    assert len(heads) == LAYERS * HEADS
    assert roles["previous"].previous == max(head.previous for head in heads)


@pytest.mark.usefixtures("in_pieces")
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


@pytest.mark.usefixtures("in_pieces")
def test_embeddings_lie_where_the_matrix_says_and_neighbours_are_the_nearest_texts(
    answered: Callable[..., LoadedModel],
) -> None:
    loaded = answered()
    found = looked_at(loaded)
    assert found.embeddings is not None
    matrix = TENSORS["model.embed_tokens.weight"].astype(np.float64)
    own = list(dict.fromkeys(found.tokens))
    assert [each.token for each in found.embeddings.tokens] == own
    assert found.embeddings.width == matrix.shape[1]
    directions = matrix / np.linalg.norm(matrix, axis=1, keepdims=True)
    is_text = np.array([bool(loaded.weights.vocabulary.piece(token)) for token in range(len(matrix))])
    assert not is_text.all(), "there are control tokens"
    resting = (directions @ directions[~is_text].T).max(1)  # how near a row is to one of them
    for each in found.embeddings.tokens:
        cosines = directions @ directions[each.token]
        cosines = np.where(is_text & (cosines > resting), cosines, -2)
        cosines[each.token] = -2
        assert [near.similarity for near in each.neighbours] == pytest.approx(np.sort(cosines)[::-1][:5], abs=1e-5)
        assert [near.similarity for near in each.neighbours] == pytest.approx(
            cosines[[near.token for near in each.neighbours]], abs=1e-5
        )
    rows = matrix[own] - matrix[own].mean(0)
    values, vectors = np.linalg.eigh(rows.T @ rows)
    assert found.embeddings.shown == pytest.approx(values[-2:].sum() / values.sum(), abs=1e-4)
    for name, axis in (("x", vectors[:, -1]), ("y", vectors[:, -2])):
        places = np.array([getattr(each, name) for each in found.embeddings.tokens])
        assert np.abs(places) == pytest.approx(np.abs(rows @ axis), abs=1e-3), "but for the axis's direction"
    known = {piece.token for piece in found.pieces}
    assert known >= {near.token for each in found.embeddings.tokens for near in each.neighbours}


def test_a_control_token_has_a_place_but_no_neighbours(answered: Callable[..., LoadedModel]) -> None:
    found = looked_at(answered([5, N_BYTE_LEVEL - 1]))
    assert found.embeddings is not None
    text, control = found.embeddings.tokens[:2]
    assert (len(text.neighbours), control.neighbours) == (5, ())
    assert (control.x, control.y) != (0.0, 0.0)


def test_a_lens_that_does_not_give_the_models_own_logits_is_refused(
    answered: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmrun.engine.jobs.explain_matrices._MAX_DIFFERENCE", -1.0)
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
    for example in found.pictures:
        assert list(map(len, example.rows)) == list(range(size - 3, size + 1))
        own = expected.shares[example.layer][example.head]
        assert np.abs(np.array(example.rows[0]) - own[size - 4, : size - 3]).max() < 1e-3


def test_every_layer_takes_time(answered: Callable[..., LoadedModel]) -> None:
    found = looked_at(answered())
    assert found.prefill_seconds > sum(layer.prefill_seconds for layer in found.layers) > 0
    assert found.decode_seconds > sum(layer.decode_seconds for layer in found.layers) > 0
    assert all(layer.prefill_seconds > 0 < layer.decode_seconds for layer in found.layers)


def test_attention_is_seen_of_answers_with_flash_attention_too(answered: Callable[..., LoadedModel]) -> None:
    found = looked_at(answered(kv_type_k="f16", kv_type_v="f16", flash_attention="on"))
    assert found.flash_attention
    assert not looked_at(answered(flash_attention="off")).flash_attention
    assert all(len(layer.heads) == HEADS for layer in found.layers)


def test_an_answer_that_is_not_remembered(answered: Callable[..., LoadedModel]) -> None:
    with pytest.raises(UsageError):
        run_explain(ExplainRun(7), lambda update: None, _native.CancelFlag(), answered())


def test_an_answer_about_an_image_is_refused(
    answered: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = answered()
    sequence = loaded.engine.finished(1)
    monkeypatch.setattr(sequence, "media", object())
    with pytest.raises(UsageError, match="about an image"):
        looked_at(loaded)


def test_a_single_token_can_be_looked_at(answered: Callable[..., LoadedModel]) -> None:
    found = looked_at(answered([5]))
    assert found.n_prompt == 1
    assert found.lens[0].position == 0


@pytest.mark.parametrize("case", CASES)
def test_all_is_as_transformers_says(
    case: str, answered: Callable[..., LoadedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = 2e-3 if case in ("Gemma3ForCausalLM", "capped logits") else 1e-3  # ggml looks up GELU in half precision
    seen: dict[int, Any] = {}  # layer -> attention of all heads
    attention = Collector._attention
    monkeypatch.setattr(
        Collector,
        "_attention",
        lambda self, layer, shares: attention(self, layer, seen.setdefault(layer, shares.copy())),
    )
    golden, ids = json.loads(GOLDENS.read_text())["cases"][case], ids_of(case)
    path = convert_folder(folder_of(case, tmp_path), tmp_path / "tiny.gguf", type="f32").path
    found, size = looked_at(answered(ids, path), everywhere=True), len(ids)
    assert found.embedding[:size] == pytest.approx(golden["embedding"], rel=1e-3)
    for number, layer in enumerate(found.layers):
        assert layer.residual[:size] == pytest.approx(golden["residual"][number], rel=1e-3)
        for shares, head in zip(seen[number], golden["attention"][number], strict=True):
            for place, row in enumerate(head):
                assert shares[place, : place + 1] == pytest.approx(row, abs=exact)
    assert (found.lens_refused, len(found.layers)) == ("", len(golden["residual"]))
    for column in found.lens[:size]:
        for cell, best, shares in zip(column.cells, golden["lens"], golden["probabilities"], strict=True):
            first, second = shares[column.position][:2]
            assert cell.probabilities == pytest.approx(shares[column.position], abs=exact)
            assert cell.candidates[0] == best[column.position][0] or first - second < 2e-3
    woken = [[list(row) for row in layer.experts[:size]] for layer in found.layers if layer.experts]
    assert woken == golden["experts"]


@pytest.mark.usefixtures("package_on_path")
@pytest.mark.parametrize("quant", ["Q4_0", "Q4_K_M", "Q2_K"])
def test_quantized_weights_are_the_same_repacked_or_not(
    quant: str, answered: Callable[..., LoadedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in (("WIDTH", 256), ("FEED_FORWARD", 512), ("HEAD", 64)):
        monkeypatch.setattr(hf_writer, name, size)  # blocks of K-quants have 256 elements
    source = write(tmp_path / "hf", files_of("Qwen3ForCausalLM"))
    whole = convert_folder(source, tmp_path / "tiny.gguf", type="f32").path
    target = tmp_path / "small.gguf"
    types = quantize(QuantizeRequest(whole, target, quant, threads=1)).bytes_per_type
    assert len(types) > 2, "some of it is repacked, some is not"
    one, other = (looked_at(answered(path=target, repack=repack)) for repack in (True, False))
    assert (one.lens_refused, other.lens_refused) == ("", "")
    for found, expected in zip(one.layers, other.layers, strict=True):
        for name in ("residual", "attention", "feed_forward"):  # of the prompt: the answers may differ
            rows, others = (getattr(layer, name)[: len(PROMPT)] for layer in (found, expected))
            assert rows == pytest.approx(others, rel=0.05)
    assert all(sum(row) == pytest.approx(1, abs=1e-3) for example in one.pictures for row in example.rows)


def test_an_answer_with_an_adapter_is_explained_with_it(answered: Callable[..., LoadedModel], tmp_path: Path) -> None:
    files = adapted_model(tmp_path, "LlamaForCausalLM")
    adapter = Adapter("tiny", str(files.adapter), 1.0)
    merged = looked_at(answered(path=files.merged))
    for chosen, is_merged in (((AdapterScale(0, 1.0),), True), ((), False)):
        found = looked_at(answered(path=files.base, adapters=(adapter,), chosen=chosen))
        same = pytest.approx(merged.layers[-1].residual[: len(PROMPT)], rel=1e-3)
        assert (found.layers[-1].residual[: len(PROMPT)] == same) == is_merged


LACKS: dict[str, set[str]] = {
    "bailingmoe3": {"parts"},
    "cohere2": set(),
    "cohere2moe": {"parts"},
    "deepseek2": set(),
    "gemma2": set(),
    "gpt-oss": set(),
    "gptneox": {"lens"},
    "granite": set(),
    "jamba": set(),
    "lfm2": {"parts"},
    "mamba": {"parts", "heads"},
    "mistral3": set(),
    "plamo2": {"norms", "parts", "lens"},
    "qwen3moe": set(),
    "smollm3": set(),
}
"""Kinds of architectures, and what llama.cpp has no name for in them, or the lens doesn't know."""


@pytest.mark.skipif(os.name != "posix", reason="it forks")
@pytest.mark.parametrize("architecture", sorted(LACKS))
def test_what_an_architecture_has_is_shown_and_the_rest_left_out(
    architecture: str, answered: Callable[..., LoadedModel], tmp_path: Path
) -> None:
    tiny_answers(tmp_path, (architecture,))
    found = looked_at(answered(path=tmp_path / f"{architecture}.gguf"), everywhere=True)
    seen = {
        "norms": all(layer.residual for layer in found.layers),
        "parts": all(layer.attention and layer.feed_forward for layer in found.layers),
        "heads": any(layer.heads for layer in found.layers),
        "lens": not found.lens_refused,
    }
    assert {name for name, is_there in seen.items() if not is_there} == LACKS[architecture]
    shown = replace(FOUND, run=found, choices=())
    output = Output(stdout=io.StringIO(), stderr=io.StringIO(), environment={})
    show_explained(output, shown)
    assert ("no attention weights" in output.stdout.getvalue()) == ("heads" in LACKS[architecture])
    assert ("is not shown" in explain_page(shown, SamplingParams(), None)) == ("lens" in LACKS[architecture])


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
    assert all(abs(sum(row) - 1) < 1e-3 for example in found.pictures for row in example.rows)
    assert found.lens_refused == ""
