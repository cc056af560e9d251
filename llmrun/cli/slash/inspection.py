"""Slash commands that show something: the model, its tools, the context window, what the last answer cost and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.errors import UsageError
from llmrun.model.chat_model import loaded_locally
from llmrun.protocol.messages import Finished

if TYPE_CHECKING:
    from llmrun.cli.talk import Chat
    from llmrun.model import Model

REMEMBERED = 16
"""Tokens that /why can be asked about; each costs 4 bytes for every token of the vocabulary."""
_CANDIDATES = 8


def show_header(chat: Chat, rest: str) -> None:
    """Show the model's header."""
    from llmrun.cli.show import header_facts
    from llmrun.ui.views.model_facts import show_model

    show_model(chat.output, header_facts(loaded_locally(chat.conversation.model, "/show").header), stderr=True)


def show_offered(chat: Chat, rest: str) -> None:
    """Show what the model may call."""
    from llmrun.ui.views.tools import show_tools

    show_tools(chat.output, chat.tools.offered)
    if not chat.tools.offered:
        chat.output.note("There are none: llmrun chat --tools FILE.py")


def show_window(chat: Chat, rest: str) -> None:
    """Show what fills the context window."""
    from llmrun.ui.views.context import show_context

    messages = chat.conversation.chat.messages()
    if not messages:
        chat.output.note("Nothing fills the context window yet.")
        return
    model = chat.conversation.model
    show_context(chat.output, messages, chat.conversation.count(), model.n_ctx, about=bool(model.used.server))


def stats(chat: Chat, rest: str) -> None:
    """Show what the last answer cost."""
    answer = chat.conversation.chat.last_answer
    if answer is None:
        chat.output.note("There is no answer yet.")
    elif not answer.stats.completion_tokens:
        chat.output.note("The last answer has no figures: it broke off before its end.")
    else:
        from llmrun.ui.answer.meter import summary

        times = chat.conversation.model.step_times
        chat.output.note(summary(Finished(0, answer.finish, answer.stats), times))


def why(chat: Chat, rest: str) -> None:
    """Show how tokens of the last answer were chosen."""
    count = rest or "1"
    if not count.isdecimal() or not 1 <= int(count) <= REMEMBERED:
        raise UsageError(f"invalid /why {rest}", why=f"must be a number of tokens, 1 to {REMEMBERED}")
    model = _with_last_answer(chat, "/why")
    from llmrun.ui.views.sampling import least_certain, show_choice

    choices = model.explain(int(count) if rest else REMEMBERED, _CANDIDATES).choices
    for choice in choices if rest else (least_certain(choices),):
        show_choice(chat.output, choice)


def explain(chat: Chat, rest: str) -> None:
    """Show what the model did for the last answer."""
    model = _with_last_answer(chat, "/explain")
    from llmrun.insight.explain import explain_answer
    from llmrun.ui.views.explain import show_explained

    show_explained(chat.output, explain_answer(model))


def _with_last_answer(chat: Chat, command: str) -> Model:
    """The model that gave the last answer. Raises UsageError where a server did, or the answer is not of this run."""
    model = loaded_locally(chat.conversation.model, command)
    if chat.conversation.last is None:
        why = "only the last answer of this run can be explained: logits are not saved with a chat"
        raise UsageError("there is no answer to explain", why=why, hint="ask something, or /retry")
    return model
