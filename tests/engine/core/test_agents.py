"""Coding agents whose sub-agents and titles come between the turns of the main conversation, on one server.

None of these requests costs another conversation its prefill, whatever the memory and however few slots there are.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any

import pytest
from support.conversation import Conversation
from support.fake_context import END, hashed, tokens_of

from llmrun.engine.core.policy import POLICY
from llmrun.protocol.messages import Finished

N_CTX = 2000
MEMORIES: dict[str, dict[str, Any]] = {
    "pool": {"n_parked": 4},
    "recurrent": {"cuts": False, "has_checkpoints": True},
    "window": {"window": 100, "has_checkpoints": True, "n_parked": 4},
    "streams": {"streams": True},
    "streams on a device": {"streams": True, "on_device": True},
    "pool on a device": {"on_device": True, "n_parked": 4},
    "apart": {"unified": False},
}
ORDER = ("main", "title", *["main"] * 3, *["a", "b"] * 2, "a", "main", "b", "main", "title", *["main"] * 4)
MOST_COMPUTED = 1.1  # times the tokens that an agent computes alone


class Agent:
    """The prompts of a main conversation, of two sub-agents that begin alike, and for titles, in turns."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        sub_agent = [*self._letters(150), END]
        self._conversations = {"main": [*self._letters(400), END], "a": sub_agent, "b": [*sub_agent]}
        self._turns = iter(ORDER)
        self._conversation: list[int] = []
        self.request = seed
        self.computed = 0  # tokens

    def _letters(self, length: int) -> list[int]:
        return tokens_of("".join(self._rng.choices("abcdefgh", k=length)))

    def begin(self, talk: Conversation, most: int) -> bool:
        """Ask the next turn, for an answer of `most` tokens; return whether there was one."""
        name = next(self._turns, "")
        if name:
            self._conversation = self._conversations.get(name, [])
            self._conversation += [*self._letters(self._rng.randint(20, 60)), END]
            talk.ask([*self._conversation], most=most, request=self.request)
        return bool(name)

    def has_answer(self, talk: Conversation) -> bool:
        """Take the answer, if it is whole."""
        found = talk.of(self.request)
        if not found or not isinstance(found[-1], Finished):
            return False
        started, text = talk.started(self.request), talk.text(self.request)
        self._conversation += [*tokens_of(text[:3] + "..."), END]  # in another form, as by clients and templates
        self.computed += found[-1].stats.prompt_tokens - started.reused_tokens
        talk.events = [event for event in talk.events if event not in found]
        return True


def conversation(**settings: Any) -> Conversation:
    return Conversation(hashed, n_ctx=N_CTX, n_batch=64, **settings)


def computed(seeds: Sequence[int], **settings: Any) -> list[int]:
    """Return the tokens that agents compute who take random turns at one engine."""
    talk, agents, rng = conversation(**settings), [*map(Agent, seeds)], random.Random(7)
    waiting = [*agents]
    while waiting:
        agent = rng.choice(waiting)
        if agent.begin(talk, most=6):
            talk.run()
            assert agent.has_answer(talk)
        else:
            waiting.remove(agent)
    return [agent.computed for agent in agents]


def computed_at_once(pause: int, **settings: Any) -> tuple[list[int], float]:
    """Return the tokens that two agents compute whose answers overlap, and the share of steps in which they do.

    Args:
        pause: steps from an agent's answer to its next prompt, at most.
    """
    talk, rng, n_both = conversation(**settings), random.Random(7), 0
    agents = [Agent(1), Agent(2)]
    pauses: dict[Agent, int | None] = {agents[0]: 0, agents[1]: 8}  # steps; None while the answer is computed
    n_steps = 0
    while pauses:
        for agent, steps in [*pauses.items()]:
            if steps is None and agent.has_answer(talk):
                pauses[agent] = rng.randint(0, pause)
            elif steps == 0 and not agent.begin(talk, most=20):
                del pauses[agent]
            elif steps is not None:
                pauses[agent] = steps - 1 if steps else None
        talk.events += talk.engine.step()
        n_steps += 1
        n_both += talk.engine.status().running == 2
    return [agent.computed for agent in agents], n_both / n_steps


@functools.cache
def computed_alone(seed: int, memory: str) -> int:
    """Return the tokens that an agent computes alone, with a slot for each of its conversations."""
    return computed([seed], n_seq_max=8, **MEMORIES[memory])[0]


def assert_as_alone(found: Sequence[int], memory: str) -> None:
    for seed, tokens in zip((1, 2), found, strict=True):
        assert tokens <= MOST_COMPUTED * computed_alone(seed, memory)


@pytest.mark.parametrize("n_seq_max", [1, 2, 3, 8])
@pytest.mark.parametrize("memory", MEMORIES)
def test_two_agents_compute_what_each_computes_alone(memory: str, n_seq_max: int) -> None:
    settings = MEMORIES[memory] if n_seq_max > 1 else {**MEMORIES[memory], "n_parked": 0}
    assert_as_alone(computed((1, 2), n_seq_max=n_seq_max, **settings), memory)


@pytest.mark.parametrize("memory", ["pool", "recurrent", "window", "pool on a device"])
def test_also_where_all_share_the_cells_of_one_window(memory: str) -> None:
    assert_as_alone(computed((1, 2), n_seq_max=8, n_cells=N_CTX, **MEMORIES[memory]), memory)


def test_copies_have_their_checkpoints_beside_those_of_slots() -> None:
    policy = POLICY._replace(checkpoint_bytes=12_000)
    assert_as_alone(computed((1, 2), n_seq_max=2, policy=policy, **MEMORIES["recurrent"]), "recurrent")


def test_without_memory_for_copies_conversations_are_computed_again() -> None:
    memory = MEMORIES["streams"]
    with_copies, without = (computed((1, 2), n_seq_max=1, copy_bytes=n_bytes, **memory) for n_bytes in (10**9, 0))
    assert without[0] > 2 * with_copies[0]


# ---- while the other one's answer is decoded ---------------------------------------------------------------------


@pytest.mark.parametrize("n_seq_max", [2, 8])
@pytest.mark.parametrize("memory", ["pool", "recurrent", "window", "streams", "apart"])
def test_two_agents_at_once_compute_what_each_computes_alone(memory: str, n_seq_max: int) -> None:
    found, share = computed_at_once(3, n_seq_max=n_seq_max, **MEMORIES[memory])
    assert share > 0.5, "they seldom overlapped"
    assert_as_alone(found, memory)


@pytest.mark.parametrize("pause", [0, 10])
@pytest.mark.parametrize("memory", ["pool", "recurrent", "window"])
def test_at_once_also_where_all_share_the_cells_of_one_window(memory: str, pause: int) -> None:
    found, _ = computed_at_once(pause, n_seq_max=8, n_cells=N_CTX, **MEMORIES[memory])
    assert_as_alone(found, memory)


@pytest.mark.parametrize("memory", ["pool", "recurrent", "streams"])
def test_at_once_also_where_a_state_is_copied_in_many_pieces(memory: str) -> None:
    settings = {**MEMORIES[memory], **({"n_cells": N_CTX} if memory == "pool" else {})}
    found, _ = computed_at_once(3, n_seq_max=2, policy=POLICY._replace(piece_bytes=200), **settings)
    assert_as_alone(found, memory)
