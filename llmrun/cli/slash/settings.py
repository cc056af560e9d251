"""Slash commands that change how the next answers are made: sampling, thoughts, drafts, system prompt, model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from llmrun.cli.loading import open_chat_model
from llmrun.cli.options import read_think
from llmrun.cli.sampling import FLAGS, read_value, sampling_rows, shown_value
from llmrun.errors import UsageError
from llmrun.model.chat_model import loaded_locally
from llmrun.model.load_plan import A_CHAT
from llmrun.planning.speculation import AUTO, OFF, read_speculate

if TYPE_CHECKING:
    from llmrun.cli.talk import Chat


def set_value(chat: Chat, rest: str) -> None:
    """Show the sampling parameters, or set one."""
    words = rest.removeprefix("parameter ").split(maxsplit=1)
    if not words:
        from llmrun.ui.views.sampling import show_sampling

        show_sampling(chat.output, sampling_rows(*chat.conversation.sampling()))
    elif words[0] == "system":
        set_system(chat, words[1] if len(words) > 1 else "")
    elif len(words) == 1:
        raise UsageError(f"/set {words[0]} needs a value", hint="/set temp 0.5; /set lists them")
    else:
        name, value = read_value(words[0], words[1], "/set ")
        if not chat.conversation.model.takes(name):
            raise UsageError(f"{chat.conversation.model.used.server} can't be told {FLAGS[name][0]}")
        chat.conversation.manner.session[name] = value
        chat.output.note(f"{FLAGS[name][0]} is {shown_value(name, value)} from now on.")


def think(chat: Chat, rest: str) -> None:
    """Whether and how long the model thinks, and what is shown of it."""
    think = read_think(rest, "/think")
    manner = chat.conversation.manner
    manner.asked = replace(manner.asked, thinking=think.thinking, thinking_tokens=think.tokens)
    chat.shown_as = replace(chat.shown_as, think=think.shown)
    if not chat.conversation.model.thinks:
        chat.output.note(f"{chat.conversation.model.name} is not a model that thinks first.")


def speculation(chat: Chat, rest: str) -> None:
    """How many tokens are drafted, and whether they are tinted."""
    drafting = loaded_locally(chat.conversation.model, "/speculation").drafting
    if rest not in ("", "on"):
        drafting.most = read_speculate(rest, "/speculation")
    elif rest == "on" and drafting.most == OFF:
        drafting.most = AUTO
    chat.loading = replace(chat.loading, speculate=drafting.most)  # of the models that come
    chat.shown_as = replace(chat.shown_as, tints=(chat.shown_as.tints or rest == "on") and rest != "off")
    tints = "; those that were accepted are tinted" if chat.shown_as.tints else ""
    chat.output.note(f"Drafted tokens: {drafting.words}{tints}.")


def set_system(chat: Chat, rest: str) -> None:
    """Show the system prompt, or set another."""
    saved = chat.conversation.chat
    if rest:
        saved.set_system(rest.strip('"'))
    chat.output.note(f"System prompt: {saved.system}" if saved.system else "There is no system prompt.")


def change_model(chat: Chat, rest: str) -> None:
    """Say which model answers, or go on with another."""
    conversation = chat.conversation
    if not rest:
        chat.output.note(f"{conversation.model.name}: {conversation.model.used.path}")
        return
    before = conversation.model
    saves = chat.store.folder is not None
    chat.loading = replace(chat.loading, draft=None, adapters=())  # they were for the other one
    manner = conversation.manner
    flags = {**manner.flags, **manner.session}
    wanted = open_chat_model(
        chat.output,
        rest,
        chat.loading,
        manner.asked,
        flags,
        warm_up=True,
        keeps_states=saves,
        another=True,
        expected=A_CHAT,
    )
    conversation.model = chat.models.enter_context(wanted)
    before.close()
    conversation.last = None
    chat.output.note(f"Going on with {conversation.model.name}.")


def multiline(chat: Chat, rest: str) -> None:
    """Change what Enter does."""
    chat.typed.multiline = not chat.typed.multiline
    chat.output.note(chat.typed.multiline_hint)
