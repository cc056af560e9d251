"""Slash commands on saved chats, export and clipboard."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from llmrun.cli.replacing import check_output_file
from llmrun.errors import UsageError
from llmrun.system import user_path
from llmrun.ui.prompt.drafts import unquoted
from llmrun.ui.terminal.format import counted, short

if TYPE_CHECKING:
    from llmrun.cli.talk import Chat


def save(chat: Chat, rest: str) -> None:
    """Rename this chat."""
    name = unquoted(rest)
    if not name:
        raise UsageError("/save needs a name", hint="/save trip-to-rome; every turn is saved anyway")
    saved = chat.conversation.chat
    saved.rename(name)
    resumed = f"llmrun chat --session {shlex.quote(saved.name)}" if chat.is_saved else "it is not saved"
    chat.output.note(f"This chat is now called {name}: {resumed}")


def load(chat: Chat, rest: str) -> None:
    """Open another saved chat."""
    name = unquoted(rest)
    if not name:
        raise UsageError("/load needs a name", hint="/sessions lists them")
    opened = chat.store.open(name)
    if opened.open_elsewhere:
        raise UsageError(f"{opened.name} is open in another llmrun", hint="leave it there first")
    chat.conversation.save_state()
    chat.conversation.chat.release()
    chat.conversation.chat = opened
    chat.greet()


def list_sessions(chat: Chat, rest: str) -> None:
    """Print the saved chats."""
    for facts in chat.store.all()[:20]:
        chat.output.note(f"  {facts.name}: {counted(facts.turns, 'turn')}, {short(facts.first)}")


def export_chat(chat: Chat, rest: str) -> None:
    """Write this chat to a file."""
    from llmrun.chat.store.export import export, format_for
    from llmrun.storage import write_whole

    name = unquoted(rest)
    form = format_for(name)
    if form is None:
        raise UsageError("/export needs a file name with .md, .json or .jsonl", hint="/export chat.md")
    if chat.conversation.chat.id is None:
        raise UsageError("there is nothing to export yet", hint="ask something first")
    path = user_path(name)
    check_output_file(chat.output, path, yes=False, hint="/export with another name")
    write_whole(path, export(chat.conversation.chat.tree(), form))
    chat.output.note(f"Wrote {path}.")


def copy_answer(chat: Chat, rest: str) -> None:
    """Copy the last answer to the clipboard."""
    answer = chat.conversation.chat.last_answer
    if answer is None:
        chat.output.note("There is no answer yet.")
    elif chat.output.to_clipboard(answer.content):
        chat.output.note("Copied the last answer, if the terminal lets programs write to the clipboard.")
    else:
        chat.output.note("The answer is too long for the terminal's clipboard; /export writes a file.")
