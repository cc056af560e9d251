"""How a model is loaded: what the front wants of the engine, and what comes of it.

Owns these records; must not know what is asked of a loaded model (messages.py), nor who decided this (planning/).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from llmrun.protocol.adapters import Adapter


class Open(NamedTuple):
    """A guess, sent before the plan is made: begin to load these weights. Not answered; Load repeats what it meant.

    Attributes:
        path: of the GGUF file, absolute.
        gpu_layers: how many layers go to the GPU; -1 is all.
    """

    path: str
    gpu_layers: int = -1
    request: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """Load a model and make its context; answered by LoadProgress*, then Loaded or Failed.

    Sent again with the same weights, it changes the context only: what the KV cache holds moves into the new one.

    Attributes:
        path: of the GGUF file, absolute.
        n_ctx: context window of each sequence, in tokens.
        n_ctx_start: for how many of them to have memory at first; it grows when a sequence does.
        n_batch: most tokens of one decode call.
        n_seq_max: most sequences at the same time.
        threads: for decode, and for prefill where threads_batch is 0.
        gpu_layers: how many layers go to the GPU; -1 is all.
        warm_up: run one empty decode before saying Loaded.
        verbose: llama.cpp's whole log goes to stderr, not only its warnings.
        states: folder of the KV states that were saved, "" for none.
        states_bytes: how many bytes that folder may hold.
        threads_batch: for prefill; 0 is as many as for decode.
        n_ubatch: most tokens that are computed at once in prefill.
        flash_attention: "auto", "on" or "off".
        kv_type_k: type of the keys in the KV cache, e.g. "f16".
        kv_type_v: type of the values.
        repack: weights may be brought into the order that this processor's kernels like best.
        mmap: the file is mapped into memory, not read.
        n_cells: of the KV cache that several sequences share, at most; 0 is n_ctx for each.
        n_parked: how many prefixes of prompts can be kept beside the sequences, where those share cells from the start.
        n_stream: how many cells each of several sequences may have to itself; one that needs more shares with all.
        throughput: nobody waits for single tokens, so prompts are prefilled in whole batches beside what decodes.
        cpu_experts: layers whose experts stay with the processor, though the rest of the layer is on a GPU.
        workers: "HOST:PORT" of RPC workers, whose devices come before this machine's GPUs.
        layer_counts: how many of gpu_layers each device has, the workers' first; none leaves it to llama.cpp.
        exact: sequences share nothing and take turns, so that each answer is bit for bit what it would be alone.
        draft: a smaller model that drafts for this one, and how it is loaded beside it.
        projector: GGUF file that turns pictures into vectors for this model, absolute, "" for none; read when the first
            picture comes.
        adapters: LoRA adapters of which each request may choose some.
    """

    path: str
    n_ctx: int
    n_ctx_start: int
    n_batch: int = 512
    n_seq_max: int = 1
    threads: int = 1
    gpu_layers: int = -1
    warm_up: bool = False
    verbose: bool = False
    states: str = ""
    states_bytes: int = 0
    threads_batch: int = 0
    n_ubatch: int = 512
    flash_attention: str = "auto"
    kv_type_k: str = "f16"
    kv_type_v: str = "f16"
    repack: bool = True
    mmap: bool = True
    n_cells: int = 0
    n_parked: int = 0
    n_stream: int = 0
    exact: bool = False
    throughput: bool = False
    cpu_experts: tuple[int, ...] = ()
    workers: tuple[str, ...] = ()
    layer_counts: tuple[int, ...] = ()
    request: int = 0
    draft: Load | None = None
    projector: str = ""
    adapters: tuple[Adapter, ...] = ()


class LoadProgress(NamedTuple):
    """How much of the weights is loaded, 0 to 1."""

    fraction: float
    request: int = 0


class DeviceBuffer(NamedTuple):
    """Memory that llama.cpp allocated on a device: ggml's name, and bytes."""

    device: str
    n_bytes: int


class Loaded(NamedTuple):
    """The model is ready.

    Attributes:
        n_ctx: context window in tokens, as llama.cpp made it.
        n_ctx_train: context window the model was trained on.
        n_vocab: tokens in the vocabulary.
        description: llama.cpp's, e.g. "llama 135M Q4_1".
        has_template: whether the file carries a chat template.
        devices: names of the devices ggml can compute on.
        load_seconds: for the weights and the context together.
        thinking_tags: the texts between which the model thinks before it answers; none if it does not.
        buffers: memory that llama.cpp allocated for the model and its first context; none without GPUs.
    """

    n_ctx: int
    n_ctx_train: int
    n_vocab: int
    description: str
    has_template: bool
    devices: tuple[str, ...]
    load_seconds: float
    thinking_tags: tuple[str, ...] = ()
    request: int = 0
    buffers: tuple[DeviceBuffer, ...] = ()


def ways_to_fit(load: Load | None = None) -> str:
    """Return the hint for a KV cache that a GPU has no memory for: the flags that help, the best first."""
    ways = ["fewer layers on the GPU (-ngl)"] if load is None or load.gpu_layers else []
    ways += (
        ["a smaller KV cache (-ctk q8_0 -ctv q8_0)"]
        if load is None or "f16" in (load.kv_type_k, load.kv_type_v)
        else []
    )
    return "try " + ", ".join([*ways, "a smaller context window (--ctx)"])
