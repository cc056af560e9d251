"""`llmrun bench --clients`: one engine that several clients ask at once, as `llmrun serve` has it, without HTTP; or a
far server, with all that lies between.

Owns the prompts, the order of the work and the figures; must not know terminals. Times are those of this side: what a
client sees. What was measured when somebody stops it, or the engine dies, is not lost: it comes back beside the error.
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

from llmrun.bench.noise import DisturbanceMonitor
from llmrun.bench.results import BenchWarning
from llmrun.bench.run import Progress, quantile
from llmrun.errors import LlmrunError
from llmrun.protocol.loading import Load
from llmrun.protocol.messages import AnswerRequest, Event, Finished, Generate, Stats, TextDelta
from llmrun.protocol.params import Limits, SamplingParams
from llmrun.runner.client import Client
from llmrun.runner.requests import Put

PROMPT_TOKENS = 512
"""Of each client's prompt, about: it depends on the model's tokenizer."""
LEAST_FOR_A_KNEE = 3
"""Numbers of clients."""
# A model goes on repeating this, so that no answer ends before it has all its tokens.
_SENTENCE, _SENTENCES = "The quick brown fox jumps over the lazy dog. ", 48


class LoadCase(NamedTuple):
    """So many clients at once, each with a prompt of its own, or all with one that differs only at its end."""

    clients: int
    shares_prompt: bool

    @property
    def name(self) -> str:
        """E.g. "8 clients, own prompts"."""
        noun = "client" if self.clients == 1 else "clients"
        return f"{self.clients} {noun}, {'shared' if self.shares_prompt else 'own'} prompts"


class LoadTarget(Protocol):
    """Who is asked: an engine with its model, or a far server."""

    @property
    def next_request(self) -> Callable[[], int]:
        """Gives a number for a command that has none yet."""

    def listen(self, command: Generate, put: Put) -> None:
        """See runner.client."""

    def close(self) -> None:
        """End what is open."""


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What is to be measured: answers of so many tokens, with the model loaded for the most clients.

    Attributes:
        load: None where the model is a far server's, and nobody here knows how it is loaded.
        server: that far server's host.
        ignores_end: answers go on to their last token, whatever the model says.
    """

    model: str
    load: Load | None
    clients: tuple[int, ...]
    tokens: int = 64
    repetitions: int = 5
    warm_up: bool = True
    server: str = ""
    ignores_end: bool = False

    @property
    def cases(self) -> tuple[LoadCase, ...]:
        """In the order in which they are measured."""
        return tuple(itertools.starmap(LoadCase, itertools.product(self.clients, (False, True))))


@dataclass(frozen=True, slots=True)
class LoadRow:
    """What so many clients at once got. Quantiles are of all answers of all repetitions.

    Attributes:
        prompt_tokens: of one prompt.
        samples_ts: tokens/s of all answers together, from the first request to the last token, of each repetition.
        client_ts: tokens/s of one client behind its first token, the median.
        ttft_p50_ns, ttft_p95_ns: from a client's request to its first text.
        token_p50_ns, token_p95_ns, token_p99_ns: between two pieces of an answer's text.
        cached_share: of the prompts' tokens, found in the KV cache, 0 to 1.
        answer_p50_ns: from a client's request to the last text of its answer.
        early: answers that ended before all their tokens.
    """

    clients: int
    shares_prompt: bool
    prompt_tokens: int
    samples_ts: tuple[float, ...]
    avg_ts: float
    stddev_ts: float
    client_ts: float
    ttft_p50_ns: int
    ttft_p95_ns: int
    token_p50_ns: int
    token_p95_ns: int
    token_p99_ns: int
    cached_share: float
    answer_p50_ns: int = 0
    early: int = 0

    @property
    def power(self) -> float:
        """Tokens/s for each second that an answer takes: L. Kleinrock's, ICC 1979; see knee()."""
        return 1e9 * self.avg_ts / self.answer_p50_ns if self.answer_p50_ns else 0.0


class LoadOutcome(NamedTuple):
    """What was measured, what disturbed it, and what ended it before its time."""

    rows: tuple[LoadRow, ...]
    warnings: tuple[BenchWarning, ...]
    error: LlmrunError | None

    def knee(self, *, shares_prompt: bool) -> LoadRow | None:
        """From where on more clients cost each one more time than they gain tokens/s: the row of the most power.

        None where it can't be told: with fewer than three numbers of clients, or where power still grows at the end.
        """
        rows = sorted(
            (row for row in self.rows if row.shares_prompt == shares_prompt and row.power), key=lambda row: row.clients
        )
        best = max(rows, key=lambda row: row.power, default=None)
        return best if len(rows) >= LEAST_FOR_A_KNEE and best is not rows[-1] else None


class _Stream:
    """One client's answer as it comes. put() is called by the thread that reads, all else when it has ended."""

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
            self.times = self.times or [time.perf_counter_ns()]  # no token of it had a text
        elif isinstance(event, LlmrunError):
            self.error = event
        elif event is None:
            self._ended.put(None)

    @property
    def rate(self) -> float:
        """Tokens/s behind the first; 0 of one."""
        ns = self.times[-1] - self.times[0]
        return 1e9 * (self.stats.completion_tokens - 1) / ns if ns else 0.0


def measure(
    request: LoadRequest,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    start: Callable[[], LoadTarget] | None = None,
) -> LoadOutcome:
    """Measure everything; the numbers of clients take turns, so that drift hits all alike.

    Args:
        start: gives who is asked; by default an engine that loads the model.
    """
    crowds: dict[LoadCase, list[list[_Stream]]] = {case: [] for case in request.cases}
    total = request.repetitions * len(crowds)
    numbers = itertools.count(1) if request.load else new_numbers()
    watch, error = DisturbanceMonitor(), None

    def tell(case: LoadCase, phase: str, done: int = 0) -> None:
        repetition = done // len(crowds) + 1
        on_progress(Progress(request.model, case.name, done, total, phase, repetition, request.repetitions))

    try:
        largest = max(crowds, key=lambda case: case.clients)
        tell(largest, "loading")
        with closing(start() if start else loaded(Client(), request.load)) as client:
            if request.warm_up:
                tell(largest, "warming up")
                _crowd(client, largest, request, numbers)
            with watch:
                for done, case in enumerate(itertools.chain.from_iterable([crowds] * request.repetitions)):
                    tell(case, "measuring", done)
                    crowds[case].append(_crowd(client, case, request, numbers))
                    watch.look()
    except LlmrunError as stopped:  # Ctrl-C too
        error = stopped
    rows = tuple(_row(case, found, request.tokens) for case, found in crowds.items() if found)
    disturbed = watch.warnings if request.load else ()  # what happens here matters little to a far server
    return LoadOutcome(rows, disturbed, error)


def loaded(client: Client, load: Load | None) -> Client:
    """An engine with its model.

    Raises:
        LlmrunError: it can't be loaded; the engine is closed.
    """
    assert load is not None, "a far server's model is not loaded here"
    try:
        for _ in client.submit(load):
            pass
    except BaseException:
        client.close()
        raise
    return client


def _crowd(client: LoadTarget, case: LoadCase, request: LoadRequest, numbers: Iterator[int]) -> list[_Stream]:
    """So many clients at once, to the end of the last answer.

    Raises:
        LlmrunError: an answer failed.
    """
    ended: SimpleQueue[None] = SimpleQueue()
    streams = []
    limits = Limits(max_tokens=request.tokens, ignores_end=request.ignores_end)
    for prompt in prompts(case, numbers):
        asked = AnswerRequest(prompt=prompt, sampling=SamplingParams(temperature=0), limits=limits)
        streams.append(_Stream(ended))
        client.listen(Generate(client.next_request(), asked), streams[-1].put)
    for _ in streams:
        ended.get()
    if error := next((stream.error for stream in streams if stream.error is not None), None):
        raise error
    return streams


def new_numbers() -> Iterator[int]:
    """Equally long ones that a far server has not seen in an earlier measurement either."""
    while True:
        yield 10**8 + secrets.randbelow(9 * 10**8)


def prompts(case: LoadCase, numbers: Iterator[int]) -> list[str]:
    """Equally long ones that begin like none before them, so that only what clients share can be in the KV cache."""
    shared = next(numbers)
    starts = [shared if case.shares_prompt else next(numbers) for _ in range(case.clients)]
    return [f"{start}. {_SENTENCE * _SENTENCES}{end}. The quick" for end, start in enumerate(starts, 1)]


def _row(case: LoadCase, crowds: Sequence[Sequence[_Stream]], tokens: int) -> LoadRow:
    streams = [stream for crowd in crowds for stream in crowd]
    rates = tuple(map(_rate, crowds))
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
        ttft_p50_ns=quantile(first, 0.50),
        ttft_p95_ns=quantile(first, 0.95),
        token_p50_ns=quantile(gaps, 0.50),
        token_p95_ns=quantile(gaps, 0.95),
        token_p99_ns=quantile(gaps, 0.99),
        cached_share=sum(stream.stats.reused_tokens for stream in streams) / max(prompt_tokens, 1),
        answer_p50_ns=quantile(sorted(stream.times[-1] - stream.began for stream in streams), 0.50),
        early=sum(stream.stats.completion_tokens < tokens for stream in streams),
    )


def _rate(crowd: Sequence[_Stream]) -> float:
    """Tokens/s of all together."""
    ns = max(stream.times[-1] for stream in crowd) - min(stream.began for stream in crowd)
    return 1e9 * sum(stream.stats.completion_tokens for stream in crowd) / ns
