"""Streamed text of a paragraph: text that can no longer change is released word by word.

Owns the point up to which emphasis, code and links are settled; must not know blocks, rows or the terminal. markdown-it
parses. The settled part is a function of the text, however it was split. A mark holds back the following text until its
counterpart comes, for a bounded number of characters; then it is plain text.
"""

from __future__ import annotations

import re
from typing import Any

from markdown_it.rules_inline import StateInline, link_pairs
from markdown_it.token import Token
from rich.style import Style
from rich.text import Text

from llmrun.ui.answer.formula import formula_end, readable
from llmrun.ui.answer.parser import inline_parser
from llmrun.ui.answer.rows import ATOM
from llmrun.ui.terminal.sanitize import clean

MAX_HELD = 400
# Line breaks after shorter lines stay: verses, addresses, code without a fence. Longer lines flow.
FLOWS_FROM = 60
INDENTED = 2  # blanks

CODE, ADDRESS, LINK = Style(color="cyan"), Style(dim=True), Style(underline=True)
_STYLES = {
    "em_open": Style(italic=True),
    "strong_open": Style(bold=True),
    "s_open": Style(strike=True),
    "link_open": LINK,
}
_SPECIAL = re.compile(r"[\\`*_~\[\]!<&$\n]")
_BREAK_TAG = re.compile(r"<br\s*/?>", re.IGNORECASE)
_ANYTHING = "\0"
_CLOSERS = {
    "[": "])",
    "<": ">",
    "$": "$",
    "\\": ")]",
}  # characters that end a construct; emphasis and code end as they begin


class Inline:
    """A paragraph, or another text of one block.

    Args:
        references: definitions of links, as markdown-it stores them.
        styled: apply styles; otherwise marks stay in the text.
        formulas: make formulas readable; otherwise they stay as they are.
        style: of all of the text.
        indented: the first line begins with significant blanks.
    """

    def __init__(
        self,
        references: dict[str, Any],
        *,
        styled: bool,
        formulas: bool,
        style: Style | None = None,
        indented: bool = False,
    ) -> None:
        self._env = {"references": references}
        self._styled, self._formulas = styled, formulas
        self._style = style or Style()
        self._held = ""
        self._before = ""  # character before the held text; "" if they are separated by a blank
        self._waits_for = ""  # only these characters settle more
        self._length = 0  # of the source line, rendered
        self._indented = indented

    def feed(self, text: str) -> list[Text]:
        """Add source text; return the newly settled texts. A row may break between two of them."""
        self._held += text
        out: list[Text] = []
        if self._waits_for and len(self._held) < MAX_HELD and not any(char in self._waits_for for char in text):
            return out
        while end := self._settled():
            out.append(self._shown(self._held[:end]))
            last = self._held[end - 1]
            self._before = last if last.isalnum() or not last.isascii() else "."
            if self._held[end : end + 1].isspace():
                self._before = ""
            self._held = self._held[end:]
        return out

    def end(self) -> Text:
        """Return the rest of the paragraph."""
        out = self._shown(self._held.rstrip())
        self._held = self._before = self._waits_for = ""
        return out

    # ---- settled text ------------------------------------------------------------------------------

    def _settled(self) -> int:
        """Return the length of the held text that can't change any more and ends where a row may break."""
        self._waits_for = ""
        window = self._held[:MAX_HELD]
        special = _SPECIAL.search(window)
        end = _last_break(window, 0, special.start() if special else len(window))
        if end or (not special and len(window) < MAX_HELD):
            return end
        if not special:
            return MAX_HELD  # an endless word
        plain, unsettled, last_end = self._steps(window)
        end = _last_of(plain, window, unsettled)
        if end or len(window) < MAX_HELD:
            return end
        return _last_of(plain, window, MAX_HELD) or last_end  # a construct that long is plain text

    def _steps(self, window: str) -> tuple[list[tuple[int, int]], int, int]:
        """Return plain text outside of all constructs as (begin, end), the first place that may still change, and the
        last place outside of all constructs.
        """
        state = StateInline(self._before + window, inline_parser(), self._env, [])
        n_before, rules = len(self._before), inline_parser().inline.ruler.getRules("")
        plain: list[tuple[int, int]] = []
        marks: list[int] = []  # position of each delimiter
        ends: list[int] = []  # of all steps
        unsettled, waits_for = len(window), ""
        while state.pos < state.posMax:
            at, n_tokens = state.pos, len(state.tokens)
            if not any(rule(state, False) for rule in rules):
                state.pending += state.src[at]
                state.pos = at + 1
            begin, end, is_text = at - n_before, state.pos - n_before, len(state.tokens) == n_tokens
            ends.append(end)
            marks += [begin] * (len(state.delimiters) - len(marks))
            if state.src[at] == "\n":
                begin = len(window[:begin].rstrip(" "))  # two blanks before it belong to the break
            if is_text or state.src[at] == "\n":
                plain.append((max(begin, 0), end))
            closers = self._closers(state, at, is_text=is_text)
            if closers is not None:
                unsettled, waits_for = min(unsettled, begin), waits_for + (closers or _ANYTHING)
        link_pairs(state)
        for mark, one in zip(marks, state.delimiters, strict=True):
            if one.open and one.end < 0:
                unsettled, waits_for = min(unsettled, mark), waits_for + chr(one.marker)
        pairs = [(mark, marks[one.end]) for mark, one in zip(marks, state.delimiters, strict=True) if one.end >= 0]
        for begin, end in reversed(pairs):
            unsettled = begin if begin < unsettled < end else unsettled
        self._waits_for = "" if _ANYTHING in waits_for else waits_for
        outside = [step for step in plain if not any(begin < step[0] < end for begin, end in pairs)]
        last_end = max(at for at in ends if not any(begin < at <= end for begin, end in pairs) or at == len(window))
        return outside, unsettled, last_end

    def _closers(self, state: StateInline, at: int, *, is_text: bool) -> str | None:
        """Return the characters that may still change the text just read; "" for any, None for none."""
        char, src = state.src[at], state.src
        if char in "`*_~\\!<&$" and state.pos == len(src):
            return ""
        if char in "$\\":
            return _CLOSERS[char] if formula_end(src, at) < 0 else None
        if not is_text:
            return None
        if char == "[":
            return _link_closers(state, at)
        is_tag = char == "<" and (src[at + 1].isalpha() or src[at + 1] in "/!?") and ">" not in src[at:]
        return _CLOSERS.get(char, char) if char == "`" or is_tag else None

    # ---- rendering ---------------------------------------------------------------------------------

    def _shown(self, source: str) -> Text:
        if not source:
            return Text()
        if not _SPECIAL.search(source):
            self._length += len(source)
            return Text(source, style=self._style)
        tokens: list[Token] = []
        inline_parser().inline.parse(self._before + source, inline_parser(), self._env, tokens)
        out, styles = Text(), [self._style]
        addresses: list[tuple[Token, int]] = []  # open links, and the start of their names
        if self._before:
            tokens[0].content = tokens[0].content[len(self._before) :]
        for token in tokens:
            text = self._text_of(token)
            if token.type == "link_open":
                addresses.append((token, len(out)))
            if token.nesting > 0:
                styles.append(styles[-1] + _STYLES[token.type] if self._styled else styles[-1])
            elif token.nesting < 0:
                styles.pop()
            style = styles[-1] + CODE if token.type == "code_inline" and self._styled else styles[-1]
            out.append(text, style)
            self._length += len(text)
            if token.type == "link_close":
                opened, start = addresses.pop()
                self._append_address(out, opened, out.plain[start:], styles[-1])
        return out

    def _text_of(self, token: Token) -> str:
        if token.type in {"softbreak", "hardbreak"}:
            return self._line_break(token)
        if token.type == "html_inline" and _BREAK_TAG.fullmatch(token.content):
            self._length = 0
            return "\n"
        if token.type == "formula":
            return readable(token.content) if self._formulas else token.markup
        if token.type == "image":
            name = clean("".join(child.content for child in token.children or ()))
            return f"{name} ({_address(token, 'src')})" if name else _address(token, "src")
        if token.type == "text_special":
            return clean(token.content)  # an entity may name any character
        if not self._styled and token.type == "code_inline":
            return token.markup + token.content + token.markup
        return token.markup if token.nesting and not self._styled and token.markup != "autolink" else token.content

    def _line_break(self, token: Token) -> str:
        """Return a newline for a hard break, beside an indented line or after a short line; else a space."""
        is_indented = len(token.content) >= INDENTED
        is_break = token.type == "hardbreak" or is_indented or self._indented or self._length < FLOWS_FROM
        self._indented, self._length = is_indented, 0
        return "\n" + (token.content if is_indented else "") if is_break else " "

    def _append_address(self, out: Text, opened: Token, name: str, style: Style) -> None:
        address = _address(opened, "href")
        if address and opened.markup != "autolink" and address != name:
            out.append(" " if name else "", style)
            out.append(f"({address})" if name else address, style + ADDRESS if self._styled else style)


def _address(token: Token, name: str) -> str:
    return clean(inline_parser().normalizeLinkText(str(token.attrs.get(name, ""))))


def _last_break(text: str, begin: int, end: int) -> int:
    """Return the last place in a part of the text where an atom begins; 0 for none."""
    starts = [match.start() for match in ATOM.finditer(text, begin, end)]
    usable = [at for at in starts if at > 0 and (at > begin or text[at].isspace())]
    return usable[-1] if usable else 0


def _last_of(plain: list[tuple[int, int]], window: str, limit: int) -> int:
    """Return the last place in plain text before a limit where an atom begins; 0 for none."""
    ends = (_last_break(window, begin, min(end, limit)) for begin, end in reversed(plain) if begin < limit)
    return next(filter(None, ends), 0)


def _link_closers(state: StateInline, at: int) -> str | None:
    """Return the characters that may make a link of a bracket that is none so far."""
    label = state.md.helpers.parseLinkLabel(state, at, True) if "]" in state.src[at:] else -1
    if label < 0:
        return _CLOSERS["["]
    following = state.src[label + 1 : label + 2]
    if following not in {"(", "["}:
        return None if following else ""
    closer = {"(": ")", "[": "]"}[following]
    return None if closer in state.src[label + 2 :] else closer
