"""Anthropic's protocol as data: what Claude Code and others send, and what the official client reads of our bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic import Anthropic
from anthropic.types import Message as Theirs
from anthropic.types import RawMessageStreamEvent
from pydantic import TypeAdapter
from support import answers
from support.event_streams import calls, fed, named_events, replaying, streamed

from llmrun.errors import BadGrammarError, ContextOverflowError, EngineCrashedError, UsageError
from llmrun.grammar import Grammar
from llmrun.protocol.messages import Event, Failed, Message, Stats, Tool, ToolCall
from llmrun.protocol.params import Limits
from llmrun.server.answer import Envelope
from llmrun.server.protocols.anthropic import error_body, read, read_count, writer

HELLO: dict[str, Any] = {"model": "m", "max_tokens": 100, "messages": [{"role": "user", "content": "Hello"}]}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "weather", "description": "Tells it.", "input_schema": SCHEMA}
ENVELOPE = Envelope("msg_1", 1_700_000_000, "smollm2")
STATS = Stats(prompt_tokens=30, completion_tokens=7)
CALLS = calls("toolu_1", "toolu_2")


def stream_of(*parts: Event) -> bytes:
    return streamed(writer(HELLO, ENVELOPE), *parts)


def as_their_client_reads(data: bytes) -> Theirs:
    """The message that the official client puts together from a stream."""
    client = Anthropic(api_key="none", http_client=replaying(data))
    with client, client.messages.stream(**HELLO) as stream:
        return stream.get_final_message()


# ---- what is asked


def test_claude_code() -> None:
    asked = read(
        {
            "model": "m",
            "max_tokens": 32_000,
            "stream": True,
            "metadata": {"user_id": "u"},
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=1a2b;"},
                {"type": "text", "text": "You are a coder.", "cache_control": {"type": "ephemeral"}},
            ],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Weather?"}, {"type": "text", "text": "Rome."}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                        {"type": "text", "text": "Let me see."},
                        {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "Sun"}]},
                        {"type": "text", "text": "And?"},
                    ],
                },
            ],
            "tools": [TOOL, {"type": "web_search_20250305", "name": "web_search"}],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "stop_sequences": ["END"],
            "temperature": 1,
        }
    )
    request = asked.request
    assert request.messages == (
        Message("system", "You are a coder."),
        Message("user", "Weather?\nRome."),
        Message("assistant", "Let me see.", (ToolCall("toolu_1", "weather", '{"city": "Rome"}'),), reasoning="Hm."),
        Message("tool", "Sun", tool_call_id="toolu_1", name="weather"),
        Message("user", "And?"),
    )
    assert request.tools == (Tool("weather", "Tells it.", json.dumps(SCHEMA)),)
    assert (request.tool_choice, request.parallel_calls) == ("auto", False)
    assert (request.thinking, request.thinking_tokens) == (True, 1024)
    assert request.limits == Limits(32_000, ("END",))
    assert (asked.sampling, asked.stream) == ({"temperature": 1}, True)


def test_the_billing_header_is_the_same_in_no_two_requests_and_is_blanked() -> None:
    header = "x-anthropic-billing-header: cc_version=2.1.37.abc; cc_entrypoint=cli; cch={};"
    prompts = {
        read({**HELLO, "system": f"{header.format(code)}\nYou are a coder."}).request.messages[0].content
        for code in ("00000", "f3a1c")
    }
    assert prompts == {"You are a coder."}
    assert read({**HELLO, "system": header}).request.messages == (Message("user", "Hello"),)


def test_a_result_that_is_an_error_says_so() -> None:
    failed = {"type": "tool_result", "tool_use_id": "t", "content": "no such city", "is_error": True}
    asked = read({**HELLO, "messages": [{"role": "user", "content": [failed]}]})
    assert asked.request.messages == (Message("tool", "Error: no such city", tool_call_id="t"),)


@pytest.mark.parametrize(
    ("choice", "meant"),
    [
        ({"type": "any"}, "required"),
        ({"type": "tool", "name": "weather"}, "=weather"),
        ({"type": "none"}, "none"),
        (None, "auto"),
    ],
)
def test_tool_choice(choice: dict[str, Any] | None, meant: str) -> None:
    assert read({**HELLO, "tools": [TOOL], "tool_choice": choice}).request.tool_choice == meant


@pytest.mark.parametrize(
    ("config", "thinking"), [({"type": "disabled"}, False), ({"type": "adaptive"}, None), (None, None)]
)
def test_thinking(config: dict[str, Any] | None, thinking: bool | None) -> None:
    assert read({**HELLO, "thinking": config}).request.thinking is thinking


@pytest.mark.parametrize(
    "said",
    [
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        {"output_format": {"type": "json_schema", "schema": SCHEMA}},
    ],
)
def test_structured_output(said: dict[str, Any]) -> None:
    assert read({**HELLO, **said}).request.grammar == Grammar("json_schema", json.dumps(SCHEMA))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"text": "Hello"}]}]}, r"messages\[0\].content\[0\].type"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "source.data is missing"),
        ({"messages": [{"role": "user", "content": 5}]}, r"messages\[0\].content"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        ({"messages": [{"role": "assistant", "content": "Well,"}]}, "last message"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"system": 5}, "system"),
        ({"temperature": -1}, "temperature"),
        ({"tools": [{"input_schema": {}}]}, r"tools\[0\].name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "rain"}}, "rain"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "budget_tokens"),
    ],
)
def test_what_is_refused_is_named(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read({**HELLO, **wrong})


def test_a_strict_schema_that_cannot_be_enforced_is_refused_and_another_is_not() -> None:
    properties = {"a": {"type": "string", "pattern": "(?=a)b"}}
    tool = {"name": "any", "input_schema": {"type": "object", "properties": properties}}
    assert read({**HELLO, "tools": [tool]}).request.tools[0].name == "any"
    with pytest.raises(BadGrammarError, match="pattern"):
        read({**HELLO, "tools": [{**tool, "strict": True}]})


def test_tokens_are_counted_without_a_limit_and_behind_the_assistant() -> None:
    asked = read_count({"model": "m", "messages": [*HELLO["messages"], {"role": "assistant", "content": "Hi"}]})
    assert (asked.request.messages, asked.request.begins) == ((Message("user", "Hello"),), "Hi")


def test_a_compaction_stands_for_the_conversation_before_it() -> None:
    said = [
        {"role": "user", "content": "Long ago"},
        {"role": "assistant", "content": [
            {"type": "text", "text": "old"},
            {"type": "compaction", "content": "They greeted.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "new"},
        ]},
        {"role": "user", "content": "And now?"},
    ]  # fmt: skip
    asked = read({"model": "m", "max_tokens": 9, "system": "Be brief.", "messages": said})
    assert [(message.role, message.content) for message in asked.request.messages] == [
        ("system", "Be brief."),
        ("user", "Summary of the conversation so far:\nThey greeted."),
        ("assistant", "new"),
        ("user", "And now?"),
    ]
    assert asked.ignored == ()
    said[1]["content"][1]["content"] = None  # type: ignore[index]
    kept = read({"model": "m", "max_tokens": 9, "messages": said}).request.messages
    assert [message.content for message in kept] == ["Long ago", "old\nnew", "And now?"], "it failed"


def test_blocks_that_nobody_reads_are_named_by_their_type() -> None:
    blocks = [{"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}, {"type": "text", "text": "a"}]
    said = [*HELLO["messages"], {"role": "assistant", "content": blocks}, *HELLO["messages"]]
    body = {"model": "m", "max_tokens": 9, "messages": said, "context_management": {"edits": [{"type": "clear"}]}}
    assert read(body).ignored == ("context_management", "messages[1].content[0].type=server_tool_use")


def test_an_effort_needs_no_thinking_beside_it() -> None:
    body = {"model": "m", "max_tokens": 9, **HELLO, "output_config": {"effort": "low"}}
    assert read(body).request.reasoning_effort == "low"


# ---- what is answered


def test_a_stream_of_thoughts_and_text() -> None:
    data = stream_of(
        answers.started(30, 10),
        answers.reasoning("Hm."),
        answers.text("Hel"),
        answers.text("lo"),
        answers.finished("stop", STATS),
    )
    assert [event["type"] for event in named_events(data)] == [
        "ping", "message_start",
        "content_block_start", "content_block_delta", "content_block_delta", "content_block_stop",
        "content_block_start", "content_block_delta", "content_block_delta", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    message = as_their_client_reads(data)
    assert message.content[0].type == "thinking"
    assert message.content[0].signature, "clients send back no reasoning without a signature"
    assert [(block.type, getattr(block, "thinking", getattr(block, "text", None))) for block in message.content] == [
        ("thinking", "Hm."),
        ("text", "Hello"),
    ]
    assert (message.stop_reason, message.usage.output_tokens) == ("end_turn", 7)


def test_message_start_has_the_input_tokens() -> None:
    start = named_events(stream_of(answers.started(30, 10), answers.finished("stop", STATS)))[1]
    assert start["message"]["usage"]["input_tokens"] == 20
    assert start["message"]["usage"]["cache_read_input_tokens"] == 10


def test_every_event_is_one_of_theirs() -> None:
    known: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)
    for event in named_events(
        stream_of(answers.started(30, 0), answers.reasoning("Hm."), *CALLS, answers.finished("stop", STATS))
    )[1:]:
        known.validate_python(event)


def test_a_stream_of_calls() -> None:
    data = stream_of(answers.started(30, 10), answers.text("Let me see."), *CALLS, answers.finished("stop", STATS))
    message = as_their_client_reads(data)
    calls = [(block.id, block.name, block.input) for block in message.content if block.type == "tool_use"]
    assert calls == [("toolu_1", "weather", {"city": "Rome"}), ("toolu_2", "now", {})]
    assert message.stop_reason == "tool_use"


def test_a_whole_message() -> None:
    made = fed(
        writer(HELLO, ENVELOPE),
        answers.started(30, 10),
        answers.reasoning("Hm."),
        answers.text("Well."),
        *CALLS,
        answers.finished("stop", STATS),
    )
    message = Theirs.model_validate(made.whole())
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert (message.id, message.model, message.role, message.stop_reason) == (
        "msg_1",
        "smollm2",
        "assistant",
        "tool_use",
    )
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens, message.usage.output_tokens) == (
        20,
        10,
        7,
    )


@pytest.mark.parametrize(
    ("reason", "stop", "told"),
    [("stop", "", "end_turn"), ("length", "", "max_tokens"), ("stop", "END", "stop_sequence")],
)
def test_why_it_stopped(reason: str, stop: str, told: str) -> None:
    message = as_their_client_reads(
        stream_of(answers.started(3, 0), answers.text("a"), answers.finished(reason, STATS, stop))
    )
    assert (message.stop_reason, message.stop_sequence) == (told, stop or None)


def test_a_call_that_was_cut_off_is_left_out_of_a_whole_message() -> None:
    made = fed(writer(HELLO, ENVELOPE), answers.started(30, 0), *CALLS[:2], answers.finished("length", STATS))
    assert made.whole()["content"] == []


def test_errors() -> None:
    long = error_body(ContextOverflowError("the prompt has 9 tokens", why="8 fit"), 400)
    assert long["error"]["type"] == "invalid_request_error"
    assert long["error"]["message"].startswith("prompt is too long: the prompt has 9 tokens: 8 fit")
    sized = ContextOverflowError("too long", hint="shorten it", size=(30_005, 4096))
    failed = Failed.of(sized, 1).error()
    assert error_body(failed, 400)["error"]["message"] == "prompt is too long: 30005 tokens > 4096 maximum"
    assert error_body(EngineCrashedError("it died"), 500)["error"] == {
        "type": "api_error",
        "message": "it died",
        "code": "engine-crashed",
    }
    (event,) = named_events(writer(HELLO, ENVELOPE).error(EngineCrashedError("it died")))
    assert event["type"] == "error"
    assert error_body(UsageError("busy"), 503)["error"]["type"] == "overloaded_error"


def test_the_broken_input_of_an_earlier_call_is_text() -> None:
    block = {"type": "tool_use", "id": "c1", "name": "write", "input": '{"path": "a'}
    history = [HELLO["messages"][0], {"role": "assistant", "content": [block]}, HELLO["messages"][0]]
    (taken,) = read({**HELLO, "messages": history}).request.messages[1].tool_calls
    assert taken.arguments == json.dumps({"input": '{"path": "a'})
