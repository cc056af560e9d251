"""Our matrix kernels inside ggml's graphs: the same products as in numpy, computed where they are to be."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import gguf
import numpy as np
import pytest

from llmrun import _native
from llmrun.engine.llama import library as library_module
from llmrun.engine.llama.ggml import GgmlTensor, Operations, type_numbers
from llmrun.engine.llama.library import function, import_llama, kernels
from llmrun.protocol.jobs import Empty
from llmrun.protocol.jobs.machine import BUILD
from llmrun.runner.client import EngineClient
from llmrun.runner.launch import launch

TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "F16")
REPACKED = ("Q4_0", "Q4_K", "IQ4_NL")  # by ggml, on x86

pytestmark = pytest.mark.skipif(not _native.available_kernels(), reason="no kernels for this processor")


@pytest.fixture
def ggml(monkeypatch: pytest.MonkeyPatch) -> Iterator[Operations]:
    monkeypatch.delenv("LLMRUN_KERNELS", raising=False)
    monkeypatch.setattr(library_module, "_no_kernels", "")
    library_module._choose_kernels(import_llama()._lib)
    yield Operations(threads=2)
    _native.enable_kernels(True)


def fill(tensor: int, data: Any) -> None:
    raw = np.ascontiguousarray(data).tobytes()
    ctypes.memmove(GgmlTensor.from_address(tensor).data, raw, len(raw))


def read(tensor: int) -> Any:
    described = GgmlTensor.from_address(tensor)
    flat = np.ctypeslib.as_array((ctypes.c_float * int(np.prod(described.ne[:]))).from_address(described.data))
    return flat.reshape(described.ne[::-1]).copy()


def run(ggml: Operations, result: int) -> tuple[Any, int]:
    """Return a result, and how many products our kernels computed for it."""
    before = _native.products_computed()
    with ggml.tensors() as place:
        graph = ggml.new_graph(place)
        ggml.build_forward_expand(graph, result)
        ggml.backend_graph_compute(ggml._backend, graph)
    return read(result), _native.products_computed() - before


def quantized(rng: np.random.Generator, name: str, *shape: int) -> tuple[Any, Any]:
    """Return random weights: as bytes of a type, and what these stand for."""
    kind, values = gguf.GGMLQuantizationType[name], rng.standard_normal(shape, dtype=np.float32)
    block, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    data = np.zeros((*shape[:-1], shape[-1] // block * n_bytes), np.uint8)
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    quantize = function("ggml_quantize_chunk", ctypes.c_size_t, ctypes.c_int, pointer, pointer, *[count] * 3, pointer)
    quantize(kind.value, values.ctypes.data, data.ctypes.data, 0, values.size // shape[-1], shape[-1], None)
    return data, gguf.quants.dequantize(data, kind)


def assert_close(results: Any, exact: Any) -> None:
    assert np.abs(results - exact).max() < 0.03 * np.abs(exact).max()


@pytest.mark.parametrize("columns", [1, 8, 40])
@pytest.mark.parametrize("name", TYPES)
def test_products(ggml: Operations, name: str, columns: int) -> None:
    """With broadcast matrices, as grouped heads have them."""
    rng = np.random.default_rng(columns)
    data, weights = quantized(rng, name, 2, 70, 768)
    activations = rng.standard_normal((4, columns, 768), dtype=np.float32)
    with ggml.tensors() as place:
        left = ggml.tensor(place, type_numbers()[name], 768, 70, 2)
        right = ggml.tensor(place, 0, 768, columns, 4)
        result = int(ggml.mul_mat(place, left, right))
        with ggml.memory(place, ggml.plain):
            fill(left, data)
            fill(right, activations)
            results, n_ours = run(ggml, result)
            _native.enable_kernels(False)
            others, n_of_ggml = run(ggml, result)
    assert (n_ours, n_of_ggml) == (1, 0)
    exact = np.einsum("mrk,mck->mcr", np.repeat(weights, 2, axis=0), activations)
    assert_close(results[0], exact)
    assert_close(others[0], exact)


@pytest.mark.parametrize("name", TYPES)
def test_a_token_has_the_same_products_alone_and_in_a_prompt(ggml: Operations, name: str) -> None:
    """To the last bit. Activations are rounded as ggml's kernels do it for few columns: sums differ by their order.

    Beside weights of 16 bits, only ggml rounds them.
    """
    rng = np.random.default_rng(3)
    data, weights = quantized(rng, name, 64, 1024)
    activations = rng.standard_normal((9, 1024), dtype=np.float32) * rng.lognormal(0, 2, (9, 1024)).astype(np.float32)
    with ggml.tensors() as place:
        left, all_columns = ggml.tensor(place, type_numbers()[name], 1024, 64), ggml.tensor(place, 0, 1024, 9)
        alone = ggml.tensor(place, 0, 1024, 1)
        together, single = int(ggml.mul_mat(place, left, all_columns)), int(ggml.mul_mat(place, left, alone))
        with ggml.memory(place, ggml.plain):
            fill(left, data)
            fill(all_columns, activations)
            results, n_ours = run(ggml, together)
            assert n_ours == 1
            for column in range(9):
                fill(alone, activations[column])
                assert np.array_equal(run(ggml, single)[0][0, 0, 0], results[0, 0, column])
                _native.enable_kernels(False)
                expected, n_ours = run(ggml, single)
                _native.enable_kernels(True)
                assert n_ours == 0
                if name == "F16":
                    exact = weights.astype(np.float64) @ activations[column]
                    assert np.abs(expected[0, 0, 0] - exact).max() > 1e-5 * np.abs(exact).max()
                    expected[0, 0, 0] = exact
                assert np.abs(results[0, 0, column] - expected[0, 0, 0]).max() <= 3e-6 * np.abs(expected).max()


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("tokens", [1, 33])
def test_products_of_experts(ggml: Operations, tokens: int, is_shared: bool) -> None:
    """The experts of a token share its activations, or each has its own."""
    rng = np.random.default_rng(tokens)
    data, weights = quantized(rng, "Q4_0", 5, 40, 64)
    activations = rng.standard_normal((tokens, 1 if is_shared else 2, 64), dtype=np.float32)
    chosen = np.stack([rng.permutation(4)[:2] for _ in range(tokens)]).astype(np.int32)  # one expert has no token
    multiply = function("ggml_mul_mat_id", *[ctypes.c_void_p] * 5)
    with ggml.tensors() as place:
        experts = ggml.tensor(place, type_numbers()["Q4_0"], 64, 40, 5)
        right = ggml.tensor(place, 0, 64, activations.shape[1], tokens)
        ids = ggml.tensor(place, type_numbers()["I32"], 2, tokens)
        result = int(multiply(place, experts, right, ids))
        with ggml.memory(place, ggml.plain):
            fill(experts, data)
            fill(right, activations)
            fill(ids, chosen)
            results, n_ours = run(ggml, result)
    assert n_ours == 1
    exact = np.einsum("tsrk,tsk->tsr", weights[chosen], np.broadcast_to(activations, (tokens, 2, 64)))
    assert_close(results[0], exact)


@pytest.mark.parametrize("rows", [8, 72, 64])
@pytest.mark.parametrize("name", REPACKED)
def test_weights_that_ggml_has_repacked_are_left_to_it(ggml: Operations, name: str, rows: int) -> None:
    rng = np.random.default_rng(rows)
    data, exact_weights = quantized(rng, name, rows, 1280)
    activations = rng.standard_normal((19, 1280), dtype=np.float32)
    with ggml.tensors() as weights, ggml.tensors() as place:
        left, right = ggml.tensor(weights, type_numbers()[name], 1280, rows), ggml.tensor(place, 0, 1280, 19)
        result = int(ggml.mul_mat(place, left, right))
        with ggml.memory(weights, ggml.repacking[0]), ggml.memory(place, ggml.plain):
            set_tensor = function("ggml_backend_tensor_set", None, *[ctypes.c_void_p] * 2, *[ctypes.c_size_t] * 2)
            set_tensor(left, data.ctypes.data, 0, data.nbytes)
            fill(right, activations)
            results, n_ours = run(ggml, result)
    assert n_ours == 0
    assert_close(results[0, 0], activations @ exact_weights.T)


def test_ggml_computes_other_types(ggml: Operations) -> None:
    with ggml.tensors() as place:
        floats = ggml.mul_mat(place, ggml.tensor(place, type_numbers()["F32"], 64, 32), ggml.tensor(place, 0, 64, 9))
        with ggml.memory(place, ggml.plain):
            assert run(ggml, floats)[1] == 0


@pytest.mark.parametrize("name", ["F16", "BF16"])
def test_ggml_computes_products_with_a_cache(ggml: Operations, name: str) -> None:
    """However much of it is in use. A cache is a view, and has 16 bits."""
    view = function("ggml_view_2d", *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 2, *[ctypes.c_size_t] * 2)
    with ggml.tensors() as place:
        cache = ggml.tensor(place, type_numbers()[name], 64, 32)
        product = ggml.mul_mat(place, view(place, cache, 64, 32, 128, 0), ggml.tensor(place, 0, 64, 9))
        with ggml.memory(place, ggml.plain):
            assert run(ggml, product)[1] == 0


@pytest.mark.parametrize("name", [*_native.available_kernels(), "ggml", "", "AVX-9000"])
def test_the_kernels_are_chosen_by_name(name: str) -> None:
    with closing(EngineClient(launch(environment={"LLMRUN_KERNELS": name}))) as engine:
        build = engine.do(BUILD, Empty())
    if name in ("", *_native.available_kernels()):
        assert (build.kernels, build.no_kernels) == (name or _native.available_kernels()[-1], "")
    else:
        assert build.kernels == ""
        assert name in build.no_kernels


def test_a_build_with_another_interface_keeps_ggmls_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The object that is replaced has to be where we know it."""
    ggml = Operations(threads=1)
    monkeypatch.delenv("LLMRUN_KERNELS", raising=False)
    monkeypatch.setattr(library_module, "_installed", {})
    monkeypatch.setattr(library_module, "_no_kernels", "")
    other = (ctypes.c_void_p * 8)(*range(1, 9))
    library = import_llama()._lib
    monkeypatch.setattr(library, "ggml_backend_buft_get_device", lambda kind: 8)
    library_module._install_kernels(library, ctypes.addressof(other))
    assert kernels() == ("", "this build of llama.cpp has another interface")
    assert [*other] == [*range(1, 9)]
    assert ggml.plain
