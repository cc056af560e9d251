"""The planned KV cache against the one that llama.cpp allocates, for models with windows and recurrent states."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.hf_writer import files_of, write
from support.hybrid_models import HYBRIDS, write_models

from llmrun import _native
from llmrun.engine.llama import model as module
from llmrun.engine.llama.context import LlamaContext
from llmrun.engine.llama.model import LlamaModel
from llmrun.gguf.reader import read_header
from llmrun.lab.convert.job import convert_folder
from llmrun.planning.hardware import Hardware
from llmrun.planning.memory import UBATCH
from llmrun.planning.plan import make_plan
from llmrun.planning.preferences import LoadPreferences

GIB = 1 << 30
MACHINE = Hardware("CPU", (), 4, 8, None, 64 * GIB, 60 * GIB, ())
LONG = {"context_length": 65_536}
BLOCKS = {"attention.key_length": 32, "attention.value_length": 32}  # as q8_0 needs them
CONVERTED = {
    "phi3": ("Phi3ForCausalLM", {"sliding_window": 512}),
    "gemma2": ("Gemma2ForCausalLM", {"sliding_window": 512}),
}
WINDOWS: dict[str, dict[str, int]] = {
    "gemma3": {**BLOCKS, "attention.sliding_window": 1024},
    "gpt-oss": {"attention.sliding_window": 128},
    "llama": {**BLOCKS, "rope.dimension_count": 32},
}
# Each with window, type of the cache and answers at the same time.
LOADS: tuple[dict[str, Any], ...] = (
    {"n_ctx": 2048},
    {"n_ctx": 16_384},
    {"n_ctx": 4096, "parallel": 4},
    {"n_ctx": 16_384, "n_ubatch": 2048},
    {"n_ctx": 16_384, "kv_type_k": "q8_0", "kv_type_v": "q8_0", "flash_attention": "on"},
)
SHORT = {"gpt-oss", *CONVERTED, *HYBRIDS}  # their heads are shorter than a block of q8_0
CASES = [
    (name, load)
    for name in (*CONVERTED, *WINDOWS, *HYBRIDS)
    for load in LOADS
    if name not in SHORT or "kv_type_k" not in load
]
LOG_STEP = 11_000  # bytes of the smallest difference that llama.cpp's log shows


@pytest.fixture(scope="module")
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name, folder = request.param, tmp_path_factory.mktemp("models")
    if name in CONVERTED:
        architecture, settings = CONVERTED[name]
        files = files_of(architecture, max_position_embeddings=65_536, **settings)
        convert_folder(write(folder / "in", files), folder / f"{name}.gguf")
        return folder / f"{name}.gguf"
    if os.name != "posix":
        pytest.skip("models are built in processes that fork")
    return write_models(folder, (name,), **LONG, **WINDOWS.get(name, {}))[name]


@pytest.mark.parametrize(("path", "preferences"), CASES, ids=str, indirect=["path"], scope="module")
def test_as_much_is_planned_as_llama_cpp_allocates(
    path: Path, preferences: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    header = read_header(path)
    monkeypatch.setattr(module, "gpus", lambda: ("a GPU",))  # then the log is read
    plan = make_plan(header, MACHINE, LoadPreferences(**preferences))
    # As it is at last, and with the micro-batch that memory is planned for.
    ubatch = preferences.get("n_ubatch", UBATCH)
    load = replace(plan.load, n_ubatch=ubatch)
    model = LlamaModel.of(load, _native.CancelFlag())
    context = LlamaContext(model, load)
    sizes = {purpose: size for (_, purpose), size in model.buffer_log._sizes.items()}
    context.close()
    model.close()
    assert sizes.keys() & {"KV", "RS"}, "the log is not read"
    assert plan.memory.kv == pytest.approx(sizes.get("KV", 0) + sizes.get("RS", 0), rel=0.05, abs=LOG_STEP)
    states = header.recurrent_bytes * plan.load.n_seq_max * (1 + load.n_rollback)
    assert states == pytest.approx(sizes.get("RS", 0), rel=0.05, abs=LOG_STEP)
