"""Masks and bans of single calls: the chain over a row in which everything else is -inf."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support.masks import mask_of, only
from support.sampler_cases import PARAMETERS, may_draw_another, native_sampler, rows
from support.sampler_llama import LlamaChain

from llmrun import _native
from llmrun.protocol.params import SamplingParams


def some_tokens(n_vocab: int, seed: int) -> list[np.ndarray]:
    """Tokens that masks allow: one, few, around the shortlist's limits, half, nearly all."""
    generator = np.random.default_rng(seed)
    counts = [1, 2, 7, 39, 41, 255, 257, n_vocab // 2, n_vocab - 1]
    return [generator.permutation(n_vocab)[: min(count, n_vocab)] for count in counts]


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("n_vocab", [300, 5000])
def test_a_mask_is_minus_infinity_everywhere_else(name: str, n_vocab: int) -> None:
    params = PARAMETERS[name]
    masked, exact = (native_sampler(n_vocab, params, 4, exact=exact) for exact in (False, True))
    logits = rows(n_vocab, 9, seed=n_vocab)
    for index, (row, tokens) in enumerate(zip(logits, some_tokens(n_vocab, 5), strict=True)):
        # Biases and rows may already have made the few impossible.
        tokens = np.append(tokens, np.flatnonzero(row > -np.inf)[[33, 71]])
        banned = (int(tokens[0]),) if index % 2 else ()
        mask, left = mask_of(n_vocab, tokens), only(row, tokens, banned)
        token, expected = masked.sample(row.ctypes.data, mask.ctypes.data, banned), exact.sample(left.ctypes.data)
        assert token == expected or may_draw_another(params, n_vocab)
        for sampler in (masked, exact):
            sampler.accept_many([expected, 33, expected])
    assert masked.random_state() == exact.random_state()


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_masked_row_is_llama_cpp(name: str) -> None:
    params, n_vocab = PARAMETERS[name], 700
    native, llama = native_sampler(n_vocab, params, 9), LlamaChain(n_vocab, params, 9)
    for seed, row in enumerate(rows(n_vocab, 24, seed=2)):
        tokens = np.append(some_tokens(n_vocab, seed)[seed % 9], np.flatnonzero(row > -np.inf)[[33, 71]])
        token = native.sample(row.ctypes.data, mask_of(n_vocab, tokens).ctypes.data)
        assert token == llama.sample(only(row, tokens)), f"row {seed}"
        native.accept(token)
        llama.accept(token)
    llama.close()


def test_few_allowed_tokens_need_no_whole_vocabulary() -> None:
    row = rows(128_256, 1, seed=3)[0]
    sampler = native_sampler(128_256, SamplingParams(repeat_penalty=1.1), 1)
    mask = mask_of(128_256, [5, 70_000, 128_255])
    assert {sampler.sample(row.ctypes.data, mask.ctypes.data) for _ in range(40)} <= {5, 70_000, 128_255}
    assert sampler.exact_count == 0


def test_banned_tokens_are_not_drawn() -> None:
    row = np.array([9, 8, 7, 6], np.float32)
    greedy = SamplingParams(temperature=0.0)
    sampler = native_sampler(4, greedy, 1)
    address = row.ctypes.data
    assert sampler.sample(address) == 0
    assert sampler.sample(address, banned=[0]) == 1
    assert sampler.sample(address, 0, (1, 0, 1)) == 2
    assert sampler.sample(address, banned={0, 1, 2}) == 3
    assert sampler.sample(address, mask_of(4, [0, 2, 3]).ctypes.data, [0]) == 2
    assert sampler.sample(address) == 0  # the bans were for those calls alone


def test_bits_after_the_vocabulary_are_not_looked_at() -> None:
    row = np.arange(33, dtype=np.float32)
    mask = np.array([0, 0xFFFFFFFF], np.uint32)
    assert native_sampler(33, SamplingParams(), 1).sample(row.ctypes.data, mask.ctypes.data) == 32


def test_row_and_mask_are_only_read() -> None:
    row, mask = rows(100, 1, seed=2)[0], mask_of(100, list(range(50)))
    before = row.copy(), mask.copy()
    native_sampler(100, SamplingParams(), 1).sample(row.ctypes.data, mask.ctypes.data, [3])
    assert np.array_equal(row, before[0])
    assert np.array_equal(mask, before[1])


@pytest.mark.parametrize("left", [3, 400])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_only_what_is_allowed_has_to_be_a_number(bad: float, left: int) -> None:
    row = rows(700, 1, seed=2)[0]
    row[[17, 650]] = bad
    mask = mask_of(700, list(range(100, 100 + left)))
    sampler = native_sampler(700, SamplingParams(), 1)
    assert 100 <= sampler.sample(row.ctypes.data, mask.ctypes.data) < 100 + left
    before = sampler.random_state()
    mask = mask_of(700, [*range(100, 100 + left), 650])
    with pytest.raises(_native.BadLogits, match="token 650") as caught:
        sampler.sample(row.ctypes.data, mask.ctypes.data)
    assert caught.value.token == 650
    assert sampler.random_state() == before


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(xtc_probability=1.0), SamplingParams(mirostat=2)])
def test_nothing_left_is_bad_logits(params: SamplingParams) -> None:
    row = rows(40, 1, seed=2)[0]
    sampler = native_sampler(40, params, 1)
    before = sampler.random_state()
    for allowed, banned in (([], []), ([4, 5], [5, 4])):
        with pytest.raises(_native.BadLogits, match="no token") as caught:
            sampler.sample(row.ctypes.data, mask_of(40, allowed).ctypes.data, banned)
        assert caught.value.logit == -math.inf
    assert sampler.random_state() == before


def test_nonsense_is_refused() -> None:
    row = np.zeros(40, np.float32)
    sampler = native_sampler(40, SamplingParams(), 1)
    for token in (-1, 40):
        with pytest.raises(ValueError, match="vocabulary"):
            sampler.sample(row.ctypes.data, banned=[token])
    for no_token in ("a", 2**40, 1.5):
        with pytest.raises(TypeError, match="banned"):
            sampler.sample(row.ctypes.data, banned=[no_token])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="mask"):
        sampler.sample(row.ctypes.data, 2)
