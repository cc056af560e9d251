"""Every field of llama.cpp's model and context parameters: what llama-server sets, what we set, and why it differs.

With LLAMA_CPP, the folder of llama.cpp's sources, llama-server's values are compared with those in common/common.h.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from llmrun.engine.llama.library import import_llama
from llmrun.engine.llama.parameters import context_parameters
from llmrun.protocol.loading import Load

pytestmark = pytest.mark.upstream

LLAMA_CPP = os.environ.get("LLAMA_CPP", "")
# What llama-server (common_context_params_to_llama) passes without options; llama-cli the same, with one sequence.
SERVER_CONTEXT: dict[str, Any] = {
    "n_ctx": 0, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1, "n_rs_seq": 0, "n_outputs_max": 0,
    "n_outputs_max_per_seq": 1, "n_threads": -1, "n_threads_batch": -1, "ctx_type": 0, "rope_scaling_type": -1,
    "pooling_type": -1, "attention_type": -1, "flash_attn_type": -1, "rope_freq_base": 0.0, "rope_freq_scale": 0.0,
    "yarn_ext_factor": -1.0, "yarn_attn_factor": -1.0, "yarn_beta_fast": -1.0, "yarn_beta_slow": -1.0,
    "yarn_orig_ctx": 0, "defrag_thold": -1.0, "cb_eval": None, "cb_eval_user_data": None, "type_k": 1, "type_v": 1,
    "abort_callback": None, "abort_callback_data": None, "embeddings": False, "offload_kqv": True, "no_perf": False,
    "op_offload": True, "swa_full": False, "kv_unified": False, "samplers": None, "n_samplers": 0, "ctx_other": None,
}  # fmt: skip
CONTEXT_REASONS = {
    "n_ctx": "the plan's, or the one that was asked for, never 0",
    "n_batch": "smaller, so that a cancel and the tokens of others do not wait for a long prefill",
    "n_seq_max": "the parallel answers, and the prefixes that are parked beside them",
    "n_outputs_max": "one row a sequence, or those of a draft: rows of logits take memory",
    "n_threads": "the physical cores that are free", "n_threads_batch": "as n_threads",
    "flash_attn_type": "auto too, unless the plan knows better",
    "abort_callback": "cancels a decode", "abort_callback_data": "the flag that cancels it",
    "kv_unified": "one pool of cells, where sequences share prefixes",
    "no_perf": "the loop measures its own times",
    "embeddings": "for embeddings only",
}  # fmt: skip
SERVER_MODEL: dict[str, Any] = {
    "devices": None, "tensor_buft_overrides": None, "n_gpu_layers": -1, "split_mode": 1, "main_gpu": 0,
    "tensor_split": None, "progress_callback": None, "progress_callback_user_data": None, "kv_overrides": None,
    "vocab_only": False, "check_tensors": False, "use_extra_bufts": True, "no_host": False, "no_alloc": False,
}  # fmt: skip
MODEL_REASONS = {
    "kv_overrides": "accents are stripped before llama.cpp tokenizes: it strips vowels too",
    "n_gpu_layers": "the plan's",
    "progress_callback": "progress, and a cancel while loading", "progress_callback_user_data": "as progress_callback",
    "load_mode": "mmap, unless the plan says otherwise",
}  # fmt: skip


def value(field: Any) -> Any:
    """A field's value; None for pointers and callbacks that are null."""
    return field if isinstance(field, (bool, int, float)) else field or None


def defaults(params: Any) -> dict[str, Any]:
    return {name: value(getattr(params, name)) for name, _ in params._fields_}


def test_context_parameters_are_llama_servers_but_for_reasons() -> None:
    llama = import_llama()
    ours = defaults(context_parameters(llama, Load("", 4096, threads=1)))
    named = SERVER_CONTEXT.keys()
    assert ours.keys() - named == set(), "a new field: look what llama-server sets"
    for name, theirs in SERVER_CONTEXT.items():
        if name in ours and name not in CONTEXT_REASONS:
            assert ours[name] == theirs, name


def test_model_parameters_are_llama_servers_but_for_reasons() -> None:
    ours = defaults(import_llama().llama_model_default_params())
    for name, theirs in SERVER_MODEL.items():
        if name not in MODEL_REASONS:
            assert ours[name] == theirs, name
    assert ours.keys() - SERVER_MODEL.keys() <= {"load_mode", "lazy_mode", "load_mtp", "use_mmap", "use_mlock"}


@pytest.mark.skipif(not LLAMA_CPP, reason="needs LLAMA_CPP, the folder of llama.cpp's sources")
def test_llama_servers_values_are_those_of_its_sources() -> None:
    text = (Path(LLAMA_CPP) / "common/common.h").read_text(encoding="utf-8")
    names = {"n_seq_max": "n_parallel", "offload_kqv": "", "op_offload": "", "embeddings": "embedding"}
    for name, theirs in SERVER_CONTEXT.items():
        source = names.get(name, name)
        pattern = rf"^\s+(?:u?int32_t|float|bool)\s+{source}\s*=\s*([-\w.]+);"
        found = re.search(pattern, text, re.MULTILINE) if source else None
        if found is not None:
            said = {"true": 1.0, "false": 0.0}.get(found[1])
            assert float(found[1].rstrip("f") if said is None else said) == float(theirs), name
