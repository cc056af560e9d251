"""Lists without repetitions whose items can't be listed: jsonschema judges what may be written."""

from __future__ import annotations

import ctypes
import json
import random
from typing import Any

import jsonschema
import pytest
from support.fake_context import END, N_VOCAB, FakeVocabulary, favouring
from support.schema_answers import allowed, follows, of_schema

from llmrun.engine.constraint.closing import TimelyEnd
from llmrun.engine.core.sampler import SequenceSampler
from llmrun.errors import BadGrammarError
from llmrun.protocol.params import SamplingParams

UNIQUE: dict[str, Any] = {"type": "array", "uniqueItems": True}
PAIR: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
    "required": ["a"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {
    "texts": {**UNIQUE, "items": {"type": "string"}, "minItems": 3},
    "numbers": {**UNIQUE, "items": {"type": "number"}},
    "few integers": {**UNIQUE, "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 9},
    "objects": {**UNIQUE, "items": PAIR},
    "lists in lists": {
        "properties": {"x": {**UNIQUE, "items": {**UNIQUE, "items": {"type": "integer"}}}},
        "required": ["x"],
    },
    "fifty values": {**UNIQUE, "items": {"enum": [f"v{index}" for index in range(50)]}},
    "thirty values": {**UNIQUE, "items": {"enum": [f"v{index}" for index in range(30)]}, "minItems": 28},
    "anything": {"uniqueItems": True},
}
VALUES: list[Any] = [
    [], ["a", "a"], ["a", "b", "c"], ["a", "b", "a"], [1, 1], [1, 1.0], [1, 2], [1, 12, 1], [{"a": 1}, {"a": 1}],
    [{"a": 1, "b": "x"}, {"b": "x", "a": 1}], [{"a": 1}, {"a": 2}], {"x": [[1, 1]]}, {"x": [[1, 2], [2, 1]]},
    {"x": [[1], [1]]}, ["v1", "v1"], ["v1", "v11"], ["v11", "v1"], [True, True], [True, False], [None, None],
    ['a"', "a\\"], ["é", "é"], ["é", "e"], [[], {}], [[], []], "x",
]  # fmt: skip


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_list_repeats_nothing_as_jsonschema_sees_it(name: str) -> None:
    constraint, judge = of_schema(SCHEMAS[name]), jsonschema.Draft202012Validator(SCHEMAS[name])
    for value in VALUES:
        assert follows(constraint, value) == judge.is_valid(value), value
    assert not constraint.left_out


@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_step_back_from_repetitions_and_end(name: str) -> None:
    judge, n_refused = jsonschema.Draft202012Validator(SCHEMAS[name]), 0
    for seed in range(10):
        constraint, choose, answer = of_schema(SCHEMAS[name]), random.Random(seed), bytearray()
        for _ in range(150):
            tokens = [token for token in allowed(constraint) if not constraint.refuses(token)]
            n_refused += len(tokens) < len(allowed(constraint))
            assert tokens, answer
            if END in tokens:
                break
            usual = [token for token in tokens if token in (*b'"[{}, 01av', *(b"]" if choose.random() < 0.1 else b""))]
            token = choose.choice(usual or [each for each in tokens if each < 128])
            constraint.accept(token)
            answer.append(token)
        closing = constraint.closing(500)
        assert closing is not None, answer
        assert judge.is_valid(json.loads(answer + bytes(closing))), answer
    assert n_refused or name in ("thirty values", "anything")


def answered(schema: Any, liked: str) -> str:
    """Return the answer of a model that likes some characters, each in its turn."""
    vocabulary, constraint, answer = FakeVocabulary(), of_schema(schema), bytearray()
    end = TimelyEnd(constraint, constraint.tokens, 400)
    sampler = SequenceSampler(SamplingParams(temperature=0), vocabulary, [], constraint, end=end)
    while len(answer) < 400:
        row = (ctypes.c_float * N_VOCAB)(*favouring(ord(liked[len(answer) % len(liked)])))
        token = sampler.sample(ctypes.addressof(row))
        if vocabulary.is_end(token):
            break
        answer.append(token)
    return answer.decode()


def test_the_sampler_writes_another_item_where_the_model_repeats_itself() -> None:
    schema = {**UNIQUE, "items": {"type": "string", "maxLength": 3}, "minItems": 3, "maxItems": 3}
    first, second, third = json.loads(answered(schema, '["a", "a", "a"]'))
    assert first == "a"
    assert len({first, second, third}) == 3


def test_a_rewound_item_may_be_written_again() -> None:
    constraint = of_schema({**UNIQUE, "items": {"type": "string"}})
    for token in b'["a", "b", "b':
        constraint.accept(token)
    assert constraint.refuses(ord('"'))
    constraint.rewind(5)
    assert not constraint.refuses(ord('"'))
    for token in b'c", "b':
        constraint.accept(token)
    assert not constraint.refuses(ord('"'))


def test_a_list_that_needs_more_items_than_there_are_says_so() -> None:
    schema = {**UNIQUE, "items": {"type": "integer", "minimum": 0, "maximum": 1}, "minItems": 3}
    with pytest.raises(BadGrammarError) as caught:
        answered(schema, "[0, 1, ")
    assert "in the list already" in str(caught.value.why)
