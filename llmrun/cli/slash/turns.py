"""Slash commands on the turns of a chat: retry, edit, undo, branch, attach files.

Owns the messages; llmrun.chat decides what happens to the turns.
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
from llmrun.cli.talk import way_back
from llmrun.errors import UsageError, did_you_mean
from llmrun.model.n_answers import seeds_for
from llmrun.models.location import require_projector
from llmrun.protocol.messages import Event, Finished
from llmrun.ui.prompt.drafts import unquoted
from llmrun.ui.terminal.format import counted, short

if TYPE_CHECKING:
    from llmrun.cli.talk import Chat

_RETRY_BOUNDS = (2, 9)
DROP = "--drop"


def retry(chat: Chat, rest: str) -> None:
    """Answer the last question again, or several times at once, and keep one of these answers."""
    if not rest:
        chat.answer(chat.conversation.retry())
        return
    low, high = _RETRY_BOUNDS
    if not rest.isdecimal() or not low <= int(rest) <= high:
        raise UsageError(f"invalid /retry {rest}", why=f"must be a number of answers, {low} to {high}")
    sampling, _ = chat.conversation.sampling()
    seeds = seeds_for(replace(sampling, seed=None), int(rest))
    chat.answer(chat.conversation.retry_n(seeds), partial(_show_and_choose, chat, seeds))


def resume(chat: Chat, rest: str) -> None:
    """Continue the last answer where it ended."""
    if rest:
        raise UsageError(f"invalid /continue {rest}", why="it takes nothing", hint="/continue")
    chat.answer(chat.conversation.resume())


def _show_and_choose(chat: Chat, seeds: list[int], events: Generator[Event, None, None]) -> Finished:
    """Show several answers, and continue with the user's choice, by default the last."""
    from llmrun.cli.n_answers import stream

    conversation, output = chat.conversation, chat.output
    with closing(events), cancelling(output, conversation.model):
        finished = stream(output, conversation.model, events, seeds, chat.shown_as)
    numbers = {str(place + 1): "" for place in range(conversation.n_versions)}
    if len(numbers) > 1:
        chosen = output.choose("Which answer to keep?", numbers, explained=False)
        conversation.keep(int(chosen) - 1)
        output.note(f"Kept answer {chosen}. The others are saved too: /branch lists them.")
    return finished[-1]


def edit(chat: Chat, rest: str) -> None:
    """Ask another question instead of the last one, with the same files and images."""
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
        chat.answer(chat.conversation.edit(last.part.reworded(rest, chat.find_passages(rest, is_edit=True))))


def undo(chat: Chat, rest: str) -> None:
    """Remove the last question and its answer from the conversation."""
    if rest:
        raise UsageError(f"invalid /undo {rest}", why="it removes one question and its answer", hint="/undo")
    question = chat.conversation.chat.undo()
    chat.output.note(f'Removed: "{short(question.shown)}"' if question else "There is no question to remove.")


def branch(chat: Chat, rest: str) -> None:
    """List the branches, switch to one, or start a new one."""
    saved, name = chat.conversation.chat, unquoted(rest)
    first, _, new = rest.partition(" ")
    if not name:
        _list_branches(chat)
    elif first == "new" and new.strip():
        name = unquoted(new.strip())
        saved.make_branch(name)
        chat.output.note(f"Started the branch {name}.")
    else:
        _switch(chat, name)


def _switch(chat: Chat, name: str) -> None:
    """Continue with a branch.

    Raises:
        UsageError: there is none of this name; suggests a similar one.
    """
    saved = chat.conversation.chat
    names = [branch.name or f"#{branch.head}" for branch in saved.branches()]
    if name not in names:
        why = f"the branches: {', '.join(names)}" if names else "there is none yet"
        hint = did_you_mean(name, names, f"/branch new {name} starts one here")
        raise UsageError(f"there is no branch {name!r}", why=why, hint=hint)
    saved.switch(name)
    chat.output.note(f"Switched to {saved.branch}.")


def _list_branches(chat: Chat) -> None:
    """Print each branch, and its first difference from the current one."""
    saved = chat.conversation.chat
    branches = saved.branches()
    if not any(branch.turns for branch in branches):
        chat.output.note("There is no branch yet: ask something first.")
        return
    for branch in branches:
        name, turns = branch.name or f"#{branch.head}", counted(branch.turns, "turn")
        if branch.current:
            last = f', last "{short(branch.last)}"' if branch.turns else ""
            chat.output.note(f"* {name}: {turns}, current{last}")
            continue
        fork = saved.difference(branch)
        if fork is None:
            chat.output.note(f"  {name}: {turns}, all in the current branch")
        else:
            turn, text = fork
            chat.output.note(f'  {name}: {turns}, differs from turn {turn} on: "{short(text)}"')


def clear(chat: Chat, rest: str) -> None:
    """Start the conversation anew."""
    if rest:
        raise UsageError(f"invalid /clear {rest}", why="it takes nothing", hint="/clear")
    saved = chat.conversation.chat
    if not saved.entries:
        chat.output.note("The conversation is empty already.")
        return
    saved.clear()
    chat.output.note(f"Started anew. The old conversation stays saved: {way_back(saved)}.")


def attach_files(chat: Chat, rest: str) -> None:
    """Attach text files to the next message, or detach some."""
    before = chat.attached
    if dropped := _dropped("/file", rest):
        chat.attached = replace(before, files=reduce(without, dropped, before.files))
    else:
        chat.attached = replace(attach(_names(rest), beside=before.files), images=before.images)
    list_attached(chat, "")


def attach_images(chat: Chat, rest: str) -> None:
    """Attach images to the next message, or detach some."""
    model, before = chat.conversation.model, chat.attached
    if dropped := _dropped("/image", rest):
        chat.attached = replace(before, images=reduce(without, dropped, before.images))
    elif names := _names(rest):
        require_projector(model.name, model.sees, model.used.server)
        chat.attached = replace(before, images=attach_image_files(names, beside=before.images))
    list_attached(chat, "")


def list_attached(chat: Chat, rest: str) -> None:
    """Print the attached files."""
    attached = chat.attached
    show_attached(chat.output, attached)
    chat.attached = replace(attached, notes=())  # shown once
    if not (attached.files or attached.images):
        chat.output.note("Nothing is attached to the next message.")
    elif attached.files:
        files = f"{counted(len(attached.files), 'file')}, about {counted(attached.tokens, 'token')}"
        chat.output.note(f"Attached to the next message: {files}. /file --drop NAME detaches one.")


def _dropped(command: str, rest: str) -> list[str]:
    """Return the names after --drop; none without it.

    Raises:
        UsageError: there are no names.
    """
    first, _, names = rest.partition(" ")
    if first != DROP:
        return []
    if not names.strip():
        raise UsageError(f"{command} {DROP} needs a name", hint=f"{command} {DROP} '*' detaches all")
    return _names(names.strip())


def _names(rest: str) -> list[str]:
    """Return the file names in a command; one with blanks stands alone, or in quotes."""
    if os.path.lexists(os.path.expanduser(rest)):  # noqa: PTH111 - a Path would lose a slash at the end
        return [rest]
    try:
        return shlex.split(rest)
    except ValueError:  # an apostrophe
        return rest.split()
