"""How a command shows a model's answer, and how Ctrl-C stops it; the same for `run` and `chat`."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from llmrun.messages import Event, Finished
from llmrun.model import Model
from llmrun.ui.answer import answer_view
from llmrun.ui.output import Output


@contextmanager
def cancelling(model: Model) -> Iterator[None]:
    """Inside, Ctrl-C stops the model's answer instead of the command."""
    before = signal.signal(signal.SIGINT, lambda number, frame: model.cancel())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def show(output: Output, events: Iterable[Event], model: Model, stats: bool | None) -> Finished:
    """Show an answer as it comes; gives its last event."""
    if output.json:
        return _to_the_end(events, output.event_json)
    wanted = output.stdout_is_terminal if stats is None else stats
    with answer_view(output, n_ctx=model.loaded.n_ctx, stats=wanted) as view:
        return _to_the_end(events, view.show)


def _to_the_end(events: Iterable[Event], show_event: Callable[[Event], None]) -> Finished:
    for event in events:
        show_event(event)
        if isinstance(event, Finished):
            return event
    raise AssertionError("an answer ended without Finished")
