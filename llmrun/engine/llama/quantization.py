"""Quantization of a model file with llama_model_quantize, and capture of llama.cpp's log.

Owns its parameters and their layout; must not know how they are chosen, nor what the log means.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from llmrun import _native
from llmrun.engine.llama.library import import_llama
from llmrun.errors import LlmrunError
from llmrun.protocol.jobs.quantize import Quantize

_SLAB_BYTES = 16 << 20  # of a tensor's rows in memory at a time: 5 to 10 % faster than whole tensors, by the caches
# sizeof of the structs passed; another layout would corrupt memory silently.
_SIZES = {
    "llama_model_quantize_params": 64,
    "llama_model_imatrix_data": 24,
    "llama_model_tensor_override": 16,
    "llama_model_kv_override": 264,
}
_KV_INT, _KV_STR = 0, 3  # llama_model_kv_override_type
_KV_BYTES = 127


def check_layout() -> None:
    """Compare the sizes of the structs passed with those this file was written for.

    Raises:
        LlmrunError: one has another size.
    """
    for struct, size in _SIZES.items():
        if ctypes.sizeof(getattr(import_llama(), struct)) != size:
            raise LlmrunError(f"{struct} of llama-cpp-python has an unexpected size on this platform")


def quantize(command: Quantize, weights: Mapping[str, Any], facts: Mapping[str, str | int]) -> bool:
    """Write a quantized file, or without a target only log its types; return False if llama.cpp's log has an error.

    Args:
        weights: the importance matrix: tensor -> float32 for each column.
        facts: additional metadata of the file.
    """
    llama = import_llama()
    params = llama.llama_model_quantize_default_params()
    params.ftype = command.file_type
    params.nthread = command.threads
    params.allow_requantize = True  # the front has warned the user
    params.pure = command.pure
    params.quantize_output_tensor = not command.keeps_output
    params.max_buf_size = _SLAB_BYTES
    params.dry_run = not command.target
    if command.output_type >= 0:
        params.output_tensor_type = command.output_type
    if command.embedding_type >= 0:
        params.token_embedding_type = command.embedding_type
    # Each array ends with an entry of zeros, and must not be collected before the call returns.
    patterns = [(pattern.encode(), type_number) for pattern, type_number in command.overrides]
    overrides = (llama.llama_model_tensor_override * (len(patterns) + 1))(*patterns)
    rows, metadata = _importance(llama, weights), _metadata(llama, facts)
    if patterns:
        params.tt_overrides = overrides
    if weights:
        params.imatrix, params.kv_overrides = rows, metadata
    source, target = os.fsencode(command.source), os.fsencode(command.target)
    return bool(llama.llama_model_quantize(source, target, ctypes.byref(params)) == 0)


def _importance(llama: Any, weights: Mapping[str, Any]) -> Any:
    rows = (llama.llama_model_imatrix_data * (len(weights) + 1))()
    for row, (tensor, numbers) in zip(rows, weights.items(), strict=False):
        row.name, row.size = tensor.encode(), len(numbers)
        row.data = numbers.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    return rows


def _metadata(llama: Any, facts: Mapping[str, str | int]) -> Any:
    rows = (llama.llama_model_kv_override * (len(facts) + 1))()
    for fact, (key, value) in zip(rows, facts.items(), strict=False):
        fact.key = key.encode()
        if isinstance(value, int):
            fact.tag, fact.value.val_i64 = _KV_INT, value
        else:
            fact.tag, fact.value.val_str = _KV_STR, value.encode()[:_KV_BYTES]
    return rows


def loads_without_weights(path: str) -> bool:
    """Return whether llama.cpp loads all but the weights: metadata, vocabulary, every tensor's name and shape."""
    llama = import_llama()
    params = llama.llama_model_default_params()
    params.n_gpu_layers = 0
    params.no_alloc = True
    params.use_extra_bufts = False
    params.load_mode = llama.LLAMA_LOAD_MODE_NONE
    model = llama.llama_model_load_from_file(os.fsencode(path), params)
    if model:
        llama.llama_model_free(model)
    return bool(model)


@contextmanager
def log_to(receive: Callable[[str], None]) -> Iterator[None]:
    """Pass llama.cpp's log to a function inside the block, in pieces of lines; restore the usual log afterwards."""
    llama = import_llama()
    usual = llama.llama_log_callback(_native.log_callback_address)
    callback = llama.llama_log_callback(lambda level, text, data: receive(text.decode("utf-8", "replace")))
    llama.llama_log_set(callback, None)
    try:
        yield
    finally:
        llama.llama_log_set(usual, None)
