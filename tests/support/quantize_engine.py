"""A quantize engine without llama.cpp, and a small model for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmrun.lab.quantize.types import FILE_TYPES, TENSOR_TYPES
from llmrun.protocol.jobs.quantize import Quantize, Quantized, QuantizeUpdate
from support.gguf_writer import TensorSpec, gguf, metadata, write

WIDTH, ROWS = 64, 16

NUMBERS = {number: name for name, (number, _, _) in TENSOR_TYPES.items()}


def specs(kind: str, embedding: str = "") -> list[TensorSpec]:
    """The tensors of a model whose matrices are all of one type."""
    return [
        matrix("token_embd.weight", embedding or kind),
        matrix("blk.0.attn_q.weight", kind),
        matrix("blk.0.ffn_down.weight", kind),
        TensorSpec("output_norm.weight", (WIDTH,), 0, 4 * WIDTH),
    ]


def matrix(name: str, kind: str) -> TensorSpec:
    number, block, n_bytes = TENSOR_TYPES[kind]
    return TensorSpec(name, (WIDTH, ROWS), number, WIDTH * ROWS // block * n_bytes)


def model(kind: str, embedding: str = "") -> bytes:
    return gguf(metadata(**{"general.file_type": FILE_TYPES[kind]}), specs(kind, embedding))


class Engine:
    """Writes what it is told to, and remembers what it was asked."""

    def __init__(self, makes: str, wanted: dict[str, str] | None = None, needs_imatrix: bool = False) -> None:
        self.makes, self.wanted, self.needs_imatrix = makes, wanted or {}, needs_imatrix
        self.commands: list[Quantize] = []
        self.fails: Callable[[Path], None] = lambda path: None
        self.unimportant: tuple[str, ...] = ()

    def do(
        self, kind: Any, command: Quantize, on_update: Callable[[QuantizeUpdate], None] = lambda update: None
    ) -> Quantized:
        self.commands.append(command)
        types = {spec.name: NUMBERS[spec.type] for spec in specs(self.makes)}
        if command.target:
            on_update(QuantizeUpdate(0, 0))
            path = Path(command.target)
            self.fails(path)
            write(path, model(self.makes))
            on_update(QuantizeUpdate(len(types), path.stat().st_size))
        return Quantized(types, self.wanted, self.needs_imatrix, self.unimportant)
