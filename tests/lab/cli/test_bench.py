"""`llmrun bench` as it is typed: lists, formats, and refusals before anything runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from support.gguf_writer import runnable_model, write
from typer.testing import CliRunner

from llmrun.errors import CancelledError, LlmrunError, UsageError
from llmrun.lab.bench.cases import BenchGrid
from llmrun.lab.bench.results import BenchRow, Machine, Result
from llmrun.lab.bench.run import BenchOutcome, BenchRequest
from llmrun.lab.cli import bench as command
from llmrun.planning.hardware import probe
from llmrun.protocol.settings import SETTINGS

pytestmark = pytest.mark.usefixtures("home")
app = typer.Typer()
app.command()(command.bench)
ROW = BenchRow(n_gen=8, test="tg8", model="tiny", model_type="llama", samples_ns=(10**9, 2 * 10**9), repetitions=2)


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(write(tmp_path / "tiny.gguf", runnable_model()))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[BenchRequest]:
    """What would have been run."""
    requests: list[BenchRequest] = []

    def run(request: BenchRequest, *rest: Any, **more: Any) -> BenchOutcome:
        requests.append(request)
        return BenchOutcome(Result((ROW,), Machine(name="here")), None)

    monkeypatch.setattr("llmrun.lab.cli.bench.run", run)
    return requests


def bench(*arguments: str) -> str:
    """What it prints on stdout; its error is raised."""
    done = CliRunner().invoke(app, list(arguments))
    if done.exception is not None:
        raise done.exception
    return str(done.stdout)


def typed(**lists: list[str]) -> BenchGrid:
    settings = {name: lists.pop(name) for name in [*lists] if name in SETTINGS}
    names = command.BenchArguments.__dataclass_fields__
    return command.grid_of(
        command.BenchArguments(**{name: lists.get(name) for name in names} | {"settings": settings}), 4
    )


def test_nothing_typed_is_llama_benchs_default_and_a_chat() -> None:
    assert typed() == BenchGrid({"threads": (4,)}, chats=((128, 64),))
    assert [case.test.name for case in typed().cases()] == ["pp512", "tg128", "chat128+64"]


def test_who_says_what_is_measured_gets_that() -> None:
    assert [case.test.name for case in typed(prompts=["8"]).cases()] == ["pp8", "tg128"]
    assert [case.test.name for case in typed(prompts=["0"], answers=["4"]).cases()] == ["tg4"]
    assert [case.test.name for case in typed(chats=["8,4"], prompts=["0"], answers=["0"]).cases()] == ["chat8+4"]
    assert [case.test.name for case in typed(pairs=["8,4"]).cases()] == ["pp512", "tg128", "pp8+tg4"]


def test_every_list_gets_to_its_place() -> None:
    found = typed(
        depths=["0,16"], n_batch=["64"], n_ubatch=["32"], threads=["1-3"], flash_attention=["on,0"], kv_type_k=["q8_0"],
        kv_type_v=["F32"], repack=["0"], gpu_layers=["-1,5"],
    )  # fmt: skip
    assert found.depths == (0, 16)
    assert found.settings == {
        "n_batch": (64,), "n_ubatch": (32,), "threads": (1, 2, 3), "flash_attention": ("on", "off"),
        "kv_type_k": ("q8_0",), "kv_type_v": ("f32",), "repack": (False,), "gpu_layers": (-1, 5),
    }  # fmt: skip


def test_options_as_llama_bench_has_them(model: str, asked: list[BenchRequest]) -> None:
    bench(model, "-p", "8,16", "-p", "4", "-n", "0", "-pg", "8,4", "-ub", "32", "-ctk", "f32", "-fa", "1", "-t", "1")
    (request,) = asked
    assert [case.test.name for case in request.cases] == ["pp8", "pp16", "pp4", "pp8+tg4"]
    settings = request.cases[0].settings
    assert (settings.n_ubatch, settings.kv_type_k, settings.flash_attention) == (32, "f32", "on")
    assert (request.repetitions, request.warm_up, request.with_limits) == (5, True, True)


def test_manner(model: str, asked: list[BenchRequest]) -> None:
    bench(model, "-r", "3", "--no-warmup", "--delay", "1.5", "--no-limits", "--machine", "desk")
    (request,) = asked
    assert (request.repetitions, request.warm_up, request.delay) == (3, False, 1.5)
    assert (request.with_limits, request.name, request.interleave) == (False, "desk", False)


def test_several_models_take_turns_unless_told_otherwise(tmp_path: Path, asked: list[BenchRequest]) -> None:
    names = [str(write(tmp_path / f"{name}.gguf", runnable_model())) for name in "ab"]
    bench(*names)
    bench(*names, "--no-interleave")
    bench(names[0], names[0])
    assert [request.interleave for request in asked] == [True, False, False]
    assert [len(request.models) for request in asked] == [2, 2, 1]
    assert [model.name for model in asked[0].models] == ["a", "b"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-p", "0", "-n", "0"], "nothing to measure"),
        (["-p", "1000000000"], "invalid test pp1000000000"),
        (["-t", "100000"], "invalid -t 100000"),
        (["-ctk", "q9"], "invalid -ctk q9"),
        (["-ctv", "q8_0", "-fa", "off"], "-ctv q8_0 needs flash attention"),
        (["-r", "0"], "--repetitions 0"),
        (["-o", "xml"], "invalid -o xml"),
        (["-o", "x.txt"], "invalid -o x.txt"),
        (["-o", "no/such/folder/x.json"], "there is no folder"),
    ],
)
def test_refused_before_anything_runs(model: str, asked: list[BenchRequest], arguments: list[str], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        bench(model, *arguments)
    assert words in caught.value.what
    assert asked == []


def test_what_does_not_fit_is_refused(model: str, asked: list[BenchRequest], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmrun.planning.hardware.probe", lambda: _small())
    with pytest.raises(LlmrunError, match="tiny does not fit into memory for pp16000000"):
        bench(model, "-p", "16000000")
    assert asked == []


def _small() -> Any:
    return replace(probe(), memory_total=1 << 30, memory_available=1 << 28)


def test_without_a_model_it_says_what_to_type() -> None:
    with pytest.raises(UsageError, match="bench needs a model"):
        bench()


def test_formats_are_whole_on_stdout(model: str, asked: list[BenchRequest]) -> None:
    import json

    assert json.loads(bench(model, "-o", "json"))[0]["test"] == "tg8"
    assert json.loads(bench(model, "--json"))[0]["n_gen"] == 8
    with pytest.raises(UsageError, match="can't be used together"):
        bench(model, "--json", "-o", "md")


def test_json_and_a_file_besides(asked: list[BenchRequest], model: str, tmp_path: Path) -> None:
    import json

    file = tmp_path / "result.md"
    assert json.loads(bench(model, "--json", "-o", str(file)))[0]["n_gen"] == 8
    assert "tg8" in file.read_text()
    assert json.loads(bench("history", "last", "--json", "-o", str(tmp_path / "again.csv")))[0]["n_gen"] == 8
    assert "tg8" in (tmp_path / "again.csv").read_text()
    assert bench(model, "-o", "csv").splitlines()[0].startswith("build_commit")
    assert "<html" in bench(model, "-o", "html")


def test_a_file_gets_the_format_of_its_name(model: str, asked: list[BenchRequest], tmp_path: Path) -> None:
    import json

    target = tmp_path / "result.json"
    assert bench(model, "-o", str(target)) == ""
    assert json.loads(target.read_text())[0]["test"] == "tg8"


def test_results_are_kept_unless_told_otherwise(model: str, asked: list[BenchRequest]) -> None:
    bench(model, "--no-save")
    assert bench("history") == ""
    bench(model)
    bench(model)
    listed = bench("history").splitlines()
    assert listed[0].split() == ["NUMBER", "WHEN", "MODELS", "TESTS", "MACHINE"]
    assert len(listed) == 3
    assert "tg8" in bench("history", "1")
    assert bench("history", "last", "-o", "md").startswith("|")


def test_comparing(model: str, asked: list[BenchRequest], tmp_path: Path) -> None:
    import json

    target = tmp_path / "a.json"
    bench(model, "-o", str(target))
    shown = bench("--compare", str(target), "1")
    assert "1.000" in shown
    assert json.loads(bench("--compare", "1", "last", "-o", "json"))["rows"]
    with pytest.raises(UsageError, match="no earlier bench result"):
        bench("--compare", "1", "99")
    with pytest.raises(UsageError, match="can't be written as csv"):
        bench("--compare", "1", "1", "-o", "csv")


def test_compare_and_rm_are_words_in_place_of_a_model(model: str, asked: list[BenchRequest]) -> None:
    for _ in range(2):
        bench("run", model)
    assert "1.000" in bench("compare", "1", "2")
    bench("rm", "1")
    with pytest.raises(UsageError, match="no earlier bench result"):
        bench("compare", "1", "2")
    assert len(bench("history").splitlines()) == 2
    for arguments in (["compare", "2"], ["rm"], ["rm", "1"]):
        with pytest.raises(UsageError):
            bench(*arguments)


def test_history_refuses_what_it_can_not_show() -> None:
    for arguments in (["history", "5"], ["history", "1", "2"], ["history", "-o", "md"]):
        with pytest.raises(UsageError):
            bench(*arguments)


def test_ctrl_c_shows_and_keeps_the_rows_and_ends_so(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import json

    def run(*anything: Any, **more: Any) -> BenchOutcome:
        return BenchOutcome(Result((ROW,), is_partial=True), CancelledError("stopped by Ctrl-C"))

    monkeypatch.setattr("llmrun.lab.cli.bench.run", run)
    done = CliRunner().invoke(app, [model, "--json"])
    assert isinstance(done.exception, CancelledError)
    assert json.loads(done.stdout)[0]["test"] == "tg8"
    assert "tg8" in bench("history")


class Rival:
    """Another program; it is half as fast, and fails at the second test when told so."""

    name, where = "llama-bench", "/llama-bench"

    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails

    def measure(self, model: Any, case: Any) -> BenchRow:
        if self.fails and case.test.n_gen:
            raise LlmrunError("llama-bench failed")
        return replace(_row(case), samples_ns=(2 * 10**9,), program="llama-bench")


def _row(case: Any) -> BenchRow:
    test = case.test
    return replace(ROW, test=test.name, n_prompt=test.n_prompt, n_gen=test.n_gen, samples_ns=(10**9,), repetitions=1)


@pytest.fixture
def rival(monkeypatch: pytest.MonkeyPatch) -> Rival:
    from llmrun.lab.cli import bench as bench_module

    @contextmanager
    def our_side(start: Any, hardware: Any) -> Iterator[Any]:
        yield lambda model, case: _row(case)

    found = Rival()
    monkeypatch.setattr(bench_module, "find", lambda program: found)
    monkeypatch.setattr(bench_module, "our_side", our_side)
    return found


def test_another_program_beside_ours(model: str, rival: Rival) -> None:
    lines = bench(model, "--vs", "llama-bench", "-p", "16", "-n", "8", "-r", "6").splitlines()
    assert lines[0].split()[:4] == ["TEST", "LLMRUN", "LLAMA-BENCH", "RATIO"]
    assert [line.split()[0] for line in lines[1:]] == ["pp16", "tg8"]
    assert all(line.split()[3] == "2.000" and line.endswith("faster") for line in lines[1:])
    assert "llama-bench" in bench("history", "last", "-o", "json")


def test_without_a_word_another_program_is_not_asked_for_a_chat(model: str, rival: Rival) -> None:
    lines = bench(model, "--vs", "llama-bench", "-r", "2").splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["pp512", "tg128"]


def test_what_was_measured_before_the_other_program_failed_is_shown(model: str, rival: Rival) -> None:
    rival.fails = True
    done = CliRunner().invoke(app, [model, "--vs", "llama-bench", "-p", "16", "-n", "8", "-r", "2"])
    assert isinstance(done.exception, LlmrunError)
    assert "pp16" in done.stdout
