"""A server from end to end, over fake engines: what a client gets, and what becomes of it when things go wrong."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest
from support.gguf_writer import runnable_model, write
from support.installed import eventually
from support.served import CHAT, HI, SECONDS, LiveServer, parse, read_all

from llmrun.model import Model
from llmrun.protocol.messages import Command
from llmrun.runner.launch import EngineHandle
from llmrun.runner.requests import Put
from llmrun.server import app, exchange
from llmrun.server.connection import EngineConnection
from llmrun.server.guard import Policy
from llmrun.server.listener import ChunkWriter
from llmrun.server.protocols.models import VERSION
from llmrun.server.registry import ServedDrafts
from llmrun.server.serving import run_in_event_loop, served_files

pytestmark = pytest.mark.usefixtures("package_on_path")
STREAM = {**HI, "stream": True}
Serve = Callable[..., LiveServer]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """serve(*modes, **options): a server over engines of these modes, ended afterwards."""
    with ExitStack() as stack:
        yield lambda *modes, **options: stack.enter_context(LiveServer(tmp_path, modes or ("normal",), **options))


def test_an_answer_at_once(serve: Serve) -> None:
    answer = serve().post(CHAT, {**HI, "model": ""}).json
    assert answer["object"] == "chat.completion"
    (choice,) = answer["choices"]
    assert (choice["message"]["role"], choice["message"]["content"]) == ("assistant", "Hello")
    assert choice["finish_reason"] == "stop"
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 2


def test_an_answer_as_a_stream(serve: Serve) -> None:
    answer = serve().post(CHAT, {**STREAM, "stream_options": {"include_usage": True}})
    assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream")
    *chunks, last = answer.events
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "Hel"}, {"content": "lo"}, {}]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert (last["choices"], last["usage"]["total_tokens"]) == ([], 5)
    assert answer.body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_names_the_settings_that_were_used(serve: Serve, stream: bool) -> None:
    server = serve(sampling={"temperature": 0.25})
    answer = server.post("/v1/responses", {"input": "Hi", "top_p": 0.5, "stream": stream})
    responses = [event["response"] for event in answer.events if "response" in event] if stream else [answer.json]
    assert responses
    assert {(each["temperature"], each["top_p"]) for each in responses} == {(0.25, 0.5)}


def test_several_answers_to_one_prompt(serve: Serve) -> None:
    answer = serve("together").post(CHAT, {**HI, "n": 2}).json
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["Hello", "Hello"]


ANSWERING = (CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/api/chat", "/api/generate", "/completion")
ASKED = {**HI, "prompt": "Hi", "max_tokens": 5, "stream": False}


@pytest.mark.parametrize("path", ANSWERING)
def test_a_mistake_in_the_engine_is_a_500_with_a_number_that_the_log_has(
    serve: Serve, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server, asked = serve("buggy"), {"input": "Hi"} if path == "/v1/responses" else ASKED
    for _ in range(3):  # it counts as no death of the engine, after two of which a prompt is refused
        failed = server.post(path, asked)
        assert failed.status == 500
        found = re.search(rb"internal error ([0-9a-f]{8})", failed.body)
        assert found is not None
        assert b"internal-error" in failed.body
        log = capsys.readouterr().err
        assert "KeyError: 'of ours'" in log
        assert f"internal error {found[1].decode()}" in log
        assert b"of ours" not in failed.body
    assert server.engines == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/models", CHAT])
def test_a_mistake_in_the_front_is_one_too(
    serve: Serve, path: str, stream: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> bytes:
        raise KeyError("of ours")

    server = serve()
    with monkeypatch.context() as patch:
        patch.setattr("llmrun.server.protocols.openai_chat.ChatWriter.feed", broken)
        patch.setattr("llmrun.server.model_routes.ModelRoutes._by_name", broken)
        answer = server.get(path) if path == "/v1/models" else server.post(path, {**HI, "stream": stream})
    assert answer.status == (200 if stream and path == CHAT else 500)
    found = re.search(rb"internal error ([0-9a-f]{8})", answer.body)
    assert found is not None
    log = capsys.readouterr().err
    assert f"internal error {found[1].decode()}" in log
    assert log.count("KeyError: 'of ours'") == 1
    assert server.post(CHAT, HI).status == 200


def test_drafts_are_as_the_client_says_or_else_the_server(serve: Serve) -> None:
    server = serve(speculate=7)
    answer = server.post(CHAT, HI).json
    details = {"accepted_prediction_tokens": 68, "rejected_prediction_tokens": 2}
    assert answer["usage"]["completion_tokens_details"] == details
    assert "completion_tokens_details" not in server.post(CHAT, {**HI, "speculate": "off"}).json["usage"]
    assert server.drafts == (ServedDrafts(server.model, "text", 0, 70, 68),)


def test_no_client_escapes_the_servers_watermark(serve: Serve) -> None:
    server = serve(sampling={"watermark": "green", "watermark_key": "secret"})
    assert server.post(CHAT, HI).status == 200
    refused = server.post(CHAT, {**HI, "watermark": "", "mirostat": 2})
    assert (refused.status, "mirostat and a watermark" in refused.json["error"]["message"]) == (400, True)


def test_text_completions(serve: Serve) -> None:
    server = serve()
    answer = server.post("/v1/completions", {"prompt": "Once", "echo": True}).json
    assert (answer["object"], answer["choices"][0]["text"]) == ("text_completion", "OnceHello")
    streamed = server.post("/v1/completions", {"prompt": "Once", "stream": True}).events
    assert "".join(event["choices"][0]["text"] for event in streamed) == "Hello"


def test_the_other_protocols_have_their_routes(serve: Serve) -> None:
    server = serve()
    message = server.post("/v1/messages", {**HI, "max_tokens": 9}).json
    assert message["content"] == [{"type": "text", "text": "Hello"}]
    assert server.post("/v1/messages/count_tokens", HI).json == {"input_tokens": 7}
    assert server.post("/v1/messages", {"messages": 1}).json["type"] == "error"
    assert server.post("/v1/responses", {"input": "Hi"}).json["status"] == "completed"


@pytest.mark.parametrize("body", [HI, STREAM])
def test_what_the_engine_refuses_is_a_real_error(serve: Serve, body: dict[str, Any]) -> None:
    refused = serve("failing").post(CHAT, body)
    assert (refused.status, refused.code) == (400, "context_length_exceeded")


def test_codex_hears_in_the_stream_that_its_prompt_is_too_long(serve: Serve) -> None:
    server = serve("failing")
    answer = server.post("/v1/responses", {"input": "Hi", "stream": True})
    assert answer.status == 200
    *_, last = answer.events
    assert (last["type"], last["response"]["error"]["code"]) == ("response.failed", "context_length_exceeded")
    assert server.post("/v1/responses", {"input": "Hi"}).status == 400


def test_a_field_that_is_wrong_is_named(serve: Serve) -> None:
    refused = serve().post(CHAT, {**HI, "temperature": "hot"})
    assert refused.status == 400
    assert "temperature" in refused.json["error"]["message"]


def test_a_model_that_can_not_be_loaded_is_an_error_to_who_asks(serve: Serve) -> None:
    refused = serve("refuse").post(CHAT)
    assert (refused.status, refused.code) == (422, "bad-model")


def slow_to_load(folder: Path, mode: str) -> tuple[LiveServer, threading.Event]:
    """Return a server whose engine starts once the event is set."""
    server, may_start = LiveServer(folder, (mode,)), threading.Event()
    start = server._start

    def late(model: Model) -> EngineHandle:
        assert may_start.wait(SECONDS)
        return start(model)

    server._start = late  # type: ignore[method-assign]
    return server, may_start


@pytest.mark.parametrize("mode", ["normal", "refuse"])
def test_health_is_loading_until_the_models_named_at_the_start_are_loaded(tmp_path: Path, mode: str) -> None:
    server, may_start = slow_to_load(tmp_path, mode)
    with server, ThreadPoolExecutor() as clients:
        assert server.get("/v1/health").status == 503
        loading = {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}
        assert server.get("/health").json == loading
        waiting = clients.submit(server.post, CHAT)
        assert server.get("/health").json == loading
        may_start.set()
        if mode == "normal":
            assert waiting.result().status == 200, "who asks meanwhile waits"
            assert server.get("/health").json == {"status": "ok"}
        else:
            assert waiting.result().status == 422
            assert eventually(lambda: server.get("/health").json != loading, SECONDS)
            health = server.get("/health")
            assert (health.status, health.json["error"]["message"]) == (503, "No model could be loaded: bad-model")


def test_a_health_check_waits_for_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some clients ask again at once."""
    monkeypatch.setattr(app, "_HEALTH_SECONDS", SECONDS)
    server, may_start = slow_to_load(tmp_path, "normal")
    with server, ThreadPoolExecutor() as clients:
        health = clients.submit(server.get, "/health")
        for _ in range(5):
            assert server.get("/v1/models").status == 200
        may_start.set()
        assert health.result().json == {"status": "ok"}


def test_health_of_a_server_without_models_is_ok_at_once(serve: Serve) -> None:
    assert serve(names=()).get("/health").json == {"status": "ok"}


def test_an_engine_that_dies_ends_a_stream_with_an_error(serve: Serve) -> None:
    server = serve("die:decode:SIGSEGV", "normal")
    *chunks, last = server.post(CHAT, STREAM).events
    assert chunks[-1]["choices"][0]["delta"] == {"content": "Hel"}
    assert last["error"]["code"] == "engine-crashed"
    assert eventually(lambda: bool(server.served), SECONDS)
    assert "SIGSEGV" in server.served[0].facts["error"]
    assert server.post(CHAT).json["choices"][0]["message"]["content"] == "Hello"
    assert server.engines == 2


def test_a_request_that_only_waited_goes_on_in_the_next_engine(serve: Serve) -> None:
    server = serve("die:render:SIGKILL", "normal")
    assert server.post(CHAT).status == 200
    assert server.engines == 2


def test_an_engine_that_dies_while_it_loads_is_told_at_once(serve: Serve) -> None:
    server = serve("die:load:SIGSEGV")
    assert server.post(CHAT).code == "engine-crashed"
    assert server.engines <= 2


def test_a_prompt_that_killed_two_engines_is_refused(serve: Serve) -> None:
    server = serve("die:prefill:SIGSEGV")
    assert [server.post(CHAT).code for _ in range(2)] == ["engine-crashed"] * 2
    refused = server.post(CHAT)
    assert (refused.status, refused.code, server.engines) == (422, "deadly-prompt", 2)
    other = {"messages": [{"role": "user", "content": "Something else"}]}
    assert server.post(CHAT, other).code == "engine-crashed"


def test_a_client_that_leaves_is_no_longer_answered(serve: Serve) -> None:
    """The engine says nothing more until it is cancelled; it then hears the next request."""
    server = serve("obedient")
    for _ in range(2):
        with server.connect() as connection:
            connection.sendall(server.request("POST", CHAT, json.dumps(STREAM).encode()))
            received = b""
            while b"Hel" not in received:
                received += connection.recv(65536)
    assert eventually(lambda: len(server.served) == 2, SECONDS)
    assert [served.facts["reason"] for served in server.served] == ["left", "left"]
    assert server.engines == 1


def test_more_requests_than_may_wait_are_sent_away(serve: Serve) -> None:
    server = serve("obedient", parallel=1, queue=0)
    with server.connect() as connection:
        connection.sendall(server.request("POST", CHAT, json.dumps(STREAM).encode()))
        assert connection.recv(65536)
        refused = server.post(CHAT)
        assert (refused.status, refused.code) == (503, "busy")
        assert int(refused.headers["retry-after"]) > 0
        assert server.get("/health").status == 200


def test_more_answers_than_may_ever_wait_are_a_mistake_of_the_request(serve: Serve) -> None:
    refused = serve("obedient", parallel=1, queue=2).post(CHAT, {**STREAM, "n": 4})
    assert refused.status == 400
    assert b"larger --queue" in refused.body


def test_a_silent_answer_is_filled_with_comments(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "KEEP_ALIVE_SECONDS", 0.01)
    server = serve("obedient")
    with server.connect() as connection:
        connection.sendall(server.request("POST", CHAT, json.dumps(STREAM).encode()))
        received = b""
        while received.count(b":\n\n") < 2:
            received += connection.recv(65536)
        assert received.startswith(b"HTTP/1.1 200")


def test_an_answer_that_takes_too_long_ends(
    serve: Serve, eventually: Callable[[Callable[[], bool], float], bool]
) -> None:
    server = serve("obedient", answer_seconds=0.1)
    assert server.post(CHAT).code == "timeout"
    assert server.post(CHAT, STREAM).status in {200, 504}
    assert eventually(lambda: server.engines == 1, 30.0)


def test_while_the_server_ends_only_running_answers_go_on(serve: Serve) -> None:
    server = serve("obedient", grace_seconds=SECONDS)
    with server.connect() as connection:
        connection.sendall(server.request("POST", CHAT, json.dumps(STREAM).encode()))
        assert connection.recv(65536)
        server.end()
        assert eventually(lambda: server.get("/health").status == 503, SECONDS)
        refused = server.post(CHAT)
        assert (refused.status, refused.code) == (503, "shutting-down")
    server.wait()  # nobody is answered any more


def test_what_is_not_answered_in_time_ends_with_an_error(serve: Serve) -> None:
    server = serve("obedient", grace_seconds=0.0)
    with server.connect() as connection:
        connection.sendall(server.request("POST", CHAT, json.dumps(STREAM).encode()))
        received = b""
        while b"Hel" not in received:
            received += connection.recv(65536)
        server.end()
        received += read_all(connection)
    assert b"shutting-down" in received
    assert received.endswith(b"0\r\n\r\n")


def test_models_are_listed_and_found(serve: Serve) -> None:
    server = serve()
    server.post(CHAT)  # the window is that of the loaded model from now on
    listed = server.get("/v1/models").json
    assert listed["object"] == "list"
    assert listed["data"][0]["id"] == server.model
    assert [each["name"] for each in listed["models"]] == [each["id"] for each in listed["data"]], "as llama-server"
    codex = server.get("/v1/models?client_version=0.169.0").json
    assert (codex["models"], codex["data"]) == ([], listed["data"]), "an entry would replace Codex's own prompt"
    assert server.get("/v1/models/nothing/like:that").code == "model_not_found"


def test_models_have_their_context_window(serve: Serve, tmp_path: Path) -> None:
    server = serve(aliases={"gpt-5": str(tmp_path / "tiny.gguf")})
    server.post(CHAT)
    n_ctx = server.get("/props").json["default_generation_settings"]["n_ctx"]
    for name in (server.model, "gpt-5"):
        entry = next(each for each in server.get("/v1/models").json["data"] if each["id"] == name)
        assert entry["context_length"] == entry["max_model_len"] == n_ctx
        assert entry.get("alias_of") == (None if name == server.model else server.model)
    page = server.get("/v1/models", anthropic_version="2023-06-01").json
    entry = page["data"][0]
    assert (page["has_more"], page["first_id"], entry["id"]) == (False, server.model, server.model)
    assert (entry["type"], entry["display_name"], entry["max_input_tokens"]) == ("model", server.model, n_ctx)
    assert (entry["created_at"][-1], entry["lifecycle"]) == ("Z", "active")
    missing = server.get("/v1/models/none", anthropic_version="2023-06-01").json
    assert (missing["type"], missing["error"]["type"]) == ("error", "not_found_error")


@pytest.mark.parametrize("path", ANSWERING)
def test_an_answer_has_the_name_of_its_request(serve: Serve, tmp_path: Path, path: str) -> None:
    server = serve(aliases={"gpt-5": str(tmp_path / "tiny.gguf")})
    body = {"input": "Hi"} if path == "/v1/responses" else ASKED
    for name in ("gpt-5", "gpt-5:latest", server.model):
        answer = server.post(path, {**body, "model": name})
        assert (answer.status, answer.json["model"]) == (200, name)
        assert answer.headers["x-llmrun-model"] == quote(server.model, safe="/:@+")
    assert server.post(path, {**body, "model": "gpt-6"}).status == 404
    assert server.served[0].facts["model"] == server.model


@pytest.mark.parametrize("path", ANSWERING)
def test_so_has_a_stream(serve: Serve, tmp_path: Path, path: str) -> None:
    server = serve(aliases={"gpt-5": str(tmp_path / "tiny.gguf")})
    body = {"input": "Hi"} if path == "/v1/responses" else ASKED
    answer = server.post(path, {**body, "stream": True, "model": "gpt-5"})
    assert answer.headers["x-llmrun-model"] == quote(server.model, safe="/:@+")
    names = set(re.findall(rb'"model": ?"([^"]*)"', answer.body))
    assert names == {b"gpt-5"}


def test_a_served_file_is_called_by_its_stem(serve: Serve) -> None:
    server = serve(aliases={"gpt-5": "tiny"})
    listed = [each["id"] for each in server.get("/v1/models").json["data"]]
    assert listed[:2] == ["tiny", "gpt-5"]
    assert "tiny:latest" in [each["name"] for each in server.get("/api/tags").json["models"]]
    for name in ("tiny", "tiny:latest", "gpt-5"):
        assert server.post("/api/show", {"model": name}).json["details"]["family"] == "llama"
    assert server.post(CHAT, {**HI, "model": "gpt-5"}).headers["x-llmrun-model"] == "tiny"
    assert [each["name"] for each in server.get("/api/ps").json["models"]] == ["tiny:latest"]
    assert server.served[-2].facts["model"] == "tiny"


def test_files_of_one_stem_are_told_apart(tmp_path: Path) -> None:
    paths = [str(tmp_path / folder / "big-00001-of-00001.gguf") for folder in "ab"]
    for path in map(Path, paths):
        path.parent.mkdir()
        write(path, runnable_model())
    found = served_files((*paths, "smollm2"))
    assert [*found] == ["big", paths[1]]
    assert found["big"] == (paths[0], Path(paths[0]))


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_ignored_is_named_in_a_header(serve: Serve, stream: bool) -> None:
    server = serve()
    tool = {"type": "function", "function": {"name": "f"}}
    strange = {"type": "web_search, x\r\ny: z" * 9}
    answer = server.post(CHAT, {**HI, "stream": stream, "tools": [tool, {"type": "web_search"}, strange]})
    first, second = answer.headers["x-llmrun-ignored"].split(", ")
    assert first == "tools[1].type=web_search"
    assert second.startswith("tools[2].type=web_search??x??y:?z")
    assert "x-llmrun-ignored" not in server.post(CHAT).headers
    messages = {**HI, "max_tokens": 5, "tools": [{"type": "bash_20250124", "name": "bash"}]}
    assert server.post("/v1/messages", messages).headers["x-llmrun-ignored"] == "tools[0].type=bash_20250124"
    items = {"input": "Hi", "background": True, "tools": [{"type": "web_search"}, {"type": "custom", "name": "c"}]}
    assert server.post("/v1/responses", items).headers["x-llmrun-ignored"] == "tools[0].type=web_search, background"
    options = {**HI, "options": {"num_ctx": 4096}}
    assert server.post("/api/chat", options).headers["x-llmrun-ignored"] == "options.num_ctx"
    unnamed = server.post(CHAT, {**HI, **{f"{number:08}": 1 for number in range(200)}, "": 1})  # cut in front of a name
    assert (unnamed.status, len(unnamed.headers["x-llmrun-ignored"])) == (200, 999)
    assert server.post(CHAT, {**HI, "a": 1, "": 1}).headers["x-llmrun-ignored"] == "a, ?"
    context = {"prompt": "Hi", "context": [1, 2], "stream": False}
    assert server.post("/api/generate", context).headers["x-llmrun-ignored"] == "context"


def test_any_model_is_the_first_one(serve: Serve) -> None:
    server = serve(any_model=True)
    for name in ("claude-opus-9", "../etc/passwd", server.model):
        for path in (CHAT, "/v1/messages"):
            answer = server.post(path, {**HI, "model": name, "max_tokens": 5})
            assert answer.json["model"] == name
            assert answer.headers["x-llmrun-model"] == quote(server.model, safe="/:@+")
        entry = server.get(f"/v1/models/{quote(name)}").json
        assert (entry["id"], entry.get("alias_of")) == (name, None if name == server.model else server.model)
    assert server.post(CHAT, {**HI, "model": "x" * 1000}).json["model"] == server.model
    assert [each["id"] for each in server.get("/v1/models").json["data"]].count("claude-opus-9") == 0


def test_metrics_have_vllms_names(serve: Serve) -> None:
    server = serve()
    server.post(CHAT)
    text = server.get("/metrics").body.decode()
    label = f'{{model_name="{server.model}"}}'
    assert f"vllm:num_requests_running{label} 0" in text
    assert f"vllm:generation_tokens_total{label} 2" in text
    assert f"vllm:time_to_first_token_seconds_count{label} 1" in text
    assert f"vllm:kv_cache_usage_perc{label} 0.25" in text
    assert f"vllm:prefix_cache_hits_total{label} 6" in text


def test_ollamas_routes(serve: Serve) -> None:
    server = serve()
    answer = server.post("/api/chat", HI)
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in answer.body.splitlines()]
    assert "".join(line["message"]["content"] for line in lines) == "Hello"
    assert (lines[-1]["done"], lines[-1]["eval_count"]) == (True, 2)
    assert server.post("/api/generate", {"prompt": "Hi", "stream": False}).json["response"] == "Hello"
    assert server.get("/api/version").json == VERSION
    (running,) = server.get("/api/ps").json["models"]
    assert (running["name"], running["context_length"]) == (f"{server.model}:latest", 256)
    assert server.post("/api/chat", {**HI, "model": running["name"], "stream": False}).status == 200
    assert server.engines == 1
    assert isinstance(server.get("/api/tags").json["models"], list)
    refused = server.post("/api/show", {"model": "nothing"})
    assert (refused.status, set(refused.json)) == (404, {"error", "code"})


def test_ollamas_clients_load_a_model_and_let_it_go(serve: Serve) -> None:
    server = serve()
    assert server.post("/api/generate", {"model": ""}).json["done"] is True
    assert server.get("/api/ps").json["models"]
    assert server.post("/api/generate", {"keep_alive": 0}).json["done"] is True
    assert eventually(lambda: not server.get("/api/ps").json["models"], SECONDS)
    assert server.post("/api/generate", {"prompt": "Hi", "stream": False}).json["response"] == "Hello"
    assert server.engines == 2


def test_llama_servers_routes(serve: Serve) -> None:
    server = serve()
    assert server.get("/props").json["default_generation_settings"]["n_ctx"] == 256
    assert server.get("/props").json["modalities"] == {"vision": False, "audio": False}
    assert server.get("/props?model=nothing").status == 404
    assert server.post("/tokenize", {"content": "Hi"}).json["tokens"] == [72, 105]
    assert server.post("/detokenize", {"tokens": [72, 105]}).json == {"content": "Hi"}
    for tokens in ("Hi", [-1], [0.5], [True], [2**31], [[1]]):
        assert server.post("/detokenize", {"tokens": tokens}).status == 400


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses", "/api/chat", "/tokenize", "/v1/embeddings"])
@pytest.mark.parametrize("name", ["", ":latest"])
def test_without_models_one_has_to_be_named(serve: Serve, path: str, name: str) -> None:
    refused = serve(names=()).post(path, {**HI, "max_tokens": 1, "input": "Hi", "content": "Hi", "model": name})
    assert refused.status == 400
    assert b"model is missing" in refused.body


def test_questions_to_an_engine_wait_like_answers_and_end_with_the_server(serve: Serve) -> None:
    server = serve("obedient", parallel=1, queue=0, grace_seconds=SECONDS)
    questions: list[tuple[str, Any]] = [
        ("/props", None), ("/tokenize", {"content": "Hi"}), ("/detokenize", {"tokens": [72]}),
        ("/v1/messages/count_tokens", HI),
    ]  # fmt: skip

    def answers() -> set[str]:
        return {str((server.get(path) if body is None else server.post(path, body)).json) for path, body in questions}

    with server.connect() as connection:
        connection.sendall(server.request("POST", CHAT, json.dumps(STREAM).encode()))
        assert connection.recv(65536)
        assert all("busy" in answer for answer in answers())
        server.end()
        assert eventually(lambda: server.get("/health").status == 503, SECONDS)
        assert all("shutting-down" in answer for answer in answers())


def test_the_log_knows_what_was_asked_and_no_secret(serve: Serve) -> None:
    server = serve(policy=Policy(keys=(b"secret key",)))
    server.post(CHAT, authorization="Bearer secret key")
    server.post(CHAT + "?key=hidden", authorization="Bearer wrong key")
    assert eventually(lambda: len(server.served) == 2, SECONDS)
    first, second = server.served
    assert (first.method, first.path, first.status) == ("POST", CHAT, 200)
    assert (first.facts["prompt_tokens"], first.facts["completion_tokens"], first.facts["reason"]) == (3, 2, "stop")
    assert (second.path, second.status) == (CHAT, 401)
    assert "key" not in repr(server.served).replace(server.model, "")


def test_text_of_a_running_stream_is_written_without_waking_its_task(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks: list[bytes] = []
    write = ChunkWriter.write
    monkeypatch.setattr(ChunkWriter, "write", lambda self, data: (chunks.append(data), write(self, data)))
    server = serve("held")
    with server.connect() as connection:
        connection.sendall(server.request("POST", CHAT, json.dumps(STREAM).encode()))
        received = b""
        while b"Hel" not in received:
            received += connection.recv(65536)
        server.get("/metrics")  # the engine goes on
        received += read_all(connection)
    chunk = chunks[-1]
    assert json.loads(chunk.removeprefix(b"data: "))["choices"][0]["delta"] == {"content": "lo"}
    answer = parse(received)
    texts = [event["choices"][0]["delta"].get("content", "") for event in answer.events]
    assert ("".join(texts), answer.body.endswith(b"data: [DONE]\n\n")) == ("Hello", True)


def test_a_client_that_does_not_read_stalls_no_other_and_gets_all_in_the_end(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten megabytes each: more than the sockets hold. A file holds them meanwhile, not the memory."""
    waiting = list[exchange._Backlog]()
    n_queued = list[int]()

    class Backlog(exchange._Backlog):
        def __init__(self) -> None:
            super().__init__()
            waiting.append(self)

    class Queue(asyncio.Queue[Any]):
        def put_nowait(self, item: Any) -> None:
            super().put_nowait(item)
            n_queued.append(self.qsize())

    monkeypatch.setattr(exchange, "_Backlog", Backlog)
    monkeypatch.setattr(exchange.asyncio, "Queue", Queue)
    server = serve("flood_together")
    with socket.socket() as slow, server.connect() as fast:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        slow.connect(("127.0.0.1", server.port))
        for connection in (slow, fast):
            connection.sendall(server.request("POST", CHAT, json.dumps(STREAM).encode()))
        for connection in (fast, slow):
            texts = [event["choices"][0]["delta"].get("content", "") for event in parse(read_all(connection)).events]
            assert "".join(texts) == "".join(f"{number:032768}" for number in range(300))
            if connection is fast:
                assert any(each._file._rolled for each in waiting)  # type: ignore[attr-defined]
    assert max(n_queued) < 20
    assert eventually(lambda: all(each._file.closed for each in waiting), SECONDS)


def test_two_streams_on_one_connection_have_whole_chunks(serve: Serve) -> None:
    server = serve("normal")
    request = server.request("POST", CHAT, json.dumps(STREAM).encode(), connection="")
    with server.connect() as connection:
        for _ in range(2):
            connection.sendall(request)
            received = b""
            while not received.endswith(b"0\r\n\r\n"):
                received += connection.recv(65536)
            texts = [event["choices"][0]["delta"].get("content", "") for event in parse(received).events]
            assert "".join(texts) == "Hello"


def test_requests_that_arrive_together_are_sent_together(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one arrives while the first one is read."""
    server = serve("normal")
    assert server.post(CHAT).status == 200
    order: list[str] = []
    is_reading, has_arrived = threading.Event(), threading.Event()
    read, send = exchange.HttpExchange._parse, EngineConnection.send

    def reading(self: exchange.HttpExchange, data: bytes) -> Any:
        order.append("read")
        is_reading.set()
        assert has_arrived.wait(SECONDS)
        return read(self, data)

    def sending(self: EngineConnection, command: Command, put: Put) -> None:
        order.append("sent")
        send(self, command, put)

    monkeypatch.setattr(exchange.HttpExchange, "_parse", reading)
    monkeypatch.setattr(EngineConnection, "send", sending)
    data = server.request("POST", CHAT, json.dumps(HI).encode())
    with server.connect() as first, server.connect() as second:
        first.sendall(data)
        assert is_reading.wait(SECONDS)
        second.sendall(data)
        has_arrived.set()
        assert [parse(read_all(connection)).status for connection in (first, second)] == [200, 200]
    assert order == ["read", "read", "sent", "sent"]


def test_uvloop_runs_the_server_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    loops: list[str] = []

    async def main() -> None:
        loops.append(type(asyncio.get_running_loop()).__module__.partition(".")[0])

    def run(coroutine: Coroutine[Any, Any, None]) -> None:
        loops.append("uvloop")
        coroutine.close()

    monkeypatch.setitem(sys.modules, "uvloop", SimpleNamespace(run=run))
    run_in_event_loop(main())
    monkeypatch.setitem(sys.modules, "uvloop", None)
    run_in_event_loop(main())
    assert loops == ["uvloop", "asyncio"]


def test_a_response_without_chunks_is_sent_by_its_task(serve: Serve) -> None:
    server = serve("normal")
    request = server.request("POST", CHAT, json.dumps(STREAM).encode()).replace(b"HTTP/1.1", b"HTTP/1.0", 1)
    answer = server.raw(request)
    assert b"transfer-encoding" not in answer.lower()
    assert b'"Hel"' in answer
    assert answer.endswith(b"data: [DONE]\n\n")
