"""The table of slash commands: names, help and functions.

The names are Ollama's where it has such a command. Each function gets the chat, and the text after the command's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from llmrun.cli.slash import beams, inspection, settings, storage, turns
from llmrun.errors import UsageError
from llmrun.protocol.params import PARAMETERS, Parameter
from llmrun.ui.prompt.completion import Candidate, Completion, file_names
from llmrun.ui.prompt.drafts import LEAVING_WORDS
from llmrun.ui.prompt.input import KEYS, USUAL_KEYS

if TYPE_CHECKING:
    from llmrun.cli.talk import Chat


class SlashCommand(NamedTuple):
    """A command's help and its function."""

    meaning: str
    obey: Callable[[Chat, str], None]
    is_usual: bool = False  # shown by /help, and not only by /help all


def show_help(chat: Chat, rest: str) -> None:
    """Print the usual commands and keys, or with "all" every one."""
    from llmrun.ui.terminal.tables import show_facts

    if rest not in ("", "all"):
        raise UsageError(f"invalid /help {rest}", why="must be all, or nothing", hint="/help all")
    meanings = {name: command.meaning for name, command in SLASH_COMMANDS.items() if rest or command.is_usual}
    keys = {key: meaning for key, meaning in KEYS.items() if rest or key in USUAL_KEYS}
    show_facts(chat.output, [*meanings.items(), *keys.items()], stderr=True)


def leave(chat: Chat, rest: str) -> None:
    """Make this message the last."""
    chat.leaves = True


SLASH_COMMANDS: dict[str, SlashCommand] = {
    "/help [all]": SlashCommand("show the usual commands, or all; also /?", show_help, is_usual=True),
    "/retry [COUNT]": SlashCommand(
        "answer the last question again, or several times at once, and keep one answer", turns.retry, is_usual=True
    ),
    "/continue": SlashCommand("continue the last answer where it ended", turns.resume),
    "/beams [COUNT]": SlashCommand("search for the likeliest answer to the last question", beams.search_again),
    "/edit [TEXT]": SlashCommand(
        "edit the last question and send it again; with TEXT, ask that instead", turns.edit, is_usual=True
    ),
    "/undo": SlashCommand("remove the last question and its answer", turns.undo, is_usual=True),
    "/branch [new] [NAME]": SlashCommand(
        "switch to a branch, or start one here with new NAME; without a name, show how they differ", turns.branch
    ),
    "/file PATTERN...": SlashCommand(
        "attach text files to the next message; --drop NAME detaches one", turns.attach_files, is_usual=True
    ),
    "/image FILE...": SlashCommand("attach images to the next message; --drop NAME detaches one", turns.attach_images),
    "/files": SlashCommand("list the attached files, with their tokens", turns.list_attached),
    "/sources": SlashCommand("show the passages of --docs that were sent with the last question", inspection.sources),
    "/set [NAME VALUE]": SlashCommand(
        "set a sampling parameter, such as /set temp 0.5; without a name, show the usual ones",
        settings.set_value,
        is_usual=True,
    ),
    "/think MODE": SlashCommand(
        "reasoning: on, off, hide, fold, low, medium, high, or a number of tokens", settings.think
    ),
    "/speculation [MODE]": SlashCommand(
        "drafted tokens: on colours them; off, auto, or a number a step", settings.speculation
    ),
    "/system [TEXT]": SlashCommand(
        "set the system prompt; without a text, show it", settings.set_system, is_usual=True
    ),
    "/model [NAME]": SlashCommand(
        "switch to another model; without a name, show the current one", settings.change_model, is_usual=True
    ),
    "/show": SlashCommand("show the model, as `llmrun show` does", inspection.show_header),
    "/tools": SlashCommand("list the tools that the model may call", inspection.show_offered),
    "/context": SlashCommand("show the content of the context window", inspection.show_window, is_usual=True),
    "/stats": SlashCommand("show the statistics of the last answer", inspection.stats),
    "/why [COUNT]": SlashCommand(
        "show how the least certain of the last tokens was chosen, or each of the last COUNT",
        inspection.why,
        is_usual=True,
    ),
    "/explain": SlashCommand("show how the model made the last answer, from tokens to choices", inspection.explain),
    "/save NAME": SlashCommand("rename this chat", storage.save),
    "/load NAME": SlashCommand("resume another saved chat", storage.load, is_usual=True),
    "/sessions": SlashCommand("list the saved chats", storage.list_sessions, is_usual=True),
    "/export FILE": SlashCommand("write this chat to a .md, .json or .jsonl file", storage.export_chat),
    "/copy": SlashCommand("copy the last answer to the clipboard", storage.copy_answer),
    "/multiline": SlashCommand("make Enter a newline and Alt-Enter send, or switch back", settings.multiline),
    "/clear": SlashCommand("start the conversation anew, with the same system prompt", turns.clear, is_usual=True),
    "/bye": SlashCommand("leave, as Ctrl-D does; also exit, quit", leave, is_usual=True),
}
_OTHER_NAMES = {"/?": "/help", "/exit": "/bye", "/quit": "/bye", "/q": "/bye", "/history": "/sessions"}
_OTHER_NAMES |= dict.fromkeys(LEAVING_WORDS, "/bye")
BY_NAME = {name.split()[0]: command.obey for name, command in SLASH_COMMANDS.items()}
BY_NAME |= {other: BY_NAME[name] for other, name in _OTHER_NAMES.items()}


def completions(chat: Chat) -> dict[str, Completion | None]:
    """Return the completion of each command's arguments."""
    from llmrun.cli.completion import complete_model

    found: dict[str, Completion | None] = {name: None for name in BY_NAME if name not in LEAVING_WORDS}
    found["/model"] = lambda words: complete_model(words[-1]) if chat.loading.server is None else []
    found["/load"] = lambda words: chat.store.names()
    found["/help"] = lambda words: ["all"]
    found["/set"] = lambda words: [Candidate(row.flag.lstrip("-"), _hint(row)) for row in PARAMETERS.values()]
    found["/think"] = lambda words: ["on", "off", "hide", "fold", "low", "medium", "high"]
    found["/speculation"] = lambda words: ["on", "off", "auto"]
    found["/branch"] = lambda words: [branch.name for branch in chat.conversation.chat.branches() if branch.name]
    found["/export"] = file_names
    found["/file"] = lambda words: _files(words, [file.name for file in chat.attached.files])
    found["/image"] = lambda words: _files(words, [image.name for image in chat.attached.images])
    return found


def _files(words: Sequence[str], attached: Sequence[str]) -> Iterable[str]:
    """Return the completions of a word after /file: files, or after --drop the attached ones."""
    return attached if words[0] == turns.DROP else file_names(words)


def _hint(row: Parameter) -> str:
    """Return the bounds of a sampling parameter, and its meaning."""
    return f"{row.bounds[0]} to {row.bounds[1]}. {row.help}" if row.bounds else row.help
