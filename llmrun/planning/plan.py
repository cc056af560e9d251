"""The plan of a model on a machine: context, threads, layers on the GPU, memory, and the reasons.

A pure function of facts and preferences. Sizes are in bytes, context lengths in tokens.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from llmrun.errors import OutOfMemoryError, UsageError
from llmrun.planning.hardware import Hardware
from llmrun.planning.memory import (
    DEVICE_BATCH,
    UBATCH,
    Memory,
    cell_bytes,
    kernel_types,
    largest_context,
    memory,
    score_bytes,
    without_flash_attention,
)
from llmrun.planning.placement import Split, described, placement_notes, split_model
from llmrun.planning.preferences import ALL_LAYERS, ATTENTION, CONTEXT_BOUNDS, LoadPreferences
from llmrun.protocol.loading import Load
from llmrun.protocol.settings import MAX_THREADS
from llmrun.protocol.sizes import readable_size

if TYPE_CHECKING:
    from llmrun.gguf.header import Header

UNKNOWN_CONTEXT = 4096  # for files without a training context
SMALLEST_CONTEXT = 512  # useful for a conversation
_SMALLEST_MARGIN = 512 << 20
_FEWEST_PARKED = 16
_SEQUENCE_IDS = 256  # of llama.cpp
_ENOUGH_EACH = 16_384  # tokens
_FP16_STEP = 128  # elements that ggml's AVX512-FP16 kernels take at a time; the rest of a head, one at a time
_MOST_SCORES = 1 << 30  # bytes
_SCORES_SHARE = 16  # of memory
# Drafted tokens of a step of a recurrent model: 4 rows. Each costs a copy of the state, and time in every step, also in
# those without drafts: of three recurrent layers on one processor, 3 cost 18 us and 7 cost 47 us.
_ROLLBACK = 3
_MOST_COPIES = 8_000_000_000  # bytes of copies of KV states at most, about llama-server's default
_ROLLBACK_SHARE = 64  # copies of recurrent states take at most 1/N of all memory: what is free changes

# Quant -> bits per weight of whole models; in order of quality.
_SMALLER_QUANTS = {
    "Q8_0": 8.5, "Q6_K": 6.6, "Q5_K_M": 5.7, "Q4_K_M": 4.9, "Q4_K_S": 4.6, "Q3_K_M": 3.9, "Q2_K": 3.2,
}  # fmt: skip


class Measurements(NamedTuple):
    """Measurements of earlier runs of a model on this machine."""

    attention: str = ""  # faster flash attention setting of one sequence, see measurements.py; "" if unknown
    gpu_excess: tuple[tuple[str, int], ...] = ()  # bytes of each GPU beyond an earlier plan, see measurements.py
    cpu_variant: str = ""  # fastest variant of the processor's backend; "" for ggml's choice, or if unknown


UNMEASURED = Measurements()


@dataclass(frozen=True, slots=True)
class Plan:
    """The load of a model, and the memory that it takes."""

    load: Load
    memory: Memory  # of the model, in the machine's memory or a GPU's
    ram_bytes: int  # part of memory.needed that the machine's own memory has to hold
    vram_bytes: int = 0  # part that the GPUs have to hold; 0 without any, or if unknown
    gpu_counts: tuple[int, ...] = ()  # layers on each GPU
    gpu_excess: tuple[tuple[str, int], ...] = ()  # part of gpu_bytes that an earlier load needed beyond its plan
    gpu_bytes: tuple[tuple[str, int], ...] = ()  # each GPU's name, and its bytes when the model is loaded
    notes: tuple[str, ...] = ()  # a sentence about each choice that is not simply what the model was trained on
    tuned: tuple[str, ...] = ()  # settings that `llmrun tune` found faster, in words
    slow_flash_attention: bool = False  # ggml's kernel is slow here; answers without it differ a little
    draft: Header | None = None  # of the draft model that load.draft loads
    draft_bytes: int = 0  # part of memory that is a draft model's, or the model's own heads'

    @property
    def summary(self) -> str:
        """One line for --verbose: the choices and their memory."""
        parts, load = self.memory, self.load
        clients = f" for each of {load.n_seq_max}, {load.n_cells:,} in all" if load.n_seq_max > 1 else ""
        start = "its memory is allocated at once" if not load.cell_bytes else "it takes memory when it is used"
        text = (
            f"plan: context {load.n_ctx:,} tokens{clients} ({start}), "
            f"{load.threads} threads; "
            f"{readable_size(self.ram_bytes)} of memory when it is full: weights {readable_size(parts.weights)}, "
            f"KV cache {readable_size(parts.kv)}, scratch {readable_size(parts.compute)}, "
            f"{f'checkpoints {readable_size(parts.checkpoints)}, ' if parts.checkpoints else ''}"
            f"{f'copies of conversations {readable_size(parts.copies)}, ' if parts.copies else ''}"
            f"process {readable_size(parts.process)}"
        )
        drafter = "the model's prediction heads" if load.draft_heads else "the draft model"
        text += f"; {readable_size(self.draft_bytes)} of that for {drafter}" if self.draft_bytes else ""
        if self.vram_bytes:
            where = described(load.gpu_layers, len(load.cpu_experts))
            text += f"; and {readable_size(self.vram_bytes)} of GPU memory: {where}"
        if load.cpu_variant:
            text += f"; processor variant {load.cpu_variant}, which is faster here than ggml's choice"
        if self.tuned:
            text += f"; tuned: {', '.join(self.tuned)}"
        if self.slow_flash_attention:
            text += "; flash attention is slow here with heads this short: see --flash-attention off, llmrun tune"
        return text


def make_plan(
    header: Header,
    hardware: Hardware,
    preferences: LoadPreferences,
    *,
    measured: Measurements = UNMEASURED,
    name: str = "MODEL",
    repository: str = "",
) -> Plan:
    """Choose all settings that the user left open.

    Args:
        name: the user's name of the model, for commands in hints.
        repository: "owner/repo" with other quants of the model, or "".

    Raises:
        OutOfMemoryError: the model or the preferred context does not fit.
        UsageError: the preferences name a GPU that is not there.
    """
    hardware = replace(hardware, gpus=preferences.gpus(hardware.gpus))
    fit, head_notes = _with_heads(_ContextFit(header, hardware, preferences, measured, name, repository))
    n_ctx, context_notes = fit.context()
    n_cells, cell_notes = fit.cells(n_ctx)
    on_device = fit.is_on_device(n_cells)
    usual_batch = max(preferences.micro_batch, DEVICE_BATCH if on_device else UBATCH)
    n_batch = min(preferences.n_batch or usual_batch, n_ctx)
    fit, context_notes = _with_wide_micro_batches(fit, n_ctx, n_cells, n_batch, context_notes)
    threads, thread_notes = _threads(hardware, fit.preferences, on_device=on_device)
    flash_attention = _flash_attention(fit)
    split, plain = fit.split(n_cells), fit.memory(n_cells)
    where_notes = placement_notes(header, hardware, split, fit.preferences)
    writes_scores = flash_attention == "off" and not (split.gpu_bytes and split.gpu_layers == ALL_LAYERS)
    parts = without_flash_attention(plain, header, n_ctx, fit.preferences.micro_batch) if writes_scores else plain
    load = Load(
        str(header.path.absolute()), n_ctx, n_batch=n_batch, n_ubatch=fit.preferences.micro_batch,
        n_seq_max=fit.preferences.parallel, n_cells=n_cells, n_parked=fit.parked, n_rollback=fit.rollback,
        draft_heads=fit.heads, checkpoint_bytes=parts.checkpoints, cpu_variant=measured.cpu_variant,
        gpu_layers=split.gpu_layers, cpu_experts=split.cpu_experts, layer_counts=split.layer_counts,
        workers=tuple(worker.endpoint for worker in hardware.workers),
        **{**fit.preferences.as_given, **threads, "flash_attention": flash_attention},
    )  # fmt: skip
    plan = Plan(
        load,
        memory=parts,
        ram_bytes=split.ram + parts.compute - plain.compute,
        vram_bytes=split.vram,
        notes=(*context_notes, *head_notes, *cell_notes, *where_notes, *thread_notes),
        slow_flash_attention=flash_attention != "off" and _is_flash_attention_slow(header, hardware),
        draft_bytes=plain.needed - replace(fit, heads=False).memory(n_cells).needed,
        gpu_counts=split.gpu_counts,
        gpu_excess=measured.gpu_excess,
        gpu_bytes=split.gpu_bytes,
    )
    return _with_copies(plan, fit, is_on_use=hardware.kv_on_use and not on_device and flash_attention != "off")


def _with_copies(plan: Plan, fit: _ContextFit, *, is_on_use: bool) -> Plan:
    """Return the plan with memory for copies of what has to leave the KV cache: what is left, up to another cache.

    Args:
        is_on_use: the KV cache is in the machine's own memory, and a cell takes it when it is used.
    """
    cache = plan.memory.kv + plan.memory.checkpoints
    n_bytes, free = min(cache, _MOST_COPIES), fit.hardware.memory_available
    if fit.hardware.memory_total:
        n_bytes = max(min(n_bytes, free - margin(free) - plan.ram_bytes), 0)
    cell = cell_bytes(fit.header, plan.load.n_cells, fit.preferences.kv_type) if is_on_use else 0
    return replace(
        plan,
        load=replace(plan.load, copy_bytes=n_bytes, cell_bytes=cell),
        memory=replace(plan.memory, copies=n_bytes),
        ram_bytes=plan.ram_bytes + n_bytes,
    )


def margin(free: int) -> int:
    """Return the part of free memory that automatic choices leave to the rest of the system."""
    return max(_SMALLEST_MARGIN, free // 10)


def trained_context(header: Header) -> int:
    """Return the context window of training within bounds; a default if the file does not state it."""
    return min(header.n_ctx_train or UNKNOWN_CONTEXT, CONTEXT_BOUNDS[1])


def beyond_training(header: Header, n_ctx: int) -> tuple[str, ...]:
    """Return the warning about a context window longer than the model was trained on; none where that is unknown."""
    trained = trained_context(header)
    if not header.n_ctx_train or n_ctx <= trained:
        return ()
    return (f"context {n_ctx:,} tokens: the model was trained on {trained:,}, so answers get worse beyond that",)


# ---- flash attention ---------------------------------------------------------------------------------


def choose_flash_attention(
    header: Header, hardware: Hardware, preferences: LoadPreferences, measured: Measurements = UNMEASURED
) -> str:
    """Return the flash attention setting of one sequence, the same for all commands whose figures are to be equal.

    The user's preference; else off if that was measured to be faster and memory is left; else llama.cpp's own choice,
    which is on. With our own kernels nothing else is faster.
    """
    preferred = preferences.attention
    is_open = [preferred[name] for name in ATTENTION] == ["auto", "f16", "f16"]
    is_decided = hardware.gpus or hardware.workers or kernel_types(hardware.cpu_flags)
    if not is_open or is_decided or measured.attention != "off":
        return preferred["flash_attention"]
    alone = _ContextFit(header, hardware, replace(preferences, parallel=1), measured, "", "")
    try:
        n_ctx, _ = alone.context()  # not the window of one of several, which may be cut to fit
    except OutOfMemoryError:
        return "auto"
    needed = alone.split(n_ctx).ram + score_bytes(header, n_ctx, preferences.micro_batch)
    return (
        "off"
        if scores_fit(header, hardware, n_ctx, preferences.micro_batch) and needed <= hardware.memory_available
        else "auto"
    )


def _flash_attention(fit: _ContextFit) -> str:
    """Return the setting of a plan; with several sequences, the preference as it is."""
    preferences = fit.preferences
    if preferences.parallel == 1 or preferences.as_alone:
        return choose_flash_attention(fit.header, fit.hardware, preferences, fit.measured)
    return preferences.attention["flash_attention"]


def _is_flash_attention_slow(header: Header, hardware: Hardware) -> bool:
    """Return whether ggml's flash attention computes one element at a time for this model.

    Compiled for AVX512-FP16, ggml's f16 dot product takes 128 elements at a time and the rest one by one
    (GGML_F16_STEP in simd-mappings.h), so heads of 64 are not vectorized: SmolLM2's decode is half as fast as without
    flash attention after 2,048 tokens, a third after 4,096, while prefill is 1.2 times as fast.
    """
    is_ours = hardware.gpus or kernel_types(hardware.cpu_flags)
    return not is_ours and 0 < header.key_length < _FP16_STEP and "avx512_fp16" in hardware.cpu_flags


def scores_fit(header: Header, hardware: Hardware, n_ctx: int, ubatch: int = UBATCH) -> bool:
    """Return whether attention without flash attention takes a small share of all memory.

    Free memory changes between commands, and greedy answers would change with it.
    """
    return score_bytes(header, n_ctx, ubatch) <= min(_MOST_SCORES, hardware.memory_total // _SCORES_SHARE)


# ---- prediction heads --------------------------------------------------------------------------------


def _with_heads(fit: _ContextFit) -> tuple[_ContextFit, list[str]]:
    """Return the fit with the model's prediction heads if they are to be used, and notes.

    On GPUs, and of architectures that were never run in a test, they are used only on request.

    Raises:
        UsageError: they are requested, and can't be used.
    """
    header, hardware, preferences = fit.header, fit.hardware, fit.preferences
    is_asked = preferences.draft_heads is True
    if is_asked and not header.n_draft_heads:
        why = "the file has no layers for multi-token prediction"
        raise UsageError(f"{fit.name} has no heads to draft with", why=why, hint="leave out --draft mtp")
    is_possible = header.can_use_heads and not hardware.workers
    if is_asked and not is_possible:
        raise UsageError(
            f"the heads of {fit.name} can't draft",
            why="llama.cpp's graph for this architecture does not suit it"
            if not header.can_use_heads
            else "layers are on other machines",
            hint="leave out --draft mtp",
        )
    with_heads = replace(fit, heads=True)
    if is_asked or not is_possible or preferences.draft_heads is False:
        return (with_heads if is_asked else fit), []
    if not header.has_proven_heads or (hardware.gpus and preferences.gpu_layers != 0):
        return fit, []
    try:
        has_room = with_heads.context()[0] >= fit.context()[0]
    except OutOfMemoryError:
        has_room = False
    if has_room:
        return with_heads, []
    return fit, ["its heads for multi-token prediction are left out: there is too little memory for them"]


# ---- micro-batches -----------------------------------------------------------------------------------


def _with_wide_micro_batches(
    fit: _ContextFit, n_ctx: int, n_cells: int, n_batch: int, notes: list[str]
) -> tuple[_ContextFit, list[str]]:
    """Return the fit with micro-batches as large as a usual batch, if a single GPU has memory to spare for them.

    Prefill is 7 % faster with them on an H200. The context window and the KV cache stay as they are.
    """
    header, hardware, preferences = fit.header, fit.hardware, fit.preferences
    # With experts or a sliding window, reserved_bytes() is not close to what llama.cpp allocates.
    if hardware.workers or header.expert_bytes or header.window_bytes:
        return fit, notes
    n_ubatch = min(n_batch, DEVICE_BATCH)
    if preferences.n_ubatch is not None or n_ubatch <= preferences.micro_batch:
        return fit, notes
    split = fit.split(n_cells)
    if split.gpu_layers != ALL_LAYERS or len(split.gpu_bytes) != 1:
        return fit, notes
    wide = replace(fit, preferences=replace(preferences, n_ubatch=n_ubatch))
    wide_split = wide.split(n_cells)
    has_room = wide_split.vram - split.vram <= sum(gpu.memory_free for gpu in hardware.gpus) / 10
    if wide_split.gpu_layers != ALL_LAYERS or not has_room:
        return fit, notes
    try:
        wide_ctx, wide_notes = wide.context()
        return (wide, wide_notes) if (wide_ctx, wide.cells(n_ctx)[0]) == (n_ctx, n_cells) else (fit, notes)
    except OutOfMemoryError:
        return fit, notes


# ---- context ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ContextFit:
    """The context windows of a model that fit into memory, and the errors for others."""

    header: Header
    hardware: Hardware
    preferences: LoadPreferences
    measured: Measurements
    name: str
    repository: str
    heads: bool = False  # with the model's prediction heads

    @property
    def n_caches(self) -> int:
        """Number of KV caches of a whole window: one, or one per sequence."""
        return self.header.n_caches(self.preferences.parallel)

    @property
    def parked(self) -> int:
        """Number of prefixes to cache; none if recurrent, since each state takes its memory even if unused."""
        parallel = self.preferences.parallel
        if parallel == 1 or self.n_caches > 1 or self.header.recurrent_bytes:
            return 0
        return min(max(_FEWEST_PARKED, parallel), _SEQUENCE_IDS - parallel)

    @property
    def rollback(self) -> int:
        """Return as Load.n_rollback."""
        preferences = self.preferences
        if not self.header.can_roll_back:
            return 0
        if preferences.n_drafted is not None:
            return preferences.n_drafted
        if not self.hardware.memory_total:
            return _ROLLBACK
        copy = self.header.recurrent_bytes * preferences.parallel
        gpus = self.hardware.gpus if preferences.gpu_layers != 0 else ()
        limit = min([self.hardware.memory_total, *(gpu.memory_total for gpu in gpus)]) // _ROLLBACK_SHARE
        return _ROLLBACK if _ROLLBACK * copy <= limit else 0

    def memory(self, n_cells: int) -> Memory:
        return memory(
            self.header,
            n_cells,
            kv_type=self.preferences.kv_type,
            sequences=self.preferences.parallel,
            parked=self.parked,
            ubatch=self.preferences.micro_batch,
            rollback=self.rollback,
            heads=self.heads,
        )

    def split(self, n_cells: int) -> Split:
        excess = dict(self.measured.gpu_excess)
        return split_model(self.header, self.memory(n_cells), n_cells, self.hardware, self.preferences, excess)

    def ram(self, n_ctx: int) -> int:
        """Return the RAM of windows of this size."""
        return self.split(n_ctx * self.n_caches).ram

    def cells(self, n_ctx: int) -> tuple[int, list[str]]:
        """Return the KV cells of all sequences, each of which may fill its window, and notes."""
        full = n_ctx * self.preferences.parallel
        if self.n_caches > 1 or full == n_ctx or not self.hardware.memory_total:
            return full, []
        free, one = self.hardware.memory_available, self._layers_on_gpus(n_ctx)

        def fits(n_cells: int) -> bool:
            return self.ram(n_cells) <= free - margin(free) and self._layers_on_gpus(n_cells) == one

        if fits(full):
            return full, []
        chosen = max(n_ctx, largest_context(fits, full))
        vram = sum(gpu.memory_free for gpu in self.hardware.gpus if not gpu.shared)
        where = f"{readable_size(free)} of free memory" + (f" and {readable_size(vram)} on GPUs" if vram else "")
        return chosen, [
            f"{self.preferences.parallel} answers at the same time share {chosen:,} tokens of KV cache: what fits into "
            f"{where} with some to spare"
        ]

    def _layers_on_gpus(self, n_cells: int) -> tuple[int, tuple[int, ...]]:
        """Return the layers on GPUs with a KV cache of this size, and those without their experts."""
        split = self.split(n_cells)
        return split.gpu_layers, split.cpu_experts

    def is_on_device(self, n_cells: int) -> bool:
        """Return whether GPUs or workers hold layers, and with them their part of the KV cache."""
        return bool(self.hardware.workers or (self.hardware.gpus and self._layers_on_gpus(n_cells)[0]))

    def largest(self, room: int, limit: int) -> int:
        return largest_context(lambda n_ctx: self.ram(n_ctx) <= room, limit)

    def context(self) -> tuple[int, list[str]]:
        """Return the context window and notes."""
        trained = trained_context(self.header)
        if self.preferences.n_ctx is not None:
            return self._preferred(self.preferences.n_ctx, trained)
        if not self.hardware.memory_total:  # unknown
            chosen = trained
        else:
            free = self.hardware.memory_available
            chosen = self._fitting(free - margin(free), trained)
            if not chosen:
                raise self._too_large(trained)
            window = self._window_of_each(free - margin(free), chosen)
            if window < chosen:
                available, parallel = readable_size(free), self.preferences.parallel
                note = f"context {window:,} of {trained:,} tokens for each of {parallel} answers at the same time"
                note += f": what fits into {available} of free memory with some to spare"
                return window, [f"{note} (--parallel 1 leaves {chosen:,})"]
        if chosen < trained:
            available = readable_size(self.hardware.memory_available)
            note = f"context {chosen:,} of {trained:,} tokens: what fits into {available} of free memory"
            return chosen, [f"{note} with some to spare (--ctx asks for more)"]
        if not self.header.n_ctx_train:
            return chosen, [f"context {chosen:,} tokens: the file does not state the context of training"]
        return chosen, []

    def _fitting(self, room: int, trained: int) -> int:
        if self.ram(trained) <= room:
            return trained
        largest = self.largest(room, trained)
        return largest if largest >= SMALLEST_CONTEXT else 0

    def _window_of_each(self, room: int, n_ctx: int) -> int:
        """Return the window that each of several sequences can have whole, if that is enough.

        Where they share the cells of fewer windows, a processor computes attention over the cells of others too. A
        device hardly notices it, and sequences with a sliding window or a recurrent memory always share their cells.
        """
        header, parallel = self.header, self.preferences.parallel
        is_shared = self.hardware.gpus or self.hardware.workers or header.recurrent_bytes or header.window_bytes
        if parallel == 1 or self.n_caches > 1 or is_shared:
            return n_ctx
        window = self.largest(room, n_ctx * parallel) // parallel // 256 * 256
        return min(n_ctx, window) if window >= min(_ENOUGH_EACH, n_ctx) else n_ctx

    def _preferred(self, n_ctx: int, trained: int) -> tuple[int, list[str]]:
        free = self.hardware.memory_available
        needed = self.ram(n_ctx)
        if self.hardware.memory_total and needed > free:
            largest = self.largest(free, n_ctx)
            if not largest:
                raise self._too_large(trained)
            parts, advised, why = self.memory(n_ctx), largest, "the largest that fits"
            if beyond_training(self.header, largest):
                advised, why = trained, f"what the model was trained on; {largest} is the largest that fits"
            raise OutOfMemoryError(
                f"a context of {n_ctx:,} tokens does not fit into memory",
                why=f"that takes {readable_size(needed)}, {readable_size(parts.kv)} of it for the "
                f"KV cache, and {readable_size(free)} are free",
                hint=f"llmrun run {shlex.quote(self.name)} --ctx {advised}, {why}",
            )
        notes = [*beyond_training(self.header, n_ctx)]
        if self.hardware.memory_total and needed > free - margin(free):
            notes.append(f"context {n_ctx:,} tokens: leaves only {readable_size(free - needed)} of memory free")
        return n_ctx, notes

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
        """Return the command for the best quant that would fit; "" without one."""
        free = self.hardware.memory_available - margin(self.hardware.memory_available)
        rest = self.ram(n_ctx) - self.header.weight_bytes
        for quant, bits in _SMALLER_QUANTS.items():
            size = int(self.header.n_parameters * bits / 8)
            if size < self.header.weight_bytes and size + rest <= free:
                if not self.repository:
                    return f"use a smaller quant: {quant} would take about {readable_size(size)}"
                return f"llmrun run {self.repository}:{quant} (about {readable_size(size)}), if the repository has it"
        return ""


def _threads(
    hardware: Hardware, preferences: LoadPreferences, *, on_device: bool
) -> tuple[dict[str, int | bool], list[str]]:
    """Return the settings of threads, and notes."""
    count, notes = _number_of_threads(hardware, preferences.threads)
    is_open = preferences.adapts_threads and preferences.threads is None
    return {"threads": count, "adapts_threads": is_open and count > 1 and not on_device}, notes


def _number_of_threads(hardware: Hardware, preferred: int | None) -> tuple[int, list[str]]:
    if preferred is not None:
        if preferred > hardware.logical_cores:
            return preferred, [
                f"threads {preferred}: more than the {hardware.logical_cores} there are, so it gets slower"
            ]
        return preferred, []
    chosen = hardware.usable_cores
    if chosen < hardware.physical_cores:
        return chosen, [
            f"threads {chosen} of {hardware.physical_cores} cores: the container may use {hardware.cpu_quota:g} of them"
        ]
    return min(chosen, MAX_THREADS), []
