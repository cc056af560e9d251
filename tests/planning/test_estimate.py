"""The outlook: each quantization's figures and verdict, the hub's files as candidates, and the table of it."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import gguf_writer
from support.gguf_writer import TENSORS, tiny_model
from support.mtp_models import write_mtp_model

from llmrun.config import load_settings
from llmrun.errors import ModelNotFoundError, OutOfMemoryError, UsageError
from llmrun.gguf.header import Header
from llmrun.gguf.reader import read_header
from llmrun.models import hub
from llmrun.models.download.transfer import ignore_note
from llmrun.models.hub import RemoteFile, Repository
from llmrun.models.registry import ModelSpec
from llmrun.planning.estimate import (
    QuantCandidate,
    QuantEstimate,
    best,
    contexts_for,
    is_open,
    local_candidate,
    look_ahead,
    parse_contexts,
    remote_candidates,
    types_of,
)
from llmrun.planning.hardware import Hardware, is_built_for_gpus
from llmrun.planning.plan import make_plan
from llmrun.planning.preferences import LoadPreferences
from llmrun.protocol.devices import Gpu
from llmrun.protocol.jobs.machine import MachineSpeed, Rates
from llmrun.runner.workers import RpcWorker
from llmrun.ui.terminal.format import context_name
from llmrun.ui.terminal.output import Output
from llmrun.ui.views.plan import show_estimates

GIB = 1 << 30
SPEED = MachineSpeed(1e10, 1e-6, {"F16": {64: 1e-8}}, {"F16": {64: 1e-9}}, {"Q4_K": Rates(((100.0, 1e10),), 1e11)})


def machine(free: int = 16 * GIB, gpus: tuple[Gpu, ...] = ()) -> Hardware:
    return Hardware("CPU", ("avx2",), 4, 8, None, free, free, gpus)


@pytest.fixture
def header(tmp_path: Path) -> Header:
    """A model with the KV cache of an 8B."""
    changes: dict[str, Any] = {
        "llama.context_length": 131_072,
        "llama.block_count": 32,
        "llama.embedding_length": 4096,
        "llama.attention.head_count": 32,
        "llama.attention.head_count_kv": 8,
    }
    path = tmp_path / "Tiny-Q4_1.gguf"
    path.write_bytes(gguf_writer.tiny_model(changes, TENSORS))
    return read_header(path)


def candidate(header: Header, size: int, quant: str = "Q4_K_M") -> QuantCandidate:
    return QuantCandidate(quant, f"big-{quant}.gguf", size, header, False)


def test_plenty_of_memory(header: Header) -> None:
    row = look_ahead(candidate(header, 5 * GIB), machine(64 * GIB), SPEED, (4096, 131_072))
    beside_the_weights = header.file_size - header.weight_bytes
    assert (row.verdict, row.n_ctx, row.weight_bytes) == ("fits", 131_072, 5 * GIB - beside_the_weights)
    short, long = row.contexts
    assert long.kv_bytes == 16 * GIB
    assert short.needed_bytes < long.needed_bytes
    assert short.fits
    assert long.fits
    assert row.decode_rate is not None
    assert short.decode_rate is not None
    assert long.decode_rate is not None
    assert row.decode_rate > short.decode_rate > long.decode_rate


def test_less_context(header: Header) -> None:
    row = look_ahead(candidate(header, 5 * GIB), machine(12 * GIB), SPEED, (4096, 131_072))
    assert row.verdict == "fits with less context"
    assert 4096 < row.n_ctx < 131_072
    assert [at.fits for at in row.contexts] == [True, False]


def test_windows_beyond_training_are_warned_about_as_by_run(header: Header) -> None:
    row = look_ahead(candidate(header, GIB), machine(), None, (4096, 131_072, 262_144))
    wished = make_plan(header, machine(256 * GIB), LoadPreferences(n_ctx=262_144))
    assert row.notes == wished.notes
    assert row.notes == ("context 262,144 tokens: the model was trained on 131,072, so answers get worse beyond that",)
    out, errors = io.StringIO(), io.StringIO()
    show_estimates(Output(stdout=out, stderr=errors, environment={}), [row], machine())
    assert row.notes[0] in errors.getvalue()


def test_prediction_heads_are_named_with_their_memory(tmp_path: Path) -> None:
    header = read_header(write_mtp_model(tmp_path / "heads.gguf", "qwen35", 1.0))
    own = local_candidate(header.path, header)
    with_heads = look_ahead(own, machine(), None, (1024,))
    without = look_ahead(own, machine(), None, (1024,), LoadPreferences(draft_heads=False))
    added = make_plan(header, machine(), LoadPreferences(n_ctx=1024)).draft_bytes
    assert with_heads.contexts[0].needed_bytes - without.contexts[0].needed_bytes == added > header.head_bytes
    assert with_heads.notes[-1].startswith("its prediction heads (MTP) draft, for ")
    assert without.notes[-1].endswith("are not used; --draft mtp uses them")


def test_too_big(header: Header) -> None:
    row = look_ahead(candidate(header, 20 * GIB), machine(), SPEED, (4096,))
    assert (row.verdict, row.n_ctx, row.contexts[0].fits) == ("too big", 0, False)


def test_smaller_kv_type_takes_less(header: Header) -> None:
    preferences = LoadPreferences(kv_type_k="q8_0", kv_type_v="q8_0")
    plain = look_ahead(candidate(header, GIB), machine(), None, (4096,)).contexts[0]
    small = look_ahead(candidate(header, GIB), machine(), None, (4096,), preferences).contexts[0]
    assert small.kv_bytes == plain.kv_bytes * 34 // 64


def test_without_speed_nothing_is_said_about_it(header: Header) -> None:
    row = look_ahead(candidate(header, GIB), machine(), None, (4096,))
    assert (row.load_seconds, row.prefill_rate, row.decode_rate, row.contexts[0].decode_rate) == (None,) * 4


def test_on_a_gpu_the_processors_speed_says_nothing(header: Header) -> None:
    gpus = (Gpu("CUDA0", "card", 24 * GIB, 23 * GIB),)
    row = look_ahead(candidate(header, 5 * GIB), machine(gpus=gpus), SPEED, (4096,))
    assert row.contexts[0].gpu_layers == -1
    assert row.contexts[0].vram_bytes > 5 * GIB
    assert row.decode_rate is None


def test_a_gpu_that_was_measured_is_predicted_with_its_share_of_the_layers(header: Header) -> None:
    fast = replace(
        SPEED,
        read=10 * SPEED.read,
        types={
            kind: replace(
                rates, decode=tuple((size, 10 * rate) for size, rate in rates.decode), prefill=10 * rates.prefill
            )
            for kind, rates in SPEED.types.items()
        },
    )

    def row(free: int, gpus: tuple[MachineSpeed, ...] = (fast,), **preferred: Any) -> QuantEstimate:
        there = machine(gpus=(Gpu("CUDA0", "card", 24 * GIB, free),) if free else ())
        chosen = LoadPreferences(**preferred)
        return look_ahead(candidate(header, 5 * GIB), there, SPEED, (4096,), chosen, gpus=gpus)

    whole, part, none = row(23 * GIB), row(23 * GIB, gpu_layers=1), row(0, ())
    rates = [each.decode_rate or 0 for each in (none, part, whole)]
    assert 0 < rates[0] < rates[1] < rates[2] < 11 * rates[0]
    prefills = [each.prefill_rate or 0 for each in (none, part, whole)]
    assert 0 < prefills[0] <= prefills[1] < prefills[2]  # the last layer is the output, which prompts need once
    assert (whole.contexts[0].decode_rate or 0) > 0
    assert row(23 * GIB, split_mode="tensor").decode_rate is None


def test_a_window_that_leaves_layers_to_a_gpu_has_no_speed_without_that_gpus(header: Header) -> None:
    small = machine(64 * GIB, gpus=(Gpu("CUDA0", "card", 24 * GIB, 43 * GIB // 8),))
    row = look_ahead(candidate(header, 5 * GIB), small, SPEED, (4096, 131_072))
    short, long = row.contexts
    assert short.gpu_layers > 0 == long.gpu_layers
    assert (short.decode_rate, long.decode_rate is not None) == (None, True)


def test_unknown_memory_refuses_nothing(header: Header) -> None:
    unknown = Hardware("CPU", (), 4, 8, None, 0, 0)
    row = look_ahead(candidate(header, 500 * GIB), unknown, None, (4096,))
    assert (row.verdict, row.contexts[0].fits) == ("fits", True)


def test_own_header_counts_more_than_the_name(header: Header) -> None:
    own = local_candidate(header.path, header)
    assert types_of([own]) == {tensor.type for tensor in header.tensors if len(tensor.shape) > 1}
    assert types_of([own, candidate(header, GIB, "UD-Q5_K_XL")]) == {*types_of([own]), "Q5_K"}
    assert look_ahead(own, machine(), None, ()).weight_bytes == header.weight_bytes


def test_contexts(header: Header) -> None:
    assert contexts_for(header) == (4096, 8192, 32_768, 131_072)
    assert contexts_for(header, (512, 256, 512)) == (256, 512)


def test_contexts_of_a_small_model(tmp_path: Path) -> None:
    path = gguf_writer.write(tmp_path / "m.gguf", gguf_writer.tiny_model())
    assert contexts_for(read_header(path)) == (128,)


def test_typed_contexts() -> None:
    assert parse_contexts("4096, 32K,1k") == (4096, 32_768, 1024)
    assert parse_contexts("4k,") == (4096,)
    assert parse_contexts("") == ()


@pytest.mark.parametrize("text", ["x", "-1", "255", "k", "1e4", "99999999", "٣٠٠"])
def test_contexts_that_make_no_sense(text: str) -> None:
    with pytest.raises(UsageError, match="invalid"):
        parse_contexts(text)


# ---- hub -------------------------------------------------------------------------------------------


@pytest.fixture
def repository(header: Header, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A repository of three quants, one of them split and one incomplete; gives the links whose headers were read."""
    sizes = {
        "m-Q8_0.gguf": 80,
        "m-Q4_K_M-00001-of-00002.gguf": 30,
        "m-Q4_K_M-00002-of-00002.gguf": 20,
        "m-Q6_K-00001-of-00002.gguf": 10,
    }
    files = tuple(RemoteFile(name, size, "0" * 64) for name, size in sizes.items())
    monkeypatch.setattr(hub, "repository_files", lambda *arguments: Repository("o/r", "c" * 40, False, files))
    monkeypatch.setattr(hub, "token", lambda: "secret")
    links: list[str] = []

    def read(url: str, *, token: str | None = None, **others: object) -> Header:
        links.append(f"{url} {token}")
        return header

    monkeypatch.setattr("llmrun.models.download.remote.read_remote_header", read)
    return links


def test_every_quant_of_a_repository(repository: list[str]) -> None:
    found = remote_candidates(
        ModelSpec("o/r", repository="o/r"), load_settings({"HF_ENDPOINT": "https://hub.test"}), ignore_note
    )
    assert {(one.quant, one.n_bytes, one.exact) for one in found} == {("Q4_K_M", 50, True), ("Q8_0", 80, False)}
    assert repository == [f"https://hub.test/o/r/resolve/{'c' * 40}/m-Q4_K_M-00001-of-00002.gguf secret"]


def test_the_quant_that_was_named_is_looked_at_closely(repository: list[str]) -> None:
    found = remote_candidates(ModelSpec("o/r:Q8_0", repository="o/r", quant="Q8_0"), load_settings({}), ignore_note)
    assert [one.quant for one in found if one.exact] == ["Q8_0"]


def test_a_link_is_one_file(repository: list[str]) -> None:
    (found,) = remote_candidates(ModelSpec("x", url="https://x.test/m.gguf"), load_settings({}), ignore_note)
    assert found.exact
    assert repository == ["https://x.test/m.gguf None"]


def test_a_repository_without_models(repository: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "repository_files", lambda *arguments: Repository("o/r", "c" * 40, False, ()))
    with pytest.raises(ModelNotFoundError):
        remote_candidates(ModelSpec("o/r", repository="o/r"), load_settings({}), ignore_note)


# ---- table -----------------------------------------------------------------------------------------


def shown(rows: list[Any], hardware: Hardware) -> tuple[list[str], str]:
    """Lines on stdout, and stderr."""
    out, errors = io.StringIO(), io.StringIO()
    show_estimates(Output(stdout=out, stderr=errors, environment={}), rows, hardware)
    return out.getvalue().splitlines(), errors.getvalue()


def test_table(header: Header) -> None:
    hardware = machine(12 * GIB)
    sizes = {"Q4_K_M": 5 * GIB, "Q8_0": 20 * GIB}
    rows = [
        look_ahead(candidate(header, size, quant), hardware, SPEED, (4096, 131_072)) for quant, size in sizes.items()
    ]
    (heading, small, large), errors = shown(rows, hardware)
    assert heading.split() == ["QUANT", "FILE", "4k", "CTX", "128k", "CTX", "LOAD", "PREFILL", "DECODE", "VERDICT"]
    assert small.split()[:4] == ["Q4_K_M", "5.4", "GB", "6.0"]
    assert " → " in small
    assert small.endswith(f"fits with --ctx {rows[0].n_ctx}")
    assert large.endswith("too big")
    assert large.count("(") == 2
    assert "12.9 GB of 12.9 GB free" in errors
    assert "in brackets" in errors


def test_table_with_a_gpu(header: Header) -> None:
    hardware = machine(gpus=(Gpu("CUDA0", "Imaginary 3060", 12 * GIB, 4 * GIB),))
    row = look_ahead(candidate(header, 6 * GIB), hardware, SPEED, (4096,))
    (_, line), errors = shown([row], hardware)
    assert line.endswith(f"{row.contexts[0].gpu_layers} layers on the GPU")
    assert "Imaginary 3060: 4.3 GB of 12.9 GB free" in errors


def test_table_with_workers(header: Header) -> None:
    worker = RpcWorker("far:50052", (20 * GIB,), 24 * GIB)
    hardware = replace(machine(), workers=(worker,))
    row = look_ahead(candidate(header, 20 * GIB), hardware, None, (4096,))
    assert row.verdict != "too big"
    assert row.decode_rate is None
    _, said = shown([row], hardware)
    assert "far:50052: 21.5 GB of 25.8 GB free" in said
    assert "on far:50052; " in said
    assert "llmrun bench MODEL --rpc HOST:PORT measures them" in said


def test_nothing_fits(header: Header) -> None:
    row = look_ahead(candidate(header, 60 * GIB), machine(), None, (4096,))
    assert "smaller models" in shown([row], machine())[1]


@pytest.mark.parametrize(("n_ctx", "name"), [(4096, "4k"), (131_072, "128k"), (5000, "5,000")])
def test_context_name(n_ctx: int, name: str) -> None:
    assert context_name(n_ctx) == name


def test_speeds_of_a_busy_machine_are_marked_as_estimates(header: Header) -> None:
    row = look_ahead(candidate(header, GIB), machine(), SPEED, (4096,))
    shown = {}
    for is_estimated in (False, True):
        out, errors = io.StringIO(), io.StringIO()
        speed = replace(SPEED, is_estimated=is_estimated)
        show_estimates(Output(stdout=out, stderr=errors, environment={}), [row], machine(), speed=speed)
        shown[is_estimated] = out.getvalue().count("~"), "processor time" in errors.getvalue()
    assert shown == {False: (0, False), True: (2, True)}


# ---- the rule that chooses a quant: the usual one with a context worth having, else the largest that fits


GB = 10**9


@pytest.fixture
def sized_header(tmp_path: Path) -> Header:
    """An 8B, of whose KV cache 4,096 tokens take 0.54 GB."""
    changes = {
        "llama.context_length": 131_072, "llama.block_count": 32, "llama.embedding_length": 4096,
        "llama.attention.head_count": 32, "llama.attention.head_count_kv": 8,
    }  # fmt: skip
    path = tmp_path / "m-Q4_K_M.gguf"
    path.write_bytes(tiny_model(changes))
    return read_header(path)


def machine_with(ram: float, vram: float = 0, *, shared: bool = False) -> Hardware:
    gpus = (Gpu("CUDA0", "card", int(vram * GB), int(vram * GB), shared),) if vram else ()
    return Hardware("CPU", (), 4, 8, None, 64 * GB, int(ram * GB), gpus)


def taken(sized_header: Header, hardware: Hardware, **gigabytes: float) -> tuple[str, str]:
    """The quant, of those of these sizes the first being the usual one, and why."""
    candidates = [
        QuantCandidate(
            quant, f"m-{quant}.gguf", int(size * GB), _of_size(sized_header, size, exact=not number), not number
        )
        for number, (quant, size) in enumerate(gigabytes.items())
    ]
    chosen, why = best(candidates, hardware, "a/b")
    return chosen.quant, why


def _of_size(sized_header: Header, gigabytes: float, *, exact: bool) -> Header:
    if not exact:
        return sized_header
    tensor = replace(sized_header.tensors[-1], n_bytes=int(gigabytes * GB))
    return replace(sized_header, tensors=(tensor,), file_size=int(gigabytes * GB))


QUANTS = {"Q4_K_M": 4.7, "Q2_K": 3.0, "IQ3_XXS": 3.3, "Q3_K_M": 3.8, "Q8_0": 8.1}


def test_the_usual_one_where_it_fits(sized_header: Header) -> None:
    quant, why = taken(sized_header, machine_with(64), **QUANTS)
    assert quant == "Q4_K_M"
    assert why.startswith("Q4_K_M of Q4_K_M (4.7 GB), Q2_K (3.0 GB)")
    assert taken(sized_header, machine_with(64), Q4_K_M=4.7) == ("Q4_K_M", "")  # nothing was to be chosen


def test_the_largest_that_fits_with_a_context_worth_having(sized_header: Header) -> None:
    quant, why = taken(sized_header, machine_with(5.8), **QUANTS)
    assert quant == "Q3_K_M"
    assert why == (
        "Q3_K_M (3.8 GB): Q4_K_M with 4.7 GB and a KV cache of 4,096 tokens does not fit into 5.8 GB of memory"
    )


def test_a_short_context_is_better_than_none(sized_header: Header) -> None:
    assert taken(sized_header, machine_with(4.1), **QUANTS)[0] == "IQ3_XXS"


def test_memory_of_a_gpu_counts(sized_header: Header) -> None:
    with pytest.raises(OutOfMemoryError):
        taken(sized_header, machine_with(2), **QUANTS)
    assert taken(sized_header, machine_with(2, 8), **QUANTS)[0] == "Q4_K_M"
    with pytest.raises(OutOfMemoryError):  # the same memory twice is no more
        taken(sized_header, machine_with(2, 8, shared=True), **QUANTS)


def test_no_quant_fits(sized_header: Header) -> None:
    with pytest.raises(OutOfMemoryError, match="no quant of a/b fits") as caught:
        taken(sized_header, machine_with(8, 2), Q4_K_M=47, Q2_K=30)
    assert caught.value.why == "the smallest, Q2_K, takes 30.0 GB; 8.0 GB of memory and 2.0 GB on GPUs are free"
    assert "a/b:Q2_K" in caught.value.hint


def test_unknown_memory_refuses_no_quant(sized_header: Header) -> None:
    assert taken(sized_header, Hardware("CPU", (), 4, 8, None, 0, 0), Q4_K_M=470)[0] == "Q4_K_M"


def test_who_names_a_quant_or_a_file_gets_it() -> None:
    assert is_open(ModelSpec("a/b", repository="a/b"))
    assert is_open(ModelSpec("x", repository="a/b", quant="Q4_0", filename="m.gguf", any_quant=True))
    assert not is_open(ModelSpec("a/b:Q4_0", repository="a/b", quant="Q4_0"))
    assert not is_open(ModelSpec("a/b/m.gguf", repository="a/b", filename="m.gguf"))


@pytest.mark.parametrize(
    ("names", "built"),
    [
        (["libggml-base.so", "libggml-cpu.so", "libggml.so", "libllama.so"], False),
        (["libggml-base.so.0", "libggml-cpu-haswell.so", "libggml-blas.so"], False),
        (["libggml-cpu.so", "libggml-cuda.so"], True),
        (["ggml-vulkan.dll", "ggml-base.dll"], True),
        (["libggml-metal.dylib"], True),
    ],
)
def test_whether_an_engine_is_asked_for_gpus(tmp_path: Path, names: list[str], built: bool) -> None:
    for name in names:
        (tmp_path / name).touch()
    assert is_built_for_gpus(tmp_path) == built
    assert not is_built_for_gpus(tmp_path / "nowhere")
