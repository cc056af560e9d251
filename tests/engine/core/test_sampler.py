"""The native sampler: against its slow twin, against llama.cpp itself, and the Python around it."""

from __future__ import annotations

import math
import random
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.sampler_cases import (
    PARAMETERS,
    hard_rows,
    may_draw_another,
    native_sampler,
    random_parameters,
    rows,
    shuffled_order,
)
from support.sampler_llama import assert_same_as_llama
from support.sampler_twin import Mt19937, Twin, assert_twins
from support.seeds import for_seeds

from llmrun import _native
from llmrun.engine.core import sampler as sampler_module
from llmrun.engine.core.sampler import SequenceSampler, dry_breaker_tokens, sample_rows
from llmrun.errors import BadGrammarError, BadLogitsError, UsageError
from llmrun.protocol.params import SamplingParams

# ---- against the twin ------------------------------------------------------------------------------


@for_seeds(300)
def test_native_is_the_twin(seed: int) -> None:
    draw = random.Random(seed)
    n_vocab, params = draw.choice([12, 12, 40, 90]), random_parameters(draw)
    if seed % 2:
        params = replace(params, order=shuffled_order(draw))
        # Where several logits are -inf, typical sampling computes with NaN, and the sort's order decides.
        if params.top_n_sigma > 0 or params.temperature == 0:
            params = replace(params, typical_p=1.0)
    prompt = [draw.randrange(draw.choice([4, 12])) for _ in range(40)]
    starts = [draw.randrange(36) for _ in range(draw.choice([0, 0, 1, 3]))]
    breakers = tuple(tuple(prompt[start : start + draw.randint(1, 3)]) for start in starts)
    assert_twins(
        native_sampler(n_vocab, params, seed, breakers), Twin(params, seed, breakers), prompt, n_vocab, seed, draw
    )


# ---- against llama.cpp -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("n_vocab", [20, 300])
def test_native_is_llama_cpp(name: str, n_vocab: int) -> None:
    assert_same_as_llama(PARAMETERS[name], 1234, rows(n_vocab, 180, seed=n_vocab))


@pytest.mark.parametrize("name", PARAMETERS)
def test_native_is_llama_cpp_where_only_part_is_sorted(name: str) -> None:
    assert_same_as_llama(PARAMETERS[name], 99, rows(3000, 24, seed=5))


@pytest.mark.parametrize("n_vocab", [49_152, 128_256])
@pytest.mark.parametrize("name", ["defaults", "greedy", "penalties-all", "top-p", "min-p", "typical", "mirostat-2"])
def test_native_is_llama_cpp_on_real_vocabularies(name: str, n_vocab: int) -> None:
    assert_same_as_llama(PARAMETERS[name], 7, rows(n_vocab, 6, seed=3))


@pytest.mark.parametrize("n_vocab", [49_152, 128_256, 151_936, 262_144])
def test_the_shortlist_is_llama_cpp_on_hard_rows(n_vocab: int) -> None:
    logits = hard_rows(n_vocab, seed=n_vocab)
    for name in ("defaults", "penalties-all", "greedy-penalized", "min-p", "xtc-sometimes"):
        assert_same_as_llama(PARAMETERS[name], 21, logits)


# ---- the shortlist against every step on the whole vocabulary ----------------------------------------


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("n_vocab", [49_152, 262_144])
def test_the_shortlist_is_exact(name: str, n_vocab: int) -> None:
    params = PARAMETERS[name]
    fast, exact = (native_sampler(n_vocab, params, 77, exact=exact) for exact in (False, True))
    hard = hard_rows(n_vocab, seed=3)
    easy = rows(n_vocab, 2, seed=4)
    # What sorts a whole vocabulary takes milliseconds a row.
    logits = [*easy, *hard] if n_vocab == 49_152 else [easy[0], hard[8], hard[len(name) % 8]]
    for row in logits:
        token, expected = fast.sample(row.ctypes.data), exact.sample(row.ctypes.data)
        assert token == expected or may_draw_another(params, n_vocab)
        for sampler in (fast, exact):
            sampler.accept_many([expected, 5, 70, expected])
    assert fast.random_state() == exact.random_state()
    assert exact.exact_count == len(logits)


@pytest.mark.parametrize(
    "name",
    ["defaults", "greedy", "hot", "repeat", "dry", "bias", "typical-in-chain", "top-n-sigma", "dynamic",
     "xtc-sometimes", "min-p", "min-p-then-xtc", "min-p-repeat", "top-p", "top-p-min-p", "top-p-repeat"],
)  # fmt: skip
def test_distinct_logits_need_no_whole_vocabulary(name: str) -> None:
    sampler = native_sampler(49_152, PARAMETERS[name], 5)
    peaked = hard_rows(49_152, seed=1)[8]
    sampler.accept_many([1, 2, 3, 1, 2])
    for _ in range(3):
        sampler.accept(sampler.sample(peaked.ctypes.data))
    assert sampler.exact_count == 0


def test_the_default_chain_reads_the_logits_once() -> None:
    for n_vocab in (49_152, 128_256):
        row = rows(n_vocab, 1, seed=6)[0]
        sampler = native_sampler(n_vocab, SamplingParams(), 1)
        sampler.sample(row.ctypes.data)
        assert 4 * n_vocab < sampler.bytes_read <= 1.3 * 4 * n_vocab


def test_vocabulary_of_one_still_draws() -> None:
    row = np.array([0.5], np.float32)
    assert_same_as_llama(SamplingParams(), 1, np.full((5, 1), 0.5, np.float32))
    sampler = native_sampler(1, SamplingParams(), 1)
    before = sampler.random_state()
    assert sampler.sample(row.ctypes.data) == 0
    assert sampler.random_state() != before


# ---- the native class ------------------------------------------------------------------------------


def test_a_copy_goes_on_identically_and_alone() -> None:
    params = SamplingParams(repeat_penalty=1.2, dry_multiplier=1.0, xtc_probability=0.5)
    logits = rows(50, 60, seed=1)
    first = native_sampler(50, params, 5)
    for row in logits[:20]:
        first.accept(first.sample(row.ctypes.data))
    second = first.copy()

    def rest(sampler: _native.Sampler) -> list[int]:
        tokens = []
        for row in logits[20:]:
            tokens.append(sampler.sample(row.ctypes.data))
            sampler.accept(tokens[-1])
        return tokens

    assert rest(first) == rest(second)
    assert first.random_state() == second.random_state()


def test_a_seed_gives_std_mt19937() -> None:
    # The standard says the 10,000th word of the default seed 5489 is 4123659995.
    twin = Mt19937(5489)
    assert [twin.word() for _ in range(10_000)][-1] == 4123659995
    words = native_sampler(4, SamplingParams(), 5489).random_state().split("\n")
    assert len(words) == 2
    assert words[0].split()[0] == "5489"


def test_the_logits_are_only_read() -> None:
    row = rows(100, 1, seed=2)[0]
    before = row.copy()
    sampler = native_sampler(100, replace(PARAMETERS["everything"], seed=None), 1)
    sampler.accept_many([1, 2, 3])
    sampler.sample(row.ctypes.data)
    assert np.array_equal(row, before)


@pytest.mark.parametrize("mirostat", [0, 1, 2])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_logits_name_the_first_token(bad: float, mirostat: int) -> None:
    row = rows(30, 1, seed=2)[0]
    row[[17, 21]] = bad
    sampler = native_sampler(30, SamplingParams(mirostat=mirostat, xtc_probability=1.0), 1)
    before = sampler.random_state()
    with pytest.raises(_native.BadLogits, match="token 17") as caught:
        sampler.sample(row.ctypes.data)
    assert caught.value.token == 17
    assert isinstance(caught.value, ValueError)
    assert sampler.random_state() == before


def test_all_banned_is_bad_logits() -> None:
    row = np.zeros(2, np.float32)
    banned = SamplingParams(logit_bias=((0, -math.inf), (1, -math.inf)))
    with pytest.raises(_native.BadLogits, match="no token"):
        native_sampler(2, banned, 1).sample(row.ctypes.data)


@pytest.mark.parametrize("size", [0, -1, 2**24 + 1, 2**32 + 5])
def test_vocabulary_size_is_bounded(size: int) -> None:
    with pytest.raises(ValueError, match="vocabulary_size"):
        _native.Sampler(size)


@pytest.mark.parametrize(
    "values",
    [
        {"top_p": math.nan},
        {"temperature": math.inf},
        {"repeat_penalty": 0.0},
        {"repeat_last_n": -1},
        {"mirostat": 3},
        {"logit_bias": [(10, 1.0)]},
        {"logit_bias": [(1, math.nan)]},
        {"logit_bias": [(1, math.inf)]},
    ],
)
def test_nonsense_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"has to|must not|not in|a bias"):
        _native.Sampler(10, **values)


@pytest.mark.parametrize("values", [{"top_q": 1}, {"top_k": 1.5}, {"temperature": "warm"}, {"top_k": 2**40}])
def test_names_and_types_of_numbers_are_checked(values: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"sampler|number"):
        _native.Sampler(10, **values)


def test_tokens_out_of_range_are_refused() -> None:
    params = SamplingParams(temperature=0.0, presence_penalty=5.0)
    sampler = native_sampler(3, params, 1)
    for bad in (-1, 3):
        with pytest.raises(ValueError, match="vocabulary"):
            sampler.accept(bad)
        with pytest.raises(ValueError, match="vocabulary"):
            sampler.accept_many([2, bad])
    row = np.array([0, 0, 1], np.float32)
    assert sampler.sample(row.ctypes.data) == 2  # the 2 before the bad token was not accepted either


@pytest.mark.parametrize("n_vocab", [5, 300, 49_152])
@pytest.mark.parametrize("count", [0, 1, 20, 3000])
def test_log_probabilities_are_numpys(n_vocab: int, count: int) -> None:
    sampler = native_sampler(n_vocab, SamplingParams(), 1)
    for row in rows(n_vocab, 6, seed=n_vocab):
        wide = row.astype(np.float64)
        expected = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
        found = sampler.log_probabilities(row.ctypes.data, 2, count)
        assert found[0][0] == 2
        likeliest = np.argsort(-wide, kind="stable")[: min(count, np.isfinite(row).sum())]
        assert [token for token, _ in found[1:]] == likeliest.tolist()
        tokens = [token for token, _ in found]
        assert np.allclose([value for _, value in found], expected[tokens], rtol=1e-6, atol=2e-6)


def test_log_probabilities_refuse_nonsense() -> None:
    row = np.zeros(3, np.float32)
    sampler = _native.Sampler(3)
    with pytest.raises(ValueError, match="vocabulary"):
        sampler.log_probabilities(row.ctypes.data, 3, 1)
    row[:] = -math.inf
    with pytest.raises(_native.BadLogits, match="no token"):
        sampler.log_probabilities(row.ctypes.data, 0, 1)


@pytest.mark.parametrize("address", [0, 2])
def test_an_address_that_is_none_is_refused(address: int) -> None:
    with pytest.raises(ValueError, match="address"):
        _native.Sampler(3).sample(address)


# ---- llmrun.engine.core.sampler -------------------------------------------------------------------------


class FakeVocabulary:
    """Words as tokens; tokenizes character by character."""

    def __init__(self, words: list[bytes], suppressed: tuple[int, ...] = ()) -> None:
        self.words = words
        self.n_tokens = len(words)
        self.suppressed = suppressed
        self.looked_at = 0

    def tokenize(self, text: str, *, special: bool, begins: bool = True) -> list[int]:
        assert not special
        return [self.words.index(character.encode()) for character in text]

    def piece(self, token: int) -> bytes:
        self.looked_at += 1
        return self.words[token]


WORDS = [b"a", b"b", b"c", b"xa", b"xab", b"abc", b"zabcz", b"", "é".encode(), "é".encode()[:1]]


def test_dry_breakers_are_llama_cpps() -> None:
    vocabulary = FakeVocabulary(WORDS)
    assert sorted(dry_breaker_tokens(("abc",), vocabulary)) == [[0, 1, 2], [3, 1, 2], [4, 2], [5], [6]]
    assert dry_breaker_tokens(("b", ""), vocabulary) == [[1], [4], [5], [6]]
    assert dry_breaker_tokens(("é",), vocabulary) == [[8]]  # token 9 ends inside the character


def test_dry_breakers_are_looked_for_once_a_model() -> None:
    vocabulary = FakeVocabulary(WORDS)
    dry_breaker_tokens(("abc", "b"), vocabulary)
    dry_breaker_tokens(("b", "abc"), vocabulary)
    assert vocabulary.looked_at == len(WORDS)


def test_few_tokens_of_dry_breakers_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also right where the breakers of one request are more than may stay; the last used ones do."""
    monkeypatch.setattr(sampler_module, "_MAX_CACHED", 5)
    vocabulary = FakeVocabulary(WORDS)
    expected = sorted([[1], [4], [5], [6], [0, 1, 2], [3, 1, 2], [4, 2], [5], [6]])
    for _ in range(3):
        assert sorted(dry_breaker_tokens(("b", "abc"), vocabulary)) == expected
    dry_breaker_tokens(("b",), vocabulary)
    assert sum(map(len, sampler_module._cache[vocabulary].values())) <= 5
    assert "b" in sampler_module._cache[vocabulary]


def test_dry_breakers_cost_nothing_without_dry() -> None:
    vocabulary = FakeVocabulary(WORDS)
    SequenceSampler(SamplingParams(seed=1), vocabulary)
    assert vocabulary.looked_at == 0
    SequenceSampler(SamplingParams(dry_multiplier=1.0), vocabulary)
    assert vocabulary.looked_at == len(WORDS)


def test_dry_breakers_reach_the_native_sampler() -> None:
    row = np.array([2, 1, 3, 0, 0, 0, 0, 0, 0, 0], np.float32)
    params = SamplingParams(temperature=0.0, dry_multiplier=5.0, dry_breakers=())

    def next_token(breakers: tuple[str, ...]) -> int:
        abcab = [0, 1, 2, 0, 1]  # c would repeat
        sampler = SequenceSampler(replace(params, dry_breakers=breakers), FakeVocabulary(WORDS), abcab)
        return sampler.sample(row.ctypes.data)

    assert next_token(()) == 0
    assert next_token(("b",)) == 2


def test_each_sampled_token_joins_the_history() -> None:
    row = np.array([3, 2, 1], np.float32)
    params = SamplingParams(temperature=0.0, presence_penalty=10.0)
    sampler = SequenceSampler(params, FakeVocabulary([b"a", b"b", b"c"]))
    assert [sampler.sample(row.ctypes.data) for _ in range(3)] == [0, 1, 2]


def test_the_prompt_counts_in_the_penalties() -> None:
    row = np.array([3, 2, 1], np.float32)
    params = SamplingParams(temperature=0.0, presence_penalty=10.0)
    sampler = SequenceSampler(params, FakeVocabulary([b"a", b"b", b"c"]), [0, 1])
    assert sampler.sample(row.ctypes.data) == 2


def test_suppressed_tokens_are_never_sampled() -> None:
    row = np.array([3, 2, 1], np.float32)
    vocabulary = FakeVocabulary([b"a", b"b", b"c"], suppressed=(0, 99, -1))  # the file may be wrong
    assert SequenceSampler(SamplingParams(temperature=0.0), vocabulary).sample(row.ctypes.data) == 1


def test_the_seed_is_the_given_one() -> None:
    logits = rows(10, 20, seed=8)

    def tokens(seed: int) -> list[int]:
        sampler = SequenceSampler(SamplingParams(seed=seed), FakeVocabulary(WORDS))
        return [sampler.sample(row.ctypes.data) for row in logits]

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2**32 - 1)


def test_a_bias_outside_the_vocabulary_is_explained() -> None:
    with pytest.raises(UsageError, match="token 10"):
        SequenceSampler(SamplingParams(logit_bias=((10, 1.0),)), FakeVocabulary(WORDS))


def test_a_value_the_native_sampler_refuses_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="bias"):
        SequenceSampler(SamplingParams(logit_bias=((1, 1e300),)), FakeVocabulary(WORDS))


@pytest.mark.parametrize(("logit", "word"), [(math.nan, "NaN"), (math.inf, "infinity")])
def test_bad_logits_blame_the_file(logit: float, word: str) -> None:
    row = np.zeros(10, np.float32)
    row[4] = logit
    sampler = SequenceSampler(SamplingParams(seed=1), FakeVocabulary(WORDS))
    with pytest.raises(BadLogitsError, match=f"{word} at token 4") as caught:
        sampler.sample(row.ctypes.data)
    assert "damaged" in caught.value.hint


def test_banning_everything_is_not_blamed_on_the_file() -> None:
    row = np.zeros(10, np.float32)
    banned = SamplingParams(logit_bias=tuple((token, -math.inf) for token in range(10)))
    with pytest.raises(BadLogitsError, match="no token") as caught:
        SequenceSampler(banned, FakeVocabulary(WORDS)).sample(row.ctypes.data)
    assert "logit_bias" in caught.value.hint
    row[:] = -math.inf
    with pytest.raises(BadLogitsError, match="no token") as caught:
        SequenceSampler(SamplingParams(seed=1), FakeVocabulary(WORDS)).sample(row.ctypes.data)
    assert "damaged" in caught.value.hint


class OnlyLetters:
    """A constraint that allows a, then b, then c, then nothing, and says what it was told."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def mask(self) -> int:
        if len(self.taken) == 3:
            raise BadGrammarError("the grammar can't be followed any further")
        self._words = np.array([1 << len(self.taken)], np.uint32)
        return self._words.ctypes.data

    def accept(self, token: int) -> None:
        self.taken.append(token)

    def refuses(self, token: int) -> bool:
        return False

    def forced(self) -> list[int]:
        return [2] if len(self.taken) == 2 else []

    def rewind(self, n_tokens: int) -> None:
        del self.taken[len(self.taken) - n_tokens :]


def greedy(constraint: Any = None) -> SequenceSampler:
    return SequenceSampler(SamplingParams(temperature=0.0), FakeVocabulary(WORDS), constraint=constraint)


def test_rows_are_sampled_as_each_one_alone() -> None:
    logits = np.random.default_rng(3).normal(size=(9, 10)).astype(np.float32)
    logits[4, 6] = math.nan
    together, alone = ([greedy(OnlyLetters() if row % 3 == 0 else None) for row in range(9)] for _ in range(2))
    addresses = [row.ctypes.data for row in logits]
    refused: list[Collection[int]] = [{row} if row == 5 else () for row in range(9)]
    for count in (9, 1, 9):
        found = sample_rows(together[:count], addresses[:count], refused[:count])
        for sampler, address, banned, token in zip(alone, addresses, refused, found, strict=False):
            if isinstance(token, BadLogitsError):
                with pytest.raises(BadLogitsError, match="NaN at token 6"):
                    sampler.sample(address, banned)
            else:
                assert sampler.sample(address, banned) == token
        assert [isinstance(token, BadLogitsError) for token in found] == [row == 4 for row in range(count)]
    assert sample_rows([], [], []) == []


@pytest.mark.parametrize("n_rows", [1, 2])
def test_a_grammar_that_goes_no_further_is_its_rows_error(n_rows: int) -> None:
    row = np.arange(10, dtype=np.float32)
    samplers = [greedy(OnlyLetters()), greedy()][:n_rows]
    found = [sample_rows(samplers, [row.ctypes.data] * n_rows, [()] * n_rows) for _ in range(4)]
    assert [tokens[0] for tokens in found[:3]] == [0, 1, 2]
    assert isinstance(found[3][0], BadGrammarError)
    assert [tokens[1:] for tokens in found] == [[9][: n_rows - 1]] * 4
