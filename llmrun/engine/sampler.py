"""One native sampler per sequence, made from what a person asked and what the model demands.

Owns the translation of SamplingParams and a vocabulary into `_native.Sampler`, and of its errors into ours;
must not know the generation loop. The arithmetic is in native/.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Protocol
from weakref import WeakKeyDictionary

from llmrun import _native
from llmrun.errors import BadLogitsError, UsageError
from llmrun.params import SamplingParams

# llama_sampler_init_dry's bounds on one breaker.
_MOST_BREAKER_BYTES = 40
_MOST_TAIL_TOKENS = 20


class Vocabulary(Protocol):
    """What a sampler needs to know of a model; every Backend is one.

    Attributes:
        n_vocab: floats of one row of logits.
        suppressed: tokens the model's makers say must never be sampled.
    """

    n_vocab: int
    suppressed: tuple[int, ...]

    def tokenize(self, text: str, *, special: bool) -> list[int]: ...

    def token_bytes(self, token: int) -> bytes: ...


class SequenceSampler:
    """Chooses the tokens of one sequence and remembers them for the penalties."""

    def __init__(self, params: SamplingParams, seed: int, vocabulary: Vocabulary) -> None:
        """Start a sequence.

        Args:
            params: how to sample; their own seed is not looked at.
            seed: of the random generators, 0 to 2**32 - 1.
            vocabulary: the model's.

        Raises:
            UsageError: the parameters make no sense for this vocabulary.
        """
        values = asdict(params)
        for name in ("seed", "dry_breakers", "logit_bias"):
            del values[name]
        breakers = dry_breaker_tokens(params.dry_breakers, vocabulary) if params.dry_multiplier else []
        try:
            self._native = _native.Sampler(
                vocabulary.n_vocab,
                seed=seed,
                logit_bias=_biases(params, vocabulary),
                dry_breakers=breakers,
                **values,
            )
        except ValueError as error:
            raise UsageError("these sampling parameters make no sense", why=str(error)) from None
        self._bans = any(bias == -math.inf for _, bias in params.logit_bias)

    def accept_prompt(self, tokens: Sequence[int]) -> None:
        """Let the penalties see the prompt, as llama.cpp's server does."""
        self._native.accept_many(tokens)

    def sample(self, address: int) -> int:
        """Choose the next token and make it part of the sequence.

        Args:
            address: of the n_vocab float logits; they are only read.

        Raises:
            BadLogitsError: the logits are not numbers that can be sampled from.
        """
        try:
            token = self._native.sample(address)
        except _native.BadLogits as error:
            raise self._explain(error) from None
        self._native.accept(token)
        return token

    def _explain(self, error: _native.BadLogits) -> BadLogitsError:
        damaged = "the model file is probably damaged: download it again"
        if error.logit != -math.inf:
            value = "NaN" if math.isnan(error.logit) else "infinity"
            return BadLogitsError(
                f"the model produced {value} at token {error.token}",
                why="its logits are not numbers that can be sampled from",
                hint=damaged,
            )
        return BadLogitsError(
            "no token can be sampled",
            why="every logit is -infinity",
            hint="ban fewer tokens with logit_bias" if self._bans else damaged,
        )


def _biases(params: SamplingParams, vocabulary: Vocabulary) -> list[tuple[int, float]]:
    for token, _ in params.logit_bias:
        if token >= vocabulary.n_vocab:
            raise UsageError(
                f"logit_bias names token {token}",
                why=f"the model's tokens are 0 to {vocabulary.n_vocab - 1}",
            )
    # The file's list is not trusted to fit its own vocabulary.
    bans = [(token, -math.inf) for token in vocabulary.suppressed if 0 <= token < vocabulary.n_vocab]
    return [*params.logit_bias, *bans]


# Looking through a whole vocabulary takes tenths of a second; the next request mostly has the same breakers.
_known: WeakKeyDictionary[Vocabulary, dict[str, list[list[int]]]] = WeakKeyDictionary()


def dry_breaker_tokens(breakers: Sequence[str], vocabulary: Vocabulary) -> list[list[int]]:
    """Token sequences in which one of the breaker texts occurs, as llama_sampler_init_dry finds them.

    That is each token whose text contains the breaker; and each token whose text ends with the breaker's
    beginning, followed by the tokens of the rest. Unlike there, control tokens have no text, and a rest
    that begins inside a UTF-8 character is left out.
    """
    known = _known.setdefault(vocabulary, {})
    missing = [breaker for breaker in dict.fromkeys(breakers) if breaker and breaker not in known]
    if missing:
        words = [vocabulary.token_bytes(token) for token in range(vocabulary.n_vocab)]
        by_last_byte = defaultdict[int, list[int]](list)
        for token, word in enumerate(words):
            if word:
                by_last_byte[word[-1]].append(token)
        for breaker in missing:
            known[breaker] = _breaker_tokens(breaker, words, by_last_byte, vocabulary)
    return [tokens for breaker in breakers if breaker for tokens in known[breaker]]


def _breaker_tokens(
    breaker: str, words: Sequence[bytes], by_last_byte: Mapping[int, list[int]], vocabulary: Vocabulary
) -> list[list[int]]:
    data = breaker.encode("utf-8", "replace")[:_MOST_BREAKER_BYTES]
    found = [[token] for token, word in enumerate(words) if data in word]
    for length in range(1, len(data)):
        beginning, rest = data[:length], data[length:]
        near = [(token, words[token]) for token in by_last_byte.get(beginning[-1], [])]
        heads = [token for token, word in near if word.endswith(beginning) and data not in word]
        try:
            tail = vocabulary.tokenize(rest.decode(), special=False)[:_MOST_TAIL_TOKENS] if heads else []
        except UnicodeDecodeError:
            continue
        found += [[token, *tail] for token in heads]
    return found
