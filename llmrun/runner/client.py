"""The client of one engine process: commands from any thread, and the events of each for its own caller.

Together with requests.py, pipe.py and launch.py, the only part of the front that knows the engine process. Events come
in three ways: an iterator reads the pipe in its caller's thread, and needs no other; a callback is called by a reading
thread, which the first callback starts; or an event loop calls whenever the pipe is readable (server/connection.py).
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from llmrun.errors import LlmrunError, UsageError
from llmrun.protocol.jobs import JobKind
from llmrun.protocol.loading import Load, Loaded, LoadProgress
from llmrun.protocol.messages import Cancel, Command, Event, Job, JobDone, JobUpdate
from llmrun.runner.launch import EngineHandle, take_prestarted
from llmrun.runner.pipe import EngineExited, Pipe, Run
from llmrun.runner.requests import PendingRequest, Put, read_job

_TICK_SECONDS = 0.1  # between two checks of the deadlines: a signal handler or another thread may have set one
_Command = TypeVar("_Command")
_Update = TypeVar("_Update")
_Result = TypeVar("_Result")
_EventQueue = SimpleQueue[Event | LlmrunError | None]


class EngineClient:
    """One engine process, with at most one model in it. The process ends with the last reference to the client.

    Args:
        launched: a process started by launch.launch(); by default, a new one.

    Attributes:
        next_request: returns a number for a command.
    """

    def __init__(self, launched: EngineHandle | None = None) -> None:
        self._pipe = Pipe(launched)
        self.next_request = itertools.count(1).__next__
        self._requests: dict[int, PendingRequest] = {}
        self._load: Load | None = None
        self._exited: EngineExited | None = None
        self._reader: threading.Thread | None = None
        self._reading = threading.RLock()
        self._lock = threading.Lock()  # between a new request and the end of all

    @property
    def alive(self) -> bool:
        """Whether the engine can take another command."""
        return self._pipe.alive

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._pipe.pid

    # ---- the two ways to hear events ------------------------------------------------------------------

    def submit(
        self,
        *commands: Command,
        models: tuple[str, ...] = (),
        seconds: float | None = None,
        on_wait: Callable[[], None] = lambda: None,
    ) -> Iterator[Event]:
        """Send commands; return an iterator over the events of all, to their ends. Closing it cancels them.

        Several iterators may be open at the same time, in one thread or in many: each also reads for the others.

        Args:
            commands: each with a number of next_request(); a Load's is 0.
            models: files that the engine reads for the commands, if not the loaded model.
            seconds: processor time that each may take; see HangDetector.
            on_wait: called about ten times a second while nothing comes.

        Raises:
            UsageError: a command is too long.
            LlmrunError: from the iterator, the failure of a command; EngineCrashedError if the engine died.
        """
        events: _EventQueue = SimpleQueue()
        pending = [self._send(command, events.put, models, seconds) for command in commands]
        return self._events(pending, events, on_wait)

    @property
    def descriptor(self) -> int:
        """The file descriptor that is readable when events come, for an event loop that calls read_ready()."""
        return self._pipe.descriptor

    def read_ready(self, *, is_tick: bool = False) -> bool:
        """Pass on the events that have come, and end overdue requests; return whether the engine is still there.

        To be called when the descriptor is readable, and every tenth of a second with `is_tick`.
        """
        with self._reading:
            self._pump(seconds=0, checks_deadlines=is_tick)
        return self._exited is None

    def listen(self, command: Command, put: Put, run: Run | None = None) -> None:
        """Send a command; a reading thread passes its events to `put`.

        Args:
            run: for an event loop that calls read_ready() instead, see Pipe.send().

        Raises:
            UsageError: the command is too long.
        """
        with self._lock:
            if self._reader is None and run is None:
                # The thread has no reference to the client between two reads, which would keep the engine alive.
                self._reader = threading.Thread(
                    target=_read, args=(weakref.ref(self),), name="engine reader", daemon=True
                )
                self._reader.start()
        self._send(command, put, run=run)

    def cancel(self, request: int | None = None, run: Run | None = None) -> None:
        """Ask a request to stop, or all of them: it ends soon for its caller, whatever the engine does, and the engine
        lives on. Safe in a signal handler.

        Args:
            run: see Pipe.send().
        """
        for number in list(self._requests) if request is None else [request]:
            pending = self._requests.get(number)
            if pending is not None and pending.cancel():
                with suppress(EngineExited):
                    self._pipe.send(Cancel(number), run)

    def end_requests(self) -> None:
        """End all requests, now and later ones, with the error that the engine was closed; close() then ends it."""
        self._end_all(EngineExited("it was closed"), kills=False)

    def close(self) -> None:
        """End the engine and all requests. May be called at any time, and again."""
        self._end_all(EngineExited("it was closed"))
        if self._reader is not None and self._reader is not threading.current_thread():
            self._reader.join()
        with self._reading:
            self._pipe.close()

    # ---- questions and answers ------------------------------------------------------------------------

    def load(self, load: Load, on_progress: Callable[[float], None] = lambda fraction: None) -> Loaded:
        """Load a model. Any exception ends the engine, Ctrl-C too.

        Raises:
            BadModelError: llama.cpp refuses the model, or it killed the engine.
            EngineCrashedError: the engine died for another reason.
        """
        with self._closing_on_error():
            for event in self.submit(load):
                if isinstance(event, LoadProgress):
                    on_progress(event.fraction)
                elif isinstance(event, Loaded):
                    return event
        raise AssertionError("the events ended without a result")

    def do(
        self,
        kind: JobKind[_Command, _Update, _Result],
        command: _Command,
        on_update: Callable[[_Update], None] = lambda update: None,
        *,
        seconds: float | None = None,
    ) -> _Result:
        """Run a job, and return its result. Any exception, Ctrl-C too, ends the engine unless the job needs its model.

        Raises:
            LlmrunError: as the job says.
            BadModelError: a model's file killed the engine.
            EngineCrashedError: the engine died for another reason.
        """
        job = Job(self.next_request(), kind.name, command)
        with nullcontext() if kind.needs_model else self._closing_on_error():
            for event in self.submit(job, models=kind.models(command), seconds=seconds):
                if isinstance(event, JobUpdate):
                    on_update(read_job(kind, kind.update, event.data))
                elif isinstance(event, JobDone):
                    return read_job(kind, kind.result, event.result)
        raise AssertionError("the events ended without a result")

    def begin(self, kind: JobKind[_Command, Any, _Result], command: _Command) -> Callable[[], _Result | None]:
        """Start a job in the background; return a function that returns the result if that has come by then."""
        events: _EventQueue = SimpleQueue()
        self._send(Job(self.next_request(), kind.name, command), events.put)

        def result() -> _Result | None:
            if self._reading.acquire(blocking=False):
                try:
                    self._pump(seconds=0)
                finally:
                    self._reading.release()
            event = None if events.empty() else events.get()
            return read_job(kind, kind.result, event.result) if isinstance(event, JobDone) else None

        return result

    @contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise

    # ---- the core -------------------------------------------------------------------------------------

    def _send(
        self,
        command: Command,
        put: Put,
        models: tuple[str, ...] = (),
        seconds: float | None = None,
        run: Run | None = None,
    ) -> PendingRequest:
        if isinstance(command, Load):
            self._load = command
        if self._load is not None:
            models = models or (self._load.path,)
        workers = self._load.workers if self._load is not None else ()
        request = PendingRequest(command, self._pipe, put, models=models, workers=workers, seconds=seconds)
        with self._lock:
            exited = self._exited
            if exited is None:
                self._requests[command.request] = request
        if exited is not None:
            request.fail(exited)
            return request
        try:
            self._pipe.send(command, run)
        except EngineExited:
            pass  # the next read reports it
        except UsageError:
            del self._requests[command.request]
            raise
        return request

    def _events(
        self, pending: list[PendingRequest], events: _EventQueue, on_wait: Callable[[], None]
    ) -> Iterator[Event]:
        n_open = len(pending)
        try:
            while n_open:
                event = self._next(events, on_wait)
                if event is None:
                    n_open -= 1
                elif isinstance(event, LlmrunError):
                    raise event
                else:
                    yield event
        finally:
            for request in pending:
                if self._requests.get(request.command.request) is request:
                    self.cancel(request.command.request)
                    request.abandon()
            if not self.alive:
                self.close()

    def _next(self, events: _EventQueue, on_wait: Callable[[], None]) -> Event | LlmrunError | None:
        """Return the next event. One thread reads for all; the others check now and then whether it still does."""
        while True:
            if self._reading.acquire(blocking=False):
                try:
                    while events.empty():
                        if not self._pump():
                            on_wait()
                finally:
                    self._reading.release()
            try:
                return events.get(timeout=_TICK_SECONDS)
            except Empty:
                on_wait()

    def read(self) -> bool:
        """Read for the callbacks during one tick; return whether the engine is still there."""
        try:
            with self._reading:
                self._pump()
        except BaseException:
            self._end_all(EngineExited("its reader failed"))  # or the callbacks would wait forever
            raise
        return self._exited is None

    def _pump(self, seconds: float = _TICK_SECONDS, *, checks_deadlines: bool = True) -> bool:
        """End overdue requests, and pass on the events that come within some seconds; return whether any came."""
        has_come = False
        try:
            if checks_deadlines:
                self._end_overdue()
            for event in self._pipe.receive(seconds):
                has_come = True
                request = self._requests.get(event.request)  # None: its iterator was closed
                if request is not None and request.take(event):
                    self._end(request)
        except EngineExited as exited:
            self._end_all(exited)
        return has_come

    def _end_overdue(self) -> None:
        """End cancelled requests for their callers, and requests with which the engine hangs.

        Raises:
            EngineExited: the engine hangs.
        """
        now = time.monotonic()
        for request in list(self._requests.values()):
            if request.ends_at is not None and now >= request.ends_at:
                request.put_cancelled()
                request.abandon()
            if request.hang is not None and (why := request.hang.look()):
                request.put(request.hung(why))
                self._end(request)
                whose = " with another request" if self._requests else ""
                raise EngineExited(f"it hung{whose} {request.phase}")

    def _end(self, request: PendingRequest) -> None:
        request.put(None)
        self._requests.pop(request.command.request, None)

    def _end_all(self, exited: EngineExited, *, kills: bool = True) -> None:
        """Kill the engine, and pass its end on to all requests; later ones get the same reason."""
        with self._lock:
            if self._exited is None:
                self._exited = EngineExited(exited.why, exited.hint)  # without a traceback, whose frames hold objects
            requests, exited = list(self._requests.values()), self._exited
            self._requests.clear()
        if kills:
            self._pipe.kill()
        for request in requests:
            request.fail(exited)


def _read(reference: weakref.ref[EngineClient]) -> None:
    """Read in a thread of its own until the engine or the client is gone."""
    while (client := reference()) is not None and client.read():
        del client


@functools.cache
def prestarted() -> EngineClient:
    """Return the client of the prestarted engine, else of a new one; the same at every call."""
    return EngineClient(take_prestarted())
