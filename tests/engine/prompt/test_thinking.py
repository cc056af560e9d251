"""How long a model may think, and where its thoughts begin."""

from __future__ import annotations

import pytest
from support.conversation import Conversation
from support.fake_context import scripted

from llmrun.engine.core.sequence import Extras
from llmrun.engine.prompt.thinking import ThinkingBudget, opens, thinking_tags

TAGS = ("<think>", "</think>")


@pytest.mark.parametrize(
    ("template", "tags"),
    [
        ("{% if enable_thinking %}<think>{% endif %}</think>", TAGS),
        ("[THINK]{{ x }}[/THINK]", ("[THINK]", "[/THINK]")),
        ("{{ messages }}", None),
        (None, None),
    ],
)
def test_a_template_tells_the_tags(template: str | None, tags: tuple[str, str] | None) -> None:
    assert thinking_tags(template) == tags


@pytest.mark.parametrize(
    ("prompt", "inside"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n", False),
        ("what does <think> mean?<|im_start|>assistant\n", False),
        ("<think>old</think>a<|im_start|>assistant\n<think>", True),
    ],
)
def test_a_prompt_may_end_inside_of_a_thought(prompt: str, inside: bool) -> None:
    assert opens(prompt, TAGS) is inside


def think(answer: str, most: int, *, inside: bool = False) -> str:
    talk = Conversation(scripted({"Hi": answer}), n_ctx=200)
    text, _ = talk.answer("Hi", extras=Extras(thinking=ThinkingBudget(TAGS, inside, most)), most=60)
    return text


def test_a_short_thought_is_left_alone() -> None:
    """A byte is a token here, those of the closing tag count too."""
    assert think("<think>ab</think>yes", 10) == "<think>ab</think>yes"
    assert think("ab</think>yes", 10, inside=True) == "ab</think>yes"


def test_a_long_thought_is_closed() -> None:
    assert think("<think>abcdefgh</think>yes", 3) == "<think>abc\n</think>\n\n"
    assert think("abcdefgh</think>yes", 3, inside=True) == "abc\n</think>\n\n"


def test_no_thought_at_all() -> None:
    assert think("<think>ab</think>yes", 0) == "<think>\n</think>\n\n"


def test_only_thoughts_count() -> None:
    assert think("a long answer, no thoughts", 3) == "a long answer, no thoughts"
    assert think("<think>a</think>a long answer", 9) == "<think>a</think>a long answer"
