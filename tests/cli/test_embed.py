"""`llmrun embed` and `llmrun rerank`, with real engines and tiny models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.embedding_models import GOLDENS, QUERY, TEXTS, gguf_of
from support.stand_in_hub import stand_in_hub
from typer.testing import CliRunner

from llmrun.cli.app import app
from llmrun.errors import UsageError
from llmrun.models.registry import CatalogueEntry, load_catalogue

BERT = "bert, mean"
FOUND: dict[str, Any] = json.loads(GOLDENS.read_text(encoding="utf-8"))

pytestmark = pytest.mark.usefixtures("package_on_path")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {case: str(gguf_of(case, tmp_path_factory.mktemp("embed"))) for case in (BERT, "bert reranker")}


@pytest.fixture
def llmrun(own_engines: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setenv("LLMRUN_HOME", str(tmp_path / "home"))
    return lambda *arguments, **more: CliRunner().invoke(app, list(arguments), **more)


def rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_pipe_gets_a_json_object_a_line(llmrun: Callable[..., Any], files: dict[str, str]) -> None:
    found = rows(llmrun("embed", files[BERT], "--no-normalize", *TEXTS).stdout)
    assert [(one["index"], one["text"]) for one in found] == list(enumerate(TEXTS))
    assert np.array([one["embedding"] for one in found]) == pytest.approx(np.array(FOUND[BERT]), abs=1e-2)
    assert found[1]["tokens"] == 4


def test_lines_of_files_and_of_stdin_are_texts(
    llmrun: Callable[..., Any], files: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "texts.txt").write_bytes(b"a\r\nthe model\n")
    found = rows(llmrun("embed", files[BERT], "b", str(tmp_path / "texts.txt"), "-", input=b"run\n").stdout)
    assert [one["text"] for one in found] == ["b", "a", "the model", "run"]
    assert [one["text"] for one in rows(llmrun("embed", files[BERT], input=b"run\nb").stdout)] == ["run", "b"]


def test_an_array_of_many_texts(llmrun: Callable[..., Any], files: dict[str, str], tmp_path: Path) -> None:
    words = ("the", "model", "run", "a", "b")
    numbers = range(1, 10_001)
    texts = [" ".join(words[number // 5**place % 5] for place in range(6) if number >= 5**place) for number in numbers]
    target = tmp_path / "vectors.npy"
    done = llmrun("embed", files[BERT], "-t", "1", "-o", str(target), input="\n".join(texts).encode())
    assert "10,000 vectors of 64 dimensions" in done.stderr
    assert done.stdout == ""
    vectors = np.load(target)
    assert (vectors.shape, vectors.dtype) == ((10_000, 64), np.float32)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(np.ones(10_000), abs=1e-5)
    alone = rows(llmrun("embed", files[BERT], texts[7_777]).stdout)[0]["embedding"]
    assert vectors[7_777] == pytest.approx(np.array(alone), abs=1e-3)


def test_what_is_cut_off_is_said_or_refused(llmrun: Callable[..., Any], files: dict[str, str]) -> None:
    done = llmrun("embed", files[BERT], "b", "b a " * 100)
    assert "1 of 2 texts were too long" in done.stderr
    assert [one.get("truncated", False) for one in rows(done.stdout)] == [False, True]
    refused = llmrun("embed", files[BERT], "b", "b a " * 100, "--no-truncate")
    assert str(refused.exception) == "text 2 has 202 tokens, the context window 32", "and no line of llama.cpp's log"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["embed", BERT, "a", " "], "text 2 is empty"),
        (["embed", BERT, "a", "-o", "x.txt"], "must end in .npy"),
        (["embed", BERT, "a", "-o", "x.npy", "--json"], "can't be used together"),
        (["embed", BERT, "a", "--pooling", "rank"], "invalid pooling"),
        (["embed", BERT, "a", "--dimensions", "65"], "invalid dimensions 65"),
        (["embed", "bert reranker", "a"], "ranks documents"),
        (["rerank", BERT, " ", "a"], "query is empty"),
        (["run", BERT, "hi"], "does not answer"),
    ],
)
def test_what_is_wrong_is_said(
    arguments: list[str], words: str, llmrun: Callable[..., Any], files: dict[str, str]
) -> None:
    failure = llmrun(arguments[0], files[arguments[1]], *arguments[2:]).exception
    assert isinstance(failure, UsageError)
    assert words in f"{failure.what} {failure.why}"


def test_empty_lines_are_named(llmrun: Callable[..., Any], files: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("a\n\nb\n")
    failure = llmrun("embed", files[BERT], str(tmp_path / "texts.txt")).exception
    assert str(failure).startswith(f"line 2 of {tmp_path / 'texts.txt'} is empty")


@pytest.mark.parametrize("nothing", [b"", b"\n"])
def test_an_empty_stdin_is_said(nothing: bytes, llmrun: Callable[..., Any], files: dict[str, str]) -> None:
    assert str(llmrun("embed", files[BERT], input=nothing).exception).startswith("stdin is empty")


def test_documents_in_the_order_of_a_query(llmrun: Callable[..., Any], files: dict[str, str]) -> None:
    model = files["bert reranker"]
    found = json.loads(llmrun("rerank", model, QUERY, *TEXTS, "--json").stdout)
    assert [one["index"] for one in found] == np.argsort(FOUND["bert reranker"])[::-1].tolist()
    assert found[0]["document"] == TEXTS[found[0]["index"]]
    lines = llmrun("rerank", model, QUERY, "-", "--top", "2", input="\n".join(TEXTS).encode()).stdout.splitlines()
    assert [line.split("\t")[1] for line in lines] == [one["document"] for one in found[:2]]


def test_a_model_without_a_ranking_head_says_what_its_scores_are(
    llmrun: Callable[..., Any], files: dict[str, str]
) -> None:
    done = llmrun("rerank", files[BERT], QUERY, "b", QUERY)
    assert done.stdout.splitlines()[0] == f"1.000000\t{QUERY}"
    assert "no ranking head" in done.stderr


EMBEDDING_MODELS = [entry for entry in load_catalogue().entries.values() if entry.kind == "embedding"]


@pytest.mark.parametrize("entry", EMBEDDING_MODELS, ids=lambda entry: entry.alias)
def test_each_embedding_model_of_the_catalogue_works_by_its_name(
    entry: CatalogueEntry,
    llmrun: Callable[..., Any],
    files: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The file comes from a stand-in of the hub, and is another model's: name, download and prompts count."""
    with stand_in_hub(entry.repository) as hub:
        hub.files[entry.filename(entry.quant)] = Path(files[BERT]).read_bytes()
        for name, value in {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "hub"), "NO_PROXY": "*"}.items():
            monkeypatch.setenv(name, value)
        asked = llmrun("embed", entry.alias, "--as", "query", "a model")
    assert "to download" in asked.stderr
    assert entry.embedding is not None
    found = rows(asked.stdout)[0]
    same = rows(llmrun("embed", files[BERT], "--prompt", entry.embedding.query, "a model").stdout)[0]
    assert found["embedding"] == pytest.approx(same["embedding"], abs=1e-6)
    assert found["tokens"] > 4
    shown = llmrun("show", entry.alias).stdout
    assert "embeddings: the mean of all tokens" in shown
    assert repr(entry.embedding.query)[:20] in shown
