"""Several answers to one prompt: asked for at once, shown side by side, in turn, or as a list of JSON objects.

Owns what `run --answers` adds to `run`; must not know how answers are drawn.
"""

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
    output: Output, model: ChatModel, asked: AnswerRequest, answers: int, shown_as: DisplayOptions
) -> Finished:
    """Show so many answers as they come; gives the end of the one that was cut shortest.

    Raises:
        UsageError: they would all be the same.
    """
    seeds = seeds_for(asked.sampling, answers)
    events = model.answer(*with_seeds(asked, seeds))
    finished = _print_json(output, events, seeds) if output.json else stream(output, model, events, seeds, shown_as)
    order = ("cancelled", "length")
    return min(finished, key=lambda each: order.index(each.reason) if each.reason in order else len(order))


def stream(
    output: Output, model: ChatModel, events: Iterable[Event], seeds: Sequence[int], shown_as: DisplayOptions
) -> list[Finished]:
    """Show answers with these seeds as they come; gives their ends."""
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
    places, heard = SeedIndex(seeds), [list[Event]() for _ in seeds]
    for event in events:
        heard[places.of(event)].append(event)
    output.result_json([_as_json(events, seed) for events, seed in zip(heard, seeds, strict=True)])
    return [each for answer in heard for each in answer if isinstance(each, Finished)]


def _as_json(events: list[Event], seed: int) -> dict[str, Any]:
    reply = Reply(iter(events), lambda: None)
    facts = {"seed": seed, "text": reply.text, "reason": reply.reason, "stats": as_dict(reply.stats)}
    if reply.thoughts:
        facts["thoughts"] = reply.thoughts
    if reply.logprobs:
        facts["logprobs"] = {"content": logprob_entries(reply.logprobs)}
    return facts
