"""Answers in llama.cpp's tests/test-chat.cpp mean to us what they mean there, whole and in pieces.

LLAMA_CPP is the folder of llama.cpp's sources.
"""

from __future__ import annotations

import json
import os
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.chat_cases import ChatCase, read_cases

from llmrun.engine.prompt.template import ChatTemplate, ControlTexts, Part
from llmrun.engine.prompt.thinking import opens, possible_reasoning
from llmrun.protocol.answer import AnswerSplitter
from llmrun.protocol.messages import Message, Tool

LLAMA_CPP = os.environ.get("LLAMA_CPP", "")
ENDS = (
    "<|im_end|>",
    "<|end_of_msg|>",
    "<|eot|>",
    "<|eot_id|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|call|>",
    "<|return|>",
    "<|role_end|>",
)

pytestmark = [
    pytest.mark.upstream,
    pytest.mark.skipif(not LLAMA_CPP, reason="needs LLAMA_CPP, the folder of llama.cpp's sources"),
]


# Template and the beginning of the answer -> why it means something else to us.
DIFFERENT = {
    (
        "mistralai-Ministral-3-14B-Reasoning-2512",
        "[THINK]I need to output the invoice",
    ): "with a schema our grammar begins at once, without a fence",
    ("meta-llama-Llama-3.1-8B-Instruct", "```json"): "with a schema our grammar begins at once, without a fence",
    (
        "openai-gpt-oss-120b",
        "<|channel|>analysis<|message|>I will execute",
    ): "nothing that a model writes is lost: what it says to an unknown tool is shown",
}


class Meaning(NamedTuple):
    """What is compared: texts without blanks around them, and JSON as data."""

    reasoning: str
    content: str
    calls: tuple[tuple[str, Any], ...]


@cache
def _cases() -> list[ChatCase]:
    return read_cases(Path(LLAMA_CPP, "tests", "test-chat.cpp").read_text()) if LLAMA_CPP else []


@cache
def _template(name: str) -> ChatTemplate:
    source = Path(LLAMA_CPP, "models", "templates", f"{name}.jinja").read_text()
    # In the model's vocabulary these are control tokens.
    written = "".join(case.text for case in _cases() if case.template == name)
    control = {*re.findall(r"<\|[^|<>]*\|>", written)}
    return ChatTemplate(source, bos="<s>", eos="</s>", control=control, ends=ENDS)


def _tools(case: ChatCase) -> tuple[Tool, ...]:
    return tuple(Tool(*tool[:3]) for tool in case.options.get("tools", ()))


def _splitter(case: ChatCase) -> AnswerSplitter:
    template, tools = _template(case.template), _tools(case)
    thinking = case.options.get("enable_thinking", True)
    parts = template.render((Message("user", "Hey there!"),), ControlTexts(()), thinking=thinking, tools=tools)
    prompt = "".join(part.text for part in parts if isinstance(part, Part))
    reasoning = template.reasoning or possible_reasoning((), "" if tools else template.lead)
    inside = opens(prompt, reasoning)
    continues = case.options.get("continue_final_message", "")
    if continues:
        inside, reasoning = continues.endswith("REASONING"), reasoning._replace(words="")
    return AnswerSplitter(reasoning, inside=inside, syntax=template.syntax if tools else None, tools=tools)


def _read(case: ChatCase, pieces: list[str]) -> Meaning:
    splitter = _splitter(case)
    parts = [part for piece in pieces for part in splitter.feed(piece)]
    parts += splitter.flush(is_cut_off="is_partial" in case.options)
    texts = {"reasoning": "", "text": ""}
    calls: list[list[str]] = []
    for part in parts:
        if part.kind in texts:
            texts[part.kind] += part.text
        elif part.kind == "call":
            calls.append([part.text, ""])
        elif part.kind == "arguments":
            calls[-1][1] += part.text
    return _normal(texts["reasoning"], texts["text"], calls)


def _normal(reasoning: str, content: str, calls: list[Any]) -> Meaning:
    return Meaning(reasoning.strip(), content.strip(), tuple((name, _data(text)) for name, text in calls))


def _data(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return re.sub(r"\s", "", text)


def _expected(case: ChatCase) -> Meaning:
    reasoning, content = case.reasoning, case.content
    if case.options.get("continue_final_message"):
        said = case.options["messages"][-1]  # belongs to the prompt
        reasoning = reasoning.removeprefix(said.reasoning_content)
        content = content.removeprefix(said.content)
    return _normal(reasoning, content, case.calls)


def _answer(case: ChatCase) -> str:
    """Return the text as the engine decodes it: up to a token that ends it, without control tokens of no meaning."""
    text = min((case.text.partition(end)[0] for end in ENDS), key=len)
    template = _template(case.template)
    meaning = "".join(((template.reasoning or possible_reasoning(())).texts, template.syntax.texts)[bool(_tools(case))])
    return text.replace("<|CHATBOT_TOKEN|>", "") if "<|CHATBOT_TOKEN|>" not in meaning else text


def _means(case: ChatCase, found: Meaning) -> bool:
    expected = _expected(case)
    calls = found.calls == expected.calls
    if "is_partial" in case.options:  # arguments may come later here, but never others
        names = [tuple(name for name, _ in each.calls) for each in (found, expected)]
        calls = names[1][: len(names[0])] == names[0]
    if case.options.get("reasoning_format", "COMMON_REASONING_FORMAT_NONE").endswith("NONE"):
        # There the reasoning stays in the content, with its tags; here it never does.
        syntax = _template(case.template).reasoning or possible_reasoning(())
        marks = re.compile("|".join([*map(re.escape, filter(None, (*syntax.texts, syntax.words))), r"<\|\w+\|>|\s"]))
        said, meant = (marks.sub("", each.reasoning + each.content) for each in (found, expected))
        return said == meant and calls
    return found[:2] == expected[:2] and calls


def test_all_cases_are_read() -> None:
    source = Path(LLAMA_CPP, "tests", "test-chat.cpp").read_text()
    assert len(_cases()) >= len(re.findall(r"^\s*[^/\s].*\brun\(\);", source, re.MULTILINE))
    assert all(isinstance(tool, list) for case in _cases() for tool in case.options.get("tools", ()))


def _reason(case: ChatCase) -> str:
    keys = ((template, begin) for template, begin in DIFFERENT if template == case.template)
    return next((DIFFERENT[key] for key in keys if case.text.startswith(key[1])), "")


@pytest.mark.parametrize("case", _cases(), ids=lambda case: f"{case.template}: {case.text[:60]}")
def test_it_is_read_as_llama_cpp_reads_it(case: ChatCase) -> None:
    text = _answer(case)
    whole = _read(case, [text])
    assert _read(case, [*text]) == whole
    for cut in range(1, len(text)):
        assert _read(case, [text[:cut], text[cut:]]) == whole
    if _reason(case) and not _means(case, whole):
        pytest.xfail(_reason(case))
    assert _means(case, whole), f"{whole} is not {_expected(case)}"
