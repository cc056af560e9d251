"""Slash commands that change settings of the next answers: sampling, reasoning, drafts, system prompt, model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from llmrun.cli.loading import open_chat_model
from llmrun.cli.reasoning import read_think
from llmrun.cli.sampling import read_value, sampling_rows, shown_value
from llmrun.errors import UsageError
from llmrun.model.chat_model import loaded_locally
from llmrun.model.loading import A_CHAT
from llmrun.planning.speculation import AUTO, OFF, read_speculate
from llmrun.protocol.params import PARAMETERS, SERVER
from llmrun.ui.prompt.drafts import unquoted

if TYPE_CHECKING:
    from llmrun.cli.talk import Chat


USUAL_PARAMETERS = frozenset(
    PARAMETERS[name].flag
    for name in (
        "temperature", "seed", "top_k", "top_p", "min_p", "repeat_penalty", "repeat_last_n", "presence_penalty",
        "dry_multiplier", "xtc_probability",
    )
)  # fmt: skip
"""Flags of the sampling parameters that /set shows even if nothing sets them."""


def set_value(chat: Chat, rest: str) -> None:
    """Print the sampling parameters, or set one."""
    words = rest.removeprefix("parameter ").split(maxsplit=1)
    if words in ([], ["all"]):
        from llmrun.ui.views.sampling import show_sampling

        rows = sampling_rows(*chat.conversation.sampling())
        shown = [row for row in rows if words or row[0] in USUAL_PARAMETERS or row[2] not in ("default", SERVER)]
        show_sampling(chat.output, shown)
        if len(shown) < len(rows):
            chat.output.note(f"{len(rows) - len(shown)} more have their defaults: /set all")
    elif words[0] == "system":
        set_system(chat, words[1] if len(words) > 1 else "")
    else:
        name, value = read_value(words[0], "".join(words[1:]), "/set ")
        if not chat.conversation.model.takes(name):
            raise UsageError(f"{chat.conversation.model.used.server} does not support {PARAMETERS[name].flag}")
        chat.conversation.settings.session[name] = value
        chat.output.note(f"{PARAMETERS[name].flag} is now {shown_value(name, value)}.")


def think(chat: Chat, rest: str) -> None:
    """Set whether the model reasons, or how long, or how that is displayed; the rest stays."""
    think = read_think(rest, "/think")
    settings = chat.conversation.settings
    request = settings.request
    if think.thinking is not None:
        request = replace(request, thinking=think.thinking)
    elif request.thinking is False and (think.tokens is not None or think.effort is not None):
        request = replace(request, thinking=None)
    settings.request = replace(
        request,
        thinking_tokens=request.thinking_tokens if think.tokens is None else think.tokens,
        reasoning_effort=think.effort or request.reasoning_effort,
    )
    if rest in ("on", "hide", "fold"):
        chat.shown_as = replace(chat.shown_as, think=think.shown)
    if not chat.conversation.model.thinks:
        chat.output.note(f"{chat.conversation.model.name} has no thinking mode.")


def speculation(chat: Chat, rest: str) -> None:
    """Set the number of drafted tokens a step, and their display."""
    drafting = loaded_locally(chat.conversation.model, "/speculation").drafting
    if rest not in ("", "on"):
        drafting.most = read_speculate(rest, "/speculation")
    elif rest == "on" and drafting.most == OFF:
        drafting.most = AUTO
    chat.loading = replace(chat.loading, speculate=drafting.most)  # of further models
    chat.shown_as = replace(chat.shown_as, tints=(chat.shown_as.tints or rest == "on") and rest != "off")
    tints = "; accepted ones are coloured" if chat.shown_as.tints else ""
    chat.output.note(f"Drafted tokens: {drafting.words}{tints}.")


def set_system(chat: Chat, rest: str) -> None:
    """Print the system prompt, or set another."""
    saved = chat.conversation.chat
    if rest:
        saved.set_system(unquoted(rest))
    chat.output.note(f"System prompt: {saved.system}" if saved.system else "There is no system prompt.")


def change_model(chat: Chat, rest: str) -> None:
    """Print the model, or load another."""
    conversation = chat.conversation
    if not rest:
        chat.output.note(f"{conversation.model.name}: {conversation.model.used.path}")
        return
    before = conversation.model
    saves = chat.store.folder is not None
    chat.loading = replace(chat.loading, draft=None, adapters=(), projector=None)  # they belong to the other model
    settings = conversation.settings
    flags = {**settings.flags, **settings.session}
    loaded = open_chat_model(
        chat.output,
        rest,
        chat.loading,
        settings.request,
        flags,
        warm_up=True,
        keeps_states=saves,
        another=True,
        expected=A_CHAT,
    )
    conversation.model = chat.models.enter_context(loaded)
    before.close()
    conversation.last = None
    chat.output.note(f"Switched to {conversation.model.name}.")


def multiline(chat: Chat, rest: str) -> None:
    """Toggle the meaning of Enter."""
    chat.typed.multiline = not chat.typed.multiline
    chat.output.note(chat.typed.multiline_hint)
