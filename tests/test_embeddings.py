"""What is put before texts, how they are sent, and what is made of what comes back."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmrun.errors import BadModelError, EngineCrashedError, UsageError
from llmrun.gguf.header import Header
from llmrun.gguf.pooling import command_for, makes_embeddings, pooling_of, refuse_answers
from llmrun.model.embeddings import Embedding, EmbedOptions, Ranking, joined
from llmrun.models.registry import EmbeddingAdvice, load_catalogue, resolve
from llmrun.protocol.jobs.text import TextsEmbedded

ADVICE = EmbeddingAdvice("query: ", "passage: ", least_dimensions=2)


def header(architecture: str = "bert", **settings: Any) -> Header:
    own = {f"{architecture}.{name.replace('__', '.')}": value for name, value in settings.items()}
    metadata = {"general.architecture": architecture, "general.name": "Tiny", f"{architecture}.embedding_length": 4}
    return Header(Path("tiny.gguf"), 1, 3, {**metadata, **own}, ())


def answered(*rows: list[float], **changes: Any) -> TextsEmbedded:
    data = np.array(rows, "<f4").tobytes()
    return TextsEmbedded(base64.b64encode(data).decode(), (3,) * len(rows), **changes)


def embedding(head: Header | None = None, advice: EmbeddingAdvice | None = ADVICE, **options: Any) -> Embedding:
    return Embedding(head or header(pooling_type=1), advice, EmbedOptions(**options))


@pytest.mark.parametrize(
    ("options", "sent"),
    [
        ({}, "passage: a"),
        ({"role": "query"}, "query: a"),
        ({"role": None}, "a"),
        ({"role": "query", "prompt": "find "}, "find a"),
        ({"prompt": ""}, "a"),
    ],
)
def test_the_makers_prompt_goes_before_a_text(options: dict[str, Any], sent: str) -> None:
    (command,) = embedding(**options).commands(["a"])
    assert command.texts == (sent,)


def test_the_prompts_of_the_catalogue_are_known_by_every_way_to_name_a_model() -> None:
    catalogue = load_catalogue()
    wanted = {
        "bge-small": "Represent this sentence for searching relevant passages: ",
        "nomic-embed": "search_query: ",
        "embeddinggemma": "task: search result | query: ",
        "qwen3-embedding-0.6b": (
            "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"
        ),
    }
    named = [entry.alias for entry in catalogue.entries.values() if entry.kind == "embedding"]
    assert set(named) == set(wanted)
    for alias, prompt in wanted.items():
        for name in (alias, catalogue.entries[alias].repository, f"{catalogue.entries[alias].repository}:q8_0"):
            spec = resolve(name)
            assert spec.embedding is not None
            assert spec.embedding.query == prompt


@pytest.mark.parametrize(
    ("head", "pooling", "embeds"),
    [
        (header(pooling_type=2), "cls", True),
        (header(), "mean", True),
        (header("newmodel", attention__causal=False), "mean", True),
        (header("qwen3", pooling_type=3), "last", True),
        (header("qwen3", pooling_type=0), "last", False),
        (header("qwen3", pooling_type=9), "last", False),
        (header("llama"), "last", False),
    ],
)
def test_pooling_is_that_of_the_file(head: Header, pooling: str, embeds: bool) -> None:
    assert (pooling_of(head), makes_embeddings(head)) == (pooling, embeds)
    assert embedding(head, pooling="cls").pooling == "cls"
    if embeds:
        with pytest.raises(UsageError, match="does not answer"):
            refuse_answers(head)
    else:
        refuse_answers(head)


def test_what_the_user_should_know_is_said() -> None:
    assert embedding().notes == ()
    (note,) = embedding(header("llama")).notes
    assert "not made for embeddings" in note
    (note,) = embedding(header()).notes
    assert "does not say" in note
    assert embedding(header(), pooling="mean").notes == ()


def test_a_ranking_model_gives_no_vectors() -> None:
    with pytest.raises(UsageError, match="ranks documents"):
        embedding(header(pooling_type=4))
    (command,) = Ranking(header(pooling_type=4), None).commands("q", ["a", "b"])
    assert (command.query, command.texts, command.pooling) == ("q", ("a", "b"), "rank")
    with pytest.raises(UsageError, match="reranker"):
        refuse_answers(header(pooling_type=4))


@pytest.mark.parametrize(
    ("head", "command"),
    [
        (header("llama"), 'llmrun run x "Hello"'),
        (header(), "llmrun embed x TEXT..."),
        (header(pooling_type=4), "llmrun rerank x QUERY DOCUMENT..."),
    ],
)
def test_the_command_of_a_model_follows_its_purpose(head: Header, command: str) -> None:
    assert command_for(head, "x") == command


@pytest.mark.parametrize(
    ("advice", "dimensions", "is_fine"),
    [(ADVICE, 2, True), (ADVICE, 1, False), (ADVICE, 5, False), (ADVICE, 4, True), (None, 1, True),
     (EmbeddingAdvice(), 2, False), (EmbeddingAdvice(), 4, True)],
)  # fmt: skip
def test_vectors_are_cut_where_that_is_allowed(advice: EmbeddingAdvice | None, dimensions: int, is_fine: bool) -> None:
    if not is_fine:
        with pytest.raises(UsageError):
            embedding(advice=advice, dimensions=dimensions)
        return
    found = embedding(advice=advice, dimensions=dimensions).read(answered([3.0, 4.0, 12.0, 84.0]))
    assert found.vectors.shape == (1, dimensions)
    assert np.linalg.norm(found.vectors) == pytest.approx(1.0)


def test_vectors_have_length_one_unless_that_is_not_wanted() -> None:
    rows = [[3.0, 4.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]
    assert embedding().read(answered(*rows)).vectors.tolist() == [
        [pytest.approx(0.6), pytest.approx(0.8), 0, 0],
        rows[1],
    ]
    assert embedding(normalize=False).read(answered(*rows)).vectors.tolist() == rows


def test_what_is_not_numbers_is_the_models_fault() -> None:
    with pytest.raises(BadModelError, match="no numbers"):
        embedding().read(answered([float("nan"), 0.0, 0.0, 0.0]))


def test_what_is_no_vectors_at_all_is_the_engines_fault() -> None:
    for data in ("AAA", "AAAAAAA=", "AAAAAAAAAAA="):
        with pytest.raises(EngineCrashedError):
            embedding().read(TextsEmbedded(data, (3, 3, 3)))


def test_many_texts_are_many_jobs_in_their_order() -> None:
    texts = [f"{number} " * (number % 50 * 40 + 1) for number in range(300)]
    commands = list(embedding(role=None).commands(iter(texts)))
    assert [text for command in commands for text in command.texts] == texts
    assert len(commands) > 3
    assert max(len(command.texts) for command in commands) <= 128
    assert all(len("".join(command.texts)) <= 4096 for command in commands if len(command.texts) > 1)
    tokens = list(embedding().of_tokens([[1]] * 300))
    assert sum(len(command.tokens) for command in tokens) == 300


def test_other_requests_never_wait_for_many_long_texts() -> None:
    assert [len(command.texts) for command in embedding(role=None).commands(["word " * 400] * 5)] == [2, 2, 1]
    assert [len(command.tokens) for command in embedding().of_tokens([[1] * 500] * 5)] == [2, 2, 1]


def test_an_empty_text_is_refused_by_its_number() -> None:
    with pytest.raises(UsageError, match="text 2 is empty"):
        list(embedding().commands(["a", " \n"]))
    with pytest.raises(UsageError, match="query is empty"):
        list(Ranking(header(), None).commands(" ", ["a"]))


def test_indexes_of_truncated_texts_go_on_from_job_to_job() -> None:
    one, vector = embedding(), [1.0, 0.0, 0.0, 0.0]
    parts = [one.read(answered(vector, vector, truncated=(1,))), one.read(answered(vector, truncated=(0,)))]
    assert joined(parts).truncated == (1, 2)
    assert joined(parts).vectors.shape == (3, 4)
    assert len(joined([]).vectors) == 0


def test_without_a_ranking_head_the_cosine_decides() -> None:
    ranking = Ranking(header(pooling_type=1), ADVICE)
    assert [command.texts for command in ranking.commands("q", ["a", "b"])] == [
        ("query: q",),
        ("passage: a", "passage: b"),
    ]
    ranked = ranking.read([answered([2.0, 0.0, 0.0, 0.0]), answered([1.0, 1.0, 0.0, 0.0], [3.0, 0.0, 0.0, 0.0])])
    assert [(one.index, one.score) for one in ranked] == [(1, pytest.approx(1.0)), (0, pytest.approx(0.5**0.5))]
    assert any("no ranking head" in note for note in ranking.notes)
