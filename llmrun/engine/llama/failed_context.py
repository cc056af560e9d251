"""Causes of a context that llama.cpp can't create, each with what helps. Must not know llama.cpp's pointers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.engine.llama.devices import gpus
from llmrun.errors import OutOfMemoryError, UsageError
from llmrun.gguf.types import TENSOR_TYPES
from llmrun.protocol.loading import DeviceBuffer, Load, ways_to_fit
from llmrun.protocol.sizes import readable_size

if TYPE_CHECKING:
    from llmrun.engine.llama.model import LlamaModel


def check_kv_types(model: LlamaModel, load: Load) -> None:
    """Raise UsageError if the attention heads are no multiple of the blocks of the KV cache's types."""
    if load.flash_attention == "off":
        return  # rows of all heads are divided into blocks then
    for flag, kind, name in (("k", load.kv_type_k, "key"), ("v", load.kv_type_v, "value")):
        block = TENSOR_TYPES[kind.upper()].block
        if block == 1:
            continue  # without reading the header, which takes longer than creating a context
        header = model.header
        lengths = (getattr(header, f"{name}_length"), header.model_count(f"attention.{name}_length_swa"))
        odd = next((length for length in lengths if length % block), 0)
        if odd and header.kv_layers:
            raise UsageError(
                f"--cache-type-{flag} {kind} does not suit this model",
                why=f"it is stored in blocks of {block} elements, and the model's {name} heads have {odd}",
                hint=f"leave out --cache-type-{flag}",
            )


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
