"""Chat completions: what every field means, and the chunks that clients wait for."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from support import answers

from llmrun.errors import BadGrammarError, ContextOverflowError, LlmrunError, UsageError
from llmrun.grammar import Grammar
from llmrun.protocol.messages import Message, Stats, TokenLogprob
from llmrun.server.answer import CompletionRequest, Envelope
from llmrun.server.protocols import openai_text
from llmrun.server.protocols.openai_chat import error_body, read, writer

USER: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
ENVELOPE = Envelope("chatcmpl-1", 7, "tiny")
TOKEN = TokenLogprob("Hi", (72, 105), -0.5, (("Ho", (72, 111), -1.5),))


def chunks(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: {")]


def test_ignore_eos() -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    assert [
        read({**body, **more}).request.limits.ignores_end
        for more in ({}, {"ignore_eos": None}, {"ignore_eos": False}, {"ignore_eos": True})
    ] == [False, False, False, True]


def test_messages_of_every_kind() -> None:
    body = {
        "messages": [
            {"role": "developer", "content": "Be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
        ]
    }
    system, user, assistant, tool = read(body).request.messages
    assert (system, user) == (Message("system", "Be brief"), Message("user", "ab"))
    assert [tuple(call) for call in assistant.tool_calls] == [("c1", "f", '{"x": 1}')]
    assert (tool.role, tool.content, tool.tool_call_id, tool.name) == ("tool", "2", "c1", "f")


def test_sampling_has_only_what_was_named() -> None:
    assert read(USER).sampling == {}
    named = {"temperature": 0, "top_p": 0.5, "seed": 7, "logit_bias": {"5": -100}, "min_p": None, "unknown": 1}
    assert read({**USER, **named}).sampling == {
        "temperature": 0, "top_p": 0.5, "seed": 7, "logit_bias": ((5, -100.0),)
    }  # fmt: skip


def test_a_client_may_ask_for_a_watermark() -> None:
    named = {"watermark": "green,bias=1", "watermark_key": "secret"}
    assert read({**USER, **named}).sampling == named
    with pytest.raises(UsageError, match="invalid watermark red"):
        read({**USER, "watermark": "red"})


def test_names_of_other_servers_are_understood() -> None:
    named = {
        "typ_p": 0.5, "repetition_penalty": 1.5, "samplers": ["top_k"], "seed": -1,
        "logit_bias": [[5, False], ["Hello", -1]],
    }  # fmt: skip
    assert read({**USER, **named}).sampling == {
        "typical_p": 0.5, "repeat_penalty": 1.5, "order": ("top_k",), "seed": None,
        "logit_bias": ((5, -math.inf), ("Hello", -1.0)),
    }  # fmt: skip


def test_when_the_answer_ends() -> None:
    limits = read({**USER, "max_tokens": 5, "max_completion_tokens": 6, "stop": "x", "ban": ["y"]}).request.limits
    assert (limits.max_tokens, limits.stop, limits.ban) == (6, ("x",), ("y",))
    assert read({**USER, "max_tokens": -1, "stop": None}).request.limits.max_tokens is None


@pytest.mark.parametrize(
    ("given", "grammar"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, '{"type": "object"}'),
        ({"type": "json_schema", "json_schema": {"schema": {"type": "string"}}}, '{"type": "string"}'),
    ],
)
def test_response_formats(given: dict[str, Any], grammar: str | None) -> None:
    found = read({**USER, "response_format": given}).request.grammar
    assert (found.text if found else None) == grammar


@pytest.mark.parametrize("strict", [True, False, None])
def test_only_a_strict_schema_is_closed(strict: bool | None) -> None:
    schema = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
    given: dict[str, Any] = {
        "type": "json_schema",
        "json_schema": {"name": "x", "strict": strict, "schema": {"type": "string"}},
    }
    found = read({**USER, "response_format": given}).request.grammar
    assert found == Grammar("json_schema", '{"type": "string"}', is_strict=bool(strict))
    given["json_schema"]["schema"] = schema
    if strict:
        with pytest.raises(BadGrammarError, match="oneOf"):
            read({**USER, "response_format": given})
    else:
        assert read({**USER, "response_format": given}).request.grammar


def test_grammars_exclude_each_other_and_must_be_right() -> None:
    assert read({**USER, "grammar": 'root ::= "a"'}).request.grammar is not None
    with pytest.raises(UsageError, match="can't be used together"):
        read({**USER, "grammar": 'root ::= "a"', "json_schema": {}})
    with pytest.raises(BadGrammarError):
        read({**USER, "grammar": "root ::= undefined"})


def test_thinking_and_log_probabilities() -> None:
    assert read({**USER, "reasoning_effort": "none"}).request.thinks is False
    assert read({**USER, "reasoning_effort": "low"}).request.reasoning_effort == "low"
    with pytest.raises(UsageError, match="reasoning_effort must be one of"):
        read({**USER, "reasoning_effort": "huge"})
    assert read({**USER, "chat_template_kwargs": {"enable_thinking": True}}).request.thinking is True
    assert read(USER).request.logprobs is None
    assert read({**USER, "logprobs": True}).request.logprobs == 0
    assert read({**USER, "logprobs": True, "top_logprobs": 3}).request.logprobs == 3


def test_whether_earlier_reasoning_stays() -> None:
    assert read(USER).request.keep_reasoning is None
    assert read({**USER, "keep_reasoning": False}).request.keep_reasoning is False
    request = read({**USER, "chat_template_kwargs": {"preserve_reasoning": False, "x": 1}}).request  # llama-server's
    assert (request.keep_reasoning, request.template_variables) == (False, '{"x": 1}')
    both = {"keep_reasoning": True, "chat_template_kwargs": {"preserve_reasoning": False}}
    assert read({**USER, **both}).request.keep_reasoning is True
    with pytest.raises(UsageError, match="keep_reasoning"):
        read({**USER, "keep_reasoning": "yes"})


def test_variables_of_the_chat_template() -> None:
    given = {"enable_thinking": False, "reasoning_effort": "no_think", "levels": [1, {"a": None}]}
    request = read({**USER, "chat_template_kwargs": given}).request
    assert (request.thinks, request.reasoning_effort) == (False, None)
    assert json.loads(request.template_variables) == {"reasoning_effort": "no_think", "levels": [1, {"a": None}]}
    with pytest.raises(UsageError, match=r"chat_template_kwargs\.messages can't be set"):
        read({**USER, "chat_template_kwargs": {"messages": []}})
    with pytest.raises(UsageError, match="too long"):
        read({**USER, "chat_template_kwargs": {"x": "y" * 70_000}})


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_in_the_history(name: str) -> None:
    said = {"role": "assistant", "content": "Hi", name: "Hm."}
    assert read({"messages": [said, *USER["messages"]]}).request.messages[0].reasoning == "Hm."


def test_tools_and_their_choice() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    request = read({**USER, "tools": tools, "tool_choice": {"type": "function", "function": {"name": "f"}}}).request
    assert ([tool.name for tool in request.tools], request.tool_choice) == (["f"], "=f")
    assert read({**USER, "tools": tools, "parallel_tool_calls": False}).request.parallel_calls is False
    with pytest.raises(UsageError, match="tool"):
        read({**USER, "tools": tools, "tool_choice": {"type": "function", "function": {"name": "g"}}})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", []),
        ("messages", "Hi"),
        ("messages", [{"content": "Hi"}]),
        ("messages", [{"role": "king", "content": "Hi"}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]),
        ("model", 5),
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", 1e9),
        ("top_k", 1.5),
        ("n", 0),
        ("n", 10**9),
        ("n", 10**400),
        ("temperature", -(10**400)),
        ("temperature", 1e400),
        ("logit_bias", {"1": 10**400}),
        ("max_tokens", 2**40),
        ("stop", [1]),
        ("stop", ["x"] * 10_000),
        ("stop", ["x" * 10_000]),
        ("logit_bias", {"": 1}),
        ("logit_bias", {"a": True}),
        ("logit_bias", [["a"]]),
        ("logit_bias", [[True, 1]]),
        ("logit_bias", "a"),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {str(token): 1 for token in range(10_000)}),
        ("stream", "yes"),
        ("top_logprobs", 1000),
        ("response_format", {"type": "xml"}),
        ("response_format", {"type": "json_schema"}),
        ("tool_choice", "sometimes"),
        ("cache_salt", 1),
        ("speculate", "fast"),
        ("speculate", 99),
        ("speculate", 7.0),
        ("speculate", True),
        ("speculate", [7]),
    ],
)
def test_what_is_wrong_is_an_error_of_the_client(field: str, value: Any) -> None:
    with pytest.raises(UsageError):
        read({**USER, field: value})


def test_a_message_names_the_field_that_is_wrong() -> None:
    with pytest.raises(UsageError, match=r"messages\[1\]\.role is missing"):
        read({"messages": [*USER["messages"], {"content": "x"}]})


def test_a_stream_begins_with_the_role_of_every_answer() -> None:
    first = chunks(writer({**USER, "n": 2}, ENVELOPE).begin())
    assert [chunk["choices"][0]["index"] for chunk in first] == [0, 1]
    assert all(chunk["choices"][0]["delta"] == {"role": "assistant", "content": ""} for chunk in first)
    assert all((chunk["id"], chunk["created"], chunk["model"]) == ENVELOPE[:3] for chunk in first)


def test_parts_become_deltas_and_the_same_parts_a_whole_answer() -> None:
    written = writer({**USER, "stream_options": {"include_usage": True}}, ENVELOPE)
    parts = [
        answers.started(10, 4),
        answers.reasoning("hm "),
        answers.text("Hi", (TOKEN,)),
        answers.call("c1", "f"),
        answers.arguments('{"x"'),
        answers.arguments(": 1}", ends=True),
        answers.finished("stop", Stats(completion_tokens=3)),
    ]
    deltas = [chunk["choices"][0] for part in parts for chunk in chunks(written.feed(0, part))]
    assert [choice["delta"] for choice in deltas] == [
        {"reasoning_content": "hm "},
        {"content": "Hi"},
        {"tool_calls": [{"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"x"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
        {},
    ]
    assert deltas[1]["logprobs"]["content"][0] == {
        "token": "Hi", "logprob": -0.5, "bytes": [72, 105],
        "top_logprobs": [{"token": "Ho", "logprob": -1.5, "bytes": [72, 111]}],
    }  # fmt: skip
    assert deltas[-1]["finish_reason"] == "tool_calls"
    (last,) = chunks(written.end())
    assert (last["choices"], last["usage"]["prompt_tokens_details"]) == ([], {"cached_tokens": 4})
    (choice,) = written.whole()["choices"]
    assert choice["message"]["reasoning_content"] == "hm"
    assert choice["message"]["content"] == "Hi"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": 1}'}
    assert written.whole()["usage"]["total_tokens"] == 13


@pytest.mark.parametrize(
    ("reason", "detail", "told"),
    [("stop", "", "stop"), ("stop", "END", "stop"), ("length", "", "length"), ("repeats", "a", "stop")],
)
def test_why_an_answer_ended(reason: str, detail: str, told: str) -> None:
    written = writer(USER, ENVELOPE)
    written.feed(0, answers.finished(reason, Stats(), detail))
    assert written.whole()["choices"][0]["finish_reason"] == told


def test_a_whole_answer_has_no_cut_call() -> None:
    written = writer(USER, ENVELOPE)
    for part in (
        answers.call("c1", "f"), answers.arguments("{}", ends=True), answers.call("c2", "f"),
        answers.arguments('{"a": '), answers.finished("length", Stats()),
    ):  # fmt: skip
        written.feed(0, part)
    (choice,) = written.whole()["choices"]
    assert [call["id"] for call in choice["message"]["tool_calls"]] == ["c1"]
    assert choice["finish_reason"] == "length"


def test_allowed_tools_are_the_only_ones() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
    group = {"mode": "required", "tools": [tools[1]]}
    request = read({**USER, "tools": tools, "tool_choice": {"type": "allowed_tools", "allowed_tools": group}}).request
    assert ([each.name for each in request.tools], request.tool_choice) == (["g"], "required")
    with pytest.raises(UsageError, match="'custom' can't be used"):
        read({**USER, "tools": tools, "tool_choice": {"type": "custom", "custom": {"name": "f"}}})


def test_usage_has_the_tokens_of_reasoning() -> None:
    written = writer({**USER, "n": 2}, ENVELOPE)
    for index in range(2):
        written.feed(index, answers.reasoning("Hm.", tokens=4))
        written.feed(index, answers.finished("stop", Stats(completion_tokens=9)))
    assert written.whole()["usage"]["completion_tokens_details"] == {"reasoning_tokens": 8}


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_no_tokens_at_all_are_refused_by_the_name_of_the_field(name: str) -> None:
    with pytest.raises(UsageError, match=f"invalid {name} 0"):
        read({**USER, name: 0})


def test_every_chunk_of_a_completion_has_a_usage_if_one_is_requested() -> None:
    body = {"prompt": "Hi", "stream_options": {"include_usage": True}}
    written = openai_text.writer(body, ENVELOPE)
    first, second, last = chunks(
        written.feed(0, answers.text("a"))
        + written.feed(0, answers.finished("stop", Stats(completion_tokens=1)))
        + written.end()
    )
    assert (first["usage"], second["usage"], last["usage"]["completion_tokens"]) == (None, None, 1)
    assert "usage" not in chunks(openai_text.writer({"prompt": "Hi"}, ENVELOPE).feed(0, answers.text("a")))[0]


def test_the_best_of_several_completions_is_not_looked_for() -> None:
    assert openai_text.read({"prompt": "Hi", "best_of": 3}).ignored == ("best_of",)
    assert openai_text.read({"prompt": "Hi", "best_of": 1}).ignored == ()


def test_usage_tells_what_became_of_drafts() -> None:
    written = writer({**USER, "n": 2}, ENVELOPE)
    written.feed(0, answers.finished("stop", Stats(drafted_tokens=10, accepted_tokens=7)))
    assert "completion_tokens_details" in written.whole()["usage"]
    written.feed(1, answers.finished("stop", Stats(drafted_tokens=5, accepted_tokens=1)))
    details = written.whole()["usage"]["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": 8, "rejected_prediction_tokens": 7}
    assert "completion_tokens_details" not in writer(USER, ENVELOPE).whole()["usage"]


def test_usage_counts_the_prompt_of_several_answers_once_whichever_came_first() -> None:
    written = writer({**USER, "n": 3}, ENVELOPE)
    for choice, cached in ((2, 10), (0, 39), (1, 39)):
        written.feed(choice, answers.started(40, cached))
    usage = written.whole()["usage"]
    assert (usage["prompt_tokens"], usage["prompt_tokens_details"]) == (40, {"cached_tokens": 10})


def test_several_text_completions_are_streamed_by_their_index() -> None:
    written = openai_text.writer({"prompt": "Once", "n": 2, "echo": True}, ENVELOPE)
    streamed = written.begin() + written.feed(1, answers.text("b")) + written.feed(0, answers.text("a"))
    told = [(chunk["choices"][0]["index"], chunk["choices"][0]["text"]) for chunk in chunks(streamed)]
    assert told == [(0, "Once"), (1, "Once"), (1, "b"), (0, "a")]
    assert [choice["text"] for choice in written.whole()["choices"]] == ["Oncea", "Onceb"]


def test_usage_comes_only_where_it_was_asked_for() -> None:
    assert writer(USER, ENVELOPE).end() == b"data: [DONE]\n\n"
    assert "usage" not in chunks(writer(USER, ENVELOPE).begin())[0]


def test_an_error_in_a_stream_has_our_code() -> None:
    (chunk,) = chunks(writer(USER, ENVELOPE).error(LlmrunError("it broke", hint="mend it")))
    assert chunk["error"]["code"] == "internal"
    assert chunk["error"]["message"] == "it broke; mend it"


def test_half_a_character_pair_is_escaped() -> None:
    assert (
        chunks(writer(USER, ENVELOPE).feed(0, answers.text("\ud800")))[0]["choices"][0]["delta"]["content"] == "\ud800"
    )


def test_text_completions_have_the_old_log_probabilities() -> None:
    body = {"prompt": ["Once"], "logprobs": 1}
    assert openai_text.read(body).request.prompt == "Once"
    written = openai_text.writer(body, ENVELOPE)
    written.feed(0, answers.text("Hi", (TOKEN,)))
    assert written.whole()["choices"][0]["logprobs"] == {
        "tokens": ["Hi"], "token_logprobs": [-0.5], "top_logprobs": [{"Ho": -1.5}],
        "text_offset": [0],
    }  # fmt: skip


def test_offsets_count_characters_of_which_tokens_may_be_parts() -> None:
    pieces = (b"H\xc3", b"\xa4", "€".encode(), b"!")
    tokens = [TokenLogprob(piece.decode("utf-8", "replace"), tuple(piece), -0.5, ()) for piece in pieces]
    written = openai_text.writer({"prompt": "Once", "logprobs": 1}, ENVELOPE)
    streamed = b"".join(written.feed(0, answers.text("?", (token,))) for token in tokens)
    offsets = [offset for chunk in chunks(streamed) for offset in chunk["choices"][0]["logprobs"]["text_offset"]]
    assert offsets == [0, 1, 2, 3]


def test_several_prompts_and_token_ids() -> None:
    read_all = openai_text.read({"prompt": ["a", "b", [5, 6]], "n": 2, "max_tokens": 3})
    prompts = [(each.prompt, each.prompt_tokens) for each in map(read_all.of_choice, range(read_all.n_choices))]
    assert prompts == [("a", ())] * 2 + [("b", ())] * 2 + [("", (5, 6))] * 2
    assert {each.limits.max_tokens for each in (read_all.request, *read_all.others)} == {3}
    assert openai_text.read({"prompt": [5, 6]}).request.prompt_tokens == (5, 6)
    assert openai_text.read({"prompt": "def f(", "suffix": ")"}).request.suffix == ")"


def test_usage_is_that_of_all_prompts() -> None:
    written = openai_text.writer({"prompt": ["a", "b"], "n": 2, "echo": True}, ENVELOPE)
    for choice, tokens in enumerate((3, 3, 5, 5)):
        written.feed(choice, answers.started(tokens, 1))
        written.feed(choice, answers.finished("stop", Stats(completion_tokens=2)))
    whole = written.whole()
    assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (8, 8)
    assert [choice["text"] for choice in whole["choices"]] == ["a", "a", "b", "b"]


@pytest.mark.parametrize(
    "body",
    [
        {}, {"prompt": []}, {"prompt": [[]]}, {"prompt": [[1, True]]}, {"prompt": ["a", [1, []]]}, {"prompt": {}},
        {"prompt": {"prompt_string": "a <__media__>", "multimodal_data": ["YQ=="]}}, {"prompt": [-1]},
        {"prompt": ["a"] * 65}, {"prompt": [1], "suffix": "b"},
        {"prompt": "a", "echo": True, "logprobs": 1, "suffix": "b"},
    ],
)  # fmt: skip
def test_text_completions_that_can_not_be_made(body: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        openai_text.read(body)


@pytest.mark.parametrize("broken", ['{"path": "a.txt", "text": "hel', "[1, 2]", "not JSON"])
def test_the_broken_arguments_of_an_earlier_call_are_text(broken: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "write", "arguments": broken}}
    history = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "Error: invalid JSON"},
    ]
    (taken,) = read({"messages": history}).request.messages[1].tool_calls
    assert json.loads(taken.arguments) == {"input": broken}


@pytest.mark.parametrize(
    ("given", "budget"),
    [
        ({"thinking_tokens": 5}, 5),
        ({"thinking_token_budget": 5}, 5),
        ({"thinking_budget_tokens": 5}, 5),
        ({"reasoning_budget_tokens": 5}, 5),
        ({"reasoning": {"max_tokens": 5}}, 5),
        ({"thinking_budget_tokens": 0}, 0),
        ({"thinking_budget_tokens": -1}, None),
        ({}, None),
    ],
)
def test_a_reasoning_budget_has_the_names_of_other_servers(given: dict[str, Any], budget: int | None) -> None:
    asked = read({"messages": [{"role": "user", "content": "Hi"}], **given})
    assert (asked.request.thinking_tokens, asked.ignored) == (budget, ())


def test_openrouters_reasoning_is_read() -> None:
    def asked(reasoning: Any) -> CompletionRequest:
        return read({"messages": [{"role": "user", "content": "Hi"}], "reasoning": reasoning})

    assert asked({"effort": "high"}).request.reasoning_effort == "high"
    assert (asked({"enabled": True}).request.thinking, asked({"enabled": False}).request.thinking) == (True, False)
    assert asked({"exclude": True}).ignored == ("reasoning.exclude",)


def test_the_client_says_whether_the_last_message_is_continued() -> None:
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "reasoning_content": "Hm"}]

    def begins(**more: Any) -> tuple[str, str]:
        request = read({"messages": said, **more}).request
        return request.begins, request.begins_reasoning

    assert begins() == begins(continue_final_message=True, add_generation_prompt=False) == ("", "Hm")
    assert begins(continue_final_message="reasoning_content") == ("", "Hm")
    assert read({"messages": said}).request.may_begin_anew
    assert not read({"messages": said, "continue_final_message": True}).request.may_begin_anew
    assert begins(continue_final_message=False) == begins(add_generation_prompt=True) == ("", "")
    with pytest.raises(UsageError, match="can't be used together"):
        begins(continue_final_message=True, add_generation_prompt=True)
    with pytest.raises(UsageError, match="not a text of the assistant"):
        read({"messages": said[:1], "continue_final_message": True})


def test_an_overflow_has_the_words_that_clients_look_for() -> None:
    error = ContextOverflowError("too long", hint="shorten it", size=(5000, 4096))
    found = error_body(error, 400)["error"]
    assert found["message"] == (
        "This model's maximum context length is 4096 tokens. However, your messages resulted in 5000 tokens. "
        "Please reduce the length of the messages.; shorten it"
    )
    assert (found["code"], found["n_prompt_tokens"], found["n_ctx"]) == ("context_length_exceeded", 5000, 4096)
    assert error_body(ContextOverflowError("too long"), 400)["error"]["message"] == "too long"
