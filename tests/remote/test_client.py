"""A far server's answers, and all that can go wrong with them, against a stand-in that misbehaves in named ways."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import pytest
from support import remote_server
from support.answers import accumulated
from support.certificates import server_context
from support.remote_server import (
    CHAT,
    IMPATIENCE,
    KEY,
    MODEL,
    PATIENCE,
    STREAM,
    TEXT,
    WAYS,
    Endless,
    FarServer,
    Reply,
    chunk,
    failed,
    listed,
    told,
)

import llmrun.remote.client as module
from llmrun.errors import LlmrunError, LoginRequiredError, NetworkError, UsageError
from llmrun.protocol.messages import (
    AnswerRequest,
    Event,
    Finished,
    Generate,
    Message,
    Started,
    TextDelta,
    Tool,
    ToolCall,
)
from llmrun.protocol.params import Limits
from llmrun.remote.client import RemoteClient
from llmrun.remote.server import ServedModel, Server
from llmrun.remote.transport import models

HI = AnswerRequest(messages=(Message("user", "Hi"),))
RAW = AnswerRequest(prompt="Hi")


@pytest.fixture
def client(server: FarServer) -> Iterator[RemoteClient]:
    client = RemoteClient(Server(f"{server.url}/v1", KEY), ServedModel(MODEL), PATIENCE)
    yield client
    client.close()


def ask(client: RemoteClient, asked: AnswerRequest = HI) -> list[Event]:
    return list(submit(client, Generate(client.next_request(), asked)))


def submit(client: RemoteClient, command: Generate) -> Iterator[Event]:
    """Send a request; yields the answer's events."""
    heard: SimpleQueue[Event | LlmrunError | None] = SimpleQueue()
    client.listen(command, heard.put)
    while (event := heard.get()) is not None:
        if isinstance(event, LlmrunError):
            raise event
        yield event


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


@pytest.mark.parametrize(
    ("name", "asked"), [(name, kind) for name, way in WAYS.items() for kind in ([HI] if way.error else [HI, RAW])]
)
def test_a_server_may_misbehave(server: FarServer, name: str, asked: AnswerRequest) -> None:
    way = server.behave(name)
    patience = IMPATIENCE if "silent" in name else PATIENCE
    client = RemoteClient(Server(f"{server.url}/v1", KEY), ServedModel(MODEL), patience)
    try:
        if way.error is None:
            events = ask(client, asked)
            assert isinstance(events[0], Started)
            assert text_of(events) == way.says
            assert isinstance(events[-1], Finished)
            assert events[-1].reason == "stop"
        else:
            with pytest.raises(LlmrunError) as caught:
                ask(client, asked)
            error = caught.value
            assert type(error) is way.error
            assert way.says in str(error)
            assert KEY not in f"{error!r} {error} {error.hint} {error.__cause__!r}"
        if patience is PATIENCE:
            server.behave("is fine")
            assert text_of(ask(client)) == "Hello there", "the client does not survive it"
    finally:
        client.close()


WORDS = (STREAM, Endless(chunk(" word")))


def test_a_server_that_ignores_the_limit_of_tokens_is_cut(server: FarServer) -> None:
    notes: list[str] = []
    client = RemoteClient(Server(f"{server.url}/v1"), ServedModel(MODEL), PATIENCE, notes.append)
    server.replies = [WORDS]
    events = ask(client, replace(HI, limits=Limits(5)))
    assert text_of(events) == " word" * 5
    assert isinstance(events[-1], Finished)
    assert (events[-1].reason, events[-1].stats.completion_tokens) == ("length", 6)
    server.behave("does not stream")  # an answer of two tokens, by its usage
    assert text_of(ask(client, replace(HI, limits=Limits(1)))) == "Hello there"
    client.close()
    host = server.url.removeprefix("http://")
    assert notes == [
        f"{host} ignores max_tokens 5: its answer was cut here",
        f"{host} ignores max_tokens 1: its answer has 2 tokens",
    ]


def test_an_answer_without_end_is_given_up(server: FarServer, client: RemoteClient) -> None:
    server.replies = [(STREAM, Endless(chunk("x" * 2**20), 0.0))]
    with pytest.raises(NetworkError, match="sends too much"):
        ask(client)


def test_a_server_that_sends_single_characters_is_not_cut(server: FarServer, client: RemoteClient) -> None:
    server.replies = [told(*(chunk(letter) for letter in "One to ten"))]
    assert text_of(ask(client, replace(HI, limits=Limits(3)))) == "One to ten"


def test_calls_count_as_tokens(server: FarServer, client: RemoteClient) -> None:
    called = {"index": 0, "id": "x", "type": "function", "function": {"name": "add", "arguments": "[[[["}}
    server.replies = [(STREAM, Endless(chunk(tool_calls=[called])))]
    tools = (Tool("add"),)
    last = ask(client, replace(HI, tools=tools, limits=Limits(50)))[-1]
    assert isinstance(last, Finished)
    assert last.reason == "length"


def test_waiting_for_the_first_token_is_said_once(server: FarServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HINT_SECONDS", 0.01)
    notes: list[str] = []
    client = RemoteClient(Server(f"{server.url}/v1"), ServedModel(MODEL), IMPATIENCE, notes.append)
    for name in ("is silent but for comments", "falls silent behind the headers"):
        server.behave(name)
        with pytest.raises(NetworkError, match="stopped answering"):
            ask(client)
    client.close()
    (note,) = notes
    assert "has sent nothing of the answer yet; waiting 0.2 seconds at most" in note


TOOL_TURN = replace(
    HI,
    messages=(
        Message("user", "Double 4."),
        Message("assistant", "", (ToolCall("a", "double", "{}"),), reasoning="Plan."),
        Message("tool", "8", tool_call_id="a", name="double"),
    ),
)
MISSING = failed(400, "The `reasoning_content` in the thinking mode must be passed back to the API.")
UNKNOWN_FIELD = failed(422, "Extra inputs are not permitted: 'reasoning_content'")


def test_reasoning_goes_back_as_the_server_gave_it(server: FarServer, client: RemoteClient) -> None:
    server.replies = [told(chunk(reasoning="Hm."), chunk("Yes.")), told(chunk("Yes."))]
    for _ in range(3):
        ask(client, TOOL_TURN)
    sent = [request.body["messages"][1].get("reasoning") for request in server.answered()]
    assert sent == [None, "Plan.", "Plan."]


@pytest.mark.parametrize("refusal", [MISSING, UNKNOWN_FIELD], ids=["missing", "unknown"])
def test_a_server_that_wants_its_reasoning_otherwise_is_asked_again(server: FarServer, refusal: Reply) -> None:
    """A chat that began with another model, or was resumed: the server's way is not known yet, or changes."""
    client = RemoteClient(Server(f"{server.url}/v1"), ServedModel(MODEL), PATIENCE)
    is_missing = refusal is MISSING
    client.reasoning_name = None if is_missing else "reasoning_content"
    answer = told(chunk(reasoning_content="Hm."), chunk("Yes."))
    server.replies = [refusal, answer]
    assert text_of(ask(client, TOOL_TURN)) == text_of(ask(client, TOOL_TURN)) == "Hm.Yes."
    sent = [request.body["messages"][1].get("reasoning_content") for request in server.answered()]
    assert sent == ([None, "Plan.", "Plan."] if is_missing else ["Plan.", None, None])
    server.replies = [refusal]
    with pytest.raises(UsageError, match="reasoning_content"):
        ask(client, TOOL_TURN)
    client.close()
    assert len(server.answered()) == 5, "a server that always refuses is asked twice"


def test_there_are_as_many_ways_as_promised() -> None:
    assert len([way for way in WAYS.values() if way.error]) >= 30


def test_the_key_and_the_question_arrive(server: FarServer, client: RemoteClient) -> None:
    ask(client)
    (request,) = server.asked
    assert (request.method, request.path) == ("POST", CHAT)
    assert request.headers["authorization"] == f"Bearer {KEY}"
    assert request.body["messages"] == [{"role": "user", "content": "Hi"}]
    assert request.body["model"] == MODEL
    assert request.body["stream_options"] == {"include_usage": True}
    ask(client, AnswerRequest(prompt="Hi"))
    assert (server.asked[1].path, server.asked[1].body["prompt"]) == (TEXT, "Hi")


def test_no_key_is_no_header(server: FarServer) -> None:
    client = RemoteClient(Server(f"{server.url}/v1"), ServedModel(MODEL), PATIENCE)
    server.behave("wants a key")
    with pytest.raises(LoginRequiredError, match="wants a key") as caught:
        ask(client)
    client.close()
    assert "LLMRUN_SERVER_KEY" in caught.value.hint
    assert "authorization" not in server.asked[0].headers


def test_a_redirect_takes_the_key_nowhere(server: FarServer, client: RemoteClient) -> None:
    with remote_server.serving() as other:
        location = f"{other.url}/v1/chat/completions"
        server.replies = [(remote_server.response(307, location=location),)]
        with pytest.raises(NetworkError, match="redirects to"):
            ask(client)
        assert not other.asked


def test_a_busy_server_is_asked_again_and_that_is_said(server: FarServer) -> None:
    notes: list[str] = []
    client = RemoteClient(Server(f"{server.url}/v1"), ServedModel(MODEL), PATIENCE, notes.append)
    server.behave("is busy at first")
    ask(client)
    server.behave("is busy for ever")
    with pytest.raises(NetworkError, match="answered 429"):
        ask(client)
    client.close()
    assert len(server.asked) == 3 + 1 + PATIENCE.retries
    assert len(notes) == 2 + PATIENCE.retries
    assert "is busy; trying again in" in notes[0]


def test_what_the_server_counts_is_taken_over(client: RemoteClient) -> None:
    finished = ask(client)[-1]
    assert isinstance(finished, Finished)
    stats = finished.stats
    assert (stats.prompt_tokens, stats.reused_tokens, stats.completion_tokens) == (7, 3, 2)
    assert stats.ttft_seconds > 0
    assert client.has_usage is True


@pytest.mark.parametrize("name", ["says no usage", "does not say that it is done"])
def test_pieces_are_counted_where_the_server_counts_nothing(server: FarServer, client: RemoteClient, name: str) -> None:
    server.behave(name)
    finished = ask(client)[-1]
    assert isinstance(finished, Finished)
    assert (finished.stats.prompt_tokens, finished.stats.completion_tokens) == (0, 2)
    assert client.has_usage is False


def test_who_counts_is_known_when_an_answer_ends(server: FarServer, client: RemoteClient) -> None:
    server.behave("stays when it is done")
    known = [client.has_usage for event in submit(client, Generate(1, HI)) if isinstance(event, Finished)]
    assert known == [True]


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_thoughts_are_thoughts(server: FarServer, client: RemoteClient, field: str) -> None:
    server.replies = [told(chunk(**{field: "Hm"}), chunk(**{field: "m."}), chunk("Yes."))]
    received = accumulated(ask(client))
    assert (received.reasoning, received.text) == ("Hmm.", "Yes.")


def test_calls_are_calls(server: FarServer, client: RemoteClient) -> None:
    server.replies = [remote_server.CALLS]
    tools = (Tool("add"), Tool("now"))
    received = accumulated(ask(client, replace(HI, tools=tools)))
    assert [(call.name, call.arguments) for call in received.calls] == [("add", '{"a": 1, "b": 2}'), ("now", "{}")]
    assert received.reason == "tool_calls"


def test_a_call_that_is_none_is_an_error(server: FarServer, client: RemoteClient) -> None:
    function = {"name": "add", "arguments": "{a: 1}"}
    server.replies = [told(chunk(tool_calls=[{"index": 0, "function": function}]))]
    with pytest.raises(NetworkError, match="not JSON"):
        ask(client, replace(HI, tools=(Tool("add"),)))


def test_a_cancelled_answer_ends_and_its_connection_too(server: FarServer, client: RemoteClient) -> None:
    server.behave("falls silent in the middle")
    heard: SimpleQueue[Event | LlmrunError | None] = SimpleQueue()
    request = client.next_request()
    client.listen(Generate(request, HI), heard.put)
    while not isinstance(heard.get(timeout=remote_server.SECONDS), TextDelta):
        pass
    client.cancel(request)
    rest = list(iter(lambda: heard.get(timeout=remote_server.SECONDS), None))
    assert isinstance(rest[-1], Finished)
    assert rest[-1].reason == "cancelled"
    client.cancel(request)  # nothing happens
    server.behave("is fine")
    assert text_of(ask(client)) == "Hello there"


def test_closing_ends_what_is_open(server: FarServer, client: RemoteClient) -> None:
    server.behave("falls silent at once")
    heard: SimpleQueue[Event | LlmrunError | None] = SimpleQueue()
    client.listen(Generate(client.next_request(), HI), heard.put)
    client.close()
    last = heard.get(timeout=remote_server.SECONDS)
    assert isinstance(last, Finished)
    assert last.reason == "cancelled"
    assert heard.get(timeout=remote_server.SECONDS) is None
    assert not client.alive


def test_many_are_answered_at_once(server: FarServer, client: RemoteClient) -> None:
    heard: SimpleQueue[Event | LlmrunError | None] = SimpleQueue()
    for _ in range(64):
        client.listen(Generate(client.next_request(), HI), heard.put)
    ended, texts = 0, dict[int, str]()
    while ended < 64:
        event = heard.get(timeout=remote_server.SECONDS)
        ended += event is None
        if isinstance(event, TextDelta):
            texts[event.request] = texts.get(event.request, "") + event.text
    assert texts == dict.fromkeys(range(1, 65), "Hello there")


def test_nobody_listens_there() -> None:
    with remote_server.serving() as server:
        where = Server(f"{server.url}/v1", KEY)
    client = RemoteClient(where, ServedModel(MODEL), PATIENCE)
    with pytest.raises(NetworkError, match="can't reach 127") as caught:
        ask(client)
    client.close()
    assert "does the server run" in caught.value.hint


# ---- TLS


def test_a_certificate_has_to_be_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context, authority = server_context(tmp_path)
    with remote_server.serving(context) as server:
        where = Server(f"{server.url}/v1", KEY)
        with pytest.raises(NetworkError, match="is not trusted") as caught:
            models(where)
        assert "SSL_CERT_FILE" in caught.value.hint
        monkeypatch.setenv("SSL_CERT_FILE", str(authority))
        client = RemoteClient(where, models(where)[0], PATIENCE)
        assert text_of(ask(client)) == "Hello there"
        client.close()
        assert len(server.asked) == 3 - 1, "the key went out before the certificate was checked"


def test_a_plain_server_is_asked_for_tls(server: FarServer) -> None:
    with pytest.raises(NetworkError, match="no TLS") as caught:
        models(Server(f"{server.url}/v1".replace("http", "https"), KEY), 30.0)
    assert "http://127.0.0.1" in caught.value.hint


def test_a_tls_server_is_asked_in_plain_text(tmp_path: Path) -> None:
    with remote_server.serving(server_context(tmp_path)[0]) as server, pytest.raises(NetworkError):
        models(Server(f"{server.url}/v1".replace("https", "http"), KEY), 30.0)


# ---- which models there are


def test_models_are_listed(server: FarServer) -> None:
    where = Server(f"{server.url}/v1", KEY)
    assert models(where) == (ServedModel(MODEL, "llmrun"),)
    assert server.asked[0].headers["authorization"] == f"Bearer {KEY}"
    server.models = listed("a", "b", owned_by="vllm", max_model_len=4096)
    assert models(where) == (ServedModel("a", "vllm", 4096), ServedModel("b", "vllm", 4096))
    server.models = listed("c", owned_by="llamacpp", meta={"n_ctx": 2048, "n_ctx_train": 8192})
    assert models(where) == (ServedModel("c", "llamacpp", 2048),)


@pytest.mark.parametrize(
    ("reply", "error", "says"),
    [
        (remote_server.failed(401, f"wrong: {KEY}"), LoginRequiredError, "refuses the key"),
        ((remote_server.response(404, b"{}"),), NetworkError, "does not have"),
        ((remote_server.response(200, b"<html>", "text/html"),), NetworkError, "a web page"),
        ((remote_server.response(200, b"{"),), NetworkError, "not JSON"),
        ((remote_server.response(200, b'{"models": []}'),), NetworkError, "another shape"),
        ((remote_server.response(200, b" " * 17 * 2**20),), NetworkError, "sends too much"),
        ((remote_server.response(301, location="https://x.example/"),), NetworkError, "https://x.example"),
        ((remote_server.Act.SILENCE,), NetworkError, "stopped answering"),
        ((b"HTTP/1.1 200 OK\r\n", Endless(b"x-a: b\r\n")), NetworkError, "stopped answering"),
        ((remote_server.response(200, content_length="1000"), Endless(b" ")), NetworkError, "stopped answering"),
    ],
)  # fmt: skip
def test_models_that_cannot_be_listed(
    server: FarServer, reply: remote_server.Reply, error: type[LlmrunError], says: str
) -> None:
    server.models = reply
    seconds = 0.2 if says == "stopped answering" else 30.0
    with pytest.raises(error, match=says) as caught:
        models(Server(f"{server.url}/v1", KEY), seconds)
    assert KEY not in f"{caught.value!r} {caught.value}"
