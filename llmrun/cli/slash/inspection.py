"""Slash commands that show something: the model, its tools, the context window, statistics and choices of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.chat.store.turns import Question
from llmrun.errors import UsageError
from llmrun.model.chat_model import loaded_locally
from llmrun.protocol.messages import Finished

if TYPE_CHECKING:
    from llmrun.cli.talk import Chat
    from llmrun.model import Model

REMEMBERED = 16  # tokens that /why can explain; each takes 4 bytes for every token of the vocabulary
_CANDIDATES = 8


def show_header(chat: Chat, rest: str) -> None:
    """Print the model's header."""
    from llmrun.cli.show import header_facts
    from llmrun.ui.views.model_facts import show_model

    show_model(chat.output, header_facts(loaded_locally(chat.conversation.model, "/show").header), stderr=True)


def show_offered(chat: Chat, rest: str) -> None:
    """Print the model's tools."""
    from llmrun.ui.views.tools import show_tools

    show_tools(chat.output, chat.tools.offered, chat.tools.offers)
    if not chat.tools.offered:
        chat.output.note("There are no tools: llmrun chat --tools FILE.py")


def show_window(chat: Chat, rest: str) -> None:
    """Print the content of the context window."""
    from llmrun.ui.views.context import show_context

    messages = chat.conversation.chat.messages()
    if not messages:
        chat.output.note("The context window is empty.")
        return
    model = chat.conversation.model
    show_context(chat.output, messages, chat.conversation.count(), model.n_ctx, about=bool(model.used.server))


def sources(chat: Chat, rest: str) -> None:
    """Print the passages that were sent with the last question."""
    from llmrun.ui.views.passages import show_passages

    last = chat.conversation.chat.last_question
    passages = last.part.passages if last is not None and isinstance(last.part, Question) else ()
    if not passages:
        chat.output.note("No passage was sent with the last question: llmrun chat --docs FOLDER")
    show_passages(chat.output, passages)


def stats(chat: Chat, rest: str) -> None:
    """Print the statistics of the last answer."""
    answer = chat.conversation.chat.last_answer
    if answer is None:
        chat.output.note("There is no answer yet.")
    elif not answer.stats.completion_tokens:
        chat.output.note("The last answer has no statistics: it was interrupted.")
    else:
        from llmrun.ui.answer.meter import summary

        times = chat.conversation.model.step_times
        chat.output.note(summary(Finished(0, answer.finish, answer.stats), times))


def why(chat: Chat, rest: str) -> None:
    """Print how tokens of the last answer were chosen."""
    count = rest or "1"
    if not count.isdecimal() or not 1 <= int(count) <= REMEMBERED:
        raise UsageError(f"invalid /why {rest}", why=f"must be a number of tokens, 1 to {REMEMBERED}")
    model = _with_last_answer(chat, "/why")
    from llmrun.ui.views.sampling import least_certain, show_choice

    choices = model.explain(int(count) if rest else REMEMBERED, _CANDIDATES).choices
    for choice in choices if rest else (least_certain(choices),):
        show_choice(chat.output, choice)


def explain(chat: Chat, rest: str) -> None:
    """Print how the model made the last answer."""
    model = _with_last_answer(chat, "/explain")
    from llmrun.insight.explain import explain_answer
    from llmrun.ui.terminal.activity import Activity
    from llmrun.ui.views.explain import show_explained

    with Activity(chat.output) as activity:
        activity.show("computing every step again")
        found = explain_answer(model)
    show_explained(chat.output, found)


def _with_last_answer(chat: Chat, command: str) -> Model:
    """Return the model of the last answer.

    Raises:
        UsageError: a server answered, or the answer is not of this run.
    """
    model = loaded_locally(chat.conversation.model, command)
    if chat.conversation.last is None:
        why = "logits are in memory for the last sampled answer of this run only"
        raise UsageError("there is no answer to explain", why=why, hint="ask something, or /retry")
    return model
