"""What a batch comes to: which rows are left, how many run side by side, and whose answers are already there."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support import gguf_writer

from llmrun.batch import answerers
from llmrun.batch.answerers import MOST_PARALLEL, LocalEngine
from llmrun.batch.plan import BatchPlan, plan_batch
from llmrun.batch.results import WrittenRow
from llmrun.batch.rows import Row, RowTemplate
from llmrun.errors import UsageError
from llmrun.model.loading import prepare
from llmrun.models.registry import ModelSpec
from llmrun.planning.preferences import LoadPreferences
from llmrun.protocol.jobs.machine import MachineSpeed, Rates
from llmrun.protocol.messages import AnswerRequest
from llmrun.protocol.params import Limits


@pytest.fixture
def model(home: Path, tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(gguf_writer.tiny_model({"tokenizer.chat_template": "x", "llama.context_length": 4096}))
    return path


def rows(count: int) -> list[Row]:
    return [Row(number, {"prompt": f"text {number}"}) for number in range(1, count + 1)]


def planned(path: Path, found: list[Row], recipe: RowTemplate | None = None, **options: Any) -> BatchPlan:
    prepared = partial(prepare, ModelSpec(str(path), path=path), path)
    engine = LocalEngine(prepared, options.get("wishes", LoadPreferences()), options.get("parallel"))
    return plan_batch(engine, found, recipe or RowTemplate(), options.get("done", {}))


def written(path: Path, found: list[Row], recipe: RowTemplate) -> dict[int, WrittenRow]:
    return {each.row.number: WrittenRow(each.key, failed=False) for each in planned(path, found, recipe).todo}


def test_all_rows_are_left_and_run_side_by_side(model: Path) -> None:
    few, many = planned(model, rows(5)), planned(model, rows(500))
    assert (len(few.todo), few.parallel) == (5, 5)
    assert (len(many.todo), many.parallel) == (500, MOST_PARALLEL)


def test_the_users_number_of_rows_counts(model: Path) -> None:
    assert planned(model, rows(500), parallel=7).parallel == 7


def test_rows_with_answers_are_not_asked_again(model: Path) -> None:
    recipe = RowTemplate()
    done = written(model, rows(6), recipe)
    assert [each.row.number for each in planned(model, rows(8), recipe, done=done).todo] == [7, 8]
    assert planned(model, rows(6), recipe, done=done).todo == ()


def test_answers_to_something_else_are_refused(model: Path) -> None:
    done = written(model, rows(6), RowTemplate())
    other = RowTemplate(asked=AnswerRequest(limits=Limits(3)))
    for found, recipe, why in ((rows(6), other, "had another request"), (rows(5), RowTemplate(), "not in the input")):
        with pytest.raises(UsageError, match="belong to another batch") as raised:
            planned(model, found, recipe, done=done)
        assert why in raised.value.why


def test_a_row_that_failed_can_be_corrected(model: Path) -> None:
    done = {**written(model, rows(3), RowTemplate()), 2: WrittenRow("", failed=True)}
    with pytest.raises(UsageError, match="not complete") as raised:
        planned(model, rows(3), done=done)
    assert "--retry-errors" in raised.value.hint
    del done[2]  # as --retry-errors has it
    assert [each.row.number for each in planned(model, rows(3), done=done).todo] == [2]


def test_a_row_that_failed_and_is_as_it_was_is_done(model: Path) -> None:
    found = [*rows(2), Row(3, {}, UsageError("the line is not JSON"))]
    done = written(model, rows(2), RowTemplate())
    done |= {2: done[2]._replace(failed=True), 3: WrittenRow("", failed=True)}
    plan = planned(model, found, done=done)
    assert (plan.todo, plan.broken) == ((), ())


def test_a_prompt_that_fits_no_row_is_named_after_a_finished_run_too(model: Path) -> None:
    done = written(model, rows(3), RowTemplate())
    with pytest.raises(UsageError, match="no column 'txt'"):
        planned(model, rows(3), RowTemplate("{txt}"), done=done)


def test_a_row_with_an_answer_that_cant_be_asked_any_more_is_another_batchs(model: Path) -> None:
    done = written(model, rows(3), RowTemplate())
    with pytest.raises(UsageError, match="belong to another batch") as raised:
        planned(model, [*rows(2), Row(3, {"text": "x"})], done=done)
    assert "row 3 has an answer" in raised.value.why


def test_broken_rows_are_kept_apart(model: Path) -> None:
    plan = planned(model, [*rows(2), Row(3, {}), Row(4, {}, UsageError("the line is not JSON"))])
    assert [row.number for row, _ in plan.broken] == [3, 4]
    assert len(plan.todo) == 2


def test_where_not_one_row_can_be_asked_nothing_is_written(model: Path) -> None:
    with pytest.raises(UsageError, match="neither a prompt"):
        planned(model, [Row(1, {"text": "a"}), Row(2, {"text": "b"})])


def test_without_a_chat_template_texts_are_continued(tmp_path: Path, model: Path) -> None:
    plain = tmp_path / "plain.gguf"
    plain.write_bytes(gguf_writer.tiny_model({}))
    plan = planned(plain, rows(1))
    assert plan.todo[0].completion.request.prompt == "text 1"
    assert "no chat template" in plan.notes[0]


def test_what_rows_have_in_common_is_counted_once(model: Path) -> None:
    apart = planned(model, [Row(number, {"prompt": f"{number} " + "word " * 60}) for number in range(1, 5)])
    alike = planned(model, [Row(number, {"prompt": "word " * 60 + f" {number}"}) for number in range(1, 5)])
    assert apart.prompt_tokens == alike.prompt_tokens
    assert alike.shared_tokens - apart.shared_tokens == pytest.approx(3 * 100, abs=3)


def test_how_long_it_takes_by_what_was_measured(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speed = MachineSpeed(1e9, 1e-6, {}, {}, {"F32": Rates(((100.0, 2e9),), 1e6)})
    monkeypatch.setattr(answerers, "speed_of", lambda *args, **options: speed)

    def seconds(count: int, most: int | None) -> float | None:
        prepared = partial(prepare, ModelSpec(str(model), path=model), model)
        engine = LocalEngine(prepared, LoadPreferences(), None)
        recipe = RowTemplate(asked=AnswerRequest(limits=Limits(most)))
        return engine.seconds(plan_batch(engine, rows(count), recipe, {}))

    some, twice = seconds(64, 10), seconds(128, 10)
    assert some is not None
    assert twice == pytest.approx(2 * some, rel=0.1)
    assert seconds(64, None) is None, "answers may be as long as the model likes"
