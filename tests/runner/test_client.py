"""One engine shared by many: everybody gets their own events, whatever happens to the others."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from llmrun.errors import BadTemplateError, EngineCrashedError, UsageError
from llmrun.protocol import frames
from llmrun.protocol.loading import Load, Loaded
from llmrun.protocol.messages import (
    AnswerRequest,
    Event,
    Finished,
    Generate,
    Message,
    Started,
    Stats,
    TextDelta,
)
from llmrun.protocol.questions import COUNT_TOKENS, TokenCount
from llmrun.runner import hang, requests
from llmrun.runner.client import EngineClient
from llmrun.runner.launch import launch

HI = AnswerRequest((Message("user", "Hi"),))

pytestmark = pytest.mark.usefixtures("package_on_path")
Start = Callable[[str], EngineClient]


def ask(client: EngineClient) -> tuple[int, Iterator[Event]]:
    request = client.next_request()
    return request, client.submit(Generate(request, HI))


def test_many_threads_get_their_own_answers(start: Start) -> None:
    client = start("normal")
    assert isinstance(list(client.submit(Load("/m.gguf", 512)))[-1], Loaded)

    def talk(_: int) -> None:
        for _ in range(20):
            request, events = ask(client)
            answer = list(events)
            assert {event.request for event in answer} == {request}
            assert "".join(event.text for event in answer if isinstance(event, TextDelta)) == "Hello"
            assert client.do(COUNT_TOKENS, HI) == TokenCount((3,), 7)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(talk, range(8)))


def test_two_answers_side_by_side(start: Start) -> None:
    client = start("together")
    (_, one), (_, other) = ask(client), ask(client)
    assert [type(event) for event in other] == [Started, TextDelta, TextDelta, Finished]
    assert [type(event) for event in one] == [Started, TextDelta, TextDelta, Finished]


def test_a_cancel_ends_one_and_not_the_other(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where the engine takes its time: the step that it is in belongs to the other, too."""
    monkeypatch.setattr(requests, "CANCEL_SECONDS", 0.0)
    client = start("half_deaf")
    (request, one), (_, other) = ask(client), ask(client)
    assert isinstance(next(one), Started)
    client.cancel(request)
    assert list(one) == [Finished(request, "cancelled", Stats())]
    assert client.do(COUNT_TOKENS, HI) == TokenCount((3,), 7)
    assert [type(event) for event in other] == [Started, TextDelta, TextDelta, Finished]
    assert client.alive


def test_a_cancelled_request_that_computes_on_ends_for_its_caller_only(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As while an image is encoded, or a state of gigabytes is restored: the next request waits for it."""
    monkeypatch.setattr(requests, "CANCEL_SECONDS", 0.0)
    monkeypatch.setenv("FAKE_ENGINE_MAY_END", str(tmp_path / "may end"))
    client = start("tireless")
    request, events = ask(client)
    next(events)
    client.cancel(request)
    assert list(events)[-1] == Finished(request, "cancelled", Stats())
    next_request, next_events = ask(client)
    for _ in range(5):
        client.read()
    assert client.alive
    (tmp_path / "may end").touch()
    assert list(next_events)[-1] == Finished(next_request, "stop", Stats())
    assert client.alive


def test_an_engine_that_hangs_after_a_cancel_ends_with_what_waits_behind_it(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "CANCEL_SECONDS", 0.0)
    monkeypatch.setattr(hang, "SILENT_SECONDS", 0.2)
    client = start("deaf")
    request, events = ask(client)
    next(events)
    client.cancel(request)
    assert list(events)[-1] == Finished(request, "cancelled", Stats())
    with pytest.raises(EngineCrashedError, match="hung with another request in decode"):
        list(ask(client)[1])
    assert not client.alive


def test_closing_the_iterator_cancels(start: Start) -> None:
    client = start("obedient")
    for _ in range(2):  # the second one waits until the first has ended
        _, events = ask(client)
        next(events)
        events.close()  # type: ignore[attr-defined]
    assert client.alive


def test_a_death_is_told_to_all_and_to_those_who_come_later(start: Start) -> None:
    client = start("die:together:SIGSEGV")
    answers = [ask(client)[1] for _ in range(2)]
    for events in answers:
        with pytest.raises(EngineCrashedError, match=r"in decode.*SIGSEGV"):
            list(events)
    for _ in range(2):
        with pytest.raises(EngineCrashedError, match="SIGSEGV"):
            list(ask(client)[1])


@pytest.mark.parametrize("mode", ["hang_in_render", "spin_in_render"])
def test_a_hostile_template_ends_the_engine_and_the_others_are_told(
    start: Start, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr(requests, "RENDER_SECONDS", 0.1)
    monkeypatch.setattr(hang, "SILENT_SECONDS", 0.2)
    client = start(mode)
    (_, hostile), (_, other) = ask(client), ask(client)
    with pytest.raises(BadTemplateError):
        list(hostile)
    with pytest.raises(EngineCrashedError, match="hung with another request while rendering"):
        list(other)


def test_closing_tells_all(start: Start) -> None:
    client = start("deaf")
    answers = [ask(client)[1] for _ in range(2)]
    next(answers[0])
    closing = threading.Timer(0.1, client.close)
    closing.start()
    for events in answers:
        with pytest.raises(EngineCrashedError, match="it was closed"):
            list(events)
    closing.join()
    with pytest.raises(EngineCrashedError, match="it was closed"):
        list(ask(client)[1])


def test_what_is_too_long_is_refused_and_forgotten(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    client = start("normal")
    with monkeypatch.context() as patched:
        patched.setattr(frames, "MAX_FRAME_BYTES", 1000)
        with pytest.raises(UsageError, match="too long"):
            client.submit(Generate(client.next_request(), AnswerRequest(prompt="x" * 1000)))
    assert isinstance(list(ask(client)[1])[-1], Finished)


def test_nothing_is_left_behind() -> None:
    process = psutil.Process()
    before = process.num_fds(), len(process.children()), threading.active_count()
    for _ in range(10):
        client = EngineClient(launch((sys.executable, "-c", "input()")))
        client.close()
        client.close()
    assert (process.num_fds(), len(process.children()), threading.active_count()) == before
