"""Bench results: rows with raw samples, and the machine they were measured on, to and from JSON.

Owns the names and the JSON of results; must not know how they are measured, printed or kept. A row has llama-bench's
field names and ours, and carries its machine: rows of several files can be put into one list, and a list that
llama-bench itself wrote can be read.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from llmrun.errors import LlmrunError
from llmrun.protocol.codec import as_dict, from_json
from llmrun.protocol.jobs.bench import BenchTest

SCHEMA = 1
"""Version of the rows' fields; a reader refuses newer ones."""

# llama-bench's settings that llmrun never changes; readers of its files expect them.
_CONSTANT: dict[str, Any] = {
    "cpu_mask": "0x0",
    "cpu_strict": False,
    "poll": 50,
    "main_gpu": 0,
    "no_kv_offload": False,
    "devices": "auto",
    "tensor_split": "0.00",
    "tensor_buft_overrides": "none",
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


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine of a measurement. Sizes are in bytes; unknown facts are "", 0 and None.

    Attributes:
        name: a label from the user, or a default made of processor and fingerprint.
        cpu: as the vendor calls it.
        cpu_flags: relevant to ggml, e.g. "avx512_vnni".
        cores: usable physical cores.
        threads: that can compute at the same time, of cores and a container's quota.
        cpu_quota: of the container, in cores; None is no limit.
        memory_total: of the machine, or of the container if smaller.
        memory_speed: e.g. "DDR5-4800".
        gpus: as ggml describes them.
        os: e.g. "Debian GNU/Linux 12".
        kernel: e.g. "Linux 6.1.0".
        governor: of the processor's frequency, e.g. "performance".
        python: its version.
        llmrun: our version.
        llama: of llama-cpp-python.
        build_commit: of ggml.
    """

    name: str = ""
    cpu: str = ""
    cpu_flags: tuple[str, ...] = ()
    cores: int = 0
    threads: int = 0
    cpu_quota: float | None = None
    memory_total: int = 0
    memory_speed: str = ""
    gpus: tuple[str, ...] = ()
    os: str = ""
    kernel: str = ""
    governor: str = ""
    python: str = ""
    llmrun: str = ""
    llama: str = ""
    build_commit: str = ""


@dataclass(frozen=True, slots=True)
class Limit:
    """The machine's limit in a test.

    Attributes:
        tokens_per_second: the lower one of the two ceilings below.
        binds: "memory" or "compute", whichever ceiling that is.
        memory_ceiling: tokens/s if only reading weights and KV cache took time.
        compute_ceiling: tokens/s if only multiplying took time.
        read_rate: bytes/s read from memory with the test's threads, as measured.
        compute_rate: multiply-adds/s with the test's threads, as measured.
        bytes_per_token: of weights and KV cache that one token of the answer reads, on average over the test.
        kv_bytes_per_token: of these, the KV cache's.
        multiply_adds: that one token takes, on average over the test.
    """

    tokens_per_second: float
    binds: str
    memory_ceiling: float
    compute_ceiling: float
    read_rate: float
    compute_rate: float
    bytes_per_token: float
    kv_bytes_per_token: float
    multiply_adds: float


@dataclass(frozen=True, slots=True)
class ChatTimes:
    """Latencies of chat tests: one entry for each repetition, or one for all their tokens.

    Attributes:
        ttft_ns: from the request to its first text.
        token_p50_ns: between two tokens, the median.
        token_p95_ns: between two tokens; one in twenty takes longer.
        token_p99_ns: between two tokens; one in a hundred takes longer.
        sampling_share: of the time after the first token, 0 to 1.
        text_share: of detokenizing and delivering the text, in the same time.
        decode_ts: tokens/s after the first token, of each repetition.
    """

    ttft_ns: tuple[int, ...]
    token_p50_ns: int
    token_p95_ns: int
    token_p99_ns: int
    sampling_share: float
    text_share: float
    decode_ts: tuple[float, ...]


WarningKind = Literal[
    "noisy", "drift", "outliers", "load", "steal", "quota", "swapped", "reread", "heat", "clock"
]  # fmt: skip


class BenchWarning(NamedTuple):
    """A reason to doubt a figure.

    Attributes:
        kind: the first three concern the samples; the others, the machine meanwhile.
        text: with figures, for display.
    """

    kind: WarningKind
    text: str

    @property
    def is_disturbance(self) -> bool:
        """Whether it concerns the machine rather than the samples."""
        return self.kind not in {"noisy", "drift", "outliers"}


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One test of one model with one set of settings. Names are llama-bench's up to samples_ns; then ours.

    Attributes:
        build_commit: of ggml.
        build_number: of llama.cpp; 0 where that is unknown.
        cpu_info: as ggml describes the processor.
        gpu_info: as ggml describes the GPUs.
        backends: of ggml's, e.g. "CPU" or "CUDA".
        model_filename: path of the GGUF file.
        model_type: e.g. "llama 135M Q4_1".
        model_size: bytes of the tensors.
        model_n_params: weights.
        n_batch: most tokens of one decode call.
        n_ubatch: most tokens of one micro-batch.
        n_threads: of decode.
        type_k: of the KV cache's keys, e.g. "f16".
        type_v: of its values.
        n_gpu_layers: on the GPU; -1 is all.
        n_cpu_moe: number of first layers whose experts the processor computes.
        split_mode: of layers over GPUs.
        flash_attn: -1 auto, 0 off, 1 on.
        load_mode: "auto", which maps the file into memory, or "none".
        repack: whether weights may be repacked.
        n_prompt: tokens of the prompt.
        n_gen: tokens decoded one by one.
        n_depth: tokens in the context before.
        test_time: e.g. "2026-11-21T10:00:00Z".
        samples_ns: duration of each repetition.
        test: e.g. "pp512", "tg128 @ d4096", "chat512+128".
        model: as the user named it.
        program: "llmrun", or the name of another.
        version: of that program.
        n_threads_batch: of prefill; 0 is as many as in decode.
        environment: of the engine, where it was changed.
        repetitions: requested; fewer samples mean that the bench was stopped.
        load_ns: to load the model.
        peak_bytes: largest resident set of the engine process.
        joules: of each repetition; empty where no counter can be read.
        limit: the machine's.
        chat: of a chat test.
        warnings: reasons to doubt this row.
        machine: of the measurement.
    """

    build_commit: str = ""
    build_number: int = 0
    cpu_info: str = ""
    gpu_info: str = ""
    backends: str = "CPU"
    model_filename: str = ""
    model_type: str = ""
    model_size: int = 0
    model_n_params: int = 0
    n_batch: int = 2048
    n_ubatch: int = 512
    n_threads: int = 1
    type_k: str = "f16"
    type_v: str = "f16"
    n_gpu_layers: int = -1
    n_cpu_moe: int = 0
    split_mode: str = "layer"
    flash_attn: int = -1
    load_mode: str = "auto"
    repack: bool = True
    n_prompt: int = 0
    n_gen: int = 0
    n_depth: int = 0
    test_time: str = ""
    samples_ns: tuple[int, ...] = ()
    test: str = ""
    model: str = ""
    program: str = "llmrun"
    version: str = ""
    n_threads_batch: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    repetitions: int = 0
    load_ns: int | None = None
    peak_bytes: int | None = None
    joules: tuple[float, ...] = ()
    limit: Limit | None = None
    chat: ChatTimes | None = None
    warnings: tuple[BenchWarning, ...] = ()
    machine: Machine | None = None

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
    def joules_per_token(self) -> float | None:
        """Mean over the repetitions; None where no counter can be read."""
        if not self.joules or not self.n_tokens:
            return None
        return statistics.fmean(self.joules) / self.n_tokens

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
        known = {**_CONSTANT, **ours, **computed, "samples_ts": list(self.samples_ts)}
        row = {name: known[name] for name in _LLAMA_BENCH}
        row["schema"] = SCHEMA
        row.update((name, value) for name, value in ours.items() if name not in row)
        row["share_of_limit"] = self.share_of_limit
        row["joules_per_token"] = self.joules_per_token
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
    """One run of the bench.

    Attributes:
        rows: in the order requested.
        machine: of the measurement.
        is_partial: whether it was stopped early.
    """

    rows: tuple[BenchRow, ...]
    machine: Machine = Machine()
    is_partial: bool = False

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
