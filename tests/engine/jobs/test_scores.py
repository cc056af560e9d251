"""The mathematics of `llmrun evaluate` beside slow twins: plain loops in double precision, as llama-perplexity has."""

from __future__ import annotations

import ctypes
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.convert_golden import GOLDENS, folder_of, ids_of
from support.fake_context import BEGIN, FakeContext, tokens_of
from support.noisy import TEXT, nll_of, noisy
from support.plain_logits import loaded

from llmrun.engine.jobs import scores as figures
from llmrun.engine.jobs.evaluate import Evaluation, open_context, score, window_starts
from llmrun.engine.jobs.scores import SCORE, Rows
from llmrun.lab.convert.job import convert_folder
from llmrun.protocol.jobs.evaluate import BLOCKS, LEAST_BLOCKS, Evaluate, EvaluateUpdate, Figure, ScoredText

N_VOCAB = 3001
FIGURES = ("mean", "median", "p90", "p95", "p99", "p999", "same_top", "log_ratio", "ratio", "rms_change")


def row_of(values: Any) -> ctypes.Array[ctypes.c_float]:
    return (ctypes.c_float * len(values))(*values)


def log_softmax(values: Any) -> list[float]:
    """In plain Python."""
    top = max(values)
    total = math.fsum(math.exp(value - top) for value in values)
    return [value - top - math.log(total) for value in values]


def some_logits(seed: int, scale: float = 4.0) -> tuple[Any, Any]:
    """A row, and one that is a little different, as float32."""
    random = np.random.default_rng(seed)
    row = (scale * random.standard_normal(N_VOCAB) + 12).astype(np.float32)
    return row, (row + 0.3 * random.standard_normal(N_VOCAB) - 5).astype(np.float32)


@pytest.mark.parametrize("seed", range(8))
def test_a_position_is_compared_as_the_definition_says(seed: int) -> None:
    reference, model = some_logits(seed, scale=1.0 + seed)
    token = int(np.argsort(reference)[-1 - 3 * seed])
    p, q = log_softmax(reference.tolist()), log_softmax(model.tolist())
    scores = np.zeros(1, SCORE)
    kept = row_of(model), row_of(reference)
    Rows(N_VOCAB).compare(ctypes.addressof(kept[0]), ctypes.addressof(kept[1]), token, scores[0])
    found = scores[0]
    assert found["nll"] == pytest.approx(-q[token], abs=2e-6)
    assert found["reference_nll"] == pytest.approx(-p[token], abs=2e-6)
    divergence = math.fsum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))
    assert found["kld"] == pytest.approx(divergence, rel=1e-4)
    assert found["same_top"] == (np.argmax(reference) == np.argmax(model))
    assert found["top"] == (np.argmax(model) == token)
    assert found["reference_top"] == (np.argmax(reference) == token)
    alone = Rows(N_VOCAB).score(ctypes.addressof(kept[0]), token)
    assert alone == (found["nll"], found["top"])


def test_logits_are_only_read() -> None:
    reference, model = some_logits(1)
    kept = row_of(model), row_of(reference)
    Rows(N_VOCAB).compare(ctypes.addressof(kept[0]), ctypes.addressof(kept[1]), 7, np.zeros(1, SCORE)[0])
    assert np.array_equal(np.array(kept[0]), model)
    assert np.array_equal(np.array(kept[1]), reference)


def test_a_model_does_not_differ_from_itself_at_all() -> None:
    row = row_of(some_logits(2)[0])
    scores = np.zeros(1, SCORE)
    Rows(N_VOCAB).compare(ctypes.addressof(row), ctypes.addressof(row), 5, scores[0])
    assert scores[0]["kld"] == 0.0
    assert scores[0]["nll"] == scores[0]["reference_nll"]
    assert scores[0]["same_top"]


def test_what_is_impossible_for_both_does_not_count() -> None:
    reference, model = (np.where(np.arange(N_VOCAB) % 3, row, -np.inf) for row in some_logits(3))
    finite = np.arange(N_VOCAB) % 3 > 0
    p, q = log_softmax(reference[finite].tolist()), log_softmax(model[finite].tolist())
    scores = np.zeros(1, SCORE)
    kept = row_of(model), row_of(reference)
    Rows(N_VOCAB).compare(ctypes.addressof(kept[0]), ctypes.addressof(kept[1]), 1, scores[0])
    assert scores[0]["kld"] == pytest.approx(sum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True)), rel=1e-4)


def some_scores(chunks: int, each: int, seed: int = 0) -> Any:
    """Positions whose figures have to do with each other, as in real texts."""
    random = np.random.default_rng(seed)
    scores = np.zeros(chunks * each, SCORE)
    scores["chunk"] = np.repeat(np.arange(chunks), each)
    scores["position"] = np.tile(np.arange(each) + each, chunks)
    scores["reference_nll"] = random.gamma(1.0, 3.0, len(scores))
    scores["nll"] = np.maximum(scores["reference_nll"] + 0.3 * random.standard_normal(len(scores)) + 0.05, 1e-3)
    scores["kld"] = random.gamma(0.5, 0.1, len(scores))
    scores["same_top"] = random.random(len(scores)) < 0.9
    scores["n_bytes"] = random.integers(1, 9, len(scores))
    return scores


def mean_and_uncertainty(values: list[float]) -> tuple[float, float]:
    """Llama-perplexity's."""
    count = len(values)
    mean = sum(values) / count
    variance = sum(value * value for value in values) / count - mean * mean
    return mean, math.sqrt(variance / (count - 1)) if variance > 0 and count > 10 else 0.0


def covariance(one: list[float], other: list[float]) -> float:
    """Llama-perplexity's."""
    count = len(one)
    both = sum(a * b for a, b in zip(one, other, strict=True)) / count
    return (both - sum(one) / count * (sum(other) / count)) / (count - 1)


def percentile(values: list[float], fraction: float) -> float:
    """Llama-perplexity's."""
    place = fraction * (len(values) - 1)
    index = int(place)
    place -= index
    return (1 - place) * values[index] + place * values[min(index + 1, len(values) - 1)]


def test_figures_and_errors_are_llama_perplexitys() -> None:
    scores = some_scores(5, 100)
    found = figures.divergence(scores)
    nll, base, kld = ([float(value) for value in scores[name]] for name in ("nll", "reference_nll", "kld"))
    log_ppl, log_base = mean_and_uncertainty(nll), mean_and_uncertainty(base)
    own = figures.perplexity(scores)
    assert (own.value, own.error) == pytest.approx((math.exp(log_ppl[0]), math.exp(log_ppl[0]) * log_ppl[1]))
    reference = found.reference_perplexity
    assert (reference.value, reference.error) == pytest.approx(
        (math.exp(log_base[0]), math.exp(log_base[0]) * log_base[1])
    )
    shared = covariance(nll, base)
    uncertainty = math.sqrt(log_ppl[1] ** 2 + log_base[1] ** 2 - 2 * shared)
    assert (found.log_ratio.value, found.log_ratio.error) == pytest.approx((log_ppl[0] - log_base[0], uncertainty))
    assert found.ratio.value == pytest.approx(math.exp(log_ppl[0] - log_base[0]))
    assert found.ratio.error == pytest.approx(found.ratio.value * uncertainty)
    assert found.correlation == pytest.approx(shared / (log_ppl[1] * log_base[1]))
    assert (found.mean.value, found.mean.error) == pytest.approx(mean_and_uncertainty(kld))
    ordered = sorted(kld)
    assert found.maximum == ordered[-1]
    for figure, share in ((found.median, 0.5), (found.p90, 0.9), (found.p95, 0.95), (found.p99, 0.99)):
        assert figure.value == pytest.approx(percentile(ordered, share))
    assert found.p999.value == pytest.approx(percentile(ordered, 0.999))
    changes = [math.exp(-a) - math.exp(-b) for a, b in zip(nll, base, strict=True)]
    change = found.probability_change
    assert (change.value, change.error) == pytest.approx(mean_and_uncertainty(changes))
    square, its_error = mean_and_uncertainty([value * value for value in changes])
    rms = math.sqrt(square)
    assert (found.rms_change.value, found.rms_change.error) == pytest.approx((rms, 0.5 / rms * its_error))
    share = float(np.mean(scores["same_top"]))
    assert found.same_top.value == pytest.approx(share)
    assert found.same_top.error == pytest.approx(math.sqrt(share * (1 - share) / (len(scores) - 1)))


def test_bits_per_byte() -> None:
    scores = some_scores(1, 20)
    bits = sum(float(nll) for nll in scores["nll"]) / math.log(2)
    assert figures.bits_per_byte(scores) == pytest.approx(bits / int(scores["n_bytes"].sum()))
    assert figures.bits_per_byte(scores[:0]) == 0.0


def correlated(random: Any, blocks: int) -> Any:
    """Scores of easy and hard parts of a text, each as long as the shorter kind of block."""
    length = BLOCKS[1]
    scores = np.zeros(blocks * length, SCORE)
    scores["chunk"] = np.repeat(np.arange(blocks), length)
    scores["position"] = np.tile(np.arange(length), blocks)
    hardness = np.repeat(random.normal(3.0, 0.5, blocks), length)
    scores["nll"] = np.maximum(hardness + random.standard_normal(len(scores)), 0)
    scores["kld"] = np.exp(hardness - 3.0) * random.gamma(0.5, 0.1, len(scores))
    scores["same_top"] = random.random(len(scores)) < 0.99 - 0.1 * (hardness - 2.0)
    return scores


@pytest.mark.parametrize("blocks", [LEAST_BLOCKS, 15])
def test_intervals_contain_the_truth_as_often_as_they_say(blocks: int) -> None:
    """Correlated positions, for which llama-perplexity's errors are several times too small."""
    random = np.random.default_rng(5)
    truth = correlated(np.random.default_rng(6), 1000)
    expected, expected_perplexity = figures.divergence(truth), figures.perplexity(truth).value
    names = ("mean", "median", "p90", "same_top")
    right = dict.fromkeys((*names, "perplexity"), 0)
    rounds = 150
    for _ in range(rounds):
        scores = correlated(random, blocks)
        found = figures.divergence(scores)
        for name in names:
            figure = getattr(found, name)
            right[name] += figure.low <= getattr(expected, name).value <= figure.high
        perplexity = figures.perplexity(scores)
        right["perplexity"] += perplexity.low <= expected_perplexity <= perplexity.high
    for name, count in right.items():
        assert count / rounds > 0.87, (name, count)


def test_a_share_of_all_is_not_certain() -> None:
    scores = some_scores(LEAST_BLOCKS, 64)
    scores["same_top"] = True
    share = figures.divergence(scores).same_top
    assert share.value == share.high == 1.0
    assert share.low is not None
    assert 0.99 < share.low < 1.0


def test_few_positions_are_no_reason_to_fail() -> None:
    for count in (1, 2, 11):
        found = figures.divergence(some_scores(1, count))
        assert found.mean.value > 0
        for name in FIGURES:
            assert getattr(found, name).half is None, name
        assert figures.perplexity(some_scores(1, count)).value > 1


def test_position_ranges() -> None:
    assert figures.range_bounds(512) == [(0, 512)]
    assert figures.range_bounds(300) == [(0, 300)]
    assert figures.range_bounds(3000) == [(0, 512), (512, 1024), (1024, 2048), (2048, 3000)]
    scores = some_scores(2, 1500)
    scores["position"] -= 1500
    near, middle, far = figures.position_ranges(scores, 1501, compared=True)
    assert (near.start, near.end, near.positions) == (0, 512, 1024)
    assert (far.start, far.end, far.positions) == (1024, 1501, 2 * 476)
    part = scores[scores["position"] >= 1024]
    assert far.perplexity == figures.perplexity(part)
    assert far.divergence == figures.divergence(part).mean
    assert far.same_top == figures.divergence(part).same_top
    assert (
        middle.reference_perplexity == figures.divergence(scores[scores["position"] // 512 == 1]).reference_perplexity
    )
    assert all(stretch.divergence is None for stretch in figures.position_ranges(scores, 1501, compared=False))


def test_an_interval_has_its_figure_inside() -> None:
    figure = figures.divergence(some_scores(LEAST_BLOCKS, 50))
    for name in FIGURES:
        value: Figure = getattr(figure, name)
        assert value.low is not None, name
        assert value.high is not None, name
        assert value.low <= value.value <= value.high, name


def test_intervals_of_positive_figures_are_positive() -> None:
    """One block that differs from its reference among nine that hardly do: mean - half is negative."""
    scores = some_scores(LEAST_BLOCKS, 64)
    for name in ("kld", "nll"):
        scores[name][64:] = 1e-4
    scores["reference_nll"][64:] = 1e-4 + 1e-6
    found = figures.divergence(scores)
    for name in ("mean", "rms_change", "ratio", "reference_perplexity"):
        low = getattr(found, name).low
        assert low is not None, name
        assert 0 < low < getattr(found, name).value, name
    mean = figures._mean(scores["kld"], figures._blocks(scores))
    assert mean.low is not None
    assert mean.low < 0, "or the case says nothing"


def test_a_hopeless_model_has_a_perplexity_too() -> None:
    scores = some_scores(LEAST_BLOCKS, 2)
    scores["nll"] = np.linspace(900, 1000, len(scores))
    found = figures.perplexity(scores)
    assert math.isfinite(found.value)
    assert found.high is not None
    assert math.isfinite(found.high)


# ---- a text's own tokens by their probability: windows, one of them against evaluate, and against transformers


GOLDEN = json.loads(GOLDENS.read_text(encoding="utf-8"))["logprobs"]
MODEL = noisy(1)


def scored(tokens: list[int], n_ctx: int, begin: list[int], n_batch: int = 64) -> tuple[ScoredText, EvaluateUpdate]:
    updates: list[EvaluateUpdate] = []
    command = Evaluate("m", "", n_ctx=n_ctx, every_position=True)
    context = FakeContext(MODEL, n_ctx=n_ctx, n_batch=n_batch, n_outputs=n_batch)
    return score(command, context, [*begin, *tokens], begin, updates.append), updates[-1]


@pytest.mark.parametrize(("n_tokens", "n_ctx"), [(2, 2), (7, 7), (8, 7), (100, 7), (100, 8), (1000, 33)])
def test_windows_reach_from_beginning_to_end_and_overlap_by_half_at_least(n_tokens: int, n_ctx: int) -> None:
    starts = window_starts(n_tokens, n_ctx)
    assert (starts[0], starts[-1]) == (0, n_tokens - n_ctx)
    steps = [later - start for start, later in itertools.pairwise(starts)]
    assert all(step == n_ctx // 2 for step in steps[:-1])
    assert all(0 < step <= n_ctx // 2 for step in steps[-1:])


@pytest.mark.parametrize("n_batch", [64, 5])
@pytest.mark.parametrize("begin", [[], [BEGIN]])
def test_each_token_is_scored_after_all_before_it(begin: list[int], n_batch: int) -> None:
    tokens = tokens_of(TEXT[:40])
    found, _ = scored(tokens, 40 + len(begin), begin, n_batch)
    whole = [*begin, *tokens]
    expected = [-nll_of(MODEL, whole[:place], whole[place]) for place in range(1, len(whole))]
    if not begin:
        assert found.tokens[0].logprob is None
    known = [token for token in found.tokens if token.logprob is not None]
    assert [token.logprob for token in known] == pytest.approx(expected, abs=1e-6)
    assert [token.id for token in found.tokens] == tokens
    assert b"".join(bytes.fromhex(token.data) for token in found.tokens).decode() == TEXT[:40]
    assert found.perplexity.value == pytest.approx(math.exp(-sum(expected) / len(expected)), rel=1e-6)
    assert found.windows == 1


@pytest.mark.parametrize("begin", [[], [BEGIN]])
def test_a_long_text_is_read_in_windows_and_each_token_scored_once(begin: list[int]) -> None:
    tokens, n_ctx = tokens_of(TEXT[:50]), 16
    found, update = scored(tokens, n_ctx, begin)
    whole = [*begin, *tokens]
    starts = window_starts(len(whole), n_ctx)
    expected, known = [], 1
    for start in starts:
        window = [*begin, *whole[start : start + n_ctx][len(begin) :]]
        expected += [-nll_of(MODEL, window[: place - start], whole[place]) for place in range(known, start + n_ctx)]
        known = start + n_ctx
    assert [token.logprob for token in found.tokens if token.logprob is not None] == pytest.approx(expected, abs=1e-6)
    assert (len(found.tokens), found.windows) == (50, len(starts))
    assert update.done == update.total == n_ctx * len(starts)


def test_the_second_half_of_one_window_has_the_perplexity_that_evaluate_finds() -> None:
    tokens = tokens_of(TEXT[:64])
    found, _ = scored(tokens, 64, [])
    half = [token.logprob for token in found.tokens[33:] if token.logprob is not None]
    context = FakeContext(MODEL, n_ctx=64, n_batch=64, n_outputs=64)
    evaluated = Evaluation(Evaluate("m", "", n_ctx=64), [context], tokens, [], lambda update: None).run()
    assert evaluated.perplexity is not None
    assert len(half) == evaluated.positions
    assert math.exp(-sum(half) / len(half)) == pytest.approx(evaluated.perplexity.value, rel=1e-12)


@pytest.mark.parametrize("case", GOLDEN)
def test_log_probabilities_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    convert_folder(folder_of(case, tmp_path), tmp_path / "tiny.gguf", type="f32")
    ids = ids_of(case)
    with loaded(tmp_path / "tiny.gguf") as model:
        command = Evaluate(
            "m", "", n_ctx=len(ids), every_position=True, flash_attention="off", kv_type_k="f32", kv_type_v="f32"
        )
        context = open_context(model, command)
        found = score(command, context, ids, [], lambda update: None)
        context.close()
    assert [token.logprob for token in found.tokens[1:]] == pytest.approx(GOLDEN[case], abs=1e-4)
