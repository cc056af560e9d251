"""Slash commands about the turns of a chat: answered again, edited, taken back, branched.

Owns what each says; what becomes of the turns is decided in llmrun.chat.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Generator
from contextlib import closing
from dataclasses import replace
from functools import partial, reduce
from typing import TYPE_CHECKING

from llmrun.chat.attachments import attach, attach_image_files, without
from llmrun.chat.store.turns import Question
from llmrun.cli.answering import cancelling, show_attached
from llmrun.errors import UsageError
from llmrun.model.n_answers import seeds_for
from llmrun.models.location import require_projector
from llmrun.protocol.messages import Event, Finished
from llmrun.ui.terminal.format import counted, short
from llmrun.ui.terminal.keyboard import keyboard

if TYPE_CHECKING:
    from llmrun.cli.talk import Chat

_RETRIES = (2, 9)
DROP = "--drop"


def retry(chat: Chat, rest: str) -> None:
    """Answer the last question once more, or several times together, and keep one of these answers."""
    if not rest:
        chat.answer(chat.conversation.retry())
        return
    low, high = _RETRIES
    if not rest.isdecimal() or not low <= int(rest) <= high:
        raise UsageError(f"invalid /retry {rest}", why=f"must be a number of answers, {low} to {high}")
    sampling, _ = chat.conversation.sampling()
    seeds = seeds_for(replace(sampling, seed=None), int(rest))
    chat.answer(chat.conversation.retry_n(seeds), partial(_show_and_choose, chat, seeds))


def _show_and_choose(chat: Chat, seeds: list[int], events: Generator[Event, None, None]) -> Finished:
    """Show several answers, and go on with the one that the user wants; with the last where nobody says."""
    from llmrun.cli.n_answers import stream

    conversation, output = chat.conversation, chat.output
    with closing(events), keyboard(output.stdin, echoes=False), cancelling(conversation.model):
        finished = stream(output, conversation.model, events, seeds, chat.shown_as)
    numbers = {str(place + 1): "" for place in range(conversation.n_versions)}
    if len(numbers) > 1:
        chosen = output.choose("Which one stays?", numbers, explained=False)
        conversation.keep(int(chosen) - 1)
        output.note(f"Answer {chosen} stays. The others are saved too: /branch lists them.")
    return finished[-1]


def edit(chat: Chat, rest: str) -> None:
    """Ask the last question differently; its files and pictures go along again."""
    last = chat.conversation.chat.last_question
    if last is None or not isinstance(last.part, Question):
        chat.output.note("There is no question yet.")
        return
    if not rest:
        chat.typed.prefill(last.part.shown)
        rest = chat.typed.read() or ""
        if chat.typed.is_command:
            chat.obey(rest)
            return
    if rest:
        chat.answer(chat.conversation.edit(last.part.reworded(rest)))


def undo(chat: Chat, rest: str) -> None:
    """Take the last question and its answer back."""
    question = chat.conversation.chat.undo()
    chat.output.note(f'Taken back: "{short(question.shown)}"' if question else "There is nothing to take back.")


def branch(chat: Chat, rest: str) -> None:
    """List the branches, go to one, or go on under a new one."""
    saved = chat.conversation.chat
    if not rest:
        _list_branches(chat)
    elif any(rest in (branch.name, f"#{branch.head}") for branch in saved.branches()):
        saved.switch(rest)
        chat.output.note(f"Going on with {saved.branch}.")
    else:
        saved.make_branch(rest)
        chat.output.note(f"From here on this is {rest}.")


def _list_branches(chat: Chat) -> None:
    """Each with where it leaves the one that goes on, and what was said there instead."""
    saved = chat.conversation.chat
    for branch in saved.branches():
        name, turns = branch.name or f"#{branch.head}", counted(branch.turns, "turn")
        if branch.current:
            chat.output.note(f'* {name}: {turns}, this one, last "{short(branch.last)}"')
            continue
        fork = saved.difference(branch)
        if fork is None:
            chat.output.note(f"  {name}: {turns}, all of them in this one too")
        else:
            turn, said = fork
            chat.output.note(f'  {name}: {turns}, differs from turn {turn} on: "{short(said)}"')


def clear(chat: Chat, rest: str) -> None:
    """Forget the conversation."""
    chat.conversation.chat.clear()
    chat.output.note("The conversation is forgotten. It stays saved: /branch shows where.")


def attach_files(chat: Chat, rest: str) -> None:
    """Let text files go along with the next message, or take some out."""
    before = chat.attached
    if dropped := _dropped("/file", rest):
        chat.attached = replace(before, files=reduce(without, dropped, before.files))
    else:
        chat.attached = replace(attach(_names(rest), beside=before.files), pictures=before.pictures)
    list_attached(chat, "")


def attach_images(chat: Chat, rest: str) -> None:
    """Let pictures go along with the next message, or take some out."""
    model, before = chat.conversation.model, chat.attached
    if dropped := _dropped("/image", rest):
        chat.attached = replace(before, pictures=reduce(without, dropped, before.pictures))
    elif names := _names(rest):
        require_projector(model.name, model.sees, model.used.server)
        chat.attached = replace(before, pictures=attach_image_files(names, beside=before.pictures))
    list_attached(chat, "")


def list_attached(chat: Chat, rest: str) -> None:
    """List what goes along with the next message."""
    attached = chat.attached
    show_attached(chat.output, attached)
    chat.attached = replace(attached, notes=())  # said once
    if not (attached.files or attached.pictures):
        chat.output.note("Nothing goes along with the next message.")
    elif attached.files:
        files = f"{counted(len(attached.files), 'file')}, about {counted(attached.tokens, 'token')}"
        chat.output.note(f"{files}, with the next message. /file --drop NAME takes one out.")


def _dropped(command: str, rest: str) -> list[str]:
    """Return the names behind --drop; none without it. Raises UsageError where there are no names."""
    first, _, names = rest.partition(" ")
    if first != DROP:
        return []
    if not names.strip():
        raise UsageError(f"{command} {DROP} needs a name", hint=f"{command} {DROP} '*' takes all of them out")
    return _names(names.strip())


def _names(rest: str) -> list[str]:
    """Return the file names in a command; one with blanks stands alone, or in quotes."""
    if os.path.lexists(os.path.expanduser(rest)):  # noqa: PTH111 - a Path would lose a slash at the end
        return [rest]
    try:
        return shlex.split(rest)
    except ValueError:  # an apostrophe
        return rest.split()
