"""Commands that are under way with one engine: what comes in goes to its command, and what takes too long ends.

Owns which event belongs to which command, deadlines, and what a death means for each; must not know who waits. With
pipe.py and launch.py, all of the front that knows there is an engine process.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue

from llmrun.errors import (
    BadTemplateError,
    CancelledError,
    EngineCrashedError,
    LlmrunError,
    OutOfMemoryError,
    UsageError,
)
from llmrun.protocol.engine_status import EngineStatus, GetStatus
from llmrun.protocol.finished_answers import AnswerExplanation, Explain, SaveState, StateSaved
from llmrun.protocol.loading import Load, Loaded, LoadProgress, Open, ways_to_fit
from llmrun.protocol.messages import (
    AnswerRequest,
    Cancel,
    Command,
    CountTokens,
    Detokenize,
    Detokenized,
    Event,
    Failed,
    Finished,
    Generate,
    ImageAccepted,
    Job,
    JobDone,
    JobUpdate,
    PrefillProgress,
    Rendered,
    Rendering,
    Started,
    Stats,
    TextDelta,
    TokenCount,
    Tokenize,
    Tokenized,
)
from llmrun.protocol.rendering import rendering_share
from llmrun.protocol.speculation import MeasureSteps, StepsMeasured
from llmrun.runner.launch import EngineHandle
from llmrun.runner.pipe import EngineExited, Pipe

RENDER_SECONDS = 2.0
"""A chat template that takes longer is hostile: real ones take milliseconds."""
CANCEL_SECONDS = 1.0
"""An engine that does not stop within this is ended."""
_TICK_SECONDS = 0.1  # deadlines are looked at so often: a signal handler, or another thread, may have set one

# What each command is answered by, the end of it last; or Failed.
_ANSWERS: dict[type[Command], tuple[type[Event], ...]] = {
    Load: (LoadProgress, Loaded),
    Generate: (Rendering, Rendered, ImageAccepted, Started, PrefillProgress, TextDelta, Finished),
    CountTokens: (Rendering, Rendered, TokenCount),
    Tokenize: (Tokenized,),
    MeasureSteps: (StepsMeasured,),
    Detokenize: (Detokenized,),
    Explain: (AnswerExplanation,),
    SaveState: (StateSaved,),
    GetStatus: (EngineStatus,),
    Job: (JobUpdate, JobDone),
}
_PHASES = {
    Rendering: "while rendering the chat template",
    Rendered: "while tokenizing the prompt",
    Started: "in prefill",
    TextDelta: "in decode",
}


Put = Callable[[Event | LlmrunError | None], None]
"""Takes what comes of a command, in the thread that reads; must not wait."""


_TOO_LARGE = "pre-allocated tensor (cache_"  # ggml aborts: a layer's keys are larger than the device's largest buffer


class PendingRequest:
    """A command on its way.

    Attributes:
        command: as it was sent.
        models: files that the engine reads for it.
        workers: RPC workers that the engine computes with.
        put: who is told its events, an error in place of the last one where it failed, and behind it None.
        phase: what the engine is doing with it, in words.
        events: that came and were not taken yet, where nobody else is told them; calls may have them together.
        ends_at: when the engine's time for it is over, by the monotonic clock; None is never.
        is_cancelled: it was asked to stop.
    """

    def __init__(
        self,
        command: Command,
        models: tuple[str, ...],
        seconds: float | None,
        put: Put | None = None,
        beside: PendingRequest | None = None,
        workers: tuple[str, ...] = (),
    ) -> None:
        self.command, self.models, self.workers = command, models, workers
        self.phase = _first_phase(command)
        self.events: SimpleQueue[Event | LlmrunError | None] = beside.events if beside else SimpleQueue()
        self.put = put or self.events.put
        self.ends_at = None if seconds is None else time.monotonic() + seconds
        self.is_cancelled = False
        self._seconds = seconds

    def take(self, event: Event) -> bool:
        """Take an event; whether it was the last.

        Raises:
            EngineExited: it is not an answer to the command.
        """
        answers = _ANSWERS[type(self.command)]
        if not isinstance(event, (*answers, Failed)):
            raise EngineExited(f"it answered {type(self.command).__name__} with {type(event).__name__}")
        self.phase = _PHASES.get(type(event), self.phase)
        if isinstance(event, Rendered) and any(message.pictures for message in self._asked.messages):
            self.phase = "while looking at a picture"  # which may be the reason
        if isinstance(event, (Rendering, Rendered)):
            if not self.is_cancelled:
                self.ends_at = self._rendering_ends() if isinstance(event, Rendering) else None
        else:
            self.put(event)
        return isinstance(event, (answers[-1], Failed))

    def _rendering_ends(self) -> float:
        return time.monotonic() + RENDER_SECONDS + rendering_share(self._asked.messages, self._asked.tools)

    @property
    def _asked(self) -> AnswerRequest:
        """What it asks for, if it asks for an answer."""
        return self.command.asked if isinstance(self.command, (Generate, CountTokens)) else AnswerRequest()

    def overdue(self) -> Event | LlmrunError:
        """What comes of it now that its time is over."""
        if self.is_cancelled and isinstance(self.command, Generate):
            return Finished(self.command.request, "cancelled", Stats())
        if self.is_cancelled:
            return CancelledError(f"cancelled {self.phase}")
        if isinstance(self.command, Job):
            return LlmrunError("llama.cpp does not answer", why=f"nothing came within {self._seconds:.0f} seconds")
        return BadTemplateError(
            f"the chat template takes longer than {RENDER_SECONDS:g} seconds",
            hint="another one goes with --template",
        )

    def fail(self, gone: EngineExited) -> None:
        """The engine is gone: the end of it."""
        self.put(self._crash(gone))
        self.put(None)

    def _crash(self, gone: EngineExited) -> LlmrunError:
        """What the engine's death means; where a file is known to kill engines, the error is about the file."""
        crash = EngineCrashedError(f"the engine died {self.phase}", why=gone.why, hint=gone.hint)
        if _TOO_LARGE in gone.why:
            full = OutOfMemoryError("the GPU can't allocate a KV cache this large in one piece", hint=ways_to_fit())
            full.__cause__ = crash
            return full
        if self.workers:
            from llmrun.runner.workers import missing

            lost = missing(self.workers)
            if lost is not None:
                worker, error = lost
                what = f"the worker {worker} was lost {self.phase}"
                return EngineCrashedError(what, why=error.why or error.what, hint=error.hint)
        if self.models:
            from llmrun.gguf.rules import cause_of_crash

            for path in self.models:
                reason = cause_of_crash(Path(path))
                if reason is not None:
                    reason.__cause__ = crash
                    return reason
        return crash


def _first_phase(command: Command) -> str:
    if isinstance(command, Load):
        return "while loading the model"
    if isinstance(command, Job):
        return f"in its job, {command.name}"
    return "while reading the prompt" if isinstance(command, (Generate, CountTokens)) else "while waiting"


class EngineRequests:
    """The calls of one engine.

    Attributes:
        pipe: to the engine.
        on_wait: called about ten times a second while nothing comes, by whoever pumps.
    """

    def __init__(self, launched: EngineHandle | None = None) -> None:
        self.pipe = Pipe(launched)
        self.on_wait: Callable[[], None] = lambda: None
        self._calls: dict[int, PendingRequest] = {}
        self._numbers = itertools.count(1)
        self._models: tuple[str, ...] = ()
        self._workers: tuple[str, ...] = ()
        self._was_overdue = False
        self._gone: EngineExited | None = None
        self._reading = threading.Lock()
        self._lock = threading.Lock()  # between a new call and the end of all

    def next_request(self) -> int:
        """A number for a command that has none yet."""
        return next(self._numbers)

    def submit(
        self,
        command: Command,
        *,
        models: tuple[str, ...] = (),
        seconds: float | None = None,
        put: Put | None = None,
        beside: PendingRequest | None = None,
    ) -> PendingRequest:
        """Send a command. The engine's death is told by the call's events.

        Args:
            models: files that the engine reads for it, where that is not the loaded model.
            seconds: after which it is given up.
            put: who is told its events; the call keeps them by default.
            beside: a call that keeps them with its own.

        Raises:
            UsageError: it is too long.
        """
        if isinstance(command, Load):
            self._models, self._workers = (command.path,), command.workers
        call = PendingRequest(command, models or self._models, seconds, put, beside, self._workers)
        with self._lock:
            gone = self._gone
            if gone is None:
                self._calls[command.request] = call
        if gone is not None:
            call.fail(gone)
        else:
            self._send(call)
        return call

    def _send(self, call: PendingRequest) -> None:
        try:
            self.pipe.send(call.command)
        except EngineExited:
            pass  # pump() will hear of it
        except UsageError:
            del self._calls[call.command.request]
            raise

    def open_ahead(self, path: str) -> None:
        """Let the engine begin to load weights; there is no answer."""
        with suppress(EngineExited):
            self.pipe.send(Open(path))

    def events(self, *calls: PendingRequest, pumps: bool) -> Iterator[Event]:
        """What comes of calls that keep it together, to their end. Whoever stops before cancels them.

        Args:
            pumps: nobody calls pump() but those who wait here.

        Raises:
            LlmrunError: one of them failed.
        """
        heard, n_open = calls[0].events, len(calls)
        try:
            while n_open:
                event = self._next(heard) if pumps else heard.get()
                if event is None:
                    n_open -= 1
                    continue
                if isinstance(event, LlmrunError):
                    raise event
                if isinstance(event, Failed):
                    raise self.error(calls[0].command, event)
                yield event
        finally:
            for call in calls:
                request = call.command.request
                if self._calls.get(request) is call:
                    self.cancel(request)
                    self._calls.pop(request, None)

    def _next(self, heard: SimpleQueue[Event | LlmrunError | None]) -> Event | LlmrunError | None:
        """What comes next. One thread reads for all; the others look now and then whether it still does."""
        while True:
            if self._reading.acquire(blocking=False):
                try:
                    while heard.empty():
                        self.pump()
                finally:
                    self._reading.release()
            with suppress(Empty):
                return heard.get(timeout=_TICK_SECONDS)

    def error(self, command: Command, failed: Failed) -> LlmrunError:
        """Why a command failed; what llama.cpp refuses to load or to do is explained by its log alone."""
        error = failed.error()
        return self.pipe.with_log(error) if isinstance(command, (Load, Job)) else error

    def pump(self, seconds: float = _TICK_SECONDS) -> bool:
        """Wait a moment for what the engine says, and give it to whom it belongs. Calls that take too long end.

        Gives whether the engine is still there.
        """
        try:
            self._end_overdue()
            came = False
            for event in self.pipe.receive(seconds):
                came = True
                call = self._calls.get(event.request)  # None: nobody wants it any more
                if call is not None and call.take(event):
                    self._end(call)
        except EngineExited as gone:
            self.end_all(gone)
            return False
        if not came:
            self.on_wait()
        return True

    def cancel(self, request: int) -> None:
        """Ask a call to stop: it ends soon, whatever the engine does. Safe in a signal handler."""
        call = self._calls.get(request)
        if call is not None and not call.is_cancelled:
            call.is_cancelled, call.ends_at = True, time.monotonic() + CANCEL_SECONDS
            with suppress(EngineExited):
                self.pipe.send(Cancel(request))

    def cancel_all(self) -> None:
        """Ask everything to stop. Safe in a signal handler."""
        for request in list(self._calls):
            self.cancel(request)

    def _end_overdue(self) -> None:
        """End the calls whose time is over, and the engine if it hangs.

        Raises:
            EngineExited: it does.
        """
        calls = list(self._calls.values())
        now = time.monotonic()
        overdue = [call for call in calls if call.ends_at is not None and now >= call.ends_at]
        # One more read is granted: we may have been asleep ourselves.
        if overdue and self._was_overdue:
            for call in overdue:
                call.put(call.overdue())
                self._end(call)
            # In a batch with others a cancel waits for the end of the step: that is not hanging.
            if len(overdue) == len(calls) or not all(call.is_cancelled for call in overdue):
                raise EngineExited(f"it hung {overdue[0].phase}")
        self._was_overdue = bool(overdue)

    def _end(self, call: PendingRequest) -> None:
        call.put(None)
        self._calls.pop(call.command.request, None)

    def end_all(self, gone: EngineExited) -> None:
        """End the engine and all calls."""
        with self._lock:
            if self._gone is None:
                self._gone = EngineExited(gone.why, gone.hint)  # without the frames that it came through
            calls, gone = list(self._calls.values()), self._gone
            self._calls.clear()
        self.pipe.kill()
        for call in calls:
            call.fail(gone)
