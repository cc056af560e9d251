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

TYPES = ("Q4_0", "Q4_1", "Q8_0")  # that gguf-py can write; test_matmul.cpp has all, block by block

pytestmark = pytest.mark.skipif(not _native.available_kernels(), reason="no kernels for this processor")


@pytest.fixture
def ggml() -> Iterator[Operations]:
    import_llama()
    _native.enable_kernels(True)
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
    kind = gguf.GGMLQuantizationType[name]
    data = gguf.quants.quantize(rng.standard_normal(shape, dtype=np.float32), kind)
    return data, gguf.quants.dequantize(data, kind)


def assert_close(results: Any, exact: Any) -> None:
    assert np.abs(results - exact).max() < 0.03 * np.abs(exact).max()


@pytest.mark.parametrize("columns", [1, 7, 40])
@pytest.mark.parametrize("name", TYPES)
def test_products(ggml: Operations, name: str, columns: int) -> None:
    """With broadcast matrices, as grouped heads have them."""
    rng = np.random.default_rng(columns)
    data, weights = quantized(rng, name, 2, 70, 96)
    activations = rng.standard_normal((4, columns, 96), dtype=np.float32)
    with ggml.tensors() as place:
        left = ggml.tensor(place, type_numbers()[name], 96, 70, 2)
        right = ggml.tensor(place, 0, 96, columns, 4)
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


def test_ggml_computes_the_rest(ggml: Operations) -> None:
    """Types without a kernel, and weights that ggml has repacked."""
    with ggml.tensors() as place:
        half = ggml.mul_mat(place, ggml.tensor(place, type_numbers()["F16"], 64, 32), ggml.tensor(place, 0, 64, 3))
        with ggml.memory(place, ggml.plain):
            assert run(ggml, half)[1] == 0
    if not ggml.repacking:
        return
    with ggml.tensors() as weights, ggml.tensors() as place:
        left, right = ggml.tensor(weights, type_numbers()["Q4_0"], 64, 32), ggml.tensor(place, 0, 64, 3)
        result = int(ggml.mul_mat(place, left, right))
        with ggml.memory(weights, ggml.repacking[0]), ggml.memory(place, ggml.plain):
            assert not ggml.supports(result)  # so that llama.cpp leaves these weights where they are
            _native.enable_kernels(False)
            assert ggml.supports(result) == bool(GgmlTensor.from_address(left).extra)


@pytest.mark.parametrize("name", [*_native.available_kernels(), "ggml", "AVX-9000"])
def test_the_kernels_are_chosen_by_name(name: str) -> None:
    with closing(EngineClient(launch(environment={"LLMRUN_KERNELS": name}))) as engine:
        build = engine.do(BUILD, Empty())
    if name in _native.available_kernels():
        assert (build.kernels, build.no_kernels) == (name, "")
    else:
        assert build.kernels == ""
        assert name in build.no_kernels


def test_a_build_with_another_interface_keeps_ggmls_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The object that is replaced has to be where we know it."""
    ggml = Operations(threads=1)
    monkeypatch.setattr(library_module, "_installed", {})
    monkeypatch.setattr(library_module, "_no_kernels", "")
    other = (ctypes.c_void_p * 8)(*range(1, 9))
    library = import_llama()._lib
    monkeypatch.setattr(library, "ggml_backend_buft_get_device", lambda kind: 8)
    library_module._install_kernels(library, ctypes.addressof(other))
    assert kernels() == ("", "this build of llama.cpp has another interface")
    assert [*other] == [*range(1, 9)]
    assert ggml.plain
