"""Makes a tiny model of any architecture, of weights of zero, by asking llama.cpp what is still missing in its file.

Knows no architecture: llama.cpp's log names the next key or tensor that it misses, or the shape that it expected.
What becomes of a model is found out in a process of its own for each, for llama.cpp aborts on some, or never returns.
"""

from __future__ import annotations

import ctypes
import functools
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import llmrun
from llmrun.engine.llama.library import import_llama
from llmrun.engine.llama.quantization import log_to
from support.gguf_writer import TensorSpec, gguf, runnable_metadata

F32, F16 = 0, 1  # ggml_type
LENGTHS = (16, 64, 128)
"""Tokens after which the state of a context is measured: within the window, and beyond it."""
BATCH = 8
_KEY = re.compile(r"key not found in model: [^.\s]+\.(\S+)")
_TENSOR = re.compile(r"tensor '([^']+)' not found")
_SHAPE = re.compile(r"tensor '([^']+)' has wrong shape; expected +([\d, ]+), got")
_GENERAL = ("general.", "tokenizer.")
_LOADED = b"\n"  # comes before the answer of one that was loaded
_MOST_LOADS = 500
_MOST_SECONDS = 10  # of processor time
# CUDA does not work in a process that was forked from one that has begun to use it.
_NO_GPU = {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}

# What an architecture may ask for, of every one.
USUAL: dict[str, Any] = {
    "attention.clamp_kqv": 8.0, "attention.decay_lora_rank": 8, "attention.gate_lora_rank": 8,
    "attention.iclr_lora_rank": 8, "attention.indexer.head_count": 2, "attention.indexer.key_length": 16,
    "attention.indexer.top_k": 8, "attention.key_length": 16, "attention.key_length_mla": 24,
    "attention.kv_lora_rank": 32, "attention.layer_norm_epsilon": 1e-5, "attention.q_lora_rank": 16,
    "attention.relative_buckets_count": 32, "attention.scale": 1.0, "attention.sliding_window_pattern": [1, 1, 1, 0],
    "attention.value_length": 16, "attention.value_length_mla": 16, "attention.value_residual_mix_lora_rank": 8,
    "embedding_length_per_layer_input": 0, "embedding_scale": 1.0, "expert_feed_forward_length": 64,
    "expert_gating_func": 2, "expert_group_scale": 0.05, "expert_shared_count": 1,
    "expert_shared_feed_forward_length": 64, "expert_weights_norm": True, "expert_weights_scale": 1.0,
    "experts_per_group": 2, "full_attention_interval": 4, "interleave_moe_layer_step": 1, "kda.gate_lower_bound": -1.0,
    "kda.head_dim": 16, "leading_dense_block_count": 1, "logit_scale": 1.0, "rescale_every_n_layers": 0,
    "residual_scale": 1.0, "rope.dimension_sections": [4, 2, 2, 0], "rope.freq_base_swa": 10000.0,
    "shortconv.l_cache": 3, "ssm.conv_kernel": 4, "ssm.dt_b_c_rms": False, "ssm.group_count": 1, "ssm.inner_size": 64,
    "ssm.state_size": 16, "ssm.time_step_rank": 2, "swiglu_clamp_exp": [1.0] * 4, "time_decay_extra_dim": 8,
    "time_mix_extra_dim": 8, "use_parallel_residual": True, "wkv.head_size": 16,
}  # fmt: skip


def load(path: Path, *, only_vocabulary: bool = False) -> tuple[Any, str]:
    """A llama_model, or None; and what llama.cpp's log says."""
    llama = import_llama()
    params = llama.llama_model_default_params()
    params.n_gpu_layers, params.vocab_only = 0, only_vocabulary
    params.load_mode = llama.LLAMA_LOAD_MODE_NONE
    log: list[str] = []
    with log_to(log.append):
        model = llama.llama_model_load_from_file(os.fsencode(path), params)
    return model, "".join(log)


def build(path: Path, architecture: str, settings: Mapping[str, Any]) -> Any:
    """Write a file that llama.cpp loads, and give the llama_model.

    Args:
        settings: keys beside a tiny llama's, without the architecture's name; None removes one. What is still missing
            is USUAL.

    Raises:
        ValueError: llama.cpp refuses it for another reason than that something is missing.
    """
    usual = {re.sub(r"^llama\.", f"{architecture}.", key): value for key, value in runnable_metadata().items()}
    metadata = {**usual, "general.architecture": architecture}
    for key, value in settings.items():
        metadata[key if key.startswith(_GENERAL) else f"{architecture}.{key}"] = value
    metadata = {key: value for key, value in metadata.items() if value is not None}
    shapes: dict[str, tuple[int, ...]] = {}
    for _ in range(_MOST_LOADS):
        path.write_bytes(gguf(metadata, [TensorSpec(name, s, F32, 4 * math.prod(s)) for name, s in shapes.items()]))
        model, log = load(path)
        if model:
            return model
        if (found := _KEY.search(log)) and found[1] in USUAL:
            metadata[f"{architecture}.{found[1]}"] = USUAL[found[1]]
        elif found := _TENSOR.search(log):
            first = re.sub(r"blk\.\d+", "blk.0", found[1])
            shapes[found[1]] = shapes.get(first, (1,))
        elif found := _SHAPE.search(log):
            shapes[found[1]] = tuple(map(int, found[2].split(",")))
        else:
            break
    raise ValueError(next((line for line in log.splitlines() if "error" in line), log[-500:]))


def state_bytes(model: Any, kind: int) -> list[int]:
    """What a context's only sequence keeps, after LENGTHS tokens, with keys and values of a type; [] for encoders."""
    llama = import_llama()
    params = llama.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 2 * LENGTHS[-1], BATCH, BATCH, 1
    params.n_threads = params.n_threads_batch = 1
    params.swa_full = False
    params.type_k = params.type_v = kind
    context = llama.llama_init_from_model(model, params)
    found = []
    tokens = (ctypes.c_int32 * BATCH)(*range(5, 5 + BATCH))
    for length in range(BATCH, LENGTHS[-1] + 1, BATCH) if llama.llama_get_memory(context) else ():
        assert llama.llama_decode(context, llama.llama_batch_get_one(tokens, BATCH)) == 0
        if length in LENGTHS:
            found.append(llama.llama_state_seq_get_size(context, 0))
    llama.llama_free(context)
    return found


def measured(path: Path, architecture: str, settings: Mapping[str, Any], on_load: Callable[[], Any]) -> dict[str, Any]:
    """What llama.cpp says of a model: its window, and the bytes of its states. on_load is called when it is loaded."""
    try:
        model = build(path, architecture, settings)
    except ValueError as error:
        return {"refused": str(error)}
    on_load()
    return {
        "window": import_llama().llama_model_n_swa(model),
        "f16": state_bytes(model, F16),
        "f32": state_bytes(model, F32),
    }


class Case(NamedTuple):
    """A model to be made; see build()."""

    architecture: str
    settings: Mapping[str, Any]


def answers(folder: Path, cases: Mapping[str, Case]) -> dict[str, dict[str, Any]]:
    """What llama.cpp makes of each model, whose file is folder/NAME.gguf: measured(), or the process's end.

    That is {"died": status, "loaded": whether llama.cpp had loaded it by then}.
    """
    lines = [json.dumps({"path": str(folder / f"{name}.gguf"), **case._asdict()}) for name, case in cases.items()]
    paths = (Path(__file__).parents[1], Path(llmrun.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, __file__],
        input="\n".join(lines),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **_NO_GPU, "PYTHONPATH": os.pathsep.join(map(str, paths)), "GGML_NO_BACKTRACE": "1"},
        check=True,
    )
    return dict(zip(cases, map(json.loads, done.stdout.splitlines()), strict=True))


def main() -> None:
    """A line of JSON for each line of stdin: a path, and a case's fields."""
    import resource

    import_llama().llama_backend_init()
    for line in sys.stdin:
        case = json.loads(line)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            resource.setrlimit(resource.RLIMIT_CPU, (_MOST_SECONDS, _MOST_SECONDS))
            told = functools.partial(os.write, writing, _LOADED)
            found = measured(Path(case["path"]), case["architecture"], case["settings"], told)
            os.write(writing, json.dumps(found).encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            told = pipe.read()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        ended = json.dumps({"died": status, "loaded": told.startswith(_LOADED)})
        print(told.removeprefix(_LOADED).decode() if status == 0 else ended, flush=True)


if __name__ == "__main__":
    main()
