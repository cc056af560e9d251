"""The shapes in which servers send the parts of an answer: text, reasoning, refusals, tool calls, reasons of its end.

Pure; must not know events or statistics.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

REASONING_FIELDS = ("reasoning_content", "reasoning", "reasoning_text", "thinking")
"""Fields of a message with the reasoning as one text."""
REASONING_DETAILS = "reasoning_details"
"""OpenRouter's and MiniMax's field: the reasoning as a list of blocks."""
REASONING_BLOCKS, REASONING_TAGS = "content", "tags"
"""The reasoning is in blocks of the content, as Mistral has it, or between <think> and </think> of its text."""

_MOST_NESTED = 8
_LONGEST_ID = 1000


class ChunkTexts(NamedTuple):
    """The texts of a message, or of a piece of one."""

    text: str = ""
    reasoning: str = ""
    refusal: str = ""
    reasoning_name: str = ""  # where the reasoning was: a field, REASONING_BLOCKS, or "" for none


def texts_of(delta: dict[str, Any]) -> ChunkTexts:
    """Return the texts of a chunk's `delta`, a whole `message`, or a choice of text completions."""
    content = _blocks(delta.get("content")) or _blocks(delta.get("text"))
    text, thought, refusal = (_joined(content, kind) for kind in ("text", "reasoning", "refusal"))
    refusal += text_of(delta.get("refusal"))
    for name in (*REASONING_FIELDS, REASONING_DETAILS):
        if named := "".join(part for _, part in _blocks(delta.get(name))):
            return ChunkTexts(text, named, refusal, name)
    return ChunkTexts(text, thought, refusal, REASONING_BLOCKS if thought else "")


def _joined(parts: list[tuple[str, str]], kind: str) -> str:
    return "".join(text for each, text in parts if each == kind)


def _blocks(value: Any, kind: str = "text", depth: int = 0) -> list[tuple[str, str]]:
    """Return the texts of a text, a block, or a list of these, each with its kind: text, reasoning or refusal."""
    if isinstance(value, str):
        return [(kind, text_of(value))] if value else []
    if depth > _MOST_NESTED:
        return []
    if isinstance(value, list):
        return [part for each in value for part in _blocks(each, kind, depth + 1)]
    if not isinstance(value, dict):
        return []
    named = text_of(value.get("type"))
    if "thinking" in named or "reasoning" in named or "summary" in named:
        kind = "reasoning"
    elif named == "refusal":
        kind = "refusal"
    names = ("text", "thinking", "reasoning", "summary", "refusal", "content", "value")
    found = next((value[name] for name in names if value.get(name)), None)
    return _blocks(found, kind, depth + 1)


class RemoteCall:
    """A tool call as received: its name at once, its arguments in pieces.

    Attributes:
        is_whole: the arguments are a complete object.
    """

    def __init__(self) -> None:
        self.id, self.name, self.arguments = "", "", ""
        self.is_whole = False
        self._n_pieces = self._depth = 0
        self._in_string = self._is_escaped = False

    def add(self, call_id: str, name: str, arguments: str) -> None:
        """Add the call's part of a chunk. What follows complete arguments repeats them, and is dropped."""
        self.id, self.name = self.id or call_id, self.name or name
        if self.arguments == "{}" and arguments.strip():  # some gateways send it until the arguments come
            self.arguments, self.is_whole = "", False
        if arguments and not self.is_whole:
            self.arguments += arguments
            self._n_pieces += 1
            for char in arguments:
                self._follow(char)

    def _follow(self, char: str) -> None:
        """Follow the nesting of the arguments: parsing them after each piece would take quadratic time."""
        if self._is_escaped:
            self._is_escaped = False
        elif self._in_string:
            self._in_string, self._is_escaped = char != '"', char == "\\"
        else:
            self._in_string = char == '"'
            self._depth += (char in "{[") - (char in "}]")
            self.is_whole = self.is_whole or (char == "}" and self._depth == 0)

    def is_followed_by(self, call_id: str, name: str, arguments: str) -> bool:
        """Return whether a piece of a chunk with the number of this call is a part of it, not of another one."""
        if not name and not arguments.strip():
            return True
        if name and self.name and name != self.name:
            return False
        has_other_id = bool(call_id and self.id) and call_id != self.id
        if not self.is_whole:
            return not (has_other_id and name)
        repeats = bool(call_id and call_id == self.id) or (self._n_pieces > 1 and arguments == self.arguments)
        return not has_other_id and (not name or repeats)


class RemoteCalls:
    """The tool calls of one answer.

    Servers number the calls of an answer, or give all the same number, or none; the calls have ids, or none; and a few
    give each piece of a call an id of its own.
    """

    def __init__(self) -> None:
        self.all: list[RemoteCall] = []
        self._by_index: dict[int, RemoteCall] = {}  # the last call of each number

    def add(self, calls: Any) -> Iterator[None]:
        """Add the calls of a chunk; yield once for each piece."""
        listed = calls if isinstance(calls, list) else []
        for place, piece in enumerate(listed):
            function = piece.get("function") if isinstance(piece, dict) else None
            if not isinstance(function, dict):
                continue
            call_id, name = text_of(piece.get("id")), text_of(function.get("name"))
            call_id = call_id if call_id.isprintable() and len(call_id) <= _LONGEST_ID else ""
            given = function.get("arguments")  # some send an object
            arguments = json.dumps(given) if isinstance(given, dict) else text_of(given)
            index = piece.get("index")
            call = self._numbered(index, call_id, place if len(listed) > 1 and not name else -1)
            if call is None or not call.is_followed_by(call_id, name, arguments):
                call = RemoteCall()
                self.all.append(call)
            if isinstance(index, int):
                self._by_index[index] = call
            call.add(call_id, name, arguments)
            yield

    def _numbered(self, index: Any, call_id: str, place: int) -> RemoteCall | None:
        """Return the last call with a number; without a number, the one with this id or at this place, or the last."""
        if isinstance(index, int):
            return self._by_index.get(index)
        same = [call for call in self.all if call_id and call.id == call_id] or self.all[-1:]
        return self.all[place] if 0 <= place < len(self.all) else same[-1] if same else None


class EndKind(enum.Enum):
    """Meaning of the reason that a server gives for an answer's end."""

    WHOLE = enum.auto()
    LENGTH = enum.auto()  # a limit of tokens, or the context window
    WITHHELD = enum.auto()  # by a filter
    FAILED = enum.auto()
    UNKNOWN = enum.auto()


_ENDS = {
    EndKind.LENGTH: re.compile(r"length|max_?(output_?)?tokens|token_limit|context_window"),
    EndKind.WITHHELD: re.compile(r"filter|safety|sensitive|prohibited|blocked|blocklist|recitation|spii"),
    EndKind.FAILED: re.compile(
        r"error|abort|cancel|fail|malformed|unexpected|insufficient|time_?out|timed_out|interrupt|overload|disconnect"
    ),
    EndKind.WHOLE: re.compile(r"stop|eos|end|tool|function_call|complete|finish|done|refusal|null|none"),
}


def end_kind(reason: str) -> EndKind:
    """Return the meaning of a `finish_reason`, in the words of OpenAI and of others."""
    word = reason.lower()
    return next((kind for kind, pattern in _ENDS.items() if pattern.search(word)), EndKind.UNKNOWN)


def text_of(value: Any) -> str:
    """Return a text; "" for anything else. Halves of surrogate pairs, which can't be encoded, become U+FFFD."""
    if not isinstance(value, str):
        return ""
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if not value.isascii() else value
