"""Embeddings and reranking: the protocols of OpenAI, Ollama and Jina. Pure."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from llmrun.errors import UsageError
from llmrun.model.embeddings import EmbedOptions, RankedDocument, Role, TextVectors
from llmrun.server.protocols.fields import Fields
from llmrun.server.protocols.openai import content
from llmrun.server.protocols.options import HIGHEST_TOKEN, read_keep_seconds

_MOST_DIMENSIONS = 1 << 20


class EmbeddingRequest(NamedTuple):
    """Texts to embed."""

    model: str  # its name; "" for the first model of the server
    texts: tuple[str, ...]
    tokens: tuple[tuple[int | str, ...], ...]  # of further texts, given as token ids, with texts between them
    options: EmbedOptions
    keep_seconds: float | None = None  # see CompletionRequest
    in_base64: bool = False  # encoding of the vectors
    places: tuple[int, ...] = ()  # in the input, of `texts` and then of `tokens`; none if it has only one of them


class RerankRequest(NamedTuple):
    """Documents to rank."""

    model: str
    query: str
    documents: tuple[str, ...]
    limit: int  # maximum number of results
    has_texts: bool  # results contain the documents
    is_list: bool = False  # the response is a list, as Text Embeddings Inference and llama-server have it for `texts`


def read_openai(body: Mapping[str, Any]) -> EmbeddingRequest:
    """Return a request to /v1/embeddings. A text gets a prefix only if "input_type" is given.

    Raises:
        UsageError: a field is invalid.
    """
    fields = Fields(body)
    kind = fields.choice("encoding_format", "float", "base64")
    texts, tokens, places = _texts_and_tokens(fields)
    options = EmbedOptions(_role(fields), dimensions=_dimensions(fields), truncate=bool(fields.flag("truncate")))
    model, keep_seconds = fields.text("model") or "", read_keep_seconds(fields)
    return EmbeddingRequest(model, texts, tokens, options, keep_seconds, in_base64=kind == "base64", places=places)


def _role(fields: Fields) -> Role | None:
    found = fields.choice("input_type", "query", "document")
    return "query" if found == "query" else "document" if found else None


def _dimensions(fields: Fields) -> int | None:
    return fields.whole("dimensions", 1, _MOST_DIMENSIONS)


def _texts_and_tokens(fields: Fields) -> tuple[tuple[str, ...], tuple[tuple[int | str, ...], ...], tuple[int, ...]]:
    """Return the input: texts, token ids of texts, and their places in it where it has both.

    As in llama-server, a list with a token id in it is one text, and objects have one too.
    """
    given = fields.value("input")
    if not isinstance(given, (str, list, dict)) or given == []:
        raise UsageError("input must be a text, or a list of texts or of token ids", why="and not be empty")
    rows = list(map(_row, given if isinstance(given, list) and not any(map(_is_token, given)) else [given]))
    texts = {place: row for place, row in enumerate(rows) if isinstance(row, str)}
    tokens = {place: row for place, row in enumerate(rows) if isinstance(row, tuple)}
    places = (*texts, *tokens) if texts and tokens else ()
    return tuple(texts.values()), tuple(tokens.values()), places


def _row(value: Any) -> str | tuple[int | str, ...]:
    """Return a text, or its token ids."""
    if isinstance(value, dict):
        inner = Fields(value, "input")
        text, media = content(inner, "content") if isinstance(value.get("content"), list) else ("", ())
        if media:
            raise UsageError("input.content can have no images or audio", why="only texts have vectors here")
        return text or inner.needed_text("prompt_string")
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value or not all(isinstance(each, str) or _is_token(each) for each in value):
        raise UsageError("input must be a text, or a list of texts or of token ids")
    return tuple(value)


def _is_token(value: Any) -> bool:
    return type(value) is int and 0 <= value <= HIGHEST_TOKEN


def openai_body(request: EmbeddingRequest, found: TextVectors, model: str) -> dict[str, Any]:
    """Return the response of /v1/embeddings."""
    rows = (
        [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in found.vectors]
        if request.in_base64
        else found.vectors.tolist()
    )
    return {
        "object": "list",
        "data": [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)],
        "model": model,
        "usage": _usage(sum(found.tokens)),
    }


def read_native(body: Mapping[str, Any]) -> EmbeddingRequest:
    """Return a request to llama-server's /embedding, whose input may be called `content`. Raises as read_openai()."""
    return read_openai({**body, "input": body["content"]} if body.get("content") is not None else body)


def native_body(request: EmbeddingRequest, found: TextVectors, model: str) -> list[dict[str, Any]]:
    """Return the response of /embedding: each text has a list of vectors, here of one."""
    return [{"index": index, "embedding": [row]} for index, row in enumerate(found.vectors.tolist())]


def read_ollama(body: Mapping[str, Any]) -> EmbeddingRequest:
    """Return a request to /api/embed. Without input it only loads the model.

    Raises:
        UsageError: a field is invalid.
    """
    fields = Fields(body)
    given = fields.value("input")
    texts = (given,) if isinstance(given, str) else fields.texts("input")
    return _ollama(
        fields, texts, EmbedOptions(None, dimensions=_dimensions(fields), truncate=fields.flag("truncate") is not False)
    )


def read_ollama_prompt(body: Mapping[str, Any]) -> EmbeddingRequest:
    """Return a request to /api/embeddings, Ollama's older route: one text, whose vector is not normalized.

    Raises:
        UsageError: a field is invalid.
    """
    fields = Fields(body)
    return _ollama(fields, (fields.text("prompt") or "",), EmbedOptions(None, normalize=False))


def _ollama(fields: Fields, texts: Sequence[str], options: EmbedOptions) -> EmbeddingRequest:
    model = fields.text("model") or fields.text("name") or ""
    texts = () if list(texts) == [""] else tuple(texts)
    return EmbeddingRequest(model, texts, (), options, read_keep_seconds(fields))


def ollama_body(request: EmbeddingRequest, found: TextVectors, model: str) -> dict[str, Any]:
    """Return the response of /api/embed."""
    return {"model": model, "embeddings": found.vectors.tolist(), "prompt_eval_count": sum(found.tokens)}


def ollama_prompt_body(request: EmbeddingRequest, found: TextVectors, model: str) -> dict[str, Any]:
    """Return the response of /api/embeddings."""
    return {"embedding": found.vectors[0].tolist() if len(found.vectors) else []}


def read_rerank(body: Mapping[str, Any]) -> RerankRequest:
    """Return a request to /v1/rerank, as Jina and Cohere have it, or Text Embeddings Inference with `texts`.

    Raises:
        UsageError: a field is invalid.
    """
    fields = Fields(body)
    is_list = fields.value("texts") is not None
    name = "texts" if is_list else "documents"
    if is_list and fields.value("documents") is not None:
        raise UsageError("texts and documents can't be used together", hint="give one of them")
    given = fields.list(name)
    if not given:
        raise UsageError(f"{name} is {'empty' if is_list else 'missing'}")
    documents = tuple(
        one if isinstance(one, str) else Fields(one, f"{name}[{index}]").needed_text("text")
        for index, one in enumerate(given)
    )
    limit = fields.whole("top_n", 1, HIGHEST_TOKEN) or len(documents)
    has_texts = bool(fields.flag("return_text" if is_list else "return_documents"))
    query = fields.needed_text("query")
    return RerankRequest(fields.text("model") or "", query, documents, limit, has_texts, is_list)


def rerank_body(request: RerankRequest, ranked: Sequence[RankedDocument], model: str, tokens: int) -> Any:
    """Return the response of /v1/rerank."""
    if request.is_list:
        return [
            {"index": one.index, "score": one.score}
            | ({"text": request.documents[one.index]} if request.has_texts else {})
            for one in ranked[: request.limit]
        ]
    results = [
        {"index": one.index, "relevance_score": one.score}
        | ({"document": {"text": request.documents[one.index]}} if request.has_texts else {})
        for one in ranked[: request.limit]
    ]
    return {"model": model, "object": "list", "usage": _usage(tokens), "results": results}


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": tokens, "total_tokens": tokens}
