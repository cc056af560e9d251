"""Streamed text of a paragraph: text that can no longer change is released word by word.

markdown-it parses. The settled part is a function of the text, however it was split. A mark holds back the following
text until its counterpart comes, for a bounded number of characters; then it is plain text.
"""

from __future__ import annotations

import re
from functools import lru_cache

from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock, table
from markdown_it.rules_inline import StateInline, link_pairs, newline
from markdown_it.token import Token
from rich.style import Style
from rich.text import Text

from llmrun.ui.answer.rows import ATOM
from llmrun.ui.terminal.sanitize import clean

CLOSING = {r"\(": r"\)", r"\[": r"\]", "$$": "$$", "$": "$"}

_NOT_OPENED = re.compile(r"\s|\d[\d.,]*(?![\w.,^\\{*/+=$-])")  # after a dollar: a blank, an amount of money
_WORD = re.compile(r"[A-Za-z0-9]")  # before a formula, and after it
_MARKS = re.compile(r"(?<!\\)\\[\[\]()]|\$\$")
_HAS_CONTENT = re.compile(r"\w")
_GROUP = r"\{((?:[^{}]|\{[^{}]*\})*)\}"
_FRACTION = re.compile(rf"\\[dt]?frac\s*{_GROUP}\s*{_GROUP}")
_ROOT = re.compile(rf"\\sqrt\s*{_GROUP}")
_WORDS = re.compile(
    rf"\\(?:text|textbf|mathrm|mathbf|mathit|mathbb|mathcal|operatorname|boxed|bar|hat|vec)\*?\s*{_GROUP}"
)
_ENVIRONMENT = re.compile(
    r"\\(?:begin|end)\s*\{[^{}]*\}(?:\{[^{}]*\})?|\\(?:left|right|displaystyle|limits)(?![a-zA-Z])"
)
_SCRIPT = re.compile(rf"([\^_])(?:{_GROUP}|(\w|\\[a-zA-Z]+))")
_COMMAND = re.compile(r"\\([a-zA-Z]+) ?|\\(.)")

_SYMBOLS: dict[str, str] = dict(
    re.findall(
        r"(\w+)=(\S+)",
        "alpha=α beta=β gamma=γ delta=δ epsilon=ε varepsilon=ε zeta=ζ eta=η theta=θ iota=ι kappa=κ lambda=λ mu=μ nu=ν "
        "xi=ξ pi=π rho=ρ sigma=σ tau=τ phi=φ varphi=φ chi=χ psi=ψ omega=ω Gamma=Γ Delta=Δ Theta=Θ Lambda=Λ Pi=Π "
        "Sigma=Σ Phi=Φ Psi=Ψ Omega=Ω times=× cdot=· div=÷ pm=± mp=∓ le=≤ leq=≤ ge=≥ geq=≥ ne=≠ neq=≠ approx=≈ equiv=≡ "
        "sim=∼ "
        "propto=∝ infty=∞ sum=∑ prod=∏ int=∫ partial=∂ nabla=∇ to=→ rightarrow=→ leftarrow=← Rightarrow=⇒ implies=⇒ "
        "iff=⇔ leftrightarrow=↔ in=∈ notin=∉ subset=⊂ subseteq=⊆ cup=∪ cap=∩ emptyset=∅ forall=∀ exists=∃ neg=¬ land=∧ "
        "wedge=∧ lor=∨ vee=∨ therefore=∴ angle=∠ circ=° degree=° ldots=… dots=… cdots=⋯ perp=⊥ parallel=∥ ast=* "
        "lfloor=⌊ rfloor=⌋ lceil=⌈ rceil=⌉ langle=⟨ rangle=⟩ mid=| sin=sin cos=cos tan=tan log=log ln=ln exp=exp "
        "lim=lim min=min max=max",
    )
)
_SPACES = {"quad": "  ", "qquad": "    ", "\\": "\n", ",": " ", ";": " ", ":": " ", " ": " ", "!": ""}
_RAISED = str.maketrans("0123456789+-=()nixyabcdekmt", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱˣʸᵃᵇᶜᵈᵉᵏᵐᵗ")
_LOWERED = str.maketrans("0123456789+-=()aeijklmnprstuvx", "₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₐₑᵢⱼₖₗₘₙₚᵣₛₜᵤᵥₓ")


def readable(source: str) -> str:
    """Return a formula, or a line of one, as text."""
    text = _ENVIRONMENT.sub("", _MARKS.sub("", source)).replace("&", "")
    for _ in range(3):  # fractions in fractions
        text = _FRACTION.sub(lambda match: f"{_grouped(match[1])}/{_grouped(match[2])}", text)
        text = _ROOT.sub(lambda match: f"√{_grouped(match[1])}", text)
        text = _WORDS.sub(r"\1", text)
    text = _SCRIPT.sub(_script, text)
    text = _COMMAND.sub(_command, text)
    return re.sub(r" {2,}", " ", text.replace("{", "").replace("}", "")).strip()


def formula_begins(line: str) -> int:
    """Return the length of the mark that opens a formula in lines of its own, 0 if the line opens none."""
    start = 2 if line[:2] in {r"\[", "$$"} else 0
    if not start or line == line[:2]:
        return start
    end = line.find(CLOSING[line[:2]], 2)
    return start if end == len(line) - 2 and _HAS_CONTENT.search(line[2:end]) else 0


def formula_end(text: str, at: int) -> int:
    """Return the end of the formula that opens at a position; 0 if there is none, -1 if it is incomplete."""
    opening = next((mark for mark in (r"\(", r"\[", "$$", "$") if text.startswith(mark, at)), "")
    start = at + len(opening)
    if not opening or (opening == "$" and (_NOT_OPENED.match(text, start) or _WORD.match(text[max(at - 1, 0) : at]))):
        return 0
    end = text.find(CLOSING[opening], start)
    if end < 0:
        return -1
    opens_next = ("{", "(") if text[start] == "(" else ("{",)  # variables of a shell: ${A}/${B}, $(a)/$(b)
    is_closed = not (text[end - 1].isspace() or _WORD.match(text, end + 1) or text.startswith(opens_next, end + 1))
    single = opening == "$" and (not is_closed or "\n" in text[start:end])
    is_one = _HAS_CONTENT.search(text, start, end) and not single
    return end + len(CLOSING[opening]) if is_one else 0


def _grouped(text: str) -> str:
    """Return the text, in brackets if it would be misread without."""
    text = text.strip()
    return text if re.fullmatch(r"\w*|\\[a-zA-Z]+|\w\^\{?\w\}?", text) else f"({text})"


def _script(match: re.Match[str]) -> str:
    text = (match[2] if match[2] is not None else match[3]).strip()
    small = text.translate(_RAISED if match[1] == "^" else _LOWERED)
    if not any(one == other for one, other in zip(text, small, strict=True)):
        return small
    return "°" if text == r"\circ" else match[1] + (text if len(text) == 1 or match[3] else f"({text})")


def _command(match: re.Match[str]) -> str:
    name = match[1] or match[2]
    if name in _SPACES:
        return _SPACES[name]
    if name in _SYMBOLS:
        return _SYMBOLS[name] + (" " if match[0].endswith(" ") else "")
    return match[0] if match[1] else name


FORMULA = "formula"
_MAX_NESTING = 100


@lru_cache(maxsize=1)
def block_parser() -> MarkdownIt:
    md = MarkdownIt("commonmark", {"maxNesting": _MAX_NESTING}).enable("table").disable("reference")
    md.block.ruler.before("table", "begins", _note_begin)
    md.block.ruler.at("table", _barred_table, {"alt": ["paragraph"]})
    md.block.ruler.before("fence", FORMULA, _formula_block, {"alt": ["paragraph", "blockquote", "list"]})
    return md


@lru_cache(maxsize=1)
def inline_parser() -> MarkdownIt:
    """Return the parser of the text inside blocks."""
    md = MarkdownIt("commonmark").enable("strikethrough")
    md.inline.ruler.at("newline", _line_break)
    md.inline.ruler.before("escape", FORMULA, _formula)
    return md


def _note_begin(state: StateBlock, line: int, end: int, silent: bool) -> bool:
    """Record where each line's text begins after its markers; the innermost container comes last."""
    at = state.bMarks[line] + state.tShift[line]
    state.env["begins"][line] = at - state.src.rfind("\n", 0, at) - 1
    return False


def _barred_table(state: StateBlock, line: int, end: int, silent: bool) -> bool:
    """Parse a table whose first line begins with a bar: words of any other line are shown as they come."""
    at = state.bMarks[line] + state.tShift[line]
    return state.src.startswith("|", at) and table(state, line, end, silent)


def _formula_block(state: StateBlock, line: int, end: int, silent: bool) -> bool:
    r"""Parse a formula in lines of its own, between \[ and \] or $$ and $$; an empty line ends it too."""
    text = state.src[state.bMarks[line] + state.tShift[line] : state.eMarks[line]].strip()
    start = formula_begins(text)
    if not start or state.is_code_block(line):
        return False
    if not silent:
        closing, after = CLOSING[text[:start]], line + 1
        if closing not in text[start:]:
            while after < end and not state.isEmpty(after) and state.sCount[after] >= state.blkIndent:
                after += 1
                if closing in state.src[state.bMarks[after - 1] : state.eMarks[after - 1]]:
                    break
        token = state.push(FORMULA, "", 0)
        token.content = state.getLines(line, after, state.blkIndent, False)
        token.map, state.line = [line, after], after
    return True


def _line_break(state: StateInline, silent: bool) -> bool:
    """Parse a line break, and keep the blanks after it: they are the indentation of code without fences."""
    at = state.pos
    if not newline(state, silent):
        return False
    if not silent:
        state.tokens[-1].content = state.src[at + 1 : state.pos]
    return True


def _formula(state: StateInline, silent: bool) -> bool:
    """Parse a formula inside a line."""
    end = formula_end(state.src[: state.posMax], state.pos) if state.src[state.pos] in "\\$" else 0
    if end <= 0:
        return False
    if not silent:
        token = state.push("formula", "", 0)
        token.markup = state.src[state.pos : end]
        n_marks = 1 if end - state.pos > 1 and token.markup[:2] not in CLOSING else 2
        token.content = token.markup[n_marks:-n_marks]
    state.pos = end
    return True


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
        styled: apply styles; otherwise marks stay in the text.
        formulas: make formulas readable; otherwise they stay as they are.
        style: of all of the text.
        indented: the first line begins with significant blanks.
    """

    def __init__(
        self,
        *,
        styled: bool,
        formulas: bool,
        style: Style | None = None,
        indented: bool = False,
    ) -> None:
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
        state = StateInline(self._before + window, inline_parser(), {}, [])
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
        inline_parser().inline.parse(self._before + source, inline_parser(), {}, tokens)
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
    if following != "(":
        return None if following else ""
    return None if ")" in state.src[label + 2 :] else ")"
