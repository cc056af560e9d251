"""The slash commands of a chat: one table of their names, what they do, and who does it.

The names are those that Ollama's users know. Each gets the chat, and what stands behind its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from llmrun.cli.sampling import FLAGS
from llmrun.cli.slash import beams, inspection, settings, storage, turns
from llmrun.protocol.params import BOUNDS
from llmrun.ui.prompt.completion import Candidate, Completion, file_names
from llmrun.ui.prompt.drafts import LEAVING_WORDS
from llmrun.ui.prompt.input import KEYS

if TYPE_CHECKING:
    from llmrun.cli.talk import Chat


class SlashCommand(NamedTuple):
    """What a command does, as the help says it and as it is done."""

    meaning: str
    obey: Callable[[Chat, str], None]


def show_help(chat: Chat, rest: str) -> None:
    """What the commands and keys do."""
    width = max(map(len, SLASH_COMMANDS))
    for name, command in SLASH_COMMANDS.items():
        chat.output.note(f"  {name:{width}}  {command.meaning}")
    for key, meaning in KEYS.items():
        chat.output.note(f"  {key:{width}}  {meaning}")


def leave(chat: Chat, rest: str) -> None:
    """Let this message be the last."""
    chat.leaves = True


SLASH_COMMANDS: dict[str, SlashCommand] = {
    "/help": SlashCommand("this help; also /?", show_help),
    "/retry [COUNT]": SlashCommand(
        "another answer to the last question, or that many at once, of which you keep one", turns.retry
    ),
    "/beams [COUNT]": SlashCommand("the likeliest answer to the last question, by beam search", beams.search_again),
    "/edit [TEXT]": SlashCommand(
        "the last question at the prompt, to be changed and sent; with TEXT, ask that instead of it", turns.edit
    ),
    "/undo": SlashCommand("take the last question and its answer back", turns.undo),
    "/branch [NAME]": SlashCommand(
        "go on under a name of its own, or go to a branch; without a name, list them", turns.branch
    ),
    "/file PATTERN...": SlashCommand(
        "text files that go along with the next message; --drop NAME takes one out", turns.attach_files
    ),
    "/image FILE...": SlashCommand(
        "images that go along with the next message; --drop NAME takes one out", turns.attach_images
    ),
    "/files": SlashCommand("what goes along with the next message, with its tokens", turns.list_attached),
    "/set [NAME VALUE]": SlashCommand(
        "a sampling value, such as /set temp 0.5; /set system TEXT; without a name, all of them", settings.set_value
    ),
    "/think MODE": SlashCommand("on, off, hide, fold, or a number of tokens", settings.think),
    "/speculation [MODE]": SlashCommand(
        "drafted tokens: on tints them; off, auto, or how many a step", settings.speculation
    ),
    "/system [TEXT]": SlashCommand("another system prompt from now on; without a text, show it", settings.set_system),
    "/model [NAME]": SlashCommand("go on with another model; without a name, say which it is", settings.change_model),
    "/show": SlashCommand("the model, as `llmrun show` does", inspection.show_header),
    "/tools": SlashCommand("what the model may call", inspection.show_offered),
    "/context": SlashCommand("what fills the context window", inspection.show_window),
    "/stats": SlashCommand("what the last answer cost", inspection.stats),
    "/why [COUNT]": SlashCommand(
        "how the least certain of the last tokens was chosen, or that many of the last", inspection.why
    ),
    "/explain": SlashCommand(
        "what the model did for the last answer, from its tokens to its choices", inspection.explain
    ),
    "/save NAME": SlashCommand("call this chat something", storage.save),
    "/load NAME": SlashCommand("go on with another saved chat", storage.load),
    "/sessions": SlashCommand("the saved chats", storage.list_sessions),
    "/export FILE": SlashCommand("write this chat as .md, .json or .jsonl", storage.export_chat),
    "/copy": SlashCommand("the last answer into the clipboard", storage.copy_answer),
    "/multiline": SlashCommand("Enter makes newlines, Alt-Enter sends; once more: as before", settings.multiline),
    "/clear": SlashCommand("forget the conversation, keep the system prompt", turns.clear),
    "/bye": SlashCommand("leave, as Ctrl-D does; also /exit, /quit, exit, quit", leave),
}
"""What is typed -> the command, in the order of the help."""
_OTHER_NAMES = {"/?": "/help", "/exit": "/bye", "/quit": "/bye", "/q": "/bye", "/history": "/sessions"}
_OTHER_NAMES |= dict.fromkeys(LEAVING_WORDS, "/bye")
_BY_WORD = {name.split()[0]: command.obey for name, command in SLASH_COMMANDS.items()}


def find(word: str) -> Callable[[Chat, str], None] | None:
    """Who obeys a command; None where there is no such command."""
    return _BY_WORD.get(_OTHER_NAMES.get(word, word))


def completions(chat: Chat) -> dict[str, Completion | None]:
    """What the Tab key offers behind each command."""
    from llmrun.cli.completion import complete_model

    names = (name.split()[0] for name in (*SLASH_COMMANDS, *_OTHER_NAMES))
    offers: dict[str, Completion | None] = {name: None for name in names if name not in LEAVING_WORDS}
    offers["/model"] = lambda words: complete_model(words[-1]) if chat.loading.server is None else []
    offers["/load"] = lambda words: chat.store.names()
    offers["/set"] = lambda words: [Candidate(flag.lstrip("-"), _hint(name)) for name, (flag, _) in FLAGS.items()]
    offers["/think"] = lambda words: ["on", "off", "hide", "fold"]
    offers["/speculation"] = lambda words: ["on", "off", "auto"]
    offers["/branch"] = lambda words: [branch.name for branch in chat.conversation.chat.branches() if branch.name]
    offers["/export"] = file_names
    offers["/file"] = lambda words: _files(words, [file.name for file in chat.attached.files])
    offers["/image"] = lambda words: _files(words, [picture.name for picture in chat.attached.pictures])
    return offers


def _files(words: Sequence[str], attached: Sequence[str]) -> Iterable[str]:
    """Return what a word behind /file can be: a file's name, or behind --drop that of one that goes along."""
    return attached if words[0] == turns.DROP else file_names(words)


def _hint(parameter: str) -> str:
    """The bounds of a sampling parameter, and what it does."""
    low, high = BOUNDS.get(parameter, ("", ""))
    return f"{low} to {high}. {FLAGS[parameter][1]}" if parameter in BOUNDS else FLAGS[parameter][1]
