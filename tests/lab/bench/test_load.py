"""Several clients at once: what they are asked to read, whose turn it is, and the figures that come of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.engines import fake_client
from support.scripted_client import MS, ScriptedClient

from llmrun.errors import CancelledError, EngineCrashedError
from llmrun.lab.bench import load
from llmrun.lab.bench.load import LoadCase, LoadOutcome, LoadRequest, LoadRow, loaded, measure
from llmrun.lab.bench.run import Progress
from llmrun.protocol.loading import Load

LOAD = Load("/m.gguf", 1024, n_seq_max=3)
REQUEST = LoadRequest("tiny", LOAD, (1, 3), tokens=4, repetitions=2)

Run = Callable[..., LoadOutcome]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Measure REQUEST with a client, by the client's clock."""

    def measured(client: Any, *more: Any) -> LoadOutcome:
        monkeypatch.setattr(load, "time", client)
        return measure(REQUEST, *more, start=lambda: client)

    return measured


def test_figures(run: Run) -> None:
    client = ScriptedClient()
    rows, _, error = run(client)
    assert error is None
    assert [LoadCase(row.clients, row.shares_prompt) for row in rows] == [(1, False), (1, True), (3, False), (3, True)]
    for row in rows:
        assert row.prompt_tokens == 100
        assert row.samples_ts == pytest.approx((8.0, 8.0))  # 4 tokens in 0.5 s, one client behind the other
        assert (row.avg_ts, row.stddev_ts) == pytest.approx((8.0, 0.0))
        assert row.client_ts == pytest.approx(30.0)  # 3 tokens in 0.1 s
        assert (row.ttft_p50_ns, row.ttft_p95_ns) == (400 * MS, 400 * MS)
        assert (row.token_p50_ns, row.token_p95_ns, row.token_p99_ns) == (20 * MS, 70 * MS, 70 * MS)
        assert row.cached_share == pytest.approx(0.25)
        assert (row.answer_p50_ns, row.early) == (500 * MS, 0)
    assert client.is_closed


def test_numbers_of_clients_take_turns_behind_the_warm_up(run: Run) -> None:
    told: list[Progress] = []
    run(ScriptedClient(), told.append)
    assert [each.phase for each in told] == ["loading", "warming up", *["measuring"] * 8]
    turns = ["1 client, own prompts", "1 client, shared prompts", "3 clients, own prompts", "3 clients, shared prompts"]
    assert [each.test for each in told[2:]] == turns * 2
    assert [(each.done, each.repetition) for each in told[2:]] == [(done, 1 + done // 4) for done in range(8)]
    assert {each.total for each in told} == {8}


def test_prompts_are_equally_long_and_share_what_they_should(run: Run) -> None:
    client = ScriptedClient()
    run(client)
    assert all(asked.limits.max_tokens == 4 and asked.sampling.temperature == 0 for asked in client.asked)
    prompts = [asked.prompt or "" for asked in client.asked[3:11]]  # behind the warm-up
    alone, alone_too, own, shared = prompts[:1], prompts[1:2], prompts[2:5], prompts[5:8]
    starts = [prompt.split(".")[0] for prompt in (*alone, *alone_too, *own, shared[0])]
    assert len(set(starts)) == 6, "what was measured before is not known"
    most = len(shared[0]) * 9 // 10
    assert len({prompt[:most] for prompt in shared}) == 1
    assert len(set(shared)) == 3
    assert max(map(len, prompts)) - min(map(len, prompts)) <= 2


def test_a_far_server_has_seen_no_prompt_of_an_earlier_measurement() -> None:
    request = replace(REQUEST, load=None, server="host", ignores_end=True)
    client, again = ScriptedClient(), ScriptedClient()
    for each in (client, again):
        assert len(measure(request, start=lambda each=each: each).rows) == 4
    starts = [{(asked.prompt or "")[:9] for asked in each.asked} for each in (client, again)]
    assert not starts[0] & starts[1]
    assert len({len(asked.prompt or "") for asked in client.asked}) == 1
    assert all(asked.limits.ignores_end for asked in client.asked)


def test_answers_that_end_early_are_counted() -> None:
    rows = measure(replace(REQUEST, tokens=8), start=ScriptedClient).rows
    assert [row.early for row in rows] == [2, 2, 6, 6]
    assert not any(row.early for row in measure(REQUEST, start=ScriptedClient).rows)


def test_what_was_measured_before_it_was_stopped_comes_with_the_error(run: Run) -> None:
    def stop(progress: Progress) -> None:
        if progress.done == 5:
            raise CancelledError("stopped by Ctrl-C")

    client = ScriptedClient()
    rows, _, error = run(client, stop)
    assert isinstance(error, CancelledError)
    assert [len(row.samples_ts) for row in rows] == [2, 1, 1, 1]
    assert client.is_closed


def test_a_crowd_with_one_failure_does_not_count(run: Run) -> None:
    failed = EngineCrashedError("the engine died")
    rows, _, error = run(ScriptedClient(failed, after=3 + 1 + 1 + 2))  # in the first crowd of three
    assert error is failed
    assert [(row.clients, len(row.samples_ts)) for row in rows] == [(1, 1), (1, 1)]


@pytest.mark.usefixtures("package_on_path")
@pytest.mark.parametrize(("mode", "error"), [("normal", type(None)), ("die:decode:SIGSEGV", EngineCrashedError)])
def test_an_engine_behind_a_pipe(mode: str, error: type) -> None:
    outcome = measure(REQUEST, start=lambda: loaded(fake_client(mode), LOAD))
    assert type(outcome.error) is error
    assert [len(row.samples_ts) for row in outcome.rows] == ([] if outcome.error else [2] * 4)
    assert all(row.avg_ts > 0 and row.prompt_tokens == 3 for row in outcome.rows)


def rows_of(figures: dict[int, tuple[float, int]], *, shares_prompt: bool = False) -> tuple[LoadRow, ...]:
    """Number of clients -> tokens/s of all, and milliseconds that an answer takes."""
    return tuple(
        LoadRow(clients, shares_prompt, 100, (rate,), rate, 0.0, rate, MS, MS, MS, MS, MS, 0.0, time * MS)
        for clients, (rate, time) in figures.items()
    )


@pytest.mark.parametrize(
    ("figures", "knee"),
    [
        ({1: (100.0, 640), 2: (150.0, 850), 4: (220.0, 1160), 8: (240.0, 2130)}, 4),  # 156, 176, 190, 113
        ({8: (240.0, 2130), 1: (100.0, 640), 4: (220.0, 1160), 2: (150.0, 850)}, 4),
        ({1: (100.0, 640), 2: (100.0, 1280), 4: (100.0, 2560)}, 1),
        ({1: (100.0, 640), 2: (200.0, 640), 4: (400.0, 640)}, None),  # it is beyond
        ({1: (100.0, 640), 2: (100.0, 1280)}, None),  # two are no curve
        ({}, None),
    ],
)
def test_the_knee_is_where_more_clients_cost_more_than_they_gain(
    figures: dict[int, tuple[float, int]], knee: int | None
) -> None:
    outcome = LoadOutcome(rows_of(figures), (), None)
    found = outcome.knee(shares_prompt=False)
    assert (found and found.clients) == knee
    assert outcome.knee(shares_prompt=True) is None
