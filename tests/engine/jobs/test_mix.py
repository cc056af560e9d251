"""Candidate types of a tensor, the choice for all tensors, and its name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmrun.engine.jobs.mix import grouped
from llmrun.engine.llama.quants import Quants
from llmrun.errors import UsageError
from llmrun.gguf.header import Header, Tensor
from llmrun.gguf.imatrix import ImatrixEntry, ImatrixFile
from llmrun.lab.quantize import mix
from llmrun.lab.quantize.calibration import write_imatrix
from llmrun.lab.quantize.types import FILE_TYPES, tensor_bytes
from llmrun.protocol.jobs.mix import MixMeasurement

WIDTH = 512


def header(*tensors: Tensor) -> Header:
    """Return the header of a file with these tensors and 500 bytes of metadata."""
    return Header(Path("m.gguf"), 500 + sum(tensor.n_bytes for tensor in tensors), 3, {}, tensors, {})


def matrix(name: str, columns: int = WIDTH, rows: int = 64, kind: str = "F16") -> Tensor:
    """A matrix of some type."""
    return Tensor(name, (columns, rows), kind, columns * rows * (4 if kind == "F32" else 2), 0)


def room(found: Header, goal: int, kinds: tuple[str, ...] = ("F16", "Q8_0", "Q4_K")) -> mix._Room:
    return mix._Room(found, {tensor.name: kinds for tensor in found.tensors if len(tensor.shape) > 1}, goal)


TWO = header(matrix("blk.0.a.weight"), matrix("blk.1.a.weight"), Tensor("norm.weight", (WIDTH,), "F32", 4 * WIDTH, 0))
LOSSES = {"blk.0.a.weight": (0.0, 0.001, 0.1), "blk.1.a.weight": (0.0, 0.002, 0.9)}


def test_the_tensor_that_loses_more_gets_more_bits() -> None:
    fixed = 500 + 1024 + 4 * WIDTH
    sizes = {kind: tensor_bytes(TWO.tensors[0], kind) for kind in ("F16", "Q8_0", "Q4_K")}
    goal = fixed + sizes["Q8_0"] + sizes["Q4_K"]
    chosen = room(TWO, goal).mix(MixMeasurement(LOSSES, 2, 100))
    assert chosen.types == {"blk.0.a.weight": "Q4_K", "blk.1.a.weight": "Q8_0"}
    assert chosen.n_bytes == goal
    assert chosen.divergence == pytest.approx(0.102)
    (row,) = chosen.table
    assert (row.kind, dict(row.types), row.n_bytes) == ("a.weight", {"Q4_K": 1, "Q8_0": 1}, goal - fixed)


def test_with_room_for_everything_nothing_is_lost() -> None:
    chosen = room(TWO, 10**9).mix(MixMeasurement(LOSSES, 2, 100))
    assert set(chosen.types.values()) == {"F16"}
    assert chosen.divergence == 0
    assert chosen.base == "Q8_0"  # llama.cpp takes single tensors' types only for a quantized file


def test_a_size_that_is_too_small_names_the_smallest() -> None:
    with pytest.raises(UsageError, match=r"no mix of types makes 'm\.gguf' as small as") as error:
        room(TWO, 20_000)
    least = 500 + 1024 + 4 * WIDTH + 2 * tensor_bytes(TWO.tensors[0], "Q4_K")
    assert f"{least:,} bytes" in error.value.why


@pytest.mark.parametrize("kind", [*mix.CANDIDATES, *mix.SMALL_CANDIDATES])
def test_the_file_calls_itself_what_most_of_it_is(kind: str) -> None:
    one = header(matrix("a.weight"))
    chosen = room(one, 10**9, (kind,)).mix(MixMeasurement({"a.weight": (0.1,)}, 1, 100))
    assert chosen.base in FILE_TYPES
    assert chosen.base[:2] == kind[:2] or kind == "MXFP4"


def test_an_override_is_for_one_tensor_alone() -> None:
    chosen = mix.Mix({"blk.1.ffn_up.weight": "Q4_K"}, "Q4_K_S", 1, 0.1, ())
    ((pattern, kind),) = chosen.overrides
    assert kind == "Q4_K"
    assert re.search(pattern, "blk.1.ffn_up.weight")
    assert not any(
        re.search(pattern, name) for name in ("blk.11.ffn_up.weight", "xblk.1.ffn_up.weight", "blk.1.ffn_upx")
    )


def candidates(tensor: Tensor, imatrix: Path | None = None) -> tuple[str, ...]:
    return mix._candidates(header(tensor), [tensor], imatrix)[tensor.name]


def test_rows_decide_what_a_tensor_can_be() -> None:
    assert candidates(matrix("a")) == ("F16", *mix.CANDIDATES)
    assert candidates(matrix("a", 96)) == ("F16", "Q8_0", "Q5_0", "IQ4_NL", "MXFP4")
    assert candidates(matrix("a", 100, kind="F32")) == ("F32",)
    assert candidates(matrix("a", kind="F32"))[:3] == ("F32", "F16", "Q8_0")


def test_nothing_becomes_larger() -> None:
    q5 = Tensor("a", (WIDTH, 64), "Q5_K", WIDTH * 64 // 256 * 176, 0)
    assert candidates(q5) == ("Q5_K", "Q4_K", "IQ4_NL", "IQ4_XS", "MXFP4", "Q3_K", "Q2_K")


def test_the_smallest_types_need_an_importance_matrix(tmp_path: Path) -> None:
    path = tmp_path / "i.gguf"
    ones = np.ones((1, WIDTH), np.float32)
    write_imatrix(path, ImatrixFile({"a": ImatrixEntry(ones, np.ones(1, np.float32))}, (), 1, 512))
    assert candidates(matrix("a"), path)[-4:] == mix.SMALL_CANDIDATES
    assert "IQ2_S" not in candidates(matrix("b"), path)


def test_groups_are_neighbours_of_one_kind() -> None:
    names = [f"blk.{layer}.{kind}" for layer in range(12) for kind in ("a", "b")] + ["output"]
    assert grouped(names, 6) == [
        [f"blk.{layer}.{kind}" for layer in layers] for kind in "ab" for layers in (range(6), range(6, 12))
    ] + [["output"]]
    assert [len(group) for group in grouped(names, 0)] == [12, 12, 1]
    assert all(len(group) == 1 for group in grouped(names, 1000))


@pytest.fixture(scope="module")
def quants() -> Quants:
    """ggml's types."""
    return Quants(2)


@pytest.mark.parametrize("kind", ["F16", *mix.CANDIDATES])
def test_rows_come_back_nearly_as_they_were(quants: Quants, kind: str) -> None:
    rows: Any = np.random.default_rng(0).standard_normal((4, WIDTH)).astype(np.float32)
    back = quants.rounded(quants.numbers[kind], rows)
    error = np.square(back - rows).mean()
    assert (error > 0 and error < 0.15) if kind != "F16" else error < 1e-6


def test_importance_moves_the_error_to_where_it_does_not_count(quants: Quants) -> None:
    rows: Any = np.random.default_rng(0).standard_normal((16, WIDTH)).astype(np.float32)
    weights = np.where(np.arange(WIDTH) % 4, 0.01, 1).astype(np.float32)
    plain, weighted = (quants.rounded(quants.numbers["Q4_K"], rows, w) for w in (None, weights))
    assert np.square(weighted - rows)[:, ::4].sum() < 0.9 * np.square(plain - rows)[:, ::4].sum()


def test_a_whole_tensor_in_pieces_is_the_same(quants: Quants) -> None:
    rows: Any = np.random.default_rng(0).standard_normal((5000, WIDTH)).astype(np.float32)
    f16, q4 = quants.numbers["F16"], quants.numbers["Q4_0"]
    whole = quants.pack(f16, quants.rounded(q4, rows))
    assert np.array_equal(quants.repack(0, rows.view(np.uint8).reshape(-1), WIDTH, q4, f16), whole)
