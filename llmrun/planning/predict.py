"""Predictions of load time, prefill and decode speed, from a model's shape and the measured speed of ggml's kernels.

Pure arithmetic; speed.py measures. Times are in seconds.
tests/benchmarks/plan.py compares these figures with real answers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from llmrun.gguf.types import TENSOR_TYPES
from llmrun.planning.memory import KV_BYTES
from llmrun.protocol.jobs.machine import LONG_ROW

if TYPE_CHECKING:
    from llmrun.gguf.header import Header, Tensor
    from llmrun.protocol.jobs.machine import MachineSpeed

# Of a block besides its matrices: norms, RoPE, KV cells, activations, additions, and conversions.
_OPERATIONS_A_LAYER = 30
ANSWER_SECONDS = 60e-6  # to sample and send a token
_OPEN_SECONDS = 0.03
_TOKEN_SECONDS = 1e-6  # to load one token of the vocabulary
_REPACK_RATE = 0.7e9  # bytes/s in which weights are repacked, on one core
_KV_SHARE = 0.5  # of the read rate: keys and values lie in short pieces
_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"

# Parts of a quantization that is named after a mix -> type that most of its bytes have.
_MAIN_TYPES = {"IQ3_M": "IQ3_S", "IQ3_XS": "IQ3_S", "IQ2_M": "IQ2_S", "TQ1_0": "TQ1_0", "MXFP4_MOE": "MXFP4"}


@dataclass(frozen=True, slots=True)
class Work:
    """The work of computing one token, from the tensor table."""

    decode_bytes: Mapping[str, float]  # type -> bytes of matrices that one token of an answer reads
    prefill_weights: Mapping[str, float]  # type -> weights that multiply one prompt token, without the output matrix
    layers: float  # transformer blocks
    full_layers: float  # of them, with attention to all previous tokens
    window_layers: float  # of them, with attention to a sliding window
    window: int  # in tokens
    kv_elements: float  # cached for a token in full_layers
    window_kv_elements: float  # cached for a token in window_layers
    heads: float  # query heads of a block
    head_length: int  # elements of one head
    vocabulary: int  # tokens
    file_bytes: Mapping[str, float]  # type -> bytes of matrices, all experts included
    output_bytes: Mapping[str, float] = field(default_factory=dict)  # part of decode_bytes: the output matrix
    row_lengths: Mapping[str, float] = field(default_factory=dict)  # type -> mean row length of decode_bytes' matrices

    @property
    def decode_weights(self) -> dict[str, float]:
        """Type -> weights that multiply one token of an answer."""
        return {
            type_name: size / TENSOR_TYPES[type_name].block_bytes * TENSOR_TYPES[type_name].block
            for type_name, size in self.decode_bytes.items()
        }

    def copies(self, repacked: Collection[str]) -> int:
        """Return the bytes of weights of the repacked types."""
        return int(sum(size for type_name, size in self.file_bytes.items() if type_name in repacked))

    def attention_reads(self, depth: float) -> float:
        """Return the pairs of query head and position that a token at this depth attends to."""
        return self.heads * (self.full_layers * depth + self.window_layers * min(depth, self.window))

    def kv_read(self, depth: float) -> float:
        """Return the elements of keys and values that a token at this depth reads."""
        return self.kv_elements * depth + self.window_kv_elements * min(depth, self.window)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Rates in tokens/s; load_seconds with the file in the page cache."""

    load_seconds: float
    prefill_rate: float
    decode_rate: float


def work_of(header: Header) -> Work:
    """Return the work by a file's tensor table."""
    tied = all(tensor.name != _OUTPUT for tensor in header.tensors)
    decode: Counter[str] = Counter()
    prefill: Counter[str] = Counter()
    whole: Counter[str] = Counter()
    output: Counter[str] = Counter()
    weights: Counter[str] = Counter()
    rows: Counter[str] = Counter()
    for tensor in header.tensors:
        if len(tensor.shape) < 2 or (tensor.name == _EMBEDDING and not tied):
            continue
        part = header.active_share(tensor)
        whole[tensor.type] += tensor.n_bytes
        decode[tensor.type] += tensor.n_bytes * part  # type: ignore[assignment]
        weights[tensor.type] += tensor.n_elements * part  # type: ignore[assignment]
        rows[tensor.type] += tensor.n_elements / tensor.shape[0] * part  # type: ignore[assignment]
        if tensor.name not in (_EMBEDDING, _OUTPUT):
            prefill[tensor.type] += tensor.n_elements * part  # type: ignore[assignment]
        else:
            output[tensor.type] += tensor.n_bytes
    near = header.n_window_layers
    return Work(
        decode_bytes=decode,
        prefill_weights=prefill,
        layers=header.n_layers,
        full_layers=len(header.kv_layers) - near,
        window_layers=near,
        window=header.sliding_window,
        kv_elements=sum(layer.elements for layer in header.kv_layers if not layer.window),
        window_kv_elements=sum(layer.elements for layer in header.kv_layers if layer.window),
        heads=_mean(header.n_heads),
        head_length=header.key_length,
        vocabulary=header.n_vocab,
        file_bytes=whole,
        output_bytes=output,
        row_lengths={type_name: count / rows[type_name] for type_name, count in weights.items()},
    )


def work_of_quant(header: Header, quant: str, size: int) -> Work:
    """Estimate the work of another quant of the same model by its name, e.g. "Q5_K_M", and file size in bytes."""
    exact = work_of(header)
    type_name = main_type(quant)
    grown = size / max(header.weight_bytes, 1)
    weights = exact.decode_weights
    rows = sum(count / exact.row_lengths[other] for other, count in weights.items())
    return replace(
        exact,
        decode_bytes={type_name: sum(exact.decode_bytes.values()) * grown},
        prefill_weights={type_name: sum(exact.prefill_weights.values())},
        file_bytes={type_name: sum(exact.file_bytes.values()) * grown},
        output_bytes={type_name: sum(exact.output_bytes.values()) * grown},
        row_lengths={type_name: sum(weights.values()) / max(rows, 1)},
    )


def main_type(quant: str) -> str:
    """Return the type of most bytes of a quant, e.g. "Q4_K" of "UD-Q4_K_XL"."""
    name = quant.upper().removeprefix("UD-")
    if name in _MAIN_TYPES:
        return _MAIN_TYPES[name]
    mixed = re.fullmatch(r"(Q\d_K)(_\w+)?", name)
    return mixed[1] if mixed else name


def predict(
    work: Work,
    speed: MachineSpeed,
    gpus: Sequence[MachineSpeed] = (),
    counts: Sequence[int] = (),
    *,
    depth: int = 0,
    prompt: int = 512,
    kv_type: str = "f16",
    copies: int = 0,
) -> Prediction:
    """Predict load time and rates of a model whose layers are computed by the processor, then by each GPU in sequence.

    Args:
        speed: of the processor.
        gpus: speed of each GPU.
        counts: layers of each GPU; the rest is on the processor.
        depth: tokens in the context during decode.
        prompt: tokens of the prompt, for the prefill rate.
        copies: bytes of weights that are repacked at load.
    """
    decode, prefill = ANSWER_SECONDS, 0.0
    for part, device in zip(_parts(work, counts), (speed, *gpus), strict=True):
        if part is not None:
            decode += decode_seconds(part, device, depth, kv_type)
            prefill += prefill_seconds(part, device, prompt, kv_type)
    return Prediction(load_seconds(work, copies), 1 / max(prefill, 1e-9), 1 / max(decode, 1e-9))


def _parts(work: Work, counts: Sequence[int]) -> list[Work | None]:
    """Return the work of the processor and of each GPU, which has this many layers; None of one without any."""
    if not any(counts):
        return [work, *(None for _ in counts)]
    blocks = round(work.layers)
    shares = [blocks + 1 - sum(counts), *counts]
    last = max(index for index, count in enumerate(shares) if count)
    return [
        part_of(work, (count - (index == last)) / max(blocks, 1), with_output=index == last) if count else None
        for index, count in enumerate(shares)
    ]


def decode_seconds(work: Work, speed: MachineSpeed, depth: float, kv_type: str) -> float:
    """Return the time of one token of an answer."""
    whole = sum(work.decode_bytes.values())
    lengths = {type_name: work.row_lengths.get(type_name, LONG_ROW) for type_name in work.decode_bytes}
    decode = sum(
        size / speed.decode(type_name, whole, lengths[type_name]) for type_name, size in work.decode_bytes.items()
    )
    decode += work.kv_read(depth) * KV_BYTES[kv_type] / (_KV_SHARE * speed.read)
    operations = work.layers * _OPERATIONS_A_LAYER * speed.operation
    return decode + work.attention_reads(depth) * speed.attention(kv_type, work.head_length) + operations


def prefill_seconds(work: Work, speed: MachineSpeed, prompt: int, kv_type: str) -> float:
    """Return the time per token of a prompt of this length."""
    multiply = sum(count / speed.prefill(type_name) for type_name, count in work.prefill_weights.items())
    return multiply + work.attention_reads(prompt / 2) * speed.attention(kv_type, work.head_length, prefill=True)


def load_seconds(work: Work, copies: int) -> float:
    """Return the load time with the file in the page cache; copies as in predict()."""
    return _OPEN_SECONDS + work.vocabulary * _TOKEN_SECONDS + copies / _REPACK_RATE


def step_seconds(work: Work, speed: MachineSpeed, rows: int, *, depth: int = 0) -> float:
    """Return the time of a decode step of N answers, at a depth of tokens each.

    Weights are read once and multiplied for each answer.
    """
    alone = 1 / predict(work, speed, depth=depth).decode_rate
    row = sum(count / speed.prefill(type_name) for type_name, count in work.decode_weights.items())
    row += work.attention_reads(depth) * speed.attention("f16", work.head_length) + ANSWER_SECONDS
    return max(alone, rows * row)


def part_of(work: Work, share: float, *, with_output: bool) -> Work:
    """Return the work of a share of the blocks, with or without the output matrix."""

    def scaled(sizes: Mapping[str, float]) -> dict[str, float]:
        return {type_name: size * share for type_name, size in sizes.items()}

    decode = scaled(
        {type_name: size - work.output_bytes.get(type_name, 0) for type_name, size in work.decode_bytes.items()}
    )
    for type_name, size in work.output_bytes.items() if with_output else ():
        decode[type_name] = decode.get(type_name, 0) + size
    return replace(
        work,
        decode_bytes=decode,
        prefill_weights=scaled(work.prefill_weights),
        layers=work.layers * share,
        full_layers=work.full_layers * share,
        window_layers=work.window_layers * share,
        kv_elements=work.kv_elements * share,
        window_kv_elements=work.window_kv_elements * share,
    )


def _mean(heads: int | tuple[int, ...]) -> float:
    if isinstance(heads, int):
        return float(heads)
    return sum(heads) / len(heads) if heads else 0.0


def tensor_types(tensors: Collection[Tensor]) -> set[str]:
    """Return the types of matrices, whose speeds a prediction needs."""
    return {tensor.type for tensor in tensors if len(tensor.shape) > 1}
