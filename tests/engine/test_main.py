"""The engine's threads: what is prepared, computed and cancelled at the same time, and how the process ends."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_context import FakeContext, FakeVocabulary, endless
from support.gguf_writer import runnable_model, write

import llmrun.engine.main as module
from llmrun.engine import loaded
from llmrun.engine.core.slots import Slots
from llmrun.engine.jobs import explain
from llmrun.engine.llama.base import Aborted
from llmrun.engine.llama.context import LlamaContext
from llmrun.engine.llama.model import LlamaModel
from llmrun.engine.loaded import LoadedModel
from llmrun.engine.main import EngineProcess
from llmrun.engine.slices import TimeShare
from llmrun.errors import BadModelError, CancelledError, OutOfMemoryError, UsageError
from llmrun.protocol.codec import as_dict
from llmrun.protocol.frames import encode
from llmrun.protocol.jobs.text import EmbedTexts
from llmrun.protocol.loading import Load
from llmrun.protocol.messages import (
    AnswerRequest,
    Cancel,
    Event,
    Failed,
    Finished,
    Frame,
    Generate,
    Job,
    JobDone,
    Message,
    PrefillProgress,
    Rendered,
    Rendering,
    Started,
    TextDelta,
)
from llmrun.protocol.params import Limits
from llmrun.protocol.questions import COUNT_TOKENS, EngineStatus, TokenCount
from llmrun.protocol.speculation import Speculation

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
PATIENCE = 120.0  # seconds, for what is only a matter of turns


class FakeChannel:
    """A front that says what the test says, and keeps what it hears."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._heard = threading.Condition()
        self.sent: list[Event] = []

    def say(self, *frames: Frame | TheEnd) -> None:
        for frame in frames:
            self._commands.put(frame)

    def receive(self) -> Frame:
        frame = self._commands.get()
        if isinstance(frame, TheEnd):
            raise EndError
        return frame

    def send(self, *events: Event) -> None:
        with self._heard:
            self.sent += events
            self._heard.notify_all()

    def wait(self, condition: Callable[[Event], bool]) -> Event:
        """The first event for which this is true."""

        def found() -> Event | None:
            return next(filter(condition, self.sent), None)

        with self._heard:
            assert self._heard.wait_for(found, PATIENCE), self.sent
            event = found()
        assert event is not None
        return event

    def finished(self, request: int) -> Finished:
        event = self.wait(lambda event: isinstance(event, Finished) and event.request == request)
        assert isinstance(event, Finished)
        return event


class EndError(BaseException):
    """The test is over."""


class TheEnd:
    """A command substitute that ends the thread that takes it."""

    def __iter__(self) -> Iterator[Any]:
        raise EndError


class Gate:
    """A barrier that stops a thread of the engine until the test releases it."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()

    def stop(self) -> None:
        self.reached.set()
        assert self._open.wait(PATIENCE)

    def open(self) -> None:
        self._open.set()

    def wait(self) -> None:
        assert self.reached.wait(PATIENCE)


STARTED: list[Running] = []


class Running:
    """The engine's threads over a fake context, and the front beside them."""

    def __init__(self, n_seq_max: int = 1) -> None:
        self.channel = FakeChannel()
        self.process = EngineProcess(self.channel)  # type: ignore[arg-type]
        self.context = FakeContext(endless, n_ctx=500, n_batch=100, n_seq_max=n_seq_max)
        weights: Any = SimpleNamespace(vocabulary=FakeVocabulary(), chat_template=TEMPLATE)
        self.model = LoadedModel(weights, self.context, Load("/model.gguf", 500))
        self.process._model = self.model
        self.model.engine.watch.on_begin = partial(self.process._to_prepare.put, None)
        self._threads = [
            threading.Thread(target=self._until_the_end, args=(work,), daemon=True)
            for work in (self.process._read, self._prepare, self.process._compute)
        ]
        STARTED.append(self)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self.channel.say(TheEnd())
        self.process._to_prepare.put(TheEnd())  # type: ignore[arg-type]
        self.process._to_compute.put(TheEnd())  # type: ignore[arg-type]
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(PATIENCE)

    def _until_the_end(self, work: Callable[[], None]) -> None:
        with contextlib.suppress(EndError):
            work()

    def _prepare(self) -> None:
        while not isinstance(command := self.process._next_to_prepare(), TheEnd):
            self.process._prepare(command)

    def gate_in_preparing(self, request: int) -> Gate:
        """The preparing thread stops at this request."""
        gate, prepare = Gate(), self.model.preparer.prepare

        def gated(generate: Generate, send: Callable[[Event], None]) -> Any:
            if generate.request == request:
                gate.stop()
            return prepare(generate, send)

        self.model.preparer.prepare = gated  # type: ignore[method-assign]
        return gate

    def gate_in_decode(self, call: int) -> Gate:
        """The computing thread stops in this call of decode()."""
        gate = Gate()
        self.context.before_decode = lambda number: gate.stop() if number == call else None
        return gate


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """They load no libraries, and end with the test."""
    monkeypatch.setattr(module.environment, "load_libraries", lambda: None)
    yield
    while STARTED:
        STARTED.pop().end()


@pytest.fixture
def running() -> Running:
    one = Running()
    one.start()
    return one


def ask(request: int, text: str = "Hi", most: int | None = 5) -> Generate:
    return Generate(request, AnswerRequest((Message("user", text),), limits=Limits(most)))


def kinds(events: list[Event], request: int) -> list[str]:
    return [type(event).__name__ for event in events if event.request == request]


def test_a_request_is_prepared_and_answered(running: Running) -> None:
    running.channel.say(ask(1))
    assert running.channel.finished(1).reason == "length"
    assert kinds(running.channel.sent, 1)[:3] == ["Rendering", "Rendered", "Started"]
    text = "".join(event.text for event in running.channel.sent if isinstance(event, TextDelta))
    assert text == "cdefg"


def test_a_long_batch_is_told_while_it_is_computed(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PREFILL_INTERVAL", 0.01)
    gate = running.gate_in_decode(0)
    running.channel.say(ask(1, "x" * 40))
    gate.wait()
    for share, n_tokens in ((0.25, 10), (0.5, 20)):
        running.context.computed = share
        running.channel.wait(lambda event, n=n_tokens: isinstance(event, PrefillProgress) and event.tokens == n)
    gate.open()
    running.channel.finished(1)
    told = [event.tokens for event in running.channel.sent if isinstance(event, PrefillProgress)]
    assert told == [10, 20, 40]
    assert kinds(running.channel.sent, 1)[:4] == ["Rendering", "Rendered", "Started", "PrefillProgress"]


def test_a_model_that_answers_is_not_loaded_again(running: Running) -> None:
    gate = running.gate_in_decode(3)
    running.channel.say(ask(1, most=50))
    gate.wait()
    running.channel.say(Load("/model.gguf", 500, n_seq_max=2, request=2))
    assert eventually(lambda: not running.process._to_compute.empty())
    gate.open()
    failed = running.channel.wait(lambda event: isinstance(event, Failed))
    assert isinstance(failed, Failed)
    assert (failed.request, failed.what) == (2, "the model can't be loaded again")
    assert running.channel.finished(1).reason == "length"


def test_a_context_for_embeddings_is_freed_with_its_model() -> None:
    process, closed = Running().process, []
    assert process._model is not None
    process._model.embedder._context = SimpleNamespace(close=lambda: closed.append(True))  # type: ignore[assignment]
    process._unload()
    assert closed == [True]


@pytest.fixture
def without_freeze(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects of a load can be collected."""
    monkeypatch.setattr(gc, "freeze", lambda: None)


@pytest.mark.usefixtures("without_freeze")
def test_weights_that_a_failed_load_has_freed_are_loaded_again(tmp_path: Path) -> None:
    process = EngineProcess(FakeChannel())  # type: ignore[arg-type]
    load = Load(str(write(tmp_path / "tiny.gguf", runnable_model())), 64, threads=1)
    process._load(load)
    assert process._model is not None
    freed = process._model.weights
    with pytest.raises(BadModelError):
        process._load(replace(load, path=str(tmp_path / "missing.gguf")))
    process._load(load)
    assert process._model.weights is not freed
    process._unload()
    process._weights["model"].close()


@pytest.mark.usefixtures("without_freeze")
def test_all_weights_are_freed_for_another_variant_of_the_processors_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buffers of a draft model's weights would outlive the variant that they belong to."""
    open_at_exchange, used = [], []
    process = EngineProcess(FakeChannel())  # type: ignore[arg-type]

    def use_variant(name: str) -> None:
        used.append(name)
        open_at_exchange.append({weights.cpu_variant for weights in process._weights.values()} - {name})

    monkeypatch.setattr("llmrun.engine.llama.model.use_variant", use_variant)
    load = Load(str(write(tmp_path / "tiny.gguf", runnable_model())), 64, threads=1)
    for variant in ("", "haswell", "zen4"):
        variant_load = replace(load, cpu_variant=variant)
        process._load(replace(variant_load, draft=variant_load))
    assert used == ["", "", "haswell", "haswell", "zen4", "zen4"]
    assert not any(open_at_exchange)
    process._unload()
    for weights in process._weights.values():
        weights.close()


@pytest.mark.usefixtures("without_freeze")
def test_a_context_is_freed_where_that_of_the_draft_model_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Context(LlamaContext):
        def __init__(self, model: LlamaModel, load: Load, **options: Any) -> None:
            if load.request == draft:
                raise OutOfMemoryError("no memory")
            super().__init__(model, load, **options)

        def close(self) -> None:
            closed.append(self)
            super().close()

    process, closed = EngineProcess(FakeChannel()), []  # type: ignore[arg-type, var-annotated]
    monkeypatch.setattr(loaded, "LlamaContext", Context)
    load, draft = Load(str(write(tmp_path / "tiny.gguf", runnable_model())), 64, threads=1), 7
    with pytest.raises(OutOfMemoryError):
        process._load(replace(load, draft=replace(load, request=draft)))
    assert len(closed) == 1
    process._load(load)
    process._unload()
    assert len(closed) == 2
    for weights in process._weights.values():
        weights.close()


@pytest.mark.usefixtures("without_freeze")
def test_prefixes_are_copied_only_where_the_weights_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process, copied = EngineProcess(FakeChannel()), []  # type: ignore[arg-type, var-annotated]
    load = Load(str(write(tmp_path / "tiny.gguf", runnable_model())), 64, threads=1, copy_bytes=1 << 30)
    other = replace(load, path=str(write(tmp_path / "other.gguf", runnable_model())))
    monkeypatch.setattr(Slots, "prefixes", lambda slots: copied.append(slots) or [])
    for number, (next_load, n_copied) in enumerate([(load, 0), (replace(load, n_seq_max=2), 1), (other, 1), (load, 1)]):
        process._load(next_load)
        assert len(copied) == n_copied, number
    process._unload()
    assert len(copied) == 1
    process._weights["model"].close()


@pytest.mark.parametrize("projectors", [("", "/p.gguf"), ("/p.gguf", ""), ("/p.gguf", "/other.gguf")])
def test_another_projector_replaces_that_of_the_load_before(
    projectors: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded, "Projector", lambda weights, load: load.projector)
    context, weights = FakeContext(endless), Running().model.weights
    models: list[LoadedModel] = []
    for projector in projectors:
        load = Load("/model.gguf", 64, projector=projector)
        models.append(LoadedModel(weights, context, load, before=models[-1] if models else None))  # type: ignore[arg-type]
    assert [model._projector or "" for model in models] == [*projectors]


def test_the_model_may_be_unloaded_while_another_thread_looks_at_it() -> None:
    class Process(EngineProcess):
        @property
        def _model(self) -> LoadedModel | None:  # type: ignore[override]
            return seen.pop(0)

        @_model.setter
        def _model(self, model: LoadedModel | None) -> None: ...

    process, model = Process(FakeChannel()), Running().model  # type: ignore[arg-type]
    seen = [model, None, model, None]
    assert process._status().running == 0
    seen = [model, None]
    assert not process._is_alone(1)


def test_a_request_that_is_alone_is_prepared_with_all_of_its_threads_share(running: Running) -> None:
    gate = running.gate_in_decode(0)
    assert not module.environment.is_decoding()
    running.channel.say(ask(1))
    gate.wait()
    assert module.environment.is_decoding()
    gate.open()
    running.channel.finished(1)


def test_preparing_one_request_does_not_hold_up_another() -> None:
    running = Running(n_seq_max=2)
    gate = running.gate_in_preparing(2)
    running.context.before_decode = lambda number: gate.wait() if number > 9 else None  # not all steps are over by then
    running.start()
    running.channel.say(ask(1, most=None))
    running.channel.wait(lambda event: isinstance(event, TextDelta))
    running.channel.say(ask(2))
    gate.wait()
    assert eventually(lambda: len(running.context.calls) >= 10 + 20), "steps go on"
    gate.open()
    assert running.channel.finished(2).reason == "length"


def test_prompts_that_arrive_together_share_the_first_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GATHER_SECONDS", PATIENCE)
    running = Running(n_seq_max=2)
    gate = running.gate_in_preparing(2)
    running.start()
    running.channel.say(ask(1, "Hi"), ask(2, "Oh"))
    gate.wait()
    assert eventually(lambda: running.process._commands.n_answers == 1), "the first is ready to be computed"
    gate.open()
    running.channel.finished(1)
    running.channel.finished(2)
    assert {entry.sequence_id for entry in running.context.calls[0]} == {0, 1}


def test_an_answer_cancelled_while_others_are_prepared_is_no_longer_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GATHER_SECONDS", PATIENCE)
    running = Running(n_seq_max=2)
    gate = running.gate_in_preparing(2)
    running.start()
    running.channel.say(ask(1), ask(2))
    running.channel.wait(lambda event: isinstance(event, Started))
    running.channel.say(Cancel(1))
    running.channel.finished(1)
    gate.open()
    running.channel.finished(2)
    assert not running.model.engine.runs_alone(2)


def test_a_long_preparation_does_not_hold_up_an_idle_engine() -> None:
    running = Running(n_seq_max=2)
    gate = running.gate_in_preparing(2)
    running.start()
    running.channel.say(ask(1), ask(2))
    gate.wait()
    assert running.channel.finished(1).reason == "length"
    gate.open()
    running.channel.finished(2)


def test_counting_does_not_wait_for_a_step(running: Running) -> None:
    gate = running.gate_in_decode(0)
    running.channel.say(ask(1))
    gate.wait()
    running.channel.say(Job(2, "count_tokens", as_dict(AnswerRequest((Message("user", "Hi"),)))))
    assert running.channel.wait(lambda event: isinstance(event, JobDone)) == JobDone(2, TokenCount((2,), 2))
    assert running.channel.sent[-3:-1] == [Rendering(2), Rendered(2)]
    gate.open()
    running.channel.finished(1)


def test_a_worn_out_engine_does_not_exit_before_what_is_prepared_is_answered(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job too: the front repeats answers only."""
    exits, counting, prompts = Gate(), Gate(), running.model.preparer.prompts
    count = prompts.count

    def gated(*arguments: Any) -> Any:
        counting.stop()
        return count(*arguments)

    prompts.count = gated  # type: ignore[method-assign]
    running.channel.say(Job(1, COUNT_TOKENS.name, as_dict(ask(1).asked)))
    counting.wait()
    exits.open()
    monkeypatch.setattr(module.os, "_exit", lambda status: exits.stop())
    monkeypatch.setattr(LoadedModel, "is_worn_out", True)
    running.process._exit_if_worn_out()
    assert not exits.reached.is_set()
    counting.open()
    exits.wait()
    assert isinstance(running.channel.sent[-1], JobDone)


def test_the_condition_is_told_while_a_step_runs_and_another_request_is_prepared(running: Running) -> None:
    gate, preparing = running.gate_in_decode(0), running.gate_in_preparing(2)
    running.channel.say(ask(1))
    gate.wait()
    running.channel.say(ask(2))
    preparing.wait()
    running.channel.say(ask(3), Job(4, "status", {}))
    told = running.channel.wait(lambda event: isinstance(event, JobDone))
    assert isinstance(told, JobDone)
    assert isinstance(told.result, EngineStatus)
    assert (told.request, told.result.running, told.result.waiting) == (4, 1, 2)
    gate.open()
    preparing.open()
    for request in (1, 2, 3):
        running.channel.finished(request)


# ---- cancelling ----------------------------------------------------------------------------------------------


def test_a_request_can_be_cancelled_while_it_is_prepared() -> None:
    running = Running()
    gate = running.gate_in_preparing(1)
    running.start()
    running.channel.say(ask(1))
    gate.wait()
    running.channel.say(Cancel(1))
    assert running.channel.finished(1).reason == "cancelled"
    gate.open()
    running.channel.say(ask(2))
    assert running.channel.finished(2).reason == "length"
    assert kinds(running.channel.sent, 1).count("Finished") == 1
    assert "Started" not in kinds(running.channel.sent, 1)


def test_a_request_can_be_cancelled_while_it_waits_to_be_prepared() -> None:
    running = Running()
    gate = running.gate_in_preparing(1)
    running.start()
    running.channel.say(ask(1), ask(2))
    gate.wait()
    running.channel.say(Cancel(2))
    assert running.channel.finished(2).reason == "cancelled"
    gate.open()
    assert running.channel.finished(1).reason == "length"
    assert kinds(running.channel.sent, 2).count("Finished") == 1


def test_a_request_can_be_cancelled_while_another_is_computed(running: Running) -> None:
    gate = running.gate_in_decode(1)
    running.channel.say(ask(1))
    gate.wait()
    running.channel.say(ask(2), Cancel(2))
    running.channel.wait(lambda event: event.request == 2)
    gate.open()
    assert running.channel.finished(2).reason == "cancelled"
    assert running.channel.finished(1).reason == "length"


@pytest.mark.parametrize(
    "command", [Load("/x.gguf", 1, request=3), Job(3, "bench", {}), Job(3, "count_tokens", {})], ids=str
)
def test_whatever_waits_can_be_cancelled(command: Any) -> None:
    running = Running()
    gate = running.gate_in_preparing(1)
    running.start()
    running.channel.say(ask(1), command)
    gate.wait()
    running.channel.say(Cancel(3))
    failed = running.channel.wait(lambda event: event.request == 3)
    assert isinstance(failed, Failed)
    assert failed.code == "cancelled"
    gate.open()
    running.channel.finished(1)
    running.channel.say(ask(2))
    running.channel.finished(2)
    assert kinds(running.channel.sent, 3) == ["Failed"]


def in_a_batch(n_requests: int) -> tuple[Running, Gate]:
    """Return an engine that stops inside a batch of n_requests."""
    running = Running(n_seq_max=2)
    gate = Gate()

    def before_decode(call: int) -> None:
        if len({entry.sequence_id for entry in running.context.calls[call]}) == n_requests:
            gate.stop()
        elif call == 0:  # or the first has its whole answer before the second is prepared
            assert eventually(lambda: bool(running.model.engine._waiting) or not running.process._to_compute.empty())

    running.context.before_decode = before_decode
    running.start()
    running.channel.say(*(ask(request, most=50) for request in range(1, n_requests + 1)))
    gate.wait()
    return running, gate


def eventually(condition: Callable[[], bool]) -> bool:
    ends = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < ends:
        time.sleep(0.001)
    return condition()


def test_a_cancel_stops_a_batch_that_is_its_requests_alone() -> None:
    running, gate = in_a_batch(1)
    running.channel.say(Cancel(1))
    assert eventually(lambda: running.process._flag.is_set)
    gate.open()
    assert running.channel.finished(1).reason == "cancelled"
    assert not running.process._flag.is_set


def test_a_cancel_waits_for_the_end_of_a_step_that_others_share() -> None:
    running, gate = in_a_batch(2)
    running.channel.say(Cancel(1))
    assert eventually(lambda: not running.process._to_compute.empty())
    assert not running.process._flag.is_set
    gate.open()
    assert running.channel.finished(1).reason == "cancelled"
    assert running.channel.finished(2).reason == "length"


def test_a_cancel_of_a_finished_request_stops_no_request() -> None:
    running = Running()
    running.start()
    running.channel.say(ask(1))
    running.channel.finished(1)
    gate = running.gate_in_decode(len(running.context.calls) + 2)
    running.channel.say(ask(2))
    gate.wait()
    running.channel.say(Cancel(1))
    assert eventually(lambda: not running.process._to_compute.empty())
    assert not running.process._flag.is_set
    gate.open()
    assert running.channel.finished(2).reason == "length"


def test_a_drafted_answer_says_so(running: Running) -> None:
    asked = ask(1, most=40).asked
    running.channel.say(Generate(1, replace(asked, speculation=Speculation(7))))
    stats = running.channel.finished(1).stats
    assert stats.decode_steps + stats.accepted_tokens == stats.completion_tokens
    assert stats.accepted_tokens > 0


def test_a_job_can_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    running = Running()
    gate = Gate()

    def job(command: Job) -> JobDone:
        gate.stop()
        return JobDone(command.request, {"stopped": running.process._flag.is_set})

    monkeypatch.setitem(running.process._compute_handlers, Job, job)
    running.start()
    running.channel.say(Job(1, "bench", {}))
    gate.wait()
    running.channel.say(Cancel(2))  # of somebody else
    running.channel.say(Cancel(1))
    assert eventually(lambda: running.process._flag.is_set)
    gate.open()
    assert running.channel.wait(lambda event: event.request == 1).result == {"stopped": True}  # type: ignore[union-attr]
    assert eventually(lambda: not running.process._flag.is_set)


def test_the_time_to_the_first_token_begins_with_the_request_and_has_its_parts(running: Running) -> None:
    arrived = time.perf_counter() - 5
    asked = ask(1)
    running.channel.say(Generate(1, replace(asked.asked, arrived=arrived)))
    stats = running.channel.finished(1).stats
    assert stats.ttft_seconds > 5
    assert list(stats.ttft_parts) == ["template", "tokenize", "grammar", "queue", "prefill"]
    assert stats.template_seconds > 0
    assert stats.tokenize_seconds > 0
    assert stats.grammar_seconds >= 0
    assert 4 < stats.queue_seconds < sum(stats.ttft_parts.values()) <= stats.ttft_seconds


EMBEDDING = as_dict(EmbedTexts(("a",), "mean"))


def in_slices(monkeypatch: pytest.MonkeyPatch, n_slices: float, at_slice: Callable[[int, TimeShare], None]) -> None:
    """Replace the embeddings by a job of slices, in each of which `at_slice` is called."""

    def slices(command: Any, loaded: Any, share: TimeShare, is_wanted: Any) -> Iterator[None]:
        number = 0
        while number < n_slices:
            yield
            at_slice(number, share)
            number += 1
        return number

    monkeypatch.setattr("llmrun.engine.jobs.text.run_embed", slices)


def test_between_two_slices_of_a_job_each_answer_decodes_a_token(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_calls, seconds, gate = list[int](), list[float | None](), running.gate_in_decode(3)

    def at_slice(number: int, share: TimeShare) -> None:
        n_calls.append(len(running.context.calls))
        seconds.append(share.seconds)

    in_slices(monkeypatch, 10, at_slice)
    running.channel.say(ask(1, most=200))
    gate.wait()
    running.channel.say(Job(2, "embed", EMBEDDING))
    assert eventually(lambda: not running.process._to_compute.empty())
    gate.open()
    assert running.channel.wait(lambda event: isinstance(event, JobDone)) == JobDone(2, 10)
    assert running.channel.finished(1).stats.completion_tokens == 200
    assert [after - before for before, after in itertools.pairwise(n_calls)] == [1] * 9
    assert None not in seconds
    running.channel.say(Job(3, "embed", EMBEDDING))
    assert running.channel.wait(lambda event: event.request == 3) == JobDone(3, 10)
    assert seconds[10:] == [None] * 10, "alone it computes as much as it can"


def test_a_job_is_cancelled_between_two_slices(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()
    in_slices(monkeypatch, math.inf, lambda number, share: begun.set())
    running.channel.say(Job(1, "embed", EMBEDDING))
    assert begun.wait(PATIENCE)
    running.channel.say(Cancel(1))
    failed = running.channel.wait(lambda event: event.request == 1)
    assert isinstance(failed, Failed)
    assert failed.code == CancelledError.code
    running.channel.say(ask(2, most=5))
    assert running.channel.finished(2).reason == "length"


def test_a_job_that_is_not_prepared_ends_without_a_slice(running: Running) -> None:
    running.channel.say(Job(1, "embed", {"texts": 5}))
    failed = running.channel.wait(lambda event: event.request == 1)
    assert isinstance(failed, Failed)
    assert failed.code == UsageError.code


def test_a_late_cancel_of_an_answer_does_not_stop_the_job_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    running, gate = in_a_batch(1)
    process = running.process
    monkeypatch.setitem(process._compute_handlers, Job, lambda job: JobDone(job.request, process._flag.is_set))
    running.channel.say(Job(9, "beams", {}))
    assert eventually(lambda: not process._to_compute.empty())
    running.channel.say(Cancel(1))
    assert eventually(lambda: process._flag.is_set)
    gate.open()
    assert running.channel.wait(lambda event: event.request == 9) == JobDone(9, result=False)
    assert running.channel.finished(1).reason == "cancelled"


def test_a_cancelled_job_whose_decode_call_is_aborted_fails_alone(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def aborted(*_: object) -> None:
        raise Aborted

    monkeypatch.setattr(explain, "run_explain", aborted)
    running.channel.say(Job(1, "explain", {"answer": 1}))
    failed = running.channel.wait(lambda event: event.request == 1)
    assert isinstance(failed, Failed)
    assert failed.code == CancelledError("").code
    running.channel.say(ask(2))
    assert running.channel.finished(2).reason == "length"


def test_a_cancel_sets_the_flag_before_it_can_be_handled() -> None:
    """Else a quick thread clears the flag first, and every later computation is stopped by it."""
    running = Running()
    process = running.process
    running.model.engine.add(running.model.preparer.prepare(ask(1), lambda event: None))
    states: list[bool] = []
    process._to_compute = SimpleNamespace(put=lambda item: states.append(process._flag.is_set))  # type: ignore[assignment]
    process._cancel(Cancel(1))
    assert states == [True]


# ---- how the process ends ------------------------------------------------------------------------------------


def end_of(program: str, stdin: bytes) -> subprocess.CompletedProcess[bytes]:
    """The engine, as launch.py starts it, given these bytes and an open pipe."""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd="/"
    )
    assert process.stdin is not None
    process.stdin.write(stdin)
    process.stdin.flush()
    try:
        status = process.wait(PATIENCE)  # stdin stays open: nothing but what it read can end it
        assert process.stdout is not None
        assert process.stderr is not None
        return subprocess.CompletedProcess(program, status, process.stdout.read(), process.stderr.read())
    finally:
        process.kill()
        process.communicate()


ENGINE = "from llmrun.engine.start import main; main()"


@pytest.mark.usefixtures("package_on_path")
@pytest.mark.parametrize(
    "garbage",
    [
        b"\0\0\0\x05hello",
        b"\xff\xff\xff\xff",
        encode(Finished(1, "stop", module.Stats())),
        b"\0\0\0\x10" + b'{"kind": "Load"}',
    ],
    ids=["no JSON", "too long", "an event", "half a command"],
)
def test_garbage_ends_the_engine(garbage: bytes) -> None:
    done = end_of(ENGINE, garbage)
    assert done.returncode == 1
    assert b"FrameError" in done.stderr.splitlines()[-1]


@pytest.mark.usefixtures("package_on_path")
@pytest.mark.parametrize("thread", ["_read", "_prepare", "_compute"])
def test_the_engine_ends_with_any_of_its_threads(thread: str) -> None:
    program = f"import llmrun.engine.main as m; m.EngineProcess.{thread} = lambda *_: 1 / 0; m.serve()"
    done = end_of(program, encode(ask(1)))
    assert done.returncode == 1
    assert b"ZeroDivisionError" in done.stderr


# ---- an exception of one request -----------------------------------------------------------------------------


def broken(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("ours")


def assert_is_internal(event: Event) -> None:
    assert isinstance(event, Failed), event
    assert (event.code, event.why) == ("internal-error", "ZeroDivisionError")
    assert "ours" in event.trace
    assert event.what.split()[-1] in str(event.error()), "a number to find it by"
    assert event.trace in str(event.error().__cause__)


@pytest.mark.parametrize("step", ["prepare", "add", "count", "embed", "slice", "explain"])
def test_an_exception_of_one_request_fails_that_request(
    step: str, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = {
        "count": Job(1, "count_tokens", as_dict(AnswerRequest((Message("user", "Hi"),)))),
        "embed": Job(1, "embed", as_dict(EmbedTexts(("a",), "mean"))),
        "slice": Job(1, "embed", as_dict(EmbedTexts(("a",), "mean"))),
        "explain": Job(1, "explain_choices", {"answer": 7, "last": 1, "candidates": 1}),
    }
    with monkeypatch.context() as patch:
        if step == "prepare":
            patch.setattr(running.model.preparer, "prepare", broken)
        elif step == "add":
            patch.setattr(running.model.engine, "add", broken)
        elif step == "count":
            patch.setattr(running.model.preparer.prompts, "count", broken)
        elif step == "explain":
            patch.setattr(running.model.engine, "finished", broken)
        else:
            in_slices(patch, 3, broken if step == "slice" else lambda *_: None)
            if step == "embed":
                patch.setattr(module, "_job", broken)
        running.channel.say(jobs.get(step, ask(1)))
        others = (Rendering, Rendered)
        assert_is_internal(running.channel.wait(lambda event: event.request == 1 and not isinstance(event, others)))
    running.channel.say(ask(2))
    assert running.channel.finished(2).reason == "length"


def test_started_names_the_seed_that_the_sampler_has(running: Running) -> None:
    running.channel.say(ask(1))
    running.channel.finished(1)
    started = next(event for event in running.channel.sent if isinstance(event, Started))
    assert started.seed == running.channel.finished(1).stats.seed
