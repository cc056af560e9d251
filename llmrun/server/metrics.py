"""Counters of requests, tokens and latencies: for Prometheus under vLLM's names, and for the live view.

Must not know HTTP or engines.
"""

from __future__ import annotations

import bisect
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from llmrun.protocol.messages import Finished, Started, TextDelta
from llmrun.protocol.questions import EngineStatus
from llmrun.statistics import quantile

_RECENT = 512
_RATE_SECONDS = 5.0
_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)


class Histogram:
    """Counts of values per bucket, and the latest values."""

    def __init__(self, buckets: tuple[float, ...]) -> None:
        self.buckets = buckets
        self.counts = [0] * (len(buckets) + 1)
        self.total = 0.0
        self._recent: deque[float] = deque(maxlen=_RECENT)

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect.bisect_left(self.buckets, value)] += times
        self.total += value * times
        self._recent.append(value)

    def quantile(self, share: float) -> float | None:
        """Return a quantile of the latest values; None without values."""
        return quantile(sorted(self._recent), share) if self._recent else None


class Figures(NamedTuple):
    """The figures of the live view."""

    running: int  # requests
    waiting: int
    rate: float  # tokens/s of all answers
    ttft: tuple[float | None, float | None]  # median and 95th percentile in seconds, None if not measured
    itl: tuple[float | None, float | None]  # inter-token latency, the same
    acceptance: float | None = None  # share of drafted tokens that were accepted; None without drafts
    cells_used: int = 0  # of the KV cache
    cells: int = 0  # 0 while no model is loaded


class ModelMetrics:
    """The counters of one model."""

    def __init__(self) -> None:
        self.running = self.waiting = 0
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = 0
        self.drafted_tokens = self.accepted_tokens = 0
        self.model_drafted = self.model_accepted = 0  # of these, by a draft model or the model's prediction heads
        self.finished: dict[str, int] = {}
        self.ttft = Histogram(_TTFT_BUCKETS)
        self.itl = Histogram(_ITL_BUCKETS)
        self.latency = Histogram(_TTFT_BUCKETS)


class RequestClock:
    """Updates the counters for one answer."""

    def __init__(
        self, model: ModelMetrics, clock: Callable[[], float], tokens: deque[tuple[float, int]], arrived: float
    ) -> None:
        self._model, self._clock, self._tokens = model, clock, tokens
        self._start = arrived
        self._first: float | None = None  # of the text, for an answer without an end
        self._last: float | None = None
        self._state = "waiting"
        model.waiting += 1

    def started(self, event: Started) -> None:
        if self._state == "waiting":
            self._set_state("running")
        self._model.prompt_tokens += event.prompt_tokens
        self._model.cached_tokens += event.reused_tokens

    def delta(self, event: TextDelta) -> None:
        now = self._clock()
        if self._last is None:
            self._first = now
        elif event.tokens:
            self._model.itl.add((now - self._last) / event.tokens, event.tokens)
        self._last = now
        self._model.completion_tokens += event.tokens
        self._tokens.append((now, event.tokens))

    def finished(self, event: Finished) -> None:
        self._end(event.reason)
        if event.stats.ttft_seconds:  # the same figure as everywhere
            self._model.ttft.add(event.stats.ttft_seconds)
            self._first = None
        self._add_ttft()
        self._model.drafted_tokens += event.stats.drafted_tokens
        self._model.accepted_tokens += event.stats.accepted_tokens
        self._model.model_drafted += event.stats.model_drafted
        self._model.model_accepted += event.stats.model_accepted
        self._model.latency.add(self._clock() - self._start)

    def aborted(self) -> None:
        self._add_ttft()
        self._end("abort")

    def _add_ttft(self) -> None:
        if self._first is not None:
            self._model.ttft.add(self._first - self._start)
            self._first = None

    def _end(self, reason: str) -> None:
        if self._state:
            self._set_state("")
            self._model.finished[reason] = self._model.finished.get(reason, 0) + 1

    def _set_state(self, state: str) -> None:
        if self._state == "waiting":
            self._model.waiting -= 1
        else:
            self._model.running -= 1
        self._model.running += state == "running"
        self._state = state


class ServerMetrics:
    """The counters of all models.

    Args:
        clock: seconds, as AnswerRequest.arrived.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.models: dict[str, ModelMetrics] = {}
        self._clock = clock
        self._tokens: deque[tuple[float, int]] = deque(maxlen=20_000)

    def request(self, model: str, arrived: float) -> RequestClock:
        return RequestClock(self.models.setdefault(model, ModelMetrics()), self._clock, self._tokens, arrived)

    @property
    def figures(self) -> Figures:
        """The figures of the live view, with the latencies of the busiest model."""
        models = list(self.models.values())
        busiest = max(models, key=lambda model: model.completion_tokens, default=ModelMetrics())
        return Figures(
            sum(model.running for model in models),
            sum(model.waiting for model in models),
            self._rate(),
            (busiest.ttft.quantile(0.5), busiest.ttft.quantile(0.95)),
            (busiest.itl.quantile(0.5), busiest.itl.quantile(0.95)),
            busiest.accepted_tokens / busiest.drafted_tokens if busiest.drafted_tokens else None,
        )

    def _rate(self) -> float:
        """Return the recent tokens/s."""
        since = self._clock() - _RATE_SECONDS
        return sum(tokens for when, tokens in self._tokens if when > since) / _RATE_SECONDS

    def text(self, statuses: Mapping[str, EngineStatus]) -> str:
        """Return all counters in Prometheus's text format.

        Args:
            statuses: of the engine of each loaded model, by name.
        """
        return "\n".join([*self._lines(statuses), ""])

    def _lines(self, statuses: Mapping[str, EngineStatus]) -> Iterator[str]:
        models = self.models
        yield from _family("num_requests_running", "gauge", {name: m.running for name, m in models.items()})
        yield from _family("num_requests_waiting", "gauge", {name: m.waiting for name, m in models.items()})
        yield from _family("prompt_tokens_total", "counter", {name: m.prompt_tokens for name, m in models.items()})
        yield from _family(
            "generation_tokens_total", "counter", {name: m.completion_tokens for name, m in models.items()}
        )
        drafted = {name: m.drafted_tokens for name, m in models.items()}
        yield from _family("spec_decode_num_draft_tokens_total", "counter", drafted)
        accepted = {name: m.accepted_tokens for name, m in models.items()}
        yield from _family("spec_decode_num_accepted_tokens_total", "counter", accepted)
        used = {name: each.cells_used / max(each.cells, 1) for name, each in statuses.items()}
        yield from _family("kv_cache_usage_perc", "gauge", used)
        queries = {name: each.prefix_queries for name, each in statuses.items()}
        yield from _family("prefix_cache_queries_total", "counter", queries)
        hits = {name: each.prefix_hits for name, each in statuses.items()}
        yield from _family("prefix_cache_hits_total", "counter", hits)
        threads = {name: each.threads[0] for name, each in statuses.items()}
        yield from _family("decode_threads", "gauge", threads, prefix="llmrun")
        yield "# TYPE vllm:request_success_total counter"
        for name, model in models.items():
            for reason, count in sorted(model.finished.items()):
                yield f'vllm:request_success_total{{model_name="{_label(name)}",finished_reason="{reason}"}} {count}'
        yield from _histograms("time_to_first_token_seconds", {name: m.ttft for name, m in models.items()})
        yield from _histograms("inter_token_latency_seconds", {name: m.itl for name, m in models.items()})
        yield from _histograms("e2e_request_latency_seconds", {name: m.latency for name, m in models.items()})


def _family(name: str, kind: str, values: dict[str, float] | dict[str, int], prefix: str = "vllm") -> Iterator[str]:
    yield f"# TYPE {prefix}:{name} {kind}"
    for model, value in values.items():
        yield f'{prefix}:{name}{{model_name="{_label(model)}"}} {value}'


def _histograms(name: str, histograms: dict[str, Histogram]) -> Iterator[str]:
    yield f"# TYPE vllm:{name} histogram"
    for model, histogram in histograms.items():
        label = _label(model)
        below = 0
        for bound, count in zip((*histogram.buckets, "+Inf"), histogram.counts, strict=True):
            below += count
            yield f'vllm:{name}_bucket{{model_name="{label}",le="{bound}"}} {below}'
        yield f'vllm:{name}_sum{{model_name="{label}"}} {histogram.total}'
        yield f'vllm:{name}_count{{model_name="{label}"}} {below}'


def _label(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
