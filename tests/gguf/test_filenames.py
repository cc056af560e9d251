"""File names: which quantization they tell, which one is taken, which files belong together."""

from __future__ import annotations

import pytest

from llmrun.gguf.filenames import (
    all_parts,
    available,
    choose,
    is_later_part,
    is_model,
    projector_for,
    projectors_for,
    quant_of,
)


@pytest.mark.parametrize(
    ("name", "quant"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"),
        ("Qwen3-8B-Q4_K_M.gguf", "Q4_K_M"),
        ("Qwen3-8B-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("gemma-3-1b-it-q4_0.gguf", "Q4_0"),
        ("phi-2_IQ3_XXS.gguf", "IQ3_XXS"),
        ("model-fp16.gguf", "F16"),
        ("model-BF16.gguf", "BF16"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("Big-Q4_K_M-00001-of-00003.gguf", "Q4_K_M"),
        ("Q6_K/big.gguf", "Q6_K"),
        ("Q6_K/big-Q8_0.gguf", "Q8_0"),
        ("Qwen3-0.6B.gguf", None),
        ("f16tastic.gguf", None),
    ],
)
def test_quant_of(name: str, quant: str | None) -> None:
    assert quant_of(name) == quant


def test_choice() -> None:
    names = [
        "m-Q8_0.gguf",
        "m-Q4_0.gguf",
        "m-Q4_K_M.gguf",
        "mmproj-m-Q4_K_M.gguf",
        "m.imatrix.gguf",
        "README.md",
    ]
    assert choose(names, None) == "m-Q4_K_M.gguf"
    assert choose(names, "q8_0") == "m-Q8_0.gguf"
    assert choose(names, "Q2_K") is None
    assert choose(["m-Q8_0.gguf", "m-Q5_K_M.gguf", "m-F16.gguf"], None) == "m-Q5_K_M.gguf"
    assert choose(["m-UD-Q2_K_XL.gguf"], "Q2_K_XL") == "m-UD-Q2_K_XL.gguf"
    assert choose(["strange.gguf"], None) == "strange.gguf"
    assert choose([], None) is None


def test_available_lists_each_quant_once() -> None:
    names = ["m-Q8_0-00002-of-00002.gguf", "m-Q8_0-00001-of-00002.gguf", "m-Q4_0.gguf", "old/m-Q4_0.gguf"]
    assert available(names) == {"Q4_0": "m-Q4_0.gguf", "Q8_0": "m-Q8_0-00001-of-00002.gguf"}


def test_parts() -> None:
    assert all_parts("a.gguf") == ("a.gguf",)
    assert all_parts("d/a-00001-of-00002.gguf") == ("d/a-00001-of-00002.gguf", "d/a-00002-of-00002.gguf")
    assert all_parts("a-00001-of-99999.gguf") == ("a-00001-of-99999.gguf",)
    assert is_later_part("a-00002-of-00002.gguf")
    assert not is_later_part("a-00001-of-00002.gguf")


def test_is_model() -> None:
    assert is_model("folder/A.GGUF")
    assert not is_model("mmproj-a.gguf")
    assert not is_model("folder/mtp-a-Q4_0.gguf")
    assert is_model("a-MTP-Q4_0.gguf")
    assert not any(map(is_model, ("eagle3-a-Q8_0.gguf", "a-EAGLE3-Q8_0.gguf", "a.dflash.gguf", "b/dspark-a.gguf")))
    assert is_model("my-eagle3fan-Q4_0.gguf")
    assert not is_model("a.safetensors")


def test_a_projector_with_the_models_name_comes_first() -> None:
    names = ["zebra-vision-Q8_0.gguf", "mmproj-zebra-vision-F32.gguf", "mmproj-apple-vision-F16.gguf", "README.md"]
    assert projector_for("zebra-vision-Q8_0.gguf", names) == "mmproj-zebra-vision-F32.gguf"
    unnamed = ["mmproj-F16.gguf", "mmproj-apple-vision-F16.gguf", "mmproj-model-Q8_0.gguf"]
    assert projectors_for("zebra-vision-Q8_0.gguf", unnamed) == ["mmproj-F16.gguf", "mmproj-model-Q8_0.gguf"]


def test_a_projector_of_another_model_in_the_folder_is_that_ones() -> None:
    names = ["zebra-Q8_0.gguf", "apple-vision-Q4_0.gguf", "mmproj-apple-vision-F16.gguf"]
    assert projector_for("zebra-Q8_0.gguf", names) is None
    assert projector_for("apple-vision-Q4_0.gguf", names) == "mmproj-apple-vision-F16.gguf"
    assert projector_for("zebra-Q8_0.gguf", [names[0], names[2]]) == "mmproj-apple-vision-F16.gguf"
