"""The answers of models, and the messages that they mean, in llama.cpp's tests/test-chat.cpp, as data.

Reads the small part of C++ in which these are written: strings, lists, calls of builders, variables and loops.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

_TOKEN = re.compile(
    r"""(?P<skip>\s+|//[^\n]*|/\*.*?\*/|\#[^\n]*)
    |(?P<raw>R"(?P<delimiter>[^\s()]*)\((?P<body>.*?)\)(?P=delimiter)")
    |(?P<string>"(?:[^"\\]|\\.)*")
    |(?P<char>'(?:[^'\\]|\\.)+')
    |(?P<name>[A-Za-z_]\w*(?:\s*::\s*[A-Za-z_]\w*)*)
    |(?P<number>\d[\w.]*)
    |(?P<mark>.)""",
    re.DOTALL | re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]+|u[0-9a-fA-F]{4}|[0-7]{1,3}|.)", re.DOTALL)
_PLAIN = {"n": "\n", "t": "\t", "r": "\r"}


class _Token(NamedTuple):
    kind: str
    text: str


class _Name(str):
    """A constant whose value does not matter."""

    __slots__ = ()


class _Tester(NamedTuple):
    template: str


@dataclass
class ChatCase:
    """An answer as a model writes it, and its meaning.

    Attributes:
        template: name of the file.
        options: further settings by the names of test-chat.cpp's builder.
        content, reasoning, calls: the meaning; calls are (name, arguments).
    """

    template: str
    text: str
    options: dict[str, Any] = field(default_factory=dict)
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)


@dataclass
class ChatMessage:
    """A message of test-chat.cpp."""

    role: str = "assistant"
    content: str = ""
    reasoning_content: str = ""
    tool_calls: list[tuple[str, str]] = field(default_factory=list)


def _message(content: str, reasoning: str = "", name: str = "", arguments: str = "", call_id: str = "") -> ChatMessage:
    calls = [(name, arguments)] if name or call_id else []
    return ChatMessage("assistant", content, reasoning, calls)


_FUNCTIONS: dict[str, Any] = {
    "simple_assist_msg": _message,
    "message_with_tool_calls": lambda name, arguments: _message("", "", name, arguments),
    "message_with_tool_calls_and_reasoning": lambda name, arguments, said: _message("", said, name, arguments),
    "message_with_content_and_tool_call": lambda content, name, arguments: _message(content, "", name, arguments),
    "message_with_reasoning_and_tool_call": lambda said, name, arguments: _message("", said, name, arguments),
    "message_with_reasoning_content_and_multiple_tool_calls": lambda said, content, calls: ChatMessage(
        "assistant", content, said, [(call[0], call[1]) for call in calls]
    ),
    "peg_tester": lambda path, *debug: _Tester(Path(path).stem),
    "std::string": lambda text="": text,
}


def read_cases(source: str) -> list[ChatCase]:
    """Return all cases of test-chat.cpp."""
    reader = _Reader(_tokens(source))
    reader.run(0, len(reader.tokens))
    return reader.cases


def _tokens(source: str) -> list[_Token]:
    tokens = []
    for match in _TOKEN.finditer(source):
        kind = match.lastgroup if match["raw"] is None else "raw"
        if kind == "raw":
            tokens.append(_Token("string", match["body"]))
        elif match["string"] is not None:
            tokens.append(_Token("string", _ESCAPE.sub(_unescaped, match["string"][1:-1])))
        elif match["skip"] is None:
            assert kind is not None
            tokens.append(_Token(kind, match[0].replace(" ", "")))
    return tokens


def _unescaped(match: re.Match[str]) -> str:
    code = match[1]
    if code[0] in "xu":
        return chr(int(code[1:], 16))
    if code[0].isdecimal():
        return chr(int(code, 8))
    return _PLAIN.get(code, code)


class _SyntaxError(Exception):
    pass


class _Reader:
    def __init__(self, tokens: list[_Token]) -> None:
        self.tokens = tokens
        self.cases: list[ChatCase] = []
        self._variables: dict[str, Any] = {}
        self._functions: dict[str, tuple[str, int, int]] = {}  # name -> parameter, body
        self._at = 0

    def run(self, start: int, stop: int) -> None:
        """Carry out the statements between two tokens that are understood."""
        self._at = start
        while self._at < stop:
            before = self._at
            try:
                self._statement()
            except (_SyntaxError, IndexError):
                self._at = before + 1

    def _text(self, offset: int = 0) -> str:
        at = self._at + offset
        if at >= len(self.tokens):
            return ""
        token = self.tokens[at]
        return '"' if token.kind == "string" else token.text

    def _take(self, *texts: str) -> None:
        for text in texts:
            if self._text() != text:
                raise _SyntaxError
            self._at += 1

    def _statement(self) -> None:
        name = self._text()
        if name == "for":
            self._loop()
        elif name == "common_chat_tool" and self._text(2) == "{":
            tool, self._at = self._text(1), self._at + 2
            self._variables[tool] = self._expression()
        elif name == "test_lfm2_parser" and self._text(-1) == "void":
            self._at += 1
            self._take("(", "const", "std::string", "&")
            parameter = self._text()
            while self._text() != "{":
                self._at += 1
            self._functions[name] = (parameter, *self._body())
        elif name in self._functions:
            self._at += 2
            argument, after = self._expression(), self._at
            parameter, start, stop = self._functions[name]
            self._variables[parameter] = argument
            self.run(start, stop)
            self._at = after
        elif self._text(1) == "=" and self.tokens[self._at].kind == "name":
            self._at += 2
            self._variables[name] = self._expression()
        elif self._text(1) == "." and self._text(3) == "=" and isinstance(self._variables.get(name), ChatMessage):
            attribute = self._text(2)
            self._at += 4
            setattr(self._variables[name], attribute, self._expression())
        elif name == "common_chat_msg" and self._text(2) == ";":
            self._variables[self._text(1)] = ChatMessage()
            self._at += 3
        elif self._text(1) == "." and isinstance(self._variables.get(name), _Tester):
            case = self._expression()
            if isinstance(case, ChatCase):
                self.cases.append(case)
        else:
            self._at += 1

    def _loop(self) -> None:
        self._take("for", "(", "const")
        while self._text() != ":":
            if self._text() in ("=", ";"):
                raise _SyntaxError
            self._at += 1
        name = self._text(-1)
        self._take(":")
        items = self._expression()
        self._take(")")
        start, stop = self._body()
        for item in items:
            self._variables[name] = item
            self.run(start, stop)
        self._at = stop

    def _body(self) -> tuple[int, int]:
        """Return the first and last token of the block that begins here, and go on behind it."""
        self._take("{")
        start, depth = self._at, 1
        while depth:
            depth += (self._text() == "{") - (self._text() == "}")
            self._at += 1
        return start, self._at - 1

    def _expression(self) -> Any:
        value = self._term()
        while self._text() in ("+", '"'):
            if self._text() == "+":
                self._at += 1
            value += self._term()
        return value

    def _term(self) -> Any:
        token = self.tokens[self._at]
        if token.kind == "string":
            self._at += 1
            return token.text
        if token.text == "{":
            return self._list("{", "}")
        if token.kind not in ("name", "number"):
            raise _SyntaxError
        self._at += 1
        value: Any = self._variables.get(token.text, _Name(token.text))
        if token.text in ("true", "false"):
            value = token.text == "true"
        if self._text() == "(" and token.text in _FUNCTIONS:
            value = _FUNCTIONS[token.text](*self._list("(", ")"))
        while self._text() == ".":
            name, self._at = self._text(1), self._at + 2
            value = self._called(value, name, self._list("(", ")"))
        if isinstance(value, _Name) and self._text() in ("(", "<"):
            raise _SyntaxError
        return value

    def _list(self, begin: str, end: str) -> list[Any]:
        self._take(begin)
        items = []
        while self._text() != end:
            items.append(self._expression())
            if self._text() == ",":
                self._at += 1
        self._take(end)
        return items

    @staticmethod
    def _called(value: Any, name: str, arguments: list[Any]) -> Any:
        if isinstance(value, _Tester) and name == "test":
            return ChatCase(value.template, arguments[0])
        if not isinstance(value, ChatCase):
            raise _SyntaxError
        if name == "expect":
            said = arguments[0]
            value.content, value.reasoning, value.calls = said.content, said.reasoning_content, said.tool_calls
        elif name == "expect_content":
            value.content = arguments[0]
        elif name == "expect_reasoning":
            value.reasoning = arguments[0]
        elif name == "expect_tool_calls":
            value.calls = [(call[0], call[1]) for call in arguments[0]]
        elif name != "run":
            value.options[name] = arguments[0] if arguments else True
        return value
