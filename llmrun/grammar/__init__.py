"""Grammars and JSON schemas that constrain answers, with the checks that need no model.

Mistakes are named by line and column before a model is loaded. Parsers are imported when they are first used.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from llmrun.errors import TEXT, require

_GBNF_RULE = re.compile(r"^[ \t]*[A-Za-z0-9][\w-]*\s*::=", re.MULTILINE)
_LARK_LINE = re.compile(r"^[ \t]*(?:%[a-z]+|[?!]?[A-Za-z_][\w.-]*\s*(?:\[[^\]\n]*\]\s*)?:(?![:=]))", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint of an answer."""

    kind: str  # "gbnf" (llama.cpp's), "lark" (llguidance's dialect) or "json_schema"
    text: str  # as the user wrote it
    # Of a JSON schema: objects are closed unless it says otherwise, and in its order; nothing of it is left out.
    is_strict: bool = False


def read_grammar(text: str) -> Grammar:
    """Read a grammar in llama.cpp's GBNF or in Lark, recognized by `::=`.

    Raises:
        BadGrammarError: the grammar is broken; names line and column. The engine checks the rest of a Lark grammar.
    """
    require("text", text, TEXT)
    if not _GBNF_RULE.search(text) and _LARK_LINE.search(text):
        from llmrun.grammar.lark import check

        check(text)
        return Grammar("lark", text)
    from llmrun.grammar.gbnf import parse

    parse(text)
    return Grammar("gbnf", text)


def read_json_schema(text: str, *, is_strict: bool = False) -> Grammar:
    """Read a JSON schema.

    Args:
        is_strict: objects have only the properties that the schema lists, in its order, unless it says otherwise, and a
            oneOf whose schemas may both be met is refused, if that can't be prevented, instead of taken as anyOf.

    Raises:
        BadGrammarError: the schema is broken, can't be met, or can't be enforced; names line and column.
    """
    require("text", text, TEXT)
    from llmrun.grammar.json_lark import rules_of

    rules_of(text, is_strict=is_strict)
    return Grammar("json_schema", text, is_strict)
