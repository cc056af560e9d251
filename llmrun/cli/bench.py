"""`llmrun bench`: measurements of speed, and comparisons of two results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmrun.cli.bench_history import OutputOptions, deliver, kind_of_file, look_back, output_options, save
from llmrun.cli.bench_load import LoadTestOptions, load_test_options
from llmrun.cli.bench_options import BenchArguments, Lists, MeasurementOptions
from llmrun.cli.completion import BENCH_ACTIONS, complete_bench
from llmrun.cli.defaults import with_preset
from llmrun.cli.options import LoraOption, OptionTable, YesOption, adapters_of, engine_option, with_options
from llmrun.cli.rpc import RpcOption, workers_of
from llmrun.config import load_settings
from llmrun.errors import OutOfMemoryError, UsageError
from llmrun.protocol.settings import DEFAULTS, DEVICE_SETTINGS, SETTINGS, shown
from llmrun.ui.terminal.output import Output

if TYPE_CHECKING:
    from llmrun.bench.cases import BenchGrid, Case
    from llmrun.bench.run import BenchedModel, BenchOutcome, BenchRequest, Loading
    from llmrun.gguf.header import Header
    from llmrun.models.registry import ModelSpec
    from llmrun.planning.hardware import Hardware
    from llmrun.protocol.adapters import Adapter
    from llmrun.protocol.loading import Load

_TESTS, _LOADING = "Tests", "Loading"
_DEFAULTS = {"threads": SETTINGS["threads"].unset, "n_batch": "2048"}  # other than the engine's


def _tests(short: str, long: str, metavar: str, text: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(short, long, metavar=metavar, help=text, rich_help_panel=_TESTS)
    return option


def _loading_option(name: str) -> Any:
    """Return the annotated type of the option of an engine setting, with llmrun bench's default."""
    default = _DEFAULTS.get(name, shown(getattr(DEFAULTS, name)))
    return Annotated[Lists, engine_option(name, default, panel=_LOADING)]


_SETTINGS = OptionTable({name: _loading_option(name) for name, setting in SETTINGS.items() if setting.option}, dict)


@with_options(settings=_SETTINGS)
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
    from llmrun.cli import bench_load, bench_speculation

    output = Output(json=after.kind in {"json", "jsonl"})
    if models and models[0] == "run":
        models = models[1:]
    load.check(with_drafts=speculate)
    after.check_files(output, yes=yes)
    if speculate:
        bench_speculation.measure(output, models or (), load, lists, how, after, yes=yes)
        return
    if load.clients is not None:
        bench_load.measure(output, models or (), load, lists, how, after, yes=yes)
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
    from llmrun.bench.run import BenchedModel
    from llmrun.cli.loading import fetch
    from llmrun.gguf.reader import read_header
    from llmrun.gguf.rules import check
    from llmrun.models.location import locate
    from llmrun.models.store.use import using

    settings = load_settings()
    located = [locate(name, settings) for name in dict.fromkeys(names)]
    with ExitStack() as stack:
        models = []
        for name, each in zip(dict.fromkeys(names), located, strict=True):
            path = each.path or fetch(output, each.spec, settings, yes=yes)
            header = read_header(path)
            check(header)
            _check_adapters(lists.adapters, header)
            stack.enter_context(using(path))
            label = "+".join((Path(name).stem if each.spec.path else name, *(one.name for one in lists.adapters)))
            usual = None if lists.settings else _usual(name, each.spec, path, lists)
            spread = _spread(output, each.spec, path, lists.workers) if lists.workers else None
            models.append(BenchedModel(label, path.absolute(), header, usual, lists.adapters, spread))
        yield tuple(models)


def _check_adapters(adapters: tuple[Adapter, ...], header: Header) -> None:
    if adapters:
        from llmrun.models.adapters import adapter_bytes

        adapter_bytes(adapters, header)


def _spread(output: Output, spec: ModelSpec, path: Path, workers: tuple[str, ...]) -> Load:
    """Return the division of the layers between the workers, and note it."""
    from llmrun.model.loading import prepare
    from llmrun.planning.plan import LoadPreferences

    model = prepare(spec, path, LoadPreferences(workers=workers))
    for note in model.plan.notes:
        output.note(note)
    return model.load


def _usual(name: str, spec: ModelSpec, path: Path, lists: BenchArguments) -> Loading | None:
    """Return the parameters with which `llmrun chat` loads a model, with tuned ones and those of its preset.

    None if it does not fit.
    """
    from dataclasses import replace

    from llmrun.bench.run import Loading
    from llmrun.model.loading import A_CHAT, prepare
    from llmrun.planning.plan import LoadPreferences

    preferences = with_preset(name, LoadPreferences(workers=lists.workers))
    try:
        model = prepare(spec, path, preferences, expected=A_CHAT, adapters=lists.adapters)
    except OutOfMemoryError:
        return None
    load = replace(model.load, n_ctx=0, n_ctx_start=0)  # each test has its own
    return Loading(load, model.tuned.environment if model.tuned else {})


def _cases(
    output: Output, lists: BenchArguments, how: MeasurementOptions, *, with_chat: bool
) -> tuple[Hardware, tuple[Case, ...]]:
    """Return the machine and the cases to measure. Raise for cases that no model can run."""
    from llmrun.bench.cases import check_cases
    from llmrun.planning.hardware import this_machine

    hardware = this_machine(lists.workers)
    cases = wanted(lists, hardware.usable_cores, with_chat=with_chat).cases()
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
    from llmrun.bench.cases import NamedModel, check_models, fit_together
    from llmrun.bench.run import BenchRequest, engines_of

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


def wanted(lists: BenchArguments, threads: int, *, with_chat: bool = True) -> BenchGrid:
    """Return the lists as numbers and words.

    Args:
        threads: the default.
        with_chat: add the chat test if no test is given.

    Raises:
        UsageError: one is invalid.
    """
    from llmrun.bench import cases as known

    def numbers(texts: Lists, option: str, default: tuple[int, ...]) -> tuple[int, ...]:
        return default if texts is None else known.numbers(texts, option)

    silent = with_chat and lists.prompts is None and lists.answers is None and lists.pairs is None
    chats = [",".join(map(str, known.DEFAULT_CHAT))] if silent and lists.chats is None else lists.chats or []
    return known.BenchGrid(
        settings={
            "threads": (threads,),
            **{name: known.setting_values(name, texts) for name, texts in lists.settings.items()},
        },
        prompts=numbers(lists.prompts, "-p", (known.DEFAULT_PROMPT,)),
        answers=numbers(lists.answers, "-n", (known.DEFAULT_ANSWER,)),
        pairs=known.pairs(lists.pairs or (), "-pg"),
        chats=known.pairs(chats, "--chat"),
        depths=numbers(lists.depths, "-d", (0,)),
    )


def _measure(output: Output, request: BenchRequest, hardware: Hardware, after: OutputOptions) -> BenchOutcome:
    """Run the measurements and show their progress. After Ctrl-C, return the partial result with the error."""
    from llmrun.bench.run import run
    from llmrun.ui.views.bench import BenchView

    if after.versus:
        from llmrun.cli import bench_versus

        return bench_versus.measure(output, request, hardware, after.versus, shows_table=after.kind == "table")
    names = [model.name for model in request.models]
    view = BenchView(output, names, request.cases, shows_rows=after.kind == "table")
    outcome = run(request, hardware, view.progress, view.row)
    view.end(outcome.result)
    return outcome
