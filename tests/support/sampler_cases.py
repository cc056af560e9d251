"""Parameters and logits on which the native sampler is compared with the others.

Owns what is tried; knows nothing of the samplers compared.
"""

from __future__ import annotations

import math
import random
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from llmrun import _native
from llmrun.protocol.params import STEPS, SamplingParams

OFF = SamplingParams(top_k=0, top_p=1.0, min_p=0.0, temperature=1.0)
BANS = tuple((token, -math.inf) for token in range(0, 20, 2))

# Every step alone and in company; each is run as a sequence whose tokens are fed back.
PARAMETERS = {
    "defaults": SamplingParams(),
    "off": OFF,
    "greedy": SamplingParams(temperature=0.0),
    "greedy-untruncated": replace(OFF, temperature=0.0),
    "greedy-penalized": SamplingParams(temperature=0.0, repeat_penalty=1.3),
    "hot": SamplingParams(temperature=3.0),
    "cold": SamplingParams(temperature=0.05),
    "top-k-1": SamplingParams(top_k=1),
    "top-k": replace(OFF, top_k=7),
    "top-k-200": replace(OFF, top_k=200),
    "top-k-over": replace(OFF, top_k=10**6),
    "top-p": replace(OFF, top_p=0.7),
    "top-p-0": replace(OFF, top_p=0.0),
    "top-p-all": replace(OFF, top_p=0.999999),
    "min-p": replace(OFF, min_p=0.1),
    "min-p-1": replace(OFF, min_p=1.0),
    "min-p-low": replace(OFF, min_p=0.001),
    "min-p-dynamic": replace(OFF, min_p=0.05, temperature_range=0.3),
    "min-p-repeat": replace(OFF, min_p=0.05, repeat_penalty=1.1, logit_bias=((5, 2.0), (17, -3.0))),
    "top-p-min-p": replace(OFF, top_p=0.95, min_p=0.05),
    "top-p-repeat": replace(OFF, top_p=0.6, repeat_penalty=1.3, frequency_penalty=0.2),
    "min-p-then-xtc": replace(OFF, min_p=0.01, xtc_probability=0.5, xtc_threshold=0.02),
    "typical": replace(OFF, typical_p=0.6),
    "typical-in-chain": SamplingParams(typical_p=0.8, top_k=100),
    "top-n-sigma": replace(OFF, top_n_sigma=1.0),
    "top-n-sigma-in-chain": SamplingParams(top_n_sigma=1.5, top_k=0),
    "xtc": replace(OFF, xtc_probability=1.0, xtc_threshold=0.05),
    "xtc-sometimes": SamplingParams(xtc_probability=0.4, xtc_threshold=0.1),
    "xtc-one-candidate": SamplingParams(top_k=1, xtc_probability=0.5),
    "repeat": SamplingParams(repeat_penalty=1.2),
    "repeat-short": SamplingParams(repeat_penalty=1.7, repeat_last_n=1),
    "repeat-less-than-1": SamplingParams(repeat_penalty=0.8, repeat_last_n=5),
    "frequency": SamplingParams(frequency_penalty=0.3, repeat_last_n=300),
    "presence": SamplingParams(presence_penalty=1.5, top_k=0),
    "penalties-no-history": SamplingParams(presence_penalty=1.5, repeat_last_n=0),
    "penalties-all": SamplingParams(repeat_penalty=1.1, frequency_penalty=0.2, presence_penalty=-0.5),
    "dry": SamplingParams(dry_multiplier=0.8, top_k=5),
    "dry-long": SamplingParams(dry_multiplier=2.0, dry_base=3.0, dry_allowed_length=1, dry_last_n=400),
    "dry-base-1": SamplingParams(dry_multiplier=0.8, dry_base=1.0, dry_allowed_length=0, dry_last_n=9),
    "dry-base-off": SamplingParams(dry_multiplier=0.8, dry_base=0.9),
    "dry-and-repeat": SamplingParams(dry_multiplier=0.5, dry_last_n=10, repeat_penalty=1.1, repeat_last_n=99),
    "dynamic": SamplingParams(temperature_range=0.5),
    "dynamic-from-0": replace(OFF, temperature=0.4, temperature_range=1.0, temperature_exponent=0.5),
    "dynamic-greedy": SamplingParams(temperature=0.0, temperature_range=0.7, temperature_exponent=2.0),
    "bias": SamplingParams(logit_bias=((3, 5.0), (4, -2.5), (3, 1.0))),
    "bans": SamplingParams(logit_bias=BANS, top_k=0),
    "mirostat-1": SamplingParams(mirostat=1),
    "mirostat-1-low": SamplingParams(mirostat=1, mirostat_tau=1.0, mirostat_eta=0.5, temperature=1.5),
    "mirostat-1-cold": SamplingParams(mirostat=1, temperature=0.0, logit_bias=BANS),
    "mirostat-2": SamplingParams(mirostat=2),
    "mirostat-2-low": SamplingParams(mirostat=2, mirostat_tau=0.5, mirostat_eta=0.3, repeat_penalty=1.5),
    "everything": SamplingParams(
        temperature=1.3, temperature_range=0.4, top_k=60, top_p=0.9, min_p=0.02, typical_p=0.9,
        top_n_sigma=3.0, xtc_probability=0.3, xtc_threshold=0.08, repeat_penalty=1.05,
        frequency_penalty=0.1, presence_penalty=0.1, dry_multiplier=0.7, logit_bias=BANS,
    ),
}  # fmt: skip


def random_parameters(draw: random.Random) -> SamplingParams:
    """Each step switched on with some probability, in random strength."""

    def maybe(value: Any, neutral: Any) -> Any:
        return value if draw.random() < 0.4 else neutral

    # Typical after masked logits computes with NaN, so that all candidates tie and the sort's order decides.
    truncating = maybe({"top_n_sigma": draw.uniform(0.3, 3)}, {"typical_p": maybe(draw.random(), 1.0)})
    return SamplingParams(
        **truncating,
        temperature=maybe(draw.uniform(0, 2), draw.choice([0.0, 0.8, 1.0])),
        temperature_range=maybe(draw.uniform(0, 1), 0.0),
        temperature_exponent=draw.uniform(0.3, 2),
        top_k=maybe(draw.randint(1, 50), 0),
        top_p=maybe(draw.random(), 1.0),
        min_p=maybe(draw.uniform(0, 0.3), 0.0),
        xtc_probability=maybe(draw.random(), 0.0),
        xtc_threshold=draw.uniform(0.01, 0.3),
        repeat_last_n=draw.randint(0, 40),
        repeat_penalty=maybe(draw.uniform(0.7, 1.6), 1.0),
        frequency_penalty=maybe(draw.uniform(-0.5, 1), 0.0),
        presence_penalty=maybe(draw.uniform(-0.5, 1), 0.0),
        dry_multiplier=maybe(draw.uniform(0.1, 3), 0.0),
        dry_base=draw.uniform(0.9, 3),
        dry_allowed_length=draw.randint(0, 4),
        dry_last_n=draw.randint(0, 60),
        mirostat=draw.choice([0, 0, 0, 0, 1, 2]),
        mirostat_tau=draw.uniform(0.3, 6),
        mirostat_eta=draw.random(),
        logit_bias=maybe(tuple((draw.randrange(12), draw.uniform(-3, 3)) for _ in range(4)), ()),
    )


def native_sampler(
    n_vocab: int, params: SamplingParams, seed: int, breakers: Any = (), *, exact: bool = False, remember: int = 0
) -> _native.Sampler:
    values = asdict(params)
    del values["seed"], values["dry_breakers"], values["watermark"], values["watermark_key"]
    return _native.Sampler(n_vocab, seed=seed, dry_breakers=breakers, exact=exact, remember=remember, **values)


def shuffled_order(draw: random.Random) -> tuple[str, ...]:
    """All steps in a random order; often some are left out."""
    order = draw.sample(STEPS, len(STEPS))
    return tuple(order[: draw.choice([len(order), len(order), draw.randrange(len(order))])])


def rows(n_vocab: int, count: int, seed: int) -> np.ndarray:
    """Logits of several kinds in turn: broad, peaked, with equals, with -inf, far from 0."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(count, n_vocab)).astype(np.float32)
    logits[0::6] *= 2
    logits[1::6, :9] += 6
    logits[2::6] = np.round(logits[2::6] * 2) / 2
    logits[3::6][:, 20 % n_vocab :: 3] = -np.inf
    logits[4::6] = logits[4::6] * 8 - 40
    logits[5::6] = np.round(logits[5::6]) * 5
    return np.ascontiguousarray(logits)


def hard_rows(n_vocab: int, seed: int) -> np.ndarray:
    """Logits that a shortcut could get wrong: equal, single, sorted, tiny, huge, clustered, mostly -inf."""
    generator = np.random.default_rng(seed)
    noise = generator.normal(size=n_vocab).astype(np.float32)
    one_hot = np.zeros(n_vocab, np.float32)
    one_hot[n_vocab * 2 // 3] = 30
    clusters = noise * np.float32(0.01)
    clusters[n_vocab // 2 : n_vocab // 2 + 30] += 9
    clusters[-3:] += 10
    mostly_impossible = np.full(n_vocab, -np.inf, np.float32)
    mostly_impossible[:: n_vocab // 11] = noise[:: n_vocab // 11]
    peaked = noise * 2
    peaked[generator.integers(0, n_vocab, 25)] += np.linspace(4, 14, 25, dtype=np.float32)
    return np.stack(
        [
            np.full(n_vocab, 1.5, np.float32), one_hot, np.sort(noise * 3), -np.sort(noise * 3),
            noise * np.float32(1e-39), noise * np.float32(1e37), clusters, mostly_impossible, peaked,
            np.round(noise * 8) / 4,
        ]
    )  # fmt: skip


def may_draw_another(params: SamplingParams, n_vocab: int) -> bool:
    """Whether another token may be drawn than llama.cpp draws: what top-p leaves of many without top-k is not sorted.

    That the kept set and the shares are its own is tested in tests/native/test_sampler_draws.py.
    """
    return params.top_k <= 0 and params.top_p < 1 and n_vocab > 1024
