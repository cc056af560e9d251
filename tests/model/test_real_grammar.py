"""JSON schemas and grammars with the real model: its answers end by themselves, and meet what was asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from support.grammar_cases import GRAMMARS, SCHEMAS
from support.grammar_twin import Twin
from support.plain_llama import assert_greedy, smollm2_prompt

import llmrun
from llmrun.errors import BadGrammarError
from llmrun.gguf.reader import read_header
from llmrun.grammar import Grammar, gbnf, read_grammar, read_json_schema

GREEDY = llmrun.SamplingParams(temperature=0)
# What a schema leaves open, a small model would fill with the same again and again.
VARIED = llmrun.SamplingParams(temperature=0, repeat_penalty=1.1)
ENOUGH = llmrun.Limits(max_tokens=300)
_TOKENS = "tokenizer.ggml.tokens"


@pytest.fixture(scope="module")
def model(pulled: None) -> Iterator[llmrun.Model]:
    with llmrun.load("smollm2", pull=False, n_ctx=1024) as model:
        yield model


def answer(
    model: llmrun.Model,
    question: str,
    grammar: Grammar,
    limits: llmrun.Limits = ENOUGH,
    sampling: llmrun.SamplingParams = VARIED,
) -> tuple[str, str]:
    """The text, and why it ended."""
    reply = model.chat([llmrun.Message("user", question)], sampling=sampling, limits=limits, grammar=grammar)
    events = list(reply.events())
    text = "".join(event.text for event in events if isinstance(event, llmrun.TextDelta))
    assert isinstance(events[-1], llmrun.Finished)
    return text, events[-1].reason


@pytest.fixture(scope="module")
def closing(model_path: Path) -> llmrun.SamplingParams:
    """With these an answer closes its strings, lists and objects as soon as it may."""
    tokens = read_header(model_path, arrays=(_TOKENS,)).metadata[_TOKENS]
    biases = {token: 100.0 if text[:1] == b'"' else 50.0 for token, text in enumerate(tokens) if not text.strip(b'"}]')}
    return replace(VARIED, logit_bias=tuple(biases.items()))


def valid(schema: Any, text: str) -> bool:
    """Whether a text is JSON that meets a schema, in the draft that the schema was written for."""
    old = isinstance(schema.get("exclusiveMinimum"), bool)
    validator: Any = jsonschema.Draft4Validator if old else jsonschema.Draft202012Validator
    return bool(validator(schema, format_checker=validator.FORMAT_CHECKER).is_valid(json.loads(text)))


# All of them are asked for through the server, in test_real_schemas.py.
@pytest.mark.parametrize("name", ["a number in a range", "a time", "nested objects", "a tuple", "a tree", "an invoice"])
def test_the_answer_meets_the_schema(model: llmrun.Model, closing: llmrun.SamplingParams, name: str) -> None:
    schema, question = SCHEMAS[name], f"Give me {name} as JSON."
    grammar = read_json_schema(json.dumps(schema))
    text, reason = answer(model, question, grammar)
    if reason == "length":  # what a schema leaves open, a tree's leaves, some processors' kernels fill for ever
        text, reason = answer(model, question, grammar, sampling=closing)
    assert reason == "stop"
    assert valid(schema, text), text


@pytest.mark.parametrize("name", ["json", "chess"])
def test_the_answer_follows_the_grammar(model: llmrun.Model, name: str) -> None:
    grammar = read_grammar(GRAMMARS[name][0])
    text, reason = answer(model, "Write something short.", grammar, llmrun.Limits(max_tokens=40))
    assert reason == "length" or Twin(gbnf.parse(grammar.text), text).follows


def test_a_bad_grammar_that_got_past_the_front_leaves_the_engine_alive(model: llmrun.Model) -> None:
    with pytest.raises(BadGrammarError, match="line 1, column 10"):
        answer(model, "Hi", Grammar("gbnf", "root ::= nothing"))
    with pytest.raises(BadGrammarError, match="line 1, column 8"):
        answer(model, "Hi", Grammar("lark", "start: nothing"))
    assert answer(model, "Hi", read_json_schema('{"const": [1]}')) == ("[1]", "stop")


def test_the_same_question_without_a_grammar_is_free_again(model: llmrun.Model, model_path: Path) -> None:
    question = "Why is the sky blue?"
    prompt = smollm2_prompt(question)
    assert answer(model, question, read_json_schema('{"const": [1]}')) == ("[1]", "stop")
    reply = model.chat([llmrun.Message("user", question)], sampling=GREEDY, limits=llmrun.Limits(max_tokens=8))
    text = "".join(event.text for event in reply.events() if isinstance(event, llmrun.TextDelta))
    assert_greedy(model_path, (prompt, ""), (prompt, text))


# SmolLM2's own way of writing, and then it is told that it thinks.
THINKS = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{{ '<|im_start|>assistant\n<think>\n' }}{# </think> #}"
)
YEAR = read_json_schema(
    '{"type": "object", "properties": {"year": {"type": "integer"}}, "required": ["year"], '
    '"additionalProperties": false}'
)


def thoughts_and_answer(grammar: Grammar | None, thinking_tokens: int) -> tuple[str, str, str]:
    """What a new engine thinks, what it says then, and why that ends."""
    with llmrun.load("smollm2", pull=False, n_ctx=1024) as model:
        question = [llmrun.Message("user", "In which year did men first walk on the Moon?")]
        events = list(
            model.chat(
                question,
                sampling=GREEDY,
                limits=llmrun.Limits(max_tokens=60),
                template=THINKS,
                grammar=grammar,
                thinking_tokens=thinking_tokens,
            ).events()
        )
    text = "".join(event.text for event in events if isinstance(event, llmrun.TextDelta))
    thoughts, _, said = text.partition("</think>")
    assert isinstance(events[-1], llmrun.Finished)
    return thoughts, said, events[-1].reason


@pytest.mark.parametrize("thinking_tokens", [0, 3, 12])
def test_a_schema_binds_the_answer_and_not_the_thoughts_before_it(pulled: None, thinking_tokens: int) -> None:
    thoughts, said, reason = thoughts_and_answer(YEAR, thinking_tokens)
    assert thoughts == thoughts_and_answer(None, thinking_tokens)[0]
    assert reason == "stop"
    assert [*json.loads(said)] == ["year"]
