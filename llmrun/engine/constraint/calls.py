"""The grammar of tool calls: arguments follow the tool's JSON schema.

Must not know templates. Keywords of a schema that can't be enforced during generation are ignored; the client validates
the arguments anyway.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from llmrun.engine.constraint.matcher import Matcher, compile_lark, prepared_schema
from llmrun.engine.constraint.reasoning import unconstrained_mask
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

_MAX_CALLS = 16  # of one answer: a small model may never stop
_MAX_COUNTED = 1000  # characters of a text
_ANY_OBJECT = {"type": "object"}
_LOOSENED = frozenset({*REFUSED, "pattern", "format", "$id", "$anchor"})


def compile_calls(request: AnswerRequest, syntax: Syntax, vocabulary: Vocabulary, shown: Collection[int]) -> Matcher:
    """Compile a grammar of a request's calls; if text may precede a call, the grammar starts after `syntax.begin`.

    Args:
        shown: control tokens of the syntax, which the grammar matches by their texts.

    Raises:
        UsageError: the request has a grammar that can't be combined with calls.
        BadGrammarError: the schemas are too complex.
    """
    only = request.tool_choice.removeprefix("=") if request.tool_choice.startswith("=") else ""
    tools = [tool for tool in request.tools if only in ("", tool.name)]
    begin = "" if allows_text(request) else syntax.begin
    text = "\n".join(_lines(tools, syntax, begin, several=request.parallel_calls and not only))
    if request.grammar is None or request.tool_choice != "auto":
        return compile_lark(f"start: calls\n{text}", vocabulary, shown)
    if request.grammar.kind != "json_schema":
        raise UsageError("a grammar and tools exclude each other", why="an answer can't follow both")
    lead = _literal(syntax.lead) + " " if syntax.lead else ""
    answer = f"start: calls | answer\nanswer: {lead}%json {prepared_schema(request.grammar.text)}"
    return compile_lark(f"{answer}\n{text}", vocabulary, shown)


def _lines(tools: Sequence[Tool], syntax: Syntax, begin: str, *, several: bool) -> Iterator[str]:
    more = f" then{{0,{_MAX_CALLS - 1}}}" if several and syntax.then else ""
    first = begin + syntax.first
    yield f"calls: {_literal(first) + ' ' if first else ''}call{more}{_then(syntax.end)}"
    if more:
        yield f"then: {_literal(syntax.then)} call"
    yield f"call: {' | '.join(f'call_{index}' for index in range(len(tools)))}"
    for index, tool in enumerate(tools):
        head = _literal(tool.name + syntax.middle)
        yield f"call_{index}: {head} arguments_{index}{_then(syntax.close)}"
        if syntax.parameter is None:
            yield f"arguments_{index}: %json {arguments_schema(tool.parameters)}"
        else:
            yield from _parameter_lines(f"arguments_{index}", tool, syntax.parameter)


def _parameter_lines(rule: str, tool: Tool, form: ParameterForm) -> Iterator[str]:
    """Yield rules for the parameters of a tool's schema, one by one, in their order."""
    schema = load_json(tool.parameters)
    parameters = parameters_of(schema)
    required = schema.get("required") if isinstance(schema, dict) else None
    yield f"{rule}: {rule}_first_0"
    for index, (name, value) in enumerate(parameters.items()):
        is_needed = isinstance(required, list) and name in required
        after = f"{rule}_more_{index + 1}"
        yield f"{rule}_{index}: {_literal(form.begin + name + form.middle)} {rule}_value_{index}"
        yield f"{rule}_value_{index}{_value(value, schema, form)}"
        yield f"{rule}_first_{index}: {rule}_{index} {after}" + ("" if is_needed else f" | {rule}_first_{index + 1}")
        between = f"{_literal(form.between)} " if form.between else ""
        yield f"{rule}_more_{index}: {between}{rule}_{index} {after}" + ("" if is_needed else f" | {after}")
    yield f'{rule}_first_{len(parameters)}: ""'
    yield f'{rule}_more_{len(parameters)}: ""'


def _value(schema: Any, root: Any, form: ParameterForm) -> str:
    """Return the body of a rule for a parameter's value and its end."""
    if not may_be_text(schema):
        complete = {**schema, **{name: root[name] for name in ("$defs", "definitions") if name in root}}
        return f": %json {_enforceable(complete)}{_then(form.end)}"
    schema = schema if isinstance(schema, dict) else {}
    end = form.quote + form.end
    choices = schema.get("enum")
    if isinstance(choices, list) and all(isinstance(choice, str) for choice in choices):
        return f": {' | '.join(_literal(form.quote + choice + end) for choice in choices)}"
    limit = schema.get("maxLength")
    size = f"{{0,{limit}}}" if isinstance(limit, int) and 0 <= limit <= _MAX_COUNTED else "*"
    return f"[suffix={_literal(end)}]: /{re.escape(form.quote)}(?s:.{size})/"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _then(text: str) -> str:
    return f" {_literal(text)}" if text else ""


@lru_cache(maxsize=256)
def arguments_schema(parameters: str) -> str:
    """Return the enforceable part of a tool's schema; arguments are always an object.

    Cached, because agents send the same tools with every request, and reading a schema takes a millisecond or two.
    """
    try:
        schema = load_json(parameters)
    except ValueError:  # nested too deep, since the template has read it
        return _enforceable(_ANY_OBJECT)
    is_object = isinstance(schema, dict) and schema.get("type", "object") == "object"
    return _enforceable({**schema, "type": "object"} if is_object else _ANY_OBJECT)


def _enforceable(schema: dict[str, Any]) -> str:
    """Return the schema, the schema without unsupported keywords, or its type alone: the first that compiles."""
    for candidate in (schema, _loosened(schema)):
        with suppress(BadGrammarError, RecursionError):
            return prepared_schema(json.dumps(candidate))
    return prepared_schema(json.dumps({name: schema[name] for name in ("type",) if name in schema}))


def _loosened(schema: Any) -> Any:
    """Remove unsupported keywords from a schema, but not properties of the same names."""
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


class _State(NamedTuple):
    reasoning: ReasoningTracker | None  # None: the model does not reason
    text: str | None = ""  # the end of the answer, which may begin a call; None: no call can begin any more
    is_call: bool = False


class ToolCallConstraint:
    """A Constraint that allows any text until a call begins, and applies the grammar from there on."""

    def __init__(
        self, calls: Matcher, vocabulary: Vocabulary, syntax: Syntax, reasoning: ReasoningTracker | None
    ) -> None:
        self._calls = calls
        self._vocabulary = vocabulary
        self._syntax = syntax
        self._unconstrained = unconstrained_mask(calls.tokens, syntax.begin, may_end=True)
        self._states = [_State(reasoning)]

    def mask(self) -> int:
        state = self._states[-1]
        return self._calls.mask() if state.is_call else self._unconstrained.mask(state.text or "").address

    def accept(self, token: int) -> None:
        self._states.append(self._after(self._states[-1], token))

    def _after(self, state: _State, token: int) -> _State:
        if state.is_call:
            self._calls.accept(token)
            return state
        reasoning = state.reasoning
        if reasoning is not None and reasoning.stage is not ReasoningStage.ANSWER:
            was_inside = reasoning.stage is ReasoningStage.INSIDE
            reasoning = reasoning.after(self._vocabulary.control_piece(token).decode("utf-8", "replace"))
            if was_inside or reasoning.stage is ReasoningStage.INSIDE:
                return _State(reasoning)
        if state.text is None:
            return _State(reasoning, None)
        begin = self._syntax.begin
        text = state.text + self._calls.tokens.tokens[token].decode("utf-8", "replace")
        if not self._syntax.at_start:
            return _State(reasoning, text[-len(begin) :], text.endswith(begin))
        text = text.lstrip()
        return _State(reasoning, text if begin.startswith(text) else None, text == begin)

    def forced(self) -> list[int]:
        return self._calls.forced() if self._states[-1].is_call else []

    def allowed(self, tokens: list[int]) -> int:
        return self._calls.allowed(tokens) if self._states[-1].is_call else len(tokens)

    def rewind(self, n_tokens: int) -> None:
        n_left = len(self._states) - n_tokens
        # The grammar accepted each token after the one that began the call.
        n_constrained = sum(state.is_call for state in self._states[n_left - 1 : -1])
        del self._states[n_left:]
        if n_constrained:
            self._calls.rewind(n_constrained)
