"""The sampler chain once more, slow and obvious: what native/ is compared with on random input.

Owns the rules of llama.cpp's src/llama-sampler.cpp in plain Python over (logit, id) lists; numbers are numpy
float32 where C++ has float, Python floats where it has double, and expf and its like come from the C library.
Equal logits may come out in another order than in C++, whose sorts are not stable.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmrun.protocol.params import SamplingParams

f32 = np.float32
_libm = ctypes.CDLL(ctypes.util.find_library("m"))


def _libm_function(name: str, arguments: int):
    function = getattr(_libm, name)
    function.restype = ctypes.c_float
    function.argtypes = [ctypes.c_float] * arguments
    return lambda *values: f32(function(*values))


expf, logf, log2f = (_libm_function(name, 1) for name in ("expf", "logf", "log2f"))
powf = _libm_function("powf", 2)


class Mt19937:
    """std::mt19937 with the two draws that the chain takes from it, as libstdc++ takes them."""

    def __init__(self, seed: int) -> None:
        state = [seed]
        for i in range(1, 624):
            state.append((1812433253 * (state[-1] ^ (state[-1] >> 30)) + i) & 0xFFFFFFFF)
        self._words = random.Random()
        self._words.setstate((3, (*state, 624), None))

    def word(self) -> int:
        return self._words.getrandbits(32)

    def double(self) -> float:
        low = self.word()
        drawn = (low + self.word() * 2.0**32) / 2.0**64
        return min(drawn, math.nextafter(1.0, 0.0))

    def float(self) -> np.float32:
        return min(f32(self.word()) / f32(2.0**32), np.nextafter(f32(1), f32(0)))


@dataclass
class Candidate:
    id: int
    logit: np.float32
    p: np.float32 = np.float32(0)  # noqa: RUF009 - immutable


class Twin:
    """The same interface as _native.Sampler, over sequences of floats in place of addresses."""

    def __init__(self, params: SamplingParams, seed: int, breakers: tuple[tuple[int, ...], ...] = ()) -> None:
        self.params = params
        self.breakers = breakers
        self.history: list[int] = []
        self.random = Mt19937(seed)
        self.xtc_random = Mt19937(seed)
        self.explained: list[tuple[str, dict[int, float]]] = []  # of the last sample(): after each step
        self.mu = f32(2) * f32(params.mirostat_tau)

    def accept(self, token: int) -> None:
        self.history.append(token)

    def sample(self, logits: np.ndarray) -> int:
        params = self.params
        candidates = [Candidate(i, f32(logit)) for i, logit in enumerate(logits)]
        self.explained = []
        with np.errstate(all="ignore"):
            self._note("model", candidates)
            for token, bias in params.logit_bias:
                candidates[token].logit += f32(bias)
            self._note("logit_bias", candidates)
            if params.mirostat:
                candidates = temperature(candidates, f32(params.temperature))
                self._note("temperature", candidates)
                return self._mirostat(candidates, len(logits))
            for step in params.order:
                candidates = self._step(step, candidates)
                self._note(step, candidates)
            return self._draw(candidates)

    def _note(self, step: str, candidates: list[Candidate]) -> None:
        """Write down the probabilities of those that can be drawn; in double, unlike the chain's own."""
        largest = float(max(candidate.logit for candidate in candidates))
        possible = {c.id: math.exp(float(c.logit) - largest) for c in candidates if c.logit > -np.inf}
        total = sum(possible.values())
        self.explained.append((step, {token: weight / total for token, weight in possible.items()}))

    def _step(self, step: str, candidates: list[Candidate]) -> list[Candidate]:
        params = self.params
        steps = {
            "penalties": self._penalties,
            "dry": self._dry,
            "top_n_sigma": lambda c: top_n_sigma(c, f32(params.top_n_sigma)),
            "top_k": lambda c: top_k(c, params.top_k),
            "typical_p": lambda c: typical(c, f32(params.typical_p)),
            "top_p": lambda c: top_p(c, f32(params.top_p)),
            "min_p": lambda c: min_p(c, f32(params.min_p)),
            "xtc": self._xtc,
            "temperature": self._temperature,
        }
        return steps[step](candidates)

    def _penalties(self, candidates: list[Candidate]) -> list[Candidate]:
        params = self.params
        repeat, frequency = f32(params.repeat_penalty), f32(params.frequency_penalty)
        window = self.history[-params.repeat_last_n :] if params.repeat_last_n else []
        counts = Counter(window)
        for candidate in candidates:
            if count := counts[candidate.id]:
                logit = candidate.logit
                logit = logit * repeat if logit <= 0 else logit / repeat
                candidate.logit = logit - (f32(count) * frequency + f32(params.presence_penalty))
        return candidates

    def _dry(self, candidates: list[Candidate]) -> list[Candidate]:
        params = self.params
        if params.dry_multiplier == 0 or params.dry_base < 1 or params.dry_last_n == 0:
            return candidates
        window = self.history[-params.dry_last_n :]
        limit = self._tokens_after_last_breaker(window)
        if len(window) <= params.dry_allowed_length or limit < params.dry_allowed_length:
            return candidates
        longest: dict[int, int] = {}
        for end in range(1, len(window)):  # window[end] once followed window[:end]
            length = 0
            while length < end and window[end - 1 - length] == window[-1 - length]:
                length += 1
            length = min(length, limit)
            if length >= params.dry_allowed_length:
                longest[window[end]] = max(length, longest.get(window[end], 0))
        base = f32(params.dry_base)
        most = int(f32(88.7228391) / logf(base)) if base > f32(1.000001) else 0
        for candidate in candidates:
            length = longest.get(candidate.id)
            if length is None or (candidate.id,) in self.breakers:
                continue
            exponent = length - params.dry_allowed_length
            exponent = min(exponent, most) if most else exponent
            penalty = f32(float(f32(params.dry_multiplier)) * float(base) ** exponent)
            candidate.logit -= penalty
        return candidates

    def _tokens_after_last_breaker(self, window: list[int]) -> int:
        for start in range(len(window) - 1, -1, -1):
            lengths = [len(b) for b in self.breakers if tuple(window[start : start + len(b)]) == b]
            if lengths:
                return len(window) - start - max(lengths)
        return len(window)

    def _xtc(self, candidates: list[Candidate]) -> list[Candidate]:
        threshold = f32(self.params.xtc_threshold)
        if self.params.xtc_probability <= 0 or threshold > 0.5 or len(candidates) < 2:
            return candidates
        if self.xtc_random.float() > f32(self.params.xtc_probability):
            return candidates
        candidates = softmax(by_logit(candidates))
        over = sum(candidate.p >= threshold for candidate in candidates)
        return candidates[max(over - 1, 0) :]

    def _temperature(self, candidates: list[Candidate]) -> list[Candidate]:
        middle, spread = f32(self.params.temperature), f32(self.params.temperature_range)
        if spread <= 0:
            return temperature(candidates, middle)
        if len(candidates) <= 1:
            return candidates
        low, high = max(f32(0), middle - spread), middle + spread
        candidates = softmax(by_logit(candidates))
        entropy = f32(0)
        for candidate in candidates:
            if candidate.p > 0:
                entropy -= candidate.p * logf(candidate.p)
        share = entropy / -logf(f32(1) / f32(len(candidates)))
        exponent = f32(self.params.temperature_exponent)
        return temperature(candidates, low + (high - low) * powf(share, exponent))

    def _draw(self, candidates: list[Candidate]) -> int:
        largest = max(candidate.logit for candidate in candidates)
        weights = [float(expf(candidate.logit - largest)) for candidate in candidates]
        drawn = self.random.double()
        target = _running_sums(weights)[-1] * drawn
        reached = [total >= target for total in _running_sums(weights)]
        return candidates[reached.index(True)].id

    def _mirostat(self, candidates: list[Candidate], vocabulary_size: int) -> int:
        candidates = softmax(by_logit(candidates))
        if self.params.mirostat == 1:
            candidates = candidates[: _mirostat_k(candidates, vocabulary_size, self.mu)]
        else:
            surprising = [-log2f(candidate.p) > self.mu for candidate in candidates]
            candidates = candidates[: max(1, [*surprising, True].index(True))]
        self._note("mirostat", candidates)
        candidates = softmax(candidates)
        chosen = candidates[0]
        if len(candidates) > 1:
            weights = [float(candidate.p) for candidate in candidates]
            total, drawn = _running_sums(weights)[-1], self.random.double()
            sums = _running_sums([weight / total for weight in weights])
            chosen = candidates[[*(s >= drawn for s in sums[:-1]), True].index(True)]
        error = -log2f(chosen.p) - f32(self.params.mirostat_tau)
        self.mu = self.mu - f32(self.params.mirostat_eta) * error
        return chosen.id


def _running_sums(values: list[float]) -> list[float]:
    total, sums = 0.0, []
    for value in values:
        total += value
        sums.append(total)
    return sums


def _mirostat_k(candidates: list[Candidate], vocabulary_size: int, mu: np.float32) -> int:
    sum_tb, sum_tt = f32(0), f32(0)
    for i in range(min(99, len(candidates) - 1)):
        t = logf(f32(i + 2) / f32(i + 1))
        sum_tb += t * logf(candidates[i].p / candidates[i + 1].p)
        sum_tt += t * t
    exponent = sum_tb / sum_tt
    epsilon = exponent - f32(1)
    share = (epsilon * powf(2, mu)) / (f32(1) - powf(vocabulary_size, -epsilon))
    k = powf(share, f32(1) / exponent)
    # What is no int32 becomes the smallest one, as on x86.
    return max(int(k), 1) if math.isfinite(k) and k < 2**31 else 1


def by_logit(candidates: list[Candidate]) -> list[Candidate]:
    return sorted(candidates, key=lambda candidate: -candidate.logit)


def softmax(candidates: list[Candidate]) -> list[Candidate]:
    largest = max(candidate.logit for candidate in candidates)
    total = f32(0)
    for candidate in candidates:
        candidate.p = expf(candidate.logit - largest)
        total += candidate.p
    for candidate in candidates:
        candidate.p /= total
    return candidates


def top_n_sigma(candidates: list[Candidate], n: np.float32) -> list[Candidate]:
    if n <= 0 or len(candidates) <= 1:
        return candidates
    finite = [candidate.logit for candidate in candidates if candidate.logit != -np.inf]
    total, squares = f32(0), f32(0)
    for logit in finite:
        total += logit
    mean = total / f32(len(finite))
    for logit in finite:
        squares = f32(float(squares) + float(logit - mean) ** 2)
    smallest = max(finite) - n * np.sqrt(squares / f32(len(finite)))
    for candidate in candidates:
        if candidate.logit < smallest:
            candidate.logit = f32(-np.inf)
    return candidates


def top_k(candidates: list[Candidate], k: int) -> list[Candidate]:
    return by_logit(candidates)[:k] if k > 0 else candidates


def typical(candidates: list[Candidate], p: np.float32) -> list[Candidate]:
    if p >= 1:
        return candidates
    candidates = softmax(by_logit(candidates))
    entropy = f32(0)
    for candidate in candidates:
        entropy += -candidate.p * logf(candidate.p)
    candidates = sorted(candidates, key=lambda candidate: abs(-logf(candidate.p) - entropy))
    total = f32(0)
    for kept, candidate in enumerate(candidates, 1):
        total += candidate.p
        if total > p:
            return candidates[:kept]
    return candidates


def top_p(candidates: list[Candidate], p: np.float32) -> list[Candidate]:
    if p >= 1:
        return candidates
    # The sum that the probabilities are divided by is taken in the order the list has, then it is sorted.
    candidates = by_logit(softmax(candidates))
    total = f32(0)
    for kept, candidate in enumerate(candidates, 1):
        total += candidate.p
        if total >= p:
            return candidates[:kept]
    return candidates


def min_p(candidates: list[Candidate], p: np.float32) -> list[Candidate]:
    if p <= 0:
        return candidates
    smallest = max(candidate.logit for candidate in candidates) + logf(p)
    return [candidate for candidate in candidates if candidate.logit >= smallest]


def temperature(candidates: list[Candidate], value: np.float32) -> list[Candidate]:
    if value > 0:
        for candidate in candidates:
            candidate.logit /= value
        return candidates
    best = max(candidates, key=lambda candidate: candidate.logit)  # the first of equals
    for candidate in candidates:
        if candidate is not best:
            candidate.logit = f32(-np.inf)
    return candidates


def assert_twins(native: Any, twin: Twin, prompt: Sequence[int], n_vocab: int, seed: int, draw: random.Random) -> None:
    """Require the same tokens of the native sampler and its twin, which are fed back."""
    native.accept_many(prompt)
    for token in prompt:
        twin.accept(token)
    # A handful of peaks makes repeats, which DRY needs; the logits are all different.
    logits = np.random.default_rng(seed).normal(size=(8, n_vocab)).astype(np.float32)
    logits[:, : draw.randint(1, 4)] += 3
    for row in logits:
        token = native.sample(row.ctypes.data)
        assert token == twin.sample(row)
        native.accept(token)
        twin.accept(token)
