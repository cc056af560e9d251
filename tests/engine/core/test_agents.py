"""Coding agents whose sub-agents and titles come between the turns of the main conversation, on one server.

None of these requests costs another conversation its prefill, whatever the memory and however few slots there are.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from support.conversation import Conversation
from support.fake_context import END, hashed, tokens_of

from llmrun.engine.core.policy import POLICY

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
        self.computed = 0  # tokens

    def _letters(self, length: int) -> list[int]:
        return tokens_of("".join(self._rng.choices("abcdefgh", k=length)))

    def ask(self, talk: Conversation) -> bool:
        """Do the next turn; return whether there was one."""
        name = next(self._turns, "")
        if name:
            conversation = self._conversations.get(name, [])
            conversation += [*self._letters(self._rng.randint(20, 60)), END]
            text, _ = talk.answer([*conversation], most=6)
            conversation += [*tokens_of(text[:3] + "..."), END]  # in another form, as by clients and templates
            self.computed += talk.finished().stats.prompt_tokens - talk.started().reused_tokens
        return bool(name)


def computed(seeds: Sequence[int], **settings: Any) -> list[int]:
    """Return the tokens that agents compute who take random turns at one engine."""
    talk, agents, rng = (
        Conversation(hashed, n_ctx=N_CTX, n_batch=64, **settings),
        [*map(Agent, seeds)],
        random.Random(7),
    )
    waiting = [*agents]
    while waiting:
        agent = rng.choice(waiting)
        if not agent.ask(talk):
            waiting.remove(agent)
    return [agent.computed for agent in agents]


def assert_as_alone(found: Sequence[int], **memory: Any) -> None:
    """Check what two agents compute against each with a slot for each of its conversations."""
    for seed, tokens in zip((1, 2), found, strict=True):
        assert tokens <= MOST_COMPUTED * computed([seed], n_seq_max=8, **memory)[0]


@pytest.mark.parametrize("n_seq_max", [1, 2, 3, 8])
@pytest.mark.parametrize("memory", MEMORIES)
def test_two_agents_compute_what_each_computes_alone(memory: str, n_seq_max: int) -> None:
    settings = MEMORIES[memory] if n_seq_max > 1 else {**MEMORIES[memory], "n_parked": 0}
    assert_as_alone(computed((1, 2), n_seq_max=n_seq_max, **settings), **MEMORIES[memory])


@pytest.mark.parametrize("memory", ["pool", "recurrent", "window", "pool on a device"])
def test_also_where_all_share_the_cells_of_one_window(memory: str) -> None:
    assert_as_alone(computed((1, 2), n_seq_max=8, n_cells=N_CTX, **MEMORIES[memory]), **MEMORIES[memory])


def test_copies_have_their_checkpoints_beside_those_of_slots() -> None:
    memory = MEMORIES["recurrent"]
    assert_as_alone(computed((1, 2), n_seq_max=2, policy=POLICY._replace(checkpoint_bytes=12_000), **memory), **memory)


def test_without_memory_for_copies_conversations_are_computed_again() -> None:
    memory = MEMORIES["streams"]
    with_copies, without = (computed((1, 2), n_seq_max=1, copy_bytes=n_bytes, **memory) for n_bytes in (10**9, 0))
    assert without[0] > 2 * with_copies[0]
