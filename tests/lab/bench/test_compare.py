"""The comparison of results: pairs, differences, and refusals."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from support.bench_rows import XEON, result, row

from llmrun.config import load_settings
from llmrun.errors import LlmrunError, UsageError
from llmrun.lab.bench.compare import ComparedSide, Comparison, Pair, compare_results, machine_differences, resolve
from llmrun.lab.bench.history import History
from llmrun.lab.bench.results import BenchRow, BenchWarning, Machine, Result


def sides(a: tuple[BenchRow, ...], b: tuple[BenchRow, ...]) -> tuple[ComparedSide, ComparedSide]:
    return ComparedSide("A", (result(*a),)), ComparedSide("B", (result(*b),))


def compared(a: tuple[BenchRow, ...], b: tuple[BenchRow, ...]) -> Comparison:
    return compare_results(*sides(a, b))


def only(comparison: Comparison) -> Pair:
    (pair,) = comparison.pairs
    return pair


def test_like_rows_are_compared_whatever_their_order_and_paths() -> None:
    moved = {"model_filename": "C:\\models\\x.gguf", "model": "x.gguf", "n_threads_batch": 2}
    found = compared((row("pp512", 100), row("tg128", 40)), (row("tg128", 30, **moved), row("pp512", 100.3, **moved)))
    assert [(pair.a.test, pair.b.test, pair.verdict.kind) for pair in found.pairs] == [
        ("pp512", "pp512", "same"),
        ("tg128", "tg128", "slower"),
    ]
    assert found.pairs[1].verdict.ratio == pytest.approx(0.75, abs=0.001)
    assert not any(pair.differences or pair.notes for pair in found.pairs), "batch threads that are the threads"
    assert (found.only_a, found.only_b, found.machines) == ((), (), ())
    assert found.summary == "1 of 2 rows differ"


def test_a_sweep_is_compared_setting_by_setting() -> None:
    a = tuple(row(n_threads=threads, rate=20 * threads) for threads in (1, 2))
    b = tuple(row(n_threads=threads, rate=20 * threads) for threads in (4, 2, 1))
    found = compared(a, b)
    assert [(pair.a.n_threads, pair.b.n_threads) for pair in found.pairs] == [(1, 1), (2, 2)]
    assert [left.n_threads for left in found.only_b] == [4]


def test_other_settings_are_compared_only_with_a_word() -> None:
    pair = only(compared((row(n_threads=2),), (row(n_threads=8, flash_attn=1, rate=90),)))
    assert pair.verdict.kind == "faster"
    assert [str(difference) for difference in pair.differences] == ["threads 2 / 8", "flash attention -1 / 1"]


def test_which_of_several_belongs_to_a_row_is_not_guessed() -> None:
    with pytest.raises(UsageError, match="no rows in common") as raised:
        compared((row(n_threads=2),), (row(n_threads=4), row(n_threads=8)))
    assert raised.value.why.startswith(
        "one has tg128 of llama 1.24B Q4_K - Medium (799.9 MB) with 2 threads; the other"
    )


def test_another_type_of_the_only_model_is_compared_with_a_word() -> None:
    q8 = {"model_type": "llama 1B Q8_0", "model_size": 1_300_000_000}
    pair = only(compared((row(),), (row(rate=25, **q8),)))
    assert [difference.what for difference in pair.differences] == ["model"]
    assert pair.differences[0].b == "llama 1.24B Q8_0 (1.3 GB)"
    with pytest.raises(UsageError):
        compared((row(),), (row(**q8), row(model_type="llama 7B", model_size=1)))


def test_another_program_is_compared_with_a_word() -> None:
    theirs = replace(row(program="llama-bench", version="1 (abc)", load_mode="auto"), machine=None, limit=None)
    pair = only(compared((row(),), (theirs,)))
    assert [str(difference) for difference in pair.differences] == ["program llmrun / llama-bench"]
    sweep = compared((theirs,), (row(n_threads=1), row(n_threads=2)))
    assert [(pair.a.n_threads, pair.b.n_threads) for pair in sweep.pairs] == [(2, 2)]


def test_gpu_layers_of_a_machine_without_a_gpu_mean_nothing() -> None:
    assert not only(compared((row(n_gpu_layers=99),), (row(n_gpu_layers=-1),))).differences
    gpu = {"backends": "CUDA"}
    assert only(compared((row(n_gpu_layers=99, **gpu),), (row(n_gpu_layers=10, **gpu),))).differences


def test_what_was_disturbed_is_not_believed_lightly() -> None:
    warning = BenchWarning("load", "other programs used 1.3 of 2 cores")
    calm = only(compared((row(),), (row(rate=34),)))
    assert calm.verdict.kind == "slower"
    disturbed = only(compared((row(),), (row(rate=34, warnings=(warning,)),)))
    assert disturbed.verdict.kind == "noisy"
    assert disturbed.notes == (f"B: {warning.text}",)
    assert disturbed.verdict.why == "B was disturbed"
    assert only(compared((row(),), (row(rate=15, warnings=(warning,)),))).verdict.kind == "slower", (
        "that is no disturbance"
    )


def test_runs_count_as_samples_when_there_are_enough() -> None:
    """Each run is steady in itself; from run to run they differ by 3 %, and that is what counts."""
    rates = (40.0, 41.2, 38.9, 40.4, 39.3)
    many = ComparedSide("many", tuple(result(row(rate=rate)) for rate in rates))
    like = ComparedSide("like", tuple(result(row(rate=rate * 1.01)) for rate in reversed(rates)))
    pair = only(compare_results(many, like))
    assert (pair.runs, pair.verdict.kind) == ((5, 5), "same")
    assert pair.notes == ("each run counts as one sample",)
    better = ComparedSide("better", tuple(result(row(rate=rate * 1.12)) for rate in rates))
    assert only(compare_results(many, better)).verdict.kind == "faster"


def test_a_machine_that_is_known_to_vary_is_given_more_room() -> None:
    restless = ComparedSide("A", tuple(result(row(rate=rate)) for rate in (40, 44, 36, 43, 37)))
    once = ComparedSide("B", (result(row(rate=37)),))
    steady = ComparedSide("A", tuple(result(row(rate=40)) for _ in range(5)))
    assert only(compare_results(steady, once)).verdict.kind == "slower"
    assert only(compare_results(restless, once)).verdict.kind == "noisy"


def test_machines_are_told_apart_by_what_is_known_of_both() -> None:
    ryzen = replace(XEON, name="r", cpu="Ryzen 7", cpu_flags=("avx2",), cores=8, threads=8, cpu_quota=2.0, python="")
    ryzen = replace(ryzen, memory_total=32 << 30, memory_speed="DDR5-4800", llama="0.3.40")
    assert [str(each) for each in machine_differences(XEON, ryzen)] == [
        "processor Intel(R) Xeon(R) Processor / Ryzen 7",
        "its instructions avx512f / none of its own",
        "cores 2 / 8",
        "usable threads 2 / 8",
        "container's quota none / 2",
        "memory 25.8 GB / 34.4 GB",
        "llama-cpp-python 0.3.36 / 0.3.40",
    ]
    assert machine_differences(XEON, replace(XEON, build_commit="0c1e570-dirty")) == ()
    from_llama_bench = Machine(cpu=XEON.cpu, threads=1, build_commit="abc")
    assert [str(each) for each in machine_differences(XEON, from_llama_bench)] == ["ggml 0c1e570 / abc"]
    assert machine_differences(XEON, replace(XEON, name="another name")) == ()
    assert [each.what for each in machine_differences(Machine(cpu="a"), Machine(cpu="b", threads=9))] == ["processor"]


def test_chance_is_named_where_it_may_have_done_it() -> None:
    tests = [f"tg128 @ d{depth}" for depth in range(20)]
    a = tuple(row(test) for test in tests)
    b = tuple(row(test, rate=50 if index == 3 else 40) for index, test in enumerate(tests))
    assert compared(a, b).summary == "1 of 20 rows differ; chance alone makes 1 of 20 look different"
    assert compared(a, a).summary == "no difference seen"
    noisy = row(spread=(1, 0.5, 1.5, 0.7, 1.3))
    assert compared((noisy,), (noisy,)).summary == "too noisy to tell"
    assert compared((noisy, a[1]), (noisy, a[1])).summary == "no difference seen, 1 is too noisy to tell"


def test_the_json_is_json_even_without_an_upper_end() -> None:
    once = row(spread=(1.0,))
    data = json.loads(json.dumps(compared((once,), (row(n_threads=1),)).to_json(), allow_nan=False))
    (pair,) = data["rows"]
    assert (pair["kind"], pair["high"], pair["samples"]) == ("noisy", None, [1, 5])
    assert pair["differences"][0] == {"what": "threads", "a": "2", "b": "1"}
    assert (data["a"], data["b"], data["machines"]) == ("A", "B", [])


def test_too_noisy_comes_with_a_way_out() -> None:
    restless = row(spread=(1, 1.03, 0.97, 1.025, 0.98))
    pair = only(compared((restless,), (restless,)))
    assert pair.verdict.kind == "noisy"
    (note,) = pair.notes
    found = re.fullmatch(r"the samples spread too far for their number: about (\d+) repetitions would do", note)
    assert found
    assert 6 <= int(found[1]) <= 20


def test_rows_without_samples_are_no_partners() -> None:
    stopped = row(spread=())
    with pytest.raises(UsageError):
        compared((stopped,), (row(),))


def test_sides_are_found_in_files_and_in_the_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMRUN_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs.json").write_text(json.dumps(result().to_json()))
    (tmp_path / "1").write_text(json.dumps(result(row(rate=1)).to_json()))
    with History(load_settings()) as history:
        for _ in range(3):
            history.add(result())
        assert resolve("theirs.json", history) == ComparedSide("theirs.json", (result(),))
        assert resolve("2", history).label == "result 2 (xeon-a42d42)"
        assert resolve("last", history).label == "result 3 (xeon-a42d42)"
        assert len(resolve("xeon-a42d42", history).results) == 3
        assert resolve("./1", history).results[0].rows[0].avg_ts < 2, "a file that is called like a number"
        with pytest.raises(UsageError, match=r"nothing\.json"):
            resolve("nothing.json", history)
        with pytest.raises(UsageError, match="no file and no earlier"):
            resolve("nothing", history)
        (tmp_path / "text.json").write_text("hello")
        with pytest.raises(LlmrunError, match=r"text\.json"):
            resolve("text.json", history)


def test_a_result_without_machine_is_compared_as_well() -> None:
    bare = Result((replace(row(), machine=None),))
    found = compare_results(ComparedSide("A", (bare,)), ComparedSide("B", (result(row()),)))
    assert found.machines == ()
