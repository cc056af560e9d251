"""Routes for embeddings and reranking: OpenAI's /v1/embeddings, Ollama's /api/embed, Jina's /v1/rerank.

Must not know JSON shapes. A request may be several jobs of the engine, with jobs of other requests in between; texts of
concurrent requests are computed together: one job runs at a time, and the requests that arrive meanwhile become the
next one.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from llmrun.errors import EngineCrashedError, LlmrunError, as_llmrun_error
from llmrun.model.embeddings import MOST_CHARACTERS, MOST_TEXTS, Embedding, Ranking, TextVectors, joined
from llmrun.protocol.jobs.text import EMBED, EmbedTexts, TextsEmbedded
from llmrun.server.connection import EngineConnection
from llmrun.server.exchange import ServerState
from llmrun.server.http import read_json
from llmrun.server.pool import PooledModel
from llmrun.server.protocols import embeddings
from llmrun.server.protocols.embeddings import EmbeddingRequest
from llmrun.server.protocols.models import model_header, shown_name

_FLOAT_BYTES = 4


class _Waiting(NamedTuple):
    command: EmbedTexts
    done: asyncio.Future[TextsEmbedded]  # cancelled when the client leaves

    @property
    def size(self) -> int:
        """Characters, or tokens."""
        return sum(map(len, self.command.texts or self.command.tokens))


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
        while waiting := _still_wanted(self._waiting):
            count = together([one.command for one in waiting])
            chosen, self._waiting = waiting[:count], waiting[count:]
            try:
                await self._do(chosen)
            except Exception as error:
                await self._one_by_one(chosen, as_llmrun_error(error))

    async def _do(self, chosen: Sequence[_Waiting]) -> None:
        """Run one job for some commands. It is stopped when the clients of most of it have left, and done again for the
        others."""
        while wanted := _still_wanted(chosen):
            job = asyncio.ensure_future(self._answers([one.command for one in wanted]))
            for one in wanted:
                one.done.add_done_callback(partial(_cancel_if_left, job, wanted))
            await asyncio.wait((job,))
            if not job.cancelled():
                for one, answer in zip(wanted, job.result(), strict=True):
                    _resolve(one, answer)
                break

    async def _one_by_one(self, chosen: Sequence[_Waiting], error: LlmrunError) -> None:
        """Run the commands of a failed job one by one, so that only the cause gets the error."""
        for one in chosen:
            if len(chosen) == 1:
                _resolve(one, error)
                continue
            try:
                await self._do([one])
            except Exception as own:
                _resolve(one, as_llmrun_error(own))

    async def _answers(self, commands: Sequence[EmbedTexts]) -> list[TextsEmbedded]:
        """Return the result of each command, computed by one job. The engine is untrusted."""
        done = await self._engine.do(EMBED, merged(commands))
        try:
            return list(split(done, commands))
        except ValueError as error:
            raise EngineCrashedError("the engine sent no vectors", why=f"it sent garbage ({error})") from error


def _still_wanted(waiting: Iterable[_Waiting]) -> list[_Waiting]:
    """Return the requests whose clients have not left."""
    return [one for one in waiting if not one.done.done()]


def _cancel_if_left(job: asyncio.Future[Any], chosen: Sequence[_Waiting], done: asyncio.Future[Any]) -> None:
    """Cancel the job of some requests if the clients of most of its text have left."""
    if 2 * sum(one.size for one in _still_wanted(chosen)) < sum(one.size for one in chosen):
        job.cancel()


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


Read = Callable[[Mapping[str, Any]], EmbeddingRequest]
Write = Callable[[EmbeddingRequest, TextVectors, str], Any]
_RERANK_PATHS = ("/v1/rerank", "/v2/rerank", "/rerank", "/v1/reranking", "/reranking")


def _in_order(request: EmbeddingRequest, embedding: Embedding, results: Iterable[TextsEmbedded]) -> TextVectors:
    """Return the vectors in the order of the request's input."""
    found = joined(map(embedding.read, results))
    if not request.places:
        return found
    order = sorted(range(len(request.places)), key=request.places.__getitem__)
    return TextVectors(found.vectors[order], tuple(found.tokens[index] for index in order))


class EmbeddingRoutes:
    """The routes for embeddings and reranking."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._batches: dict[EngineConnection, EmbeddingBatches] = {}

    @property
    def routes(self) -> list[Route]:
        embeds: dict[str, tuple[Read, Write]] = {
            "/v1/embeddings": (embeddings.read_openai, embeddings.openai_body),
            "/api/embed": (embeddings.read_ollama, embeddings.ollama_body),
            "/api/embeddings": (embeddings.read_ollama_prompt, embeddings.ollama_prompt_body),
            "/embedding": (embeddings.read_native, embeddings.native_body),
            "/embeddings": (embeddings.read_native, embeddings.native_body),
        }
        return [
            *(Route(path, self._embedding(*both), methods=["POST"]) for path, both in embeds.items()),
            *(Route(path, self._rerank, methods=["POST"]) for path in _RERANK_PATHS),
        ]

    def _embedding(self, read: Read, write: Write) -> Any:
        async def embed(http: Request) -> Response:
            request = read(await read_json(http.receive))
            self._state.pool.adapters.refuse(self._state.pool.true_name(request.model))
            async with self._state.engine(request.model, http.receive, request.keep_seconds) as (engine, pooled):
                embedding = Embedding(pooled.loaded_model.header, pooled.located.spec.embedding, request.options)
                commands = (*embedding.commands(request.texts), *embedding.of_tokens(request.tokens))
                results = await self._results(engine, commands)
            name, headers, _ = self._log_usage(http, request.model, pooled, results)
            body = await asyncio.to_thread(lambda: write(request, _in_order(request, embedding, results), name))
            return await asyncio.to_thread(JSONResponse, body, 200, headers)

        return embed

    async def _rerank(self, http: Request) -> Response:
        request = embeddings.read_rerank(await read_json(http.receive))
        self._state.pool.adapters.refuse(self._state.pool.true_name(request.model))
        async with self._state.engine(request.model, http.receive) as (engine, pooled):
            ranking = Ranking(pooled.loaded_model.header, pooled.located.spec.embedding)
            results = await self._results(engine, list(ranking.commands(request.query, request.documents)))
        name, headers, tokens = self._log_usage(http, request.model, pooled, results)
        return JSONResponse(embeddings.rerank_body(request, ranking.read(results), name, tokens), headers=headers)

    async def _results(self, engine: EngineConnection, commands: Iterable[EmbedTexts]) -> list[TextsEmbedded]:
        """Return the result of each command."""
        if engine not in self._batches:
            self._batches = {each: batches for each, batches in self._batches.items() if each.alive}
            self._batches[engine] = EmbeddingBatches(engine)
        return [await self._batches[engine].embed(command) for command in commands]

    def _log_usage(
        self, http: Request, named: str, pooled: PooledModel, results: Iterable[TextsEmbedded]
    ) -> tuple[str, dict[str, str], int]:
        """Log the model and the computed tokens; return the model's name for the client, headers, and the tokens."""
        name, tokens = self._state.pool.true_name(named) or pooled.name, sum(sum(each.tokens) for each in results)
        http.scope["state"] |= {"model": name, "prompt_tokens": tokens}
        headers = {key.decode(): value.decode() for key, value in model_header(name).items()}
        return shown_name(named, name), headers, tokens
