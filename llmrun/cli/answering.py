"""How a command shows a model's answer, and how Ctrl-C stops it; the same for `run` and `chat`."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from llmrun.model.chat_model import ChatModel
from llmrun.protocol.messages import Event, Finished, ImageAccepted, Started, Stats, TextDelta
from llmrun.protocol.sizes import readable_size
from llmrun.ui.answer.view import answer_view
from llmrun.ui.terminal.output import Output

if TYPE_CHECKING:
    from llmrun.chat.attachments import Attachments
    from llmrun.chat.tools.toolbox import Toolbox


@dataclass(frozen=True, slots=True)
class DisplayOptions:
    """How answers are shown.

    Attributes:
        stats: figures during the answer and after it; None is a few, where stdout and stderr are a terminal.
        markdown: as Markdown, where the terminal can.
        think: what is shown of a model's thoughts, "on", "hide" or "fold".
        end_line: an answer ends with a newline in a pipe too.
        tints: drafted tokens are coloured.
        shades: all tokens are, by how likely they were.
    """

    stats: bool | None = None
    markdown: bool = True
    think: Literal["on", "hide", "fold"] = "fold"
    end_line: bool = False
    tints: bool = False
    shades: bool = False


@contextmanager
def on_ctrl_c(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """Inside, Ctrl-C does this."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def cancelling(what: ChatModel | Toolbox) -> AbstractContextManager[None]:
    """Inside, Ctrl-C stops the model's answer, or a tool's call, instead of the command."""
    return on_ctrl_c(lambda number, frame: what.cancel())


def show(output: Output, events: Iterable[Event], model: ChatModel, shown_as: DisplayOptions) -> Finished:
    """Show an answer as it comes; gives its last event."""
    if output.json:
        return _to_the_end(events, output.event_json)
    pictures: list[ImageAccepted] = []
    with answer_view(
        output,
        n_ctx=model.n_ctx,
        stats=is_on_terminal(output) if shown_as.stats is None else shown_as.stats,
        markdown=shown_as.markdown,
        think=shown_as.think,
        end_line=shown_as.end_line,
        short=shown_as.stats is None,
        times=model.step_times,
        tints=shown_as.tints,
        shades=shown_as.shades,
    ) as view:
        model.on_wait = view.tick
        finished = _to_the_end(_keeping(events, pictures), view.show)
    for picture in pictures if shown_as.stats is not False else ():
        output.note(f"{picture.name}: {picture.width:,} x {picture.height:,} pixels, {picture.tokens:,} tokens")
    return finished


def show_again(output: Output, text: str, shown_as: DisplayOptions) -> None:
    """Show an answer that was given before as it was shown then, without its thoughts."""
    events = (Started(1, 0, 0, 0), TextDelta(1, text, 0), Finished(1, "stop", Stats()))
    with answer_view(output, stats=False, markdown=shown_as.markdown, end_line=shown_as.end_line) as view:
        _to_the_end(events, view.show)


def is_on_terminal(output: Output) -> bool:
    """Whether a user sees both the answer and what is said of it."""
    return output.stdout_is_terminal and output.stderr_is_terminal


def collecting(events: Iterable[Event], deltas: list[TextDelta]) -> Iterator[Event]:
    """The events, their text kept."""
    for event in events:
        if isinstance(event, TextDelta):
            deltas.append(event)
        yield event


def _keeping(events: Iterable[Event], pictures: list[ImageAccepted]) -> Iterator[Event]:
    """The events; what is told of pictures is kept until the answer is there: a line would break into the live one."""
    for event in events:
        if isinstance(event, ImageAccepted):
            pictures.append(event)
        yield event


def show_attached(output: Output, attached: Attachments) -> None:
    """Say which files go along, before they are sent."""
    for note in attached.notes:
        output.note(note)
    for file in attached.files:
        output.note(f"{file.name}: {readable_size(file.n_bytes)}, about {file.tokens:,} tokens")
    for picture in attached.pictures:
        output.note(
            f"{picture.name}: {readable_size(picture.n_bytes)}, an image; its tokens are counted when it is sent"
        )


def _to_the_end(events: Iterable[Event], show_event: Callable[[Event], None]) -> Finished:
    for event in events:
        show_event(event)
        if isinstance(event, Finished):
            return event
    raise AssertionError("an answer ended without Finished")
