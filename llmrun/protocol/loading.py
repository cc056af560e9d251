"""How a model is loaded: what the front wants of the engine, and what comes of it.

Owns these records; must not know what is asked of a loaded model (messages.py), nor who decided this (planning/).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from llmrun.protocol.adapters import Adapter
from llmrun.protocol.settings import EngineSettings, common_fields


class Open(NamedTuple):
    """A guess, sent before the plan is made: begin to load these weights. Not answered; Load repeats what it meant.

    Attributes:
        path: of the GGUF file, absolute.
        gpu_layers: how many layers go to the GPU; -1 is all.
    """

    path: str
    gpu_layers: int = -1
    request: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings(EngineSettings):
    """The settings of a load that a plan chooses, besides the context window."""

    n_seq_max: int = 1  # sequences at the same time
    n_cells: int = 0  # maximum cells of the KV cache that several sequences share; 0 is n_ctx for each
    n_parked: int = 0  # prompt prefixes cached beside the sequences, where those share cells from the start
    n_stream: int = 0  # cells that each of several sequences may have of its own; one that needs more shares with all
    exact: bool = False  # sequences share nothing and take turns: each answer is bit for bit that of one alone
    workers: tuple[str, ...] = ()  # "HOST:PORT" of RPC workers, whose devices come before this machine's GPUs
    layer_counts: tuple[int, ...] = ()  # layers of each device, the workers' first; () leaves them to llama.cpp


@dataclass(frozen=True, slots=True)
class Load(LoadSettings):
    """Load a model and make its context; answered by LoadProgress*, then Loaded or Failed.

    Sent again with the same weights, it changes the context only: the content of the KV cache moves into the new one.
    """

    path: str  # of the GGUF file, absolute
    n_ctx: int  # context window of each sequence, in tokens
    n_ctx_start: int  # tokens that have memory at first; it grows when a sequence does
    warm_up: bool = False  # run one empty decode before Loaded
    verbose: bool = False  # llama.cpp's whole log goes to stderr, not only its warnings
    states: str = ""  # folder of saved KV states, "" for none
    states_bytes: int = 0  # limit of that folder
    throughput: bool = False  # prefill prompts in whole batches: the latency of single tokens does not matter
    request: int = 0
    draft: Load | None = None  # a smaller model that drafts for this one
    projector: str = ""  # GGUF file of the image projector, absolute, "" for none; read with the first image
    adapters: tuple[Adapter, ...] = ()  # LoRA adapters that requests choose from

    @classmethod
    def of(cls, settings: EngineSettings, path: str, **others: Any) -> Load:
        """Return a load of this file with these settings and other fields."""
        return cls(path, **{**common_fields(settings, cls), **others})


class LoadProgress(NamedTuple):
    """How much of the weights is loaded, 0 to 1."""

    fraction: float
    request: int = 0


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
