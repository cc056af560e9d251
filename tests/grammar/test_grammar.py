"""Grammars and JSON schemas: what is refused, where, and that nothing else ever happens."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import pytest
from support.effort import loop_seconds, loops
from support.grammar_cases import BROKEN_GRAMMARS, BROKEN_SCHEMAS, GRAMMARS, SCHEMAS, Broken
from support.mutations import MUTATIONS, mutations

from llmrun.errors import BadGrammarError
from llmrun.grammar import Grammar, read_grammar, read_json_schema
from llmrun.grammar.json_lark import rules_of

MOST_LOOPS = 400  # about two seconds on an idle machine


def refused(read: Callable[[str], Grammar], case: Broken) -> BadGrammarError:
    """The error, after its words and its work were looked at."""
    began = time.process_time()
    with pytest.raises(BadGrammarError) as caught:
        read(case.text)
    assert time.process_time() - began < MOST_LOOPS * loop_seconds()
    said = f"{caught.value} ({caught.value.hint})"
    assert case.place in said
    assert case.why in said
    assert len(said) < 500
    return caught.value


@pytest.mark.parametrize("name", BROKEN_GRAMMARS)
def test_a_broken_grammar_is_refused_with_its_place(name: str) -> None:
    refused(read_grammar, BROKEN_GRAMMARS[name])


@pytest.mark.parametrize("name", BROKEN_SCHEMAS)
def test_a_broken_schema_is_refused_with_its_place(name: str) -> None:
    refused(read_json_schema, BROKEN_SCHEMAS[name])


def test_there_are_as_many_broken_ones_as_promised() -> None:
    assert len(BROKEN_GRAMMARS) + len(BROKEN_SCHEMAS) >= 60
    assert len(SCHEMAS) >= 50


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_good_grammar_is_gbnf(name: str) -> None:
    text = GRAMMARS[name][0]
    assert read_grammar(text) == Grammar("gbnf", text)
    assert read_grammar(text.replace("\n", "\r\n")).kind == "gbnf"


@pytest.mark.parametrize(
    "text",
    [
        'start: "a"',
        '%llguidance {}\nstart: A "::="\nA: /[a-z]+/ // letters',
        'start[capture]: ("a" | "b")*\n',
        "?start: INT\n",
    ],
)
def test_lark_is_told_from_gbnf(text: str) -> None:
    assert read_grammar(text) == Grammar("lark", text)


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_good_schema_is_taken(name: str) -> None:
    text = json.dumps(SCHEMAS[name], indent=2, ensure_ascii=False)
    assert read_json_schema(text) == Grammar("json_schema", text)


def test_hints_name_what_was_meant() -> None:
    assert refused(read_grammar, BROKEN_GRAMMARS["unknown rule"]).hint == "did you mean items?"
    assert refused(read_json_schema, BROKEN_SCHEMAS["unknown type"]).hint == "did you mean string?"
    assert refused(read_json_schema, BROKEN_SCHEMAS["reference to nothing"]).hint == "did you mean #/$defs/item?"


@pytest.mark.parametrize(
    "options",
    [
        [{"type": "string"}, {"type": ["integer", "null"]}],
        [{"const": 1}, {"enum": [2, 3]}, {"const": "1"}, {"const": True}],
        [
            {"type": "object", "required": ["a"], "properties": {"a": {}}},
            {"type": "object", "additionalProperties": False},
        ],
        [
            {"type": "object", "required": ["k"], "properties": {"k": {"const": 1}}},
            {"type": "object", "required": ["k"], "properties": {"k": {"type": "string"}}},
        ],
    ],
)
def test_one_of_what_excludes_itself_is_taken(options: object) -> None:
    assert read_json_schema(json.dumps({"oneOf": options}))


@pytest.mark.parametrize(
    "options",
    [
        [{"type": "string", "format": "date"}, {"type": "string", "format": "time"}],
        [{"type": "integer"}, {"type": "number", "minimum": 0}],
        [{"additionalProperties": {"type": "string"}}, {"patternProperties": {"a": {}}, "minProperties": 1}],
    ],
)
def test_one_of_what_may_overlap_is_refused_if_strict(options: object) -> None:
    text = json.dumps({"oneOf": options})
    strict = refused(partial(read_json_schema, is_strict=True), Broken(text, "(oneOf[1])", "may both be met"))
    assert "write anyOf" in str(strict.hint)
    assert read_json_schema(text) == Grammar("json_schema", text)
    assert rules_of(text, is_strict=False).ignored == (("oneOf",),)


@pytest.mark.parametrize(
    ("read", "texts"),
    [
        (read_grammar, [text for text, _, _ in GRAMMARS.values()]),
        (read_json_schema, [json.dumps(schema, indent=1) for schema in SCHEMAS.values()]),
    ],
)
def test_whatever_is_written_it_is_taken_or_refused(read: Callable[[str], Grammar], texts: list[str]) -> None:
    refusals, slowest = 0, 0.0
    for text in mutations(texts, seed=3):
        began = time.process_time()
        try:
            read(text)
        except BadGrammarError:
            refusals += 1
        slowest = max(slowest, time.process_time() - began)
    assert slowest < MOST_LOOPS * loop_seconds()
    assert 0 < refusals < MUTATIONS


def test_a_long_chain_of_names_takes_no_time() -> None:
    size = 3_000
    chain = "".join(f"r{n} ::= r{n + 1} | [a-z]+ r{n + 1}\n" for n in range(size))
    definitions = {f"d{n}": {"items": {"$ref": f"#/$defs/d{n + 1}"}, "minItems": 1} for n in range(size)}
    schema = json.dumps({"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{size}": {}}})
    grammar = f'root ::= r0\n{chain}r{size} ::= "a"\n'
    assert loops(lambda: (read_grammar(grammar), read_json_schema(schema))) < MOST_LOOPS


def test_the_front_imports_next_to_nothing() -> None:
    """Every start imports the dataclass, because messages do."""
    program = (
        "import sys, llmrun.grammar; print([name for name in sys.modules if 'grammar.' in name or 'llguid' in name])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        (r"a(?=b)", "a look-ahead in the middle"),
        (r"(?<=a)b|(?<!c)d", "look-around and back-references"),
        (r"(a)\1", "look-around and back-references"),
        (r"\\(?=b)", "a look-ahead in the middle"),
        (r"a\bb", r"\b in the middle"),
        (r"\b.", r"\b can only be enforced"),
        (r"(^a)+", "a repeated ^"),
        (r"(?i)a", "flags"),
    ],
)
def test_a_pattern_that_cannot_be_enforced_is_refused_by_its_place(pattern: str, why: str) -> None:
    with pytest.raises(BadGrammarError, match=rf"line 1, column 31 \(pattern\): {re.escape(why)}"):
        read_json_schema(json.dumps({"type": "string", "pattern": pattern}))


def test_a_chain_of_references_that_is_too_long_is_refused() -> None:
    chain = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(5_000)}
    with pytest.raises(BadGrammarError, match="too long a chain"):
        read_json_schema(json.dumps({"$ref": "#/$defs/d0", "$defs": {**chain, "d5000": {}}}))
