"""`llmrun serve` with the real SmolLM2, asked by the official clients: tools, schemas, streams, in every protocol."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import jsonschema
import ollama
import openai
import pytest
from support.installed import SECONDS
from support.real_server import RealServer

PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
QUESTION: Any = [{"role": "user", "content": "How is the weather in Rome?"}]
ABOUT = {"name": "weather", "description": "Tells the weather."}
OPENAI_TOOL: Any = {"type": "function", "function": {**ABOUT, "parameters": PLACE}}
RESPONSES_TOOL: Any = {"type": "function", **ABOUT, "parameters": PLACE, "strict": True}
ANTHROPIC_TOOL: Any = {**ABOUT, "input_schema": PLACE}


@pytest.fixture
def openais(server: RealServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", timeout=SECONDS, max_retries=0)


@pytest.fixture
def anthropics(server: RealServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.address, api_key="none", timeout=SECONDS, max_retries=0)


@pytest.fixture
def ollamas(server: RealServer) -> ollama.Client:
    return ollama.Client(host=server.address, timeout=SECONDS)


def test_a_call_and_its_result_in_chat_completions(openais: openai.OpenAI) -> None:
    ask = openais.chat.completions.create
    called = ask(model="", messages=QUESTION, tools=[OPENAI_TOOL], tool_choice="required", parallel_tool_calls=False)
    assert called.choices[0].finish_reason == "tool_calls"
    message = called.choices[0].message
    (call,) = message.tool_calls or ()
    assert call.type == "function"
    jsonschema.validate(json.loads(call.function.arguments), PLACE)
    said: Any = [*QUESTION, message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "Sunny"}]
    answer = ask(model="", messages=said, tools=[OPENAI_TOOL], max_tokens=8)
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens_details.cached_tokens or 0) > answer.usage.prompt_tokens / 2


def test_a_named_call_streams_in_chat_completions(openais: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "weather"}}
    stream = openais.chat.completions.create(
        model="", messages=QUESTION, tools=[OPENAI_TOOL], tool_choice=named, stream=True
    )
    deltas = [call for chunk in stream for call in chunk.choices[0].delta.tool_calls or ()]
    assert [delta.function.name for delta in deltas if delta.function and delta.function.name] == ["weather"]
    jsonschema.validate(
        json.loads("".join((delta.function and delta.function.arguments) or "" for delta in deltas)), PLACE
    )


def test_a_call_and_its_result_in_responses(openais: openai.OpenAI) -> None:
    called = openais.responses.create(
        model="", input=QUESTION, tools=[RESPONSES_TOOL], tool_choice="required", parallel_tool_calls=False
    )
    (call,) = called.output
    assert call.type == "function_call"
    jsonschema.validate(json.loads(call.arguments), PLACE)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny"}
    said: Any = [*QUESTION, call.model_dump(), result]
    with openais.responses.stream(model="", input=said, tools=[RESPONSES_TOOL], max_output_tokens=8) as stream:
        kinds = [event.type for event in stream]
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")


def test_structured_output_in_responses(openais: openai.OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "place", "schema": PLACE}}
    jsonschema.validate(json.loads(openais.responses.create(model="", input=QUESTION, text=form).output_text), PLACE)


def test_a_call_and_its_result_in_messages(anthropics: anthropic.Anthropic) -> None:
    only: Any = {"type": "any", "disable_parallel_tool_use": True}
    with anthropics.messages.stream(
        model="", max_tokens=100, messages=QUESTION, tools=[ANTHROPIC_TOOL], tool_choice=only
    ) as stream:
        called = stream.get_final_message()
    assert called.stop_reason == "tool_use"
    (call,) = called.content
    assert call.type == "tool_use"
    jsonschema.validate(call.input, PLACE)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny"}
    said: Any = [*QUESTION, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    answer = anthropics.messages.create(model="", max_tokens=8, messages=said, tools=[ANTHROPIC_TOOL])
    assert answer.stop_reason in ("end_turn", "max_tokens", "tool_use")
    counted = anthropics.messages.count_tokens(model="", messages=said, tools=[ANTHROPIC_TOOL])
    usage = answer.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_ollama(ollamas: ollama.Client) -> None:
    answer = ollamas.chat(model="smollm2", messages=QUESTION, format=PLACE)
    jsonschema.validate(json.loads(answer.message.content or ""), PLACE)
    *pieces, last = ollamas.chat(model="smollm2", messages=QUESTION, stream=True, options={"num_predict": 4})
    assert (last.done_reason, last.eval_count) in {("length", 4), ("stop", last.eval_count)}
    assert not any(piece.done for piece in pieces)
    said = [*QUESTION, {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": {}}}]}]
    said.append({"role": "tool", "content": "Sunny", "tool_name": "weather"})
    assert ollamas.chat(model="smollm2", messages=said, tools=[OPENAI_TOOL], options={"num_predict": 4}).done
    assert ollamas.generate(model="smollm2", prompt="One, two,", raw=True, options={"num_predict": 4}).response
    assert ollamas.show("smollm2").modelinfo


def test_the_asynchronous_clients(server: RealServer) -> None:
    async def answers() -> list[object]:
        one = openai.AsyncOpenAI(base_url=f"{server.address}/v1", api_key="none", timeout=SECONDS, max_retries=0)
        two = anthropic.AsyncAnthropic(base_url=server.address, api_key="none", timeout=SECONDS, max_retries=0)
        three = ollama.AsyncClient(host=server.address, timeout=SECONDS)
        async with one, two:
            return await asyncio.gather(
                one.responses.create(model="", input="Hi", max_output_tokens=4),
                two.messages.create(model="", max_tokens=4, messages=QUESTION),
                three.chat(model="smollm2", messages=QUESTION, options={"num_predict": 4}),
            )

    assert len(asyncio.run(answers())) == 3
