"""Ollama's protocol as data: what its clients send, and what their own types read of our lines."""

from __future__ import annotations

import json
from typing import Any

import ollama
import pytest
from support import answers
from support.event_streams import calls, streamed

from llmrun.errors import BadGrammarError, ContextOverflowError, LlmrunError, UsageError
from llmrun.grammar import Grammar
from llmrun.protocol.messages import Event, Message, Stats, TokenLogprob, Tool, ToolCall
from llmrun.protocol.params import Limits
from llmrun.server.answer import AnswerWriter, Envelope
from llmrun.server.protocols import models
from llmrun.server.protocols import ollama as ours
from llmrun.server.protocols.models import VERSION, ModelDescription, running, show, tags

HELLO = {"model": "smollm2", "messages": [{"role": "user", "content": "Hello"}]}
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}}
ENVELOPE = Envelope("id", 1_700_000_000, "smollm2")
STATS = Stats(prompt_tokens=30, prefill_seconds=0.5, completion_tokens=7, decode_seconds=2.0, ttft_seconds=0.75)
MODEL = ModelDescription("smollm2:135m", 1_700_000_000.25, 92_000_000, "sha256:12ab", "llama", "135M", "Q4_1")


CALLS = calls("call_1", "call_2", "turn_on", "room")


def told(writer: AnswerWriter, *parts: Event) -> list[dict[str, Any]]:
    """The lines of a stream."""
    return [json.loads(line) for line in streamed(writer, *parts).splitlines()]


# ---- what is asked


def test_home_assistant() -> None:
    asked = ours.read_chat(
        {
            "model": "smollm2",
            "messages": [
                {"role": "system", "content": "You control a home."},
                {"role": "user", "content": "Light!"},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"function": {"name": "turn_on", "arguments": {"room": "hall"}}}],
                },
                {"role": "tool", "content": '{"ok": true}', "tool_name": "turn_on"},
            ],
            "tools": [
                {"type": "function", "function": {"name": "turn_on", "description": "Light", "parameters": WEATHER}}
            ],
            "stream": True,
            "keep_alive": -1,
            "think": False,
            "options": {"num_ctx": 8192},
        }
    )
    assert asked.model == "smollm2"
    assert asked.request.messages[2:] == (
        Message("assistant", "", (ToolCall("", "turn_on", '{"room": "hall"}'),)),
        Message("tool", '{"ok": true}', name="turn_on"),
    )
    assert asked.request.tools == (Tool("turn_on", "Light", json.dumps(WEATHER)),)
    assert (asked.keep_seconds, asked.request.thinking, asked.stream) == (-1, False, True)


def test_options_become_sampling_parameters_and_limits() -> None:
    options = {"temperature": 0, "top_k": 20, "num_predict": 5, "stop": ["\n"], "seed": 7, "num_gpu": 99, "top_p": None}
    asked = ours.read_chat({**HELLO, "options": options})
    assert asked.sampling == {"temperature": 0, "top_k": 20, "seed": 7}
    assert asked.request.limits == Limits(5, ("\n",))


@pytest.mark.parametrize("most", [-1, -2, 0, None])
def test_no_limit_of_tokens(most: int | None) -> None:
    assert ours.read_chat({**HELLO, "options": {"num_predict": most}}).request.limits == Limits()


def test_everything_is_streamed_unless_it_is_not() -> None:
    assert ours.read_chat(HELLO).stream
    assert not ours.read_chat({**HELLO, "stream": False}).stream


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ("300s", 300), (-1, -1), ("-1", -1), ("-1m", -1), (0, 0), ("5m", 300), ("1h30m", 5400), ("1.5s", 1.5),
        ("200ms", 0.2), (60, 60), ("60", 60), (None, None),
    ],
)  # fmt: skip
def test_keep_alive(said: object, seconds: float | None) -> None:
    assert ours.read_chat({**HELLO, "keep_alive": said}).keep_seconds == seconds


def test_format() -> None:
    assert ours.read_chat({**HELLO, "format": "json"}).request.grammar == Grammar("json_schema", '{"type": "object"}')
    assert ours.read_chat({**HELLO, "format": WEATHER}).request.grammar == Grammar("json_schema", json.dumps(WEATHER))
    assert ours.read_chat({**HELLO, "format": ""}).request.grammar is None


@pytest.mark.parametrize(("said", "thinking"), [(True, True), (False, False), ("high", True), (None, None)])
def test_think(said: object, thinking: bool | None) -> None:
    assert ours.read_chat({**HELLO, "think": said}).request.thinks is thinking


def test_reasoning_in_the_history() -> None:
    said = {"role": "assistant", "content": "Hi", "thinking": "Hm."}
    asked = ours.read_chat({"model": "m", "messages": [said, {"role": "user", "content": "And?"}]}).request
    assert asked.messages[0] == Message("assistant", "Hi", reasoning="Hm.")


def test_generate() -> None:
    asked = ours.read_generate({"model": "m", "prompt": "Why?", "system": "Be short."})
    assert asked.request.messages == (Message("system", "Be short."), Message("user", "Why?"))
    raw = ours.read_generate({"model": "m", "prompt": "def f(", "raw": True, "suffix": ""}).request
    assert (raw.prompt, raw.messages) == ("def f(", ())
    gap = ours.read_generate({"model": "m", "prompt": "def f(", "suffix": ")"}).request
    assert (gap.prompt, gap.suffix) == ("def f(", ")")


@pytest.mark.parametrize(
    ("body", "reason"),
    [({}, "load"), ({"keep_alive": 0}, "unload"), ({"prompt": "", "keep_alive": "0"}, "unload")],
)
def test_a_request_that_only_loads_or_lets_go(body: dict[str, Any], reason: str) -> None:
    asked = ours.read_generate(body)
    assert (asked.request.messages, asked.request.prompt) == ((), None)
    loaded = ollama.GenerateResponse(**ours.generate_writer(body, ENVELOPE).whole())
    assert (loaded.done, loaded.done_reason, loaded.response) == (True, reason, "")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"messages": "Hello"}, "messages"),
        ({"messages": ["Hello"]}, r"messages\[0\]"),
        ({"messages": [{"content": "Hello"}]}, r"messages\[0\].role"),
        ({"messages": [{"role": "robot", "content": "Hello"}]}, "robot"),
        ({"messages": [{"role": "user", "content": 5}]}, r"messages\[0\].content"),
        ({"messages": [{"role": "user", "content": "", "images": ["aGk="]}]}, "images"),
        ({"options": {"temperature": "hot"}}, "temperature"),
        ({"options": {"top_p": 1.5}}, "top_p"),
        ({"options": {"num_ctx": 0}}, "num_ctx"),
        ({"options": []}, "options"),
        ({"keep_alive": "soon"}, "keep_alive"),
        ({"keep_alive": "nan"}, "keep_alive"),
        ({"keep_alive": 1e12}, "keep_alive"),
        ({"think": "a bit"}, "think"),
        ({"format": "yaml"}, "format"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, r"tools\[0\].function.name"),
        ({"tools": [{"type": "function", "function": {"name": 'a", "b'}}]}, r"tools\[0\].function.name"),
        ({"tools": [{"function": {"name": "a"}}, {"function": {"name": "a"}}]}, "same name"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": 5}}]}]}, "argum"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ],
)
def test_what_is_refused_is_named(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        ours.read_chat({**HELLO, **wrong})


@pytest.mark.parametrize("wrong", [{"template": "{{ .Prompt }}"}, {"images": ["aGk="]}])
def test_what_generate_refuses(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        ours.read_generate({"model": "m", "prompt": "f(", **wrong})


def test_a_schema_that_cannot_be_met_is_refused() -> None:
    with pytest.raises(BadGrammarError):
        ours.read_chat({**HELLO, "format": {"type": "nothing"}})


# ---- what is answered


def test_a_chat_streams() -> None:
    writer = ours.chat_writer(HELLO, ENVELOPE)
    lines = told(
        writer,
        answers.started(30, 10),
        answers.reasoning("Hm."),
        answers.text("Hel"),
        answers.text("lo"),
        answers.finished("stop", STATS),
    )
    pieces = [ollama.ChatResponse(**line) for line in lines]
    assert [(piece.message.thinking, piece.message.content, piece.done) for piece in pieces] == [
        ("Hm.", "", False),
        (None, "Hel", False),
        (None, "lo", False),
        (None, "", True),
    ]
    last = pieces[-1]
    assert (last.model, last.done_reason, last.created_at) == ("smollm2", "stop", "2023-11-14T22:13:20Z")
    assert (last.prompt_eval_count, last.prompt_eval_duration) == (30, 500_000_000)
    assert (last.eval_count, last.eval_duration, last.total_duration) == (7, 2_000_000_000, 2_750_000_000)


def test_a_whole_chat() -> None:
    writer = ours.chat_writer({**HELLO, "stream": False}, ENVELOPE)
    told(
        writer,
        answers.started(30, 10),
        answers.reasoning("H"),
        answers.reasoning("m."),
        answers.text("Hel"),
        answers.text("lo"),
        answers.finished("length", STATS),
    )
    whole = ollama.ChatResponse(**writer.whole())
    assert (whole.message.role, whole.message.thinking, whole.message.content) == ("assistant", "Hm.", "Hello")
    assert (whole.done, whole.done_reason) == (True, "length")


def test_arguments_of_calls_are_objects() -> None:
    writer = ours.chat_writer(HELLO, ENVELOPE)
    lines = told(writer, *CALLS, answers.finished("stop", STATS))
    calls = [call for line in lines for call in ollama.ChatResponse(**line).message.tool_calls or ()]
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        ("turn_on", {"room": "Rome"}),
        ("now", {}),
    ]
    whole = ollama.ChatResponse(**writer.whole())
    assert whole.message.tool_calls == calls


def test_a_call_that_was_cut_off_is_left_out() -> None:
    writer = ours.chat_writer(HELLO, ENVELOPE)
    lines = told(writer, *CALLS[:2], answers.finished("length", STATS))
    assert [line["message"] for line in lines] == [{"role": "assistant", "content": ""}]
    assert "tool_calls" not in writer.whole()["message"]


def test_generate_streams() -> None:
    writer = ours.generate_writer({}, ENVELOPE)
    lines = told(writer, answers.reasoning("Hm."), answers.text("Hi"), answers.finished("stop", STATS))
    pieces = [ollama.GenerateResponse(**line) for line in lines]
    assert [(piece.thinking, piece.response) for piece in pieces] == [("Hm.", ""), (None, "Hi"), (None, "")]
    assert ollama.GenerateResponse(**writer.whole()).response == "Hi"


def test_logprobs() -> None:
    token = TokenLogprob("é", (195, 169), -0.5, (("e", (101,), -0.7),))
    writer = ours.chat_writer(HELLO, ENVELOPE)
    told(writer, answers.text("é", (token,)), answers.finished("stop", STATS))
    logprobs = ollama.ChatResponse(**writer.whole()).logprobs
    assert logprobs is not None
    assert (logprobs[0].token, logprobs[0].logprob) == ("é", -0.5)
    assert [top.token for top in logprobs[0].top_logprobs or ()] == ["e"]


def test_errors() -> None:
    error: LlmrunError = ContextOverflowError("the prompt has 9 tokens", why="8 fit")
    line = json.loads(ours.chat_writer(HELLO, ENVELOPE).error(error))
    assert (
        line == ours.error_body(error, 400) == {"error": "the prompt has 9 tokens: 8 fit", "code": "context-overflow"}
    )


# ---- what there is


def test_tags_have_what_zed_reads() -> None:
    body = tags([MODEL])
    (model,) = ollama.ListResponse(**body).models
    assert (model.model, model.size, model.digest) == ("smollm2:135m", 92_000_000, "sha256:12ab")
    assert model.modified_at is not None
    assert model.modified_at.timestamp() == 1_700_000_000.25
    assert body["models"][0]["name"] == "smollm2:135m"
    assert model.details is not None
    assert (model.details.format, model.details.family) == ("gguf", "llama")
    assert (model.details.parameter_size, model.details.quantization_level) == ("135M", "Q4_1")


@pytest.mark.parametrize("expires", [1_800_000_000.0, None])
def test_ps(expires: float | None) -> None:
    found = running(MODEL, expires=expires, size=200, size_vram=0, n_ctx=4096)
    (model,) = ollama.ProcessResponse(models=[found]).models
    assert (model.name, model.size, model.size_vram, model.context_length) == ("smollm2:135m", 200, 0, 4096)
    assert model.expires_at is not None
    assert model.expires_at.timestamp() >= 1_800_000_000


def test_show_has_what_vs_code_reads() -> None:
    shown = ollama.ShowResponse(**show(MODEL, n_ctx_train=8192, template="{{ messages }}", thinks=True))
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert shown.modelinfo == {"general.architecture": "llama", "llama.context_length": 8192}
    assert show(MODEL, n_ctx_train=8192, template="", thinks=False)["capabilities"] == ["completion"]
    seeing = show(MODEL, n_ctx_train=8192, template="", thinks=False, modalities=frozenset({"image"}))
    assert seeing["capabilities"] == ["completion", "vision"]


def test_the_version_is_one_that_vs_code_takes() -> None:
    assert tuple(map(int, VERSION["version"].split("."))) >= (0, 6, 4)


def test_tags_have_what_zed_parses() -> None:
    """Its structs LocalModelListing and ModelDetails: a missing field, or one of another type, empties the list."""
    listing = {"name": str, "modified_at": str, "size": int, "digest": str, "details": dict}
    details = {"format": str, "family": str, "families": list, "parameter_size": str, "quantization_level": str}
    (model,) = models.tags([models.ModelDescription("m:q", 0.5, 9, "d", "llama", "1B", "Q4_0")])["models"]
    assert {name: type(model[name]) for name in listing} == listing
    assert {name: type(model["details"][name]) for name in details} == details
