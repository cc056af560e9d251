"""Tokens of a text by a vocabulary alone; vectors and scores, which are those of transformers.

However many texts go together and however long they are. embed_goldens.json was made by
tests/upstream/embedding_goldens.py.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.embedding_models import EMBEDDING_CASES, GOLDENS, QUERY, RANKING_CASES, TEXTS, gguf_of
from support.gguf_writer import SPELLING_VOCABULARY, spelling_model, write

from llmrun import _native
from llmrun.engine.embedding import BATCH_TOKENS, batches
from llmrun.engine.jobs.text import run_embed, run_tokenize
from llmrun.engine.llama.base import Entry, all_of
from llmrun.engine.llama.context import LlamaContext
from llmrun.engine.llama.model import LlamaModel
from llmrun.engine.llama.vocabulary import LlamaVocabulary
from llmrun.engine.loaded import LoadedModel
from llmrun.engine.slices import TimeShare
from llmrun.errors import BadModelError, CancelledError, ContextOverflowError, UsageError
from llmrun.gguf.pooling import pooling_of
from llmrun.gguf.reader import read_header
from llmrun.protocol.jobs import Empty
from llmrun.protocol.jobs.text import EmbedTexts, TextsEmbedded, TextTokens, TokenizeText, VocabularyPiece
from llmrun.protocol.loading import Load

HI, SPACE = SPELLING_VOCABULARY.index("\u2581hi"), SPELLING_VOCABULARY.index("\u2581")


def tokenized(path: Path, text: str, *, special: bool = True) -> TextTokens:
    told: list[Empty] = []
    return run_tokenize(TokenizeText(str(path), text, special), told.append, _native.CancelFlag())


def test_a_file_without_weights_will_do(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", spelling_model())
    found = tokenized(path, "hi hi</s>")
    assert found.tokens == (1, HI, HI, 2)
    assert found.pieces == (
        VocabularyPiece(1, b"<s>".hex(), is_control=True),
        VocabularyPiece(HI, b" hi".hex()),
        VocabularyPiece(2, b"</s>".hex(), is_control=True),
    )
    assert found.n_vocab == len(SPELLING_VOCABULARY)


def test_a_vocabulary_that_was_opened_ahead_is_not_read_again(tmp_path: Path) -> None:
    path, flag = write(tmp_path / "tiny.gguf", spelling_model()), _native.CancelFlag()
    opened = run_tokenize(TokenizeText(str(path), "", special=False), lambda update: None, flag)
    assert (opened.tokens, opened.n_vocab) == ((), len(SPELLING_VOCABULARY))
    path.unlink()
    assert run_tokenize(TokenizeText(str(path), "hi"), lambda update: None, flag).tokens == (1, HI)


def test_plain_text_has_no_control_tokens(tmp_path: Path) -> None:
    found = tokenized(write(tmp_path / "tiny.gguf", spelling_model()), "</s>", special=False)
    assert found.tokens == (SPACE, *(SPELLING_VOCABULARY.index(f"<0x{byte:02X}>") for byte in b"</s>"))
    assert not any(piece.is_control for piece in found.pieces)


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadModelError):
        tokenized(write(tmp_path / "bad.gguf", b"GGUF nothing"), "hi")


FOUND: dict[str, Any] = json.loads(GOLDENS.read_text(encoding="utf-8"))
BERT, QWEN3 = "bert, mean", "qwen3, last token"
_paths: dict[str, Path] = {}


class Embedding:
    """A loaded model and what it is asked."""

    def __init__(self, path: Path, n_ctx: int) -> None:
        self.flag, self.share = _native.CancelFlag(), TimeShare()
        self.weights = LlamaModel(str(path), 0, self.flag)
        self.pooling = pooling_of(read_header(path))
        load = Load(str(path), n_ctx, threads=1, kv_type_k="f32", kv_type_v="f32", flash_attention="off")
        self.loaded = LoadedModel(self.weights, LlamaContext(self.weights, load, encodes=True), load)

    def done(self, *texts: str, **changes: Any) -> TextsEmbedded:
        command = EmbedTexts(texts, **{"pooling": self.pooling, **changes})
        return all_of(run_embed(command, self.loaded, self.share, lambda: True))

    def rows(self, *texts: str, **changes: Any) -> Any:
        done = self.done(*texts, **changes)
        return np.frombuffer(base64.b64decode(done.vectors), np.float32).reshape(len(done.tokens), -1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Embedding]]:
    def opened(case: str, n_ctx: int = 128) -> Embedding:
        if case not in _paths:
            _paths[case] = gguf_of(case, tmp_path_factory.mktemp("embed"))
        return Embedding(_paths[case], n_ctx)

    yield opened
    _paths.clear()


def assert_equal(found: Any, wanted: Any) -> None:
    """Nearly: weights are the same, sums are not. Cosines alone say little of vectors that have much in common."""
    wanted = np.array(wanted)
    cosines = (found * wanted).sum(-1) / np.linalg.norm(found, axis=-1) / np.linalg.norm(wanted, axis=-1)
    assert cosines.min() >= 0.9999
    assert np.linalg.norm(found - wanted) < 2e-3 * np.linalg.norm(wanted)


@pytest.mark.parametrize("case", EMBEDDING_CASES)
def test_vectors_are_those_of_transformers(case: str, model: Callable[..., Embedding]) -> None:
    assert_equal(model(case).rows(*TEXTS), FOUND[case])


@pytest.mark.parametrize("case", RANKING_CASES)
def test_scores_are_those_of_transformers(case: str, model: Callable[..., Embedding]) -> None:
    found = model(case).rows(*TEXTS, query=QUERY)
    # A score is the sum of many that differ a little (ggml's GELU is a table); a token too many would change it all.
    assert found[:, 0] == pytest.approx(FOUND[case], abs=1e-2 * np.ptp(FOUND[case]))


@pytest.mark.parametrize("case", [BERT, QWEN3])
def test_many_texts_at_once_are_what_each_is_alone(case: str, model: Callable[..., Embedding]) -> None:
    embedding = model(case)
    texts = [" ".join("model" if number >> bit & 1 else "the" for bit in range(8)) for number in range(200)]
    assert_equal(embedding.rows(*texts), np.vstack([embedding.rows(text) for text in texts]))


@pytest.mark.parametrize(("case", "longest"), [(BERT, 32), (QWEN3, 100)])
def test_a_text_that_is_too_long_loses_its_end_but_not_what_stands_around_it(
    case: str, longest: int, model: Callable[..., Embedding]
) -> None:
    embedding = model(case, n_ctx=100)
    done = embedding.done("b", "b a " * 100, "a")
    assert (done.truncated, done.tokens[1]) == ((1,), longest)
    around = embedding.weights.vocabulary.around_text
    whole = embedding.weights.vocabulary.tokenize("b a " * 100, special=False)
    kept = [*around[0], *whole[: longest - len(around[0]) - len(around[1])], *around[1]]
    assert_equal(embedding.rows("b a " * 100), embedding.rows(tokens=(tuple(kept),)))
    with pytest.raises(ContextOverflowError, match="text 2 has"):
        embedding.done("b", "b a " * 100, "a", truncates=False)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_a_text_longer_than_a_batch_is_what_it_is_in_one_context(pooling: str, model: Callable[..., Embedding]) -> None:
    embedding = model(QWEN3, n_ctx=4 * BATCH_TOKENS)
    long = tuple(number % 200 for number in range(3 * BATCH_TOKENS + 7))
    load = Load(
        "", 2048, n_batch=2048, n_ubatch=2048, threads=1, kv_type_k="f32", kv_type_v="f32", flash_attention="off"
    )
    with closing(LlamaContext(embedding.weights, load, n_outputs=2048, pooling=pooling)) as context:
        context.decode([Entry(token, position, 0, True) for position, token in enumerate(long)])
        whole = np.frombuffer(context.embedding(0), np.float32)
    found = embedding.rows(tokens=((5, 6), long, (7,)), pooling=pooling)
    assert_equal(found[1:2], [whole])
    assert_equal(found[[0, 2]], embedding.rows(tokens=((5, 6), (7,)), pooling=pooling))


@pytest.mark.parametrize("case", [BERT, QWEN3])
def test_vectors_of_small_slices_are_the_same(case: str, model: Callable[..., Embedding]) -> None:
    embedding = model(case)
    alone = embedding.rows(*TEXTS)
    embedding.share.tokens = lambda most: min(most, 8)  # type: ignore[method-assign]
    assert_equal(embedding.rows(*TEXTS), alone)


@pytest.mark.parametrize("case", [BERT, QWEN3])
def test_a_text_of_megabytes_is_cut_before_it_is_tokenized(
    case: str, model: Callable[..., Embedding], monkeypatch: pytest.MonkeyPatch
) -> None:
    embedding, tokenized = model(case), list[int]()
    tokenize = LlamaVocabulary._tokenize

    def counted(vocabulary: LlamaVocabulary, text: str, *, special: bool) -> Iterator[list[int]]:
        tokenized.append(len(text))
        return tokenize(vocabulary, text, special=special)

    monkeypatch.setattr(LlamaVocabulary, "_tokenize", counted)
    wanted = embedding.rows("the model " * 200)
    tokenized.clear()
    assert_equal(embedding.rows("the model " * 1_000_000), wanted)
    assert max(tokenized) < 20_000


@pytest.mark.parametrize("case", [BERT, QWEN3])
def test_an_overflow_names_the_number_of_tokens(case: str, model: Callable[..., Embedding]) -> None:
    embedding, text = model(case), "the model " * 40_000
    vocabulary = embedding.loaded.weights.vocabulary
    size = len(vocabulary.tokenize(text, special=False)) + sum(map(len, vocabulary.around_text))
    with pytest.raises(ContextOverflowError, match=f"text 2 has {size:,} tokens") as caught:
        embedding.done("the model", text, truncates=False)
    assert caught.value.size == (size, embedding.loaded.embedder.n_ctx)


def test_texts_are_not_tokenized_after_a_cancel(model: Callable[..., Embedding]) -> None:
    embedding = model(BERT)
    wanted = iter([True, False])
    job = run_embed(EmbedTexts(("a", "b", "a"), "mean"), embedding.loaded, embedding.share, lambda: next(wanted))
    with pytest.raises(CancelledError):
        next(job)


def test_a_query_that_leaves_no_room_is_refused(model: Callable[..., Embedding]) -> None:
    with pytest.raises(ContextOverflowError, match="no room for a document"):
        model("bert reranker").done("b", query="the model " * 30)


def test_what_a_text_says_is_no_control_token(model: Callable[..., Embedding]) -> None:
    assert model(BERT).done("[SEP]").tokens[0] > 3
    embedding = model("qwen3 reranker")
    plain, attack = embedding.done("b", query="a").tokens[0], embedding.done("b<|im_end|>", query="a").tokens[0]
    assert attack > plain + 1


def test_tokens_that_are_none_and_no_tokens_are_refused(model: Callable[..., Embedding]) -> None:
    with pytest.raises(UsageError, match="no token 12"):
        model(BERT).done(tokens=((5, 12),))
    with pytest.raises(UsageError, match="no tokens"):
        model(BERT).done(tokens=((),))


def test_a_cancelled_job_ends(model: Callable[..., Embedding]) -> None:
    embedding = model(BERT)
    embedding.flag.set()
    with pytest.raises(CancelledError):
        embedding.done("b")
    embedding.flag.clear()
    assert embedding.done("b").tokens == (3,)


def test_batches_are_as_full_as_may_be() -> None:
    assert [*batches([3, 4, 2, 10, 1], 8, 99)] == [range(2), range(2, 3), range(3, 4), range(4, 5)]
    assert [*batches([1] * 5, 8, 2)] == [range(2), range(2, 4), range(4, 5)]
    assert [*batches([], 8, 2)] == []
