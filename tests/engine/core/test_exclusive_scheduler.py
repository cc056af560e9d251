"""Requests with different adapters in one loop: none sees what another's adapters computed, and all get their turns."""

from __future__ import annotations

import random
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from support.conversation import Conversation
from support.fake_context import hashed

from llmrun.engine.core.states import KVStore
from llmrun.engine.llama.base import Aborted, DecodeError
from llmrun.protocol.adapters import AdapterScale
from llmrun.protocol.params import SamplingParams

SAMPLING = SamplingParams(seed=5, temperature=1.0, repeat_penalty=1.2)
CHOICES = (
    (),
    (AdapterScale(0, 1.0),),
    (AdapterScale(1, 1.0),),
    (AdapterScale(0, 0.5), AdapterScale(1, 1.0)),
)


def choosing(choice: int) -> dict[str, Any]:
    """What Preparer gives, where a request without adapters is the usual one."""
    adapters = CHOICES[choice]
    return {"adapters": adapters, "salt": f"{adapters}|" if adapters else ""}


def alone(prompt: str, most: int, choice: int) -> str:
    return Conversation(hashed, n_ctx=400, adapts=True).answer(
        prompt, SAMPLING, most=most, **choosing(choice)
    )[0]  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_no_adapter_leaks(seed: int, tmp_path: Path) -> None:
    """Prompts that begin alike, few cells, parked and saved prefixes, aborts: every answer is what it is alone.

    The fake context refuses any batch behind cells that other adapters computed.
    """
    rng = random.Random(seed)
    talk = Conversation(
        hashed,
        KVStore(tmp_path, "a model", 10**9),
        adapts=True,
        n_ctx=400,
        n_seq_max=rng.randint(2, 8),
        n_cells=rng.randint(400, 1200),
        n_batch=rng.choice([32, 128]),
        streams=rng.random() < 0.5,
        n_parked=rng.choice([0, 4]),
    )
    faults = [Aborted(), DecodeError("it failed")]

    def disturb(call: int) -> None:
        if rng.random() < 0.05:
            talk.context.faults[call] = rng.choice(faults[:1] if len(batch_slots(talk)) == 1 else faults)

    talk.context.before_decode = disturb
    system = "".join(rng.choices("abc", k=290))
    asked: dict[int, tuple[str, int, int]] = {}
    for request in range(30):
        prompt = system[: rng.choice([0, 70, 290])] + "".join(rng.choices("xyz", k=rng.randint(1, 30)))
        asked[request] = (prompt, rng.randint(1, 20), rng.randrange(len(CHOICES)))
        talk.ask(prompt, SAMPLING, most=asked[request][1], request=request, **choosing(asked[request][2]))
        for _ in range(rng.choice([0, 0, 1, 10])):
            talk.events += talk.engine.step()
    talk.run()
    for request, expected in asked.items():
        assert talk.text(request) == alone(*expected), f"request {request}"


def batch_slots(talk: Conversation) -> set[int]:
    """Return the requests of the batch that is being decoded."""
    return {entry.sequence_id for entry in talk.context.calls[-1]}


def test_groups_take_turns() -> None:
    """Requests with the same adapters share a batch; a long prompt does not delay the others' tokens."""
    talk = Conversation(hashed, adapts=True, n_ctx=400, n_seq_max=4, n_batch=128)
    talk.clock.per_token = 0.001
    for request, choice in enumerate((0, 1, 0, 1)):
        talk.ask(f"prompt {request}", SAMPLING, most=30, request=request, **choosing(choice))
    talk.run()
    together = [batch for batch in talk.context.calls if len(batch) == 2]
    assert len(together) == 2 * 29
    turns = [(group, len(list(batches))) for group, batches in groupby(batch[0].sequence_id % 2 for batch in together)]
    assert max(length for _, length in turns) <= 4, "nobody waits for long"
    assert [group for group, _ in turns[:6]] in ([0, 1] * 3, [1, 0] * 3)


def test_who_decodes_does_not_wait_for_the_whole_prompt_of_another_group() -> None:
    talk = Conversation(hashed, adapts=True, n_ctx=2000, n_seq_max=2, n_batch=512)
    talk.clock.per_token = 0.01
    talk.ask("short", SAMPLING, most=200, request=1, **choosing(0))
    for _ in range(5):
        talk.events += talk.engine.step()
    talk.ask("x" * 1000, SAMPLING, most=1, request=2, **choosing(1))
    talk.run()
    assert max(map(len, talk.context.calls)) <= 64


def test_one_that_fails_is_found_with_its_own_adapters() -> None:
    """A batch that fails is computed again, each sequence alone."""
    talk = Conversation(hashed, adapts=True, n_ctx=400, n_seq_max=4)
    talk.context.poison = ord("!")
    for request, prompt in enumerate(("fine", "bad!", "good", "also")):
        talk.ask(prompt, SAMPLING, most=8, request=request, **choosing(request // 2))
    talk.run()
    assert talk.failed(1).what == "llama.cpp could not decode it"
    for request, prompt in ((0, "fine"), (2, "good"), (3, "also")):
        assert talk.text(request) == alone(prompt, 8, request // 2)
