"""The order of a bench, and the rows it gives, with engines that only pretend."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.gguf_writer import runnable_model, write

from llmrun.errors import CancelledError, EngineCrashedError
from llmrun.gguf.reader import read_header
from llmrun.lab.bench.cases import BenchGrid, Case, bench_settings
from llmrun.lab.bench.results import BenchRow
from llmrun.lab.bench.run import (
    BenchedModel,
    BenchRequest,
    BenchStep,
    Loading,
    Progress,
    engines_of,
    quantile_ns,
    run,
    steps,
)
from llmrun.planning.hardware import Hardware
from llmrun.protocol.devices import Gpu
from llmrun.protocol.jobs.bench import Bench, BenchAnswer, BenchModel, BenchResult, BenchTest, BenchUpdate, Repetition
from llmrun.protocol.jobs.machine import MeasuredLimits, MeasureLimits
from llmrun.protocol.loading import Load
from llmrun.protocol.settings import SETTINGS

MACHINE = Hardware("CPU", (), 2, 2, None, 1 << 34, 1 << 33)
FACTS = BenchModel("llama 1B Q4_0", 700, 1000, 16, 64, "abc", "0.25", "CPU", "A CPU", "")
LIMITS = MeasuredLimits(1e10, 1e12, 1e11, 1e11)


class Engines:
    """Engines that note what they were asked for. ns is how long each repetition takes, one after the other."""

    def __init__(self, ns: Callable[[int], int] = lambda number: 1000 + number, facts: BenchModel = FACTS) -> None:
        self.ns, self.facts = ns, facts
        self.log: list[tuple[int, Bench | MeasureLimits]] = []
        self.living: set[int] = set()
        self.most = 0
        self.measured = 0
        self.stops_after: int | None = None
        self.error: type[Exception] = CancelledError

    def start(self, environment: Mapping[str, str]) -> Engine:
        return Engine(self)


class Engine:
    _numbers = itertools.count()

    def __init__(self, engines: Engines) -> None:
        self.engines, self.number = engines, next(self._numbers)
        engines.living.add(self.number)

    def do(self, kind: Any, command: Any, on_update: Callable[[Any], None] = lambda update: None) -> Any:
        engines = self.engines
        assert self.number in engines.living
        engines.most = max(engines.most, len(engines.living))
        engines.log.append((self.number, command))
        if isinstance(command, MeasureLimits):
            return LIMITS
        on_update(BenchUpdate("loading"))
        done = []
        for _ in range(command.repetitions):
            if engines.measured == engines.stops_after:
                raise engines.error("stopped")
            answer = BenchAnswer(5, (10, 20, 30), 6, 12) if command.test.chat else None
            done.append(Repetition(engines.ns(engines.measured), answer))
            engines.measured += 1
            on_update(BenchUpdate("measured", done[-1]))
        return BenchResult(engines.facts, tuple(done), 77, 1234)

    def close(self) -> None:
        self.engines.living.discard(self.number)


@pytest.fixture
def models(tmp_path: Path) -> tuple[BenchedModel, ...]:
    paths = [write(tmp_path / f"{name}.gguf", runnable_model()) for name in ("a", "b")]
    return tuple(BenchedModel(path.stem, path, read_header(path)) for path in paths)


def wanted(**lists: Any) -> tuple[Case, ...]:
    settings = {"threads": (1,)} | {name: lists.pop(name) for name in [*lists] if name in SETTINGS}
    return BenchGrid(settings, **{"prompts": (8,), "answers": (4,), **lists}).cases()


# ---- order -----------------------------------------------------------------------------------------


def test_one_after_the_other() -> None:
    assert list(steps([0, 0, 1], 3, interleave=False)) == [
        BenchStep(0, 0, 3, True),
        BenchStep(1, 0, 3, True),
        BenchStep(2, 1, 3, True),
    ]


def test_models_take_turns_repetition_by_repetition() -> None:
    order = list(steps([0, 0, 1, 1], 2, interleave=True))
    assert [(step.row, step.is_first) for step in order] == [
        (0, True), (2, True), (0, False), (2, False), (1, True), (3, True), (1, False), (3, False),
    ]  # fmt: skip
    assert all(step.repetitions == 1 for step in order)


@pytest.mark.parametrize("interleave", [False, True])
def test_every_row_gets_its_repetitions_from_its_engine(interleave: bool) -> None:
    engines = [0, 1, 0, 1, 1, 2]
    done = [0] * len(engines)
    for step in steps(engines, 5, interleave=interleave):
        assert step.engine == engines[step.row]
        assert step.is_first == (done[step.row] == 0)
        done[step.row] += step.repetitions
    assert done == [5] * len(engines)


def test_weights_that_differ_have_engines_of_their_own() -> None:
    cases = wanted(repack=(True, False), threads=(1, 2))
    loadings = [Loading(Load.of(case.settings, path, n_ctx=0)) for path in ("/a", "/b") for case in cases]
    assert engines_of(loadings) == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    tuned = Loading(loadings[0].load, {"GOMP_SPINCOUNT": "1"})
    assert engines_of([loadings[0], tuned, loadings[0]]) == [0, 1, 0]


def test_a_chat_is_loaded_as_usual_and_the_row_says_how(models: tuple[BenchedModel, ...]) -> None:
    load = Load(str(models[0].path), 0, threads=2, threads_batch=1, flash_attention="off", mmap=False)
    usual = replace(models[0], usual=Loading(load, {"A": "1"}))
    engines = Engines()
    request = BenchRequest((usual,), wanted(prompts=(), chats=((8, 4),)), repetitions=1, with_limits=False)
    answer, chat = run(request, MACHINE, start=engines.start).result.rows
    assert [command.load for _, command in engines.log if isinstance(command, Bench)][1] == load
    assert (answer.flash_attn, answer.n_threads, answer.environment, answer.load_mode) == (-1, 1, {}, "auto")
    assert (chat.flash_attn, chat.n_threads, chat.n_threads_batch, chat.environment) == (0, 2, 1, {"A": "1"})
    assert chat.load_mode == "none"
    assert len({number for number, _ in engines.log}) == 2, "its variables need an engine of their own"


# ---- running ---------------------------------------------------------------------------------------


def test_a_model_stays_loaded_and_only_one_at_a_time(models: tuple[BenchedModel, ...]) -> None:
    engines = Engines()
    request = BenchRequest(models, wanted(threads=(1, 2)), repetitions=3, with_limits=False)
    outcome = run(request, MACHINE, start=engines.start)
    assert outcome.error is None
    assert [row.samples_ns for row in outcome.result.rows][:2] == [(1000, 1001, 1002), (1003, 1004, 1005)]
    assert len({number for number, _ in engines.log}) == 2
    assert (engines.most, engines.living) == (1, set())
    assert [command.load.path for _, command in engines.log if isinstance(command, Bench)] == [
        str(model.path) for model in models for _ in range(4)
    ]


def test_interleaved_models_are_loaded_together_and_warmed_up_once(models: tuple[BenchedModel, ...]) -> None:
    engines = Engines()
    request = BenchRequest(models, wanted(answers=()), repetitions=3, interleave=True, with_limits=False)
    outcome = run(request, MACHINE, start=engines.start)
    assert [row.samples_ns for row in outcome.result.rows] == [(1000, 1002, 1004), (1001, 1003, 1005)]
    assert engines.most == 2
    assert [command.warm_up for _, command in engines.log if isinstance(command, Bench)] == [True] * 2 + [False] * 4
    seeds = [command.seed for _, command in engines.log if isinstance(command, Bench)]
    assert seeds == [1, 1, 2, 2, 3, 3], "all models get the same tokens, every repetition other ones"


def test_rows_say_what_was_measured(models: tuple[BenchedModel, ...]) -> None:
    settings = bench_settings(
        threads=2, n_batch=64, n_ubatch=128, flash_attention="on", kv_type_k="f32", kv_type_v="bf16", repack=False,
        gpu_layers=0,
    )  # fmt: skip
    request = BenchRequest(models[:1], (Case(settings, BenchTest(8, 4, 16)),), repetitions=2, environment={"A": "1"})
    rows: list[BenchRow] = []
    outcome = run(request, MACHINE, on_row=rows.append, start=Engines().start)
    (row,) = outcome.result.rows
    assert rows == [row]
    assert (row.test, row.model, row.model_type, row.model_size, row.model_n_params) == (
        "pp8+tg4 @ d16", "a", "llama 1B Q4_0", 700, 1000,
    )  # fmt: skip
    assert (row.n_threads, row.n_batch, row.n_ubatch, row.flash_attn) == (2, 64, 64, 1)
    assert (row.type_k, row.type_v, row.repack, row.n_gpu_layers) == ("f32", "bf16", False, 0)
    assert (row.load_ns, row.peak_bytes, row.repetitions) == (77, 1234, 2)
    assert row.environment == {"A": "1"}
    assert row.limit is not None
    assert row.machine is not None
    assert (row.machine.build_commit, outcome.result.machine.build_commit) == ("abc", "abc")
    assert row.test_time.endswith("Z")
    assert not row.is_partial


def test_a_chat_row_tells_where_the_time_went(models: tuple[BenchedModel, ...]) -> None:
    case = Case(bench_settings(threads=1), BenchTest(8, 4, chat=True))
    (row,) = run(BenchRequest(models[:1], (case,), repetitions=2), MACHINE, start=Engines().start).result.rows
    assert row.chat is not None
    assert (row.chat.ttft_ns, row.chat.token_p50_ns, row.chat.token_p99_ns) == ((5, 5), 20, 30)
    assert (row.chat.sampling_share, row.chat.text_share) == (0.1, 0.2)
    assert row.chat.decode_ts == (5e7, 5e7)


def test_ctrl_c_keeps_what_was_measured(models: tuple[BenchedModel, ...]) -> None:
    engines = Engines()
    engines.stops_after = 4
    outcome = run(BenchRequest(models, wanted(), repetitions=3), MACHINE, start=engines.start)
    assert isinstance(outcome.error, CancelledError)
    assert outcome.result.is_partial
    assert [(row.test, len(row.samples_ns), row.is_partial) for row in outcome.result.rows] == [
        ("pp8", 3, False),
        ("tg4", 1, True),
    ]
    assert outcome.result.rows[1].model_type == "llama 1B Q4_0"
    assert engines.living == set()


def test_a_crash_loses_nothing_either(models: tuple[BenchedModel, ...]) -> None:
    engines = Engines()
    engines.stops_after, engines.error = 0, EngineCrashedError
    outcome = run(BenchRequest(models, wanted(), repetitions=3), MACHINE, start=engines.start)
    assert isinstance(outcome.error, EngineCrashedError)
    assert (outcome.result.rows, outcome.result.is_partial, engines.living) == ((), True, set())


def test_an_error_of_our_own_ends_the_engines(models: tuple[BenchedModel, ...]) -> None:
    engines = Engines()
    engines.stops_after, engines.error = 1, ZeroDivisionError
    with pytest.raises(ZeroDivisionError):
        run(BenchRequest(models, wanted(), repetitions=3), MACHINE, start=engines.start)
    assert engines.living == set()


def test_progress_counts_to_the_end(models: tuple[BenchedModel, ...]) -> None:
    seen: list[Progress] = []
    run(BenchRequest(models, wanted(), repetitions=2), MACHINE, on_progress=seen.append, start=Engines().start)
    assert [each.done for each in seen] == sorted(each.done for each in seen)
    assert (seen[0].phase, seen[0].done, seen[0].total) == ("measuring the machine", 0, 8)
    assert (seen[-1].phase, seen[-1].done, seen[-1].total) == ("measured", 8, 8)
    assert all(1 <= each.repetition <= each.repetitions == 2 for each in seen)


def test_a_gpu_has_no_limit_of_the_processor(models: tuple[BenchedModel, ...]) -> None:
    known = Hardware("CPU", (), 2, 2, None, 1 << 34, 1 << 33, (Gpu("CUDA0", "GPU", 1, 1),))
    seen_by_engine = BenchModel("llama", 1, 1, 1, 1, "", "", "CUDA", "CPU", "NVIDIA H200")
    for hardware, facts in ((known, FACTS), (MACHINE, seen_by_engine)):
        outcome = run(BenchRequest(models[:1], wanted(), repetitions=1), hardware, start=Engines(facts=facts).start)
        assert [row.limit for row in outcome.result.rows] == [None, None]
    on_cpu = wanted(gpu_layers=(0,))
    outcome = run(BenchRequest(models[:1], on_cpu, repetitions=1), known, start=Engines().start)
    assert all(row.limit for row in outcome.result.rows)


def test_quantiles_are_whole_nanoseconds() -> None:
    assert [quantile_ns([1, 2, 3, 4, 10], share) for share in (0.5, 0.95, 1.0)] == [3, 9, 10]
    assert quantile_ns([], 0.5) == 0
