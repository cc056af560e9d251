"""Sampled text with drafts has the model's own distribution: chi-squared tests over 100,000 draws with fixed seeds.

The model is a Markov chain of six letters, so the distribution of each letter is known from the one before it. Drafts
are copied from the text, or by heads that know the chain's likeliest letter. A draw in the place of a drafted letter
has the same distribution as any other, or the verification would prefer what was drafted.
"""

from __future__ import annotations

import ctypes
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.chi_square import assert_drawn_from
from support.conversation import Conversation
from support.drafters import NoDrafts
from support.fake_context import N_VOCAB, FakeVocabulary, tokens_of

from llmrun.engine.core.drafts import Drafting
from llmrun.engine.core.loop import Engine
from llmrun.engine.core.mtp_model import HeadModel
from llmrun.engine.core.sampler import SequenceSampler
from llmrun.engine.core.sequence import Sequence as Request
from llmrun.errors import LlmrunError
from llmrun.protocol.messages import AnswerRequest
from llmrun.protocol.params import Limits, SamplingParams
from llmrun.protocol.speculation import Speculation

LETTERS = tokens_of("abcdef")
LOGITS = (2.5, 1.5, 1.0, 0.5, 0.2, 0.1)
TOKENS = 100  # of an answer
DRAWS = 100_000
SAMPLING = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


def logits_after(letter: int) -> list[float]:
    logits = [-math.inf] * N_VOCAB
    for place, logit in enumerate(LOGITS):
        logits[LETTERS[(LETTERS.index(letter) + place) % len(LETTERS)]] = logit
    return logits


LOGITS_AFTER = {letter: logits_after(letter) for letter in LETTERS}
ROWS = {letter: (ctypes.c_float * N_VOCAB)(*logits) for letter, logits in LOGITS_AFTER.items()}


def chain(tokens: Sequence[int]) -> Sequence[float]:
    return LOGITS_AFTER[tokens[-1]]


class ChainHeads:
    """See llmrun.engine.llama.heads.PredictionHeads: heads that predict as the model does."""

    n_most = 3

    def __init__(self) -> None:
        self._last: list[int] = []

    def begin(self, tokens: Sequence[tuple[int, int]]) -> list[int]:
        """Return each sequence's row of logits."""
        self._last = [token for _, token in tokens]
        return list(range(len(tokens)))

    go_on = begin

    def end(self, sequences: Iterable[int]) -> None:
        """Do nothing: there are no cells."""

    def logits(self, row: int) -> int:
        """Return the address of a row's logits."""
        return ctypes.addressof(ROWS[self._last[row]])


def draws_of(source: str, n_sequences: int, count: int) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Return the letters sampled after each letter, and those of them in whose place one was drafted."""
    target: Any = SimpleNamespace(
        vocabulary=FakeVocabulary(), switch_heads=lambda *, on: None, can_use_heads=lambda slot: True
    )
    heads: Any = HeadModel(target, ChainHeads()) if source == "heads" else None  # type: ignore[arg-type]
    talk = Conversation(chain, draft_model=heads, n_ctx=TOKENS + 8, n_seq_max=n_sequences, n_batch=32)
    found, in_place_of_drafts = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for first in range(0, count // TOKENS, n_sequences):
        for number in range(first, first + n_sequences):
            prompt = [LETTERS[number % len(LETTERS)]]
            drafting = Drafting(Speculation(3), prompt, heads, text=NoDrafts() if heads is not None else None)
            sampler = SequenceSampler(replace(SAMPLING, seed=number), talk.context.vocabulary, prompt, remember=TOKENS)
            talk.engine.add(Request(number, prompt, sampler, AnswerRequest(limits=Limits(TOKENS)), drafting=drafting))
        talk.run()
        for number in range(first, first + n_sequences):
            answer = talk.engine.finished(number)
            for index in range(1, len(answer.tokens)):
                before, token = answer.tokens[index - 1 : index + 1]
                found[before].append(token)
                if index in answer.drafted:
                    in_place_of_drafts[before].append(token)
        talk.events.clear()
        talk.context.calls.clear()
    return found, in_place_of_drafts


def assert_of_the_chain(draws: dict[int, list[int]]) -> None:
    for letter, drawn in draws.items():
        weights = {token: math.exp(LOGITS_AFTER[letter][token]) for token in LETTERS}
        assert_drawn_from({token: each / sum(weights.values()) for token, each in weights.items()}, drawn)


@pytest.mark.slow
@pytest.mark.parametrize(("source", "n_sequences"), [("text", 1), ("heads", 1), ("heads", 4)])
def test_100_000_draws_with_drafts_have_the_models_distribution(source: str, n_sequences: int) -> None:
    draws, in_place_of_drafts = draws_of(source, n_sequences, DRAWS)
    assert sum(map(len, draws.values())) == DRAWS
    assert sum(map(len, in_place_of_drafts.values())) > DRAWS / 3
    assert_of_the_chain(draws)
    assert_of_the_chain(in_place_of_drafts)


@pytest.mark.parametrize(("source", "n_sequences"), [("text", 1), ("heads", 1), ("heads", 4)])
def test_a_verification_that_prefers_what_was_drafted_would_be_seen(
    source: str, n_sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafted token that is the model's likeliest is accepted here, without a draw."""
    sample: Any = Engine._sample

    def greedily(self: Engine, parts: Any) -> list[int | LlmrunError]:
        sampled = sample(self, parts)
        for at, part in enumerate(parts):
            answer = part.sequence
            place = len(answer.tokens) - answer.n_fed
            if place < len(answer.draft) and answer.draft[place] == likeliest_after(answer.tokens[-1]):
                sampled[at] = answer.draft[place]
        return sampled

    monkeypatch.setattr(Engine, "_sample", greedily)
    draws, in_place_of_drafts = draws_of(source, n_sequences, DRAWS // 20)
    for each in (draws, in_place_of_drafts):
        with pytest.raises(AssertionError):
            assert_of_the_chain(each)


def likeliest_after(letter: int) -> int:
    return max(LETTERS, key=LOGITS_AFTER[letter].__getitem__)
