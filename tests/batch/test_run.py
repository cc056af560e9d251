"""Rows through engines that answer, fail and die: each gets one line, and only those whose fault it was get errors."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.answers import accumulated

from llmrun.batch.results import ResultFile
from llmrun.batch.rows import FinishedRow, PendingRow, Row, RowTemplate, result_of
from llmrun.batch.run import BatchProgress, BatchRun, Ledger
from llmrun.errors import BadGrammarError, EngineCrashedError, LlmrunError, OutOfMemoryError, UsageError
from llmrun.model import Model
from llmrun.models.registry import ModelSpec
from llmrun.protocol.loading import Load
from llmrun.protocol.messages import Command, Finished, Generate, Started, Stats, TextDelta, TokenLogprob
from llmrun.protocol.params import SamplingParams
from llmrun.runner.client import EngineClient
from llmrun.runner.requests import Put

PARALLEL = 4


class FakeEngine:
    """Answers a prompt with itself, the newest first, when nothing more comes in; "deadly" kills it, "bad" fails."""

    def __init__(self, most_inside: list[int]) -> None:
        self.next_request = itertools.count(1).__next__
        self.most_inside = most_inside
        self._inside: list[tuple[Generate, Put]] = []
        self._is_dead = False

    def load(self, command: Command) -> None:
        pass

    def listen(self, command: Generate, put: Put) -> None:
        if command.asked.messages[-1].content == "long":
            raise UsageError("it is too long for the pipe")
        self._inside.append((command, put))
        self.most_inside.append(len(self._inside))

    def work(self) -> None:
        """One answer, as the loop that waits for it would see."""
        if self._is_dead:
            self._end(*self._inside.pop(), EngineCrashedError("it died"))
            return
        if not self._inside:
            return
        command, put = self._inside.pop()
        text = command.asked.messages[-1].content
        if text == "deadly":
            self._is_dead = True
            self._end(command, put, EngineCrashedError("it died"))
        elif text == "bad":
            self._end(command, put, BadGrammarError("it is broken"))
        else:
            put(Started(command.request, 10, 4, 0))
            put(TextDelta(command.request, text, 1))
            put(Finished(command.request, "stop", Stats(10, 4, completion_tokens=2)))
            put(None)

    def _end(self, command: Generate, put: Put, error: LlmrunError) -> None:
        put(error)
        put(None)

    def close(self) -> None:
        pass


class Setup:
    """A batch whose engines are fake ones."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.engines: list[FakeEngine] = []
        self.most_inside: list[int] = []
        self.tally = BatchProgress(0)

    def run(self, *texts: str, stop_after: int = 10**6) -> None:
        recipe = RowTemplate()
        todo = []
        for number, text in enumerate(texts, 1):
            asked = recipe.request(Row(number, {"prompt": text, "id": f"r{number}"}))
            todo.append(PendingRow(Row(number, {"prompt": text, "id": f"r{number}"}), asked, f"k{number}"))
        self.tally = BatchProgress(len(todo))
        load = Load("model.gguf", 512, n_seq_max=PARALLEL)
        model = SimpleNamespace(load=load, sampling=lambda flags: (SamplingParams(), {}), spec=ModelSpec("m"))
        with ResultFile(self.path) as results:
            left = [each for each in todo if each.row.number not in results.written]
            ledger = Ledger(results, self.tally, clock=lambda: 1.0)
            runner = BatchRun(cast(Model, model), ledger, start=self._start)
            ended = runner._finished
            get = ended.get

            def working() -> Any:
                if self.tally.done >= stop_after:
                    raise OutOfMemoryError("stopped")
                self.engines[-1].work()
                return get()

            runner._finished = cast(Any, SimpleNamespace(get=working, put=ended.put))
            runner.run(left)

    def _start(self, model: Model) -> EngineClient:
        self.engines.append(FakeEngine(self.most_inside))
        return cast(EngineClient, self.engines[-1])

    @property
    def lines(self) -> dict[int, dict[str, Any]]:
        found = [json.loads(line) for line in self.path.read_text().splitlines()]
        assert len({each["row"] for each in found}) == len(found), "a row has two lines"
        return {each["row"]: each for each in found}


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(tmp_path / "out.jsonl")


def test_every_row_has_its_own_answer(setup: Setup) -> None:
    texts = [f"text {number}" for number in range(50)]
    setup.run(*texts)
    assert {number: line["answer"] for number, line in setup.lines.items()} == dict(enumerate(texts, 1))
    assert setup.lines[7]["id"] == "r7"
    assert (setup.tally.done, setup.tally.completion_tokens, setup.tally.cached_tokens) == (50, 100, 200)


def test_the_engine_has_a_few_more_rows_than_it_runs(setup: Setup) -> None:
    setup.run(*map(str, range(50)))
    assert PARALLEL < max(setup.most_inside) <= PARALLEL + 8


def test_a_row_that_fails_gets_its_error_and_the_rest_goes_on(setup: Setup) -> None:
    setup.run("a", "bad", "b")
    assert setup.lines[2]["error"]["code"] == BadGrammarError.code
    assert [setup.lines[number]["answer"] for number in (1, 3)] == ["a", "b"]
    assert setup.tally.failed == 1


def test_rows_that_cant_be_sent_get_their_error(setup: Setup) -> None:
    setup.run("long", "a", "long", "b", "long")
    assert [number for number, line in sorted(setup.lines.items()) if line["error"]] == [1, 3, 5]
    assert len(setup.engines) == 1


def test_only_the_row_that_kills_gets_an_error_for_it(setup: Setup) -> None:
    texts = [f"text {number}" for number in range(30)]
    texts[11] = "deadly"
    setup.run(*texts)
    failed = [number for number, line in setup.lines.items() if line["error"]]
    assert failed == [12]
    assert setup.lines[12]["error"]["code"] == EngineCrashedError.code
    assert len(setup.lines) == 30
    assert (setup.tally.deaths, len(setup.engines)) == (2, 3)


def test_several_that_kill(setup: Setup) -> None:
    setup.run(*("deadly" if number % 5 == 0 else "fine" for number in range(20)))
    assert sorted(number for number, line in setup.lines.items() if line["error"]) == [1, 6, 11, 16]


def test_what_was_done_before_a_stop_stays_and_the_rest_follows(setup: Setup) -> None:
    texts = [f"text {number}" for number in range(20)]
    with pytest.raises(OutOfMemoryError):
        setup.run(*texts, stop_after=7)
    before = setup.lines
    assert len(before) == 7
    setup.run(*texts)
    assert len(setup.lines) == 20
    assert all(setup.lines[number] == line for number, line in before.items())


def test_a_model_that_cant_be_loaded_ends_the_batch(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: FakeEngine, command: Command) -> None:
        raise OutOfMemoryError("it does not fit")

    monkeypatch.setattr(FakeEngine, "load", refuse)
    with pytest.raises(OutOfMemoryError):
        setup.run("a")


def test_a_row_of_openais_has_its_log_probabilities() -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True}
    row = Row(1, {"custom_id": "a", "url": "/v1/chat/completions", "body": body})
    logprob = TokenLogprob("Hi", (72, 105), -0.5, ())
    events = (Started(1, 3, 0, 0), TextDelta(1, "Hi", 1, (logprob,)), Finished(1, "stop", Stats(3)))
    (choice,) = result_of(row, accumulated(events), None, "k")["response"]["body"]["choices"]
    assert choice["message"]["content"] == "Hi"
    assert choice["logprobs"]["content"][0]["logprob"] == -0.5


def test_time_left_goes_by_the_rows_of_this_run() -> None:
    assert BatchProgress(10, before=4).seconds_left is None
    assert BatchProgress(80, done=1, seconds=48.0).seconds_left is None, "one row gives no pace"
    assert BatchProgress(80, done=8, parallel=8, seconds=48.0).seconds_left is None, "they ended together"
    assert BatchProgress(20, before=4, done=8, seconds=6.0).seconds_left == 6.0
    assert BatchProgress(10, completion_tokens=30, seconds=6.0).tokens_per_second == 5.0


# ---- what is written and counted of rows that are done


def test_time_counts_from_the_first_engine_on(tmp_path: Path) -> None:
    times = iter([10.0, 14.0])
    tally = BatchProgress(2)
    with ResultFile(tmp_path / "out.jsonl") as results:
        ledger = Ledger(results, tally, clock=lambda: next(times))
        ledger.begin()
        ledger.begin()
        ledger.put(FinishedRow(1, "k", {"error": None}, 10, 4, 2))
    assert tally.seconds == 4.0
    assert (tally.done, tally.prompt_tokens, tally.cached_tokens, tally.completion_tokens) == (1, 10, 4, 2)


def test_rows_that_cant_be_asked_have_their_error(tmp_path: Path) -> None:
    tally, path = BatchProgress(1), tmp_path / "out.jsonl"
    with ResultFile(path) as results:
        Ledger(results, tally).refuse([(Row(3, {"id": "x"}), UsageError("it is broken"))])
    line = json.loads(path.read_text())
    assert (line["row"], line["id"], line["error"]["message"]) == (3, "x", "it is broken")
    assert (tally.done, tally.failed) == (1, 1)
