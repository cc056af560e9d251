"""`llmrun replay`: a recorded answer computed again."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated

import typer

from llmrun.chat.replay import Recording, differences, place_of, read
from llmrun.cli.answering import cancelling, collecting, show
from llmrun.cli.completion import complete_model
from llmrun.cli.loading import open_model
from llmrun.cli.options import LoadingOptions, loading, with_options
from llmrun.cli.sampling import read_key
from llmrun.errors import CancelledError, IntegrityError, UsageError
from llmrun.planning.preferences import CONTEXT_BOUNDS, LoadPreferences
from llmrun.protocol.messages import TextDelta
from llmrun.protocol.watermark import fingerprint
from llmrun.ui.answer.view import DisplayOptions
from llmrun.ui.terminal.output import Output


@with_options(loading=loading)
def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Recording written by `llmrun run --record FILE`.")],
    *,
    model: Annotated[
        str,
        typer.Option(
            "--model", help="Name or path of the recorded model, if it has changed.", autocompletion=complete_model
        ),
    ] = "",
    watermark_key: Annotated[
        str | None,
        typer.Option(
            "--watermark-key",
            metavar="KEY",
            help="Key of a watermarked answer; @FILE reads it from a file.",
        ),
    ] = None,
    loading: LoadingOptions,
) -> None:
    """Answer a recorded prompt again and compare the bytes.

    The model is loaded with the recorded settings; options override them.
    """
    output = Output()
    record = _with_key(read(file), watermark_key)
    loading = replace(loading, preferences=_changed(_recorded(record), loading.preferences))
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
        with cancelling(output, loaded):
            request = record.again()
            if loading.speculate is not None:
                request = replace(request, speculation=loaded.drafting.speculation())
            events = collecting(loaded.answer(request), deltas)
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
    """Return the index of the first different character of two texts; None if they are equal."""
    if text == recorded:
        return None
    shorter = min(len(text), len(recorded))
    return next((index for index in range(shorter) if text[index] != recorded[index]), shorter)


def _with_key(record: Recording, key: str | None) -> Recording:
    """Return the record with the watermark key, since it has only the key's fingerprint.

    Raises:
        UsageError: the key is missing or different.
    """
    sampling = record.answer.sampling
    if not sampling.watermark:
        return record
    key = read_key(key, "--watermark-key")
    if fingerprint(key) != sampling.watermark_key:
        raise UsageError("the answer was watermarked with another --watermark-key")
    return replace(record, answer=replace(record.answer, sampling=replace(sampling, watermark_key=key)))


def _recorded(record: Recording) -> LoadPreferences:
    """Return the recorded parameters of loading."""
    kv_types, flash_attention = record.place.get("KV cache", "f16 f16"), record.place.get("flash attention", "auto")
    type_k, _, type_v = kv_types.partition(" ")
    n_ctx = _number(record, "context")
    window = n_ctx if n_ctx >= CONTEXT_BOUNDS[0] else None  # no option asks for less: it was the model's own
    return LoadPreferences(
        window,
        _number(record, "threads"),
        flash_attention=flash_attention,
        kv_type_k=type_k,
        kv_type_v=type_v,
    )


def _changed(preferences: LoadPreferences, typed: LoadPreferences) -> LoadPreferences:
    """Return the recorded preferences with the typed ones that are not defaults."""
    changes = {each.name: getattr(typed, each.name) for each in fields(LoadPreferences)}
    return replace(
        preferences, **{name: value for name, value in changes.items() if value != getattr(LoadPreferences(), name)}
    )


def _number(record: Recording, name: str) -> int:
    value = record.place.get(name, "")
    if not value.isdecimal():
        raise UsageError("the recording is incomplete", why=f"{name} is {value or 'missing'}")
    return int(value)
