"""Fields for sampling, limits, drafts, adapters and grammars: OpenAI's, llama.cpp's and our own."""

from __future__ import annotations

import json
import math
from itertools import starmap
from typing import Any

from llmrun.errors import UsageError
from llmrun.grammar import Grammar, read_grammar, read_json_schema
from llmrun.models.adapters import LARGEST_SCALE
from llmrun.planning.speculation import read_speculate
from llmrun.protocol.adapters import AdapterScale
from llmrun.protocol.params import BOUNDS, MOST_TOKENS, STEPS, Limits, check_limits, check_parameter
from llmrun.server.protocols.fields import Fields

MOST_ANSWERS = 16  # to one prompt
_MOST_BIASES = 1024
_MOST_BREAKERS = 64
_LARGEST_BIAS = 1e6
_LONGEST_GRAMMAR = 256 * 1024
_MOST_ADAPTERS = 1024

# Names of our parameters in other servers.
_ALIASES = {
    "typ_p": "typical_p",
    "dynatemp_range": "temperature_range",
    "dynatemp_exponent": "temperature_exponent",
    "repetition_penalty": "repeat_penalty",
    "dry_sequence_breakers": "dry_breakers",
    "samplers": "order",
}
ANY_OBJECT = Grammar("json_schema", '{"type": "object"}')
"""The grammar of JSON without a schema."""


def read_sampling(body: Fields) -> dict[str, Any]:
    """Return the fields of SamplingParams that a client set.

    Raises:
        UsageError: a field has the wrong type, or is out of bounds.
    """
    found: dict[str, Any] = {}
    for key in body.data:
        name = _ALIASES.get(key, key) if isinstance(key, str) else ""
        if body.data[key] is None:
            continue
        if name == "seed":
            seed = body.whole(key, -(2**63), 2**63 - 1) or 0
            found[name] = seed % 2**32 if seed != -1 else None  # -1: random, as in llama.cpp
        elif name in BOUNDS:
            found[name] = check_parameter(name, body.number(key, -math.inf, math.inf), body.name(key))
        elif name == "logit_bias":
            found[name] = check_parameter(name, _biases(body, key), body.name(key))
        elif name == "order":
            found[name] = check_parameter(name, _few(body, key, len(STEPS)), body.name(key))
        elif name in ("watermark", "watermark_key"):
            found[name] = check_parameter(name, body.text(key), body.name(key))
        elif name == "dry_breakers":
            found[name] = _few(body, key, _MOST_BREAKERS)
    return found


def _few(body: Fields, key: str, limit: int) -> tuple[str, ...]:
    texts = body.texts(key)
    if len(texts) > limit or any(len(text) > 1024 for text in texts):
        raise UsageError(f"{body.name(key)} is too long", why=f"{limit} strings at most, each of 1,024 characters")
    return texts


def _biases(body: Fields, key: str) -> tuple[tuple[int, float], ...]:
    """Read OpenAI's {"token id": bias}, or llama.cpp's [[token id, bias], ...], in which false bans a token."""
    value = body.data[key]
    pairs = list(value.items()) if isinstance(value, dict) else value
    invalid = UsageError(f"{body.name(key)} must be an object of token ids and numbers")
    if not isinstance(pairs, list) or len(pairs) > _MOST_BIASES:
        raise invalid
    found: list[tuple[int, float]] = []
    for pair in pairs:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise invalid
        token, bias = pair
        if not str(token).isdecimal() or len(str(token)) > 9:
            raise invalid
        if not isinstance(bias, (int, float)) or not abs(bias) <= _LARGEST_BIAS:
            raise invalid
        found.append((int(token), -math.inf if bias is False else float(bias)))
    return tuple(found)


def read_drafts(body: Fields) -> int | None:
    """Return `speculate`: the number of drafted tokens per step, see read_speculate(); None if it is missing.

    Raises:
        UsageError: it is neither "auto", "off" nor a number.
    """
    value = body.data.get("speculate")
    return None if value is None else read_speculate(value, body.name("speculate"))


def read_adapters(body: Fields) -> tuple[AdapterScale, ...] | None:
    """Return llama-server's `lora`: scales of adapters; None for the scales that the server was started with.

    Raises:
        UsageError: it is invalid, or names an adapter twice.
    """
    if body.data.get("lora") is None:
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
    """Return the grammar of the answer: response_format, or llama.cpp's json_schema or grammar.

    Raises:
        UsageError: a field has the wrong type, or there are two of them.
        BadGrammarError: the grammar or the schema is invalid or too complex.
    """
    found = [each for each in (_response_format(body), _json_schema(body), _grammar(body)) if each is not None]
    if len(found) > 1:
        raise UsageError("response_format, json_schema and grammar exclude each other")
    return found[0] if found else None


def _response_format(body: Fields) -> Grammar | None:
    response_format = body.object("response_format")
    if response_format is None:
        return None
    kind = response_format.choice("type", "text", "json_object", "json_schema")
    if kind == "json_schema":
        inner = response_format.object("json_schema")
        if inner is None:
            raise UsageError(f"{response_format.name('json_schema')} is missing")
        return schema_grammar(inner.data.get("schema", {}))
    if kind == "json_object":
        return schema_grammar(response_format.data["schema"]) if response_format.data.get("schema") else ANY_OBJECT
    return None


def _json_schema(body: Fields) -> Grammar | None:
    schema = body.data.get("json_schema")
    return None if schema is None else schema_grammar(schema)


def _grammar(body: Fields) -> Grammar | None:
    text = body.text("grammar")
    if text is None or not text.strip():
        return None
    if len(text) > _LONGEST_GRAMMAR:
        raise UsageError(f"{body.name('grammar')} is too long", why=f"{_LONGEST_GRAMMAR:,} characters at most")
    return read_grammar(text)


def schema_grammar(schema: Any) -> Grammar:
    """Return the grammar of a JSON schema.

    Args:
        schema: JSON data.

    Raises:
        UsageError: it is too long.
        BadGrammarError: it is invalid or too complex.
    """
    text = json.dumps(schema)
    if len(text) > _LONGEST_GRAMMAR:
        raise UsageError("the JSON schema is too long", why=f"{_LONGEST_GRAMMAR:,} characters at most")
    return read_json_schema(text)
