"""The comparison with other programs: the same test, in turns; missing features are named."""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.bench_rows import row
from support.gguf_writer import tiny_model, write
from support.stand_in_ollama import StandInOllama, serving

from llmrun.bench.external import LlamaBench, arguments, find, merged, our_side, result_of, versus
from llmrun.bench.ollama import Ollama, address
from llmrun.bench.parameters import Case, bench_settings
from llmrun.bench.results import BenchRow, BenchWarning
from llmrun.bench.run import BenchedModel
from llmrun.errors import LlmrunError, UsageError
from llmrun.gguf.reader import read_header
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

    def notes(self, model: BenchedModel, case: Case) -> tuple[str, ...]:
        return ("it is scripted",)

    def close(self) -> None:
        self._log.append("closed")


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
    assert found.notes == ("another build of ggml: ours 0c1e570, theirs fff", "it is scripted")


def test_rows_of_both_can_be_written_and_kept(model: BenchedModel) -> None:
    found = versus(Scripted([20.0] * 2, []), lambda: row(spread=(1.0,)), model, case(), repetitions=2)
    kept = result_of([found])
    assert [each.program for each in kept.rows] == ["llmrun", "scripted"]
    assert kept.machine == kept.rows[1].machine == row().machine


def test_merging_keeps_samples_and_says_a_disturbance_once() -> None:
    less, more = (BenchWarning("load", f"other programs used {cores} of 2 cores") for cores in (1.0, 1.4))
    odd = BenchWarning("noisy", "too noisy: ± 90%")
    rows = [
        row(rate=40, spread=(1.0,), joules=(2.0,), peak_bytes=5, warnings=(less,)),
        row(rate=41, spread=(1.0,), joules=(3.0,), peak_bytes=9, warnings=(more, odd)),
    ]
    found = merged(rows)
    assert found.samples_ns == rows[0].samples_ns + rows[1].samples_ns
    assert (found.joules, found.peak_bytes, found.repetitions) == ((2.0, 3.0), 9, 2)
    assert found.warnings[0] == more
    assert odd not in found.warnings


def test_the_same_build_from_an_archive_is_the_same(model: BenchedModel) -> None:
    theirs = Scripted([20.0] * 2, [])
    found = versus(theirs, lambda: row(spread=(1.0,), build_commit="fff-dirty"), model, case(), repetitions=2)
    assert found.notes == ("it is scripted",)


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
    assert found.notes(model, case()) == ()


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
        ("vllm", "--vs can't measure 'vllm'", "it knows llama-bench and ollama"),
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


# ---- Ollama ----------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[StandInOllama]:
    with serving() as running:
        yield running


def test_ollama_gets_the_same_file_and_gives_it_back(model: BenchedModel, server: StandInOllama) -> None:
    found = find("ollama", server.environment)
    rows = [found.measure(model, case(test)) for test in (PREFILL, DECODE, BOTH)]
    assert [round(each.avg_ts, 6) for each in rows] == [100, 20, round(80 / (64 / 100 + 16 / 20), 6)]
    assert {(each.program, each.version, each.model) for each in rows} == {("ollama", "0.13.0", "tiny")}
    (name,) = server.models
    assert name.startswith("llmrun-bench-")
    assert sum(path == "/api/create" for _, path, _ in server.asked) == 1, "one file is imported once"
    found.close()
    assert server.models == set()


def test_ollama_gets_our_settings_and_never_the_same_prompt_twice(model: BenchedModel, server: StandInOllama) -> None:
    found = find("ollama", server.environment)
    for _ in range(2):
        found.measure(model, case(BOTH, gpu_layers=3))
    asked = server.generated()
    assert asked[0]["options"] == {
        "num_predict": 16, "num_ctx": 32 + 64 + 16 + 64, "num_batch": 2048, "num_thread": 2, "seed": 1, "num_gpu": 3
    }  # fmt: skip
    prompts = [body["prompt"] for body in asked]
    assert len(set(prompts)) == len(prompts) == 3, "a warm-up and two repetitions"


def test_ollamas_prompts_are_made_as_long_as_wanted(model: BenchedModel, server: StandInOllama) -> None:
    server.tokens_a_word = 1.5
    found = find("ollama", server.environment)
    found.measure(model, case(PREFILL))
    assert abs(1.5 * len(server.generated()[-1]["prompt"].split()) - 512) < 0.02 * 512


def test_an_answer_that_ends_early_still_gives_a_rate(model: BenchedModel, server: StandInOllama) -> None:
    server.ends_after = 9
    assert find("ollama", server.environment).measure(model, case()).avg_ts == pytest.approx(20)


def test_settings_that_ollama_decides_are_reported(model: BenchedModel, server: StandInOllama) -> None:
    found = find("ollama", server.environment)
    assert len(found.notes(model, case(PREFILL))) == 1
    notes = found.notes(model, case(BOTH, repack=False, kv_type_v="q8_0"))
    assert any("samples" in note for note in notes)
    assert "Ollama chooses KV values, repack by itself" in notes


def test_a_model_that_ollama_refuses_is_an_error_in_its_words(model: BenchedModel, server: StandInOllama) -> None:
    server.refuses["/api/create"] = "unsupported architecture"
    with pytest.raises(LlmrunError, match=r"can't import tiny\.gguf") as raised:
        find("ollama", server.environment).measure(model, case())
    assert raised.value.why == "unsupported architecture"


def test_what_was_imported_goes_even_after_a_failure(model: BenchedModel, server: StandInOllama) -> None:
    found = find("ollama", server.environment)
    server.refuses["/api/generate"] = "out of memory"
    with pytest.raises(LlmrunError, match="refused"):
        found.measure(model, case())
    assert server.models
    found.close()
    assert not server.models


def test_an_answer_without_times_is_refused(model: BenchedModel, server: StandInOllama) -> None:
    server.ends_after = 0
    with pytest.raises(LlmrunError, match="can't be used"):
        find("ollama", server.environment).measure(model, case())


def test_a_server_that_is_not_there_says_how_to_start_it(tmp_path: Path) -> None:
    nobody = {"OLLAMA_HOST": "127.0.0.1:9", "PATH": str(tmp_path)}
    with pytest.raises(UsageError, match=r"no Ollama answers at 127\.0\.0\.1:9") as raised:
        find("ollama", nobody)
    assert "no ollama on the PATH" in raised.value.hint
    program(tmp_path / "ollama", "")
    with pytest.raises(UsageError) as raised:
        find("ollama", nobody)
    assert raised.value.hint.endswith("ollama serve")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ("127.0.0.1", 11434)), ("127.0.0.1", ("127.0.0.1", 11434)), (":1234", ("127.0.0.1", 1234)),
        ("http://localhost:9999", ("localhost", 9999)), ("0.0.0.0:5", ("127.0.0.1", 5)), ("[::1]:7", ("::1", 7)),
    ],
)  # fmt: skip
def test_ollamas_address_is_read_as_ollama_reads_it(text: str, expected: tuple[str, int]) -> None:
    assert address(text) == expected


@pytest.mark.parametrize("text", ["example.com", "http://10.0.0.7:11434", "127.0.0.1:port", "http://[::"])
def test_another_machine_is_never_spoken_to(text: str) -> None:
    with pytest.raises(UsageError, match="OLLAMA_HOST="):
        Ollama.find({"OLLAMA_HOST": text})


def test_a_server_that_is_something_else(server: StandInOllama, model: BenchedModel) -> None:
    server.refuses["/api/version"] = "who are you?"
    with pytest.raises(UsageError, match="no Ollama answers") as raised:
        find("ollama", server.environment)
    assert raised.value.why == "who are you?"
