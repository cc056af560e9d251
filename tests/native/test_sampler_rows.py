"""Many sequences in one native call: each row as if it were alone, whatever the others are and whoever computes it."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Sequence

import numpy as np
import pytest
from support.masks import mask_of
from support.sampler_cases import PARAMETERS, native_sampler, rows

from llmrun import _native
from llmrun._native import Status
from llmrun.protocol.params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
MANY = 40  # rows: enough for several threads


def sample_rows(
    samplers: Sequence[_native.Sampler], logits: np.ndarray, masks: Sequence[np.ndarray | None] = ()
) -> list[tuple[int, int]]:
    """One call for the rows of a matrix, without bans."""
    addresses = [row.ctypes.data for row in logits]
    words = [None if mask is None else mask.ctypes.data for mask in masks or [None] * len(samplers)]
    return _native.sample_rows(samplers, addresses, words, [()] * len(samplers))


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, MANY])
def test_rows_are_each_one_alone(count: int) -> None:
    n_vocab, names = 700, list(PARAMETERS)
    params = [PARAMETERS[names[row % len(names)]] for row in range(count)]
    together, alone = ([native_sampler(n_vocab, each, seed) for seed, each in enumerate(params)] for _ in range(2))
    generator = np.random.default_rng(count)
    for step in range(6):
        logits = rows(n_vocab, count, seed=step)
        allowed = [generator.permutation(n_vocab)[: generator.integers(60, n_vocab)] for _ in range(count)]
        # What a mask leaves may be impossible already, so that each row keeps some possible tokens of its own.
        possible = [np.flatnonzero(row > -np.inf)[[33, 71]] for row in logits]
        masks = [mask_of(n_vocab, np.append(*both)) for both in zip(allowed, possible, strict=True)]
        words = [mask.ctypes.data if (row + step) % 3 else None for row, mask in enumerate(masks)]
        bans: list[Collection[int]] = [{int(allowed[row][0])} if row % 2 else () for row in range(count)]
        found = _native.sample_rows(together, [row.ctypes.data for row in logits], words, bans)
        expected = []
        for sampler, row, mask, banned in zip(alone, logits, words, bans, strict=True):
            expected.append((sampler.sample(row.ctypes.data, mask, banned), Status.CHOSEN))
            sampler.accept(expected[-1][0])
        assert found == expected
    assert [sampler.random_state() for sampler in together] == [sampler.random_state() for sampler in alone]


def test_the_token_is_accepted() -> None:
    params = SamplingParams(temperature=0.0, presence_penalty=10.0)
    one, other = (native_sampler(3, params, 1) for _ in range(2))
    logits = np.array([[3, 2, 1], [1, 2, 3]], np.float32)
    assert [sample_rows([one, other], logits) for _ in range(3)] == [
        [(0, 0), (2, 0)],
        [(1, 0), (1, 0)],
        [(2, 0), (0, 0)],
    ]


def test_one_alone_may_be_accepted_at_once() -> None:
    sampler = native_sampler(3, SamplingParams(temperature=0.0, presence_penalty=10.0), 1)
    row = np.array([3, 2, 1], np.float32)
    assert [sampler.sample(row.ctypes.data, accept=True) for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("count", [6, MANY])
def test_a_bad_row_says_what_is_wrong_and_spoils_no_other(count: int) -> None:
    logits = np.random.default_rng(9).normal(size=(count, 30)).astype(np.float32)
    logits[1, [4, 7]] = math.nan
    logits[2, 5] = math.inf
    logits[3] = -math.inf
    mask = mask_of(30, [3])
    samplers = [native_sampler(30, SamplingParams(temperature=0.0, presence_penalty=1e-3), 3) for _ in logits]
    states = [sampler.random_state() for sampler in samplers]
    addresses, likeliest = [row.ctypes.data for row in logits], [int(row.argmax()) for row in logits]
    allowed = mask.ctypes.data
    words: list[int | None] = [None, None, None, None, allowed, allowed, *[None] * (count - 6)]
    bans: list[Sequence[int]] = [(), (), (), (), [3], (), *[()] * (count - 6)]
    found = _native.sample_rows(samplers, addresses, words, bans)
    assert found[:6] == [
        (likeliest[0], Status.CHOSEN),
        (4, Status.NOT_A_NUMBER),
        (5, Status.INFINITE),
        (0, Status.IMPOSSIBLE),
        (0, Status.IMPOSSIBLE),
        (3, Status.CHOSEN),
    ]
    assert found[6:] == [(token, Status.CHOSEN) for token in likeliest[6:]]
    moved = [sampler.random_state() != state for sampler, state in zip(samplers, states, strict=True)]
    assert moved == [True, False, False, False, False, *[True] * (count - 5)]


def test_rows_have_to_match_up() -> None:
    row = np.zeros(3, np.float32)
    sampler, address = _native.Sampler(3), row.ctypes.data
    before = sampler.random_state()
    for n_addresses, n_masks, n_bans in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
        with pytest.raises(ValueError, match="as many"):
            _native.sample_rows([sampler], [address] * n_addresses, [None] * n_masks, [()] * n_bans)
    with pytest.raises(ValueError, match="address of the logits"):
        _native.sample_rows([sampler], [2], [None], [()])
    with pytest.raises(ValueError, match="mask"):
        _native.sample_rows([sampler], [address], [2], [()])
    with pytest.raises(ValueError, match="vocabulary"):
        _native.sample_rows([sampler], [address], [None], [[3]])
    with pytest.raises(TypeError, match="banned"):
        _native.sample_rows([sampler], [address], [None], [["a"]])  # type: ignore[list-item]
    for no_sampler in (3, None):
        with pytest.raises(TypeError, match="Sampler"):
            _native.sample_rows([no_sampler], [address], [None], [()])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="same sampler"):
        _native.sample_rows([sampler, _native.Sampler(3), sampler], [address] * 3, [None] * 3, [()] * 3)
    assert sampler.random_state() == before
    assert _native.sample_rows([], [], [], []) == []


def in_threads(count: int, work: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_several_threads_may_sample_at_once() -> None:
    """As in a test or a server with two models: each call has samplers of its own."""
    logits = rows(2000, MANY, seed=4)
    expected = [native_sampler(2000, SamplingParams(), seed).sample(row.ctypes.data) for seed, row in enumerate(logits)]
    found: dict[int, list[list[tuple[int, int]]]] = {number: [] for number in range(3)}

    def work(number: int) -> None:
        for _ in range(20):
            samplers = [native_sampler(2000, SamplingParams(), seed) for seed in range(MANY)]
            found[number].append(sample_rows(samplers, logits))

    in_threads(3, work)
    one_call = [(token, Status.CHOSEN) for token in expected]
    assert found == dict.fromkeys(range(3), [one_call] * 20)


def test_one_thread_may_prepare_a_sampler_and_another_one_use_it() -> None:
    """The prompt is accepted while other rows are being sampled."""
    logits = rows(500, MANY, seed=4)
    params = SamplingParams(repeat_penalty=1.1, repeat_last_n=300, dry_multiplier=0.5, dry_last_n=2000)
    prompt = np.random.default_rng(1).integers(0, 500, 20_000).tolist()
    prepared: list[_native.Sampler] = []

    def work(number: int) -> None:
        if number == 0:
            prepared.append(native_sampler(500, params, 5))
            prepared[0].accept_many(prompt)
        else:
            samplers = [native_sampler(500, params, seed) for seed in range(MANY)]
            for _ in range(20):
                sample_rows(samplers, logits)

    in_threads(2, work)
    alone = native_sampler(500, params, 5)
    alone.accept_many(prompt)
    [(token, status)] = sample_rows(prepared, logits[:1])
    assert (token, status) == (alone.sample(logits[0].ctypes.data), Status.CHOSEN)


FORK = """
import os
import numpy as np
from llmrun import _native

logits = np.random.default_rng(1).normal(size=(40, 300)).astype(np.float32)

def tokens():
    samplers = [_native.Sampler(300, seed=seed) for seed in range(40)]
    return _native.sample_rows(samplers, [row.ctypes.data for row in logits], [None] * 40, [()] * 40)

before = tokens()
child = os.fork()
if child == 0:
    os._exit(0 if tokens() == before else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_does_without_the_threads() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FORK], timeout=60, cwd="/")
    assert done.returncode == 0
