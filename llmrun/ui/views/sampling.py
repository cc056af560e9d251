"""The sampler's settings with their origins, and the steps of one choice.

Owns the words and the layout; must not know the source of the figures. Beside an answer the output is on stderr.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmrun.protocol.messages import DraftedToken, DraftSource
from llmrun.protocol.questions import Choice
from llmrun.ui.terminal.format import bar, counted, percent
from llmrun.ui.terminal.output import Output
from llmrun.ui.terminal.tables import Column, right, show_table

_BAR_CELLS = 8
_DRAFTED: dict[DraftSource, str] = {
    "prompt": "copied from the prompt",
    "answer": "copied from the answer itself",
    "model": "by the draft model",
    "heads": "by the model's heads",
    "probe": "to measure a step",
}
_SHORTLY: dict[DraftSource, str] = {
    "prompt": "prompt", "answer": "answer", "model": "draft model", "heads": "heads", "probe": "measurement"
}  # fmt: skip


def show_sampling(output: Output, rows: Sequence[tuple[str, str, str]]) -> None:
    """Print the sampling parameters.

    Args:
        rows: (flag, value, origin) of each.
    """
    columns = (Column("SAMPLING", style="bold"), Column("VALUE"), Column("FROM", style="dim"))
    show_table(output, columns, rows, stderr=True)


def least_certain(choices: Sequence[Choice]) -> Choice:
    """Return the choice with the least model probability; a token that a grammar forced only if all were forced."""
    free = [choice for choice in choices if not choice.forced]
    return min(free, key=lambda choice: choice.steps[0].probabilities[choice.chosen], default=choices[-1])


def about_draft(draft: DraftedToken) -> str:
    """Return a sentence about what was drafted in the place of a token."""
    what = "" if draft.accepted else f" {draft.text!r}, which was refused"
    likely = f", with {percent(draft.probability)}" if draft.probability is not None else ""
    return f"Drafted{what}: {_DRAFTED[draft.source]}{likely}, as token {draft.depth} of the draft."


def draft_cell(draft: DraftedToken | None) -> str:
    """Return source and depth of a draft, its probability, and the drafted token if it was refused."""
    if draft is None:
        return ""
    likely = f" {percent(draft.probability)}" if draft.probability is not None else ""
    return f"{_SHORTLY[draft.source]} {draft.depth}{likely}{'' if draft.accepted else f', not {draft.text!r}'}"


def show_choice(output: Output, choice: Choice, *, stderr: bool = True) -> None:
    """Print the candidates of one token, with their probabilities after each step or the step that cut them."""
    say = output.note if stderr else output.sentence
    about = f" {about_draft(choice.draft)}" if choice.draft is not None else ""
    if choice.forced:
        say(f"{choice.text!r}: the grammar left no choice.{about}")
        return
    first, last = choice.steps[0], choice.steps[-1]
    say(
        f"{choice.text!r}: the model gave it {percent(first.probabilities[choice.chosen])}; "
        f"drawn with {percent(last.probabilities[choice.chosen])} from {counted(last.remaining, 'candidate')}.{about}"
    )
    columns = (Column("TOKEN", style="bold"), *right(*(step.name for step in choice.steps)), Column("", style="cyan"))
    rows = [_row(choice, index) for index in range(len(choice.candidates))]
    left = ("left", *(f"{step.remaining:,}" for step in choice.steps), "")
    show_table(output, columns, [*rows, left], stderr=stderr)


def _row(choice: Choice, index: int) -> tuple[str, ...]:
    cells = []
    for before, step in zip((None, *choice.steps), choice.steps, strict=False):
        if step.probabilities[index] > 0:
            cells.append(percent(step.probabilities[index]))
        else:
            was_there = before is None or before.probabilities[index] > 0
            cells.append("cut" if was_there else "")
    shown = bar(choice.steps[-1].probabilities[index], _BAR_CELLS)
    return repr(choice.candidates[index]), *cells, f"{shown} ◀ chosen".strip() if index == choice.chosen else shown
