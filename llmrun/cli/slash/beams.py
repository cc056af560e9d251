"""The slash command /beams: the last question, answered by beam search.

Owns the conversion of the result to an answer of the chat; cli/beams.py runs the search.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from llmrun.cli.beams import searched, show_rest
from llmrun.errors import UsageError, require_within
from llmrun.model.chat_model import loaded_locally
from llmrun.protocol.jobs.beams import MOST_BEAMS, BeamSettings, BeamsFound
from llmrun.protocol.messages import AnswerRequest, Event, Finished, Started, Stats, TextDelta

if TYPE_CHECKING:
    from llmrun.cli.talk import Chat

_BEAMS = 4


def search_again(chat: Chat, rest: str) -> None:
    """Search for the likeliest answer to the last question."""
    if rest and not rest.isdecimal():
        raise UsageError(f"invalid /beams {rest}", why=f"must be a number of beams, 2 to {MOST_BEAMS}")
    require_within("/beams", int(rest or _BEAMS), (2, MOST_BEAMS))
    settings = BeamSettings(int(rest or _BEAMS))
    conversation, searches = chat.conversation, list[BeamsFound]()
    model = loaded_locally(conversation.model, "/beams")

    def answer(request: AnswerRequest) -> Iterator[Event]:
        if request.tools:
            raise UsageError(
                "/beams can't be used with tools", why="a search ends with an answer, never with a tool call"
            )
        found, _ = searched(chat.output, model, request, settings)
        searches.append(found)
        yield from _events(found, model.n_ctx)

    if chat.typed.interactive:
        chat.output.note("Searching; Ctrl-C ends the search with the best answer so far.")
    chat.answer(conversation.retry(answer))
    conversation.last = None  # the engine can't explain it
    for found in searches if chat.typed.interactive else ():
        show_rest(chat.output, model, settings, found, is_free=conversation.settings.request.grammar is None)


def _events(found: BeamsFound, n_ctx: int) -> Iterator[Event]:
    """Yield the events of the best answer, like those of a sampled one."""
    best, seconds = found.answers[0], found.prefill_seconds + found.decode_seconds
    stats = Stats(
        prompt_tokens=found.prompt_tokens,
        prefill_seconds=found.prefill_seconds,
        completion_tokens=len(best.tokens),
        decode_seconds=found.decode_seconds,
        ttft_seconds=seconds,  # the best answer is known at the end
        context_used=found.prompt_tokens + len(best.tokens),
        n_ctx=n_ctx,
        decode_steps=found.steps,
    )
    yield Started(0, found.prompt_tokens, 0, 0)
    yield TextDelta(0, best.text, len(best.tokens))
    yield Finished(0, "cancelled" if found.is_cancelled else best.reason, stats)
