"""Colours for code, line by line as it comes.

Owns the choice of lexer and colours; pygments is loaded with the first code block that names a language. pygments
wants the whole text; its own loop is repeated here so that the lexer's state is kept from one line to the next.
What a line looks like depends on the lines before it and never on later ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from llmrun.ui.terminal.ansi import BLUE, CYAN, DIM, GREEN, MAGENTA, YELLOW, Span

if TYPE_CHECKING:
    from pygments.lexer import Lexer

# Patterns of lexers may take quadratic time.
MAX_LINE = 400

_NAME = re.compile(r"[A-Za-z0-9_+#.-]{1,30}")
_STYLES = {
    "Comment": DIM,
    "Comment.Preproc": MAGENTA,
    "Keyword": MAGENTA,
    "Keyword.Constant": CYAN,
    "Keyword.Type": CYAN,
    "Literal.String": GREEN,
    "Literal.String.Escape": CYAN,
    "Literal.String.Interpol": CYAN,
    "Literal.Number": CYAN,
    "Name.Function": BLUE,
    "Name.Class": BLUE,
    "Name.Tag": BLUE,
    "Name.Attribute": YELLOW,
    "Name.Decorator": YELLOW,
    "Name.Builtin": CYAN,
    "Operator.Word": MAGENTA,
    "Generic.Deleted": "31",
    "Generic.Inserted": GREEN,
    "Generic.Heading": "1",
    "Generic.Subheading": BLUE,
    "Generic.Prompt": DIM,
}

# Where it begins in its line, its type, its text.
_Token = tuple[int, str, str]

# Comments of several lines, which many lexers know only as one pattern.
_COMMENTS = (("/*", "*/"), ("<!--", "-->"))


class Highlighter:
    """The code of one block.

    Args:
        language: as the block names it; an unknown one leaves the code as it is.
    """

    def __init__(self, language: str) -> None:
        self._lexer = _lexer(language.lower()) if _NAME.fullmatch(language) else None
        self._stack = ["root"]
        self._comment = ""  # what ends the comment that the line begins in

    def line(self, text: str) -> list[Span]:
        """The next line, without its newline, in colour."""
        if self._lexer is None or len(text) > MAX_LINE:
            return [(text, "")]
        spans: list[Span] = []
        start = self._rest_of_comment(text, spans)
        if start < len(text) or not spans:
            spans += self._lexed(self._lexer, text[start:])
        return spans

    def _rest_of_comment(self, text: str, spans: list[Span]) -> int:
        if not self._comment:
            return 0
        end = text.find(self._comment)
        end = len(text) if end < 0 else end + len(self._comment)
        if text.endswith(self._comment, 0, end):
            self._comment = ""
        spans.append((text[:end], DIM))
        return end

    def _lexed(self, lexer: Lexer, text: str) -> list[Span]:
        pieces = list(_tokens(lexer, text + "\n", self._stack))
        begins = self._comment_begun(text, pieces)
        spans = []
        if "".join(value for _, _, value in pieces).rstrip("\n") != text.rstrip("\n"):
            return [(text, "")]  # a lexer that loses or adds text
        for at, kind, value in pieces:
            kept = value if begins < 0 else value[: max(begins - at, 0)]
            spans.append((kept.replace("\n", ""), _style(kind)))
        if begins >= 0:
            spans.append((text[begins:], DIM))
        return [span for span in spans if span[0]]

    def _comment_begun(self, text: str, pieces: list[_Token]) -> int:
        """Where a comment begins that has no end in this line and that the lexer will not remember; -1 is nowhere."""
        for opening, closing in _COMMENTS:
            at = text.rfind(opening)
            if at < 0 or text.find(closing, at + len(opening)) >= 0:
                continue
            kind = next((kind for begin, kind, value in pieces if begin <= at < begin + len(value)), "")
            to_the_end = kind == "Comment.Multiline" and "comment" not in self._stack[-1]
            if to_the_end or kind.startswith(("Operator", "Punctuation", "Error")):
                self._comment = closing
                return at
        return -1


@lru_cache(maxsize=32)
def _lexer(language: str) -> Lexer | None:
    """The lexer for a language; None for an unknown one."""
    from pygments.lexers import find_lexer_class_by_name
    from pygments.util import ClassNotFound

    try:
        made: Lexer = find_lexer_class_by_name(language)()
    except ClassNotFound:
        return None
    return made


def _tokens(lexer: Any, text: str, stack: list[str]) -> Iterator[_Token]:
    """The tokens of a line.

    Args:
        lexer: one that is not driven by a table of rules alone sees each line as if it were the first.
        text: with its newline.
        stack: the lexer's states, the innermost last; it is left as the line leaves it.
    """
    from pygments.lexer import ExtendedRegexLexer, RegexLexer

    if isinstance(lexer, RegexLexer) and not isinstance(lexer, ExtendedRegexLexer):
        return _by_rules(lexer, text, stack)
    return ((at, ".".join(kind), value) for at, kind, value in lexer.get_tokens_unprocessed(text))


def _by_rules(lexer: Any, text: str, stack: list[str]) -> Iterator[_Token]:
    """What RegexLexer.get_tokens_unprocessed does, but that it keeps the states."""
    at = 0
    while at < len(text):
        for match_here, action, new_state in lexer._tokens[stack[-1]]:
            match = match_here(text, at)
            if match:
                yield from _matched(lexer, match, action)
                at = match.end()
                _enter(stack, new_state)
                break
        else:
            if text[at] == "\n":  # a line's end that no rule takes ends everything that is open
                stack[:] = ["root"]
            yield at, "Error", text[at]
            at += 1


def _matched(lexer: Any, match: re.Match[str], action: Any) -> Iterator[_Token]:
    from pygments.token import _TokenType

    if action is None:
        return
    if type(action) is _TokenType:
        yield match.start(), ".".join(action), match.group()
        return
    for at, kind, value in action(lexer, match):
        yield at, ".".join(kind), value


def _enter(stack: list[str], new_state: Any) -> None:
    """Follow a rule to its state: names, "#pop", "#push", or how many states to leave."""
    if new_state is None:
        return
    if isinstance(new_state, int):
        del stack[max(len(stack) + new_state, 1) if abs(new_state) < len(stack) else 1 :]
    elif new_state == "#push":
        stack.append(stack[-1])
    else:
        for state in new_state:
            if state == "#pop":
                del stack[max(len(stack) - 1, 1) :]
            else:
                stack.append(stack[-1] if state == "#push" else state)


@lru_cache(maxsize=256)
def _style(kind: str) -> str:
    """Of a token type, or of the nearest wider one."""
    while kind:
        if kind in _STYLES:
            return _STYLES[kind]
        kind = kind.rpartition(".")[0]
    return ""
