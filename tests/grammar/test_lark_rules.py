"""Lark grammars as rules of characters, judged by regular expressions of Python's."""

from __future__ import annotations

import json
import random
import re

import pytest
from support.text_grammars import APPLY_PATCH, PATCH

from llmrun.errors import BadGrammarError
from llmrun.grammar.gbnf import ROOT, Characters, Choice, Literal, Node, Reference, Repeat, Rule, Series
from llmrun.grammar.lark_rules import before, in_json, of_pattern, parse

GRAMMARS = {
    APPLY_PATCH: PATCH.pattern,
    'start: "a" | "b"i ~ 2..3 // a remark\n  | c\n?c.2: ["x"] C{1,2}\nC: "0".."9"': "a|[bB]{2,3}|x?[0-9]{1,2}",
    'start: root ("," root)*\nroot: SIGNED_INT\n%import common.SIGNED_INT': "[+-]?[0-9]+(,[+-]?[0-9]+)*",
    'start: ( "\\"" | "\\\\"\n | "\\u00e9\\n" )+': '("|\\\\|é\n)+',
    "start: W N\n%import common.CNAME -> N\n%import common.WS_INLINE -> W": "[ \t]+[A-Za-z_][A-Za-z_0-9]*",
    of_pattern("a/b\\/[^\\n]{2}"): "a/b/[^\n]{2}",
    of_pattern("\n"): "\n",
}


def write(rules: dict[str, Rule], node: Node, numbers: random.Random) -> str:
    if isinstance(node, Literal):
        return node.text
    if isinstance(node, Characters):
        first, last = numbers.choice(node.ranges)
        return chr(numbers.choice((first, last, numbers.randint(first, last))))
    if isinstance(node, Reference):
        return write(rules, rules[node.name].body, numbers)
    if isinstance(node, Choice):
        return write(rules, numbers.choice(node.options), numbers)
    if isinstance(node, Series):
        return "".join(write(rules, part, numbers) for part in node.parts)
    assert isinstance(node, Repeat)
    most = node.minimum + 3 if node.maximum is None else node.maximum
    return "".join(write(rules, node.part, numbers) for _ in range(numbers.randint(node.minimum, most)))


@pytest.mark.parametrize(("grammar", "pattern"), GRAMMARS.items())
def test_what_the_rules_write_is_right(grammar: str, pattern: str) -> None:
    rules, numbers, texts = parse(grammar), random.Random(1), set()
    for _ in range(200):
        text = write(rules, rules[ROOT].body, numbers)
        assert re.fullmatch(pattern, text)
        texts.add(text)
        escaped = in_json(rules)
        content = write(escaped, escaped[ROOT].body, numbers)
        assert re.fullmatch(pattern, json.loads(f'"{content}"'))
        assert json.dumps(json.loads(f'"{content}"'), ensure_ascii=False) == f'"{content}"'
        ended = before(rules, "<end>")
        assert re.fullmatch(f"(?s:{pattern})<end>", write(ended, ended[ROOT].body, numbers))
    assert len(texts) > 1 or pattern == "\n"


def test_what_they_can_write_is_all_of_it() -> None:
    """Every branch of the grammar is met."""
    rules, numbers = parse(APPLY_PATCH), random.Random(2)
    text = "".join(write(rules, rules[ROOT].body, numbers) for _ in range(200))
    for part in ("Add File", "Delete File", "Update File", "Move to", "\n@@\n", "\n@@ ", "\n-", "\n ", "End of File"):
        assert part in text


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        ("  ", "nothing is written"),
        ('begin: "a"', "never defined"),
        ("start: x", "never defined"),
        ('start: "a', "is not expected"),
        ('start: ("a"', "never closed"),
        ('start: "a"\nstart: "b"', "defined twice"),
        ('start: start "a" | "a"', "begins with itself"),
        ('start: "a" start', "can never end"),
        ('start: "a"\n%ignore " "', "%ignore"),
        ("start: A\n%import python.A", "common"),
        ("start: A\n%import common.A", "common.A"),
        ("start: /a(?=b)/", "look-around"),
        ("start: /[/", "never closed"),
        ("start: /a/s", "flag"),
        ('start: "a"~3..2', "not a range"),
        ('start: pair{"a"}\npair{x}: x x', "templates"),
        ("start: " + "(" * 200 + '"a"' + ")" * 200, "nested"),
    ],
)
def test_what_is_broken_or_cant_be_enforced_is_refused(grammar: str, why: str) -> None:
    with pytest.raises(BadGrammarError) as caught:
        parse(grammar)
    assert why in f"{caught.value} {caught.value.why}"
