"""Grammars and JSON schemas that an answer has to follow: what they are, and what is wrong with them.

Owns the checks that need no model, so that a mistake is named by line and column before one is loaded; must not know
tokens. Nothing here is imported before a grammar is asked for, but the dataclass.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from llmrun.errors import TEXT, require

_GBNF_RULE = re.compile(r"^[ \t]*[A-Za-z0-9][\w-]*\s*::=", re.MULTILINE)
_LARK_LINE = re.compile(r"^[ \t]*(?:%[a-z]+|[?!]?[A-Za-z_][\w.-]*\s*(?:\[[^\]\n]*\]\s*)?:(?![:=]))", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer has to follow.

    Attributes:
        kind: "gbnf" (llama.cpp's), "lark" (llguidance's dialect) or "json_schema".
        text: its source, as a user wrote it.
    """

    kind: str
    text: str


def read_grammar(text: str) -> Grammar:
    """A grammar in GBNF, as llama.cpp's users have them, or in Lark; told apart by `::=`.

    Raises:
        BadGrammarError: it is broken; the message names line and column. Of a Lark grammar only what could harm is
            checked here, the rest by the engine.
    """
    require("text", text, TEXT)
    if not _GBNF_RULE.search(text) and _LARK_LINE.search(text):
        from llmrun.grammar.lark import check

        check(text)
        return Grammar("lark", text)
    from llmrun.grammar.gbnf import parse

    parse(text)
    return Grammar("gbnf", text)


def read_json_schema(text: str) -> Grammar:
    """A JSON schema.

    Raises:
        BadGrammarError: it is broken, can't be met, or uses what can't be enforced; the message names line and column.
    """
    require("text", text, TEXT)
    from llmrun.grammar.schema import parse

    parse(text)
    return Grammar("json_schema", text)
