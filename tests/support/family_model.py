"""A tiny llama of random weights whose vocabulary has the control tokens that a family's chat template writes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from support.gguf_writer import runnable_metadata
from support.random_model import llama_shapes, write_weights

# In the order in which one is looked for. Where models end an answer; most have another one after a call.
ENDS = (
    "<|im_end|>", "<|eot_id|>", "<|END_OF_TURN_TOKEN|>", "<|end_of_msg|>", "<end_of_sentence>",
    "[e~[", "<seed:eos>", "<|assistant_end|>", "<end_of_turn>", "<turn|>", "<|tool_response>", "<|end_of_text|>",
    "<|role_end|>", "<｜hy_eos:opensource｜>", "<｜end▁of▁sentence｜>", "<SPECIAL_12>", "<|return|>", "<|call|>",
    "<|eot|>", "</assistant>", "<|observation|>", "<|user|>", "<sep>", "<|end|>", "</s>",
)  # fmt: skip
_CONTROL = re.compile(
    r"<\|[^|<>\s'\"{}]{1,40}\|?>|<｜[^｜<>\s'\"{}]{1,40}｜>|<[a-zA-Z_]+\|>|</?[a-zA-Z_:]{1,30}>|<SPECIAL_\d+>"
    r"|\[/?[A-Z_]{3,30}\]|\[e~\[|\]~[b!]\[?|\]<\]minimax\[>\["
)
_WIDTH, _HEAD, _LAYERS, _FEED_FORWARD = 64, 32, 2, 96


def control_texts(template: str) -> list[str]:
    """Return the texts in a template that look like those of control tokens."""
    return sorted({*_CONTROL.findall(template)} - {"<s>", "</s>"})


def write_family_model(
    path: Path, control: Iterable[str], ends: Iterable[str], *, template: str = "", n_ctx: int = 16_384
) -> Path:
    """Write the model; weights are the same every time.

    Args:
        control: texts of its control tokens.
        ends: those that end an answer, or a blank line; the first is the end of a sequence.
    """
    tokens = ["<s>", "</s>", *map(_printable, range(256)), _BLANK_LINE, *control]
    tokens += [each for each in ends if each != "\n\n" and each not in tokens]
    numbers = [tokens.index(_BLANK_LINE if each == "\n\n" else each) for each in ends]
    names = ("eos", "eot", "eom")
    types = [3 if len(each) > 2 else 1 for each in tokens]  # control tokens, and text
    changes = {
        "llama.block_count": _LAYERS, "llama.context_length": n_ctx, "llama.embedding_length": _WIDTH,
        "llama.feed_forward_length": _FEED_FORWARD, "llama.attention.head_count": _WIDTH // _HEAD,
        "llama.attention.head_count_kv": 1, "llama.rope.dimension_count": _HEAD, "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(_BLANK_LINE)], "tokenizer.ggml.scores": None,
        "tokenizer.chat_template": template or None, "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1,
        **{f"tokenizer.ggml.{name}_token_id": number for name, number in zip(names, numbers, strict=False)},
    }  # fmt: skip
    shapes = llama_shapes(_LAYERS, _WIDTH, _HEAD, _FEED_FORWARD, len(tokens))
    return write_weights(path, runnable_metadata(**changes), shapes, seed=3)


def _printable(byte: int) -> str:
    """Return the character of a byte in byte-level vocabularies."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return chr(byte) if byte in plain else chr(256 + [each for each in range(256) if each not in plain].index(byte))


_BLANK_LINE = _printable(10) * 2
