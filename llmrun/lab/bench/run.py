"""The bench run: its engines, the order of the cases, and the rows they give.

The order spares loading, or lets drift hit all models alike. Rows measured before an interrupt or a failed test are
returned beside the error.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from llmrun.errors import LlmrunError
from llmrun.gguf.header import Header
from llmrun.lab.bench import limits
from llmrun.lab.bench.cases import Case
from llmrun.lab.bench.machine import DisturbanceMonitor, describe, sample_warnings
from llmrun.lab.bench.results import BenchRow, BenchWarning, ChatTimes, Limit, Machine, Result, setting_columns
from llmrun.planning.hardware import Hardware
from llmrun.planning.predict import work_of
from llmrun.planning.tuned import waiting_environment
from llmrun.protocol.adapters import Adapter
from llmrun.protocol.jobs import JobKind
from llmrun.protocol.jobs.bench import BENCH, Bench, BenchAnswer, BenchModel, BenchResult, BenchUpdate, Repetition
from llmrun.protocol.jobs.machine import LIMITS, MeasuredLimits, MeasureLimits
from llmrun.protocol.llama_folder import chosen_kernels
from llmrun.protocol.loading import Load
from llmrun.protocol.settings import DEVICE_SETTINGS
from llmrun.runner.client import EngineClient
from llmrun.runner.launch import launch
from llmrun.statistics import quantile

_Command = TypeVar("_Command")
_Update = TypeVar("_Update")
_Result = TypeVar("_Result")


class Worker(Protocol):
    """An engine process: runner.EngineClient, or a stand-in for tests."""

    def do(
        self, kind: JobKind[_Command, _Update, _Result], command: _Command, on_update: Callable[[_Update], None] = ...
    ) -> _Result: ...

    def close(self) -> None: ...


class EnginePool:
    """Engines by key. The least recently used one is closed to make room for another.

    Args:
        start: an engine with these environment variables.
        limit: engines that may run at once; None for any number.
    """

    def __init__(self, start: Callable[[Mapping[str, str]], Worker], limit: int | None = None) -> None:
        self._start, self._limit = start, limit
        self._engines: OrderedDict[Hashable, Worker] = OrderedDict()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._engines

    def engine(self, key: Hashable, environment: Mapping[str, str]) -> Worker:
        """Return the engine of this key, started where there is none."""
        if key not in self._engines:
            while self._limit is not None and len(self._engines) >= self._limit:
                self.drop(next(iter(self._engines)))
            self._engines[key] = self._start(environment)
        self._engines.move_to_end(key)
        return self._engines[key]

    def drop(self, key: Hashable) -> None:
        """Close the engine of this key, if there is one."""
        engine = self._engines.pop(key, None)
        if engine is not None:
            engine.close()

    def close(self) -> None:
        """Close all engines."""
        for key in list(self._engines):
            self.drop(key)


@dataclass(frozen=True, slots=True)
class Loading:
    """A model's load settings and its engine's environment variables."""

    load: Load
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BenchedModel:
    """A model to measure."""

    name: str  # as the user typed it
    path: Path
    header: Header
    usual: Loading | None = None  # for chat tests, as `llmrun chat` loads it; None: as for all other tests
    adapters: tuple[Adapter, ...] = ()
    spread: Load | None = None  # the RPC workers, and the number of layers on each, where there are any

    def loading(self, case: Case, environment: Mapping[str, str]) -> Loading:
        """Return how to load the model for a case; environment is that of all tests but chats."""
        if case.test.chat and self.usual is not None:
            return self.usual
        load = Load.of(case.settings, str(self.path), n_ctx=0, adapters=self.adapters)
        if self.spread is not None:
            workers, counts, gpu_layers = self.spread.workers, self.spread.layer_counts, self.spread.gpu_layers
            load = replace(load, workers=workers, layer_counts=counts, gpu_layers=gpu_layers)
        return Loading(load, {**waiting_environment(load), **environment})


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """Models and the cases to run with each of them."""

    models: tuple[BenchedModel, ...]  # at least one
    cases: tuple[Case, ...]
    repetitions: int = 5  # of each case
    warm_up: bool = True  # run each case once before, untimed
    interleave: bool = False  # repetitions of models (and of other weights) take turns, with all of them loaded
    delay: float = 0.0  # seconds to cool down before each test
    environment: Mapping[str, str] = field(default_factory=dict)  # of the engines
    with_limits: bool = True  # measure the machine's limits
    name: str = ""  # the machine's, where the user gave it one


@dataclass(frozen=True, slots=True)
class Progress:
    """The current step of a bench."""

    model: str
    test: str
    done: int  # repetitions of all tests
    total: int
    phase: str  # of BenchUpdate, or "measuring the machine", "cooling down", "next"
    repetition: int  # of this test, from 1 on
    repetitions: int


class BenchOutcome(NamedTuple):
    """A result, and the error that ended the bench early."""

    result: Result
    error: LlmrunError | None


class BenchStep(NamedTuple):
    """Consecutive repetitions of one row of the result on one engine. Numbers count from 0."""

    row: int
    engine: int
    repetitions: int
    is_first: bool


def engines_of(loadings: Sequence[Loading]) -> list[int]:
    """Return the number of the engine for each row: rows share one if they need the same weights in memory."""
    keys = [
        (
            load.path,
            load.gpu_layers,
            load.cpu_experts,
            load.repack,
            load.mmap,
            tuple(sorted(environment.items())),
            *(getattr(load, name) for name in DEVICE_SETTINGS),
        )
        for load, environment in ((loading.load, loading.environment) for loading in loadings)
    ]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return [numbers[key] for key in keys]


def steps(engines: Sequence[int], repetitions: int, *, interleave: bool) -> Iterator[BenchStep]:
    """Yield the steps in order. Interleaved, the n-th rows of all engines take turns, one repetition each."""
    rows: dict[int, list[int]] = {}
    for row, engine in enumerate(engines):
        rows.setdefault(engine, []).append(row)
    if not interleave:
        yield from (BenchStep(row, engine, repetitions, True) for engine, numbers in rows.items() for row in numbers)
        return
    for index in range(max(map(len, rows.values()))):
        for repetition in range(repetitions):
            for engine, numbers in rows.items():
                if index < len(numbers):
                    yield BenchStep(numbers[index], engine, 1, repetition == 0)


def run(
    request: BenchRequest,
    hardware: Hardware,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    on_row: Callable[[BenchRow], None] = lambda row: None,
    start: Callable[[Mapping[str, str]], Worker] = lambda environment: EngineClient(launch(environment=environment)),
) -> BenchOutcome:
    """Measure all cases of all models.

    Args:
        on_row: called with each row when it is complete.
        start: starts an engine with these environment variables.
    """
    bench = _Run(request, hardware, on_progress, on_row, start)
    error = None
    try:
        bench.run()
    except LlmrunError as stopped:  # Ctrl-C too
        error = stopped
    finally:
        bench.close()
    rows = tuple(row for number in range(len(bench.rows)) if (row := bench.row(number)).samples_ns)
    partial = error is not None or len(rows) < len(bench.rows)
    return BenchOutcome(Result(rows, bench.machine, partial), error)


@dataclass(slots=True)
class _OpenRow:
    """A row under measurement."""

    model: BenchedModel
    case: Case
    loading: Loading
    done: list[Repetition] = field(default_factory=list)
    benched: BenchResult | None = None
    peak_bytes: int | None = None
    limit: Limit | None = None
    began: float = 0.0
    warnings: dict[str, BenchWarning] = field(default_factory=dict)


class _Run:
    def __init__(
        self,
        request: BenchRequest,
        hardware: Hardware,
        on_progress: Callable[[Progress], None],
        on_row: Callable[[BenchRow], None],
        start: Callable[[Mapping[str, str]], Worker],
    ) -> None:
        self._request, self._hardware, self._start = request, hardware, start
        self._on_progress, self._on_row = on_progress, on_row
        self._engines = EnginePool(start)
        self._limits_engine: Worker | None = None
        self._limits = limits.MachineLimits(self._measure_machine)
        self._work = {model.path: work_of(model.header) for model in request.models}
        self.rows = [
            _OpenRow(model, case, model.loading(case, request.environment))
            for model in request.models
            for case in request.cases
        ]
        self.machine = describe(hardware, name=request.name)

    def run(self) -> None:
        request = self._request
        engines = engines_of([row.loading for row in self.rows])
        for step in steps(engines, request.repetitions, interleave=request.interleave):
            row = self.rows[step.row]
            if not request.interleave and step.engine not in self._engines:
                self._engines.close()
            if step.is_first:
                self._begin(row)
            self._measure(row, step)
            if len(row.done) == request.repetitions:
                self._on_row(self.row(step.row))

    def close(self) -> None:
        self._engines.close()
        if self._limits_engine is not None:
            self._limits_engine.close()

    def _begin(self, row: _OpenRow) -> None:
        row.began = time.time()
        on_gpu = row.case.settings.gpu_layers != 0 and bool(self._hardware.gpus or self._hardware.workers)
        if self._request.with_limits and not on_gpu:
            self._report(row, "measuring the machine")
            parts = limits.phases(self._work[row.model.path], row.case.test, row.case.settings)
            n_bytes = max(part.working_set for part in parts)
            row.limit = limits.limit_of(parts, self._limits.at(n_bytes, row.loading.load.threads))
        if self._request.delay:
            self._report(row, "cooling down")
            time.sleep(self._request.delay)

    def _measure_machine(self, command: MeasureLimits) -> MeasuredLimits:
        if self._limits_engine is None:
            self._limits_engine = self._start({})
        return self._limits_engine.do(LIMITS, command)

    def _measure(self, row: _OpenRow, step: BenchStep) -> None:
        request = self._request
        engine = self._engines.engine(step.engine, row.loading.environment)
        seed = 1 + len(row.done)
        command = Bench(row.loading.load, row.case.test, step.repetitions, request.warm_up and step.is_first, seed)
        with ExitStack() as stack:
            watches: list[DisturbanceMonitor] = []

            def on_update(update: BenchUpdate) -> None:
                if update.phase != "loading" and not watches:
                    watches.append(stack.enter_context(DisturbanceMonitor()))
                if update.repetition is not None:
                    row.done.append(update.repetition)
                    watches[0].sample()
                if update.phase != "answering":
                    self._report(row, update.phase)

            row.benched = engine.do(BENCH, command, on_update)
        row.warnings.update((warning.kind, warning) for watch in watches for warning in watch.warnings)
        if not self.machine.build_commit:
            facts = row.benched.model
            gpus = tuple(gpu for gpu in facts.gpus.split(", ") if gpu)
            self.machine = replace(self.machine, gpus=gpus, build_commit=facts.build_commit)
        row.peak_bytes = max(row.peak_bytes or 0, row.benched.peak_bytes or 0) or None

    def _report(self, row: _OpenRow, phase: str) -> None:
        done, repetitions = len(row.done), self._request.repetitions
        self._on_progress(
            Progress(
                model=row.model.name,
                test=row.case.test.name,
                done=sum(len(open_row.done) for open_row in self.rows),
                total=len(self.rows) * repetitions,
                phase=phase,
                repetition=min(done + 1, repetitions),
                repetitions=repetitions,
            )
        )

    def row(self, number: int) -> BenchRow:
        """Return a row with the repetitions measured, and the facts of its model, which any of its rows has."""
        row = self.rows[number]
        models = (other.benched.model for other in (row, *self.rows) if other.model is row.model and other.benched)
        return _row(row, next(models, None), self.machine, self._request.repetitions)


def _row(row: _OpenRow, facts: BenchModel | None, machine: Machine, repetitions: int) -> BenchRow:
    load, test, header = row.loading.load, row.case.test, row.model.header
    samples = tuple(repetition.ns for repetition in row.done)
    answers = [repetition.answer for repetition in row.done if repetition.answer is not None]
    rates = [1e9 * test.n_tokens / ns for ns in samples]
    return BenchRow(
        build_commit=facts.build_commit if facts else "",
        cpu_info=facts.cpu if facts else machine.cpu,
        gpu_info=facts.gpus if facts else "",
        backends=facts.backends if facts else "CPU",
        model_filename=str(row.model.path),
        model_type=facts.description if facts else header.name,
        model_size=facts.size if facts else header.weight_bytes,
        model_n_params=facts.n_params if facts else header.n_parameters,
        file_bytes=header.file_size,
        **setting_columns(load),
        load_mode="auto" if load.mmap else "none",
        n_prompt=test.n_prompt,
        n_gen=test.n_gen,
        n_depth=test.n_depth,
        test_time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(row.began)),
        samples_ns=samples,
        test=test.name,
        model=row.model.name,
        version=machine.llmrun,
        environment={**chosen_kernels(), **row.loading.environment},
        repetitions=repetitions,
        load_ns=row.benched.load_ns if row.benched else None,
        peak_bytes=row.peak_bytes,
        limit=None if facts and facts.gpus and load.gpu_layers else row.limit,
        chat=_chat(answers, row.done) if answers else None,
        warnings=(*row.warnings.values(), *sample_warnings(rates)),
        machine=machine,
    )


def _chat(answers: Sequence[BenchAnswer], done: Sequence[Repetition]) -> ChatTimes:
    gaps = sorted(gap for answer in answers for gap in answer.token_ns)
    decoding = sum(gaps)
    return ChatTimes(
        ttft_ns=tuple(answer.ttft_ns for answer in answers),
        token_p50_ns=quantile_ns(gaps, 0.50),
        token_p95_ns=quantile_ns(gaps, 0.95),
        token_p99_ns=quantile_ns(gaps, 0.99),
        sampling_share=sum(answer.sampling_ns for answer in answers) / max(decoding, 1),
        text_share=sum(answer.text_ns for answer in answers) / max(decoding, 1),
        decode_ts=tuple(1e9 * len(answer.token_ns) / max(sum(answer.token_ns), 1) for answer in answers),
    )


def quantile_ns(ordered: Sequence[int], share: float) -> int:
    return round(quantile(ordered, share)) if ordered else 0
