"""The display of answers, one or several, and Ctrl-C to stop them, for `run` and `chat`."""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import TYPE_CHECKING, Any

from llmrun.errors import UsageError, require_within
from llmrun.model.chat_model import ChatModel, seeds_for, with_seeds
from llmrun.protocol.answer import logprob_entries
from llmrun.protocol.arguments import MOST_TOP_LOGPROBS
from llmrun.protocol.codec import as_dict
from llmrun.protocol.messages import AnswerRequest, Event, Finished, MediaAccepted, Started, Stats, TextDelta
from llmrun.protocol.sizes import readable_size
from llmrun.reply import Reply
from llmrun.ui.answer.meter import summary_of_all
from llmrun.ui.answer.view import DisplayOptions, answer_view
from llmrun.ui.terminal.format import counted
from llmrun.ui.terminal.keyboard import keyboard
from llmrun.ui.terminal.output import Output

if TYPE_CHECKING:
    from llmrun.chat.attachments import Attachments
    from llmrun.chat.tools.toolbox import Toolbox


@contextmanager
def on_ctrl_c(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """Handle Ctrl-C with this function inside the block."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def cancelling(output: Output, what: ChatModel | Toolbox) -> Iterator[None]:
    """Cancel the model's answer or the tool's call on Ctrl-C, instead of the command; echo no keys into the display."""
    drawn_on = output.stdin if output.stdin_is_terminal else output.stdout
    with (
        keyboard(drawn_on, echoes=False) if output.stdout_is_terminal else nullcontext(),  # `| less` has its own mode
        on_ctrl_c(lambda number, frame: what.cancel()),
    ):
        yield


def show(output: Output, events: Iterable[Event], model: ChatModel, shown_as: DisplayOptions) -> Finished:
    """Show an answer; return its last event."""
    if output.json:
        return _to_the_end(events, lambda event: print_event(output, event))
    accepted: list[MediaAccepted] = []  # noted afterwards: a line would break into the live one
    kinds = PartKinds()
    with answer_view(output, shown_as, n_ctx=model.n_ctx) as view:
        model.on_wait = view.tick
        for event in events:
            view.show(event)
            kinds.take(event)
            if isinstance(event, MediaAccepted):
                accepted.append(event)
            elif isinstance(event, Finished):
                break
        else:
            raise AssertionError("an answer ended without Finished")
    for each in accepted if shown_as.stats is not False else ():
        size = f"{each.seconds:.1f} s of audio" if each.seconds else f"{each.width:,} x {each.height:,} pixels"
        output.note(f"{each.name}: {size}, {counted(each.tokens, 'token')}")
    if empty := kinds.empty_note(event):
        output.note(empty)
    return event


class PartKinds:
    """The kinds of parts that an answer has so far: an answer that shows nothing must not pass for one."""

    def __init__(self) -> None:
        self._found: set[str] = set()

    def take(self, event: Event) -> None:
        """Note the parts of an event; blanks are no text."""
        if isinstance(event, TextDelta) and "text" not in self._found:
            self._found.update(part.kind for part in event.answer_parts if part.kind != "text" or part.text.strip())

    def empty_note(self, finished: Finished) -> str:
        """Return the note about an answer without text and calls; "" if there is something, or the user stopped it."""
        if self._found & {"text", "call"} or finished.reason == "cancelled":
            return ""
        if "reasoning" not in self._found:
            return "The answer is empty."
        if finished.reason == "length":
            return "The answer is empty: the tokens ran out in the reasoning."
        return "The answer is empty: there is nothing after the reasoning."


def show_again(output: Output, text: str, shown_as: DisplayOptions) -> None:
    """Show an earlier answer, without its reasoning."""
    events = (Started(1, 0, 0, 0), TextDelta(1, text, 0), Finished(1, "stop", Stats()))
    plain = DisplayOptions(stats=False, markdown=shown_as.markdown, end_line=shown_as.end_line)
    with answer_view(output, plain) as view:
        _to_the_end(events, view.show)


def collecting(events: Iterable[Event], deltas: list[TextDelta]) -> Iterator[Event]:
    """Yield the events, and append their text to deltas."""
    for event in events:
        if isinstance(event, TextDelta):
            deltas.append(event)
        yield event


def show_attached(output: Output, attached: Attachments) -> None:
    """Print the attached files, before they are sent."""
    for note in attached.notes:
        output.note(note)
    for file in attached.files:
        output.note(f"{file.name}: {readable_size(file.n_bytes)}, about {counted(file.tokens, 'token')}")
    for each in attached.media:
        kind = "an image" if each.modality == "image" else "audio"
        output.note(f"{each.name}: {readable_size(each.n_bytes)}, {kind}; its tokens are counted when it is sent")


def print_event(output: Output, event: Event) -> None:
    """Print an event on stdout as one line of JSON: {"event": its name, its fields ...}."""
    facts = {"event": type(event).__name__, **as_dict(event)}
    if isinstance(event, TextDelta):
        facts["logprobs"] = logprob_entries(event.logprobs)
    output.json_line(facts)


def _to_the_end(events: Iterable[Event], show_event: Callable[[Event], None]) -> Finished:
    for event in events:
        show_event(event)
        if isinstance(event, Finished):
            return event
    raise AssertionError("an answer ended without Finished")


def show_n_answers(
    output: Output, model: ChatModel, request: AnswerRequest, answers: int, shown_as: DisplayOptions
) -> Finished:
    """Show several answers; return the end of the one that was cut shortest.

    Raises:
        UsageError: all answers would be the same.
    """
    seeds = seeds_for(request.sampling, answers)
    events = model.answer(*with_seeds(request, seeds))
    finished = _print_json(output, events, seeds) if output.json else stream(output, model, events, seeds, shown_as)
    order = ("cancelled", "length")
    return min(finished, key=lambda each: order.index(each.reason) if each.reason in order else len(order))


def stream(
    output: Output, model: ChatModel, events: Iterable[Event], seeds: Sequence[int], shown_as: DisplayOptions
) -> list[Finished]:
    """Show answers with these seeds; return their ends."""
    from llmrun.ui.answer.columns import n_answers_view  # most prompts have one answer

    together = model.parallel > 1
    finished: list[Finished] = []
    kinds = defaultdict[int, PartKinds](PartKinds)
    with n_answers_view(output, seeds, shown_as, together=together) as view:
        model.on_wait = view.tick
        for event in events:
            view.show(event)
            kinds[event.request].take(event)
            if isinstance(event, Finished):
                finished.append(event)
    for empty in filter(None, (kinds[each.request].empty_note(each) for each in finished)):
        output.note(empty)
    if together and shown_as.has_stats(output):
        output.note(summary_of_all(finished, short=shown_as.is_short))
    return finished


def _print_json(output: Output, events: Iterable[Event], seeds: Sequence[int]) -> list[Finished]:
    from llmrun.ui.answer.columns import SeedIndex

    places, answers = SeedIndex(seeds), [list[Event]() for _ in seeds]
    for event in events:
        answers[places.of(event)].append(event)
    output.result_json([_as_json(events, seed) for events, seed in zip(answers, seeds, strict=True)])
    return [event for events in answers for event in events if isinstance(event, Finished)]


def _as_json(events: list[Event], seed: int) -> dict[str, Any]:
    reply = Reply(iter(events), lambda: None)
    facts = {"seed": seed, "text": reply.text, "reason": reply.reason, "stats": as_dict(reply.stats)}
    if reply.thoughts:
        facts["thoughts"] = reply.thoughts
    if reply.logprobs:
        facts["logprobs"] = {"content": logprob_entries(reply.logprobs)}
    return facts


def check_logprobs(output: Output, count: int, answers: int) -> None:
    """Raise UsageError if log-probabilities can't be shown."""
    require_within("--logprobs", count, (0, MOST_TOP_LOGPROBS))
    if output.json:
        return
    if answers > 1:
        why = "only one answer can be shaded"
        raise UsageError("--logprobs and --answers can't be used together", why=why, hint="--json has both")
    if not (output.cursor_moves and output.stdout_has_color):
        why = "it colours the text, and there are no colours here"
        raise UsageError("--logprobs needs colours", why=why, hint="--json prints them for each token")


def show_logprobs(output: Output, deltas: Sequence[TextDelta], count: int) -> None:
    """Print the legend of the colours, and the N likeliest tokens where the answer's token was unlikely."""
    from llmrun.ui.answer.surprise import show_legend, show_surprises

    tokens = [token for delta in deltas for token in delta.logprobs]
    show_legend(output, stderr=True)
    if count and tokens:
        show_surprises(output, tokens, stderr=True)
