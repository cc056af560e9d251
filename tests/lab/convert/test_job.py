"""Converted files in llama.cpp: logits against numpy, and tokens against tokenizer.json."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.hf_writer import (
    HEAD,
    MERGES,
    N_BYTE_LEVEL,
    SPECIAL,
    byte_level,
    byte_texts,
    config,
    files_of,
    llama_like,
    write,
)
from support.hf_writer import safetensors as safetensors_bytes
from support.numpy_llama import logits
from support.plain_logits import computed, loaded

from llmrun.lab.convert.job import convert_folder

IDS = [3, 70, 71, 260, 9, 42, 13]


def converted(folder: Path, files: dict[str, Any], kind: str = "f32") -> Path:
    """Convert a folder with these files; return the GGUF file."""
    target = folder / "out.gguf"
    convert_folder(write(folder / "Tiny-1B", files), target, type=kind)
    return target


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("LlamaForCausalLM", {}),
        ("Qwen2ForCausalLM", {"bias": True}),
        ("Qwen3ForCausalLM", {"head_norms": True}),
        ("Qwen2ForCausalLM", {"tied": True}),
    ],
)
def test_logits_are_those_of_the_plain_twin(architecture: str, options: dict[str, bool], tmp_path: Path) -> None:
    tensors = llama_like(N_BYTE_LEVEL, **options)
    settings = config(architecture, N_BYTE_LEVEL, head_dim=HEAD, tie_word_embeddings=options.get("tied", False))
    files = {"config.json": settings, "model.safetensors": safetensors_bytes(tensors), "tokenizer.json": byte_level()}
    with loaded(converted(tmp_path, files)) as model:
        found = computed(model, IDS, N_BYTE_LEVEL)
    wanted = logits(settings, tensors, IDS)
    # Keys and values are kept as float16; rows in a wrong order would differ a thousand times as much.
    assert np.linalg.norm(found - wanted) < 2e-3 * np.linalg.norm(wanted)


# ---- text


def simple_bpe(text: str) -> list[int]:
    """Tokenize by tokenizer.json, one merge after another; for letters that Python's `re` recognizes too."""
    pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\w]?[^\W\d_]+|\d| ?[^\s\w]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    names = [*byte_texts(), *(merge.replace(" ", "") for merge in MERGES)]
    ids: list[int] = []
    for word in re.findall(pattern, text):
        parts = [byte_texts()[byte] for byte in word.encode()]
        while pairs := [
            (MERGES.index(pair), place)
            for place in range(len(parts) - 1)
            if (pair := f"{parts[place]} {parts[place + 1]}") in MERGES
        ]:
            _, place = min(pairs)
            parts[place : place + 2] = ["".join(parts[place : place + 2])]
        ids += map(names.index, parts)
    return ids


TEXTS = (
    "hello world", "Hello, the World!", "  two   spaces", "12 123 1.5", "I'll say it's\n\n\tdone ", "Привет, пир",
    "the\r\nend", "日本語", "🚀 go", "ab" * 20, "", "a-b--c  (x)", "ing ring in",
)  # fmt: skip


@pytest.mark.parametrize("form", ["texts", "pairs"])
def test_text_becomes_the_tokens_of_tokenizer_json(form: str, tmp_path: Path) -> None:
    merges = list(MERGES) if form == "texts" else [merge.split(" ") for merge in MERGES]
    with loaded(converted(tmp_path, files_of("Qwen2ForCausalLM") | {"tokenizer.json": byte_level(merges)})) as model:
        for text in TEXTS:
            assert model.vocabulary.tokenize(text, special=False) == simple_bpe(text), text
        assert model.vocabulary.tokenize(SPECIAL[1], special=True) == [N_BYTE_LEVEL - 2]


def test_sentencepiece_text_merges_by_score(tmp_path: Path) -> None:
    with loaded(converted(tmp_path, files_of("LlamaForCausalLM"))) as model:
        words = [model.vocabulary.piece(token) for token in model.vocabulary.tokenize("hello ж", special=False)]
    assert words == [b" he", b"l", b"l", b"o", b" ", b"\xd0", b"\xb6"]
