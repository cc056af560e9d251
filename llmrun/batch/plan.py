"""What a batch comes to before it begins: which rows are left, in which order, and how many run side by side.

Owns these decisions; must not know terminals or engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from os.path import commonprefix
from typing import NamedTuple, Protocol

from llmrun.batch.ledger import RowSink
from llmrun.batch.results import WrittenRow
from llmrun.batch.rows import PendingRow, Row, RowTemplate, in_order, text_of
from llmrun.errors import LlmrunError, UsageError
from llmrun.model import Model
from llmrun.planning.plan import LoadPreferences
from llmrun.server.answer_parts import CompletionRequest

MOST_PARALLEL = 64
"""Rows side by side where nobody says: from about there on a step is all arithmetic, and more rows only share it."""
_BYTES_A_TOKEN = 3  # of text, about; a guess on the safe side
_TEMPLATE_TOKENS = 64  # that a chat template writes besides ...
_TEMPLATE_TAIL = 8  # ... of them behind the text, where rows differ already
_ANSWER_TOKENS = 512  # that a row's answer may take where nobody says how long it may be


class RowRequirements(NamedTuple):
    """What rows take of an engine: how many there are, and tokens of the KV cache that nine in ten don't exceed."""

    rows: int
    tokens: int


class EngineDescription(NamedTuple):
    """What will answer.

    Attributes:
        name: of the model, as typed.
        model: what names it in a row's key: another one's answers are not taken for its own.
        has_template: whether it has a chat template.
        parallel: rows side by side.
        notes: what the user should know.
    """

    name: str
    model: str
    has_template: bool
    parallel: int
    notes: tuple[str, ...] = ()


class RowAnswerer(Protocol):
    """What answers the rows of a batch: an engine here, or whatever else there may be."""

    def find(self, need: RowRequirements) -> EngineDescription:
        """Find the model, and plan it.

        Raises:
            LlmrunError: it can't be run.
        """

    def seconds(self, plan: BatchPlan) -> float | None:
        """About how long that takes, once the model is loaded; None where nobody can tell."""

    def run(self, todo: Iterable[PendingRow], sink: RowSink) -> None:
        """Answer all rows; each comes to the sink once.

        Raises:
            LlmrunError: it can't go on, or the sink can't take a row. What came before is in it.
        """


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """What is to be done, and how.

    Attributes:
        todo: rows without an answer, in the order in which they are asked.
        broken: rows that can't be asked, and why.
        prompt_tokens: of all that is to do, about.
        shared_tokens: of them, those that a row has in common with the one before, about.
        parallel: rows side by side.
        notes: what the user should know.
    """

    todo: tuple[PendingRow, ...]
    broken: tuple[tuple[Row, LlmrunError], ...]
    prompt_tokens: int
    shared_tokens: int
    parallel: int
    notes: tuple[str, ...] = ()

    @property
    def most_answer_tokens(self) -> int | None:
        """Of all answers together; None where they may be as long as the model likes."""
        limits = [todo.asked.request.limits.max_tokens for todo in self.todo]
        return None if None in limits else sum(limit or 0 for limit in limits)


class _PreparedRows(NamedTuple):
    """What rows ask, and which of them ask nothing that can be understood."""

    asked: Mapping[int, tuple[Row, CompletionRequest]]
    broken: tuple[tuple[Row, LlmrunError], ...]


def plan_batch(
    answering: RowAnswerer, rows: Iterable[Row], recipe: RowTemplate, done: Mapping[int, WrittenRow]
) -> BatchPlan:
    """Which rows are left, and how they are answered.

    Args:
        recipe: without the name of the model.
        done: number of a row -> what its line says.

    Raises:
        UsageError: the answers that are there belong to other rows, or to another model or other settings; a row that
            failed has changed since; or not one row can be asked.
        LlmrunError: the model can't be run, see Answering.find().
    """
    rows = tuple(rows)
    questions = _questions(rows, recipe)
    if questions.broken and not questions.asked:
        raise questions.broken[0][1]
    for row, error in questions.broken:
        if row.number in done and not done[row.number].failed:
            raise _another_batch(f"row {row.number} has an answer, but can't be asked: {error}")
    found = answering.find(_need(asked for number, (_, asked) in questions.asked.items() if number not in done))
    recipe, notes = replace(recipe, model=found.model), found.notes
    if not recipe.raw and not recipe.asked.template and not found.has_template:
        recipe = replace(recipe, raw=True)
        questions = _questions(rows, recipe)
        notes = (f"{found.name} has no chat template: texts are continued (--template gives it one)", *notes)
    todo = _left(questions, recipe, done)
    texts = {number: text_of(each.asked) for number, each in todo.items()}
    order = in_order(texts)
    pairs = ((texts[before], texts[number]) for before, number in pairwise(order))
    shared = sum(len(commonprefix(pair)) for pair in pairs)  # noqa: RUF071  # of texts, not of paths
    return BatchPlan(
        tuple(todo[number] for number in order),
        tuple((row, error) for row, error in questions.broken if row.number not in done),
        sum(_prompt_tokens(each.asked) for each in todo.values()),
        shared // _BYTES_A_TOKEN + (_TEMPLATE_TOKENS - _TEMPLATE_TAIL) * max(len(order) - 1, 0),
        found.parallel,
        notes,
    )


def _questions(rows: Iterable[Row], recipe: RowTemplate) -> _PreparedRows:
    asked: dict[int, tuple[Row, CompletionRequest]] = {}
    broken: list[tuple[Row, LlmrunError]] = []
    for row in rows:
        try:
            asked[row.number] = row, recipe.ask(row)
        except LlmrunError as error:
            broken.append((row, error))
    return _PreparedRows(asked, tuple(broken))


def _left(questions: _PreparedRows, recipe: RowTemplate, done: Mapping[int, WrittenRow]) -> dict[int, PendingRow]:
    """The rows without a line, of those that can be asked."""
    todo: dict[int, PendingRow] = {}
    for number, (row, asked) in questions.asked.items():
        key = recipe.key(asked)
        if number not in done:
            todo[number] = PendingRow(row, asked, key)
        elif done[number].key != key and done[number].failed:
            why = f"row {number} failed, and asks something else now"
            raise UsageError("these answers are not complete", why=why, hint="add --retry-errors")
        elif done[number].key != key:
            raise _another_batch(f"row {number} asked something else, or of another model")
    numbers = questions.asked.keys() | {row.number for row, _ in questions.broken}
    if strangers := sorted(done.keys() - numbers):
        raise _another_batch(f"it answers row {strangers[0]}, which is not in the input")
    return todo


def _another_batch(why: str) -> UsageError:
    return UsageError("these answers belong to another batch", why=why, hint="name another file with -o")


def _prompt_tokens(asked: CompletionRequest) -> int:
    return len(text_of(asked).encode("utf-8", "replace")) // _BYTES_A_TOKEN + _TEMPLATE_TOKENS


def _need(asked: Iterable[CompletionRequest]) -> RowRequirements:
    lengths = sorted(_prompt_tokens(each) + (each.request.limits.max_tokens or _ANSWER_TOKENS) for each in asked)
    return RowRequirements(len(lengths), lengths[len(lengths) * 9 // 10] if lengths else 0)


def model_for(
    prepared: Callable[[LoadPreferences], Model], wishes: LoadPreferences, need: RowRequirements, parallel: int | None
) -> Model:
    """The model, planned for as many rows as the KV cache has room for, each as long as most are.

    Args:
        prepared: plans the model, as model.prepare().
        parallel: rows side by side; None is as many as fit, and one where rows are computed one at a time.

    Raises:
        LlmrunError: see prepare().
    """
    count = parallel or (1 if wishes.exact else max(1, min(MOST_PARALLEL, need.rows)))
    while True:
        model = prepared(replace(wishes, parallel=count))
        if parallel or count == 1 or model.plan.n_cells >= count * min(need.tokens, model.plan.n_ctx):
            return model
        count = max(1, count // 2)
