"""How to run a model on a machine: context, threads, layers on the GPU, what it costs in memory, and why.

Owns the choices and the words that explain them; must not know how the machine was looked at, nor read files:
it is a pure function of facts and wishes. Sizes are in bytes, context lengths in tokens.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from llmrun.errors import OutOfMemoryError, UsageError, require_within
from llmrun.planning.hardware import Hardware
from llmrun.planning.memory import (
    KV_BYTES,
    UBATCH,
    Memory,
    context_start,
    largest_context,
    longest_stream,
    memory,
    score_bytes,
    without_flash_attention,
)
from llmrun.planning.rpc import layer_placement, split_model
from llmrun.planning.split import ALL_LAYERS, Layers, Split, described, gpu_notes
from llmrun.protocol.loading import Load
from llmrun.protocol.sizes import readable_size

# Bounds of what may be wished for, inclusive.
CONTEXT_BOUNDS = (256, 1 << 24)
THREAD_BOUNDS = (1, 512)
GPU_LAYER_BOUNDS = (-1, 1000)
CPU_EXPERT_BOUNDS = (0, 1000)
PARALLEL_BOUNDS = (1, 128)

UNKNOWN_CONTEXT = 4096  # for files that do not say what the model was trained on
SMALLEST_CONTEXT = 512  # below that a conversation is pointless
FLASH_ATTENTION = ("auto", "on", "off")
_SMALLEST_MARGIN = 512 << 20
_FEWEST_PARKED = 16
_SEQUENCE_IDS = 256  # of llama.cpp
_FP16_STEP = 128  # elements of a head that ggml's AVX512-FP16 kernels take at a time; of shorter ones, one at a time
_MOST_SCORES = 1 << 30  # bytes
_SCORES_SHARE = 16  # of memory

# Quantization -> bits a weight, as they come out for whole models; the smaller ones in order of quality.
_SMALLER_QUANTS = {
    "Q8_0": 8.5, "Q6_K": 6.6, "Q5_K_M": 5.7, "Q4_K_M": 4.9, "Q4_K_S": 4.6, "Q3_K_M": 3.9, "Q2_K": 3.2,
}  # fmt: skip


class HeaderFacts(Layers, Protocol):
    """What a plan needs of a model file's header; counts that the file does not state are 0."""

    @property
    def n_ctx_train(self) -> int:
        """Context window in tokens that the model was trained on."""

    @property
    def n_parameters(self) -> int:
        """Weights in this file."""


@dataclass(frozen=True, slots=True)
class LoadPreferences:
    """What the user asked for; None leaves it to us.

    Attributes:
        n_ctx: context window in tokens.
        threads: that compute at the same time.
        gpu_layers: layers on the GPU; -1 is all, None as many as fit.
        as_alone: each of several answers is to be what its seed gives alone, so flash attention is as for one.
        cpu_experts: of how many of them a mixture's experts stay with the processor.
        cache_type_k, cache_type_v: of the keys and the values in the KV cache, keys of memory.KV_BYTES.
        flash_attention: one of FLASH_ATTENTION.
        parallel: how many answers at the same time.
        exact: these share nothing and are computed as one is, so that each is bit for bit what it would be alone.
        workers: "HOST:PORT" of RPC workers that hold a part of the layers.

    Raises:
        UsageError: a wish is out of bounds, or two contradict each other.
    """

    n_ctx: int | None = None
    threads: int | None = None
    gpu_layers: int | None = None
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    flash_attention: str = "auto"
    parallel: int = 1
    exact: bool = False
    cpu_experts: int | None = None
    as_alone: bool = False
    workers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_within("--parallel", self.parallel, PARALLEL_BOUNDS)
        require_within("--ctx", self.n_ctx, CONTEXT_BOUNDS)
        require_within("--threads", self.threads, THREAD_BOUNDS)
        require_within("--gpu-layers", self.gpu_layers, GPU_LAYER_BOUNDS)
        require_within("--n-cpu-moe", self.cpu_experts, CPU_EXPERT_BOUNDS)
        for flag, kind in (("--cache-type-k", self.cache_type_k), ("--cache-type-v", self.cache_type_v)):
            if kind not in KV_BYTES:
                raise UsageError(f"invalid {flag} {kind}", why=f"must be one of {', '.join(KV_BYTES)}")
        if self.flash_attention not in FLASH_ATTENTION:
            why = f"must be one of {', '.join(FLASH_ATTENTION)}"
            raise UsageError(f"invalid --flash-attention {self.flash_attention}", why=why)
        if self.flash_attention == "off" and self.cache_type_v != "f16":
            what = f"--cache-type-v {self.cache_type_v} needs flash attention"
            raise UsageError(what, hint="leave out --flash-attention off")

    @property
    def kv_type(self) -> str:
        """What memory is planned for: the larger of the two types."""
        return max(self.cache_type_k, self.cache_type_v, key=KV_BYTES.__getitem__)


@dataclass(frozen=True, slots=True)
class Plan:
    """How the model will be run, and what that takes.

    Attributes:
        n_ctx: context window in tokens, of each sequence.
        n_ctx_start: for how many tokens the KV cache has memory at first; it grows with the conversation.
        n_batch: most tokens of one decode call.
        threads: for decode and for prefill.
        gpu_layers: how many layers go to the GPU; -1 is all.
        cpu_experts: layers whose experts stay with the processor.
        kv_type_k, kv_type_v: of the keys and the values in the KV cache.
        flash_attention: as in loading.Load.
        memory: what the model takes, wherever it lies.
        ram_bytes: how much of memory.needed the machine's own memory has to hold.
        vram_bytes: what the GPUs have to hold; 0 without any, or when nobody looked.
        notes: every choice that is not simply what the model was trained on, in plain words.
        tuned: what is different because `llmrun tune` found it faster, in words.
        slow_flash_attention: ggml's kernel for it is known to be slow here; answers differ a little without.
        n_seq_max: how many answers at the same time.
        n_cells: tokens that the KV cache holds for all of them together.
        n_parked, n_stream: as in loading.Load.
        exact: they share nothing.
        draft_bytes: how much of memory is a draft model's.
        workers, layer_counts: as in loading.Load.
        devices: each GPU's name, and the bytes that it holds when the model is loaded.
    """

    n_ctx: int
    n_ctx_start: int
    n_batch: int
    threads: int
    gpu_layers: int
    memory: Memory
    ram_bytes: int
    vram_bytes: int = 0
    notes: tuple[str, ...] = ()
    kv_type_k: str = "f16"
    kv_type_v: str = "f16"
    flash_attention: str = "auto"
    tuned: tuple[str, ...] = ()
    slow_flash_attention: bool = False
    n_seq_max: int = 1
    n_cells: int = 0
    n_parked: int = 0
    n_stream: int = 0
    exact: bool = False
    draft_bytes: int = 0
    cpu_experts: tuple[int, ...] = ()
    workers: tuple[str, ...] = ()
    layer_counts: tuple[int, ...] = ()
    devices: tuple[tuple[str, int], ...] = ()

    def load(self, path: Path) -> Load:
        """What an engine is told to load a file so."""
        return Load(
            path=str(path.absolute()),
            n_ctx=self.n_ctx,
            n_ctx_start=self.n_ctx_start,
            n_batch=self.n_batch,
            threads=self.threads,
            gpu_layers=self.gpu_layers,
            flash_attention=self.flash_attention,
            kv_type_k=self.kv_type_k,
            kv_type_v=self.kv_type_v,
            n_seq_max=self.n_seq_max,
            n_cells=self.n_cells,
            n_parked=self.n_parked,
            n_stream=self.n_stream,
            exact=self.exact,
            cpu_experts=self.cpu_experts,
            workers=self.workers,
            layer_counts=self.layer_counts,
        )

    @property
    def summary(self) -> str:
        """One line for --verbose: what was chosen, and what it takes."""
        parts = self.memory
        clients = f" for each of {self.n_seq_max}, {self.n_cells:,} in all" if self.n_seq_max > 1 else ""
        text = (
            f"plan: context {self.n_ctx:,} tokens{clients} (memory for {self.n_ctx_start:,} at first), "
            f"{self.threads} threads; "
            f"{readable_size(self.ram_bytes)} of memory when it is full: weights {readable_size(parts.weights)}, "
            f"KV cache {readable_size(parts.kv)}, scratch {readable_size(parts.compute + parts.growth)}, "
            f"process {readable_size(parts.process)}"
        )
        text += f"; {readable_size(self.draft_bytes)} of that for the draft model" if self.draft_bytes else ""
        if self.vram_bytes:
            where = described(self.gpu_layers, len(self.cpu_experts))
            text += f"; and {readable_size(self.vram_bytes)} of GPU memory: {where}"
        if self.tuned:
            text += f"; tuned: {', '.join(self.tuned)}"
        if self.slow_flash_attention:
            text += "; flash attention is slow here with heads this short: see --flash-attention off, llmrun tune"
        return text


def make_plan(
    header: HeaderFacts, hardware: Hardware, wishes: LoadPreferences, *, name: str = "MODEL", repository: str = ""
) -> Plan:
    """Choose everything that the user did not.

    Args:
        name: what the user called the model, for the commands in our hints.
        repository: "owner/repo" it came from, "" when it has no other quants.

    Raises:
        OutOfMemoryError: the model does not fit, or the wished context doesn't.
    """
    room = _Room(header, hardware, wishes, name, repository)
    n_ctx, context_notes = room.context()
    threads, thread_notes = _threads(hardware, wishes.threads)
    n_cells, cell_notes = room.cells(n_ctx)
    # A growing KV cache would cross the network each time.
    n_ctx_start = n_ctx if room.apart > 1 or hardware.workers else room.start(n_cells)
    split = room.split(n_cells, n_ctx_start * room.apart)
    is_like_one = wishes.parallel == 1 or wishes.as_alone or wishes.exact
    flash_attention = choose_flash_attention(header, hardware, wishes) if is_like_one else wishes.flash_attention
    plain = room.memory(n_cells, n_ctx_start * room.apart)
    writes_scores = flash_attention == "off" and not (split.devices and split.gpu_layers == ALL_LAYERS)
    parts = without_flash_attention(plain, header, n_ctx) if writes_scores else plain
    return Plan(
        n_ctx=n_ctx,
        n_ctx_start=n_ctx_start,
        n_batch=min(UBATCH, n_ctx),
        threads=threads,
        gpu_layers=split.gpu_layers,
        memory=parts,
        ram_bytes=split.ram + parts.compute - plain.compute,
        vram_bytes=split.vram,
        notes=(*context_notes, *cell_notes, *_gpu_notes(header, hardware, wishes, split), *thread_notes),
        kv_type_k=wishes.cache_type_k,
        kv_type_v=wishes.cache_type_v,
        flash_attention=flash_attention,
        slow_flash_attention=flash_attention != "off" and _is_flash_attention_slow(header, hardware),
        n_seq_max=wishes.parallel,
        n_cells=n_cells,
        n_parked=room.parked,
        n_stream=0
        if hardware.gpus or hardware.workers
        else longest_stream(header, n_cells, wishes.parallel, wishes.kv_type),
        exact=wishes.exact,
        cpu_experts=split.cpu_experts,
        workers=tuple(worker.endpoint for worker in hardware.workers),
        layer_counts=split.layer_counts,
        devices=room.at_start(n_ctx_start, split).devices,
    )


def margin(free: int) -> int:
    """What our own choice leaves of free memory to the rest of the system; a wish may use it up."""
    return max(_SMALLEST_MARGIN, free // 10)


def trained_context(header: HeaderFacts) -> int:
    """What a model was trained on, bounded; a guess for files that do not say."""
    return min(header.n_ctx_train or UNKNOWN_CONTEXT, CONTEXT_BOUNDS[1])


def beyond_training(header: HeaderFacts, n_ctx: int) -> tuple[str, ...]:
    """Return the warning about a context window longer than the model was trained on; none where that is unknown."""
    trained = trained_context(header)
    if not header.n_ctx_train or n_ctx <= trained:
        return ()
    return (f"context {n_ctx:,} tokens: the model was trained on {trained:,}, so answers get worse beyond that",)


# ---- processor and GPUs ----------------------------------------------------------------------------


def _gpu_notes(header: HeaderFacts, hardware: Hardware, wishes: LoadPreferences, split: Split) -> list[str]:
    if hardware.workers:
        return [layer_placement(header.n_layers + 1, hardware, split)]
    return gpu_notes(header, hardware.gpus, split, wishes.gpu_layers, wishes.cpu_experts)


def choose_flash_attention(header: HeaderFacts, hardware: Hardware, wishes: LoadPreferences) -> str:
    """Return the flash attention setting of one sequence, the same for all commands whose figures are to be equal.

    The user's wish; else off where decode is faster without by much more than prefill is slower, and memory is left.
    On x86, ggml's kernel for it goes through the KV cache once for every head. Without it, a step behind 2,000 tokens
    takes 0.70 of the time and prefill there 1.35 (SmolLM2; 0.75 and 1.09 on a model of 1B; 0.81 and 1.16 without
    AVX-512). A conversation, whose earlier turns are in the cache, decodes most of the time. With several sequences it
    is slower behind few tokens, or where they share a pool.
    """
    asked = wishes.flash_attention, wishes.cache_type_k, wishes.cache_type_v
    if asked != ("auto", "f16", "f16") or hardware.gpus or hardware.workers or "avx2" not in hardware.cpu_flags:
        return wishes.flash_attention
    alone = _Room(header, hardware, replace(wishes, parallel=1, exact=False), "", "")
    try:
        n_ctx, _ = alone.context()  # not the window of one of several, which may be cut to fit
    except OutOfMemoryError:
        return wishes.flash_attention
    needed = alone.split(n_ctx, alone.start(n_ctx)).ram + score_bytes(header, n_ctx)
    return "off" if scores_fit(header, hardware, n_ctx) and needed <= hardware.memory_available else "auto"


def _is_flash_attention_slow(header: HeaderFacts, hardware: Hardware) -> bool:
    """Whether ggml's flash attention computes one element at a time for this model.

    Compiled for AVX512-FP16, ggml's dot product of f16 takes 128 elements at a time and what is left one by one
    (GGML_F16_STEP in simd-mappings.h), so that heads of 64 are not vectorized at all: decode behind 2,048 tokens of
    SmolLM2 is half as fast as without, behind 4,096 a third, while prefill is 1.2 times as fast.
    """
    return not hardware.gpus and 0 < header.key_length < _FP16_STEP and "avx512_fp16" in hardware.cpu_flags


def scores_fit(header: HeaderFacts, hardware: Hardware, n_ctx: int) -> bool:
    """Return whether attention without flash attention takes a small share of memory.

    Of all memory: free memory changes from one command to the next, and greedy answers would change with it.
    """
    return score_bytes(header, n_ctx) <= min(_MOST_SCORES, hardware.memory_total // _SCORES_SHARE)


# ---- context ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Room:
    """A model beside the memory there is: which context windows fit, and what to say of those that don't."""

    header: HeaderFacts
    hardware: Hardware
    wishes: LoadPreferences
    name: str
    repository: str

    @property
    def apart(self) -> int:
        """How many KV caches there are, each of a whole window: one, or one for each sequence.

        One pool of cells is one window to llama.cpp, which would choose the factors of LongRoPE by its size.
        """
        return self.wishes.parallel if self.wishes.exact or self.header.rope_depends_on_window else 1

    @property
    def parked(self) -> int:
        """How many prefixes to keep: a recurrent state takes its memory whether or not it is used."""
        parallel = self.wishes.parallel
        if parallel == 1 or self.apart > 1 or self.header.recurrent_bytes:
            return 0
        return min(max(_FEWEST_PARKED, parallel), _SEQUENCE_IDS - parallel)

    def memory(self, n_cells: int, start: int) -> Memory:
        kv_type, parallel = self.wishes.kv_type, self.wishes.parallel
        return memory(self.header, n_cells, kv_type=kv_type, start=start, sequences=parallel, parked=self.parked)

    def split(self, n_cells: int, start: int) -> Split:
        needs = self.memory(n_cells, start)
        wishes = self.wishes
        layers, experts, without_flash = wishes.gpu_layers, wishes.cpu_experts, wishes.flash_attention == "off"
        return split_model(self.header, needs, n_cells, self.hardware, layers, experts, with_scores=without_flash)

    def at_start(self, start: int, split: Split) -> Split:
        """Return a split as it is when the model is loaded, before the KV cache has grown."""
        wishes = replace(self.wishes, gpu_layers=split.gpu_layers, cpu_experts=len(split.cpu_experts))
        return replace(self, wishes=wishes).split(start * self.apart, start * self.apart)

    def ram(self, n_ctx: int) -> int:
        """What has to be free at least for such windows, where one has to be apart from the other: all made at once."""
        return self.split(n_ctx * self.apart, n_ctx * self.apart).ram

    def cells(self, n_ctx: int) -> tuple[int, list[str]]:
        """Tokens that the KV cache is to hold for all sequences, each of which may fill its window; and words on it."""
        wanted = n_ctx * self.wishes.parallel
        if self.apart > 1 or wanted == n_ctx or not self.hardware.memory_total:
            return wanted, []
        free = self.hardware.memory_available
        if self.ram(wanted) <= free - margin(free):
            return wanted, []
        chosen = max(n_ctx, self.largest(free - margin(free), wanted))
        return chosen, [
            f"{self.wishes.parallel} answers at the same time share {chosen:,} tokens of KV cache: what fits into "
            f"{readable_size(free)} of free memory with some to spare"
        ]

    def start(self, n_ctx: int) -> int:
        """For how many tokens to have memory at first; for all where there is no room to grow."""
        start = context_start(self.header, n_ctx, self.wishes.kv_type)
        free = self.hardware.memory_available
        if self.hardware.memory_total and self.split(n_ctx, start).ram > free - margin(free):
            return n_ctx
        return start

    def largest(self, room: int, limit: int) -> int:
        return largest_context(lambda n_ctx: self.ram(n_ctx) <= room, limit)

    def context(self) -> tuple[int, list[str]]:
        """The context window and what to say about it."""
        trained = trained_context(self.header)
        if self.wishes.n_ctx is not None:
            return self._wished(self.wishes.n_ctx, trained)
        if not self.hardware.memory_total:  # nothing known about memory
            chosen = trained
        else:
            free = self.hardware.memory_available
            chosen = self._fitting(free - margin(free), trained)
            if not chosen:
                raise self._too_large(trained)
        if chosen < trained:
            available = readable_size(self.hardware.memory_available)
            note = f"context {chosen:,} of {trained:,} tokens: what fits into {available} of free memory"
            return chosen, [f"{note} with some to spare (--ctx asks for more)"]
        if not self.header.n_ctx_train:
            return chosen, [f"context {chosen:,} tokens: the file does not say what the model was trained on"]
        return chosen, []

    def _fitting(self, room: int, trained: int) -> int:
        if self.ram(trained) <= room:
            return trained
        largest = self.largest(room, trained)
        return largest if largest >= SMALLEST_CONTEXT else 0

    def _wished(self, wish: int, trained: int) -> tuple[int, list[str]]:
        free = self.hardware.memory_available
        needed = self.ram(wish)
        if self.hardware.memory_total and needed > free:
            largest = self.largest(free, wish)
            if not largest:
                raise self._too_large(trained)
            parts, advised, why = self.memory(wish, wish), largest, "the largest that fits"
            if beyond_training(self.header, largest):
                advised, why = trained, f"what the model was trained on; {largest} is the largest that fits"
            raise OutOfMemoryError(
                f"a context of {wish:,} tokens does not fit into memory",
                why=f"that takes {readable_size(needed)}, {readable_size(parts.kv)} of it for the "
                f"KV cache, and {readable_size(free)} are free",
                hint=f"llmrun run {shlex.quote(self.name)} --ctx {advised}, {why}",
            )
        notes = [*beyond_training(self.header, wish)]
        if self.hardware.memory_total and needed > free - margin(free):
            notes.append(f"context {wish:,} tokens: leaves only {readable_size(free - needed)} of memory free")
        return wish, notes

    def _too_large(self, trained: int) -> OutOfMemoryError:
        free = self.hardware.memory_available
        smallest = min(SMALLEST_CONTEXT, trained)
        needed = self.ram(smallest)
        hint = self._smaller_quant(smallest) or "use a smaller model (`llmrun list --all`), or close other programs"
        if needed <= free:
            hint = f"llmrun run {shlex.quote(self.name)} --ctx {smallest} would take the last of it; better {hint}"
        return OutOfMemoryError(
            "the model does not fit into memory",
            why=f"with the smallest context it takes {readable_size(needed)}, "
            f"{readable_size(self.header.weight_bytes)} of it for the weights; {readable_size(free)} are free, and "
            f"{readable_size(margin(free))} of that is left to the rest of the system",
            hint=hint,
        )

    def _smaller_quant(self, n_ctx: int) -> str:
        """The command for the best quantization that would fit, "" when none is known to."""
        free = self.hardware.memory_available - margin(self.hardware.memory_available)
        rest = self.ram(n_ctx) - self.header.weight_bytes
        for quant, bits in _SMALLER_QUANTS.items():
            size = int(self.header.n_parameters * bits / 8)
            if size < self.header.weight_bytes and size + rest <= free:
                if not self.repository:
                    return f"use a smaller quant: {quant} would take about {readable_size(size)}"
                return f"llmrun run {self.repository}:{quant} (about {readable_size(size)}), if it is there"
        return ""


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
