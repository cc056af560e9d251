"""Calls of tools as a grammar: the arguments of a call follow the tool's JSON schema.

Owns that grammar, and when it begins; must not know templates. What a schema says beyond what can be enforced while an
answer is written is passed over: it is advice to the model, and the client validates what it runs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from llmrun.engine.constraint.matcher import Matcher, compile_lark, followed
from llmrun.engine.constraint.reasoning import unbound
from llmrun.engine.prompt.thinking import ReasoningStage, ReasoningTracker
from llmrun.engine.prompt.tools import allows_text
from llmrun.errors import BadGrammarError, UsageError
from llmrun.grammar.schema import REFUSED
from llmrun.protocol.codec import load_json
from llmrun.protocol.messages import AnswerRequest, Tool
from llmrun.protocol.parameters import may_be_text, parameters_of
from llmrun.protocol.toolcalls import ParameterForm, Syntax

if TYPE_CHECKING:
    from llmrun.engine.llama.base import Vocabulary

_MOST_CALLS = 16
"""Of one answer: a small model goes on for ever."""
_MOST_COUNTED = 1000  # characters of a text
_ANY_OBJECT = {"type": "object"}
_LOOSENED = frozenset({*REFUSED, "pattern", "format", "$id", "$anchor"})


def compile_calls(asked: AnswerRequest, syntax: Syntax, vocabulary: Vocabulary, shown: Collection[int]) -> Matcher:
    """A grammar of the calls that a request allows. Where it waits for a call, that has begun already.

    Args:
        shown: the control tokens of the syntax.

    Raises:
        UsageError: it asks for another grammar, too, that can't be put beside calls.
        BadGrammarError: the schemas ask for too much.
    """
    named = asked.tool_choice.removeprefix("=") if asked.tool_choice.startswith("=") else ""
    tools = [tool for tool in asked.tools if named in ("", tool.name)]
    begin = "" if allows_text(asked) else syntax.begin
    text = "\n".join(_lines(tools, syntax, begin, several=asked.parallel_calls and not named))
    if asked.grammar is None or asked.tool_choice != "auto":
        return compile_lark(f"start: calls\n{text}", vocabulary, shown)
    if asked.grammar.kind != "json_schema":
        raise UsageError("a grammar and tools exclude each other", why="an answer can't follow both")
    lead = _literal(syntax.lead) + " " if syntax.lead else ""
    answer = f"start: calls | answer\nanswer: {lead}%json {followed(asked.grammar.text)}"
    return compile_lark(f"{answer}\n{text}", vocabulary, shown)


def _lines(tools: Sequence[Tool], syntax: Syntax, begin: str, *, several: bool) -> Iterator[str]:
    more = f" then{{0,{_MOST_CALLS - 1}}}" if several and syntax.then else ""
    first = begin + syntax.first
    yield f"calls: {_literal(first) + ' ' if first else ''}call{more}{_behind(syntax.end)}"
    if more:
        yield f"then: {_literal(syntax.then)} call"
    yield f"call: {' | '.join(f'call_{index}' for index in range(len(tools)))}"
    for index, tool in enumerate(tools):
        head = _literal(tool.name + syntax.middle)
        yield f"call_{index}: {head} arguments_{index}{_behind(syntax.close)}"
        if syntax.parameter is None:
            yield f"arguments_{index}: %json {arguments_schema(tool.parameters)}"
        else:
            yield from _parameter_lines(f"arguments_{index}", tool, syntax.parameter)


def _parameter_lines(rule: str, tool: Tool, form: ParameterForm) -> Iterator[str]:
    """The parameters of a tool one by one, those that its schema names, in their order."""
    schema = load_json(tool.parameters)
    parameters = parameters_of(schema)
    required = schema.get("required") if isinstance(schema, dict) else None
    yield f"{rule}: {rule}_first_0"
    for index, (name, value) in enumerate(parameters.items()):
        is_needed = isinstance(required, list) and name in required
        behind = f"{rule}_more_{index + 1}"
        yield f"{rule}_{index}: {_literal(form.begin + name + form.middle)} {rule}_value_{index}"
        yield f"{rule}_value_{index}{_value(value, schema, form)}"
        yield f"{rule}_first_{index}: {rule}_{index} {behind}" + ("" if is_needed else f" | {rule}_first_{index + 1}")
        between = f"{_literal(form.between)} " if form.between else ""
        yield f"{rule}_more_{index}: {between}{rule}_{index} {behind}" + ("" if is_needed else f" | {behind}")
    yield f'{rule}_first_{len(parameters)}: ""'
    yield f'{rule}_more_{len(parameters)}: ""'


def _value(schema: Any, root: Any, form: ParameterForm) -> str:
    """What stands behind the name of the rule for a parameter's value up to its end."""
    if not may_be_text(schema):
        known = {**schema, **{name: root[name] for name in ("$defs", "definitions") if name in root}}
        return f": %json {_enforceable(known)}{_behind(form.end)}"
    schema = schema if isinstance(schema, dict) else {}
    end = form.quote + form.end
    choices = schema.get("enum")
    if isinstance(choices, list) and all(isinstance(choice, str) for choice in choices):
        return f": {' | '.join(_literal(form.quote + choice + end) for choice in choices)}"
    most = schema.get("maxLength")
    size = f"{{0,{most}}}" if isinstance(most, int) and 0 <= most <= _MOST_COUNTED else "*"
    return f"[suffix={_literal(end)}]: /{re.escape(form.quote)}(?s:.{size})/"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _behind(text: str) -> str:
    return f" {_literal(text)}" if text else ""


@lru_cache(maxsize=256)
def arguments_schema(parameters: str) -> str:
    """The schema of a tool's arguments as it can be followed; they are an object, whatever it says.

    An agent sends the same tools with every request, and to read a schema takes a millisecond or two.
    """
    try:
        schema = load_json(parameters)
    except ValueError:  # nested too deep, since the template has read it
        return _enforceable(_ANY_OBJECT)
    is_object = isinstance(schema, dict) and schema.get("type", "object") == "object"
    return _enforceable({**schema, "type": "object"} if is_object else _ANY_OBJECT)


def _enforceable(schema: dict[str, Any]) -> str:
    """As much of a schema as can be followed: its type at least."""
    for known in (schema, _loosened(schema)):
        with suppress(BadGrammarError, RecursionError):
            return followed(json.dumps(known))
    return followed(json.dumps({name: schema[name] for name in ("type",) if name in schema}))


def _loosened(schema: Any) -> Any:
    """Without the keywords that can't be enforced; properties may be called like them."""
    if isinstance(schema, list):
        return [_loosened(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    loosened = {}
    for key, value in schema.items():
        if key in ("properties", "$defs", "definitions") and isinstance(value, dict):
            loosened[key] = {name: _loosened(item) for name, item in value.items()}
        elif key in ("enum", "const", "default", "examples"):
            loosened[key] = value
        elif key not in _LOOSENED:
            loosened[key] = _loosened(value)
    return loosened


class _Place(NamedTuple):
    """Where an answer is.

    Attributes:
        thoughts: whether it thinks; None where the model does not.
        text: the end of what it said that may be the beginning of a call; None where no call can begin any more.
        is_call: a call has begun.
    """

    thoughts: ReasoningTracker | None
    text: str | None = ""
    is_call: bool = False


class ToolCallConstraint:
    """A Constraint that leaves the model free until it begins a call, and holds it to the grammar from there on."""

    def __init__(
        self, calls: Matcher, vocabulary: Vocabulary, syntax: Syntax, thoughts: ReasoningTracker | None
    ) -> None:
        """At the beginning of an answer, which may be inside the model's thoughts."""
        self._calls = calls
        self._vocabulary = vocabulary
        self._syntax = syntax
        self._free = unbound(calls.tokens, syntax.begin, may_end=True)
        self._places = [_Place(thoughts)]

    def mask(self) -> int:
        """See Constraint."""
        place = self._places[-1]
        return self._calls.mask() if place.is_call else self._free.mask(place.text or "").address

    def accept(self, token: int) -> None:
        """See Constraint."""
        self._places.append(self._after(self._places[-1], token))

    def _after(self, place: _Place, token: int) -> _Place:
        if place.is_call:
            self._calls.accept(token)
            return place
        thoughts = place.thoughts
        if thoughts is not None and thoughts.stage is not ReasoningStage.ANSWER:
            was_inside = thoughts.stage is ReasoningStage.INSIDE
            thoughts = thoughts.after(self._vocabulary.control_piece(token).decode("utf-8", "replace"))
            if was_inside or thoughts.stage is ReasoningStage.INSIDE:
                return _Place(thoughts)
        said = self._calls.tokens.tokens[token].decode("utf-8", "replace")
        return self._said(thoughts, place.text, said)

    def _said(self, thoughts: ReasoningTracker | None, before: str | None, said: str) -> _Place:
        begin = self._syntax.begin
        if before is None:
            return _Place(thoughts, None)
        text = before + said
        if not self._syntax.at_start:
            return _Place(thoughts, text[-len(begin) :], text.endswith(begin))
        text = text.lstrip()
        return _Place(thoughts, text if begin.startswith(text) else None, text == begin)

    def forced(self) -> list[int]:
        """See Constraint."""
        return self._calls.forced() if self._places[-1].is_call else []

    def allowed(self, tokens: list[int]) -> int:
        """See Constraint."""
        return self._calls.allowed(tokens) if self._places[-1].is_call else len(tokens)

    def rewind(self, n_tokens: int) -> None:
        """See Constraint."""
        left = len(self._places) - n_tokens
        # A token behind the one that began the call is the grammar's.
        bound = sum(place.is_call for place in self._places[left - 1 : -1])
        del self._places[left:]
        if bound:
            self._calls.rewind(bound)
