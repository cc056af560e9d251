"""The grammar of tool calls: arguments follow the tool's JSON schema.

What can't be enforced of a schema is left out and named; the rest is enforced. Must not know templates.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

from llmrun.engine.constraint.lexemes import lark_rules as as_lark_rules
from llmrun.engine.constraint.matcher import SCHEMA_NAME, Matcher, check_rules, compile_lark, tokens_of
from llmrun.engine.constraint.reasoning import unconstrained_mask
from llmrun.engine.prompt.thinking import ReasoningTracker
from llmrun.engine.prompt.tools import allows_text
from llmrun.errors import BadGrammarError, UsageError
from llmrun.grammar import lark_rules
from llmrun.grammar.json_lark import Rules, rules_of
from llmrun.grammar.loosen import EnforceableSchema, Path, enforceable
from llmrun.grammar.place import dotted
from llmrun.grammar.regex import FORMATS
from llmrun.protocol.call_parameters import alternatives, narrowed_to, parameters_of, resolved, types_of
from llmrun.protocol.codec import load_json
from llmrun.protocol.messages import AnswerRequest, Tool
from llmrun.protocol.reasoning import Stage
from llmrun.protocol.toolcalls import CDATA, KEY, CallElement, CallField, CallSyntax, ParameterForm, Parameters

if TYPE_CHECKING:
    from llmrun.engine.llama.base import Vocabulary

_MAX_CALLS = 16  # of one answer: a small model may never stop
_MAX_LEFT_OUT = 50  # parts of schemas that are named
_MAX_COUNTED = 1000  # characters of a text, or items of a list
_OF_STRINGS = {"enum", "const", "pattern", "format", "minLength", "maxLength", "anyOf", "oneOf", "allOf", "not"}


def compile_calls(
    request: AnswerRequest, syntax: CallSyntax, vocabulary: Vocabulary, shown: Collection[int]
) -> Matcher:
    """Compile a grammar of a request's calls; if text may precede a call, the grammar starts after the trigger.

    Args:
        shown: control tokens of the syntax, which the grammar matches by their texts.

    Raises:
        UsageError: the request has a grammar that can't be combined with calls.
        BadGrammarError: the schemas are too complex.
    """
    only = request.tool_choice.removeprefix("=") if request.tool_choice.startswith("=") else ""
    tools = [tool for tool in request.tools if only in ("", tool.name)]
    form = syntax.parameters
    arguments = [_json_arguments(tool) if form is None else _ParameterRules(tool, form).rules() for tool in tools]
    lines = _all_lines(request, tools, [part.rules for part in arguments], syntax, only)
    matcher = compile_lark("\n".join(lines), vocabulary, shown)
    named = (*_left_out_of_answer(request), *left_out(tools), *(path for part in arguments for path in part.left_out))
    matcher.left_out = tuple(dict.fromkeys(named))
    if form is not None:
        close = "".join(part for part in syntax.tail if isinstance(part, str)) + syntax.end
        ends = dict.fromkeys((close, *"'\"" * form.is_python, *(end for part in arguments for end in part.ends)))
        matcher.endings = [vocabulary.tokenize(end, special=True) for end in ends if end]
    return matcher


def _json_arguments(tool: Tool) -> _Arguments:
    if tool.grammar:
        (name,) = parameters_of(load_json(tool.parameters))
        text = text_rules(tool.grammar, '"}', in_json=True)
        if text is not None:
            return _Arguments(Rules(f"{_literal('{' + json.dumps(name) + ': ' + chr(34))} {text.start}", text.lines))
    return _Arguments(arguments_schema(tool.parameters).rules)


@lru_cache(maxsize=64)
def text_rules(grammar: str, end: str, *, in_json: bool) -> Rules | None:
    """Return the rules of a text by a Lark grammar, and of the end behind it; None if they can't be enforced.

    Cached, because agents send the same tools with every request.

    Args:
        in_json: the text is the content of a JSON string.
    """
    try:
        rules = lark_rules.parse(grammar)
        rules = lark_rules.before(lark_rules.in_json(rules) if in_json else rules, end)
        written = as_lark_rules(rules, prefix=f"t{sha256(f'{grammar} {end} {in_json}'.encode()).hexdigest()[:10]}_")
        check_rules(written)
    except BadGrammarError:
        return None
    return written


def arguments_schema(parameters: str) -> EnforceableSchema:
    """Return the enforceable part of a tool's schema; arguments are always an object."""
    try:
        schema = load_json(parameters)
    except ValueError:
        schema = None  # nested too deep, since the template has read it
    if not isinstance(schema, dict):
        return EnforceableSchema(value_rules({"type": "object"}), () if schema is True else ((),))
    rules, left_out = enforceable(json.dumps({**schema, "type": "object"}), check_rules)
    is_object = schema.get("type", "object") == "object"
    return EnforceableSchema(rules, left_out if is_object else (("type",), *left_out))


def value_rules(schema: dict[str, Any]) -> Rules:
    """Return the rules of the enforceable part of a schema."""
    return enforceable(json.dumps(schema), check_rules).rules


def left_out(tools: Iterable[Tool]) -> tuple[str, ...]:
    """Return what of tools' schemas is not enforced, e.g. "tools.get_weather.parameters.properties.city.pattern"."""
    parts = [
        ".".join(filter(None, ("tools", tool.name, "parameters", dotted(path))))
        for tool in tools
        for path in arguments_schema(tool.parameters).left_out
    ]
    parts += [
        f"tools.{tool.name}.format"
        for tool in tools
        if tool.grammar and text_rules(tool.grammar, '"}', in_json=True) is None
    ]
    return tuple(parts[:_MAX_LEFT_OUT])


def _left_out_of_answer(request: AnswerRequest) -> Iterator[str]:
    """Yield what is not enforced of the schema of an answer that may be a call instead."""
    grammar = request.grammar
    if grammar is not None and grammar.kind == "json_schema":
        rules = rules_of(grammar.text, is_strict=grammar.is_strict)
        yield from (dotted((SCHEMA_NAME, *path)) for path in (*rules.ignored, *rules.repeating))


class _Arguments(NamedTuple):
    rules: Rules  # of a tool's arguments
    left_out: Sequence[str] = ()  # paths of what is not enforced
    ends: Sequence[str] = ()  # the texts that end strings without quotes


def _all_lines(
    request: AnswerRequest, tools: Sequence[Tool], arguments: Sequence[Rules], syntax: CallSyntax, only: str
) -> Iterable[str]:
    """Return the whole grammar, each line once, because tools may have equal schemas."""
    starts_later = allows_text(request) and not syntax.has_header
    written = len(syntax.trigger) if starts_later else len(syntax.prefill)
    lines = dict.fromkeys(_lines(tools, arguments, syntax, written, several=request.parallel_calls and not only))
    lead = syntax.lead.removeprefix(syntax.prefill)
    if request.grammar is not None and request.tool_choice == "auto":
        if request.grammar.kind != "json_schema":
            raise UsageError("a grammar and tools can't be used together", why="an answer can't follow both")
        rules = rules_of(request.grammar.text, is_strict=request.grammar.is_strict)
        answer = f"{_text(lead)}{rules.start}"
        lines.update(dict.fromkeys(rules.lines))
    elif allows_text(request) and syntax.has_header:
        answer = f"{_text(lead)}/(?s:.*)/"
    else:
        return ["start: calls", *lines]
    return ["start: calls | answer", f"answer: {answer}", *lines]


def _lines(
    tools: Sequence[Tool], arguments: Sequence[Rules], syntax: CallSyntax, n_written: int, *, several: bool
) -> Iterator[str]:
    """Yield the rules of calls, of which the first characters are written already."""
    at = syntax.call.index(CallField.NAME)
    before, after = syntax.call[:at], syntax.call[at + 1 :]
    more = several and syntax.between is not None
    first = _joined(syntax.begin, *before)
    first[0] = str(first[0])[n_written:]
    yield f"calls: {_elements(first)}call{f' more{{0,{_MAX_CALLS - 1}}}' if more else ''} {_text(syntax.end)}"
    if more:
        yield f"more: {_elements(_joined(syntax.between or '', *before))}call"
    yield f"call: {' | '.join(f'call_{index}' for index in range(len(tools)))}"
    for index, (tool, rules) in enumerate(zip(tools, arguments, strict=True)):
        named = (tool.name if element is CallField.NAME else element for element in after)
        yield f"call_{index}: {_elements(_joined(tool.name, *named), rules.start)}"
        yield from rules.lines


def _joined(*elements: CallElement) -> list[CallElement]:
    """Join texts that follow each other; the first element is a text."""
    joined: list[CallElement] = [""]
    for element in elements:
        if isinstance(element, str) and isinstance(joined[-1], str):
            joined[-1] += element
        else:
            joined.append(element)
    return joined


def _elements(elements: Sequence[CallElement], arguments: str = "") -> str:
    """Return the body of a rule for elements of a call, with a blank after it."""
    rules = {
        CallField.ARGUMENTS: f"{arguments} ",
        CallField.INDEX: "/[0-9]{1,3}/ ",
        CallField.ID: "/[A-Za-z0-9_-]{1,40}/ ",
    }
    return "".join(_text(element) if isinstance(element, str) else rules[element] for element in elements)


class _ParameterRules:
    """The rules of a tool's arguments whose members are written one by one, in the order of the schema."""

    def __init__(self, tool: Tool, form: Parameters) -> None:
        self._tool, self._form, self._root = tool, form, load_json(tool.parameters)
        self._prefix = "p" + sha256(tool.parameters.encode()).hexdigest()[:10]
        self._names: dict[tuple[int, str], str] = {}  # a schema, by its place in memory, and the text after its values
        self._lines: list[str] = []
        self._left_out: list[str] = []
        self._ends: list[str] = []

    def rules(self) -> _Arguments:
        start = self._members(parameters_of(self._root), self._root, ())
        return _Arguments(Rules(start, tuple(self._lines)), self._left_out, self._ends)

    def _rule(self, body: str, name: str = "") -> str:
        name = name or self._new_name()
        self._lines.append(f"{name}{body}")
        return name

    def _new_name(self) -> str:
        return f"{self._prefix}_{len(self._lines)}_{len(self._names)}"

    def _members(self, properties: dict[str, Any], schema: Any, path: Path) -> str:
        """Write rules of an object's members, and return the name of the first one."""
        required = schema.get("required") if isinstance(schema, dict) else None
        between = _text(self._form.between)
        first = more = self._rule(': ""')
        for name, value in reversed(properties.items()):
            is_needed = isinstance(required, list) and name in required
            written = f"{_text(self._form.begin + name)}{self._value(value, name, (*path, 'properties', name))}"
            skipped = ("", "") if is_needed else (f" | {first}", f" | {more}")
            first, more = (
                self._rule(f": {written} {more}{skipped[0]}"),
                self._rule(f": {between}{written} {more}{skipped[1]}"),
            )
        return first

    def _value(self, schema: Any, name: str, path: Path, start: int = 0) -> str:
        """Return the name of the rule of a value in each form that its type may have, with the texts around it.

        Args:
            start: of the text before it, where it begins.
        """
        schema = resolved(schema, self._root)
        key = id(schema), f"{name}/{start}"
        if key not in self._names:
            rule = self._names[key] = self._new_name()
            types = types_of(schema, self._root)
            forms = [form for form in self._form.forms if types & form.types] or [self._form.forms[0]]
            choices = [choice for form in forms for choice in self._choices(schema, form, name, path, start)]
            self._rule(f": {' | '.join(choices)}", rule)
        return self._names[key]

    def _choices(self, schema: Any, form: ParameterForm, name: str, path: Path, start: int) -> Iterator[str]:
        """Yield what may stand for a value in one form, with the texts around it."""
        types = types_of(schema, self._root)
        types = types & form.types or types
        before, end = _text(form.middle[start:]), form.end.replace(KEY, name)
        if self._form.is_python:
            yield from (f"{before}{value}" for value in self._python_values(schema, types))
            return
        if "string" in types:
            text = text_rules(self._tool.grammar, end, in_json=False) if self._tool.grammar else None
            yield f"{before}{self._raw_text(schema, end, path) if text is None else self._given(text)}"
            self._ends += [end] * (text is not None)
            return
        for alternative in alternatives(schema, self._root):
            allowed = types & types_of(alternative, self._root)
            nested = dict(self._nested(alternative, allowed, path))
            yield from (f"{before}{value}{_text(end)}" for value in nested.values())
            if allowed := allowed - nested.keys():
                yield f"{before}{self._json(narrowed_to(alternative, allowed))} {_text(end)}"

    def _nested(self, schema: Any, types: Collection[str], path: Path) -> Iterator[tuple[str, str]]:
        """Yield expressions of objects and lists that are not JSON, by their types."""
        nesting = self._form.nesting
        if nesting is None or not isinstance(schema, dict):
            return
        if "object" in types and (properties := parameters_of(schema)):
            self._leave_out(schema, ("patternProperties", "minProperties", "maxProperties", "allOf", "not", "if"), path)
            members = self._members(properties, schema, path)
            yield "object", f"{_text(nesting.braces[0])}{members} {_text(nesting.braces[1])}"
        if "array" in types and isinstance(schema.get("items"), dict):
            bounds = [key for key in ("minItems", "maxItems") if _count_of(schema, key) is None]
            self._leave_out(schema, (*bounds, "prefixItems", "uniqueItems", "contains", "allOf", "not", "if"), path)
            path = (*path, "items")
            if nesting.item:
                item = _text(self._form.begin + nesting.item) + self._value(schema["items"], nesting.item, path)
            else:
                item = self._value(schema["items"], "", path, self._form.value_start)
            least, most = _count_of(schema, "minItems") or 0, _count_of(schema, "maxItems")
            more = (
                f"({_text(self._form.between)}{item}){{{max(least - 1, 0)},{'' if most is None else max(most - 1, 0)}}}"
            )
            items = "" if most == 0 else f"{item} {more}" if least else f"({item} {more})?"
            yield "array", f"{_text(nesting.brackets[0])}{items} {_text(nesting.brackets[1])}"

    def _python_values(self, schema: Any, types: frozenset[str]) -> Iterator[str]:
        """Yield literals of Python, in which lists and objects are as in JSON, and strings may be."""
        if self._tool.grammar and (text := text_rules(self._tool.grammar, '"', in_json=True)):
            yield f'"\\"" {self._given(text)}'
            return
        constants = {"boolean": '("True" | "False")', "null": '"None"'}
        yield from (text for json_type, text in constants.items() if json_type in types)
        if others := types - constants.keys():
            yield self._json(narrowed_to(schema, others) if others != types else schema)
        if "string" in types and not (isinstance(schema, dict) and schema.keys() & _OF_STRINGS):
            yield r"/'([^'\\]|\\.)*'/"

    def _given(self, rules: Rules) -> str:
        self._lines += rules.lines
        return rules.start

    def _json(self, schema: Any) -> str:
        schema = schema if isinstance(schema, dict) else {}
        root = self._root if isinstance(self._root, dict) else {}
        rules = value_rules({**schema, **{name: root[name] for name in ("$defs", "definitions") if name in root}})
        return self._given(rules)

    def _raw_text(self, schema: Any, end: str, path: Path) -> str:
        """Return an expression of a string as it is, and of the text after it."""
        schema = schema if isinstance(schema, dict) else {}
        choices = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(choices, list) and all(isinstance(choice, str) for choice in choices):
            return f"({' | '.join(_literal(choice + end) for choice in choices)})"
        limit = _count_of(schema, "maxLength")
        lost = ["pattern", "minLength"] + ["format"] * (schema.get("format") in FORMATS)
        self._leave_out(schema, lost + ["maxLength"] * (limit is None), path)
        self._ends += (end, CDATA[1] + end) if self._form.has_cdata else (end,)
        size = "*" if limit is None else f"{{0,{limit}}}"
        if not self._form.has_cdata:
            return self._rule(f"[suffix={_literal(end)}]: /(?s:.{size})/")
        quoted = self._rule(f"[suffix={_literal(CDATA[1] + end)}]: /(?s:.{size})/")
        rest = "([^<]|<[^!]).*" if limit is None else f"[^<].{{0,{limit - 1}}}" if limit else ""  # nothing of CDATA's
        plain = self._rule(f"[suffix={_literal(end)}]: /(?s:({rest})?)/")
        return f"({_text(CDATA[0])}{quoted} | {plain})"

    def _leave_out(self, schema: dict[str, Any], keys: Iterable[str], path: Path) -> None:
        """Note keywords that are not enforced."""
        paths = ((*path, key) for key in keys if key in schema)
        self._left_out += (dotted(("tools", self._tool.name, "parameters", *steps)) for steps in paths)


def _count_of(schema: dict[str, Any], key: str) -> int | None:
    """Return the value of a keyword that limits a size, if that is enforced."""
    limit = schema.get(key)
    return limit if isinstance(limit, int) and 0 <= limit <= _MAX_COUNTED else None


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _text(text: str) -> str:
    return f"{_literal(text)} " if text else ""


class _State(NamedTuple):
    reasoning: ReasoningTracker | None  # None: the model does not reason
    text: str | None = ""  # the end of the answer, which may begin a call; None: no call can begin any more
    is_call: bool = False


class ToolCallConstraint:
    """A Constraint that allows any text until a call begins, and applies the grammar from there on.

    Args:
        calls: the grammar; None forbids calls.
        shown: control tokens of the syntax.
    """

    def __init__(
        self,
        calls: Matcher | None,
        vocabulary: Vocabulary,
        syntax: CallSyntax,
        reasoning: ReasoningTracker | None,
        shown: Collection[int] = (),
    ) -> None:
        self._matcher = calls
        self._vocabulary = vocabulary
        self._syntax = syntax
        self._tokens = calls.tokens if calls is not None else tokens_of(vocabulary, frozenset(shown))
        self._unconstrained = unconstrained_mask(
            self._tokens, syntax.trigger, may_end=True, may_close=calls is not None
        )
        self._states = [_State(reasoning)]

    @property
    def _calls(self) -> Matcher:
        assert self._matcher is not None
        return self._matcher

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
        piece = self._tokens.tokens[token].decode("utf-8", "replace")
        if reasoning is not None and reasoning.stage is not Stage.ANSWER:
            was_inside = reasoning.stage is Stage.INSIDE
            reasoning = reasoning.after(self._vocabulary.control_piece(token).decode("utf-8", "replace"))
            if was_inside and reasoning.stage is Stage.INSIDE and not self._syntax.at_start:
                return self._in_reasoning(state.text or "", piece, reasoning)
            if was_inside or reasoning.stage is Stage.INSIDE:
                return _State(reasoning)
        if state.text is None:
            return _State(reasoning, None)
        begin = self._syntax.trigger
        text = state.text + piece
        if not self._syntax.at_start:
            return _State(reasoning, text[-len(begin) :], text.endswith(begin) and self._matcher is not None)
        text = text.lstrip()
        return _State(reasoning, text if begin.startswith(text) else None, text == begin and self._matcher is not None)

    def _in_reasoning(self, tail: str, piece: str, reasoning: ReasoningTracker) -> _State:
        """Return the state after text of the reasoning, which a call ends, as ReasoningSplitter sees it."""
        begin = self._syntax.trigger
        text = "\n" + (tail + piece).lstrip() if not tail.strip() else tail + piece
        is_call = self._matcher is not None and text.endswith(begin if self._syntax.begins_anywhere else "\n" + begin)
        return _State(reasoning, text[-len(begin) - 1 :], is_call)

    def refuses(self, token: int) -> bool:
        return self._states[-1].is_call and self._calls.refuses(token)

    def forced(self) -> list[int]:
        return self._calls.forced() if self._states[-1].is_call else []

    def allowed(self, tokens: list[int]) -> int:
        return self._calls.allowed(tokens) if self._states[-1].is_call else len(tokens)

    def closing(self, limit: int) -> list[int] | None:
        return self._calls.closing(limit) if self._states[-1].is_call else None

    def rewind(self, n_tokens: int) -> None:
        n_left = len(self._states) - n_tokens
        # The grammar accepted each token after the one that began the call.
        n_constrained = sum(state.is_call for state in self._states[n_left - 1 : -1])
        del self._states[n_left:]
        if n_constrained:
            self._calls.rewind(n_constrained)
