"""A turn in which the model calls tools: what is sent, what is saved, and what undo, retry and a resumed chat see."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.answers import sent

from llmrun.chat.conversation import ChatSettings, Conversation
from llmrun.chat.store.export import export, read_json
from llmrun.chat.store.store import Sessions
from llmrun.chat.store.turns import INTERRUPTED, Answer, Question, ToolOutput, answer_of, plain_facts
from llmrun.errors import EngineCrashedError
from llmrun.models.fingerprint import ModelFingerprint, fingerprint_file
from llmrun.protocol.media import Media
from llmrun.protocol.messages import (
    AnswerRequest,
    Event,
    Finished,
    Message,
    Started,
    Stats,
    Tool,
)
from llmrun.protocol.params import resolve_sampling
from llmrun.protocol.questions import TokenCount

WEATHER = Tool("weather", "Tells it.")
STARTED = Started(1, 1, 0, 0, thinking_tags=("<think>", "</think>"), tool_syntax="hermes")
CALL = 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


class FakeModel:
    """Says the next of its answers; a byte is a token."""

    def __init__(self, path: Path, *answers: str) -> None:
        self.path = path
        path.write_bytes(b"GGUF")
        self.name = "fake"
        self.n_ctx = 10_000
        self.adapters = ()
        self.examples: tuple[Message, ...] = ()
        self.modalities: frozenset[str] = frozenset()
        self.answers = [*answers]
        self.seen: list[AnswerRequest] = []
        self.ends = "stop"

    @property
    def used(self) -> ModelFingerprint:
        return fingerprint_file(self.name, self.path)

    def speculation(self) -> None:
        return None

    def sampling(self, flags: Any, session: Any) -> Any:
        return resolve_sampling(("session", session), ("flag", flags))

    def count(self, messages: Iterable[Message], *, tools: tuple[Tool, ...], **_: object) -> TokenCount:
        each = tuple(len(message.content) for message in messages)
        return TokenCount(each, sum(each) + 1000 * len(tools))

    def answer(self, asked: AnswerRequest) -> Iterator[Event]:
        self.seen.append(asked)
        if not self.answers:
            raise EngineCrashedError("the engine died")
        yield STARTED
        yield from sent(STARTED, [self.answers.pop(0)], reason=self.ends)[:-1]
        yield Finished(1, self.ends, Stats(prompt_tokens=len(self.seen)))


class Talk:
    def __init__(self, folder: Path, *answers: str) -> None:
        self.model = FakeModel(folder / "m.gguf", *answers)
        self.store = Sessions(folder)
        self.notes: list[str] = []
        self.conversation = Conversation(
            self.model,  # type: ignore[arg-type]
            self.store.new(),
            ChatSettings(request=AnswerRequest(tools=(WEATHER,))),
            on_note=self.notes.append,
            on_overflow=lambda misfit: "roll",
        )

    def say(self, text: str, *results: str) -> None:
        """Ask, and give the calls these results."""
        list(self.conversation.ask(Question(text)))
        for result in results:
            assert [call.name for call in self.conversation.calls] == ["weather"]
            list(self.conversation.go_on([ToolOutput(result)]))

    @property
    def saved(self) -> Answer:
        answer = Sessions(self.store.folder).open().last_answer
        assert answer is not None
        return answer

    def roles(self) -> list[str]:
        """Of what was sent last."""
        return [message.role for message in self.model.seen[-1].messages]


@pytest.fixture
def talk(tmp_path: Path) -> Talk:
    return Talk(tmp_path, CALL, "It is sunny.", "Bye.")


def test_results_go_back_with_their_calls(talk: Talk) -> None:
    talk.say("Weather?", "Sun")
    question, called, result = talk.model.seen[-1].messages
    assert question == Message("user", "Weather?")
    assert (called.role, called.content) == ("assistant", "Let me see.")
    (call,) = called.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Rome"})
    assert result == Message("tool", "Sun", tool_call_id=call.id, name="weather")
    assert not talk.conversation.calls
    assert talk.model.seen[-1].tools == (WEATHER,)


def test_a_saved_turn_is_sent_as_it_was(talk: Talk) -> None:
    talk.say("Weather?", "Sun")
    assert talk.saved.content == "It is sunny."
    assert [made.results for made in talk.saved.rounds] == [("Sun",)]
    before = talk.model.seen[-1].messages
    talk.conversation.chat = Sessions(talk.store.folder).open()
    talk.say("Thanks")
    *sent, answer, _ = talk.model.seen[-1].messages
    assert (tuple(sent), answer) == (before, Message("assistant", "It is sunny."))


def test_a_model_that_does_not_see_is_told_of_images_of_a_tool(talk: Talk) -> None:
    list(talk.conversation.ask(Question("Weather?")))
    list(talk.conversation.go_on([ToolOutput("Sun", (Media("iVBORw0KGgoAAAAN"),))]))
    assert talk.model.seen[-1].messages[-1].content == "Sun\n[The image can't be read.]"
    assert not talk.model.seen[-1].messages[-1].media
    assert talk.notes == ["fake can't read images: the tool's is left out"]


def test_images_of_a_tool_are_sent_again_and_saved(talk: Talk) -> None:
    seen = Media("iVBORw0KGgoAAAAN", at=3)
    talk.model.modalities = frozenset(("image",))
    list(talk.conversation.ask(Question("Weather?")))
    list(talk.conversation.go_on([ToolOutput("Sun", (seen,))]))
    before = talk.model.seen[-1].messages
    assert before[-1].media == (seen,)
    talk.conversation.chat = Sessions(talk.store.folder).open()
    talk.say("Thanks")
    assert talk.model.seen[-1].messages[: len(before)] == before
    facts = plain_facts(talk.saved) | {"rounds": [{"content": "", "calls": [], "results": [], "media": [[], []]}]}
    with pytest.raises(ValueError, match="one result for each call"):
        answer_of("", "", facts)


def test_reasoning_goes_back_with_its_round(tmp_path: Path) -> None:
    talk = Talk(tmp_path, f"<think>One.</think>{CALL}", "<think>Two.</think>It is sunny.", "Bye.")
    talk.say("Weather?", "Sun")
    assert [message.reasoning for message in talk.model.seen[-1].messages] == ["", "One.", ""]
    talk.conversation.chat = Sessions(talk.store.folder).open()
    talk.say("Thanks")
    assert [message.reasoning for message in talk.model.seen[-1].messages] == ["", "One.", "", "Two.", ""]
    assert talk.saved.reasoning == "", "of the last turn"


def test_undo_and_retry_take_the_whole_turn(talk: Talk) -> None:
    talk.say("Weather?", "Sun")
    list(talk.conversation.retry())
    assert talk.roles() == ["user"]
    talk.conversation.chat.undo()
    assert talk.conversation.chat.messages() == []


def test_reasoning_of_all_rounds_is_kept_and_holds_no_calls(tmp_path: Path) -> None:
    mentioned = CALL.replace("\n<tool_call>", " <tool_call>")  # on a line of its own it would end the reasoning
    talk = Talk(tmp_path, f"<think>I could write {mentioned}</think>{CALL}", "<think>Well.</think>Sunny.")
    talk.say("Weather?", "Sun")
    assert talk.saved.reasoning == f"I could write {mentioned}\n\nWell."
    assert (len(talk.saved.rounds), talk.saved.content) == (1, "Sunny.")


@pytest.mark.parametrize("reason", ["length", "cancelled", "repeats"])
def test_calls_of_an_answer_that_did_not_end_by_itself_are_not_made(talk: Talk, reason: str) -> None:
    talk.model.ends = reason
    talk.say("Weather?")
    assert talk.conversation.calls == ()
    assert (talk.saved.content, talk.saved.finish) == ("Let me see.", reason)


def test_a_turn_that_is_ended_at_a_call_is_kept(talk: Talk) -> None:
    talk.model.answers[:] = [CALL, CALL]
    talk.say("Weather?", "Sun")
    talk.conversation.end_turn()
    talk.conversation.end_turn()
    assert talk.conversation.calls == ()
    assert (talk.saved.content, talk.saved.finish, len(talk.saved.rounds)) == ("Let me see.", "cancelled", 1)
    assert len(talk.conversation.chat.branches()) == 1


def test_what_was_called_before_the_engine_died_is_kept(talk: Talk) -> None:
    talk.model.answers[:] = [CALL]
    with pytest.raises(EngineCrashedError):
        talk.say("Weather?", "Sun")
    talk.conversation.end_turn()
    assert (talk.saved.finish, len(talk.saved.rounds), talk.saved.content) == (INTERRUPTED, 1, "")


def test_tools_and_results_count_against_the_window(talk: Talk) -> None:
    talk.say("one", "Sun")
    talk.model.n_ctx = 1800
    talk.conversation.settings.overflow = "roll"
    talk.say("x" * 330)
    assert talk.roles() == ["user"]
    assert any("left the context window" in note for note in talk.notes)


def test_turns_that_left_stay_out_in_later_rounds(talk: Talk) -> None:
    talk.say("one", "Sun")
    talk.model.answers[:] = [CALL, "Sunny."]
    talk.model.n_ctx = 1800
    talk.conversation.settings.overflow = "roll"
    talk.say("x" * 330, "Rain")
    assert talk.roles() == ["user", "assistant", "tool"]
    assert [request.moves for request in talk.model.seen[-2:]] == [True, False]
    assert len(talk.notes) == len(talk.saved.departures) == 1


def test_exports_tell_of_calls(talk: Talk) -> None:
    talk.say("Weather?", "Sun ``` here")
    tree = talk.conversation.chat.tree()
    assert read_json(export(tree, "json")).entries == tree.entries
    markdown = export(tree, "markdown")
    assert "Called `weather`:" in markdown
    assert "````\nSun ``` here\n````" in markdown
    (line,) = export(tree, "openai").splitlines()
    messages = json.loads(line)["messages"]
    (call,) = messages[1]["tool_calls"]
    assert messages[1] == {"role": "assistant", "content": "Let me see.", "tool_calls": [call]}
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert messages[2] == {"role": "tool", "content": "Sun ``` here", "tool_call_id": call["id"]}
    assert messages[3] == {"role": "assistant", "content": "It is sunny."}
    assert [json.loads(line)["role"] for line in export(tree, "jsonl").splitlines()] == [
        "user", "assistant", "tool", "assistant",
    ]  # fmt: skip


def test_a_turn_without_calls_is_as_ever(talk: Talk) -> None:
    talk.model.answers[:] = ["Sunny."]
    talk.say("Weather?")
    assert talk.saved == replace(talk.saved, content="Sunny.", rounds=())
