"""The job `importance`: sums of squared activations for each column of each matrix, over a calibration text."""

from __future__ import annotations

from dataclasses import dataclass

from llmrun.protocol.jobs import JobKind


@dataclass(frozen=True, slots=True)
class CalibrationPrompt:
    """A prompt from which the model writes calibration text."""

    text: str
    is_question: bool  # apply the chat template; otherwise the model continues the plain text


@dataclass(frozen=True, slots=True)
class Importance:
    """Read a text with the model, written by the model itself if there is none, and sum the squared activations."""

    model: str  # path of the model's (first) file, absolute
    sums: str  # path of the file to write: float32, for each tensor of the result its sums, then its counts
    text: str = ""  # path of the calibration text in UTF-8; "" makes the model write one
    prompts: tuple[CalibrationPrompt, ...] = ()  # for writing; used in turn, repeatedly
    n_tokens: int = 1 << 30  # maximum to read or to write
    seconds: float = 600.0  # time limit for writing
    seed: int = 0
    threads: int = 1
    gpu_layers: int = -1  # -1 is all
    n_ctx: int = 512  # tokens of a chunk
    includes_output: bool = False  # the output matrix too; llama.cpp leaves it out: its quantization gets worse


@dataclass(frozen=True, slots=True)
class ImportanceUpdate:
    """Progress of the job."""

    phase: str  # "loading", "writing" or "reading"
    done: int = 0  # tokens; writing may end before the total
    total: int = 0
    share: float = 0.0  # of the phase, 0 to 1; by time if the time limit comes first


@dataclass(frozen=True, slots=True)
class TensorSums:
    """One tensor's part of the file."""

    name: str
    n_sums: int  # columns times matrices
    n_counts: int  # 1, or the number of experts


@dataclass(frozen=True, slots=True)
class ImportanceSums:
    """The content of the file."""

    tensors: tuple[TensorSums, ...]  # in the order of the file
    n_tokens: int  # read
    n_chunks: int
    chunk_size: int
    written_tokens: int  # 0 for a given text
    writing_seconds: float
    reading_seconds: float
    text: str = ""  # written by the model


IMPORTANCE = JobKind("importance", Importance, ImportanceUpdate, ImportanceSums, lambda command: (command.model,))
