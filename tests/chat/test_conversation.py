"""A conversation over a fake model and a real store: requests, truncation, saving, notes."""

from __future__ import annotations

import base64
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.answers import sent

from llmrun.chat.attachments import read_media
from llmrun.chat.conversation import ChatSettings, Conversation
from llmrun.chat.media import MediaFile
from llmrun.chat.store.export import export, read_json
from llmrun.chat.store.store import Sessions
from llmrun.chat.store.turns import INTERRUPTED, Question
from llmrun.chat.truncation import Policy, Window
from llmrun.chat.turn import Overflow
from llmrun.errors import ContextOverflowError, EngineCrashedError, OutOfMemoryError, UsageError
from llmrun.models.fingerprint import ModelFingerprint, fingerprint_file
from llmrun.protocol.messages import (
    AnswerRequest,
    Event,
    Finished,
    Message,
    Started,
    Stats,
    TextDelta,
    Tool,
)
from llmrun.protocol.params import Limits, resolve_sampling
from llmrun.protocol.questions import TokenCount
from llmrun.protocol.speculation import Speculation

BEGIN, MARKS, END = 5, 4, 3  # tokens that the template writes before all, around each message, and behind all


class FakeModel:
    """Answers with the number of the request; a byte is a token."""

    def __init__(self, path: Path, n_ctx: int) -> None:
        self.path = path
        path.write_bytes(b"GGUF")
        self.name = "fake"
        self.n_ctx = n_ctx
        self.adapters = ()
        self.examples: tuple[Message, ...] = ()
        self.modalities = frozenset(("image", "audio"))
        self.seen: list[list[Message]] = []
        self.requests: list[AnswerRequest] = []
        self.says = ""
        self.ends = "stop"
        self.dies = False
        self.dies_behind = False
        self.together = 1
        self.most_together = 9

    @property
    def used(self) -> ModelFingerprint:
        return fingerprint_file(self.name, self.path)

    def speculation(self) -> Speculation:
        return Speculation(7)

    def decode_together(self, answers: int) -> None:
        if answers > self.most_together:
            raise OutOfMemoryError("there is no memory for that")
        self.together = answers

    def sampling(self, flags: Any, session: Any) -> Any:
        return resolve_sampling(("session", session), ("flag", flags))

    def count(self, messages: Iterable[Message], **_: object) -> TokenCount:
        each = tuple(len(message.content.encode()) for message in messages)
        return TokenCount(each, BEGIN + sum(each) + MARKS * len(each) + END)

    def answer(self, *asked: AnswerRequest) -> Iterator[Event]:
        for request, each in enumerate(asked, 1):
            yield from self._answer(request, each)

    def _answer(self, request: int, asked: AnswerRequest) -> Iterator[Event]:
        self.seen.append(list(asked.messages))
        self.requests.append(asked)
        if self.dies:
            raise EngineCrashedError("the engine died")
        prompt = self.count(asked.messages).total
        assert prompt <= self.n_ctx, "the engine would refuse it"
        started = Started(request, prompt, 0, asked.sampling.seed or 0, thinking_tags=("<think>", "</think>"))
        yield started
        text = self.says or f"answer {len(self.seen)}"
        if text:
            yield from sent(started, [text])[:-1]
        if self.dies_behind:
            raise EngineCrashedError("the engine died")
        stats = Stats(prompt_tokens=prompt, completion_tokens=len(text), context_used=prompt + len(text))
        yield Finished(request, self.ends, stats)


class Talk:
    def __init__(self, folder: Path, n_ctx: int = 10_000, overflow: Overflow = "stop", **settings: Any) -> None:
        self.model = FakeModel(folder / "m.gguf", n_ctx)
        self.store = Sessions(folder)
        self.notes: list[str] = []
        self.asked: list[str] = []
        self.policy: Policy = "roll"
        self.conversation = Conversation(
            self.model,  # type: ignore[arg-type]
            self.store.new(),
            ChatSettings(overflow=overflow, **settings),
            on_note=self.notes.append,
            on_overflow=self._choose,
        )
        self.chat = self.conversation.chat

    def _choose(self, misfit: Any) -> Policy:
        self.asked.append(misfit.why)
        return self.policy

    def say(self, text: str) -> list[Event]:
        return list(self.conversation.ask(Question(text)))

    def texts(self) -> list[str]:
        return [message.content for message in self.chat.messages()]


@pytest.fixture
def talk(tmp_path: Path) -> Talk:
    return Talk(tmp_path)


def test_what_fills_the_window_is_what_the_last_answer_said(talk: Talk) -> None:
    talk.model.says = "<think>long</think>yes"
    *_, finished = talk.say("one")
    assert isinstance(finished, Finished)
    counted = talk.conversation.count()
    assert counted.total == finished.stats.context_used
    assert counted.each == (len("one"), len(talk.model.says)), "with the reasoning, which the next prompt is without"
    talk.say("two")
    talk.chat.undo()
    assert talk.conversation.count() == counted
    for change in (lambda: talk.chat.set_system("Be kind."), lambda: setattr(talk.model, "name", "another")):
        talk.say("three")
        change()
        assert talk.conversation.count() == talk.model.count(talk.chat.messages()), "the next prompt is another one"


def test_turns_are_sent_and_saved(talk: Talk) -> None:
    talk.say("one")
    talk.say("two")
    assert [message.content for message in talk.model.seen[1]] == ["one", "answer 1", "two"]
    assert Sessions(talk.store.folder).open().messages() == talk.chat.messages()
    assert talk.chat.last_answer is not None
    assert talk.chat.last_answer.model.name == "fake"


def test_a_turn_is_saved_before_its_end_is_seen(talk: Talk) -> None:
    for event in talk.conversation.ask(Question("one")):
        if isinstance(event, Finished):
            assert talk.texts() == ["one", "answer 1"]


def test_the_question_is_saved_before_it_is_sent(talk: Talk) -> None:
    events = talk.conversation.ask(Question("one"))
    next(events)
    assert not Sessions(talk.store.folder).open().is_answered


def test_a_question_whose_answer_failed_can_be_asked_again(talk: Talk) -> None:
    talk.say("one")
    talk.model.dies = True
    with pytest.raises(EngineCrashedError):
        talk.say("two")
    talk.model.dies = False
    assert Sessions(talk.store.folder).open().entries[-1].part == Question("two")
    list(talk.conversation.retry())
    assert talk.texts() == ["one", "answer 1", "two", "answer 3"]
    assert [message.content for message in talk.model.seen[2]] == ["one", "answer 1", "two"]


def test_another_question_takes_the_place_of_one_without_an_answer(talk: Talk) -> None:
    talk.model.dies = True
    with pytest.raises(EngineCrashedError):
        talk.say("one")
    talk.model.dies = False
    talk.say("two")
    assert talk.texts() == ["two", "answer 2"]


def test_what_came_before_the_engine_died_is_kept_and_marked(talk: Talk) -> None:
    talk.model.dies_behind = True
    with pytest.raises(EngineCrashedError):
        talk.say("one")
    saved = Sessions(talk.store.folder).open()
    assert saved.last_answer is not None
    assert (saved.last_answer.content, saved.last_answer.finish) == ("answer 1", INTERRUPTED)
    assert "its engine died" in export(talk.store.tree(), "markdown")


def test_what_came_is_kept_where_nobody_takes_the_rest(talk: Talk) -> None:
    events = talk.conversation.ask(Question("one"))
    while not isinstance(next(events), TextDelta):
        pass
    events.close()
    assert talk.texts() == ["one", "answer 1"]


def test_a_seed_counts_until_there_is_a_whole_answer(tmp_path: Path) -> None:
    talk = Talk(tmp_path, flags={"seed": 7})
    talk.model.dies_behind = True
    with pytest.raises(EngineCrashedError):
        talk.say("one")
    talk.model.dies_behind = False
    list(talk.conversation.retry())
    list(talk.conversation.retry())
    assert [request.sampling.seed for request in talk.model.requests] == [7, 7, None]


def fill_disk(talk: Talk) -> None:
    pages = talk.chat._connection.execute("PRAGMA page_count").fetchone()[0]
    talk.chat._connection.execute(f"PRAGMA max_page_count={pages + 1}")


@pytest.mark.parametrize("question", ["long " * 4000, "short"])
def test_a_chat_on_a_full_disk_says_so_and_goes_on(tmp_path: Path, question: str) -> None:
    """It is full for the question, or only for its answer."""
    talk = Talk(tmp_path, n_ctx=1_000_000)
    talk.say("one")
    fill_disk(talk)
    talk.model.says = "word " * 4000
    talk.say(question)
    talk.say("three")
    assert [note.partition(":")[0] for note in talk.notes] == ["This chat is no longer saved"]
    assert "disk is full" in talk.notes[0]
    assert "/export" in talk.notes[0]
    chat = talk.conversation.chat
    assert [message.content for message in chat.messages()][::2] == ["one", question, "three"]
    assert len(chat.tree().entries) == 6
    chat.release()
    assert Sessions(talk.store.folder).open().entries[1].part.content == "answer 1"


def test_what_ctrl_c_stopped_is_kept_as_far_as_it_came(talk: Talk) -> None:
    talk.model.ends = "cancelled"
    talk.say("one")
    assert talk.texts() == ["one", "answer 1"]


def test_undo_retry_and_edit(talk: Talk) -> None:
    talk.say("one")
    talk.say("two")
    list(talk.conversation.retry())
    assert talk.texts() == ["one", "answer 1", "two", "answer 3"]
    assert [message.content for message in talk.model.seen[2]] == ["one", "answer 1", "two"]
    list(talk.conversation.edit(Question("zwei")))
    assert talk.texts() == ["one", "answer 1", "zwei", "answer 4"]
    talk.chat.undo()
    assert talk.texts() == ["one", "answer 1"]
    assert len(talk.chat.branches()) == 4


def test_an_answer_is_continued_where_it_ended(talk: Talk) -> None:
    with pytest.raises(UsageError, match="no answer to continue"):
        list(talk.conversation.resume())
    talk.say("one")
    list(talk.conversation.resume())
    first, second = talk.model.requests
    assert (first.begins, second.begins) == ("", "answer 1")
    assert second.messages == first.messages, "the answer is not a turn before it"
    assert len(talk.chat.branches()) == 2, "both stay saved"


def test_each_answer_begins_with_the_given_text(tmp_path: Path) -> None:
    talk = Talk(tmp_path, request=AnswerRequest(begins="Yes, "))
    talk.say("one")
    assert talk.model.requests[0].begins == "Yes, "


def test_retry_draws_anew_even_with_a_seed(tmp_path: Path) -> None:
    talk = Talk(tmp_path, flags={"seed": 7})
    talk.say("one")
    list(talk.conversation.retry())
    assert [request.sampling.seed for request in talk.model.requests] == [7, None]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_of_several_answers_one_stays_and_all_are_saved(talk: Talk, place: int) -> None:
    talk.say("one")
    list(talk.conversation.retry_n([5, 6, 7]))
    assert [request.sampling.seed for request in talk.model.requests] == [None, 5, 6, 7]
    assert talk.conversation.n_versions == 3
    talk.conversation.keep(place)
    assert talk.texts() == ["one", f"answer {2 + place}"]
    assert talk.chat.last_answer is not None
    assert talk.chat.last_answer.sampling.seed == 5 + place
    assert sorted(branch.name == "main" for branch in talk.chat.branches()) == [False, False, False, True]
    assert (talk.conversation.last is not None) is (place == 2), "the engine remembers the last one only"
    talk.chat.reload()
    assert talk.texts() == ["one", f"answer {2 + place}"]
    talk.say("two")
    assert [message.content for message in talk.model.seen[-1]] == ["one", f"answer {2 + place}", "two"]


@pytest.mark.parametrize("most", [1, 3])
def test_several_answers_are_decoded_together_where_there_is_memory(talk: Talk, most: int) -> None:
    talk.say("one")
    talk.model.most_together = most
    list(talk.conversation.retry_n([5, 6, 7]))
    assert talk.model.together == most
    assert talk.conversation.n_versions == 3
    note = "The answers are decoded one by one: there is no memory for that"
    assert talk.notes == ([note] if most == 1 else [])


def test_each_of_several_answers_has_its_own_reasoning(talk: Talk) -> None:
    talk.say("one")
    talk.model.says = "<think>hm</think>yes"
    list(talk.conversation.retry_n([5, 6]))
    assert talk.chat.last_answer is not None
    assert (talk.chat.last_answer.content, talk.chat.last_answer.reasoning) == ("yes", "hm")


def test_several_answers_that_are_given_up_are_kept_as_far_as_they_came(talk: Talk) -> None:
    talk.say("one")
    events = talk.conversation.retry_n([5, 6])
    while not isinstance(next(events), Finished):
        pass
    next(events)  # the second one has begun
    events.close()
    assert talk.conversation.n_versions == 1
    assert talk.texts() == ["one", "answer 2"]


def test_several_answers_can_not_call_tools(tmp_path: Path) -> None:
    talk = Talk(tmp_path, request=AnswerRequest(tools=(Tool("clock"),)))
    talk.say("one")
    with pytest.raises(UsageError, match="tools"):
        list(talk.conversation.retry_n([1, 2]))


def test_nothing_to_retry(talk: Talk) -> None:
    with pytest.raises(UsageError):
        list(talk.conversation.retry_n([1, 2]))
    with pytest.raises(UsageError):
        list(talk.conversation.retry())
    with pytest.raises(UsageError):
        list(talk.conversation.edit(Question("x")))


def test_reasoning_is_saved_but_not_sent_again(talk: Talk) -> None:
    talk.model.says = "<think>\nhm\n</think>\n\nYes."
    talk.say("one")
    assert talk.texts() == ["one", "Yes."]
    assert talk.chat.last_answer is not None
    assert talk.chat.last_answer.reasoning.strip() == "hm"


def test_set_in_the_chat_counts_before_the_flag(tmp_path: Path) -> None:
    talk = Talk(tmp_path, flags={"top_k": 1, "top_p": 0.5})
    talk.conversation.settings.session["top_k"] = 2
    params, origins = talk.conversation.sampling()
    assert (params.top_k, origins["top_k"], params.top_p, origins["top_p"]) == (2, "session", 0.5, "flag")


def test_stop_sends_nothing_that_does_not_fit(tmp_path: Path) -> None:
    talk = Talk(tmp_path, n_ctx=200, request=AnswerRequest(limits=Limits(20)))
    talk.say("a" * 60)
    with pytest.raises(ContextOverflowError) as caught:
        talk.say("b" * 100)
    assert "200" in caught.value.why
    assert talk.texts() == ["a" * 60, "answer 1"]
    assert len(talk.model.seen) == 1


def test_ask_asks(tmp_path: Path) -> None:
    talk = Talk(tmp_path, n_ctx=200, overflow="ask", request=AnswerRequest(limits=Limits(20)))
    talk.say("a" * 60)
    talk.say("b" * 100)
    assert len(talk.asked) == 1
    assert talk.texts() == ["b" * 100, "answer 2"]
    assert "turn 1" in talk.notes[0].lower()


def test_what_the_cache_holds_is_moved_only_where_turns_left_since_the_last_answer(tmp_path: Path) -> None:
    """Else every turn behind a thinking answer would reuse what was computed with thoughts that are gone."""
    talk = Talk(tmp_path, n_ctx=210, overflow="roll", request=AnswerRequest(limits=Limits(20)))
    talk.model.says = "<think>hm</think>yes"
    for text in ("a" * 60, "b" * 60, "c" * 60, "d"):
        talk.say(text)
    assert [message.content[0] for message in talk.model.seen[2]] == ["b", "y", "c"]
    assert [request.moves for request in talk.model.requests] == [False, False, True, False]


@pytest.mark.parametrize("system", ["", "Be kind."])
def test_example_turns_of_the_model_stand_before_the_chat_and_stay(tmp_path: Path, system: str) -> None:
    talk = Talk(tmp_path, n_ctx=400, overflow="roll")
    talk.model.examples = (Message("user", "Ahoy?"), Message("assistant", "Arr!"))
    talk.chat.set_system(system)
    first = [*([Message("system", system)] if system else []), *talk.model.examples]
    for number in range(6):
        talk.say(f"question {number} " + "x" * 60)
        assert talk.model.seen[-1][: len(first)] == first
    sent = [message.content for message in talk.model.seen[-1]]
    assert not any("question 0" in text for text in sent), "the oldest turn goes, not an example"
    assert "question 5" in sent[-1]
    assert len(talk.conversation.messages()) == len(talk.conversation.count().each)
    assert Message("user", "Ahoy?") not in talk.chat.messages()


def test_notes_of_the_user_are_part_of_each_prompt(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMRUN_NOTES", "on")
    talk = Talk(tmp_path)
    talk.chat.set_system("Be kind.")
    talk.say("One?")
    assert talk.model.seen[-1][0] == Message("system", "Be kind.")
    (home / "notes.md").write_text("- I live in Oslo")
    talk.say("Two?")
    assert talk.model.seen[-1][0].content.startswith("Be kind.\n\n")
    assert "I live in Oslo" in talk.model.seen[-1][0].content
    assert len(talk.conversation.messages()) == len(talk.conversation.count().each)
    assert talk.chat.system == "Be kind.", "the chat does not keep them"


def test_a_summary_stands_where_the_turns_were(tmp_path: Path) -> None:
    talk = Talk(tmp_path, n_ctx=4000, overflow="summarize", request=AnswerRequest(limits=Limits(500)))
    for number in range(8):
        talk.say(f"{number} " + "x" * 600)
    summaries = [text for text in talk.texts() if text.startswith("answer") and "Please" not in text]
    assert "Please summarize our conversation so far." in talk.texts()
    assert summaries
    assert any("condensed" in note for note in talk.notes)
    # The next start sees the same window.
    assert Sessions(tmp_path).open().messages() == talk.chat.messages()


def fresh_folder(folder: Path, number: int) -> Path:
    (folder / str(number)).mkdir()
    return folder / str(number)


@pytest.mark.parametrize("policy", ["stop", "roll", "middle", "summarize", "ask"])
def test_random_conversations_over_the_limit(policy: Overflow, tmp_path: Path) -> None:
    """What the model saw is what the front reported to have stayed; the system prompt is always first."""
    rng = random.Random(policy)
    for number in range(60):
        talk = Talk(fresh_folder(tmp_path, number))
        talk.store._connection.execute("PRAGMA synchronous=OFF")  # whether turns survive a crash is another question
        talk.model.n_ctx = rng.randint(1200, 2500)
        talk.conversation.settings.overflow = policy
        talk.conversation.settings.keep = rng.randint(0, 2)
        talk.conversation.settings.request = AnswerRequest(limits=Limits(rng.randint(20, 200)))
        talk.policy = rng.choice(["roll", "middle", "summarize"])
        system = "s" * rng.randint(0, 100)
        talk.chat.set_system(system)
        for _ in range(rng.randint(2, 8)):
            before = talk.model.count([*talk.chat.messages(), Message("user", "q")]).total - 1
            talk.notes.clear()
            talk.model.says = "x" * rng.randint(1, 60)
            question = "q" * rng.randint(1, 700)
            try:
                events = talk.say(question)
            except ContextOverflowError:
                continue
            started = next(event for event in events if isinstance(event, Started))
            answer = talk.chat.last_answer
            assert answer is not None
            gone = sum(departure.tokens for departure in answer.departures)
            assert started.prompt_tokens == before + len(question) - gone
            sent = talk.model.seen[-1]
            assert sent == talk.chat.messages()[:-1], "the saved chat sees what the model saw"
            assert (sent[0].role == "system") == bool(system)
            window = Window.of(talk.model.n_ctx, talk.conversation.settings.request.limits.max_tokens)
            assert started.prompt_tokens + window.reserve <= talk.model.n_ctx
            reported = [note for note in talk.notes if " tokens, " in note]
            assert len(reported) == len(answer.departures)
            assert all(f"{d.tokens:,} tokens" in note for d, note in zip(answer.departures, reported, strict=True))
        talk.store.close()


# ---- images --------------------------------------------------------------------------------------------------


@pytest.fixture
def image(tmp_path: Path) -> MediaFile:
    path = tmp_path / "cat.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\ncat")
    return MediaFile.of(read_media(str(path)))


def seen(talk: Talk) -> list[list[tuple[str, str]]]:
    """The images of each message that was sent last."""
    return [[(each.name, each.data) for each in message.media] for message in talk.model.seen[-1]]


def test_an_image_is_sent_with_its_question_each_time(talk: Talk, image: MediaFile) -> None:
    cat = [("cat.png", base64.b64encode(Path(image.path).read_bytes()).decode())]
    list(talk.conversation.ask(Question("What is it?", media=(image,))))
    assert seen(talk) == [cat]
    talk.say("And now?")
    assert seen(talk) == [cat, [], []]
    again = Talk(talk.model.path.parent)
    again.conversation.chat = talk.store.open(talk.chat.name)
    again.say("Still there?")
    assert seen(again)[0] == cat
    assert again.notes == []


@pytest.mark.parametrize("change", ["gone", "other"])
def test_a_missing_image_is_reported_once_and_the_chat_goes_on(talk: Talk, image: MediaFile, change: str) -> None:
    list(talk.conversation.ask(Question("What is it?", media=(image,))))
    if change == "gone":
        Path(image.path).unlink()
    else:
        Path(image.path).write_bytes(b"\x89PNG\r\n\x1a\ndog")
    talk.conversation = Conversation(
        talk.model,  # type: ignore[arg-type]
        talk.chat,
        ChatSettings(),
        on_note=talk.notes.append,
        on_overflow=talk._choose,
    )
    talk.say("one")
    talk.say("two")
    assert seen(talk)[0] == []
    assert talk.model.seen[-1][0].content == "[The file cat.png can't be read.]\nWhat is it?"
    [note] = talk.notes
    assert ("no such file" if change == "gone" else "has changed") in note


def test_a_model_without_image_input_is_told_of_images(talk: Talk, image: MediaFile) -> None:
    list(talk.conversation.ask(Question("What is it?", media=(image,))))
    talk.model.modalities = frozenset()
    talk.say("one")
    talk.say("two")
    assert seen(talk)[0] == []
    assert talk.model.seen[-1][0].content == "[The image cat.png can't be read.]\nWhat is it?"
    assert talk.notes == ["fake can't read images: cat.png is left out"]


def test_a_question_whose_image_can_not_be_read_is_removed(talk: Talk, image: MediaFile) -> None:
    talk.say("one")
    talk.model.dies = True
    with pytest.raises(EngineCrashedError):
        list(talk.conversation.ask(Question("What is it?", media=(image,))))
    assert talk.texts() == ["one", "answer 1"]
    assert talk.notes == ["The question and its files were removed."]


def test_an_exported_chat_names_its_images(talk: Talk, image: MediaFile) -> None:
    list(talk.conversation.ask(Question("What is it?", media=(image,))))
    tree = talk.chat.tree()
    assert read_json(export(tree, "json")).entries == tree.entries
    assert image.path in export(tree, "markdown")
