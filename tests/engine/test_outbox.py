"""The engine's outbox: text of fast models goes out a few tokens at a time, nothing is lost or reordered."""

from __future__ import annotations

from support.clock import Clock

from llmrun.engine.channel import Outbox
from llmrun.protocol.messages import Event, Finished, Started, Stats, TextDelta, TokenLogprob


def outbox() -> tuple[Outbox, list[Event], Clock]:
    sent: list[Event] = []
    clock = Clock()
    return Outbox(lambda *events: sent.extend(events), clock), sent, clock


def test_first_text_goes_out_at_once() -> None:
    box, sent, _ = outbox()
    box.add([TextDelta(1, "a", 1)])
    assert sent == [TextDelta(1, "a", 1)]


def test_fast_text_is_gathered_and_slow_text_is_not() -> None:
    box, sent, clock = outbox()
    for letter in "abcdef":
        box.add([TextDelta(1, letter, 1)])
        clock.now += 0.02
    assert sent == [TextDelta(1, "a", 1), TextDelta(1, "bcd", 3)]
    clock.now += 1
    box.add([TextDelta(1, "g", 2)])
    assert sent[2:] == [TextDelta(1, "efg", 4)]


def test_gathered_text_still_tells_what_was_drafted() -> None:
    writes: list[tuple[Event, ...]] = []
    clock = Clock()
    box = Outbox(lambda *events: writes.append(events), clock)
    box.add([TextDelta(1, "a", 1)])
    for letter, drafted in (("b", False), ("c", True), ("d", True), ("e", False)):
        box.add([TextDelta(1, letter, 1, drafted=drafted)])
    clock.now += 1
    box.add([TextDelta(1, "f", 1)])
    assert writes[1:] == [(TextDelta(1, "b", 1), TextDelta(1, "cd", 2, drafted=True), TextDelta(1, "ef", 2))]


def test_the_end_comes_after_all_text() -> None:
    box, sent, _ = outbox()
    finished = Finished(1, "stop", Stats())
    box.add([TextDelta(1, "a", 1)])
    for event in (TextDelta(1, "b", 1), TextDelta(1, "c", 1), finished):
        box.add([event])
    assert sent == [TextDelta(1, "a", 1), TextDelta(1, "bc", 2), finished]


def test_the_first_text_of_an_answer_does_not_wait_for_its_start() -> None:
    box, sent, _ = outbox()
    for event in (Started(1, 3, 0, 7), TextDelta(1, "a", 1)):
        box.add([event])
    assert sent == [Started(1, 3, 0, 7), TextDelta(1, "a", 1)]


def test_requests_are_not_mixed() -> None:
    box, sent, clock = outbox()
    box.add([TextDelta(1, "a", 1)])
    box.add([TextDelta(1, "b", 1), TextDelta(2, "x", 1)])
    box.add([TextDelta(1, "c", 1), Finished(2, "stop", Stats())])
    assert sent[1:] == [TextDelta(2, "x", 1), Finished(2, "stop", Stats())]
    clock.now += 1
    box.add([])
    assert sent[3:] == [TextDelta(1, "bc", 2)]


def test_what_a_step_gave_goes_out_together() -> None:
    writes: list[tuple[Event, ...]] = []
    box = Outbox(lambda *events: writes.append(events), Clock())
    step = (TextDelta(1, "a", 1), Started(2, 3, 0, 7), TextDelta(3, "x", 1))
    box.add(step)
    assert [sorted(events, key=lambda event: event.request) for events in writes] == [[*step]]


def test_a_servers_clients_get_each_token_at_once() -> None:
    box, sent, clock = outbox()
    box.set_joining(False)
    for letter in "abc":
        box.add([TextDelta(1, letter, 1)])
        clock.now += 0.001
    assert [delta.tokens for delta in sent if isinstance(delta, TextDelta)] == [1, 1, 1]


def test_probabilities_are_gathered_with_their_text() -> None:
    box, sent, clock = outbox()
    for letter in "abc":
        box.add([TextDelta(1, letter, 1, (TokenLogprob(letter, (), -1.0, ()),))])
    clock.now += 1
    box.add([TextDelta(1, "d", 1)])
    assert [[token.text for token in delta.logprobs] for delta in sent if isinstance(delta, TextDelta)] == [
        ["a"],
        ["b", "c"],
    ]
