"""`llmrun quantize` and `llmrun report`: a model quantized to a smaller file, or to several that are compared."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmrun.cli.completion import complete_model, complete_type
from llmrun.cli.options import PREFERENCES, JsonOption, OutputFileYesOption, check_output_file, with_options
from llmrun.errors import UsageError, require_within
from llmrun.gguf.types import FILE_TYPES
from llmrun.lab.quantize.evaluate import read_text
from llmrun.lab.quantize.job import preview
from llmrun.lab.quantize.job import quantize as run
from llmrun.lab.quantize.report import (
    MAX_CHUNKS,
    MIN_CHUNKS,
    QUICK_ROUNDS,
    ROUNDS,
    LocalMeasurements,
    make_report,
    require_text,
)
from llmrun.lab.quantize.request import (
    AUTO,
    QuantizeOptions,
    SizeGoal,
    decide,
    find,
    importance_matrix,
    open_source,
    read_options,
    read_size,
    resolve_type,
)
from llmrun.lab.quantize.types import TensorTypes, file_type
from llmrun.lab.quantize.types import tensor_type as read_tensor_type
from llmrun.lab.views.quantize import show_done, show_preview, stages
from llmrun.lab.views.report import checked_target, report_progress, show, write
from llmrun.models.store.new_file import refuse_inputs
from llmrun.planning.preferences import CONTEXT_BOUNDS, LoadPreferences
from llmrun.runner import client
from llmrun.ui.terminal.output import Output

if TYPE_CHECKING:
    from llmrun.lab.quantize.evaluate import EvaluatedText
    from llmrun.lab.quantize.request import SourceFile

_MIX, _IMPORTANCE, _SEVERAL = "Mixed types", "Importance matrix", "Several types"
USUAL_TYPES = "Q8_0,Q5_K_M,Q4_K_M,IQ4_NL,Q4_0"
QUICK_TYPES = "Q8_0,Q4_K_M,Q4_0"


def tensors(
    tensor_type: Annotated[
        list[str] | None,
        typer.Option(metavar="REGEX=TYPE", help="Type for tensors whose name matches; may be repeated."),
    ] = None,
    output_type: Annotated[str, typer.Option(metavar="TYPE", help="Type of the output matrix.")] = "",
    embedding_type: Annotated[str, typer.Option(metavar="TYPE", help="Type of the token embedding.")] = "",
    pure: Annotated[bool, typer.Option("--pure", help="Use the same type for every matrix.")] = False,
    keep_output: Annotated[bool, typer.Option("--keep-output", help="Leave the output matrix as it is.")] = False,
) -> TensorTypes:
    """Options of single tensors.

    Raises:
        UsageError: one is invalid.
    """
    return TensorTypes(
        overrides=tuple(_override(text) for text in tensor_type or ()),
        output_type=read_tensor_type(output_type, "--output-type ") if output_type else "",
        embedding_type=read_tensor_type(embedding_type, "--embedding-type ") if embedding_type else "",
        pure=pure,
        keeps_output=keep_output,
    )


def _override(text: str) -> tuple[str, str]:
    pattern, equals, kind = text.rpartition("=")
    if not equals or not pattern:
        raise UsageError(f"invalid --tensor-type {text}", hint="--tensor-type 'ffn_down=Q6_K'")
    return pattern, read_tensor_type(kind, f"--tensor-type {pattern}=")


def goal(
    size: Annotated[
        str, typer.Option(metavar="SIZE", help="Maximum file size, e.g. 4GB or 900MB.", rich_help_panel=_MIX)
    ] = "",
    bpw: Annotated[
        float | None, typer.Option(metavar="BITS", help="Average bits per weight, e.g. 4.5.", rich_help_panel=_MIX)
    ] = None,
    fit: Annotated[
        bool, typer.Option("--fit", help="Use the largest size that fits on this machine.", rich_help_panel=_MIX)
    ] = False,
    ctx: Annotated[
        int | None,
        typer.Option("--ctx", "-c", metavar="TOKENS", help="Context window for --fit.", rich_help_panel=_MIX),
    ] = None,
) -> SizeGoal:
    """Collect the options of the file size.

    Raises:
        UsageError: an option is invalid, or two can't be used together.
    """
    given = [flag for flag, value in (("--size", size), ("--bpw", bpw is not None), ("--fit", fit)) if value]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} can't be used together", hint="give one of them")
    if ctx is not None and not fit:
        raise UsageError("--ctx has no effect here", why="it is for --fit", hint=f"--fit --ctx {ctx}")
    require_within("--bpw", bpw, (1, 32))
    require_within("--ctx", ctx, CONTEXT_BOUNDS)
    label = size.replace(" ", "") if size else f"{bpw:g}bpw" if bpw else "fit" if fit else ""
    return SizeGoal(read_size(size) if size else 0, bpw or 0.0, fit, ctx, label)


@dataclass(frozen=True, slots=True)
class ImportanceOptions:
    """The source of the importance matrix: "", "auto" or a file, and the calibration text."""

    source: str
    text: Path | None


def importance(
    imatrix: Annotated[
        str,
        typer.Option(
            metavar="auto|FILE", help="Importance matrix: compute it now, or read a file.", rich_help_panel=_IMPORTANCE
        ),
    ] = "",
    calibration: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Text for --imatrix auto. Default: text that the model writes itself.",
            rich_help_panel=_IMPORTANCE,
        ),
    ] = None,
) -> ImportanceOptions:
    """Collect the options of the importance matrix.

    Raises:
        UsageError: a file does not exist, or is not needed.
    """
    if calibration is not None and imatrix not in ("", "auto"):
        raise UsageError("--calibration has no effect here", why="--imatrix names a file that is finished")
    _require_file("--imatrix", None if imatrix in ("", "auto") else Path(imatrix), "or the word auto")
    _require_file("--calibration", calibration, "of text")
    return ImportanceOptions("auto" if calibration else imatrix, calibration)


def _require_file(flag: str, path: Path | None, kind: str) -> None:
    if path is not None and not path.is_file():
        raise UsageError(f"{flag}: there is no file {str(path)!r}", hint=f"{flag} takes a file {kind}")


@dataclass(frozen=True, slots=True)
class MultipleTypes:
    """Several types to make and measure."""

    types: tuple[str, ...]
    file: Path | None
    text: EvaluatedText | None
    preferences: LoadPreferences = LoadPreferences()
    is_quick: bool = False


def several(
    types: Annotated[
        str,
        typer.Option(
            metavar="TYPE,...",
            help="Make and compare these types: size, speed, quality. A folder as OUT keeps the files.",
            rich_help_panel=_SEVERAL,
        ),
    ] = "",
    report: Annotated[
        bool,
        typer.Option("--report", help=f"Compare several types. Default: {USUAL_TYPES}.", rich_help_panel=_SEVERAL),
    ] = False,
    report_to: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the report as .html, .md or .json.", rich_help_panel=_SEVERAL),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Text to measure quality on. Default: Python's language reference.",
            rich_help_panel=_SEVERAL,
        ),
    ] = None,
) -> MultipleTypes | None:
    """Collect the options of a report; None without one.

    Raises:
        UsageError: a type is unknown, the report file is invalid, or the text can't be read.
    """
    if not (types or report or report_to):
        if text is not None:
            raise UsageError("--text has no effect here", why="it is for --report")
        return None
    if report_to is not None:
        checked_target(report_to, "--report-to")
    evaluated = read_text(text) if text is not None else None
    return MultipleTypes(_read_types(types or USUAL_TYPES), report_to, evaluated)


def _read_types(text: str) -> tuple[str, ...]:
    return tuple(file_type(name) for name in text.split(",") if name.strip())


SourceArgument = Annotated[
    str,
    typer.Argument(metavar="SRC", help="GGUF file, model name, or Hugging Face folder.", autocompletion=complete_model),
]
OutArgument = Annotated[
    Path | None,
    typer.Argument(metavar="[OUT.gguf]", help="Output file. Default: NAME-TYPE.gguf in this folder."),
]
OutputFileOption = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="OUT", help="Output file, the same as OUT.")
]
TypeOption = Annotated[
    str,
    typer.Option(
        "--type",
        metavar="TYPE",
        help="Q4_K_M, Q6_K, ..., int8, or int4: the best 4-bit type for this machine. Default: int4.",
        autocompletion=complete_type,
    ),
]
ThreadsOption = Annotated[
    int | None, typer.Option("--threads", "-t", min=1, max=512, help="CPU threads. Default: all.")
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only print the size and types that would result.")]


@with_options(tensors=tensors, goal=goal, importance=importance, several=several)
def quantize(
    source: SourceArgument,
    tensors: TensorTypes,
    goal: SizeGoal,
    importance: ImportanceOptions,
    several: MultipleTypes | None,
    out: OutArgument = None,
    output_file: OutputFileOption = None,
    type_: TypeOption = "",
    threads: ThreadsOption = None,
    dry_run: DryRunOption = False,
    yes: OutputFileYesOption = False,
    json: JsonOption = False,
) -> None:
    """Quantize a model to a smaller file.

    The source is not changed; the new file is verified before it gets its name.
    """
    output = Output(json=json)
    if out is not None and output_file is not None:
        raise UsageError(f"-o {output_file} and {str(out)!r} are two output files", hint="name one of them")
    out = out or output_file
    options = QuantizeOptions(
        goal=goal, **tensors.tensor_types(), imatrix=importance.source, calibration=importance.text, threads=threads
    )
    options = read_options(type_, options)
    if dry_run and options.imatrix == AUTO:
        raise UsageError("--dry-run would wait for --imatrix auto", hint="name a file, or leave --imatrix out")
    if several is None:
        _quantize(output, source, out, options, may_replace=yes or dry_run, dry_run=dry_run)
    elif type_ or goal or dry_run:
        raise UsageError("a report needs --types instead of --type", hint="--types Q8_0,Q4_K_M --report")
    elif tensors.flags:
        raise UsageError(f"{tensors.flags[0]} has no effect here", why="a report compares types as they are")
    else:
        _report(output, find(source), out, options, several, may_replace=yes)


def _quantize(
    output: Output, source: str, out: Path | None, options: QuantizeOptions, *, may_replace: bool, dry_run: bool
) -> None:
    """Make one file, or predict the result."""
    engine = client.prestarted()
    found = find(source)
    target = _Target(output, found, out, may_replace=may_replace)
    if options.label:
        target(options.label)  # asks before anything takes long
    with stages(output, found.name) as progress, open_source(found, target.folder, progress, progress.say) as header:
        request = decide(options, header, target, progress.say, progress, engine, check_file=target.check)
        outlook = preview(request, engine)
        for note in outlook.notes:
            progress.say(f"note: {note}")
        if dry_run:
            show_preview(output, outlook, request.type, str(request.target))
            return
        done = run(request, progress, engine=engine, estimate=outlook)
    for note in done.notes[len(outlook.notes) :]:
        output.note(f"note: {note}")
    show_done(output, done)


def _report(
    output: Output,
    found: SourceFile,
    out: Path | None,
    options: QuantizeOptions,
    several: MultipleTypes,
    *,
    may_replace: bool,
) -> None:
    """Make and measure several types; keep the files if OUT is a folder."""
    if out is not None and out.suffix.lower() == ".gguf":
        raise UsageError(f"{str(out)!r} can't be the file of several types", hint="name a folder as OUT")
    check_file = partial(check_output_file, output, yes=may_replace)
    if several.file is not None:
        check_file(several.file)
    folder = out or Path()
    with stages(output, found.name) as progress, open_source(found, folder, progress, progress.say) as header:
        if several.text is not None:
            require_text(header.path, several.text)
        types = [resolve_type(kind, header, progress.say) for kind in several.types]
        path = folder / f"{found.name}.gguf"
        imatrix = importance_matrix(options, header, path, progress.say, progress, check_file)
        progress.pause()
        with report_progress(output) as on_update:
            measures = LocalMeasurements(
                header.path,
                name=found.name,
                text=several.text,
                imatrix=imatrix,
                preferences=replace(several.preferences, threads=options.threads),
                chunks=MIN_CHUNKS if several.is_quick else MAX_CHUNKS,
            )
            rounds = QUICK_ROUNDS if several.is_quick else ROUNDS
            card = make_report(measures, types, keep=out, on_update=on_update, rounds=rounds)
    if several.file is not None:
        write(card, several.file)
    show(output, card)


class _Target:
    """The output file: the given name, or one made of the model's name and a label. Asks once before replacing.

    Raises:
        UsageError: the given name is not that of a GGUF file.
    """

    def __init__(self, output: Output, found: SourceFile, out: Path | None, *, may_replace: bool) -> None:
        self._output = output
        self._found = found
        self._may_replace = may_replace
        self._is_named = out is not None and not out.is_dir()
        self._out = out or Path()
        if self._is_named:
            _check_name(self._out)
        self._settled: Path | None = None

    @property
    def folder(self) -> Path:
        return self._out.parent if self._is_named else self._out

    def __call__(self, label: str) -> Path:
        """Return the output file for a label.

        Raises:
            UsageError: the file is an input, or exists and there is no terminal to ask on.
            CancelledError: the user refused to replace it.
        """
        if self._settled is None:
            target = self._out if self._is_named else self._out / f"{self._found.name}-{label}.gguf"
            if not self._found.is_folder:
                refuse_inputs(target, [self._found.path])
            self.check(target)
            self._settled = target
        return self._settled

    def check(self, path: Path) -> None:
        check_output_file(self._output, path, yes=self._may_replace)


def _check_name(target: Path) -> None:
    if target.suffix.lower() != ".gguf":
        is_type = target.name.upper() in FILE_TYPES
        hint = f"--type {target}" if is_type else f"name it {target.name}.gguf"
        raise UsageError(f"{str(target)!r} does not end in .gguf", hint=hint)
    if target.exists() and not target.is_file():
        raise UsageError(f"{str(target)!r} is not a file", hint="name another OUT")


@with_options(importance=importance, preferences=PREFERENCES)
def report(
    source: SourceArgument,
    importance: ImportanceOptions,
    preferences: LoadPreferences,
    out: Annotated[
        Path | None,
        typer.Argument(metavar="[FOLDER]", help="Keep the files in this folder. Default: they are deleted afterwards."),
    ] = None,
    types: Annotated[str, typer.Option(metavar="TYPE,...", help=f"Types to compare. Default: {USUAL_TYPES}.")] = "",
    to: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the report as .html, .md or .json.")
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Text to measure quality on. Default: Python's language reference."),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help=f"Take fewer types ({QUICK_TYPES}), less text and two measurements of speed each."
        ),
    ] = False,
    yes: OutputFileYesOption = False,
) -> None:
    """Compare several quants of a model: size, speed, quality.

    Each quant is made and measured on this machine.
    """
    if to is not None:
        checked_target(to, "--output")
    several = MultipleTypes(
        _read_types(types or (QUICK_TYPES if quick else USUAL_TYPES)),
        to,
        read_text(text) if text is not None else None,
        preferences,
        quick,
    )
    options = QuantizeOptions(imatrix=importance.source, calibration=importance.text, threads=preferences.threads)
    _report(Output(), find(source), out, options, several, may_replace=yes)
