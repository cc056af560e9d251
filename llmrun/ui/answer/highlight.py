"""Syntax highlighting of code, line by line.

Owns the colours; pygments lexes and Rich's theme maps its tokens to styles. The lexer's state is kept from line to
line, so the colours of a line depend only on the lines before it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from pygments.lexer import ExtendedRegexLexer, LexerContext, RegexLexer
from pygments.lexers import find_lexer_class_by_name
from pygments.token import Comment, Error, Generic, Keyword, Literal, Name, Operator, Punctuation
from pygments.util import ClassNotFound
from rich.style import Style
from rich.syntax import ANSISyntaxTheme
from rich.text import Text

from llmrun.ui.answer.blocks import MAX_LINE

_NAME = re.compile(r"[A-Za-z0-9_+#.-]{1,30}")
_GREEN, _CYAN, _BLUE, _MAGENTA = (Style(color=name) for name in ("green", "cyan", "blue", "magenta"))
_COMMENT = Style(dim=True)
_THEME = ANSISyntaxTheme(
    {
        Comment: _COMMENT,
        Comment.Preproc: _MAGENTA,
        Keyword: _MAGENTA,
        Keyword.Constant: _CYAN,
        Keyword.Type: _CYAN,
        Literal.String: _GREEN,
        Literal.String.Escape: _CYAN,
        Literal.String.Interpol: _CYAN,
        Literal.Number: _CYAN,
        Name.Function: _BLUE,
        Name.Class: _BLUE,
        Name.Tag: _BLUE,
        Name.Attribute: Style(color="yellow"),
        Name.Decorator: Style(color="yellow"),
        Name.Builtin: _CYAN,
        Operator.Word: _MAGENTA,
        Generic.Deleted: Style(color="red"),
        Generic.Inserted: _GREEN,
        Generic.Heading: Style(bold=True),
        Generic.Subheading: _BLUE,
        Generic.Prompt: Style(dim=True),
    }
)


class Highlighter:
    """The highlighting of one code block.

    Args:
        language: as the block names it; code in an unknown one stays plain.
    """

    def __init__(self, language: str) -> None:
        self._lexer = _lexer(language.lower()) if _NAME.fullmatch(language) else None
        self._states = ["root"]
        self._in_comment = False  # of several lines, which many lexers know only as a whole

    def line(self, code: str) -> Text:
        """Return the next line, without its newline, in colour."""
        if self._lexer is None or len(code) > MAX_LINE:  # patterns of lexers may take quadratic time
            return Text(code)
        start = 0
        if self._in_comment:
            end = code.find("*/")
            start, self._in_comment = (end + 2, False) if end >= 0 else (len(code), True)
        text = Text.assemble((code[:start], _COMMENT))
        for kind, value in self._tokens(self._lexer, code[start:] + "\n"):
            at = len(text)
            text.append(value.replace("\n", ""), _THEME.get_style_for_token(kind))
            opened = code.rfind("/*", at, len(text) + 1)
            if opened >= 0 and "*/" not in code[opened:] and self._forgets(kind):
                self._in_comment = True
                return Text.assemble(text[:opened], (code[opened:], _COMMENT))
        return text if text.plain == code else Text(code)  # some lexers lose or add text

    def _forgets(self, kind: Any) -> bool:
        """Return whether this token opens a comment that the lexer will have forgotten in the next line."""
        if kind in Comment.Multiline:
            return "comment" not in self._states[-1]
        return any(kind in one for one in (Operator, Punctuation, Error))

    def _tokens(self, lexer: Any, line: str) -> Iterable[tuple[Any, str]]:
        if not isinstance(lexer, RegexLexer) or isinstance(lexer, ExtendedRegexLexer):
            return ((kind, value) for _, kind, value in lexer.get_tokens_unprocessed(line))
        context = LexerContext(line, 0, self._states)  # the lexer leaves its states there
        try:
            return [token[1:] for token in ExtendedRegexLexer.get_tokens_unprocessed(lexer, context=context)]
        except TypeError:  # a rule of this lexer has no context
            self._lexer = None
            return []


@lru_cache(maxsize=32)
def _lexer(language: str) -> Any:
    try:
        return find_lexer_class_by_name(language)()
    except ClassNotFound:
        return None
