"""Validation of a bench before it runs: impossible cases are refused by name, odd ones are noted.

Pure; must not know how anything is measured. Sizes are in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from llmrun.bench.parameters import Case
from llmrun.errors import OutOfMemoryError, UsageError, require_within
from llmrun.gguf.header import Header
from llmrun.planning.hardware import Hardware
from llmrun.planning.memory import UBATCH, memory
from llmrun.planning.placement import check_overrides
from llmrun.planning.plan import CONTEXT_BOUNDS
from llmrun.protocol.devices import selected
from llmrun.protocol.jobs.bench import BenchTest
from llmrun.protocol.settings import KV_TYPES, MAX_THREADS, SETTINGS, check_setting
from llmrun.protocol.sizes import readable_size

MOST_REPETITIONS = 1000

_PLAIN = frozenset({"f32", "f16", "bf16"})


class NamedModel(NamedTuple):
    """A model's name and header."""

    name: str
    header: Header


def check_cases(cases: Sequence[Case], hardware: Hardware, repetitions: int) -> list[str]:
    """Check the cases before models are located.

    Returns:
        Notes about odd cases.

    Raises:
        UsageError: a case is impossible.
    """
    require_within("--repetitions", repetitions, (1, MOST_REPETITIONS))
    if not cases:
        raise UsageError(
            "there is nothing to measure",
            why="prompts and answers have 0 tokens in all",
            hint="llmrun bench MODEL -p 512 -n 128",
        )
    for case in cases:
        _check_tokens(case.test)
        _check_settings(case, hardware)
    for threads in sorted({case.settings.threads for case in cases}):
        _check_threads(threads, hardware)
    return _odd_threads(cases, hardware)


def check_models(cases: Sequence[Case], subjects: Sequence[NamedModel], hardware: Hardware) -> list[str]:
    """Check the models for the cases before the first test.

    Returns:
        Notes about odd models.

    Raises:
        UsageError: a model can't be loaded with these settings.
        OutOfMemoryError: a model does not fit with the context that a test needs.
    """
    notes: list[str] = []
    for subject in subjects:
        for case in cases:
            _check_heads(case, subject)
            _check_memory(case, subject, hardware)
        notes += _odd_depths(cases, subject)
    return notes


def _check_tokens(test: BenchTest) -> None:
    if test.chat and not (test.n_prompt and test.n_gen):
        raise UsageError(
            f"invalid test {test.name}",
            why="a chat has a prompt of at least one token, and an answer of at least one",
            hint="--chat 128,64",
        )
    most = CONTEXT_BOUNDS[1]
    if test.n_tokens + test.n_depth > most:
        raise UsageError(
            f"invalid test {test.name}",
            why=f"it needs a context of {test.n_tokens + test.n_depth:,} tokens; the limit is {most:,}",
        )


def _check_settings(case: Case, hardware: Hardware) -> None:
    settings = case.settings
    for name in ("n_batch", "n_ubatch", "gpu_layers", "main_gpu"):
        check_setting(name, getattr(settings, name), SETTINGS[name].short)
    gpus = selected(hardware.gpus, settings.device, settings.split_mode, settings.main_gpu, settings.tensor_split)
    check_overrides(settings.override_tensor, gpus)
    if settings.flash_attention == "off" and settings.split_mode == "tensor":
        raise UsageError("-sm tensor needs flash attention", hint="leave out -fa off")
    if settings.flash_attention == "off" and settings.kv_type_v not in _PLAIN:
        raise UsageError(
            f"-ctv {settings.kv_type_v} needs flash attention",
            why="llama.cpp supports quantized values only with it",
            hint="leave out -fa off",
        )


def _check_threads(threads: int, hardware: Hardware) -> None:
    most = min(max(hardware.logical_cores, 1), MAX_THREADS)
    if not 1 <= threads <= most:
        raise UsageError(
            f"invalid -t {threads}",
            why=f"this machine has {most} usable hardware thread{'s' if most > 1 else ''}",
            hint=f"-t {hardware.usable_cores}, which is the default",
        )


def _odd_threads(cases: Sequence[Case], hardware: Hardware) -> list[str]:
    most = max(case.settings.threads for case in cases)
    if most <= hardware.usable_cores:
        return []
    why = "the container's quota" if hardware.cpu_quota is not None else "physical cores"
    return [f"{most} threads are more than {why} can compute at once ({hardware.usable_cores}): expect noise"]


def _check_heads(case: Case, subject: NamedModel) -> None:
    settings = case.settings
    for option, kind, length in (
        ("-ctk", settings.kv_type_k, subject.header.key_length),
        ("-ctv", settings.kv_type_v, subject.header.value_length),
    ):
        together = KV_TYPES[kind][1]
        if length and length % together:
            raise UsageError(
                f"{subject.name} can't have {option} {kind}",
                why=f"its heads have {length} elements, which is not a multiple of {together}",
                hint=f"{option} f16",
            )


def needed_memory(case: Case, header: Header) -> int:
    """Return the memory for a test: weights, KV cache (twice at a depth, whose state is saved), scratch."""
    n_ctx = case.test.n_tokens + case.test.n_depth
    ubatch = max(UBATCH, min(case.settings.n_ubatch, case.settings.n_batch))
    parts = memory(header, n_ctx, start=n_ctx, ubatch=ubatch)
    kv = parts.kv * case.settings.kv_element_bytes / 2.0
    if case.test.n_depth and not case.test.chat:
        kv *= 1 + case.test.n_depth / n_ctx
    return int(parts.needed - parts.kv + kv)


def _check_memory(case: Case, subject: NamedModel, hardware: Hardware) -> None:
    needed = needed_memory(case, subject.header)
    free = hardware.memory_available
    if not hardware.memory_total or needed <= free or _has_gpu_memory(case, hardware):
        return
    raise OutOfMemoryError(
        f"{subject.name} does not fit into memory for {case.test.name}",
        why=f"that takes {readable_size(needed)}, and {readable_size(free)} are free",
        hint="a shorter test or depth, a smaller quant, or close other programs",
    )


def _has_gpu_memory(case: Case, hardware: Hardware) -> bool:
    """Return whether a part of the model, not yet known, lies on GPUs or workers."""
    return case.settings.gpu_layers != 0 and (bool(hardware.workers) or any(not gpu.shared for gpu in hardware.gpus))


def fit_together(cases: Sequence[Case], headers: Sequence[Header], hardware: Hardware) -> bool:
    """Return whether all models fit into memory together."""
    needed = sum(max(needed_memory(case, header) for case in cases) for header in headers)
    return not hardware.memory_total or needed <= hardware.memory_available


def _odd_depths(cases: Sequence[Case], subject: NamedModel) -> list[str]:
    trained = subject.header.n_ctx_train
    beyond = [case.test for case in cases if trained and case.test.n_depth + case.test.n_tokens > trained]
    if not beyond:
        return []
    names = ", ".join(dict.fromkeys(test.name for test in beyond))
    return [
        f"{names}: beyond the {trained:,} tokens that {subject.name} was trained on; its speed is real all the same"
    ]
