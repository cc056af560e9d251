"""What prompts reuse of earlier ones, and from where: a worse choice gives the same answers, only later.

Each run is a script of conversations that share their beginnings, change earlier turns, take turns and run beside each
other, through idle times, a new context and restarts. The golden file has the reused tokens of each request, and a
letter: c for cells of the slot itself, s for those of another slot, h for a copy in host memory, f for a file.
After a change that is meant, write it anew: python tests/engine/core/test_prefix_hits.py
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from support.conversation import Conversation
from support.fake_context import END, FakeContext, hashed, tokens_of

from llmrun.engine.core.prefix import NO_SALT, Salt
from llmrun.engine.core.states import KVStore

GOLDEN = Path(__file__).with_name("prefix_hits.json")
N_CTX = 1200
MEMORIES: dict[str, dict[str, Any]] = {
    "plain": {"n_parked": 2},
    "recurrent": {"cuts": False, "has_checkpoints": True},
    "window": {"window": 100, "has_checkpoints": True, "n_parked": 2},
    "rollback": {"cuts": False, "has_checkpoints": True, "n_rollback": 3},
    "streams": {"streams": True},
    "device": {"streams": True, "on_device": True},
    "device pool": {"on_device": True, "n_parked": 2},
    "apart": {"unified": False},
    "alone": {"n_seq_max": 1},
}
SEEDS = (1, 2)


class Watched:
    """The requests of a run, and what each reused."""

    def __init__(self, folder: Path, memory: str) -> None:
        self._folder, self._memory = folder, memory
        self._source = ""
        self.hits: list[str] = []
        self.open([])

    def open(self, prefixes: list[Any]) -> None:
        """Begin with a new context, as after a restart if there are no prefixes."""
        settings = {"n_ctx": N_CTX, "n_batch": 64, "n_seq_max": 3, **MEMORIES[self._memory]}
        self.talk = Conversation(hashed, KVStore(self._folder, "model", 1 << 30), prefixes=prefixes, **settings)
        self._watch(self.talk.context)

    def _watch(self, context: FakeContext) -> None:
        set_state, copy = context.set_state, context.copy

        def setting(sequence_id: int, state: bytearray | memoryview, n_tokens: int) -> bool:
            self._source = "f" if isinstance(state, memoryview) else "h"
            return set_state(sequence_id, state, n_tokens)

        def copying(*arguments: Any) -> bool:
            self._source = "s"
            return copy(*arguments)

        context.set_state, context.copy = setting, copying  # type: ignore[method-assign]

    def ask(self, *prompts: tuple[list[int], Salt]) -> list[str]:
        """Return the answers of prompts that are asked at once."""
        engine, numbers = self.talk.engine, range(1, 1 + len(prompts))
        self.talk.events.clear()
        for number, (prompt, salt) in zip(numbers, prompts, strict=True):
            engine.read_ahead(list(prompt), salt)
            self._source = "c"
            self.talk.ask(prompt, most=6, request=number, salt=salt)
            while not self.talk.of(number):
                self.talk.events += engine.step()
            n_reused = self.talk.started(number).reused_tokens
            self.hits.append(f"{n_reused}{self._source}" if n_reused else "0")
        self.talk.run()
        self._wait()
        return [self.talk.text(number) for number in numbers]

    def save(self) -> None:
        """Save what is parked, as the idle engine does."""
        self.talk.engine.save_parked()
        self._wait()

    def _wait(self) -> None:
        """Wait for the files that another thread writes: what is saved and found depends on those that are there."""
        saver = self.talk.engine._slots.saver
        assert saver is not None
        saver.wait()


def letters(rng: random.Random, length: int) -> list[int]:
    return tokens_of("".join(rng.choices("abcdefgh", k=length)))


def hits(memory: str, seed: int, folder: Path) -> str:
    """Return what the requests of a script reuse."""
    rng, run = random.Random(seed), Watched(folder, memory)
    system = [*letters(rng, 300), END]
    salts = [NO_SALT, NO_SALT, NO_SALT, Salt("one"), Salt("two"), Salt("one", "private")]
    conversations = [[*system] for _ in salts]
    conversations[1] = [*letters(rng, 200), END]

    def turn(number: int) -> tuple[list[int], Salt]:
        conversation = conversations[number]
        if len(conversation) > N_CTX - 200:
            conversation[:] = system
        conversation += [*letters(rng, rng.randint(20, 120)), END]
        return list(conversation), salts[number]

    for _ in range(26):
        action, number = rng.random(), rng.randrange(len(salts))
        if action < 0.1:  # an earlier turn is changed
            conversation = conversations[number]
            del conversation[rng.randint(len(conversation) // 2, len(conversation)) :]
        elif action < 0.2:  # a title for a conversation
            run.ask(([*conversations[number], *tokens_of("title?"), END], salts[number]))
        elif action < 0.3:
            run.save()
        elif action < 0.35:
            run.save()
            run.open([])
        elif action < 0.4:
            run.open(run.talk.engine.prefixes())
        numbers = [number] if action < 0.8 else rng.sample(range(len(salts)), 2)
        for each, answer in zip(numbers, run.ask(*map(turn, numbers)), strict=True):
            conversations[each] += [*tokens_of(answer), END]
    return " ".join(run.hits)


def scripts() -> Iterator[tuple[str, int]]:
    return ((memory, seed) for memory in MEMORIES for seed in SEEDS)


@pytest.mark.parametrize(("memory", "seed"), scripts())
def test_prompts_reuse_what_they_did(memory: str, seed: int, tmp_path: Path) -> None:
    assert hits(memory, seed, tmp_path) == json.loads(GOLDEN.read_text())[f"{memory} {seed}"]


def test_the_scripts_reuse_from_everywhere() -> None:
    golden = json.loads(GOLDEN.read_text())
    sources = {
        memory: {each[-1] for seed in SEEDS for each in golden[f"{memory} {seed}"].split()} for memory in MEMORIES
    }
    assert sources["plain"] >= {"c", "s", "h", "f"}
    assert sources["streams"] >= {"c", "s", "h", "f"}
    assert all("c" in each and "f" in each for each in sources.values())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        found = {
            f"{memory} {seed}": hits(memory, seed, Path(temporary) / memory / str(seed)) for memory, seed in scripts()
        }
    GOLDEN.write_text(json.dumps(found, indent=2) + "\n")
