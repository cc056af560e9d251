"""What a far server is asked with, and what it can't be asked for."""

from __future__ import annotations

import base64
import json
import math
from typing import Any

import pytest

from llmrun.grammar import Grammar
from llmrun.protocol.media import Media
from llmrun.protocol.messages import AnswerRequest, Message, Tool, ToolCall
from llmrun.protocol.params import Limits, SamplingParams
from llmrun.remote.answer_shapes import REASONING_FIELDS
from llmrun.remote.request_body import body_of, refused_fields
from llmrun.remote.server import ServedModel
from llmrun.server.protocols import openai_chat, openai_text

HI = (Message("user", "Hi"),)
SCHEMA = '{"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}'
OWNERS = ("llmrun", "llamacpp", "vllm", "sglang", "openai", "")


def body(asked: AnswerRequest, owner: str = "", **fields: Any) -> dict[str, Any]:
    return json.loads(json.dumps(body_of(asked, ServedModel("m", owner), **fields).body))


def test_what_the_user_did_not_set_is_not_sent() -> None:
    bare = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    for owner in OWNERS:
        assert body(AnswerRequest(HI), owner) == {**bare, "stream_options": {"include_usage": True}}
        assert not refused_fields(AnswerRequest(HI), ServedModel("m", owner))


def test_what_the_user_set_to_its_default_is_sent_where_that_is_known() -> None:
    assert body(AnswerRequest(HI), named=["temperature"])["temperature"] == 0.8
    assert "temperature" not in body(AnswerRequest(HI))


@pytest.mark.parametrize(
    ("owner", "refused"),
    [("llmrun", ()), ("llamacpp", ("order",)), ("vllm", ("order", "mirostat")), ("", ("top_k", "order", "mirostat"))],
)
def test_what_a_server_does_not_know_is_told_and_not_sent(owner: str, refused: tuple[str, ...]) -> None:
    sampling = SamplingParams(top_k=3, top_p=0.5, order=("top_k",), mirostat=1)
    asked = AnswerRequest(HI, sampling=sampling)
    assert set(refused_fields(asked, ServedModel("m", owner))) == set(refused)
    sent = body(asked, owner)
    assert sent["top_p"] == 0.5
    assert ("top_k" in sent) == ("top_k" not in refused)


def test_servers_have_other_names_for_some() -> None:
    asked = AnswerRequest(HI, sampling=SamplingParams(repeat_penalty=1.2, temperature_range=0.3))
    assert body(asked, "vllm")["repetition_penalty"] == 1.2
    assert body(asked, "llamacpp")["repeat_penalty"] == 1.2
    assert body(asked, "llamacpp")["dynatemp_range"] == 0.3
    limits = AnswerRequest(HI, limits=Limits(max_tokens=5))
    assert body(limits, "openai")["max_completion_tokens"] == body(limits)["max_tokens"] == 5


def test_biases_are_sent_as_openai_has_them() -> None:
    sampling = SamplingParams(logit_bias=((5, 1.5), (7, -math.inf)))
    assert body(AnswerRequest(HI, sampling=sampling))["logit_bias"] == {"5": 1.5, "7": -100}


@pytest.mark.parametrize("owner", OWNERS)
def test_a_schema_goes_to_every_chat(owner: str) -> None:
    asked = AnswerRequest(HI, grammar=Grammar("json_schema", SCHEMA))
    assert not refused_fields(asked, ServedModel("m", owner))
    assert body(asked, owner)["response_format"]["json_schema"]["schema"]["required"] == ["a"]


def test_grammars_go_where_they_are_known() -> None:
    gbnf = AnswerRequest(HI, grammar=Grammar("gbnf", 'root ::= "a"'))
    lark = AnswerRequest(HI, grammar=Grammar("lark", 'start: "a"'))
    assert body(gbnf, "llamacpp")["grammar"] == 'root ::= "a"'
    assert [refused_fields(gbnf, ServedModel("m", owner)) for owner in ("llmrun", "vllm")] == [(), ("grammar",)]
    assert [refused_fields(lark, ServedModel("m", owner)) for owner in ("llmrun", "llamacpp")] == [(), ("lark",)]


def test_all_else_that_cannot_be_asked_is_told() -> None:
    asked = AnswerRequest(
        HI,
        limits=Limits(ban=("x",), ignores_end=True),
        template="chatml",
        thinking=False,
        keep_reasoning=False,
        thinking_tokens=5,
        stops_repeats=True,
        salt="s",
        adapters=(),
    )
    everything = {
        "ban",
        "ignore_eos",
        "template",
        "thinking",
        "keep_reasoning",
        "thinking_tokens",
        "stops_repeats",
        "salt",
        "adapters",
    }
    assert set(refused_fields(asked, ServedModel("m"))) == everything
    assert set(refused_fields(asked, ServedModel("m", "llmrun"))) == {"template", "adapters"}


def test_our_own_server_reads_what_is_sent() -> None:
    """The other side of the same protocol: what comes out there is what went in here."""
    data = base64.b64encode(b"\x89PNG\r\n\x1a\n----").decode()
    picture = Media(data, "messages[1].content[1].image_url.url", 4)
    audio = Media(base64.b64encode(b"fLaC----").decode(), "messages[1].content[2].input_audio.data", 4)
    messages = (
        Message("system", "Be brief."),
        Message("user", "See  this", media=(picture, audio)),
        Message("assistant", "", (ToolCall("call_1", "add", '{"a": 1}'),)),
        Message("tool", "2", tool_call_id="call_1", name="add"),
    )
    sampling = SamplingParams(seed=3, top_k=5, dry_breakers=("x",), order=("top_k", "temperature"))
    asked = AnswerRequest(
        messages,
        sampling=sampling,
        limits=Limits(9, ("stop",), ("ban",), ignores_end=True),
        grammar=Grammar("json_schema", SCHEMA),
        thinking=False,
        keep_reasoning=False,
        thinking_tokens=4,
        stops_repeats=True,
        logprobs=2,
        salt="s",
        tools=(Tool("add", "Adds.", '{"type": "object"}'),),
        tool_choice="=add",
        parallel_calls=False,
    )
    read = openai_chat.read(body(asked, "llmrun"))
    assert read.stream
    assert SamplingParams(**read.sampling) == sampling
    names = (
        "messages", "limits", "thinking", "keep_reasoning", "thinking_tokens", "logprobs", "tools", "tool_choice",
        "salt",
    )  # fmt: skip
    for name in names:
        assert getattr(read.request, name) == getattr(asked, name), name
    assert read.request.grammar is not None
    assert read.request.grammar.kind == "json_schema"
    assert (read.request.stops_repeats, read.request.parallel_calls) == (True, False)


def test_our_own_server_reads_plain_texts() -> None:
    asked = AnswerRequest(prompt="Once", limits=Limits(5), logprobs=1, grammar=Grammar("json_schema", SCHEMA))
    read = openai_text.read(body(asked, "llmrun")).request
    assert (read.prompt, read.limits, read.logprobs) == ("Once", Limits(5), 1)
    assert read.grammar is not None
    assert body_of(asked, ServedModel("m")).refused == ("json_schema",)
    assert body_of(asked, ServedModel("m")).endpoint == "/completions"


@pytest.mark.parametrize("owner", OWNERS)
def test_the_beginning_of_an_answer_is_sent_as_the_last_message(owner: str) -> None:
    asked = AnswerRequest(HI, begins="Yes, ", begins_reasoning="Hm")
    if owner in ("openai", ""):
        assert refused_fields(asked, ServedModel("m", owner)) == ("begins",)
        return
    sent = body(asked, owner)
    assert sent["messages"][-1] == {"role": "assistant", "content": "Yes, ", "reasoning_content": "Hm"}
    read = openai_chat.read(sent).request
    assert (read.messages, read.begins, read.begins_reasoning) == (HI, "Yes, ", "Hm")


TOOL_TURN = (
    Message("user", "Plain?"),
    Message("assistant", "Plain.", reasoning="Old."),
    Message("user", "Double 4."),
    Message("assistant", "So:", (ToolCall("a", "double", "{}"),), reasoning="Plan."),
    Message("tool", "8", tool_call_id="a", name="double"),
    Message("assistant", "", (ToolCall("b", "double", "{}"),)),
    Message("tool", "16", tool_call_id="b", name="double"),
)


def messages_of(owner: str, name: str | None) -> list[dict[str, Any]]:
    return list(body(AnswerRequest(TOOL_TURN), owner, reasoning_name=name)["messages"])


@pytest.mark.parametrize("name", REASONING_FIELDS)
def test_reasoning_of_a_turn_with_calls_goes_back_under_the_name_it_came_by(name: str) -> None:
    sent = messages_of("somebody", name)
    assert [each.get(name) for each in sent] == [None, None, None, "Plan.", None, "", None]
    assert [each["content"] for each in sent] == [message.content for message in TOOL_TURN]
    assert sum(field in each for each in sent for field in REASONING_FIELDS) == 2


@pytest.mark.parametrize("name", [None, ""])
def test_reasoning_is_not_sent_to_a_server_of_which_nothing_is_known_or_that_refuses_it(name: str | None) -> None:
    assert "Plan." not in json.dumps(messages_of("somebody", name))


@pytest.mark.parametrize(
    ("name", "content", "details"),
    [
        (
            "content",
            [{"type": "thinking", "thinking": [{"type": "text", "text": "Plan."}]}, {"type": "text", "text": "So:"}],
            None,
        ),
        ("tags", "<think>\nPlan.\n</think>\n\nSo:", None),
        ("reasoning_details", "So:", [{"type": "reasoning.text", "text": "Plan."}]),
    ],
)
def test_reasoning_goes_back_in_the_shape_it_came_in(name: str, content: Any, details: Any) -> None:
    sent = messages_of("somebody", name)
    assert (sent[3]["content"], sent[3].get("reasoning_details")) == (content, details)
    assert "Old." not in json.dumps(sent)
    assert sent[5]["content"] == ""


@pytest.mark.parametrize("name", [None, "reasoning_content", "tags"])
def test_local_servers_get_all_reasoning(name: str | None) -> None:
    for owner in ("llmrun", "llamacpp", "vllm", "sglang"):
        sent = messages_of(owner, name)
        assert [each.get("reasoning_content") for each in sent] == [None, "Old.", None, "Plan.", None, None, None]


@pytest.mark.parametrize("owner", OWNERS)
def test_files_of_tools_are_sent_by_the_user(owner: str) -> None:
    """OpenAI's protocol has only text in a result."""
    image = Media("iVBORw0KGgoAAAAN", at=2)
    calls = (ToolCall("1", "look", "{}"), ToolCall("2", "look", "{}"))
    results = (Message("tool", "A.", tool_call_id="1", media=(image,)), Message("tool", "B.", tool_call_id="2"))
    asked = AnswerRequest(
        (Message("user", "Hi"), Message("assistant", "", calls), *results, Message("assistant", "So."))
    )
    sent = body(asked, owner)["messages"]
    assert [message["role"] for message in sent] == ["user", "assistant", "tool", "tool", "user", "assistant"]
    assert [message["content"] for message in sent[2:4]] == ["A.", "B."]
    assert [part["type"] for part in sent[4]["content"]] == ["text", "image_url"]
    assert [each["role"] for each in body(AnswerRequest(asked.messages[:4]), owner)["messages"]][-1] == "user"
