"""Numbers, names and sizes that are written down, against those of the installed llama.cpp and gguf-py."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import gguf
import pytest

from llmrun.engine.llama import (
    devices,
    ggml,
    library,
    parameters,
    quantization,
    quants,
    vocabulary,
)
from llmrun.engine.llama.library import folder_of, function, import_llama
from llmrun.gguf.header import _FILE_TYPES
from llmrun.gguf.types import TENSOR_TYPES
from llmrun.lab.quantize.types import FILE_TYPES
from llmrun.runner import workers

pytestmark = pytest.mark.upstream

LAYOUT = Path(__file__).parents[2] / "native/llama_layout.cpp"
# C's name of a struct of ours -> where it is mirrored.
MIRRORED: dict[str, Any] = {
    "ggml_tensor": ggml.GgmlTensor,
    "ggml_type_traits": quants._Traits,
    "ggml_init_params": ggml._InitParams,
}
OF_LLAMA_CPP_PYTHON = {**library._SIZES, **quantization._SIZES}
UNNAMED = {"value": "val_str"}  # llama-cpp-python's name of a union without one -> its longest member
HAVE_NO_TYPE_OF_FILES = {"GUESSED", "NVFP4"}  # nothing is quantized to them


def types_of_ggml() -> dict[int, tuple[str, int, int]]:
    """Number -> name, elements and bytes of a block, of every type that has a name and is not retired."""
    name = function("ggml_type_name", ctypes.c_char_p, ctypes.c_int)
    elements = function("ggml_blck_size", ctypes.c_int64, ctypes.c_int)
    size = function("ggml_type_size", ctypes.c_size_t, ctypes.c_int)
    numbers = [number for number in range(import_llama().GGML_TYPE_COUNT) if elements(number)]
    return {number: (name(number).decode().upper(), elements(number), size(number)) for number in numbers}


def test_rpc() -> None:
    """By the header that llama-cpp-python installs, be RPC built or not."""
    folder = folder_of("llama_cpp")
    assert folder is not None
    header = (folder.parent / "include/ggml-rpc.h").read_text(encoding="utf-8")
    defined = {name: int(value) for name, value in re.findall(r"#define (\w+)\s+(\d+)", header)}
    parts = ("MAJOR", "MINOR", "PATCH")
    assert tuple(defined[f"RPC_PROTO_{part}_VERSION"] for part in parts) == workers.VERSION
    assert defined["GGML_RPC_MAX_SERVERS"] == workers.MOST_WORKERS


def test_types_of_tensors() -> None:
    found = types_of_ggml()
    assert {name: (number, elements, size) for number, (name, elements, size) in found.items()} == TENSOR_TYPES
    assert all(found[number][0] == name.upper() for name, number in parameters.KV_TYPES.items())


def test_types_of_tensors_in_gguf_py() -> None:
    """It says 40 bytes of Q8_1, where ggml-common.h asserts two halves and 32, and no file has it."""
    for kind, (elements, size) in gguf.GGML_QUANT_SIZES.items():
        assert kind.name == "Q8_1" or TENSOR_TYPES[kind.name] == (kind.value, elements, size)


def test_types_of_files() -> None:
    llama = import_llama()
    prefixes = "LLAMA_FTYPE_MOSTLY_", "LLAMA_FTYPE_ALL_"
    found = {
        name.removeprefix(prefix): getattr(llama, name)
        for name in dir(llama)
        for prefix in prefixes
        if name.startswith(prefix)
    }
    assert {name: number for name, number in found.items() if name not in HAVE_NO_TYPE_OF_FILES} == FILE_TYPES
    for name, number in found.items():
        assert _FILE_TYPES.get(number, name).removesuffix("_MOE") == name.removesuffix("_MOE")


def test_numbers_of_enums() -> None:
    llama = import_llama()
    assert {
        name: getattr(llama, f"LLAMA_FLASH_ATTN_TYPE_{other}")
        for name, other in (("auto", "AUTO"), ("off", "DISABLED"), ("on", "ENABLED"))
    } == parameters._FLASH_ATTENTION
    assert vocabulary._SENTENCE_PIECE == llama.LLAMA_VOCAB_TYPE_SPM
    assert vocabulary._RWKV == llama.LLAMA_VOCAB_TYPE_RWKV
    assert quantization._KV_INT == llama.LLAMA_KV_OVERRIDE_TYPE_INT
    assert quantization._KV_STR == llama.LLAMA_KV_OVERRIDE_TYPE_STR
    assert (quants.F32, quants.F16) == (llama.GGML_TYPE_F32, llama.GGML_TYPE_F16)
    assert devices.CPU in {device.kind for device in devices.devices()}


def test_operations_have_their_names() -> None:
    assert {"MUL_MAT", "MUL_MAT_ID"} <= ggml.operation_numbers().keys()


def test_layouts_that_the_compiler_checks_are_those_that_python_has() -> None:
    """native/llama_layout.cpp compares these lines with llama.h and ggml.h when it is built."""
    text = LAYOUT.read_text(encoding="utf-8")
    checked = set(re.findall(r"^(?:FIELD|SIZE)\(.+\);$", text, re.MULTILINE))
    others = {name: getattr(import_llama(), name) for name in OF_LLAMA_CPP_PYTHON}
    lines = set()
    for name, struct in {**MIRRORED, **others}.items():
        if struct is not quants._Traits:  # only its beginning
            lines.add(f"SIZE({name}, {ctypes.sizeof(struct)});")
        for field in (field[0] for field in struct._fields_):
            place = getattr(struct, field)
            lines.add(f"FIELD({name}, {UNNAMED.get(field, field)}, {place.offset}, {place.size});")
    assert checked == lines


def test_fields_of_a_tensor_are_read_back() -> None:
    """What Python reads of a tensor, of one that ggml itself has made and filled in."""
    operations = ggml.Operations(1)
    with operations.tensors() as place:
        one, other = (operations.tensor(place, quants.F32, 8, *shape) for shape in ((3,), (5, 2)))
        function("ggml_set_name", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(one, b"CUDA0#a name#0")
        product = ggml.GgmlTensor.from_address(operations.mul_mat(place, one, other))
        viewed = ggml.GgmlTensor.from_address(operations.permute(place, one, 1, 0, 2, 3))
        with operations.memory(place, operations.plain) as fits:
            assert fits
            assert product.op == ggml.operation_numbers()["MUL_MAT"]
            assert (product.type, list(product.ne), list(product.nb)) == (quants.F32, [3, 5, 2, 1], [4, 12, 60, 120])
            assert product.source(0).plain_name == "a name"
            assert list(product.source(1).ne) == [8, 5, 2, 1]
            assert not product.src[2]
            assert viewed.view_src == one
            assert list(viewed.nb)[:2] == [32, 4]
            assert ggml.TensorNumbers()(product.source(1)).shape == (1, 2, 5, 8)
