"""Memory: the parts add up, the KV cache grows in steps, and what is known of llama.cpp's figures comes out."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
from support.model_facts import Facts

from llmrun.planning.memory import (
    Memory,
    kernel_types,
    kv_bytes,
    largest_context,
    memory,
    repacked_types,
    reserved_bytes,
    without_flash_attention,
)
from llmrun.protocol.llama_folder import own_kernels_wanted

MIB = 1 << 20


SMALL = Facts()


def test_needed_is_a_sum() -> None:
    assert Memory(weights=1, kv=10, compute=1000, process=10_000).needed == 11_011


def test_scores_lie_where_activations_do() -> None:
    parts = memory(SMALL, 4096)
    assert without_flash_attention(parts, SMALL, 64) == parts
    assert without_flash_attention(parts, SMALL, 4096).compute == 4 * 512 * 4096 * 9


def test_a_larger_micro_batch_takes_more_scratch_memory() -> None:
    found = [memory(SMALL, 8192, ubatch=ubatch) for ubatch in (512, 1024, 2048)]
    logits = 4 * SMALL.n_vocab
    assert [(each.compute - logits) / (found[0].compute - logits) for each in found] == pytest.approx([1, 2, 4])
    assert reserved_bytes(SMALL, 131_072, ubatch=2048) > 3.9 * reserved_bytes(SMALL, 131_072)
    assert without_flash_attention(found[2], SMALL, 4096, 2048).compute == 4 * 2048 * 4096 * 9


def test_merges_take_memory() -> None:
    assert memory(replace(SMALL, n_merges=1000), 512).process - memory(SMALL, 512).process == 210_000


def test_what_llama_cpp_reports() -> None:
    assert kv_bytes(SMALL, 8192) == 180 * MIB
    assert reserved_bytes(SMALL, 8192) / MIB == pytest.approx(21.51, abs=0.1)
    assert reserved_bytes(SMALL, 131_072) / MIB == pytest.approx(141.51, abs=0.1)


def test_kv_cache_is_made_in_steps_of_256() -> None:
    assert kv_bytes(SMALL, 1) == kv_bytes(SMALL, 256) == 256 * 23_040
    assert kv_bytes(SMALL, 0) == 0


def test_q8_0_takes_34_bytes_for_32_elements() -> None:
    assert kv_bytes(SMALL, 256, "q8_0") == 256 * 11_520 * 34 // 32


def test_recurrent_state_counts_once() -> None:
    assert kv_bytes(replace(SMALL, recurrent_bytes=7), 512) - kv_bytes(SMALL, 512) == 7


@pytest.mark.parametrize(
    ("recurrent", "window", "sequences", "limit"),
    [(0, 0, 8, 0), (5 * MIB, 0, 1, 160 * MIB), (5 * MIB, 0, 8, 512 * MIB), (150 * MIB, 0, 8, 1200 * MIB),
     (0, 400 * MIB, 1, 512 * MIB)],
)  # fmt: skip
def test_checkpoints_count(recurrent: int, window: int, sequences: int, limit: int) -> None:
    sizes = replace(SMALL, recurrent_bytes=recurrent, window_bytes=window)
    found = memory(sizes, 1024, sequences=sequences)
    assert found.checkpoints == limit
    assert found.needed - replace(found, checkpoints=0).needed == limit


def test_more_context_never_takes_less() -> None:
    needed = [memory(SMALL, n_ctx).needed for n_ctx in range(256, 20_000, 256)]
    assert all(larger >= smaller for smaller, larger in pairwise(needed))


@pytest.mark.parametrize("most", [0, 255, 256, 5000, 8192, 9000])
def test_largest_context_agrees_with_trying_them_all(most: int) -> None:
    fitting = [n_ctx for n_ctx in range(256, 8193, 256) if n_ctx <= most]
    assert largest_context(lambda n_ctx: n_ctx <= most, 8192) == max(fitting, default=0)


def test_repacked_types() -> None:
    assert "Q4_K" in repacked_types(("avx2",))
    assert "Q2_K" not in repacked_types(("avx2",))
    assert "Q2_K" in repacked_types(("avx2", "avx512f"))
    assert not repacked_types(("sse4_2",))


def test_types_of_our_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("LLMRUN_KERNELS", "any but ggml")
    assert "Q4_1" in kernel_types(("avx2", "fma"))
    assert repacked_types(("avx2", "fma")) == {"MXFP4"}
    assert not kernel_types(("avx2", "fma", "amx_int8"))
    assert not kernel_types(("avx2",))
    assert kernel_types(("asimd", "asimddp")) == kernel_types(("avx2", "fma"))
    assert repacked_types(("asimd", "asimddp")) == {"MXFP4"}
    assert not kernel_types(("asimd",))
    monkeypatch.setattr("sys.platform", "darwin")
    assert not kernel_types(("asimd", "asimddp"))
    assert "Q8_0" in repacked_types(("asimd", "asimddp"))
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("LLMRUN_KERNELS", "ggml")
    assert not kernel_types(("avx2", "fma"))
    assert not kernel_types(("asimd", "asimddp"))


@pytest.mark.parametrize(("machine", "is_wanted"), [("x86_64", True), ("aarch64", False)])
def test_kernels_that_nobody_chose(monkeypatch: pytest.MonkeyPatch, machine: str, *, is_wanted: bool) -> None:
    monkeypatch.delenv("LLMRUN_KERNELS", raising=False)
    monkeypatch.setattr("os.uname", lambda: SimpleNamespace(machine=machine), raising=False)
    assert own_kernels_wanted() == is_wanted
