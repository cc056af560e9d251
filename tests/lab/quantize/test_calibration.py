"""Files of importance matrices: their bytes, invalid files, and files of another model."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from support import gguf_writer
from support.gguf_writer import TensorSpec, gguf, tiny_model, write

from llmrun.errors import BadModelError, LlmrunError, ModelNotFoundError, UsageError
from llmrun.gguf.imatrix import ImatrixEntry, ImatrixFile, read_imatrix
from llmrun.gguf.reader import read_header
from llmrun.lab.quantize.calibration import prepare_imatrix, require_fit, unused_experts, write_imatrix

DENSE, EXPERTS = "blk.0.attn_q.weight", "blk.0.ffn_up_exps.weight"


def some(columns: int = 64) -> ImatrixFile:
    values = np.random.default_rng(3).random((4, columns), np.float32)
    entries = {
        EXPERTS: ImatrixEntry(values, np.array([3, 0, 5, 8], np.float32)),
        DENSE: ImatrixEntry(values[:1] * 1000, np.array([1024], np.float32)),
    }
    return ImatrixFile(entries, ("wiki.txt", "Ünï"), 2, 512)


def by_hand(imatrix: ImatrixFile) -> bytes:
    """Return a file in llama-imatrix's layout: tensors by name, sums before counts, a row for each matrix."""
    specs, data = [], b""
    for name, entry in sorted(imatrix.entries.items()):
        for end, values in ((".in_sum2", entry.sums), (".counts", entry.counts.reshape(-1, 1))):
            specs.append(TensorSpec(name + end, tuple(reversed(values.shape)), 0, values.nbytes))
            data += values.tobytes() + b"\0" * (-values.nbytes % 32)
    metadata = {
        "general.type": "imatrix",
        "imatrix.datasets": list(imatrix.datasets),
        "imatrix.chunk_count": imatrix.n_chunks,
        "imatrix.chunk_size": imatrix.chunk_size,
    }
    return gguf(metadata, specs)[: -len(data)] + data


def legacy(imatrix: ImatrixFile, *, ending: bool = True) -> bytes:
    """Return a file in the older format: means times the number of calls."""
    out = struct.pack("<i", len(imatrix.entries))
    for name, entry in sorted(imatrix.entries.items()):
        counts = np.where(entry.counts, entry.counts, 1)[:, None]
        means = np.where(entry.counts[:, None], entry.sums / counts, 1) * 7
        out += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", 7, means.size)
        out += means.astype("<f4").tobytes()
    dataset = imatrix.datasets[0].encode()
    return out + (struct.pack("<ii", imatrix.n_chunks, len(dataset)) + dataset if ending else b"")


def same(one: ImatrixFile, other: ImatrixFile) -> bool:
    return one.entries.keys() == other.entries.keys() and all(
        np.array_equal(entry.sums, other.entries[name].sums)
        and np.array_equal(entry.counts, other.entries[name].counts)
        for name, entry in one.entries.items()
    )


def model(folder: Path, columns: int = 64) -> Path:
    tensors = (
        *gguf_writer.TENSORS[:2],
        TensorSpec(DENSE, (columns, 64), 0, columns * 64 * 4),
        TensorSpec(EXPERTS, (columns, 96, 4), 0, columns * 96 * 4 * 4),
    )
    return write(folder / "model.gguf", tiny_model(tensors=tensors))


# ---- the bytes


def test_a_file_has_llama_cpps_bytes_and_comes_back(tmp_path: Path) -> None:
    target = tmp_path / "im.gguf"
    write_imatrix(target, some())
    assert target.read_bytes() == by_hand(some())
    found = read_imatrix(target)
    assert same(found, some())
    assert (found.datasets, found.n_chunks, found.chunk_size) == (("wiki.txt", "Ünï"), 2, 512)
    assert [path.name for path in tmp_path.iterdir()] == ["im.gguf"]


@pytest.mark.parametrize("ending", [True, False])
def test_the_older_format_is_read(ending: bool, tmp_path: Path) -> None:
    found = read_imatrix(write(tmp_path / "im.dat", legacy(some(), ending=ending)))
    for name, entry in some().entries.items():
        used = entry.counts > 0
        means = (entry.sums[used] / entry.counts[used][:, None]).reshape(-1)
        read = found.entries[name]
        assert (read.sums / read.counts).reshape(entry.sums.shape)[used].reshape(-1) == pytest.approx(means, rel=1e-6)
    assert (found.datasets, found.n_chunks) == ((("wiki.txt",), 2) if ending else ((), 0))


def test_one_of_the_older_format_becomes_gguf_for_the_engine(tmp_path: Path) -> None:
    old, target = write(tmp_path / "im.dat", legacy(some())), tmp_path / "new.gguf"
    checked: list[Path] = []
    assert prepare_imatrix(old, model(tmp_path), target, checked.append) == target
    assert checked == [target]
    assert same(read_imatrix(target), read_imatrix(old))
    assert prepare_imatrix(target, model(tmp_path), tmp_path / "unneeded.gguf", checked.append) == target
    assert checked == [target]
    assert not (tmp_path / "unneeded.gguf").exists()


def test_unused_experts_are_counted() -> None:
    assert unused_experts(some()) == {EXPERTS: 1}


def test_a_name_too_long_for_the_format_is_refused(tmp_path: Path) -> None:
    entry = some().entries[DENSE]
    with pytest.raises(UsageError, match="too long"):
        write_imatrix(tmp_path / "im.gguf", ImatrixFile({"x" * 56: entry}, ("t",), 1, 512))
    assert not list(tmp_path.iterdir())


def test_sums_are_divided_by_counts() -> None:
    sums = np.array([[1.0, 2.0], [5.0, 5.0], [9.0, 3.0]], np.float32)
    entry = ImatrixEntry(sums, np.array([1.0, 0.0, 3.0], np.float32))
    found = ImatrixFile({EXPERTS: entry}, (), 1, 512).weights()[EXPERTS]
    assert found.tolist() == [1.0, 2.0, 1.0, 1.0, 3.0, 1.0]  # an expert that was never used counts 1
    assert found.dtype == np.float32


# ---- wrong files


def test_files_of_other_formats_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"not an importance matrix: it is a model \(llama\)"):
        read_imatrix(model(tmp_path))
    with pytest.raises(UsageError, match="neither as GGUF nor"):
        read_imatrix(write(tmp_path / "text", b"Once upon a time there was a file of text"))
    with pytest.raises(UsageError, match="not an importance matrix"):
        read_imatrix(write(tmp_path / "empty", b""))
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(ModelNotFoundError, match="there is no file"):
            read_imatrix(path)


def damaged(name: str, sums: list[float], counts: list[float]) -> ImatrixFile:
    return ImatrixFile({name: ImatrixEntry(np.array([sums], "f4"), np.array(counts, "f4"))}, ("t",), 1, 512)


@pytest.mark.parametrize(
    ("sums", "counts"),
    [([1.0, 2.0, 3.0], [1.0, 1.0]), ([float("nan")], [1.0]), ([-1.0], [1.0]), ([1.0], [float("inf")]), ([1.0], [-1.0])],
)
def test_impossible_numbers_are_named(sums: list[float], counts: list[float], tmp_path: Path) -> None:
    content = by_hand(damaged(DENSE, sums, counts))
    with pytest.raises(BadModelError, match=rf"is damaged: {DENSE} h"):
        read_imatrix(write(tmp_path / "im.gguf", content))


def test_sums_without_counts_are_named(tmp_path: Path) -> None:
    content = gguf({"general.type": "imatrix"}, [TensorSpec(f"{DENSE}.in_sum2", (64, 1), 0, 256)])
    with pytest.raises(BadModelError, match=f"{DENSE} has sums but no counts"):
        read_imatrix(write(tmp_path / "im.gguf", content))


@pytest.mark.parametrize("make", [by_hand, legacy])
def test_a_broken_file_is_one_of_our_errors(make: Callable[[ImatrixFile], bytes], tmp_path: Path) -> None:
    content, chance = make(some()), random.Random(5)
    for _ in range(300):
        broken = bytearray(content[: chance.choice([len(content), chance.randrange(len(content))])])
        for _ in range(chance.randrange(4)):
            if broken:
                broken[chance.randrange(min(len(broken), 400))] = chance.randrange(256)
        path = write(tmp_path / "im", bytes(broken))
        with suppress(LlmrunError):
            read_imatrix(path)


# ---- and a model


def test_a_matrix_of_another_model_is_refused(tmp_path: Path) -> None:
    header = read_header(model(tmp_path))
    require_fit(some(), header, Path("im.gguf"))
    with pytest.raises(UsageError, match=r"another model: blk\.0\.attn_q\.weight has 64 columns in the model, 96 in"):
        require_fit(
            ImatrixFile({DENSE: ImatrixEntry(np.ones((1, 96), "f4"), np.ones(1, "f4"))}, (), 0, 0), header, Path("im")
        )
    foreign = {f"blk.{layer}.other.weight": some().entries[DENSE] for layer in range(5)}
    with pytest.raises(UsageError, match=r"model.gguf has no blk\.0\.other\.weight, .* and 2 more"):
        require_fit(ImatrixFile(foreign, (), 0, 0), header, Path("im"))


def test_a_column_that_got_only_zeros_keeps_a_weight() -> None:
    """llama.cpp writes zeros for a block of columns without any, and nobody would see it."""
    sums = np.array([[0, 4, 2, 0], [0, 0, 0, 0], [1, 2, 3, 4]], np.float32)
    means = ImatrixEntry(sums, np.array([2, 2, 0], np.float32)).means().reshape(3, 4)
    assert means.tolist() == [[1, 2, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]]
