"""Fields that protocols share: sampling, limits, drafts, adapters, grammars, keep_alive, reasoning, logprobs. Pure."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import starmap
from typing import Any

from llmrun.errors import UsageError
from llmrun.grammar import Grammar, read_grammar, read_json_schema
from llmrun.models.adapters import LARGEST_SCALE
from llmrun.planning.speculation import read_speculate
from llmrun.protocol.adapters import AdapterScale
from llmrun.protocol.arguments import BIASES, EFFORTS, MOST_TOP_LOGPROBS, TEXTS
from llmrun.protocol.codec import load_json
from llmrun.protocol.messages import REQUEST_FIELDS, AnswerRequest, Message, RequestField
from llmrun.protocol.params import MOST_TOKENS, PARAMETERS, Limits, check_limits, check_parameter
from llmrun.server.answer import CompletionRequest
from llmrun.server.protocols.fields import Fields, as_json, read_duration

MOST_ANSWERS = 16  # to one prompt
_MOST_BIASES = 1024
_MOST_TEXTS = 64
_LONGEST_TEXT = 1024  # characters of such a text, or of one with a bias
HIGHEST_TOKEN = 2**31 - 1
_NUMBER = re.compile("-?[0-9]{1,1024}")
_LARGEST_BIAS = 1e6
_LONGEST_GRAMMAR = 256 * 1024
_MOST_ADAPTERS = 1024
_MOST_SECONDS = 10 * 365 * 86_400
_FOR_EVER = -1.0

# Name in a request -> ours: that of another server is understood, too.
_NAMES = {name: name for name in PARAMETERS} | {
    other: name for name, row in PARAMETERS.items() for other in (*row.servers.values(), *row.aliases) if other
}
_TYPES = ("text", "json_object", "json_schema")
_OLLAMA = "format"  # a schema itself, unless it has one of these types
_JSON_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_SCHEMA_KEYS = ("properties", "required", "anyOf", "oneOf", "allOf", "$ref", "enum", "const")
"""Keys that only a schema has."""
_FORMATS = (
    ("response_format",),  # OpenAI's completions
    ("text", "format"),  # OpenAI's responses
    (_OLLAMA,),
    ("output_config", "format"),  # Anthropic
    ("output_format",),
    ("guided_json",),  # vLLM
    ("structured_outputs", "json"),
)
"""Fields with a schema of the answer."""
_SCHEMAS = ("guided_json", "json")  # always a schema itself
ANY_OBJECT = Grammar("json_schema", '{"type": "object"}')
"""The grammar of JSON without a schema."""


def completion_request(fields: Fields, request: AnswerRequest, n: int = 1) -> CompletionRequest:
    """Return the completion that a body requests, after everything else of the body was read."""
    return CompletionRequest(
        fields.text("model") or "",
        request,
        read_sampling(fields),
        n,
        stream=fields.flag("stream") is True,
        keep_seconds=read_keep_seconds(fields),
        speculate=read_drafts(fields),
        ignored=fields.ignored,
    )


def read_logprobs(fields: Fields) -> int | None:
    """Return AnswerRequest.logprobs of OpenAI's chat completions, which Ollama has too."""
    top = fields.whole("top_logprobs", 0, MOST_TOP_LOGPROBS) or 0
    return top if fields.flag("logprobs") else None


def read_sampling(body: Fields) -> dict[str, Any]:
    """Return the fields of SamplingParams that a client set.

    Raises:
        UsageError: a field has the wrong type, or is out of bounds.
    """
    found: dict[str, Any] = {}
    for key in body.data:
        name = _NAMES.get(key, "")
        if not name or body.data[key] is None:
            continue
        row = PARAMETERS[name]
        if name == "seed":
            seed = body.whole(key, -(2**63), 2**63 - 1) or 0
            found[name] = seed % 2**32 if seed != -1 else None  # -1: random, as in llama.cpp
        elif row.bounds is not None:
            found[name] = check_parameter(name, body.number(key, -math.inf, math.inf), body.name(key))
        elif row.values is BIASES:
            found[name] = check_parameter(name, _biases(body, key), body.name(key))
        elif row.values is TEXTS:
            found[name] = check_parameter(name, _few(body, key, _MOST_TEXTS), body.name(key))
        else:
            found[name] = check_parameter(name, body.text(key), body.name(key))
    return found


def _few(body: Fields, key: str, limit: int) -> tuple[str, ...]:
    texts = body.texts(key)
    if len(texts) > limit or any(len(text) > _LONGEST_TEXT for text in texts):
        why = f"{limit} strings at most, each of {_LONGEST_TEXT:,} characters"
        raise UsageError(f"{body.name(key)} is too long", why=why)
    return texts


def _biases(body: Fields, key: str) -> tuple[tuple[int | str, float], ...]:
    """Read OpenAI's {"token id": bias}, or llama.cpp's [[token id, bias], ...], in which false bans a token.

    As in llama.cpp, a text stands for each of its tokens; as the name of a field, a number is a token id.
    """
    value, name = body.value(key), body.name(key)
    if not isinstance(value, (dict, list)):
        raise UsageError(f"{name} must be an object of token ids or texts and numbers, or a list of such pairs")
    if len(value) > _MOST_BIASES:
        raise UsageError(f"{name} has {len(value):,} entries", why=f"the maximum is {_MOST_BIASES:,}")
    if isinstance(value, dict):
        pairs = [[int(token) if _NUMBER.fullmatch(token) else token, bias] for token, bias in value.items()]
    else:
        pairs = value
    return tuple(starmap(_bias, ((f"{name}[{index}]", pair) for index, pair in enumerate(pairs))))


def _bias(name: str, pair: Any) -> tuple[int | str, float]:
    token: Any
    bias: Any
    token, bias = pair if isinstance(pair, list) and len(pair) == 2 else (None, None)
    is_token = type(token) is int and 0 <= token <= HIGHEST_TOKEN
    is_text = isinstance(token, str) and 0 < len(token) <= _LONGEST_TEXT
    is_bias = bias is False or (isinstance(bias, (int, float)) and bias is not True and abs(bias) <= _LARGEST_BIAS)
    if not (is_token or is_text) or not is_bias:
        raise UsageError(f"{name} must be a token id or a text, and a number of at most {_LARGEST_BIAS:,.0f}, or false")
    return token, -math.inf if bias is False else float(bias)


def read_drafts(body: Fields) -> int | None:
    """Return `speculate`: the number of drafted tokens per step, see read_speculate(); None if it is missing.

    Raises:
        UsageError: it is neither "auto", "off" nor a number.
    """
    value = body.value("speculate")
    return None if value is None else read_speculate(value, body.name("speculate"))


def read_adapters(body: Fields) -> tuple[AdapterScale, ...] | None:
    """Return llama-server's `lora`: scales of adapters; None for the scales that the server was started with.

    Raises:
        UsageError: it is invalid, or names an adapter twice.
    """
    if body.value("lora") is None:
        return None
    found: dict[int, float] = {}
    for each in body.objects("lora"):
        number, scale = each.whole("id", 0, _MOST_ADAPTERS), each.number("scale", -LARGEST_SCALE, LARGEST_SCALE)
        if number is None or number in found:
            raise UsageError(f"{each.name('id')} is {'missing' if number is None else 'given twice'}")
        found[number] = 1.0 if scale is None else scale
    return tuple(starmap(AdapterScale, found.items()))


def read_limits(body: Fields, *names: str) -> Limits:
    """Return the limits of the answer.

    Args:
        names: of the field with the maximum number of tokens; the first one present counts, -1 is no limit.

    Raises:
        UsageError: a field has the wrong type, or is out of bounds.
    """
    counts = ((name, body.whole(name, -1, MOST_TOKENS)) for name in names)
    name, max_tokens = next((each for each in counts if each[1] is not None), ("", None))
    if max_tokens == 0:
        raise UsageError(f"invalid {body.name(name)} 0", why="must be at least 1")
    stop, ban, ignores_end = read_stop(body, "stop"), body.texts("ban"), body.flag("ignore_eos") is True
    return Limits(None if max_tokens == -1 else max_tokens, stop, ban, ignores_end)


def read_stop(body: Fields, key: str) -> tuple[str, ...]:
    """Return the stop strings without empty ones.

    Raises:
        UsageError: the field has the wrong type, or is too long.
    """
    found = tuple(filter(None, body.texts(key)))
    check_limits(None, found, (), ("", body.name(key), ""))
    return found


def read_grammar_fields(body: Fields) -> Grammar | None:
    """Return the grammar of the answer. A schema is taken under the name that any protocol has for it.

    Raises:
        UsageError: a field has the wrong type, or there are two of them.
        BadGrammarError: the grammar or the schema is invalid or too complex.
    """
    found = {name: grammar for name, grammar in _grammars(body) if grammar is not None}
    if len(found) > 1:
        raise UsageError(f"{' and '.join(found)} can't be used together")
    return next(iter(found.values()), None)


def _grammars(body: Fields) -> Iterator[tuple[str, Grammar | None]]:
    yield "grammar", _grammar(body)
    yield "json_schema", _json_schema(body, "json_schema")
    for path in _FORMATS:
        *holders, key = path
        fields: Fields | None = body
        for holder in holders:
            fields = fields.object(holder) if fields is not None else None
        if fields is not None and fields.data.get(key) not in (None, ""):
            yield fields.name(key), _answer_format(fields, key)


def _answer_format(fields: Fields, key: str) -> Grammar | None:
    """Return the grammar of "json", a schema, or an object with a schema and the type that protocols give it."""
    value = fields.value(key)
    if value == "json":
        return ANY_OBJECT
    if key in _SCHEMAS:
        return _json_schema(fields, key)
    if not isinstance(value, Mapping):
        raise UsageError(f"invalid {fields.name(key)}", why='must be an object, a JSON schema or "json"')
    is_wrapped = value.get("type") in _TYPES or (fields.name(key) != _OLLAMA and not _is_schema(value))
    if not is_wrapped:
        return _json_schema(fields, key)
    wrapper = fields.object(key)
    assert wrapper is not None
    kind = wrapper.choice("type", *_TYPES)
    schema, is_strict = _wrapped_schema(wrapper)
    if kind == "text" or (kind is None and schema is None):
        return None
    if kind == "json_schema" and schema is None:
        raise UsageError(f"{wrapper.name('json_schema')} has no schema")
    return ANY_OBJECT if kind == "json_object" and not schema else schema_grammar(schema, is_strict=is_strict)


def _wrapped_schema(wrapper: Fields) -> tuple[Any, bool]:
    """Return the schema of an object with a type, and whether it is strict.

    It is `schema`, in `json_schema` or beside it, or `json_schema` itself.
    """
    inner = wrapper.data.get("json_schema")
    if isinstance(inner, Mapping) and "schema" not in inner and _is_schema(inner):
        return wrapper.value("json_schema"), False
    holder = wrapper.object("json_schema") or wrapper
    holder.text("name")
    is_strict = bool(holder.flag("strict"))
    return holder.value("schema"), is_strict


def _is_schema(value: Mapping[str, Any]) -> bool:
    return value.get("type") in _JSON_TYPES or any(key in value for key in _SCHEMA_KEYS)


def _json_schema(body: Fields, key: str) -> Grammar | None:
    schema = body.value(key)
    if isinstance(schema, str):  # as vLLM takes it
        try:
            schema = load_json(schema)
        except ValueError as error:
            raise UsageError(f"{body.name(key)} is not JSON", why=str(error)) from None
    return None if schema is None else schema_grammar(schema)


def _grammar(body: Fields) -> Grammar | None:
    text = body.text("grammar")
    if text is None or not text.strip():
        return None
    if len(text) > _LONGEST_GRAMMAR:
        raise UsageError(f"{body.name('grammar')} is too long", why=f"{_LONGEST_GRAMMAR:,} characters at most")
    return read_grammar(text)


def schema_grammar(schema: Any, *, is_strict: bool = False) -> Grammar:
    """Return the grammar of a JSON schema.

    Args:
        schema: JSON data.
        is_strict: see read_json_schema().

    Raises:
        UsageError: it is too long.
        BadGrammarError: it is invalid or too complex.
    """
    text = json.dumps(schema)
    if len(text) > _LONGEST_GRAMMAR:
        raise UsageError("the JSON schema is too long", why=f"{_LONGEST_GRAMMAR:,} characters at most")
    return read_json_schema(text, is_strict=is_strict)


def read_keep_seconds(fields: Fields) -> float | None:
    """Return keep_alive, given in seconds or as a Go duration; below 0 is for ever.

    Raises:
        UsageError: it is neither.
    """
    value = fields.value("keep_alive")
    seconds = _duration(value) if isinstance(value, str) else fields.number("keep_alive", -_MOST_SECONDS, _MOST_SECONDS)
    if seconds is None:
        return None
    if not abs(seconds) <= _MOST_SECONDS:
        raise UsageError("invalid keep_alive", why="must be at most ten years")
    return seconds if seconds >= 0 else _FOR_EVER


def _duration(text: str) -> float:
    seconds = read_duration(text)
    if seconds is None:
        raise UsageError(f"invalid keep_alive {text[:80]!r}", why='must be seconds, or a duration like "5m" or "1h30m"')
    return seconds


_OURS = ("messages", "tools", "bos_token", "eos_token", "add_generation_prompt")
_LONGEST_VARIABLES = 64 * 1024
_KWARGS = "chat_template_kwargs"
_SWITCHES = {
    key.removeprefix(f"{_KWARGS}.") for row in REQUEST_FIELDS.values() for key in row.keys if key.startswith(_KWARGS)
}
"""Names of fields of a request among the variables of the template."""


def read_effort(fields: Fields, key: str) -> str | None:
    return fields.choice(key, *EFFORTS)


def read_request_fields(fields: Fields, names: Iterable[str] = REQUEST_FIELDS) -> dict[str, Any]:
    """Return the fields of AnswerRequest that have the same name in each protocol, as far as a body has them.

    Args:
        names: of the fields that may be read.

    Raises:
        UsageError: one has the wrong type, or is out of bounds.
    """
    values = {name: _first_given(fields, REQUEST_FIELDS[name]) for name in names}
    return {name: None if value == _NO_LIMIT else value for name, value in values.items() if value is not None}


_NO_LIMIT = -1


def _first_given(fields: Fields, row: RequestField) -> Any:
    """Return the value of the first of a field's keys that a body has."""
    for path in row.keys:
        holder, _, key = path.rpartition(".")
        place = Fields(fields.mapping(holder) or {}, fields.name(holder)) if holder else fields
        if row.bounds:
            found: Any = place.whole(key, _NO_LIMIT, row.bounds[1])
        elif row.plain_type == "bool":
            found = place.flag(key)
        else:
            found = place.choice(key, *row.choices) if row.choices else place.text(key)
        if found is not None:
            return found
    return None


def read_reasoning(fields: Fields, effort: str | None = None, thinking: bool | None = None) -> dict[str, Any]:
    """Return what read_request_fields() does, and the fields of AnswerRequest about reasoning and the chat template.

    Args:
        effort: in the protocol's own field; one in chat_template_kwargs reaches the template as it is.
        thinking: in the protocol's own field; chat_template_kwargs.enable_thinking overrides it.

    Raises:
        UsageError: a variable is invalid, too long, or one that is made from the conversation.
    """
    variables = fields.mapping(_KWARGS) or {}
    for name in _OURS:
        if name in variables:
            why = "it is made from the request's other fields"
            raise UsageError(f"{fields.name(_KWARGS)}.{name} can't be set", why=why)
    text = as_json({name: value for name, value in variables.items() if name not in _SWITCHES})
    if len(text) > _LONGEST_VARIABLES:
        raise UsageError(f"{_KWARGS} is too long", why=f"{_LONGEST_VARIABLES:,} characters at most")
    own = {"thinking": thinking, "reasoning_effort": effort, "template_variables": text}
    return {**own, **read_request_fields(fields)}


def read_openrouter_reasoning(fields: Fields) -> dict[str, Any]:
    """Return what read_reasoning() does, of a request that may also have OpenRouter's and OpenAI's `reasoning`."""
    effort, inner = read_effort(fields, "reasoning_effort"), fields.object("reasoning")
    if inner is None:
        return read_reasoning(fields, effort)
    budget = inner.whole("max_tokens", -1, MOST_TOKENS)
    found = read_reasoning(fields, effort or read_effort(inner, "effort"), inner.flag("enabled"))
    return found if budget is None else {**found, "thinking_tokens": None if budget < 0 else budget}


def prefilled(messages: Sequence[Message], *, is_asked_for: bool = False) -> dict[str, Any]:
    """Return the fields of AnswerRequest of a conversation whose last message, if the assistant's, is continued.

    Args:
        is_asked_for: the client demands that; else a schema that the message does not fit gets an answer of its own.
    """
    *earlier, last = messages
    if last.role != "assistant" or last.tool_calls or not earlier:
        return {"messages": tuple(messages)}
    begins = {"begins": last.content, "begins_reasoning": last.reasoning, "may_begin_anew": not is_asked_for}
    return {"messages": tuple(earlier), **begins}


def signature(reasoning: str) -> str:
    """Return a digest of reasoning: some clients send back only reasoning that has a signature."""
    return hashlib.sha256(reasoning.encode("utf-8", "replace")).hexdigest()


def compacted(summary: str) -> Message:
    """Return the message that stands for the conversation before it."""
    return Message("user", f"Summary of the conversation so far:\n{summary}")
