"""A context's parameters that a load determines, its evaluation callback, and the reasons why it can't be created."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llmrun import _native
from llmrun.engine.llama.devices import gpus
from llmrun.engine.llama.library import kernels
from llmrun.errors import OutOfMemoryError, UsageError
from llmrun.gguf.header import Header
from llmrun.gguf.types import TENSOR_TYPES
from llmrun.protocol.loading import DeviceBuffer, Load, ways_to_fit
from llmrun.protocol.sizes import readable_size

if TYPE_CHECKING:
    from llmrun.engine.llama.ggml import GgmlTensor
    from llmrun.engine.llama.model import LlamaModel


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


Watch = Callable[["GgmlTensor", bool], bool]
"""Evaluation callback, called for each tensor: with True to ask whether to observe it; if so, again with False when its
numbers are available. Returning False then ends the computation. LlamaContext.decode() raises its exceptions."""


def guarded(llama: Any, watch: Watch, keep: Callable[[BaseException], None]) -> Any:
    """Return llama_context_params.cb_eval, which passes exceptions to keep(): none may pass through C++."""
    from llmrun.engine.llama.ggml import GgmlTensor, check_layout

    check_layout()

    def callback(address: int, ask: bool, data: Any) -> bool:
        try:
            return watch(GgmlTensor.from_address(address), ask)
        except BaseException as failure:
            keep(failure)
            return False

    return llama.ggml_backend_sched_eval_callback(callback)


def check_kv_types(model: LlamaModel, load: Load) -> None:
    """Raise UsageError if the attention heads are no multiple of the blocks of the KV cache's types."""
    if load.flash_attention == "off":
        return  # rows of all heads are divided into blocks then
    for flag, kv_type, name in (("k", load.kv_type_k, "key"), ("v", load.kv_type_v, "value")):
        block = TENSOR_TYPES[kv_type.upper()].block
        if block == 1:
            continue  # without reading the header, which takes longer than creating a context
        header = model.header
        odd = next((length for length in _head_lengths(header, name) if length % block), 0)
        if odd and header.kv_layers:
            raise UsageError(
                f"--cache-type-{flag} {kv_type} does not suit this model",
                why=f"it is stored in blocks of {block} elements, and the model's {name} heads have {odd}",
                hint=f"leave out --cache-type-{flag}",
            )


def _head_lengths(header: Header, name: str) -> tuple[int, int]:
    """Return the length of "key" or "value" heads: those of full attention, and those of windows if they differ."""
    return getattr(header, f"{name}_length"), header.model_count(f"attention.{name}_length_swa")


def has_own_attention(model: LlamaModel, load: Load) -> bool:
    """Return whether our kernels compute all attention on the processor, with a result that threads don't change."""
    if load.flash_attention == "off" or not kernels().name:
        return False
    types = KV_TYPES[load.kv_type_k], KV_TYPES[load.kv_type_v]
    lengths = zip(_head_lengths(model.header, "key"), _head_lengths(model.header, "value"), strict=True)
    return all(_native.can_attend(*types, key, value) for key, value in lengths)


def out_of_memory(load: Load, room: int, failed: DeviceBuffer | None) -> OutOfMemoryError:
    """Return the error of a context with `room` cells.

    Args:
        failed: the buffer that could not be allocated, if known.
    """
    what = f"there is no memory for a context window of {room:,} tokens"
    if failed is None or failed.device not in {gpu.name for gpu in gpus()}:
        return OutOfMemoryError(what, hint="ask for a smaller one with --ctx")
    why = f"{failed.device} can't allocate {readable_size(failed.n_bytes)}"
    return OutOfMemoryError(what, why=why, hint=ways_to_fit(load))
