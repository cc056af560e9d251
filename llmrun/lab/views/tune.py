"""The output of `llmrun tune`: a line for each trial, and a table at the end."""

from __future__ import annotations

import shlex
from types import TracebackType
from typing import Any

from llmrun.gguf.header import Header
from llmrun.lab.bench.tune import Improvement, Ratio, SearchResult, Step, Trial
from llmrun.lab.quantize.request import model_stem
from llmrun.lab.quantize.types import FastCopy
from llmrun.planning.tuned import Profile, TunedSettings
from llmrun.protocol.codec import as_dict
from llmrun.protocol.sizes import readable_size
from llmrun.statistics import Verdict
from llmrun.ui.terminal.activity import StatusLine
from llmrun.ui.terminal.format import rate, seconds
from llmrun.ui.terminal.output import Output
from llmrun.ui.terminal.tables import Column, show_table

_BUSY = "not tried while other programs compute, because that changes the best settings"


class TuneView:
    """The view of a search on stderr: finished trials as lines, and on a terminal the current step."""

    def __init__(self, output: Output, budget: float) -> None:
        self._output = output
        self._budget = budget
        self._skipped: dict[str, list[str]] = {"no time": [], "busy": []}
        self._status = StatusLine(output)

    def __enter__(self) -> TuneView:
        self._output.note(f"trying settings for {self._budget:g} seconds; press Ctrl-C to stop without changes")
        return self

    def show(self, step: Step) -> None:
        """Show the next step."""
        if not isinstance(step, Trial):
            self._status.show(f"{step.seconds:3.0f} of {self._budget:g} s: {step.what}")
        elif step.verdict in ("no time", "busy"):
            self._skipped[step.verdict].append(step.change)
        else:
            self._status.clear()
            self._output.note(line_of(step))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._status.clear()
        if error is not None:
            return
        for verdict, reason in (("no time", f"no time was left for (--seconds {2 * self._budget:g})"), ("busy", _BUSY)):
            changes = ", ".join(dict.fromkeys(self._skipped[verdict]))
            if changes:
                self._output.note(f"{reason}: {changes}")


def line_of(trial: Trial) -> str:
    """Return e.g. "repack off                      prefill  ×1.63 (1.58 to 1.69)  faster"."""
    goal = f"{trial.goal} at {trial.depth:,} tokens" if trial.depth else trial.goal
    return f"{trial.change:<34}{goal:<24}{times(trial.ratio) if trial.ratio else '':<24}{trial.verdict}".rstrip()


def times(ratio: Ratio | Verdict) -> str:
    """Return a ratio with its interval, e.g. "×1.63 (1.58 to 1.69)"."""
    mean = ratio.ratio if isinstance(ratio, Verdict) else ratio.mean
    return f"×{mean:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"


def show_outcome(output: Output, name: str, found: SearchResult, stored: TunedSettings | None) -> None:
    """Print default and tuned settings and the gain on stdout, and advice on stderr.

    Args:
        stored: settings that are stored now; None if none can be.
    """
    tests = [each.name for each in (found.prefill_test, found.decode_test)]
    columns = (
        Column("SETTINGS", style="bold"),
        Column("LOAD", right=True),
        Column(f"PREFILL {tests[0]}"),
        Column(f"DECODE {tests[1]}"),
    )
    rows = [_default_cells(found.tuned.default), *(_cells(each, found.tuned.default) for each in found.compared)]
    show_table(output, columns, rows)
    _show_gain(output, name, found)
    for each in found.unsure:
        changes = ", ".join(each.profile.settings.changes(found.tuned.default.settings))
        output.note(f"too uncertain to store: {changes}: prefill {times(each.prefill)}, decode {times(each.decode)}")
    for warning in found.warnings:
        output.note(f"meanwhile {warning.text}")
    if found.warnings:
        output.note("this hides differences and can change the best settings: tune again on a quieter machine")
    if stored is None:
        return
    if stored == found.tuned and stored.others:
        output.note(
            f"stored for models of this shape on this machine; undo with llmrun tune {shlex.quote(name)} --forget"
        )
    if stored != found.tuned:
        output.note(f"the stored settings stay: {stored.summary}")


def _show_gain(output: Output, name: str, found: SearchResult) -> None:
    tuned = found.tuned
    if not tuned.others:
        output.sentence(f"{name}: {_without_gain(found)}")
        return
    output.sentence(f"{name}: prefill ×{tuned.prefill_gain:.2f}, decode ×{tuned.decode_gain:.2f} of the defaults")
    profiles = [profile.settings.changes(tuned.default.settings, in_answers=True) for profile in tuned.others]
    changes = sorted({change for profile in profiles for change in profile})
    if changes:
        output.note(f"other kernels round differently: a --temp 0 answer can change ({', '.join(changes)})")
    if len(tuned.others) > 1 or any("slower" in (each.prefill.kind, each.decode.kind) for each in found.compared):
        output.note("the expected lengths of prompt and answer decide between them")


def _without_gain(found: SearchResult) -> str:
    """Return what a search without a gain has shown: the defaults are best only if every comparison was clear."""
    measured = [trial.verdict for trial in found.tried if trial.verdict not in ("no time", "busy", "failed")]
    if not measured or set(measured) == {"unclear"}:
        return "nothing could be told, so the defaults stay: every difference was smaller than the noise"
    if found.unsure or "unclear" in measured or len(measured) < len(found.tried):
        return "no setting was measurably faster, so the defaults stay; some could not be told"
    return "the defaults are best here"


def _default_cells(profile: Profile) -> list[str]:
    rates = (rate(profile.prefill_rate, whole=True), rate(profile.decode_rate))
    return ["default", seconds(profile.load_seconds), *rates]


def _cells(compared: Improvement, default: Profile) -> list[str]:
    prefill, decode = compared.prefill, compared.decode
    return [
        ", ".join(compared.profile.settings.changes(default.settings)),
        seconds(compared.profile.load_seconds),
        f"{rate(default.prefill_rate * prefill.ratio, whole=True)} {times(prefill)}",
        f"{rate(default.decode_rate * decode.ratio)} {times(decode)}",
    ]


def show_fast_copy(output: Output, name: str, header: Header, copy: FastCopy) -> None:
    """Print the command that makes the copy, its price, and how to measure its loss."""
    file = f"{model_stem(header.path)}-{copy.type}.gguf"
    output.note(
        f"{header.quant} has no fast kernel for prompts on this processor. By its measured kernels, {copy.type} reads "
        f"them ×{copy.prefill:.1f} as fast and decodes at ×{copy.decode:.2f} of the speed, with "
        f"{readable_size(copy.n_bytes)} of weights instead of {readable_size(header.weight_bytes)}. To make that file "
        f"and measure what it loses: llmrun quantize {shlex.quote(name)} --type {copy.type}; "
        f"llmrun evaluate {shlex.quote(file)} --reference {shlex.quote(name)}"
    )


def as_json(name: str, found: SearchResult, copy: FastCopy | None = None) -> dict[str, Any]:
    """Return the whole outcome as JSON data."""
    return {
        "model": name,
        "seconds": found.seconds,
        "prefill_test": found.prefill_test.name,
        "decode_test": found.decode_test.name,
        "prefill_gain": found.tuned.prefill_gain,
        "decode_gain": found.tuned.decode_gain,
        "default": found.tuned.default.to_json(),
        "tuned": [each.to_json() for each in found.compared],
        "unsure": [each.to_json() for each in found.unsure],
        "tried": [as_dict(each) for each in found.tried],
        "fast_copy": copy._asdict() if copy is not None else None,
        "warnings": [as_dict(warning) for warning in found.warnings],
    }
