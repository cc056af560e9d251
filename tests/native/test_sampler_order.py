"""The chain in other orders: against llama.cpp's samplers put together likewise, and against the slow twin."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from support.sampler_cases import (
    OFF,
    PARAMETERS,
    hard_rows,
    native_sampler,
    random_parameters,
    rows,
    shuffled_order,
)
from support.sampler_llama import assert_same_as_llama
from support.seeds import for_seeds

from llmrun import _native
from llmrun.protocol.params import STEPS, SamplingParams


@for_seeds(120)
def test_any_order_is_llama_cpp(seed: int) -> None:
    draw = random.Random(seed)
    name = draw.choice([name for name in PARAMETERS if not name.startswith("mirostat")])
    params = replace(PARAMETERS[name], order=shuffled_order(draw))
    assert_same_as_llama(params, seed, rows(draw.choice([20, 300, 300, 3000]), 24, seed))


@for_seeds(60)
def test_any_order_of_many_steps_is_llama_cpp(seed: int) -> None:
    draw = random.Random(1000 + seed)
    params = replace(random_parameters(draw), mirostat=0, order=shuffled_order(draw))
    assert_same_as_llama(params, seed, rows(draw.choice([20, 300, 1500]), 18, seed))


@pytest.mark.parametrize("n_vocab", [49_152, 128_256])
def test_any_order_is_llama_cpp_on_real_vocabularies(n_vocab: int) -> None:
    order = ("temperature", "top_k", "penalties", "dry", "top_p", "min_p")
    params = SamplingParams(repeat_penalty=1.2, dry_multiplier=0.8, top_k=200, order=order)
    assert_same_as_llama(params, 5, hard_rows(n_vocab, 2))
    assert_same_as_llama(replace(params, order=("min_p", "penalties", "temperature")), 5, hard_rows(n_vocab, 2))


def exact_tokens(params: SamplingParams) -> int:
    """How many of three tokens were chosen on the whole vocabulary."""
    sampler = native_sampler(49_152, params, 1)
    row = hard_rows(49_152, seed=1)[8]
    for _ in range(3):
        sampler.accept(sampler.sample(row.ctypes.data))
    return sampler.exact_count


def test_only_a_changed_order_of_working_steps_takes_the_exact_way() -> None:
    assert exact_tokens(SamplingParams(order=("top_k", "top_p", "min_p", "temperature"))) == 0
    # Steps that are off may be anywhere.
    assert exact_tokens(SamplingParams(order=("xtc", "top_k", "penalties", "temperature", "dry"))) == 0
    assert exact_tokens(SamplingParams(order=("temperature", "top_k"))) == 3


@pytest.mark.parametrize("step", STEPS)
def test_a_missing_step_is_off(step: str) -> None:
    everything = replace(PARAMETERS["everything"], logit_bias=(), temperature_range=0.0)
    fields = {"penalties": "repeat_last_n", "dry": "dry_multiplier", "xtc": "xtc_probability"}
    field = fields.get(step, step)
    without = replace(everything, **{field: 0 if field == "repeat_last_n" else getattr(OFF, field)})
    missing = replace(everything, order=tuple(name for name in STEPS if name != step))
    first, second = native_sampler(300, without, 3), native_sampler(300, missing, 3)
    for row in rows(300, 30, seed=7):
        token = first.sample(row.ctypes.data)
        assert token == second.sample(row.ctypes.data)
        for sampler in (first, second):
            sampler.accept(token)
    assert first.random_state() == second.random_state()


@pytest.mark.parametrize("mirostat", [1, 2])
def test_mirostat_has_its_own_order(mirostat: int) -> None:
    params = SamplingParams(mirostat=mirostat, temperature=0.7)
    first, second = native_sampler(300, params, 3), native_sampler(300, replace(params, order=()), 3)
    for row in rows(300, 20, seed=7):
        assert first.sample(row.ctypes.data) == second.sample(row.ctypes.data)


def test_a_nonsensical_order_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="no step 'top_q'"):
        _native.Sampler(10, order=["top_k", "top_q"])
    with pytest.raises(ValueError, match="'min_p' is in the order twice"):
        _native.Sampler(10, order=["min_p", "top_k", "min_p"])
