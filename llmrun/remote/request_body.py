"""Requests in OpenAI's format, and the fields that a server does not support. Pure.

Must not know HTTP. Parameters that the user did not set are not sent: the server knows its model's own settings. Fields
beyond OpenAI's are sent only to servers known to support them, since others refuse the request or, worse, ignore them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

from llmrun.errors import UsageError
from llmrun.grammar import Grammar
from llmrun.protocol.codec import load_json
from llmrun.protocol.media import Media, beginning_of
from llmrun.protocol.messages import REQUEST_FIELDS, AnswerRequest, Message, Tool, given_values
from llmrun.protocol.params import DEFAULTS, PARAMETERS, SamplingParams
from llmrun.remote.answer_shapes import REASONING_DETAILS, REASONING_FIELDS, REASONING_TAGS
from llmrun.remote.server import ServedModel, Server

_LLMRUN = {name: name for name in PARAMETERS}
_OPENAI, _LLAMA_SERVER, _VLLM = (
    {name: row.servers[server] or name for name, row in PARAMETERS.items() if server in row.servers}
    for server in ("openai", "llamacpp", "vllm")
)
# The owner in a server's list of models -> our names of the parameters that it takes, and its own.
_SAMPLING = {"llmrun": _LLMRUN, "llamacpp": _LLAMA_SERVER, "vllm": _VLLM, "sglang": _VLLM}
_WORDS = {
    "ban": "phrases to ban",
    "grammar": "a GBNF grammar",
    "json_schema": "a JSON schema",
    "lark": "a Lark grammar",
    **{name: row.words for name, row in REQUEST_FIELDS.items() if row.words},
}
_OURS_BY_DEFAULT = frozenset({"stops_repeats"})  # on without the user's request; most servers lack it
_OPENAI_OWNERS = frozenset({"openai", "openai-internal", "system"})
_FILES_OF_TOOLS = "The files in the results of the tools:"
_BAN = -100  # OpenAI's bias for a banned token
_IMAGE_TYPES = {b"\x89PNG": "png", b"GIF8": "gif", b"BM": "bmp", b"RIFF": "webp"}
_AUDIO_TYPES = {b"RIFF": "wav", b"fLaC": "flac"}


class RequestBody(NamedTuple):
    """A request."""

    endpoint: str  # path after the server's address
    body: dict[str, Any]
    refused: tuple[str, ...]  # fields left out, by our names


def refused_fields(asked: AnswerRequest, model: ServedModel, named: Collection[str] | None = None) -> tuple[str, ...]:
    """Return the fields that the model's server does not support, by our names; see body_of()."""
    return body_of(asked, model, named).refused


def require_told(
    server: Server,
    model: ServedModel,
    asked: AnswerRequest,
    named: Collection[str] | None = None,
    *,
    yielding: Collection[str] = (),
) -> None:
    """Raise UsageError, with our names, if a server does not support a field of the request.

    Args:
        named: see body_of().
        yielding: fields of presets, which are left out where the server does not support them.
    """
    left_out = _OURS_BY_DEFAULT.union(yielding)
    if missing := [name for name in refused_fields(asked, model, named) if name not in left_out]:
        raise UsageError(
            f"{server.host} can't be told {', '.join(_WORDS.get(name, name) for name in missing)}",
            why="OpenAI's protocol has no such field, and this server is not known to have one of its own",
        )


def body_of(
    asked: AnswerRequest,
    model: ServedModel,
    named: Collection[str] | None = None,
    reasoning_name: str | None = None,
) -> RequestBody:
    """Return the request for a streamed answer.

    Args:
        named: fields of the sampling parameters set by the user; None is all that differ from the defaults.
        reasoning_name: where earlier reasoning goes, see answer_shapes.texts_of(); "" leaves it out, None decides by
            the kind of server.
    """
    sampling, refused = _sampling(asked.sampling, model.owner, named)
    extensions, refused_extensions = _extensions(asked, model.owner)
    if asked.prompt is None:
        endpoint, prompt = "/chat/completions", _conversation(asked, model.owner, reasoning_name)
    else:
        likeliest = {} if asked.logprobs is None else {"logprobs": asked.logprobs}
        endpoint, prompt = "/completions", {"prompt": asked.prompt, **likeliest}
    body: dict[str, Any] = {"model": model.name, **prompt, **sampling, **extensions}
    if asked.limits.max_tokens is not None:
        is_new = model.owner in _OPENAI_OWNERS and asked.prompt is None
        body["max_completion_tokens" if is_new else "max_tokens"] = asked.limits.max_tokens
    if asked.limits.stop:
        body["stop"] = list(asked.limits.stop)
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    return RequestBody(endpoint, {**body, **streamed}, (*refused, *refused_extensions))


def _sampling(
    sampling: SamplingParams, owner: str, named: Collection[str] | None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    known = _SAMPLING.get(owner, _OPENAI)
    if named is None:
        named = [name for name in _LLMRUN if getattr(sampling, name) != getattr(DEFAULTS, name)]
    body = {known[name]: getattr(sampling, name) for name in named if name in known}
    if sampling.logit_bias and "logit_bias" in body:
        biases = {str(token): _BAN if bias == -math.inf else bias for token, bias in sampling.logit_bias}
        body["logit_bias"] = biases
    return body, tuple(name for name in named if name not in known)


def _extensions(asked: AnswerRequest, owner: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the fields that OpenAI lacks or calls otherwise, and the refused ones."""
    is_llmrun, is_local = owner == "llmrun", owner in _SAMPLING
    takes_grammar = is_llmrun or owner == "llamacpp"
    grammar, is_raw = asked.grammar, asked.prompt is not None
    kind = grammar.kind if grammar else ""
    variables = {"chat_template_kwargs": load_json(asked.template_variables)}
    # Our name -> (requested, supported by the server, the server's fields).
    table: dict[str, tuple[bool, bool, dict[str, Any]]] = {
        "ignore_eos": (asked.limits.ignores_end, is_local, {"ignore_eos": True}),
        "ban": (bool(asked.limits.ban), is_llmrun, {"ban": list(asked.limits.ban)}),
        "template_variables": (asked.template_variables != "{}", is_local and not is_raw, variables),
        "begins": (
            bool(asked.begins or asked.begins_reasoning),
            is_local and not is_raw,
            {"continue_final_message": True, "add_generation_prompt": False},
        ),
        "json_schema": (
            kind == "json_schema",
            takes_grammar or not is_raw,
            _schema(grammar, is_raw=is_raw) if grammar and kind == "json_schema" else {},
        ),
        "grammar": (kind == "gbnf", takes_grammar, {"grammar": grammar.text if grammar else ""}),
        "lark": (kind == "lark", is_llmrun, {"grammar": grammar.text if grammar else ""}),
    }
    requested = {
        name: (is_supported, sent) for name, (is_requested, is_supported, sent) in table.items() if is_requested
    }
    body = {key: value for is_supported, sent in requested.values() if is_supported for key, value in sent.items()}
    refused = [name for name, (is_supported, _) in requested.items() if not is_supported]
    for name, value in given_values(asked).items():
        servers = REQUEST_FIELDS[name].servers if name in REQUEST_FIELDS else None
        if servers is None:
            continue
        path = servers.get(owner, servers.get(""))
        if path is None or (is_raw and REQUEST_FIELDS[name].needs_template):
            refused.append(name)
            continue
        holder, _, key = path.rpartition(".")
        place = body.setdefault(holder, {}) if holder else body
        place[key] = value
    return body, tuple(refused)


def _schema(grammar: Grammar, *, is_raw: bool) -> dict[str, Any]:
    schema = load_json(grammar.text)
    if is_raw:
        return {"json_schema": schema}
    strict = {"strict": True} if grammar.is_strict else {}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", **strict, "schema": schema}}}


def _conversation(asked: AnswerRequest, owner: str, reasoning_name: str | None) -> dict[str, Any]:
    messages = asked.messages
    if asked.begins or asked.begins_reasoning:
        messages = (*messages, Message("assistant", asked.begins, reasoning=asked.begins_reasoning))
    messages = tuple(_with_files_of_tools(messages))
    is_local = owner in _SAMPLING
    if is_local and reasoning_name in (None, REASONING_TAGS):
        reasoning_name = REASONING_FIELDS[0]
    sent = []
    for message, has_calls in zip(messages, _in_turns_with_calls(messages), strict=True):
        sent.append(_message(message))
        if reasoning_name and (message.reasoning if is_local else has_calls):
            _add_reasoning(sent[-1], message, reasoning_name)
    body: dict[str, Any] = {"messages": sent}
    if asked.logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": asked.logprobs}
    if asked.tools:
        body |= {"tools": [_tool(tool) for tool in asked.tools], "tool_choice": _choice(asked.tool_choice)}
        if not asked.parallel_calls:
            body["parallel_tool_calls"] = False
    return body


def _in_turns_with_calls(messages: Sequence[Message]) -> list[bool]:
    """Return for each message whether the model answers in it, in a turn with tool calls.

    There some servers require the reasoning, and others lose the plan without it; in other turns some refuse it.
    """
    turns = list(accumulate(m.role == "user" and m.content != _FILES_OF_TOOLS for m in messages))
    with_calls = {turn for turn, message in zip(turns, messages, strict=True) if message.tool_calls}
    return [message.role == "assistant" and turn in with_calls for turn, message in zip(turns, messages, strict=True)]


def _with_files_of_tools(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield messages in which the user sends images in results of tools: OpenAI's protocol has only text there."""
    files: list[Media] = []
    for message in messages:
        if files and message.role != "tool":
            yield Message("user", _FILES_OF_TOOLS, media=_at_end(files))
            files = []
        files += message.media if message.role == "tool" else ()
        yield replace(message, media=()) if message.role == "tool" else message
    if files:
        yield Message("user", _FILES_OF_TOOLS, media=_at_end(files))


def _at_end(files: Sequence[Media]) -> tuple[Media, ...]:
    return tuple(file._replace(at=len(_FILES_OF_TOOLS)) for file in files)


def _message(message: Message) -> dict[str, Any]:
    body: dict[str, Any] = {"role": message.role, "content": _content(message)}
    if message.tool_calls:
        body["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.role == "tool":
        body["tool_call_id"] = message.tool_call_id
    return body


def _add_reasoning(body: dict[str, Any], message: Message, name: str) -> None:
    """Add a message's reasoning to its body, in the shape in which the server sends it."""
    reasoning = message.reasoning
    if name in REASONING_FIELDS:
        if reasoning or message.tool_calls:  # DeepSeek refuses a message with calls and without the field
            body[name] = reasoning
    elif not reasoning:
        pass
    elif name == REASONING_DETAILS:
        body[name] = [{"type": "reasoning.text", "text": reasoning}]
    elif name == REASONING_TAGS:
        body["content"] = f"<think>\n{reasoning}\n</think>\n\n{message.content}"
    else:
        text = [{"type": "text", "text": message.content}] if message.content else []
        body["content"] = [{"type": "thinking", "thinking": [{"type": "text", "text": reasoning}]}, *text]


def _content(message: Message) -> str | list[dict[str, Any]]:
    """Return a text, or texts, images and audio in their order."""
    if not message.media:
        return message.content
    parts: list[dict[str, Any]] = []
    begin = 0
    for media in message.media:
        parts.append({"type": "text", "text": message.content[begin : media.at]})
        parts.append(_media_part(media))
        begin = media.at
    parts.append({"type": "text", "text": message.content[begin:]})
    return [part for part in parts if part.get("text") != ""]


def _media_part(media: Media) -> dict[str, Any]:
    start = beginning_of(media.data)
    if media.modality == "audio":
        kind = next((kind for beginning, kind in _AUDIO_TYPES.items() if start.startswith(beginning)), "mp3")
        return {"type": "input_audio", "input_audio": {"data": media.data, "format": kind}}
    kind = next((kind for beginning, kind in _IMAGE_TYPES.items() if start.startswith(beginning)), "jpeg")
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{media.data}"}}


def _tool(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": load_json(tool.parameters)}
    return {"type": "function", "function": function}


def _choice(choice: str) -> str | Mapping[str, Any]:
    return {"type": "function", "function": {"name": choice[1:]}} if choice.startswith("=") else choice
