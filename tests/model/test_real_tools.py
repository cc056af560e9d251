"""Calls of tools with the real model: whatever it says, its arguments follow the tools' schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from support.call_syntaxes import SYNTAXES
from support.tool_templates import TOOL_TEMPLATES

from llmrun.protocol.answer import ResponseAccumulator
from llmrun.protocol.loading import Load
from llmrun.protocol.messages import AnswerPart, AnswerRequest, Finished, Generate, Message, Started, Tool, ToolCall
from llmrun.protocol.params import Limits, SamplingParams
from llmrun.runner.client import EngineClient

PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12, "pattern": "^[A-Z][a-z]*$"},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
LIGHT: dict[str, Any] = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
SCHEMAS = {"weather": PLACE, "light": LIGHT}
# Of a text that is written as it is, a pattern is not enforced.
CITY = {"type": "string", "maxLength": 12}
UNQUOTED = {**SCHEMAS, "weather": {**PLACE, "properties": {**PLACE["properties"], "city": CITY}}}
ASKED = AnswerRequest(
    (Message("user", "What's the weather in Rome?"),),
    sampling=SamplingParams(seed=1),
    limits=Limits(max_tokens=200),
    tools=tuple(Tool(name, f"About the {name}.", json.dumps(schema)) for name, schema in SCHEMAS.items()),
    tool_choice="required",
    parallel_calls=False,
)


@pytest.fixture(scope="module")
def engine(model_path: Path) -> Iterator[EngineClient]:
    engine = EngineClient()
    try:
        engine.load(Load(str(model_path), n_ctx=2048, n_batch=256, threads=2))
        yield engine
    finally:
        engine.close()


def answer(engine: EngineClient, asked: AnswerRequest, request: int) -> tuple[Started, list[AnswerPart], Finished]:
    """How it began, the parts of its text, how it ended."""
    started, *events = engine.submit(Generate(request, asked))
    assert isinstance(started, Started)
    received = ResponseAccumulator()
    parts = [part for event in events for part in received.take(event)]
    assert isinstance(events[-1], Finished)
    return started, parts, events[-1]


def check_calls(parts: list[AnswerPart], schemas: dict[str, Any] = SCHEMAS) -> list[ToolCall]:
    """The calls, each by its schema; there is nothing else."""
    calls: list[ToolCall] = []
    for part in parts:
        if part.kind == "call":
            calls.append(ToolCall(part.call_id, part.text, ""))
        elif part.kind != "call_end":
            assert part.kind == "arguments"
            calls[-1] = calls[-1]._replace(arguments=calls[-1].arguments + part.text)
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), schemas[call.name])
    return calls


@pytest.mark.parametrize("template", [None, *TOOL_TEMPLATES])
def test_a_required_call(engine: EngineClient, template: str | None) -> None:
    asked = replace(ASKED, template=TOOL_TEMPLATES[template] if template else None)
    started, parts, finished = answer(engine, asked, 1)
    syntax = SYNTAXES[template or "hermes"]
    assert started.tool_syntax == syntax.trigger
    assert finished.reason == "stop"
    assert len(check_calls(parts, SCHEMAS if syntax.parameters is None else UNQUOTED)) == 1


def test_every_syntax_is_tried() -> None:
    assert set(TOOL_TEMPLATES) <= set(SYNTAXES)


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_named_tool_is_called(engine: EngineClient, name: str) -> None:
    _, parts, _ = answer(engine, replace(ASKED, tool_choice=f"={name}"), 2)
    assert [call.name for call in check_calls(parts)] == [name]


@pytest.mark.slow
def test_a_round_trip(engine: EngineClient) -> None:
    """The result of a call is read like any other message, and what was said before is not computed again."""
    _, parts, _ = answer(engine, ASKED, 3)
    (call,) = check_calls(parts)
    result = Message("tool", "22 degrees", tool_call_id=call.id, name=call.name)
    asked = replace(ASKED, messages=(*ASKED.messages, Message("assistant", "", (call,)), result), tool_choice="auto")
    started, _, finished = answer(engine, asked, 4)
    assert finished.reason in ("stop", "length")
    assert started.reused_tokens > started.prompt_tokens / 2
