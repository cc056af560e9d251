"""The job that measures how fast a model computes: one test of one model, as often as asked.

Must not know how it is measured. An engine keeps the model of its last job: the next one with the same settings of
loading finds it in memory, so tests of one model, or of several in turns, need no job of their own for that.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmrun.protocol.jobs import JobKind
from llmrun.protocol.loading import Load


@dataclass(frozen=True, slots=True)
class BenchTest:
    """What is measured.

    Attributes:
        n_prompt: tokens of a prompt, decoded in batches; llama-bench's "pp".
        n_gen: tokens that follow one by one; llama-bench's "tg".
        n_depth: tokens that are in the context before, outside the clock.
        chat: an answer as `llmrun run` makes it, with sampling and text, in place of random tokens.
    """

    n_prompt: int = 0
    n_gen: int = 0
    n_depth: int = 0
    chat: bool = False

    @property
    def name(self) -> str:
        """As llama-bench writes it: "pp512", "tg128", "pp512+tg128", "pp512 @ d4096"; "chat512+128" is our own."""
        if self.chat:
            name = f"chat{self.n_prompt}+{self.n_gen}"
        else:
            parts = (("pp", self.n_prompt), ("tg", self.n_gen))
            name = "+".join(f"{kind}{tokens}" for kind, tokens in parts if tokens)
        return f"{name} @ d{self.n_depth}" if self.n_depth else name

    @property
    def n_tokens(self) -> int:
        """That the clock covers."""
        return self.n_prompt + self.n_gen


@dataclass(frozen=True, slots=True)
class Bench:
    """Measure one test.

    Attributes:
        load: how the model is loaded; n_ctx is made as large as the test needs.
        test: what is measured.
        repetitions: how often.
        warm_up: run once before the first repetition, outside the clock.
        seed: of the random tokens.
    """

    load: Load
    test: BenchTest
    repetitions: int = 5
    warm_up: bool = True
    seed: int = 1


@dataclass(frozen=True, slots=True)
class BenchAnswer:
    """One answer of a chat test, as the engine's own clock saw it.

    Attributes:
        ttft_ns: from the request to its first text, prefill included.
        token_ns: from each token to the next.
        sampling_ns: of the whole answer: choosing tokens.
        text_ns: of the whole answer: tokens to text, stop strings, and handing the text on.
    """

    ttft_ns: int
    token_ns: tuple[int, ...]
    sampling_ns: int
    text_ns: int


@dataclass(frozen=True, slots=True)
class Repetition:
    """One measurement.

    Attributes:
        ns: that it took.
        joules: of processor, memory and GPUs, as far as their counters can be read; None when none can.
        answer: of a chat test.
    """

    ns: int
    joules: float | None = None
    answer: BenchAnswer | None = None


@dataclass(frozen=True, slots=True)
class BenchUpdate:
    """How far it is.

    Attributes:
        phase: "loading", "warming up", "depth" (the context is being filled), "answering" (a chat test), "measured".
        repetition: that was measured, else None.
        text: of an answer; it is sent because an answer's text always is.
    """

    phase: str
    repetition: Repetition | None = None
    text: str = ""


@dataclass(frozen=True, slots=True)
class BenchModel:
    """What llama.cpp says of the model and of itself.

    Attributes:
        description: e.g. "llama 135M Q4_1".
        size: bytes of the tensors.
        n_params: weights.
        n_layers: transformer blocks.
        n_ctx_train: context window that it was trained on.
        build_commit: of ggml.
        version: of ggml.
        backends: ggml's besides "CPU", comma-separated; "CPU" when there are no others.
        cpu: as ggml describes it.
        gpus: as ggml describes them.
    """

    description: str
    size: int
    n_params: int
    n_layers: int
    n_ctx_train: int
    build_commit: str
    version: str
    backends: str
    cpu: str
    gpus: str


@dataclass(frozen=True, slots=True)
class BenchResult:
    """What one test gave.

    Attributes:
        model: that was measured.
        repetitions: in their order.
        load_ns: to load the weights and make the context, at the last time that was needed.
        peak_bytes: largest resident set of the engine process during the test; None where the system does not tell.
    """

    model: BenchModel
    repetitions: tuple[Repetition, ...]
    load_ns: int
    peak_bytes: int | None


BENCH = JobKind("bench", Bench, BenchUpdate, BenchResult, lambda command: (command.load.path,))
