"""How to run a model on a machine: context, threads, layers on the GPU, what it costs in memory, and why.

Owns the choices and the words that explain them; must not know how the machine was looked at, nor read files:
it is a pure function of facts and wishes. Sizes are in bytes, context lengths in tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Protocol

from llmrun.errors import OutOfMemoryError, UsageError
from llmrun.hardware import Hardware

# Bounds of what may be wished for, inclusive.
CONTEXT_BOUNDS = (256, 1 << 24)
THREAD_BOUNDS = (1, 512)
GPU_LAYER_BOUNDS = (-1, 1000)

_UNKNOWN_CONTEXT = 4096  # for files that do not say what the model was trained on
_SMALLEST_CONTEXT = 512  # below that a conversation is pointless
_CONTEXT_STEP = 256  # llama.cpp rounds a context up to this
_UBATCH = 512  # tokens that llama.cpp computes at a time; a larger batch would only make progress and cancel coarser
_START_BYTES = 16 << 20  # of KV cache: zeroing that much takes some milliseconds
_KV_ELEMENT_BYTES = 2.0  # f16
_SMALLEST_MARGIN = 512 << 20


class HeaderFacts(Protocol):
    """What a plan needs of a model file's header; counts that the file does not state are 0."""

    @property
    def weight_bytes(self) -> int:
        """Of all tensors."""

    @property
    def n_ctx_train(self) -> int:
        """Context window in tokens that the model was trained on."""

    @property
    def n_embd(self) -> int:
        """Width of the residual stream."""

    @property
    def n_vocab(self) -> int:
        """Tokens in the vocabulary."""

    @property
    def rope_depends_on_window(self) -> bool:
        """Whether positions are encoded differently when the context window is made larger (LongRoPE)."""

    def kv_bytes_per_token(self, bytes_per_element: float = 2.0) -> float:
        """KV cache that one token takes in all layers together."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the user asked for; None leaves it to us.

    Attributes:
        n_ctx: context window in tokens.
        threads: that compute at the same time.
        gpu_layers: how many layers go to the GPU; -1 is all.
    """

    n_ctx: int | None = None
    threads: int | None = None
    gpu_layers: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """How the model will be run, and what that takes.

    Attributes:
        n_ctx: context window in tokens.
        n_ctx_start: for how many of them the KV cache has memory at first; it grows with the conversation.
        n_batch: most tokens of one decode call.
        threads: for decode and for prefill.
        gpu_layers: how many layers go to the GPU; -1 is all.
        weight_bytes: of the weights, which are mapped from the file and count fully.
        kv_bytes: of the KV cache.
        compute_bytes: of llama.cpp's scratch memory, an estimate.
        total_bytes: the three together.
        notes: every choice that is not simply what the model was trained on, in plain words.
    """

    n_ctx: int
    n_ctx_start: int
    n_batch: int
    threads: int
    gpu_layers: int
    weight_bytes: int
    kv_bytes: int
    compute_bytes: int
    total_bytes: int
    notes: tuple[str, ...] = ()


def make_plan(header: HeaderFacts, hardware: Hardware, wishes: Wishes) -> Plan:
    """Choose everything that the user did not.

    Raises:
        UsageError: a wish is out of bounds.
        OutOfMemoryError: the model does not fit, or the wished context doesn't.
    """
    _check("--ctx", wishes.n_ctx, CONTEXT_BOUNDS)
    _check("--threads", wishes.threads, THREAD_BOUNDS)
    _check("--gpu-layers", wishes.gpu_layers, GPU_LAYER_BOUNDS)
    n_ctx, context_notes = _context(header, hardware, wishes.n_ctx)
    threads, thread_notes = _threads(hardware, wishes.threads)
    return Plan(
        n_ctx=n_ctx,
        n_ctx_start=_context_start(header, n_ctx),
        n_batch=min(_UBATCH, n_ctx),
        threads=threads,
        gpu_layers=-1 if wishes.gpu_layers is None else wishes.gpu_layers,
        weight_bytes=header.weight_bytes,
        kv_bytes=_kv_bytes(header, n_ctx),
        compute_bytes=_compute_bytes(header, n_ctx),
        total_bytes=_total_bytes(header, n_ctx),
        notes=(*context_notes, *thread_notes),
    )


def _context_start(header: HeaderFacts, n_ctx: int) -> int:
    """The largest power of two whose KV cache is made in no time; all of it where RoPE depends on the window."""
    if header.rope_depends_on_window:
        return n_ctx
    affordable = int(_START_BYTES / max(header.kv_bytes_per_token(_KV_ELEMENT_BYTES), 1.0))
    return min(n_ctx, max(_SMALLEST_CONTEXT, 1 << max(affordable.bit_length() - 1, 0)))


def readable_size(n_bytes: int) -> str:
    """E.g. "11.2 GiB" or "512 MiB"."""
    if n_bytes >= 1 << 30:
        return f"{n_bytes / (1 << 30):,.1f} GiB"
    return f"{n_bytes / (1 << 20):,.0f} MiB"


def _check(option: str, value: int | None, bounds: tuple[int, int]) -> None:
    low, high = bounds
    if value is not None and not low <= value <= high:
        raise UsageError(f"{option} {value} makes no sense", why=f"it has to be between {low:,} and {high:,}")


# ---- memory ----------------------------------------------------------------------------------------


def _kv_bytes(header: HeaderFacts, n_ctx: int) -> int:
    tokens = -(-n_ctx // _CONTEXT_STEP) * _CONTEXT_STEP
    return int(tokens * header.kv_bytes_per_token(_KV_ELEMENT_BYTES))


def _compute_bytes(header: HeaderFacts, n_ctx: int) -> int:
    """llama.cpp's compute buffer with flash attention: the larger of what its two hungriest moments keep.

    A micro-batch's logits (f32) and two activations at the end; its attention mask (f16, as long as the
    context) and a dozen activations in a layer. SmolLM2-135M: llama.cpp reports 98.25 MiB at 8,192 tokens and
    141.51 at 131,072; this says 98.25 and 141.50.
    """
    activation = 4 * header.n_embd
    return _UBATCH * max(4 * header.n_vocab + 2 * activation, 2 * n_ctx + 12 * activation)


def _total_bytes(header: HeaderFacts, n_ctx: int) -> int:
    return header.weight_bytes + _kv_bytes(header, n_ctx) + _compute_bytes(header, n_ctx)


def _largest_context(header: HeaderFacts, room: int, limit: int) -> int:
    """The largest multiple of 256 up to `limit` that fits into `room`; 0 when none does."""
    steps = range(_CONTEXT_STEP, limit + 1, _CONTEXT_STEP)
    index = bisect_right(steps, room, key=lambda n_ctx: _total_bytes(header, n_ctx))
    return steps[index - 1] if index else 0


# ---- choices ---------------------------------------------------------------------------------------


def _context(header: HeaderFacts, hardware: Hardware, wish: int | None) -> tuple[int, list[str]]:
    trained = min(header.n_ctx_train or _UNKNOWN_CONTEXT, CONTEXT_BOUNDS[1])
    if wish is not None:
        return _wished_context(header, hardware, wish, trained)
    if not hardware.memory_total:  # nothing known about memory
        chosen = trained
    else:
        free = hardware.memory_available
        chosen = _fitting_context(header, free - _margin(free), trained)
        if not chosen:
            raise _model_too_large(header, hardware, trained)
    if chosen < trained:
        free_text = readable_size(hardware.memory_available)
        return chosen, [
            f"context {chosen:,} of {trained:,} tokens: what fits into {free_text} of free memory "
            "with some to spare (--ctx asks for more)"
        ]
    if not header.n_ctx_train:
        return chosen, [f"context {chosen:,} tokens: the file does not say what the model was trained on"]
    return chosen, []


def _margin(free: int) -> int:
    """What our own choice leaves to the rest of the system; a wish may use it up."""
    return max(_SMALLEST_MARGIN, free // 10)


def _fitting_context(header: HeaderFacts, room: int, trained: int) -> int:
    if _total_bytes(header, trained) <= room:
        return trained
    largest = _largest_context(header, room, trained)
    return largest if largest >= _SMALLEST_CONTEXT else 0


def _wished_context(header: HeaderFacts, hardware: Hardware, wish: int, trained: int) -> tuple[int, list[str]]:
    free = hardware.memory_available
    needed = _total_bytes(header, wish)
    if hardware.memory_total and needed > free:
        largest = _largest_context(header, free, wish)
        if not largest:
            raise _model_too_large(header, hardware, trained)
        raise OutOfMemoryError(
            f"a context of {wish:,} tokens does not fit into memory",
            why=f"that takes {readable_size(needed)}, {readable_size(_kv_bytes(header, wish))} of it for the "
            f"KV cache, and {readable_size(free)} are free",
            hint=f"use --ctx {largest}, the largest that fits",
        )
    notes = []
    if wish > trained and header.n_ctx_train:
        notes.append(f"context {wish:,} tokens: the model was trained on {trained:,}, so answers get worse beyond that")
    if hardware.memory_total and needed > free - _margin(free):
        notes.append(f"context {wish:,} tokens: leaves only {readable_size(free - needed)} of memory free")
    return wish, notes


def _model_too_large(header: HeaderFacts, hardware: Hardware, trained: int) -> OutOfMemoryError:
    free = hardware.memory_available
    smallest = min(_SMALLEST_CONTEXT, trained)
    needed = _total_bytes(header, smallest)
    hint = "use a smaller quant or a smaller model (`llmrun list --all`), or close other programs"
    if needed <= free:
        hint = f"--ctx {smallest} would take the last of it; better {hint}"
    return OutOfMemoryError(
        "the model does not fit into memory",
        why=f"with the smallest context it takes {readable_size(needed)}, "
        f"{readable_size(header.weight_bytes)} of it for the weights; {readable_size(free)} are free, and "
        f"{readable_size(_margin(free))} of that is left to the rest of the system",
        hint=hint,
    )


def _threads(hardware: Hardware, wish: int | None) -> tuple[int, list[str]]:
    if wish is not None:
        if wish > hardware.logical_cores:
            return wish, [f"threads {wish}: more than the {hardware.logical_cores} there are, so it gets slower"]
        return wish, []
    chosen = hardware.usable_cores
    if chosen < hardware.physical_cores:
        return chosen, [
            f"threads {chosen} of {hardware.physical_cores} cores: the container may use {hardware.cpu_quota:g} of them"
        ]
    return min(chosen, THREAD_BOUNDS[1]), []
