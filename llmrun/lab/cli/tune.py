"""`llmrun tune`: find the engine's fastest settings for a model on this machine."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmrun.cli.loading import find_model
from llmrun.cli.options import JsonOption, ModelArgument, YesOption, engine_options, with_options
from llmrun.config import load_settings
from llmrun.errors import CancelledError, LlmrunError, OutOfMemoryError
from llmrun.gguf.reader import read_header
from llmrun.gguf.rules import check
from llmrun.lab.bench import tune as search
from llmrun.lab.bench.tune import most_ubatch
from llmrun.lab.quantize.types import COPY_TYPE, fast_copy, has_slow_prompts
from llmrun.lab.views.tune import TuneView, as_json, show_fast_copy, show_outcome
from llmrun.planning.hardware import this_machine
from llmrun.planning.measurements import measured_attention
from llmrun.planning.plan import Measurements, make_plan
from llmrun.planning.preferences import LoadPreferences
from llmrun.planning.speed import speed_of
from llmrun.planning.tuned import forget
from llmrun.protocol.settings import DEVICE_SETTINGS
from llmrun.ui.terminal.output import Output

if TYPE_CHECKING:
    from llmrun.gguf.header import Header
    from llmrun.lab.quantize.types import FastCopy
    from llmrun.planning.hardware import Hardware
    from llmrun.planning.plan import Plan


@with_options(devices=engine_options(*DEVICE_SETTINGS))
def tune(
    model: ModelArgument,
    seconds: Annotated[float, typer.Option("--seconds", help="Time limit.")] = 60.0,
    depth: Annotated[
        int | None,
        typer.Option("--depth", metavar="TOKENS", help="Tokens cached before the steps. Default: by the time limit."),
    ] = None,
    kv: Annotated[bool, typer.Option("--cache-types", help="Try a q8_0 KV cache too; it is less precise.")] = False,
    forget: Annotated[bool, typer.Option("--forget", help="Delete the tuned settings and use the defaults.")] = False,
    yes: YesOption = False,
    json: JsonOption = False,
    *,
    devices: dict[str, Any],
) -> None:
    """Find and save the fastest settings for a model on this machine.

    The settings apply to models of the same shape on this machine. A setting is kept only if it is significantly
    faster than the default, measured alternately; the kept settings are printed. Other threads, flash attention or
    repacking change the rounding, which can change an answer at --temp 0. The cost of drafting tokens is measured too.
    For a type of weights without a fast kernel for prompts here, the command for a faster copy is printed.
    """
    search.check_preferences(seconds, depth)
    output, settings, preferences = Output(json=json), load_settings(), LoadPreferences(**devices)
    spec, path = find_model(output, model, yes=yes)
    name = spec.name
    header, hardware = read_header(path), this_machine()
    check(header)
    if forget:
        _forget(output, name, header, hardware, settings.state_dir)
        return
    plan = _plan(header, hardware, preferences, settings.state_dir, name)
    try:
        with TuneView(output, seconds) as view:
            outcome = search.tune(header, hardware, plan, seconds=seconds, depth=depth, kv=kv, on_step=view.show)
    except CancelledError:
        output.note("stopped: nothing was changed")
        raise
    kept, error = None, None
    copy = _fast_copy(header, hardware, settings.state_dir)
    try:
        kept = search.keep(outcome, header, hardware, settings.state_dir, name)
    except LlmrunError as refused:
        error = refused
    if json:
        output.result_json(as_json(name, outcome, copy))
    else:
        show_outcome(output, name, outcome, kept)
    if copy is not None and not json:
        show_fast_copy(output, name, header, copy)
    if error is not None:  # only now: what was measured is shown even where it can't be kept
        raise error


def _fast_copy(header: Header, hardware: Hardware, folder: Path) -> FastCopy | None:
    """Return the copy that reads prompts faster here, if any.

    Measures the kernels of both types once; None on a busy machine, where the figures would be wrong.
    """
    if not has_slow_prompts(header, hardware):
        return None
    types = {*header.bytes_per_type, COPY_TYPE}
    with suppress(LlmrunError):
        speed = speed_of(hardware, types, folder)
        return None if speed.is_estimated else fast_copy(header, speed)
    return None


def _plan(header: Header, hardware: Hardware, preferences: LoadPreferences, folder: Path, name: str) -> Plan:
    """Return the plan with memory for the largest micro-batch to try, or for the usual one."""
    measured = Measurements(measured_attention(header, hardware, folder))
    with suppress(OutOfMemoryError):
        wide = replace(preferences, n_ubatch=most_ubatch(header, hardware))
        return make_plan(header, hardware, wide, measured=measured, name=name)
    return make_plan(header, hardware, preferences, measured=measured, name=name)


def _forget(output: Output, name: str, header: Header, hardware: Hardware, folder: Path) -> None:
    known = forget(header, hardware, folder)
    if output.json:
        output.result_json({"model": name, "forgotten": known})
    else:
        output.note(f"{name} runs with the defaults again" if known else f"{name} was not tuned on this machine")
