"""Several answers to one prompt, for `run --answers` and /retry COUNT: side by side, in turn, or as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from llmrun.cli.answering import DisplayOptions, is_on_terminal
from llmrun.model.chat_model import ChatModel
from llmrun.model.n_answers import seeds_for, with_seeds
from llmrun.protocol.codec import as_dict
from llmrun.protocol.logprobs import logprob_entries
from llmrun.protocol.messages import AnswerRequest, Event, Finished
from llmrun.reply import Reply
from llmrun.ui.answer.columns import SeedIndex
from llmrun.ui.answer.meter import summary_of_all
from llmrun.ui.answer.n_answers import n_answers_view
from llmrun.ui.terminal.output import Output


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
    stats = is_on_terminal(output) if shown_as.stats is None else shown_as.stats
    together = model.parallel > 1
    finished: list[Finished] = []
    with n_answers_view(
        output,
        seeds,
        together=together,
        stats=stats,
        markdown=shown_as.markdown,
        think=shown_as.think,
        short=shown_as.stats is None,
    ) as view:
        model.on_wait = view.tick
        for event in events:
            view.show(event)
            if isinstance(event, Finished):
                finished.append(event)
    if stats and together:
        output.note(summary_of_all(finished, short=shown_as.stats is None))
    return finished


def _print_json(output: Output, events: Iterable[Event], seeds: Sequence[int]) -> list[Finished]:
    places, answers = SeedIndex(seeds), [list[Event]() for _ in seeds]
    for event in events:
        answers[places.of(event)].append(event)
    output.result_json([_as_json(events, seed) for events, seed in zip(answers, seeds, strict=True)])
    return [each for events in answers for each in events if isinstance(each, Finished)]


def _as_json(events: list[Event], seed: int) -> dict[str, Any]:
    reply = Reply(iter(events), lambda: None)
    facts = {"seed": seed, "text": reply.text, "reason": reply.reason, "stats": as_dict(reply.stats)}
    if reply.thoughts:
        facts["thoughts"] = reply.thoughts
    if reply.logprobs:
        facts["logprobs"] = {"content": logprob_entries(reply.logprobs)}
    return facts
