"""The messages that load a model. Must not know the loaded model's requests (messages.py), or planning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from llmrun.protocol.adapters import Adapter


class Open(NamedTuple):
    """Begin to load these weights, on a guess before the plan is made. Not answered; Load repeats the arguments."""

    path: str  # of the GGUF file, absolute
    gpu_layers: int = -1  # number of layers on the GPU; -1 is all
    request: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """Load a model and create its context; answered by LoadProgress*, then Loaded or Failed.

    Sent again with the same weights, it replaces the context only: the KV cache moves into the new one.

    Attributes:
        path: of the GGUF file, absolute.
        n_ctx: context window of each sequence, in tokens.
        n_ctx_start: tokens of it to allocate at first; it grows with the sequences.
        n_batch: maximum tokens of one decode call.
        n_seq_max: maximum number of sequences at the same time.
        threads: for decode, and for prefill if threads_batch is 0.
        gpu_layers: number of layers on the GPU; -1 is all.
        warm_up: run one empty decode before Loaded.
        verbose: write llama.cpp's whole log to stderr, not only its warnings.
        states: folder of saved KV states, "" for none.
        states_bytes: maximum size of that folder.
        threads_batch: for prefill; 0 is the same as for decode.
        n_ubatch: maximum tokens computed at once in prefill.
        flash_attention: "auto", "on" or "off".
        kv_type_k: type of the keys in the KV cache, e.g. "f16".
        kv_type_v: type of the values.
        repack: weights may be repacked into the layout that is fastest on this CPU.
        mmap: map the file into memory instead of reading it.
        n_cells: maximum KV cells shared by several sequences; 0 is n_ctx for each.
        n_parked: maximum number of prompt prefixes cached besides the running sequences, if these share cells.
        n_stream: KV cells that each of several sequences has to itself; a sequence that needs more shares with all.
        throughput: latency does not matter, so that whole prompts are prefilled in the batches that decode.
        cpu_experts: layers whose experts stay on the CPU although the rest of the layer is on a GPU.
        workers: "HOST:PORT" of RPC workers, whose devices come before this machine's GPUs.
        layer_counts: number of the gpu_layers for each device, the workers' first; () lets llama.cpp choose.
        exact: sequences share nothing and take turns, so that each answer is bit for bit the one it would be alone.
        draft: the load of a smaller model that drafts for this one.
        projector: GGUF file of the model's image encoder, absolute, "" for none; read with the first image.
        adapters: LoRA adapters that requests can choose from.
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
    """The loaded share of the weights, 0 to 1."""

    fraction: float
    request: int = 0


class Loaded(NamedTuple):
    """The loaded model."""

    n_ctx: int  # context window in tokens, as created by llama.cpp
    n_ctx_train: int  # context window that the model was trained on
    n_vocab: int  # tokens in the vocabulary
    description: str  # llama.cpp's, e.g. "llama 135M Q4_1"
    has_template: bool  # the file has a chat template
    devices: tuple[str, ...]  # names of ggml's devices
    load_seconds: float  # for weights and context together
    thinking_tags: tuple[str, ...] = ()  # opening and closing tag of the reasoning; none without reasoning
    request: int = 0
