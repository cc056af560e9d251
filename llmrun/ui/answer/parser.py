"""The Markdown dialect of answers: CommonMark, tables that begin with a bar, strikethrough, formulas.

Owns markdown-it and our rules for it; must not know streams or rendering.
"""

from __future__ import annotations

from functools import lru_cache

from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock, table
from markdown_it.rules_inline import StateInline, newline

from llmrun.ui.answer.formula import CLOSING, formula_begins, formula_end

FORMULA = "formula"
_MAX_NESTING = 100


@lru_cache(maxsize=1)
def block_parser() -> MarkdownIt:
    md = MarkdownIt("commonmark", {"maxNesting": _MAX_NESTING}).enable("table")
    md.block.ruler.before("table", "begins", _note_begin)
    md.block.ruler.at("table", _barred_table, {"alt": ["paragraph", "reference"]})
    md.block.ruler.before("fence", FORMULA, _formula_block, {"alt": ["paragraph", "reference", "blockquote", "list"]})
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
