"""Types: names, llama.cpp's numbers, and the best 4-bit type of made-up machines and models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support import quantize_engine
from support.gguf_writer import write

from llmrun.errors import LlmrunError, UsageError
from llmrun.gguf.header import _FILE_TYPES, Header, Tensor
from llmrun.gguf.reader import read_header
from llmrun.lab.cli import tune
from llmrun.lab.quantize.types import (
    ALIASES,
    BEST_4_BIT,
    FILE_TYPES,
    NEED_IMATRIX,
    TENSOR_TYPES,
    best_4_bit,
    cost,
    fast_copy,
    file_type,
    has_slow_prompts,
    is_quantized,
    slow_prompts,
    tensor_bytes,
    tensor_type,
    unfit,
)
from llmrun.planning.hardware import Hardware
from llmrun.protocol.devices import Gpu
from llmrun.protocol.jobs.machine import MachineSpeed, Rates

AVX2 = ("avx", "avx2", "fma", "f16c")
ARM = ("neon", "asimd", "asimddp", "i8mm")
OLD = ("sse4_2", "avx")


def tensor(name: str, *shape: int, kind: str = "F16") -> Tensor:
    elements = 1
    for length in shape:
        elements *= length
    return Tensor(name, shape, kind, elements * 2, 0)


def model(width: int) -> list[Tensor]:
    return [
        tensor("token_embd.weight", width, 1000),
        tensor("blk.0.ffn_down.weight", 4 * 256, width),
        tensor("n", width),
    ]


def test_the_numbers_are_those_of_the_files() -> None:
    for name, number in FILE_TYPES.items():
        assert _FILE_TYPES[number].removesuffix("_MOE") == name.removesuffix("_MOE")


def test_every_alias_and_exception_is_a_type() -> None:
    assert set(ALIASES.values()) <= set(FILE_TYPES)
    assert set(FILE_TYPES) > NEED_IMATRIX


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("q4_k_m", "Q4_K_M"), ("Q4-K-M", "Q4_K_M"), ("q4_k", "Q4_K_M"), ("int8", "Q8_0"), ("INT4", BEST_4_BIT),
        ("fp16", "F16"), ("mxfp4", "MXFP4_MOE"), (" iq4_nl ", "IQ4_NL"), ("bf16", "BF16"),
    ],
)  # fmt: skip
def test_types_as_people_type_them(typed: str, meant: str) -> None:
    assert file_type(typed) == meant


@pytest.mark.parametrize(
    ("typed", "hint"),
    [("q4_9", "Q4_0"), ("q4km", "Q4_K_M"), ("q5", "Q5_K_M"), ("int5", "INT4"), ("xyz", "one of ")],
)
def test_an_unknown_type_names_the_nearest(typed: str, hint: str) -> None:
    with pytest.raises(UsageError) as error:
        file_type(typed)
    assert repr(typed) in error.value.what
    assert hint in error.value.hint


def test_what_llama_cpp_can_only_read() -> None:
    with pytest.raises(UsageError, match="can read NVFP4, but not write"):
        file_type("nvfp4")


def test_a_tensor_takes_no_mix() -> None:
    assert tensor_type("q6_k", "--output-type ") == "Q6_K"
    with pytest.raises(UsageError) as error:
        tensor_type("q4_k_m", "--output-type ")
    assert "mix of types" in error.value.what
    assert error.value.hint == "--output-type Q4_K"
    with pytest.raises(UsageError) as error:
        tensor_type("q9", "--output-type ")
    assert "--output-type" in error.value.what


# ---- the best 4-bit type ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "flags", "gpu", "best"),
    [
        (2048, AVX2, False, "Q4_K_M"),
        (2048, ARM, False, "Q4_K_M"),
        (2048, OLD, False, "Q4_K_M"),
        (2048, (), True, "Q4_K_M"),
        (576, AVX2, False, "IQ4_NL"),
        (576, ARM, False, "IQ4_NL"),
        (576, OLD, True, "IQ4_NL"),
        (576, OLD, False, "Q4_0"),
    ],
)
def test_the_best_4_bit_type(width: int, flags: tuple[str, ...], gpu: bool, best: str) -> None:
    choice = best_4_bit(model(width), flags, gpu=gpu)
    assert choice.type == best
    assert ("576" in choice.why) == (width == 576)
    assert ("GPU" in choice.why) == gpu


def test_some_rows_that_do_not_divide_are_no_reason() -> None:
    mostly = [tensor("a", 2048, 10_000), tensor("b", 1000, 100)]
    assert best_4_bit(mostly, AVX2).type == "Q4_K_M"
    assert best_4_bit([], AVX2).type == "Q4_K_M"


def test_types_that_read_prompts_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMRUN_KERNELS", "ggml")
    assert slow_prompts("Q4_1", AVX2).startswith("Q4_1 reads prompts at about a third")
    assert slow_prompts("Q4_1", ARM) == slow_prompts("Q4_0", AVX2) == ""
    monkeypatch.delenv("LLMRUN_KERNELS")
    monkeypatch.setattr("sys.platform", "linux")
    assert slow_prompts("Q4_1", AVX2) == ""


# ---- sizes and times -------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "n_bytes"), [("F16", 512), ("Q4_K", 144), ("Q8_0", 272), ("F32", 1024)])
def test_bytes_of_a_tensor(kind: str, n_bytes: int) -> None:
    assert tensor_bytes(tensor("a", 256), kind) == n_bytes


def test_a_tensor_of_a_type_that_is_only_copied() -> None:
    assert tensor_bytes(Tensor("a", (3,), "I64", 24, 0), "I64") == 24


def test_rows_that_blocks_do_not_divide() -> None:
    tensors = {"a": tensor("a", 576, 2)}
    assert unfit(tensors, "a", "Q4_K") == 576
    assert unfit(tensors, "a", "Q8_0") == 0
    assert unfit(tensors, "not there", "Q4_K") == 0


def test_what_takes_long() -> None:
    assert cost(10, "F16", "F16") < cost(10, "F16", "Q4_0") < cost(10, "F16", "Q4_K") < cost(10, "F16", "IQ4_NL")
    assert cost(10, "F16", "Q4_0", weighted=True) > 5 * cost(10, "F16", "Q4_0")
    assert all(cost(1, "I8", kind, weighted=weighted) > 0 for kind in TENSOR_TYPES for weighted in (False, True))


@pytest.mark.parametrize(
    ("kinds", "lost"), [(("F16", "F32"), False), (("BF16", "I32"), False), (("F32", "Q8_0"), True)]
)
def test_what_has_lost_something(kinds: tuple[str, ...], lost: bool) -> None:
    assert is_quantized(kinds) is lost


# ---- a copy for faster prompts: proposed only where the kernels of the file's type are slow, by measured rates


MACHINE = Hardware("Some CPU", ("avx2",), 4, 8, None, 1 << 34, 1 << 33)


def speed(prefill: float, *, others: float = 0.0) -> MachineSpeed:
    """A machine that multiplies Q8_0 this many times as fast as Q4_1 in prefill, with equal bytes/s in decode."""
    rates = {"Q4_1": Rates(((100.0, 1e9),), 1e6), "Q8_0": Rates(((100.0, 1e9),), prefill * 1e6)}
    return MachineSpeed(1e9, 0.0, {"F16": {64: 0.0}}, {"F16": {64: 0.0}}, rates, others)


@pytest.fixture
def header(tmp_path: Path) -> Header:
    return read_header(write(tmp_path / "model-Q4_1.gguf", quantize_engine.model("Q4_1")))


def test_slow_is_a_type_on_a_processor(header: Header, tmp_path: Path) -> None:
    assert has_slow_prompts(header, MACHINE)
    assert not has_slow_prompts(header, replace(MACHINE, cpu_flags=("asimddp",)))
    assert not has_slow_prompts(header, replace(MACHINE, gpus=(Gpu("CUDA0", "", 1, 1),)))
    assert not has_slow_prompts(read_header(write(tmp_path / "fast.gguf", quantize_engine.model("Q4_0"))), MACHINE)


def test_the_copy_has_the_measured_gain_and_its_price(header: Header) -> None:
    found = fast_copy(header, speed(4.0))
    assert found is not None
    assert found.type == "Q8_0"
    assert 3 < found.prefill <= 4
    assert found.decode < 1  # it reads more bytes
    assert (
        found.n_bytes
        == read_header(write(header.path.with_name("copy.gguf"), quantize_engine.model("Q8_0"))).weight_bytes
    )


def test_a_small_gain_is_no_copy(header: Header) -> None:
    assert fast_copy(header, speed(1.2)) is None


def test_a_busy_machine_gives_no_figures(header: Header, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = speed(4.0)
    monkeypatch.setattr("llmrun.lab.cli.tune.speed_of", lambda *arguments, **more: found)
    assert tune._fast_copy(header, MACHINE, tmp_path) is not None
    found = replace(speed(4.0, others=1.0), is_estimated=True)
    assert tune._fast_copy(header, MACHINE, tmp_path) is None


def test_kernels_that_can_not_be_measured_are_no_error(
    header: Header, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def measure(*arguments: object, **more: object) -> MachineSpeed:
        raise LlmrunError("it takes too long")

    monkeypatch.setattr("llmrun.lab.cli.tune.speed_of", measure)
    assert tune._fast_copy(header, MACHINE, tmp_path) is None
