"""The sampler of one sequence: a `_native.Sampler` with a grammar.

Owns the translation of SamplingParams and a vocabulary into native arguments, and of native errors into ours; must not
know the generation loop. The arithmetic is in native/.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from itertools import islice
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from llmrun import _native
from llmrun.errors import BadGrammarError, BadLogitsError, LlmrunError, OutOfMemoryError, UsageError
from llmrun.protocol.messages import TokenLogprob
from llmrun.protocol.params import SamplingParams
from llmrun.protocol.questions import ChainStep, Choice

if TYPE_CHECKING:
    from llmrun.engine.constraint.closing import TimelyEnd
    from llmrun.engine.constraint.matcher import Constraint
    from llmrun.engine.llama.base import Vocabulary

# llama_sampler_init_dry's limits of one breaker.
_MAX_BREAKER_BYTES = 40
_MAX_TAIL_TOKENS = 20
# The parameters that the native sampler takes unchanged.
_OTHERS = frozenset({"seed", "dry_breakers", "logit_bias", "watermark", "watermark_key"})
_CHAIN = tuple(field.name for field in fields(SamplingParams) if field.name not in _OTHERS)


class SequenceSampler:
    """The sampler of one sequence, with its last tokens for the penalties.

    Not thread-safe, but one thread may create it and another one sample.

    Attributes:
        seed: of its random generators, 0 to 2**32 - 1.
        n_logprobs: number of likeliest tokens to report with each token's log probability; None reports nothing.
        logprob: the last token's log probability, if the request has logprobs.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocabulary: Vocabulary,
        prompt: Sequence[int] = (),
        constraint: Constraint | None = None,
        remember: int = 0,
        logprobs: int | None = None,
        end: TimelyEnd | None = None,
        banned: Collection[int] = (),
        *,
        processed_logprobs: bool = False,
    ) -> None:
        """Start a sequence. The native call releases the interpreter's lock.

        Args:
            end: replaces tokens after which the constraint could not be met before the answer's limit.
            prompt: token ids for the penalties, as in llama.cpp's server, and for a watermark.
            logprobs: n_logprobs.
            processed_logprobs: report them after the chain, see AnswerRequest.
            banned: tokens that are never sampled.

        Raises:
            UsageError: the parameters are invalid for this vocabulary.
        """
        self.seed = int.from_bytes(os.urandom(4), "little") if params.seed is None else params.seed
        breakers = dry_breaker_tokens(params.dry_breakers, vocabulary) if params.dry_multiplier else []
        try:
            self._native = _native.Sampler(
                vocabulary.n_tokens,
                seed=self.seed,
                logit_bias=logit_biases(params, vocabulary, banned),
                dry_breakers=breakers,
                watermark=_watermark(params),
                remember=max(remember, int(processed_logprobs)),
                **{name: getattr(params, name) for name in _CHAIN},
            )
        except ValueError as error:
            raise UsageError("these sampling parameters are invalid", why=str(error)) from None
        if logprobs is not None and not 0 <= logprobs <= vocabulary.n_tokens:
            raise UsageError(f"invalid logprobs {logprobs}", why=f"they must be 0 to {vocabulary.n_tokens}")
        self._native.accept_many(prompt)
        self._vocabulary = vocabulary
        self._constraint = constraint
        self._end = end
        self._text = list(prompt) if end is not None else []  # all tokens, for what replaces one
        self._bans = bool(banned) or any(bias == -math.inf for _, bias in params.logit_bias)
        # The last tokens, and whether each was sampled, not forced; the native sampler remembers the sampled ones.
        self._last: deque[tuple[int, bool]] = deque(maxlen=remember)
        self.n_logprobs, self._processes_logprobs = logprobs, processed_logprobs
        self.logprob: TokenLogprob | None = None

    @property
    def remembers(self) -> bool:
        """explain() can explain tokens."""
        return bool(self._last.maxlen)

    def sample(self, address: int, refused: Collection[int] = ()) -> int:
        """Sample the next token from the logits at an address, and append it to the sequence.

        Raises:
            BadLogitsError: no token can be sampled from these logits.
            BadGrammarError: the grammar exceeded a limit.
            OutOfMemoryError: sampling needs more memory.
        """
        mask = self._constraint.mask() if self._constraint else None
        try:
            token = self._native.sample(address, mask, refused, True)
        except _native.BadLogits as error:
            raise self._bad_logits(error, bool(refused)) from None
        except MemoryError:
            raise OutOfMemoryError("there is no memory to sample a token") from None
        return self._record(token, address, refused)

    @property
    def is_cut_short(self) -> bool:
        """The answer was completed because of its limit."""
        return self._end is not None and self._end.is_cut_short

    @property
    def is_plain(self) -> bool:
        """It has neither a grammar nor log probabilities."""
        return self._constraint is None and self.n_logprobs is None

    @property
    def is_reported(self) -> bool:
        """Its tokens are reported with log probabilities, or can be explained."""
        return self.n_logprobs is not None or bool(self._last.maxlen)

    @property
    def native(self) -> _native.Sampler:
        return self._native

    def failure(self, address: int) -> LlmrunError:
        """Return the reason for which no token can be sampled from these logits."""
        try:
            self.sample(address)
        except LlmrunError as error:
            return error
        raise AssertionError("a token can be sampled")

    def record_run(self, tokens: Sequence[int]) -> None:
        """Note the tokens that the native sampler sampled and accepted in a run; is_plain."""
        if self._last.maxlen:
            self._last += ((token, True) for token in tokens)

    def forced(self) -> list[int]:
        """Return the next tokens if the grammar leaves no choice; mostly none."""
        return self._constraint.forced() if self._constraint else []

    def allowed(self, tokens: list[int]) -> int:
        """Return how many first tokens of a draft the grammar allows, as far as it can tell in advance."""
        return self._constraint.allowed(tokens) if self._constraint else len(tokens)

    def follow(self, token: int) -> None:
        self._native.accept(token)
        self._record(token, 0)

    def undraw(self, n_tokens: int, remaining: Sequence[int]) -> None:
        """Remove the last n_tokens as rewind() does, as if they had never been sampled; is_plain."""
        self.rewind(n_tokens, remaining)
        self._native.undraw(n_tokens)

    def rewind(self, n_tokens: int, remaining: Sequence[int]) -> None:
        """Remove the last n_tokens; `remaining` are all others of the sequence, prompt included."""
        if self._constraint and n_tokens:
            self._constraint.rewind(n_tokens)
            if self._end is not None:
                self._end.rewind(n_tokens)
                self._text = list(remaining)
        dropped = [self._last.pop() for _ in range(min(n_tokens, len(self._last)))]
        self._native.rewind(sum(is_sampled for _, is_sampled in dropped), remaining)

    def _record(self, token: int, address: int, refused: Collection[int] = ()) -> int:
        """Update the state outside of the native sampler; return the token, or the one that replaces it.

        Args:
            address: of the logits; 0 for a forced token.
        """
        is_sampled = address != 0
        if self._constraint:
            if is_sampled and self._constraint.refuses(token):
                token = self._other(token, address, refused)
            self._constraint.accept(token)
            if self._end is not None:
                sampled, token = token, self._end.accept(token, is_forced=not is_sampled)
                if token != sampled:
                    self._native.rewind(1, self._text)
                    self._native.accept(token)
                    is_sampled = False
                self._text.append(token)
        if self._last.maxlen:
            self._last.append((token, is_sampled))
        if self.n_logprobs is not None:
            self.logprob = self._logprob(token, address, self.n_logprobs, is_sampled=is_sampled)
        return token

    def _other(self, token: int, address: int, refused: Collection[int]) -> int:
        """Step back from a token that the constraint refuses, and sample another one."""
        assert self._constraint is not None, "it refuses"
        others = {*refused, token}
        while True:
            self._native.rewind(1, self._text)
            try:
                token = self._native.sample(address, self._constraint.mask(), others, True)
            except _native.BadLogits:
                why = "every item that may follow is in the list already"
                raise BadGrammarError("the grammar can't be followed any further", why=why) from None
            if not self._constraint.refuses(token):
                return token
            others.add(token)

    def _logprob(self, token: int, address: int, count: int, *, is_sampled: bool) -> TokenLogprob:
        """Return the log probabilities of a token and of the `count` likeliest; a forced token was certain."""
        if self._processes_logprobs:
            logprobs = self._processed_logprobs(count) if is_sampled else [(token, 0.0)]
        else:
            logprobs = self._native.log_probabilities(address, token, count) if address else [(token, 0.0)]
        (text, data, value), *top = [(*self._text_and_bytes(candidate), logprob) for candidate, logprob in logprobs]
        return TokenLogprob(text, data, value, tuple(top), ids=tuple(candidate for candidate, _ in logprobs))

    def _processed_logprobs(self, count: int) -> list[tuple[int, float]]:
        """Return those of the last sampled token, and of the likeliest that could be drawn, after the whole chain."""
        chosen, steps = self._native.explain(0, count)
        shares = [(token, math.log(share)) for token, share in steps[-1][2] if share > 0]
        likeliest = sorted(shares, key=lambda each: (-each[1], each[0]))[:count]
        return [(chosen, dict(shares).get(chosen, 0.0)), *likeliest]

    def _text_and_bytes(self, token: int) -> tuple[str, tuple[int, ...]]:
        data = self._vocabulary.piece(token) or self._vocabulary.control_piece(token)
        return data.decode("utf-8", "replace"), tuple(data)

    def explain(self, last: int, candidates: int) -> list[Choice]:
        """Explain how the last tokens were sampled, oldest first, each with the likeliest candidates."""
        choices: list[Choice] = []
        n_sampled = 0
        for token, is_sampled in islice(reversed(self._last), last):
            if is_sampled:
                choices.append(self._choice(n_sampled, candidates))
                n_sampled += 1
            else:
                choices.append(Choice(self.text(token), forced=True))
        return choices[::-1]

    def _choice(self, samples_ago: int, count: int) -> Choice:
        chosen, steps = self._native.explain(samples_ago, count)
        tokens = [token for token, _ in steps[0][2]]
        return Choice(
            self.text(chosen),
            forced=False,
            candidates=tuple(map(self.text, tokens)),
            chosen=tokens.index(chosen),
            steps=tuple(ChainStep(name, left, tuple(share for _, share in shares)) for name, left, shares in steps),
        )

    def text(self, token: int) -> str:
        """Return the text of a token for people; an end token has one too."""
        text = self._vocabulary.piece(token).decode("utf-8", "replace")
        return text or ("<end>" if self._vocabulary.is_end(token) else f"<token {token}>")

    def _bad_logits(self, error: _native.BadLogits, refused: bool) -> BadLogitsError:
        damaged = "the model file is probably damaged: download it again"
        if error.logit != -math.inf:
            value = "NaN" if math.isnan(error.logit) else "infinity"
            return BadLogitsError(
                f"the model produced {value} at token {error.token}",
                why="its logits are not numbers that can be sampled from",
                hint=damaged,
            )
        if refused:
            return BadLogitsError(
                "no token can be sampled",
                why="every possible token begins a banned phrase",
                hint="ban fewer phrases",
            )
        return BadLogitsError(
            "no token can be sampled",
            why="every logit is -infinity",
            hint="ban fewer tokens with logit_bias" if self._bans else damaged,
        )


def sample_rows(
    samplers: Sequence[SequenceSampler], addresses: Sequence[int], refused: Sequence[Collection[int]]
) -> list[int | Exception]:
    """Sample the next token of several sequences as SequenceSampler.sample() does, in one native call.

    Returns:
        The tokens; for a sequence that can't continue, what sample() raises, or its constraint.
    """
    if len(samplers) == 1:  # a shortcut for a single user
        try:
            return [samplers[0].sample(addresses[0], refused[0])]
        except Exception as error:
            return [error]
    masks: list[int | None] = []
    errors: dict[int, Exception] = {}
    for row, sampler in enumerate(samplers):
        try:
            masks.append(sampler._constraint.mask() if sampler._constraint else None)
        except Exception as error:
            masks.append(None)
            errors[row] = error
    sampled = _native.sample_rows([sampler._native for sampler in samplers], addresses, masks, refused)
    results: list[int | Exception] = []
    for row, (token, status) in enumerate(sampled):
        try:
            if row in errors:
                raise errors[row]
            if status == _native.Status.CHOSEN:
                token = samplers[row]._record(token, addresses[row], refused[row])
            else:  # its state has not changed: sample again, for the error
                token = samplers[row].sample(addresses[row], refused[row])
            results.append(token)
        except Exception as error:
            results.append(error)
    return results


def _watermark(params: SamplingParams) -> _native.Watermark | None:
    if not params.watermark:
        return None
    from llmrun.protocol.watermark import read_watermark

    return read_watermark(params.watermark).native(params.watermark_key)


def logit_biases(
    params: SamplingParams, vocabulary: Vocabulary, banned: Collection[int] = ()
) -> list[tuple[int, float]]:
    """Return the biases of a request, and the bans of its model; raise UsageError if the model has no such token."""
    biases: list[tuple[int, float]] = []
    for token, bias in params.logit_bias:
        tokens = vocabulary.tokenize(token, special=False) if isinstance(token, str) else [token]
        biases += ((each, bias) for each in tokens)
    for number, _ in biases:
        if number >= vocabulary.n_tokens:
            raise UsageError(
                f"logit_bias names token {number}",
                why=f"the model's tokens are 0 to {vocabulary.n_tokens - 1}",
            )
    # The file's list is not trusted to fit its own vocabulary.
    suppressed = (token for token in vocabulary.suppressed if 0 <= token < vocabulary.n_tokens)
    return [*biases, *((token, -math.inf) for token in (*banned, *suppressed))]


# Searching a whole vocabulary takes tenths of a second; the next request mostly has the same breakers.
_cache: WeakKeyDictionary[Vocabulary, dict[str, list[list[int]]]] = WeakKeyDictionary()
_MAX_CACHED = 1 << 20  # token sequences of all breakers of a vocabulary; a short one has tens of thousands


def dry_breaker_tokens(breakers: Sequence[str], vocabulary: Vocabulary) -> list[list[int]]:
    """Return the token sequences that contain one of the breaker texts, as llama_sampler_init_dry finds them.

    They are each token whose text contains the breaker; and each token whose text ends with the breaker's beginning,
    followed by the tokens of the rest. Unlike in llama.cpp, control tokens have no text, and a rest that begins inside
    a UTF-8 character is left out.
    """
    cached = _cache.setdefault(vocabulary, {})
    wanted = [breaker for breaker in dict.fromkeys(breakers) if breaker]
    missing = [breaker for breaker in wanted if breaker not in cached]
    if missing:
        words = [vocabulary.piece(token) for token in range(vocabulary.n_tokens)]
        by_last_byte = defaultdict[int, list[int]](list)
        for token, word in enumerate(words):
            if word:
                by_last_byte[word[-1]].append(token)
        for breaker in missing:
            cached[breaker] = _breaker_tokens(breaker, words, by_last_byte, vocabulary)
    for breaker in wanted:  # the latest ones stay
        cached[breaker] = cached.pop(breaker)
    found = [tokens for breaker in breakers if breaker for tokens in cached[breaker]]
    while sum(map(len, cached.values())) > _MAX_CACHED:
        del cached[next(iter(cached))]
    return found


def _breaker_tokens(
    breaker: str, words: Sequence[bytes], by_last_byte: Mapping[int, list[int]], vocabulary: Vocabulary
) -> list[list[int]]:
    data = breaker.encode("utf-8", "replace")[:_MAX_BREAKER_BYTES]
    found = [[token] for token, word in enumerate(words) if data in word]
    for length in range(1, len(data)):
        beginning, rest = data[:length], data[length:]
        near = [(token, words[token]) for token in by_last_byte.get(beginning[-1], [])]
        heads = [token for token, word in near if word.endswith(beginning) and data not in word]
        try:
            tail = vocabulary.tokenize(rest.decode(), special=False, begins=False)[:_MAX_TAIL_TOKENS] if heads else []
        except UnicodeDecodeError:
            continue
        found += [[token, *tail] for token in heads]
    return found
