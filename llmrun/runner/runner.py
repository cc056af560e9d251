"""One engine for one user: asks, and waits for the answer, without threads of its own.

Owns the order of a load, an answer, a job; must not know bytes or deadlines. Several answers may be open at the same
time, in one thread or in many: whoever wants the next event of one takes in those of the others too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import TypeVar

from llmrun.errors import EngineCrashedError, LlmrunError
from llmrun.protocol.codec import as_dict, from_json
from llmrun.protocol.finished_answers import AnswerExplanation, Explain, SaveState, StateSaved
from llmrun.protocol.jobs import JobKind
from llmrun.protocol.loading import Load, Loaded, LoadProgress
from llmrun.protocol.messages import (
    Command,
    CountTokens,
    Event,
    Generate,
    Job,
    JobDone,
    JobUpdate,
    TokenCount,
    Tokenize,
    Tokenized,
)
from llmrun.protocol.speculation import MeasureSteps, StepsMeasured
from llmrun.runner.launch import EngineHandle, take_prestarted
from llmrun.runner.requests import EngineRequests

_Answer = TypeVar("_Answer", AnswerExplanation, StateSaved, TokenCount, Tokenized, StepsMeasured)
_Command = TypeVar("_Command")
_Update = TypeVar("_Update")
_Result = TypeVar("_Result")


class Runner:
    """One engine process, with at most one model in it.

    Args:
        launched: a process that launch.launch() made; one is started by default.
    """

    def __init__(self, launched: EngineHandle | None = None) -> None:
        self._exchange = EngineRequests(launched)
        self._pipe = self._exchange.pipe
        self.next_request = self._exchange.next_request

    @property
    def alive(self) -> bool:
        """Whether the engine can take another command."""
        return self._pipe.alive

    @property
    def pid(self) -> int:
        """The engine's process id."""
        return self._pipe.pid

    def open_ahead(self, path: str) -> None:
        """Let the engine begin to load weights that load() will probably ask for; nothing happens if it can't."""
        self._exchange.open_ahead(path)

    def load(self, load: Load, on_progress: Callable[[float], None] = lambda fraction: None) -> Loaded:
        """Load a model. Whatever is raised here meanwhile, Ctrl-C too, ends the engine.

        Raises:
            BadModelError: llama.cpp refuses it, or it killed the engine.
            EngineCrashedError: the engine died of something else.
        """
        with self._closing_on_error():
            for event in self._events(load):
                if isinstance(event, LoadProgress):
                    on_progress(event.fraction)
                elif isinstance(event, Loaded):
                    return event
        raise AssertionError("a call came to no end")

    def generate(self, *asked: Generate, on_wait: Callable[[], None] = lambda: None) -> Iterator[Event]:
        """Answer requests, all at once: of each Started, then PrefillProgress and TextDelta, at last Finished.

        Args:
            on_wait: called about ten times a second while the engine is silent.

        Raises:
            BadTemplateError: the chat template fails or takes too long.
            BadModelError: the model's file killed the engine.
            EngineCrashedError: the engine died; load() again in a new Runner.
        """
        self._exchange.on_wait = on_wait
        return self._events(*asked)

    def do(
        self,
        kind: JobKind[_Command, _Update, _Result],
        command: _Command,
        on_update: Callable[[_Update], None] = lambda update: None,
        *,
        seconds: float | None = None,
    ) -> _Result:
        """Have the engine do a job, and wait for it.

        Whatever is raised here meanwhile, Ctrl-C too, ends the engine; one whose loaded model does the job only stops.

        Args:
            seconds: after which it is given up.

        Raises:
            LlmrunError: as the job says.
            BadModelError: a model's file killed the engine.
            EngineCrashedError: the engine died of something else.
        """
        job = Job(self.next_request(), kind.name, as_dict(command))
        with nullcontext() if kind.needs_model else self._closing_on_error():
            for event in self._events(job, models=kind.models(command), seconds=seconds):
                if isinstance(event, JobUpdate):
                    on_update(_read(kind.update, event.data, job))
                elif isinstance(event, JobDone):
                    return _read(kind.result, event.result, job)
        raise AssertionError("a call came to no end")

    def begin(self, kind: JobKind[_Command, _Update, _Result], command: _Command) -> None:
        """Have the engine do a job that nobody waits for: what it finds out makes the next one quicker."""
        with suppress(EngineCrashedError):
            self._exchange.submit(Job(self.next_request(), kind.name, as_dict(command)))

    def explain(self, explain: Explain) -> AnswerExplanation:
        """How the last tokens of an answer were chosen.

        Raises:
            LlmrunError: the engine does not remember that answer.
            EngineCrashedError: the engine died.
        """
        return self._ask(explain, AnswerExplanation)

    def count(self, count: CountTokens) -> TokenCount:
        """How many tokens a conversation has.

        Raises:
            BadTemplateError: the model has no chat template, or it fails.
            EngineCrashedError: the engine died.
        """
        return self._ask(count, TokenCount)

    def tokenize(self, tokenize: Tokenize) -> Tokenized:
        """The token ids of a text.

        Raises:
            BadModelError: the vocabulary can't write it.
            EngineCrashedError: the engine died.
        """
        return self._ask(tokenize, Tokenized)

    def save_state(self, save: SaveState) -> StateSaved:
        """Save the KV state of an answer.

        Raises:
            LlmrunError: it can't be saved.
            EngineCrashedError: the engine died.
        """
        return self._ask(save, StateSaved)

    def measure_steps(self, measure: MeasureSteps) -> StepsMeasured:
        """How long decode steps take.

        Raises:
            EngineCrashedError: the engine died.
        """
        return self._ask(measure, StepsMeasured)

    def start_measuring(self, measure: MeasureSteps) -> Callable[[], StepsMeasured]:
        """The same in the background: gives what looks, without waiting, for what was found so far.

        Whatever else is asked meanwhile ends it, and then nothing is ever found.
        """
        call = self._exchange.submit(measure)

        def look() -> StepsMeasured:
            self._exchange.pump(seconds=0)
            found = call.events.get() if not call.events.empty() else None
            return found if isinstance(found, StepsMeasured) else StepsMeasured(measure.request)

        return look

    def _ask(
        self, question: Explain | SaveState | CountTokens | Tokenize | MeasureSteps, kind: type[_Answer]
    ) -> _Answer:
        for event in self._events(question):
            if isinstance(event, kind):
                return event
        raise AssertionError("a call came to no end")

    def _events(
        self, *commands: Command, models: tuple[str, ...] = (), seconds: float | None = None
    ) -> Iterator[Event]:
        first = self._exchange.submit(commands[0], models=models, seconds=seconds)
        others = [self._exchange.submit(each, beside=first) for each in commands[1:]]
        try:
            yield from self._exchange.events(first, *others, pumps=True)
        finally:
            if not self.alive:
                self.close()

    @contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise

    def cancel(self, request: int | None = None) -> None:
        """Ask a request, or all that is under way, to stop: it ends soon, whatever the engine does.

        Safe in a signal handler, and from any thread.
        """
        if request is None:
            self._exchange.cancel_all()
        else:
            self._exchange.cancel(request)

    def close(self) -> None:
        """End the engine. May be called at any time, and again."""
        self._pipe.close()


def _read(kind: type[_Result], data: object, job: Job) -> _Result:
    """What a job told; an engine that a model's file took over may tell anything."""
    try:
        return from_json(kind, data)
    except (TypeError, ValueError, LlmrunError) as error:
        raise EngineCrashedError(f"the engine died in its job, {job.name}", why=f"it sent garbage ({error})") from error


@functools.cache
def prestarted() -> Runner:
    """The runner of the prestarted engine if there is one, else of a new one; the same at every call."""
    return Runner(take_prestarted())
