"""`llmrun replay`: a recorded answer once more."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated

import typer

from llmrun.chat.replay import Recording, differences, place_of, read
from llmrun.cli.answering import DisplayOptions, cancelling, collecting, show
from llmrun.cli.completion import complete_model
from llmrun.cli.loading import open_model
from llmrun.cli.options import LoadingOptions, loading, with_options
from llmrun.cli.sampling import read_key
from llmrun.errors import CancelledError, IntegrityError, UsageError
from llmrun.planning.plan import LoadPreferences
from llmrun.protocol.messages import TextDelta
from llmrun.ui.terminal.output import Output


@with_options(loading=loading)
def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Recording that `llmrun run --record FILE` wrote.")],
    *,
    model: Annotated[
        str,
        typer.Option("--model", help="Another name or path for the recorded model.", autocompletion=complete_model),
    ] = "",
    watermark_key: Annotated[
        str | None,
        typer.Option(
            "--watermark-key",
            metavar="KEY",
            help="Watermark key of the recorded answer; @FILE reads it from a file.",
        ),
    ] = None,
    loading: LoadingOptions,
) -> None:
    """Repeat a recorded answer and compare the bytes.

    The model is loaded as it was then, but for what an option changes.
    """
    output = Output()
    record = _with_key(read(file), watermark_key)
    loading = replace(loading, wishes=_changed(_recorded(record), loading.wishes))
    used, draft = record.answer.model, record.draft
    if loading.draft is None and draft is not None:
        loading = replace(loading, draft=draft.name or draft.path)
    if not loading.adapters:
        loading = replace(loading, adapters=record.answer.adapters)
    with open_model(output, model or used.name or used.path, loading) as loaded:
        changed = differences(record, place_of(loaded))
        for line in changed:
            output.note(line)
        deltas: list[TextDelta] = []
        with cancelling(loaded):
            asked = record.again()
            if loading.speculate is not None:
                asked = replace(asked, speculation=loaded.drafting.speculation())
            events = collecting(loaded.answer(asked), deltas)
            finished = show(output, events, loaded, DisplayOptions(markdown=False, end_line=True))
    if finished.reason == "cancelled":
        raise CancelledError("stopped by Ctrl-C")
    at = _first_difference("".join(delta.text for delta in deltas), record.answer.content)
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


def _with_key(record: Recording, key: str | None) -> Recording:
    """A record whose watermark can be left again: it has only the key's fingerprint.

    Raises:
        UsageError: the key is missing, or another one.
    """
    sampling = record.answer.sampling
    if not sampling.watermark:
        return record
    from llmrun.protocol.watermark import fingerprint

    key = read_key(key, "--watermark-key")
    if fingerprint(key) != sampling.watermark_key:
        raise UsageError("the answer was marked with another --watermark-key")
    return replace(record, answer=replace(record.answer, sampling=replace(sampling, watermark_key=key)))


def _recorded(record: Recording) -> LoadPreferences:
    """How the model was loaded."""
    kv_types, flash_attention = record.place.get("KV cache", "f16 f16"), record.place.get("flash attention", "auto")
    type_k, _, type_v = kv_types.partition(" ")
    return LoadPreferences(
        _number(record, "context"), _number(record, "threads"), None, type_k, type_v, flash_attention
    )


def _changed(wishes: LoadPreferences, typed: LoadPreferences) -> LoadPreferences:
    """Wishes with all that is typed and not the default."""
    changes = {each.name: getattr(typed, each.name) for each in fields(LoadPreferences)}
    return replace(
        wishes, **{name: value for name, value in changes.items() if value != getattr(LoadPreferences(), name)}
    )


def _number(record: Recording, name: str) -> int:
    value = record.place.get(name, "")
    if not value.isdecimal():
        raise UsageError("the record does not say how it was made", why=f"{name} is {value or 'missing'}")
    return int(value)
