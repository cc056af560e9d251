"""The tables of ggml's tensor types, their numbers and blocks, and of llama.cpp's mixes of them."""

from __future__ import annotations

from typing import NamedTuple


class TensorType(NamedTuple):
    """A storage type of tensors."""

    number: int  # ggml's
    block: int  # elements of a block
    block_bytes: int


# From ggml.h; removed types are left out.
TENSOR_TYPES: dict[str, TensorType] = {
    name: TensorType(*sizes)
    for name, sizes in {
        "F32": (0, 1, 4), "F16": (1, 1, 2), "Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20), "Q5_0": (6, 32, 22),
        "Q5_1": (7, 32, 24), "Q8_0": (8, 32, 34), "Q8_1": (9, 32, 36), "Q2_K": (10, 256, 84),
        "Q3_K": (11, 256, 110), "Q4_K": (12, 256, 144), "Q5_K": (13, 256, 176), "Q6_K": (14, 256, 210),
        "Q8_K": (15, 256, 292), "IQ2_XXS": (16, 256, 66), "IQ2_XS": (17, 256, 74), "IQ3_XXS": (18, 256, 98),
        "IQ1_S": (19, 256, 50), "IQ4_NL": (20, 32, 18), "IQ3_S": (21, 256, 110), "IQ2_S": (22, 256, 82),
        "IQ4_XS": (23, 256, 136), "I8": (24, 1, 1), "I16": (25, 1, 2), "I32": (26, 1, 4), "I64": (27, 1, 8),
        "F64": (28, 1, 8), "IQ1_M": (29, 256, 56), "BF16": (30, 1, 2), "TQ1_0": (34, 256, 54),
        "TQ2_0": (35, 256, 66), "MXFP4": (39, 32, 17), "NVFP4": (40, 64, 36), "Q1_0": (41, 128, 18),
        "Q2_0": (42, 64, 18),
    }.items()
}  # fmt: skip
"""ggml's name -> type."""

TYPE_NAMES = {kind.number: name for name, kind in TENSOR_TYPES.items()}
"""ggml's number -> name."""

WEIGHT_TYPES = (
    "F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K", "Q5_1", "Q5_0", "Q4_K", "Q4_1", "Q4_0", "IQ4_NL", "IQ4_XS", "MXFP4",
    "NVFP4", "Q3_K", "IQ3_S", "IQ3_XXS", "Q2_K", "IQ2_S", "IQ2_XS", "IQ2_XXS", "Q2_0", "TQ2_0", "TQ1_0", "IQ1_M",
    "IQ1_S", "Q1_0",
)  # fmt: skip
"""Types that ggml can quantize weights to, the largest first."""

# llama_ftype in llama.h, in the order of `llmrun quantize --help`: the largest first.
FILE_TYPES: dict[str, int] = {
    "F32": 0, "BF16": 32, "F16": 1, "Q8_0": 7, "Q6_K": 18, "Q5_K_M": 17, "Q5_K_S": 16, "Q5_1": 9, "Q5_0": 8,
    "Q4_K_M": 15, "Q4_K_S": 14, "Q4_1": 3, "Q4_0": 2, "IQ4_NL": 25, "IQ4_XS": 30, "MXFP4_MOE": 38, "Q3_K_L": 13,
    "Q3_K_M": 12, "Q3_K_S": 11, "IQ3_M": 27, "IQ3_S": 26, "IQ3_XS": 22, "IQ3_XXS": 23, "Q2_K": 10, "Q2_K_S": 21,
    "IQ2_M": 29, "IQ2_S": 28, "IQ2_XS": 20, "IQ2_XXS": 19, "Q2_0": 41, "TQ2_0": 37, "TQ1_0": 36, "IQ1_M": 31,
    "IQ1_S": 24, "Q1_0": 40,
}  # fmt: skip
"""llama-quantize's name of a mix of types -> general.file_type."""
