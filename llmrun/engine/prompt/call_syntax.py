"""The syntax of a model's tool calls, found by rendering conversations that differ in one thing with its template.

A call is rendered with names, ids and arguments that occur nowhere else. What stands between them is the syntax; a
second call shows what is repeated, and an answer in text shows where a call begins and ends. llama.cpp finds a syntax
by the same kind of comparisons (docs/autoparser.md). Pure; must not know Jinja.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from llmrun.engine.prompt.thinking import shared_length
from llmrun.engine.prompt.tools import Render
from llmrun.protocol.messages import Message, Tool, ToolCall
from llmrun.protocol.toolcalls import (
    CDATA,
    KEY,
    CallElement,
    CallField,
    CallSyntax,
    Nesting,
    ParameterForm,
    Parameters,
    write_nested,
)

_QUESTION, _TEXT = Message("user", "Probe question?"), "Probe answer."
_NAMES, _KEYS, _IDS = ("probe_alpha", "probe_beta"), ("key_one", "key_two"), ("probeid01", "probeid02")
_VALUES = ("Word One", "Word Two")
_PROPERTIES = {key: {"type": "string", "description": "A probe."} for key in _KEYS}
_SCHEMA = json.dumps({"type": "object", "description": "A probe.", "properties": _PROPERTIES})
_TOOLS = tuple(Tool(name, f"Tool {name}.", _SCHEMA) for name in _NAMES)
_ARGUMENTS = dict(zip(_KEYS, _VALUES, strict=True))
# One value of each type of JSON, by the name that JSON Schema has for the type.
_SAMPLES: dict[str, Any] = {
    "string": _VALUES[0],
    "integer": 7531,
    "number": 75.31,
    "boolean": True,
    "null": None,
    "array": [7531, 1357],
    "object": {"inner": 7531},
}
_BOUNDARY = re.compile(r"\]?<|[\[{]")  # begins a marker; MiniMax M3's are "]<]minimax[>[<name>"
_EMPTY_REASONING = re.compile(r"\s*(?:<([^<>/]+)>\s*</\1>|</[^<>/]+>)\s*")


def find_syntax(render: Render, end: str = "") -> CallSyntax | None:
    """Return the syntax of the calls that a template writes; None if it writes none, or none that can be described.

    Args:
        end: what stands between the text of an answer and its calls, and belongs to neither.
    """
    turns = _Turns(render, end)
    single = turns.calls(_ARGUMENTS)
    if single is None:
        return None
    spans = _json_spans(single, _ARGUMENTS)
    one = _cut(single, *(spans or _parameter_spans(single)))
    if one is None:
        return None
    calls = _compared(one, turns.calls(_ARGUMENTS, _ARGUMENTS))
    syntax = calls if spans else _with_parameters(calls, turns)
    return _with_trigger(syntax, turns) if syntax is not None else None


class _Turns:
    """Trial renderings of an assistant's last message.

    Attributes:
        opening, closing: the text before and after an answer in text.
        begin: what the template writes of the next answer.
    """

    def __init__(self, render: Render, end: str) -> None:
        self._render, self._text_end = render, end
        self._before = render((_QUESTION,), _TOOLS, begins=False)
        self.begin = render((_QUESTION,), _TOOLS)[len(self._before) :]
        self.opening, _, self.closing = self._turn(_TEXT, ()).partition(_TEXT)
        self.closing = self.closing.removeprefix(end)

    def _turn(self, text: str, calls: tuple[ToolCall, ...]) -> str:
        whole = self._render((_QUESTION, Message("assistant", text, calls)), _TOOLS, begins=False)
        return whole[shared_length(self._before, whole) :]

    def calls(self, *arguments: dict[str, Any]) -> str | None:
        """Return calls as the template writes them, without the end of the turn; None if it writes none."""
        calls = tuple(
            ToolCall(call_id, name, json.dumps(each))
            for call_id, name, each in zip(_IDS, _NAMES, arguments, strict=False)
        )
        before, said, turn = self._turn(_TEXT, calls).partition(_TEXT)
        turn = turn.removeprefix(self._text_end)
        is_one_message = said and not (self.closing.strip() and turn.lstrip().startswith(self.closing.strip()))
        if not is_one_message or _NAMES[0] in before or _NAMES[0] not in turn:
            turn = self._turn("", calls)
            if _NAMES[0] not in turn:
                return None
            turn = turn[self._start(turn) :]
            empty = _EMPTY_REASONING.match(turn)
            turn = turn[empty.end() :] if empty else turn
        return turn[: _end(turn, self.closing)].rstrip()

    def _start(self, turn: str) -> int:
        """Return where a turn begins to differ from one in text: behind a marker, else behind the turn's beginning."""
        start = _before_marker(turn, shared_length(turn, self.opening))
        is_between = start == 0 or turn[start - 1] in "\n>]"
        return start if is_between else shared_length(turn, self.opening, self.begin)


def _before_marker(text: str, position: int) -> int:
    """Return the position, or the start of the marker that it lies in."""
    start = max(text.rfind("<", 0, position), text.rfind("[", 0, position))
    return position if start < 0 or re.search(r"[>\]]", text[start:position]) else start


def _end(turn: str, closing: str) -> int:
    """Return the length of a turn without its end, of which at least a part is the end of other turns too."""
    shared = shared_length(turn[::-1], closing[::-1])
    tail = closing[len(closing) - shared :]
    if shared < len(closing):  # not in the middle of a marker
        start = _BOUNDARY.search(tail)
        tail = tail[start.start() :] if start else ""
    return len(turn) - len(tail)


class _Call(NamedTuple):
    """One rendered call: its fields, and the texts before each of them and after the last one."""

    fields: list[CallField]
    texts: list[str]


def _json_spans(text: str, arguments: dict[str, Any]) -> list[tuple[int, int]]:
    """Return where these arguments stand as JSON objects."""
    decoder, spans = json.JSONDecoder(), []
    for match in re.finditer(r"\{", text):
        try:
            value, end = decoder.raw_decode(text, match.start())
        except ValueError:
            continue
        if value == arguments:
            spans.append((match.start(), end))
    return spans


def _parameter_spans(text: str) -> list[tuple[int, int]]:
    """Return where parameters are written one by one: from each first name to the last value."""
    pattern = f"{_KEYS[0]}(?:(?!{_KEYS[0]}|{_VALUES[1]}).)*?{_VALUES[0]}.*?{_VALUES[1]}"
    return [match.span() for match in re.finditer(pattern, text, re.DOTALL)]


def _cut(text: str, *spans: tuple[int, int], number: int = 0) -> _Call | None:
    """Cut a call at its arguments, the last of these, and at its name and its id wherever they are written."""
    if not spans:
        return None
    places = [(*spans[-1], CallField.ARGUMENTS)]
    for field, said in ((CallField.NAME, _NAMES[number]), (CallField.ID, _IDS[number])):
        places += [(*match.span(), field) for match in re.finditer(re.escape(said), text)]
    places.sort(key=lambda place: place[0])
    ends, starts = [0, *(place[1] for place in places)], [*(place[0] for place in places), len(text)]
    fields = [place[2] for place in places]
    if CallField.NAME not in fields or any(start < end for end, start in zip(ends, starts, strict=True)):
        return None
    return _Call(fields, [text[end:start] for end, start in zip(ends, starts, strict=True)])


def _compared(one: _Call, several: str | None) -> CallSyntax:
    """Compare one call with two calls, and return the syntax of calls, without its trigger.

    Both calls begin and end alike: the text between the two ends as the first one begins, and begins as it ends.
    """
    before, after = one.texts[0], one.texts[-1]
    alone = CallSyntax(_elements(one), "")
    if several is None or _NAMES[1] not in several:
        return alone
    spans = _json_spans(several, _ARGUMENTS) or _parameter_spans(several)
    firsts = [match.end() for said in (_NAMES[0], _IDS[0]) for match in re.finditer(said, several)]
    seconds = [match.start() for said in (_NAMES[1], _IDS[1]) for match in re.finditer(said, several)]
    if len(spans) != 2:
        return alone
    stop, start = max(spans[0][1], *firsts), min(spans[1][0], *seconds)
    if stop > start:
        return alone
    middle = several[stop:start]
    second = _cut(several[stop:], (spans[1][0] - stop, spans[1][1] - stop), number=1)
    if second is None or second.fields != one.fields:
        return alone
    begins = _shared_end(before, middle)
    texts = [begins, *(_numbered(*pair) for pair in zip(one.texts[1:-1], second.texts[1:-1], strict=True))]
    begin, rest = before[: len(before) - _size(begins)], middle[: len(middle) - _size(begins)]
    close = rest[: shared_length(rest, after)]
    call = [element for text, field in zip(texts, one.fields, strict=True) for element in (*text, field)]
    elements = tuple(element for element in (*call, close) if element)
    return CallSyntax(elements, "", begin, rest[len(close) :], after[len(close) :])


def _elements(call: _Call) -> tuple[CallElement, ...]:
    fields: list[CallElement] = [*call.fields, ""]
    return tuple(element for pair in zip(call.texts, fields, strict=True) for element in pair if element)


def _shared_end(first: str, second: str) -> list[CallElement]:
    """Return the common end of the texts before two calls, from a marker on, in which their numbers may stand."""
    size = _shared_size(first, second)
    digits = first[len(first) - size - 1 :][:1], second[len(second) - size - 1 :][:1]
    if size < min(len(first), len(second)) and _follow(*digits):
        cut = len(first) - size
        head = _shared_size(first[: cut - 1], second[: len(second) - size - 1])
        return [_from_marker(first[: cut - 1], head), CallField.INDEX, first[cut:]]
    return [_from_marker(first, size)]


def _from_marker(text: str, size: int) -> str:
    """Return the longest end of a text of at most this size that begins with a marker; without any, all of it."""
    end = text[len(text) - size :]
    start = _BOUNDARY.search(end)
    return end[start.start() :] if start else end


def _shared_size(first: str, second: str) -> int:
    return shared_length(first[::-1], second[::-1])


def _follow(first: str, second: str) -> bool:
    return first.isdecimal() and second.isdecimal() and int(second) == int(first) + 1


def _numbered(first: str, second: str) -> list[CallElement]:
    """Return the text that two calls have at the same place, in which their numbers may stand."""
    start = shared_length(first, second)
    if _follow(first[start : start + 1], second[start : start + 1]) and first[start + 1 :] == second[start + 1 :]:
        return [first[:start], CallField.INDEX, first[start + 1 :]]
    return [first]


def _size(elements: Sequence[CallElement]) -> int:
    return sum(len(element) if isinstance(element, str) else 1 for element in elements)


def _with_parameters(syntax: CallSyntax, turns: _Turns) -> CallSyntax | None:
    """Tell the syntax of parameters that are written one by one from that of a call; None if it can't be described."""
    at = syntax.call.index(CallField.ARGUMENTS)
    before = syntax.call[at - 1] if at and isinstance(syntax.call[at - 1], str) else ""
    after = syntax.call[at + 1] if at + 1 < len(syntax.call) else ""
    assert isinstance(before, str)
    assert isinstance(after, str)
    after = after.replace(_KEYS[1], KEY)
    samples = {kind: found for kind, value in _SAMPLES.items() if (found := _around(turns, value))}
    if "string" not in samples:
        return None
    between_values = samples["string"][1]
    begin = _from_marker(before, _shared_size(before, between_values)) if before else ""
    head = before[: len(before) - len(begin)]
    bare = _text_after_fields(turns.calls({}), syntax)
    rest = between_values[: len(between_values) - len(begin)]
    close = after[shared_length(rest, after) :]
    if bare.startswith(head) and after.endswith(bare[len(head) :]) and bare[len(head) :]:
        close = bare[len(head) :]
    end = after[: len(after) - len(close)]
    if not rest.startswith(end):
        return None
    between = rest[len(end) :]
    forms: dict[tuple[str, str], set[str]] = {}
    for kind, (middle, following) in samples.items():
        following = following[: len(following) - len(begin)]
        form = (middle, following.removesuffix(between))
        forms.setdefault(form, set()).add(kind)
    is_python = "integer" in samples and samples["integer"][0] == "=" and head.endswith("(") and not begin
    if is_python:
        forms = {("=", ""): set(_SAMPLES)}
    known = set().union(*forms.values())
    parameters = Parameters(
        begin,
        between,
        tuple(
            ParameterForm(middle, end, frozenset(kinds | ({*_SAMPLES} - known if "number" in kinds else set())))
            for (middle, end), kinds in forms.items()
        ),
        is_python=is_python,
        has_cdata=CDATA[0] in (turns.calls({_KEYS[0]: "<&>"}) or ""),
    )
    parameters = parameters if is_python else _with_nesting(parameters, turns)
    call = [*syntax.call[: at - 1 if before else at], head, CallField.ARGUMENTS, close, *syntax.call[at + 2 :]]
    return syntax._replace(call=tuple(element for element in call if element), parameters=parameters)


def _with_nesting(parameters: Parameters, turns: _Turns) -> Parameters:
    """Add how objects and lists in parameters are written, if not as JSON."""
    value = {"inner": [7531, 1357]}
    text = turns.calls({_KEYS[0]: value}) or ""
    item = re.search(re.escape(parameters.begin) + r"(\w+)" + re.escape(parameters.forms[0].middle) + "7531", text)
    choices = [Nesting(("{", "}"), ("[", "]"))]
    choices += [Nesting(("", ""), ("", ""), item[1])] if item and parameters.begin else []
    nested = (parameters._replace(nesting=nesting) for nesting in choices)
    return next((form for form in nested if write_nested(value, form) in text), parameters)


def _around(turns: _Turns, value: Any) -> tuple[str, str] | None:
    """Return the texts before and after a parameter's value, up to the next parameter's name."""
    text = turns.calls({_KEYS[0]: value, _KEYS[1]: _VALUES[1]})
    start = text.find(_KEYS[0]) + len(_KEYS[0]) if text and _KEYS[0] in text else -1
    if text is None or start < 0:
        return None
    end = text.find(_KEYS[1], start)
    written = value if isinstance(value, str) else json.dumps(value)
    for said in (written, written.replace(" ", ""), repr(value)):
        if said in text[start:end]:
            middle, _, following = text[start:end].rpartition(said)
            return middle, following.replace(_KEYS[0], KEY)
    return None


def _text_after_fields(bare: str | None, syntax: CallSyntax) -> str:
    """Return what a call without parameters has after its last field before them."""
    if bare is None:
        return ""
    ends = [match.end() for said in (_NAMES[0], _IDS[0]) for match in re.finditer(said, bare)]
    text = bare[max(ends, default=len(bare)) :]
    return text.removesuffix(syntax.end)


def _with_trigger(syntax: CallSyntax, turns: _Turns) -> CallSyntax:
    """Add the text by which a call is told from an answer in text."""
    first = syntax.call[0] if isinstance(syntax.call[0], str) else ""
    begins = (syntax.begin + first).lstrip()
    ends = [match.end() for match in re.finditer(r"[>\]]", begins) if re.search(r"\w", begins[: match.end()])]
    plain = turns.opening + turns.closing
    if not ends and (json_start := re.search(r"\w\s*[\[{]", begins)):  # of words
        ends = [json_start.end()]
    trigger = next((begins[:end] for end in ends if begins[:end] not in plain), begins)
    lead = prefill = ""
    if not _BOUNDARY.search(trigger):
        # Text and call differ by the beginning of the message, of which some may stand in the prompt.
        prefill = trigger if turns.begin.endswith(trigger) else ""
        lead = prefill + turns.opening[shared_length(turns.opening, turns.begin) :]
    return syntax._replace(
        trigger=trigger,
        begin=syntax.begin if lead else syntax.begin.lstrip(),
        at_start=begins.startswith("{") or bool(lead),
        lead=lead,
        prefill=prefill,
    )


def for_vocabulary(syntax: CallSyntax, control: Collection[str], ends: Sequence[str]) -> CallSyntax:
    """Return a syntax without what ends the answer, whose trigger does not end within a control text."""
    end = min(
        (syntax.end[: syntax.end.find(text)] for text in ends if text and text in syntax.end),
        key=len,
        default=syntax.end,
    )
    first = syntax.call[0]
    begins = syntax.begin + (first if isinstance(first, str) else "")
    size = len(syntax.trigger)
    for text in control:
        for match in re.finditer(re.escape(text), begins):
            if match.start() < size < match.end():
                size = match.end()
    trigger = begins[:size] if size > len(syntax.trigger) else syntax.trigger
    return syntax._replace(end=end, trigger=trigger, is_control=any(text in trigger for text in control if text))


# Syntaxes by hand, of models whose templates write no calls: a control token shows them.
_BY_CONTROL_TEXT = {
    "<|tool_call_start|>": CallSyntax(  # LFM2's
        (CallField.NAME, "(", CallField.ARGUMENTS, ")"),
        "<|tool_call_start|>",
        "<|tool_call_start|>[",
        ", ",
        "]<|tool_call_end|>",
        Parameters("", ", ", (ParameterForm("=", "", frozenset(_SAMPLES)),), is_python=True),
    ),
    "<|tool_call|>": CallSyntax(  # Granite 3's
        ('{"name": "', CallField.NAME, '", "arguments": ', CallField.ARGUMENTS, "}"),
        "<|tool_call|>",
        "<|tool_call|>[",
        ", ",
        "]",
    ),
}


def syntax_by_vocabulary(control: Collection[str], source: str) -> CallSyntax | None:
    """Return the syntax of a model whose template writes no calls; None if nothing shows it."""
    return next((syntax for text, syntax in _BY_CONTROL_TEXT.items() if text in control or text in source), None)
