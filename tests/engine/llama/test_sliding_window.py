"""Models with sliding window attention: a reused KV cache gives the logits of a fresh one.

Cells that the window has passed are gone once a sequence's state was saved, or its cells were used again; whoever goes
on from there without them gets other logits, and nothing says so.
"""

from __future__ import annotations

import ctypes
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.hf_writer import files_of, write

from llmrun import _native
from llmrun.engine.core.loop import Engine
from llmrun.engine.core.sampler import SequenceSampler
from llmrun.engine.core.sequence import Sequence
from llmrun.engine.core.states import KVStore
from llmrun.engine.llama.base import RunLimit
from llmrun.engine.llama.context import LlamaContext
from llmrun.engine.llama.model import LlamaModel
from llmrun.lab.convert.job import convert_folder
from llmrun.protocol.loading import Load
from llmrun.protocol.messages import AnswerRequest, Failed, TextDelta
from llmrun.protocol.params import Limits, SamplingParams

WINDOW = 32
N_CTX = 1024
# Layers with and without a window; only with; and none, which shows that the comparison itself holds.
MODELS = {
    "gemma2": ("Gemma2ForCausalLM", {"sliding_window": WINDOW}),
    "gemma3": ("Gemma3ForCausalLM", {"sliding_window": WINDOW}),
    "llama": ("LlamaForCausalLM", {}),
}
LENGTHS = (3, WINDOW - 1, WINDOW, WINDOW + 1, 100, 200, 300, 390)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaModel]:
    architecture, settings = MODELS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    files = files_of(architecture, max_position_embeddings=N_CTX, **settings)
    convert_folder(write(folder / "Tiny-1B", files), folder / "tiny.gguf")
    loaded = LlamaModel(str(folder / "tiny.gguf"), 0, _native.CancelFlag())
    yield loaded
    loaded.close()


@contextmanager
def engine(model: LlamaModel, states: KVStore | None = None) -> Iterator[tuple[Engine, Any]]:
    """An engine with an empty KV cache, and its context."""
    context = LlamaContext(model, Load(model.path, N_CTX, n_batch=64))
    try:
        yield Engine(context, states=states), context
    finally:
        context.close()


def logits(talk: tuple[Engine, Any], prompt: list[int], n_tokens: int = 1, request: int = 1) -> Any:
    """Return the logits of the first or a later token after a prompt."""
    loop, context = talk
    sampler = SequenceSampler(SamplingParams(temperature=0), context.vocabulary, prompt)
    loop.add(Sequence(request, prompt, sampler, AnswerRequest(limits=Limits(n_tokens))))
    while loop.busy:
        for event in loop.step():
            assert not isinstance(event, Failed), event
    n_vocab = context.vocabulary.n_tokens
    return np.array((ctypes.c_float * n_vocab).from_address(context.logits(-1)), dtype=np.float64)


def tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(3, 100), k=count)


def assert_as_fresh(model: LlamaModel, found: Any, prompt: list[int]) -> None:
    with engine(model) as fresh:
        expected = logits(fresh, prompt)
    # Batches of other shapes round differently; a missing cell changes much more.
    off = float(np.abs(found - expected).max() / expected.std())
    assert off < 0.05, f"{len(prompt)} tokens"


@pytest.mark.parametrize("length", LENGTHS)
def test_a_shorter_prefix(model: LlamaModel, length: int) -> None:
    prompt = tokens(length, 400)
    with engine(model) as talk:
        logits(talk, prompt)
        found = logits(talk, prompt[:length], request=2)
    assert_as_fresh(model, found, prompt[:length])


@pytest.mark.parametrize("length", [WINDOW, 100, 300])
def test_the_same_prompt_after_its_state_was_read_back(model: LlamaModel, length: int, tmp_path: Path) -> None:
    prompt, store = tokens(length, length), KVStore(tmp_path, "key", 1 << 30)
    with engine(model, store) as talk:
        logits(talk, prompt, 4)
        talk[0].save(1, prompt_only=False)
    with engine(model, store) as talk:
        assert_as_fresh(model, logits(talk, prompt), prompt)


@pytest.mark.parametrize("length", [100, 300])
def test_another_answer_after_a_state_was_read_back(model: LlamaModel, length: int, tmp_path: Path) -> None:
    """As `--continue`, then `/retry`: an answer is added to what was saved, then taken back."""
    store, prompt = KVStore(tmp_path, "key", 1 << 30), tokens(length, length)
    with engine(model, store) as talk:
        logits(talk, prompt, 20)
        assert talk[0].save(1, prompt_only=False)[0] > length
    with engine(model, store) as talk:
        longer = [*prompt, *tokens(1, 40)]
        assert_as_fresh(model, logits(talk, longer), longer)
        assert_as_fresh(model, logits(talk, prompt, request=2), prompt)


def test_what_goes_on_after_a_state_that_was_read_back_is_reused(model: LlamaModel, tmp_path: Path) -> None:
    store, prompt = KVStore(tmp_path, "key", 1 << 30), tokens(5, 300)
    with engine(model, store) as talk:
        logits(talk, prompt)
        talk[0].save(1, prompt_only=False)
    longer = [*prompt, *tokens(6, 40)]
    with engine(model, store) as talk:
        decoded = []
        decode = talk[1].decode
        talk[1].decode = lambda batch: (decoded.extend(batch), decode(batch))
        assert_as_fresh(model, logits(talk, longer), longer)
    assert len(decoded) == 40


def test_without_the_oldest_turns(model: LlamaModel) -> None:
    """Dropping positions in the middle leaves what is after them as it was computed, and all that the window needs."""
    with engine(model) as talk:
        context = talk[1]
        logits(talk, tokens(7, 200))
        has_passed = model.sliding_window > 0
        assert context.drop(0, 50, 100) is not has_passed
        assert context.forget(0, 190)
        assert has_passed or context.forget(0, 40)


def test_a_window_decodes_in_native_runs(model: LlamaModel) -> None:
    """And gives the tokens that steps give, also from where the window has passed the prompt."""
    prompt = tokens(11, 50)

    def answer(limit: RunLimit | None) -> tuple[str, int]:
        with engine(model) as (loop, context):
            sampler = SequenceSampler(SamplingParams(temperature=0), context.vocabulary, prompt)
            loop.add(Sequence(1, prompt, sampler, AnswerRequest(limits=Limits(120))))
            n_steps, events = 0, []
            while loop.busy:
                events += loop.step(limit)
                n_steps += 1
            assert not any(isinstance(event, Failed) for event in events)
            return "".join(event.text for event in events if isinstance(event, TextDelta)), n_steps

    alone, n_steps = answer(None)
    in_runs, n_runs = answer(RunLimit(30, math.inf, _native.CancelFlag()))
    assert in_runs == alone
    assert n_runs <= n_steps / 2
