"""`llmrun bench --clients`: a load test of an engine here or of a remote server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmrun.cli.completion import BENCH_ACTIONS
from llmrun.cli.defaults import with_preset
from llmrun.cli.options import DraftOption
from llmrun.cli.remote import AtOption, KeyFileOption, remote_server, served_model
from llmrun.errors import UsageError, require_within
from llmrun.protocol.settings import SETTINGS

if TYPE_CHECKING:
    from llmrun.bench.load import LoadOutcome, LoadRequest
    from llmrun.cli.bench_history import OutputOptions
    from llmrun.cli.bench_options import BenchArguments, MeasurementOptions
    from llmrun.remote.server import Server
    from llmrun.ui.terminal.output import Output

_DEFAULT_TOKENS = 64
_MOST_FAR_CLIENTS = 1024
_PANEL = "Load test"
# Lists of other tests and other ways to load: the model is loaded as `llmrun serve` does.
_FOREIGN = {"prompts": "-p", "answers": "-n", "pairs": "-pg", "chats": "--chat", "depths": "-d"}


@dataclass(frozen=True, slots=True)
class LoadTestOptions:
    """Options as typed; None for an option that is missing."""

    clients: list[str] | None
    tokens: int | None
    draft: str | None
    at: str | None = None
    key_file: Path | None = None

    def check(self, *, with_drafts: bool) -> None:
        """Raise UsageError for an option that does not apply to the measurement."""
        if self.clients is None and (self.at is not None or self.key_file is not None):
            hint = "llmrun bench --at http://127.0.0.1:8080 --clients 1,2,4,8"
            raise UsageError("--at and --key-file need --clients", hint=hint)
        if self.draft is not None and not with_drafts:
            raise UsageError("--draft needs --speculate", hint="llmrun bench MODEL --draft SMALLER --speculate")
        if self.clients is not None and with_drafts:
            raise UsageError("--clients and --speculate can't be used together", hint="give one of them")
        if self.clients is None and not with_drafts and self.tokens is not None:
            hint = f"-n {self.tokens} measures one answer of {self.tokens} tokens"
            raise UsageError("--tokens needs --clients or --speculate", hint=hint)


def load_test_options(
    clients: Annotated[
        list[str] | None,
        typer.Option(
            "--clients",
            metavar="NUMBER",
            help="Measure one engine under this many clients at once instead, e.g. 1,2,4,8.",
            rich_help_panel=_PANEL,
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens",
            metavar="TOKENS",
            help=f"Length of each answer. Default: {_DEFAULT_TOKENS}; with --speculate up to 400.",
            rich_help_panel=_PANEL,
        ),
    ] = None,
    draft: DraftOption = None,
    at: AtOption = None,
    key_file: KeyFileOption = None,
) -> LoadTestOptions:
    """Collect the options of a load test."""
    return LoadTestOptions(clients, tokens, draft, at, key_file)


def measure(
    output: Output,
    models: Sequence[str],
    typed: LoadTestOptions,
    lists: BenchArguments,
    how: MeasurementOptions,
    after: OutputOptions,
    *,
    yes: bool,
) -> None:
    """Measure a model and show the result, also a partial one after Ctrl-C or a failure.

    Raises:
        UsageError: an option does not apply, or is out of bounds.
    """
    from llmrun.bench.load import PROMPT_TOKENS, LoadRequest
    from llmrun.bench.load import measure as measure_load
    from llmrun.cli.loading import find_model
    from llmrun.model.loading import prepare
    from llmrun.models.store.use import using
    from llmrun.planning.plan import LoadPreferences
    from llmrun.protocol.settings import PARALLEL_BOUNDS
    from llmrun.ui.views.bench import BenchView

    server = remote_server(typed.at, typed.key_file)
    if len(models) > 1 or (not models and server is None) or set(models) & set(BENCH_ACTIONS):
        raise UsageError("--clients measures one model", hint="llmrun bench smollm2 --clients 1,2,4,8")
    refuse_others("--clients", lists, how, after, has_page=True)
    if server is not None:
        _measure_remote(output, server, models[0] if models else None, typed, lists, how, after)
        return
    clients = _clients(typed, PARALLEL_BOUNDS)
    preferences = LoadPreferences(
        threads=number_of_threads("--clients", lists), parallel=max(clients), workers=lists.workers
    )
    preferences = with_preset(models[0], preferences)
    tokens = typed.tokens or _DEFAULT_TOKENS
    spec, path = find_model(output, models[0], yes=yes)
    name = path.stem if spec.path else models[0]
    with using(path):
        model = prepare(spec, path, preferences, warm_up=True, adapters=lists.adapters)
        if PROMPT_TOKENS + tokens > model.plan.n_ctx:
            raise UsageError(
                f"invalid --tokens {tokens}",
                why=f"with prompts of {PROMPT_TOKENS} tokens that exceeds the context window of {model.plan.n_ctx:,}",
            )
        for note in model.plan.notes:
            output.note(note)
        request = LoadRequest(name, model.load, clients, tokens, how.repetitions, how.warm_up)
        view = BenchView(output, [name], (), shows_rows=False)
        outcome = measure_load(request, view.progress)
        view.clear()
    _end(output, request, outcome, after)


def _measure_remote(
    output: Output,
    server: Server,
    wanted: str | None,
    typed: LoadTestOptions,
    lists: BenchArguments,
    how: MeasurementOptions,
    after: OutputOptions,
) -> None:
    """Measure the model of a remote server and show the result.

    Raises:
        UsageError: an option is about an engine here, or is out of bounds.
        LlmrunError: the request failed.
    """
    from llmrun.bench.load import LoadRequest
    from llmrun.bench.load import measure as measure_load
    from llmrun.protocol.messages import AnswerRequest
    from llmrun.protocol.params import Limits
    from llmrun.remote.client import RemoteClient
    from llmrun.remote.request_body import refused_fields
    from llmrun.ui.views.bench import BenchView

    for flag, came in (
        ("-t", "threads" in lists.settings), ("--lora", bool(lists.adapters)), ("--rpc", bool(lists.workers))
    ):  # fmt: skip
        if came:
            raise UsageError(f"--at and {flag} can't be used together", why="the server has loaded its model already")
    clients = _clients(typed, (1, _MOST_FAR_CLIENTS))
    model = served_model(output, server, wanted)
    goes_on = not refused_fields(AnswerRequest(limits=Limits(ignores_end=True)), model)
    request = LoadRequest(
        model.name, None, clients, typed.tokens or _DEFAULT_TOKENS, how.repetitions, how.warm_up, server.host, goes_on
    )
    view = BenchView(output, [model.name], (), shows_rows=False)
    client = RemoteClient(server, model, on_note=output.note)
    outcome = measure_load(request, view.progress, lambda: client)
    view.clear()
    if client.has_usage is False:
        output.note(f"{server.host} does not count tokens: pieces of text are counted instead")
    _end(output, request, outcome, after)


def _end(output: Output, request: LoadRequest, outcome: LoadOutcome, after: OutputOptions) -> None:
    if outcome.rows:
        _show(output, request, outcome, after)
    if outcome.error is not None:
        raise outcome.error


def _show(output: Output, request: LoadRequest, outcome: LoadOutcome, after: OutputOptions) -> None:
    """Print a table or JSON, and write a page if one is requested; a page on stdout replaces the table."""
    from llmrun.bench.machine import describe
    from llmrun.cli.bench_history import put
    from llmrun.ui.views.bench_load import show_outcome
    from llmrun.ui.views.bench_load_html import load_page

    file = after.file or after.copy
    if file is not None or after.kind != "html":
        show_outcome(output, request, outcome, after.machine)
    if file is not None or after.kind == "html":
        put(output, load_page(request, outcome, describe(name=after.machine)), file)


def _clients(typed: LoadTestOptions, bounds: tuple[int, int]) -> tuple[int, ...]:
    from llmrun.bench.cases import numbers
    from llmrun.protocol.params import MOST_TOKENS

    clients = numbers(typed.clients or (), "--clients", least=1)
    require_within("--clients", max(clients), bounds)
    require_within("--tokens", typed.tokens, (2, MOST_TOKENS))
    return tuple(dict.fromkeys(clients))


def number_of_threads(flag: str, lists: BenchArguments) -> int | None:
    """Return the number of threads, if given.

    Raises:
        UsageError: several are given.
    """
    from llmrun.bench.cases import numbers

    threads = numbers(lists.settings.get("threads", ()), "-t", least=1)
    if len(threads) > 1:
        raise UsageError(f"{flag} takes one number of threads", hint=f"-t {threads[0]}")
    return threads[0] if threads else None


def refuse_others(
    flag: str, lists: BenchArguments, how: MeasurementOptions, after: OutputOptions, *, has_page: bool = False
) -> None:
    """Raise for options of tests that a flag replaces.

    Args:
        has_page: the result can be an HTML page.

    Raises:
        UsageError: such an option is given.
    """
    from llmrun.bench.cases import MOST_REPETITIONS

    require_within("--repetitions", how.repetitions, (1, MOST_REPETITIONS))
    target = after.file or after.copy
    is_page = has_page and (after.kind if target is None else target.suffix.lower().removeprefix(".")) == "html"
    is_plain = target is None and after.kind in {"table", "json"}
    foreign = {flag: getattr(lists, name) is not None for name, flag in _FOREIGN.items()}
    foreign |= {SETTINGS[name].short: True for name in lists.settings if name != "threads"}
    foreign |= {
        "--interleave": how.interleave is True,
        "--no-interleave": how.interleave is False,
        "--delay": how.delay > 0,
        "--no-limits": not how.with_limits,
        "--compare": after.compare is not None,
        "--vs": bool(after.versus),
        f"-o {target or after.kind}": not is_plain and not is_page,
    }
    for other, came in foreign.items():
        if came:
            raise UsageError(f"{flag} and {other} can't be used together", hint="give one of them")
