"""The messages that load a model. Must not know the loaded model's requests (messages.py), or planning."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, NamedTuple

from llmrun.protocol.adapters import Adapter
from llmrun.protocol.settings import EngineSettings, common_fields


@dataclass(frozen=True, slots=True)
class Load(EngineSettings):
    """Load a model and make its context; answered by LoadProgress*, then Loaded or Failed.

    Sent again with the same weights, it changes the context only: the content of the KV cache moves into the new one.
    """

    path: str  # of the GGUF file, absolute
    n_ctx: int  # context window of each sequence, in tokens
    _: KW_ONLY
    n_seq_max: int = 1  # sequences at the same time
    n_cells: int = 0  # cells of the KV cache: n_ctx for each sequence, or 0 for that; fewer are shared by all
    n_parked: int = 0  # prompt prefixes cached beside the sequences, where those share cells
    checkpoint_bytes: int = 0  # limit of the copies of recurrent states and sliding windows, in the machine's memory
    copy_bytes: int = 0  # limit of the copies of KV states in the machine's memory while all cells are used, and ...
    cell_bytes: int = 0  # ... what each cell that was never used adds to it: its memory, if that comes on use
    # Drafted tokens of a sequence in a step that a recurrent state can take back; each takes a copy of the state.
    n_rollback: int = 0
    draft_heads: bool = False  # load the layers that predict further tokens (NextN), and draft with them
    adapts_threads: bool = False  # decode with fewer threads while other programs need the cores
    cpu_variant: str = ""  # of the processor's backend, e.g. "haswell"; "" for the one that ggml chooses
    workers: tuple[str, ...] = ()  # "HOST:PORT" of RPC workers, whose devices come before this machine's GPUs
    layer_counts: tuple[int, ...] = ()  # layers of each device, the workers' first; () leaves them to llama.cpp
    warm_up: bool = False  # run one empty decode before Loaded
    verbose: bool = False  # llama.cpp's whole log goes to stderr, not only its warnings
    states: str = ""  # folder of saved KV states, "" for none
    states_bytes: int = 0  # limit of that folder
    throughput: bool = False  # prefill prompts in whole batches: the latency of single tokens does not matter
    each_token: bool = False  # send each token by itself; else a single user gets the text of several together
    request: int = 0
    draft: Load | None = None  # a smaller model that drafts for this one
    projector: str = ""  # GGUF file of the projector, absolute, "" for none; read with the first image or audio
    adapters: tuple[Adapter, ...] = ()  # LoRA adapters that requests choose from

    @classmethod
    def of(cls, settings: EngineSettings, path: str, **others: Any) -> Load:
        """Return a load of this file with these settings and other fields."""
        return cls(path, **{**common_fields(settings, cls), **others})

    def widened(self, wide: Load) -> Load:
        """Return the load with the number of sequences of another one, and all that follows from it."""
        draft = self.draft
        if draft is not None and wide.draft is not None:
            draft = draft.widened(wide.draft)
        return replace(self, draft=draft, **{name: getattr(wide, name) for name in _OF_SEQUENCES})


_OF_SEQUENCES = (
    "n_seq_max", "n_cells", "n_parked", "checkpoint_bytes", "copy_bytes", "cell_bytes", "n_rollback",
)  # fmt: skip


class LoadProgress(NamedTuple):
    """The loaded share of the weights, 0 to 1."""

    fraction: float
    request: int = 0


class DeviceBuffer(NamedTuple):
    """Memory that llama.cpp allocated on a device: ggml's name, and bytes."""

    device: str
    n_bytes: int


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
