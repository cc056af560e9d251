"""`llmrun serve` with the real SmolLM2, asked by what is built on the protocols: llm, LangChain, LiteLLM, Open WebUI.

All but llm are replayed: what they send was read off their own requests (langchain-openai 1.7, LiteLLM 1.106), or
their source.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from support.installed import SECONDS
from support.real_server import RealServer

PLACE: dict[str, Any] = {
    "title": "place",
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
SAID = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How is the weather in Rome?"}]
TOOL = {"type": "function", "function": {"name": "weather", "description": "Tells the weather.", "parameters": PLACE}}


class Replay:
    """Sends what a client sent, with no header but its own.

    Args:
        headers: of every request.
    """

    def __init__(self, server: RealServer, **headers: str) -> None:
        self._port, self._headers = server.port, {name.replace("_", "-"): value for name, value in headers.items()}

    def __call__(self, path: str, body: Any = None) -> bytes:
        """What is answered."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=SECONDS)
        data = None if body is None else json.dumps(body).encode()
        connection.request("GET" if body is None else "POST", path, data, self._headers)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        assert answer.status == 200, content
        return content


def lines(content: bytes) -> list[Any]:
    """Of newline-delimited JSON."""
    return [json.loads(line) for line in content.splitlines()]


# ---- llm


@pytest.fixture
def llm(server: RealServer, tmp_path: Path) -> Any:
    """llm(*words): what Simon Willison's command prints."""
    model = {"model_id": "local", "model_name": "smollm2", "api_base": f"{server.address}/v1", "supports_schema": True}
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([model]))

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "llm", *words], capture_output=True, text=True, timeout=SECONDS,
            env={**os.environ, "LLM_USER_PATH": str(tmp_path)}, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_llm_streams_and_does_not(llm: Any) -> None:
    asked = ("-m", "local", "-o", "max_tokens", "8", "-o", "temperature", "0", "Count from one.")
    assert llm(*asked).strip() == llm("--no-stream", *asked).strip() != ""


def test_llm_goes_on_with_a_conversation_and_knows_what_it_cost(llm: Any) -> None:
    llm("-m", "local", "-o", "max_tokens", "4", "-s", "Be brief.", "Hi")
    llm("-c", "-o", "max_tokens", "4", "And then?")
    first, second = json.loads(llm("logs", "--json"))
    assert second["input_tokens"] > first["input_tokens"] > 0


def test_llm_gets_its_schema(llm: Any) -> None:
    jsonschema.validate(json.loads(llm("-m", "local", "--schema", json.dumps(PLACE), SAID[1]["content"])), PLACE)


# ---- LangChain


@pytest.fixture
def langchain(server: RealServer) -> Any:
    """langchain(**fields): the answer to what ChatOpenAI sends."""
    replay = Replay(server, authorization="Bearer none", content_type="application/json", x_stainless_lang="python")

    def ask(**fields: Any) -> Any:
        said = {"messages": SAID[1:], "model": "smollm2", "stream": False, "temperature": 0.0, **fields}
        return json.loads(replay("/v1/chat/completions", said))["choices"][0]["message"]

    return ask


def test_langchain_gets_its_structure(langchain: Any) -> None:
    schema = {name: value for name, value in PLACE.items() if name != "title"}
    wanted = {"type": "json_schema", "json_schema": {"name": "place", "strict": False, "schema": schema}}
    jsonschema.validate(json.loads(langchain(response_format=wanted)["content"]), PLACE)
    tools = [{"type": "function", "function": {"name": "place", "parameters": schema}}]
    chosen = {"type": "function", "function": {"name": "place"}}
    (call,) = langchain(tools=tools, tool_choice=chosen, parallel_tool_calls=False)["tool_calls"]
    jsonschema.validate(json.loads(call["function"]["arguments"]), PLACE)


def test_langchain_calls_a_tool_and_answers_with_its_result(langchain: Any) -> None:
    (call,) = langchain(tools=[TOOL], tool_choice="required", parallel_tool_calls=False)["tool_calls"]
    jsonschema.validate(json.loads(call["function"]["arguments"]), PLACE)
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "content": "Sunny", "tool_call_id": call["id"]}
    assert langchain(messages=[*SAID[1:], called, result], max_completion_tokens=4)["content"]


# ---- LiteLLM


def test_litellm_as_openai(server: RealServer) -> None:
    replay = Replay(server, authorization="Bearer none", content_type="application/json", x_stainless_lang="python")
    wanted = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE, "strict": True}}
    answer = replay(
        "/v1/chat/completions", {"messages": SAID, "model": "smollm2", "max_tokens": 20, "response_format": wanted}
    )
    jsonschema.validate(json.loads(json.loads(answer)["choices"][0]["message"]["content"]), PLACE)
    options = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 4}
    stream = replay("/v1/chat/completions", {"messages": SAID, "model": "smollm2", **options})
    assert json.loads(stream.split(b"data: ")[-2])["usage"]["completion_tokens"] > 0


def test_litellm_as_ollama_sends_no_content_type(server: RealServer) -> None:
    replay = Replay(server, authorization="Bearer none", accept="*/*", user_agent="litellm/1.106.2")
    assert json.loads(replay("/api/show", {"name": "smollm2"}))["model_info"]
    said = [{**message, "images": []} for message in SAID]
    options = {"temperature": 0.2, "stop": ["x"], "num_predict": 4}
    *pieces, last = lines(
        replay("/api/chat", {"model": "smollm2", "messages": said, "options": options, "stream": True})
    )
    assert pieces
    assert last["done"]
    body = {"model": "smollm2", "messages": said, "options": {"num_predict": 20}, "stream": False, "format": PLACE}
    jsonschema.validate(json.loads(json.loads(replay("/api/chat", body))["message"]["content"]), PLACE)
    prompt = "### System:\nBe brief.\n\n### User:\nHow is the weather in Rome?\n\n"
    body = {"model": "smollm2", "prompt": prompt, "options": options, "stream": False, "images": []}
    assert json.loads(replay("/api/generate", body))["done"]


def test_litellm_as_anthropic(server: RealServer) -> None:
    replay = Replay(server, x_api_key="none", anthropic_version="2023-06-01", content_type="application/json")
    said = [{"role": "user", "content": [{"type": "text", "text": SAID[1]["content"]}]}]
    body = {"model": "smollm2", "messages": said, "system": [{"type": "text", "text": "Be brief."}], "max_tokens": 40}
    chosen = {"name": "json_tool_call", "type": "tool"}
    tools = [{"name": "json_tool_call", "input_schema": PLACE}]
    answer = json.loads(replay("/v1/messages", {**body, "tools": tools, "tool_choice": chosen}))
    (used,) = (block for block in answer["content"] if block["type"] == "tool_use")
    jsonschema.validate(used["input"], PLACE)
    assert b"event: message_stop" in replay("/v1/messages", {**body, "max_tokens": 4, "stream": True})


# ---- Open WebUI


def test_open_webui_over_ollama(server: RealServer) -> None:
    """It adds ":latest" to names without a tag, and then looks for them in the list; dates are read by Python."""
    replay = Replay(server, content_type="application/json", authorization="Bearer key")
    version = json.loads(replay("/api/version"))["version"]
    assert [part.isdecimal() for part in version.split(".")] == [True] * 3
    listed = {model["model"] for model in json.loads(replay("/api/tags"))["models"]}
    assert "smollm2:latest" in listed
    options = {
        "temperature": 0.8, "top_p": 0.9, "seed": 1, "mirostat": 0, "mirostat_eta": 0.1, "mirostat_tau": 5.0,
        "num_ctx": 2048, "num_batch": 512, "num_keep": 24, "repeat_last_n": 64, "tfs_z": 1, "top_k": 40, "min_p": 0.0,
        "use_mmap": True, "use_mlock": False, "num_thread": 8, "num_gpu": 99, "num_predict": 4, "repeat_penalty": 1.1,
    }  # fmt: skip
    body = {"model": "smollm2:latest", "messages": SAID, "options": options, "stream": True, "keep_alive": "5m"}
    assert lines(replay("/api/chat", body))[-1]["done"]
    (running,) = json.loads(replay("/api/ps"))["models"]
    assert running["name"] == "smollm2:latest"
    datetime.fromisoformat(running["expires_at"].replace("Z", "+00:00"))
    assert json.loads(
        replay("/api/generate", {"model": "smollm2:latest", "prompt": "", "keep_alive": 0, "stream": False})
    )


def test_open_webui_over_openai(server: RealServer) -> None:
    replay = Replay(server, content_type="application/json", authorization="Bearer ")
    assert "smollm2" in [model["id"] for model in json.loads(replay("/v1/models"))["data"]]
    body = {"stream": True, "model": "smollm2", "messages": SAID, "max_tokens": 4, "temperature": 0.8}
    stream = replay("/v1/chat/completions", {**body, "stream_options": {"include_usage": True}})
    assert stream.endswith(b"data: [DONE]\n\n")
    title = {"model": "smollm2", "messages": SAID, "stream": False, "max_completion_tokens": 4}
    assert json.loads(replay("/v1/chat/completions", title))["choices"][0]["message"]["content"]
