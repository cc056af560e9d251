"""`llmrun serve` with the real SmolLM2, asked by OpenAI's own client."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import openai
import psutil
import pytest
from support.installed import SECONDS, engine_of, eventually, gone
from support.real_server import RealServer, environment


@pytest.fixture(scope="module")
def client(server: RealServer) -> openai.OpenAI:
    """OpenAI's own."""
    return openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", timeout=SECONDS, max_retries=0)


def question(text: str) -> list[openai.types.chat.ChatCompletionMessageParam]:
    """A conversation of one turn."""
    return [{"role": "user", "content": text}]


def test_an_answer_is_the_same_at_once_and_as_a_stream(client: openai.OpenAI) -> None:
    asked = {"model": "smollm2", "messages": question("Name a colour."), "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    stream = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert stream[0].choices[0].delta.role == "assistant"
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert stream[-1].usage == whole.usage or stream[-1].usage.total_tokens == whole.usage.total_tokens
    assert stream[-1].usage.prompt_tokens_details.cached_tokens > 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has scheduling policies of threads")
def test_all_threads_have_their_share_and_sending_interrupts_no_step(server: RealServer, client: openai.OpenAI) -> None:
    client.completions.create(model="smollm2", prompt="One, two,", max_tokens=1)
    (engine,) = psutil.Process(server.process.pid).children()
    own = psutil.Process().nice()
    assert [psutil.Process(server.process.pid).nice(), engine.nice()] == [own, own]
    assert os.sched_getscheduler(server.process.pid) == os.SCHED_BATCH
    assert {os.sched_getscheduler(thread.id) for thread in engine.threads()} == {os.SCHED_OTHER}


def test_what_can_not_be_asked_is_an_error_of_its_class(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="no-such-model", messages=question("Hi"))
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="smollm2", messages=question("Hi"), temperature=-1)
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model="smollm2", messages=question("word " * 20_000), stream=True)
    assert (missing.value.code, long.value.code) == ("model_not_found", "context_length_exceeded")


def test_an_engine_that_is_killed_ends_the_answer_and_another_one_takes_over(
    server: RealServer, client: openai.OpenAI
) -> None:
    stream = client.chat.completions.create(
        model="smollm2", messages=question("Tell a long story."), stream=True, extra_body={"logit_bias": {"2": -100}}
    )
    next(iter(stream))
    engine = engine_of(server.process.pid)
    engine.kill()
    with pytest.raises(openai.APIError, match="engine died"):
        for _ in stream:
            pass
    assert eventually(lambda: gone(engine), SECONDS)
    answer = client.chat.completions.create(model="smollm2", messages=question("Hi"), max_tokens=4)
    assert answer.usage.completion_tokens > 0


def test_ps_shows_it_and_stop_ends_it(command: str, pulled: None, tmp_path: Path) -> None:
    running = RealServer(command, tmp_path)
    process = psutil.Process(running.process.pid)
    listed = subprocess.run([command, "ps", "--json"], capture_output=True, env=environment(tmp_path), timeout=SECONDS)
    assert [(each["port"], each["pid"]) for each in json.loads(listed.stdout)] == [(running.port, process.pid)]
    again = subprocess.run(
        [command, "serve", "--port", str(running.port)], capture_output=True, env=environment(tmp_path), timeout=SECONDS
    )
    assert again.returncode == 2
    assert f"--port {running.port + 1}" in again.stderr.decode()
    stopped = subprocess.run([command, "stop"], capture_output=True, env=environment(tmp_path), timeout=SECONDS)
    assert stopped.returncode == 0
    assert running.process.wait(SECONDS) == 0
    after = subprocess.run([command, "ps", "--json"], capture_output=True, env=environment(tmp_path), timeout=SECONDS)
    assert json.loads(after.stdout) == []
