"""The job `bench`: one speed test of one model, with repetitions.

Must not know the measuring. An engine keeps the model of its last job in memory for the next one with the same load
settings.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmrun.protocol.jobs import JobKind
from llmrun.protocol.loading import Load


@dataclass(frozen=True, slots=True)
class BenchTest:
    """The numbers of tokens of one test."""

    n_prompt: int = 0  # tokens of a prompt, decoded in batches; llama-bench's "pp"
    n_gen: int = 0  # tokens decoded one by one after it; llama-bench's "tg"
    n_depth: int = 0  # tokens in the context before, not timed
    chat: bool = False  # an answer as in `llmrun run`, with sampling and text, instead of random tokens

    @property
    def name(self) -> str:
        """llama-bench's name: "pp512", "tg128", "pp512+tg128", "pp512 @ d4096"; "chat512+128" is our own."""
        if self.chat:
            name = f"chat{self.n_prompt}+{self.n_gen}"
        else:
            parts = (("pp", self.n_prompt), ("tg", self.n_gen))
            name = "+".join(f"{prefix}{tokens}" for prefix, tokens in parts if tokens)
        return f"{name} @ d{self.n_depth}" if self.n_depth else name

    @property
    def n_tokens(self) -> int:
        """Timed tokens."""
        return self.n_prompt + self.n_gen


@dataclass(frozen=True, slots=True)
class Bench:
    """Measure one test."""

    load: Load  # n_ctx is replaced by what the test needs
    test: BenchTest
    repetitions: int = 5
    warm_up: bool = True  # run once before the first repetition, not timed
    seed: int = 1  # of the random tokens


@dataclass(frozen=True, slots=True)
class BenchAnswer:
    """Times of one answer of a chat test, by the engine's clock."""

    ttft_ns: int  # from the request to the first text, prefill included
    token_ns: tuple[int, ...]  # from each token to the next
    sampling_ns: int  # in total
    text_ns: int  # in total: detokenizing, stop strings, and sending the text


@dataclass(frozen=True, slots=True)
class Repetition:
    """One measurement."""

    ns: int
    answer: BenchAnswer | None = None  # of a chat test


@dataclass(frozen=True, slots=True)
class BenchUpdate:
    """Progress of a test."""

    phase: str  # "loading", "warming up", "depth" (filling the context), "answering" (a chat test), "measured"
    repetition: Repetition | None = None  # of the phase "measured"
    text: str = ""  # of an answer; sent because a real answer's text is sent too


@dataclass(frozen=True, slots=True)
class BenchModel:
    """llama.cpp's description of the model, the machine and its build."""

    description: str  # e.g. "llama 135M Q4_1"
    size: int  # bytes of the tensors
    n_params: int
    n_layers: int
    n_ctx_train: int  # context window that it was trained on
    build_commit: str  # ggml's
    version: str  # ggml's
    backends: str  # ggml's other than "CPU", comma-separated; "CPU" if there are no others
    cpu: str
    gpus: str


@dataclass(frozen=True, slots=True)
class BenchResult:
    """The result of one test."""

    model: BenchModel
    repetitions: tuple[Repetition, ...]
    load_ns: int  # time of the last load of these weights
    peak_bytes: int | None  # largest resident set of the engine process; None if the system does not report it


BENCH = JobKind("bench", Bench, BenchUpdate, BenchResult, lambda command: (command.load.path,))
