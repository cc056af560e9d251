"""Headers that are refused before loading, each with a word of the refusal."""

from __future__ import annotations

from typing import Any

from support.gguf_writer import metadata


def other(architecture: str, **settings: Any) -> dict[str, Any]:
    """The same model under another architecture; a double underscore in a name stands for a dot."""
    own = {key.partition(".")[2]: value for key, value in metadata().items() if key.startswith("llama.")}
    own |= {name.replace("__", "."): value for name, value in settings.items()}
    return {"general.architecture": architecture, **{f"{architecture}.{key}": value for key, value in own.items()}}


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "no architecture": ({"general.architecture": None}, "general.architecture is missing"),
    "projector": ({"general.architecture": "clip"}, "image or audio part"),
    "adapter": ({"general.type": "adapter"}, "general.type is 'adapter'"),
    "no layers": ({"llama.block_count": 0}, "'llama.block_count' is 0"),
    "layers missing": ({"llama.block_count": None}, "'llama.block_count' is missing"),
    "layers as text": ({"llama.block_count": "two"}, "'llama.block_count' is 'two'"),
    "too many layers": ({"llama.block_count": 513}, "'llama.block_count' is 513"),
    "more predicted layers than layers": (
        {"llama.nextn_predict_layers": 3},
        "'llama.nextn_predict_layers' is 3",
    ),
    "no context": ({"llama.context_length": 0}, "'llama.context_length' is 0"),
    "endless context": ({"llama.context_length": 2**31 - 1}, "'llama.context_length' is 2147483647"),
    "endless vocabulary": ({"llama.vocab_size": 2**32 - 1}, "'llama.vocab_size' is 4294967295"),
    "no vocabulary": ({"tokenizer.ggml.tokens": None}, "the vocabulary has 0 tokens"),
    "endless template": ({"tokenizer.chat_template": "x" * (2**20 + 1)}, "has 1048577 characters"),
    "endless heads": ({"llama.attention.head_count": 2**31 + 4}, "'llama.attention.head_count' is 2147483652"),
    "endless keys": ({"llama.attention.key_length": 2**31 + 16}, "'llama.attention.key_length' is 2147483664"),
    "endless width": ({"llama.feed_forward_length": [64, 2**31 - 1]}, "'llama.feed_forward_length' is 2147483647"),
    "endless window": ({"llama.attention.sliding_window": 2**31}, "'llama.attention.sliding_window' is 2147483648"),
    "nothing rotated": (other("gemma2", rope__dimension_count=0), "'gemma2.rope.dimension_count' is 0"),
}
