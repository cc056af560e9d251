"""OpenAI's Responses as data: what Codex and the official client send, and what the client reads of our bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from support import answers
from support.event_streams import calls, fed, named_events, replaying, streamed

from llmrun.errors import BadGrammarError, ContextOverflowError, UsageError
from llmrun.grammar import Grammar
from llmrun.protocol.messages import AnswerRequest, Event, Message, Stats, TokenLogprob, Tool, ToolCall
from llmrun.protocol.params import Limits, SamplingParams
from llmrun.server.answer import Envelope
from llmrun.server.protocols.openai_responses import CompactionWriter, read, read_compaction, writer

HELLO: dict[str, Any] = {"model": "m", "input": "Hello"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "name": "weather", "description": "Tells it.", "parameters": SCHEMA, "strict": False}
ENVELOPE = Envelope("resp_1", 1_700_000_000, "smollm2")
STATS = Stats(prompt_tokens=30, completion_tokens=7)
CALLS = calls("call_1", "call_2")


def test_a_last_message_of_the_assistant_is_continued() -> None:
    said = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi th"}]
    request = read({**HELLO, "input": said}).request
    hello = Message("user", "Hello")
    assert (request.messages, request.begins, request.may_begin_anew) == ((hello,), "Hi th", True)


def stream_of(*parts: Event) -> bytes:
    return streamed(writer(HELLO, ENVELOPE), *parts)


def as_their_client_reads(data: bytes) -> Response:
    """The response that the official client puts together from a stream."""
    client = OpenAI(api_key="none", http_client=replaying(data))
    with client, client.responses.stream(**HELLO) as stream:
        return stream.get_final_response()


# ---- what is asked


def test_codex() -> None:
    asked = read(
        {
            "model": "m",
            "instructions": "You are a coder.",
            "input": [
                {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandbox: off"}]},
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
                {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
                {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city":"Rome"}'},
                {"type": "custom_tool_call", "call_id": "call_2", "name": "apply_patch", "input": "*** Begin"},
                {"type": "function_call_output", "call_id": "call_1", "output": "Sun"},
                {"type": "custom_tool_call_output", "call_id": "call_2", "output": "Done"},
            ],
            "tools": [TOOL, {"type": "local_shell"}, {"type": "web_search"}, {"type": "custom", "name": "apply_patch"}],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "store": False,
            "stream": True,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "c",
            "previous_response_id": None,
        }
    )
    calls = (
        ToolCall("call_1", "weather", '{"city": "Rome"}'),
        ToolCall("call_2", "apply_patch", '{"input": "*** Begin"}'),
    )
    assert asked.request.messages == (
        Message("system", "You are a coder.\n\nSandbox: off"),
        Message("user", "Weather?"),
        Message("assistant", "Let me see.", calls),
        Message("tool", "Sun", tool_call_id="call_1", name="weather"),
        Message("tool", "Done", tool_call_id="call_2", name="apply_patch"),
    )
    assert asked.request.tools[0] == Tool("weather", "Tells it.", json.dumps(SCHEMA))
    assert [each.name for each in asked.request.tools] == ["weather", "apply_patch"]
    assert (asked.request.parallel_calls, asked.request.thinking, asked.stream) == (False, None, True)


def test_a_string_is_a_question() -> None:
    asked = read({**HELLO, "max_output_tokens": 9, "temperature": 0.5, "reasoning": {"effort": "none"}})
    assert asked.request.messages == (Message("user", "Hello"),)
    assert (asked.request.limits, asked.sampling, asked.stream) == (Limits(9), {"temperature": 0.5}, False)
    assert asked.request.thinks is False


def test_reasoning_belongs_to_what_follows_it() -> None:
    def thought(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}

    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"}
    items = [
        {"role": "user", "content": "Weather?"}, thought("One."), {"role": "assistant", "content": "Let me see."}, call,
        {"type": "function_call_output", "call_id": "c1", "output": "Sun"}, thought("Two."),
        call | {"call_id": "c2"}, {"type": "function_call_output", "call_id": "c2", "output": "Rain"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "In short."}], "encrypted_content": "x"},
        {"role": "assistant", "content": "Mixed."}, thought("Interrupted."), {"role": "user", "content": "So?"},
    ]  # fmt: skip
    messages = read({"model": "m", "input": items}).request.messages
    assert [(each.role, each.reasoning, each.content) for each in messages] == [
        ("user", "", "Weather?"), ("assistant", "One.", "Let me see."), ("tool", "", "Sun"), ("assistant", "Two.", ""),
        ("tool", "", "Rain"), ("assistant", "In short.", "Mixed."), ("user", "", "So?"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("choice", "meant", "names"),
    [
        ("required", "required", ["weather", "now"]),
        ({"type": "function", "name": "now"}, "=now", ["weather", "now"]),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]},
            "required",
            ["now"],
        ),
        ({"type": "web_search"}, "auto", ["weather", "now"]),
    ],
)
def test_tool_choice(choice: object, meant: str, names: list[str]) -> None:
    request = read({**HELLO, "tools": [TOOL, {"type": "function", "name": "now"}], "tool_choice": choice}).request
    assert (request.tool_choice, [tool.name for tool in request.tools]) == (meant, names)


def test_structured_output() -> None:
    wanted = {"type": "json_schema", "name": "place", "schema": SCHEMA}
    assert read({**HELLO, "text": {"format": wanted}}).request.grammar == Grammar("json_schema", json.dumps(SCHEMA))
    assert read({**HELLO, "text": {"format": {"type": "json_object"}}}).request.grammar is not None
    assert read({**HELLO, "text": {"format": {"type": "text"}, "verbosity": "low"}}).request.grammar is None


def test_logprobs_are_asked_for_in_two_ways() -> None:
    assert read({**HELLO, "top_logprobs": 3}).request.logprobs == 3
    assert read({**HELLO, "include": ["message.output_text.logprobs"]}).request.logprobs == 0
    assert read({**HELLO, "top_logprobs": 0}).request.logprobs is None


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "image_url.*data: URL"),
        ({"input": [{"role": "user", "content": 5}]}, r"input\[0\].content"),
        ({"input": [{"content": "Hello"}]}, r"input\[0\].role"),
        ({"input": [{"type": "function_call", "name": "a", "arguments": "{}"}]}, r"input\[0\].call_id"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "a", "arguments": 5}]}, "arguments"),
        ({"conversation": "conv_0"}, "conversation"),
        ({"max_output_tokens": 0}, "max_output_tokens|max_tokens"),
        ({"tool_choice": "some"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "rain"}}, "rain"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\].name"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"top_logprobs": 21}, "top_logprobs"),
    ],
)
def test_what_is_refused_is_named(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read({**HELLO, **wrong})


def test_a_strict_schema_that_cannot_be_enforced_is_refused() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=a)b"}}}
    with pytest.raises(BadGrammarError, match="pattern"):
        read({**HELLO, "tools": [{**TOOL, "parameters": parameters, "strict": True}]})


# ---- what is answered


def test_a_stream_of_thoughts_and_text() -> None:
    data = stream_of(
        answers.started(30, 10),
        answers.reasoning("Hm."),
        answers.text("Hel"),
        answers.text("lo"),
        answers.finished("stop", STATS),
    )
    assert [event["type"].removeprefix("response.") for event in named_events(data)] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    response = as_their_client_reads(data)
    assert (response.id, response.status, response.output_text) == ("resp_1", "completed", "Hello")
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (30, 7, 37)
    assert response.usage.input_tokens_details.cached_tokens == 10


def test_every_event_is_one_of_theirs_and_numbered() -> None:
    known: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
    parts = (
        answers.started(30, 0),
        answers.reasoning("Hm."),
        answers.text("Well."),
        *CALLS,
        answers.finished("stop", STATS),
    )
    told = named_events(stream_of(*parts))
    for event in told:
        known.validate_python(event)
    assert [event["sequence_number"] for event in told] == list(range(len(told)))


def test_a_stream_of_calls() -> None:
    data = stream_of(answers.started(30, 10), answers.text("Let me see."), *CALLS, answers.finished("stop", STATS))
    response = as_their_client_reads(data)
    calls = [(item.call_id, item.name, item.arguments) for item in response.output if item.type == "function_call"]
    assert calls == [("call_1", "weather", '{"city": "Rome"}'), ("call_2", "now", "{}")]
    assert len({item.id for item in response.output}) == 3


def test_a_whole_response_is_what_the_stream_ended_with() -> None:
    made = writer(HELLO, ENVELOPE)
    parts = (
        answers.started(30, 10),
        answers.reasoning("Hm."),
        answers.text("Well."),
        *CALLS,
        answers.finished("stop", STATS),
    )
    fed(made, *parts)
    assert made.whole() == named_events(stream_of(*parts))[-1]["response"]
    response = Response.model_validate(made.whole())
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]


def test_an_answer_that_was_cut_off_is_incomplete() -> None:
    data = stream_of(answers.started(30, 10), answers.text("Hel"), answers.finished("length", STATS))
    last = named_events(data)[-1]
    assert last["type"] == "response.incomplete"
    response = Response.model_validate(last["response"])
    assert (response.status, response.output[0].status) == ("incomplete", "incomplete")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


def test_a_cut_call_is_incomplete() -> None:
    parts = (*CALLS[:4], answers.arguments('{"zone": "U'), answers.finished("length", STATS))
    response = Response.model_validate(named_events(stream_of(answers.started(30, 10), *parts))[-1]["response"])
    assert [(item.type, item.status) for item in response.output if item.type == "function_call"] == [
        ("function_call", "completed"),
        ("function_call", "incomplete"),
    ]
    assert response.status == "incomplete"


def test_an_overflow_fails_with_the_code_that_codex_knows() -> None:
    made = writer(HELLO, ENVELOPE)
    (*_, failed) = named_events(made.begin() + made.error(ContextOverflowError("the prompt has 9 tokens", why="8 fit")))
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {
        "code": "context_length_exceeded",
        "message": "the prompt has 9 tokens: 8 fit",
    }


def test_logprobs() -> None:
    token = TokenLogprob("é", (195, 169), -0.5, (("e", (101,), -0.7),))
    response = as_their_client_reads(
        stream_of(answers.started(3, 0), answers.text("é", (token,)), answers.finished("stop", STATS))
    )
    message = response.output[0]
    assert message.type == "message"
    assert message.content[0].type == "output_text"
    chosen = message.content[0].logprobs
    assert chosen is not None
    assert (chosen[0].token, chosen[0].logprob, chosen[0].top_logprobs[0].token) == ("é", -0.5, "e")


_CODEX_TOOLS = [
    {"type": "namespace", "name": "mcp__memory", "tools": [{"type": "function", "name": "add", "parameters": {}}]},
    {"type": "custom", "name": "apply_patch", "description": "Patches files."},
    {"type": "function", "name": "add", "parameters": {}},
]


def test_namespaces_are_flattened_and_custom_tools_take_a_string() -> None:
    history = [
        {"role": "user", "content": "Hi"},
        {"type": "function_call", "call_id": "c", "namespace": "mcp__memory", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "Done"},
    ]
    request = read({"input": history, "tools": _CODEX_TOOLS}).request
    assert [each.name for each in request.tools] == ["mcp__memory__add", "apply_patch", "add"]
    assert json.loads(request.tools[1].parameters)["properties"] == {"input": {"type": "string"}}
    assert [call.name for call in request.messages[1].tool_calls] == ["mcp__memory__add"]
    assert request.messages[2].name == "mcp__memory__add"
    for kind, more in (("custom", {"name": "apply_patch"}), ("function", {"namespace": "mcp__memory", "name": "add"})):
        assert read({"input": history, "tools": _CODEX_TOOLS, "tool_choice": {"type": kind, **more}})


@pytest.mark.parametrize(
    ("syntax", "definition", "grammar"),
    [("lark", 'start: "a" | "b"', 'start: "a" | "b"'), ("regex", "[ab/]", r"start: /[ab\/]/")],
)
def test_the_grammar_of_a_custom_tool_reaches_the_model(syntax: str, definition: str, grammar: str) -> None:
    form = {"type": "grammar", "syntax": syntax, "definition": definition}
    (tool,) = read({"input": "Hi", "tools": [{**_CODEX_TOOLS[1], "format": form}]}).request.tools
    assert tool.grammar == grammar
    assert tool.description.startswith("Patches files.\n\n")
    assert tool.description.endswith(grammar)
    (free,) = read({"input": "Hi", "tools": [{**_CODEX_TOOLS[1], "format": {"type": "text"}}]}).request.tools
    assert (free.grammar, free.description) == ("", "Patches files.")
    for wrong in ({**form, "syntax": "peg"}, {"type": "grammar", "syntax": "lark"}, {"type": "xml"}):
        with pytest.raises(UsageError):
            read({"input": "Hi", "tools": [{**_CODEX_TOOLS[1], "format": wrong}]})


def test_what_is_said_of_a_namespace_reaches_the_model_once() -> None:
    namespace = {
        **_CODEX_TOOLS[0],
        "description": "Remembers.",
        "tools": [_CODEX_TOOLS[2], {**_CODEX_TOOLS[2], "name": "b"}],
    }
    asked = read({"input": "Hi", "tools": [namespace]})
    assert [each.description for each in asked.request.tools] == ["Remembers.", ""]
    assert asked.ignored == ()


def test_reasoning_that_was_written_here_is_not_named_as_ignored() -> None:
    item = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "llmrun:So."}
    whole = {**item, "content": [{"type": "reasoning_text", "text": "So."}]}
    for each in (item, whole):
        asked = read({"input": [{"role": "user", "content": "Hi"}, each, {"role": "user", "content": "Go on."}]})
        assert asked.ignored == ()


def test_calls_have_the_names_of_the_client() -> None:
    known: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
    made = writer({"input": "Hi", "tools": _CODEX_TOOLS}, ENVELOPE)
    data = made.begin()
    for part in (
        answers.started(30, 0),
        answers.call("c1", "mcp__memory__add"),
        answers.arguments("{}", ends=True),
        answers.call("c2", "apply_patch"),
        answers.arguments('{"input": "*** Be'),
        answers.arguments('gin\\n"}', ends=True),
        answers.finished("stop", STATS),
    ):
        data += made.feed(0, part)
    sent = named_events(data + made.end())
    for event in sent:
        known.validate_python(event)
    call, patch = made.whole()["output"]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "mcp__memory", "add")
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "apply_patch", "*** Begin\n")
    (done,) = [event for event in sent if event["type"] == "response.custom_tool_call_input.done"]
    assert done["input"] == "*** Begin\n"


def test_reasoning_is_counted() -> None:
    made = writer(HELLO, ENVELOPE)
    made.feed(0, answers.reasoning("Hm.", tokens=4))
    made.feed(0, answers.finished("stop", STATS))
    assert made.whole()["usage"]["output_tokens_details"] == {"reasoning_tokens": 4}
    with pytest.raises(UsageError, match="max_output_tokens 0"):
        read({**HELLO, "max_output_tokens": 0})


_NULL, _NUMBER = type(None), (int, float)
_TYPES: dict[str, type | tuple[type, ...]] = {
    "id": str, "object": str, "created_at": int, "completed_at": (int, _NULL), "status": str, "model": str,
    "incomplete_details": (dict, _NULL), "previous_response_id": (str, _NULL), "instructions": (str, _NULL),
    "output": list, "error": (dict, _NULL), "tools": list, "tool_choice": (str, dict), "truncation": str,
    "parallel_tool_calls": bool, "text": dict, "top_p": _NUMBER, "presence_penalty": _NUMBER,
    "frequency_penalty": _NUMBER, "top_logprobs": int, "temperature": _NUMBER, "reasoning": dict,
    "usage": (dict, _NULL), "max_output_tokens": (int, _NULL), "max_tool_calls": (int, _NULL), "store": bool,
    "background": bool, "service_tier": str, "metadata": dict, "safety_identifier": (str, _NULL),
    "prompt_cache_key": (str, _NULL),
}  # fmt: skip
"""Fields that every response has, as OpenResponses requires."""


@pytest.mark.parametrize("reason", ["stop", "length", "cancelled", "failed"])
@pytest.mark.parametrize(
    "asked",
    [
        {},
        dict.fromkeys(_TYPES),
        {"metadata": "x", "prompt_cache_key": 5, "safety_identifier": [], "truncation": "auto", "max_tool_calls": 2},
        {"text": {"format": "json"}, "tools": [{"type": "function", "name": "now"}], "service_tier": "flex"},
        {"text": {"format": {"type": None}}, "tool_choice": {"type": "web_search"}, "reasoning": {"summary": "auto"}},
    ],
)
def test_a_response_has_all_fields_that_openresponses_requires(asked: dict[str, Any], reason: str) -> None:
    made = writer({**HELLO, **asked}, ENVELOPE)
    events = (answers.started(30, 10), answers.reasoning("Hm."), answers.text("Hi"))
    data = made.begin() + b"".join(made.feed(0, event) for event in events)
    if reason == "failed":
        data += made.error(ContextOverflowError("the prompt has 9 tokens"))
    else:
        data += made.feed(0, answers.finished(reason, STATS)) + made.end()
    found = [event["response"] for event in named_events(data) if "response" in event]
    assert len(found) == 3
    for response in found:
        wrong = [name for name, kind in _TYPES.items() if not isinstance(response.get(name, ...), kind)]
        assert not wrong
        assert response["text"]["format"]["type"] in ("text", "json_object")
        assert response["tool_choice"] == "auto"
        assert set(response["reasoning"]) == {"effort", "summary"}
        assert all({"name", "description", "parameters", "strict"} <= set(tool) for tool in response["tools"])
        assert (response["truncation"], response["service_tier"]) == ("disabled", "default")
    last = found[-1]
    status = {"stop": "completed", "length": "incomplete"}.get(reason, reason)
    assert (last["status"], last["completed_at"] is not None) == (status, reason == "stop")


def test_a_bare_schema_is_the_schema_of_the_format() -> None:
    asked = {**HELLO, "text": {"format": SCHEMA}}
    assert read(asked).request.grammar == Grammar("json_schema", json.dumps(SCHEMA))
    told = writer(asked, ENVELOPE).whole()["text"]["format"]
    assert told == {"type": "json_schema", "name": "", "description": None, "strict": False, "schema": SCHEMA}


def test_settings_are_those_that_the_engine_gets() -> None:
    made = writer({**HELLO, "top_p": 0.5}, ENVELOPE)
    assert (made.whole()["temperature"], made.whole()["top_p"]) == (0.8, 0.5)
    made.requests[0] = AnswerRequest(
        sampling=SamplingParams(temperature=0.25), limits=Limits(7), reasoning_effort="low"
    )
    whole = made.whole()
    assert [whole[name] for name in ("temperature", "max_output_tokens")] == [0.25, 7]
    assert whole["reasoning"] == {"effort": "low", "summary": None}


def test_encrypted_reasoning_comes_back_as_it_was() -> None:
    body = {**HELLO, "include": ["reasoning.encrypted_content"], "store": False}
    made = fed(writer(body, ENVELOPE), answers.reasoning("Hm."), answers.text("Hi"), answers.finished("stop", STATS))
    thought, said = made.whole()["output"]
    bare = {name: value for name, value in thought.items() if name != "content"}
    messages = read({"model": "m", "input": [bare, said, {"role": "user", "content": "And?"}]}).request.messages
    assert messages[0] == Message("assistant", "Hi", reasoning="Hm.")


def test_what_was_asked_is_echoed() -> None:
    asked = {
        "temperature": 0.5, "top_p": 0.9, "max_output_tokens": 9, "metadata": {"a": "b"}, "tools": [TOOL],
        "reasoning": {"effort": "low", "summary": None}, "tool_choice": {"type": "function", "name": "weather"},
        "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True, "description": ""}},
    }  # fmt: skip
    whole = writer({**HELLO, **asked}, ENVELOPE).whole()
    assert {name: whole[name] for name in asked} == asked
    Response.model_validate(whole)


# ---- compaction

_TALK: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": "We launch on Tuesday."},
    {"type": "function_call", "call_id": "c", "name": "now", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "Monday"},
    {"id": "msg_7", "role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]},
    {"role": "assistant", "content": "Understood."},
]


def test_a_conversation_is_compacted() -> None:
    asked = {"model": "m", "input": [*_TALK[:4], *_TALK[5:]], "instructions": "You plan."}
    request = read_compaction(asked).request
    assert request.messages[0] == Message("system", "You plan.\n\nBe brief.")
    assert [message.role for message in request.messages[1:]] == ["user", "assistant", "tool", "assistant", "user"]
    assert "Summarize our conversation" in request.messages[-1].content
    assert (request.begins, request.thinking) == ("", False)
    with pytest.raises(UsageError, match="model is missing"):
        read_compaction({"input": _TALK})


def test_a_compaction_keeps_what_the_user_said_and_is_read_again() -> None:
    made = fed(
        CompactionWriter({"input": _TALK}, ENVELOPE),
        answers.started(30, 10),
        answers.reasoning("Hm."),
        answers.text(" Launch: Tuesday."),
        answers.finished("stop", STATS),
    )
    whole = made.whole()
    assert (whole["object"], whole["id"], whole["usage"]["total_tokens"]) == ("response.compaction", "resp_1", 37)
    first, second, summary = whole["output"]
    assert (first["role"], first["content"]) == ("user", [{"type": "input_text", "text": "We launch on Tuesday."}])
    assert (second["id"], second["content"][0]["detail"]) == ("msg_7", "auto")
    assert all({"id", "type", "role", "status", "content"} <= set(item) for item in (first, second))
    assert set(summary) == {"id", "type", "encrypted_content"}
    going_on = read({"model": "m", "input": [first, summary, {"role": "user", "content": "When?"}]}).request.messages
    assert [message.role for message in going_on] == ["user"] * 3
    assert "Launch: Tuesday." in going_on[1].content


def test_a_compaction_of_another_server_is_named_as_ignored() -> None:
    items = [{"type": "compaction", "id": "cmp_1", "encrypted_content": "gAAAA"}, {"role": "user", "content": "When?"}]
    asked = read({"model": "m", "input": items})
    assert (len(asked.request.messages), asked.ignored) == (1, ("input[0].type=compaction",))
