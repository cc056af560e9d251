"""Jobs that need no model: what llama.cpp says of itself."""

from __future__ import annotations

from contextlib import closing

from llmrun.engine.jobs.machine import parse_system_info
from llmrun.protocol.jobs import Empty
from llmrun.protocol.jobs.machine import BUILD
from llmrun.runner.client import EngineClient


def test_what_llama_cpp_was_built_with() -> None:
    with closing(EngineClient()) as engine:
        build = engine.do(BUILD, Empty())
    assert build.features["CPU"]


def test_system_info() -> None:
    text = "CUDA : ARCHS = 500,610 | USE_GRAPHS = 1 | CPU : SSE3 = 1 | AVX512 = 0 | REPACK = 1 | "
    assert parse_system_info(text) == {"CUDA": ("ARCHS", "USE_GRAPHS"), "CPU": ("SSE3", "REPACK")}
    assert parse_system_info("") == {}
