"""The job `bench`: llama-bench's tests, its way: random tokens, a cleared KV cache, a clock around the decode calls.

Owns the measuring of one test in this process, and the model that is kept for the next one; must not know parameters,
limits, or what is made of the figures. Chat tests are bench_chat.py's. What a repetition needs is made before its clock
starts: between two decode calls Python only goes to the next of the prepared batches.
"""

from __future__ import annotations

import ctypes
import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmrun import _native
from llmrun.engine.jobs.bench.energy import Energy
from llmrun.engine.llama.base import DecodeError
from llmrun.engine.llama.context import LlamaContext
from llmrun.engine.llama.model import LlamaModel
from llmrun.protocol.jobs.bench import Bench, Benched, BenchModel, BenchTest, BenchUpdate, Repetition
from llmrun.protocol.messages import Load

Report = Callable[[BenchUpdate], None]

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5)


class BenchContext(LlamaContext):
    """A context in which the same work can be done again and again."""

    def __init__(self, model: LlamaModel, load: Load, seed: int) -> None:
        """Make the context. seed is of the random tokens; for the errors see LlamaContext."""
        super().__init__(model, load)
        self._random = random.Random(seed)  # noqa: S311 - the same tokens every time is the point
        self.load = load

    def clear(self) -> None:
        """Empty the KV cache."""
        self._llama.llama_memory_clear(self._memory, False)

    def prompt(self, n_tokens: int) -> Work:
        """The decode calls of a prompt of random tokens."""
        tokens = self._tokens(n_tokens)
        starts = range(0, n_tokens, self.n_batch)
        return Work(tokens, [self._piece(tokens, start, min(self.n_batch, n_tokens - start)) for start in starts])

    def answer(self, n_tokens: int) -> Work:
        """The decode calls of random tokens, one by one."""
        tokens = self._tokens(n_tokens)
        return Work(tokens, [self._piece(tokens, start, 1) for start in range(n_tokens)], one_by_one=True)

    def do(self, work: Work) -> None:
        """Compute it, behind what the KV cache holds; waits until the last token is computed.

        Raises:
            DecodeError: llama.cpp can't.
        """
        decode, synchronize, context = self._llama.llama_decode, self._llama.llama_synchronize, self._context
        status = 0
        for batch in work.batches:
            status = decode(context, batch)
            if status:
                raise DecodeError("llama.cpp could not decode a batch of random tokens", why=f"status {status}")
            if work.one_by_one:
                synchronize(context)
        synchronize(context)

    def close(self) -> None:
        """Free the context; it can't be used any more."""
        self._llama.llama_batch_free(self._batch)
        self._llama.llama_free(self._context)

    def _tokens(self, count: int) -> Any:
        """Random ones behind the begin-of-sequence token, where the model wants one: as llama-bench has them."""
        tokens = (ctypes.c_int32 * count)(*self._random.choices(range(self.vocabulary.n_tokens), k=count))
        if count and self.vocabulary.adds_bos:
            tokens[0] = self.vocabulary.bos
        return tokens

    def _piece(self, tokens: Any, start: int, count: int) -> Any:
        address = ctypes.addressof(tokens) + start * ctypes.sizeof(ctypes.c_int32)
        pointer = ctypes.cast(address, ctypes.POINTER(ctypes.c_int32))
        return self._llama.llama_batch_get_one(pointer, count)


@dataclass(frozen=True, slots=True)
class Work:
    """Decode calls, prepared.

    Attributes:
        tokens: what the batches point to.
        batches: llama_batch, in their order.
        one_by_one: each one is waited for, since its logits would be wanted.
    """

    tokens: Any
    batches: Sequence[Any]
    one_by_one: bool = False


@dataclass(slots=True)
class _Kept:
    """What stays in memory between two jobs. depth is how many tokens `state` holds."""

    weights: LlamaModel
    load_ns: int
    context: BenchContext | None = None
    depth: int = 0
    state: bytes = b""

    def drop_context(self) -> None:
        if self.context is not None:
            self.context.close()
            self.context = None

    def close(self) -> None:
        self.drop_context()
        self.weights.close()


_kept: list[_Kept] = []  # one at most


def run(command: Bench, report: Report, flag: _native.CancelFlag) -> Benched:
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
    energy = Energy(with_gpus=_uses_gpus(load, kept.weights))
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
    return Benched(
        describe(kept.weights), tuple(repetitions), kept.load_ns, peak - len(kept.state) if peak is not None else None
    )


def _with_weights(load: Load, report: Report, flag: _native.CancelFlag) -> _Kept:
    """The kept model where it is the one, else another one in its place."""
    if _kept and _kept[0].weights.is_for(load):
        return _kept[0]
    while _kept:
        _kept.pop().close()
    report(BenchUpdate("loading"))
    began = time.perf_counter_ns()
    weights = LlamaModel(load.path, load.gpu_layers, flag, verbose=load.verbose, repack=load.repack, mmap=load.mmap)
    kept = _Kept(weights, time.perf_counter_ns() - began)
    _kept.append(kept)
    len(weights.vocabulary.control_texts)  # what collects them would compete with the first test
    return kept


def _with_context(kept: _Kept, load: Load, seed: int) -> BenchContext:
    """The kept context where it is the one, else another one in its place."""
    if kept.context is None or kept.context.load != load:
        kept.drop_context()
        kept.context = BenchContext(kept.weights, load, seed)
    return kept.context


def _warm_up(context: BenchContext, test: BenchTest) -> None:
    """As llama-bench does: the prompt once, and one token."""
    context.clear()
    if test.n_prompt:
        context.do(context.prompt(test.n_prompt))
    if test.n_gen:
        context.do(context.answer(1))


def _measure(
    kept: _Kept, context: BenchContext, test: BenchTest, seed: int, energy: Energy, report: Report
) -> Repetition:
    context.clear()
    if test.n_depth:
        _fill(kept, context, test.n_depth, report)
    work = [context.prompt(test.n_prompt), context.answer(test.n_gen)]
    before = energy.read()
    began = time.perf_counter_ns()
    for part in work:
        context.do(part)
    ns = time.perf_counter_ns() - began
    return Repetition(ns, energy.since(before))


def _fill(kept: _Kept, context: BenchContext, depth: int, report: Report) -> None:
    """Let the KV cache hold so many tokens: from the state that was saved, where there is one that fits."""
    if kept.depth == depth and context.set_state(0, kept.state, depth):
        return
    report(BenchUpdate("depth"))
    context.clear()
    context.do(context.prompt(depth))
    kept.depth, kept.state = depth, bytes(context.state(0))


def _measure_chat(
    kept: _Kept, context: BenchContext, test: BenchTest, seed: int, energy: Energy, report: Report
) -> Repetition:
    from llmrun.engine.jobs.bench.chat import Conversation

    context.clear()
    conversation = Conversation(context, test, seed)
    if test.n_depth:
        report(BenchUpdate("depth"))
        conversation.fill()
    before = energy.read()
    ns, answer = conversation.answer(lambda text: report(BenchUpdate("answering", text=text)))
    return Repetition(ns, energy.since(before), answer)


def describe(weights: LlamaModel) -> BenchModel:
    """What llama.cpp says of the model and of itself."""
    llama, library = weights.llama, weights.llama._lib
    devices = _devices(library)
    backends = [name for name in _registries(library) if name != "CPU"]
    return BenchModel(
        description=weights.description,
        size=int(llama.llama_model_size(weights.pointer)),
        n_params=int(llama.llama_model_n_params(weights.pointer)),
        n_layers=int(llama.llama_model_n_layer(weights.pointer)),
        n_ctx_train=weights.n_ctx_train,
        build_commit=_text(library, "ggml_commit"),
        version=_text(library, "ggml_version"),
        backends=",".join(backends) or "CPU",
        cpu=", ".join(text for kind, text in devices if kind in _PROCESSORS),
        gpus=", ".join(text for kind, text in devices if kind not in _PROCESSORS),
    )


_PROCESSORS = (0, 3)  # GGML_BACKEND_DEVICE_TYPE_CPU, _ACCEL


def _function(library: Any, name: str, result: Any, *arguments: Any) -> Any:
    """A function of ggml's, of our own: what llama-cpp-python makes of it stays as it is."""
    function = library[name]
    function.restype, function.argtypes = result, arguments
    return function


def _text(library: Any, name: str) -> str:
    return bytes(_function(library, name, ctypes.c_char_p)() or b"").decode("utf-8", "replace")


def _devices(library: Any) -> list[tuple[int, str]]:
    """Kind and description of what ggml can compute on."""
    get = _function(library, "ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
    kind = _function(library, "ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)
    description = _function(library, "ggml_backend_dev_description", ctypes.c_char_p, ctypes.c_void_p)
    count = _function(library, "ggml_backend_dev_count", ctypes.c_size_t)()
    devices = [get(index) for index in range(count)]
    return [(kind(device), description(device).decode("utf-8", "replace")) for device in devices]


def _registries(library: Any) -> list[str]:
    get = _function(library, "ggml_backend_reg_get", ctypes.c_void_p, ctypes.c_size_t)
    name = _function(library, "ggml_backend_reg_name", ctypes.c_char_p, ctypes.c_void_p)
    count = _function(library, "ggml_backend_reg_count", ctypes.c_size_t)()
    return [name(get(index)).decode("utf-8", "replace") for index in range(count)]


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


def _uses_gpus(load: Load, weights: LlamaModel) -> bool:
    return load.gpu_layers != 0 and bool(weights.llama.llama_supports_gpu_offload())
