"""A conversation with a far server's model: what is saved, learned and said, however the server behaves."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import remote_server
from support.remote_server import (
    CALLS,
    FINE,
    IMPATIENCE,
    KEY,
    MODEL,
    PATIENCE,
    STREAM,
    THOUGHTS,
    Act,
    FarServer,
    chunk,
    failed,
    response,
)

from llmrun.chat.conversation import ChatSettings, Conversation
from llmrun.chat.store.export import export
from llmrun.chat.store.store import Sessions
from llmrun.chat.store.turns import INTERRUPTED, Answer, Question, ToolOutput
from llmrun.errors import ContextOverflowError, LlmrunError, UsageError
from llmrun.grammar import read_grammar
from llmrun.model.chat_model import with_seeds
from llmrun.protocol.messages import AnswerRequest, Event, Finished, Message, TextDelta, Tool
from llmrun.remote.model import RemoteModel
from llmrun.remote.server import ServedModel, Server

Open = Callable[..., RemoteModel]


@pytest.fixture
def far(server: FarServer) -> Iterator[Open]:
    """far(owner, n_ctx, patience): the server's model."""
    opened: list[RemoteModel] = []

    def make(owner: str = "", n_ctx: int | None = None, patience: object = PATIENCE) -> RemoteModel:
        served = ServedModel(MODEL, owner, n_ctx)
        opened.append(RemoteModel(Server(f"{server.url}/v1", KEY), served, lambda note: None, patience))  # type: ignore[arg-type]
        return opened[-1]

    yield make
    for each in opened:
        each.close()


class Talk:
    def __init__(self, folder: Path, model: RemoteModel, settings: ChatSettings | None = None) -> None:
        self.store = Sessions(folder)
        self.notes: list[str] = []
        self.conversation = Conversation(
            model,
            self.store.new(),
            settings or ChatSettings(),
            on_note=self.notes.append,
            on_overflow=lambda misfit: "stop",
        )

    def say(self, text: str) -> list[Event]:
        return list(self.conversation.ask(Question(text)))

    @property
    def parts(self) -> list[Question | Answer]:
        """What is on the disk."""
        return [entry.part for entry in Sessions(self.store.folder).open().entries]

    @property
    def answer(self) -> Answer:
        """The last one there."""
        last = self.parts[-1]
        assert isinstance(last, Answer)
        return last


@pytest.mark.parametrize(
    "name",
    [
        "is fine", "does not stream", "is busy at first", "wants a key", "finds the prompt too long", "streams garbage",
        "hangs up at once", "hangs up in the middle", "falls silent in the middle", "streams an error", "filters",
    ],
)  # fmt: skip
def test_a_chat_loses_nothing_whatever_the_server_does(server: FarServer, far: Open, tmp_path: Path, name: str) -> None:
    way = server.behave(name)
    talk = Talk(tmp_path, far(patience=IMPATIENCE if "silent" in name else PATIENCE))
    if way.error is None:
        talk.say("Hi")
        assert (talk.answer.content, talk.answer.finish) == (way.says, "stop")
    else:
        came = []
        with pytest.raises(way.error) as caught:
            came.extend(talk.conversation.ask(Question("Hi")))
        assert way.says in str(caught.value)
        assert KEY not in f"{caught.value!r} {caught.value.hint}"
        assert talk.parts[0] == Question("Hi")
        if len(talk.parts) > 1:
            assert talk.answer.finish == INTERRUPTED
            assert "Hello there".startswith(talk.answer.content)
    assert KEY not in repr(talk.parts)
    server.replies = [FINE]
    if "silent" in name:
        return  # the next answer may take longer than this patience lasts
    list(talk.conversation.retry())
    assert talk.answer.content == "Hello there"


def test_what_came_before_the_server_broke_off_is_kept(server: FarServer, far: Open, tmp_path: Path) -> None:
    server.behave("hangs up in the middle")
    talk = Talk(tmp_path, far())
    with pytest.raises(LlmrunError):
        talk.say("Hi")
    assert (talk.answer.content, talk.answer.finish) == ("Hello there", INTERRUPTED)


def test_an_answer_says_which_server_gave_it_and_never_the_key(server: FarServer, far: Open, tmp_path: Path) -> None:
    talk = Talk(tmp_path, far())
    talk.say("Hi")
    assert (talk.answer.model.name, talk.answer.model.server) == (MODEL, f"{server.url}/v1")
    assert all(KEY.encode() not in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())


def test_only_what_was_set_is_sent(server: FarServer, far: Open, tmp_path: Path) -> None:
    settings = ChatSettings(flags={"temperature": 0.8, "top_p": 0.9}, session={"top_p": 0.5})
    model = far("llamacpp")
    Talk(tmp_path, model, settings).say("Hi")
    (request,) = server.answered()
    assert (request.body["temperature"], request.body["top_p"]) == (0.8, 0.5)
    assert not {"top_k", "min_p", "seed", "stops_repeats"} & set(request.body)
    _, origins = model.sampling({"temperature": 0.8})
    assert (origins["temperature"], origins["top_k"]) == ("flag", "server")


def test_only_what_was_set_is_saved(far: Open, tmp_path: Path) -> None:
    talk = Talk(tmp_path, far(), ChatSettings(flags={"top_p": 0.5}))
    talk.say("Hi")
    exported = json.loads(export(talk.store.tree(), "json"))
    assert exported["messages"][-1]["sampling"] == {"top_p": 0.5}
    assert talk.answer.sampling.top_p == 0.5


def test_what_a_server_can_not_be_told_is_refused_before_anything_is_sent(server: FarServer, far: Open) -> None:
    model = far("openai")
    assert model.takes("temperature")
    assert not model.takes("min_p")
    with pytest.raises(UsageError, match="min_p"):
        model.sampling({"min_p": 0.1})
    with pytest.raises(UsageError, match="a GBNF grammar"):
        list(model.answer(AnswerRequest((Message("user", "Hi"),), grammar=read_grammar('root ::= "a"'))))
    assert not server.answered()


def test_figures_are_the_servers_tokens_and_our_clock(server: FarServer, far: Open, tmp_path: Path) -> None:
    finished = Talk(tmp_path, far(n_ctx=100)).say("Hi")[-1]
    assert isinstance(finished, Finished)
    stats = finished.stats
    assert (stats.prompt_tokens, stats.reused_tokens, stats.completion_tokens) == (7, 3, 2)
    assert (stats.context_used, stats.n_ctx, stats.over_network) == (9, 100, True)
    assert stats.ttft_seconds > 0


def test_thoughts_are_told_apart(server: FarServer, far: Open, tmp_path: Path) -> None:
    talk = Talk(tmp_path, far())
    for reply in (THOUGHTS, remote_server.told(chunk("<think>Hmm.</think>\n\nYes."))):
        server.replies = [reply]
        talk.say("Sure?")
        assert (talk.answer.reasoning, talk.answer.content) == ("Hmm.", "Yes.")


def test_tools_are_called(server: FarServer, far: Open, tmp_path: Path) -> None:
    tools = (Tool("add", "", '{"properties": {"a": {}, "b": {}}}'), Tool("now"))
    talk = Talk(tmp_path, far(), ChatSettings(request=AnswerRequest(tools=tools)))
    server.replies = [CALLS, FINE]
    talk.say("What is 1 + 2?")
    assert [call.name for call in talk.conversation.calls] == ["add", "now"]
    list(talk.conversation.go_on([ToolOutput("3"), ToolOutput("noon")]))
    assert talk.answer.content == "Hello there"
    sent = server.answered()[-1].body["messages"]
    assert [message["content"] for message in sent if message["role"] == "tool"] == ["3", "noon"]


def test_a_cancelled_answer_is_kept(server: FarServer, far: Open, tmp_path: Path) -> None:
    server.replies = [(STREAM, chunk("Hello"), Act.SILENCE)]
    model = far()
    talk = Talk(tmp_path, model)
    for event in talk.conversation.ask(Question("Hi")):
        if isinstance(event, TextDelta):
            model.cancel()
    assert (talk.answer.content, talk.answer.finish) == ("Hello", "cancelled")


def test_another_answer_has_another_seed(server: FarServer, far: Open, tmp_path: Path) -> None:
    talk = Talk(tmp_path, far(), ChatSettings(flags={"seed": 5}))
    talk.say("Hi")
    list(talk.conversation.retry())
    assert [request.body.get("seed", "none") for request in server.answered()] == [5, "none"]


def test_several_answers_have_their_seeds(server: FarServer, far: Open) -> None:
    asked = AnswerRequest((Message("user", "Hi"),))
    events = list(far().answer(*with_seeds(asked, [5, 6])))
    assert [event.reason for event in events if isinstance(event, Finished)] == ["stop", "stop"]
    assert sorted(request.body["seed"] for request in server.answered()) == [5, 6]


# ---- the context window --------------------------------------------------------------------------


def test_a_server_tells_its_window(server: FarServer, far: Open) -> None:
    properties = {"default_generation_settings": {"n_ctx": 1024}, "modalities": {"vision": False}}
    server.others = {f"/props?model={MODEL}": (response(200, json.dumps(properties).encode()),)}
    found = far("llamacpp")
    assert (found.n_ctx, found.modalities) == (1024, {"audio"})
    assert far("llamacpp", 512).n_ctx == 512
    unknown = far("openai")
    assert (unknown.n_ctx, unknown.modalities) == (0, {"image", "audio"})


def test_a_server_that_was_loading_tells_its_window_later(server: FarServer, far: Open, tmp_path: Path) -> None:
    place = f"/props?model={MODEL}"
    server.others = {place: failed(503, "Loading model")}
    model = far("llamacpp")
    assert model.n_ctx == 0
    server.others = {place: (response(200, b'{"default_generation_settings": {"n_ctx": 1024}}'),)}
    finished = Talk(tmp_path, model).say("Hi")[-1]
    assert isinstance(finished, Finished)
    assert finished.stats.n_ctx == model.n_ctx == 1024


def test_a_refusal_tells_the_window_and_the_policy_makes_room(server: FarServer, far: Open, tmp_path: Path) -> None:
    model = far()
    talk = Talk(tmp_path, model, ChatSettings(overflow="roll"))
    talk.say("word " * 2000)
    refused = failed(400, "This model's maximum context length is 2000 tokens. However, you asked for 4000.")
    server.replies = [refused, FINE]
    talk.say("Short?")
    assert model.n_ctx == 2000
    assert [len(request.body["messages"]) for request in server.answered()] == [1, 3, 1]
    assert talk.answer.departures
    assert any("roll" in note or "left" in note for note in talk.notes), talk.notes


def test_a_refusal_that_tells_no_window_is_an_overflow(server: FarServer, far: Open, tmp_path: Path) -> None:
    server.behave("finds the prompt too long")
    with pytest.raises(ContextOverflowError, match="too long"):
        Talk(tmp_path, far(), ChatSettings(overflow="roll")).say("Hi")
    assert len(server.answered()) == 1


def test_a_servers_tokenizer_counts(server: FarServer, far: Open) -> None:
    server.others = {"/tokenize": (response(200, b'{"tokens": [1, 2, 3]}'),)}
    counted = far("vllm").count([Message("user", "Hi"), Message("assistant", "Hello"), Message("user", "Hi")])
    assert counted.each == (3, 3, 3)
    assert counted.total > 9
    assert [request.body["prompt"] for request in server.asked] == ["Hi", "Hello"], "a text is counted once"


def test_without_one_the_answers_teach_how_long_a_token_is(server: FarServer, far: Open, tmp_path: Path) -> None:
    model = far("vllm")  # which says that it has one, and has none
    text = "word " * 1000
    before = model.count([Message("user", text)]).total
    server.replies = [(*remote_server.told(chunk("Hi"))[:-2], remote_server.usage(5016, 1), remote_server.DONE)]
    Talk(tmp_path, model).say(text)
    assert before < 2000
    assert model.count([Message("user", text)]).total == 5016
