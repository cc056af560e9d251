"""The page's stream of events: text is sent as often as the page draws it."""

from __future__ import annotations

import time

import pytest
from support import answers

from llmrun.errors import LlmrunError
from llmrun.protocol.messages import PrefillProgress, Stats
from llmrun.server.page.answering import PageWriter


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that time.perf_counter() gives."""
    now = [1000.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_the_first_text_is_sent_at_once_and_the_next_ones_together(clock: list[float]) -> None:
    writer = PageWriter()
    assert writer.feed(0, answers.reasoning("Hm.")).count(b"event: reasoning") == 1
    assert [writer.feed(0, answers.text(word)) for word in ("one", " two")] == [b"", b""]
    clock[0] += 0.2
    sent = writer.feed(0, answers.text(" three"))
    assert sent.count(b"event: text") == 3
    assert sent.index(b"one") < sent.index(b" two") < sent.index(b" three")
    assert writer.answer.text == "one two three"


def test_the_progress_of_prefill_is_sent() -> None:
    assert PageWriter().feed(0, PrefillProgress(1, 512, 0.5)) == b'event: prefill\ndata: {"computed_tokens":512}\n\n'


def test_the_first_token_of_a_stopped_answer_is_timed_from_the_arrival_of_its_request(clock: list[float]) -> None:
    writer = PageWriter(arrived=990.0)
    writer.feed(0, answers.text("word"))
    assert writer.stats.ttft_seconds == 10.0


def test_slow_text_never_waits(clock: list[float]) -> None:
    writer = PageWriter()
    for _ in range(5):
        assert writer.feed(0, answers.text("word")).count(b"event: text") == 1
        clock[0] += 0.2


@pytest.mark.parametrize("failed", [False, True])
def test_waiting_text_is_sent_before_the_end_and_before_an_error(clock: list[float], *, failed: bool) -> None:
    writer = PageWriter()
    writer.feed(0, answers.text("one"))
    writer.feed(0, answers.text(" two"))
    end = writer.error(LlmrunError("no")) if failed else writer.feed(0, answers.finished("stop", Stats()))
    events = end.split(b"\n\n")
    assert [b" two" in events[0], len(events)] == [True, 3]
    assert writer.end() == b""
