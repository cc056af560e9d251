"""Top-p without top-k: the kept sets are llama.cpp's, and the draws come from its probabilities."""

from __future__ import annotations

import numpy as np
import pytest
from support.chi_square import assert_drawn_from
from support.sampler_cases import OFF, hard_rows, native_sampler, rows
from support.sampler_llama import LlamaChain

from llmrun.protocol.params import SamplingParams

CHAINS = {
    "top-p": SamplingParams(top_k=0, top_p=0.7, min_p=0.0, temperature=1.0),
    "top-p-hot": SamplingParams(top_k=0, top_p=0.9, min_p=0.0, temperature=1.5),
    "top-p-min-p": SamplingParams(top_k=0, top_p=0.95, min_p=0.05, temperature=1.0),
    "top-p-repeat": SamplingParams(top_k=0, top_p=0.8, min_p=0.0, temperature=1.0, repeat_penalty=1.3),
}


def prepared(params: SamplingParams, n_vocab: int, seed: int, remember: int = 0):
    """Ours and llama.cpp's after the same prompt."""
    native, llama = native_sampler(n_vocab, params, seed, remember=remember), LlamaChain(n_vocab, params, seed)
    for token in [(i * i) % n_vocab for i in range(50)]:
        native.accept(token)
        llama.accept(token)
    return native, llama


def broad_row(n_vocab: int, seed: int, equals: int = 0) -> np.ndarray:
    """Logits of which top-p keeps dozens or hundreds."""
    generator = np.random.default_rng(seed)
    row = (generator.normal(size=n_vocab) * 0.7).astype(np.float32)
    row[generator.integers(0, n_vocab, 60)] += np.linspace(4, 9, 60, dtype=np.float32)
    row[generator.integers(0, n_vocab, equals)] = 7.5
    return row


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("n_vocab", [300, 5000, 49_152])
def test_kept_sets_are_llama_cpps(name: str, n_vocab: int) -> None:
    native, llama = prepared(CHAINS[name], n_vocab, 5, remember=1)
    several = [*rows(n_vocab, 12, seed=n_vocab), *hard_rows(n_vocab, seed=1), broad_row(n_vocab, 1, equals=6)]
    for row in several if n_vocab < 10_000 else several[-4:]:
        native.sample(row.ctypes.data)
        _, steps = native.explain(0, n_vocab)
        ours = {token for token, p in steps[-1][2] if p > 0}
        theirs = {token for token, p in llama.kept(row).items() if p > 0}
        # Of equal ones at the end of the set, the sort decides which are kept: the same ones on both sides.
        assert ours == theirs
    llama.close()


# Equal logits make the shortlist give up, and the exact way is slow on a large vocabulary.
@pytest.mark.parametrize(("n_vocab", "equals"), [(1500, 6), (12_000, 0)])
@pytest.mark.parametrize("name", CHAINS)
def test_draws_pass_a_chi_square_test(name: str, n_vocab: int, equals: int) -> None:
    native, llama = prepared(CHAINS[name], n_vocab, 40)
    row = broad_row(n_vocab, 2, equals)
    expected = {token: p for token, p in llama.kept(row).items() if p > 0}
    llama.close()
    draws = [native.sample(row.ctypes.data) for _ in range(4000)]
    assert_drawn_from(expected, draws)
    assert equals or native.exact_count == 0


def test_draws_of_a_long_list_pass_a_chi_square_test() -> None:
    # Over 1,024 candidates, a few of them equal: the case in which ours may exchange equal ones.
    n_vocab = 49_152
    params = SamplingParams(top_k=0, top_p=0.5, min_p=0.0, temperature=1.0)
    native, llama = prepared(params, n_vocab, 3)
    row = np.random.default_rng(3).normal(size=n_vocab).astype(np.float32) * 2
    expected = llama.kept(row)
    llama.close()
    assert len(expected) > 1024
    draws = [native.sample(row.ctypes.data) for _ in range(4000)]
    assert native.exact_count == 0
    # By the tens, so that each cell is hit often enough.
    cell = {token: place // 10 for place, token in enumerate(expected)}
    cells: dict[int, float] = {}
    for token, p in expected.items():
        cells[cell[token]] = cells.get(cell[token], 0.0) + p
    assert_drawn_from(cells, [cell[token] for token in draws])


def test_the_test_would_notice() -> None:
    row = broad_row(300, 1)
    llama = LlamaChain(300, OFF, 1)
    expected = llama.kept(row)
    llama.close()
    hotter = native_sampler(300, SamplingParams(top_k=0, top_p=1.0, min_p=0.0, temperature=2.0), 1)
    with pytest.raises(AssertionError):
        assert_drawn_from(expected, [hotter.sample(row.ctypes.data) for _ in range(4000)])
