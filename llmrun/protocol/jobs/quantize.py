"""The job `quantize`: a GGUF file becomes another one, its weights in fewer bits."""

from __future__ import annotations

from dataclasses import dataclass

from llmrun.protocol.jobs import JobKind


@dataclass(frozen=True, slots=True)
class Quantize:
    """Write a quantized file and verify it, or only say what would be written.

    Attributes:
        source: path of the model's (first) file, absolute.
        target: path of the file to write, absolute; what is there is overwritten. Empty: only say what would come out.
        file_type: llama.cpp's number (llama_ftype) of the mix of types.
        overrides: (regular expression, ggml's number of a type) for tensors whose name contains a match; the first one
            that fits counts.
        output_type: ggml's number of the output matrix's type; -1 leaves it to the mix.
        embedding_type: the same for the token embedding.
        imatrix: path of an importance matrix in GGUF, absolute; "" for none.
        threads: at least 1.
        pure: every matrix gets the mix's main type.
        keeps_output: the output matrix stays as it is.
    """

    source: str
    target: str
    file_type: int
    overrides: tuple[tuple[str, int], ...] = ()
    output_type: int = -1
    embedding_type: int = -1
    imatrix: str = ""
    threads: int = 1
    pure: bool = False
    keeps_output: bool = False


@dataclass(frozen=True, slots=True)
class QuantizeUpdate:
    """How far it is.

    Attributes:
        tensors: how many are written, in the order of the result's `types`.
        n_bytes: of the file so far.
    """

    tensors: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Quantized:
    """What was written, or would be.

    Attributes:
        types: tensor -> ggml's name of its type, in the order in which they are written.
        wanted: tensor -> the type that it should have got, if the length of its rows did not forbid it.
        needs_imatrix: it can't be written without an importance matrix.
        unimportant: tensors that are quantized without weights although there is an importance matrix.
    """

    types: dict[str, str]
    wanted: dict[str, str]
    needs_imatrix: bool = False
    unimportant: tuple[str, ...] = ()


QUANTIZE = JobKind("quantize", Quantize, QuantizeUpdate, Quantized, lambda command: (command.source,))
