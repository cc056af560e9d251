"""The engine process: reads commands from stdin and writes events to a private copy of stdout.

Owns the threads: one reads the pipe, one prepares requests, one owns llama.cpp. Must not know terminals, or files other
than the model. An exception of one request fails that request. The process ends when the front dies, even in the middle
of a computation, and when anything else fails: a load, a batch, the pipe. SIGINT is left to the front.
"""

from __future__ import annotations

import gc
import importlib
import os
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Union

from llmrun import _native
from llmrun.engine import environment
from llmrun.engine.channel import Channel, Outbox
from llmrun.engine.llama.base import MAX_RUN, Aborted, RunLimit
from llmrun.engine.slices import SlicedJob, Slices, TimeShare
from llmrun.errors import CancelledError, LlmrunError, UsageError, as_llmrun_error
from llmrun.protocol.frames import FrameError
from llmrun.protocol.jobs import MODULES, JobKind
from llmrun.protocol.loading import Load, Loaded, LoadProgress
from llmrun.protocol.messages import (
    Cancel,
    Command,
    Event,
    Failed,
    Finished,
    Generate,
    Job,
    JobDone,
    JobUpdate,
    Stats,
)
from llmrun.protocol.questions import (
    APPLY_TEMPLATE,
    COMPARE,
    COUNT_TOKENS,
    DETOKENIZE,
    EXPLAIN_CHOICES,
    QUESTIONS,
    SAVE_STATE,
    STATUS,
    TOKENIZE_LOADED,
    AnswerExplanation,
    Compare,
    EngineStatus,
    ExplainChoices,
)
from llmrun.protocol.repeating import repeating
from llmrun.protocol.speculation import ComparisonTimes

if TYPE_CHECKING:
    from llmrun.engine.core.sequence import Sequence
    from llmrun.engine.llama.model import LlamaModel
    from llmrun.engine.loaded import LoadedModel
    from llmrun.engine.preload import Preload
    from llmrun.engine.prompt.writer import PromptWriter

_Argument = Union["Command", "Sequence", "SlicedJob"]
_Role = Literal["model", "draft"]  # of loaded weights
_SLICED = frozenset({"embed", "prompt_scores"})
"""Jobs of a loaded model that share the thread that owns llama.cpp with running answers."""
_PROGRESS_INTERVAL = 0.1  # seconds between two LoadProgress
_PREFILL_INTERVAL = 0.5  # seconds between two PrefillProgress within a batch
_GATHER_SECONDS = 0.02  # the most that an idle engine waits for further requests in preparation
_IDLE_SECONDS = 3.0  # without commands, before parked conversations are saved; a server measures steps later


class Commands:
    """The commands by state, for cancelling: waiting, or running in llama.cpp's thread.

    Args:
        flag: stops the computation.

    Attributes:
        busy: the running command; None between commands, while the loop may run.
    """

    def __init__(self, flag: _native.CancelFlag) -> None:
        self.busy: int | None = None
        self._flag = flag
        self._lock = threading.Lock()
        self._waiting: dict[int, Command] = {}

    def add(self, command: Command) -> None:
        with self._lock:
            self._waiting[command.request] = command

    def is_waiting(self, command: Command) -> bool:
        return self._waiting.get(command.request) is command

    def take(self, command: Command, *, busy: bool = False) -> bool:
        """Start a waiting command, as the running one if busy; return False if it is not waiting any more."""
        with self._lock:
            if not self.is_waiting(command):
                return False
            del self._waiting[command.request]
            if busy:
                self.busy = command.request
                self._flag.clear()  # the cancel of an answer or a job before may have come too late to stop that
            return True

    def resume(self, request: int) -> None:
        """Make a job the running command again, for a slice."""
        with self._lock:
            self.busy = request
            self._flag.clear()

    def stop(self, request: int, *, is_alone: bool) -> None:
        """Stop the computation if it is this request's: a command, or an answer that is alone in the loop."""
        with self._lock:
            if self.busy == request or (self.busy is None and is_alone):
                self._flag.set()

    @property
    def n_answers(self) -> int:
        """Waiting Generate commands."""
        with self._lock:
            return sum(isinstance(command, Generate) for command in self._waiting.values())

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def drop(self, request: int) -> Command | None:
        """Remove and return a waiting command; None if it is not waiting."""
        with self._lock:
            return self._waiting.pop(request, None)


class EngineProcess:
    """The threads, and the handlers of all commands; messages.py names the events that answer each."""

    def __init__(self, channel: Channel, preload: Preload | None = None) -> None:
        self._channel, self._preload = channel, preload
        self._outbox = Outbox(channel.send)
        self._flag = _native.CancelFlag() if preload is None else preload.flag
        self._commands = Commands(self._flag)
        self._to_prepare: queue.SimpleQueue[Command | None] = queue.SimpleQueue()  # None: a batch begins to be watched
        # A command, and the argument of its handler.
        self._to_compute: queue.SimpleQueue[tuple[Command, _Argument]] = queue.SimpleQueue()
        self._share, self._sliced = TimeShare(), deque[SlicedJob]()
        self._queued = _native.CancelFlag()  # set after each put; ends a run of decode steps
        self._load_finished = threading.Event()
        # A thread of its own, so that a Load does not wait for it.
        self._importer = threading.Thread(target=environment.import_for_requests, daemon=True)
        self._weights: dict[_Role, LlamaModel] = {}
        self._model: LoadedModel | None = None
        environment.is_decoding = self._is_decoding
        # The event that a handler returns is sent to the front.
        self._compute_handlers: dict[type[Command], Callable[[Any], Event | None]] = {
            Load: self._load,
            Generate: self._generate,
            Job: self._do_job,
        }
        # The handlers of short jobs, by the thread that does them; they get the job's request and command.
        self._read_questions: dict[str, Callable[[int, Any], Any]] = {STATUS.name: lambda _, command: self._status()}
        self._prepare_questions: dict[str, Callable[[int, Any], Any]] = {
            COUNT_TOKENS.name: lambda request, command: self._prompts.count(command, request, self._channel.send),
            APPLY_TEMPLATE.name: lambda request, command: self._prompts.rendered(command, request, self._channel.send),
            TOKENIZE_LOADED.name: lambda _, command: self._prompts.tokenize(command),
            DETOKENIZE.name: lambda _, tokens: self._prompts.detokenize(tokens),
        }
        self._compute_questions: dict[str, Callable[[int, Any], Any]] = {
            EXPLAIN_CHOICES.name: lambda _, command: self._explain(command),
            COMPARE.name: lambda _, command: self._compare(command),
            SAVE_STATE.name: lambda _, command: self._loaded_model().save(command),
        }

    def run(self) -> None:
        """Serve until the front is gone. This thread prepares requests: signals limit a template's time, and only
        reach the main thread."""
        for work in (self._read, self._compute):
            threading.Thread(target=_run_or_exit, args=(work,), daemon=True).start()
        if self._preload is not None and self._preload.path:
            self._importer.start()
        while True:
            self._prepare(self._next_to_prepare())

    # ---- the thread that reads -----------------------------------------------------------------------------

    def _read(self) -> None:
        while True:
            command = self._channel.receive()
            if command is None:
                os._exit(0)
            if not isinstance(command, Command):
                raise FrameError("an event came instead of a command")
            if isinstance(command, Cancel):
                self._cancel(command)
            elif isinstance(command, Job) and command.name in self._read_questions:
                self._channel.send(self._ask(command, self._read_questions))
            else:
                self._commands.add(command)
                self._to_prepare.put(command)

    def _cancel(self, cancel: Cancel) -> None:
        """Finish a waiting command; abort a computation that no other request shares; else finish after the step."""
        request, commands = cancel.request, self._commands
        command = commands.drop(request)
        if isinstance(command, Generate):
            self._channel.send(Finished(request, "cancelled", Stats()))
        elif command is not None:
            self._channel.send(_failure(Aborted(), request))
        else:
            # Before the other thread can take the cancel, which clears the flag.
            commands.stop(request, is_alone=self._is_alone(request))
            self._queue(cancel, cancel)

    def _ask(self, job: Job, questions: dict[str, Callable[[int, Any], Any]]) -> Event:
        """Do a short job; return its last event."""
        try:
            command = QUESTIONS[job.name].read(job.arguments)
            return JobDone(job.request, questions[job.name](job.request, command))
        except Exception as error:
            return _failure(error, job.request)

    def _status(self) -> EngineStatus:
        waiting, model = self._commands.n_answers, self._model  # another thread may set it to None
        return EngineStatus(waiting=waiting) if model is None else model.engine.status(waiting)

    def _is_decoding(self) -> bool:
        model = self._model
        return model is not None and model.engine.busy

    def _is_alone(self, request: int) -> bool:
        model = self._model
        return model is not None and model.engine.runs_alone(request)

    # ---- the thread that prepares --------------------------------------------------------------------------

    def _next_to_prepare(self) -> Command:
        """Wait for a command; meanwhile, tell the progress of prefill within a batch.

        Where nothing moves, the waits grow: an engine that hangs is known by using no processor time.
        """
        seconds: float | None = _PREFILL_INTERVAL
        while True:
            try:
                command = self._to_prepare.get(timeout=seconds)
            except queue.Empty:
                model = self._model  # another thread may set it to None
                moves = None if model is None else model.engine.watch.tell(self._channel.send)
                seconds = None if moves is None else _PREFILL_INTERVAL if moves else 2 * (seconds or _PREFILL_INTERVAL)
            else:
                if command is not None:
                    return command
                seconds = _PREFILL_INTERVAL

    def _prepare(self, command: Command) -> None:
        if not self._commands.is_waiting(command):
            return
        try:
            if isinstance(command, Generate):
                sequence = self._loaded_model().preparer.prepare(command, self._channel.send)
                self._loaded_model().engine.read_ahead(sequence.tokens, sequence.salt)
                self._queue(command, sequence)
            elif isinstance(command, Job) and command.name in self._prepare_questions:
                self._answer(command, self._ask(command, self._prepare_questions))
            elif isinstance(command, Job) and command.name in _SLICED:
                self._queue(command, self._begin_slices(command))
            else:
                self._queue(command, command)
        except Exception as error:
            self._answer(command, _failure(error, command.request))
        if isinstance(command, Load):
            if self._importer.ident is None:
                self._importer.start()
            self._importer.join()
            self._compile_template()
            self._load_finished.wait()
            self._load_finished.clear()
            if self._model is not None and command.n_seq_max > 1:
                self._model.preparer.read_vocabulary()

    def _compile_template(self) -> None:
        """Compile the chat template of preloaded weights while their context is created."""
        if self._preload is None:
            return
        self._preload.join()
        weights = self._preload.weights
        if weights is not None and weights.chat_template is not None:
            from llmrun.engine.prompt.template import compile_template

            with suppress(LlmrunError):  # a request reports it
                compile_template(weights.chat_template)

    def _begin_slices(self, job: Job) -> SlicedJob:
        """Begin a job up to its first slice."""
        described, run = _job(job.name)
        is_wanted = partial(self._commands.is_waiting, job)
        sliced: Slices = run(described.read(job.arguments), self._loaded_model(), self._share, is_wanted)
        next(sliced)
        return SlicedJob(job.request, sliced)

    @property
    def _prompts(self) -> PromptWriter:
        return self._loaded_model().preparer.prompts

    def _loaded_model(self) -> LoadedModel:
        if self._model is None:
            raise LlmrunError("no model is loaded")
        return self._model

    def _answer(self, command: Command, event: Event) -> None:
        if self._commands.take(command):
            self._channel.send(event)
        cancel = Cancel(command.request)
        self._queue(cancel, cancel)  # wakes the other thread, which may have to exit

    def _queue(self, command: Command, argument: _Argument) -> None:
        """Pass a command to the thread that owns llama.cpp."""
        self._to_compute.put((command, argument))
        self._queued.set()

    # ---- the thread that owns llama.cpp --------------------------------------------------------------------

    def _compute(self) -> None:
        if self._preload is not None and self._preload.path:
            with self._reporting_progress(0):  # a Load's number
                self._preload.join()
            if self._preload.weights is not None:
                self._weights["model"] = self._preload.weights
        while True:
            self._queued.clear()
            while self._model is None or not self._to_compute.empty() or not (self._model.engine.busy or self._sliced):
                self._exit_if_worn_out()
                self._handle(*self._next_command())
            engine, self._share.seconds = self._model.engine, None
            if engine.busy:
                if engine.is_starting:
                    self._gather()
                began = time.perf_counter()
                seconds = self._outbox.due - began
                limit = RunLimit(1 if self._sliced else MAX_RUN, seconds, self._queued)
                self._outbox.add(engine.step(limit, self._outbox.add))
                self._share.seconds = time.perf_counter() - began
            if self._sliced:
                self._do_slice()

    def _do_slice(self) -> None:
        """Do a slice of the first job of them; the others wait for its end."""
        job = self._sliced[0]
        self._commands.resume(job.request)
        event: Event | None = None
        try:
            next(job.slices)
        except StopIteration as end:
            event = JobDone(job.request, end.value)
        except Exception as error:
            event = _failure(error, job.request)
        self._commands.busy = None
        if event is not None:
            self._sliced.popleft()
            self._channel.send(event)

    def _drop_sliced(self, request: int) -> None:
        """End a cancelled job between two of its slices."""
        for job in [job for job in self._sliced if job.request == request]:
            self._sliced.remove(job)
            job.slices.close()
            self._channel.send(_failure(Aborted(), request))

    def _gather(self) -> None:
        """Wait briefly for requests in preparation: prompts that arrive together share the first prefill."""
        ends_at = time.perf_counter() + _GATHER_SECONDS
        while self._commands.n_answers and (seconds := ends_at - time.perf_counter()) > 0:
            self._outbox.add(self._loaded_model().engine.admit())  # copies cached prefixes meanwhile
            with suppress(queue.Empty):
                self._handle(*self._to_compute.get(timeout=seconds))

    def _next_command(self) -> tuple[Command, _Argument]:
        """Wait for a command; copy parked prefixes meanwhile, and save them when none has come for a while."""
        engine = self._model.engine if self._model is not None and self._model.load.n_seq_max > 1 else None
        while engine is not None and self._to_compute.empty() and not self._commands.n_answers and engine.offload():
            pass
        with suppress(queue.Empty):
            return self._to_compute.get(timeout=_IDLE_SECONDS)
        if engine is not None:
            engine.save_parked(self._has_queued_command)
        return self._to_compute.get()

    def _exit_if_worn_out(self) -> None:
        """Exit when idle if the process is worn out; the front starts a new one on demand."""
        model = self._model
        if model is None or model.engine.busy or self._sliced or not self._to_compute.empty():
            return
        if self._commands.has_waiting:  # the front repeats no job
            return
        if model.is_worn_out:
            os._exit(0)

    def _handle(self, command: Command, argument: _Argument) -> None:
        if isinstance(command, Cancel):
            self._flag.clear()  # if it stopped a batch with other requests, that is decoded again
            if self._model is not None:
                self._model.engine.cancel(command.request)
            self._drop_sliced(command.request)
        elif self._commands.take(command, busy=True):
            try:
                event = self._compute_handlers[type(command)](argument)
            except Exception as error:
                if isinstance(command, Load) and not isinstance(error, (LlmrunError, Aborted)):
                    raise  # half a model may be loaded
                event = _failure(error, command.request)
            self._commands.busy = None
            if event is not None:
                self._channel.send(event)
        if isinstance(command, Load):
            self._load_finished.set()

    def _generate(self, sequence: Sequence) -> None:
        self._loaded_model().engine.add(sequence)

    def _explain(self, command: ExplainChoices) -> AnswerExplanation:
        answer = self._loaded_model().engine.explainable(command.answer)
        choices = answer.sampler.explain(command.last, command.candidates)
        first = len(answer.tokens) - len(choices)
        drafted = (answer.drafted.get(index) for index in range(first, len(answer.tokens)))
        explained = [choice._replace(draft=draft) for choice, draft in zip(choices, drafted, strict=True)]
        return AnswerExplanation(tuple(explained))

    def _compare(self, command: Compare) -> ComparisonTimes:
        model = self._loaded_model()
        attention = model.compare_attention(self._has_queued_command) if command.attention else ()
        return ComparisonTimes(attention, model.compare_variants(command.variant_types, self._has_queued_command))

    def _has_queued_command(self) -> bool:
        return self._commands.has_waiting or not self._to_compute.empty()

    def _load_weights(self, load: Load, role: _Role) -> LlamaModel:
        """Return the loaded weights if they match the command; else free them, and load the right ones."""
        from llmrun.engine.llama.model import LlamaModel

        loaded = self._weights.get(role)
        if loaded is not None and loaded.is_for(load):
            return loaded
        for other, weights in [*self._weights.items()]:
            if other == role or weights.cpu_variant != load.cpu_variant:
                del self._weights[other]
                weights.close()
        with self._reporting_progress(load.request):
            self._weights[role] = LlamaModel.of(load, self._flag)
        return self._weights[role]

    def _load(self, load: Load) -> Loaded:
        """Load a model. If its weights are loaded already, only replace the context, and keep the cached prefixes.

        Raises:
            UsageError: the engine is answering.
            LlmrunError: loading failed; no model is loaded then.
        """
        from llmrun.engine.llama.devices import devices
        from llmrun.engine.loaded import LoadedModel

        while self._sliced:
            self._do_slice()
        began = time.perf_counter()
        loaded = self._weights.get("model")
        before, drafts = self._unload(keeps_prefixes=loaded is not None and loaded.is_for(load)), None
        weights = self._load_weights(load, "model")
        if load.draft is not None and not load.draft_heads:
            drafts = self._load_weights(load.draft, "draft")
        if before is not None and before.weights is not weights:
            before = None
        self._model = model = LoadedModel.open(weights, drafts, load, before)
        model.engine.watch.on_begin = partial(self._to_prepare.put, None)
        self._outbox.set_joining(load.n_seq_max == 1 and not load.each_token)
        gc.freeze()  # the objects so far live long; launch.py disables collection to start sooner
        gc.enable()
        return Loaded(
            n_ctx=model.context.n_ctx,
            n_ctx_train=weights.n_ctx_train,
            n_vocab=weights.vocabulary.n_tokens,
            description=weights.description,
            has_template=weights.chat_template is not None,
            devices=tuple(device.name for device in devices()),
            load_seconds=time.perf_counter() - began,
            thinking_tags=model.preparer.prompts.thinking_tags,
            request=load.request,
            buffers=model.buffers,
        )

    def _unload(self, *, keeps_prefixes: bool = False) -> LoadedModel | None:
        """Close the loaded model, if any, and return it; its prefixes only stay with its weights."""
        model = self._model
        if model is not None:
            if model.engine.busy:
                raise UsageError("the model can't be loaded again", why="it is answering")
            self._model = None
            model.close(keeps_prefixes=keeps_prefixes)
        return model

    def _do_job(self, job: Job | SlicedJob) -> Event | None:
        gc.enable()  # launch.py disables collection to start sooner
        if isinstance(job, SlicedJob):
            self._sliced.append(job)
            return None
        if job.name in self._compute_questions:
            return self._ask(job, self._compute_questions)
        described, run = _job(job.name)
        command = described.read(job.arguments)

        def report(update: Any) -> None:
            self._channel.send(JobUpdate(job.request, update))

        result = run(command, report, self._flag, *([self._loaded_model()] if described.needs_model else ()))
        return JobDone(job.request, result)

    def _reporting_progress(self, request: int) -> AbstractContextManager[None]:
        return repeating(_PROGRESS_INTERVAL, lambda: self._channel.send(LoadProgress(self._flag.progress, request)))


def _failure(error: Exception, request: int) -> Failed:
    """Return the event for a command that failed, or that was cancelled."""
    ours = CancelledError("it was cancelled") if isinstance(error, Aborted) else as_llmrun_error(error)
    return Failed.of(ours, request)


def _job(name: str) -> tuple[JobKind[Any, Any, Any], Callable[..., Any]]:
    """Return the description and the function of a job. Raises UsageError if there is none of this name."""
    if name not in MODULES:
        raise UsageError(f"the engine can't do the job {name!r:.40}")
    described, done = (
        importlib.import_module(f"llmrun.{side}.jobs.{MODULES[name]}") for side in ("protocol", "engine")
    )
    return getattr(described, name.upper()), getattr(done, f"run_{name}")


def _run_or_exit(work: Callable[[], None]) -> None:
    """Run a thread's endless loop; exit the process if it fails, because its commands would never be answered."""
    try:
        work()
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def serve(preload: Preload | None = None) -> None:
    """Serve the front until it is gone, and never return."""
    if preload is not None:
        preload.has_read.wait()  # the line before the commands
    _run_or_exit(EngineProcess(Channel.private(), preload).run)
