"""One request to an engine: its phase, its deadline, and the error for its failure.

Must not know other requests or the reading of the pipe (client.py).
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from llmrun.errors import BadTemplateError, CancelledError, EngineCrashedError, LlmrunError, OutOfMemoryError
from llmrun.protocol.codec import from_json
from llmrun.protocol.jobs import JobKind
from llmrun.protocol.loading import Load, Loaded, LoadProgress, ways_to_fit
from llmrun.protocol.messages import (
    AnswerRequest,
    Command,
    Event,
    Failed,
    Finished,
    Generate,
    Job,
    JobDone,
    JobUpdate,
    MediaAccepted,
    PrefillProgress,
    Rendered,
    Rendering,
    Started,
    Stats,
    TextDelta,
    rendering_share,
)
from llmrun.protocol.questions import QUESTIONS
from llmrun.runner.hang import SILENT_SECONDS, HangDetector
from llmrun.runner.pipe import EngineExited, Pipe
from llmrun.system import processor_seconds

RENDER_SECONDS = 3.0
"""Processor time for a chat template, besides a share for long conversations. The engine itself ends a rendering at
half of it, which it can't where C code does not return."""
CANCEL_SECONDS = 1.0
"""Time for a cancelled request to end; then its caller waits no longer, and the engine ends it when it can."""

# The events that answer each command, the last one at the end; or Failed.
_ANSWERS: dict[type[Command], tuple[type[Event], ...]] = {
    Load: (LoadProgress, Loaded),
    Generate: (Rendering, Rendered, MediaAccepted, Started, PrefillProgress, TextDelta, Finished),
    Job: (Rendering, Rendered, JobUpdate, JobDone),
}
_PHASES = {
    Rendering: "while rendering the chat template",
    Rendered: "while tokenizing the prompt",
    Started: "in prefill",
}
_Value = TypeVar("_Value")

Put = Callable[[Event | LlmrunError | None], None]
"""Receives the events of a request in the reading thread: an error instead of the last one if it failed, then None.

Must not block."""


_TOO_LARGE = "pre-allocated tensor (cache_"  # ggml aborts: a layer's keys are larger than the device's largest buffer


class PendingRequest:
    """A command sent to an engine and not answered yet.

    Args:
        pipe: to the engine.
        put: receives the events.
        models: files that the engine reads for it.
        workers: RPC workers that the engine computes with.
        seconds: processor time that the whole request may take.

    Attributes:
        ends_at: when the caller stops waiting, by the monotonic clock; None for never.
        hang: tells whether the engine hangs with this request; None where it may take as long as it likes.
        is_abandoned: its caller waits no longer, and the engine has not ended it yet.
    """

    def __init__(
        self,
        command: Command,
        pipe: Pipe,
        put: Put,
        *,
        models: tuple[str, ...] = (),
        workers: tuple[str, ...] = (),
        seconds: float | None = None,
    ) -> None:
        self.command, self.put = command, put
        self.is_cancelled = self.is_abandoned = False
        self.phase = _first_phase(command)  # in words, for errors
        self.ends_at: float | None = None
        self._pipe, self._models, self._workers = pipe, models, workers
        self._log_start = pipe.log_size
        self.hang = None if seconds is None else self._detector(seconds)

    def take(self, event: Event) -> bool:
        """Pass an event on; return whether it was the last.

        Raises:
            EngineExited: it does not answer the command.
        """
        if type(event) is TextDelta and type(self.command) is Generate:  # a shortcut for most events
            self.phase = "in decode"
            self.put(event)
            return False
        answers = _ANSWERS[type(self.command)]
        if not isinstance(event, (*answers, Failed)):
            raise EngineExited(f"it answered {type(self.command).__name__} with {type(event).__name__}")
        self.phase = _PHASES.get(type(event), self.phase)
        if isinstance(event, Rendered) and any(message.media for message in self._asked.messages):
            self.phase = "while encoding an image"  # a likely reason for a crash
        if isinstance(event, Rendering):
            share = rendering_share(self._asked.messages, self._asked.tools)
            self.hang = self._detector(RENDER_SECONDS + 2 * share, renders=True)
        elif isinstance(event, Rendered):
            self.hang = self._detector() if self.is_abandoned else None
        else:
            self.put(self._error(event) if isinstance(event, Failed) else event)
        return isinstance(event, (answers[-1], Failed))

    def _detector(self, seconds: float = math.inf, *, renders: bool = False) -> HangDetector:
        """Return what detects that the engine hangs, or takes more processor time than this.

        Args:
            renders: only the main thread's time counts, which renders; where it is unknown, that of all must be long.
        """
        if renders and sys.platform != "linux":
            seconds += SILENT_SECONDS
        return HangDetector(partial(processor_seconds, self._pipe.pid, is_main_thread=renders), seconds)

    @property
    def _asked(self) -> AnswerRequest:
        asked = self.command.asked if isinstance(self.command, Generate) else None
        asked = self.command.arguments if isinstance(self.command, Job) else asked
        return asked if isinstance(asked, AnswerRequest) else AnswerRequest()

    def _error(self, failed: Failed) -> LlmrunError:
        """Return the error; only llama.cpp's log explains why it refuses to load or to compute."""
        is_job = isinstance(self.command, Job) and self.command.name not in QUESTIONS
        error = failed.error()
        return self._pipe.with_log(error, self._log_start) if is_job or isinstance(self.command, Load) else error

    def cancel(self) -> bool:
        """Set the deadline of a cancelled request; return whether it was not cancelled before."""
        was_cancelled, self.is_cancelled = self.is_cancelled, True
        if not was_cancelled:
            self.ends_at = time.monotonic() + CANCEL_SECONDS
        return not was_cancelled

    def put_cancelled(self) -> None:
        """Pass on the end of a cancelled request that the engine has not ended in time."""
        if isinstance(self.command, Generate):
            self.put(Finished(self.command.request, "cancelled", Stats()))
        else:
            self.put(CancelledError(f"cancelled {self.phase}"))
        self.put(None)

    def abandon(self) -> None:
        """Drop further events: the caller has left. The engine may be busy with the request for long, or hang."""
        self.put = lambda event: None
        self.ends_at, self.is_abandoned = None, True
        self.hang = self.hang or self._detector()

    def hung(self, why: str) -> LlmrunError:
        """Return the error for a request with which the engine hangs."""
        if self.phase == _PHASES[Rendering]:
            return BadTemplateError(
                "the chat template does not end", why=why, hint="choose another one with --template"
            )
        return LlmrunError("llama.cpp does not answer", why=why)

    def fail(self, exited: EngineExited) -> None:
        """Pass on the end of the engine."""
        self.put(self._crash(exited))
        self.put(None)

    def _crash(self, exited: EngineExited) -> LlmrunError:
        """Return the error for the engine's death, which is about the file if that is known to kill engines."""
        crash = EngineCrashedError(f"the engine died {self.phase}", why=exited.why, hint=exited.hint)
        if _TOO_LARGE in exited.why:
            full = OutOfMemoryError("the GPU can't allocate a KV cache this large in one piece", hint=ways_to_fit())
            full.__cause__ = crash
            return full
        if self._workers:
            from llmrun.runner.workers import missing

            lost = missing(self._workers)
            if lost is not None:
                worker, error = lost
                what = f"the worker {worker} was lost {self.phase}"
                return EngineCrashedError(what, why=error.why or error.what, hint=error.hint)
        if self._models:
            from llmrun.gguf.rules import cause_of_crash

            for path in self._models:
                reason = cause_of_crash(Path(path))
                if reason is not None:
                    reason.__cause__ = crash
                    return reason
        return crash


def _first_phase(command: Command) -> str:
    if isinstance(command, Load):
        return "while loading the model"
    return f"in its job, {command.name}" if isinstance(command, Job) else "while reading the prompt"


def read_job(kind: JobKind[Any, Any, Any], part: type[_Value], data: object) -> _Value:
    """Return an update or the result of a job from its JSON data; a compromised engine may send anything.

    Raises:
        EngineCrashedError: the data are of something else.
    """
    try:
        return from_json(part, data)
    except (TypeError, ValueError, LlmrunError) as error:
        why = f"it sent garbage ({error})"
        raise EngineCrashedError(f"the engine died in its job, {kind.name}", why=why) from error
