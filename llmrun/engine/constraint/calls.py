"""The grammar of tool calls: arguments follow the tool's JSON schema.

Must not know templates. Of schemas it knows only how strings are written without quotes.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from llmrun.engine.constraint.matcher import Matcher, compile_lark, tokens_of
from llmrun.engine.constraint.reasoning import unconstrained_mask
from llmrun.engine.constraint.tool_schemas import arguments_schema, left_out, value_rules
from llmrun.engine.prompt.thinking import ReasoningStage, ReasoningTracker
from llmrun.engine.prompt.tools import allows_text
from llmrun.errors import UsageError
from llmrun.grammar.json_lark import Rules, rules_of
from llmrun.protocol.codec import load_json
from llmrun.protocol.messages import AnswerRequest, Tool
from llmrun.protocol.parameters import narrowed_to, parameters_of, types_of
from llmrun.protocol.toolcalls import KEY, CallElement, CallField, CallSyntax, Parameters

if TYPE_CHECKING:
    from llmrun.engine.llama.base import Vocabulary

_MAX_CALLS = 16  # of one answer: a small model may never stop
_MAX_COUNTED = 1000  # characters of a text


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
    starts_later = allows_text(request) and not syntax.has_header
    written = len(syntax.trigger) if starts_later else len(syntax.prefill)
    # Each line once: tools may have equal schemas.
    lines = dict.fromkeys(_lines(tools, syntax, written, several=request.parallel_calls and not only))
    lead = syntax.lead.removeprefix(syntax.prefill)
    if request.grammar is not None and request.tool_choice == "auto":
        if request.grammar.kind != "json_schema":
            raise UsageError("a grammar and tools exclude each other", why="an answer can't follow both")
        rules = rules_of(request.grammar.text)
        answer = f"{_text(lead)}{rules.start}"
        lines.update(dict.fromkeys(rules.lines))
    elif allows_text(request) and syntax.has_header:
        answer = f"{_text(lead)}/(?s:.*)/"
    else:
        return _compiled(["start: calls", *lines], tools, vocabulary, shown)
    return _compiled(["start: calls | answer", f"answer: {answer}", *lines], tools, vocabulary, shown)


def _compiled(lines: Sequence[str], tools: Sequence[Tool], vocabulary: Vocabulary, shown: Collection[int]) -> Matcher:
    matcher = compile_lark("\n".join(lines), vocabulary, shown)
    matcher.left_out = left_out(tools)
    return matcher


def _lines(tools: Sequence[Tool], syntax: CallSyntax, n_written: int, *, several: bool) -> Iterator[str]:
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
    for index, tool in enumerate(tools):
        named = (tool.name if element is CallField.NAME else element for element in after)
        yield f"call_{index}: {_elements(_joined(tool.name, *named), f'arguments_{index}')}"
        if syntax.parameters is None:
            rules = arguments_schema(tool.parameters).rules
            yield f"arguments_{index}: {rules.start}"
            yield from rules.lines
        else:
            yield from _parameter_lines(f"arguments_{index}", tool, syntax.parameters)


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


def _parameter_lines(rule: str, tool: Tool, form: Parameters) -> Iterator[str]:
    """Yield rules for the parameters of a tool's schema, one by one, in their order."""
    schema = load_json(tool.parameters)
    parameters = parameters_of(schema)
    required = schema.get("required") if isinstance(schema, dict) else None
    yield f"{rule}: {rule}_first_0"
    for index, (name, value) in enumerate(parameters.items()):
        is_needed = isinstance(required, list) and name in required
        after = f"{rule}_more_{index + 1}"
        yield f"{rule}_{index}: {_text(form.begin + name)}{rule}_value_{index}"
        yield from _value_lines(f"{rule}_value_{index}", name, value, schema, form)
        yield f"{rule}_first_{index}: {rule}_{index} {after}" + ("" if is_needed else f" | {rule}_first_{index + 1}")
        yield f"{rule}_more_{index}: {_text(form.between)}{rule}_{index} {after}" + ("" if is_needed else f" | {after}")
    yield f'{rule}_first_{len(parameters)}: ""'
    yield f'{rule}_more_{len(parameters)}: ""'


def _value_lines(rule: str, name: str, schema: Any, root: Any, form: Parameters) -> Iterator[str]:
    """Yield rules for a parameter's value in each form that its type may have, with the texts around it."""
    types = types_of(schema)
    forms = [each for each in form.forms if types & each.types] or [form.forms[0]]
    yield f"{rule}: {' | '.join(f'{rule}_{number}' for number in range(len(forms)))}"
    for number, each in enumerate(forms):
        end = each.end.replace(KEY, name)
        body = f"{rule}_{number}"
        if "string" in each.types & types and not form.is_python:
            yield f"{body}: {_text(each.middle)}{body}_text"
            yield f"{body}_text{_raw_text(schema, end)}"
        elif form.is_python:
            yield from _python_value(f"{body}: {_text(each.middle)}", types, schema, root)
        else:
            allowed = types & each.types or types
            narrowed = schema if allowed == types else narrowed_to(schema, allowed)
            rules = _with_definitions(narrowed, root)
            yield f"{body}: {_text(each.middle)}{rules.start} {_text(end)}"
            yield from rules.lines


def _python_value(before: str, types: frozenset[str], schema: Any, root: Any) -> Iterator[str]:
    """Yield a rule for a literal of Python, in which strings, lists and objects are as in JSON."""
    constants = {"boolean": '("True" | "False")', "null": '"None"'}
    choices = [text for kind, text in constants.items() if kind in types]
    others = types - constants.keys()
    if others:
        rules = _with_definitions(narrowed_to(schema, others) if others != types else schema, root)
        choices.append(rules.start)
        yield from rules.lines
    yield f"{before}({' | '.join(choices)})"


def _with_definitions(schema: Any, root: Any) -> Rules:
    schema = schema if isinstance(schema, dict) else {}
    return value_rules({**schema, **{name: root[name] for name in ("$defs", "definitions") if name in root}})


def _raw_text(schema: Any, end: str) -> str:
    """Return the end of a rule for a string as it is, and the text after it."""
    schema = schema if isinstance(schema, dict) else {}
    choices = schema.get("enum")
    if isinstance(choices, list) and all(isinstance(choice, str) for choice in choices):
        return f": {' | '.join(_literal(choice + end) for choice in choices)}"
    limit = schema.get("maxLength")
    size = f"{{0,{limit}}}" if isinstance(limit, int) and 0 <= limit <= _MAX_COUNTED else "*"
    return f"[suffix={_literal(end)}]: /(?s:.{size})/"


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
        if reasoning is not None and reasoning.stage is not ReasoningStage.ANSWER:
            was_inside = reasoning.stage is ReasoningStage.INSIDE
            reasoning = reasoning.after(self._vocabulary.control_piece(token).decode("utf-8", "replace"))
            if was_inside and reasoning.stage is ReasoningStage.INSIDE and not self._syntax.at_start:
                return self._in_reasoning(state.text or "", piece, reasoning)
            if was_inside or reasoning.stage is ReasoningStage.INSIDE:
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
        """Return the state after text of the reasoning, which a call ends at the start of a line, as in answers."""
        begin = self._syntax.trigger
        text = "\n" + (tail + piece).lstrip() if not tail.strip() else tail + piece
        is_call = self._matcher is not None and text.endswith("\n" + begin)
        return _State(reasoning, text[-len(begin) - 1 :], is_call)

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
