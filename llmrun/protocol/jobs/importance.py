"""The job `importance`: what each column of each matrix is multiplied with, summed over calibration text."""

from __future__ import annotations

from dataclasses import dataclass

from llmrun.protocol.jobs import JobKind


@dataclass(frozen=True, slots=True)
class CalibrationPrompt:
    """What the model is asked to write about.

    Attributes:
        text: of the prompt.
        is_question: it goes through the chat template; otherwise the model continues it as plain text.
    """

    text: str
    is_question: bool


@dataclass(frozen=True, slots=True)
class Importance:
    """Read a text with the model, or let it write one first, and sum the squares of what its matrices are given.

    Attributes:
        model: path of the model's (first) file, absolute.
        sums: path of the file to write: float32 numbers, of each tensor of the result its sums and then its counts.
        text: path of the calibration text in UTF-8; "" lets the model write it.
        prompts: to write from, over and over.
        n_tokens: how much of the text to read, or to write, at most.
        seconds: writing ends after this time, whatever there is then.
        seed: of what the model writes.
        threads: at least 1.
        gpu_layers: how many layers go to the GPU; -1 is all.
        n_ctx: tokens that are read at once.
        includes_output: the output matrix counts too; llama.cpp leaves it out, because its quantization gets worse.
    """

    model: str
    sums: str
    text: str = ""
    prompts: tuple[CalibrationPrompt, ...] = ()
    n_tokens: int = 1 << 30
    seconds: float = 600.0
    seed: int = 0
    threads: int = 1
    gpu_layers: int = -1
    n_ctx: int = 512
    includes_output: bool = False


@dataclass(frozen=True, slots=True)
class ImportanceUpdate:
    """How far it is.

    Attributes:
        phase: "loading", "writing" or "reading".
        done: tokens; writing may end before all are written.
        total: tokens.
        share: of the phase, 0 to 1; by time where that ends writing sooner.
    """

    phase: str
    done: int = 0
    total: int = 0
    share: float = 0.0


@dataclass(frozen=True, slots=True)
class TensorSums:
    """One tensor's part of the file.

    Attributes:
        name: of the tensor.
        n_sums: how many numbers; columns times matrices.
        n_counts: 1, or the number of experts.
    """

    name: str
    n_sums: int
    n_counts: int


@dataclass(frozen=True, slots=True)
class ImportanceSums:
    """What is in the file.

    Attributes:
        tensors: in the order of the file.
        n_tokens: that were read.
        n_chunks: of how many pieces.
        chunk_size: tokens of each.
        written_tokens: how many tokens the model wrote; 0 for a text that was there.
        writing_seconds: how long that took.
        reading_seconds: how long reading took.
        text: what was written.
    """

    tensors: tuple[TensorSums, ...]
    n_tokens: int
    n_chunks: int
    chunk_size: int
    written_tokens: int
    writing_seconds: float
    reading_seconds: float
    text: str = ""


IMPORTANCE = JobKind("importance", Importance, ImportanceUpdate, ImportanceSums, lambda command: (command.model,))
