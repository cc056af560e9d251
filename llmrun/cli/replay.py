"""`llmrun replay`: a recorded answer once more."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llmrun.chat.replay import Record, differences, place_of, read
from llmrun.cli.answering import ShownAs, cancelling, collecting, show
from llmrun.cli.loading import open_model
from llmrun.cli.options import LoadingOptions
from llmrun.errors import CancelledError, IntegrityError, UsageError
from llmrun.planning.plan import Wishes
from llmrun.ui.terminal.output import Output


def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `llmrun run --record FILE` wrote.")],
    model: Annotated[str, typer.Option("--model", help="Another name or path for the recorded model.")] = "",
) -> None:
    """Answer a recorded prompt again, and compare the bytes."""
    output = Output()
    record = read(file)
    wishes = Wishes(_number(record, "context"), _number(record, "threads"))
    used = record.answer.model
    with open_model(
        output, model or used.name or used.path, LoadingOptions(wishes, verbose=False, yes=False)
    ) as loaded:
        changed = differences(record, place_of(loaded))
        for line in changed:
            output.note(line)
        pieces: list[str] = []
        with cancelling(loaded):
            events = collecting(loaded.answer(record.again()), pieces)
            finished = show(output, events, loaded, ShownAs(markdown=False))
    if finished.reason == "cancelled":
        raise CancelledError("stopped by Ctrl-C")
    at = _first_difference("".join(pieces), record.answer.content)
    if at is None:
        output.note("The same bytes as recorded.")
        return
    raise IntegrityError(
        f"the answer differs from the recorded one from character {at + 1:,} on",
        why="; ".join(changed) or "nothing that was recorded is different here",
        hint="the same bytes need the same model, build, processor, threads and context window",
    )


def _first_difference(text: str, recorded: str) -> int | None:
    """Index of the first character in which two texts differ; None if they are equal."""
    if text == recorded:
        return None
    shorter = min(len(text), len(recorded))
    return next((index for index in range(shorter) if text[index] != recorded[index]), shorter)


def _number(record: Record, name: str) -> int:
    value = record.place.get(name, "")
    if not value.isdecimal():
        raise UsageError("the record does not say how it was made", why=f"{name} is {value or 'missing'}")
    return int(value)
