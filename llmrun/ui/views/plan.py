"""The table of `llmrun plan`."""

from __future__ import annotations

from collections.abc import Sequence

from llmrun.planning.catalogue import SLOW, USUAL_CONTEXT, Proposal
from llmrun.planning.estimate import ContextEstimate, QuantEstimate
from llmrun.planning.hardware import Hardware
from llmrun.planning.placement import described
from llmrun.protocol.jobs.machine import MachineSpeed
from llmrun.protocol.sizes import readable_size
from llmrun.ui.terminal.format import context_name, rate, rough, seconds
from llmrun.ui.terminal.output import Output
from llmrun.ui.terminal.tables import Column, right, show_table
from llmrun.ui.views.models import ESTIMATED, size_of

ROUGH = "~: from the size of the file alone; llmrun plan MODEL reads the model's header"


def show_estimates(
    output: Output,
    rows: Sequence[QuantEstimate],
    hardware: Hardware,
    reason: str = "",
    *,
    fits_now: bool = True,
    speed: MachineSpeed | None = None,
) -> None:
    """Print a line for each quantization on stdout, and the hardware on stderr.

    Args:
        reason: of the choice of a quantization; "" for none.
        fits_now: any fits into what is free; the rows are of the quiet machine.
        speed: of the processor, which the rows were computed with.
    """
    contexts = [column.n_ctx for column in rows[0].contexts] if rows else []
    columns = (
        Column("QUANT", style="bold"),
        *right("FILE", *(f"{context_name(n_ctx)} CTX" for n_ctx in contexts), "LOAD", "PREFILL", "DECODE"),
        Column("VERDICT"),
    )
    show_table(output, columns, [_cells(row, is_exact=not _is_estimated(speed)) for row in rows])
    if _is_estimated(speed):
        output.note(ESTIMATED)
    output.note(f"memory: {_memory(hardware)}")
    if reason:
        output.note(reason)
    for note in rows[0].notes if rows else ():
        output.note(note)
    if hardware.workers:
        output.note("speeds over workers are not predicted: llmrun bench MODEL --rpc HOST:PORT measures them")
    if any(not at.fits for row in rows for at in row.contexts):
        output.note("(in brackets): leaves too little memory for the rest of the system")
    smallest = [row.contexts[0] for row in rows if row.contexts and row.contexts[0].fits]
    if smallest and not fits_now:
        least = min(smallest, key=lambda at: at.needed_bytes)
        output.note(_not_now(f"{context_name(least.n_ctx)} of context", least.needed_bytes, hardware))
    if not any(row.n_ctx for row in rows):
        output.note("none fits: run `llmrun list --all` for smaller models")


def show_proposals(
    output: Output, found: Sequence[Proposal], hardware: Hardware, speed: MachineSpeed | None = None
) -> None:
    """Print a line for each proposed model on stdout, and what to type next on stderr."""
    columns = (Column("FOR"), Column("MODEL", style="bold"), *right("PARAMETERS", "FILE", "MEMORY", "DECODE"))
    rows = [
        (
            each.purpose,
            each.entry.alias,
            each.size.parameters,
            readable_size(each.size.n_bytes),
            size_of(each.estimate.memory_bytes, is_exact=each.estimate.is_exact),
            _rate(each.estimate.decode_rate, is_exact=each.estimate.is_exact and not _is_estimated(speed)),
        )
        for each in found
    ]
    show_table(output, columns, rows)
    if _is_estimated(speed):
        output.note(ESTIMATED)
    output.note(f"memory: {_memory(hardware)}; estimates for {context_name(USUAL_CONTEXT)} tokens of context")
    if not all(each.estimate.is_exact for each in found):
        output.note(ROUGH)
    rates = [each.estimate.decode_rate for each in found if each.estimate.decode_rate]
    if any(each < SLOW for each in rates):
        output.note(f"slower than reading: this machine writes less than {rate(SLOW, whole=True)} with it")
    elif rates:
        output.note(f"larger models that fit write less than {rate(SLOW, whole=True)}")
    name = found[-1].entry.alias
    if not found[0].estimate.fits:
        output.note("none fits: use a machine with more memory")
    for each in found:
        if each.estimate.fits and not each.estimate.fits_now:
            output.note(_not_now(each.entry.alias, each.estimate.memory_bytes, hardware))
    output.note(f"llmrun plan {name} predicts each quant; llmrun run {name} downloads and runs it")
    output.note("llmrun list --all shows all models")


def _is_estimated(speed: MachineSpeed | None) -> bool:
    return speed is not None and speed.is_estimated


def _not_now(name: str, needed: int, hardware: Hardware) -> str:
    free = readable_size(hardware.memory_available + hardware.gpu_memory_free)
    return f"{name} needs {readable_size(needed)} of memory, and {free} are free now: close other programs first"


def _cells(row: QuantEstimate, *, is_exact: bool) -> list[str]:
    return [
        row.quant,
        readable_size(row.n_bytes),
        *(_needed(at) for at in row.contexts),
        seconds(row.load_seconds) if row.load_seconds is not None else "",
        _rate(row.prefill_rate, is_exact=is_exact, whole=True),
        _decode(row, is_exact=is_exact),
        _verdict(row),
    ]


def _needed(at: ContextEstimate) -> str:
    text = readable_size(at.needed_bytes)
    return text if at.fits else f"({text})"


def _rate(tokens_per_second: float | None, *, is_exact: bool, whole: bool = False) -> str:
    """Return a speed, with two digits if it is estimated; "" if it is unknown."""
    if not tokens_per_second:
        return ""
    return rate(tokens_per_second, whole=whole) if is_exact else f"{rough(tokens_per_second)} tokens/s"


def _decode(row: QuantEstimate, *, is_exact: bool) -> str:
    """Return the speed at the start of a conversation, and at the end of the largest context that fits."""
    if row.decode_rate is None:
        return ""
    ends = [at.decode_rate for at in row.contexts if at.fits and at.decode_rate is not None]
    if not ends:
        return _rate(row.decode_rate, is_exact=is_exact)
    begins = f"{row.decode_rate:,.1f}" if is_exact else rough(row.decode_rate)
    return f"{begins} → {_rate(ends[-1], is_exact=is_exact).removeprefix('~')}"


def _verdict(row: QuantEstimate) -> str:
    gpu = next((at for at in row.contexts if at.fits and at.vram_bytes), None)
    placement = f", {described(gpu.gpu_layers, gpu.cpu_experts)}" if gpu is not None else ""
    if row.verdict == "fits with less context":
        return f"fits with --ctx {row.n_ctx}{placement}"
    return f"{row.verdict}{placement}"


def _memory(hardware: Hardware) -> str:
    text = f"{readable_size(hardware.memory_available)} of {readable_size(hardware.memory_total)} free"
    for gpu in hardware.gpus:
        text += f"; {gpu.description}: {readable_size(gpu.memory_free)} of {readable_size(gpu.memory_total)} free"
    for worker in hardware.workers:
        free, total = sum(worker.memory_free), worker.memory_total
        text += f"; {worker.endpoint}: {readable_size(free)} of {readable_size(total)} free"
    return text
