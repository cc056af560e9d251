"""A text's own tokens by their probability: windows, one of them against evaluate, and against transformers."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
from support.convert_golden import GOLDENS, folder_of, ids_of
from support.fake_context import BEGIN, FakeContext, tokens_of
from support.noisy import TEXT, nll_of, noisy
from support.plain_logits import loaded

from llmrun.convert.job import convert_folder
from llmrun.engine.jobs.evaluate import Evaluation, open_context, score, window_starts
from llmrun.protocol.jobs.evaluate import Evaluate, EvaluateUpdate, ScoredText

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
