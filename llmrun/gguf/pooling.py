"""The recognition of embedding models and of their pooling, as pure functions of a header."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.errors import UsageError

if TYPE_CHECKING:
    from llmrun.gguf.header import Header

POOLINGS = ("none", "mean", "cls", "last", "rank")
"""enum llama_pooling_type, from 0 on; "rank" is a ranking head: one score of a query and a document."""
# Encoders that llama.cpp gives no KV cache (llama_model::create_memory), whatever their file says.
_ENCODERS = frozenset({
    "bert", "eurobert", "gemma-embedding", "jina-bert-v2", "jina-bert-v3", "llama-embed", "modern-bert", "neo-bert",
    "nomic-bert", "nomic-bert-moe", "t5encoder",
})  # fmt: skip


def stated_pooling(header: Header) -> str:
    """Return the pooling that the file states, one of POOLINGS; "" if it states no known one."""
    number = header.integer(header.model_key("pooling_type"))
    return POOLINGS[number] if number is not None and 0 <= number < len(POOLINGS) else ""


def is_encoder(header: Header) -> bool:
    """Return whether every token attends to all others, so that the model can't generate."""
    return header.architecture in _ENCODERS or header.metadata.get(header.model_key("attention.causal")) is False


def makes_embeddings(header: Header) -> bool:
    """Return whether the model is for embeddings rather than answers."""
    return is_encoder(header) or stated_pooling(header) in POOLINGS[1:]


def pooling_of(header: Header) -> str:
    """Return the stated pooling, or else "mean" for an encoder and "last" for other models."""
    stated = stated_pooling(header)
    return stated if stated in POOLINGS[1:] else "mean" if is_encoder(header) else "last"


def command_for(header: Header, model: str) -> str:
    """Return the command that uses a model for its purpose."""
    if not makes_embeddings(header):
        return f'llmrun run {model} "Hello"'
    ranks = pooling_of(header) == "rank"
    return f"llmrun rerank {model} QUERY DOCUMENT..." if ranks else f"llmrun embed {model} TEXT..."


def refuse_answers(header: Header) -> None:
    """Raise UsageError if the model is made for embeddings."""
    if makes_embeddings(header):
        what = "a reranker" if pooling_of(header) == "rank" else "an embedding model"
        raise UsageError(
            f"{header.name} is {what}, which does not answer",
            why="it is an encoder" if is_encoder(header) else "its file states a pooling of vectors",
            hint=command_for(header, "MODEL"),
        )
