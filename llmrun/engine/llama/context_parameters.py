"""The fields of llama_context_params that a load determines alone. Must not know a context's layout."""

from __future__ import annotations

from typing import Any

from llmrun.gguf.types import TENSOR_TYPES
from llmrun.protocol.loading import Load

_FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}  # llama_flash_attn_type
KV_TYPES = {
    name: TENSOR_TYPES[name.upper()].number
    for name in ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
}
"""Types that llama.cpp supports for the KV cache -> ggml's number."""


def context_parameters(llama: Any, load: Load) -> Any:
    """Return llama.cpp's defaults with batches, threads, flash attention and types as in a load."""
    params = llama.llama_context_default_params()
    params.n_batch = load.n_batch
    params.n_ubatch = min(load.n_batch, load.n_ubatch)
    params.n_threads = load.threads
    params.n_threads_batch = load.threads_batch or load.threads
    params.flash_attn_type = _FLASH_ATTENTION[load.flash_attention]
    # A sliding window caches its own tokens only, as in llama.cpp's tools; checkpoints.py has what a cut prompt needs.
    params.swa_full = False
    params.type_k, params.type_v = KV_TYPES[load.kv_type_k], KV_TYPES[load.kv_type_v]
    return params
