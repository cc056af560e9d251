"""The installed `llmrun run` and `llmrun chat` with --at, answered by `llmrun serve` with the real SmolLM2."""

from __future__ import annotations

import json

from support.installed import Installed
from support.real_server import RealServer

QUESTION = "Why is the sky blue?"
LIMITS = ("--temp", "0", "--max-tokens", "24")


def test_the_server_gets_the_prompt_that_the_model_gets_here(llmrun: Installed, server: RealServer) -> None:
    far = llmrun.run("run", "--at", server.address, "smollm2", QUESTION, *LIMITS, "--json")
    here = llmrun.run("run", "smollm2", QUESTION, *LIMITS, "--json")
    assert (far.returncode, here.returncode) == (0, 0), far.stderr + here.stderr
    events, own = ([json.loads(line) for line in done.stdout.splitlines()] for done in (far, here))
    for found in (events, own):  # what follows the surest token is a matter of rounding
        assert next(each["text"] for each in found if each["event"] == "TextDelta") == "The"
    stats = events[-1]["stats"]
    assert stats["prompt_tokens"] == own[-1]["stats"]["prompt_tokens"]
    assert stats["context_used"] == stats["prompt_tokens"] + stats["completion_tokens"]
    assert stats["over_network"]


def test_a_chat_goes_on_at_the_server(llmrun: Installed, server: RealServer) -> None:
    chat = ("chat", "--at", server.address, "--session", "far", *LIMITS)
    first = llmrun.run(*chat, stdin="My name is Ada.\n")
    assert (first.returncode, first.stderr) == (0, b"")
    second = llmrun.run(*chat, "--stats", stdin="What is my name?\n")
    assert second.returncode == 0, second.stderr
    assert first.stdout.strip()
    assert second.stdout.strip()
    assert b"reused" in second.stderr, "the server has the first turn in its KV cache"
    shown = llmrun.run("sessions", "show", "far").stdout.decode()
    assert "My name is Ada." in shown
    assert "What is my name?" in shown


def test_a_chat_on_a_terminal_knows_the_servers_window(llmrun: Installed, server: RealServer) -> None:
    chat = llmrun.terminal("chat", "--at", server.address, "--private", *LIMITS)
    chat.wait(chat.at_prompt)
    assert any(f"smollm2 at {server.address}/v1: context window 8,192 tokens" in line for line in chat.lines)
    answer = chat.ask(QUESTION)
    assert any("tokens/s · TTFT" in line and "/8,192" in line for line in answer)
    assert chat.ask("/retry")[0]
    chat.type("/bye")
    assert chat.end() == 0


def test_a_schema_and_a_sampler_of_ours_reach_the_server(llmrun: Installed, server: RealServer) -> None:
    schema = '{"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}'
    done = llmrun.run(
        "run", "--at", server.address, "default", "Name a city.", "--json-schema", schema, "--top-n-sigma", "1"
    )
    assert (done.returncode, json.loads(done.stdout)) == (0, {"city": "Rome"}), done.stderr
