"""Results of `llmrun bench`: formats and files, and the saved ones: listed, compared, removed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmrun.cli.completion import complete_words
from llmrun.cli.options import JsonOption, OutputFileYesOption, check_output_file
from llmrun.config import load_settings
from llmrun.errors import LlmrunError, UsageError
from llmrun.lab.bench.compare import compare_results, resolve
from llmrun.lab.bench.external import check_name
from llmrun.lab.bench.formats import write
from llmrun.lab.bench.history import History
from llmrun.lab.views.bench import bench_page, show_entries, show_result
from llmrun.lab.views.bench import show_comparison as show_view
from llmrun.storage import write_whole
from llmrun.ui.terminal.output import Output
from llmrun.ui.terminal.sanitize import clean

if TYPE_CHECKING:
    from llmrun.lab.bench.results import Result


FORMATS = ("table", "md", "csv", "json", "jsonl", "html")
_RESULTS = "Results"

FormatOption = Annotated[
    str,
    typer.Option(
        "-o",
        "--output",
        metavar="FORMAT|FILE",
        help=f"Format ({', '.join(FORMATS)}), or a file with one of these suffixes.",
        rich_help_panel=_RESULTS,
        autocompletion=complete_words(*FORMATS),
    ),
]


def complete_result(incomplete: str) -> list[tuple[str, str]]:
    """Complete numbers of the bench history, with a description each."""
    try:
        with History(load_settings()) as history:
            offers = {str(entry.number): f"{', '.join(entry.models)}: {entry.tests}" for entry in history.all()}
    except LlmrunError:
        return []
    return [(number, clean(text)) for number, text in offers.items() if number.startswith(incomplete)]


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Options of the result: its format, its file and the history."""

    kind: str  # one of FORMATS: on stdout, or of the file
    file: Path | None  # instead of stdout
    copy: Path | None  # a file in addition to stdout; its suffix is its format
    save: bool  # in the history
    machine: str
    compare: tuple[str, str] | None
    versus: str  # another program to measure

    def check_files(self, output: Output, *, yes: bool) -> None:
        """Raise as check_output_file() unless the files may be written."""
        for file in filter(None, (self.file, self.copy)):
            check_output_file(output, file, yes=yes)


def output_options(
    form: FormatOption = "table",
    save: Annotated[
        bool, typer.Option("--save/--no-save", help="Save the result in the history.", rich_help_panel=_RESULTS)
    ] = True,
    machine: Annotated[
        str,
        typer.Option("--machine", metavar="NAME", help="Name of this machine in the result.", rich_help_panel=_RESULTS),
    ] = "",
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(
            "--compare",
            metavar="A B",
            help="Compare two results: files, history numbers, machines, versions or models.",
            rich_help_panel=_RESULTS,
        ),
    ] = None,
    versus: Annotated[
        str,
        typer.Option(
            "--vs",
            metavar="PROGRAM",
            help="Measure llama-bench too, alternately.",
            rich_help_panel=_RESULTS,
            autocompletion=complete_words("llama-bench"),
        ),
    ] = "",
    json: JsonOption = False,
) -> OutputOptions:
    """Collect the options of the result.

    Raises:
        UsageError: there is no such format or program.
    """
    if versus:
        check_name(versus)
    kind, file = _target(form)
    if json and file is None and kind not in ("table", "json"):
        raise UsageError(f"--json and -o {form} can't be used together", hint="give one of them")
    if json:
        return OutputOptions("json", None, file, save, machine, compare, versus)
    return OutputOptions(kind, file, None, save, machine, compare, versus)


def _target(form: str) -> tuple[str, Path | None]:
    """Return the format, and the file if -o names one."""
    if form in FORMATS:
        return form, None
    file = Path(form)
    if kind_of_file(file) not in FORMATS[1:]:
        raise UsageError(
            f"invalid -o {form}", why=f"must be one of {', '.join(FORMATS)}, or a file that ends so", hint="-o md"
        )
    return kind_of_file(file), file


def kind_of_file(file: Path) -> str:
    """Return the format that a file's suffix names."""
    return file.suffix.removeprefix(".").lower()


def history(
    results: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NUMBER|last", help="Show this result. Default: list all.", autocompletion=complete_result
        ),
    ] = None,
    form: FormatOption = "table",
    json: JsonOption = False,
    yes: OutputFileYesOption = False,
) -> None:
    """List saved results, or show one."""
    _run("history", results or (), form, json=json, yes=yes)


def compare(
    sides: Annotated[
        list[str],
        typer.Argument(
            metavar="A B",
            help="Two results: files, history numbers, machines, versions or models.",
            autocompletion=complete_result,
        ),
    ],
    form: FormatOption = "table",
    json: JsonOption = False,
) -> None:
    """Compare two results: different, or noise."""
    _run("compare", sides, form, json=json)


def remove(
    results: Annotated[
        list[str],
        typer.Argument(metavar="NUMBER...", help="Numbers from the history.", autocompletion=complete_result),
    ],
) -> None:
    """Remove results from the history."""
    _run("rm", results)


def _run(action: str, words: Sequence[str], form: str = "table", *, json: bool = False, yes: bool = False) -> None:
    after = output_options(form, json=json)
    output = Output(json=after.kind in {"json", "jsonl"})
    after.check_files(output, yes=yes)
    look_back(output, [action, *words], after)


def look_back(output: Output, words: Sequence[str], after: OutputOptions) -> None:
    """Show, compare or remove saved results.

    Raises:
        UsageError: there is no such result, or the number of them is wrong.
    """
    if words[0] == "rm":
        remove_results(output, words[1:])
    elif words[0] == "history":
        show(output, words[1:], after.kind, after.file)
        if after.copy is not None:
            show(output, words[1:], kind_of_file(after.copy), after.copy)
    else:
        sides = after.compare or tuple(words[1:])
        if len(sides) != 2:
            raise UsageError("compare takes two results", hint="llmrun bench compare 1 2")
        show_comparison(output, (sides[0], sides[1]), after.kind)


def show_comparison(output: Output, sides: tuple[str, str], kind: str) -> None:
    """Compare the second result with the first.

    Raises:
        UsageError: a result does not exist, or they have no test in common.
    """
    if kind not in {"table", "json"}:
        raise UsageError(f"a comparison can't be written as {kind}", hint="-o table or -o json")
    with _history(output) as history:
        comparison = compare_results(*(resolve(side, history) for side in sides))
    if kind == "json":
        output.result_json(comparison.to_json())
    else:
        show_view(output, comparison)


def show(output: Output, which: Sequence[str], kind: str, file: Path | None) -> None:
    """List saved results, or show one in a format.

    Args:
        which: the number of a result, or "last"; empty lists all.

    Raises:
        UsageError: there is no such result.
    """
    if len(which) > 1:
        raise UsageError("history takes one result at most", hint="llmrun bench history 3 -o html > page.html")
    with _history(output) as history:
        if which:
            result = history.result(history.find(which[0]))
        elif kind in {"table", "json"}:
            entries = history.all()
        else:
            raise UsageError(f"-o {kind} is for one result", hint=f"llmrun bench history last -o {kind}")
    if which and kind == "table":
        show_result(output, result)
    elif which:
        deliver(output, result, kind, file)
    elif kind == "json":
        output.result_json([asdict(entry) for entry in entries])
    elif entries:
        show_entries(output, entries)
    else:
        output.note("No results yet. Start with `llmrun bench smollm2`.")


def remove_results(output: Output, which: Sequence[str]) -> None:
    """Remove results.

    Args:
        which: numbers, or "last".

    Raises:
        UsageError: there is no such result; those before it are removed.
    """
    if not which:
        raise UsageError("rm needs the number of a result", hint="llmrun bench rm 3; llmrun bench history lists them")
    with _history(output) as history:
        for each in which:
            output.note(f"Removed number {history.remove(each).number}.")


def deliver(output: Output, result: Result, kind: str, file: Path | None) -> None:
    """Write a result in a format to stdout or a file. Raises as put()."""
    text = bench_page(result) if kind == "html" else write(result, kind)
    put(output, text, file)


def put(output: Output, text: str, file: Path | None) -> None:
    """Write a text to stdout or a file.

    Raises:
        LlmrunError: the file can't be written.
    """
    if file is None:
        output.text(text.removesuffix("\n"))
        return
    write_whole(file, text)
    output.note(f"The result is in {file}.")


def save(output: Output, result: Result) -> None:
    """Save a result in the history, if it can be written."""
    try:
        with _history(output) as history:
            entry = history.add(result)
        output.note(f"Saved as number {entry.number}: llmrun bench compare {entry.number} ...")
    except LlmrunError as error:  # the result itself is more important
        output.note(f"the result was not saved in the history: {error}")


@contextmanager
def _history(output: Output) -> Iterator[History]:
    """Open the history; print its note, if any."""
    with History(load_settings()) as history:
        if history.note:
            output.note(history.note)
        yield history
