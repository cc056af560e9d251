"""The choice of devices: what the texts mean, and which GPUs they select."""

from __future__ import annotations

from typing import Any

import pytest

from llmrun.errors import UsageError
from llmrun.protocol.devices import Gpu, TensorOverride, device_names, proportions, selected, tensor_overrides

CARDS = (Gpu("CUDA0", "Card", 8, 8), Gpu("CUDA1", "Card", 8, 8))
CHIP = Gpu("Vulkan0", "Graphics of the processor", 8, 8, shared=True)


def test_texts_take_the_separators_of_llama_cpp() -> None:
    assert proportions("3/1") == proportions("3,1") == (3.0, 1.0)
    assert device_names("CUDA1/CUDA0,CUDA1") == ("CUDA1", "CUDA0")
    assert tensor_overrides(r"blk\.0=CUDA1;a=b=CPU") == (
        TensorOverride(r"blk\.0", "CUDA1"),
        TensorOverride("a=b", "CPU"),
    )
    assert (proportions(""), device_names(""), tensor_overrides("")) == ((), (), ())


@pytest.mark.parametrize("text", ["x", "1/-1", "0/0", "1e9", "nan", "1/ /x"])
def test_proportions_are_numbers(text: str) -> None:
    with pytest.raises(UsageError, match="--tensor-split"):
        proportions(text)


@pytest.mark.parametrize("text", ["ffn", "=CPU", "ffn=", "(=CPU"])
def test_overrides_are_a_pattern_and_a_device(text: str) -> None:
    with pytest.raises(UsageError, match="--override-tensor"):
        tensor_overrides(text)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ["CUDA0", "CUDA1"]),  # llama.cpp leaves out a chip beside cards
        ({"device": "Vulkan0/CUDA1"}, ["Vulkan0", "CUDA1"]),
        ({"device": "none"}, []),
        ({"split_mode": "none"}, ["CUDA0"]),
        ({"split_mode": "none", "main_gpu": 1}, ["CUDA1"]),
        ({"split_mode": "none", "main_gpu": 1, "device": "CUDA1,Vulkan0"}, ["Vulkan0"]),
        ({"main_gpu": 7}, ["CUDA0", "CUDA1"]),
        ({"tensor_split": "1"}, ["CUDA0", "CUDA1"]),
    ],
)
def test_selected_gpus(options: dict[str, Any], names: list[str]) -> None:
    assert [gpu.name for gpu in selected((*CARDS, CHIP), **options)] == names


def test_a_chip_is_used_where_nothing_else_is() -> None:
    assert selected((CHIP,)) == (CHIP,)
    assert selected((), split_mode="none", main_gpu=3, tensor_split="1/1") == ()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "CUDA7"}, "there is no device CUDA7"),
        ({"split_mode": "none", "main_gpu": 2}, "--main-gpu names more GPUs"),
        ({"tensor_split": "1/1/1"}, "--tensor-split names more GPUs"),
    ],
)
def test_the_error_lists_the_gpus(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        selected(CARDS, **options)
    assert "CUDA0" in caught.value.why
    assert "CUDA1" in caught.value.why


def test_without_gpus_the_hint_is_doctor() -> None:
    with pytest.raises(UsageError) as caught:
        selected((), device="CUDA0")
    assert "llmrun doctor" in caught.value.hint
