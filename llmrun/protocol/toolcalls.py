"""The syntax of a model's tool calls as data, and the calls split off an answer piece by piece.

Pure; must not know templates or tokens. A grammar holds the model to the syntax once a call has begun, so that nothing
is guessed: text that does not follow the syntax is text. Only whitespace around the syntax's own texts is free.
"""

from __future__ import annotations

import enum
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from os.path import commonprefix
from typing import Any, NamedTuple

from llmrun.protocol.call_parameters import (
    TYPES,
    as_json,
    json_of_python,
    json_type,
    member_of,
    parameters_of,
    types_of,
)
from llmrun.protocol.codec import load_json
from llmrun.protocol.messages import AnswerPart, PartKind, Tool, ToolCall
from llmrun.protocol.reasoning import overlap


class CallField(enum.Enum):
    """A part of a call, between the texts of its syntax."""

    NAME = "name"
    ID = "id"  # any text of letters and digits
    INDEX = "index"  # the call's number
    ARGUMENTS = "arguments"


CallElement = str | CallField


NAMED_ID: tuple[CallElement, ...] = ("functions.", CallField.NAME, ":", CallField.INDEX)
"""Ids of calls as Kimi K2 writes them."""


class ParameterForm(NamedTuple):
    """The texts around a parameter's value; `end` may contain KEY."""

    middle: str  # between the parameter's name and its value
    end: str
    types: frozenset[str]  # names of JSON Schema of the types that are written so


class Nesting(NamedTuple):
    """The syntax of objects and lists in parameters; their members are written as parameters are."""

    braces: tuple[str, str]  # around an object's members
    brackets: tuple[str, str]  # around a list's
    item: str = ""  # the name of each member of a list; "" if these have values only


class Parameters(NamedTuple):
    """The syntax of parameters that are written one by one: begin, name, middle, value, end."""

    begin: str
    between: str
    forms: tuple[ParameterForm, ...]  # strings are written as they are, other values as JSON
    nesting: Nesting | None = None  # None if objects and lists are JSON
    is_python: bool = False  # values are literals of Python
    has_cdata: bool = False  # strings with characters of XML's stand between CDATA's texts

    @property
    def value_start(self) -> int:
        """The length of the beginning that the middle texts of all forms have in common: a value's text follows it."""
        return len(commonprefix([form.middle for form in self.forms]))  # noqa: RUF071 - not of paths

    @property
    def quote(self) -> str:
        """The text on both sides of strings inside lists and objects; "" if these are JSON or have none."""
        string = next(form for form in self.forms if "string" in form.types)
        return string.middle[self.value_start :] if self.nesting is not None else ""


class CallSyntax(NamedTuple):
    """The syntax of a model's calls: begin, call, between, call, ..., end."""

    call: tuple[CallElement, ...]
    trigger: str  # the beginning of the first call that occurs in no other text; a grammar applies after it
    begin: str = ""
    between: str | None = None  # None if an answer has at most one call
    end: str = ""
    parameters: Parameters | None = None  # None if the arguments are a JSON object
    at_start: bool = False  # an answer is a call or text, never text and then a call
    lead: str = ""  # precedes an answer that is text
    prefill: str = ""  # of the first call or of the lead, what the prompt ends with
    is_control: bool = False  # the trigger has a control token, so that no text mentions it

    @property
    def has_header(self) -> bool:
        """The first words of an answer decide whether it is text or a call."""
        return self.at_start and bool(self.lead)

    @property
    def begins_anywhere(self) -> bool:
        """A call ends reasoning in the middle of a line too: two tags begin it, and no text mentions their tokens."""
        return self.is_control and bool(self.late_head)

    @property
    def head(self) -> tuple[CallElement, ...]:
        """A call up to its arguments."""
        return self.call[: self.call.index(CallField.ARGUMENTS)]

    @property
    def call_id(self) -> tuple[CallElement, ...]:
        """A call's id by its elements before the arguments; empty if it has none there that clients could use."""
        head = self.head
        place = head.index(CallField.NAME)
        if CallField.ID in head:
            return (CallField.ID,)
        is_named = head[place : place + 3] == NAMED_ID[1:] and str(head[place - 1]).endswith(str(NAMED_ID[0]))
        return NAMED_ID if is_named else ()

    @property
    def late_head(self) -> tuple[CallElement, ...]:
        """A call up to its arguments without its first tag, which models may leave out; empty if it has but one."""
        before = (self.begin + self.call[0] if isinstance(self.call[0], str) else self.begin).lstrip()
        rest = before[len(self.trigger) :].lstrip()
        return (rest, *self.head[1:]) if rest.startswith("<") and not self.at_start else ()

    @property
    def tail(self) -> tuple[CallElement, ...]:
        """A call from the end of its arguments."""
        return self.call[self.call.index(CallField.ARGUMENTS) + 1 :]

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts of the syntax, which may contain control tokens."""
        form = self.parameters
        texts = [self.begin, self.between, self.end, self.lead, *(each for each in self.call if isinstance(each, str))]
        if form is not None:
            texts += [form.begin, form.between, *(text for each in form.forms for text in each[:2])]
            texts += [*form.nesting.braces, *form.nesting.brackets] if form.nesting is not None else []
        return tuple(filter(None, texts))

    def write(self, calls: Sequence[ToolCall]) -> str:
        """Return calls as a model writes them."""
        texts = ["".join(self._write_call(call, index)) for index, call in enumerate(calls)]
        if self.between is None:
            return "\n".join(f"{self.begin}{text}{self.end}" for text in texts)
        return f"{self.begin}{self.between.join(texts)}{self.end}"

    def _write_call(self, call: ToolCall, index: int) -> Iterator[str]:
        for element in self.call:
            if isinstance(element, str):
                yield element
            elif element is CallField.ARGUMENTS:
                yield call.arguments if self.parameters is None else _write_parameters(call.arguments, self.parameters)
            else:
                yield {CallField.NAME: call.name, CallField.ID: call.id, CallField.INDEX: str(index)}[element]


KEY = "\0"
"""Stands for a parameter's name in the text after its value."""

_NAME, _ARGUMENTS = CallField.NAME, CallField.ARGUMENTS
# What models without a syntax of their own are told to write; the most common one.
HERMES = CallSyntax(
    ('<tool_call>\n{"name": "', _NAME, '", "arguments": ', _ARGUMENTS, "}\n</tool_call>"), "<tool_call>", between="\n"
)
# gpt-oss's, by hand: its template writes earlier calls in another form than the model, as messages with a receiver.
# The token after a call ends the answer.
HARMONY = CallSyntax(
    ("<|channel|>commentary to=functions.", _NAME, " <|constrain|>json<|message|>", _ARGUMENTS),
    "<|channel|>commentary to=",
    lead="<|channel|>final<|message|>",
)

HARMONY_AS_TOLD = "<|start|>assistant to=functions."
"""What gpt-oss's template writes of earlier calls."""

TOOL_NAME = re.compile(r"[\w.:/-]{1,256}")
TOOL_NAME_RULE = "must be 1 to 256 letters, digits or any of _-.:/"
_FIELDS = {CallField.NAME: TOOL_NAME, CallField.ID: re.compile(r"[\w-]{1,64}"), CallField.INDEX: re.compile(r"\d{1,9}")}
CDATA = "<![CDATA[", "]]>"
_Step = Callable[[list[AnswerPart]], bool]


def new_call_id() -> str:
    """Return an id for a call, for models and clients that give none."""
    return f"call_{os.urandom(12).hex()}"


class CallSplitter:
    """Splits the text of one answer.

    Args:
        syntax: of the calls; None if there can be none.
        tools: tools that may be called, whose schemas give the types of parameters.
        taken: ids of earlier calls, which no other call may have.

    Attributes:
        n_calls: number of complete calls.
    """

    def __init__(self, syntax: CallSyntax | None, tools: Sequence[Tool] = (), taken: Iterable[str] = ()) -> None:
        self._syntax = syntax or HERMES
        self._taken = {*taken}
        self._tools = {tool.name: tool for tool in tools}
        self._root: Any = {}  # the schema of the called tool
        self._schemas: dict[str, Any] = {}  # of its parameters
        self._n_parameters = 0  # of the open call
        self._step: _Step = self._start if syntax else self._text
        self._buffer = syntax.prefill if syntax else ""  # not certain yet
        self._begins: dict[str, _Step] = {self._syntax.trigger: self._head}
        if late := self._syntax.late_head:
            self._begins[str(late[0])] = self._late_head
        self._is_text = False  # the answer began as text, and a call of a tool that there is may follow
        self._depth = 0  # of brackets in the arguments
        self._in_string = self._escaped = False
        self.n_calls = 0

    def feed(self, text: str) -> list[AnswerPart]:
        """Return the parts that are certain with this piece, without the syntax and the blanks before it."""
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
        self._drop_prefill()
        rest, self._buffer = self._buffer, ""
        may_be_text = self._step in (self._start, self._outside, self._head, self._late_head)
        begins_call = is_cut_off and bool(rest.strip())
        is_text = may_be_text and not begins_call and (rest.strip() or not self.n_calls)
        return [AnswerPart("text", rest)] if rest and is_text else []

    def begin_message(self) -> list[AnswerPart]:
        """Return the remaining parts of a message before another one in the same answer."""
        parts = self.flush()
        self._step, self._is_text = self._start, False
        return parts

    # Each step takes what it can of the buffer, and returns whether there may be more to take.

    def _text(self, parts: list[AnswerPart]) -> bool:
        self._emit(parts, "text", len(self._buffer))
        return False

    def _start(self, parts: list[AnswerPart]) -> bool:
        """Drop the lead before a text."""
        lead, text = self._syntax.lead, self._buffer.lstrip()
        if lead and text.startswith(lead):
            self._buffer, self._is_text = text[len(lead) :], self._syntax.at_start
            return self._go_on(self._after_lead if self._is_text else self._outside)
        if lead.startswith(text) and lead:
            return False
        return self._go_on(self._outside)

    def _drop_prefill(self) -> None:
        """Remove the beginning that the prompt has, of which no call came."""
        if not self._is_text and not self.n_calls:
            self._buffer = self._buffer.removeprefix(self._syntax.prefill)

    def _no_call_begins(self) -> bool:
        self._drop_prefill()
        self._is_text = True
        return self._go_on(self._after_lead)

    @property
    def _after_lead(self) -> _Step:
        """The step in an answer that began as text: a header that the prompt begins may stand in it again."""
        return self._outside if self._syntax.prefill else self._text

    def _outside(self, parts: list[AnswerPart]) -> bool:
        trigger, n_blanks = self._syntax.trigger, len(self._buffer) - len(self._buffer.lstrip())
        if self._syntax.at_start and not self._is_text:
            _, end = _match((trigger,), self._buffer)
            return end is not None and (self._no_call_begins() if end < 0 else self._go_on(self._head))
        begins = self._begins
        found = min(((place, begin) for begin in begins if (place := self._buffer.find(begin)) >= 0), default=None)
        if found is not None:
            self._emit(parts, "text", len(self._buffer[: found[0]].rstrip()))
            return self._go_on(begins[found[1]])
        n_certain = len(self._buffer) - max(overlap(self._buffer, each) for each in begins)
        self._emit(parts, "text", len(self._buffer[:n_certain].rstrip()) if n_certain > n_blanks else 0)
        return False

    def _head(self, parts: list[AnswerPart]) -> bool:
        """Take the beginning of the first call, once it is certain that arguments follow."""
        return self._take_head(parts, (self._syntax.begin, *self._syntax.head), self._tools if self._is_text else None)

    def _late_head(self, parts: list[AnswerPart]) -> bool:
        """Take the beginning of a call without its first tag, of a tool that there is."""
        return self._take_head(parts, self._syntax.late_head, self._tools)

    def _take_head(
        self, parts: list[AnswerPart], elements: Sequence[CallElement], names: Collection[str] | None = None
    ) -> bool:
        fields, end = _match(elements, self._buffer)
        if end is None:
            return False
        if end < 0 or (names is not None and fields[CallField.NAME] not in names):
            return self._not_a_call(parts)
        rest = self._buffer[end:]
        form = self._syntax.parameters
        begins = ("{",) if form is None else (form.begin, *self._closings())
        text = rest.lstrip() if form is None else rest
        if not _may_begin(text, begins):
            return self._not_a_call(parts)
        if not any(text.startswith(each) for each in begins):
            return False
        name = fields[CallField.NAME]
        parts.append(AnswerPart("call", name, self._new_id(fields)))
        self._buffer = text
        if form is None:
            return self._go_on(self._arguments)
        parts.append(AnswerPart("arguments", "{"))  # never empty: clients take that for a call without arguments
        self._root = load_json(self._tools[name].parameters) if name in self._tools else {}
        self._schemas = parameters_of(self._root)
        self._n_parameters = 0
        return self._go_on(self._parameter)

    def _new_id(self, fields: dict[CallField, str]) -> str:
        """Return the id that the model gave a call; "" if it has none, or that of another call."""
        elements = self._syntax.call_id
        call_id = "".join(each if isinstance(each, str) else fields[each] for each in elements)
        if call_id in self._taken:
            return ""
        self._taken.add(call_id)
        return call_id

    def _closings(self) -> tuple[str, ...]:
        """Return the text after the last parameter, as the template writes it and without blanks before it."""
        close = next((each for each in self._syntax.tail if isinstance(each, str)), "")
        return tuple({close, close.lstrip()} - {""})

    def _parameter(self, parts: list[AnswerPart]) -> bool:
        """Take the next parameter once it is complete, or the end of the call."""
        form = self._syntax.parameters
        assert form is not None
        between = form.between if self._n_parameters else ""
        begin = between + form.begin
        closings = self._closings()
        if any(self._buffer.startswith(each) and not (begin.startswith(each) and begin != each) for each in closings):
            parts.append(AnswerPart("arguments", "}"))
            self._end_call(parts)
            return self._go_on(self._tail)
        text = self._buffer if self._buffer.startswith(begin) else self._buffer.lstrip()
        if not text.startswith(begin):
            begin = begin.strip()
        if not _may_begin(text, (begin, *closings)):
            return self._go_on(self._outside)
        if any(each.startswith(text) for each in closings):
            return False
        member = self._member(text.removeprefix(begin), form) if text.startswith(begin) else None
        if member is None:
            return False
        name, value, self._buffer = member
        separator = ", " if self._n_parameters else ""
        parts.append(AnswerPart("arguments", f"{separator}{json.dumps(name, ensure_ascii=False)}: {value}"))
        self._n_parameters += 1
        return True

    def _member(self, text: str, form: Parameters) -> tuple[str, str, str] | None:
        """Return a parameter's name, its value as JSON, and the text after it; None if it is incomplete."""
        middles = [(match, each) for each in form.forms if (match := _inner_blanks_free(each.middle).search(text, 1))]
        written = min(middles, key=lambda pair: (pair[0].start(), -len(pair[1].middle)), default=None)
        if written is None:
            return None
        (position, start), value_form = written[0].span(), written[1]
        name, value = text[:position].strip(), text[start:]
        if any(
            len(each.middle) > len(value_form.middle) and each.middle.startswith(text[position:]) for each in form.forms
        ):
            return None  # the beginning of a longer one
        end = value_form.end.replace(KEY, name)
        if end and not form.is_python:
            is_text, others = "string" in value_form.types, len(value_form.types) > 1
            schema = self._schemas.get(name)
            if form.nesting is not None and form.nesting.item:
                return (name, *found) if (found := _tagged(value, name, form, schema, self._root)) else None
            quote = CDATA[1] if form.has_cdata and value.startswith(CDATA[0]) else ""
            raw, ended, rest = value.partition(quote + end)
            if not ended:
                return None
            raw += quote
            if raw.startswith(CDATA[0]) and raw.endswith(CDATA[1]):
                raw = raw[len(CDATA[0]) : -len(CDATA[1])]
            if is_text:
                return name, as_json(raw, schema) if others else json.dumps(raw, ensure_ascii=False), rest
            return name, _json_of(raw.strip(), form.quote), rest
        stop = _end_of_value(value, ("'", '"') if form.is_python else (form.quote, '"'), self._stops(form))
        if stop is None:
            return None
        raw = value[:stop].strip()
        return name, json_of_python(raw) if form.is_python else _json_of(raw, form.quote), value[stop:]

    def _stops(self, form: Parameters) -> tuple[str, ...]:
        return (form.between.strip(), *self._closings())

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
                return self._go_on(self._tail)
        self._emit(parts, "arguments", len(self._buffer))
        return False

    def _end_call(self, parts: list[AnswerPart]) -> None:
        parts.append(AnswerPart("call_end"))
        self.n_calls += 1

    def _tail(self, parts: list[AnswerPart]) -> bool:
        """Take the text after the arguments, as far as it is there."""
        _, end = _match(self._syntax.tail, self._buffer)
        if end is None:
            return False
        self._buffer = self._buffer[max(end, 0) :]
        return self._go_on(self._after_call)

    def _after_call(self, parts: list[AnswerPart]) -> bool:
        """Take the end of all calls, or find the beginning of the next one."""
        syntax = self._syntax
        first = syntax.call[0]
        following = (syntax.between, first if isinstance(first, str) else "") if syntax.between is not None else None
        _, next_call = _match(following, self._buffer) if following and any(following) else ({}, -1)
        _, end = _match((syntax.end,), self._buffer) if syntax.end else ({}, -1)
        if next_call is not None and next_call >= 0:
            return self._go_on(self._next_head)
        if end is not None and end >= 0:
            self._buffer = self._buffer[end:]
            return self._go_on(self._text if syntax.at_start else self._outside)
        if next_call is None or end is None:
            return False
        return self._go_on(self._text if syntax.at_start else self._outside)

    def _next_head(self, parts: list[AnswerPart]) -> bool:
        return self._take_head(parts, (self._syntax.between or "", *self._syntax.head))

    def _not_a_call(self, parts: list[AnswerPart]) -> bool:
        """Give out as text what only began like a call."""
        if self._syntax.prefill and not self._is_text:
            return self._no_call_begins()
        late = str(self._syntax.late_head[0]) if self._syntax.late_head else ""
        begin = self._syntax.trigger if self._step != self._late_head else late[:1]
        size = len(self._buffer) - len(self._buffer.lstrip()) + len(begin)
        rest = self._buffer[size:].lstrip()
        if late and rest.startswith(late):  # of the same call
            size = len(self._buffer) - len(rest) + 1
        self._emit(parts, "text", max(1, min(size, len(self._buffer))))
        return self._go_on(self._after_lead if self._syntax.at_start else self._outside)

    def _go_on(self, step: _Step) -> bool:
        self._step = step
        return True

    def _emit(self, parts: list[AnswerPart], kind: PartKind, size: int) -> None:
        """Give out the first characters of the buffer."""
        if size:
            parts.append(AnswerPart(kind, self._buffer[:size]))
        self._buffer = self._buffer[size:]


def _match(elements: Sequence[CallElement], text: str) -> tuple[dict[CallField, str], int | None]:
    """Match elements of a call at the beginning of a text, with free whitespace around the syntax's texts.

    Returns:
        The fields, and the end of the match: -1 if the text does not match, None if more text decides.
    """
    position = 0
    for number, element in enumerate(elements):
        if isinstance(element, str):
            end = _match_text(element, text, position)
            if end is None or end < 0:
                return {}, end
            position = end
            continue
        run = _FIELDS[element].match(text, position)
        longest = run.end() if run else position
        if longest == len(text):
            return {}, None
        for end in range(longest, position, -1):
            fields, rest = _match(elements[number + 1 :], text[end:])
            if rest is None or rest >= 0:
                value = text[position:end]
                if element in fields and fields[element] != value:
                    continue  # a name that is written twice
                return {**fields, element: value}, None if rest is None else end + rest
        return {}, -1
    return {}, position


def _match_text(expected: str, text: str, position: int) -> int | None:
    """Return the end of a match as _match() does; blanks match any number of blanks, and may precede the text."""
    index = 0
    while index < len(expected):
        if expected[index].isspace():
            index += 1
            continue
        while position < len(text) and text[position].isspace() and text[position] != expected[index]:
            position += 1
        if position == len(text):
            return None
        if text[position] != expected[index]:
            return -1
        position, index = position + 1, index + 1
    blanks = len(expected) - len(expected.rstrip())
    while blanks and position < len(text) and text[position].isspace():
        position, blanks = position + 1, blanks - 1
    return position


@lru_cache(maxsize=64)
def _inner_blanks_free(text: str) -> re.Pattern[str]:
    """Return a pattern of a text, in which the whitespace between its words may be other, or missing."""
    words = text.split()
    before, after = text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :] if words else ""
    return re.compile(re.escape(before) + r"\s*".join(map(re.escape, words)) + re.escape(after))


def _may_begin(text: str, beginnings: Sequence[str]) -> bool:
    """Return whether a text, with more to come, may begin with one of these."""
    return any(text.startswith(each) or each.startswith(text) for each in beginnings)


def _end_of_value(text: str, quotes: Sequence[str], stops: Sequence[str]) -> int | None:
    """Return the index of the first stop outside of strings and brackets; None if there is none yet."""
    depth, index = 0, 0
    while index < len(text):
        quote = next((each for each in quotes if each and text.startswith(each, index)), None)
        if quote is not None:
            index += len(quote)
            while index < len(text) and not text.startswith(quote, index):
                index += 2 if text[index] == "\\" and len(quote) == 1 else 1
            if index >= len(text):
                return None
            index += len(quote)
            continue
        if depth == 0 and any(text.startswith(each, index) for each in stops if each):
            return index
        depth += (text[index] in "{[(") - (text[index] in "}])")
        index += 1
    return None


def _tagged(text: str, name: str, form: Parameters, schema: Any, root: Any) -> tuple[str, str] | None:
    """Return a value, whose members may be written in tags, as JSON, and the text after its end; None if incomplete."""
    assert form.nesting is not None
    end, middle, types = form.forms[0].end.replace(KEY, name), form.forms[0].middle, types_of(schema, root)
    members: list[tuple[str, str]] = []
    rest, is_item = text.lstrip(), True
    while "string" not in types or types == TYPES:
        if any(each.startswith(rest) and each != rest for each in (end, form.begin)):
            return None
        if rest.startswith(end) and members:
            values = [f"{json.dumps(key, ensure_ascii=False)}: " * (not is_item) + value for key, value in members]
            return f"{'[' if is_item else '{'}{', '.join(values)}{']' if is_item else '}'}", rest[len(end) :]
        if rest.startswith(end) or not rest.startswith(form.begin):
            break
        key, found, inner = rest[len(form.begin) :].partition(middle)
        is_item = is_item and key == form.nesting.item and "array" in types
        member = _tagged(inner, key, form, member_of(schema, None if is_item else key, root), root) if found else None
        if member is None:
            return None
        members.append((key, member[0]))
        rest = member[1].lstrip()
    raw, ended, rest = text.partition(end)
    if not raw.strip() and "string" not in types:
        raw = "[]" if "array" in types else "{}"
    return (as_json(raw, schema), rest) if ended else None


def _json_of(text: str, quote: str) -> str:
    """Return a value as JSON, whose strings may have other quotes, and whose names may have none."""
    try:
        load_json(text)
        return text
    except ValueError:
        pass
    if quote:
        pieces = text.split(quote)  # every second one is a string
        bare = (re.sub(r"([\w$-]+)\s*:", r'"\1":', each) for each in pieces[::2])
        strings = (json.dumps(each, ensure_ascii=False) for each in pieces[1::2])
        pieces[::2], pieces[1::2] = bare, strings
        try:
            return json.dumps(load_json("".join(pieces)), ensure_ascii=False)
        except ValueError:
            pass
    return json_of_python(text)


def _python_literal(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_python_literal(key)}: {_python_literal(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(_python_literal, value))}]"
    return str(value) if value is None or isinstance(value, bool) else json.dumps(value, ensure_ascii=False)


def _write_parameters(arguments: str, form: Parameters) -> str:
    return form.between.join(_member(name, value, form) for name, value in load_json(arguments).items())


def _member(name: str, value: Any, form: Parameters) -> str:
    return f"{form.begin}{name}{_write_value(name, value, form)}"


def _write_value(name: str, value: Any, form: Parameters) -> str:
    """Return a value with the texts around it."""
    kind = json_type(value)
    written = next((each for each in form.forms if kind in each.types), form.forms[-1])
    if form.is_python:
        text = _python_literal(value)
    elif form.nesting is not None and isinstance(value, dict | list):
        text = write_nested(value, form)
    else:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"{written.middle}{text}{written.end.replace(KEY, name)}"


def write_nested(value: Any, form: Parameters) -> str:
    """Return an object or a list whose members are written as parameters are."""
    nesting = form.nesting
    assert nesting is not None
    members: Iterable[str]
    if isinstance(value, dict):
        (begin, end), members = nesting.braces, (_member(name, each, form) for name, each in value.items())
    else:
        (begin, end), item = nesting.brackets, nesting.item
        members = (
            _member(item, each, form) if item else _write_value("", each, form)[form.value_start :] for each in value
        )
    return f"{begin}{form.between.join(members)}{end}"
