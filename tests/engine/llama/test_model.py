"""The log's lines on buffers."""

from __future__ import annotations

from typing import Any

import pytest

from llmrun.engine.llama import model as module
from llmrun.engine.llama.library import import_llama
from llmrun.engine.llama.model import BufferLog
from llmrun.protocol.loading import DeviceBuffer

MIB = 1 << 20
WEIGHTS = """
load_tensors:   CPU_Mapped model buffer size =    28.50 MiB
load_tensors:      Vulkan0 model buffer size =    92.00 MiB
load_tensors:      Vulkan0 model buffer size =     1.00 MiB
"""
CONTEXT = """
llama_context: Vulkan_Host  output buffer size =     0.25 MiB
llama_kv_cache:    Vulkan0 KV buffer size =    11.00 MiB
llama_memory_recurrent:    Vulkan0 RS buffer size =     2.00 MiB
sched_reserve:    Vulkan0 compute buffer size =    13.00 MiB
"""


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> BufferLog:
    log = BufferLog()
    monkeypatch.setattr(log, "_forward", lambda *line: None)
    for line in (WEIGHTS + CONTEXT).splitlines():
        log.add(2, line.encode(), None)
    return log


def test_sizes_are_added_up_by_device(log: BufferLog) -> None:
    assert dict(log.buffers) == {"CPU": 28.5 * MIB, "Vulkan0": 119 * MIB, "Vulkan_Host": MIB // 4}


def test_another_context_replaces_the_first(log: BufferLog) -> None:
    log.begin_context(import_llama(), verbose=False)
    assert dict(log.buffers) == {"CPU": 28.5 * MIB, "Vulkan0": 93 * MIB}


def test_a_buffer_that_could_not_be_allocated(log: BufferLog) -> None:
    log.read("ggml_gallocr_reserve_n_impl: failed to allocate CUDA0 buffer of size 4294967296")
    assert log.failed == DeviceBuffer("CUDA0", 1 << 32)
    log.begin_context(import_llama(), verbose=False)
    assert log.failed is None


@pytest.mark.parametrize("has_gpus", [False, True])
def test_only_with_gpus_each_line_goes_through_python(monkeypatch: pytest.MonkeyPatch, has_gpus: bool) -> None:
    monkeypatch.setattr(module, "gpus", lambda: ("GPU",) if has_gpus else ())
    seen: list[Any] = []

    class Llama:
        llama_log_callback = staticmethod(seen.append)
        llama_log_set = staticmethod(lambda callback, data: None)

    BufferLog().install(Llama, verbose=False)
    assert callable(seen[0]) == has_gpus
