"""The rule that chooses a quant: the usual one with a context worth having, else the largest that fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.gguf_writer import tiny_model

from llmrun.errors import OutOfMemoryError
from llmrun.gguf.header import Header
from llmrun.gguf.reader import read_header
from llmrun.models.registry import ModelSpec
from llmrun.planning.choice import best, is_open
from llmrun.planning.estimate import QuantCandidate
from llmrun.planning.hardware import Hardware
from llmrun.planning.machine import is_built_for_gpus
from llmrun.protocol.devices import Gpu

GB = 10**9


@pytest.fixture
def header(tmp_path: Path) -> Header:
    """An 8B, of whose KV cache 4,096 tokens take 0.54 GB."""
    changes = {
        "llama.context_length": 131_072, "llama.block_count": 32, "llama.embedding_length": 4096,
        "llama.attention.head_count": 32, "llama.attention.head_count_kv": 8,
    }  # fmt: skip
    path = tmp_path / "m-Q4_K_M.gguf"
    path.write_bytes(tiny_model(changes))
    return read_header(path)


def machine(ram: float, vram: float = 0, *, shared: bool = False) -> Hardware:
    gpus = (Gpu("CUDA0", "card", int(vram * GB), int(vram * GB), shared),) if vram else ()
    return Hardware("CPU", (), 4, 8, None, 64 * GB, int(ram * GB), gpus)


def taken(header: Header, hardware: Hardware, **gigabytes: float) -> tuple[str, str]:
    """The quant, of those of these sizes the first being the usual one, and why."""
    candidates = [
        QuantCandidate(quant, f"m-{quant}.gguf", int(size * GB), _of_size(header, size, exact=not number), not number)
        for number, (quant, size) in enumerate(gigabytes.items())
    ]
    chosen, why = best(candidates, hardware, "a/b")
    return chosen.quant, why


def _of_size(header: Header, gigabytes: float, *, exact: bool) -> Header:
    if not exact:
        return header
    tensor = replace(header.tensors[-1], n_bytes=int(gigabytes * GB))
    return replace(header, tensors=(tensor,), file_size=int(gigabytes * GB))


QUANTS = {"Q4_K_M": 4.7, "Q2_K": 3.0, "IQ3_XXS": 3.3, "Q3_K_M": 3.8, "Q8_0": 8.1}


def test_the_usual_one_where_it_fits(header: Header) -> None:
    quant, why = taken(header, machine(64), **QUANTS)
    assert quant == "Q4_K_M"
    assert why.startswith("Q4_K_M of Q4_K_M (4.7 GB), Q2_K (3.0 GB)")
    assert taken(header, machine(64), Q4_K_M=4.7) == ("Q4_K_M", "")  # nothing was to be chosen


def test_the_largest_that_fits_with_a_context_worth_having(header: Header) -> None:
    quant, why = taken(header, machine(5.8), **QUANTS)
    assert quant == "Q3_K_M"
    assert why == (
        "Q3_K_M (3.8 GB): Q4_K_M with 4.7 GB and a KV cache of 4,096 tokens does not fit into 5.8 GB of memory"
    )


def test_a_short_context_is_better_than_none(header: Header) -> None:
    assert taken(header, machine(4.1), **QUANTS)[0] == "IQ3_XXS"


def test_memory_of_a_gpu_counts(header: Header) -> None:
    with pytest.raises(OutOfMemoryError):
        taken(header, machine(2), **QUANTS)
    assert taken(header, machine(2, 8), **QUANTS)[0] == "Q4_K_M"
    with pytest.raises(OutOfMemoryError):  # the same memory twice is no more
        taken(header, machine(2, 8, shared=True), **QUANTS)


def test_nothing_fits(header: Header) -> None:
    with pytest.raises(OutOfMemoryError, match="no quant of a/b fits") as caught:
        taken(header, machine(8, 2), Q4_K_M=47, Q2_K=30)
    assert caught.value.why == "the smallest, Q2_K, takes 30.0 GB; 8.0 GB of memory and 2.0 GB on GPUs are free"
    assert "a/b:Q2_K" in caught.value.hint


def test_unknown_memory_refuses_nothing(header: Header) -> None:
    assert taken(header, Hardware("CPU", (), 4, 8, None, 0, 0), Q4_K_M=470)[0] == "Q4_K_M"


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
