"""The header reader: right figures from right files, one line of why from wrong ones, never anything else."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
from support.effort import loops
from support.gguf_writer import (
    ARRAY,
    F64,
    I32,
    I64,
    TENSORS,
    U64,
    TensorSpec,
    Typed,
    gguf,
    string,
    tiny_model,
    write,
)
from support.gguf_writer import metadata as tiny_metadata

from llmrun.errors import BadModelError, ModelNotFoundError
from llmrun.gguf import reader as reader
from llmrun.gguf.metadata import ArrayInfo
from llmrun.gguf.reader import NeedMoreBytes, parse_header, read_header, read_part


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tiny.gguf"


def test_reads_the_figures(path: Path) -> None:
    header = read_header(write(path, tiny_model()))
    assert header.architecture == "llama"
    assert header.name == "Tiny"
    assert header.version == 3
    assert header.file_size == path.stat().st_size
    assert (header.n_layers, header.n_embd, header.n_ctx_train) == (2, 64, 128)
    assert (header.n_heads, header.n_kv_heads) == (4, 2)
    assert (header.key_length, header.value_length) == (16, 16)
    assert header.n_vocab == 16
    assert header.n_experts == 0
    assert header.quant == "Q4_1"
    assert header.tokenizer_model == "gpt2"
    assert (header.split_count, header.split_number) == (1, None)
    assert header.chat_template is None
    assert header.license is None


def test_reads_the_tensor_table(path: Path) -> None:
    header = read_header(write(path, tiny_model()))
    embedding, norm, query = header.tensors
    assert (embedding.name, embedding.shape, embedding.type) == ("token_embd.weight", (64, 16), "F32")
    assert (norm.n_bytes, query.n_bytes, query.type) == (256, 2560, "Q4_1")
    assert embedding.offset % 32 == 0
    assert query.offset + query.n_bytes == header.file_size
    assert header.weight_bytes == 4096 + 256 + 2560
    assert header.n_parameters == 64 * 16 + 64 + 64 * 64
    assert header.bytes_per_type == {"F32": 4352, "Q4_1": 2560}


def test_every_kind_of_value(path: Path) -> None:
    values = {
        "small": Typed(0, 200), "signed": Typed(1, -3), "u16": Typed(2, 60_000), "i16": Typed(3, -5),
        "u32": 7, "i32": Typed(I32, -7), "f32": 0.5, "yes": True, "text": "ä", "u64": Typed(U64, 2**63),
        "i64": Typed(I64, -(2**40)), "f64": Typed(F64, 0.1), "floats": [0.5, 1.5], "none": [],
    }  # fmt: skip
    header = read_header(write(path, gguf(values)))
    expected = {key: item.value if isinstance(item, Typed) else item for key, item in values.items()}
    expected |= {"floats": (0.5, 1.5), "none": ()}
    assert dict(header.metadata) == expected


def test_agrees_with_the_reference_writer(path: Path) -> None:
    np = pytest.importorskip("numpy")
    reference = pytest.importorskip("gguf")
    writer = reference.GGUFWriter(path, "llama")
    writer.add_block_count(5)
    writer.add_head_count_kv([1, 2, 3, 0, 1])
    writer.add_token_list(["a", "b", "c"])
    writer.add_tensor("w", np.zeros((3, 8), dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_header(path)
    assert header.n_kv_heads == (1, 2, 3, 0, 1)
    assert header.n_vocab == 3
    assert [(t.name, t.shape, t.type, t.n_bytes) for t in header.tensors] == [("w", (8, 3), "F16", 48)]


def test_arrays_are_skipped_unless_asked_for(path: Path) -> None:
    scores = [float(n) for n in range(1000)]
    tokens = [b"\xff", b"b", *(b"t%d" % n for n in range(998))]
    changes = {"tokenizer.ggml.scores": scores, "tokenizer.ggml.tokens": tokens}
    write(path, tiny_model(changes))
    skipped = read_header(path).metadata
    assert skipped["tokenizer.ggml.scores"] == ArrayInfo(1000)
    assert skipped["tokenizer.ggml.tokens"] == ArrayInfo(1000)
    read = read_header(path, arrays=changes.keys())
    assert read.metadata["tokenizer.ggml.scores"] == tuple(scores)
    assert read.metadata["tokenizer.ggml.tokens"] == tuple(tokens)
    assert read.n_vocab == 1000


def test_one_number_per_layer(path: Path) -> None:
    changes = {"llama.block_count": 3, "llama.attention.head_count_kv": [2, 0, 1]}
    header = read_header(write(path, tiny_model(changes)))
    assert header.n_kv_heads == (2, 0, 1)
    assert header.kv_bytes_per_token() == 3 * (16 + 16) * 2.0


def test_kv_cache_size(path: Path) -> None:
    header = read_header(write(path, tiny_model()))
    assert header.kv_bytes_per_token() == 2 * 2 * (16 + 16) * 2.0
    assert header.kv_bytes_per_token(1.0625) == 2 * 2 * (16 + 16) * 1.0625


def test_stated_head_lengths_win(path: Path) -> None:
    changes = {"llama.attention.key_length": 128, "llama.attention.value_length": 96}
    header = read_header(write(path, tiny_model(changes)))
    assert (header.key_length, header.value_length) == (128, 96)


def test_kv_heads_default_to_heads(path: Path) -> None:
    header = read_header(write(path, tiny_model({"llama.attention.head_count_kv": None})))
    assert header.n_kv_heads == 4


def test_quant_falls_back_to_the_type_most_bytes_have(path: Path) -> None:
    assert read_header(write(path, tiny_model({"general.file_type": None}))).quant == "F32"
    assert read_header(write(path, tiny_model({"general.file_type": 15 + 1024}))).quant == "Q4_K_M"


def test_recommended_sampling(path: Path) -> None:
    advice = {
        "general.sampling.temp": 0.6, "general.sampling.top_k": 20, "general.sampling.top_p": 0.5,
        "general.sampling.penalty_last_n": Typed(I32, -1), "general.sampling.penalty_repeat": float("nan"),
        "general.sampling.min_p": "much", "general.sampling.mirostat": True,
    }  # fmt: skip
    header = read_header(write(path, tiny_model(advice)))
    assert header.recommended_sampling == {"temperature": pytest.approx(0.6), "top_k": 20, "top_p": 0.5}


def test_a_header_may_come_in_pieces(path: Path) -> None:
    whole = tiny_model({"tokenizer.ggml.tokens": [f"token {number}" for number in range(1000)]})
    asked = [0]
    while True:
        try:
            header = parse_header(whole[: asked[-1]], len(whole), path)
            break
        except NeedMoreBytes as more:
            asked.append(more.until)
    assert header == read_header(write(path, whole))
    assert asked == sorted(set(asked))
    assert asked[-1] <= len(whole)
    assert len(asked) > 30


def test_long_texts_are_skipped(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "INLINE_TEXT_BYTES", 100)
    header = read_header(
        write(path, tiny_model({"tokenizer.huggingface.json": "x" * 101, "general.author": "y" * 100}))
    )
    assert header.metadata["tokenizer.huggingface.json"] == ArrayInfo(101)
    assert header.author == "y" * 100
    assert read_header(path, arrays=("tokenizer.huggingface.json",)).text("tokenizer.huggingface.json") == "x" * 101


def test_many_short_arrays_are_skipped_in_the_end(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_INLINE_ELEMENTS", 10)
    header = read_header(write(path, gguf({"a": [1] * 6, "b": [1] * 6})))
    assert header.metadata == {"a": (1,) * 6, "b": ArrayInfo(6)}


LIMITS: dict[str, tuple[str, int, dict[str, object], str]] = {
    "texts": ("MAX_TEXT_BYTES", 300, {"a": "x" * 200, "b": "x" * 200}, "'b' is 200 bytes long; all texts"),
    "strings": ("MAX_STRINGS", 9, {"a": ["x"] * 5, "b": ["x"] * 5}, "'b' has 5 elements; all string arrays"),
    "keys": ("MAX_KEYS", 1, {"a": 1, "b": 1}, "keys is 2"),
    "header": ("MAX_HEADER_BYTES", 100, {"a": "x" * 200}, "the limit of 100 for headers ends"),
}


@pytest.mark.parametrize("name", LIMITS)
def test_limits(path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    limit, most, metadata, words = LIMITS[name]
    monkeypatch.setattr(reader, limit, most)
    with pytest.raises(BadModelError) as caught:
        read_header(write(path, gguf(metadata)))
    assert words in str(caught.value)


# ---- models in several files

COUNT = {"split.count": Typed(2, 3), "split.tensors.count": Typed(I32, len(TENSORS))}


def parts(folder: Path, changes: dict[int, dict[str, object]] | None = None, ending: str = "gguf") -> list[Path]:
    """A model of three files with a tensor each; `changes` by the file's number."""
    paths = []
    for number, tensor in enumerate(TENSORS):
        keys = {"split.no": Typed(2, number), **COUNT, **(changes or {}).get(number, {})}
        content = gguf({**(tiny_metadata() if number == 0 else {}), **keys}, [tensor])
        paths.append(write(folder / f"big-{number + 1:05}-of-00003.{ending}", content))
    return paths


def test_a_split_model_is_one(tmp_path: Path) -> None:
    files = parts(tmp_path)
    header = read_header(files[0])
    assert [(tensor.name, tensor.part) for tensor in header.tensors] == [
        (tensor.name, number) for number, tensor in enumerate(TENSORS)
    ]
    assert header.path == files[0]
    assert header.split_count == 3
    assert header.file_size == sum(path.stat().st_size for path in files)
    assert header.weight_bytes == sum(tensor.n_bytes for tensor in TENSORS)
    assert header.architecture == "llama"


def test_one_file_of_a_split_model(tmp_path: Path) -> None:
    files = parts(tmp_path)
    part = read_part(files[1])
    assert (part.split_number, [tensor.name for tensor in part.tensors]) == (1, [TENSORS[1].name])
    with pytest.raises(BadModelError, match="part 2 of a split model") as caught:
        read_header(files[1])
    assert "big-00001-of-00003.gguf" in caught.value.hint


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    first, _, third = parts(tmp_path)
    third.unlink()
    with pytest.raises(ModelNotFoundError, match="is missing"):
        read_header(first)


SPLIT: dict[str, tuple[dict[int, dict[str, object]], str]] = {
    "exchanged": ({1: {"split.no": Typed(2, 2)}}, "'split.no' is 2; it should be 1"),
    "unnumbered": ({2: {"split.no": Typed(2, 0)}}, "'split.no' is 0; it should be 2"),
    "number of another type": ({1: {"split.no": 1}}, "'split.no' has the type u32; it has to be u16"),
    "another count": ({0: {"split.count": Typed(2, 4)}}, "'split.count' is 4"),
    "too few tensors": ({0: {"split.tensors.count": Typed(I32, 4)}}, "tensors.count' is 4, but its files have 3"),
    "damaged": ({2: {"general.alignment": 3}}, "'general.alignment' is 3"),
}  # fmt: skip


@pytest.mark.parametrize("name", SPLIT)
def test_files_that_do_not_belong_together(tmp_path: Path, name: str) -> None:
    changes, words = SPLIT[name]
    with pytest.raises(BadModelError) as caught:
        read_header(parts(tmp_path, changes)[0])
    assert words in f"{caught.value} {caught.value.why}"


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    first, second, _ = parts(tmp_path)
    write(second, gguf({"split.no": Typed(2, 1), **COUNT}, [TENSORS[0]]))
    with pytest.raises(BadModelError, match="is in two of its files"):
        read_header(first)


def test_names_that_do_not_tell_the_others(tmp_path: Path) -> None:
    first, *_ = parts(tmp_path)
    with pytest.raises(BadModelError, match="does not tell their names"):
        read_header(first.rename(tmp_path / "renamed.gguf"))
    parts(tmp_path, ending="GGUF")
    with pytest.raises(BadModelError):
        read_header(tmp_path / "big-00001-of-00003.GGUF")


def test_hundred_thousand_strings_are_skipped_fast(path: Path) -> None:
    write(path, tiny_model({"tokenizer.ggml.tokens": ["token"] * 100_000}))
    assert loops(lambda: read_header(path)) < 100  # gguf-py takes a thousand


# ---- files that are none


@pytest.mark.skipif(not hasattr(os, "O_NOATIME"), reason="only Linux can read without a trace")
def test_a_header_that_is_read_is_no_use_of_the_model(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path, tiny_model())
    without_trace, real = list[bool](), os.open

    def open_as_a_stranger(path: Path, flags: int) -> int:
        without_trace.append(bool(flags & os.O_NOATIME))
        if without_trace[-1]:
            raise PermissionError("not the owner")
        return real(path, flags)

    monkeypatch.setattr(os, "open", open_as_a_stranger)
    assert read_header(path).quant
    assert without_trace == [True, False]


def test_missing_file(path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="there is no file"):
        read_header(path)


def test_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="is a folder"):
        read_header(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
def test_fifo_is_refused_without_waiting(path: Path) -> None:
    os.mkfifo(path)
    with pytest.raises(ModelNotFoundError, match="not a regular file"):
        read_header(path)


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="no devices here")
def test_device() -> None:
    with pytest.raises(ModelNotFoundError, match="not a regular file"):
        read_header(Path("/dev/zero"))


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file(path: Path) -> None:
    write(path, tiny_model()).chmod(0)
    with pytest.raises(ModelNotFoundError, match="can't open"):
        read_header(path)


def test_name_with_nul() -> None:
    with pytest.raises(ModelNotFoundError):
        read_header(Path("a\0b"))


# ---- damaged files: (what is wrong, bytes, words of the message)

_HEAD = b"GGUF" + struct.pack("<I", 3)


def _one_key(item: bytes, key: str = "k") -> bytes:
    return _HEAD + struct.pack("<QQ", 0, 1) + string(key) + item + b"\0" * 64


DAMAGED = {
    "empty": (b"", "0 bytes"),
    "short": (b"GGUF" + b"\0" * 10, "14 bytes"),
    "text": (b"<!doctype html><html><body></body></html>", "<!do"),
    "version 1": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version is 1"),
    "version 4": (b"GGUF" + struct.pack("<IQQ", 4, 0, 0), "version is 4"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "2^63 tensors": (_HEAD + struct.pack("<QQ", 2**63, 0) + b"\0" * 64, "of tensors is 9223372036854775808"),
    "2^40 keys": (_HEAD + struct.pack("<QQ", 0, 2**40) + b"\0" * 64, "keys is 1099511627776"),
    "key beyond the end": (_HEAD + struct.pack("<QQQ", 0, 1, 60_000) + b"\0" * 64, "key 0 needs 60000"),
    "endless key": (_HEAD + struct.pack("<QQQ", 0, 1, 2**64 - 1) + b"\0" * 64, "key 0 is 184467440737095516"),
    "empty key": (_one_key(struct.pack("<II", 4, 1), ""), "empty"),
    "unknown type": (_one_key(struct.pack("<I", 77)), "'k' has an unknown type 77"),
    "endless string": (_one_key(struct.pack("<IQ", 8, 2**62)), "'k' needs 4611686018427387912 bytes"),
    "endless array": (_one_key(struct.pack("<IIQ", ARRAY, 4, 2**63)), "'k' has 9223372036854775808 elements"),
    "many strings": (_one_key(struct.pack("<IIQ", ARRAY, 8, 2**40)), "'k' has 1099511627776 elements"),
    "string beyond the end": (_one_key(struct.pack("<IIQQ", ARRAY, 8, 1, 2**64 - 1)), "a string in 'k'"),
    "array in array": (_one_key(struct.pack("<IIQ", ARRAY, ARRAY, 1)), "an array in an array"),
    "array of unknown": (_one_key(struct.pack("<IIQ", ARRAY, 99, 1)), "unknown type 99"),
    "key twice": (_HEAD + struct.pack("<QQ", 0, 2) + (string("k") + struct.pack("<II", 4, 1)) * 2, "'k', "),
    "alignment 0": (gguf({"general.alignment": 0}), "'general.alignment' is 0"),
    "alignment 48": (gguf({"general.alignment": 48}), "'general.alignment' is 48"),
    "alignment text": (gguf({"general.alignment": "x"}), "'general.alignment' has the type string"),
    "five dimensions": (gguf({}, [TensorSpec("w", (1,) * 5)]), "5 dimensions"),
    "negative dimension": (gguf({}, [TensorSpec("w", (2**63 + 5,))]), "impossible shape"),
    "odd row": (gguf({}, [TensorSpec("w", (33,), 2)]), "'w' of type Q4_0 has the impossible shape [33]"),
    "unknown tensor type": (gguf({}, [TensorSpec("w", (32,), 4)]), "'w' has an unknown type 4"),
    "long tensor name": (gguf({}, [TensorSpec("w" * 64, (1,), 0, 4)]), "64 bytes long"),
    "tensor twice": (gguf({}, [TensorSpec("w", (8,), 0, 32)] * 2), "'w' is a duplicate"),
    "wrong offset": (gguf({}, [TensorSpec("w", (8,), 0, 32, offset=64)]), "'w' is at offset 64"),
    "tensor beyond the end": (gguf({}, [TensorSpec("w", (1 << 20, 1 << 20), 0, 0)]), "cut off"),
    "overflowing shape": (gguf({}, [TensorSpec("w", (2**62, 2**62, 2**62, 2**62), 0, 0)]), "impossible shape"),
    "overflow hidden by a zero": (gguf({}, [TensorSpec("w", (2**62, 2**62, 0), 0, 0)]), "impossible shape"),
    "cut off": (tiny_model()[:-1], "cut off"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_named(path: Path, name: str) -> None:
    content, words = DAMAGED[name]
    with pytest.raises(BadModelError) as caught:
        read_header(write(path, content))
    assert words in str(caught.value)


def test_control_characters_do_not_reach_messages(path: Path) -> None:
    with pytest.raises(BadModelError) as caught:
        read_header(write(path, _one_key(struct.pack("<I", 77), "\x1b]0;gotcha\x07")))
    assert str(caught.value).isprintable()


def test_cut_off_at_every_byte(path: Path) -> None:
    whole = tiny_model()
    header_end = len(whole) - sum(tensor.n_bytes for tensor in TENSORS)
    for length in (*range(header_end), *range(header_end, len(whole), 500)):
        with pytest.raises(BadModelError):
            read_header(write(path, whole[:length]))
