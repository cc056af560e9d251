"""Rows through a far server that answers, refuses, fails and goes away: each gets one line, or none when it can't."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.remote_server import FINE, MODEL, PATIENCE, FarRequest, FarServer, Reply, failed

from llmrun.batch.answerers import RemoteEngine
from llmrun.batch.plan import RowRequirements, plan_batch
from llmrun.batch.results import ResultFile
from llmrun.batch.rows import Row, RowTemplate
from llmrun.batch.run import BatchProgress, Ledger
from llmrun.errors import LoginRequiredError, UnavailableError
from llmrun.remote.server import ServedModel, Server

ONCE = replace(PATIENCE, retries=0)
HANGS_UP: Reply = (b"",)


class Run:
    """One run of a batch of prompts, with the same file of answers as others in its folder."""

    def __init__(self, server: FarServer, folder: Path, prompts: list[str], **more: Any) -> None:
        self.notes: list[str] = []
        self.file = folder / "answers.jsonl"
        rows = [Row(number, {"prompt": text, **more}) for number, text in enumerate(prompts, 1)]
        self.tally = BatchProgress(len(rows))
        engine = RemoteEngine(Server(f"{server.url}/v1"), ServedModel(MODEL), 4, ONCE, sleep=lambda seconds: None)
        with ResultFile(self.file) as results:
            self.plan = plan_batch(engine, rows, RowTemplate(), results.written)
            engine.run(self.plan.todo, Ledger(results, self.tally, on_note=self.notes.append))

    @property
    def lines(self) -> dict[int, Any]:
        """What is written: number of a row -> its line."""
        return lines(self.file)


def lines(file: Path) -> dict[int, Any]:
    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert len({line["row"] for line in found}) == len(found), "a row has two lines"
    return {line["row"]: line for line in found}


def by_prompt(server: FarServer, replies: dict[str, list[Reply]]) -> None:
    """From now on it answers by what is asked; the last reply of a prompt goes on, FINE is for all others."""
    usual = server.reply_to

    def reply_to(request: FarRequest) -> Reply:
        reply = usual(request)
        own = replies.get(request.body["messages"][-1]["content"], []) if request.body else []
        return reply if not own else own.pop(0) if len(own) > 1 else own[0]

    server.reply_to = reply_to  # type: ignore[method-assign]


def test_every_row_gets_its_answer(server: FarServer, tmp_path: Path) -> None:
    run = Run(server, tmp_path, [f"row {number}" for number in range(20)])
    assert sorted(run.lines) == list(range(1, 21))
    assert all(line["answer"] == "Hello there" and line["error"] is None for line in run.lines.values())
    assert (run.lines[1]["prompt_tokens"], run.lines[1]["completion_tokens"]) == (7, 2)
    assert (run.tally.prompt_tokens, run.tally.cached_tokens, run.tally.completion_tokens) == (140, 60, 40)
    assert len(server.asked) == 20
    assert Run(server, tmp_path, [f"row {number}" for number in range(20)]).tally.done == 0, "it is done already"


def test_another_models_answers_are_not_taken_for_its_own() -> None:
    where = Server("http://host/v1")
    found = [RemoteEngine(where, ServedModel(name), None).find(RowRequirements(100, 10)) for name in ("a", "b")]
    assert found[0].model != found[1].model
    assert [each.parallel for each in found] == [32, 32]
    assert RemoteEngine(where, ServedModel("a"), 8).find(RowRequirements(3, 10)).parallel == 3


def test_what_is_wrong_with_a_row_is_its_result(server: FarServer, tmp_path: Path) -> None:
    by_prompt(server, {"long": [failed(400, "too long", "context_length_exceeded")], "odd": [failed(500, "kaboom")]})
    run = Run(server, tmp_path, ["a", "long", "odd", "b"])
    assert run.lines[2]["error"]["code"] == "context-overflow"
    assert run.lines[3]["error"]["message"].endswith("kaboom")
    assert [run.lines[number]["answer"] for number in (1, 4)] == ["Hello there"] * 2
    assert run.tally.failed == 2


def test_a_row_that_asks_what_the_server_cannot_be_told(server: FarServer, tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "Hi"}], "top_k": 5}
    run = Run(server, tmp_path, ["ignored"], **row)
    assert "can't be told top_k" in run.lines[1]["error"]["message"]
    assert not server.asked


def test_a_server_that_is_away_for_a_moment_loses_nothing(server: FarServer, tmp_path: Path) -> None:
    by_prompt(server, {"c": [HANGS_UP, HANGS_UP, FINE]})  # a client asks twice, since connections grow stale
    run = Run(server, tmp_path, ["a", "b", "c", "d", "e", "f"])
    assert [line["error"] for line in run.lines.values()] == [None] * 6
    assert "retrying in" in run.notes[0]


def test_a_row_that_breaks_every_connection_does_not_stop_the_others(server: FarServer, tmp_path: Path) -> None:
    by_prompt(server, {"c": [HANGS_UP]})
    run = Run(server, tmp_path, [*"abcdefghijklmnopqrst"])
    assert [number for number, line in run.lines.items() if line["error"]] == [3]
    assert run.lines[3]["error"]["code"] == "unavailable"


def test_a_server_that_stays_away_ends_the_batch_and_the_same_command_goes_on(
    server: FarServer, tmp_path: Path
) -> None:
    prompts = [*"abcdefgh"]
    server.replies = [FINE, FINE, FINE, HANGS_UP]
    with pytest.raises(UnavailableError, match="broke off"):
        Run(server, tmp_path, prompts)
    assert len(lines(tmp_path / "answers.jsonl")) == 3
    server.replies = [FINE]
    run = Run(server, tmp_path, prompts)
    assert (len(run.plan.todo), len(run.lines)) == (5, 8)
    assert all(line["error"] is None for line in run.lines.values())


def test_a_key_that_is_refused_ends_the_batch_at_once(server: FarServer, tmp_path: Path) -> None:
    server.behave("wants a key")
    with pytest.raises(LoginRequiredError):
        Run(server, tmp_path, [*"abcdefgh"])
    assert not (tmp_path / "answers.jsonl").exists()
    assert len(server.asked) <= 4


def test_who_counts_no_tokens_is_told(server: FarServer, tmp_path: Path) -> None:
    server.behave("says no usage")
    run = Run(server, tmp_path, ["a"])
    assert run.tally.completion_tokens == 2
    assert "reports no token counts" in run.notes[-1]
