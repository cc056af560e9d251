"""Vectors and rankings over HTTP, from real engines with tiny models."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.embedding_models import GOLDENS, QUERY, TEXTS, gguf_of
from support.served import CHAT, LiveServer

BERT = "bert, mean"
FOUND: dict[str, Any] = json.loads(GOLDENS.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("embeddings")
    with LiveServer(folder, ("real",), model=gguf_of(BERT, folder), queue=64) as server:
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
        ({"input": [[1, "a"]]}, "usage"),
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
