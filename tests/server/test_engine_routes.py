"""llama-server's routes, asked of a real engine: a stand-in answers what the real one may not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.gguf_writer import runnable_model, write
from support.served import CHAT, HI, LiveServer, parse, read_all

from llmrun.server.pool import RequestDefaults

pytestmark = pytest.mark.usefixtures("package_on_path")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    model = write(tmp_path / "real.gguf", runnable_model({"llama.context_length": 2048}))
    with LiveServer(tmp_path, ("real",), model=model, n_ctx=2048) as live:
        yield live


def test_a_text_becomes_tokens_and_a_text_again(server: LiveServer) -> None:
    tokens = server.post("/tokenize", {"content": "Hi, you"}).json
    assert tokens["count"] == len(tokens["tokens"]) > 0
    assert server.post("/detokenize", {"tokens": tokens["tokens"]}).json["content"].strip() == "Hi, you"


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
    defaults = RequestDefaults(source, "low")
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


def test_what_was_rewritten_is_logged_once(tmp_path: Path) -> None:
    model = write(tmp_path / "real.gguf", runnable_model({"llama.context_length": 2048}))
    refuses = "{% if messages[0].role != 'user' %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}"
    body = {"messages": [{"role": "assistant", "content": "a1"}, *HI["messages"]], "max_tokens": 1}
    with LiveServer(tmp_path, ("real",), model=model, n_ctx=2048, defaults=RequestDefaults(refuses)) as live:
        assert [live.post(CHAT, body).status for _ in range(2)] == [200, 200]
    assert [record.facts.get("rewritten") for record in live.served] == [("opening",), None]


def test_a_conversation_is_counted(server: LiveServer) -> None:
    assert server.post("/v1/messages/count_tokens", HI).json["input_tokens"] > 0
