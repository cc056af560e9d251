"""The load test of `llmrun bench --clients`: concurrent requests to one engine, or to a remote server.

The engine gets them as from `llmrun serve`, but without HTTP. Times are a client's. Rows measured before an interrupt
or an engine's crash are returned beside the error.
"""

from __future__ import annotations

import itertools
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from queue import SimpleQueue
from typing import NamedTuple, Protocol

from llmrun.errors import LlmrunError
from llmrun.lab.bench.machine import DisturbanceMonitor
from llmrun.lab.bench.results import BenchWarning
from llmrun.lab.bench.run import Progress, quantile_ns
from llmrun.protocol.loading import Load
from llmrun.protocol.messages import AnswerRequest, Event, Finished, Generate, Stats, TextDelta
from llmrun.protocol.params import Limits, SamplingParams
from llmrun.runner.client import EngineClient
from llmrun.runner.requests import Put

PROMPT_TOKENS = 512
"""The approximate length of each client's prompt: it depends on the tokenizer."""
LEAST_FOR_A_KNEE = 3
"""Numbers of clients."""
# Models go on repeating this sentence, so that no answer ends early.
_SENTENCE, _SENTENCES = "The quick brown fox jumps over the lazy dog. ", 48


class LoadCase(NamedTuple):
    """N concurrent clients, with prompts of their own, or with prompts that differ only at the end."""

    clients: int
    shares_prompt: bool

    @property
    def name(self) -> str:
        """E.g. "8 clients, own prompts"."""
        noun = "client" if self.clients == 1 else "clients"
        return f"{self.clients} {noun}, {'shared' if self.shares_prompt else 'own'} prompts"


class LoadTarget(Protocol):
    """An engine with its model, or a remote server."""

    @property
    def next_request(self) -> Callable[[], int]:
        """Return the next request number."""

    def listen(self, command: Generate, put: Put) -> None:
        """Send a request; see runner.client."""

    def close(self) -> None:
        """Close the connections."""


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """The load test to run, with the model loaded for the largest number of clients."""

    model: str
    load: Load | None  # None for a remote server, whose load settings are unknown
    clients: tuple[int, ...]
    tokens: int = 64
    repetitions: int = 5
    warm_up: bool = True
    server: str = ""  # the remote server's host
    ignores_end: bool = False  # answers continue beyond the model's end token

    @property
    def cases(self) -> tuple[LoadCase, ...]:
        """The cases, in the order of measurement."""
        return tuple(itertools.starmap(LoadCase, itertools.product(self.clients, (False, True))))


@dataclass(frozen=True, slots=True)
class LoadRow:
    """The figures of N concurrent clients. Quantiles are over all answers of all repetitions."""

    clients: int
    shares_prompt: bool
    prompt_tokens: int  # of one prompt
    # Tokens/s of all answers together, from the first request to the last token, of each repetition.
    samples_ts: tuple[float, ...]
    avg_ts: float
    stddev_ts: float
    client_ts: float  # tokens/s of one client after its first token, the median
    # From a client's request to its first text.
    ttft_p50_ns: int
    ttft_p95_ns: int
    # Between two pieces of an answer's text.
    token_p50_ns: int
    token_p95_ns: int
    token_p99_ns: int
    cached_share: float  # of the prompts' tokens, found in the KV cache, 0 to 1
    answer_p50_ns: int = 0  # from a client's request to the last text of its answer
    early: int = 0  # answers that ended before all their tokens

    @property
    def power(self) -> float:
        """The power: tokens/s over the seconds of an answer (L. Kleinrock, ICC 1979); see knee()."""
        return 1e9 * self.avg_ts / self.answer_p50_ns if self.answer_p50_ns else 0.0


class LoadOutcome(NamedTuple):
    """The rows, the disturbances, and the error that ended the test early."""

    rows: tuple[LoadRow, ...]
    warnings: tuple[BenchWarning, ...]
    error: LlmrunError | None

    def knee(self, *, shares_prompt: bool) -> LoadRow | None:
        """Return the row of the most power: more clients cost each one more time than they gain tokens/s.

        None where it can't be told: with fewer than three numbers of clients, or where power still grows at the end.
        """
        rows = sorted(
            (row for row in self.rows if row.shares_prompt == shares_prompt and row.power), key=lambda row: row.clients
        )
        best = max(rows, key=lambda row: row.power, default=None)
        return best if len(rows) >= LEAST_FOR_A_KNEE and best is not rows[-1] else None


class _Stream:
    """One client's answer. The reading thread calls put(); everything else is called after the end."""

    def __init__(self, ended: SimpleQueue[None]) -> None:
        self._ended = ended
        self.began = time.perf_counter_ns()
        self.times: list[int] = []
        self.stats = Stats()
        self.error: LlmrunError | None = None

    def put(self, event: Event | LlmrunError | None) -> None:
        if isinstance(event, TextDelta):
            self.times.append(time.perf_counter_ns())
        elif isinstance(event, Finished):
            self.stats = event.stats
            self.times = self.times or [time.perf_counter_ns()]  # none of its tokens had a text
        elif isinstance(event, LlmrunError):
            self.error = event
        elif event is None:
            self._ended.put(None)

    @property
    def rate(self) -> float:
        """Tokens/s after the first token; 0 of one token."""
        ns = self.times[-1] - self.times[0]
        return 1e9 * (self.stats.completion_tokens - 1) / ns if ns else 0.0


def measure(
    request: LoadRequest,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    start: Callable[[], LoadTarget] | None = None,
) -> LoadOutcome:
    """Measure all cases. The numbers of clients take turns, so that drift hits all alike.

    Args:
        start: connects to the target; by default, an engine loads the model.
    """
    streams_of: dict[LoadCase, list[list[_Stream]]] = {case: [] for case in request.cases}
    total = request.repetitions * len(streams_of)
    numbers = itertools.count(1) if request.load else new_numbers()
    watch, error = DisturbanceMonitor(), None

    def tell(case: LoadCase, phase: str, done: int = 0) -> None:
        repetition = done // len(streams_of) + 1
        on_progress(Progress(request.model, case.name, done, total, phase, repetition, request.repetitions))

    try:
        largest = max(streams_of, key=lambda case: case.clients)
        tell(largest, "loading")
        with closing(start() if start else loaded(EngineClient(), request.load)) as client:
            if request.warm_up:
                tell(largest, "warming up")
                _run_clients(client, largest, request, numbers)
            with watch:
                for done, case in enumerate(itertools.chain.from_iterable([streams_of] * request.repetitions)):
                    tell(case, "measuring", done)
                    streams_of[case].append(_run_clients(client, case, request, numbers))
                    watch.sample()
    except LlmrunError as stopped:  # Ctrl-C too
        error = stopped
    rows = tuple(_row(case, streams, request.tokens) for case, streams in streams_of.items() if streams)
    disturbed = watch.warnings if request.load else ()  # load on this machine hardly affects a remote server
    return LoadOutcome(rows, disturbed, error)


def loaded(client: EngineClient, load: Load | None) -> EngineClient:
    """Load the model into an engine. Raises as EngineClient.load()."""
    assert load is not None, "a remote server's model is not loaded here"
    client.load(load)
    return client


def _run_clients(client: LoadTarget, case: LoadCase, request: LoadRequest, numbers: Iterator[int]) -> list[_Stream]:
    """Run concurrent clients until the last answer has ended.

    Raises:
        LlmrunError: an answer failed.
    """
    ended: SimpleQueue[None] = SimpleQueue()
    streams = []
    limits = Limits(max_tokens=request.tokens, ignores_end=request.ignores_end)
    for prompt in prompts(case, numbers):
        answer_request = AnswerRequest(prompt=prompt, sampling=SamplingParams(temperature=0), limits=limits)
        streams.append(_Stream(ended))
        client.listen(Generate(client.next_request(), answer_request), streams[-1].put)
    for _ in streams:
        ended.get()
    if error := next((stream.error for stream in streams if stream.error is not None), None):
        raise error
    return streams


def new_numbers() -> Iterator[int]:
    """Yield prompts of equal length, unknown to a remote server from earlier measurements too."""
    while True:
        yield 10**8 + secrets.randbelow(9 * 10**8)


def prompts(case: LoadCase, numbers: Iterator[int]) -> list[str]:
    """Return prompts of equal length with new beginnings, so that the KV cache can only have what clients share."""
    shared = next(numbers)
    starts = [shared if case.shares_prompt else next(numbers) for _ in range(case.clients)]
    return [f"{start}. {_SENTENCE * _SENTENCES}{end}. The quick" for end, start in enumerate(starts, 1)]


def _row(case: LoadCase, repetitions: Sequence[Sequence[_Stream]], tokens: int) -> LoadRow:
    streams = [stream for streams in repetitions for stream in streams]
    rates = tuple(map(_rate, repetitions))
    prompt_tokens = sum(stream.stats.prompt_tokens for stream in streams)
    first = sorted(stream.times[0] - stream.began for stream in streams)
    gaps = sorted(after - before for stream in streams for before, after in pairwise(stream.times))
    return LoadRow(
        clients=case.clients,
        shares_prompt=case.shares_prompt,
        prompt_tokens=prompt_tokens // len(streams),
        samples_ts=rates,
        avg_ts=statistics.fmean(rates),
        stddev_ts=statistics.stdev(rates) if len(rates) > 1 else 0.0,
        client_ts=statistics.median(stream.rate for stream in streams),
        ttft_p50_ns=quantile_ns(first, 0.50),
        ttft_p95_ns=quantile_ns(first, 0.95),
        token_p50_ns=quantile_ns(gaps, 0.50),
        token_p95_ns=quantile_ns(gaps, 0.95),
        token_p99_ns=quantile_ns(gaps, 0.99),
        cached_share=sum(stream.stats.reused_tokens for stream in streams) / max(prompt_tokens, 1),
        answer_p50_ns=quantile_ns(sorted(stream.times[-1] - stream.began for stream in streams), 0.50),
        early=sum(stream.stats.completion_tokens < tokens for stream in streams),
    )


def _rate(streams: Sequence[_Stream]) -> float:
    """Return tokens/s of all together."""
    ns = max(stream.times[-1] for stream in streams) - min(stream.began for stream in streams)
    return 1e9 * sum(stream.stats.completion_tokens for stream in streams) / ns
