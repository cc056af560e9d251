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
from llmrun.errors import CancelledError, LlmrunError, UsageError
from llmrun.protocol.codec import as_dict
from llmrun.protocol.engine_status import EngineStatus, GetStatus
from llmrun.protocol.finished_answers import AnswerExplanation, Explain, SaveState, StateSaved
from llmrun.protocol.frames import FrameError
from llmrun.protocol.jobs import JobKind
from llmrun.protocol.loading import Load, Loaded, LoadProgress, Open
from llmrun.protocol.messages import (
    Cancel,
    Command,
    CountTokens,
    Detokenize,
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
    from llmrun.engine.core.host_prefix_cache import HostPrefix
    from llmrun.engine.llama.context import LlamaContext
    from llmrun.engine.llama.model import LlamaModel
    from llmrun.engine.loaded import LoadedModel
    from llmrun.engine.service import PreparedRequest, Preparer

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
        # For the thread that owns llama.cpp: a command, and the argument of its handler.
        self._inbox: queue.SimpleQueue[tuple[Command, Command | PreparedRequest]] = queue.SimpleQueue()
        self._loading_ended = threading.Event()
        self._weights: LlamaModel | None = None
        self._draft_weights: LlamaModel | None = None
        self._contexts: list[LlamaContext] = []
        self._model: LoadedModel | None = None
        # A handler for each command, by the thread that does it. The event that a handler returns goes to the front.
        self._at_once: dict[type[Command], Callable[[Any], None]] = {
            Cancel: self._cancel,
            GetStatus: lambda status: self._channel.send(self._condition(status)),
        }
        self._in_preparing: dict[type[Command], Callable[[Any], Event]] = {
            CountTokens: lambda count: self._preparer.count(count, self._channel.send),
            Tokenize: lambda tokenize: self._preparer.tokenize(tokenize),
            Detokenize: lambda detokenize: self._preparer.detokenize(detokenize),
        }
        self._in_computing: dict[type[Command], Callable[[Any], Event | None]] = {
            Open: self._open,
            Load: self._load,
            Job: lambda job: JobDone(job.request, self._do_job(job)),
            Generate: self._generate,
            Explain: self._explain,
            MeasureSteps: self._measure_steps,
            SaveState: self._save_state,
        }

    @property
    def handled(self) -> frozenset[type[Command]]:
        """The commands that have a handler."""
        return frozenset((*self._at_once, *self._in_preparing, *self._in_computing))

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
            command = self._channel.receive()
            if command is None:
                os._exit(0)
            if not isinstance(command, Command):
                raise FrameError("an event came instead of a command")
            if type(command) not in self.handled:
                unknown = UsageError(f"the engine has no handler for {type(command).__name__}")
                self._channel.send(Failed.of(unknown, command.request))
            elif (do := self._at_once.get(type(command))) is not None:
                do(command)
            else:
                self._commands.add(command)
                self._asked.put(command)

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
            self._hand_on(cancel)

    def _hand_on(self, command: Command) -> None:
        """Give a command to the thread that owns llama.cpp, with nothing prepared."""
        self._inbox.put((command, command))

    def _condition(self, status: GetStatus) -> EngineStatus:
        """How busy the loop is, also while it computes."""
        waiting = self._commands.n_answers
        if self._model is None:
            return EngineStatus(status.request, waiting=waiting)
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
                self._inbox.put((command, self._preparer.prepare(command, self._channel.send)))
            elif (do := self._in_preparing.get(type(command))) is not None:
                self._answer(command, do(command))
            else:
                self._hand_on(command)
        except LlmrunError as error:
            self._answer(command, Failed.of(error, command.request))
            self._hand_on(Cancel(command.request))  # the other thread looks whether it has to end
        if isinstance(command, Open | Load):
            environment.import_for_requests()
        if isinstance(command, Load):
            self._loading_ended.wait()
            self._loading_ended.clear()
            if self._model is not None and command.n_seq_max > 1:
                environment.give_way()
                self._model.preparer.look_ahead()

    @property
    def _preparer(self) -> Preparer:
        return self._living_model().preparer

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

    def _handle(self, command: Command, given: Command | PreparedRequest) -> None:
        if isinstance(command, Cancel):
            self._flag.clear()  # it may have stopped a batch in which other requests took part: they try again
            if self._model is not None:
                self._model.engine.cancel(command.request)
        elif self._commands.take(command, busy=True):
            try:
                event = self._in_computing[type(command)](given)
            except LlmrunError as error:
                event = Failed.of(error, command.request)
            self._commands.busy = None
            if event is not None:
                self._channel.send(event)
        if isinstance(command, Load):
            self._loading_ended.set()

    def _open(self, command: Open) -> None:
        with suppress(LlmrunError):  # Load will say what is wrong
            self._weights = self._load_weights(Load(command.path, 0, 0, gpu_layers=command.gpu_layers))

    def _generate(self, prepared: PreparedRequest) -> None:
        self._living_model().engine.add(*prepared)
        self._commands.answering.add(prepared.request)

    def _explain(self, command: Explain) -> AnswerExplanation:
        sampler = self._living_model().engine.finished(command.answer).sampler
        return AnswerExplanation(command.request, tuple(sampler.explain(command.last, command.candidates)))

    def _measure_steps(self, command: MeasureSteps) -> StepsMeasured:
        return StepsMeasured(command.request, *self._living_model().engine.measure_steps(self._is_wanted))

    def _save_state(self, command: SaveState) -> StateSaved:
        return self._living_model().save(command)

    def _is_wanted(self) -> bool:
        """Whether somebody waits for what nobody has begun to do."""
        return self._commands.any_waits or not self._inbox.empty()

    def _load_weights(self, load: Load, loaded: LlamaModel | None = None) -> LlamaModel:
        """Return the loaded weights if they are those that are asked for; else free them, and load."""
        from llmrun.engine.llama.model import LlamaModel

        if loaded is not None and loaded.is_for(load):
            return loaded
        if loaded is not None:
            loaded.close()
        with self._reporting_progress(load.request):
            return LlamaModel.of(load, self._flag)

    def _load(self, load: Load) -> Loaded:
        """Load a model; where its weights are loaded already, make another context, and keep what the KV cache holds.

        Raises:
            UsageError: the model that is loaded answers.
            LlmrunError: it can't be loaded; no model is loaded then.
        """
        from llmrun.engine.llama.context import LlamaContext
        from llmrun.engine.llama.devices import devices

        began = time.perf_counter()
        before, prefixes = self._unload()
        self._weights = weights = self._load_weights(load, self._weights)
        if before is not None and before.weights is not weights:
            before, prefixes = None, []
        try:
            context = LlamaContext(weights, load, encodes=True)
            self._contexts.append(context)
            drafts = None
            if load.draft is not None:
                self._draft_weights = self._load_weights(load.draft, self._draft_weights)
                drafts = LlamaContext(self._draft_weights, load.draft)
                self._contexts.append(drafts)
        except Aborted:
            raise CancelledError("loading was cancelled") from None
        from llmrun.engine.loaded import LoadedModel

        self._model = model = LoadedModel(
            weights, context, load, drafts, predicts=context.predicts, before=before, prefixes=prefixes
        )
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

    def _unload(self) -> tuple[LoadedModel | None, list[HostPrefix]]:
        """Free the contexts of the loaded model, if any; return it, and what its KV cache held."""
        model = self._model
        if model is None:
            return None, []
        if model.engine.busy:
            raise UsageError("the model can't be loaded again", why="it answers")
        prefixes, self._model = model.engine.prefixes(), None
        while self._contexts:
            self._contexts.pop().close()
        return model, prefixes

    def _do_job(self, job: Job) -> dict[str, Any]:
        try:
            module = importlib.import_module(f"llmrun.protocol.jobs.{job.name}")
            kind: JobKind[Any, Any, Any] = getattr(module, job.name.upper())
        except (ImportError, AttributeError) as error:
            raise UsageError(f"the engine can't do the job {job.name!r:.40}", why=str(error)) from error
        command = kind.read(job.arguments)
        run = importlib.import_module(f"llmrun.engine.jobs.{kind.name}").run
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
