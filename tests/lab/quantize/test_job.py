"""Quantization with a fake engine: refusals, notes, progress and failures."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.gguf_writer import TensorSpec, gguf, metadata, write
from support.quantize_engine import Engine, model, specs

from llmrun.errors import BadModelError, CancelledError, DiskFullError, EngineCrashedError, ResourceError, UsageError
from llmrun.lab.quantize import job
from llmrun.lab.quantize.job import QuantizeRequest, all_cores, preview, quantize
from llmrun.planning.hardware import Hardware
from llmrun.protocol.jobs.quantize import QuantizeUpdate


@pytest.fixture
def request_(tmp_path: Path) -> QuantizeRequest:
    source = write(tmp_path / "model-F16.gguf", model("F16"))
    return QuantizeRequest(source, tmp_path / "model-Q4_0.gguf", "Q4_0", threads=3)


def run(request: QuantizeRequest, engine: Engine, **more: Any) -> job.QuantizedFile:
    return quantize(request, engine=engine, **more)  # type: ignore[arg-type]


def look(request: QuantizeRequest, engine: Engine) -> job.Preview:
    return preview(request, engine)  # type: ignore[arg-type]


def test_a_file_is_made(request_: QuantizeRequest) -> None:
    before = request_.source.read_bytes()
    shares: list[float] = []
    done = run(request_, Engine("Q4_0"), on_update=lambda phase, share: shares.append(share))
    assert request_.target.read_bytes() == model("Q4_0")
    assert request_.source.read_bytes() == before
    assert (done.source_type, done.type, done.n_bytes) == ("F16", "Q4_0", len(model("Q4_0")))
    assert (done.path, done.source_bytes, done.notes) == (request_.target, len(before), ())
    assert done.bytes_per_type == {"Q4_0": 3 * 64 * 16 // 32 * 18, "F32": 256}
    assert shares == [0.0, 1.0]


def test_the_command_for_the_engine(request_: QuantizeRequest, tmp_path: Path) -> None:
    engine = Engine("Q4_0")
    asked = replace(request_, overrides=(("ffn", "Q8_0"),), embedding_type="Q8_0", pure=True, imatrix=tmp_path / "i")
    run(asked, engine)
    dry, real = engine.commands
    assert dry.target == ""
    assert Path(real.target).parent == request_.target.parent
    assert real == replace(dry, target=real.target)
    assert real.source == str(request_.source)
    assert (real.file_type, real.overrides, real.embedding_type, real.output_type) == (2, (("ffn", 8),), 8, -1)
    assert (real.threads, real.pure, real.imatrix) == (3, True, str(tmp_path / "i"))


def test_the_size_is_known_before(request_: QuantizeRequest) -> None:
    found = look(request_, Engine("Q4_0"))
    assert found.n_bytes == len(model("Q4_0"))
    assert found.bits_per_weight == pytest.approx(8 * (3 * 576 + 256) / (3 * 1024 + 64))
    assert not request_.target.exists()


# ---- what makes no sense ---------------------------------------------------------------------------


def test_a_type_that_is_larger_than_the_source(request_: QuantizeRequest) -> None:
    write(request_.source, model("Q4_0"))
    with pytest.raises(UsageError) as error:
        look(replace(request_, type="Q8_0"), Engine("Q8_0"))
    assert error.value.what == "Q8_0 would be larger than 'model-F16.gguf'"
    assert "would not restore lost precision" in error.value.why


def test_a_larger_copy_for_fast_prompts(request_: QuantizeRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    write(request_.source, model("Q4_1"))
    machine = Hardware("Some CPU", ("avx2",), 4, 8, None, 1 << 34, 1 << 33)
    monkeypatch.setattr(job, "probe", lambda: machine)
    assert look(replace(request_, type="Q8_0"), Engine("Q8_0")).n_bytes == len(model("Q8_0"))
    monkeypatch.setattr(job, "probe", lambda: replace(machine, cpu_flags=("asimddp",)))
    with pytest.raises(UsageError, match="would be larger"):
        look(replace(request_, type="Q8_0"), Engine("Q8_0"))


def test_nothing_would_change(request_: QuantizeRequest) -> None:
    with pytest.raises(UsageError, match="F16 already: nothing would change"):
        look(replace(request_, type="F16"), Engine("F16"))


@pytest.mark.parametrize("kind", ["IQ2_XS", "Q2_K_S", "IQ3_XXS"])
def test_types_that_need_an_importance_matrix(request_: QuantizeRequest, kind: str) -> None:
    engine = Engine("Q4_0")
    with pytest.raises(UsageError) as error:
        look(replace(request_, type=kind), engine)
    assert error.value.what == f"{kind} needs an importance matrix"
    assert "--imatrix auto" in error.value.hint
    assert not engine.commands


def test_a_tensor_that_needs_one(request_: QuantizeRequest, tmp_path: Path) -> None:
    asked = replace(request_, overrides=(("ffn", "IQ2_XS"),))
    with pytest.raises(UsageError, match="needs an importance matrix"):
        look(asked, Engine("Q4_0", needs_imatrix=True))
    look(replace(asked, imatrix=tmp_path / "i.gguf"), Engine("Q4_0", needs_imatrix=True))


@pytest.mark.parametrize("change", [{"overrides": (("ffn", "Q8_0"),)}, {"pure": True}])
def test_unquantized_types_have_no_mix(request_: QuantizeRequest, change: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="has no effect with BF16"):
        look(replace(request_, type="BF16", **change), Engine("BF16"))


@pytest.mark.parametrize("field", ["embedding_type", "output_type"])
def test_a_type_whose_blocks_do_not_fit_would_kill_the_engine(request_: QuantizeRequest, field: str) -> None:
    with pytest.raises(UsageError) as error:
        look(replace(request_, **{field: "Q6_K"}), Engine("Q4_0"))  # of a tied model the output is the embedding
    assert error.value.why == "its rows of 64 weights don't divide into blocks of 256"


def test_the_source_is_never_the_target(request_: QuantizeRequest) -> None:
    before = request_.source.read_bytes()
    link = request_.target.with_name("link.gguf")
    link.symlink_to(request_.source)
    for target in (request_.source, link):
        with pytest.raises(UsageError, match="overwritten while it is read"):
            run(replace(request_, target=target), Engine("Q4_0"))
    with pytest.raises(UsageError, match="overwritten while it is read"):
        run(replace(request_, imatrix=write(request_.target, b"matrix")), Engine("Q4_0"))
    assert request_.source.read_bytes() == before


def test_names_that_llama_cpp_garbles(request_: QuantizeRequest) -> None:
    write(request_.source, gguf(metadata(), [*specs("F16"), TensorSpec("odd [1, 2]", (4,), 0, 16)]))
    with pytest.raises(BadModelError, match="ambiguous names"):
        look(request_, Engine("Q4_0"))


# ---- what should be known --------------------------------------------------------------------------


def test_requantizing_is_warned_about(request_: QuantizeRequest) -> None:
    write(request_.source, model("Q8_0"))
    (note,) = look(request_, Engine("Q4_0")).notes
    assert note.startswith("the source is quantized already (Q8_0)")
    (note,) = look(replace(request_, type="F16"), Engine("F16")).notes
    assert note == "the source is Q8_0: F16 is larger, but not better"


def test_other_types_than_requested(request_: QuantizeRequest) -> None:
    wanted = {"blk.0.attn_q.weight": "Q4_K", "blk.0.ffn_down.weight": "Q4_K"}
    (note,) = look(replace(request_, type="Q4_K_M"), Engine("Q4_0", wanted)).notes
    assert note == (
        "2 of 4 tensors get another type, because rows of 64 weights don't divide into its blocks: "
        "2 Q4_0 instead of Q4_K"
    )


def test_experts_of_a_model_that_has_none(request_: QuantizeRequest) -> None:
    (note,) = look(replace(request_, type="MXFP4_MOE"), Engine("Q8_0")).notes
    assert "has none" in note


def test_tensors_missing_in_the_importance_matrix(request_: QuantizeRequest, tmp_path: Path) -> None:
    engine = Engine("Q4_0")
    engine.unimportant = ("token_embd.weight", "blk.0.attn_q.weight")
    (note,) = run(replace(request_, imatrix=tmp_path / "i.gguf"), engine).notes
    assert note.startswith("1 tensors, e.g. blk.0.attn_q.weight, are not in the importance matrix")


# ---- failures: the target is as it was, and nothing is left ----------------------------------------


@pytest.mark.parametrize(
    "error", [CancelledError("stop"), KeyboardInterrupt(), EngineCrashedError("dead"), BadModelError("bad")]
)
def test_what_the_engine_raises(request_: QuantizeRequest, error: BaseException) -> None:
    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise error

    engine = Engine("Q4_0")
    engine.fails = fail
    assert_old_file_stays(request_, engine, type(error))


def test_a_write_that_the_system_refuses_says_why(request_: QuantizeRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> None:
        raise ResourceError("can't be written")

    engine = Engine("Q4_0")
    engine.fails = fail
    assert_old_file_stays(request_, engine, ResourceError)
    monkeypatch.setattr(job.new_file, "probe", lambda path: Path("/dev/full").write_bytes(b"x"))
    assert_old_file_stays(request_, engine, DiskFullError)


def test_a_file_that_is_not_what_was_planned(request_: QuantizeRequest) -> None:
    engine = Engine("Q4_0")
    outlook = look(request_, engine)
    outlook = replace(outlook, types={**outlook.types, "token_embd.weight": "Q8_0"})
    with pytest.raises(BadModelError, match="unexpected types"):
        run(request_, engine, estimate=outlook)
    assert not request_.target.exists()


def assert_old_file_stays(request: QuantizeRequest, engine: Engine, kind: type[BaseException]) -> None:
    request.target.write_bytes(b"old")
    before = sorted(request.target.parent.iterdir())
    with pytest.raises(kind):
        run(request, engine)
    assert request.target.read_bytes() == b"old"
    assert sorted(request.target.parent.iterdir()) == before


# ---- how far it is ---------------------------------------------------------------------------------


def test_the_share_grows_with_the_work(request_: QuantizeRequest) -> None:
    outlook = look(request_, Engine("Q4_0"))
    share = job._Share(outlook)
    head = outlook.n_bytes - 3 * 576 - 256
    steps = [
        (0, 0),
        (0, head),
        (0, head + 300),
        (1, head + 576),
        (1, head + 700),
        (3, head + 3 * 576),
        (4, outlook.n_bytes),
    ]
    found = [share.of(QuantizeUpdate(*step)) for step in steps]
    assert found == sorted(found)
    assert found[:2] == [0.0, 0.0]
    assert 0.1 < found[2] < found[3] == pytest.approx(1 / 3, abs=0.01)
    assert found[-1] == 1.0
    assert share.of(QuantizeUpdate(99, 1 << 40)) == 1.0


@pytest.mark.parametrize(("quota", "cores"), [(None, 8), (3.6, 4), (0.5, 1), (99.0, 8)])
def test_all_cores_are_those_that_may_be_used(quota: float | None, cores: int) -> None:
    assert all_cores(Hardware("", (), 4, 8, quota, 0, 0)) == cores


@pytest.mark.parametrize(("change", "is_kept"), [({}, True), ({"pure": True}, False), ({"type": "Q8_0"}, False)])
def test_prediction_heads_keep_8_bits(tmp_path: Path, change: dict[str, Any], is_kept: bool) -> None:
    """No importance matrix of the text has data for them."""
    heads = [TensorSpec("blk.1.nextn.eh_proj.weight", (64, 64), 1, 64 * 64 * 2)]
    facts = metadata(**{"llama.nextn_predict_layers": 1, "llama.block_count": 2})
    source = write(tmp_path / "heads-F16.gguf", gguf(facts, [*specs("F16"), *heads]))
    engine = Engine("Q4_0")
    asked = replace(QuantizeRequest(source, tmp_path / "o.gguf", "Q4_0", overrides=(("ffn", "Q6_K"),)), **change)
    with suppress(BadModelError, UsageError):  # the engine is a fake
        look(asked, engine)
    overrides = engine.commands[0].overrides
    assert overrides[0] == ("ffn", 14), "what the user names comes first"
    assert overrides[1:] == (((r"^blk\.\d+\.nextn\.", 8),) if is_kept else ())
