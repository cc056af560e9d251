"""Markdown inside a line: emphasis, code, links. Text goes in as it comes, styled text comes out.

Owns which marks are markup; must not know blocks, rows or the terminal. A mark holds its line back until its other
half comes, for a bounded number of characters: without it, the mark is text. Stricter than CommonMark where that
would hurt more than help: `2*3*4` and `}_{i}` are no emphasis, and emphasis ends with its line. LaTeX stays as it is.
"""

from __future__ import annotations

import re

from llmrun.ui.terminal.ansi import BOLD, CYAN, DIM, ITALIC, STRIKE, UNDERLINE, Span, joined

MAX_EMPHASIS = 240
MAX_CODE = 400
MAX_LABEL, MAX_ADDRESS = 240, 600
_MAX_DEPTH = 6

_SPECIAL = re.compile(r"[\\`*_~\[!<$]")
_ESCAPABLE = "*_`#~<>|+-.![]"
_MATH = {"(": "\\)", "[": "\\]"}
_AUTOLINK = re.compile(r"<((?:https?://|mailto:)[^\s<>]+)>")
_AUTOLINK_BEGINS = re.compile(r"<(?:https?://|mailto:)[^\s<>]*\Z")
_SCHEMES = ("<http://", "<https://", "<mailto:")
_OPENS_AFTER = " \t([{\"'-/:;,.!?|>*_~"
_STYLES = {"*": ITALIC, "**": BOLD, "***": f"{BOLD};{ITALIC}", "_": ITALIC, "__": BOLD, "___": f"{BOLD};{ITALIC}"}

# What a mark turned out to be: where it ends, and its text. None: the text so far does not tell.
_Found = tuple[int, list[Span]] | None


class Inline:
    """The inline parser of a text that comes in pieces, line by line."""

    def __init__(self) -> None:
        self._held = ""
        self._before = ""  # character before what is held
        self._math = ""  # what ends the formula that the text is in

    @property
    def in_formula(self) -> bool:
        """Whether a formula of several lines is open: no line in it begins a block."""
        return bool(self._math)

    def leave_formula(self) -> None:
        """A formula can't hold an empty line."""
        self._math = ""

    def feed(self, text: str, style: str = "") -> list[Span]:
        """What can be shown of the line so far, beyond what was given before."""
        return self._scan(text, style, final=False)

    def end(self, style: str = "") -> list[Span]:
        """The rest of the line."""
        spans = self._scan("", style, final=True)
        self._before = ""
        if self._math == _MATH["("]:  # only displayed formulas have several lines
            self._math = ""
        return spans

    def _scan(self, text: str, style: str, *, final: bool) -> list[Span]:
        text, at, spans = self._held + text, 0, []
        while at < len(text):
            if self._math:
                end, closed = _formula(text, at, self._math, final=final)
                spans.append((text[at:end], style))
                at, self._math = end, "" if closed else self._math
                if not closed:
                    break
                continue
            match = _SPECIAL.search(text, at)
            special = match.start() if match else len(text)
            spans.append((text[at:special], style))
            at = special
            if not match:
                break
            found = _mark(text, at, text[at - 1] if at else self._before, style, 0, final=final)
            if found is None:
                break
            self._math = _formula_begun(text[at : found[0]])
            at = found[0]
            spans += found[1]
        self._held, self._before = text[at:], text[at - 1] if at else self._before
        return [span for span in spans if span[0]]


def inline(text: str, style: str = "", depth: int = 0) -> list[Span]:
    """A whole line, or what stands inside a mark."""
    if depth >= _MAX_DEPTH:
        return [(text, style)]
    at, spans = 0, []
    while at < len(text):
        match = _SPECIAL.search(text, at)
        special = match.start() if match else len(text)
        spans.append((text[at:special], style))
        at = special
        if match:
            found = _mark(text, at, text[at - 1 : at], style, depth, final=True)
            assert found, "a whole text always tells"
            end = found[0]
            if math := _formula_begun(text[at:end]):
                end, _ = _formula(text, end, math, final=True)
                spans.append((text[at:end], style))
            else:
                spans += found[1]
            at = end
    return [span for span in spans if span[0]]


def _mark(text: str, at: int, before: str, style: str, depth: int, *, final: bool) -> _Found:
    """What the special character at a place begins."""
    char = text[at]
    if char in "*_~":
        return _emphasis(text, at, before, style, depth, final=final)
    if char == "`":
        return _code(text, at, style, final=final)
    if char == "[":
        return _link(text, at, at, style, depth, final=final)
    if char == "<":
        return _autolink(text, at, style, final=final)
    following = text[at + 1 : at + 2]
    if not following and not final:
        return None
    if char == "!":
        return _link(text, at, at + 1, style, depth, final=final) if following == "[" else (at + 1, [(char, style)])
    if char == "$":
        return at + 1 + (following == "$"), [(char * (1 + (following == "$")), style)]
    if (following and following in _MATH) or following == "\\":
        return at + 2, [(char + following, style)]
    if following and following in _ESCAPABLE:
        return at + 2, [(following, style)]
    return at + 1, [(char, style)]


def _formula_begun(mark: str) -> str:
    """What ends the formula that a mark begins; "" when it begins none."""
    if mark == "$$":
        return "$$"
    return _MATH.get(mark[1], "") if len(mark) == 2 and mark[0] == "\\" else ""


def _formula(text: str, at: int, closing: str, *, final: bool) -> tuple[int, bool]:
    """How far the formula is known to go, and whether it is closed there."""
    end = text.find(closing, at)
    if end >= 0:
        return end + len(closing), True
    held = not final and len(text) > at and text[-1] == closing[0]  # the other half of it may come
    return len(text) - held, False


def _run(text: str, at: int) -> int:
    """Where the run of equal characters ends that begins at a place; a very long one counts as several."""
    char, end = text[at], at + 1
    while end < min(len(text), at + MAX_CODE) and text[end] == char:
        end += 1
    return end


def _literal(text: str, at: int, end: int, style: str) -> _Found:
    return end, [(text[at:end], style)]


def _code(text: str, at: int, style: str, *, final: bool) -> _Found:
    opened = _run(text, at)
    if opened == len(text) and not final:
        return None
    close = _closing_run(text, opened, opened - at, opened + MAX_CODE, final=final)
    if close is None:
        return None
    if close < 0:
        return _literal(text, at, opened, style)
    code = text[opened:close]
    if code.startswith(" ") and code.endswith(" ") and code.strip():
        code = code[1:-1]
    return close + opened - at, [(code, joined(style, CYAN))]


def _closing_run(text: str, start: int, length: int, limit: int, *, final: bool) -> int | None:
    """Where a run of so many backticks begins; -1 is nowhere before the limit, None not known yet."""
    at = text.find("`", start)
    while 0 <= at < limit:
        end = _run(text, at)
        if end == len(text) and not final:
            return None
        if end - at == length:
            return at
        at = text.find("`", end)
    return -1 if final or len(text) > limit else None


def _emphasis(text: str, at: int, before: str, style: str, depth: int, *, final: bool) -> _Found:
    opened = _run(text, at)
    if opened == len(text) and not final:
        return None
    char, length = text[at], opened - at
    mark = text[at:opened]
    kind = STRIKE if mark == "~~" else _STYLES.get(mark, "")
    if not kind or opened == len(text) or text[opened].isspace() or not _may_open(mark, before):
        return _literal(text, at, opened, style)
    close = _emphasis_end(text, opened, char, length, final=final)
    if close is None:
        return None
    inner = text[opened:close]
    if close < 0 or (mark == "__" and inner.isidentifier()):  # __init__ is a name
        return _literal(text, at, opened, style)
    return close + length, inline(inner, joined(style, kind), depth + 1)


def _may_open(mark: str, before: str) -> bool:
    """Between letters only ** opens: 2*3 and snake_case are text, but scripts without spaces need bold words."""
    return not before or before in _OPENS_AFTER or mark == "**" or (mark[0] != "_" and not before.isascii())


def _emphasis_end(text: str, start: int, char: str, length: int, *, final: bool) -> int | None:
    """Where the closing mark begins; -1 is nowhere before the limit, None not known yet."""
    limit = start + MAX_EMPHASIS
    settled = final or len(text) > limit
    at = start
    while at < min(len(text), limit):
        here = text[at]
        if here == "\\":
            at += 2
        elif here == "`":
            end = _run(text, at)
            if end == len(text) and not final:
                return None
            close = _closing_run(text, end, end - at, limit, final=settled)
            if close is None:
                return None
            at = end if close < 0 else close + end - at
        elif here == char:
            end = _run(text, at)
            if end == len(text) and not final:
                return None
            if _closes(text, at, end, length):
                return end - length
            at = end
        else:
            at += 1
    return -1 if settled else None


def _closes(text: str, at: int, end: int, length: int) -> bool:
    """Whether a run of marks ends an emphasis; a run of three may end one inside as well."""
    run = end - at
    if text[at - 1].isspace() or (run != length and (run != 3 or text[at] == "~")):
        return False
    following = text[end : end + 1]
    if length == 1 or text[at] == "_":
        return not (following.isascii() and following.isalnum()) and not (text[at] == "_" and following.isalnum())
    return True


def _link(text: str, at: int, bracket: int, style: str, depth: int, *, final: bool) -> _Found:
    """A link or an image: its text, and its address dimmed. It is no link without an address right after it."""
    literal = _literal(text, at, bracket + 1, style)
    label = _balanced(text, bracket, "[", "]", MAX_LABEL, final=final)
    if label is None:
        return None
    if label < 0:
        return literal
    if label == len(text) and not final:
        return None
    if text[label : label + 1] != "(":
        return literal
    end = _balanced(text, label, "(", ")", MAX_ADDRESS, final=final)
    if end is None:
        return None
    words = text[label + 1 : end - 1].split() if end > 0 else []
    if not words or (len(words) > 1 and words[1][0] not in "\"'("):
        return literal
    address, name = words[0].strip("<>"), text[bracket + 1 : label - 1]
    if not name or name == address:
        return end, [(address, joined(style, UNDERLINE))]
    shown = inline(name, joined(style, UNDERLINE), depth + 1)
    return end, [*shown, (" ", style), (f"({address})", joined(style, DIM))]


def _balanced(text: str, at: int, opening: str, closing: str, limit: int, *, final: bool) -> int | None:
    """Where the bracket that is opened at a place is closed, beyond it; -1 is nowhere, None not known yet."""
    depth, limit = 0, at + limit
    skip = False
    for index in range(at, min(len(text), limit)):
        char = text[index]
        if skip:
            skip = False
        elif char == "\\":
            skip = True
        elif char == opening:
            depth += 1
        elif char == closing:
            depth -= 1
            if not depth:
                return index + 1
    return -1 if final or len(text) >= limit else None


def _autolink(text: str, at: int, style: str, *, final: bool) -> _Found:
    match = _AUTOLINK.match(text, at)
    if match and match.end() - at <= MAX_ADDRESS:
        return match.end(), [(match[1], joined(style, UNDERLINE))]
    may_begin = any(scheme.startswith(text[at : at + len(scheme)]) for scheme in _SCHEMES)
    if not final and len(text) - at < MAX_ADDRESS and (may_begin or _AUTOLINK_BEGINS.match(text, at)):
        return None
    return at + 1, [("<", style)]
