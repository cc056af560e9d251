"""Reasoning budgets, and detection of the reasoning."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.conversation import Conversation
from support.fake_context import favouring, scripted, tokens_of

from llmrun.engine.prompt.template import ChatTemplate
from llmrun.engine.prompt.thinking import (
    HARMONY,
    ReasoningTracker,
    ThinkingBudget,
    constrained_tags,
    known_reasoning,
    lead_in,
    opens,
    possible_reasoning,
)
from llmrun.protocol.reasoning import ReasoningSyntax, Stage

TAGS = ("<think>", "</think>")
THINK = ReasoningSyntax(*TAGS)
COHERE = ReasoningSyntax("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>")


@pytest.mark.parametrize(
    ("template", "syntax"),
    [
        ("{% if enable_thinking %}<think>{% endif %}</think>", THINK),
        ("[THINK]{{ x }}[/THINK]", ReasoningSyntax("[THINK]", "[/THINK]")),
        ("{{ '<|channel>' }}{{ '<channel|>' }}", ReasoningSyntax("<|channel>thought", "<channel|>")),
        ("<|START_THINKING|><|END_THINKING|><|START_RESPONSE|>", COHERE),
        ("<|START_THINKING|><|END_THINKING|>", ReasoningSyntax("<|START_THINKING|>", "<|END_THINKING|>")),
        ("<|channel|>final<|message|>", HARMONY),
        ("{{ m.content.split('</think>')[-1] }}", THINK._replace(is_implied=True)),
        ("{{ m.content.split('</think>')[-1] if not keep_thinking else m.content }}", THINK),
        (
            "{{ m.content.split('<answer>')[-1].split('</answer>')[0] }}{% if thinking %}</think>{% endif %}",
            THINK._replace(lead="<answer>", end="</answer>"),
        ),
        ("◁think▷{{ x }}◁/think▷", ReasoningSyntax("◁think▷", "◁/think▷")),
        ("{{ messages }}", None),
        (None, None),
    ],
)
def test_a_template_names_the_tags(template: str | None, syntax: ReasoningSyntax | None) -> None:
    assert known_reasoning(template) == syntax


def test_others_may_write_the_tags_of_their_vocabulary() -> None:
    assert possible_reasoning(("<|END_THINKING|>", "<|START_THINKING|>", "<|im_end|>")) == COHERE
    assert possible_reasoning(("[THINK]",)) == THINK


ANSWER = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}BODY<end>{% else %}{{ m.content }}{% endif %}"
)
THOUGHT, SAID = "{{ m.reasoning_content }}", "{{ m.content }}"


@pytest.mark.parametrize(
    ("body", "begin", "syntax"),
    [
        (f"<t1>\n{THOUGHT}\n</t1>\n\n{SAID}", "", ReasoningSyntax("<t1>", "</t1>")),
        (f"<t1>\n{THOUGHT}\n</t1>\n\n{SAID}", "<t1>\n", ReasoningSyntax("<t1>", "</t1>")),
        (f"<t1>\n{THOUGHT}\n</t1>\n\n{SAID}", "<t1>\nWell, ", ReasoningSyntax("<t1>", "</t1>", words="Well, ")),
        ("{% if m.reasoning_content %}" + THOUGHT + "[END]{% endif %}" + SAID, "My steps:\n",
         ReasoningSyntax("", "[END]", words="My steps:\n")),
        (f"<t1>{THOUGHT}</t1><a>{SAID}</a>", "", ReasoningSyntax("<t1>", "</t1>", "<a>", "</a>", "<end>")),
        (f"<s><o>t1<s>{THOUGHT}<c>t1<s><o>a<s>{SAID}<c>a<s>", "<s><o>t1<s>",
         ReasoningSyntax("<o>t1<s>", "<c>t1<s>", "<o>a<s>", "<c>a<s>", "<end>")),
        ("{% if m.reasoning_content %} to=self<m>" + THOUGHT + "<e><assistant>{% endif %} to=user<m>" + SAID, "",
         ReasoningSyntax("to=self<m>", "<e><assistant>", "to=user<m>")),
        (SAID, "", None),
        ("{{ m }}", "", None),
    ],
)  # fmt: skip
def test_a_template_shows_the_syntax_by_what_it_writes(body: str, begin: str, syntax: ReasoningSyntax | None) -> None:
    source = ANSWER.replace("BODY", body) + "{% endfor %}{% if add_generation_prompt %}<assistant>BEGIN{% endif %}"
    assert ChatTemplate(source.replace("BEGIN", begin), bos="", eos="").reasoning == syntax


def test_a_prompt_may_begin_the_thought_of_a_template_that_leaves_reasoning_out() -> None:
    source = ANSWER.replace("BODY", "{{ m.content.split('</think>')[-1] }}") + "{% endfor %}"
    begins = source + "{% if add_generation_prompt %}<assistant><think>\nOkay, so{% endif %}"
    found = ChatTemplate(begins, bos="", eos="").reasoning
    assert found is not None
    assert found.words == "Okay, so"
    assert opens("what is <think>?<assistant><think>\nOkay, so", found)
    plain = ChatTemplate(source + "{% if add_generation_prompt %}<assistant>{% endif %}", bos="", eos="").reasoning
    assert plain is not None
    assert not plain.words


def test_what_ends_the_answer_is_no_part_of_it() -> None:
    source = ANSWER.replace("BODY", f"<t1>{THOUGHT}</t1><a>{SAID}</a>") + "{% endfor %}"
    found = ChatTemplate(source, bos="", eos="", ends=("<end>",)).reasoning
    assert found == ReasoningSyntax("<t1>", "</t1>", "<a>", "</a>")


def test_gpt_oss_may_call_a_tool_after_its_reasoning() -> None:
    assert constrained_tags(HARMONY, calls=True) == ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")
    final = "<|end|><|start|>assistant<|channel|>final<|message|>"
    assert constrained_tags(HARMONY, calls=False)[1] == final
    assert ThinkingBudget(HARMONY, inside=True, max_tokens=3).closing == f"\n{final}\n\n", "then it is to answer"
    assert [lead_in(HARMONY, thinks=True, calls=calls) for calls in (False, True)] == [HARMONY.opening] * 2
    assert lead_in(HARMONY, thinks=False) == HARMONY.lead
    assert lead_in(HARMONY, thinks=False, calls=True) == lead_in(COHERE, thinks=False) == ""


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
    assert opens(prompt, THINK) is inside


def test_it_may_end_with_words_of_it() -> None:
    started = THINK._replace(words="Well, ")
    assert opens("<assistant>\n<think>\nWell, ", started)
    assert opens("<assistant>\n<think>\n", started)
    assert not opens("<assistant>\n<think>\nSo, ", started)
    assert opens("<assistant>My steps:\n", ReasoningSyntax("", "[END]", words="My steps:\n"))


def think(answer: str, most: int, *, inside: bool = False) -> str:
    talk = Conversation(scripted({"Hi": answer}), n_ctx=200)
    text, _ = talk.answer("Hi", thinking=ThinkingBudget(ReasoningSyntax(*TAGS), inside, most), most=60)
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
    text, _ = talk.answer("Hi", thinking=ThinkingBudget(ReasoningSyntax(*TAGS), False, 10), most=30, ban=("k>c",))
    assert text == "<think>ab</thinxx\n</think>\n\nxx"


@pytest.mark.parametrize(
    ("text", "stage"),
    [
        ("", Stage.BEFORE),
        (" \n<th", Stage.BEFORE),
        ("<th e", Stage.ANSWER),
        ("\n<think>x</thi", Stage.INSIDE),
        ("<think></think>\n", Stage.AFTER),
        ("<think></think>\n<think>", Stage.INSIDE),
        ("<think></think>\nyes <think>", Stage.ANSWER),
        ("say <think>", Stage.ANSWER),
    ],
)
@pytest.mark.parametrize("cut", [1, 2, 3, 100])
def test_where_an_answer_is_does_not_depend_on_its_tokens(text: str, stage: Stage, cut: int) -> None:
    thoughts = ReasoningTracker.begin(TAGS, inside=False)
    for start in range(0, len(text), cut):
        thoughts = thoughts.after(text[start : start + cut])
    assert thoughts.stage is stage


def test_without_an_opening_tag_only_the_prompt_begins_the_reasoning() -> None:
    inside = ReasoningTracker.begin(("", "[END]"), inside=True)
    assert inside.after("x[END] ").stage is Stage.AFTER
    assert inside.after("x[END] y").stage is Stage.ANSWER
    assert ReasoningTracker.begin(("", "[END]"), inside=False).after("y").stage is Stage.ANSWER
