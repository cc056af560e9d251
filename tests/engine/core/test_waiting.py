"""Requests do not wait for anything but the computation: neither for copies of KV states nor for one another."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.conversation import Conversation
from support.fake_context import hashed

from llmrun.engine.core.policy import POLICY
from llmrun.engine.core.states import KVStore
from llmrun.protocol.messages import PrefillProgress, Started
from llmrun.protocol.params import SamplingParams

SAMPLING = SamplingParams(seed=5, temperature=1.0, repeat_penalty=1.2)
SYSTEM = "You answer briefly and well. " * 10
TOKEN_SECONDS, COPY_SECONDS = 0.001, 0.08
LAYOUTS = {
    "pool": {"n_parked": 4},
    "small pool": {"n_parked": 4, "n_cells": 1600},
    "streams": {"streams": True},
    "no pool": {"unified": False},
}


def alone(prompt: str, most: int) -> str:
    return Conversation(hashed, n_ctx=1000).answer(prompt, SAMPLING, most=most)[0]


def watch(talk: Conversation, name: str, look: Callable[..., None]) -> None:
    """Call something before each call of a method of the context, with the same arguments."""
    method = getattr(talk.context, name)

    def watched(*arguments: Any) -> Any:
        look(*arguments)
        return method(*arguments)

    setattr(talk.context, name, watched)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_state_is_copied_out_at_once_between_two_steps_of_others(
    layout: str, on_device: bool, seed: int, tmp_path: Path
) -> None:
    """Conversations go on, others begin alike, prefixes are evicted, saved, restored; nothing of it delays a step.

    But for a piece, on a processor.
    """
    draws = random.Random(seed)
    store = KVStore(tmp_path, "model", 1 << 22)
    talk = Conversation(hashed, store, n_ctx=1000, n_seq_max=4, n_batch=128, on_device=on_device, **LAYOUTS[layout])
    n_copies = 0

    def look(*arguments: Any) -> None:
        nonlocal n_copies
        n_copies += 1
        is_piece = arguments[-1] == POLICY.piece_bytes and not on_device
        assert is_piece or not talk.engine._active, "others wait for it"

    for name in ("state_in_pieces", "write_state", *(("set_state",) if on_device else ())):
        watch(talk, name, look)
    said: list[tuple[str, int]] = []
    prompts = [SYSTEM + f"{number}?" * draws.randint(1, 90) for number in range(7)]
    for request in range(25):
        number = draws.randrange(len(prompts))
        said.append((prompts[number], draws.randint(1, 20)))
        talk.ask(said[-1][0], SAMPLING, most=said[-1][1], request=request)
        prompts[number] += alone(*said[-1]) + " And? "
        for _ in range(draws.choice((0, 1, 3, 20))):
            talk.events += talk.engine.step()
        if draws.random() < 0.3:
            talk.run()
            talk.engine.save_parked()
    talk.run()
    for request, (prompt, most) in enumerate(said):
        assert talk.text(request) == alone(prompt, most)
    assert n_copies, "while it rested"


@pytest.mark.parametrize("n_requests", [1, 8, 32])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_requests_that_fit_begin_within_the_time_of_their_prefill(layout: str, n_requests: int) -> None:
    """Also where the cache is full of earlier conversations, each of which would take long to copy."""
    settings = {**LAYOUTS[layout], "n_cells": 1000 * n_requests}
    talk = Conversation(hashed, n_ctx=1000, n_seq_max=n_requests, n_batch=2048, on_device=True, **settings)
    now = 0.0

    def pass_time(seconds: float) -> None:
        nonlocal now
        now += seconds

    talk.engine._clock = lambda: now
    talk.context.before_decode = lambda call: pass_time(TOKEN_SECONDS * len(talk.context.calls[-1]))
    for name in ("state_in_pieces", "write_state", "set_state"):
        watch(talk, name, lambda *_: pass_time(COPY_SECONDS))
    for number in range(2 * n_requests):
        talk.answer(f"{number:03} " * 20, SAMPLING, most=3)
    talk.events.clear()
    n_tokens = 200
    for request in range(n_requests):
        talk.ask(f"another {request:03} ".ljust(n_tokens, "x"), SAMPLING, most=20, request=request)
    began = now
    while len([event for event in talk.events if isinstance(event, Started)]) < n_requests:
        talk.events += talk.engine.step()
    assert now - began == 0.0, "all of them are admitted at once"
    talk.run()
    for request in range(n_requests):
        stats = talk.finished(request).stats
        assert stats.queue_seconds == 0.0
        assert stats.ttft_seconds < TOKEN_SECONDS * n_requests * (n_tokens + 20), "all of what they compute"


def test_the_time_in_the_queue_is_told() -> None:
    talk = Conversation(hashed, n_ctx=100, n_seq_max=1, unified=True)
    talk.clock.per_token = TOKEN_SECONDS
    talk.ask("x" * 20, SAMPLING, most=10, request=1)
    talk.ask("y" * 20, SAMPLING, most=10, request=2)
    talk.run()
    first, second = (talk.finished(request).stats for request in (1, 2))
    assert first.queue_seconds == 0.0
    assert second.queue_seconds == pytest.approx(TOKEN_SECONDS * (20 + 9))
    assert second.ttft_seconds == pytest.approx(TOKEN_SECONDS * (20 + 9 + 20))


def test_a_device_is_not_waited_for_between_the_pieces_of_a_prompt() -> None:
    """Progress is that of pieces that are computed, and the rate is that of the device."""
    talk = Conversation(hashed, n_ctx=9000, n_seq_max=2, n_batch=2048, streams=True, on_device=True)
    talk.context.is_asynchronous = True
    waits: list[int] = []
    watch(talk, "synchronize", lambda *_: waits.append(len(talk.context.calls)))
    prompt = "".join(random.Random(1).choices("abcdef", k=4096))
    talk.ask(prompt, SAMPLING, most=4, request=1)
    progress = []
    while talk.engine.busy:
        found = talk.engine.step()
        progress += [event.tokens for event in found if isinstance(event, PrefillProgress)]
        talk.events += found
    pieces = [len(call) for call in talk.context.calls if len(call) > 1]
    assert sum(pieces) == 4096
    assert len(pieces) > 2
    assert min(waits) == len(pieces), "the last piece is the first one that is waited for"
    assert progress == [*(sum(pieces[:count]) for count in range(1, len(pieces) - 1)), 4096]
    assert talk.text(1) == Conversation(hashed, n_ctx=9000).answer(prompt, SAMPLING, most=4)[0]


def test_the_progress_of_a_cancelled_prompt_does_not_follow_its_end() -> None:
    talk = Conversation(hashed, n_ctx=9000, n_seq_max=2, n_batch=512, streams=True, on_device=True)
    talk.ask("x" * 4000, SAMPLING, most=4, request=1)
    talk.ask("y" * 4000, SAMPLING, most=4, request=2)
    for _ in range(4):
        talk.events += talk.engine.step()
    talk.engine.cancel(1)
    talk.run()
    assert talk.finished(1).reason == "cancelled"
    assert talk.finished(2).reason == "length"
