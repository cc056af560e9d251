"""`llmrun bench history` and `llmrun bench --compare A B`: results of before, and whether two of them really differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from llmrun.config import load_settings
from llmrun.errors import UsageError
from llmrun.ui.terminal.output import Output


def compare(output: Output, sides: tuple[str, str], kind: str) -> None:
    """Set the second side against the first.

    Raises:
        UsageError: one of them is nothing, or they have no test in common.
    """
    from llmrun.bench.compare import compare_results, resolve
    from llmrun.bench.history import History
    from llmrun.ui.views.bench_history import show_comparison

    if kind not in {"table", "json"}:
        raise UsageError(f"a comparison can't be had as {kind}", hint="-o table or -o json")
    with History(load_settings()) as history:
        comparison = compare_results(*(resolve(side, history) for side in sides))
    if kind == "json":
        output.result_json(comparison.to_json())
    else:
        show_comparison(output, comparison)


def show(output: Output, which: Sequence[str], kind: str, file: Path | None) -> None:
    """What was measured before: a list, or one result in a format.

    Args:
        which: nothing, or a result's number or "last"; then what is shown is that.

    Raises:
        UsageError: there is no such result.
    """
    from llmrun.bench.history import History
    from llmrun.ui.views.bench_history import show_entries, show_result

    if len(which) > 1:
        raise UsageError("history takes one result at most", hint="llmrun bench history 3 -o html > page.html")
    with History(load_settings()) as history:
        if which:
            result = history.result(history.find(which[0]))
        elif kind in {"table", "json"}:
            entries = history.all()
        else:
            raise UsageError(f"which result as {kind}?", hint=f"llmrun bench history last -o {kind}")
    if which and kind == "table":
        show_result(output, result)
    elif which:
        from llmrun.cli.bench import deliver

        deliver(output, result, kind, file)
    elif kind == "json":
        output.result_json([asdict(entry) for entry in entries])
    elif entries:
        show_entries(output, entries)
    else:
        output.note("Nothing was measured yet. `llmrun bench smollm2` begins.")
