"""What the native sampler says of its last choices: against the slow twin, and against what is really drawn."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.chi_square import assert_drawn_from
from support.masks import mask_of, only
from support.sampler_cases import OFF, PARAMETERS, native_sampler, random_parameters, rows, shuffled_order
from support.sampler_twin import Twin
from support.seeds import for_seeds

from llmrun import _native
from llmrun.protocol.params import STEPS, SamplingParams

Steps = list[tuple[str, int, list[tuple[int, float]]]]


def explained(params: SamplingParams, row: np.ndarray, *, seed: int = 1, count: int = 5, allowed: int = 0) -> Steps:
    sampler = native_sampler(len(row), params, seed, remember=1)
    token = sampler.sample(row.ctypes.data, allowed)
    chosen, steps = sampler.explain(0, count)
    assert chosen == token
    return steps


def names(steps: Steps) -> list[str]:
    return [name for name, _, _ in steps]


def last(steps: Steps) -> dict[int, float]:
    """What the token was drawn from."""
    _, remaining, probabilities = steps[-1]
    found = {token: p for token, p in probabilities if p > 0}
    assert len(found) == remaining, "ask for more tokens"
    return found


# ---- against the twin ------------------------------------------------------------------------------


@for_seeds(150)
def test_each_step_is_the_twins(seed: int) -> None:
    draw = random.Random(900 + seed)
    params = random_parameters(draw)
    if draw.random() < 0.5:
        params = replace(params, order=shuffled_order(draw))
    # With several logits at -inf typical sampling computes with NaN, and the sort's order decides.
    if params.top_n_sigma > 0 or params.temperature == 0:
        params = replace(params, typical_p=1.0)
    n_vocab = draw.choice([12, 40])
    native, twin = native_sampler(n_vocab, params, seed, remember=3), Twin(params, seed)
    logits = np.random.default_rng(seed).normal(size=(6, n_vocab)).astype(np.float32) * 2
    stories = []
    for row in logits:
        token = native.sample(row.ctypes.data)
        assert token == twin.sample(row)
        stories.append((token, dict(twin.explained)))
        native.accept(token)
        twin.accept(token)
    for back in range(3):
        token, expected = stories[-1 - back]
        chosen, steps = native.explain(back, n_vocab)
        assert chosen == token
        for name, remaining, probabilities in steps:
            assert remaining == len(expected[name])
            assert dict(probabilities) == pytest.approx(
                {t: expected[name].get(t, 0.0) for t in range(n_vocab)}, abs=1e-5
            )
        assert names(steps)[-1] in ("model", *working_steps(params)[-1:])


def working_steps(params: SamplingParams) -> list[str]:
    """The names of the steps that can do anything, in their order."""
    biases = ["logit_bias"] * bool(params.logit_bias)
    if params.mirostat:
        return [*biases, *["temperature"] * (params.temperature != 1), "mirostat"]
    penalizes = (params.repeat_penalty, params.frequency_penalty, params.presence_penalty) != (1, 0, 0)
    works = {
        "penalties": params.repeat_last_n > 0 and penalizes,
        "dry": params.dry_multiplier != 0 and params.dry_base >= 1 and params.dry_last_n > 0,
        "top_n_sigma": params.top_n_sigma > 0,
        "top_k": params.top_k > 0,
        "typical_p": params.typical_p < 1,
        "top_p": params.top_p < 1,
        "min_p": params.min_p > 0,
        "xtc": params.xtc_probability > 0 and params.xtc_threshold <= 0.5,
        "temperature": params.temperature != 1 or params.temperature_range > 0,
    }
    return [*biases, *(step for step in params.order if works[step])]


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_steps_that_can_do_anything_are_named(name: str) -> None:
    params = PARAMETERS[name]
    row = rows(40, 1, seed=3)[0]
    assert names(explained(params, row)) == ["model", *working_steps(params)]
    backwards = replace(params, order=tuple(reversed(STEPS)))
    assert names(explained(backwards, row)) == ["model", *working_steps(backwards)]


# ---- against what is drawn -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["defaults", "hot", "top-p", "min-p", "typical", "top-n-sigma", "xtc", "penalties-all", "dry-long", "bans",
     "dynamic", "mirostat-1", "mirostat-2"],
)  # fmt: skip
def test_the_token_is_drawn_from_the_last_step(name: str) -> None:
    params = replace(PARAMETERS[name], mirostat_eta=0.0)  # so that each draw is made from the same
    row = rows(40, 2, seed=8)[1] / 2
    sampler = native_sampler(40, params, 3, remember=1)
    sampler.accept_many([1, 2, 3, 1, 2])
    draws = [sampler.sample(row.ctypes.data) for _ in range(8000)]
    _, steps = sampler.explain(0, 40)
    assert_drawn_from(last(steps), draws)


def test_masked_and_reordered_draws_are_from_the_last_step() -> None:
    row, mask = rows(40, 2, seed=8)[1] / 2, mask_of(40, list(range(0, 40, 3)))
    params = SamplingParams(order=("temperature", "top_p", "min_p"), temperature=1.7)
    sampler = native_sampler(40, params, 3, remember=1)
    draws = [sampler.sample(row.ctypes.data, mask.ctypes.data, [6]) for _ in range(8000)]
    _, steps = sampler.explain(0, 40)
    assert names(steps) == ["model", "mask", "temperature", "top_p", "min_p"]
    assert 6 not in last(steps)
    assert_drawn_from(last(steps), draws)


# ---- single cases ----------------------------------------------------------------------------------


def test_greedy_leaves_the_largest() -> None:
    row = np.array([1, 3, 2], np.float32)
    steps = explained(replace(OFF, temperature=0.0), row)
    assert names(steps) == ["model", "temperature"]
    assert steps[1][1:] == (1, [(1, 1.0), (2, 0.0), (0, 0.0)])


def test_xtc_shows_what_it_removed_and_that_it_did_not() -> None:
    row = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    fires = explained(replace(OFF, xtc_probability=1.0, xtc_threshold=0.25), row)
    assert fires[1][1] == 3
    assert fires[1][2][0] == (0, 0.0)
    outcomes = set()
    for seed in range(40):
        sampler = native_sampler(4, replace(OFF, xtc_probability=0.5, xtc_threshold=0.25), seed, remember=1)
        token = sampler.sample(row.ctypes.data)
        _, (_, (name, remaining, _)) = sampler.explain(0, 4)
        assert name == "xtc"
        assert remaining == 4 or token != 0
        outcomes.add(remaining)
    assert outcomes == {3, 4}


@pytest.mark.parametrize("mirostat", [1, 2])
def test_mirostat_is_explained_with_the_mu_of_then(mirostat: int) -> None:
    params = SamplingParams(mirostat=mirostat, mirostat_tau=2.0, mirostat_eta=0.5)
    sampler, twin = native_sampler(40, params, 6, remember=8), Twin(params, 6)
    row = rows(40, 1, seed=2)[0]
    remaining = []
    for _ in range(8):
        assert sampler.sample(row.ctypes.data) == twin.sample(row)
        remaining.append(len(dict(twin.explained)["mirostat"]))
    assert len(set(remaining)) > 1
    found = [sampler.explain(back, 3)[1][-1] for back in range(7, -1, -1)]
    assert [(name, left) for name, left, _ in found] == [("mirostat", left) for left in remaining]


def test_a_mask_is_a_step() -> None:
    row = rows(40, 1, seed=2)[0]
    tokens = list(range(0, 40, 3))
    masked = explained(SamplingParams(), row, count=40, allowed=mask_of(40, tokens).ctypes.data)
    plain = explained(SamplingParams(), only(row, tokens), count=40)
    assert names(masked) == ["model", "mask", "top_k", "top_p", "min_p", "temperature"]
    assert masked[1][1] == len(tokens)
    assert last(masked) == last(plain)


def test_the_likeliest_of_both_ends_and_the_chosen_one_are_shown() -> None:
    row = np.array([5, 4, 3, 2, 1, 0], np.float32)
    steps = explained(replace(OFF, logit_bias=((5, 30.0),)), row, count=2)
    assert [[token for token, _ in pairs] for _, _, pairs in steps] == [[0, 1, 5]] * 2
    assert [token for token, _ in explained(OFF, row, count=0)[0][2]] == [
        native_sampler(6, OFF, 1).sample(row.ctypes.data)
    ]


def test_explaining_moves_nothing() -> None:
    params = PARAMETERS["everything"]
    logits = rows(60, 20, seed=4)

    def tokens(*, explain: bool) -> list[Any]:
        sampler = native_sampler(60, params, 2, remember=2)
        chosen = []
        for row in logits:
            chosen.append(sampler.sample(row.ctypes.data))
            sampler.accept(chosen[-1])
            if explain:
                assert sampler.explain(0, 5) == sampler.explain(0, 5)
        return [*chosen, sampler.random_state()]

    assert tokens(explain=True) == tokens(explain=False)


def test_the_row_may_be_gone() -> None:
    row = rows(40, 1, seed=4)[0]
    sampler = native_sampler(40, SamplingParams(), 2, remember=1)
    sampler.sample(row.ctypes.data)
    before = sampler.explain(0, 5)
    row[:] = 0
    assert sampler.explain(0, 5) == before


def test_as_many_calls_as_wanted_are_remembered() -> None:
    logits = rows(40, 5, seed=4)
    sampler = native_sampler(40, SamplingParams(), 2, remember=3)
    with pytest.raises(ValueError, match="not remembered"):
        sampler.explain(0, 5)
    tokens = [sampler.sample(row.ctypes.data) for row in logits]
    assert [sampler.explain(back, 5)[0] for back in range(3)] == tokens[:1:-1]
    with pytest.raises(ValueError, match="not remembered"):
        sampler.explain(3, 5)
    copy = sampler.copy()
    sampler.rewind(2, [])
    assert sampler.explain(0, 5)[0] == tokens[2]
    with pytest.raises(ValueError, match="not remembered"):
        sampler.explain(1, 5)
    assert copy.explain(0, 5)[0] == tokens[4]


def test_rewind_makes_a_new_history() -> None:
    params = SamplingParams(repeat_penalty=1.3, dry_multiplier=0.8, repeat_last_n=5)
    logits = rows(30, 40, seed=6)
    rewound, control = native_sampler(30, params, 7), native_sampler(30, params, 7)
    for row in logits[:20]:
        rewound.accept(rewound.sample(row.ctypes.data))
        control.sample(row.ctypes.data)
    history = [1, 2, 3, 1, 2, 9, 1, 2]
    rewound.rewind(0, history)
    control.accept_many(history)
    for row in logits[20:]:
        token = rewound.sample(row.ctypes.data)
        # The draws before were from other distributions, but took as many random numbers.
        assert token == control.sample(row.ctypes.data)
        rewound.accept(token)
        control.accept(token)
    assert rewound.random_state() == control.random_state()


def test_rewind_refuses_unknown_tokens() -> None:
    sampler = native_sampler(5, SamplingParams(), 7)
    with pytest.raises(ValueError, match="vocabulary"):
        sampler.rewind(0, [1, 5])


def test_a_sampler_without_memory_explains_nothing() -> None:
    sampler = _native.Sampler(5)
    sampler.sample(np.zeros(5, np.float32).ctypes.data)
    with pytest.raises(ValueError, match="not remembered"):
        sampler.explain(0, 1)
