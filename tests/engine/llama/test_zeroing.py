"""KV caches of the whole window whose cells take memory when they are used."""

from __future__ import annotations

import ctypes
import mmap
import random
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.random_model import write_random_model

from llmrun import _native
from llmrun.engine.llama import zeroing
from llmrun.engine.llama.base import CacheFull, Entry
from llmrun.engine.llama.context import LlamaContext
from llmrun.engine.llama.model import LlamaModel
from llmrun.protocol.loading import Load

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pages are given back with Linux's calls")
WINDOW, BATCH = 65_536, 256
CELL_BYTES = 2 * 2 * 128 * 6  # keys and values as f16, of 128 elements in 6 layers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaModel]:
    path = write_random_model(tmp_path_factory.mktemp("model") / "random.gguf", inner=256, n_ctx=WINDOW)
    loaded = LlamaModel(str(path), 0, _native.CancelFlag())
    yield loaded
    loaded.close()


def context_of(model: LlamaModel, **settings: Any) -> LlamaContext:
    return LlamaContext(model, Load(model.path, **{"n_ctx": WINDOW, "n_batch": BATCH, **settings}))


def logits_of(context: LlamaContext, prompt: list[int], sequence: int = 0) -> bytes:
    """Return the logits of each batch's last token."""
    found = b""
    for start in range(0, len(prompt), context.n_batch):
        part = prompt[start : start + context.n_batch]
        batch = [Entry(token, start + i, sequence, i == len(part) - 1) for i, token in enumerate(part)]
        context.decode(batch)
        found += ctypes.string_at(context.logits(-1), 4 * context.vocabulary.n_tokens)
    return found


def resident() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * mmap.PAGESIZE


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, 250), k=length)


@pytest.mark.parametrize("settings", [{}, {"n_seq_max": 4, "n_cells": WINDOW * 3}, {"n_seq_max": 4}])
def test_only_cells_that_are_used_take_memory(model: LlamaModel, settings: dict[str, int]) -> None:
    before = resident()
    with closing(context_of(model, **settings)) as context:
        whole = context.n_cells * CELL_BYTES
        assert context.n_cells == (settings.get("n_cells") or WINDOW * context.n_seq_max)
        logits_of(context, prompt_of(4 * BATCH))
        assert resident() - before < whole / 2


@pytest.mark.parametrize(
    "settings", [{}, {"kv_type_k": "q8_0", "kv_type_v": "q8_0"}, {"flash_attention": "off", "n_ctx": 4096}]
)
def test_a_prefix_of_a_long_stream_is_copied_without_the_rest(
    model: LlamaModel, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without flash attention, values lie transposed."""
    imported: list[int] = []
    assert zeroing.zeroes_on_demand()
    long, shared, rest = prompt_of(2048), 200, prompt_of(BATCH, seed=1)
    with closing(context_of(model, n_seq_max=2, **settings)) as context:
        set_data = context._llama.llama_state_seq_set_data
        monkeypatch.setattr(
            context._llama, "llama_state_seq_set_data", lambda *call: (imported.append(call[2]), set_data(*call))[1]
        )
        assert context.can_copy
        assert not context.shares_cells
        for number in (1, 0):  # the first and the last stream
            other = 1 - number
            logits_of(context, long, number)
            before = resident()
            assert context.copy(number, other, shared)
            assert imported.pop() < 2 * shared * CELL_BYTES
            if "flash_attention" not in settings:  # else a token's values are on many pages
                assert resident() - before < len(long) * CELL_BYTES / 2
            assert context.n_copied(number, shared) == shared
            batch = [Entry(token, shared + i, other, i == BATCH - 1) for i, token in enumerate(rest)]
            context.decode(batch)
            found = ctypes.string_at(context.logits(-1), 4 * context.vocabulary.n_tokens)
            context.forget(number, shared)
            batch = [entry._replace(sequence_id=number) for entry in batch]
            context.decode(batch)
            assert ctypes.string_at(context.logits(-1), 4 * context.vocabulary.n_tokens) == found
            context.clear()


def test_a_prefix_that_is_not_the_first_cells_of_its_stream_is_copied_with_the_rest(model: LlamaModel) -> None:
    """As in a conversation whose beginning was left out, and the gap closed."""
    with closing(context_of(model, n_seq_max=2)) as context:
        logits_of(context, prompt_of(600))
        assert context.drop(0, 100, 200)
        continued = [Entry(token, 500 + i, 0, i == 99) for i, token in enumerate(prompt_of(100, seed=2))]
        context.decode(continued)  # in cells 100 to 199
        assert context.copy(0, 1, 400)
        found = []
        for sequence in (0, 1):
            context.forget(sequence, 400)
            context.decode([Entry(7, 400, sequence, True)])
            found.append(ctypes.string_at(context.logits(-1), 4 * context.vocabulary.n_tokens))
        assert found[0] == found[1]


def test_logits_are_byte_for_byte_those_of_memory_that_was_zeroed(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(1300)
    with closing(context_of(model)) as context:
        found = logits_of(context, prompt)
        context.forget(0, 0)
        assert logits_of(context, prompt) == found, "cells that were used before"
    monkeypatch.setattr(zeroing, "zero", lambda base, size, value=0: ctypes.memset(base, value, size) and None)
    before = resident()
    with closing(context_of(model)) as context:
        assert resident() - before > 0.9 * WINDOW * CELL_BYTES, "as a system without pages on use has it"
        assert logits_of(context, prompt) == found


@pytest.mark.parametrize("flash_attention", ["on", "off"])
def test_a_cache_has_its_whole_window(model: LlamaModel, flash_attention: str) -> None:
    with closing(context_of(model, n_ctx=2048, flash_attention=flash_attention)) as context:
        logits_of(context, prompt_of(2048))
        with pytest.raises(CacheFull):
            context.decode([Entry(5, 2048, 0, True)])


def test_zero_gives_pages_back_and_leaves_what_is_around_them() -> None:
    size = 16 * mmap.PAGESIZE
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view = (ctypes.c_uint8 * size).from_buffer(memory)
    base = ctypes.addressof(view)
    chance = random.Random(1)
    cases = [(0, size), (1, 10), (5, mmap.PAGESIZE), (mmap.PAGESIZE - 1, 2), (3, size - 3)]
    cases += [(start := chance.randrange(size), chance.randrange(size - start + 1)) for _ in range(50)]
    for start, count in cases:
        for value in (0, 7):
            ctypes.memset(base, 1, size)
            zeroing.zero(base + start, count, value)
            wanted = b"\1" * start + bytes([value]) * count + b"\1" * (size - start - count)
            assert bytes(view) == wanted, (start, count, value)


def test_memory_that_cannot_be_given_back_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zeroing, "_madvise", lambda: lambda *arguments: -1)
    array = (ctypes.c_uint8 * (4 * mmap.PAGESIZE))(*b"\1" * 100)
    zeroing.zero(ctypes.addressof(array), len(array))
    assert not any(array)


def test_an_unknown_layout_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zeroing, "_place_of_type", lambda kind: 0)
    assert zeroing.zeroes_on_demand.__wrapped__() is False


def test_the_layout_is_the_expected_one() -> None:
    assert zeroing.zeroes_on_demand()
