"""The comparison with other programs: the same test, in turns; missing features are named."""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.bench_rows import row
from support.gguf_writer import tiny_model, write

from llmrun.errors import LlmrunError, UsageError
from llmrun.gguf.reader import read_header
from llmrun.lab.bench.cases import Case, bench_settings
from llmrun.lab.bench.external import LlamaBench, arguments, find, merged, our_side, result_of, versus
from llmrun.lab.bench.results import BenchRow, BenchWarning
from llmrun.lab.bench.run import BenchedModel
from llmrun.planning.hardware import Hardware
from llmrun.protocol.jobs.bench import Bench, BenchModel, BenchResult, BenchTest, BenchUpdate, Repetition

PREFILL, DECODE, BOTH = BenchTest(n_prompt=512), BenchTest(n_gen=128), BenchTest(n_prompt=64, n_gen=16, n_depth=32)


@pytest.fixture
def model(tmp_path: Path) -> BenchedModel:
    path = write(tmp_path / "tiny.gguf", tiny_model())
    return BenchedModel("tiny", path, read_header(path))


def case(test: BenchTest = DECODE, **settings: Any) -> Case:
    return Case(bench_settings(**{"threads": 2, **settings}), test)


class Scripted:
    """A program with scripted speeds, which logs its calls."""

    name, where = "scripted", "here"

    def __init__(self, rates: list[float], log: list[str]) -> None:
        self._rates, self._log = iter(rates), log

    def measure(self, model: BenchedModel, case: Case) -> BenchRow:
        self._log.append("theirs")
        return row(rate=next(self._rates), spread=(1.0,), program="scripted", build_commit="fff")


def test_both_take_turns_and_neither_is_always_first(model: BenchedModel) -> None:
    log: list[str] = []
    seen: list[tuple[int, int]] = []
    ours = iter([40, 41, 39, 40.5, 39.5])

    def measure() -> BenchRow:
        log.append("ours")
        return row(rate=next(ours), spread=(1.0,))

    theirs = Scripted([20, 20.5, 19.5, 20.25, 19.75], log)
    found = versus(theirs, measure, model, case(), on_update=lambda *done: seen.append(done))
    assert log == ["ours", "theirs", "theirs", "ours", "ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert seen == [(done, 10) for done in range(11)]
    assert (len(found.ours.samples_ns), len(found.theirs.samples_ns), found.ours.repetitions) == (5, 5, 5)
    assert (found.verdict.kind, found.verdict.paired) == ("faster", True)
    assert found.verdict.ratio == pytest.approx(2, rel=1e-6)
    assert found.notes == ("another build of ggml: ours 0c1e570, theirs fff",)


def test_rows_of_both_can_be_written_and_kept(model: BenchedModel) -> None:
    found = versus(Scripted([20.0] * 2, []), lambda: row(spread=(1.0,)), model, case(), repetitions=2)
    kept = result_of([found])
    assert [each.program for each in kept.rows] == ["llmrun", "scripted"]
    assert kept.machine == kept.rows[1].machine == row().machine


def test_merging_keeps_samples_and_says_a_disturbance_once() -> None:
    less, more = (BenchWarning("load", f"other programs used {cores} of 2 cores") for cores in (1.0, 1.4))
    odd = BenchWarning("noisy", "too noisy: ± 90%")
    rows = [
        row(rate=40, spread=(1.0,), peak_bytes=5, warnings=(less,)),
        row(rate=41, spread=(1.0,), peak_bytes=9, warnings=(more, odd)),
    ]
    found = merged(rows)
    assert found.samples_ns == rows[0].samples_ns + rows[1].samples_ns
    assert (found.peak_bytes, found.repetitions) == (9, 2)
    assert found.warnings[0] == more
    assert odd not in found.warnings


def test_the_same_build_from_an_archive_is_the_same(model: BenchedModel) -> None:
    theirs = Scripted([20.0] * 2, [])
    found = versus(theirs, lambda: row(spread=(1.0,), build_commit="fff-dirty"), model, case(), repetitions=2)
    assert found.notes == ()


class Worker:
    """An engine that measures nothing, and counts."""

    def __init__(self) -> None:
        self.commands: list[Bench] = []
        self.closed = 0

    def do(self, kind: Any, command: Bench, on_update: Callable[[Any], None] = lambda update: None) -> BenchResult:
        self.commands.append(command)
        repetition = Repetition(1_000_000_000)
        on_update(BenchUpdate("measured", repetition))
        facts = BenchModel("tiny", 1, 1, 1, 1, "abc", "1", "CPU", "cpu", "")
        return BenchResult(facts, (repetition,), 5, 7)

    def close(self) -> None:
        self.closed += 1


def test_our_engine_stays_and_warms_up_before_each_repetition(model: BenchedModel) -> None:
    worker = Worker()
    hardware = Hardware("cpu", (), 2, 2, None, 1 << 30, 1 << 30)
    with our_side(lambda: worker, hardware) as measure:
        rows = [measure(model, case()) for _ in range(2)]
        assert worker.closed == 0
    assert worker.closed == 1
    assert [each.samples_ns for each in rows] == [(1_000_000_000,)] * 2
    assert [(each.repetitions, each.warm_up) for each in worker.commands] == [(1, True)] * 2


# ---- llama-bench -----------------------------------------------------------------------------------


def program(path: Path, body: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{sys.executable}\nimport json, sys\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_llama_bench_gets_our_settings(model: BenchedModel) -> None:
    assert arguments(Path("m"), case(PREFILL)) == (
        [
            "-m",
            "m",
            "-p",
            "512",
            "-n",
            "0",
            "-t",
            "2",
            "-b",
            "2048",
            "-ub",
            "512",
            "-ctk",
            "f16",
            "-ctv",
            "f16",
            "-r",
            "1",
            "-o",
            "jsonl",
        ]
    )
    unusual = {"flash_attention": "off", "repack": False, "gpu_layers": 7, "kv_type_k": "q8_0", "n_ubatch": 64}
    found = arguments(Path("m"), case(BOTH, **unusual))
    assert found[2:6] == ["-p", "0", "-n", "0"]
    for part in ("-pg 64,16", "-d 32", "-fa 0", "--repack 0", "-ngl 7", "-ctk q8_0", "-ub 64"):
        assert part in " ".join(found)


def test_llama_benchs_line_becomes_a_row(model: BenchedModel, tmp_path: Path) -> None:
    line = {"build_commit": "abc", "build_number": 7, "model_type": "tiny F32", "n_threads": 2, "n_prompt": 0,
            "n_gen": 128, "samples_ns": [2_000_000_000], "samples_ts": [64.0], "avg_ns": 2}  # fmt: skip
    where = program(
        tmp_path / "bin/llama-bench", f"print('warning: x'); print({json.dumps(line)!r}); assert '-r' in sys.argv"
    )
    found = find("llama-bench", {"PATH": str(tmp_path / "bin")})
    assert found.where == where
    read = found.measure(model, case())
    assert (read.program, read.version, read.model, read.test) == ("llama-bench", "7 (abc)", "tiny", "tg128")
    assert (read.samples_ns, read.avg_ts) == ((2_000_000_000,), 64.0)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (
            "print('error: failed to load model', file=sys.stderr); print('x', file=sys.stderr); sys.exit(1)",
            "failed to load",
        ),
        ("sys.exit(3)", "status 3"),
        ("import os; os.kill(os.getpid(), 9)", "signal 9"),
        ("print('{ nonsense')", "status 0"),
        ("pass", "status 0"),
    ],
)
def test_llama_benchs_failures_are_told_in_its_words(model: BenchedModel, tmp_path: Path, body: str, why: str) -> None:
    found = LlamaBench(program(tmp_path / "llama-bench", body))
    with pytest.raises(LlmrunError, match="could not measure tg128") as raised:
        found.measure(model, case())
    assert why in raised.value.why


def test_llama_bench_has_no_chats(model: BenchedModel) -> None:
    with pytest.raises(UsageError, match=r"no test like chat64\+16"):
        LlamaBench("llama-bench").measure(model, case(BenchTest(64, 16, chat=True)))


@pytest.mark.parametrize(
    ("name", "what", "why"),
    [
        ("llama-bench", "there is no llama-bench", "it is not on the PATH"),
        ("/nowhere/llama-bench", "there is no /nowhere/llama-bench", "no such program"),
        ("vllm", "--vs can't measure 'vllm'", "it knows llama-bench only"),
    ],
)
def test_a_rival_that_is_not_there_is_named(name: str, what: str, why: str) -> None:
    with pytest.raises(UsageError) as raised:
        find(name, {"PATH": "/nowhere"})
    assert (raised.value.what, raised.value.why) == (what, why)
    assert "--vs" in raised.value.hint


def test_a_rival_that_can_not_be_started(model: BenchedModel, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="can't be started"):
        LlamaBench(str(tmp_path / "llama-bench")).measure(model, case())
