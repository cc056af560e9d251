"""Batches of embeddings: the texts of concurrent requests are computed together. Must not know HTTP.

One job runs at a time; the requests that arrive meanwhile become the next job.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from llmrun.errors import EngineCrashedError, LlmrunError
from llmrun.model.embeddings import MOST_CHARACTERS, MOST_TEXTS
from llmrun.protocol.jobs.text import EMBED, EmbedTexts, TextsEmbedded
from llmrun.server.connection import EngineConnection

_FLOAT_BYTES = 4


class _Waiting(NamedTuple):
    command: EmbedTexts
    done: asyncio.Future[TextsEmbedded]


class EmbeddingBatches:
    """The embedding requests of one engine."""

    def __init__(self, engine: EngineConnection) -> None:
        self._engine = engine
        self._waiting: list[_Waiting] = []
        self._working: asyncio.Task[None] | None = None

    async def embed(self, command: EmbedTexts) -> TextsEmbedded:
        """Return the vectors of a command.

        Raises:
            LlmrunError: the job failed.
        """
        one = _Waiting(command, asyncio.get_running_loop().create_future())
        self._waiting.append(one)
        if self._working is None or self._working.done():
            self._working = asyncio.ensure_future(self._work())
        return await one.done

    async def _work(self) -> None:
        while self._waiting:
            count = together([one.command for one in self._waiting])
            chosen, self._waiting = self._waiting[:count], self._waiting[count:]
            try:
                answers = await self._answers([one.command for one in chosen])
            except LlmrunError as error:
                await self._one_by_one(chosen, error)
            else:
                for one, answer in zip(chosen, answers, strict=True):
                    _resolve(one, answer)

    async def _one_by_one(self, chosen: Sequence[_Waiting], error: LlmrunError) -> None:
        """Run the commands of a failed job one by one, so that only the cause gets the error."""
        for one in chosen:
            try:
                _resolve(one, error if len(chosen) == 1 else (await self._answers([one.command]))[0])
            except LlmrunError as own:
                _resolve(one, own)

    async def _answers(self, commands: Sequence[EmbedTexts]) -> list[TextsEmbedded]:
        """Return the result of each command, computed by one job. The engine is untrusted."""
        done = await self._engine.do(EMBED, merged(commands))
        try:
            return list(split(done, commands))
        except ValueError as error:
            raise EngineCrashedError("the engine sent no vectors", why=f"it sent garbage ({error})") from error


def _resolve(one: _Waiting, answer: TextsEmbedded | LlmrunError) -> None:
    if one.done.done():  # the client has left
        return
    if isinstance(answer, LlmrunError):
        one.done.set_exception(answer)
    else:
        one.done.set_result(answer)


def together(commands: Sequence[EmbedTexts]) -> int:
    """Return the number of commands, from the first on, that can be one job."""
    kind, texts, characters = commands[0]._replace(texts=()), 0, 0
    for number, command in enumerate(commands):
        texts += len(command.texts)
        characters += sum(map(len, command.texts))
        is_full = texts > MOST_TEXTS or characters > MOST_CHARACTERS
        if number and (is_full or command.tokens or command._replace(texts=()) != kind):
            return number
    return len(commands)


def merged(commands: Iterable[EmbedTexts]) -> EmbedTexts:
    first, *others = commands
    return first._replace(texts=(*first.texts, *(text for other in others for text in other.texts)))


def split(done: TextsEmbedded, commands: Sequence[EmbedTexts]) -> Iterator[TextsEmbedded]:
    """Yield the result of each command of a job.

    Raises:
        ValueError: the result does not fit the commands.
    """
    counts = [len(command.texts or command.tokens) for command in commands]
    data, start = base64.b64decode(done.vectors), 0
    if len(done.tokens) != sum(counts) or len(data) % (_FLOAT_BYTES * len(done.tokens)):
        raise ValueError(f"{len(data)} bytes for {sum(counts)} texts")
    width = len(data) // len(done.tokens)
    for count in counts:
        end = start + count
        own = base64.b64encode(data[start * width : end * width]).decode()
        truncated = tuple(index - start for index in done.truncated if start <= index < end)
        yield TextsEmbedded(own, done.tokens[start:end], truncated)
        start = end
