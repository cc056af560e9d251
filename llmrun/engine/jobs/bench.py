"""The job `bench`: llama-bench's tests, its way: random tokens, a cleared KV cache, a clock around the decode calls.

Owns the measuring of one test in this process, and the model that is kept for the next one; must not know parameters,
limits, or what is made of the figures. Chat tests are chat.py's. What a repetition needs is made before its clock
starts: between two decode calls Python only goes to the next of the prepared batches.
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
from llmrun.engine.llama.devices import backends, build, devices, supports_offload
from llmrun.engine.llama.model import LlamaModel
from llmrun.protocol.energy import Energy
from llmrun.protocol.jobs.bench import Bench, BenchModel, BenchResult, BenchTest, BenchUpdate, Repetition
from llmrun.protocol.loading import Load

Report = Callable[[BenchUpdate], None]

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5)


@dataclass(frozen=True, slots=True)
class BenchWork:
    """Decode calls, prepared.

    Attributes:
        batches: what each of them computes.
        one_by_one: each one is waited for, since its logits would be wanted.
    """

    batches: Sequence[Sequence[Entry]]
    one_by_one: bool = False


class BenchContext:
    """A context in which the same work can be done again and again.

    Attributes:
        context: llama.cpp's.
        load: what it was made for.
    """

    def __init__(self, model: LlamaModel, load: Load, seed: int) -> None:
        """Make the context. seed is of the random tokens; for the errors see LlamaContext."""
        self.context, self.load = LlamaContext(model, load), load
        self._random = random.Random(seed)  # noqa: S311 - the same tokens every time is the point

    def prompt(self, n_tokens: int, start: int = 0) -> BenchWork:
        """The decode calls of a prompt of random tokens, from position start on."""
        tokens, size = self._tokens(n_tokens), self.context.n_batch
        return BenchWork([_batch(tokens[i : i + size], start + i) for i in range(0, n_tokens, size)])

    def answer(self, n_tokens: int, start: int = 0) -> BenchWork:
        """The decode calls of random tokens, one by one."""
        tokens = self._tokens(n_tokens)
        return BenchWork([_batch([token], start + i) for i, token in enumerate(tokens)], one_by_one=True)

    def do(self, work: BenchWork) -> None:
        """Compute it; waits until the last token is computed.

        Raises:
            DecodeError: llama.cpp can't.
        """
        decode, synchronize = self.context.decode, self.context.synchronize
        for batch in work.batches:
            decode(batch)
            if work.one_by_one:
                synchronize()
        synchronize()

    def _tokens(self, count: int) -> list[int]:
        """Random ones behind the begin-of-sequence token, where the model wants one: as llama-bench has them."""
        vocabulary = self.context.vocabulary
        tokens = self._random.choices(range(vocabulary.n_tokens), k=count)
        return [vocabulary.bos, *tokens[1:]] if count and vocabulary.adds_bos else tokens


def _batch(tokens: Sequence[int], start: int) -> list[Entry]:
    """One decode call, with the logits of its last token."""
    last = len(tokens) - 1
    return [Entry(token, start + index, 0, index == last) for index, token in enumerate(tokens)]


@dataclass(slots=True)
class _ReusableState:
    """What stays in memory between two jobs. depth is how many tokens `state` holds."""

    weights: LlamaModel
    load_ns: int
    context: BenchContext | None = None
    depth: int = 0
    state: bytes = b""

    def drop_context(self) -> None:
        if self.context is not None:
            self.context.context.close()
            self.context = None

    def close(self) -> None:
        self.drop_context()
        self.weights.close()


_kept: list[_ReusableState] = []  # one at most


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
    kept = _with_weights(load, report, flag)
    context = _with_context(kept, load, command.seed)
    energy = Energy(with_gpus=load.gpu_layers != 0 and supports_offload())
    measure = _measure_chat if test.chat else _measure
    with _no_collection():
        if command.warm_up:
            report(BenchUpdate("warming up"))
            _warm_up(context, test)
        repetitions = []
        for number in range(command.repetitions):
            repetition = measure(kept, context, test, command.seed + number, energy, report)
            repetitions.append(repetition)
            report(BenchUpdate("measured", repetition))
    peak = _peak()
    return BenchResult(
        describe(kept.weights), tuple(repetitions), kept.load_ns, peak - len(kept.state) if peak is not None else None
    )


def _with_weights(load: Load, report: Report, flag: _native.CancelFlag) -> _ReusableState:
    """The kept model where it is the one, else another one in its place."""
    if _kept and _kept[0].weights.is_for(load):
        return _kept[0]
    while _kept:
        _kept.pop().close()
    report(BenchUpdate("loading"))
    began = time.perf_counter_ns()
    weights = LlamaModel.of(load, flag)
    kept = _ReusableState(weights, time.perf_counter_ns() - began)
    _kept.append(kept)
    len(weights.vocabulary.control_texts)  # what collects them would compete with the first test
    return kept


def _with_context(kept: _ReusableState, load: Load, seed: int) -> BenchContext:
    """The kept context where it is the one, else another one in its place."""
    if kept.context is None or kept.context.load != load:
        kept.drop_context()
        kept.context = BenchContext(kept.weights, load, seed)
    return kept.context


def _warm_up(context: BenchContext, test: BenchTest) -> None:
    """As llama-bench does: the prompt once, and one token."""
    context.context.clear()
    if test.n_prompt:
        context.do(context.prompt(test.n_prompt))
    if test.n_gen:
        context.do(context.answer(1, test.n_prompt))


def _measure(
    kept: _ReusableState, context: BenchContext, test: BenchTest, seed: int, energy: Energy, report: Report
) -> Repetition:
    context.context.clear()
    if test.n_depth:
        _fill(kept, context, test.n_depth, report)
    depth = test.n_depth
    work = [context.prompt(test.n_prompt, depth), context.answer(test.n_gen, depth + test.n_prompt)]
    before = energy.read()
    began = time.perf_counter_ns()
    for part in work:
        context.do(part)
    ns = time.perf_counter_ns() - began
    return Repetition(ns, energy.since(before))


def _fill(kept: _ReusableState, context: BenchContext, depth: int, report: Report) -> None:
    """Let the KV cache hold so many tokens: from the state that was saved, where there is one that fits."""
    if kept.depth == depth and context.context.set_state(0, kept.state, depth):
        return
    report(BenchUpdate("depth"))
    context.context.clear()
    context.do(context.prompt(depth))
    kept.depth, kept.state = depth, bytes(context.context.state(0))


def _measure_chat(
    kept: _ReusableState, context: BenchContext, test: BenchTest, seed: int, energy: Energy, report: Report
) -> Repetition:
    from llmrun.engine.jobs.bench_chat import BenchConversation

    context.context.clear()
    conversation = BenchConversation(context.context, test, seed)
    if test.n_depth:
        report(BenchUpdate("depth"))
        conversation.fill()
    before = energy.read()
    ns, answer = conversation.answer(lambda text: report(BenchUpdate("answering", text=text)))
    return Repetition(ns, energy.since(before), answer)


def describe(weights: LlamaModel) -> BenchModel:
    """What llama.cpp says of the model and of itself."""
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
    """No garbage collection while the clock runs."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _reset_peak() -> None:
    """Let the peak of resident memory begin anew, where the system can do that."""
    with suppress(OSError):
        _CLEAR_REFS.write_text(_RESET_PEAK, encoding="ascii")


def _peak() -> int | None:
    """Largest resident set of this process since _reset_peak(), in bytes."""
    try:
        lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None
