"""The jobs `quantize`, which writes a model's weights in fewer bits, and `trial`, which verifies a GGUF file."""

from __future__ import annotations

from dataclasses import dataclass

from llmrun.protocol.jobs import Empty, JobKind


@dataclass(frozen=True, slots=True)
class Quantize:
    """Write a quantized file and verify it, or only report its types."""

    source: str  # path of the model's (first) file, absolute
    # Path of the file to write, absolute; overwritten if it exists. Empty: only report.
    target: str
    file_type: int  # llama.cpp's number (llama_ftype) of the mix of types
    # (regular expression, ggml's number of a type) for tensors whose name contains a match; the first match counts.
    overrides: tuple[tuple[str, int], ...] = ()
    output_type: int = -1  # ggml's number of the output matrix's type; -1 leaves it to the mix
    embedding_type: int = -1  # the same for the token embedding
    imatrix: str = ""  # path of an importance matrix in GGUF, absolute; "" for none
    threads: int = 1
    pure: bool = False  # every matrix gets the mix's main type
    keeps_output: bool = False  # do not quantize the output matrix


@dataclass(frozen=True, slots=True)
class QuantizeUpdate:
    """Progress of writing."""

    tensors: int  # number written, in the order of the result's `types`
    n_bytes: int  # of the file


@dataclass(frozen=True, slots=True)
class Quantized:
    """The file, written or only planned."""

    types: dict[str, str]  # tensor -> ggml's name of its type, in the order of writing
    wanted: dict[str, str]  # tensor -> the mix's type, if the length of its rows does not allow it
    needs_imatrix: bool = False  # the types require an importance matrix
    unimportant: tuple[str, ...] = ()  # tensors without weights in the importance matrix


QUANTIZE = JobKind("quantize", Quantize, QuantizeUpdate, Quantized, lambda command: (command.source,))


@dataclass(frozen=True, slots=True)
class TryFile:
    """Verify a file."""

    path: str  # absolute
    threads: int


TRIAL = JobKind("trial", TryFile, Empty, Empty, lambda command: (command.path,))
