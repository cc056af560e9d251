"""Several GPUs: every division gives the processor's text, and GPUs that are not there are named."""

from __future__ import annotations

from typing import Any

import pytest
from support.gpu_loader import Loader, held

from llmrun.errors import UsageError
from llmrun.protocol.devices import Gpu

PROMPT = "x" * 60
DIVISIONS: list[dict[str, Any]] = [
    {"split_mode": "layer"},
    {"split_mode": "none", "main_gpu": 1},
    {"split_mode": "tensor"},
    {"tensor_split": "3/1"},
    {"override_tensor": r"blk\.[01]\.ffn=CPU"},
]


@pytest.fixture(autouse=True)
def two_gpus(gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    if len(gpus) < 2:
        pytest.skip("needs two GPUs")
    return gpus


@pytest.mark.parametrize("division", DIVISIONS)
def test_greedy_text_is_the_processors(load: Loader, division: dict[str, Any]) -> None:
    # Two KV heads, so that tensors can be divided.
    model = load(device="", **division)
    texts = [each.generate(PROMPT, temperature=0, max_tokens=8).text for each in (model, load(device="none"), model)]
    assert len(set(texts)) == 1


def test_only_the_chosen_gpu_holds_anything(load: Loader, two_gpus: tuple[Gpu, ...]) -> None:
    model = load(device=two_gpus[1].name)
    assert held(model, [two_gpus[1].name]) > 0
    assert held(model, [two_gpus[0].name]) == 0


def test_states_survive_a_tensor_split(load: Loader) -> None:
    options = {"device": "", "split_mode": "tensor"}
    first = load(others={"keeps_states": True}, **options)
    text = first.generate(PROMPT, temperature=0, max_tokens=4).text
    first.save_state(prompt_only=True)
    first.close()
    again = load(others={"keeps_states": True}, **options).generate(PROMPT, temperature=0, max_tokens=4)
    assert again.text == text


def test_unknown_gpus_are_refused_with_those_that_are_there(load: Loader, two_gpus: tuple[Gpu, ...]) -> None:
    with pytest.raises(UsageError, match="no device Nowhere0") as caught:
        load(device="Nowhere0")
    assert two_gpus[1].name in caught.value.why
