"""Reasoning budgets, and detection of the reasoning."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.conversation import Conversation
from support.fake_context import favouring, scripted, tokens_of

from llmrun.engine.core.sequence import Extras
from llmrun.engine.prompt.thinking import ReasoningStage, ReasoningTracker, ThinkingBudget, opens, thinking_tags

TAGS = ("<think>", "</think>")
HARMONY = "<|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("template", "tags"),
    [
        ("{% if enable_thinking %}<think>{% endif %}</think>", TAGS),
        ("[THINK]{{ x }}[/THINK]", ("[THINK]", "[/THINK]")),
        ("{{ '<|channel>' }}{{ '<channel|>' }}", ("<|channel>thought\n", "<channel|>")),
        (HARMONY, ("<|channel|>analysis<|message|>", f"<|end|>{HARMONY}")),
        ("{{ messages }}", None),
        (None, None),
    ],
)
def test_a_template_tells_the_tags(template: str | None, tags: tuple[str, str] | None) -> None:
    assert thinking_tags(template) == tags


def test_gpt_oss_may_call_a_tool_after_its_reasoning() -> None:
    tags = thinking_tags(HARMONY, calls=True)
    assert tags == ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")
    assert thinking_tags("[THINK][/THINK]", calls=True) == ("[THINK]", "[/THINK]")
    assert ThinkingBudget(tags, inside=True, max_tokens=3).closing == f"\n<|end|>{HARMONY}\n\n", "then it is to answer"


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


def test_only_reasoning_count() -> None:
    assert think("a long answer, no thoughts", 3) == "a long answer, no thoughts"
    assert think("<think>a</think>a long answer", 9) == "<think>a</think>a long answer"


def test_what_is_taken_back_was_neither_thought_nor_said() -> None:
    """A banned phrase begins in the thoughts and ends after them: the model thinks on, with the tokens it has left."""
    script = tokens_of("Hi<think>ab</think>cd")

    def model(tokens: Sequence[int]) -> Sequence[float]:
        logits = favouring(script[len(tokens)] if [*tokens] == script[: len(tokens)] else ord("x"))
        logits[ord("x")] += 1
        return logits

    talk = Conversation(model, n_ctx=200)
    text, _ = talk.answer("Hi", extras=Extras(thinking=ThinkingBudget(TAGS, False, 10)), most=30, ban=("k>c",))
    assert text == "<think>ab</thinxx\n</think>\n\nxx"


@pytest.mark.parametrize(
    ("text", "stage"),
    [
        ("", ReasoningStage.BEFORE),
        (" \n<th", ReasoningStage.BEFORE),
        ("<th e", ReasoningStage.ANSWER),
        ("\n<think>x</thi", ReasoningStage.INSIDE),
        ("<think></think>\n", ReasoningStage.AFTER),
        ("<think></think>\n<think>", ReasoningStage.INSIDE),
        ("<think></think>\nyes <think>", ReasoningStage.ANSWER),
        ("say <think>", ReasoningStage.ANSWER),
    ],
)
@pytest.mark.parametrize("cut", [1, 2, 3, 100])
def test_where_an_answer_is_does_not_depend_on_its_tokens(text: str, stage: ReasoningStage, cut: int) -> None:
    thoughts = ReasoningTracker.begin(TAGS, inside=False)
    for start in range(0, len(text), cut):
        thoughts = thoughts.after(text[start : start + cut])
    assert thoughts.stage is stage
