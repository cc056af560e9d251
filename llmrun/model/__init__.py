"""A model that answers: from a file to a loaded engine, and from a conversation to events.

Must not know terminals. The commands use the same objects as the Python API.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrun.errors import EngineCrashedError, LlmrunError, UsageError
from llmrun.gguf.header import Header
from llmrun.gguf.pooling import refuse_answers
from llmrun.gguf.reader import read_modalities
from llmrun.models.fingerprint import ModelFingerprint, fingerprint_file
from llmrun.models.registry import ModelSpec
from llmrun.planning.measurements import Comparisons
from llmrun.planning.pairs import DraftFile
from llmrun.planning.plan import Plan
from llmrun.planning.speculation import DraftPolicy
from llmrun.planning.tuned import waiting_environment
from llmrun.protocol import questions
from llmrun.protocol.answer import with_beginnings
from llmrun.protocol.arguments import checked, refuse_unknown
from llmrun.protocol.jobs.beams import BEAMS, BeamsFound, BeamStep, SearchBeams
from llmrun.protocol.jobs.text import TokenizeText
from llmrun.protocol.loading import Load, Loaded
from llmrun.protocol.media import Modality
from llmrun.protocol.messages import AnswerRequest, Event, Generate, Message
from llmrun.protocol.params import Limits, SamplingParams, resolve_sampling
from llmrun.protocol.speculation import Speculation
from llmrun.reply import (
    FOR_CHATS,
    FOR_TEXTS,
    Reply,
    Said,
    SchemaClass,
    as_grammar,
    as_messages,
    sort_options,
    with_request_fields,
)
from llmrun.runner import client
from llmrun.runner.launch import EngineHandle, launch

if TYPE_CHECKING:
    from llmrun.model.embeddings import EmbedOptions, RankedDocument, TextVectors
    from llmrun.planning.tuned import TunableSettings
    from llmrun.protocol.adapters import Adapter


_INTERNAL = """comparisons draft drafting embed_each examples launch_engine last_answer load loaded needs_own_engine
new_engine on_wait spec speculation start takes tuned used while_idle"""


class Model:
    """A loaded model; use it as a context manager, call close(), or drop it: its engine ends with the last reference.

        with llmrun.load("smollm2") as model:           # or async with
            print(model.chat("Why is the sky blue?").text)

    Safe in any thread; the engine answers one request after the other.

    Attributes:
        path: of the GGUF file.
        spec: meaning of the model's name.
        header: of the file.
        plan: context window, threads and layers, and the reasons.
        loaded: the engine's report.
        drafting: the use of speculation; `drafting.most` may be changed.
        comparisons: what an idle engine can measure for later loads.
        draft: the draft model, if there is one.
        tuned: settings of `llmrun tune` that were used; None without any.
        on_wait: called about ten times a second while answer() waits and the engine is silent.

    Args:
        load_for: returns the load for this many answers decoded together; None if there can't be more.
    """

    def __init__(
        self,
        path: Path,
        spec: ModelSpec,
        header: Header,
        plan: Plan,
        drafting: DraftPolicy,
        comparisons: Comparisons,
        tuned: TunableSettings | None = None,
        draft: DraftFile | None = None,
        load_for: Callable[[int], Load] | None = None,
    ) -> None:
        self.path, self.spec, self.header, self.plan = path, spec, header, plan
        self.tuned, self.drafting, self.draft, self.comparisons = tuned, drafting, draft, comparisons
        self._load_for = load_for
        self.loaded: Loaded
        self._runner: client.EngineClient | None = None
        self._request = 0
        self.on_wait: Callable[[], None] = lambda: None
        self._starting = threading.Lock()
        self._is_closed = False

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"{self.load.n_ctx:,} tokens of context"
        return f"<Model {self.name}, {self.header.quant}, {state}>"

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name[0] != "_" and name not in _INTERNAL.split()]

    @property
    def load(self) -> Load:
        """The plan's command to the engine."""
        return self.plan.load

    @property
    def name(self) -> str:
        return self.spec.name

    @cached_property
    def used(self) -> ModelFingerprint:
        """Fingerprint of the model as it was loaded, stored with an answer: its file may be renamed or deleted."""
        return fingerprint_file("" if self.spec.is_file else self.spec.name, self.path)

    @property
    def n_ctx(self) -> int:
        """Context window in tokens."""
        return self.loaded.n_ctx

    @property
    def examples(self) -> tuple[Message, ...]:
        """Example turns of its Modelfile, which stand before each conversation."""
        return self.spec.modelfile.messages

    @property
    def has_template(self) -> bool:
        return self.loaded.has_template

    @property
    def thinks(self) -> bool:
        return bool(self.loaded.thinking_tags)

    @property
    def modalities(self) -> frozenset[Modality]:
        """The kinds of files that it reads besides text."""
        return read_modalities(Path(self.load.projector) if self.load.projector else None)

    @property
    def parallel(self) -> int:
        return self.load.n_seq_max

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        return self.load.adapters

    def takes(self, parameter: str) -> bool:
        """Return whether a sampling parameter is supported."""
        return True

    def speculation(self) -> Speculation | None:
        return self.drafting.speculation()

    @checked
    def sampling(
        self, flags: Mapping[str, Any] | None = None, session: Mapping[str, Any] | None = None
    ) -> tuple[SamplingParams, dict[str, str]]:
        """Return the sampling parameters, and each one's origin: "session", "flag", "Modelfile" (of Ollama's store),
        "model" (the file), "catalogue", "default".

        Raises:
            UsageError: a value is out of its bounds.
        """
        own = self.spec.sampling_layers(self.header.recommended_sampling)
        return resolve_sampling(("session", session or {}), ("flag", flags or {}), *own)

    def start(self, engine: client.EngineClient, on_progress: Callable[[float], None] = lambda fraction: None) -> None:
        """Load the model into an engine.

        Raises:
            BadModelError: llama.cpp refuses the file.
            EngineCrashedError: the file killed the engine.
        """
        self._runner = engine
        _ = self.used  # as it is now
        self.loaded = engine.load(self.load, on_progress)

    @checked
    def decode_together(self, answers: int) -> None:
        """Let the engine decode this many answers together from now on; the cached conversation is kept.

        Raises:
            OutOfMemoryError: there is no memory for them; answers still come one after the other.
        """
        if answers <= self.parallel or self._load_for is None:
            return
        wide, before = replace(self.plan, load=self._load_for(answers)), self.plan
        with self._starting:
            self.plan = wide
            try:
                self.start(self._runner if self._runner is not None and self._runner.alive else self.new_engine())
            except LlmrunError:
                self.plan = before  # of the next engine: this one has ended
                raise

    @checked
    def chat(
        self,
        messages: Said | Iterable[Message | Mapping[str, str]],
        *,
        system: str | None = None,
        stream: bool = False,
        schema: SchemaClass | Mapping[str, Any] | None = None,
        sampling: SamplingParams | None = None,
        limits: Limits = Limits(),
        **options: Any,
    ) -> Reply:
        """Answer a conversation.

            model.chat("Why is the sky blue?", temperature=0, max_tokens=50).text
            for piece in model.chat("Tell me a story", system="Be brief."):
                print(piece, end="", flush=True)
            model.chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]).text
            schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
            model.chat("Name a city", schema=schema)    # .parsed is the data; schema may be a Pydantic class

        Args:
            messages: the whole conversation, a text being the user's; its cached prefix is reused.
            system: system prompt, put before the messages.
            stream: accepted for habit: every reply streams as soon as it is iterated.
            schema: of the answer: a JSON schema, or a class with model_json_schema().
            sampling: None is the advice of the model's makers, see sampling().
            limits: maximum length, stop texts and banned phrases.
            options: single fields of SamplingParams and Limits, such as temperature, top_p, seed, max_tokens, stop; and
                of AnswerRequest: template, grammar, thinking, thinking_tokens, reasoning_effort, keep_reasoning,
                stops_repeats, remember, logprobs.

        Raises:
            UsageError: an argument is of the wrong type or out of its bounds, or there is no message.
            BadGrammarError: the schema is broken, or uses features that can't be enforced.
        """
        conversation = as_messages(messages)
        if not conversation:
            raise UsageError("there is nothing to answer", why="the list of messages is empty")
        if system is not None:
            conversation = (Message("system", system), *conversation)
        if schema is not None:
            options["grammar"] = as_grammar(schema)
        return self._reply(AnswerRequest(messages=conversation), sampling, limits, options, schema)

    @checked
    def generate(
        self,
        prompt: str,
        *,
        system: str | None = None,
        stream: bool = False,
        sampling: SamplingParams | None = None,
        limits: Limits = Limits(),
        **options: Any,
    ) -> Reply:
        """Continue a text, without a chat template; arguments and errors as in chat(). `system` is text before it.

        model.generate("Once upon a time", max_tokens=30).text
        """
        prompt = "\n\n".join(filter(None, (system, prompt)))
        return self._reply(AnswerRequest(prompt=prompt), sampling, limits, options)

    def _reply(
        self,
        asked: AnswerRequest,
        sampling: SamplingParams | None,
        limits: Limits,
        options: Mapping[str, Any],
        schema: SchemaClass | Mapping[str, Any] | None = None,
    ) -> Reply:
        """Return the reply to a request; single options change it, its sampling parameters and its limits."""
        values, ends, others = sort_options(options, FOR_TEXTS if asked.prompt is not None else FOR_CHATS)
        sampling = self.sampling(values)[0] if sampling is None else replace(sampling, **values)
        others |= {"limits": replace(limits, **ends), "speculation": self.drafting.speculation()}
        request = self.spec.modelfile.complete(replace(asked, sampling=sampling, **others))
        engine, (generate,) = self._next(request)
        return Reply(self._events(engine, generate), lambda: engine.cancel(generate.request), schema)

    @checked
    def answer(self, *asked: AnswerRequest) -> Iterator[Event]:
        """Answer requests, all at once; yields Started, PrefillProgress, TextDelta, at last Finished of each.

        Requests are numbered in a row; each event has its request's number. What an answer is given to begin with is
        its first piece.

        Raises:
            BadTemplateError: the model has no chat template, or it fails.
            BadGrammarError: the grammar is broken, or too large.
            ContextOverflowError: the prompt alone is longer than the context window.
            EngineCrashedError: the engine died; the next call starts a new one.
        """
        engine, commands = self._next(*asked)
        events = self._events(engine, *commands, on_wait=self.on_wait)
        return (
            with_beginnings(commands, events) if any(each.begins or each.begins_reasoning for each in asked) else events
        )

    def _events(
        self, engine: client.EngineClient, *commands: Generate, on_wait: Callable[[], None] = lambda: None
    ) -> Iterator[Event]:
        """Send requests when the first event is asked for. Raises UsageError if close() ended the engine."""
        try:
            yield from engine.submit(*commands, on_wait=on_wait)
        except EngineCrashedError:
            self._refuse_if_closed()
            raise

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise UsageError("the model is closed", hint=f"load it again: llmrun.load({self.name!r})")

    def _next(self, *asked: AnswerRequest) -> tuple[client.EngineClient, list[Generate]]:
        """Return the engine and the next commands. Raises UsageError for a model that does not answer."""
        if not asked:
            raise UsageError("there is nothing to answer", why="answer() got no request")
        refuse_answers(self.header)
        engine = self._living_engine()
        now = time.perf_counter()
        commands = [Generate(engine.next_request(), replace(each, arrived=each.arrived or now)) for each in asked]
        self._request = commands[-1].request
        return engine, commands

    @property
    def needs_own_engine(self) -> bool:
        """True if the prestarted engine can't be used."""
        return self.load.verbose or bool(self._engine_environment)

    def launch_engine(self) -> EngineHandle:
        return launch(verbose=self.load.verbose, environment=self._engine_environment)

    @property
    def _engine_environment(self) -> dict[str, str]:
        variables = waiting_environment(self.load) | (self.tuned.environment if self.tuned else {})
        if self.load.workers:
            from llmrun.runner.workers import engine_environment

            variables |= engine_environment()
        return variables

    def new_engine(self) -> client.EngineClient:
        return client.EngineClient(self.launch_engine())

    def _living_engine(self) -> client.EngineClient:
        """Return the engine, a new one if it died. Raises UsageError for a closed model, NetworkError for a worker."""
        self._refuse_if_closed()
        with self._starting:
            if self._runner is None or not self._runner.alive:
                if self.load.workers:  # a lost one may have killed the engine
                    from llmrun.runner.workers import ask_all

                    ask_all(self.load.workers)
                self.start(self.new_engine())
        assert self._runner is not None
        return self._runner

    @checked
    def embed(self, texts: str | Iterable[str], **options: Any) -> TextVectors:
        """Return the vectors of texts.

            model.embed(["Paris is a city", "The Seine is a river"]).vectors    # a row for each, of length 1
            model.embed("Where is Paris?", role="query").vectors[0]

        Args:
            options: fields of EmbedOptions.

        Raises:
            ContextOverflowError: truncate=False, and a text is too long.
            UsageError: a text is blank, or an option is not for this model.
        """
        from llmrun.model.embeddings import EmbedOptions, joined

        refuse_unknown(options, (field.name for field in fields(EmbedOptions)))
        return joined(self.embed_each([texts] if isinstance(texts, str) else texts, EmbedOptions(**options)))

    @checked
    def embed_each(self, texts: Iterable[str], options: EmbedOptions) -> Iterator[TextVectors]:
        """Yield the vectors of some texts at a time; as embed()."""
        from llmrun.model.embeddings import Embedding
        from llmrun.protocol.jobs.text import EMBED

        embedding = Embedding(self.header, self.spec.embedding, options)
        for command in embedding.commands(texts):
            yield embedding.read(self._living_engine().do(EMBED, command))

    @checked
    def rerank(self, query: str, documents: Iterable[str]) -> list[RankedDocument]:
        """Return the documents by relevance to a query, the best first.

            documents = ["Paris is a city", "The Seine is a river"]
            documents[model.rerank("capital of France", documents)[0].index]

        Raises:
            UsageError: a text is blank.
        """
        from llmrun.model.embeddings import Ranking
        from llmrun.protocol.jobs.text import EMBED

        ranking = Ranking(self.header, self.spec.embedding)
        commands = list(ranking.commands(query, documents))
        return ranking.read([self._living_engine().do(EMBED, command) for command in commands])

    @checked
    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        """Return the token ids of a text alone, without a template or a begin-of-sequence token.

            model.tokenize("Hello")

        Args:
            special: texts of control tokens, such as "<|im_end|>", become these tokens.
        """
        return list(self._living_engine().do(questions.TOKENIZE_LOADED, TokenizeText("", text, special)).tokens)

    @checked
    def detokenize(self, tokens: Iterable[int]) -> str:
        """Return the text of token ids, with the texts of control tokens.

        model.detokenize(model.tokenize("Hello"))
        """
        return self._living_engine().do(questions.DETOKENIZE, tuple(tokens))

    @checked
    @with_request_fields(in_prompt=True)
    def count(self, messages: Said | Iterable[Message | Mapping[str, str]], **options: Any) -> questions.TokenCount:
        """Count the tokens of a conversation: of each message's content, and of the whole prompt.

            model.count("Why is the sky blue?").total

        Args:
            messages: as in chat().
            options: template, thinking, reasoning_effort, template_variables, tools and keep_reasoning, as in
                AnswerRequest. Answers of this model to this conversation count with the tokens that it generated, where
                these will stand in the prompt.

        Raises:
            UsageError: an argument is of the wrong type.
            BadTemplateError: the model has no chat template, or it fails.
        """
        return self._living_engine().do(questions.COUNT_TOKENS, AnswerRequest(as_messages(messages), **options))

    @contextmanager
    def while_idle(self) -> Iterator[None]:
        """Compare ways to compute while a block waits for something else, if comparisons are missing."""
        found = None
        if self._runner is not None and self._runner.alive and (missing := self.comparisons.missing()) is not None:
            found = self._runner.begin(questions.COMPARE, missing)
        yield
        with suppress(LlmrunError):  # it can't be written
            if found is not None and (compared := found()) is not None:
                self.comparisons.remember(compared)

    @checked
    def explain(self, last: int, candidates: int = 8) -> questions.AnswerExplanation:
        """Explain how the last tokens of the last answer were chosen; its request must have set `remember`.

        Args:
            last: number of tokens.
            candidates: number of the most likely tokens to report for each.
        """
        engine, answer = self.last_answer()
        return engine.do(questions.EXPLAIN_CHOICES, questions.ExplainChoices(answer, last, candidates))

    @checked
    def beams(self, search: SearchBeams, on_step: Callable[[BeamStep], None] = lambda step: None) -> BeamsFound:
        """Search for the most likely answers, the best one first. Raises UsageError if this model can't."""
        return self._living_engine().do(BEAMS, search, on_step)

    def last_answer(self) -> tuple[client.EngineClient, int]:
        """Return the engine of the last answer, and the answer's number. Raises UsageError without one."""
        self._refuse_if_closed()
        if self._runner is None or not self._runner.alive or not self._request:
            raise UsageError("there is no answer yet that could be explained or saved")
        return self._runner, self._request

    @checked
    def save_state(self, *, prompt_only: bool = False) -> questions.StateSaved:
        """Save the KV state of the last answer, so that a prompt with the same beginning needs no prefill.

        Returns the saved size: zeros if the model was loaded without a folder for states, or the folder can't be
        written.

        Args:
            prompt_only: leave the answer out, because other questions will follow the prompt's beginning.

        Raises:
            UsageError: there was no answer.
        """
        engine, answer = self.last_answer()
        return engine.do(questions.SAVE_STATE, questions.SaveState(answer, prompt_only))

    def cancel(self) -> None:
        """Stop the open answers, which then end with Finished. Safe in a signal handler."""
        if self._runner is not None:
            self._runner.cancel()

    def close(self) -> None:
        """End the engine. The model can't be used any more; may be called again."""
        self._is_closed = True
        if self._runner is not None:
            self._runner.close()

    def __enter__(self) -> Model:
        self._refuse_if_closed()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def __aenter__(self) -> Model:
        return self.__enter__()

    async def __aexit__(self, *error: object) -> None:
        self.close()
