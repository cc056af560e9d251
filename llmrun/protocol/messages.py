"""Everything that crosses the pipe between front and engine, as immutable records.

Owns what can be said; must not know processes, llama.cpp, or how it is written down (frames.py). Every command has a
`request`, a number that the front chooses, and every event names the command it belongs to by it. Numbers begin at 1:
0 is the load's, of which an engine has one at a time.

Most are named tuples: both processes make these classes at every start, and a dataclass takes ten times as long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from llmrun.errors import BY_CODE, TEXT, LlmrunError, UsageError, brief, require
from llmrun.grammar import Grammar
from llmrun.protocol.adapters import AdapterScale
from llmrun.protocol.arguments import check_fields
from llmrun.protocol.engine_status import EngineStatus, GetStatus
from llmrun.protocol.finished_answers import AnswerExplanation, Explain, SaveState, StateSaved
from llmrun.protocol.loading import Load, Loaded, LoadProgress, Open
from llmrun.protocol.params import Limits, SamplingParams
from llmrun.protocol.speculation import MeasureSteps, Speculation, StepsMeasured

PICTURE_BEGINNINGS = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF8", b"BM")
"""Of the files that the engine can decode: PNG, JPEG, GIF, BMP."""
ROLES = ("system", "user", "assistant", "tool")


class Tool(NamedTuple):
    """A function that the model may call; parameters is the JSON schema of its arguments, as text."""

    name: str
    description: str = ""
    parameters: str = "{}"


class ToolCall(NamedTuple):
    """A call that the model made.

    Attributes:
        id: names the call to the message that brings its result.
        arguments: a JSON object, as text.
    """

    id: str
    name: str
    arguments: str


class Image(NamedTuple):
    """A picture in a message. Only the engine ever decodes it: a hostile one kills no more than that.

    Attributes:
        data: the bytes of a PNG, JPEG, GIF or BMP file, in base64.
        name: of the file, for what is said about it.
        at: how many characters of the message's content stand before it.
    """

    data: str
    name: str = ""
    at: int = 0


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation. role is "system", "user", "assistant" or "tool", which is a call's result.

    Attributes:
        tool_calls: what an assistant called.
        tool_call_id: of the call that a tool's content is the result of.
        name: of that tool.
        pictures: in the order in which they stand in the content.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    pictures: tuple[Image, ...] = ()

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise UsageError(f"there is no role {brief(self.role)}", why=f"a message is of one of {', '.join(ROLES)}")
        require("content of a message", self.content, TEXT)

    @property
    def texts(self) -> tuple[str, ...]:
        """All that users, models and tools wrote in it."""
        return self.content, self.tool_call_id, self.name, *(text for call in self.tool_calls for text in call)


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """What is to be answered, a conversation or a plain text, and how.

    Attributes:
        messages: the whole conversation; empty when `prompt` is used.
        prompt: plain text to continue, without a chat template.
        sampling: how tokens are chosen.
        limits: when the answer ends.
        template: Jinja text, or "chatml", in place of the model's own chat template.
        grammar: what the answer has to follow, see llmrun.grammar; None is anything.
        thinking: whether a model that can think before it answers does; None leaves it to its template.
        thinking_tokens: how many tokens it may think at most.
        stops_repeats: end an answer that repeats itself, with the reason "repeats".
        remember: how many of the answer's last tokens Explain can ask about.
        moves: turns have left the conversation since the last answer; what the KV cache holds behind them is moved,
            which spares their prefill. What they saw of the turns that left stays in them.
        logprobs: tell how likely each token was, and so many of the likeliest in its place; None tells nothing.
        salt: what others have computed of the same prompt is used only where their salt is the same.
        tools: what the model may call.
        tool_choice: "auto", "none", "required" or "=" and the name of the one tool that has to be called.
        parallel_calls: whether an answer may have several calls.
        speculation: how tokens are drafted and verified; None decodes one token a step.
        adapters: which of the adapters that the model was loaded with count, and how strongly; None is as loaded.
        begins: text that the answer begins with, behind any reasoning; the model continues it.
    """

    messages: tuple[Message, ...] = ()
    prompt: str | None = None
    sampling: SamplingParams = SamplingParams()
    limits: Limits = Limits()
    template: str | None = None
    grammar: Grammar | None = None
    thinking: bool | None = None
    thinking_tokens: int | None = None
    stops_repeats: bool = False
    remember: int = 0
    moves: bool = False
    logprobs: int | None = None
    salt: str = ""
    tools: tuple[Tool, ...] = ()
    tool_choice: str = "auto"
    parallel_calls: bool = True
    speculation: Speculation | None = None
    adapters: tuple[AdapterScale, ...] | None = None
    begins: str = ""

    def __post_init__(self) -> None:
        check_fields(self)


# ---- front -> engine -------------------------------------------------------------------------------


class Generate(NamedTuple):
    """Answer something; answered by Rendering .. Finished, or Failed."""

    request: int
    asked: AnswerRequest


class CountTokens(NamedTuple):
    """How many tokens a conversation has; answered by Rendering .. Counted, or Failed."""

    request: int
    asked: AnswerRequest


class Tokenize(NamedTuple):
    """The token ids of a plain text; answered by Tokenized, or Failed.

    Attributes:
        special: texts of control tokens become these tokens.
    """

    request: int
    text: str
    special: bool = False


class Detokenize(NamedTuple):
    """The text of token ids; answered by Detokenized, or Failed."""

    request: int
    tokens: tuple[int, ...]


class Cancel(NamedTuple):
    """Stop that request as soon as possible; it still ends with Finished."""

    request: int


class Job(NamedTuple):
    """Do something other than answer, see llmrun.protocol.jobs; answered by JobUpdate*, then JobDone or Failed.

    Attributes:
        name: of the job.
        arguments: its command, as JSON data.
    """

    request: int
    name: str
    arguments: dict[str, Any]


# ---- engine -> front -------------------------------------------------------------------------------


class Rendering(NamedTuple):
    """The chat template of a Generate or a Count is being rendered; the front's clock for it starts now."""

    request: int


class Rendered(NamedTuple):
    """The template gave the prompt's text; the front's clock for it ends here, before tokens and prefill."""

    request: int


class ImageAccepted(NamedTuple):
    """A picture of a Generate was decoded and cut to what the model takes.

    Attributes:
        name: as it came.
        width: in pixels.
        height: in pixels.
        tokens: that it takes in the prompt, with those that enclose it.
    """

    request: int
    name: str
    width: int
    height: int
    tokens: int


class Started(NamedTuple):
    """The prompt is tokens now, and prefill begins.

    Attributes:
        prompt_tokens: tokens of the whole prompt.
        reused_tokens: how many of them were in the KV cache already and need no prefill.
        seed: of this answer's random generator.
        thinking: the answer begins inside the model's thoughts.
        thinking_tags: the texts between which the model thinks, by this request's chat template; none if it does not.
        tool_syntax: how it writes calls of tools, see toolcalls.SYNTAXES; "" where the answer can have none.
    """

    request: int
    prompt_tokens: int
    reused_tokens: int
    seed: int
    thinking: bool = False
    thinking_tags: tuple[str, ...] = ()
    tool_syntax: str = ""


class PrefillProgress(NamedTuple):
    """Prompt tokens prefilled so far in this request, reused ones not counted."""

    request: int
    tokens: int
    seconds: float


class TokenLogprob(NamedTuple):
    """How likely a token of the answer was.

    Attributes:
        text: of the token; bytes that are not a whole character as U+FFFD.
        bytes: of the token.
        logprob: natural logarithm of its probability.
        top: (text, bytes, logprob) of the likeliest tokens in its place.
    """

    text: str
    bytes: tuple[int, ...]
    logprob: float
    top: tuple[tuple[str, tuple[int, ...], float], ...]


PartKind = Literal["text", "reasoning", "reasoning_end", "call", "arguments", "call_end"]


class AnswerPart(NamedTuple):
    """A piece of the answer of one kind.

    Attributes:
        kind: "call" begins a tool call, "arguments" continues its JSON; the two ends complete what they name.
        text: the tool's name for "call"; "" for the two ends.
    """

    kind: PartKind
    text: str = ""


class TextDelta(NamedTuple):
    """The next piece of the answer, in whole characters.

    Attributes:
        text: as the model wrote it, with the tags of its reasoning and the syntax of its calls.
        tokens: number of tokens that it took.
        logprobs: of the tokens whose text begins in it, if they were requested.
        drafted: its last token was drafted, and verified by the step that chose an earlier one.
        parts: the same without tags and syntax; None if it is nothing but text.
    """

    request: int
    text: str
    tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()
    drafted: bool = False
    parts: tuple[AnswerPart, ...] | None = None

    @property
    def answer_parts(self) -> tuple[AnswerPart, ...]:
        """The parts, also if it is nothing but text."""
        if self.parts is None:
            return (AnswerPart("text", self.text),) if self.text else ()
        return self.parts


@dataclass(frozen=True, slots=True)
class Stats:
    """What one answer cost. Seconds are wall clock.

    Attributes:
        prompt_tokens: tokens of the whole prompt.
        reused_tokens: of these, found in the KV cache.
        prefill_seconds: for prompt_tokens - reused_tokens.
        completion_tokens: sampled tokens, the end token included.
        decode_seconds: from the first sampled token to the last.
        ttft_seconds: time to first token, from the request's arrival in the engine.
        itl_p50_seconds: inter-token latency, median.
        itl_p95_seconds: inter-token latency, 95th percentile.
        context_used: tokens in the KV cache afterwards.
        n_ctx: context window in tokens.
        overhead_seconds: part of decode_seconds spent outside llama_decode, per token.
        seed: of this answer's random generator.
        retracted_tokens: sampled, and taken back because they made a banned phrase.
        drafted_tokens: went through the model as guesses.
        accepted_tokens: of these, that the sampler chose too.
        decode_steps: batches that gave at least one token.
        draft_steps: of a draft model.
        picture_tokens: of prompt_tokens, those that are part of pictures.
        picture_seconds: part of prefill_seconds, for turning pictures into vectors; those reused take none.
        over_network: a server answered: its tokens, but times as they were from here, the network's among them.
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
    picture_tokens: int = 0
    picture_seconds: float = 0.0
    over_network: bool = False

    @property
    def prefill_rate(self) -> float:
        """Prefill speed in tokens/s; 0 when nothing was prefilled."""
        tokens = self.prompt_tokens - self.reused_tokens
        return tokens / self.prefill_seconds if self.prefill_seconds > 0 else 0.0

    @property
    def is_full(self) -> bool:
        """Whether the context window has no more room."""
        return 0 < self.n_ctx <= self.context_used

    @property
    def decode_rate(self) -> float:
        """Decode speed in tokens/s; 0 with fewer than two tokens."""
        tokens = self.completion_tokens - 1
        return tokens / self.decode_seconds if tokens > 0 and self.decode_seconds > 0 else 0.0


class Finished(NamedTuple):
    """The answer ended.

    Attributes:
        reason: "stop" (end token or stop string), "length" (max tokens or context), "cancelled" or "repeats".
        detail: the stop string that ended it, or the text that it repeated.
    """

    request: int
    reason: str
    stats: Stats
    detail: str = ""


class TokenCount(NamedTuple):
    """How many tokens a conversation has.

    Attributes:
        each: tokens of each message's content.
        total: of the whole prompt, with what the template writes between and behind the messages.
    """

    request: int
    each: tuple[int, ...]
    total: int


class Tokenized(NamedTuple):
    """The token ids of a text."""

    request: int
    tokens: tuple[int, ...]


class Detokenized(NamedTuple):
    """The text of token ids, control tokens as they are written; bytes that are no characters as U+FFFD."""

    request: int
    text: str


class JobUpdate(NamedTuple):
    """How far a job is, as JSON data of the job's own update."""

    request: int
    data: dict[str, Any]


class JobDone(NamedTuple):
    """What a job came to, as JSON data of its own result."""

    request: int
    result: dict[str, Any]


class Failed(NamedTuple):
    """A request ended in an error that the engine could explain."""

    request: int
    code: str
    what: str
    why: str = ""
    hint: str = ""

    @classmethod
    def of(cls, error: LlmrunError, request: int) -> Failed:
        """The frame for an error."""
        return cls(request, error.code, error.what, error.why, error.hint)

    def error(self) -> LlmrunError:
        """The error again, of its own class."""
        return BY_CODE.get(self.code, LlmrunError)(self.what, why=self.why, hint=self.hint)


Command = (
    Open
    | Load
    | Generate
    | CountTokens
    | Tokenize
    | Detokenize
    | MeasureSteps
    | Cancel
    | Explain
    | SaveState
    | GetStatus
    | Job
)
Event = (
    LoadProgress
    | Loaded
    | Rendering
    | Rendered
    | ImageAccepted
    | Started
    | PrefillProgress
    | TextDelta
    | Finished
    | TokenCount
    | Tokenized
    | StepsMeasured
    | Detokenized
    | AnswerExplanation
    | StateSaved
    | EngineStatus
    | JobUpdate
    | JobDone
    | Failed
)
Frame = Command | Event
