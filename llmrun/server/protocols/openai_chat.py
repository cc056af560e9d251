"""OpenAI's chat completions. Pure; see llmrun.server.asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llmrun.errors import LlmrunError, UsageError
from llmrun.protocol.messages import AnswerRequest, Message, Stats, TokenLogprob, ToolCall
from llmrun.protocol.params import MOST_TOKENS
from llmrun.server import sse
from llmrun.server.asked import Asked, Begun, CallArguments, CallBegun, Envelope, Part, Text, Thought
from llmrun.server.protocols.fields import Fields
from llmrun.server.protocols.openai import FINISH_REASONS, error_body, logprobs, usage
from llmrun.server.protocols.sampling import (
    MOST_ANSWERS,
    MOST_TOP_LOGPROBS,
    read_grammar_fields,
    read_limits,
    read_sampling,
)
from llmrun.server.protocols.tools import checked_tools, tool, tool_call, tool_name

__all__ = ["error_body", "read", "writer"]

_ROLES = {"developer": "system"}


def read(body: Mapping[str, Any]) -> Asked:
    """What a client asks for.

    Raises:
        UsageError: a field has an invalid value; names it.
        BadGrammarError: the JSON schema or the grammar is broken.
    """
    fields = Fields(body)
    choice = _tool_choice(fields)
    request = AnswerRequest(
        messages=_messages(fields),
        limits=read_limits(fields, "max_completion_tokens", "max_tokens", "n_predict"),
        grammar=read_grammar_fields(fields),
        thinking=_thinking(fields),
        thinking_tokens=fields.whole("thinking_tokens", 0, MOST_TOKENS),
        stops_repeats=bool(fields.flag("stops_repeats")),
        logprobs=_logprobs(fields),
        salt=fields.text("cache_salt") or "",
        tools=checked_tools((tool(each, "parameters") for each in _functions(fields)), choice),
        tool_choice=choice,
        parallel_calls=fields.flag("parallel_tool_calls") is not False,
    )
    return Asked(
        fields.text("model") or "",
        request,
        read_sampling(fields),
        n=fields.whole("n", 1, MOST_ANSWERS) or 1,
        stream=bool(fields.flag("stream")),
    )


def _messages(fields: Fields) -> tuple[Message, ...]:
    """The conversation. Results of calls get the names of their tools, which some templates want."""
    names: dict[str, str] = {}
    messages: list[Message] = []
    for said in fields.objects("messages"):
        role = said.needed_text("role")
        calls = tuple(_call(each) for each in said.objects("tool_calls"))
        names.update((call.id, call.name) for call in calls)
        call_id = said.text("tool_call_id") or ""
        name = names.get(call_id, said.text("name") or "") if role == "tool" else ""
        messages.append(Message(_ROLES.get(role, role), content_text(said), calls, call_id, name))
    if not messages:
        raise UsageError("messages is missing or empty")
    return tuple(messages)


def _call(fields: Fields) -> ToolCall:
    return tool_call(fields.text("id") or "", _function(fields))


def _function(fields: Fields) -> Fields:
    found = fields.object("function")
    if found is None:
        raise UsageError(f"{fields.name('function')} is missing")
    return found


def _functions(fields: Fields) -> Iterator[Fields]:
    """The tools that are functions; there are others, which need OpenAI's servers."""
    return (_function(each) for each in fields.objects("tools") if each.text("type") in (None, "function"))


def _tool_choice(fields: Fields) -> str:
    """Which tool has to be called, as AnswerRequest has it."""
    if isinstance(fields.data.get("tool_choice"), Mapping):
        return f"={tool_name(_function(Fields(fields.data['tool_choice'], fields.name('tool_choice'))))}"
    return fields.choice("tool_choice", "auto", "none", "required") or "auto"


def content_text(fields: Fields) -> str:
    """A message's content: a string, or the texts of a list of parts.

    Raises:
        UsageError: it has something else than text in it.
    """
    content = fields.data.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for part in fields.objects("content"):
        kind = part.needed_text("type")
        if kind not in {"text", "input_text", "output_text", "refusal"}:
            raise UsageError(f"{part.name('type')}: {kind[:80]!r} is not supported", why="only text is")
        texts.append(part.needed_text("refusal" if kind == "refusal" else "text"))
    return "".join(texts)


def _thinking(fields: Fields) -> bool | None:
    """Whether a reasoning model thinks: OpenAI's reasoning_effort, or what other servers give the chat template."""
    if fields.text("reasoning_effort") == "none":
        return False
    given = fields.object("chat_template_kwargs")
    return None if given is None else given.flag("enable_thinking")


def _logprobs(fields: Fields) -> int | None:
    top = fields.whole("top_logprobs", 0, MOST_TOP_LOGPROBS)
    return (top or 0) if fields.flag("logprobs") else None


def writer(body: Mapping[str, Any], envelope: Envelope) -> ChatWriter:
    """What writes the answer to a body that read() took."""
    options = Fields(body).object("stream_options")
    asked_for_usage = options is not None and bool(options.flag("include_usage"))
    return ChatWriter(envelope, Fields(body).whole("n", 1, MOST_ANSWERS) or 1, has_usage=asked_for_usage)


class _Choice:
    """One of the answers to a prompt, as far as it has come."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.thoughts: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.calls: list[dict[str, Any]] = []
        self.finish_reason: str | None = None
        self.stats = Stats()

    def message(self) -> dict[str, Any]:
        """As OpenAI writes a whole answer."""
        text = "".join(self.texts)
        message: dict[str, Any] = {"role": "assistant", "content": None if self.calls and not text else text}
        if self.thoughts:
            message["reasoning_content"] = "".join(self.thoughts).strip()
        if self.calls:
            message["tool_calls"] = self.calls
        return {**message, "refusal": None}


class ChatWriter:
    """Writes chat completions and their chunks."""

    media_type = sse.EVENT_STREAM

    def __init__(self, envelope: Envelope, n: int, *, has_usage: bool) -> None:
        self._envelope, self._has_usage = envelope, has_usage
        self._choices = [_Choice() for _ in range(n)]
        self._prompt_tokens = self._cached_tokens = 0

    def begin(self) -> bytes:
        """The role of each answer, which clients want to hear first."""
        return b"".join(self._chunk(index, {"role": "assistant", "content": ""}) for index in range(len(self._choices)))

    def feed(self, part: Part) -> bytes:
        """See asked.Writer."""
        choice = self._choices[part.choice]
        if isinstance(part, Begun):
            self._prompt_tokens = part.prompt_tokens
            if part.choice == 0:
                self._cached_tokens = part.cached_tokens
            return b""
        if isinstance(part, Text):
            choice.texts.append(part.text)
            choice.logprobs += part.logprobs
            return self._chunk(part.choice, {"content": part.text}, chosen=part.logprobs)
        if isinstance(part, Thought):
            choice.thoughts.append(part.text)
            return self._chunk(part.choice, {"reasoning_content": part.text})
        if isinstance(part, (CallBegun, CallArguments)):
            return self._call(choice, part)
        choice.stats = part.stats
        choice.finish_reason = FINISH_REASONS.get(part.reason, "stop")
        return self._chunk(part.choice, {}, finish_reason=choice.finish_reason)

    def _call(self, choice: _Choice, part: CallBegun | CallArguments) -> bytes:
        if isinstance(part, CallBegun):
            function = {"name": part.name, "arguments": ""}
            choice.calls.append({"id": part.id, "type": "function", "function": dict(function)})
            delta = {"index": part.call, "id": part.id, "type": "function", "function": function}
        else:
            choice.calls[part.call]["function"]["arguments"] += part.text
            delta = {"index": part.call, "function": {"arguments": part.text}}
        return self._chunk(part.choice, {"tool_calls": [delta]})

    def end(self) -> bytes:
        """Usage, where it was asked for, and the last line."""
        if not self._has_usage:
            return sse.DONE
        return sse.event({**self._head("chat.completion.chunk"), "choices": [], "usage": self._usage()}) + sse.DONE

    def error(self, error: LlmrunError) -> bytes:
        """See asked.Writer."""
        return sse.event(error_body(error, error.http_status))

    def whole(self) -> dict[str, Any]:
        """See asked.Writer."""
        choices = [
            {
                "index": index,
                "message": choice.message(),
                "logprobs": logprobs(choice.logprobs) if choice.logprobs else None,
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(self._choices)
        ]
        return {**self._head("chat.completion"), "choices": choices, "usage": self._usage()}

    def _usage(self) -> dict[str, Any]:
        return usage(self._prompt_tokens, self._cached_tokens, (choice.stats for choice in self._choices))

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._envelope.id,
            "object": kind,
            "created": self._envelope.created,
            "model": self._envelope.model,
        }

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        chosen: tuple[TokenLogprob, ...] = (),
        finish_reason: str | None = None,
    ) -> bytes:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs(chosen) if chosen else None,
            "finish_reason": finish_reason,
        }
        data = {**self._head("chat.completion.chunk"), "choices": [choice]}
        return sse.event({**data, "usage": None} if self._has_usage else data)
