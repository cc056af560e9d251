"""Every chat template in llama.cpp's sources takes the conversations that clients send, and nothing in them becomes
control tokens.

LLAMA_CPP is the folder of llama.cpp's sources.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
from support.agent_conversations import CONVERSATIONS, TOOLS, has_tools
from support.family_model import control_texts

from llmrun.engine.prompt.template import ChatTemplate, ControlTexts, Part
from llmrun.errors import BadTemplateError
from llmrun.protocol.messages import Message, Tool, ToolCall

LLAMA_CPP = os.environ.get("LLAMA_CPP", "")

pytestmark = [
    pytest.mark.upstream,
    pytest.mark.skipif(not LLAMA_CPP, reason="needs LLAMA_CPP, the folder of llama.cpp's sources"),
]


@cache
def _templates() -> dict[str, ChatTemplate]:
    files = sorted(Path(LLAMA_CPP, "models", "templates").glob("*.jinja"))
    assert len(files) >= 50
    return {file.stem: ChatTemplate(file.read_text(), bos="<s>", eos="</s>") for file in files}


def _refusal(template: ChatTemplate, name: str) -> str | None:
    messages = CONVERSATIONS[name]
    try:
        parts = template.render(messages, ControlTexts(()), tools=TOOLS if has_tools(name) else ())
    except BadTemplateError as error:
        return str(error)
    prompt = "".join(part.text for part in parts if isinstance(part, Part))
    late = [each.content for each in messages[1:] if each.role == "system"]
    return next((f"{text} is missing" for text in late if text not in prompt), None)


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_no_template_refuses_it(name: str) -> None:
    refused = {stem: why for stem, template in _templates().items() if (why := _refusal(template, name))}
    assert refused == {}


def _written(write: Callable[[], str], name: Callable[[], str]) -> tuple[list[Message], list[Tool]]:
    """Return a conversation and tools, all of whose texts these functions give; names have to be the same again."""
    called, parameter, call_ids = name(), name(), (name(), name())
    schema = {
        "type": "object",
        "properties": {parameter: {"type": "string", "description": write(), "enum": [write(), write()]}},
        "required": [parameter],
    }
    calls = [
        ToolCall(call_id, called, json.dumps({parameter: write(), name(): {name(): [write(), 1, None]}}))
        for call_id in call_ids
    ]
    results = [Message("tool", write(), tool_call_id=call_id, name=called) for call_id in call_ids]
    messages = [
        Message("system", write()), Message("user", write()),
        Message("assistant", "", (calls[0],), reasoning=write()), results[0],
        Message("assistant", write(), (calls[1],)), results[1],
        Message("assistant", write(), reasoning=write()), Message("user", write()),
    ]  # fmt: skip
    return messages, [Tool(called, write(), json.dumps(schema))]


def _made(
    template: ChatTemplate, control: ControlTexts, messages: Sequence[Message], tools: Sequence[Tool]
) -> list[str]:
    """Return the control texts in a prompt that become control tokens."""
    parts = template.render(messages, control, tools=tools, thinking=True)
    special = (part.text for part in parts if isinstance(part, Part) and part.special)
    return [text for each in special for text in control.pattern.findall(each)]


def test_nothing_that_is_written_becomes_a_control_token() -> None:
    for stem, template in _templates().items():
        texts = control_texts(template.source)
        control = ControlTexts(texts)
        for pattern in ("{}", "a {} b", "{}{}"):
            numbers = iter(range(1000))
            hostile = (pattern.replace("{}", text) for text in [*texts, "<s>"] * 100)
            innocent = _written(
                lambda numbers=numbers: f"word {next(numbers)}", lambda numbers=numbers: f"n{next(numbers)}"
            )
            attack = _written(lambda hostile=hostile: next(hostile), lambda hostile=hostile: next(hostile))
            assert _made(template, control, *attack) == _made(template, control, *innocent), (stem, pattern)


def _random_conversation(draw: random.Random) -> Iterator[Message]:
    """Yield messages in an order that OpenAI's protocol allows; most are what clients send, some are rare."""
    numbers = iter(range(1000))
    if draw.random() < 0.7:
        yield Message("system", f"system {next(numbers)}")
    for _ in range(draw.randint(1, 3)):
        for _ in range(draw.choice((1, 1, 1, 2))):
            yield Message("user", f"user {next(numbers)}")
        for _ in range(draw.randint(0, 3)):
            calls = [
                ToolCall(
                    f"call_{next(numbers):04}",
                    draw.choice(_CALLED),
                    json.dumps({"town": f"town {next(numbers)}", "n": 1}),
                )
                for _ in range(draw.choice((1, 1, 2, 3)))
            ]
            text = f"assistant {next(numbers)}" if draw.random() < 0.5 else ""
            yield Message("assistant", text, (*calls,), reasoning="reason" if draw.random() < 0.5 else "")
            draw.shuffle(calls)
            for call in calls:
                yield Message("tool", f"tool {next(numbers)}", tool_call_id=call.id, name=call.name)
        if draw.random() < 0.8:
            yield Message("assistant", f"assistant {next(numbers)}", reasoning="reason" if draw.random() < 0.5 else "")
        if draw.random() < 0.2:
            yield Message("system", f"system {next(numbers)}")


_CALLED = ("tell_time", "find_train")
_TOOLS = (
    Tool("tell_time", "Tells the time.", '{"type": "object", "properties": {"town": {"type": "string"}}}'),
    Tool("find_train", ""),
)


LAST_ONLY = ("mistralai-Mistral-Nemo-Instruct-2407",)
"""Templates that write the system prompt only where a question is last."""


def test_random_conversations_are_taken_by_every_template() -> None:
    """And what was written stands in the prompt."""
    draw = random.Random(7)
    for _ in range(40):
        messages = [*_random_conversation(draw)]
        tools = _TOOLS if draw.random() < 0.8 else ()
        for stem, template in _templates().items():
            parts = template.render(messages, ControlTexts(()), tools=tools, thinking=draw.choice((None, True, False)))
            prompt = "".join(part.text for part in parts if isinstance(part, Part))
            left_out = ("assistant", "system") if stem in LAST_ONLY else ("assistant",)
            texts = [each.content for each in messages if each.role not in left_out]
            texts += [json.loads(call.arguments)["town"] for each in messages for call in each.tool_calls]
            assert not [text for text in texts if text not in prompt], stem


SWITCHES = {
    "Cohere2MoE": "skip_thinking",
    "GLM-4.7-Flash": "clear_thinking",
    "LFM2.5-8B-A1B": "preserve_thinking",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "truncate_history_thinking",
    "deepseek-ai-DeepSeek-V4": "drop_thinking",
    "deepseek-ai-DeepSeek-V4-Flash-0731": "drop_thinking",
    "tencent-Hy3": "preserved_thinking",
    "upstage-Solar-Open-100B": "think_render_option",
}
"""Templates with a variable that decides about the reasoning of earlier turns."""


def test_earlier_reasoning_stays_where_a_template_can_keep_it() -> None:
    asked, answer, told = Message("user", "Why?"), Message("assistant", "So.", reasoning="Because."), "Because."
    found = dict[str, list[bool]]()
    for stem, template in _templates().items():
        row = []
        for keeps in (None, True, False):
            parts = template.render((asked, answer, asked), ControlTexts(()), thinking=True, keep_reasoning=keeps)
            row.append(told in "".join(part.text for part in parts if isinstance(part, Part)))
        assert row[0] is row[1], stem
        if row[1] is not row[2]:
            found[stem] = row
    assert found == dict.fromkeys(SWITCHES, [True, True, False])
    assert all(name in _templates()[stem].source for stem, name in SWITCHES.items())
