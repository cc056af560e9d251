"""The front's end of the pipe: start the engine process, send, receive, and turn its death into an error.

With launch.py, the only front file that knows there is an engine.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from llmrun.errors import (
    BadTemplateError,
    CancelledError,
    EngineCrashedError,
    LlmrunError,
    OutOfMemoryError,
    UsageError,
)
from llmrun.protocol.codec import as_dict, from_json
from llmrun.protocol.frames import PREFIX_BYTES, FrameError, decode, encode, frame_length
from llmrun.protocol.jobs import JobKind
from llmrun.protocol.messages import (
    Cancel,
    Command,
    Count,
    Counted,
    Event,
    Explain,
    Explained,
    Failed,
    Finished,
    Frame,
    Generate,
    Job,
    JobDone,
    JobUpdate,
    Load,
    Loaded,
    LoadProgress,
    Open,
    Rendered,
    Rendering,
    SaveState,
    Started,
    StateSaved,
    Stats,
    TextDelta,
    rendering_share,
)
from llmrun.runner.launch import Launched, launch, take_prestarted

_Answer = TypeVar("_Answer", Explained, StateSaved, Counted)
_Command = TypeVar("_Command")
_Update = TypeVar("_Update")
_Result = TypeVar("_Result")

RENDER_SECONDS = 2.0
"""A chat template that takes longer is hostile: real ones take milliseconds."""
CANCEL_SECONDS = 1.0
"""An engine that does not stop within this is ended."""
_DEATH_SECONDS = 0.5
_LOG_TAIL_BYTES = 64 * 1024
_USUAL = "AMX is not ready"  # see backend/llama.py
_TELLING = ("GGML_ASSERT", "rror", "failed", "terminate")  # in the log lines that say why


class Runner:
    """One engine process, with at most one model in it.

    Args:
        launched: a process that launch.launch() made; one is started by default.
    """

    def __init__(self, launched: Launched | None = None) -> None:
        self._process, self._log = launched or launch()
        self._numbers = itertools.count(1)
        self._phase = "at its start"
        self._buffer = bytearray()
        self._cancelled_at: float | None = None
        self._overdue = False
        self._sending = False
        self._next_command: Command | None = None
        self._poll = select.poll()
        assert self._process.stdout is not None
        self._poll.register(self._process.stdout, select.POLLIN)
        atexit.register(self.close)

    @property
    def alive(self) -> bool:
        """Whether the engine can take another command."""
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        """The engine's process id."""
        return self._process.pid

    def next_request(self) -> int:
        """A number for a command that has none yet."""
        return next(self._numbers)

    def open_ahead(self, path: str) -> None:
        """Let the engine begin to load weights that load() will probably ask for; nothing happens if it can't."""
        with contextlib.suppress(EngineCrashedError):
            self._send(Open(path))

    def load(self, load: Load, on_progress: Callable[[float], None] = lambda fraction: None) -> Loaded:
        """Load a model.

        Raises:
            BadModelError: llama.cpp refuses it.
            EngineCrashedError: it killed the engine.
        """
        self._phase = "while loading the model"
        self._send(load)
        while True:
            event = self._receive(None)
            if event is None:
                self.close()
                raise CancelledError("loading was cancelled")
            if isinstance(event, LoadProgress):
                on_progress(event.fraction)
            elif isinstance(event, Failed):
                self.close()
                raise self._with_log(event.error())
            elif isinstance(event, Loaded):
                self._phase = "while waiting"
                return event

    def generate(self, generate: Generate) -> Iterator[Event]:
        """Answer one request: Started, then PrefillProgress and TextDelta, at last Finished.

        Raises:
            BadTemplateError: the chat template fails or takes too long.
            EngineCrashedError: the engine died; load() again in a new Runner.
        """
        self._cancelled_at, self._overdue = None, False
        self._phase = "while rendering the chat template"
        self._send(generate)
        rendering_ends: float | None = None
        while True:
            event = self._receive(rendering_ends)
            if event is None and self._cancelled_at is not None:
                self.close()
                yield Finished(generate.request, "cancelled", Stats())
                return
            if event is None:
                raise self._endless_template()
            if event.request != generate.request:
                continue  # of an answer that nobody read to its end
            if isinstance(event, Rendering):
                rendering_ends = time.monotonic() + RENDER_SECONDS + rendering_share(generate.asked.messages)
                continue
            if isinstance(event, Rendered):
                rendering_ends = None
                continue
            if isinstance(event, Failed):
                self._phase = "while waiting"
                raise event.error()
            if isinstance(event, Started):
                self._phase, rendering_ends = "in prefill", None
            elif isinstance(event, TextDelta):
                self._phase = "in decode"
            try:
                yield event
            except GeneratorExit:
                if not isinstance(event, Finished):
                    self.cancel(generate.request)
                raise
            if isinstance(event, Finished):
                self._phase = "while waiting"
                return

    def do(
        self,
        kind: JobKind[_Command, _Update, _Result],
        command: _Command,
        on_update: Callable[[_Update], None] = lambda update: None,
    ) -> _Result:
        """Have the engine do a job, and wait for it. Whatever is raised here meanwhile, Ctrl-C too, ends the engine.

        Raises:
            LlmrunError: as the job says.
            EngineCrashedError: the engine died.
        """
        self._cancelled_at = None
        self._phase = f"in its job, {kind.name}"
        try:
            self._send(Job(self.next_request(), kind.name, as_dict(command)))
            while True:
                event = self._receive(None)
                if isinstance(event, JobUpdate):
                    on_update(from_json(kind.update, event.data))
                elif isinstance(event, Failed):
                    raise self._with_log(event.error())
                elif isinstance(event, JobDone):
                    self._phase = "while waiting"
                    return from_json(kind.result, event.result)
        except BaseException:
            self.close()
            raise

    def explain(self, explain: Explain) -> Explained:
        """How the last tokens of an answer were chosen.

        Raises:
            LlmrunError: the engine does not remember that answer.
            EngineCrashedError: the engine died.
        """
        return self._ask(explain, Explained)

    def count(self, count: Count) -> Counted:
        """How many tokens a conversation has.

        Raises:
            BadTemplateError: the model has no chat template, or it fails.
            EngineCrashedError: the engine died.
        """
        return self._ask(count, Counted)

    def save_state(self, save: SaveState) -> StateSaved:
        """Save the KV state of an answer.

        Raises:
            LlmrunError: it can't be saved.
            EngineCrashedError: the engine died.
        """
        return self._ask(save, StateSaved)

    def _ask(self, question: Explain | SaveState | Count, kind: type[_Answer]) -> _Answer:
        """Send a command and wait for what answers it; events of an answer that nobody read are passed over."""
        self._cancelled_at = None
        self._send(question)
        deadline: float | None = None
        while True:
            event = self._receive(deadline)
            if event is None:
                raise self._endless_template()
            if event.request != question.request:
                continue
            if isinstance(event, Rendering) and isinstance(question, Count):
                deadline = time.monotonic() + RENDER_SECONDS + rendering_share(question.asked.messages)
            elif isinstance(event, Rendered):
                deadline = None
            if isinstance(event, kind):
                return event
            if isinstance(event, Failed):
                raise event.error()

    def _endless_template(self) -> BadTemplateError:
        """End the engine, which renders a hostile template; the error that says so."""
        self.close()
        return BadTemplateError(
            f"the chat template takes longer than {RENDER_SECONDS:g} seconds",
            hint="another one goes with --template",
        )

    def cancel(self, request: int) -> None:
        """Ask a request to stop: generate() ends soon, whatever the engine does. Safe in a signal handler."""
        if self._cancelled_at is None:
            self._cancelled_at = time.monotonic()
            if self._sending:  # interrupted by the signal whose handler we are in
                self._next_command = Cancel(request)
                return
            with contextlib.suppress(EngineCrashedError):
                self._send(Cancel(request))

    def close(self) -> None:
        """End the engine. May be called at any time, and again."""
        atexit.unregister(self.close)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _send(self, command: Command) -> None:
        self._sending = True
        try:
            self._write(encode(command))
        except FrameError as error:
            raise UsageError("the conversation is too long to be sent to the engine", why=str(error)) from None
        finally:
            self._sending = False
        if self._next_command is not None:
            command, self._next_command = self._next_command, None
            self._send(command)

    def _write(self, frame: bytes) -> None:
        data = memoryview(frame)
        pipe = self._process.stdin
        assert pipe is not None
        try:
            while data:
                data = data[os.write(pipe.fileno(), data) :]
        except (OSError, ValueError) as error:
            raise self._death() from error

    def _receive(self, deadline: float | None) -> Event | None:
        """The next event; None when the deadline, or the patience after a cancel, is over."""
        while (frame := self._buffered()) is None:
            if self._cancelled_at is not None:
                deadline = self._cancelled_at + CANCEL_SECONDS
            if not self._fill(deadline):
                return None
        if isinstance(frame, Command):
            raise self._death(why="it sent a command instead of an event")
        return frame

    def _buffered(self) -> Frame | None:
        try:
            length = frame_length(self._buffer)
            if length is None or len(self._buffer) < length:
                return None
            body = bytes(self._buffer[PREFIX_BYTES:length])
            del self._buffer[:length]
            return decode(body)
        except FrameError as error:
            raise self._death(why=f"it sent garbage ({error})") from error

    def _fill(self, deadline: float | None) -> bool:
        """Wait for more bytes; False when the deadline passed first."""
        pipe = self._process.stdout
        assert pipe is not None
        # One read past the deadline is granted: we may have been asleep ourselves.
        overdue = deadline is not None and time.monotonic() >= deadline
        if overdue and self._overdue:
            return False
        self._overdue = overdue
        # Wake up now and then: a signal handler may have set a deadline meanwhile.
        wait = 0.1 if deadline is None else min(0.1, max(0.0, deadline - time.monotonic()))
        if not self._poll.poll(wait * 1000):
            return deadline is None or time.monotonic() < deadline
        data = os.read(pipe.fileno(), 1 << 16)
        if not data:
            raise self._death()
        self._buffer += data
        return True

    def _death(self, why: str = "") -> EngineCrashedError:
        """The engine is gone, or has to go: what phase died, of what, and llama.cpp's last words."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_DEATH_SECONDS)
        status = self._process.poll()
        self.close()
        causes = [why or _cause(status), self._last_words()]
        return EngineCrashedError(
            f"the engine died {self._phase}",
            why="; ".join(cause for cause in causes if cause),
            hint=_HINTS.get(-(status or 0), ""),
        )

    def _with_log(self, error: LlmrunError) -> LlmrunError:
        """An error of llama.cpp's whose reason stands only in its log."""
        if error.why:
            return error
        words = self._last_words()
        kind = OutOfMemoryError if "failed to allocate" in words else type(error)
        return kind(error.what, why=words, hint=error.hint)

    def _last_words(self) -> str:
        """The line of llama.cpp's log that best says why it failed."""
        if self._log is None:
            return ""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _LOG_TAIL_BYTES))
        text = self._log.read().decode("utf-8", "replace")
        lines = [line.strip() for line in text.splitlines() if line.strip() and _USUAL not in line]
        telling = [line for line in lines if any(word in line for word in _TELLING)]
        return (telling or lines or [""])[-1][:500]


_HINTS: dict[int, str] = {
    signal.SIGKILL: "the system may have run out of memory: try a smaller --ctx or a smaller quant",
    signal.SIGILL: "llama.cpp was built for another processor: pip install --force-reinstall --no-cache-dir llmrun",
}


def _cause(status: int | None) -> str:
    if status is None:
        return "it hangs"
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-status).name}"
        return f"killed by signal {-status}"
    return f"it ended with status {status}"


@functools.cache
def prestarted() -> Runner:
    """The runner of the prestarted engine if there is one, else of a new one; the same at every call."""
    return Runner(take_prestarted())
