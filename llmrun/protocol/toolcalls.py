"""Syntaxes of tool calls, and the calls split off an answer piece by piece. Pure; must not know templates or tokens.

A grammar holds the model to the syntax once a call has begun, so that nothing is guessed: text that does not follow the
syntax to the letter is text.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from llmrun.protocol.codec import load_json
from llmrun.protocol.messages import AnswerPart, PartKind, Tool
from llmrun.protocol.parameters import as_json, parameters_of
from llmrun.protocol.reasoning import overlap


class ParameterForm(NamedTuple):
    """The syntax of parameters written one by one: begin, name, middle, value, end."""

    begin: str
    middle: str
    end: str
    between: str = ""  # between two parameters
    quote: str = ""  # on both sides of a string; without it, only the tool's schema distinguishes strings


class Syntax(NamedTuple):
    """The syntax of calls of some models: begin, first, name, middle, arguments, close; then for each more; end."""

    name: str
    begin: str  # marks a call
    first: str  # between that and the first call's name
    middle: str  # between a name and the arguments, which are a JSON object unless there is a `parameter`
    close: str  # after the arguments
    then: str = ""  # between two calls, up to the next name; "" if an answer has at most one call
    end: str = ""  # after the last call
    at_start: bool = False  # an answer is a call or text, never text and then a call
    marks: tuple[str, ...] = ()  # texts that may be control tokens, and must stay in the text
    parameter: ParameterForm | None = None  # syntax of each parameter; None if the arguments are a JSON object
    lead: str = ""  # precedes an answer that is text
    # Begin with first, and middle, as the templates write earlier calls; None if they are the same.
    told: tuple[str, str] | None = None


HERMES = Syntax(
    "hermes",
    begin="<tool_call>",
    first='\n{"name": "',
    middle='", "arguments": ',
    close="}\n</tool_call>",
    then='\n<tool_call>\n{"name": "',
    marks=("<tool_call>", "</tool_call>"),
)
LLAMA = Syntax("llama", begin='{"name": "', first="", middle='", "parameters": ', close="}", at_start=True)
MISTRAL = Syntax(
    "mistral",
    begin="[TOOL_CALLS]",
    first='[{"name": "',
    middle='", "arguments": ',
    close="}",
    then=', {"name": "',
    end="]",
    marks=("[TOOL_CALLS]",),
)
MISTRAL_ARGS = Syntax(
    "mistral-args",
    begin="[TOOL_CALLS]",
    first="",
    middle="[ARGS]",
    close="",
    then="[TOOL_CALLS]",
    marks=("[TOOL_CALLS]", "[ARGS]"),
)
# Qwen3-Coder's, and Qwen's since 3.5.
QWEN_XML = Syntax(
    "qwen-xml",
    begin="<tool_call>",
    first="\n<function=",
    middle=">\n",
    parameter=ParameterForm("<parameter=", ">\n", "\n</parameter>\n"),
    close="</function>\n</tool_call>",
    then="\n<tool_call>\n<function=",
    marks=("<tool_call>", "</tool_call>"),
)
GLM = Syntax(
    "glm",
    begin="<tool_call>",
    first="",
    middle="\n",
    parameter=ParameterForm("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
    close="</tool_call>",
    then="\n<tool_call>",
    marks=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)

# Gemma 4's. Inside lists and objects the model writes strings and names as outside; here these are JSON.
GEMMA = Syntax(
    "gemma",
    begin="<|tool_call>",
    first="call:",
    middle="{",
    parameter=ParameterForm("", ":", "", between=",", quote='<|"|>'),
    close="}<tool_call|>",
    then="<|tool_call>call:",
    marks=("<|tool_call>", "<tool_call|>", '<|"|>'),
)

# gpt-oss's: a message is on a channel and may have a receiver. The token after a call ends the answer.
HARMONY = Syntax(
    "harmony",
    begin="<|channel|>commentary to=",
    first="functions.",
    middle=" <|constrain|>json<|message|>",
    close="",
    marks=("<|channel|>", "<|constrain|>", "<|message|>"),
    lead="<|channel|>final<|message|>",
    told=("<|start|>assistant to=functions.", "<|channel|>commentary json<|message|>"),
)

_ALL = (HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, QWEN_XML, GLM, GEMMA, HARMONY)
SYNTAXES = {syntax.name: syntax for syntax in _ALL}

TOOL_NAME = re.compile(r"[\w.:/-]{1,256}")
TOOL_NAME_RULE = "must be 1 to 256 letters, digits or any of _-.:/"
_MOST_NAME_CHARACTERS = 256
_Step = Callable[[list[AnswerPart]], bool]


def new_call_id() -> str:
    """Return an id for a call, for models and clients that give none."""
    return f"call_{os.urandom(12).hex()}"


class CallSplitter:
    """Splits the text of one answer.

    Args:
        syntax: of the calls; None if there can be none.
        tools: tools that may be called, whose schemas give the types of parameters.

    Attributes:
        n_calls: number of complete calls.
    """

    def __init__(self, syntax: Syntax | None, tools: Sequence[Tool] = ()) -> None:
        self._syntax = syntax or HERMES
        self._tools = {tool.name: tool for tool in tools}
        self._parameters: dict[str, Any] = {}  # schemas of the called tool's
        self._n_parameters = 0  # of the open call
        self._step: _Step = self._start if syntax else self._text
        self._buffer = ""  # not certain yet
        self._passed = ""  # a frame that may turn out to be text
        self._depth = 0  # of brackets in the arguments
        self._in_string = self._escaped = False
        self.n_calls = 0

    def feed(self, text: str) -> list[AnswerPart]:
        """Return the parts that are certain with this piece, without the frame around calls and the blanks before
        it."""
        self._buffer += text
        parts: list[AnswerPart] = []
        while self._buffer and self._step(parts):
            pass
        return parts

    def flush(self, *, is_cut_off: bool = False) -> list[AnswerPart]:
        """Return the remaining parts at the end of the answer; none of a call cut off before its arguments.

        Args:
            is_cut_off: the model did not end the answer, so that a possible beginning of a call is one.
        """
        rest, self._buffer = self._buffer, ""
        begins_call = is_cut_off and bool(rest.strip())
        is_text = self._step in (self._start, self._outside) and not begins_call and (rest.strip() or not self.n_calls)
        return [AnswerPart("text", rest)] if rest and is_text else []

    # Each step takes what it can of the buffer, and returns whether there may be more to take.

    def _text(self, parts: list[AnswerPart]) -> bool:
        self._emit(parts, "text", len(self._buffer))
        return False

    def _start(self, parts: list[AnswerPart]) -> bool:
        """Drop the lead before a text."""
        lead, text = self._syntax.lead, self._buffer.lstrip()
        if lead and text.startswith(lead):
            self._buffer = text[len(lead) :]
        elif lead.startswith(text) and lead:
            return False
        return self._go_on(self._outside)

    def _outside(self, parts: list[AnswerPart]) -> bool:
        begin, blanks = self._syntax.begin, len(self._buffer) - len(self._buffer.lstrip())
        found = blanks if self._syntax.at_start else self._buffer.find(begin)
        if found >= 0 and self._buffer.startswith(begin, found):
            self._emit(parts, "text", len(self._buffer[:found].rstrip()))
            self._buffer = self._buffer.lstrip()
            self._passed = ""
            return self._frame(parts, begin, self._first)
        if self._syntax.at_start:
            return not begin.startswith(self._buffer[blanks:]) and self._go_on(self._text)
        n_pending = overlap(self._buffer, begin)
        self._emit(parts, "text", len(self._buffer[: len(self._buffer) - n_pending].rstrip()))
        return False

    def _first(self, parts: list[AnswerPart]) -> bool:
        return self._frame(parts, self._syntax.first, self._name)

    def _name(self, parts: list[AnswerPart]) -> bool:
        """Take the name once it is certain that arguments follow."""
        name, found, rest = self._buffer.partition(self._syntax.middle)
        limit = _MOST_NAME_CHARACTERS + (0 if found else len(self._syntax.middle))
        form = self._syntax.parameter
        begins = ("{",) if form is None else (form.begin, self._syntax.close)
        if len(name) > limit or (found and not name) or not _may_begin(rest, begins):
            return self._not_a_call(parts)
        if not (found and rest.startswith(begins)):
            return False
        parts.append(AnswerPart("call", name))
        self._buffer = rest
        if form is None:
            return self._go_on(self._arguments)
        parts.append(AnswerPart("arguments", "{"))  # never empty: clients take that for a call without arguments
        self._parameters = parameters_of(load_json(self._tools[name].parameters)) if name in self._tools else {}
        self._n_parameters = 0
        return self._go_on(self._parameter)

    def _parameter(self, parts: list[AnswerPart]) -> bool:
        """Take the next parameter once it is complete, or the end of the call."""
        form = self._syntax.parameter
        assert form is not None
        if self._buffer.startswith(self._syntax.close):
            parts.append(AnswerPart("arguments", "}"))
            self._end_call(parts)
            self._passed = ""
            return self._go_on(self._close)
        begin = (form.between if self._n_parameters else "") + form.begin
        if not _may_begin(self._buffer, (begin, self._syntax.close)):
            return self._go_on(self._outside)
        name, named, rest = self._buffer.removeprefix(begin).partition(form.middle)
        value = self._value(name, rest, form) if named and self._buffer.startswith(begin) else None
        if value is None:
            return False
        member = f"{json.dumps(name, ensure_ascii=False)}: {value[0]}"
        parts.append(AnswerPart("arguments", (", " if self._n_parameters else "") + member))
        self._n_parameters += 1
        self._buffer = value[1]
        return True

    def _value(self, name: str, text: str, form: ParameterForm) -> tuple[str, str] | None:
        """Return a parameter's value as JSON, and the text after it; None if the value is incomplete."""
        if not form.quote:
            written, ended, rest = text.partition(form.end)
            return (as_json(written, self._parameters.get(name)), rest) if ended else None
        if text.startswith(form.quote):
            written, ended, rest = text.removeprefix(form.quote).partition(form.quote + form.end)
            return (json.dumps(written, ensure_ascii=False), rest) if ended else None
        try:
            end = json.JSONDecoder().raw_decode(text)[1]
        except (ValueError, RecursionError):
            return None
        return (text[:end], text[end:]) if end < len(text) else None  # a number may go on

    def _arguments(self, parts: list[AnswerPart]) -> bool:
        for index, character in enumerate(self._buffer):
            if self._in_string:
                self._in_string = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
            elif character == '"':
                self._in_string = True
            else:
                self._depth += (character in "{[") - (character in "}]")
            if self._depth == 0:
                self._emit(parts, "arguments", index + 1)
                self._end_call(parts)
                self._passed = ""
                return self._go_on(self._close)
        self._emit(parts, "arguments", len(self._buffer))
        return False

    def _end_call(self, parts: list[AnswerPart]) -> None:
        parts.append(AnswerPart("call_end"))
        self.n_calls += 1

    def _close(self, parts: list[AnswerPart]) -> bool:
        after = self._next_call if self._syntax.end else self._text if self._syntax.at_start else self._outside
        return self._frame(parts, self._syntax.close, after)

    def _next_call(self, parts: list[AnswerPart]) -> bool:
        """Take the next call of a list, or the end of the list."""
        if self._buffer.startswith(self._syntax.end):
            return self._frame(parts, self._syntax.end, self._outside)
        return self._frame(parts, self._syntax.then, self._name)

    def _frame(self, parts: list[AnswerPart], text: str, after: _Step) -> bool:
        """Take a text that is required here."""
        if self._buffer.startswith(text):
            self._passed += text
            self._buffer = self._buffer[len(text) :]
            return self._go_on(after)
        return not text.startswith(self._buffer) and self._not_a_call(parts)

    def _not_a_call(self, parts: list[AnswerPart]) -> bool:
        """Give the frame out as text, which only began like a call."""
        if self._passed:
            parts.append(AnswerPart("text", self._passed))
        return self._go_on(self._text if self._syntax.at_start else self._outside)

    def _go_on(self, step: _Step) -> bool:
        self._step = step
        return True

    def _emit(self, parts: list[AnswerPart], kind: PartKind, size: int) -> None:
        """Give out the first characters of the buffer."""
        if size:
            parts.append(AnswerPart(kind, self._buffer[:size]))
        self._buffer = self._buffer[size:]


def _may_begin(text: str, beginnings: Sequence[str]) -> bool:
    """Return whether a text, with more to come, may begin with one of these."""
    return any(text.startswith(each) or each.startswith(text) for each in beginnings)
