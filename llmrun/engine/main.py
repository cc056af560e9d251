"""The engine process: commands in on stdin, events out on what was stdout.

Owns the process (signals, limits, descriptors, threads) and the order of things; must not know terminals or files
other than the model. One thread reads the pipe, one owns the llama context. The front's death ends the process, even
in the middle of a computation; SIGINT is the front's business.
"""

from __future__ import annotations

import gc
import importlib
import math
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, BinaryIO

from llmrun import _native
from llmrun.engine.llama.submodules import import_submodule
from llmrun.errors import LlmrunError
from llmrun.protocol.frames import encode, read_frame
from llmrun.protocol.jobs import JobKind, from_json
from llmrun.protocol.messages import (
    Cancel,
    Command,
    Count,
    Event,
    Explain,
    Failed,
    Frame,
    Generate,
    Job,
    JobDone,
    JobUpdate,
    Load,
    Loaded,
    LoadProgress,
    Open,
    TextDelta,
    as_dict,
)

if TYPE_CHECKING:
    from llmrun.engine.llama.model import LlamaModel
    from llmrun.engine.service import LoadedModel

_PROGRESS_INTERVAL = 0.1  # seconds between two LoadProgress
_HOMES = {"limits": "machine.roofline"}  # where a job is done whose name is not its module's
_TEXT_INTERVAL = 0.05  # seconds between two TextDelta of an answer


class Channel:
    """The pipe to the front. Sending is safe from any thread."""

    def __init__(self, commands: BinaryIO, events: BinaryIO) -> None:
        self._commands = commands
        self._events = events
        self._lock = threading.Lock()

    def receive(self) -> Frame | None:
        """The next frame; None when the front is gone."""
        return read_frame(self._commands.read)

    def send(self, event: Event) -> None:
        """Give an event to the front; without a front there is nothing left to do."""
        data = encode(event)
        try:
            with self._lock:
                self._events.write(data)
                self._events.flush()
        except OSError:
            os._exit(0)


class Outbox:
    """Sends events on, the text of fast models a few tokens at a time.

    Every frame wakes the front up, on a core that computes the next token: at hundreds of tokens/s that costs decode
    several percent, and nobody reads that fast. Text waits for _TEXT_INTERVAL at most, or for the next token if that
    takes longer.
    """

    def __init__(self, send: Callable[[Event], None], clock: Callable[[], float] = time.perf_counter) -> None:
        self._send = send
        self._clock = clock
        self._waiting: dict[int, TextDelta] = {}
        self._sent_at = -math.inf

    def add(self, event: Event) -> None:
        """Send an event now, or with the next ones."""
        if not isinstance(event, TextDelta):
            self._flush()
            self._send(event)
            return
        before = self._waiting.get(event.request)
        if before is not None:
            event = TextDelta(event.request, before.text + event.text, before.tokens + event.tokens)
        self._waiting[event.request] = event
        if self._clock() - self._sent_at >= _TEXT_INTERVAL:
            self._flush()

    def _flush(self) -> None:
        for event in self._waiting.values():
            self._send(event)
        self._waiting.clear()
        self._sent_at = self._clock()


class EngineProcess:
    """Takes commands in turn; see messages for what answers what."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._outbox = Outbox(channel.send)
        self._flag = _native.CancelFlag()
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._weights: LlamaModel | None = None
        self._model: LoadedModel | None = None

    def run(self) -> None:
        """Serve until the front is gone."""
        threading.Thread(target=self._read, daemon=True).start()
        _import_llama_ahead()
        while True:
            while self._model is None or not self._model.engine.busy or not self._inbox.empty():
                self._handle(self._inbox.get())
            for event in self._model.engine.step():
                self._outbox.add(event)

    def _read(self) -> None:
        """Own thread: commands into the inbox, and a cancel at once into the running computation."""
        while True:
            frame = self._channel.receive()
            if frame is None:
                os._exit(0)
            if isinstance(frame, Cancel):
                self._flag.set()  # before the main thread can take the command, which clears the flag
            if isinstance(frame, Command):
                self._inbox.put(frame)
            if isinstance(frame, Open | Load):
                _import_ahead()

    def _handle(self, command: Command) -> None:
        try:
            if isinstance(command, Open):
                self._open(command)
            elif isinstance(command, Load):
                self._load(command)
            elif isinstance(command, Cancel):
                self._cancel(command)
            elif isinstance(command, Job):
                self._channel.send(JobDone(command.request, self._do(command)))
            elif self._model is None:
                raise LlmrunError("a request came before a model")
            elif isinstance(command, Generate):
                self._model.generate(command, self._channel.send)
            elif isinstance(command, Count):
                self._channel.send(self._model.count(command, self._channel.send))
            elif isinstance(command, Explain):
                explained = self._model.engine.explain(command.answer, command.last, command.candidates)
                self._channel.send(replace(explained, request=command.request))
            else:
                self._channel.send(self._model.save(command))
        except LlmrunError as error:
            self._channel.send(Failed.of(error, command.request))

    def _open(self, guess: Open) -> None:
        from llmrun.engine.llama.model import LlamaModel

        with suppress(LlmrunError), self._reporting_progress(guess.request):  # Load will say what is wrong
            self._weights = LlamaModel(guess.path, guess.gpu_layers, self._flag)

    def _load(self, load: Load) -> None:
        from llmrun.engine.llama.context import LlamaContext
        from llmrun.engine.llama.library import devices
        from llmrun.engine.llama.model import LlamaModel

        began = time.perf_counter()
        weights, self._weights = self._weights, None
        if weights is not None and not weights.is_for(load):
            weights.close()
            weights = None
        if weights is None:
            with self._reporting_progress(load.request):
                weights = LlamaModel(
                    load.path,
                    load.gpu_layers,
                    self._flag,
                    verbose=load.verbose,
                    repack=load.repack,
                    mmap=load.mmap,
                )
        from llmrun.engine.service import LoadedModel

        context = LlamaContext(weights, load)
        self._model = LoadedModel(weights, context, load)
        gc.freeze()  # whatever is there now stays; launch.py begins without collection to start sooner
        gc.enable()
        self._channel.send(
            Loaded(
                n_ctx=context.n_ctx,
                n_ctx_train=weights.n_ctx_train,
                n_vocab=weights.vocabulary.n_tokens,
                description=weights.description,
                has_template=weights.chat_template is not None,
                devices=devices(),
                load_seconds=time.perf_counter() - began,
                thinking_tags=self._model.thinking_tags or (),
                request=load.request,
            )
        )

    def _do(self, job: Job) -> dict[str, Any]:
        kind: JobKind[Any, Any, Any] = getattr(
            importlib.import_module(f"llmrun.protocol.jobs.{job.name}"), job.name.upper()
        )
        run = importlib.import_module(f"llmrun.engine.jobs.{_HOMES.get(job.name, f'{job.name}.{job.name}')}").run
        command = from_json(kind.command, job.arguments)
        gc.enable()  # launch.py begins without collection to start sooner

        def report(update: Any) -> None:
            self._channel.send(JobUpdate(job.request, as_dict(update)))

        return as_dict(run(command, report, self._flag))

    def _cancel(self, cancel: Cancel) -> None:
        # The flag may have stopped a batch in which other requests took part: they try again.
        self._flag.clear()
        if self._model is not None:
            self._model.engine.cancel(cancel.request)

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


def _import_ahead() -> None:
    """Import what the first request needs while llama.cpp loads the weights without Python's lock."""
    for name in ("ext", "sandbox"):
        import_submodule("jinja2", name)
    for name in ("prompt.template", "service"):
        importlib.import_module(f"llmrun.engine.{name}")


def _import_llama_ahead() -> None:
    """Load llama.cpp's libraries while the front still makes its plan; if they are missing, Load will say so."""
    with suppress(LlmrunError):
        from llmrun.engine.llama.library import import_llama

        import_llama()


def _private_channel() -> Channel:
    """The pipe's ends under our own descriptors: what prints to stdout from now on goes to stderr."""
    events = os.dup(1)
    os.dup2(2, 1)
    return Channel(os.fdopen(0, "rb", closefd=False), os.fdopen(events, "wb"))


def set_environment() -> None:
    """What the libraries read when they are loaded."""
    os.environ["GGML_NO_BACKTRACE"] = "1"  # ggml would start a debugger on itself when it aborts
    # libgomp's threads wait for each other by spinning, for milliseconds by default: when another program wants a core,
    # they take its turns and their own away. Spinning for microseconds is as fast alone, and several times faster then.
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "2000"


def _no_core_dumps() -> None:
    try:
        import resource
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    """Entry of the engine process; returns never."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_environment()
    _no_core_dumps()
    _native.exit_when_closed(0)
    EngineProcess(_private_channel()).run()


if __name__ == "__main__":
    main()
