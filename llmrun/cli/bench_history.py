"""What becomes of bench results: kept, listed, written in a format, compared, removed (`llmrun bench history`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.config import load_settings
from llmrun.errors import LlmrunError, UsageError
from llmrun.ui.terminal.output import Output

if TYPE_CHECKING:
    from llmrun.bench.history import History
    from llmrun.bench.results import Result


def compare(output: Output, sides: tuple[str, str], kind: str) -> None:
    """Set the second side against the first.

    Raises:
        UsageError: one of them is nothing, or they have no test in common.
    """
    from llmrun.bench.compare import compare_results, resolve
    from llmrun.ui.views.bench_history import show_comparison

    if kind not in {"table", "json"}:
        raise UsageError(f"a comparison can't be had as {kind}", hint="-o table or -o json")
    with _history(output) as history:
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
    from llmrun.ui.views.bench_history import show_entries, show_result

    if len(which) > 1:
        raise UsageError("history takes one result at most", hint="llmrun bench history 3 -o html > page.html")
    with _history(output) as history:
        if which:
            result = history.result(history.find(which[0]))
        elif kind in {"table", "json"}:
            entries = history.all()
        else:
            raise UsageError(f"which result as {kind}?", hint=f"llmrun bench history last -o {kind}")
    if which and kind == "table":
        show_result(output, result)
    elif which:
        deliver(output, result, kind, file)
    elif kind == "json":
        output.result_json([asdict(entry) for entry in entries])
    elif entries:
        show_entries(output, entries)
    else:
        output.note("Nothing was measured yet. `llmrun bench smollm2` begins.")


def remove(output: Output, which: Sequence[str]) -> None:
    """Forget results.

    Args:
        which: their numbers, or "last".

    Raises:
        UsageError: there is no such result; those before it are gone.
    """
    if not which:
        raise UsageError("which result?", hint="llmrun bench rm 3; llmrun bench history lists them")
    with _history(output) as history:
        for each in which:
            output.note(f"Removed number {history.remove(each).number}.")


def deliver(output: Output, result: Result, kind: str, file: Path | None) -> None:
    """A result in a format, on stdout or in a file.

    Raises:
        LlmrunError: the file can't be written.
    """
    from llmrun.bench.formats import write

    if kind == "html":
        from llmrun.ui.views.bench_html import bench_page

        text = bench_page(result)
    else:
        text = write(result, kind)
    put(output, text, file)


def put(output: Output, text: str, file: Path | None) -> None:
    """A text, on stdout or in a file.

    Raises:
        LlmrunError: the file can't be written.
    """
    if file is None:
        output.text(text.removesuffix("\n"))
        return
    from llmrun.storage import write_whole

    write_whole(file, text)
    output.note(f"The result is in {file}.")


def save(output: Output, result: Result) -> None:
    """Keep a result in the history, where that can be written."""
    try:
        with _history(output) as history:
            entry = history.add(result)
        output.note(f"Kept as number {entry.number}: llmrun bench compare {entry.number} ...")
    except LlmrunError as error:  # the result itself is more important
        output.note(f"it is not in the history: {error}")


@contextmanager
def _history(output: Output) -> Iterator[History]:
    """The history; what has to be told about opening it is told."""
    from llmrun.bench.history import History

    with History(load_settings()) as history:
        if history.note:
            output.note(history.note)
        yield history
