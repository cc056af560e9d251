"""Answers are complete at their limit, whatever the model prefers."""

from __future__ import annotations

import ctypes
import json
import random
from typing import Any

import jsonschema
import pytest
from support.fake_context import END, N_VOCAB, FakeVocabulary, favouring
from support.grammar_cases import SCHEMAS
from support.schema_answers import EXACT, VOCABULARY, allowed, of_schema

from llmrun.engine.constraint.closing import TimelyEnd
from llmrun.engine.constraint.matcher import Matcher, compile_grammar, tokens_of
from llmrun.engine.core.sampler import SequenceSampler
from llmrun.grammar import read_grammar
from llmrun.protocol.params import SamplingParams

OPEN: dict[str, Any] = {
    "anything": {},
    "any object": {"type": "object"},
    "a long list": {"type": "array", "items": {"type": "string"}},
    "many items": {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {"name": {}, "note": {"type": "string"}},
            "required": ["name", "note"],
        },
    },
    "a map": {"type": "object", "additionalProperties": {"type": "array", "items": {"type": "number"}}},
    "required texts": {"type": "object", "properties": {name: {"type": "string"} for name in "abc"}, "required": ["c"]},
}
SEARCHED = "one of two patterns"  # needs a letter that the search finds too late
CASES = {**{f"exact, {name}": schema for name, schema in EXACT.items() if name != SEARCHED}, **SCHEMAS, **OPEN}


def answer(constraint: Matcher, end: TimelyEnd, seed: int, most: int) -> str:
    """Return an answer of a model that likes to go on."""
    choose, found = random.Random(seed), bytearray()
    for _ in range(most):
        tokens = allowed(constraint)
        others = [token for token in tokens if token != END and token not in map(ord, '"}]')]
        token = choose.choice(others or tokens)
        constraint.accept(token)
        token = end.accept(token)
        if VOCABULARY.is_end(token):
            break
        found += VOCABULARY.piece(token)
    return found.decode("utf-8", "replace")


@pytest.mark.parametrize("name", CASES)
def test_an_answer_is_whole_json_at_its_limit(name: str) -> None:
    schema = CASES[name]
    drafts = {
        "exact, dependencies": jsonschema.Draft7Validator,
        "draft 4's exclusive bound": jsonschema.Draft4Validator,
    }
    judge = drafts.get(name, jsonschema.Draft202012Validator)
    start = of_schema(schema)
    shortest = start.closing(400)
    assert shortest is not None
    n_cut = 0
    for seed in range(8):
        constraint = start.copy()
        most = len(shortest) + 3 + 20 * seed
        end = TimelyEnd(constraint, tokens_of(VOCABULARY), most)
        text = answer(constraint, end, seed, most)
        assert judge(schema).is_valid(json.loads(text)), text
        n_cut += end.is_cut_short
    assert n_cut or name not in OPEN or name == "anything"


def test_what_cannot_be_completed_is_left_alone() -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string", "minLength": 50}}, "required": ["name"]}
    constraint = of_schema(schema)
    end = TimelyEnd(constraint, tokens_of(VOCABULARY), 30)
    assert constraint.closing(30) is None
    assert len(answer(constraint, end, 1, 30)) > 15
    assert not end.is_cut_short


def test_a_rewound_answer_is_complete_too() -> None:
    constraint = of_schema({"type": "array", "items": {"type": "string"}})
    end = TimelyEnd(constraint, tokens_of(VOCABULARY), 20)
    for token in b'["abc", "de':
        constraint.accept(token)
        assert end.accept(token) == token
    constraint.rewind(6)
    end.rewind(6)
    text = '["abc' + answer(constraint, end, 3, 15)
    assert isinstance(json.loads(text), list)
    assert end.is_cut_short


def test_the_sampler_knows_the_token_that_replaced_its_own() -> None:
    """The penalties count what is in the answer, and the explanation calls it forced."""
    vocabulary = FakeVocabulary()
    constraint = compile_grammar(read_grammar('root ::= "{" [a-f]* "}"'), vocabulary)
    end = TimelyEnd(constraint, constraint.tokens, 5, constraint.endings)
    params = SamplingParams(temperature=0, repeat_penalty=2.0)
    sampler = SequenceSampler(params, vocabulary, [], constraint, remember=8, end=end)
    rows = [(ctypes.c_float * N_VOCAB)(*favouring(ord(letter))) for letter in "{abcd"]
    answer = [sampler.sample(ctypes.addressof(row)) for row in rows]
    assert bytes(answer) == b"{abc}"
    assert [choice.forced for choice in sampler.explain(8, 2)] == [False] * 4 + [True]
    likely = favouring(ord("d"))
    likely[ord("}")] = likely[ord("d")] + 1
    assert sampler.native.sample(ctypes.addressof((ctypes.c_float * N_VOCAB)(*likely))) == ord("d")
