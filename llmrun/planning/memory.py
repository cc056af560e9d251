"""The memory of a model: weights, KV cache, llama.cpp's scratch memory, and the process around them.

Pure arithmetic over the facts of a header; plan.py compares it with the machine. Sizes are in bytes, context
windows in tokens. tests/benchmarks/plan.py compares these figures with real processes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llmrun.protocol.llama_folder import own_kernels_wanted
from llmrun.protocol.settings import KV_TYPES

if TYPE_CHECKING:
    from llmrun.gguf.header import Header

UBATCH = 512
"""Tokens of a micro-batch; `llmrun tune` may find larger ones faster, which make progress and cancelling coarser."""
DEVICE_BATCH = 2048
"""Tokens of a batch on a device, which computes its micro-batches one after the other without waiting for the host."""
MOST_UBATCH = 2048
"""Tokens of the largest micro-batch to try."""

KV_BYTES = {type_name: KV_TYPES[type_name][0] for type_name in ("f16", "q8_0")}
"""Type of the KV cache for `llmrun run` -> bytes of an element."""

_CHECKPOINT_BYTES = 512 << 20  # limit of all checkpoints, or ...
_FEWEST_CHECKPOINTS, _MOST_CHECKPOINTS = 8, 32  # ... these of a recurrent state, and of a sequence
_CONTEXT_STEP = 256  # llama.cpp rounds a context up to this
_PROCESS_BYTES = 35 << 20  # Python, llama.cpp's and our libraries
_TOKEN_BYTES = 190  # of llama.cpp's tables for one token of the vocabulary
_MERGE_BYTES = 210  # of those for one merge
_FEED_FORWARD = 3  # times the model's width is the widest thing in a block, as a rule
_ACTIVATIONS = 4  # as wide as the model, alive at the same time in a layer ...
_FEED_FORWARDS = 2  # ... beside its gate and its up projection
_LOGIT_BYTES = 4
_RESERVED_ACTIVATIONS = 6.7  # as wide as the model, in a compute buffer
_PIPELINE_COPIES = 4  # GGML_SCHED_MAX_COPIES
_LOGIT_ROWS = 16  # of a batch at least, for drafts (LlamaContext.n_outputs)
_QUANTIZED_BYTES = 1.1  # of an activation as a matrix product wants it


@dataclass(frozen=True, slots=True)
class Memory:
    """The peak memory of a model, with the whole context window used, in bytes."""

    weights: int  # of the tensors, each once
    kv: int
    compute: int  # touched part of llama.cpp's scratch memory, which reserves more
    process: int  # everything else
    checkpoints: int = 0  # limit of their bytes, see engine/core/checkpoints.py
    kv_shares: tuple[float, ...] = ()  # of `kv`, in each layer
    copies: int = 0  # limit of copies of KV states, see engine/core/slots.py; planned with what is left

    @property
    def needed(self) -> int:
        """The memory that must be free; otherwise the system swaps or reads the file again and again."""
        return self.weights + self.kv + self.compute + self.process + self.checkpoints + self.copies


def memory(
    header: Header,
    n_ctx: int,
    *,
    kv_type: str = "f16",
    sequences: int = 1,
    parked: int = 0,
    ubatch: int = UBATCH,
    rollback: int = 0,
    heads: bool = False,
) -> Memory:
    """Return the memory of a model.

    Args:
        n_ctx: context window; the total of several sequences.
        kv_type: a key of KV_BYTES.
        sequences: answered at the same time.
        parked: prefixes cached beside them.
        ubatch: tokens of a micro-batch.
        rollback, heads: as Load.n_rollback and draft_heads.
    """
    kv = kv_bytes(header, n_ctx, kv_type, sequences=sequences + parked, ubatch=ubatch)
    compute = _compute_bytes(header, n_ctx, ubatch)
    if heads:
        kv += header.head_cache_bytes(-(-n_ctx // _CONTEXT_STEP) * _CONTEXT_STEP, KV_BYTES[kv_type])
        # Their logits, and the hidden states of a batch, which are copied to them.
        compute += logit_bytes(header) + 2 * ubatch * 4 * header.n_embd
    return Memory(
        weights=header.weight_bytes - (0 if heads else header.head_bytes),
        kv=kv + header.recurrent_bytes * (sequences * (1 + rollback) - 1),
        compute=compute + _LOGIT_BYTES * header.n_vocab * (sequences + parked - 1),
        process=_PROCESS_BYTES + _TOKEN_BYTES * header.n_vocab + _MERGE_BYTES * header.n_merges,
        checkpoints=checkpoint_bytes(header, sequences),
        kv_shares=header.cache_shares(n_ctx, KV_BYTES[kv_type], ubatch=ubatch, sequences=sequences + parked),
    )


def checkpoint_bytes(header: Header, sequences: int) -> int:
    """Return the limit for checkpoints of a memory that can't be cut; 0 if all of it can."""
    one = header.recurrent_bytes + header.window_bytes
    limit = max(_CHECKPOINT_BYTES, _FEWEST_CHECKPOINTS * header.recurrent_bytes)
    return min(limit, _MOST_CHECKPOINTS * sequences * one)


def without_flash_attention(parts: Memory, header: Header, tokens: int, ubatch: int = UBATCH) -> Memory:
    """Return the memory of a conversation without flash attention, whose scores share memory with activations."""
    return replace(parts, compute=max(parts.compute, score_bytes(header, tokens, ubatch)))


def score_bytes(header: Header, tokens: int, ubatch: int = UBATCH) -> int:
    """Return the bytes of a micro-batch's attention scores (f32) without flash attention, after this many tokens."""
    return 4 * min(ubatch, tokens) * tokens * header.most_heads


def kv_bytes(
    header: Header,
    n_ctx: int,
    kv_type: str = "f16",
    *,
    sequences: int = 1,
    ubatch: int = UBATCH,
) -> int:
    """Return the bytes of a KV cache with one recurrent state; 0 for 0 tokens."""
    tokens = -(-n_ctx // _CONTEXT_STEP) * _CONTEXT_STEP
    cached = header.cache_bytes(tokens, KV_BYTES[kv_type], ubatch=ubatch, sequences=sequences)
    return int(cached) + (header.recurrent_bytes if n_ctx else 0)


def cell_bytes(header: Header, n_cells: int, kv_type: str = "f16") -> int:
    """Return the bytes that each further cell of a KV cache takes: those of layers without a window."""
    return (kv_bytes(header, 2 * n_cells, kv_type) - kv_bytes(header, n_cells, kv_type)) // n_cells


def _compute_bytes(header: Header, tokens: int, ubatch: int) -> int:
    """Return the memory of prefill: a micro-batch's activations in a layer, its mask, and the logits of one token."""
    batch = min(ubatch, max(tokens, 1))
    inner = _FEED_FORWARD * header.n_embd
    activations = 4 * (_FEED_FORWARDS * inner + _ACTIVATIONS * header.n_embd) + int(_QUANTIZED_BYTES * inner)
    return int(batch * (activations + 2 * tokens) + _LOGIT_BYTES * header.n_vocab)


def reserved_bytes(header: Header, n_ctx: int, *, ubatch: int = UBATCH, with_scores: bool = False) -> int:
    """Return the size of llama.cpp's compute buffer as it is allocated, which counts on a GPU.

    A micro-batch's attention mask (f16, as long as the context) and its activations in a layer. The gate and the up
    projection, the attention scores without flash attention, and the rows of logits lie in one another's place.
    SmolLM2-135M: llama.cpp reports 21.51 MiB at 8,192 tokens and 141.51 at 131,072.
    """
    width = max(header.n_embd, header.most_heads * header.key_length)
    inner = _FEED_FORWARDS * (header.most_feed_forward or _FEED_FORWARD * header.n_embd)
    scores = header.most_heads * n_ctx if with_scores else 0
    activations = 4 * (_RESERVED_ACTIVATIONS * width + max(inner, scores))
    return int(ubatch * 2 * n_ctx + max(ubatch * activations, logit_bytes(header)))


def logit_bytes(header: Header) -> int:
    """Return the size of the rows of logits of a batch."""
    return _LOGIT_ROWS * _LOGIT_BYTES * header.n_vocab


def pipeline_bytes(header: Header, n_ctx: int, ubatch: int) -> int:
    """Return the size of the copies of a micro-batch's inputs with which several GPUs compute at the same time."""
    return (_PIPELINE_COPIES - 1) * ubatch * (2 * n_ctx + 4 * header.n_embd)


def largest_context(fits: Callable[[int], bool], limit: int) -> int:
    """Return the largest multiple of 256 up to `limit` that fits, or 0; `fits` must be monotonic."""
    low, high = 0, limit // _CONTEXT_STEP
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle * _CONTEXT_STEP) else (low, middle - 1)
    return low * _CONTEXT_STEP


_KERNEL_TYPES = frozenset({"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"})


def kernel_types(cpu_flags: Collection[str]) -> frozenset[str]:
    """Return the types whose products llmrun's own kernels compute on this processor (native/matmul_core.hpp)."""
    flags = set(cpu_flags)
    is_x86 = {"avx2", "fma"} <= flags and "amx_int8" not in flags  # ggml keeps weights in AMX's layout
    has_kernels = sys.platform == "linux" and own_kernels_wanted() and (is_x86 or "asimddp" in flags)
    return _KERNEL_TYPES if has_kernels else frozenset()


def repacked_types(cpu_flags: Collection[str]) -> frozenset[str]:
    """Return the types that llama.cpp repacks on this processor (ggml-cpu/repack.cpp), without those of our kernels."""
    if "avx2" in cpu_flags:
        wide = {"Q2_K"} if "avx512f" in cpu_flags else set()
        return frozenset({"Q4_0", "Q4_K", "IQ4_NL", "MXFP4"} | wide) - kernel_types(cpu_flags)
    if "asimddp" in cpu_flags:
        return frozenset({"Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "IQ4_NL", "MXFP4"}) - kernel_types(cpu_flags)
    return frozenset()
