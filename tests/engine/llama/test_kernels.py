"""Our kernels inside ggml's graphs: the same products and attention as in numpy, computed where they are to be."""

from __future__ import annotations

import ctypes
import platform
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

HALVES = ("F16",) if platform.machine() == "x86_64" else ()  # most Arm processors multiply them by themselves
TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", *HALVES)
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


class AttentionCase:
    """Random inputs of ggml_flash_attn_ext() in the layout of llama.cpp's cache, and the exact result.

    Args:
        kinds: the types of keys and values.
        heads: of queries, and of keys and values.
        shape: head size, positions, cells, sequences.
        mask: "none", "causal", "holes".
        options: scale, ALiBi's greatest bias, softcap.
    """

    def __init__(
        self,
        kinds: tuple[str, str] = ("F16", "F16"),
        heads: tuple[int, int] = (6, 2),
        shape: tuple[int, int, int, int] = (64, 40, 300, 1),
        mask: str = "causal",
        *,
        has_sinks: bool = False,
        options: tuple[float, float, float] = (0.125, 0.0, 0.0),
    ) -> None:
        rng = np.random.default_rng(1)
        self.kinds, self.heads, self.shape, self.options = kinds, heads, shape, options
        size, positions, cells, sequences = shape
        self.queries = rng.standard_normal((sequences, positions, heads[0], size), dtype=np.float32)
        (self.key_data, self.keys), (self.value_data, self.values) = (
            self._cells(rng, kind, sequences, cells, heads[1], size) for kind in kinds
        )
        self.sinks = rng.standard_normal(heads[0], dtype=np.float32) * 3 if has_sinks else None
        distance = np.arange(cells) - np.arange(positions)[:, None] - (cells - positions)
        hidden = {"none": distance > cells, "causal": distance > 0, "holes": rng.random((positions, cells)) < 0.9}[mask]
        biases = np.minimum(distance, 0) / 8 if options[1] else 0.0
        self.mask = None if mask == "none" else np.where(hidden, -np.inf, biases).astype(np.float16)

    @staticmethod
    def _cells(rng: np.random.Generator, kind: str, *shape: int) -> tuple[Any, Any]:
        if kind == "Q8_0":
            return quantized(rng, kind, *shape)
        data = rng.standard_normal(shape, dtype=np.float32).astype({"F16": np.float16, "F32": np.float32}[kind])
        return data, data.astype(np.float32)

    def run(self, ggml: Operations) -> tuple[Any, int]:
        """Return the result, and how many attention operations our kernels computed."""
        size, positions, cells, sequences = self.shape
        with ggml.tensors() as place:
            numbers = type_numbers()
            queries = ggml.tensor(place, 0, size, self.heads[0], positions, sequences)
            keys, values = (
                ggml.tensor(place, numbers[kind], size, self.heads[1], cells, sequences) for kind in self.kinds
            )
            mask = ggml.tensor(place, numbers["F16"], cells, positions) if self.mask is not None else None
            sinks = ggml.tensor(place, 0, self.heads[0]) if self.sinks is not None else None
            parts = [ggml.permute(place, part, 0, 2, 1, 3) for part in (queries, keys, values)]
            result = int(ggml.flash_attn_ext(place, *parts, mask, *self.options))
            if sinks is not None:
                function("ggml_flash_attn_ext_add_sinks", None, *[ctypes.c_void_p] * 2)(result, sinks)
            filled = ((queries, self.queries), (keys, self.key_data), (values, self.value_data))
            with ggml.memory(place, ggml.plain):
                for tensor, data in (*filled, (mask, self.mask), (sinks, self.sinks)):
                    if tensor is not None:
                        fill(tensor, data)
                before = _native.attentions_computed()
                results, _ = run(ggml, result)
                return results, _native.attentions_computed() - before

    def exact(self) -> Any:
        scale, most_bias, softcap = self.options
        n_heads = self.heads[0]
        keys, values = (
            np.repeat(part, n_heads // self.heads[1], axis=2).astype(float) for part in (self.keys, self.values)
        )
        scores = np.einsum("sphd,schd->shpc", self.queries.astype(float), keys) * scale
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        slopes = 2.0 ** (-most_bias * np.arange(1, n_heads + 1) / n_heads) if most_bias else np.ones(n_heads)
        if self.mask is not None:
            scores += slopes[:, None, None] * self.mask.astype(float)
        sinks = np.full(n_heads, -np.inf) if self.sinks is None else self.sinks.astype(float)
        scores = np.concatenate([scores, np.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))], axis=3)
        weights = np.exp(scores - scores.max(axis=3, keepdims=True))
        weights /= weights.sum(axis=3, keepdims=True)
        return np.einsum("shpc,schd->sphd", weights[..., :-1], values)


ATTENTION = {
    "many positions": AttentionCase(),
    "one position": AttentionCase(shape=(128, 1, 900, 1)),
    "few positions": AttentionCase(shape=(96, 3, 300, 1), heads=(4, 4)),
    "holes": AttentionCase(mask="holes"),
    "no mask": AttentionCase(mask="none", shape=(80, 9, 260, 1), heads=(4, 1)),
    "sequences": AttentionCase(shape=(64, 5, 200, 3)),
    "many positions of sequences": AttentionCase(shape=(256, 70, 200, 2), heads=(4, 2)),
    "sinks": AttentionCase(has_sinks=True, shape=(64, 2, 100, 1)),
    "softcap": AttentionCase(options=(0.25, 0.0, 20.0)),
    "ALiBi": AttentionCase(options=(0.125, 8.0, 0.0), heads=(8, 8)),
    "Q8_0": AttentionCase(("Q8_0", "Q8_0")),
    "Q8_0, one position": AttentionCase(("Q8_0", "Q8_0"), shape=(64, 1, 700, 1)),
    "Q8_0 keys": AttentionCase(("Q8_0", "F16")),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(ggml: Operations, name: str) -> None:
    """Close to the exact result, and, where ggml can, as ggml's own; the same to the bit with other threads."""
    case = ATTENTION[name]
    exact = case.exact()
    results, n_ours = case.run(ggml)
    assert n_ours == 1
    assert np.abs(results - exact).max() < 2e-6 * np.abs(exact).max()
    for threads in (1, 3):
        assert np.array_equal(case.run(Operations(threads=threads))[0], results)
    if case.kinds[0] == case.kinds[1]:
        _native.enable_kernels(False)
        others, n_of_ggml = case.run(ggml)
        assert n_of_ggml == 0
        assert np.abs(others - exact).max() < 0.03 * np.abs(exact).max()


def test_a_position_has_the_same_attention_alone_and_beside_others(ggml: Operations) -> None:
    case = AttentionCase(shape=(64, 100, 400, 1))
    together, _ = case.run(ggml)
    assert case.mask is not None
    case.queries, case.mask, case.shape = case.queries[:, 70:71], case.mask[70:71], (64, 1, 400, 1)
    assert np.array_equal(case.run(ggml)[0][:, 0], together[:, 70])


@pytest.mark.parametrize("case", [AttentionCase(("F32", "F32")), AttentionCase(shape=(40, 3, 30, 1))])
def test_ggml_computes_other_attention(ggml: Operations, case: AttentionCase) -> None:
    assert case.run(ggml)[1] == 0


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
