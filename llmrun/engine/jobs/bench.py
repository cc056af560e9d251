"""The job `bench`: llama-bench's tests and method: random tokens, an empty KV cache, a clock around the decode calls.

Batches are prepared before the clock starts. A chat test times an answer as in `llmrun run`, and the parts of its time:
loop.Engine itself generates it, with our sampler at its defaults, text and streaming. Only the model's end tokens are
forbidden, because every answer has to be as long as the test says. The model is kept for the next job.
"""

from __future__ import annotations

import gc
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as List
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmrun import _native
from llmrun.engine.channel import Outbox
from llmrun.engine.core.loop import Engine
from llmrun.engine.core.sampler import SequenceSampler
from llmrun.engine.core.sequence import Sequence
from llmrun.engine.llama.base import Entry, Inputs
from llmrun.engine.llama.context import LlamaContext
from llmrun.engine.llama.devices import backends, build, devices
from llmrun.engine.llama.model import LlamaModel
from llmrun.errors import LlmrunError
from llmrun.protocol.jobs.bench import Bench, BenchAnswer, BenchModel, BenchResult, BenchTest, BenchUpdate, Repetition
from llmrun.protocol.loading import Load
from llmrun.protocol.messages import AnswerRequest, Event, Failed, TextDelta
from llmrun.protocol.params import Limits, SamplingParams
from llmrun.system import read_text

Report = Callable[[BenchUpdate], None]

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5)
_TEXT = (
    "A library in the old harbour kept every letter that had ever been sent from the islands. In winter, when no ship "
    "could come, its keeper read them aloud to whoever was cold enough to sit by the stove: weather of 1803, the price "
    "of rope, a list of 47 birds, and a recipe for soup that nobody had ever managed to cook twice the same way. "
)


@dataclass(frozen=True, slots=True)
class BenchWork:
    """Prepared decode calls."""

    batches: List[List[Entry]]
    one_by_one: bool = False  # wait for each batch, as for its logits


class BenchContext:
    """A context with prepared work of random tokens."""

    def __init__(self, model: LlamaModel, load: Load, seed: int) -> None:
        self.context, self.load = LlamaContext(model, load), load
        self._random = random.Random(seed)  # noqa: S311 - the same tokens every time is the point

    def prompt(self, n_tokens: int, start: int = 0) -> BenchWork:
        """Return the decode calls of a prompt of random tokens, from position start on."""
        tokens, size = self._tokens(n_tokens), self.context.n_batch
        return BenchWork([_batch(tokens[i : i + size], start + i) for i in range(0, n_tokens, size)])

    def answer(self, n_tokens: int, start: int = 0) -> BenchWork:
        """Return the decode calls of random tokens, one by one."""
        tokens = self._tokens(n_tokens)
        return BenchWork([_batch([token], start + i) for i, token in enumerate(tokens)], one_by_one=True)

    def do(self, work: BenchWork) -> None:
        """Decode the batches; wait until the last token is computed.

        Raises:
            DecodeError: llama.cpp failed.
        """
        decode, synchronize = self.context.decode, self.context.synchronize
        for batch in work.batches:
            decode(batch)
            if work.one_by_one:
                synchronize()
        synchronize()

    def _tokens(self, count: int) -> list[int]:
        """Return random tokens, the first a begin-of-sequence token if the model uses one, as in llama-bench."""
        vocabulary = self.context.vocabulary
        tokens = self._random.choices(range(vocabulary.n_tokens), k=count)
        return [vocabulary.bos, *tokens[1:]] if count and vocabulary.adds_bos else tokens


def _batch(tokens: List[int], start: int) -> list[Entry]:
    last = len(tokens) - 1
    return [Entry(token, start + index, 0, index == last) for index, token in enumerate(tokens)]


@dataclass(slots=True)
class _ReusableState:
    """The weights, context and state cached between two jobs."""

    weights: LlamaModel
    load_ns: int
    context: BenchContext | None = None
    depth: int = 0  # tokens in `state`
    state: bytearray = field(default_factory=bytearray)

    def drop_context(self) -> None:
        if self.context is not None:
            self.context.context.close()
            self.context = None

    def close(self) -> None:
        self.drop_context()
        self.weights.close()


_cached: list[_ReusableState] = []  # at most one


def run_bench(command: Bench, report: Report, flag: _native.CancelFlag) -> BenchResult:
    """Measure one test.

    Raises:
        BadModelError: llama.cpp refuses the file, or it can't generate text.
        OutOfMemoryError: the context does not fit.
        DecodeError: llama.cpp can't compute it.
    """
    test = command.test
    load = replace(command.load, n_ctx=test.n_tokens + test.n_depth)
    _reset_peak()
    cached = _with_weights(load, report, flag)
    context = _with_context(cached, load, command.seed)
    measure = _measure_chat if test.chat else _measure
    with _no_collection():
        if command.warm_up:
            report(BenchUpdate("warming up"))
            _warm_up(context, test)
        repetitions = []
        for number in range(command.repetitions):
            repetition = measure(cached, context, test, command.seed + number, report)
            repetitions.append(repetition)
            report(BenchUpdate("measured", repetition))
    peak = _peak()
    return BenchResult(
        _describe(cached.weights),
        tuple(repetitions),
        cached.load_ns,
        peak - len(cached.state) if peak is not None else None,
    )


def _with_weights(load: Load, report: Report, flag: _native.CancelFlag) -> _ReusableState:
    """Return the cached model if it has the same load settings, else replace it."""
    if _cached and _cached[0].weights.is_for(load):
        return _cached[0]
    while _cached:
        _cached.pop().close()
    report(BenchUpdate("loading"))
    began = time.perf_counter_ns()
    weights = LlamaModel.of(load, flag)
    cached = _ReusableState(weights, time.perf_counter_ns() - began)
    _cached.append(cached)
    return cached


def _with_context(cached: _ReusableState, load: Load, seed: int) -> BenchContext:
    """Return the cached context if it has the same load settings, else replace it."""
    if cached.context is None or cached.context.load != load:
        cached.drop_context()
        cached.context = BenchContext(cached.weights, load, seed)
    return cached.context


def _warm_up(context: BenchContext, test: BenchTest) -> None:
    """Decode the prompt once and one token, as llama-bench does."""
    context.context.clear()
    if test.n_prompt:
        context.do(context.prompt(test.n_prompt))
    if test.n_gen:
        context.do(context.answer(1, test.n_prompt))


def _measure(cached: _ReusableState, context: BenchContext, test: BenchTest, seed: int, report: Report) -> Repetition:
    context.context.clear()
    if test.n_depth:
        _fill(cached, context, test.n_depth, report)
    depth = test.n_depth
    work = [context.prompt(test.n_prompt, depth), context.answer(test.n_gen, depth + test.n_prompt)]
    began = time.perf_counter_ns()
    for part in work:
        context.do(part)
    ns = time.perf_counter_ns() - began
    return Repetition(ns)


def _fill(cached: _ReusableState, context: BenchContext, depth: int, report: Report) -> None:
    """Fill the KV cache with `depth` tokens, from the saved state if it has as many."""
    if cached.depth == depth and context.context.set_state(0, cached.state, depth):
        return
    report(BenchUpdate("depth"))
    context.context.clear()
    context.do(context.prompt(depth))
    cached.depth, cached.state = depth, context.context.state(0)


def _measure_chat(
    cached: _ReusableState, context: BenchContext, test: BenchTest, seed: int, report: Report
) -> Repetition:
    context.context.clear()
    conversation = BenchConversation(context.context, test, seed)
    if test.n_depth:
        report(BenchUpdate("depth"))
        conversation.fill()
    ns, answer = conversation.answer(lambda text: report(BenchUpdate("answering", text=text)))
    return Repetition(ns, answer)


class _Stopwatch:
    """A context and its vocabulary in one, whose calls from the loop are timed.

    The loop samples between logits() and is_end(), and detokenizes until the next decode().
    """

    def __init__(self, context: LlamaContext) -> None:
        self.context = context
        self.vocabulary = self
        self.sampling_ns = self.text_ns = 0
        self.token_times: list[int] = []
        self._mark = 0

    def __getattr__(self, name: str) -> Any:
        owner = self.context if hasattr(self.context, name) else self.context.vocabulary
        return getattr(owner, name)

    def decode(self, batch: Inputs) -> None:
        if self.token_times:
            self.text_ns += time.perf_counter_ns() - self._mark
        self.context.decode(batch)

    def logits(self, index: int) -> int:
        address = self.context.logits(index)
        self._mark = time.perf_counter_ns()
        return address

    def is_end(self, token: int) -> bool:
        now = time.perf_counter_ns()
        self.sampling_ns += now - self._mark
        self.token_times.append(now)
        self._mark = now
        return self.context.vocabulary.is_end(token)


class BenchConversation:
    """One prompt and its answer, in an empty context."""

    def __init__(self, context: LlamaContext, test: BenchTest, seed: int) -> None:
        self._stopwatch = _Stopwatch(context)
        self._engine = Engine(self._stopwatch)
        self._test = test
        self._text = _TEXT * (1 + (test.n_depth + test.n_prompt) // 16)
        vocabulary = context.vocabulary
        self._sampling = SamplingParams(seed=seed, logit_bias=tuple((token, -math.inf) for token in vocabulary.ends))

    def fill(self) -> None:
        """Fill the KV cache with the prompt's first n_depth tokens."""
        self._run(self._prompt()[: self._test.n_depth], 1, lambda *events: None)
        self._stopwatch.sampling_ns = self._stopwatch.text_ns = 0
        self._stopwatch.token_times.clear()

    def answer(self, send: Callable[[str], None]) -> tuple[int, BenchAnswer]:
        """Generate an answer; send its text as it comes.

        Returns:
            Nanoseconds from the prompt's text to the end of the answer's, and their parts.

        Raises:
            LlmrunError: llama.cpp failed.
        """
        first_text: list[int] = []

        def hand_on(*events: Event) -> None:
            for event in events:
                if isinstance(event, TextDelta):
                    send(event.text)
                    first_text.append(time.perf_counter_ns())

        began = time.perf_counter_ns()
        self._run(self._prompt(), self._test.n_gen, hand_on)
        ns = time.perf_counter_ns() - began
        watch, times = self._stopwatch, self._stopwatch.token_times
        gaps = tuple(after - before for before, after in itertools.pairwise(times))
        return ns, BenchAnswer((first_text or [began + ns])[0] - began, gaps, watch.sampling_ns, watch.text_ns)

    def _prompt(self) -> list[int]:
        tokens = self._stopwatch.context.vocabulary.tokenize(self._text, special=False)
        return tokens[: self._test.n_depth + self._test.n_prompt]

    def _run(self, prompt: list[int], n_tokens: int, hand_on: Callable[..., None]) -> None:
        outbox = Outbox(hand_on)
        sampler = SequenceSampler(self._sampling, self._stopwatch, prompt)
        self._engine.add(Sequence(0, prompt, sampler, AnswerRequest(limits=Limits(max_tokens=n_tokens))))
        while self._engine.busy:
            events = self._engine.step()
            for event in events:
                if isinstance(event, Failed):
                    raise event.error()
            outbox.add(events)
        if len(self._stopwatch.token_times) < n_tokens:
            raise LlmrunError("the model ended its answer before the test did")


def _describe(weights: LlamaModel) -> BenchModel:
    """Return llama.cpp's description of the model, the machine and its build."""
    processors = [device.description for device in devices() if device.is_processor]
    commit, version = build()
    return BenchModel(
        description=weights.description,
        size=weights.n_bytes,
        n_params=weights.n_params,
        n_layers=weights.n_layers,
        n_ctx_train=weights.n_ctx_train,
        build_commit=commit,
        version=version,
        backends=",".join(name for name in backends() if name != "CPU") or "CPU",
        cpu=", ".join(processors),
        gpus=", ".join(device.description for device in devices() if not device.is_processor),
    )


@contextmanager
def _no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _reset_peak() -> None:
    """Reset the peak of resident memory, if the system can do that."""
    with suppress(OSError):
        _CLEAR_REFS.write_text(_RESET_PEAK, encoding="ascii")


def _peak() -> int | None:
    """Return the largest resident set of this process since _reset_peak(), in bytes."""
    try:
        lines = read_text(_STATUS).splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except (StopIteration, ValueError, IndexError):
        return None
