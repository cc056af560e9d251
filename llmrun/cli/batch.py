"""`llmrun batch`: answers to a file of prompts, computed in parallel."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmrun.batch.answerers import LocalEngine, RemoteEngine
from llmrun.batch.plan import plan_batch
from llmrun.batch.results import ResultFile, output_files, write_table
from llmrun.batch.rows import RowTemplate, read_rows
from llmrun.batch.run import BatchProgress, Ledger
from llmrun.cli.loading import find_model
from llmrun.cli.options import (
    AnswerOptions,
    AtOption,
    JsonOption,
    KeyFileOption,
    LoadingOptions,
    ModelArgument,
    answer_options,
    loading,
    remote_server,
    some_of,
    with_options,
)
from llmrun.cli.remote import ANY_MODEL, served_model
from llmrun.cli.run import RawOption
from llmrun.cli.sampling import SAMPLING_OPTIONS
from llmrun.errors import RowsFailedError, UsageError, require_within
from llmrun.model.loading import prepare
from llmrun.models.location import find_projector
from llmrun.models.store.use import using
from llmrun.protocol.messages import REQUEST_FIELDS
from llmrun.protocol.params import resolve_sampling
from llmrun.protocol.settings import PARALLEL_BOUNDS
from llmrun.remote.request_body import require_told
from llmrun.storage import check_target
from llmrun.ui.terminal.activity import Activity
from llmrun.ui.terminal.output import Output
from llmrun.ui.views.batch import BatchView, show_plan

if TYPE_CHECKING:
    from llmrun.batch.plan import BatchPlan, RowAnswerer
    from llmrun.batch.results import OutputFiles
    from llmrun.batch.rows import Row
    from llmrun.remote.server import Server


_ANSWER = some_of(
    answer_options,
    "system",
    "max_tokens",
    "stop",
    "grammar",
    "json_schema",
    *(name for name, row in REQUEST_FIELDS.items() if row.flag and name not in ("reasoning_effort", "begins")),
)
"""The options of the request for rows without fields of their own."""

RowsArgument = Annotated[
    Path | None,
    typer.Argument(metavar="IN", help=".jsonl (OpenAI batch files too), .csv, .tsv, .parquet, or text lines."),
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        metavar="OUT",
        help="File for the answers: .jsonl, or a .csv, .tsv or .parquet table. Default: IN.answers.jsonl.",
    ),
]
RowPromptOption = Annotated[
    str | None,
    typer.Option(
        "--prompt", metavar="TEXT", help='Prompt for each row, e.g. "Classify: {text}".', rich_help_panel="Prompt"
    ),
]
ParallelOption = Annotated[
    int | None,
    typer.Option(
        "--parallel", "-np", metavar="ROWS", help="Rows answered at the same time. Default: as many as fit, up to 64."
    ),
]
RayOption = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="ADDRESS|local",
        help="Use all nodes of a Ray cluster: an address, auto, or local to start one here.",
        rich_help_panel="Engine",
    ),
]
RetryErrorsOption = Annotated[bool, typer.Option("--retry-errors", help="Try rows that failed again.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only count rows and tokens and predict the time.")]


@with_options(answer=_ANSWER, loading=loading, flags=SAMPLING_OPTIONS)
def batch(
    model: ModelArgument,
    rows: RowsArgument = None,
    out: OutOption = None,
    prompt: RowPromptOption = None,
    raw: RawOption = False,
    parallel: ParallelOption = None,
    ray: RayOption = None,
    retry_errors: RetryErrorsOption = False,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
    at: AtOption = None,
    key_file: KeyFileOption = None,
    *,
    answer: AnswerOptions,
    loading: LoadingOptions,
    flags: Mapping[str, Any],
) -> None:
    """Answer a file of prompts, many in parallel.

    A row is a text, an object with "prompt" or "messages", a table row with --prompt, or a line of an OpenAI batch
    file. Run the same command again to continue after an interruption. A failed row gets an error, and the exit status
    is 10. With --at, MODEL may be left out if the server has only one.
    """
    require_within("--parallel", parallel, PARALLEL_BOUNDS)
    if loading.draft is not None or loading.speculate:
        raise UsageError("a batch uses no drafts", why="many rows in parallel already use the hardware fully")
    output = Output(json=json)
    loading = _engine(at, key_file, ray, loading)
    model, rows = _model_and_rows(model, rows, loading)
    files = output_files(out or rows.with_name(f"{rows.stem}.answers.jsonl"), rows)
    found = _read(rows)
    if not dry_run and not files.lines.exists():
        check_target(files.lines)
    recipe = RowTemplate(prompt, answer.system, answer.request, flags, raw)
    with (
        Activity(output) as activity,
        ResultFile(files.lines, retry_errors=retry_errors) as results,
        _answering(output, activity, model, ray, loading, parallel, recipe) as answering,
    ):
        plan = plan_batch(answering, found, recipe, results.written)
        activity.pause()
        for note in plan.notes:
            output.note(note)
        if dry_run:
            show_plan(output, plan, answering.seconds(plan))
        else:
            _answer(output, answering, plan, results, files, rows, found)


def _engine(at: str | None, key_file: Path | None, ray: str | None, loading: LoadingOptions) -> LoadingOptions:
    """Return the options of loading the model, with the remote server if there is one.

    Raises:
        UsageError: the server can't be meant.
    """
    return replace(loading, server=None if ray is not None else remote_server(at, key_file))


def _model_and_rows(model: str, rows: Path | None, loading: LoadingOptions) -> tuple[str, Path]:
    """Return model and file. With a server, a single argument is the file."""
    if rows is not None:
        return model, rows
    if loading.server is None:
        raise UsageError("batch needs a model and a file of rows", hint="llmrun batch smollm2 rows.jsonl")
    return ANY_MODEL, Path(model)


@contextmanager
def _answering(
    output: Output,
    activity: Activity,
    name: str,
    address: str | None,
    loading: LoadingOptions,
    parallel: int | None,
    recipe: RowTemplate,
) -> Iterator[RowAnswerer]:
    """Yield the engine for the rows: a remote server, a Ray cluster, or an engine here."""
    if loading.server is not None:
        yield _far(output, loading.server, name, parallel, recipe, loading.origins)
        return
    if address is not None:
        try:
            from llmrun.batch.cluster import connected
        except ImportError:
            raise UsageError("--ray needs the package ray", hint="pip install 'llmrun[ray]'") from None
        from llmrun.batch.node import NodeJob

        activity.show("waiting for a node of the Ray cluster that has the model")
        job = NodeJob(name, loading.preferences, parallel, loading.adapters, loading.projector)
        with connected(address, job) as cluster:
            yield cluster
        return
    spec, path = find_model(output, name, yes=loading.yes)
    projector = find_projector(path, loading.projector, spec.modelfile.projector)
    prepared = partial(prepare, spec, path, warm_up=True, projector=projector, adapters=loading.adapters)
    with using(path):
        yield LocalEngine(prepared, loading.preferences, parallel)


def _far(
    output: Output, server: Server, name: str, parallel: int | None, recipe: RowTemplate, presets: Collection[str]
) -> RowAnswerer:
    """Return a remote engine. Raise for options that the server does not support; rows are checked one by one.

    Args:
        presets: fields that presets have set.
    """
    model = served_model(output, server, None if name == ANY_MODEL else name)
    sampling = resolve_sampling(("flag", recipe.sampling))[0]
    request = replace(recipe.asked, sampling=sampling)
    require_told(server, model, request, recipe.sampling, yielding=presets)
    return RemoteEngine(server, model, parallel, yielding=presets)


def _read(rows: Path) -> list[Row]:
    """Return all rows.

    Raises:
        UsageError: the file has no rows, or is stdin.
    """
    if str(rows) == "-":
        raise UsageError("batch does not read stdin", why="the same file continues a batch", hint="cat > rows.jsonl")
    found = list(read_rows(rows))
    if not found:
        raise UsageError(f"{str(rows)!r} has no rows")
    return found


def _answer(
    output: Output,
    answering: RowAnswerer,
    plan: BatchPlan,
    results: ResultFile,
    files: OutputFiles,
    source: Path,
    rows: list[Row],
) -> None:
    """Answer the remaining rows; write the table if there is one.

    Raises:
        RowsFailedError: rows failed, in this run or an earlier one.
    """
    total = len(rows)
    tally = BatchProgress(total, total - len(plan.todo) - len(plan.broken), results.n_failed, parallel=plan.parallel)
    if tally.before < total:
        results.require_writable()
    with BatchView(output, tally, files, plan.parallel) as view:
        ledger = Ledger(results, tally, view.progress, view.note)
        ledger.refuse(plan.broken)
        if plan.todo:
            answering.run(plan.todo, ledger)
        if files.table is not None and (tally.done or not files.table.exists()):
            write_table(files, source, rows)
    if results.n_failed:
        raise RowsFailedError(
            f"{results.n_failed:,} of {total:,} rows failed",
            why=f"each has its error in {files.shown}",
            hint="the same command with --retry-errors asks them again",
        )
