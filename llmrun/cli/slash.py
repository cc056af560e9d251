"""The table of slash commands: names, help and functions.

The names are Ollama's where it has such a command. Each function gets the chat, and the text after the command's name.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial, reduce
from typing import TYPE_CHECKING, NamedTuple, cast

from llmrun.chat.attachments import Attachments, attach, attach_media
from llmrun.chat.notes import describe_notes, notes_file, read_notes, remember
from llmrun.chat.store.export import export, format_for
from llmrun.chat.store.turns import Question
from llmrun.cli.answering import cancelling, show_attached, stream
from llmrun.cli.beams import searched, show_rest
from llmrun.cli.commands import EXPLAIN_IN_CHAT
from llmrun.cli.completion import complete_model
from llmrun.cli.docs import show_left_out
from llmrun.cli.loading import open_chat_model
from llmrun.cli.options import check_output_file
from llmrun.cli.sampling import read_value, sampling_rows, shown_value
from llmrun.cli.sessions import show_list
from llmrun.cli.talk import way_back
from llmrun.config import has_notes
from llmrun.errors import UsageError, did_you_mean, require_within
from llmrun.model.chat_model import loaded_locally, seeds_for
from llmrun.model.loading import A_CHAT
from llmrun.models.location import require_modalities
from llmrun.planning.speculation import AUTO, OFF, read_speculate
from llmrun.protocol.arguments import EFFORTS
from llmrun.protocol.jobs.beams import MOST_BEAMS, BeamSettings, BeamsFound
from llmrun.protocol.messages import AnswerRequest, Event, Finished, Started, Stats, TextDelta
from llmrun.protocol.params import MOST_TOKENS, PARAMETERS, SERVER, Parameter
from llmrun.storage import write_whole
from llmrun.system import user_path
from llmrun.ui.answer.meter import summary
from llmrun.ui.prompt.completion import Candidate, Completion, file_names
from llmrun.ui.prompt.drafts import LEAVING_WORDS, unquoted
from llmrun.ui.prompt.input import KEYS, USUAL_KEYS
from llmrun.ui.terminal.format import counted, short
from llmrun.ui.terminal.tables import show_facts
from llmrun.ui.views.chat import least_certain, show_choice, show_context, show_passages, show_sampling, show_tools

if TYPE_CHECKING:
    from llmrun.cli.talk import Chat
    from llmrun.model import Model
    from llmrun.ui.answer.page import Think

_RETRY_BOUNDS = (2, 9)
_SHOWN_CHATS = 20
DROP = "--drop"


def retry(chat: Chat, argument: str) -> None:
    """Answer the last question again, or several times at once, and keep one of these answers."""
    if not argument:
        chat.answer(chat.conversation.retry())
        return
    low, high = _RETRY_BOUNDS
    if not argument.isdecimal() or not low <= int(argument) <= high:
        raise UsageError(f"invalid /retry {argument}", why=f"must be a number of answers, {low} to {high}")
    sampling, _ = chat.conversation.sampling()
    seeds = seeds_for(replace(sampling, seed=None), int(argument))
    chat.answer(chat.conversation.retry_n(seeds), partial(_show_and_choose, chat, seeds))


def resume(chat: Chat, argument: str) -> None:
    """Continue the last answer where it ended."""
    if argument:
        raise UsageError(f"invalid /continue {argument}", why="it takes nothing", hint="/continue")
    chat.answer(chat.conversation.resume())


def _show_and_choose(chat: Chat, seeds: list[int], events: Generator[Event, None, None]) -> Finished:
    """Show several answers, and continue with the user's choice, by default the last."""
    conversation, output = chat.conversation, chat.output
    with closing(events), cancelling(output, conversation.model):
        finished = stream(output, conversation.model, events, seeds, chat.shown_as)
    numbers = {str(place + 1): "" for place in range(conversation.n_versions)}
    if len(numbers) > 1:
        chosen = output.choose("Which answer to keep?", numbers, explained=False)
        conversation.keep(int(chosen) - 1)
        output.note(f"Kept answer {chosen}. The others are saved too: /branch lists them.")
    return finished[-1]


def edit(chat: Chat, argument: str) -> None:
    """Ask another question instead of the last one, with the same files and images."""
    last = chat.conversation.chat.last_question
    if last is None or not isinstance(last.part, Question):
        chat.output.note("There is no question yet.")
        return
    if not argument:
        chat.typed.prefill(last.part.shown)
        argument = chat.typed.read() or ""
        if chat.typed.is_command:
            chat.obey(argument)
            return
    if argument:
        chat.answer(chat.conversation.edit(last.part.reworded(argument, chat.find_passages(argument, is_edit=True))))


def undo(chat: Chat, argument: str) -> None:
    """Remove the last question and its answer from the conversation."""
    if argument:
        raise UsageError(f"invalid /undo {argument}", why="it removes one question and its answer", hint="/undo")
    question = chat.conversation.chat.undo()
    chat.output.note(f'Removed: "{short(question.shown)}"' if question else "There is no question to remove.")


def branch(chat: Chat, argument: str) -> None:
    """List the branches, switch to one, or start a new one."""
    saved, name = chat.conversation.chat, unquoted(argument)
    first, _, new = argument.partition(" ")
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


def clear(chat: Chat, argument: str) -> None:
    """Start the conversation anew."""
    if argument:
        raise UsageError(f"invalid /clear {argument}", why="it takes nothing", hint="/clear")
    saved = chat.conversation.chat
    if not saved.entries:
        chat.output.note("The conversation is empty already.")
        return
    saved.clear()
    chat.output.note(f"Started anew. The old conversation stays saved: {way_back(saved)}.")


def attach_files(chat: Chat, argument: str) -> None:
    """Attach files to the next message, or detach some."""
    _attach(chat, argument, "/file", attach)


def attach_images(chat: Chat, argument: str) -> None:
    """Attach images to the next message, or detach some."""
    _attach(chat, argument, "/image", lambda names, beside: attach_media(names, "image", beside))


def attach_audio(chat: Chat, argument: str) -> None:
    """Attach audio to the next message, or detach some."""
    _attach(chat, argument, "/audio", lambda names, beside: attach_media(names, "audio", beside))


def _attach(chat: Chat, argument: str, command: str, read: Callable[..., Attachments]) -> None:
    """Attach what `read` returns for the names, given what is attached; or detach what follows --drop."""
    model, before = chat.conversation.model, chat.attached
    if dropped := _dropped(command, argument):
        chat.attached = reduce(Attachments.without, dropped, before)
    else:
        attached = read(_names(argument), beside=before)
        require_modalities(model.name, attached.modalities, model.modalities, server=model.used.server)
        chat.attached = attached
    list_attached(chat, "")


def list_attached(chat: Chat, argument: str) -> None:
    """Print the attached files."""
    attached = chat.attached
    show_attached(chat.output, attached)
    chat.attached = replace(attached, notes=())  # shown once
    if not (attached.files or attached.media):
        chat.output.note("Nothing is attached to the next message.")
    elif attached.files:
        files = f"{counted(len(attached.files), 'file')}, about {counted(attached.tokens, 'token')}"
        chat.output.note(f"Attached to the next message: {files}. /file --drop NAME detaches one.")


def _dropped(command: str, argument: str) -> list[str]:
    """Return the names after --drop; none without it.

    Raises:
        UsageError: there are no names.
    """
    first, _, names = argument.partition(" ")
    if first != DROP:
        return []
    if not names.strip():
        raise UsageError(f"{command} {DROP} needs a name", hint=f"{command} {DROP} '*' detaches all")
    return _names(names.strip())


def _names(argument: str) -> list[str]:
    """Return the file names in a command; one with blanks stands alone, or in quotes."""
    if os.path.lexists(os.path.expanduser(argument)):  # noqa: PTH111 - a Path would lose a slash at the end
        return [argument]
    try:
        return shlex.split(argument)
    except ValueError:  # an apostrophe
        return argument.split()


_BEAMS = 4


def search_again(chat: Chat, argument: str) -> None:
    """Search for the likeliest answer to the last question."""
    if argument and not argument.isdecimal():
        raise UsageError(f"invalid /beams {argument}", why=f"must be a number of beams, 2 to {MOST_BEAMS}")
    require_within("/beams", int(argument or _BEAMS), (2, MOST_BEAMS))
    settings = BeamSettings(int(argument or _BEAMS))
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


USUAL_PARAMETERS = frozenset(
    PARAMETERS[name].flag
    for name in (
        "temperature", "seed", "top_k", "top_p", "min_p", "repeat_penalty", "repeat_last_n", "presence_penalty",
        "dry_multiplier", "xtc_probability",
    )
)  # fmt: skip
"""Flags of the sampling parameters that /set shows even if nothing sets them."""


def set_value(chat: Chat, argument: str) -> None:
    """Print the sampling parameters, or set one."""
    words = argument.removeprefix("parameter ").split(maxsplit=1)
    if words in ([], ["all"]):
        rows = sampling_rows(*chat.conversation.sampling(), chat.loading.origins)
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


def think(chat: Chat, argument: str) -> None:
    """Set whether the model reasons, or how long, or how that is displayed; all else stays."""
    settings = chat.conversation.settings
    request = settings.request
    if argument in ("on", "off"):
        settings.request = replace(request, thinking=argument == "on")
    elif argument in EFFORTS or argument.isdecimal():
        if argument in EFFORTS:
            request = replace(request, reasoning_effort=argument)
        else:
            require_within("/think", int(argument), (0, MOST_TOKENS))
            request = replace(request, thinking_tokens=int(argument))
        settings.request = replace(request, thinking=request.thinking or None)
    elif argument not in ("hide", "fold"):
        why = "must be on, off, hide, fold, a number of tokens, or an effort such as low"
        raise UsageError(f"invalid /think {argument}", why=why)
    if argument in ("on", "hide", "fold"):
        chat.shown_as = replace(chat.shown_as, think=cast("Think", argument))
    if not chat.conversation.model.thinks:
        chat.output.note(f"{chat.conversation.model.name} has no thinking mode.")


def speculation(chat: Chat, argument: str) -> None:
    """Set the number of drafted tokens a step, and their display."""
    drafting = loaded_locally(chat.conversation.model, "/speculation").drafting
    if argument not in ("", "on"):
        drafting.most = read_speculate(argument, "/speculation")
    elif argument == "on" and drafting.most == OFF:
        drafting.most = AUTO
    chat.loading = replace(chat.loading, speculate=drafting.most)  # of further models
    chat.shown_as = replace(chat.shown_as, tints=(chat.shown_as.tints or argument == "on") and argument != "off")
    tints = "; accepted ones are coloured" if chat.shown_as.tints else ""
    chat.output.note(f"Drafted tokens: {drafting.words}{tints}.")


def set_system(chat: Chat, argument: str) -> None:
    """Print the system prompt, or set another."""
    saved = chat.conversation.chat
    if argument:
        saved.set_system(unquoted(argument))
    chat.output.note(f"System prompt: {saved.system}" if saved.system else "There is no system prompt.")
    chat.tell_notes()


def add_note(chat: Chat, argument: str) -> None:
    """Add a note for all chats, or print all notes."""
    if argument:
        remember(unquoted(argument))
        chat.output.note(f"It is in {notes_file()}, for this chat and later ones.")
        return
    for line in read_notes().splitlines():
        chat.output.note(line, dim=False)
    if not has_notes():
        chat.output.note("Notes across chats are off: llmrun config set notes on")
    else:
        chat.output.note(describe_notes() or f"There are no notes in {notes_file()} yet: /remember TEXT adds one.")


def change_model(chat: Chat, argument: str) -> None:
    """Print the model, or load another."""
    conversation = chat.conversation
    if not argument:
        chat.output.note(f"{conversation.model.name}: {conversation.model.used.path}")
        return
    before = conversation.model
    saves = chat.store.folder is not None
    chat.loading = replace(chat.loading, draft=None, adapters=(), projector=None)  # they belong to the other model
    settings = conversation.settings
    flags = {**settings.flags, **settings.session}
    loaded = open_chat_model(
        chat.output,
        argument,
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


def multiline(chat: Chat, argument: str) -> None:
    """Toggle the meaning of Enter."""
    chat.typed.multiline = not chat.typed.multiline
    chat.output.note(chat.typed.multiline_hint)


REMEMBERED = 16  # tokens that /why can explain; each takes 4 bytes for every token of the vocabulary
_CANDIDATES = 8


def show_header(chat: Chat, argument: str) -> None:
    """Print what `llmrun show` prints of the model."""
    from llmrun.cli.show import facts_here
    from llmrun.ui.views.model_facts import show_model

    model = loaded_locally(chat.conversation.model, "/show")
    show_model(chat.output, facts_here(model.path, model.spec), stderr=True)
    chat.tell_notes()


def switch_tools(chat: Chat, argument: str) -> None:
    """List the tools, or switch some on or off."""
    tools, words = chat.tools, argument.split()
    if words and (words[0] not in ("on", "off") or len(words) != 2):
        raise UsageError(f"invalid /tools {argument}", hint="/tools on files, or /tools off read_file")
    if words:
        tools.switch(words[1], chat.models, is_on=words[0] == "on")
        tools.offer_in(chat.conversation)
    show_tools(chat.output, tools.offered, tools.offers, tools.switched_off)
    if not tools.offered:
        chat.output.note("There are no tools: /tools on files, web, python, all or FILE.py adds some.")


def show_window(chat: Chat, argument: str) -> None:
    """Print the content of the context window."""
    messages = chat.conversation.messages()
    if not messages:
        chat.output.note("The context window is empty.")
        return
    model = chat.conversation.model
    asked = [entry.part for entry in chat.conversation.chat.entries if isinstance(entry.part, Question)]
    typed = {question.content: _with_sources(question) for question in asked if question.typed}
    count = chat.conversation.count()
    show_context(chat.output, messages, count, model.n_ctx, about=bool(model.used.server), typed=typed)


def _with_sources(question: Question) -> str:
    """Return what the user typed, after what was sent with it."""
    sources = counted(len(question.passages), "passage") if question.passages else "files"
    return f"[{sources}] {question.typed}"


def sources(chat: Chat, argument: str) -> None:
    """Print the passages that were sent with the last question, and the files of --docs that are left out."""
    last = chat.conversation.chat.last_question
    passages = last.part.passages if last is not None and isinstance(last.part, Question) else ()
    if last is None:
        chat.output.note("There is no question yet.")
    elif not passages:
        why = "" if chat.index is not None else ": llmrun chat --docs FOLDER searches your documents"
        chat.output.note(f"No passage was sent with the last question{why}")
    show_passages(chat.output, passages)
    if chat.index is not None:
        show_left_out(chat.output, chat.index.state)


def stats(chat: Chat, argument: str) -> None:
    """Print the statistics of the last answer."""
    answer = chat.conversation.chat.last_answer
    if answer is None:
        chat.output.note("There is no answer yet.")
    elif not answer.stats.completion_tokens:
        chat.output.note("The last answer has no statistics: it was interrupted.")
    else:
        chat.output.note(summary(Finished(0, answer.finish, answer.stats)))


def why(chat: Chat, argument: str) -> None:
    """Print how tokens of the last answer were chosen."""
    count = argument or "1"
    if not count.isdecimal() or not 1 <= int(count) <= REMEMBERED:
        raise UsageError(f"invalid /why {argument}", why=f"must be a number of tokens, 1 to {REMEMBERED}")
    model = _with_last_answer(chat, "/why")
    choices = model.explain(int(count) if argument else REMEMBERED, _CANDIDATES).choices
    for choice in choices if argument else (least_certain(choices),):
        show_choice(chat.output, choice)


def explain(chat: Chat, argument: str) -> None:
    """Print how the model made the last answer."""
    model = _with_last_answer(chat, "/explain")
    EXPLAIN_IN_CHAT.load()(chat.output, model)


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


def save(chat: Chat, argument: str) -> None:
    """Rename this chat."""
    name = unquoted(argument)
    if not name:
        raise UsageError("/save needs a name", hint="/save trip-to-rome; every turn is saved anyway")
    saved = chat.conversation.chat
    saved.rename(name)
    resumed = f"llmrun chat --session {shlex.quote(saved.name)}" if chat.is_saved else "it is not saved"
    chat.output.note(f"This chat is now called {name}: {resumed}")


def load(chat: Chat, argument: str) -> None:
    """Open another saved chat."""
    name = unquoted(argument)
    if not name:
        raise UsageError("/load needs a name", hint="/sessions lists them")
    opened = chat.store.open(name)
    if opened.open_elsewhere:
        raise UsageError(f"{opened.name} is open in another llmrun", hint="leave it there first")
    chat.conversation.save_state()
    chat.conversation.chat.release()
    chat.conversation.chat = opened
    chat.greet()


def list_sessions(chat: Chat, argument: str) -> None:
    """Print the saved chats."""
    show_list(chat.output, chat.store.all()[:_SHOWN_CHATS], stderr=True)


def export_chat(chat: Chat, argument: str) -> None:
    """Write this chat to a file."""
    name = unquoted(argument)
    form = format_for(name)
    if form is None:
        raise UsageError("/export needs a file name with .md, .json or .jsonl", hint="/export chat.md")
    if chat.conversation.chat.id is None:
        raise UsageError("there is nothing to export yet", hint="ask something first")
    path = user_path(name)
    check_output_file(chat.output, path, yes=False, hint="/export with another name")
    write_whole(path, export(chat.conversation.chat.tree(), form))
    chat.output.note(f"Wrote {path}.")


def copy_answer(chat: Chat, argument: str) -> None:
    """Copy the last answer to the clipboard."""
    answer = chat.conversation.chat.last_answer
    if answer is None:
        chat.output.note("There is no answer yet.")
    elif chat.output.to_clipboard(answer.content):
        chat.output.note("Copied the last answer, if the terminal lets programs write to the clipboard.")
    else:
        chat.output.note("The answer is too long for the terminal's clipboard; /export writes a file.")


class SlashCommand(NamedTuple):
    """A command's help and its function."""

    meaning: str
    obey: Callable[[Chat, str], None]
    is_usual: bool = False  # shown by /help, and not only by /help all


def show_help(chat: Chat, argument: str) -> None:
    """Print the usual commands and keys, or with "all" every one."""
    if argument not in ("", "all"):
        raise UsageError(f"invalid /help {argument}", why="must be all, or nothing", hint="/help all")
    meanings = {name: command.meaning for name, command in SLASH_COMMANDS.items() if argument or command.is_usual}
    keys = {key: meaning for key, meaning in KEYS.items() if argument or key in USUAL_KEYS}
    show_facts(chat.output, [*meanings.items(), *keys.items()], stderr=True)


def leave(chat: Chat, argument: str) -> None:
    """Make this message the last."""
    chat.leaves = True


SLASH_COMMANDS: dict[str, SlashCommand] = {
    "/help [all]": SlashCommand("show the usual commands, or all; also /?", show_help, is_usual=True),
    "/retry [COUNT]": SlashCommand(
        "answer the last question again, or several times at once, and keep one answer", retry, is_usual=True
    ),
    "/continue": SlashCommand("continue the last answer where it ended", resume),
    "/beams [COUNT]": SlashCommand("search for the likeliest answer to the last question", search_again),
    "/edit [TEXT]": SlashCommand(
        "edit the last question and send it again; with TEXT, ask that instead", edit, is_usual=True
    ),
    "/undo": SlashCommand("remove the last question and its answer", undo, is_usual=True),
    "/branch [new] [NAME]": SlashCommand(
        "switch to a branch, or start one here with new NAME; without a name, show how they differ", branch
    ),
    "/file PATTERN...": SlashCommand(
        "attach files to the next message; --drop NAME detaches one", attach_files, is_usual=True
    ),
    "/image FILE...": SlashCommand("attach images to the next message; --drop NAME detaches one", attach_images),
    "/audio FILE...": SlashCommand("attach audio to the next message; --drop NAME detaches it", attach_audio),
    "/files": SlashCommand("list the attached files, with their tokens", list_attached),
    "/sources": SlashCommand("show the passages sent with the last question, and files of --docs left out", sources),
    "/set [NAME VALUE]": SlashCommand(
        "set a sampling parameter, such as /set temp 0.5; without a name, show the usual ones",
        set_value,
        is_usual=True,
    ),
    "/think MODE": SlashCommand("reasoning: on, off, hide, fold, low, medium, high, or a number of tokens", think),
    "/speculation [MODE]": SlashCommand("drafted tokens: on colours them; off, auto, or a number a step", speculation),
    "/system [TEXT]": SlashCommand("set the system prompt; without a text, show it", set_system, is_usual=True),
    "/remember [TEXT]": SlashCommand("add a note that all chats get; without a text, show them", add_note),
    "/model [NAME]": SlashCommand(
        "switch to another model; without a name, show the current one", change_model, is_usual=True
    ),
    "/show": SlashCommand("show the model, as `llmrun show` does", show_header),
    "/tools [on|off NAME]": SlashCommand(
        "list the tools that the model may call, or switch one or a set of them: files, web, python, all", switch_tools
    ),
    "/context": SlashCommand("show the content of the context window", show_window, is_usual=True),
    "/stats": SlashCommand("show the statistics of the last answer", stats),
    "/why [COUNT]": SlashCommand(
        "show how the least certain of the last tokens was chosen, or each of the last COUNT",
        why,
        is_usual=True,
    ),
    "/explain": SlashCommand("show how the model made the last answer, from tokens to choices", explain),
    "/save NAME": SlashCommand("rename this chat", save),
    "/load NAME": SlashCommand("resume another saved chat", load, is_usual=True),
    "/sessions": SlashCommand("list the saved chats", list_sessions, is_usual=True),
    "/export FILE": SlashCommand("write this chat to a .md, .json or .jsonl file", export_chat),
    "/copy": SlashCommand("copy the last answer to the clipboard", copy_answer),
    "/multiline": SlashCommand("make Enter a newline and Alt-Enter send, or switch back", multiline),
    "/clear": SlashCommand("start the conversation anew, with the same system prompt", clear, is_usual=True),
    "/bye": SlashCommand("leave, as Ctrl-D does; also exit, quit", leave, is_usual=True),
}
_OTHER_NAMES = {"/?": "/help", "/exit": "/bye", "/quit": "/bye", "/q": "/bye", "/history": "/sessions"}
_OTHER_NAMES |= dict.fromkeys(LEAVING_WORDS, "/bye")
BY_NAME = {name.split()[0]: command.obey for name, command in SLASH_COMMANDS.items()}
BY_NAME |= {other: BY_NAME[name] for other, name in _OTHER_NAMES.items()}


def completions(chat: Chat) -> dict[str, Completion | None]:
    """Return the completion of each command's arguments."""
    found: dict[str, Completion | None] = {name: None for name in BY_NAME if name not in LEAVING_WORDS}
    found["/model"] = lambda words: complete_model(words[-1]) if chat.loading.server is None else []
    found["/load"] = lambda words: chat.store.names()
    found["/help"] = lambda words: ["all"]
    found["/set"] = lambda words: [Candidate(row.flag.lstrip("-"), _hint(row)) for row in PARAMETERS.values()]
    found["/tools"] = lambda words: ["on", "off"] if len(words) == 1 else chat.tools.names_to_switch(words[0])
    found["/think"] = lambda words: ["on", "off", "hide", "fold", "low", "medium", "high"]
    found["/speculation"] = lambda words: ["on", "off", "auto"]
    found["/branch"] = lambda words: [branch.name for branch in chat.conversation.chat.branches() if branch.name]
    found["/export"] = file_names
    for command in ("/file", "/image", "/audio"):
        found[command] = lambda words: _files(words, chat.attached.names)
    return found


def _files(words: Sequence[str], attached: Sequence[str]) -> Iterable[str]:
    """Return the completions of a word after /file: files, or after --drop the attached ones."""
    return attached if words[0] == DROP else file_names(words)


def _hint(row: Parameter) -> str:
    """Return the bounds of a sampling parameter, and its meaning."""
    return f"{row.bounds[0]} to {row.bounds[1]}. {row.help}" if row.bounds else row.help
