"""Layers on a GPU: the same answers, true times, and a KV cache that moves between devices and disk."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from support.gpu_loader import Loader
from support.random_model import write_random_model

from llmrun.errors import EngineCrashedError, OutOfMemoryError

PROMPT = "x" * 100
ALL, NONE = -1, 0


@pytest.mark.parametrize("layers", [1, 3, ALL])
def test_greedy_text_does_not_depend_on_the_split(load: Loader, layers: int) -> None:
    texts = {load(gpu_layers=each).generate("Hi", temperature=0, max_tokens=8).text for each in (NONE, layers)}
    assert len(texts) == 1


def test_prefill_is_most_of_the_time_to_first_token(load: Loader) -> None:
    model = load(n_ctx=1024)
    model.generate("Hi", max_tokens=2)  # compiles shaders
    stats = model.generate("x" * 600, temperature=0, max_tokens=4).stats  # several micro-batches
    assert 0.5 * stats.ttft_seconds < stats.prefill_seconds <= stats.ttft_seconds
    assert stats.overhead_seconds < stats.decode_seconds
    again = model.generate("x" * 600, temperature=0, max_tokens=4).stats
    assert again.reused_tokens >= 600


@pytest.mark.parametrize(("before", "after"), [(ALL, ALL), (ALL, NONE), (NONE, ALL)])
def test_one_token_is_prefilled_behind_a_prefix_from_disk(load: Loader, before: int, after: int) -> None:
    first = load(gpu_layers=before, others={"keeps_states": True})
    text = first.generate(PROMPT, temperature=0, max_tokens=2).text
    first.save_state(prompt_only=True)
    first.close()
    again = load(gpu_layers=after, others={"keeps_states": True}).generate(PROMPT, temperature=0, max_tokens=2)
    assert again.text == text
    assert again.stats.reused_tokens >= len(PROMPT) - 1


def test_four_clients_share_a_prefix(load: Loader) -> None:
    model = load(parallel=4)

    async def ask() -> list[str]:
        calls = (asyncio.to_thread(model.generate, PROMPT + end, temperature=0, max_tokens=6) for end in "abcd")
        return [reply.text for reply in await asyncio.gather(*calls)]

    alone = load(gpu_layers=NONE)
    assert asyncio.run(ask()) == [alone.generate(PROMPT + end, temperature=0, max_tokens=6).text for end in "abcd"]


def test_an_engine_that_dies_is_started_again(load: Loader) -> None:
    model = load()
    text = model.generate(PROMPT, temperature=0, max_tokens=4).text
    reply = iter(model.generate(PROMPT + "y", temperature=0, max_tokens=300))
    next(reply)
    os.kill(model.last_answer()[0].pid, signal.SIGKILL)
    with pytest.raises(EngineCrashedError):
        list(reply)
    assert model.generate(PROMPT, temperature=0, max_tokens=4).text == text


def test_a_kv_cache_that_does_not_fit_names_the_flags_that_help(load: Loader, tmp_path: Path) -> None:
    path = write_random_model(tmp_path / "deep.gguf", layers=64, width=256, inner=64)
    n_ctx = 1 << 24  # the longest context window: 550 GB of keys and values
    with pytest.raises(OutOfMemoryError, match=r"can't allocate|no memory") as caught:
        load(path, gpu_layers=ALL, n_ctx=n_ctx)
    assert [caught.value.hint.index(flag) for flag in ("-ngl", "-ctk", "--ctx")] == sorted(
        caught.value.hint.index(flag) for flag in ("-ngl", "-ctk", "--ctx")
    )
