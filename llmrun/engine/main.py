"""The engine process: commands in on stdin, events out on what was stdout.

Owns the threads and the order of things; must not know terminals or files other than the model. One thread reads the
pipe, one prepares requests, one owns llama.cpp. The front's death ends the process, even in the middle of a
computation, and so does whatever goes wrong in a thread; SIGINT is the front's business.
"""

from __future__ import annotations

import gc
import importlib
import os
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from llmrun import _native
from llmrun.engine import environment
from llmrun.engine.channel import Channel, Outbox
from llmrun.engine.llama.base import Aborted
from llmrun.errors import CancelledError, LlmrunError
from llmrun.protocol.codec import as_dict, from_json
from llmrun.protocol.condition import Condition, Status
from llmrun.protocol.ended import Explain, Explained, SaveState
from llmrun.protocol.frames import FrameError
from llmrun.protocol.jobs import JobKind
from llmrun.protocol.loading import Load, Loaded, LoadProgress, Open
from llmrun.protocol.messages import (
    Cancel,
    Command,
    Count,
    Event,
    Failed,
    Finished,
    Generate,
    Job,
    JobDone,
    JobUpdate,
    Stats,
    Tokenize,
)
from llmrun.protocol.speculation import MeasureSteps, StepsMeasured

if TYPE_CHECKING:
    from llmrun.engine.llama.model import LlamaModel
    from llmrun.engine.loaded import LoadedModel
    from llmrun.engine.service import Prepared

_PROGRESS_INTERVAL = 0.1  # seconds between two LoadProgress


class Commands:
    """What a cancel has to know: which commands wait, which are in the loop, and which one llama.cpp is busy with.

    Attributes:
        answering: requests that were given to the loop.
        busy: the command that is being done, None between two of them, when the loop may run.
    """

    def __init__(self) -> None:
        self.answering: set[int] = set()
        self.busy: int | None = None
        self._lock = threading.Lock()
        self._waiting: dict[int, Command] = {}

    def add(self, command: Command) -> None:
        """A command was read. One with the same number is superseded: a guess of what to load, by the load."""
        with self._lock:
            self._waiting[command.request] = command

    def waits(self, command: Command) -> bool:
        """Whether nobody has taken a command up, or cancelled it."""
        return self._waiting.get(command.request) is command

    def take(self, command: Command, *, busy: bool = False) -> bool:
        """Take a command up that waited, maybe to keep llama.cpp busy with; False where it waits no more."""
        with self._lock:
            if not self.waits(command):
                return False
            del self._waiting[command.request]
            self.busy = command.request if busy else self.busy
            return True

    @property
    def n_answers(self) -> int:
        """How many answers wait to be taken up."""
        with self._lock:
            return sum(isinstance(command, Generate) for command in self._waiting.values())

    @property
    def any_waits(self) -> bool:
        """Whether there are commands that nobody has taken up."""
        return bool(self._waiting)

    def drop(self, request: int) -> Command | None:
        """A command that still waited, and does so no more; None for any other."""
        with self._lock:
            return self._waiting.pop(request, None)


class EngineProcess:
    """Takes commands in turn; see messages for what answers what."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._outbox = Outbox(channel.send)
        self._flag = _native.CancelFlag()
        self._commands = Commands()
        self._asked: queue.SimpleQueue[Command] = queue.SimpleQueue()
        # For the thread that owns llama.cpp; a request comes prepared.
        self._inbox: queue.SimpleQueue[tuple[Command, Prepared | None]] = queue.SimpleQueue()
        self._loading_ended = threading.Event()
        self._weights: LlamaModel | None = None
        self._model: LoadedModel | None = None

    def run(self) -> None:
        """Serve until the front is gone. Prepares requests itself: a template's time is limited by a signal."""
        for work in (self._read, self._compute):
            threading.Thread(target=_or_end, args=(work,), daemon=True).start()
        while True:
            self._prepare(self._asked.get())

    # ---- the thread that reads -----------------------------------------------------------------------------

    def _read(self) -> None:
        """Hand commands on, and stop what is cancelled."""
        while True:
            frame = self._channel.receive()
            if frame is None:
                os._exit(0)
            if isinstance(frame, Cancel):
                self._cancel(frame)
            elif isinstance(frame, Status):
                self._channel.send(self._condition(frame))
            elif isinstance(frame, Command):
                self._commands.add(frame)
                self._asked.put(frame)
            else:
                raise FrameError("an event came instead of a command")

    def _cancel(self, cancel: Cancel) -> None:
        """End what still waits; stop a computation that is this request's alone. Else it ends after the step."""
        request, commands = cancel.request, self._commands
        command = commands.drop(request)
        if isinstance(command, Generate):
            self._channel.send(Finished(request, "cancelled", Stats()))
        elif command is not None:
            self._channel.send(Failed.of(CancelledError("it was cancelled"), request))
        else:
            if commands.busy == request or (commands.busy is None and self._is_alone(request)):
                self._flag.set()  # before the other thread can take the command, which clears the flag
            self._inbox.put((cancel, None))

    def _condition(self, status: Status) -> Condition:
        """How busy the loop is, also while it computes."""
        waiting = self._commands.n_answers
        if self._model is None:
            return Condition(status.request, waiting=waiting)
        return self._model.engine.status(status.request, waiting)

    def _is_alone(self, request: int) -> bool:
        """Whether a batch that runs is this request's alone."""
        return self._commands.answering == {request} or (
            self._model is not None and self._model.engine.runs_alone(request)
        )

    # ---- the thread that prepares --------------------------------------------------------------------------

    def _prepare(self, command: Command) -> None:
        if not self._commands.waits(command):
            return
        try:
            if isinstance(command, Generate):
                self._inbox.put((command, self._living_model().preparer.prepare(command, self._channel.send)))
            elif isinstance(command, Count):
                self._answer(command, self._living_model().preparer.count(command, self._channel.send))
            elif isinstance(command, Tokenize):
                self._answer(command, self._living_model().preparer.tokenize(command))
            else:
                self._inbox.put((command, None))
        except LlmrunError as error:
            self._answer(command, Failed.of(error, command.request))
            self._inbox.put((Cancel(command.request), None))  # the other thread looks whether it has to end
        if isinstance(command, Open | Load):
            environment.import_for_requests()
        if isinstance(command, Load):
            self._loading_ended.wait()
            self._loading_ended.clear()
            if self._model is not None and command.n_seq_max > 1:
                environment.give_way()
                self._model.preparer.look_ahead()

    def _living_model(self) -> LoadedModel:
        if self._model is None:
            raise LlmrunError("a request came before a model")
        return self._model

    def _answer(self, command: Command, event: Event) -> None:
        if self._commands.take(command):
            self._channel.send(event)

    # ---- the thread that owns llama.cpp --------------------------------------------------------------------

    def _compute(self) -> None:
        environment.load_libraries()
        while True:
            while self._model is None or not self._model.engine.busy or not self._inbox.empty():
                self._end_if_worn_out()
                self._handle(*self._inbox.get())
            events = self._model.engine.step()
            for event in events:
                if isinstance(event, Finished | Failed):
                    self._commands.answering.discard(event.request)
            self._outbox.add(events)

    def _end_if_worn_out(self) -> None:
        """End the process where a new one serves better and nobody loses an answer: the front starts one when asked."""
        model = self._model
        if model is None or model.engine.busy or not self._inbox.empty() or self._commands.n_answers:
            return
        if model.is_worn_out:
            os._exit(0)

    def _handle(self, command: Command, prepared: Prepared | None) -> None:
        if isinstance(command, Cancel):
            self._flag.clear()  # it may have stopped a batch in which other requests took part: they try again
            if self._model is not None:
                self._model.engine.cancel(command.request)
        elif self._commands.take(command, busy=True):
            try:
                event = self._do(command, prepared)
            except LlmrunError as error:
                event = Failed.of(error, command.request)
            self._commands.busy = None
            if event is not None:
                self._channel.send(event)
        if isinstance(command, Load):
            self._loading_ended.set()

    def _do(self, command: Command, prepared: Prepared | None) -> Event | None:
        """Do what a command asks for; the event that answers it, if that is not up to the loop."""
        if isinstance(command, Open):
            with suppress(LlmrunError):  # Load will say what is wrong
                self._weights = self._load_weights(Load(command.path, 0, 0, gpu_layers=command.gpu_layers))
            return None
        if isinstance(command, Load):
            return self._load(command)
        if isinstance(command, Job):
            return JobDone(command.request, self._do_job(command))
        model = self._living_model()
        if prepared is not None:
            model.engine.add(*prepared)
            self._commands.answering.add(command.request)
            return None
        if isinstance(command, Explain):
            sampler = model.engine.finished(command.answer).sampler
            return Explained(command.request, tuple(sampler.explain(command.last, command.candidates)))
        if isinstance(command, MeasureSteps):
            return StepsMeasured(command.request, *model.engine.measure_steps(self._is_wanted))
        assert isinstance(command, SaveState)
        return model.save(command)

    def _is_wanted(self) -> bool:
        """Whether somebody waits for what nobody has begun to do."""
        return self._commands.any_waits or not self._inbox.empty()

    def _load_weights(self, load: Load) -> LlamaModel:
        from llmrun.engine.llama.model import LlamaModel

        with self._reporting_progress(load.request):
            return LlamaModel.of(load, self._flag)

    def _load(self, load: Load) -> Loaded:
        from llmrun.engine.llama.context import LlamaContext
        from llmrun.engine.llama.devices import devices

        began = time.perf_counter()
        weights, self._weights = self._weights, None
        if weights is not None and not weights.is_for(load):
            weights.close()
            weights = None
        weights = weights or self._load_weights(load)
        try:
            context = LlamaContext(weights, load, encodes=True)
            drafts = LlamaContext(self._load_weights(load.draft), load.draft) if load.draft is not None else None
        except Aborted:
            raise CancelledError("loading was cancelled") from None
        from llmrun.engine.loaded import LoadedModel

        self._model = model = LoadedModel(weights, context, load, drafts, predicts=context.predicts)
        self._outbox.serve(load.n_seq_max)
        gc.freeze()  # whatever is there now stays; launch.py begins without collection to start sooner
        gc.enable()
        return Loaded(
            n_ctx=context.n_ctx,
            n_ctx_train=weights.n_ctx_train,
            n_vocab=weights.vocabulary.n_tokens,
            description=weights.description,
            has_template=weights.chat_template is not None,
            devices=tuple(device.name for device in devices()),
            load_seconds=time.perf_counter() - began,
            thinking_tags=model.preparer.thinking_tags or (),
            request=load.request,
        )

    def _do_job(self, job: Job) -> dict[str, Any]:
        kind: JobKind[Any, Any, Any] = getattr(
            importlib.import_module(f"llmrun.protocol.jobs.{job.name}"), job.name.upper()
        )
        run = importlib.import_module(f"llmrun.engine.jobs.{kind.module}").run
        command = from_json(kind.command, job.arguments)
        gc.enable()  # launch.py begins without collection to start sooner

        def report(update: Any) -> None:
            self._channel.send(JobUpdate(job.request, as_dict(update)))

        return as_dict(run(command, report, self._flag, *([self._living_model()] if kind.needs_model else ())))

    @contextmanager
    def _reporting_progress(self, request: int) -> Iterator[None]:
        done = threading.Event()

        def report() -> None:
            while not done.wait(_PROGRESS_INTERVAL):
                self._channel.send(LoadProgress(self._flag.progress, request))

        thread = threading.Thread(target=report, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def _or_end(work: Callable[[], None]) -> None:
    """Do what a thread does for ever. Where it can't, the process ends: nobody would answer what that thread has to."""
    try:
        work()
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def main() -> None:
    """Entry of the engine process; returns never."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    environment.set_environment()
    environment.no_core_dumps()
    environment.share_the_interpreter()
    _native.exit_when_closed(0)
    _or_end(EngineProcess(Channel.private()).run)


if __name__ == "__main__":
    main()
