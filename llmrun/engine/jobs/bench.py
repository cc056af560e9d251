"""The job `bench`: llama-bench's tests and method: random tokens, an empty KV cache, a clock around the decode calls.

Owns the measurement of one test in this process, and the model cached for the next one; must not know parameters,
limits, or the use of the figures. Chat tests are in bench_chat.py. Batches are prepared before the clock starts.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from llmrun import _native
from llmrun.engine.llama.base import Entry
from llmrun.engine.llama.context import LlamaContext
from llmrun.engine.llama.devices import backends, build, devices
from llmrun.engine.llama.model import LlamaModel
from llmrun.protocol.jobs.bench import Bench, BenchModel, BenchResult, BenchTest, BenchUpdate, Repetition
from llmrun.protocol.loading import Load
from llmrun.system import read_text

Report = Callable[[BenchUpdate], None]

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5)


@dataclass(frozen=True, slots=True)
class BenchWork:
    """Prepared decode calls."""

    batches: Sequence[Sequence[Entry]]
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


def _batch(tokens: Sequence[int], start: int) -> list[Entry]:
    last = len(tokens) - 1
    return [Entry(token, start + index, 0, index == last) for index, token in enumerate(tokens)]


@dataclass(slots=True)
class _ReusableState:
    """The weights, context and state cached between two jobs."""

    weights: LlamaModel
    load_ns: int
    context: BenchContext | None = None
    depth: int = 0  # tokens in `state`
    state: bytes = b""

    def drop_context(self) -> None:
        if self.context is not None:
            self.context.context.close()
            self.context = None

    def close(self) -> None:
        self.drop_context()
        self.weights.close()


_cached: list[_ReusableState] = []  # at most one


def run(command: Bench, report: Report, flag: _native.CancelFlag) -> BenchResult:
    """Measure one test.

    Raises:
        BadModelError: llama.cpp refuses the file, or it can't generate text.
        OutOfMemoryError: the context does not fit.
        DecodeError: llama.cpp can't compute it.
    """
    test = command.test
    load = replace(command.load, n_ctx=test.n_tokens + test.n_depth, n_ctx_start=test.n_tokens + test.n_depth)
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
        describe(cached.weights),
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
    len(weights.vocabulary.control_texts)  # waits for the thread that collects them: it would disturb the first test
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
    cached.depth, cached.state = depth, bytes(context.context.state(0))


def _measure_chat(
    cached: _ReusableState, context: BenchContext, test: BenchTest, seed: int, report: Report
) -> Repetition:
    from llmrun.engine.jobs.bench_chat import BenchConversation

    context.context.clear()
    conversation = BenchConversation(context.context, test, seed)
    if test.n_depth:
        report(BenchUpdate("depth"))
        conversation.fill()
    ns, answer = conversation.answer(lambda text: report(BenchUpdate("answering", text=text)))
    return Repetition(ns, answer)


def describe(weights: LlamaModel) -> BenchModel:
    """Return llama.cpp's description of the model, the machine and its build."""
    found = devices()
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
        cpu=", ".join(device.description for device in found if device.is_processor),
        gpus=", ".join(device.description for device in found if not device.is_processor),
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
