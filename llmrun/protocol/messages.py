"""The messages between front and engine: commands and events, as immutable records.

Must not know processes, llama.cpp, or the wire format (frames.py). Every command has a `request`, a number chosen
by the front; every event carries the `request` of its command. Numbers begin at 1; 0 is the load, one at a time.

Most are named tuples: both processes create these classes at every start, and a dataclass takes ten times as long.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

from llmrun.errors import (
    BY_CODE,
    TEXT,
    ContextOverflowError,
    InternalError,
    LlmrunError,
    UsageError,
    ValueKind,
    brief,
    require,
)
from llmrun.grammar import Grammar
from llmrun.protocol.adapters import AdapterScale
from llmrun.protocol.arguments import (
    EFFORTS,
    KINDS,
    MOST_TOKENS,
    MOST_TOP_LOGPROBS,
    NUMBER,
    SWITCH,
    check_fields,
    one_of,
    optional,
    whole_number,
)
from llmrun.protocol.loading import Load, Loaded, LoadProgress
from llmrun.protocol.media import Media
from llmrun.protocol.params import Limits, SamplingParams
from llmrun.protocol.speculation import Speculation, StepDraft

ROLES = ("system", "user", "assistant", "tool")
_RENDERED_CHARACTERS_PER_SECOND = 5e6


class Tool(NamedTuple):
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: str = "{}"  # JSON schema of the arguments, as text
    grammar: str = ""  # Lark, of the one argument of such a tool, a text


class ToolCall(NamedTuple):
    """A tool call that the model made."""

    id: str  # repeated by the message with the result
    name: str
    arguments: str  # a JSON object, as text


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    Attributes:
        role: "system", "user", "assistant", or "tool" for the result of a call.
        content: the text.
        tool_calls: calls made by the assistant.
        tool_call_id: of a tool's result, the id of the call.
        name: of a tool's result, the name of the tool.
        media: images and audio, in the order of their places in the content.
        reasoning: of the assistant, before the content; the chat template keeps it or leaves it out.

    Raises:
        UsageError: there is no such role, or the content is not a text.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    media: tuple[Media, ...] = ()
    reasoning: str = ""

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise UsageError(f"invalid role {brief(self.role)}", why=f"must be one of {', '.join(ROLES)}")
        require("content of a message", self.content, TEXT)
        require("reasoning of a message", self.reasoning, TEXT)

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts in it, written by users, models or tools."""
        fields = self.content, self.reasoning, self.tool_call_id, self.name
        return *fields, *(text for call in self.tool_calls for text in call)


class RequestField(NamedTuple):
    """The description of a field of AnswerRequest, besides its name, type and default.

    Whatever passes fields on reads it: options and presets, the protocols of the server and of remote servers, Python.
    """

    bounds: tuple[int, int] | None = None  # of a number, inclusive
    choices: tuple[str, ...] = ()  # of a text
    flag: str = ""  # the option of commands that answer, e.g. "--think/--no-think"; "" without one
    help: str = ""
    metavar: str = ""
    panel: str = "Answer"  # of the help
    is_on: bool = False  # the option is on unless it is switched off
    in_server: bool = False  # an option of `llmrun serve`, too: the value of requests that do not set it
    preset: Literal["", "model", "named"] = ""  # kind of presets that may set it, see cli/settings_file.py
    keys: tuple[str, ...] = ()  # names in bodies of requests, in each protocol, as paths: "chat_template_kwargs.x"
    servers: Mapping[str, str] | None = None  # server that takes it, "" is any -> path there; None: it is not sent
    words: str = ""  # what it says, if a remote server does not take it
    in_python: bool = False  # an argument of Model.chat() and generate()
    in_prompt: bool = False  # changes the prompt, and so its number of tokens
    needs_template: bool = False  # means nothing for a text to continue
    type: str = ""  # the annotation

    @property
    def plain_type(self) -> str:
        """The annotation of a value that is not None."""
        return self.type.removesuffix(" | None")

    @property
    def kind(self) -> ValueKind | None:
        """The values that it takes; None for those of other types, see arguments.KINDS."""
        kinds = {"bool": SWITCH, "float": NUMBER, "str": one_of(*self.choices) if self.choices else TEXT}
        kind = whole_number(*self.bounds) if self.bounds else kinds.get(self.plain_type)
        return kind if kind is None or self.plain_type == self.type else optional(kind)


def request_field(default: Any, **facts: Any) -> Any:
    """Return a field of AnswerRequest, described as RequestField()."""
    return field(default=default, metadata={"request": RequestField(**facts)})


_LOCAL_SERVERS = ("llmrun", "llamacpp", "vllm", "sglang")


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """A request for one answer: a conversation to answer or a text to continue, and the options for it.

    Attributes:
        messages: the whole conversation; empty if `prompt` is used.
        prompt: plain text to continue, without a chat template; texts of control tokens in it are these tokens.
        prompt_tokens: token ids to continue, and texts between them; `prompt` is "" then.
        suffix: text after the answer, which fills the gap between `prompt` and it; None is no gap.
        sampling: sampling parameters.
        limits: maximum length, stop texts and banned phrases.
        template: Jinja text, or "chatml", instead of the model's own chat template.
        grammar: constraint on the answer, see llmrun.grammar; None is none.
        thinking: let a model that can reason do so before the answer; None leaves it to the chat template.
        thinking_tokens: maximum number of reasoning tokens; None is no maximum.
        reasoning_effort: one of EFFORTS, for chat templates that know it; None leaves it to the chat template. It also
            decides about thinking if that is None, see `thinks`.
        template_variables: more variables of the chat template, a JSON object as text.
        stops_repeats: end an answer that repeats itself, with the reason "repeats"; close a reasoning that does.
        remember: number of the answer's last tokens kept for Explain.
        moves: turns were removed from the conversation since the last answer. The KV of the turns after them is moved
            instead of computed again, so that those turns still attend to the removed ones.
        logprobs: report the log-probability of each token, and of this many most likely tokens in its place; None
            reports none.
        processed_logprobs: report those after the sampler chain, by which the token was drawn, not the model's own.
        token_ids: report the id of each token, of the one that ends the answer too.
        salt: cached prefixes are shared only between requests with the same salt.
        owner: whose request it is, a digest of an API key; "" is the user of this machine. What is remembered of a
            request serves its owner only.
        tools: tools that the model may call.
        tool_choice: "auto", "none", "required", or "=" and the name of the one tool that must be called.
        parallel_calls: the answer may have more than one call.
        speculation: limits of speculative decoding; None decodes one token per step.
        adapters: scales of the loaded adapters to use; None is those given at load.
        begins: text that the answer begins with, behind any reasoning; the model continues it.
        begins_reasoning: reasoning before that text; without a text the model continues the reasoning.
        may_begin_anew: where the grammar does not allow that beginning, it is an earlier message instead.
        keep_reasoning: keep the reasoning of turns before the last question in the prompt; None keeps it where the
            template does, or where calls were made and the context window has room.
        arrived: when the front got the request, in seconds of time.perf_counter(), which the processes of a machine
            share; 0 is when the engine prepares it.

    Raises:
        UsageError: a field is of the wrong type.
    """

    messages: tuple[Message, ...] = ()
    prompt: str | None = None
    prompt_tokens: tuple[int | str, ...] = ()
    suffix: str | None = None
    sampling: SamplingParams = SamplingParams()
    limits: Limits = Limits()
    template: str | None = request_field(
        None, flag="--template", metavar="FILE|chatml", panel="Prompt",
        help="Chat template to use instead of the model's own.",
        in_server=True, preset="named", servers={}, words="another chat template",
        in_python=True, in_prompt=True, needs_template=True,
    )  # fmt: skip
    grammar: Grammar | None = request_field(None, in_python=True)
    thinking: bool | None = request_field(
        None, flag="--think/--no-think",
        help="Let a reasoning model think before it answers, or not. Default: as its template says.",
        preset="named", keys=("chat_template_kwargs.enable_thinking",), words="whether to think",
        servers=dict.fromkeys(_LOCAL_SERVERS, "chat_template_kwargs.enable_thinking"),
        in_python=True, in_prompt=True, needs_template=True,
    )  # fmt: skip
    thinking_tokens: int | None = request_field(
        None, bounds=(0, MOST_TOKENS), flag="--think-tokens", metavar="TOKENS",
        help="End the reasoning after this many tokens.",
        preset="named", servers={"llmrun": "thinking_tokens"}, words="how long to think",
        # vLLM's name is the second, llama-server's are the next two.
        keys=("thinking_tokens", "thinking_token_budget", "reasoning_budget_tokens", "thinking_budget_tokens"),
        in_python=True, needs_template=True,
    )  # fmt: skip
    reasoning_effort: str | None = request_field(
        None, choices=EFFORTS, flag="--think-effort", metavar="LEVEL",
        help="Reasoning effort: none, minimal, low, medium, high, xhigh or max; models know some of them.",
        in_server=True, preset="named", servers={"": "reasoning_effort"}, words="how hard to think",
        in_python=True, in_prompt=True, needs_template=True,
    )  # fmt: skip
    template_variables: str = request_field("{}", words="variables of the chat template", in_prompt=True)
    stops_repeats: bool = request_field(
        False, flag="--loop-guard/--no-loop-guard", is_on=True,
        help="End an answer that repeats itself, and close a reasoning that does.",
        keys=("stops_repeats",), servers={"llmrun": "stops_repeats"},
        in_python=True,
    )  # fmt: skip
    remember: int = request_field(0, bounds=(0, MOST_TOKENS), in_python=True)
    moves: bool = request_field(False)
    logprobs: int | None = request_field(None, bounds=(0, MOST_TOP_LOGPROBS), in_python=True)
    processed_logprobs: bool = request_field(False)
    token_ids: bool = request_field(False)
    salt: str = request_field(
        "", keys=("cache_salt",), servers=dict.fromkeys(("llmrun", "vllm"), "cache_salt"), words="a cache salt"
    )
    owner: str = request_field("")
    tools: tuple[Tool, ...] = request_field((), in_prompt=True)
    tool_choice: str = request_field("auto")
    parallel_calls: bool = request_field(True)
    speculation: Speculation | None = None
    adapters: tuple[AdapterScale, ...] | None = request_field(None, servers={})
    begins: str = request_field(
        "", flag="--prefill", metavar="TEXT", words="the beginning of an answer",
        help="Let each answer begin with this text; the model continues it.",
    )  # fmt: skip
    begins_reasoning: str = request_field("")
    may_begin_anew: bool = request_field(False)
    keep_reasoning: bool | None = request_field(
        None, flag="--keep-reasoning/--no-keep-reasoning",
        help="Keep the reasoning of earlier answers in the prompt, or leave it out. Default: keep it where the "
        "template can, or where tools were called and the context window has room.",
        in_server=True, preset="model", keys=("keep_reasoning", "chat_template_kwargs.preserve_reasoning"),
        servers=dict.fromkeys(("llmrun", "llamacpp"), "chat_template_kwargs.preserve_reasoning"),
        words="whether to keep earlier reasoning", in_python=True, in_prompt=True, needs_template=True,
    )  # fmt: skip
    arrived: float = request_field(0.0)

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def thinks(self) -> bool | None:
        """Whether the model may reason; None leaves it to the chat template."""
        if self.thinking is None and self.reasoning_effort is not None:
            return self.reasoning_effort != "none"
        return self.thinking


UNSET = AnswerRequest()
REQUEST_FIELDS: dict[str, RequestField] = {
    each.name: each.metadata["request"]._replace(type=str(each.type))
    for each in fields(AnswerRequest)
    if "request" in each.metadata
}
"""The fields of AnswerRequest that are described, in their order."""
KINDS.update({name: kind for name, row in REQUEST_FIELDS.items() if (kind := row.kind) is not None})


def fields_with(**facts: Any) -> tuple[str, ...]:
    """Return the names of the fields of AnswerRequest with these facts, see RequestField."""
    wanted = facts.items()
    return tuple(
        name for name, row in REQUEST_FIELDS.items() if all(getattr(row, fact) == value for fact, value in wanted)
    )


def values_with(request: AnswerRequest, **facts: Any) -> dict[str, Any]:
    """Return the values of the fields with these facts."""
    return {name: getattr(request, name) for name in fields_with(**facts)}


def without(request: AnswerRequest, **facts: Any) -> AnswerRequest:
    """Return a request without values of the fields with these facts."""
    return replace(request, **values_with(UNSET, **facts))


def given_values(request: AnswerRequest) -> dict[str, Any]:
    """Return the values that are not the defaults."""
    values = {each.name: getattr(request, each.name) for each in fields(request)}
    return {name: value for name, value in values.items() if value != getattr(UNSET, name)}


def with_defaults(request: AnswerRequest, defaults: AnswerRequest) -> AnswerRequest:
    """Return a request with other defaults of what it leaves open."""
    limits = {each.name: getattr(request.limits, each.name) for each in fields(Limits)}
    given = {name: value for name, value in limits.items() if value != getattr(UNSET.limits, name)}
    return replace(defaults, **{**given_values(request), "limits": replace(defaults.limits, **given)})


def begun_anew(request: AnswerRequest) -> AnswerRequest:
    """Return the request for another answer after the one that a request would continue."""
    if not (request.begins or request.begins_reasoning):
        return request
    earlier = Message("assistant", request.begins, reasoning=request.begins_reasoning)
    return replace(request, messages=(*request.messages, earlier), begins="", begins_reasoning="")


def characters(messages: Iterable[Message], tools: Iterable[Tool] = ()) -> int:
    """Return the length of all texts of a conversation and its tools."""
    parts = (*(message.texts for message in messages), *tools)
    return sum(len(text) for part in parts for text in part)


def rendering_share(messages: Iterable[Message], tools: Iterable[Tool] = ()) -> float:
    """Return the seconds that a chat template may take for the length of the conversation, added to the fixed limit."""
    return characters(messages, tools) / _RENDERED_CHARACTERS_PER_SECOND


# ---- front -> engine -------------------------------------------------------------------------------


class Generate(NamedTuple):
    """Generate an answer; answered by Rendering .. Finished, or Failed."""

    request: int
    asked: AnswerRequest


class Cancel(NamedTuple):
    """Stop a request as soon as possible; it still ends with Finished."""

    request: int


class Job(NamedTuple):
    """Run a job, see llmrun.protocol.jobs; answered by JobUpdate*, then JobDone or Failed.

    `arguments` is the job's command, and JSON data in the process that receives it; updates and results likewise.
    """

    request: int
    name: str
    arguments: Any


# ---- engine -> front -------------------------------------------------------------------------------


Rewriting = Literal["system", "calls", "reasoning", "neighbours", "question", "opening", "tools"]


class Rendering(NamedTuple):
    """The engine begins to render the chat template of a Generate or count_tokens; the front's time limit starts."""

    request: int


class Rendered(NamedTuple):
    """The chat template is rendered; the front's time limit ends, before tokenization and prefill."""

    request: int


class MediaAccepted(NamedTuple):
    """An image or an audio file of a Generate was decoded, and brought into a form that the model takes."""

    request: int
    name: str  # as in Media
    tokens: int  # in the prompt, with the ones that enclose it
    width: int = 0  # pixels of an image
    height: int = 0
    seconds: float = 0.0  # of audio


class PromptDifference(NamedTuple):
    """The first difference between a prompt and the most similar cached one: tokens before it, and the texts there."""

    position: int
    cached: str
    prompt: str


class PromptHistory(NamedTuple):
    """The beginning of a prompt that stands as it was computed and generated, instead of as the template writes it."""

    answers: int  # answers in it that have the tokens that the model generated
    tokens: int
    is_shortened: bool = False  # none stands: the window got narrow, and reasoning of earlier turns was left out
    kept_tools: int = 0  # tools of the conversation that the request left out; the prompt describes them as before


class Started(NamedTuple):
    """The prompt is tokenized, and prefill begins.

    Attributes:
        prompt_tokens: tokens of the whole prompt.
        reused_tokens: prompt tokens found in the KV cache, which need no prefill.
        seed: of this answer's random generator.
        thinking: the prompt ends inside the reasoning, so that the answer begins there.
        thinking_tags: opening and closing tag of the reasoning, by this request's chat template; none if the model does
            not reason.
        tool_syntax: text that begins a tool call; "" if the answer can have none.
        rewritten: of the conversation, as the chat template demands; each is reported once.
        difference: None if the prompt continues a cached one, or resembles none.
        history: None if the chat template wrote the whole prompt in its own form.
        left_out: what can't be enforced of the schemas of tools, e.g. "tools.f.parameters.properties.x.pattern".
    """

    request: int
    prompt_tokens: int
    reused_tokens: int
    seed: int
    thinking: bool = False
    thinking_tags: tuple[str, ...] = ()
    tool_syntax: str = ""
    rewritten: tuple[Rewriting, ...] = ()
    difference: PromptDifference | None = None
    history: PromptHistory | None = None
    left_out: tuple[str, ...] = ()


class PrefillProgress(NamedTuple):
    """The number of prompt tokens prefilled so far, without reused ones, and the seconds spent; at last all of them."""

    request: int
    tokens: int
    seconds: float


DraftSource = Literal["prompt", "answer", "model", "heads", "probe"]
"""What drafts a token: the text that followed the same tokens in the prompt or in the answer, a draft model, the heads
of the model itself, or the measurement of a decode step."""


class DraftedToken(NamedTuple):
    """The token that a draft had in a place of the answer, and that a decode step verified there."""

    source: DraftSource
    depth: int  # its place in the draft, from 1
    text: str
    accepted: bool  # it was sampled; else another one was, and the rest of the draft was dropped
    probability: float | None = None  # by the draft model or the heads; None from the text


class TokenLogprob(NamedTuple):
    """The log-probability of one token of the answer."""

    text: str  # the token's text; bytes that are not a whole character are U+FFFD
    bytes: tuple[int, ...]  # the token's bytes
    logprob: float  # natural logarithm of its probability
    top: tuple[tuple[str, tuple[int, ...], float], ...]  # (text, bytes, logprob) of the most likely tokens in its place
    draft: DraftedToken | None = None  # in its place
    ids: tuple[int, ...] = ()  # of the token and of those in `top`; none if a remote server does not tell them


PartKind = Literal["text", "reasoning", "reasoning_end", "call", "arguments", "call_end"]


class AnswerPart(NamedTuple):
    """A piece of the answer of one kind."""

    kind: PartKind  # "call" begins a tool call, "arguments" continues its JSON; the two ends complete what they name
    text: str = ""  # the tool's name for "call"; "" for the two ends
    call_id: str = ""  # of a "call"; "" if the model wrote none, until ResponseAccumulator makes one
    logprobs: tuple[TokenLogprob, ...] = ()  # of the tokens of "text"; ResponseAccumulator finds them


class TextDelta(NamedTuple):
    """The next piece of the answer, in whole characters.

    Attributes:
        text: raw text, with reasoning tags and tool call syntax.
        tokens: number of tokens in it.
        logprobs: log-probabilities of the tokens whose text begins in it, if they were requested.
        drafted: the last token was drafted, and verified by the decode step that gave an earlier token.
        parts: the same without tags and syntax; None if all of it is answer text.
        ids: of the tokens that are certain with it, if they were requested.
    """

    request: int
    text: str
    tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()
    drafted: bool = False
    parts: tuple[AnswerPart, ...] | None = None
    ids: tuple[int, ...] = ()

    @property
    def answer_parts(self) -> tuple[AnswerPart, ...]:
        """The parts, also if all of it is answer text."""
        if self.parts is None:
            return (AnswerPart("text", self.text),) if self.text else ()
        return self.parts


@dataclass(frozen=True, slots=True)
class Stats:
    """Token counts and times of one answer. Seconds are wall clock.

    Attributes:
        prompt_tokens: tokens of the whole prompt.
        reused_tokens: prompt tokens found in the KV cache.
        prefill_seconds: time for prompt_tokens - reused_tokens.
        completion_tokens: sampled tokens, the end token included.
        decode_seconds: time from the first sampled token to the last.
        ttft_seconds: time to first token, from the request's arrival: when a server had read it, or its question was
            sent in a terminal. Its parts are the seconds of template, tokenizing, grammar, queue and prefill.
        itl_p50_seconds: inter-token latency, median.
        itl_p95_seconds: inter-token latency, 95th percentile.
        context_used: tokens in the KV cache after the answer.
        n_ctx: context window in tokens.
        overhead_seconds: part of decode_seconds spent outside llama_decode, per token.
        seed: of this answer's random generator.
        retracted_tokens: tokens sampled, then removed because they completed a banned phrase.
        drafted_tokens: draft tokens verified by the model.
        accepted_tokens: drafted tokens that the sampler accepted.
        decode_steps: batches that gave at least one token.
        draft_steps: decode steps of the draft model, or of the model's prediction heads.
        model_drafted, model_accepted: parts of drafted_tokens and accepted_tokens from these; others are from the text.
        media_tokens: prompt tokens of images and audio.
        media_seconds: part of prefill_seconds spent encoding images and audio; cached ones take none.
        loops_closed: how often the reasoning repeated itself and was closed.
        threads: threads of the last decode steps, and those of a quiet machine; fewer decode while other programs need
            the cores. Zeros where their number does not change.
        over_network: a remote server answered; times were measured on this side and include the network.
        queue_seconds: part of ttft_seconds before the request got a slot of the KV cache, without its preparation: for
            the model's load, for the preparation of other requests, for the slot.
        template_seconds: part of ttft_seconds for the chat template: its compilation and all renderings.
        tokenize_seconds: part of ttft_seconds for the rest of the preparation.
        grammar_seconds: part of ttft_seconds for the compilation of the grammar.
        draft_gain: expected decode speed by drafts, relative to plain decoding; 0 without drafts.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    prefill_seconds: float = 0.0
    completion_tokens: int = 0
    decode_seconds: float = 0.0
    ttft_seconds: float = 0.0
    itl_p50_seconds: float = 0.0
    itl_p95_seconds: float = 0.0
    context_used: int = 0
    n_ctx: int = 0
    overhead_seconds: float = 0.0
    seed: int = 0
    retracted_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    decode_steps: int = 0
    draft_steps: int = 0
    model_drafted: int = 0
    model_accepted: int = 0
    media_tokens: int = 0
    media_seconds: float = 0.0
    loops_closed: int = 0
    threads: tuple[int, int] = (0, 0)
    over_network: bool = False
    queue_seconds: float = 0.0
    template_seconds: float = 0.0
    tokenize_seconds: float = 0.0
    grammar_seconds: float = 0.0
    draft_gain: float = 0.0

    @property
    def ttft_parts(self) -> dict[str, float]:
        """The parts of ttft_seconds by name, in their order."""
        return {
            "template": self.template_seconds,
            "tokenize": self.tokenize_seconds,
            "grammar": self.grammar_seconds,
            "queue": self.queue_seconds,
            "prefill": self.prefill_seconds,
        }

    @property
    def prefill_rate(self) -> float:
        """Prefill speed in tokens/s; 0 if nothing was prefilled."""
        tokens = self.prompt_tokens - self.reused_tokens
        return tokens / self.prefill_seconds if self.prefill_seconds > 0 else 0.0

    @property
    def is_full(self) -> bool:
        """True if the context window has no more room."""
        return 0 < self.n_ctx <= self.context_used

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens of a decode step, more than 1 with accepted drafts; 0 without steps."""
        return self.completion_tokens / self.decode_steps if self.decode_steps else 0.0

    @property
    def decode_rate(self) -> float:
        """Decode speed in tokens/s; 0 with fewer than two tokens."""
        tokens = self.completion_tokens - 1
        return tokens / self.decode_seconds if tokens > 0 and self.decode_seconds > 0 else 0.0


class Finished(NamedTuple):
    """The answer ended.

    Attributes:
        reason: "stop" (end token or stop text), "length" (max_tokens or full context), "cancelled" or "repeats".
        stats: token counts and times.
        detail: the stop text that ended it, or the repeated text.
        drafts: those that its steps verified.
    """

    request: int
    reason: str
    stats: Stats
    detail: str = ""
    drafts: tuple[StepDraft, ...] = ()


class JobUpdate(NamedTuple):
    """The progress of a job: the job's own update."""

    request: int
    data: Any


class JobDone(NamedTuple):
    """The result of a job."""

    request: int
    result: Any


class EngineTraceback(Exception):  # noqa: N818 - the text of one
    """The cause of an error in the engine, which only its text has left."""


class Failed(NamedTuple):
    """A request failed; the fields are those of LlmrunError and ContextOverflowError."""

    request: int
    code: str
    what: str
    why: str = ""
    hint: str = ""
    size: tuple[int, int] | None = None
    trace: str = ""  # the engine's traceback, of an InternalError

    @classmethod
    def of(cls, error: LlmrunError, request: int) -> Failed:
        size = error.size if isinstance(error, ContextOverflowError) else None
        trace = _traceback(error) if isinstance(error, InternalError) else ""
        return cls(request, error.code, error.what, error.why, error.hint, size, trace)

    def error(self) -> LlmrunError:
        """Return the error, of the class that the engine raised."""
        if self.code == ContextOverflowError.code:
            return ContextOverflowError(self.what, why=self.why, hint=self.hint, size=self.size)
        error = BY_CODE.get(self.code, LlmrunError)(self.what, why=self.why, hint=self.hint)
        error.__cause__ = EngineTraceback(self.trace) if self.trace else None
        return error


def _traceback(error: InternalError) -> str:
    import traceback  # slow: both processes create these messages at every start

    cause = error.__cause__
    return "" if cause is None else "".join(traceback.format_exception(type(cause), cause, cause.__traceback__))


Command = Load | Generate | Cancel | Job
Event = (
    LoadProgress
    | Loaded
    | Rendering
    | Rendered
    | MediaAccepted
    | Started
    | PrefillProgress
    | TextDelta
    | Finished
    | JobUpdate
    | JobDone
    | Failed
)
Frame = Command | Event
