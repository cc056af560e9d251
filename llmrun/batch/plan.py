"""The plan of a batch: the remaining rows, their order, and the number of parallel rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from os.path import commonprefix
from typing import NamedTuple, Protocol

from llmrun.batch.results import WrittenRow
from llmrun.batch.rows import PendingRow, Row, RowTemplate, in_order, text_of
from llmrun.batch.run import RowSink
from llmrun.errors import LlmrunError, UsageError
from llmrun.server.answer import CompletionRequest

_BYTES_PER_TOKEN = 3  # of text; a low estimate
_TEMPLATE_TOKENS = 64  # written by a chat template around the text ...
_TEMPLATE_TAIL = 8  # ... of these, after the text, where rows differ already
_ANSWER_TOKENS = 512  # of an answer without a limit


class RowRequirements(NamedTuple):
    """The size of a batch."""

    rows: int
    tokens: int  # in the KV cache, 90th percentile of the rows


class EngineDescription(NamedTuple):
    """The model of a batch."""

    name: str  # as typed
    model: str  # identity in the keys of rows: answers of another model don't count
    has_template: bool
    parallel: int  # number of parallel rows
    notes: tuple[str, ...] = ()  # for the user


class RowAnswerer(Protocol):
    """Answers the rows of a batch: a local engine, a cluster or a remote server."""

    def find(self, need: RowRequirements) -> EngineDescription:
        """Locate the model, and plan its load.

        Raises:
            LlmrunError: it can't run.
        """

    def seconds(self, plan: BatchPlan) -> float | None:
        """Return an estimate of the time after loading; None if it is unknown."""

    def run(self, todo: Iterable[PendingRow], sink: RowSink) -> None:
        """Answer all rows; put each into the sink once.

        Raises:
            LlmrunError: a fatal error, or the sink can't write a row. The sink has all rows before it.
        """


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The rows to answer, and how."""

    todo: tuple[PendingRow, ...]  # rows without an answer, in order
    broken: tuple[tuple[Row, LlmrunError], ...]  # invalid rows
    prompt_tokens: int  # of all rows to answer; an estimate
    shared_tokens: int  # of these, common to a row and the one before
    parallel: int  # number of parallel rows
    notes: tuple[str, ...] = ()  # for the user

    @property
    def most_answer_tokens(self) -> int | None:
        """Maximum number of tokens of all answers; None without a limit."""
        limits = [todo.completion.request.limits.max_tokens for todo in self.todo]
        return None if None in limits else sum(limit or 0 for limit in limits)


_Requests = dict[int, tuple[Row, CompletionRequest]]  # number of a row -> its request
_Broken = list[tuple[Row, LlmrunError]]


def plan_batch(
    answering: RowAnswerer, rows: Iterable[Row], recipe: RowTemplate, done: Mapping[int, WrittenRow]
) -> BatchPlan:
    """Return the plan of a batch.

    Args:
        recipe: without the name of the model.
        done: number of a row -> its line.

    Raises:
        UsageError: the existing answers belong to other rows, another model or other settings; a failed row has
            changed; or all rows are invalid.
        LlmrunError: the model can't run, see RowAnswerer.find().
    """
    rows = tuple(rows)
    requests, broken = _read(rows, recipe)
    if broken and not requests:
        raise broken[0][1]
    for row, error in broken:
        if row.number in done and not done[row.number].failed:
            raise _another_batch(f"row {row.number} has an answer, but is invalid: {error}")
    engine = answering.find(_requirements(request for number, (_, request) in requests.items() if number not in done))
    recipe, notes = replace(recipe, model=engine.model), engine.notes
    if not recipe.raw and not recipe.asked.template and not engine.has_template:
        recipe = replace(recipe, raw=True)
        requests, broken = _read(rows, recipe)
        notes = (f"{engine.name} has no chat template: texts are continued (set one with --template)", *notes)
    todo = _remaining(requests, broken, recipe, done)
    texts = {number: text_of(pending.completion) for number, pending in todo.items()}
    order = in_order(texts)
    pairs = ((texts[before], texts[number]) for before, number in pairwise(order))
    shared = sum(len(commonprefix(pair)) for pair in pairs)  # noqa: RUF071  # of texts, not of paths
    return BatchPlan(
        tuple(todo[number] for number in order),
        tuple((row, error) for row, error in broken if row.number not in done),
        sum(_prompt_tokens(pending.completion) for pending in todo.values()),
        shared // _BYTES_PER_TOKEN + (_TEMPLATE_TOKENS - _TEMPLATE_TAIL) * max(len(order) - 1, 0),
        engine.parallel,
        notes,
    )


def _read(rows: Iterable[Row], recipe: RowTemplate) -> tuple[_Requests, _Broken]:
    requests: _Requests = {}
    broken: _Broken = []
    for row in rows:
        try:
            requests[row.number] = row, recipe.request(row)
        except LlmrunError as error:
            broken.append((row, error))
    return requests, broken


def _remaining(
    requests: _Requests, broken: _Broken, recipe: RowTemplate, done: Mapping[int, WrittenRow]
) -> dict[int, PendingRow]:
    """Return the valid rows without a line."""
    todo: dict[int, PendingRow] = {}
    for number, (row, request) in requests.items():
        key = recipe.key(request)
        if number not in done:
            todo[number] = PendingRow(row, request, key)
        elif done[number].key != key and done[number].failed:
            why = f"row {number} failed, and has another request now"
            raise UsageError("these answers are not complete", why=why, hint="add --retry-errors")
        elif done[number].key != key:
            raise _another_batch(f"row {number} had another request or another model")
    numbers = requests.keys() | {row.number for row, _ in broken}
    if unknown := sorted(done.keys() - numbers):
        raise _another_batch(f"it answers row {unknown[0]}, which is not in the input")
    return todo


def _another_batch(why: str) -> UsageError:
    return UsageError("these answers belong to another batch", why=why, hint="choose another file with -o")


def _prompt_tokens(completion: CompletionRequest) -> int:
    return len(text_of(completion).encode("utf-8", "replace")) // _BYTES_PER_TOKEN + _TEMPLATE_TOKENS


def _requirements(completions: Iterable[CompletionRequest]) -> RowRequirements:
    lengths = sorted(
        _prompt_tokens(completion) + (completion.request.limits.max_tokens or _ANSWER_TOKENS)
        for completion in completions
    )
    return RowRequirements(len(lengths), lengths[len(lengths) * 9 // 10] if lengths else 0)
