"""What a template writes of an answer with calls is read back as this answer, and fits the grammar of calls.

For every template in llama.cpp's sources that writes calls. LLAMA_CPP is the folder of these sources.
"""

from __future__ import annotations

import json
import os
from functools import cache
from os.path import commonprefix
from pathlib import Path

import pytest
from support.byte_vocabulary import ByteVocabulary

from llmrun.engine.constraint.calls import compile_calls
from llmrun.engine.prompt.template import ChatTemplate
from llmrun.engine.prompt.thinking import opens, possible_reasoning
from llmrun.protocol.answer import AnswerSplitter
from llmrun.protocol.messages import AnswerRequest, Message, Tool, ToolCall
from llmrun.protocol.toolcalls import HARMONY

LLAMA_CPP = os.environ.get("LLAMA_CPP", "")
NAMES = sorted(file.stem for file in Path(LLAMA_CPP, "models", "templates").glob("*.jinja")) if LLAMA_CPP else []
ENDS = ("<|im_end|>", "<|end_of_msg|>", "<|eot|>", "<|eot_id|>", "<|END_OF_TURN_TOKEN|>", "<|role_end|>")
ENDS += ("<SPECIAL_12>", "<|tool_response>")

pytestmark = [
    pytest.mark.upstream,
    pytest.mark.skipif(not LLAMA_CPP, reason="needs LLAMA_CPP, the folder of llama.cpp's sources"),
]

SAID, THOUGHT = "Let me look it up.", "The user wants the weather."
ARGUMENTS = {  # in the order of their names, because some templates sort them
    "city": 'Rome\n"the eternal"',
    "days": 7,
    "exact": True,
    "factor": 1.5,
    "near": None,
    "place": {"inner": {"x": 1}, "name": "Lazio"},
    "tags": ["a, b", "c"],
}
_X = {"type": "object", "description": "?", "properties": {"x": {"type": "integer", "description": "?"}}}
_PLACE = {"inner": _X, "name": {"type": "string", "description": "?"}}
_TYPES = ("string", "integer", "boolean", "number", "null", "object", "array")
_PROPERTIES = {name: {"type": kind, "description": "?"} for name, kind in zip(ARGUMENTS, _TYPES, strict=True)}
_MORE = {"place": {"properties": _PLACE}, "tags": {"items": {"type": "string"}}}
_ALL = {name: schema | _MORE.get(name, {}) for name, schema in _PROPERTIES.items()}
_REQUIRED = [name for name, value in ARGUMENTS.items() if value is not None]  # MiniMax M3's template leaves out nulls
_SCHEMA = {"type": "object", "description": "?", "properties": _ALL, "required": _REQUIRED}
# As Python writes them, in templates that print arguments; a grammar demands JSON.
_CONSTANTS = {"True": "true", "None": "null"}
_PYTHON = {
    "['a, b', 'c']": '["a, b", "c"]',
    "{'inner': {'x': 1}, 'name': 'Lazio'}": '{"inner": {"x": 1}, "name": "Lazio"}',
}
_NO_PARAMETERS = '{"type": "object", "description": "?", "properties": {}}'
TOOLS = (Tool("get_weather", "Tells it.", json.dumps(_SCHEMA)), Tool("now", "Tells it.", _NO_PARAMETERS))
CALLS = (ToolCall("call00001", "get_weather", json.dumps(ARGUMENTS)), ToolCall("call00002", "now", "{}"))
ANSWERS = {
    "one call": Message("assistant", "", CALLS[:1]),
    "two calls": Message("assistant", "", CALLS),
    "text and call": Message("assistant", SAID, CALLS[:1]),
    "reasoning and call": Message("assistant", "", CALLS[:1], reasoning=THOUGHT),
}
QUESTION = Message("user", "How is the weather in Rome?")


# Template and kind of answer, or "" for the grammar -> why it is not so.
DIFFERENT = {
    ("Apriel-1.6-15b-Thinker-fixed", "reasoning and call"): "the template leaves out what the prompt ends with",
    ("NVIDIA-Nemotron-Nano-v2", "text and call"): "the template writes the text as reasoning that does not end",
    ("deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "two calls"): "its control token after calls occurs after two only",
}


def _expect_difference(name: str, kind: str) -> None:
    why = DIFFERENT.get((name, kind), DIFFERENT.get((name, None)))
    if why is not None:
        pytest.xfail(why)


@cache
def _template(name: str) -> ChatTemplate:
    source = Path(LLAMA_CPP, "models", "templates", f"{name}.jinja").read_text()
    return ChatTemplate(source, bos="<s>", eos="</s>", ends=ENDS)


def _rendered(template: ChatTemplate, *messages: Message, begins: bool) -> str:
    return template._render_trial(messages, TOOLS, form=template._support.form, thinking=True, begins=begins)


def _generated(template: ChatTemplate, answer: Message) -> tuple[str, str]:
    """Return the prompt and the answer, of which the template writes what a model writes after that prompt."""
    whole, plain = (_rendered(template, QUESTION, each, begins=False) for each in (answer, Message("assistant", SAID)))
    if not whole:
        pytest.skip("the template fails at this answer or its tools")
    prompt = commonprefix((_rendered(template, QUESTION, begins=True), whole))  # noqa: RUF071 - not of paths
    if prompt.rfind("<") > prompt.rfind(">"):  # not in the middle of a marker
        prompt = prompt[: prompt.rfind("<")]
    closing = plain.rpartition(SAID)[2]
    rest = min((whole[len(prompt) :].removesuffix(closing).partition(end)[0] for end in ENDS), key=len)
    return prompt, rest.removesuffix(template.reasoning.tail if template.reasoning else "")


def _skip_unless_written(template: ChatTemplate) -> None:
    if not template._support.calls:
        pytest.skip("the template writes no calls")
    if template.syntax is HARMONY:
        pytest.skip("the template writes earlier calls in another form than the model")


@pytest.mark.parametrize("kind", ANSWERS)
@pytest.mark.parametrize("name", NAMES)
def test_it_is_read_back(name: str, kind: str) -> None:
    template, answer = _template(name), ANSWERS[kind]
    _skip_unless_written(template)
    if kind == "two calls" and template.syntax.between is None:
        pytest.skip("the template takes one call")
    prompt, text = _generated(template, answer)
    if CALLS[0].name not in text:
        pytest.skip("the template leaves out the call")
    _expect_difference(name, kind)
    reasoning = template.reasoning or possible_reasoning(())
    for pieces in ([text], list(text)):
        splitter = AnswerSplitter(reasoning, inside=opens(prompt, reasoning), syntax=template.syntax, tools=TOOLS)
        parts = [part for piece in pieces for part in splitter.feed(piece)] + [*splitter.flush()]
        calls: list[list[str]] = []
        for part in parts:
            if part.kind == "call":
                calls.append([part.text, ""])
            elif part.kind == "arguments":
                calls[-1][1] += part.text
        texts = ["".join(part.text for part in parts if part.kind == each).strip() for each in ("text", "reasoning")]
        nothing = {} if "near" in text else {"near": None}
        assert [
            (called, json.loads(arguments) | (nothing if arguments != "{}" else {})) for called, arguments in calls
        ] == [(call.name, json.loads(call.arguments)) for call in answer.tool_calls]
        assert texts == [answer.content if SAID in text else "", THOUGHT if THOUGHT in text else ""]


@pytest.mark.parametrize("name", NAMES)
def test_it_fits_the_grammar(name: str) -> None:
    template = _template(name)
    _skip_unless_written(template)
    _expect_difference(name, "grammar")
    syntax = template.syntax
    text = _generated(template, ANSWERS["one call"])[1].rstrip()
    is_python = syntax.parameters is not None and syntax.parameters.is_python
    for literal, as_json in (_PYTHON if is_python else _PYTHON | _CONSTANTS).items():
        text = text.replace(literal, as_json)
    first = syntax.begin + (syntax.call[0] if isinstance(syntax.call[0], str) else "")
    written = text[text.index(first.removeprefix(syntax.prefill)) :].encode()
    request = AnswerRequest(tools=TOOLS, tool_choice="required", parallel_calls=False)
    matcher = compile_calls(request, syntax, ByteVocabulary({256: b"</s>"}), frozenset())
    assert matcher.allowed([*written]) == len(written), written[matcher.allowed([*written]) :]
    broken = written.replace(b"7", b"seven", 1)
    assert matcher.allowed([*broken]) < len(broken)
