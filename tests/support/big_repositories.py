"""Repositories whose files are as large as real ones, but are holes behind a header: what they take can be reckoned."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from support.gguf_writer import I32, U16, TensorSpec, Typed, gguf, metadata

_WIDTH, _BLOCK, _BLOCK_BYTES, _Q8_0 = 4096, 32, 34, 8
_ROW_BYTES = _WIDTH // _BLOCK * _BLOCK_BYTES
_VOCABULARY = 1000


class BigRepository(NamedTuple):
    """A model in several quants.

    Attributes:
        name: to type.
        id: "owner/repo".
        stem: of the file names.
        sizes: quant -> 10^9 bytes.
        layers, kv_heads: what its KV cache depends on, with keys and values of 128.
        parts: files of each quant.
    """

    name: str
    id: str
    stem: str
    sizes: Mapping[str, float]
    layers: int
    kv_heads: int
    parts: int = 1

    def files(self, folder: Path) -> dict[str, Any]:
        """Name -> content, as a stand-in hub wants them; the bytes take no disk and no memory."""
        found = {}
        for quant, gigabytes in self.sizes.items():
            size = int(gigabytes * 1e9) // self.parts
            for number in range(self.parts):
                part = f"-{number + 1:05}-of-{self.parts:05}" if self.parts > 1 else ""
                header = self._header(number, size)
                found[f"{self.stem}-{quant}{part}.gguf"] = _sparse(folder / f"{quant}{part}", header, size)
        return found

    def _header(self, number: int, size: int) -> bytes:
        keys: dict[str, Any] = {
            "llama.block_count": self.layers, "llama.context_length": 131_072, "llama.embedding_length": _WIDTH,
            "llama.attention.head_count": 32, "llama.attention.head_count_kv": self.kv_heads,
            "tokenizer.ggml.tokens": [f"t{n}" for n in range(_VOCABULARY)],
        }  # fmt: skip
        if self.parts > 1:
            keys |= {"split.no": Typed(U16, number), "split.count": Typed(U16, self.parts)}
            keys["split.tensors.count"] = Typed(I32, self.parts)
        name = f"blk.{number}.ffn_up.weight"
        room = size - len(gguf(metadata(**keys), [TensorSpec(name, (_WIDTH, 1), _Q8_0)]))
        return gguf(metadata(**keys), [TensorSpec(name, (_WIDTH, room // _ROW_BYTES), _Q8_0)])


def _sparse(path: Path, beginning: bytes, size: int) -> mmap.mmap:
    with path.open("w+b") as file:
        file.write(beginning)
        file.truncate(size)
        return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
