"""Layers on a GPU: the same answers, true times, and memory as planned."""

from __future__ import annotations

import asyncio

import pytest
from support.gpu_loader import Loader

from llmrun.errors import OutOfMemoryError

PROMPT = "x" * 600
ALL, NONE = -1, 0


@pytest.mark.parametrize("layers", [1, 3, ALL])
def test_greedy_text_does_not_depend_on_the_split(load: Loader, layers: int) -> None:
    texts = {load(gpu_layers=each).generate("Hi", temperature=0, max_tokens=8).text for each in (NONE, layers)}
    assert len(texts) == 1


@pytest.mark.parametrize("layers", [NONE, 1, 3, 6, ALL])
@pytest.mark.parametrize("flash_attention", ["auto", "off"])
def test_buffers_are_within_a_tenth_of_the_plan(load: Loader, layers: int, flash_attention: str) -> None:
    model = load(whole=True, gpu_layers=layers, n_ctx=2048, flash_attention=flash_attention)
    names = {name for name, _ in model.plan.gpu_bytes}
    allocated = sum(buffer.n_bytes for buffer in model.loaded.buffers if buffer.device in names)
    assert allocated == pytest.approx(model.plan.vram_bytes, rel=0.1)


def test_prefill_is_most_of_the_time_to_first_token(load: Loader) -> None:
    model = load(n_ctx=2048)
    model.generate("Hi", max_tokens=2)  # compiles shaders
    stats = model.generate(PROMPT, temperature=0, max_tokens=4).stats
    assert 0.5 * stats.ttft_seconds < stats.prefill_seconds <= stats.ttft_seconds
    assert stats.overhead_seconds < stats.decode_seconds


@pytest.mark.parametrize("layers", [NONE, ALL])
def test_one_token_is_prefilled_behind_a_prefix_that_a_gpu_has_saved(load: Loader, layers: int) -> None:
    first = load(keeps_states=True, gpu_layers=ALL, n_ctx=2048)
    reply = first.generate(PROMPT, temperature=0, max_tokens=2)
    text = reply.text
    first.save_state(prompt_only=True)
    first.close()
    again = load(keeps_states=True, gpu_layers=layers, n_ctx=2048).generate(PROMPT, temperature=0, max_tokens=2)
    assert again.text == text
    assert again.stats.reused_tokens >= len(PROMPT) - 1


def test_four_clients_share_a_prefix(load: Loader) -> None:
    model = load(parallel=4, n_ctx=1024)

    async def ask() -> list[str]:
        calls = (asyncio.to_thread(model.generate, PROMPT + end, temperature=0, max_tokens=6) for end in "abcd")
        return [reply.text for reply in await asyncio.gather(*calls)]

    alone = load(gpu_layers=NONE, n_ctx=1024)
    assert asyncio.run(ask()) == [alone.generate(PROMPT + end, temperature=0, max_tokens=6).text for end in "abcd"]


def test_a_kv_cache_that_does_not_fit_names_the_flags_that_help(load: Loader) -> None:
    with pytest.raises(OutOfMemoryError, match=r"can't allocate|no memory") as caught:
        load(whole=True, gpu_layers=ALL, n_ctx=1 << 22)
    assert [caught.value.hint.index(flag) for flag in ("-ngl", "-ctk", "--ctx")] == sorted(
        caught.value.hint.index(flag) for flag in ("-ngl", "-ctk", "--ctx")
    )
