"""Types: names, llama.cpp's numbers, and the best 4-bit type of made-up machines and models."""

from __future__ import annotations

import pytest

from llmrun.errors import UsageError
from llmrun.gguf.header import _FILE_TYPES, Tensor
from llmrun.quantize.types import (
    ALIASES,
    BEST_4_BIT,
    FILE_TYPES,
    NEED_IMATRIX,
    TENSOR_TYPES,
    best_4_bit,
    cost,
    file_type,
    is_quantized,
    slow_prompts,
    tensor_bytes,
    tensor_type,
    unfit,
)

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


def test_types_that_read_prompts_slowly() -> None:
    assert slow_prompts("Q4_1", AVX2).startswith("Q4_1 reads prompts at about a third")
    assert slow_prompts("Q4_1", ARM) == slow_prompts("Q4_0", AVX2) == ""


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
