"""What waits while an engine computes becomes one job, and each client gets its own part of it."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import numpy as np
import pytest

from llmrun.errors import ContextOverflowError, EngineCrashedError
from llmrun.protocol.codec import as_dict
from llmrun.protocol.jobs import JobKind
from llmrun.protocol.jobs.text import EmbedTexts, TextsEmbedded
from llmrun.runner.requests import read_job
from llmrun.server.embedding_batches import EmbeddingBatches, together


class Engine:
    """Gives each text its length as a vector, once it may; refuses texts that are too long."""

    def __init__(self) -> None:
        self.jobs: list[tuple[str, ...]] = []
        self.may_answer = asyncio.Event()
        self.garbage: dict[str, Any] = {}

    async def do(self, kind: JobKind[Any, Any, TextsEmbedded], command: EmbedTexts) -> TextsEmbedded:
        self.jobs.append(command.texts)
        await self.may_answer.wait()
        if any(len(text) > 5 for text in command.texts) and not command.truncates:
            raise ContextOverflowError("too long")
        rows = np.array([[len(text), 1.0] for text in command.texts], "<f4")
        cut = tuple(index for index, text in enumerate(command.texts) if len(text) > 5)
        done = TextsEmbedded(base64.b64encode(rows.tobytes()).decode(), tuple(map(len, command.texts)), cut)
        return read_job(kind, TextsEmbedded, {**as_dict(done), **self.garbage})


async def asked(engine: Any, commands: list[EmbedTexts]) -> list[Any]:
    batches = EmbeddingBatches(engine)
    tasks = [asyncio.ensure_future(batches.embed(command)) for command in commands]
    while not engine.jobs:
        await asyncio.sleep(0)
    engine.may_answer.set()
    return await asyncio.gather(*tasks, return_exceptions=True)


def command(*texts: str, **changes: Any) -> EmbedTexts:
    return EmbedTexts(texts, **{"pooling": "mean", **changes})


def lengths(done: TextsEmbedded) -> list[float]:
    return np.frombuffer(base64.b64decode(done.vectors), "<f4").reshape(-1, 2)[:, 0].tolist()


def test_who_asks_at_the_same_time_is_answered_together() -> None:
    async def run() -> None:
        engine = Engine()
        found = await asked(engine, [command("a"), command("bb", "ccccccc"), command("dddddd"), command("e")])
        assert engine.jobs == [("a", "bb", "ccccccc", "dddddd", "e")]
        assert [lengths(one) for one in found] == [[1], [2, 7], [6], [1]]
        assert [(one.tokens, one.truncated) for one in found] == [((1,), ()), ((2, 7), (1,)), ((6,), (0,)), ((1,), ())]

    asyncio.run(run())


def test_only_the_one_to_blame_is_refused() -> None:
    async def run() -> None:
        fine, wrong, other = await asked(Engine(), [command(text, truncates=False) for text in ("a", "too long", "bb")])
        assert (lengths(fine), lengths(other)) == ([1], [2])
        assert isinstance(wrong, ContextOverflowError)

    asyncio.run(run())


@pytest.mark.parametrize("garbage", [{"vectors": "AA"}, {"tokens": []}, {"tokens": "x"}, {"more": 1}])
def test_garbage_of_an_engine_leaves_nobody_waiting(garbage: dict[str, Any]) -> None:
    async def run() -> None:
        engine = Engine()
        engine.garbage = garbage
        for found in await asked(engine, [command("a"), command("b", "c")]):
            assert isinstance(found, EngineCrashedError)

    asyncio.run(run())


def test_what_differs_is_not_put_together() -> None:
    assert together([command("a"), command("b")]) == 2
    for other in (command("b", pooling="cls"), command("b", query="q"), command(tokens=((1,),)), command(*["b"] * 128)):
        assert together([command("a"), other]) == 1
    assert together([command(*["a"] * 500), command("b")]) == 1
    assert together([command("a" * 3000), command("b" * 1000), command("c" * 1000)]) == 2
