"""A loop of calls over HTTP, with a tiny model: in each protocol, and after a restart, only what is new is computed."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.family_model import control_texts, write_family_model
from support.installed import SECONDS, eventually
from support.real_server import RealServer

TEMPLATE = """{%- if tools %}{{ '<|im_start|>system\\n' ~ (tools | tojson) ~ '<|im_end|>\\n' }}{% endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' ~ message.role ~ '\\n' ~ (message.content or '') | trim }}
{%- for call in message.tool_calls or [] -%}
{{ '<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}{{ call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{{ '<|im_start|>assistant\\n' }}"""
SCHEMA = {"type": "object", "properties": {"at": {"enum": ["here", "there"]}}, "required": ["at"]}
QUESTION = "What is there? " * 80
MOST_NEW = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return write_family_model(file, control_texts(TEMPLATE), ("<|im_end|>",), template=TEMPLATE)


@pytest.fixture
def server(command: str, model: Path, tmp_path: Path) -> Iterator[RealServer]:
    server = RealServer(command, tmp_path, "--ctx", "8192", model=str(model))
    yield server
    server.end()


def post(server: RealServer, path: str, model: Path, body: dict[str, Any]) -> Any:
    data = json.dumps({"model": str(model), "temperature": 0, **body}).encode()
    headers = {"content-type": "application/json", "anthropic-version": "2023-06-01"}
    with urllib.request.urlopen(
        urllib.request.Request(server.address + path, data, headers), timeout=SECONDS
    ) as answer:
        return json.load(answer)


def chat(server: RealServer, model: Path, messages: list[Any]) -> int:
    """Add a call, written anew, and its result; return the number of tokens that were computed."""
    tools = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
    forced = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 300}
    answer = post(server, "/v1/chat/completions", model, {"messages": messages, "tools": tools, **forced})
    message = answer["choices"][0]["message"]
    messages.append(message)
    for call in message["tool_calls"]:
        call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": "A wall."})
    usage = answer["usage"]
    return int(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])


def messages(server: RealServer, model: Path, messages: list[Any]) -> int:
    """As chat()."""
    forced = {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "max_tokens": 300}
    tools = [{"name": "look", "input_schema": SCHEMA}]
    answer = post(server, "/v1/messages", model, {"messages": messages, "tools": tools, **forced})
    calls = [block for block in answer["content"] if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": each["id"], "content": "A wall."} for each in calls]
    messages += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": results}]
    return int(answer["usage"]["input_tokens"])


def responses(server: RealServer, model: Path, items: list[Any]) -> int:
    """As chat()."""
    forced = {"tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 300}
    tools = [{"type": "function", "name": "look", "parameters": SCHEMA}]
    answer = post(server, "/v1/responses", model, {"input": items, "tools": tools, **forced})
    calls = [item for item in answer["output"] if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": each["call_id"], "output": "A wall."} for each in calls]
    items += [*answer["output"], *results]
    return int(answer["usage"]["input_tokens"] - answer["usage"]["input_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("ask", [chat, messages, responses])
def test_each_request_of_a_loop_computes_what_is_new(server: RealServer, model: Path, ask: Any) -> None:
    conversation = [{"role": "user", "content": QUESTION}]
    first, *others = (ask(server, model, conversation) for _ in range(4))
    assert first > 1000
    assert max(others) < MOST_NEW
    assert eventually(lambda: "3 answers as generated" in server.log.read_text(), SECONDS)


def test_after_a_restart_the_loop_goes_on(command: str, model: Path, tmp_path: Path) -> None:
    conversation = [{"role": "user", "content": QUESTION}]
    server = RealServer(command, tmp_path, "--ctx", "8192", model=str(model))
    try:
        assert [chat(server, model, conversation) > MOST_NEW for _ in range(3)] == [True, False, False]
        # Beside the states there is the model's hash, which is written first.
        saved = eventually(lambda: any(file.parent.name != "hashes" for file in tmp_path.rglob("*.kv")), SECONDS)
        assert saved, "an idle server saves its conversations"
    finally:
        server.end()
    server = RealServer(command, tmp_path, "--ctx", "8192", model=str(model))
    try:
        assert chat(server, model, conversation) < MOST_NEW
        assert eventually(lambda: "3 answers as generated" in server.log.read_text(), SECONDS)
    finally:
        server.end()
