"""One request to an engine: its phase, its deadline, and the error for its failure.

Must not know other requests or the reading of the pipe (client.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
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
from llmrun.protocol.speculation import StepsMeasured
from llmrun.runner.pipe import EngineExited, Pipe

RENDER_SECONDS = 2.0
"""Time limit of a chat template, besides its share for long conversations: real ones take milliseconds."""
CANCEL_SECONDS = 1.0
"""Time limit for a cancelled request to end; then the engine is killed."""

# The events that answer each command, the last one at the end; or Failed.
_ANSWERS: dict[type[Command], tuple[type[Event], ...]] = {
    Load: (LoadProgress, Loaded),
    Generate: (Rendering, Rendered, MediaAccepted, Started, PrefillProgress, TextDelta, StepsMeasured, Finished),
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
        seconds: time limit of the whole request.

    Attributes:
        ends_at: the deadline, by the monotonic clock; None for none.
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
        self.is_cancelled = False
        self.phase = _first_phase(command)  # in words, for errors
        self.ends_at = None if seconds is None else time.monotonic() + seconds
        self._pipe, self._models, self._workers, self._seconds = pipe, models, workers, seconds

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
        if isinstance(event, (Rendering, Rendered)):
            if not self.is_cancelled:
                self.ends_at = None
                if isinstance(event, Rendering):
                    share = rendering_share(self._asked.messages, self._asked.tools)
                    self.ends_at = time.monotonic() + RENDER_SECONDS + share
        else:
            self.put(self._error(event) if isinstance(event, Failed) else event)
        return isinstance(event, (answers[-1], Failed))

    @property
    def _asked(self) -> AnswerRequest:
        asked = self.command.asked if isinstance(self.command, Generate) else None
        asked = self.command.arguments if isinstance(self.command, Job) else asked
        return asked if isinstance(asked, AnswerRequest) else AnswerRequest()

    def _error(self, failed: Failed) -> LlmrunError:
        """Return the error; only llama.cpp's log explains why it refuses to load or to compute."""
        is_job = isinstance(self.command, Job) and self.command.name not in QUESTIONS
        return self._pipe.with_log(failed.error()) if is_job or isinstance(self.command, Load) else failed.error()

    def cancel(self) -> bool:
        """Set the deadline of a cancelled request; return whether it was not cancelled before."""
        was_cancelled, self.is_cancelled = self.is_cancelled, True
        if not was_cancelled:
            self.ends_at = time.monotonic() + CANCEL_SECONDS
        return not was_cancelled

    def put_overdue(self) -> None:
        """Pass on the end of a request whose deadline has passed."""
        if self.is_cancelled and isinstance(self.command, Generate):
            self.put(Finished(self.command.request, "cancelled", Stats()))
        elif self.is_cancelled:
            self.put(CancelledError(f"cancelled {self.phase}"))
        elif self._seconds is not None:
            self.put(LlmrunError("llama.cpp does not answer", why=f"nothing came within {self._seconds:.0f} seconds"))
        else:
            what = f"the chat template takes longer than {RENDER_SECONDS:g} seconds"
            self.put(BadTemplateError(what, hint="choose another one with --template"))

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
