"""`llmrun bench`: the speed of models and of engines under load, the gain of drafts, and comparisons."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmrun.cli.completion import BENCH_ACTIONS, complete_bench
from llmrun.cli.defaults import with_preset
from llmrun.cli.loading import fetch, find_draft, find_model
from llmrun.cli.options import (
    AtOption,
    DraftOption,
    KeyFileOption,
    LoraOption,
    RpcOption,
    YesOption,
    adapters_of,
    engine_option,
    kernels,
    option_table,
    remote_server,
    with_options,
    workers_of,
)
from llmrun.cli.remote import served_model
from llmrun.config import load_settings
from llmrun.errors import LlmrunError, OutOfMemoryError, UsageError, require_within
from llmrun.gguf.reader import read_header
from llmrun.gguf.rules import check
from llmrun.lab.bench import cases as bench_cases
from llmrun.lab.bench.cases import MOST_REPETITIONS, NamedModel, check_cases, check_models, fit_together, numbers
from llmrun.lab.bench.external import LLAMA_BENCH, ExternalComparison, find, our_side, result_of, versus
from llmrun.lab.bench.load import PROMPT_TOKENS, LoadRequest
from llmrun.lab.bench.load import measure as run_load
from llmrun.lab.bench.machine import describe
from llmrun.lab.bench.run import BenchedModel, BenchOutcome, BenchRequest, Loading, Progress, engines_of, run
from llmrun.lab.bench.speculation import measure as measure_gains
from llmrun.lab.cli.bench_history import OutputOptions, deliver, kind_of_file, look_back, output_options, put, save
from llmrun.lab.views.bench import BenchView, show_versus
from llmrun.lab.views.bench_load import load_page, show_gains, show_outcome
from llmrun.model.loading import A_CHAT, ExpectedUse, prepare
from llmrun.models.adapters import adapter_bytes
from llmrun.models.location import locate
from llmrun.models.store.use import using
from llmrun.planning.hardware import Hardware, this_machine
from llmrun.planning.preferences import LoadPreferences
from llmrun.planning.speculation import read_draft_source
from llmrun.protocol.messages import AnswerRequest
from llmrun.protocol.params import MOST_TOKENS, Limits
from llmrun.protocol.settings import DEFAULTS, DEVICE_SETTINGS, PARALLEL_BOUNDS, SETTINGS, shown
from llmrun.remote.request_body import refused_fields
from llmrun.runner.client import EngineClient
from llmrun.ui.terminal.output import Output

if TYPE_CHECKING:
    from llmrun.lab.bench.cases import BenchGrid, Case
    from llmrun.lab.bench.load import LoadOutcome
    from llmrun.model import Model
    from llmrun.models.registry import ModelSpec
    from llmrun.protocol.adapters import Adapter
    from llmrun.protocol.loading import Load
    from llmrun.remote.server import Server

Lists = list[str] | None


@dataclass(frozen=True, slots=True)
class BenchArguments:
    """Lists as typed; None for an option that is missing."""

    prompts: Lists
    answers: Lists
    pairs: Lists
    chats: Lists
    depths: Lists
    settings: dict[str, list[str]]  # field of EngineSettings -> its list; without missing options
    adapters: tuple[Adapter, ...]
    workers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MeasurementOptions:
    """Options of the measurement; see bench.run.BenchRequest. interleave is None if not specified."""

    repetitions: int
    warm_up: bool
    interleave: bool | None
    delay: float
    with_limits: bool


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


def measure_load(
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
    tokens = typed.tokens or _DEFAULT_TOKENS
    with _prepared(output, models[0], preferences, lists.adapters, yes=yes) as (name, model):
        if PROMPT_TOKENS + tokens > model.load.n_ctx:
            raise UsageError(
                f"invalid --tokens {tokens}",
                why=f"with prompts of {PROMPT_TOKENS} tokens that exceeds the context window of {model.load.n_ctx:,}",
            )
        request = LoadRequest(name, model.load, clients, tokens, how.repetitions, how.warm_up)
        view = BenchView(output, [name], (), shows_rows=False)
        outcome = run_load(request, view.progress)
        view.clear()
    _end_load(output, request, outcome, after)


@contextmanager
def _prepared(
    output: Output,
    name: str,
    preferences: LoadPreferences,
    adapters: tuple[Adapter, ...],
    *,
    yes: bool,
    draft: str | None = None,
    expected: ExpectedUse | None = None,
) -> Iterator[tuple[str, Model]]:
    """Yield a model, downloaded if necessary, protected from removal and ready to be loaded, after its name.

    Args:
        draft: name of the model that drafts.
        expected: purpose; see prepare().
    """
    preferences = replace(with_preset(name, preferences), adapts_threads=False)  # their number is part of the result
    spec, path = find_model(output, name, yes=yes)
    drafts = find_draft(output, draft, yes=yes)
    with using(path), using(drafts.path) if drafts is not None else nullcontext():
        model = prepare(spec, path, preferences, warm_up=True, expected=expected, draft=drafts, adapters=adapters)
        for note in model.plan.notes:
            output.note(note)
        yield path.stem if spec.path else name, model


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
    from llmrun.remote.client import RemoteClient  # slow, and most tests are of this machine

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
    outcome = run_load(request, view.progress, lambda: client)
    view.clear()
    if client.has_usage is False:
        output.note(f"{server.host} does not count tokens: pieces of text are counted instead")
    _end_load(output, request, outcome, after)


def _end_load(output: Output, request: LoadRequest, outcome: LoadOutcome, after: OutputOptions) -> None:
    if outcome.rows:
        _show_load(output, request, outcome, after)
    if outcome.error is not None:
        raise outcome.error


def _show_load(output: Output, request: LoadRequest, outcome: LoadOutcome, after: OutputOptions) -> None:
    """Print a table or JSON, and write a page if one is requested; a page on stdout replaces the table."""
    file = after.file or after.copy
    if file is not None or after.kind != "html":
        show_outcome(output, request, outcome, after.machine)
    if file is not None or after.kind == "html":
        put(output, load_page(request, outcome, describe(name=after.machine)), file)


def _clients(typed: LoadTestOptions, bounds: tuple[int, int]) -> tuple[int, ...]:
    clients = numbers(typed.clients or (), "--clients", least=1)
    require_within("--clients", max(clients), bounds)
    require_within("--tokens", typed.tokens, (2, MOST_TOKENS))
    return tuple(dict.fromkeys(clients))


def number_of_threads(flag: str, lists: BenchArguments) -> int | None:
    """Return the number of threads, if given.

    Raises:
        UsageError: several are given.
    """
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


_TOKENS_WITH_DRAFTS = 400
_FLAG = "--speculate"


def measure_speculation(
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
    if len(models) != 1 or models[0] in BENCH_ACTIONS:
        raise UsageError(f"{_FLAG} measures one model", hint=f"llmrun bench smollm2 {_FLAG}")
    refuse_others(_FLAG, lists, how, after)
    require_within("--tokens", typed.tokens, (2, MOST_TOKENS))
    draft, heads = read_draft_source(typed.draft)
    preferences = LoadPreferences(threads=number_of_threads(_FLAG, lists), workers=lists.workers, draft_heads=heads)
    opened = _prepared(output, models[0], preferences, lists.adapters, yes=yes, draft=draft, expected=A_CHAT)
    with opened as (name, model):
        view = BenchView(output, [name], (), shows_rows=False)
        outcome = measure_gains(
            model,
            name,
            tokens=typed.tokens or _TOKENS_WITH_DRAFTS,
            repetitions=how.repetitions,
            warm_up=how.warm_up,
            on_progress=view.progress,
        )
        view.clear()
    if outcome.rows:
        show_gains(output, name, model.load, outcome, after.machine)
    if outcome.error is not None:
        raise outcome.error


_TESTS, _LOADING = "Tests", "Loading"
_DEFAULTS = {"threads": SETTINGS["threads"].unset, "n_batch": "2048"}  # other than the engine's


def _tests(short: str, long: str, metavar: str, text: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(short, long, metavar=metavar, help=text, rich_help_panel=_TESTS)
    return option


def _loading_option(name: str) -> Any:
    """Return the annotated type of the option of an engine setting, with llmrun bench's default."""
    default = _DEFAULTS.get(name, shown(getattr(DEFAULTS, name)))
    return Annotated[Lists, engine_option(name, default, panel=_LOADING)]


_SETTINGS = option_table({name: _loading_option(name) for name, setting in SETTINGS.items() if setting.option}, dict)


@with_options(settings=_SETTINGS, kernels=kernels)
def bench_arguments(
    prompts: Annotated[Lists, _tests("-p", "--n-prompt", "TOKENS", "Prompt lengths. Default: 512.")] = None,
    answers: Annotated[Lists, _tests("-n", "--n-gen", "TOKENS", "Answer lengths. Default: 128.")] = None,
    pairs: Annotated[Lists, _tests("-pg", "--prompt-gen", "P,N", "Prompt and answer in one test.")] = None,
    chats: Annotated[
        Lists,
        _tests("--chat", "--chats", "P,N", "As -pg, with sampling and text. Default: 128,64 without -p, -n, -pg."),
    ] = None,
    depths: Annotated[Lists, _tests("-d", "--n-depth", "TOKENS", "In the context before. Default: 0.")] = None,
    lora: LoraOption = None,
    rpc: RpcOption = None,
    *,
    kernels: str | None,  # engines have it from the environment
    settings: dict[str, Lists],
) -> BenchArguments:
    """The options that take lists. Each may be repeated, and takes "128,512", "128-1024+128" and "128-1024*2"."""
    divides = (name for name in ("gpu_layers", *DEVICE_SETTINGS) if settings[name] is not None)
    if rpc is not None and (name := next(divides, "")):
        what = f"--rpc and {SETTINGS[name].short} can't be used together"
        raise UsageError(what, why="layers are divided by the memory of each machine")
    given = {name: texts for name, texts in settings.items() if texts is not None}
    return BenchArguments(prompts, answers, pairs, chats, depths, given, adapters_of(lora), workers_of(rpc))


def measurement_options(
    repetitions: Annotated[
        int, typer.Option("-r", "--repetitions", metavar="NUMBER", help="Repetitions of each test.")
    ] = 5,
    warm_up: Annotated[
        bool, typer.Option("--warmup/--no-warmup", help="Run each test once before measuring it.")
    ] = True,
    interleave: Annotated[
        bool | None,
        typer.Option(
            "--interleave/--no-interleave",
            help="Measure the models alternately, so that drift affects all alike. Default: if they fit into memory "
            "together.",
        ),
    ] = None,
    delay: Annotated[
        float, typer.Option("--delay", metavar="SECONDS", min=0, max=3600, help="Pause before each test, to cool down.")
    ] = 0,
    limits: Annotated[bool, typer.Option("--limits/--no-limits", help="Measure the machine's limits too.")] = True,
) -> MeasurementOptions:
    """Collect the options of the measurement."""
    return MeasurementOptions(repetitions, warm_up, interleave, delay, limits)


@with_options(lists=bench_arguments, load=load_test_options, how=measurement_options, after=output_options)
def bench(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL...",
            help="Names, owner/repo[:quant] or paths. For earlier results: history [NUMBER], compare A B, or "
            "rm NUMBER...",
            autocompletion=complete_bench,
        ),
    ] = None,
    *,
    lists: BenchArguments,
    load: LoadTestOptions,
    how: MeasurementOptions,
    after: OutputOptions,
    speculate: Annotated[
        bool,
        typer.Option(
            "--speculate",
            help="Measure the gain of speculative decoding instead; see llmrun help speculation.",
            rich_help_panel=_TESTS,
        ),
    ] = False,
    yes: YesOption = False,
) -> None:
    """Measure the speed of models, with confidence intervals.

    Tests are named and done as in llama-bench: pp512 is the prefill of 512 tokens, tg128 decodes 128 random tokens.
    chat128+64 is a real answer as `llmrun run` gives it: with sampling, text and streaming.
    """
    output = Output(json=after.kind in {"json", "jsonl"})
    if models and models[0] == "run":
        models = models[1:]
    load.check(with_drafts=speculate)
    after.check_files(output, yes=yes)
    if speculate:
        measure_speculation(output, models or (), load, lists, how, after, yes=yes)
        return
    if load.clients is not None:
        measure_load(output, models or (), load, lists, how, after, yes=yes)
        return
    if after.compare is not None or (models and models[0] in BENCH_ACTIONS):
        look_back(output, [*(models or []), *(after.compare or ())], after)
        return
    if not models:
        raise UsageError("bench needs a model", hint="llmrun bench smollm2")
    hardware, cases = _cases(output, lists, how, with_chat=not after.versus)
    with _opened(output, models, lists, yes=yes) as found:
        request = _request(output, found, cases, hardware, how, after.machine)
        result, error = _measure(output, request, hardware, after)
    if result.rows and after.save:
        save(output, result)
    if result.rows and after.kind != "table":
        deliver(output, result, after.kind, after.file)
    if result.rows and after.copy is not None:
        deliver(output, result, kind_of_file(after.copy), after.copy)
    if error is not None:
        raise error


@contextmanager
def _opened(
    output: Output, names: Sequence[str], lists: BenchArguments, *, yes: bool
) -> Iterator[tuple[BenchedModel, ...]]:
    """Yield the models, downloaded if necessary and protected from removal.

    Chat tests load them as `llmrun chat` does, unless an option of the loading is given.
    """
    settings = load_settings()
    located = [locate(name, settings) for name in dict.fromkeys(names)]
    with ExitStack() as stack:
        models = []
        for name, each in zip(dict.fromkeys(names), located, strict=True):
            path = each.path or fetch(output, each.spec, settings, yes=yes)
            header = read_header(path)
            check(header)
            adapter_bytes(lists.adapters, header)  # raises for one that does not fit
            stack.enter_context(using(path))
            label = "+".join((Path(name).stem if each.spec.path else name, *(one.name for one in lists.adapters)))
            usual = None if lists.settings else _usual(name, each.spec, path, lists)
            spread = _spread(output, each.spec, path, lists.workers) if lists.workers else None
            models.append(BenchedModel(label, path.absolute(), header, usual, lists.adapters, spread))
        yield tuple(models)


def _spread(output: Output, spec: ModelSpec, path: Path, workers: tuple[str, ...]) -> Load:
    """Return the division of the layers between the workers, and note it."""
    model = prepare(spec, path, LoadPreferences(workers=workers))
    for note in model.plan.notes:
        output.note(note)
    return model.load


def _usual(name: str, spec: ModelSpec, path: Path, lists: BenchArguments) -> Loading | None:
    """Return the parameters with which `llmrun chat` loads a model, with tuned ones and those of its preset.

    None if it does not fit.
    """
    preferences = with_preset(name, LoadPreferences(workers=lists.workers, adapts_threads=False))
    try:
        model = prepare(spec, path, preferences, expected=A_CHAT, adapters=lists.adapters)
    except OutOfMemoryError:
        return None
    load = replace(model.load, n_ctx=0)  # each test has its own
    return Loading(load, model.tuned.environment if model.tuned else {})


def _cases(
    output: Output, lists: BenchArguments, how: MeasurementOptions, *, with_chat: bool
) -> tuple[Hardware, tuple[Case, ...]]:
    """Return the machine and the cases to measure. Raise for cases that no model can run."""
    hardware = this_machine(lists.workers)
    cases = grid_of(lists, hardware.usable_cores, with_chat=with_chat).cases()
    for note in check_cases(cases, hardware, how.repetitions):
        output.note(note)
    return hardware, cases


def _request(
    output: Output,
    models: tuple[BenchedModel, ...],
    cases: tuple[Case, ...],
    hardware: Hardware,
    how: MeasurementOptions,
    name: str,
) -> BenchRequest:
    """Return the measurements to run. Raise for cases that these models cannot run."""
    for note in check_models(cases, [NamedModel(model.name, model.header) for model in models], hardware):
        output.note(note)
    several = len(set(engines_of([model.loading(case, {}) for model in models for case in cases]))) > 1
    together = several and fit_together(cases, [model.header for model in models], hardware)
    if how.interleave and several and not together:
        output.note("the models don't fit into memory together, so they are measured one after the other")
    return BenchRequest(
        models=models,
        cases=cases,
        repetitions=how.repetitions,
        warm_up=how.warm_up,
        interleave=together and how.interleave is not False and not hardware.workers,  # who serve one engine at a time
        delay=how.delay,
        with_limits=how.with_limits,
        name=name,
    )


def grid_of(lists: BenchArguments, threads: int, *, with_chat: bool = True) -> BenchGrid:
    """Return the lists as numbers and words.

    Args:
        threads: the default.
        with_chat: add the chat test if no test is given.

    Raises:
        UsageError: one is invalid.
    """

    def numbers(texts: Lists, option: str, default: tuple[int, ...]) -> tuple[int, ...]:
        return default if texts is None else bench_cases.numbers(texts, option)

    silent = with_chat and lists.prompts is None and lists.answers is None and lists.pairs is None
    chats = [",".join(map(str, bench_cases.DEFAULT_CHAT))] if silent and lists.chats is None else lists.chats or []
    return bench_cases.BenchGrid(
        settings={
            "threads": (threads,),
            **{name: bench_cases.setting_values(name, texts) for name, texts in lists.settings.items()},
        },
        prompts=numbers(lists.prompts, "-p", (bench_cases.DEFAULT_PROMPT,)),
        answers=numbers(lists.answers, "-n", (bench_cases.DEFAULT_ANSWER,)),
        pairs=bench_cases.pairs(lists.pairs or (), "-pg"),
        chats=bench_cases.pairs(chats, "--chat"),
        depths=numbers(lists.depths, "-d", (0,)),
    )


def _measure(output: Output, request: BenchRequest, hardware: Hardware, after: OutputOptions) -> BenchOutcome:
    """Run the measurements and show their progress. After Ctrl-C, return the partial result with the error."""
    if after.versus:
        return measure_versus(output, request, hardware, after.versus, shows_table=after.kind == "table")
    names = [model.name for model in request.models]
    view = BenchView(output, names, request.cases, shows_rows=after.kind == "table")
    outcome = run(request, hardware, view.progress, view.row)
    view.end(outcome.result)
    return outcome


def measure_versus(
    output: Output, request: BenchRequest, hardware: Hardware, program: str, *, shows_table: bool
) -> BenchOutcome:
    """Measure every case of every model on both sides. Ctrl-C or a failure returns the partial result.

    Raises:
        UsageError: the program does not exist, or would ignore the adapters of the models.
    """
    if any(model.adapters for model in request.models):
        raise UsageError("--lora and --vs can't be used together", hint="give one of them")
    if hardware.workers:
        raise UsageError("--rpc and --vs can't be used together", hint="give one of them")
    llama_bench = find(program)
    view = BenchView(output, [model.name for model in request.models], request.cases, shows_rows=False)
    found: list[ExternalComparison] = []
    error: LlmrunError | None = None
    try:
        with our_side(EngineClient, hardware) as ours:
            pairs = [(model, case) for model in request.models for case in request.cases]
            for number, (model, case) in enumerate(pairs):

                def tell(done: int, total: int, at: int = number) -> None:
                    model, case = pairs[at]
                    share = at * total + done, len(pairs) * total
                    turn = min(done // 2 + 1, total // 2)
                    view.progress(Progress(model.name, case.test.name, *share, LLAMA_BENCH, turn, total // 2))

                one = versus(
                    llama_bench,
                    lambda model=model, case=case: ours(model, case),  # type: ignore[misc]
                    model,
                    case,
                    repetitions=request.repetitions,
                    on_update=tell,
                )
                found.append(one)
    except LlmrunError as stopped:
        error = stopped
    view.clear()
    if found and shows_table:
        show_versus(output, found, LLAMA_BENCH)
    return BenchOutcome(result_of(found), error)
