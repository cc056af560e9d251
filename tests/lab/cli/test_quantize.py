"""`llmrun quantize` as it is typed, with an engine that is none: names, questions, notes, refusals."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import typer
from support.gguf_writer import tiny_model, write
from support.quantize_engine import Engine, model
from typer.testing import CliRunner

from llmrun.errors import CancelledError, LlmrunError, ModelNotFoundError, UsageError
from llmrun.gguf.header import Header
from llmrun.lab.cli.quantize import quantize, report
from llmrun.lab.quantize import request
from llmrun.lab.quantize.evaluate import EvaluatedText
from llmrun.lab.quantize.report import LocalMeasurements
from llmrun.lab.quantize.request import SizeGoal, find, goal_bytes, read_size
from llmrun.planning.hardware import Hardware
from llmrun.protocol.devices import Gpu
from llmrun.protocol.jobs.text import TextTokens
from llmrun.runner import client

app = typer.Typer()
app.command()(quantize)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """In an empty folder with one model."""
    found = Engine("Q4_0")
    monkeypatch.setattr(client, "prestarted", lambda: found)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "tiny-F16.gguf", model("F16"))
    return found


def run(*arguments: str, **more: Any) -> Any:
    """The result, which must be a success."""
    done = CliRunner().invoke(app, arguments, **more)
    if done.exception:
        raise done.exception
    return done


def refused(*arguments: str) -> LlmrunError:
    error = CliRunner().invoke(app, arguments).exception
    assert isinstance(error, LlmrunError)
    return error


def test_the_name_follows_from_the_type(engine: Engine, tmp_path: Path) -> None:
    done = run("tiny-F16.gguf", "--type", "q4_0")
    assert (tmp_path / "tiny-Q4_0.gguf").read_bytes() == model("Q4_0")
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith(f"F16 {len(model('F16')) / 1000:.1f} kB -> Q4_0 ")


def test_a_folder_or_a_name_as_out(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    run("tiny-F16.gguf", "out", "--type", "q4_0")
    run("tiny-F16.gguf", "out/mine.gguf", "--type", "q4_0")
    run("tiny-F16.gguf", "-o", "out/other.gguf", "--type", "q4_0")
    files = ["mine.gguf", "other.gguf", "tiny-Q4_0.gguf"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == files


def test_int4_is_the_default_and_says_why(engine: Engine) -> None:
    done = run("tiny-F16.gguf", "--dry-run")  # rows of 64
    assert "rows of 64 weights" in done.stderr
    assert "would have" in done.stderr


def test_a_dry_run_writes_nothing(engine: Engine, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    found = json.loads(run("tiny-F16.gguf", "--type", "q4_0", "--dry-run", "--json").stdout)
    assert (found["path"], found["type"], found["n_bytes"]) == ("tiny-Q4_0.gguf", "Q4_0", len(model("Q4_0")))
    assert sorted(tmp_path.iterdir()) == before


def test_json(engine: Engine) -> None:
    done = run("tiny-F16.gguf", "--type", "q4_0", "--json")
    assert json.loads(done.stdout)["path"] == "tiny-Q4_0.gguf"


def test_what_is_there_is_not_replaced_unasked(engine: Engine, tmp_path: Path) -> None:
    target = write(tmp_path / "tiny-Q4_0.gguf", b"old")
    error = refused("tiny-F16.gguf", "--type", "q4_0")
    assert (error.what, error.hint) == ("'tiny-Q4_0.gguf' exists already", "-y replaces it")
    assert not engine.commands
    assert target.read_bytes() == b"old"
    run("tiny-F16.gguf", "--type", "q4_0", "-y")
    assert target.read_bytes() == model("Q4_0")


def test_an_importance_matrix_is_not_replaced_unasked(engine: Engine, tmp_path: Path) -> None:
    matrix = write(tmp_path / "mine.imatrix.gguf", b"old")
    error = refused("tiny-F16.gguf", "mine.gguf", "--type", "q4_0", "--imatrix", "auto")
    assert error.what == "'mine.imatrix.gguf' exists already"
    assert matrix.read_bytes() == b"old"


def test_a_person_is_asked(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "tiny-Q4_0.gguf", b"old")
    monkeypatch.setattr("llmrun.ui.terminal.output.Output.can_ask", True)
    monkeypatch.setattr("llmrun.ui.terminal.output.Output.confirm", lambda self, question: False)
    assert isinstance(refused("tiny-F16.gguf", "--type", "q4_0"), CancelledError)
    assert not engine.commands


def test_notes_come_before_the_waiting(engine: Engine, tmp_path: Path) -> None:
    write(tmp_path / "tiny-Q8_0.gguf", model("Q8_0"))
    lines = run("tiny-Q8_0.gguf", "--type", "q4_0").stderr.splitlines()
    assert lines[0].startswith("note: the source is quantized already (Q8_0)")
    assert lines[1] == "tiny: quantizing"


def test_single_tensors(engine: Engine) -> None:
    run(
        "tiny-F16.gguf",
        "--type",
        "q4_0",
        "--tensor-type",
        "a=b=q8_0",
        "--tensor-type",
        "ffn=f16",
        "--pure",
        "--keep-output",
    )
    command = engine.commands[-1]
    assert command.overrides == (("a=b", 8), ("ffn", 1))
    assert (command.pure, command.keeps_output) == (True, True)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("tiny-F16.gguf", "--type", "q4_9"), "there is no type 'q4_9'"),
        (("tiny-F16.gguf", "--type", "iq1_s"), "IQ1_S needs an importance matrix"),
        (("tiny-F16.gguf", "out.bin"), "'out.bin' does not end in .gguf"),
        (("tiny-F16.gguf", "nowhere/out.gguf"), "there is no folder 'nowhere'"),
        (("tiny-F16.gguf", "tiny-F16.gguf"), "'tiny-F16.gguf' would be overwritten while it is read"),
        (("tiny-F16.gguf", "--tensor-type", "abc"), "invalid --tensor-type abc"),
        (("tiny-F16.gguf", "--tensor-type", "a=q4_k_m"), "--tensor-type a=q4_k_m: that is a mix of types"),
        (("tiny-F16.gguf", "--output-type", "q77"), "there is no type for --output-type 'q77'"),
        (("tiny-F16.gguf", "--size", "4GB", "--bpw", "4"), "--size and --bpw can't be used together"),
        (("tiny-F16.gguf", "--size", "4GB", "--type", "q4_0"), "--type and a size can't be used together"),
        (("tiny-F16.gguf", "--bpw", "4", "--tensor-type", "a=q8_0"), "a size and types of single tensors can't"),
        (("tiny-F16.gguf", "--ctx", "100"), "--ctx has no effect here"),
        (("tiny-F16.gguf", "--bpw", "99"), "invalid --bpw 99"),
        (("tiny-F16.gguf", "--type", "f16", "--imatrix", "tiny-F16.gguf"), "an importance matrix has no effect on F16"),
        (("tiny-F16.gguf", "--type", "q4_0", "--imatrix", "no.gguf"), "--imatrix: there is no file 'no.gguf'"),
        (("tiny-F16.gguf", "--calibration", "no.txt"), "--calibration: there is no file 'no.txt'"),
        (("tiny-F16.gguf", "--dry-run", "--imatrix", "auto"), "--dry-run would wait for --imatrix auto"),
        (("tiny-F16.gguf", "--types", "q4_0", "--type", "q4_0"), "a report needs --types instead of --type"),
        (("tiny-F16.gguf", "--types", "q4_0,q4_9"), "there is no type 'q4_9'"),
        (("tiny-F16.gguf", "--report-to", "x.txt"), "invalid --report-to 'x.txt'"),
        (("tiny-F16.gguf", "a.gguf", "-o", "b.gguf"), "-o b.gguf and 'a.gguf' are two output files"),
        (("tiny-F16.gguf", "out.gguf", "--types", "q4_0"), "'out.gguf' can't be the file of several types"),
    ],
)
def test_what_makes_no_sense(engine: Engine, arguments: tuple[str, ...], what: str) -> None:
    error = refused(*arguments)
    assert isinstance(error, UsageError)
    assert error.what.startswith(what)
    assert not engine.commands


@pytest.mark.usefixtures("engine")
def test_a_type_in_the_place_of_the_file_is_known() -> None:
    assert refused("tiny-F16.gguf", "q4_0").hint == "--type q4_0"


def test_a_report_reads_the_text_that_was_named(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def make_report(measures: LocalMeasurements, types: list[str], **options: Any) -> None:
        asked.update(options, types=types, text=measures._text, chunks=measures._chunks)
        raise CancelledError("that is all")

    monkeypatch.setattr("llmrun.lab.cli.quantize.make_report", make_report)
    tokenizing(monkeypatch, n_tokens=1280)
    (tmp_path / "text.txt").write_text("words")
    words = EvaluatedText("text.txt", "words")
    assert isinstance(refused("tiny-F16.gguf", "--report", "--text", "text.txt"), CancelledError)
    assert asked["text"] == words
    assert asked["types"][0] == "Q8_0"
    by_name = typer.Typer()
    by_name.command()(report)
    done = CliRunner().invoke(by_name, ["tiny-F16.gguf", "folder", "--types", "q6_k,q4_0", "--text", "text.txt"])
    assert isinstance(done.exception, CancelledError)
    assert (asked["types"], asked["text"], asked["keep"]) == (["Q6_K", "Q4_0"], words, Path("folder"))
    assert (asked["chunks"], asked["rounds"]) == (16, 5)
    CliRunner().invoke(by_name, ["tiny-F16.gguf", "--quick", "--text", "text.txt"])
    assert (asked["types"], asked["chunks"], asked["rounds"]) == (["Q8_0", "Q4_K_M", "Q4_0"], 4, 2)
    CliRunner().invoke(by_name, ["tiny-F16.gguf", "--quick", "--types", "q6_k", "--text", "text.txt"])
    assert (asked["types"], asked["chunks"]) == (["Q6_K"], 4)


def test_a_report_refuses_a_short_text_before_any_work(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizing(monkeypatch, n_tokens=1279)
    (tmp_path / "short.txt").write_text("words")
    error = refused("tiny-F16.gguf", "--report", "--text", "short.txt", "--imatrix", "auto")
    assert isinstance(error, UsageError)
    assert error.what == "the text is too short for a report"
    assert error.why == "short.txt has 1,279 tokens, and at least 1,280 are needed"  # 10 chunks of 128
    assert not engine.commands
    assert sorted(path.name for path in tmp_path.iterdir()) == ["short.txt", "tiny-F16.gguf"]


def test_a_report_refuses_a_text_that_can_not_be_read(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "binary.txt").write_bytes(b"caf\0\xe9")
    assert "it is binary, not text" in str(refused("tiny-F16.gguf", "--report", "--text", "binary.txt").why)
    assert "can't be read" in refused("tiny-F16.gguf", "--report", "--text", "nowhere.txt").what


def tokenizing(monkeypatch: pytest.MonkeyPatch, n_tokens: int) -> None:
    """Give every text that many tokens."""
    found = TextTokens((7,) * n_tokens, (), 100)
    tokenizer = SimpleNamespace(do=lambda kind, command: found, close=lambda: None)
    monkeypatch.setattr("llmrun.lab.quantize.report.EngineClient", lambda: tokenizer)


@pytest.mark.parametrize("options", [("--tensor-type", "a=q8_0"), ("--output-type", "q8_0"), ("--pure",)])
def test_a_report_refuses_by_name_what_it_would_not_use(engine: Engine, options: tuple[str, ...]) -> None:
    assert refused("tiny-F16.gguf", "--report", *options).what == f"{options[0]} has no effect here"


# ---- what is quantized -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"),
        ("model-F16.gguf", "model"),
        ("model-fp16.gguf", "model"),
        ("model.gguf", "model"),
        ("q4_0.gguf", "q4_0"),
        ("big-BF16-00001-of-00003.gguf", "big"),
    ],
)
def test_names_lose_type_and_part(tmp_path: Path, file: str, name: str) -> None:
    assert find(str(write(tmp_path / file, tiny_model()))).name == name


def test_what_is_not_here(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    error = refused("empty")
    assert isinstance(error, ModelNotFoundError)
    assert "config.json" in error.why
    error = refused("owner/model:q4_k_m")
    assert (error.what, error.hint) == ("owner/model:q4_k_m is not on this disk", "llmrun pull owner/model:q4_k_m")
    assert not engine.commands


# ---- sizes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [("4GB", 4_000_000_000), ("900 mb", 900_000_000), ("3.5GiB", 3_758_096_384), ("120000", 120_000), ("2k", 2000)],
)
def test_sizes_as_people_type_them(text: str, n_bytes: int) -> None:
    assert read_size(text) == n_bytes


@pytest.mark.parametrize("text", ["", "GB", "4XB", "-4GB", "0", "4GB5", "9" * 400, "1." + "0" * 400])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        read_size(text)


def test_what_a_goal_comes_to() -> None:
    gib = 1 << 30
    header = header_of(n_parameters=8 * gib, weight_bytes=16 * gib)
    assert goal_bytes(SizeGoal(n_bytes=4 * gib), header, machine(8 * gib)) == 4 * gib
    assert goal_bytes(SizeGoal(bits=4.5), header, machine(8 * gib)) == 1000 + int(4.5 * gib)
    fitting = goal_bytes(SizeGoal(fits=True, n_ctx=4096), header, machine(12 * gib))
    assert 8 * gib < fitting < 12 * gib
    assert goal_bytes(SizeGoal(fits=True, n_ctx=1024), header, machine(12 * gib)) > fitting
    for goal, free, what in (
        (SizeGoal(n_bytes=20 * gib), 8, "is not larger than that already"),
        (SizeGoal(n_bytes=gib // 2), 8, "can't be made as small as"),
        (SizeGoal(fits=True, n_ctx=4096), 64, "fits into memory as it is"),
        (SizeGoal(fits=True, n_ctx=131_072), 2, "no type makes"),
    ):
        with pytest.raises(LlmrunError, match=what):
            goal_bytes(goal, header, machine(free * gib))
    assert not SizeGoal()


def machine(free: int) -> Hardware:
    return Hardware("", (), 4, 8, None, free, free)


def header_of(n_parameters: int, weight_bytes: int) -> Any:
    """As much of a header as the arithmetic needs."""
    return SimpleNamespace(
        path=Path("m.gguf"),
        file_size=weight_bytes + 1000,
        weight_bytes=weight_bytes,
        n_parameters=n_parameters,
        bits_per_weight=8 * weight_bytes / n_parameters,
        n_embd=4096,
        n_vocab=32_000,
        n_merges=0,
        n_ctx_train=131_072,
        n_caches=lambda sequences: 1,
        recurrent_bytes=0,
        head_bytes=0,
        window_bytes=0,
        key_length=128,
        most_heads=32,
        kv_bytes_per_token=lambda n_bytes=2.0: 65_536 * n_bytes,
        cache_bytes=lambda n_tokens, n_bytes=2.0, **more: n_tokens * 65_536 * n_bytes,
        cache_shares=lambda n_tokens, n_bytes=2.0, **more: (1.0,),
    )


# ---- what others do --------------------------------------------------------------------------------


def test_a_size_goes_to_the_mix(engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []

    def choose(source: Path, n_bytes: int, **more: Any) -> Any:
        asked.append((source.name, n_bytes, more["imatrix"]))
        more["on_progress"](0.5)
        rows = (SimpleNamespace(kind="ffn_up.weight", types={"Q4_0": 2, "Q8_0": 1}, n_bytes=3 << 20),)
        return SimpleNamespace(base="Q4_0", overrides=(("^a$", "Q8_0"),), n_bytes=1234, divergence=0.01, table=rows)

    monkeypatch.setitem(sys.modules, "llmrun.lab.quantize.mix", SimpleNamespace(choose=choose))
    done = run("tiny-F16.gguf", "--bpw", "5.5")
    ((name, n_bytes, imatrix),) = asked
    assert (name, imatrix) == ("tiny-F16.gguf", None)
    assert n_bytes < 9000
    assert engine.commands[-1].overrides == (("^a$", 8),)
    assert (tmp_path / "tiny-5.5bpw.gguf").exists()
    assert "takes 1,234; expected KLD 0.0100:" in done.stderr
    assert "  ffn_up.weight     3.1 MB  2 Q4_0, 1 Q8_0" in done.stderr


def test_an_importance_matrix_is_collected_beside_the_target(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def collect(model: Path, target: Path, **more: Any) -> tuple[None, list[str]]:
        assert (more["text"], more["threads"]) == (None, 2)
        more["on_update"](SimpleNamespace(phase="reading", share=0.5))
        target.write_bytes(b"matrix")
        return None, ["the text is short"]

    monkeypatch.setattr("llmrun.lab.quantize.calibration.collect", collect)
    done = run("tiny-F16.gguf", "--type", "q4_0", "--imatrix", "auto", "-t", "2")
    assert (tmp_path / "tiny-Q4_0.imatrix.gguf").read_bytes() == b"matrix"
    assert engine.commands[-1].imatrix == str(tmp_path / "tiny-Q4_0.imatrix.gguf")
    assert "note: the text is short" in done.stderr
    assert "reuse it with --imatrix tiny-Q4_0.imatrix.gguf" in done.stderr
    assert "tiny: importance matrix, reading" in done.stderr


def test_nonsense_is_refused_before_anything_is_collected(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write(tmp_path / "tiny-Q4_0.gguf", model("Q4_0"))
    engine.makes = "Q8_0"
    monkeypatch.setattr("llmrun.lab.quantize.calibration.collect", lambda *arguments, **more: pytest.fail("collected"))
    error = refused("tiny-Q4_0.gguf", "--type", "q8_0", "--imatrix", "auto")
    assert error.what.startswith("Q8_0 would be larger than")


@pytest.mark.parametrize(
    ("platform", "gpus", "computes"),
    [("linux", (), False), ("linux", (Gpu("CUDA0", "", 1, 1),), True), ("darwin", (), True)],
)
def test_a_gpu_is_one_that_computes(
    monkeypatch: pytest.MonkeyPatch, platform: str, gpus: tuple[Gpu, ...], computes: bool
) -> None:
    said: list[str] = []
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(request, "probe", lambda: replace(machine(1), gpus=gpus))
    request.resolve_type(request.BEST_4_BIT, cast(Header, SimpleNamespace(tensors=())), said.append)
    assert ("fast kernels on a GPU" in said[0]) == computes
