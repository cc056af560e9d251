"""Whatever JSON a client sends, it is read, or refused with an error that says why."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from llmrun.errors import BadGrammarError, UsageError
from llmrun.planning.speculation import AUTO, OFF
from llmrun.protocol.frames import encode
from llmrun.protocol.messages import Generate, Message
from llmrun.server.answer import CompletionRequest
from llmrun.server.protocols import anthropic, ollama, openai_chat, openai_responses, openai_text

HELLO = [{"role": "user", "content": "Hello"}]
READERS: dict[str, tuple[Callable[[Mapping[str, Any]], CompletionRequest], dict[str, Any]]] = {
    "anthropic": (anthropic.read, {"messages": HELLO, "max_tokens": 9}),
    "ollama chat": (ollama.read_chat, {"messages": HELLO}),
    "ollama generate": (ollama.read_generate, {"prompt": "Hello"}),
    "openai chat": (openai_chat.read, {"messages": HELLO}),
    "openai text": (openai_text.read, {"prompt": "Hello"}),
    "openai responses": (openai_responses.read, {"input": HELLO}),
}
"""Protocol -> how it is read, and a body that is plausible there."""
COMPACTION = (openai_responses.read_compaction, {"input": HELLO, "model": "m"})
KEYS = (
    "model", "messages", "input", "prompt", "role", "content", "type", "text", "system", "tools", "tool_calls",
    "function", "name", "parameters", "input_schema", "arguments", "tool_choice", "call_id", "output",
    "tool_use_id", "id", "format", "response_format", "json_schema", "schema", "options", "stop",
    "stop_sequences", "max_tokens", "num_predict", "keep_alive", "temperature", "top_k", "seed", "logit_bias",
    "thinking", "think", "reasoning", "stream", "n", "grammar", "raw", "strict", "tool_call_id", "images",
    "top_logprobs", "logprobs", "budget_tokens", "num_ctx", "effort", "echo", "suffix",
    "chat_template_kwargs", "instructions", "is_error", "speculate",
)  # fmt: skip
TEXTS = (
    "user", "assistant", "system", "tool", "text", "function", "tool_use", "tool_result", "input_text",
    "message", "function_call", "function_call_output", "json_schema", "object", "auto", "required", "any",
    "{}", "-1", "5m", "f",
)  # fmt: skip
NUMBERS = (0, 1, -1, 2**31, 2**64, 10**400, 0.5, -1e308, 1e400, float("nan"))


def made_up(numbers: random.Random, depth: int) -> Any:
    kind = numbers.randrange(4 if depth else 2)
    if kind == 0:
        return numbers.choice((None, True, False, *NUMBERS))
    if kind == 1:
        return numbers.choice(("", "\ud83d", *TEXTS))
    if kind == 2:
        return [made_up(numbers, depth - 1) for _ in range(numbers.randrange(3))]
    return {numbers.choice(KEYS): made_up(numbers, depth - 1) for _ in range(numbers.randrange(5))}


@pytest.mark.parametrize("reader", [*READERS.values(), COMPACTION], ids=[*READERS, "compaction"])
def test_any_body_is_read_or_refused(reader: tuple[Callable[[Mapping[str, Any]], CompletionRequest], Any]) -> None:
    numbers = random.Random(11)
    read, plausible = reader
    taken = refused = 0
    for _ in range(4000):
        try:
            asked = read({**plausible, numbers.choice(KEYS): made_up(numbers, 4)})
        except (UsageError, BadGrammarError):
            refused += 1
        else:
            encode(Generate(1, asked.request))
            taken += 1
    assert taken > 100
    assert refused > 100


@pytest.mark.parametrize("name", READERS)
def test_every_protocol_reads_what_is_said_of_drafts(name: str) -> None:
    read, plausible = READERS[name]

    def said(value: Any) -> int | None:
        body = {"speculate": value}
        found: int | None = read({**plausible, **({"options": body} if "ollama" in name else body)}).speculate
        return found

    assert [said(value) for value in ("auto", "off", 7, "7", None)] == [AUTO, OFF, 7, 7, None]
    with pytest.raises(UsageError, match="speculate"):
        said("fast")


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("anthropic", "stop_sequences"),
        ("ollama chat", "options.stop"),
        ("openai chat", "stop"),
        ("openai text", "stop"),
    ],
)
def test_every_protocol_drops_empty_stop_strings_and_names_its_field(name: str, key: str) -> None:
    read, plausible = READERS[name]

    def stop(texts: list[str]) -> tuple[str, ...]:
        outer, _, inner = key.rpartition(".")
        body = {inner: texts}
        return read({**plausible, **({outer: body} if outer else body)}).request.limits.stop

    assert stop(["", "END", ""]) == ("END",)
    with pytest.raises(UsageError, match=f"^invalid {key} "):
        stop([f"stop {number}" for number in range(100)])


SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
WRAPPED = {"type": "json_schema", "json_schema": {"name": "f", "schema": SCHEMA}}
FORMATS: tuple[dict[str, Any], ...] = (
    {"response_format": WRAPPED},
    {"response_format": SCHEMA},
    {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
    {"response_format": {"type": "json_object", "json_schema": SCHEMA}},
    {"response_format": {"type": "json_object", "schema": SCHEMA}},
    {"response_format": {"json_schema": {"schema": SCHEMA}}},
    {"format": {"type": "json_object", "json_schema": SCHEMA}},
    {"text": {"format": {"type": "json_schema", "name": "f", "schema": SCHEMA}}},
    {"format": SCHEMA},
    {"format": WRAPPED},
    {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    {"output_format": {"type": "json_schema", "schema": SCHEMA}},
    {"guided_json": SCHEMA},
    {"guided_json": json.dumps(SCHEMA)},
    {"structured_outputs": {"json": SCHEMA}},
    {"json_schema": SCHEMA},
)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("given", FORMATS, ids=lambda given: next(iter(given)))
def test_a_schema_is_enforced_under_the_name_of_any_protocol(name: str, given: dict[str, Any]) -> None:
    read, plausible = READERS[name]
    asked = read({**plausible, **given})
    assert asked.request.grammar is not None
    assert json.loads(asked.request.grammar.text) == SCHEMA
    assert asked.ignored == ()
    with pytest.raises(UsageError, match="can't be used together"):
        read({**plausible, "grammar": 'root ::= "a"', **given})


@pytest.mark.parametrize("name", READERS)
def test_what_nobody_reads_is_named_with_its_path(name: str) -> None:
    read, plausible = READERS[name]
    unknown: dict[str, Any] = {"made_up": {"deep": 1}, "off": False, "none": None, "empty": [], "user": "me"}
    assert read({**plausible, **unknown}).ignored == ("made_up",)
    assert read({**plausible, "made, up\n": 1}).ignored == ("made??up?",), "it goes into a header"
    if "messages" in plausible:
        messages = [{**message, "audio": {"id": "a"}} for message in HELLO * 3]
        assert read({**plausible, "messages": messages}).ignored == ("messages[0].audio",), "one of each kind"


@pytest.mark.parametrize("name", ["anthropic", "ollama chat", "openai chat"])
def test_a_last_message_of_the_assistant_is_continued(name: str) -> None:
    read, plausible = READERS[name]
    asked = read({**plausible, "messages": [*HELLO, {"role": "assistant", "content": "Hi th"}]})
    assert (asked.request.messages, asked.request.begins) == ((Message("user", "Hello"),), "Hi th")
    assert read({**plausible, "messages": HELLO}).request.begins == ""


@pytest.mark.parametrize("name", READERS)
def test_the_model_is_kept_loaded_as_any_request_says(name: str) -> None:
    read, plausible = READERS[name]
    assert read({**plausible, "keep_alive": "24h"}).keep_seconds == 86_400
    assert read({**plausible, "keep_alive": -1}).keep_seconds == -1
    assert read(plausible).keep_seconds is None
