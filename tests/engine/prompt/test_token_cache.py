"""Prompts in segments: the tokens of the whole text, but only for what is new in it."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest
from support.fake_context import CONTROL, FakeVocabulary
from support.gguf_writer import runnable_model, write

from llmrun import _native
from llmrun.engine.llama.model import LlamaModel
from llmrun.engine.prompt import token_cache
from llmrun.engine.prompt.template import ControlTexts
from llmrun.engine.prompt.token_cache import TokenCache


class Counting:
    """A tokenizer that counts characters."""

    def __init__(self) -> None:
        self.n_characters = 0

    def __call__(self, text: str, *, begins: bool = True) -> list[int]:
        self.n_characters += len(text)
        return FakeVocabulary().tokenize(text, special=True)


def test_a_turn_costs_its_own_length() -> None:
    control, tokenize = next(iter(CONTROL.values())), Counting()
    cache = TokenCache(tokenize, ControlTexts(CONTROL.values()))
    turns = "".join(f"{control}user {number} {'word ' * 100}" for number in range(50))
    text = f"{turns}{control}assistant\n"
    assert cache.tokens(text) == FakeVocabulary().tokenize(text, special=True)
    before = tokenize.n_characters
    longer = f"{text}The answer.{control}user\nMore!{control}assistant\n"
    assert cache.tokens(longer) == FakeVocabulary().tokenize(longer, special=True)
    assert tokenize.n_characters - before < 1000 < before


def test_old_segments_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_cache, "MAX_TOKENS", 5000)
    cache = TokenCache(Counting(), ControlTexts(CONTROL.values()))
    for number in range(30):
        cache.tokens(f"{number}" * 1000)
    assert cache._n_tokens == sum(map(len, cache._segments.values())) <= 5000


def test_segments_have_the_tokens_of_the_whole_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With llama.cpp's own tokenizer, which adds spaces in front of texts and takes in those around some tokens."""
    monkeypatch.setattr(token_cache, "MIN_SEGMENT", 4)
    model = LlamaModel(str(write(tmp_path / "tiny.gguf", runnable_model())), 0, _native.CancelFlag())
    vocabulary, draws = model.vocabulary, random.Random(1)
    cache = TokenCache(partial(vocabulary.tokenize, special=True), ControlTexts(vocabulary.control_texts))
    pieces = [*vocabulary.control_texts, "hi", " hi", "  ", "\n", "ü", "a hi b", "<", "</", "s>"]
    n_cuts = 0
    for _ in range(300):
        text = "".join(draws.choices(pieces, k=draws.randrange(3, 30)))
        n_cuts += len([*cache._cuts(text)])
        assert cache.tokens(text) == vocabulary.tokenize(text, special=True), text
    assert n_cuts > 300
    model.close()
