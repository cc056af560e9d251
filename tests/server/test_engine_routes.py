"""llama-server's routes, asked of a real engine: a stand-in answers what the real one may not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.gguf_writer import runnable_model, write
from support.installed import eventually
from support.served import CHAT, HI, SECONDS, LiveServer, parse, read_all

from llmrun.protocol.layers import FLAG, layer
from llmrun.server import exchange
from llmrun.server.pool import Defaults

pytestmark = pytest.mark.usefixtures("package_on_path")


def of_options(**values: Any) -> Defaults:
    """Defaults of the server's options."""
    return lambda model: layer(FLAG, values)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    model = write(tmp_path / "real.gguf", runnable_model({"llama.context_length": 2048}))
    with LiveServer(tmp_path, ("real",), model=model, n_ctx=2048) as live:
        yield live


def test_a_text_becomes_tokens_and_a_text_again(server: LiveServer) -> None:
    tokens = server.post("/tokenize", {"content": "Hi, you"}).json
    assert tokens["count"] == len(tokens["tokens"]) > 0
    assert server.post("/detokenize", {"tokens": tokens["tokens"]}).json["content"] == "Hi, you"


def test_tokens_are_read_beside_an_answer(server: LiveServer) -> None:
    """An engine that dies of the question takes the answer with it."""
    asked = {**HI, "stream": True, "max_tokens": 500, "ignore_eos": True}
    with server.connect() as connection:
        connection.sendall(server.request("POST", CHAT, json.dumps(asked).encode()))
        assert connection.recv(1)
        assert server.post("/detokenize", {"tokens": [5]}).status == 200
        refused = server.post("/detokenize", {"tokens": [2**31 - 1]})
        assert (refused.status, "no token" in refused.json["error"]["message"]) == (400, True)
        assert server.post("/tokenize", {"content": "Hi"}).status == 200
        answer = parse(b"H" + read_all(connection))
    assert answer.events[-1]["choices"][0]["finish_reason"] == "length"
    assert server.engines == 1


@pytest.mark.parametrize("path", ["/props", "/lora-adapters"])
def test_what_is_looked_up(server: LiveServer, path: str) -> None:
    assert server.get(path).status == 200


def test_requests_get_the_servers_template_and_effort(tmp_path: Path) -> None:
    model = write(tmp_path / "real.gguf", runnable_model({"llama.context_length": 2048}))
    source = "{% for m in messages %}{{ m.content }}{% endfor %}{{ reasoning_effort * 100 }}{# reasoning_effort #}"
    defaults = of_options(template=source, reasoning_effort="low")
    adaptive = {"thinking": {"type": "adaptive"}}
    levels = [{"output_config": {"effort": each}} for each in ("high", "medium")]
    with LiveServer(tmp_path, ("real",), model=model, n_ctx=2048, defaults=defaults) as live:
        low, high, medium = (
            live.post("/v1/messages/count_tokens", {**HI, **effort}).json["input_tokens"]
            for effort in ({}, {**adaptive, **levels[0]}, {**adaptive, **levels[1]})
        )
        asked = {**HI, "max_tokens": 1}
        assert live.post(CHAT, asked).json["usage"]["prompt_tokens"] == low
    assert low < high < medium, "letters"


def test_earlier_reasoning_stays_unless_a_request_or_the_server_says_otherwise(tmp_path: Path) -> None:
    model = write(tmp_path / "real.gguf", runnable_model({"llama.context_length": 2048}))
    source = (
        "{% for m in messages %}{{ m.content }}"
        "{% if m.reasoning_content and preserve_thinking %}{{ m.reasoning_content }}{% endif %}{% endfor %}"
    )
    talk = [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "So.", "reasoning_content": "Well, " * 20},
        {"role": "user", "content": "How?"},
    ]
    asked = {"messages": talk, "max_tokens": 1}
    requests = (
        {}, {"keep_reasoning": True}, {"keep_reasoning": False},
        {"chat_template_kwargs": {"preserve_reasoning": False}}, {"chat_template_kwargs": {"preserve_thinking": False}},
    )  # fmt: skip
    sizes = []
    for defaults in (of_options(template=source), of_options(template=source, keep_reasoning=False)):
        with LiveServer(tmp_path, ("real",), model=model, n_ctx=2048, defaults=defaults) as live:
            answers = [live.post(CHAT, {**asked, **fields}).json for fields in requests]
            sizes.append([answer["usage"]["prompt_tokens"] for answer in answers])
    dropped, kept = min(sizes[0]), max(sizes[0])
    assert kept > dropped + 20
    assert sizes == [[kept, kept, dropped, dropped, dropped], [dropped, kept, dropped, dropped, dropped]]


def test_a_list_of_prompts_is_answered_in_order(server: LiveServer) -> None:
    tokens = server.post("/tokenize", {"content": "Once"}).json["tokens"]
    body = {"temperature": 0, "max_tokens": 3, "ignore_eos": True, "logprobs": 0}
    alone, other = (server.post("/v1/completions", {**body, "prompt": text}).json for text in ("Once", "Hi"))
    both = server.post("/v1/completions", {**body, "prompt": ["Once", "Hi"], "n": 2}).json
    texts = [each["choices"][0]["text"] for each in (alone, alone, other, other)]
    assert [choice["text"] for choice in both["choices"]] == texts
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    assert both["usage"]["prompt_tokens"] == sum(each["usage"]["prompt_tokens"] for each in (alone, other))
    begins = alone["usage"]["prompt_tokens"] - len(tokens)  # one, the beginning of a sequence
    ids = server.post("/v1/completions", {**body, "prompt": [1] * begins + tokens}).json
    assert ids["choices"][0]["text"] == texts[0]
    assert len(ids["choices"][0]["logprobs"]["text_offset"]) == 3


def test_the_time_to_the_first_token_is_one_figure_everywhere(server: LiveServer) -> None:
    """From the request, with its template, tokens, grammar and queue: in the answer, in the log and in /metrics."""

    def total() -> float:
        lines = server.get("/metrics").body.decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:time_to_first_token_seconds_sum"))

    before = total()
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    found = server.post("/completion", {"prompt": "Once", "n_predict": 8, "json_schema": schema}).json
    assert eventually(lambda: server.served[-1].path == "/completion", SECONDS)
    facts = server.served[-1].facts
    assert facts["ttft_seconds"] == pytest.approx(found["timings"]["ttft_ms"] / 1000, abs=1e-3)
    assert total() - before == pytest.approx(facts["ttft_seconds"], abs=1e-3)
    assert list(facts["ttft_parts"]) == ["template", "tokenize", "grammar", "queue", "prefill"]
    assert facts["ttft_parts"]["grammar"] > 0
    assert sum(facts["ttft_parts"].values()) <= facts["ttft_seconds"] + 1e-3


def test_llama_servers_own_completion_and_slots(server: LiveServer) -> None:
    body = {"prompt": "Once", "temperature": 0, "n_predict": 3, "ignore_eos": True}
    whole = server.post("/completion", body).json
    streamed = server.post("/completions", {**body, "stream": True}).events
    assert "".join(each["content"] for each in streamed) == whole["content"]
    assert [each["stop"] for each in streamed[-2:]] == [False, True]
    assert (whole["tokens_predicted"], whole["stop_type"]) == (3, "limit")
    assert 0 < whole["timings"]["prompt_ms"] < whole["timings"]["ttft_ms"]
    refused = server.post("/infill", {"input_prefix": "def f(", "input_suffix": ")"})
    assert (refused.status, "fill in the middle" in refused.json["error"]["message"]) == (400, True)
    slots = server.get("/slots").json
    assert [each["id"] for each in slots] == [0, 1]
    assert not any(each["is_processing"] for each in slots)


def test_what_was_rewritten_is_logged_once(tmp_path: Path) -> None:
    model = write(tmp_path / "real.gguf", runnable_model({"llama.context_length": 2048}))
    refuses = "{% if messages[0].role != 'user' %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}"
    body = {"messages": [{"role": "assistant", "content": "a1"}, *HI["messages"]], "max_tokens": 1}
    with LiveServer(tmp_path, ("real",), model=model, n_ctx=2048, defaults=of_options(template=refuses)) as live:
        assert [live.post(CHAT, body).status for _ in range(2)] == [200, 200]
    assert [record.facts.get("rewritten") for record in live.served] == [("opening",), None]


def test_a_conversation_is_counted(server: LiveServer) -> None:
    assert server.post("/v1/messages/count_tokens", HI).json["input_tokens"] > 0


def test_a_chat_template_is_applied(server: LiveServer) -> None:
    said = [{"role": "user", "content": "Hi"}]
    prompt = server.post("/apply-template", {"messages": said}).json["prompt"]
    assert "Hi" in prompt
    given = {"messages": [*said, {"role": "assistant", "content": "Yes, "}]}
    assert server.post("/apply-template", given).json == {"prompt": f"{prompt}Yes, "}, "it is continued"
    counts = [server.post("/chat/completions/input_tokens", body).json for body in ({"messages": said}, given)]
    assert server.post("/v1/chat/completions/input_tokens", given).json == counts[1]
    assert counts[0]["object"] == "response.input_tokens"
    assert counts[1]["input_tokens"] > counts[0]["input_tokens"]


def test_the_tokens_of_a_prompt_have_log_probabilities(server: LiveServer) -> None:
    """Each place says what a completion of the tokens before it says; evaluation harnesses read nothing else."""
    text = "Once upon a time"
    tokens = server.post("/tokenize", {"content": text}).json["tokens"]
    body = {"prompt": tokens, "echo": True, "logprobs": 2, "max_tokens": 1, "temperature": 0}
    (choice,) = server.post("/v1/completions", body).json["choices"]
    found = choice["logprobs"]
    assert [len(values) for values in found.values()] == [len(tokens) + 1] * 4, "and one token of the answer"
    assert (found["token_logprobs"][0], found["top_logprobs"][0], found["text_offset"][0]) == (None, None, 0)
    assert choice["text"].strip().startswith(text)
    for place in range(1, len(tokens)):
        given = {"prompt": tokens[:place], "logprobs": 2, "max_tokens": 1, "temperature": 0}
        (expected,) = server.post("/v1/completions", given).json["choices"][0]["logprobs"]["top_logprobs"]
        best = max(expected.values())
        assert max(found["top_logprobs"][place].values()) == pytest.approx(best, abs=1e-3)
        assert found["token_logprobs"][place] <= best + 1e-3


def test_prompts_with_log_probabilities_are_streamed_and_answered_in_order(server: LiveServer) -> None:
    body = {"prompt": ["Once", "Hello"], "echo": True, "logprobs": 1, "max_tokens": 2, "ignore_eos": True}
    whole = server.post("/v1/completions", {**body, "temperature": 0}).json["choices"]
    assert [choice["text"].startswith(prompt) for choice, prompt in zip(whole, body["prompt"], strict=True)] == [
        True
    ] * 2
    events = server.post("/v1/completions", {**body, "temperature": 0, "stream": True}).events
    for index, choice in enumerate(whole):
        chunks = [each for event in events for each in event["choices"] if each["index"] == index]
        assert "".join(each["text"] for each in chunks) == choice["text"]
        joined = [token for each in chunks if each["logprobs"] for token in each["logprobs"]["tokens"]]
        assert joined == choice["logprobs"]["tokens"]
        assert choice["logprobs"]["text_offset"] == sorted(choice["logprobs"]["text_offset"])


def test_a_prompt_that_can_not_be_scored_is_refused(server: LiveServer) -> None:
    body = {"echo": True, "logprobs": 1, "max_tokens": 1}
    assert server.post("/v1/completions", {**body, "prompt": [2**31 - 1]}).status == 400
    assert server.post("/v1/completions", {**body, "prompt": [1] * 5000}).code == "context_length_exceeded"
    assert server.post("/v1/completions", {**body, "prompt": "a", "suffix": "b"}).status == 400


@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_enforced_of_a_tool_is_named_in_a_header(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """One pattern that no grammar expresses does not refuse a request, in any protocol."""
    monkeypatch.setattr(exchange, "KEEP_ALIVE_SECONDS", SECONDS)  # whose headers would go out before it is known
    city = {"type": "string", "pattern": "(?<=a)b"}
    schema = {"type": "object", "properties": {"city": city, "days": {"type": "integer"}}, "required": ["city"]}
    tool = {"type": "function", "name": "get_weather", "parameters": schema}
    nested = {"tools": [{"type": "function", "function": {"name": "get_weather", "parameters": schema}}]}
    limited = {**HI, "stream": stream, "max_tokens": 2}
    bodies: dict[str, Any] = {
        CHAT: {**limited, **nested},
        "/v1/messages": {**limited, "tools": [{"name": "get_weather", "input_schema": schema}]},
        "/v1/responses": {"input": "Hi", "stream": stream, "max_output_tokens": 2, "tools": [tool]},
        "/api/chat": {**HI, **nested, "stream": stream, "options": {"num_predict": 2}},
    }
    for route, body in bodies.items():
        answer = server.post(route, body)
        assert answer.status == 200
        named = answer.headers["x-llmrun-ignored"]
        assert named == "tools.get_weather.parameters.properties.city.pattern"
    assert server.served[-1].facts["ignored"] == ("tools.get_weather.parameters.properties.city.pattern",)


def test_an_answer_that_is_cut_short_is_whole_json(server: LiveServer) -> None:
    schema = {"type": "array", "items": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {**schema, "minItems": 1}}}
    for limit in (30, 60, 90):
        body = {**HI, "max_tokens": limit, "temperature": 1, "seed": limit, "response_format": form}
        choice = server.post(CHAT, body).json["choices"][0]
        assert json.loads(choice["message"]["content"])[0].keys() == {"a"}
