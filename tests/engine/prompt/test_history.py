"""Earlier answers stand in later prompts as they were generated, also for clients that leave parts of them out."""

from __future__ import annotations

import itertools
import json
from array import array
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.answering import (
    Answered,
    Answering,
    answering,
    with_other_json,
    without_reasoning,
)
from support.family_model import control_texts, write_family_model
from support.hybrid_models import write_models
from support.tool_templates import TOOL_TEMPLATES

from llmrun.engine.prompt import history
from llmrun.engine.prompt.control_texts import Part
from llmrun.engine.prompt.history import Conversation, History, Turn
from llmrun.engine.prompt.writer import PromptWriter
from llmrun.protocol.media import Media
from llmrun.protocol.messages import AnswerRequest, Message, PromptHistory, Tool, ToolCall
from llmrun.protocol.params import Limits, SamplingParams

THINKS = """{{ mood }}{%- set last = namespace(question=-1) -%}
{%- for message in messages if message.role == 'user' %}{% set last.question = messages.index(message) %}{% endfor -%}
{%- if tools %}{{ '<|im_start|>system\\n' ~ (tools | tojson) ~ '<|im_end|>\\n' }}{% endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' ~ message.role ~ '\\n' }}
{%- if message.reasoning_content and loop.index0 > last.question -%}
{{ '<think>\\n' ~ message.reasoning_content ~ '\\n</think>\\n\\n' }}
{%- endif -%}
{{ message.content | trim }}
{%- for call in message.tool_calls or [] -%}
{{ '<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' ~ call.function.arguments | tojson ~ '}\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{{ '<|im_start|>assistant\\n' }}"""  # noqa: E501
"""A template that leaves out reasoning before the last question, as most do."""
ENDLESS = THINKS.replace("""{{ '<|im_end|>\\n' }}
{%- endfor""", """{{ '<|im_end|>\\n' if not message.tool_calls else '' }}
{%- endfor""")  # fmt: skip
"""Without an end token after a call."""
TOOLS = (Tool("look", "Looks.", '{"type": "object", "properties": {"at": {}}}'),)
SYSTEM, QUESTION = Message("system", "Be brief. " * 20), Message("user", "What is there?")
CALL = '<tool_call>\n{"name": "look", "arguments": {"at":   [1, "a b"]}}\n</tool_call>'

Open = Callable[..., AbstractContextManager[Answering]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    control = {text for template in (THINKS, *TOOL_TEMPLATES.values()) for text in control_texts(template)}
    return write_family_model(tmp_path_factory.mktemp("model") / "tiny.gguf", sorted(control), ("<|im_end|>",))


@pytest.fixture
def talk(model: Path) -> Iterator[Answering]:
    with answering(model, THINKS, n_ctx=4096) as loaded:
        yield loaded


def new_tokens(answered: Answered, before: Answered) -> int:
    """Return the number of prompt tokens after those that stood before."""
    assert answered.prompt[: len(before.standing)] == before.standing, "the prompt did not only grow"
    return len(answered.prompt) - len(before.standing)


def fresh_prompt(model: Path, messages: list[Message], **request: Any) -> list[int]:
    """Return the prompt of a conversation that nobody has seen."""
    with answering(model, THINKS, n_ctx=4096) as talk:
        return talk.prompt(messages, **request)


def loop(
    talk: Answering, change: Callable[[Message], Message] = lambda message: message, **request: Any
) -> list[Answered]:
    """Return the answers of a question with two rounds of calls, and of the next question; `change` is the client's."""
    messages, answers = [SYSTEM, QUESTION], list[Answered]()

    def ask(says: str, thinks: str) -> None:
        answers.append(talk.ask(messages, says=says, thinks=thinks, tools=TOOLS, **request))
        messages.append(change(answers[-1].message))
        messages.extend(Message("tool", "A wall.", tool_call_id=call.id) for call in answers[-1].message.tool_calls)

    ask(CALL, "I should look. " * 9)
    ask(CALL.replace("1", "2"), "Once more. " * 9)
    ask(" There is a wall. \n", "So it is.")
    messages.append(Message("user", "And behind it?"))
    ask("Nothing.", "Who knows?")
    return answers


# ---- what is computed ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda message: message,
        without_reasoning,
        with_other_json,
        lambda each: with_other_json(without_reasoning(each)),
    ],
    ids=["as it was", "without reasoning", "other JSON", "both"],
)
def test_each_request_computes_only_what_is_new(talk: Answering, change: Callable[[Message], Message]) -> None:
    answers = loop(talk, change)
    assert [len(each.message.tool_calls) for each in answers] == [1, 1, 0, 0]
    result = len("<|im_end|>".join(("", "\n", "tool\nA wall.", "\n", "assistant\n"))) - 3 * len("<|im_end|>") + 4
    for before, answered in itertools.pairwise(answers):
        assert answered.computed == new_tokens(answered, before) <= result
    assert answers[3].computed < 0.05 * len(answers[3].prompt)
    prompt = talk.text(answers[3].prompt)
    assert prompt.count("I should look. ") == 9
    assert '{"at":   [1, "a b"]}' in prompt
    assert "</think> There is a wall. \n<|im_end|>\n<|im_start|>user\nAnd" in prompt


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models whose memory can't be cut, whose vocabulary splits texts as SentencePiece does."""
    return write_models(tmp_path_factory.mktemp("shapes"), ("qwen35", "gpt-oss"))


@pytest.mark.parametrize("shape", ["qwen35", "gpt-oss"])
def test_the_next_question_after_eight_calls(shapes: dict[str, Path], shape: str) -> None:
    template = THINKS.replace("<|im_end|>", "</s>").replace("<|im_start|>", "")
    messages, answers = [SYSTEM, QUESTION], list[Answered]()
    with answering(shapes[shape], template, n_ctx=8192) as talk:
        for says in (*(CALL.replace("1", str(number)) for number in range(8)), "A wall.", "Nothing."):
            answers.append(
                talk.ask(messages, says=says, thinks="I should look. " * 30, tools=TOOLS, limits=Limits(999))
            )
            calls = answers[-1].message.tool_calls
            messages += [without_reasoning(answers[-1].message)]
            messages += [Message("tool", "A wall. " * 10, tool_call_id=call.id) for call in calls]
            messages += [] if calls else [Message("user", "And behind it?")]
    assert [each.computed for each in answers[1:]] == [new_tokens(*pair[::-1]) for pair in itertools.pairwise(answers)]
    assert answers[-1].computed < 0.05 * len(answers[-1].prompt)


@pytest.mark.parametrize("template", [THINKS, ENDLESS], ids=["end token", "no end token after a call"])
def test_the_next_question_after_answers_that_a_client_wrote(model: Path, template: str) -> None:
    """A conversation that came from elsewhere: what stood of it in a prompt stays, its reasoning too."""
    assert ENDLESS != THINKS
    messages = [SYSTEM, QUESTION]
    with answering(model, template, n_ctx=8192) as talk:
        talk.ask(messages, says="?", tools=TOOLS)
        for number in range(6):
            call = ToolCall(f"c{number}", "look", f'{{"at": {number}}}')
            messages += [
                Message("assistant", "", (call,), reasoning="I should look. " * 20),
                Message("tool", "A wall. " * 10, tool_call_id=call.id),
            ]
            found = talk.ask(messages, says="?", tools=TOOLS)
            assert talk.text(found.prompt).count("I should look. ") == 20 * (number + 1)
        messages += [Message("assistant", "A wall.", reasoning="So it is."), Message("user", "And behind it?")]
        asked = talk.ask(messages, says="Nothing.", tools=TOOLS)
        assert talk.text(asked.prompt).count("I should look. ") == 120
        assert asked.computed < 0.05 * len(asked.prompt)
        plain = talk.ask(messages, says="Nothing.", tools=TOOLS, keep_reasoning=False)
        assert "I should look" not in talk.text(plain.prompt)


def test_an_answer_and_a_count_say_what_stands(talk: Answering) -> None:
    answers = loop(talk)
    assert answers[0].started.history is None
    assert answers[3].started.history == PromptHistory(3, len(answers[2].standing))
    asked = AnswerRequest((SYSTEM, QUESTION, *_rest(answers)), template=THINKS, tools=TOOLS)
    counted = talk.loaded.preparer.prompts.count(asked, 1, lambda event: None)
    assert counted.history == PromptHistory(4, len(answers[3].standing))
    assert counted.total > len(answers[3].standing)


@pytest.mark.parametrize("syntax", TOOL_TEMPLATES)
def test_in_every_syntax_of_calls(model: Path, syntax: str) -> None:
    schema = {"type": "object", "properties": {"at": {"enum": ["here", "there"]}}, "required": ["at"]}
    tools, messages = (Tool("look", "Looks.", json.dumps(schema)),), [QUESTION]
    with answering(model, TOOL_TEMPLATES[syntax], n_ctx=4096) as talk:
        forced = {"tool_choice": "required", "parallel_calls": False, "thinking_tokens": 6}
        first = talk.ask(messages, tools=tools, sampling=talk.without_blanks, **forced)
        assert [call.name for call in first.message.tool_calls] == ["look"]
        result = Message("tool", "A wall.", tool_call_id=first.message.tool_calls[0].id)
        messages += [with_other_json(first.message), result]
        second = talk.ask(messages, tools=tools, says="There is a wall.")
        assert second.computed == new_tokens(second, first) < 60
        messages += [second.message, Message("user", "And behind it?")]
        third = talk.ask(messages, tools=tools, says="Nothing.")
        if syntax == "gemma":  # as one message, whose text this template writes before the calls
            assert third.prompt[: len(first.prompt)] == first.prompt
        else:
            assert third.computed == new_tokens(third, second) < 60


def test_the_answer_is_that_of_a_fresh_engine_with_these_tokens(model: Path, talk: Answering) -> None:
    answers = loop(talk, without_reasoning)
    messages = [SYSTEM, QUESTION, Message("user", "More?")]
    found = talk.ask([*messages[:2], *_rest(answers), messages[2]], tools=TOOLS, limits=Limits(20))
    assert found.prompt[: len(answers[3].standing)] == answers[3].standing
    with answering(model, THINKS, n_ctx=4096) as fresh:
        expected = fresh.ask((), prompt="", prompt_tokens=tuple(found.prompt), limits=Limits(20))
    assert len(found.completion) == 20
    assert found.completion == expected.completion


def _rest(answers: list[Answered]) -> list[Message]:
    """Return the messages after the first question, as loop() sent them, without reasoning."""
    rest = list[Message]()
    for number, answered in enumerate(answers):
        rest.append(without_reasoning(answered.message))
        rest += [Message("tool", "A wall.", tool_call_id=call.id) for call in answered.message.tool_calls]
        rest += [Message("user", "And behind it?")] if number == 2 else []
    return rest


# ---- reasoning across questions ------------------------------------------------------------------------------


def test_a_plain_chat_has_the_form_of_the_template(model: Path, talk: Answering) -> None:
    messages = [SYSTEM, QUESTION]
    first = talk.ask(messages, says="A wall.", thinks="Hm. " * 9)
    messages += [first.message, Message("user", "And behind it?")]
    assert talk.ask(messages, says="Nothing.").prompt == fresh_prompt(model, messages)
    kept = talk.ask(messages, says="Nothing.", keep_reasoning=True)
    assert "Hm. " in talk.text(kept.prompt)
    assert new_tokens(kept, first) < 60


def test_answers_without_reasoning_stand_in_a_plain_chat(talk: Answering) -> None:
    first = talk.ask([SYSTEM, QUESTION], says="  A wall.\n\n")
    second = talk.ask([SYSTEM, QUESTION, replace(first.message, content="A wall."), QUESTION], says="Yes.")
    assert second.computed == new_tokens(second, first) < 60


def test_a_request_can_ask_for_the_form_of_the_template(model: Path, talk: Answering) -> None:
    answers = loop(talk)
    rest = [answers[0].message, Message("tool", "A wall.", tool_call_id=answers[0].message.tool_calls[0].id)]
    asked = [SYSTEM, QUESTION, *rest, QUESTION]
    assert talk.ask(asked, says="?", tools=TOOLS, keep_reasoning=False).prompt == fresh_prompt(
        model, asked, tools=TOOLS
    )
    assert "I should look" in talk.text(talk.ask(asked, says="?", tools=TOOLS).prompt)


def test_a_narrow_window_drops_the_reasoning_of_earlier_turns(model: Path) -> None:
    with answering(model, THINKS, n_ctx=4096) as wide:
        most = len(loop(wide)[3].prompt)
    with answering(model, THINKS, n_ctx=most + 100) as talk:
        answers = loop(talk, without_reasoning)
        prompt = talk.text(answers[3].prompt)
        assert answers[3].started.history == PromptHistory(0, 0, is_shortened=True)
        assert "I should look" not in prompt
        assert "Once more. " not in prompt
        assert "And behind it?" in prompt
        again = [SYSTEM, QUESTION, *_rest(answers), Message("user", "More?")]
        assert new_tokens(talk.ask(again, says="?", tools=TOOLS), answers[3]) < 60, "it goes on from there"


def test_a_prompt_in_a_narrow_window_is_written_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above three quarters of the window too, unless it has grown by a sixteenth."""
    sizes, tokens = list[int](), PromptWriter._tokens
    monkeypatch.setattr(
        PromptWriter, "_tokens", lambda *given: sizes.append(len((found := tokens(*given))[0])) or found
    )
    with answering(model, THINKS, n_ctx=3000) as talk:
        messages, numbers = [SYSTEM, QUESTION], list[int]()
        for _ in range(26):
            sizes.clear()
            found = talk.ask(messages, says=CALL, thinks="Hm.", tools=TOOLS)
            numbers.append(sum(size > 0.5 * len(found.prompt) for size in sizes))
            calls = found.message.tool_calls
            messages += [found.message, *(Message("tool", "A wall.", tool_call_id=call.id) for call in calls)]
    assert len(found.prompt) > 0.8 * 3000
    assert numbers.index(2) > 13, "three quarters"
    assert 1 <= numbers.count(2) <= 4
    assert {*numbers} == {1, 2}


def test_a_loop_keeps_its_reasoning_in_a_narrow_window(model: Path) -> None:
    with answering(model, THINKS, n_ctx=4096) as wide:
        most = len(loop(wide)[2].prompt)
    with answering(model, THINKS, n_ctx=most + 400) as talk:
        assert "I should look" in talk.text(loop(talk, without_reasoning)[2].prompt)


def test_reasoning_that_a_client_sent_stays(talk: Answering) -> None:
    call = ToolCall("1", "look", "{}")
    said = Message("assistant", "", (call,), reasoning="From elsewhere. ")
    messages = [SYSTEM, QUESTION, said, Message("tool", "A wall.", tool_call_id="1")]
    first = talk.ask(messages, says="A wall.", thinks="Hm.", tools=TOOLS)
    messages[2] = without_reasoning(said)
    messages += [without_reasoning(first.message), Message("user", "And behind it?")]
    second = talk.ask(messages, says="?", tools=TOOLS)
    assert "From elsewhere" in talk.text(first.prompt)
    assert second.computed == new_tokens(second, first)


# ---- what does not stand -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ends",
    [{"stop_after": 12}, {"limits": Limits(12)}, {"limits": Limits(300, stop=("wall",))}],
    ids=["cancelled", "cut", "stopped"],
)
def test_an_answer_that_the_model_did_not_end_is_what_the_client_sent(
    model: Path, talk: Answering, ends: dict[str, Any]
) -> None:
    first = talk.ask([SYSTEM, QUESTION], says=" There is a wall. " + CALL, tools=TOOLS, **ends)
    assert len(first.completion) < 24
    messages = [SYSTEM, QUESTION, first.message, Message("user", "And behind it?")]
    assert talk.ask(messages, says="?", tools=TOOLS).prompt == fresh_prompt(model, messages, tools=TOOLS)


def _changed(messages: list[Message], index: int, **changes: Any) -> list[Message]:
    return [*messages[:index], replace(messages[index], **changes), *messages[index + 1 :]]


@pytest.mark.parametrize(
    ("index", "changes"),
    [
        (0, {"content": "Be long."}),
        (1, {"content": "What is here?"}),
        (2, {"content": "I look."}),
        (2, {"tool_calls": (ToolCall("", "look", '{"at": [1, "a  b"]}'),)}),
        (2, {"reasoning": "I thought otherwise."}),
    ],
)
def test_from_a_changed_message_on_the_template_writes_the_prompt(
    model: Path, talk: Answering, index: int, changes: dict[str, Any]
) -> None:
    answers = loop(talk)
    call = replace(answers[0].message, tool_calls=(answers[0].message.tool_calls[0]._replace(id=""),))
    messages = [SYSTEM, QUESTION, call, Message("tool", "A wall."), Message("user", "And behind it?")]
    assert new_tokens(talk.ask(messages, says="?", tools=TOOLS), answers[0]) < 100
    changed = _changed(messages, index, **changes)
    assert talk.ask(changed, says="?", tools=TOOLS).prompt == fresh_prompt(model, changed, tools=TOOLS)


def test_before_a_changed_message_the_prompt_stands(talk: Answering) -> None:
    answers = loop(talk)
    messages = [SYSTEM, QUESTION, *_rest(answers)][:-1]
    messages[4] = replace(messages[4], content="Let me see.")
    assert new_tokens(talk.ask(messages, says="?", tools=TOOLS), answers[0]) < 400


@pytest.mark.parametrize(
    "other",
    [
        {"salt": "b"},
        {"tools": (*TOOLS, Tool("go"))},
        {"template": THINKS + " "},
        {"template_variables": '{"mood": "Happy."}'},
    ],
)
def test_nothing_stands_under_another_salt_or_with_other_tools(talk: Answering, other: dict[str, Any]) -> None:
    request = {"tools": TOOLS, "salt": "a"}
    first = talk.ask([SYSTEM, QUESTION], says=CALL, thinks="Secret. ", **request)
    messages = [SYSTEM, QUESTION, without_reasoning(first.message), Message("tool", "A wall.")]
    assert "Secret" in talk.text(talk.ask(messages, says="?", **request).prompt)
    assert "Secret" not in talk.text(talk.ask(messages, says="?", **{**request, **other}).prompt)


@pytest.mark.parametrize("options", [{"thinking": False}, {"reasoning_effort": "low"}])
def test_options_that_change_no_beginning_of_a_prompt_may_change(talk: Answering, options: dict[str, Any]) -> None:
    first = talk.ask([SYSTEM, QUESTION], says=CALL, thinks="Hm.", tools=TOOLS)
    messages = [SYSTEM, QUESTION, without_reasoning(first.message), Message("tool", "A wall.")]
    assert new_tokens(talk.ask(messages, says="?", tools=TOOLS, **options), first) < 60


def test_conversations_that_begin_alike_go_their_own_ways(talk: Answering) -> None:
    asked = [SYSTEM, QUESTION]
    first = [
        talk.ask(asked, says=CALL.replace("1", number), thinks=f"Number {number}.", tools=TOOLS) for number in "12"
    ]
    for answered in first:
        messages = [*asked, without_reasoning(answered.message), Message("tool", "A wall.")]
        assert new_tokens(talk.ask(messages, says="?", tools=TOOLS), answered) < 60


def test_of_two_equal_answers_the_one_whose_reasoning_is_sent_stands(talk: Answering) -> None:
    asked = [SYSTEM, QUESTION]
    first, last = (talk.ask(asked, says=CALL, thinks=thinks, tools=TOOLS) for thinks in ("Hm.", "Well."))
    result = Message("tool", "A wall.")
    for sent, standing in ((first.message, first), (last.message, last), (without_reasoning(first.message), last)):
        assert new_tokens(talk.ask([*asked, sent, result], says="?", tools=TOOLS), standing) < 60


def test_where_the_end_cannot_be_told_the_template_writes_all_with_the_reasoning(model: Path) -> None:
    with answering(model, ENDLESS, n_ctx=4096) as talk:
        first, second, *_ = loop(talk, without_reasoning)
        assert "I should look" in talk.text(second.prompt)
        assert second.prompt[: len(first.prompt)] == first.prompt


# ---- a summary, for which an agent leaves out its tools ------------------------------------------------------

SUMMARY = Message("user", "Summarize what was done.")


def test_a_summary_goes_on_from_the_prompt_with_tools(talk: Answering) -> None:
    answers = loop(talk, without_reasoning)
    asked = [SYSTEM, QUESTION, *_rest(answers), SUMMARY]
    found = talk.ask(asked, says="A wall was found.")
    assert found.computed == new_tokens(found, answers[3]) < 80
    assert found.started.history is not None
    assert found.started.history.kept_tools == len(TOOLS)
    assert found.message == Message("assistant", "A wall was found.")
    asked += [found.message, Message("user", "Shorter.")]
    again = talk.ask(asked, says="A wall.")
    assert again.computed == new_tokens(again, found) < 60
    with_tools = talk.ask([*asked[:-2], Message("user", "Now go on.")], says="Yes.", tools=TOOLS)
    assert with_tools.started.history is not None
    assert with_tools.started.history.kept_tools == 0


def test_no_tool_is_called_in_a_summary(talk: Answering) -> None:
    answers = loop(talk)
    for seed in range(4):
        found = talk.ask(
            [SYSTEM, QUESTION, *_rest(answers), SUMMARY], limits=Limits(40), sampling=SamplingParams(seed=seed)
        )
        assert not found.message.tool_calls


@pytest.mark.parametrize("change", [{"salt": "b"}, {"keep_reasoning": False}])
def test_a_summary_of_others_or_in_the_form_of_the_template(
    model: Path, talk: Answering, change: dict[str, Any]
) -> None:
    asked = [SYSTEM, QUESTION, *_rest(loop(talk, salt="a")), SUMMARY]
    found = talk.ask(asked, says="?", **{"salt": "a", **change})
    assert found.prompt == fresh_prompt(model, asked, **change)
    assert found.started.history is None


def test_tools_make_room_for_a_summary(model: Path) -> None:
    with answering(model, THINKS, n_ctx=4096) as wide:
        most = len(loop(wide)[3].prompt)
    with answering(model, THINKS, n_ctx=most + 200) as talk:
        asked = [SYSTEM, QUESTION, *_rest(loop(talk)), SUMMARY]
        found = talk.ask(asked, says="?", limits=Limits(1000))
        assert found.started.history is None or found.started.history.kept_tools == 0
        assert "Looks." not in talk.text(found.prompt)


# ---- a restart -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("salt", ["", "private"])
def test_after_a_restart_the_saved_turns_stand_again(model: Path, tmp_path: Path, salt: str) -> None:
    saving = {"states": str(tmp_path / "states"), "states_bytes": 1 << 30}
    with answering(model, THINKS, n_ctx=4096, **saving) as talk:
        answers = loop(talk, without_reasoning, salt=salt)
        talk.save()
    messages = [SYSTEM, QUESTION, *_rest(answers), Message("user", "More?")]
    with answering(model, THINKS, n_ctx=4096, **saving) as talk:
        found = talk.ask(messages, says="No.", tools=TOOLS, salt=salt)
        if salt:
            assert found.prompt == fresh_prompt(model, messages, tools=TOOLS)
            assert b"I should look" not in b"".join(path.read_bytes() for path in tmp_path.rglob("*.kv"))
        else:
            assert found.computed == new_tokens(found, answers[3]) < 60
            assert "I should look" in talk.text(found.prompt)
            summary = talk.ask([*messages[:-1], SUMMARY], says="So.")
            assert summary.computed <= new_tokens(summary, answers[3]) < 80


# ---- the tree ------------------------------------------------------------------------------------------------


def _turn(number: int, parent: Turn | None = None, size: int = 10) -> Turn:
    return Turn(bytes([number]), (), parent, array("i", [number] * size), ("",), reasons=False, keeps=False)


def test_the_least_recently_used_turns_are_forgotten_children_first() -> None:
    history = History(max_tokens=40)
    root = _turn(1)
    branches = [_turn(2, root), _turn(3, root)]
    for turn in (root, *branches, _turn(4)):
        history.add(turn)
    assert history.n_tokens == 40
    history.add(_turn(5, branches[1]))
    assert {*history._turns} == {bytes([number]) for number in (1, 3, 4, 5)}, "the one without a later use"
    history.add(_turn(6, size=41))
    assert (history.n_tokens, history._turns) == (0, {}), "one that is larger than the limit"


def test_an_equal_turn_is_remembered_once() -> None:
    history = History()
    for _ in range(3):
        history.add(_turn(1))
    assert history.n_tokens == 10


def digest(*messages: Message) -> bytes:
    return Conversation((), messages).digests[-1]


def call(arguments: str, name: str = "look", call_id: str = "") -> Message:
    return Message("assistant", "", (ToolCall(call_id, name, arguments),))


def test_equal_messages() -> None:
    equal = partial(map, digest)
    assert len({*equal((Message("assistant", " a\n"), Message("assistant", "a", reasoning="r")))}) == 1
    assert len({*equal(call(each, call_id=each) for each in ('{"a": 1.0, "b": "c"}', '{ "b":"\\u0063","a":1 }'))}) == 1
    assert len({*equal(call(each) for each in ('{"a": 1}', '{"a": "1"}', '{"a": true}', '{"a": [1]}', "{", "{ "))}) == 5
    assert len({*equal(Message("user", each) for each in ("a", "a ", "A"))}) == 3
    assert digest(call("{}", "look")) != digest(call("{}", "go"))


def test_results_belong_to_calls_whatever_their_ids() -> None:
    def asked(first: str, second: str, *results: str) -> bytes:
        calls = Message("assistant", "", (ToolCall(first, "look", "{}"), ToolCall(second, "look", "{}")))
        return digest(QUESTION, calls, *(Message("tool", "A wall.", tool_call_id=each) for each in results))

    assert asked("1", "2", "1", "2") == asked("a", "b", "a", "b") != asked("1", "2", "2", "1")


def test_arguments_of_any_kind_have_a_digest() -> None:
    for arguments in (json.dumps({"a": float("inf")}), "\ud800", '"text"', "[" * 500):
        assert len(digest(call(arguments))) == 32


def test_an_image_within_the_end_of_an_answer_stays() -> None:
    """Of a template that puts the next message's images before the end token."""
    image = Media("iVBO")
    parts = [Part("<|im", special=True), image, Part("_end|>\nNext", special=True), Part("!", special=False)]
    kept = history._without("<|im_end|>", parts)
    assert kept == [image, Part("\nNext", special=True), Part("!", special=False)]
    assert history._without("longer than all", [Part("x", special=False)]) == []
