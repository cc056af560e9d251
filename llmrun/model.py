"""A model that answers: from a name to a loaded engine, and from a conversation to events.

Owns the way from name to plan to engine, and the engine's restart after a crash; must not know terminals. The
commands use the same objects as the Python API.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from llmrun.config import TUNE_FILE, Settings, load_settings
from llmrun.errors import LlmrunError, UsageError
from llmrun.gguf.header import Header
from llmrun.gguf.reader import read_header
from llmrun.gguf.rules import check
from llmrun.grammar import Grammar
from llmrun.models.locate import locate, not_on_disk
from llmrun.models.registry import ModelSpec
from llmrun.planning.hardware import Hardware
from llmrun.planning.machine import this_machine
from llmrun.planning.pairs import DraftFile, plan_pair
from llmrun.planning.plan import Plan, Wishes, scores_fit
from llmrun.planning.speculation import AUTO, DraftPolicy, read_speculate
from llmrun.protocol.ended import Explain, Explained, SaveState, StateSaved
from llmrun.protocol.messages import AnswerRequest, Count, Counted, Event, Generate, Load, Loaded, Message, Tokenize
from llmrun.protocol.params import Limits, SamplingParams, resolve_sampling
from llmrun.protocol.speculation import MeasureSteps, StepTime
from llmrun.reply import Reply, Said, SchemaClass, as_grammar, as_messages, sort_options
from llmrun.runner import runner
from llmrun.runner.launch import Launched, launch

if TYPE_CHECKING:
    from llmrun.planning.settings import EngineSettings
    from llmrun.protocol.messages import Tool


_MEASURING_TRIES = 3


@dataclass(frozen=True, slots=True)
class Expected:
    """What a model is loaded for, as a guess: `llmrun tune` may have found other settings for other lengths.

    Attributes:
        prompt_tokens: that will be prefilled, all turns of a conversation together.
        answer_tokens: that will be decoded.
        own_engine: an engine may be started for it, which takes a tenth of a second longer.
    """

    prompt_tokens: int
    answer_tokens: int
    own_engine: bool = False


A_CHAT = Expected(prompt_tokens=2000, answer_tokens=2000, own_engine=True)
"""A conversation: its questions and files, and its answers."""


def open_ahead(name: str) -> None:
    """Let the prestarted engine load a model's weights while the command line is still being read.

    A guess: if it is wrong, or there is no such model, what comes later finds out and says so.
    """
    with suppress(LlmrunError):
        settings = load_settings()
        path = locate(name, settings).path
        if path is None or not path.is_file():
            return
        if (settings.state_dir / TUNE_FILE).exists():  # spares every other start the import
            from llmrun.planning.tuned import loads_as_usual

            if not loads_as_usual(path, settings.state_dir):
                return
        runner.prestarted().open_ahead(str(path.absolute()))


class Model:
    """A loaded model; use it as a context manager or call close().

    Any thread may ask; the engine answers one request after the other.

    Attributes:
        path: of the GGUF file.
        spec: what the name meant.
        header: what the file says about itself.
        plan: context window, threads and layers, and why.
        load: the plan as the engine gets it.
        loaded: what the engine says about it.
        drafting: whether and how its answers are drafted; `drafting.most` may be changed.
        draft: the model that drafts for it, if there is one.
        tuned: settings of `llmrun tune` that it is loaded with; None where there are none.
        on_wait: called about ten times a second while answer() waits and the engine is silent.
    """

    def __init__(
        self,
        path: Path,
        spec: ModelSpec,
        header: Header,
        plan: Plan,
        load: Load,
        drafting: DraftPolicy,
        tuned: EngineSettings | None = None,
        draft: DraftFile | None = None,
    ) -> None:
        self.path = path
        self.spec = spec
        self.header = header
        self.plan = plan
        self.loaded: Loaded
        self.tuned = tuned
        self.drafting = drafting
        self.draft = draft
        self.load = load
        self._runner: runner.Runner | None = None
        self._request = 0
        self.on_wait: Callable[[], None] = lambda: None
        self._starting = threading.Lock()

    def sampling(
        self, flags: Mapping[str, Any] | None = None, session: Mapping[str, Any] | None = None
    ) -> tuple[SamplingParams, dict[str, str]]:
        """Sampling parameters and each one's origin: "session", "flag", "model" (the file), "catalogue", "default".

        Raises:
            UsageError: a value is out of its bounds.
        """
        return resolve_sampling(
            ("session", session or {}),
            ("flag", flags or {}),
            ("model", self.header.recommended_sampling),
            ("catalogue", self.spec.sampling),
        )

    def start(self, engine: runner.Runner, on_progress: Callable[[float], None] = lambda fraction: None) -> None:
        """Load into an engine.

        Raises:
            BadModelError: llama.cpp refuses the file.
            EngineCrashedError: the file killed the engine.
        """
        self._runner = engine
        self.loaded = engine.load(self.load, on_progress)

    def chat(
        self,
        messages: Said | Iterable[Message | Mapping[str, str]],
        *,
        schema: SchemaClass | Mapping[str, Any] | None = None,
        sampling: SamplingParams | None = None,
        limits: Limits = Limits(),
        template: str | None = None,
        grammar: Grammar | None = None,
        thinking: bool | None = None,
        thinking_tokens: int | None = None,
        stops_repeats: bool = False,
        remember: int = 0,
        **options: Any,
    ) -> Reply:
        """Answer a conversation.

            model.chat("Why is the sky blue?", temperature=0, max_tokens=50).text
            model.chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]).text
            model.chat("Name a city", schema=City).parsed    # City is a Pydantic model, or a JSON schema as a dict

        Args:
            messages: the whole conversation, a text being the user's; what the KV cache knows of it is reused.
            schema: what the answer has to follow: a JSON schema, or a class with model_json_schema().
            sampling: None is what the model's makers advise, see sampling().
            limits: when the answer ends.
            template, grammar, thinking, thinking_tokens, stops_repeats, remember: as in AnswerRequest.
            options: single fields of SamplingParams and Limits, such as temperature, top_p, seed, max_tokens, stop.

        Raises:
            TypeError: messages, the schema or an option are of the wrong type.
            UsageError: a value is out of its bounds, or there is no message.
            BadGrammarError: the schema is broken, or uses what can't be enforced.
        """
        conversation = as_messages(messages)
        if not conversation:
            raise UsageError("there is nothing to answer", why="the list of messages is empty")
        asked = AnswerRequest(
            messages=conversation,
            template=template,
            grammar=grammar if schema is None else as_grammar(schema),
            thinking=thinking,
            thinking_tokens=thinking_tokens,
            stops_repeats=stops_repeats,
            remember=remember,
        )
        return self._reply(asked, sampling, limits, options, schema)

    def generate(
        self,
        prompt: str,
        *,
        sampling: SamplingParams | None = None,
        limits: Limits = Limits(),
        grammar: Grammar | None = None,
        stops_repeats: bool = False,
        remember: int = 0,
        **options: Any,
    ) -> Reply:
        """Continue a plain text, without a chat template; arguments and errors as in chat().

        model.generate("Once upon a time", max_tokens=30).text
        """
        if not isinstance(prompt, str):
            raise TypeError(f"a prompt must be a text, not {type(prompt).__name__}")
        asked = AnswerRequest(prompt=prompt, grammar=grammar, stops_repeats=stops_repeats, remember=remember)
        return self._reply(asked, sampling, limits, options)

    def _reply(
        self,
        asked: AnswerRequest,
        sampling: SamplingParams | None,
        limits: Limits,
        options: Mapping[str, Any],
        schema: SchemaClass | Mapping[str, Any] | None = None,
    ) -> Reply:
        """The reply to a request with these sampling parameters and limits, and what single options change in them."""
        values, ends = sort_options(options)
        sampling = self.sampling(values)[0] if sampling is None else replace(sampling, **values)
        limits, speculation = replace(limits, **ends), self.drafting.wanted()
        engine, generate = self._next(replace(asked, sampling=sampling, limits=limits, speculation=speculation))
        return Reply(engine.generate(generate), lambda: engine.cancel(generate.request), schema)

    def answer(self, asked: AnswerRequest) -> Iterator[Event]:
        """Answer what is asked; yields Started, PrefillProgress and TextDelta, at last Finished.

        Raises:
            BadTemplateError: the model has no chat template, or it fails.
            BadGrammarError: the grammar is broken, or asks for too much.
            ContextOverflowError: the prompt alone is longer than the context window.
            EngineCrashedError: the engine died; the next call starts a new one.
        """
        engine, generate = self._next(asked)
        return self.drafting.noticing(engine.generate(generate, self.on_wait))

    def _next(self, asked: AnswerRequest) -> tuple[runner.Runner, Generate]:
        """The next command, and who takes it."""
        engine = self._living_engine()
        self._request = engine.next_request()
        return engine, Generate(self._request, asked)

    @property
    def needs_own_engine(self) -> bool:
        """Whether an engine that was started before anybody knew what for will not do."""
        return self.load.verbose or bool(self.tuned and self.tuned.environment)

    def launch_engine(self) -> Launched:
        """Start an engine's process as this model wants it."""
        environment = self.tuned.environment if self.tuned else None
        return launch(verbose=self.load.verbose, environment=environment)

    def new_engine(self) -> runner.Runner:
        """An engine as this model wants it."""
        return runner.Runner(self.launch_engine())

    def _living_engine(self) -> runner.Runner:
        """The engine; a new one where it died."""
        with self._starting:
            if self._runner is None or not self._runner.alive:
                self.start(self.new_engine())
        assert self._runner is not None
        return self._runner

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        """The token ids of a plain text, without what a template or the start of a prompt would add.

        Args:
            special: texts of control tokens, such as "<|im_end|>", become these tokens.
        """
        if not isinstance(text, str):
            raise TypeError(f"what is tokenized must be a text, not {type(text).__name__}")
        engine = self._living_engine()
        return list(engine.tokenize(Tokenize(engine.next_request(), text, special)).tokens)

    def count(
        self,
        messages: Said | Iterable[Message | Mapping[str, str]],
        *,
        template: str | None = None,
        thinking: bool | None = None,
        tools: tuple[Tool, ...] = (),
    ) -> Counted:
        """How many tokens a conversation has: each message's content, and the whole prompt.

            model.count("Why is the sky blue?").total

        Args:
            messages: as in chat().
            template, thinking, tools: as in AnswerRequest.

        Raises:
            TypeError: messages are of the wrong type.
            BadTemplateError: the model has no chat template, or it fails.
        """
        asked = AnswerRequest(as_messages(messages), template=template, thinking=thinking, tools=tools)
        engine = self._living_engine()
        return engine.count(Count(engine.next_request(), asked))

    def measure_steps(self) -> tuple[StepTime, ...]:
        """Measure how long decode steps take here, which `drafting` needs, and remember it; takes seconds.

        () where somebody else asked for something meanwhile, or the machine was too busy, several times in turn.
        """
        engine = self._living_engine()
        for _ in range(_MEASURING_TRIES):
            found = engine.measure_steps(MeasureSteps(engine.next_request()))
            if self.drafting.remember(found.times, found.draft_times):
                return found.times
        return ()

    @contextmanager
    def measuring_steps(self) -> Iterator[None]:
        """The same while something else is waited for in this block, if it is of use; nothing is said if it fails."""
        look = None
        if self.drafting.lacks_times and self._runner is not None and self._runner.alive:
            look = self._runner.begin_measuring(MeasureSteps(self._runner.next_request()))
        yield
        if look is not None:
            with suppress(LlmrunError):  # it can't be written
                self.drafting.remember(*look())

    def explain(self, last: int, candidates: int = 8) -> Explained:
        """How the last tokens of the answer before were chosen; chat() has to have been told to remember them.

        Args:
            last: how many tokens.
            candidates: how many of the likeliest ones to name for each.
        """
        engine, answer = self.last_answer()
        return engine.explain(Explain(engine.next_request(), answer, last, candidates))

    def last_answer(self) -> tuple[runner.Runner, int]:
        """The engine that gave the answer before, and the answer's number there. Raises UsageError without one."""
        if self._runner is None or not self._runner.alive or not self._request:
            raise UsageError("there is no answer yet that could be explained or saved")
        return self._runner, self._request

    def save_state(self, *, prompt_only: bool = False) -> StateSaved:
        """Save the KV state of the answer before, so that a prompt which begins like it needs no prefill.

        Only where the model was loaded with a place for states; says how much was saved: nothing where it can't be
        written, because it is only a cache.

        Args:
            prompt_only: leave the answer out, because other questions will follow the prompt's beginning.

        Raises:
            UsageError: there was no answer.
        """
        engine, answer = self.last_answer()
        return engine.save_state(SaveState(engine.next_request(), answer, prompt_only))

    def cancel(self) -> None:
        """Stop what is being answered, which then ends with Finished. Safe in a signal handler."""
        if self._runner is not None:
            self._runner.cancel()

    def close(self) -> None:
        """End the engine."""
        if self._runner is not None:
            self._runner.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def prepare(
    spec: ModelSpec,
    path: Path,
    wishes: Wishes | None = None,
    *,
    warm_up: bool = False,
    verbose: bool = False,
    keeps_states: bool = False,
    expected: Expected | None = None,
    speculate: int = AUTO,
    draft: DraftFile | None = None,
    promised: int = 0,
) -> Model:
    """Read a model's header and make the plan; start() loads it.

    Args:
        keeps_states: KV states that were saved are looked for, and save_state() saves more.
        expected: what it is loaded for; settings of `llmrun tune` are only used where that is known.
        speculate: see DraftPolicy.most.
        draft: the model that drafts for it.
        promised: bytes of the free memory that other models may still come to take.

    Raises:
        BadModelError: the file is damaged, or no model that llama.cpp can run.
        OutOfMemoryError: it does not fit.
        UsageError: the draft model does not go with it.
    """
    header = read_header(path)
    check(header)
    hardware, wishes, settings = this_machine(), wishes or Wishes(), load_settings()
    hardware = replace(hardware, memory_available=max(hardware.memory_available - promised, 0))
    plan, drafts = plan_pair(header, draft, hardware, wishes, name=spec.name, repository=spec.repository or "")
    keeps_states = keeps_states and settings.states_bytes > 0
    load = replace(
        plan.load(path),
        warm_up=warm_up,
        verbose=verbose,
        states=str(settings.states_dir) if keeps_states else "",
        states_bytes=settings.states_bytes,
    )
    tuned = _tuned(header, hardware, settings, expected) if expected else None
    if tuned is not None:
        plain, load = load, tuned.wished(load, wishes, without_flash=scores_fit(header, hardware, plan.n_ctx))
        changes = tuned.of(load).changes(tuned.of(plain))
        plan = replace(plan, threads=load.threads, flash_attention=load.flash_attention, tuned=changes)
    if drafts is not None:
        load = replace(load, draft=replace(drafts.load, threads=load.threads, verbose=verbose))
    drafting = DraftPolicy(header, hardware, load, settings.state_dir, speculate, drafts and drafts.header)
    return Model(path, spec, header, plan, load, drafting, tuned, draft)


def _tuned(header: Header, hardware: Hardware, settings: Settings, expected: Expected) -> EngineSettings | None:
    """What `llmrun tune` found to be the fastest for this, None where it was never asked."""
    if not (settings.state_dir / TUNE_FILE).exists():
        return None  # spares every start the imports
    from llmrun.planning.tuned import choose, remembered

    found = remembered(header, hardware, settings.state_dir)
    if found is None:
        return None
    own = expected.own_engine
    return choose(found, expected.prompt_tokens, expected.answer_tokens, own_environment=own)


def load(
    name: str,
    *,
    n_ctx: int | None = None,
    threads: int | None = None,
    gpu_layers: int | None = None,
    speculate: int | Literal["auto", "off"] = "auto",
    draft: str | None = None,
    pull: bool = True,
    on_pull: Callable[[int, int], None] = lambda done, total: None,
    on_progress: Callable[[float], None] = lambda fraction: None,
) -> Model:
    """Load a model by name or path; downloads it first when it is missing.

    Args:
        name: an alias such as "smollm2", owner/repo[:quant], a URL, or a path.
        n_ctx: context window in tokens; None is what the model was trained on, cut to what fits into memory.
        threads: None is one for each physical core.
        gpu_layers: None is all.
        speculate: how many tokens a step may be drafted, which never changes answers; "auto" is as many as pay by the
            step times that were measured here, see measure_steps().
        draft: name or path of a smaller model with the same vocabulary, which drafts; downloaded when it is missing.
        pull: False never downloads.
        on_pull: called with (bytes done, bytes in all) during the download.
        on_progress: called with the loaded share of the weights, 0 to 1.

    Raises:
        LlmrunError: see llmrun.errors for the kinds.
    """
    wishes, most = Wishes(n_ctx=n_ctx, threads=threads, gpu_layers=gpu_layers), read_speculate(speculate, "speculate")
    settings = load_settings()

    def find(name: str) -> tuple[ModelSpec, Path]:
        located = locate(name, settings)
        if located.path is not None:
            return located.spec, located.path
        if not pull:
            raise not_on_disk(name)
        from llmrun.models.pull import pull as fetch
        from llmrun.planning.choice import chooser

        return located.spec, fetch(located.spec, settings, on_pull, choose=chooser(settings))

    spec, path = find(name)
    drafts = DraftFile.of(*find(draft)) if draft is not None else None
    model = prepare(spec, path, wishes, speculate=most, draft=drafts)
    model.start(runner.Runner(), on_progress)
    return model
