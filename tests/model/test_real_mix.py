"""The real thing: what is measured, the files that come of it, and their sizes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, dequantize, quantize
from support.random_model import write_random_model

from llmrun._native import CancelFlag
from llmrun.engine.jobs.mix import Reader
from llmrun.engine.llama.model import LlamaModel
from llmrun.engine.llama.quants import F16, F32, Quants
from llmrun.errors import UsageError
from llmrun.gguf.reader import read_header
from llmrun.lab.quantize import mix
from llmrun.lab.quantize.job import QuantizeRequest
from llmrun.lab.quantize.job import quantize as write_quantized
from llmrun.lab.quantize.types import TENSOR_TYPES
from llmrun.protocol.jobs.mix import MIX, MeasureMix, MixMeasurement
from llmrun.runner.client import EngineClient

FEED_FORWARD = 512
TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind. " * 20


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights, in F32."""
    return write_random_model(tmp_path_factory.mktemp("mix") / "small.gguf", layers=1, inner=FEED_FORWARD)


@pytest.mark.parametrize("share", [0.16, 0.2, 0.3, 0.5])
def test_the_file_is_what_was_chosen_and_within_a_per_cent_of_its_size(
    small: Path, tmp_path: Path, share: float
) -> None:
    goal = int(share * small.stat().st_size)
    chosen = mix.choose(small, goal, threads=2, text=TEXT)
    target = tmp_path / "out.gguf"
    write_quantized(QuantizeRequest(small, target, chosen.base, overrides=chosen.overrides, threads=2))
    written = {tensor.name: tensor.type for tensor in read_header(target).tensors}
    assert {name: written[name] for name in chosen.types} == dict(chosen.types)
    n_bytes = target.stat().st_size
    assert n_bytes <= chosen.n_bytes <= goal
    assert n_bytes > 0.9 * goal  # with eight matrices there is no mix for every size


def test_a_size_below_the_smallest_mix_is_refused_before_anything_is_measured(small: Path) -> None:
    with pytest.raises(UsageError, match="no mix of types") as error:
        mix.choose(small, 100_000, threads=1, text=TEXT)
    assert "smallest" in error.value.why
    assert error.value.hint.startswith("--size ")


@pytest.fixture(scope="module")
def measured(small: Path) -> MixMeasurement:
    """Some types of every matrix."""
    numbers = tuple(TENSOR_TYPES[kind].number for kind in ("F32", "Q8_0", "Q5_0", "Q4_0"))
    names = [tensor.name for tensor in read_header(small).tensors if len(tensor.shape) > 1]
    engine = EngineClient()
    try:
        return engine.do(MIX, MeasureMix(str(small), dict.fromkeys(names, numbers), TEXT, threads=2))
    finally:
        engine.close()


def test_losses_are_in_the_ratios_of_the_errors_of_whole_tensors(small: Path, measured: MixMeasurement) -> None:
    """The Python twin of ggml's quantization is the one that comes with the format."""
    for tensor in read_header(small).tensors:
        if tensor.name not in measured.losses:
            continue
        data = np.fromfile(small, np.float32, tensor.n_elements, offset=tensor.offset).reshape(-1, tensor.shape[0])
        errors = [_error(data, kind) for kind in ("Q8_0", "Q5_0", "Q4_0")]
        own, *losses = measured.losses[tensor.name]
        assert own == 0
        assert np.divide(losses, losses[-1]) == pytest.approx(np.divide(errors, errors[-1]), rel=0.05)


def _error(data: np.ndarray, kind: str) -> float:
    number = GGMLQuantizationType[kind]
    return float(np.square(dequantize(quantize(data, number), number) - data).sum())


def test_every_matrix_matters(measured: MixMeasurement) -> None:
    assert measured.groups == 8
    assert measured.positions > 100
    assert all(losses[-1] > 1e-7 for losses in measured.losses.values())


def test_swapped_matrices_change_what_is_said_and_swapping_back_undoes_it(small: Path) -> None:
    model = LlamaModel(str(small), 0, CancelFlag(), repack=False)
    quants = Quants(2)
    name = "blk.0.ffn_down.weight"
    tensor = next(tensor for tensor in read_header(small).tensors if tensor.name == name)
    stored = np.fromfile(small, np.uint8, tensor.n_bytes, offset=tensor.offset)
    reader = Reader(model, model.vocabulary.tokenize(TEXT, special=False)[:100], [name, "token_embd.weight"], 2)
    before = reader.read().astype(np.float64)
    reader.set_reference()
    assert reader.used == {name, "token_embd.weight"}
    for through, low, high in ((None, 0, 1e-6), ("Q8_0", 1e-9, 1e-4), ("Q4_0", 1e-6, 1e-2)):
        through_number = None if through is None else quants.numbers[through]
        changed = quants.repack(F32, stored, FEED_FORWARD, through_number, F16)
        with reader.swapped({name: changed}, F16, 2):
            divergence = reader.divergence()
            after = reader.read().astype(np.float64)
        assert divergence == pytest.approx((np.exp(before) * (before - after)).sum(axis=1).mean(), abs=1e-6)
        assert low <= abs(divergence) <= high
    assert np.array_equal(reader.read().astype(np.float64), before)
    reader.close()
    model.close()


@pytest.mark.parametrize("kind", ["BF16", "Q8_0"])
def test_a_source_that_is_not_f16(small: Path, tmp_path: Path, kind: str) -> None:
    """What F16 kernels change by themselves is not counted; in Q8_0 already, a mix keeps what it has room for."""
    source, target = tmp_path / "source.gguf", tmp_path / "out.gguf"
    write_quantized(QuantizeRequest(small, source, kind, threads=2))
    goal = int(0.75 * source.stat().st_size)
    chosen = mix.choose(source, goal, threads=2, text=TEXT)
    assert 0 < chosen.divergence < 0.01
    write_quantized(QuantizeRequest(source, target, chosen.base, overrides=chosen.overrides, threads=2))
    assert 0.9 * goal < target.stat().st_size <= goal
    assert ("Q8_0" in chosen.types.values()) or kind == "BF16"
