"""Vectors and rankings over HTTP, from real engines with tiny models."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
from support.embedding_models import GOLDENS, QUERY, TEXTS, gguf_of
from support.served import CHAT, LiveServer

from llmrun.errors import ContextOverflowError, EngineCrashedError, InternalError
from llmrun.protocol.codec import as_dict
from llmrun.protocol.jobs import JobKind
from llmrun.protocol.jobs.text import EmbedTexts, TextsEmbedded
from llmrun.runner.requests import read_job
from llmrun.server.embedding_routes import EmbeddingBatches, together

BERT = "bert, mean"
FOUND: dict[str, Any] = json.loads(GOLDENS.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("embeddings")
    model = gguf_of(BERT, folder)
    with LiveServer(folder, ("real",), model=model, queue=64, aliases={"ada": str(model)}) as server:
        yield server


@pytest.fixture(scope="module")
def unit() -> Any:
    rows = np.array(FOUND[BERT])
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def rows_of(body: Any) -> Any:
    return np.array([one["embedding"] for one in body["data"]])


def test_openai_gets_vectors_of_length_one(server: LiveServer, unit: Any) -> None:
    answer = server.post("/v1/embeddings", {"input": TEXTS, "model": server.model}).json
    assert rows_of(answer) == pytest.approx(unit, abs=1e-3)
    assert [one["index"] for one in answer["data"]] == list(range(len(TEXTS)))
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > len(TEXTS)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/api/embed", "/v1/rerank"])
def test_an_answer_has_the_name_of_its_request(server: LiveServer, path: str) -> None:
    for name in ("ada", server.model):
        answer = server.post(path, {"input": "b", "query": QUERY, "documents": TEXTS, "model": name})
        assert (answer.status, answer.json["model"]) == (200, name)
        assert unquote(answer.headers["x-llmrun-model"]) == server.model


def test_base64_holds_the_same_numbers_and_one_text_needs_no_list(server: LiveServer) -> None:
    plain = rows_of(server.post("/v1/embeddings", {"input": TEXTS[0]}).json)[0]
    packed = server.post("/v1/embeddings", {"input": TEXTS[0], "encoding_format": "base64"}).json["data"][0]
    assert np.frombuffer(base64.b64decode(packed["embedding"]), "<f4") == pytest.approx(plain, abs=1e-7)


def test_token_ids_are_taken_as_they_are(server: LiveServer) -> None:
    texts = server.post("/v1/embeddings", {"input": ["the model", "b"]}).json
    ids = server.post("/v1/embeddings", {"input": [[2, 5, 6, 3], [2, 10, 3]]}).json
    assert rows_of(ids) == pytest.approx(rows_of(texts), abs=1e-5)
    one = server.post("/v1/embeddings", {"input": [2, 5, 6, 3]}).json
    assert rows_of(one) == pytest.approx(rows_of(texts)[:1], abs=1e-5)
    mixed = server.post("/v1/embeddings", {"input": [[2, 10, 3], "the model", [2, 5, 6, 3], "b"]}).json
    order = [1, 0, 0, 1]
    assert rows_of(mixed) == pytest.approx(np.array([rows_of(texts)[place] for place in order]), abs=1e-5)
    objects = [{"prompt_string": "the model"}, {"content": [{"type": "text", "text": "b"}]}]
    assert rows_of(server.post("/v1/embeddings", {"input": objects}).json) == pytest.approx(rows_of(texts), abs=1e-5)
    for one in ([2, "the", 6, 3], [[2, "the", 6, 3]]):
        found = rows_of(server.post("/v1/embeddings", {"input": one}).json)
        assert found == pytest.approx(rows_of(texts)[:1], abs=1e-5)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    for wrong in (["a", [2, None]], ["a", []], {}, {"content": "a"}, {"content": [image]}):
        assert server.post("/v1/embeddings", {"input": wrong}).status == 400


def test_dimensions_are_cut_and_have_length_one_again(server: LiveServer, unit: Any) -> None:
    found = rows_of(server.post("/v1/embeddings", {"input": TEXTS, "dimensions": 8}).json)
    assert found == pytest.approx(unit[:, :8] / np.linalg.norm(unit[:, :8], axis=1, keepdims=True), abs=1e-3)


def test_clients_at_the_same_time_each_get_their_own(server: LiveServer, unit: Any) -> None:
    with ThreadPoolExecutor(16) as threads:
        asked = [threads.submit(server.post, "/v1/embeddings", {"input": TEXTS[n % 4]}) for n in range(48)]
        for number, one in enumerate(asked):
            assert rows_of(one.result().json)[0] == pytest.approx(unit[number % 4], abs=1e-3)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"input": "b a " * 100}, "context_length_exceeded"),
        ({"input": ["b", " "]}, "usage"),
        ({"input": []}, "usage"),
        ({"input": [[1, True]]}, "usage"),
        ({"input": [[99]]}, "usage"),
        ({"input": "b", "dimensions": 65}, "usage"),
        ({"input": "b", "encoding_format": "hex"}, "usage"),
    ],
)
def test_what_is_wrong_is_said(server: LiveServer, body: dict[str, Any], code: str) -> None:
    answer = server.post("/v1/embeddings", body)
    assert (answer.status, answer.code) == (400, code)
    assert server.post("/v1/embeddings", {"input": "b"}).status == 200  # by the same engine
    assert server.engines == 1


def test_ollama_gets_vectors_and_cuts_what_is_too_long(server: LiveServer, unit: Any) -> None:
    answer = server.post("/api/embed", {"model": server.model, "input": [*TEXTS, "b a " * 100]}).json
    assert np.array(answer["embeddings"][:4]) == pytest.approx(unit, abs=1e-3)
    assert answer["prompt_eval_count"] > 32
    refused = server.post("/api/embed", {"input": "b a " * 100, "truncate": False})
    assert (refused.status, refused.json["code"]) == (400, "context-overflow")
    assert server.post("/api/embed", {"model": server.model}).json["embeddings"] == []
    older = server.post("/api/embeddings", {"prompt": TEXTS[0]}).json["embedding"]
    assert older == pytest.approx(FOUND[BERT][0], abs=1e-2)


def test_documents_come_in_order(server: LiveServer, unit: Any) -> None:
    asked = {"query": QUERY, "documents": [TEXTS[1], {"text": QUERY}, TEXTS[3]], "top_n": 2, "return_documents": True}
    results = server.post("/v1/rerank", asked).json["results"]
    assert len(results) == 2
    assert results[0] == {"index": 1, "relevance_score": pytest.approx(1.0), "document": {"text": QUERY}}
    assert results[1]["relevance_score"] < 1.0
    assert server.post("/v1/rerank", {"query": QUERY}).status == 400
    listed = server.post("/rerank", {"query": QUERY, "texts": asked["documents"], "return_text": True}).json
    every = server.post("/rerank", {"query": QUERY, "documents": asked["documents"], "return_documents": True}).json
    assert listed == [
        {"index": each["index"], "score": each["relevance_score"], "text": each["document"]["text"]}
        for each in every["results"]
    ]
    assert server.post("/rerank", {"query": QUERY, "texts": asked["documents"], "top_n": 1}).json == [
        {"index": listed[0]["index"], "score": listed[0]["score"]}
    ]
    for wrong in ({"texts": []}, {"texts": ["a"], "documents": ["a"]}, {"texts": "a"}):
        assert server.post("/rerank", {"query": QUERY, **wrong}).status == 400


def test_an_encoder_does_not_answer(server: LiveServer) -> None:
    answer = server.post(CHAT)
    assert answer.status == 400
    assert "llmrun embed" in answer.json["error"]["message"]


def test_a_ranking_model_ranks_and_gives_no_vectors(tmp_path: Path) -> None:
    with LiveServer(tmp_path, ("real",), model=gguf_of("bert reranker", tmp_path)) as server:
        results = server.post("/v1/rerank", {"query": QUERY, "documents": TEXTS}).json["results"]
        order = np.argsort(FOUND["bert reranker"])[::-1]
        assert [one["index"] for one in results] == order.tolist()
        assert "rerank" in server.post("/v1/embeddings", {"input": "b"}).json["error"]["message"]


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


def test_a_mistake_of_ours_is_answered_too() -> None:
    class Broken(Engine):
        async def do(self, kind: JobKind[Any, Any, TextsEmbedded], command: EmbedTexts) -> TextsEmbedded:
            if "bad" in command.texts:
                raise KeyError("of ours")
            return await super().do(kind, command)

    async def run() -> None:
        engine = Broken()
        engine.jobs.append(())
        first, bad, last = await asyncio.wait_for(asked(engine, [command("a"), command("bad"), command("c")]), 60)
        assert isinstance(bad, InternalError)
        assert (lengths(first), lengths(last)) == ([1], [1])

    asyncio.run(run())


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


@pytest.mark.parametrize(
    ("leaving", "jobs"),
    [
        ("bbbbb", [("bbbbb", "a"), ("a",), ("later",)]),  # most of the job
        ("a", [("bbbbb", "a"), ("later",)]),
    ],
)
def test_a_job_is_done_again_without_most_of_its_clients(leaving: str, jobs: list[tuple[str, ...]]) -> None:
    async def run() -> None:
        engine = Engine()
        batches = EmbeddingBatches(engine)  # type: ignore[arg-type]
        tasks = {text: asyncio.ensure_future(batches.embed(command(text))) for text in ("bbbbb", "a")}
        while not engine.jobs:
            await asyncio.sleep(0)
        later = asyncio.ensure_future(batches.embed(command("later")))
        gone = tasks.pop(leaving)
        gone.cancel()
        await asyncio.wait((gone,))
        while len(engine.jobs) < len(jobs) - 1:
            await asyncio.sleep(0)
        engine.may_answer.set()
        ((text, task),) = tasks.items()
        assert lengths(await task) == [len(text)]
        assert lengths(await later) == [5]
        assert engine.jobs == jobs

    asyncio.run(run())


def test_a_job_without_clients_is_stopped() -> None:
    async def run() -> None:
        engine = Engine()
        batches = EmbeddingBatches(engine)  # type: ignore[arg-type]
        tasks = [asyncio.ensure_future(batches.embed(command(text))) for text in ("bb", "a")]
        while not engine.jobs:
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        assert batches._working is not None
        await batches._working  # the engine answers nothing
        assert engine.jobs == [("bb", "a")]

    asyncio.run(run())


def test_what_differs_is_not_put_together() -> None:
    assert together([command("a"), command("b")]) == 2
    for other in (command("b", pooling="cls"), command("b", query="q"), command(tokens=((1,),)), command(*["b"] * 128)):
        assert together([command("a"), other]) == 1
    assert together([command(*["a"] * 500), command("b")]) == 1
    assert together([command("a" * 3000), command("b" * 1000), command("c" * 1000)]) == 2
