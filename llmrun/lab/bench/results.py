"""Bench results: rows with raw samples, and the machine they were measured on, to and from JSON.

A row has llama-bench's field names and ours, and carries its machine: rows of several files can be put into one list,
and a list that llama-bench itself wrote can be read.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from llmrun.errors import LlmrunError
from llmrun.protocol.codec import as_dict, from_json
from llmrun.protocol.devices import proportions
from llmrun.protocol.jobs.bench import BenchTest
from llmrun.protocol.settings import SETTINGS, EngineSettings, shown
from llmrun.protocol.sizes import readable_count

SCHEMA = 1
"""Version of the rows' fields; a reader refuses newer ones."""

# llama-bench's settings that llmrun never changes; readers of its files expect them.
_CONSTANT: dict[str, Any] = {
    "cpu_mask": "0x0",
    "cpu_strict": False,
    "poll": 50,
    "no_kv_offload": False,
    "lazy_mode": "auto",
    "embeddings": False,
    "no_op_offload": 0,
    "no_host": False,
    "fit_target": 0,
    "fit_min_ctx": 0,
}

# In llama-bench's order, with the figures computed from the samples.
_LLAMA_BENCH = (
    "build_commit", "build_number", "cpu_info", "gpu_info", "backends", "model_filename", "model_type", "model_size",
    "model_n_params", "n_batch", "n_ubatch", "n_threads", "cpu_mask", "cpu_strict", "poll", "type_k", "type_v",
    "n_gpu_layers", "n_cpu_moe", "split_mode", "main_gpu", "no_kv_offload", "flash_attn", "devices", "tensor_split",
    "tensor_buft_overrides", "load_mode", "lazy_mode", "embeddings", "no_op_offload", "no_host", "repack",
    "fit_target", "fit_min_ctx", "n_prompt", "n_gen", "n_depth", "test_time", "avg_ns", "stddev_ns", "avg_ts",
    "stddev_ts", "samples_ns", "samples_ts",
)  # fmt: skip

_SIZE_GUESS = re.compile(r" \d[\d.x]*[KMBT] ")
_FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine of a measurement. Sizes are in bytes; unknown facts are "", 0 and None."""

    name: str = ""  # a label from the user, or a default made of processor and fingerprint
    cpu: str = ""  # as the vendor calls it
    cpu_flags: tuple[str, ...] = ()  # relevant to ggml, e.g. "avx512_vnni"
    cores: int = 0  # usable physical cores
    threads: int = 0  # that can compute at the same time, of cores and a container's quota
    cpu_quota: float | None = None  # of the container, in cores; None is no limit
    memory_total: int = 0  # of the machine, or of the container if smaller
    memory_speed: str = ""  # e.g. "DDR5-4800"
    gpus: tuple[str, ...] = ()  # as ggml describes them
    os: str = ""  # e.g. "Debian GNU/Linux 12"
    kernel: str = ""  # e.g. "Linux 6.1.0"
    governor: str = ""  # of the processor's frequency, e.g. "performance"
    python: str = ""  # its version
    llmrun: str = ""  # our version
    llama: str = ""  # of llama-cpp-python
    build_commit: str = ""  # of ggml


@dataclass(frozen=True, slots=True)
class Limit:
    """The machine's limit in a test."""

    tokens_per_second: float  # the lower one of the two ceilings below
    binds: str  # "memory" or "compute", whichever ceiling that is
    memory_ceiling: float  # tokens/s if only reading weights and KV cache took time
    compute_ceiling: float  # tokens/s if only multiplying took time
    read_rate: float  # bytes/s read from memory with the test's threads, as measured
    compute_rate: float  # multiply-adds/s with the test's threads, as measured
    bytes_per_token: float  # of weights and KV cache that one token of the answer reads, on average over the test
    kv_bytes_per_token: float  # of these, the KV cache's
    multiply_adds: float  # that one token takes, on average over the test


@dataclass(frozen=True, slots=True)
class ChatTimes:
    """Latencies of chat tests: one entry for each repetition, or one for all their tokens."""

    ttft_ns: tuple[int, ...]  # from the request to its first text
    token_p50_ns: int  # between two tokens, the median
    token_p95_ns: int  # between two tokens; one in twenty takes longer
    token_p99_ns: int  # between two tokens; one in a hundred takes longer
    sampling_share: float  # of sampling in the time after the first token, 0 to 1
    text_share: float  # of detokenizing and delivering the text, in the same time
    decode_ts: tuple[float, ...]  # tokens/s after the first token, of each repetition


WarningKind = Literal[
    "noisy", "drift", "outliers", "load", "steal", "quota", "swapped", "reread", "heat", "clock"
]  # fmt: skip


class BenchWarning(NamedTuple):
    """A reason to doubt a figure."""

    kind: WarningKind  # the first three concern the samples; the others, the machine meanwhile
    text: str  # with figures, for display

    @property
    def is_disturbance(self) -> bool:
        """Whether it concerns the machine rather than the samples."""
        return self.kind not in {"noisy", "drift", "outliers"}


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One test of one model with one set of settings. Names are llama-bench's up to samples_ns; then ours."""

    build_commit: str = ""  # of ggml
    build_number: int = 0  # of llama.cpp; 0 where that is unknown
    cpu_info: str = ""  # as ggml describes the processor
    gpu_info: str = ""  # as ggml describes the GPUs
    backends: str = "CPU"  # of ggml's, e.g. "CPU" or "CUDA"
    model_filename: str = ""  # path of the GGUF file
    model_type: str = ""  # e.g. "llama 135M Q4_1"
    model_size: int = 0  # bytes of the tensors
    model_n_params: int = 0  # weights
    n_batch: int = 2048  # most tokens of one decode call
    n_ubatch: int = 512  # most tokens of one micro-batch
    n_threads: int = 1  # of decode
    type_k: str = "f16"  # of the KV cache's keys, e.g. "f16"
    type_v: str = "f16"  # of its values
    n_gpu_layers: int = -1  # on the GPU; -1 is all
    n_cpu_moe: int = 0  # number of first layers whose experts the processor computes
    split_mode: str = "layer"  # of layers over GPUs
    main_gpu: int = 0  # number of the GPU without a split
    devices: str = "auto"  # GPUs to use, e.g. "CUDA0/CUDA1"
    tensor_split: str = "0.00"  # proportions of several GPUs, e.g. "3.00/1.00"
    tensor_buft_overrides: str = "none"  # e.g. "ffn_up=CPU"
    flash_attn: int = -1  # -1 auto, 0 off, 1 on
    load_mode: str = "auto"  # "auto", which maps the file into memory, or "none"
    repack: bool = True  # whether weights may be repacked
    n_prompt: int = 0  # tokens of the prompt
    n_gen: int = 0  # tokens decoded one by one
    n_depth: int = 0  # tokens in the context before
    test_time: str = ""  # e.g. "2026-11-21T10:00:00Z"
    samples_ns: tuple[int, ...] = ()  # duration of each repetition
    test: str = ""  # e.g. "pp512", "tg128 @ d4096", "chat512+128"
    model: str = ""  # as the user named it
    program: str = "llmrun"  # "llmrun", or the name of another
    version: str = ""  # of that program
    n_threads_batch: int = 0  # of prefill; 0 is as many as in decode
    environment: dict[str, str] = field(default_factory=dict)  # of the engine, where it was changed
    repetitions: int = 0  # requested; fewer samples mean that the bench was stopped
    load_ns: int | None = None  # to load the model
    peak_bytes: int | None = None  # largest resident set of the engine process
    limit: Limit | None = None  # the machine's
    chat: ChatTimes | None = None  # of a chat test
    warnings: tuple[BenchWarning, ...] = ()  # reasons to doubt this row
    machine: Machine | None = None  # of the measurement
    file_bytes: int = 0  # of the model's file; 0 if unknown

    @property
    def kind(self) -> str:
        """The model's type with its number of weights, which llama.cpp guesses from the number of layers."""
        count = f" {readable_count(self.model_n_params)} " if self.model_n_params else " "
        return _SIZE_GUESS.sub(count, self.model_type, count=1)

    @property
    def size(self) -> int:
        """Bytes of the file, or of its tensors where that is unknown."""
        return self.file_bytes or self.model_size

    @property
    def n_tokens(self) -> int:
        """Tokens of one repetition."""
        return self.n_prompt + self.n_gen

    @property
    def samples_ts(self) -> tuple[float, ...]:
        """Tokens/s of each repetition."""
        return tuple(1e9 * self.n_tokens / ns for ns in self.samples_ns if ns)

    @property
    def avg_ns(self) -> int:
        """Mean of the samples, cut to whole nanoseconds as llama-bench does."""
        return sum(self.samples_ns) // len(self.samples_ns) if self.samples_ns else 0

    @property
    def stddev_ns(self) -> int:
        """Sample standard deviation; 0 of one sample."""
        return int(statistics.stdev(self.samples_ns)) if len(self.samples_ns) > 1 else 0

    @property
    def avg_ts(self) -> float:
        """Mean of the samples' tokens/s."""
        return statistics.fmean(self.samples_ts) if self.samples_ts else 0.0

    @property
    def stddev_ts(self) -> float:
        """Sample standard deviation of the samples' tokens/s; 0 of one sample."""
        return statistics.stdev(self.samples_ts) if len(self.samples_ts) > 1 else 0.0

    @property
    def share_of_limit(self) -> float | None:
        """Tokens/s divided by the machine's limit; None where that is unknown."""
        if self.limit is None or not self.limit.tokens_per_second:
            return None
        return self.avg_ts / self.limit.tokens_per_second

    @property
    def warning_text(self) -> str:
        """All warnings in one line."""
        return "; ".join(warning.text for warning in self.warnings)

    @property
    def is_disturbed(self) -> bool:
        """Whether the machine was disturbed meanwhile."""
        return any(warning.is_disturbance for warning in self.warnings)

    @property
    def is_partial(self) -> bool:
        """Whether the bench was stopped before all repetitions were done."""
        return len(self.samples_ns) < self.repetitions

    def to_json(self) -> dict[str, Any]:
        """Return JSON data: llama-bench's fields in its order, then ours."""
        ours = as_dict(self)
        computed = {name: getattr(self, name) for name in ("avg_ns", "stddev_ns", "avg_ts", "stddev_ts")}
        fields = {**_CONSTANT, **ours, **computed, "samples_ts": list(self.samples_ts)}
        row = {name: fields[name] for name in _LLAMA_BENCH}
        row["schema"] = SCHEMA
        row.update((name, value) for name, value in ours.items() if name not in row)
        row["share_of_limit"] = self.share_of_limit
        return row

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> BenchRow:
        """Read a row of to_json() or llama-bench; unknown fields are ignored.

        Raises:
            LlmrunError: the data is not a row, or from a newer llmrun.
        """
        try:
            if int(data.get("schema", SCHEMA)) > SCHEMA:
                raise LlmrunError(
                    "this bench result is from a newer llmrun",
                    why=f"its schema is {data['schema']}, this version reads up to {SCHEMA}",
                    hint="pip install --upgrade llmrun",
                )
            row = from_json(cls, data, newer=True)
            if not row.samples_ns or min(row.samples_ns) <= 0 or row.n_tokens <= 0:
                raise ValueError("a row has no samples")
            return row if "schema" in data else _named(row)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise LlmrunError("this is not a bench result", why=str(error)) from None


def setting_columns(settings: EngineSettings) -> dict[str, Any]:
    """Return the fields of a row that its settings decide."""
    columns = {setting.column: getattr(settings, name) for name, setting in SETTINGS.items() if setting.column}
    return columns | {
        "n_ubatch": min(settings.n_ubatch, settings.n_batch),
        "n_cpu_moe": len(settings.cpu_experts),
        "flash_attn": _FLASH_ATTENTION[settings.flash_attention],
        "devices": settings.device or "auto",
        "tensor_split": "/".join(f"{part:.2f}" for part in proportions(settings.tensor_split) or (0,)),
        "tensor_buft_overrides": settings.override_tensor or "none",
    }


def setting_text(row: BenchRow, name: str) -> str:
    """Return a setting's value in a row as text."""
    value = getattr(row, SETTINGS[name].column)
    names = {number: word for word, number in _FLASH_ATTENTION.items()}
    return shown(names.get(value, value) if name == "flash_attention" else value)


def _named(row: BenchRow) -> BenchRow:
    """Return a row of llama-bench with its missing fields derived from the others."""
    return replace(
        row,
        test=BenchTest(row.n_prompt, row.n_gen, row.n_depth).name,
        model=row.model_type,
        program="llama-bench",
        version=f"{row.build_number} ({row.build_commit})",
        repetitions=len(row.samples_ns),
    )


@dataclass(frozen=True, slots=True)
class Result:
    """One run of the bench."""

    rows: tuple[BenchRow, ...]  # in the order requested
    machine: Machine = Machine()  # of the measurement
    is_partial: bool = False  # whether it was stopped early

    def to_json(self) -> list[dict[str, Any]]:
        """Return the rows, each with its machine."""
        return [row.to_json() for row in self.rows]

    @classmethod
    def from_json(cls, data: Sequence[Mapping[str, Any]]) -> Result:
        """Read the data of to_json(), or of llama-bench with `-o json`.

        Raises:
            LlmrunError: the data is not a result.
        """
        if isinstance(data, Mapping):
            data = [data]
        if not isinstance(data, Sequence) or not all(isinstance(row, Mapping) for row in data) or not data:
            raise LlmrunError("this is not a bench result", why="it is not a list of rows")
        rows = tuple(BenchRow.from_json(row) for row in data)
        machine = next((row.machine for row in rows if row.machine), None)
        return cls(rows, machine or _machine_of(rows[0]), any(row.is_partial for row in rows))


def _machine_of(row: BenchRow) -> Machine:
    """Return the facts about the machine that a row without one has."""
    gpus = tuple(gpu for gpu in row.gpu_info.split(", ") if gpu)
    return Machine(cpu=row.cpu_info, threads=row.n_threads, gpus=gpus, build_commit=row.build_commit)
