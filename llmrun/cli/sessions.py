"""`llmrun sessions`: the saved chats. Nothing is deleted without confirmation."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from llmrun.chat.store.export import Format, export, format_for, iso_time, read_json
from llmrun.chat.store.store import Sessions, folder_in
from llmrun.cli.command import Command, CommandGroup
from llmrun.cli.options import JsonOption, OutputFileYesOption, RemovalYesOption, check_output_file
from llmrun.config import load_settings
from llmrun.errors import CancelledError, LlmrunError, UsageError
from llmrun.storage import write_whole
from llmrun.ui.terminal.format import ago, counted, short
from llmrun.ui.terminal.output import Output
from llmrun.ui.terminal.sanitize import clean
from llmrun.ui.terminal.tables import Column, show_table

if TYPE_CHECKING:
    from llmrun.chat.store.store import SessionFacts

_HARMLESS = re.compile(r"[A-Za-z0-9_.+-]+")  # a shell evaluates what it completes

app = typer.Typer(cls=CommandGroup, help="List, show, search and export saved chats.", add_completion=False)


def complete_session(incomplete: str) -> list[str]:
    """Complete names of saved chats."""
    try:
        with _sessions() as sessions:
            names = sessions.names()
    except LlmrunError:
        return []  # a key press is no place for an error
    return [name for name in names if name.startswith(incomplete) and _HARMLESS.fullmatch(name)]


NameArgument = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="A name from `llmrun sessions list`, or an id.", autocompletion=complete_session
    ),
]
LastArgument = Annotated[
    str,
    typer.Argument(
        metavar="[NAME]", help="Name or id of the chat. Default: the last one.", autocompletion=complete_session
    ),
]
NamesArgument = Annotated[
    list[str],
    typer.Argument(metavar="NAME...", help="Names from `llmrun sessions list`.", autocompletion=complete_session),
]
BranchOption = Annotated[str, typer.Option("--branch", "-b", help="Branch of the chat. Default: the current one.")]


@app.callback(invoke_without_command=True)
def start(context: typer.Context) -> None:
    """List, show, search and export saved chats. Without a command, list them."""
    if context.invoked_subcommand is None:
        list_sessions()


@app.command("list", cls=Command)
def list_sessions(
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only names, one per line.")] = False,
    json: JsonOption = False,
) -> None:
    """List the saved chats, most recent first."""
    output = Output(json=json)
    with _sessions(output) as sessions:
        found = sessions.all()
    if json:
        output.result_json([_plain(facts) for facts in found])
    elif quiet:
        for facts in found:
            output.text(clean(facts.name))
    elif found:
        show_list(output, found)
    else:
        output.note("No saved chats yet. `llmrun chat` begins one.")


@app.command("show", cls=Command)
def show_session(name: LastArgument = "", branch: BranchOption = "", json: JsonOption = False) -> None:
    """Print a saved chat; with --json, all of its data."""
    output = Output(json=json)
    with _sessions(output) as sessions:
        tree = sessions.tree(name)
    text = export(tree, "json" if json else "markdown", branch)
    if json or not output.stdout_is_terminal:
        _print(output, text)
        return
    for line in text.removesuffix("\n").split("\n"):
        output.sentence(line)


@app.command("export", cls=Command)
def export_session(
    name: LastArgument = "",
    form: Annotated[
        Format | None,
        typer.Option(
            "--format",
            "-f",
            metavar="FORMAT",
            help=f"{', '.join(get_args(Format))}. Default: by the file's suffix, else markdown. Only json can be "
            "imported again.",
        ),
    ] = None,
    to: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="File to write. Default: stdout.")
    ] = None,
    branch: BranchOption = "",
    yes: OutputFileYesOption = False,
) -> None:
    """Export a saved chat as Markdown, JSON, JSONL, or a line for OpenAI fine-tuning."""
    output = Output()
    wanted = form or (format_for(to.name) if to else None) or "markdown"
    with _sessions(output) as sessions:
        tree = sessions.tree(name)
    text = export(tree, wanted, branch)
    if to is None:
        _print(output, text)
        return
    again = shlex.join(["llmrun", "sessions", "export", "-y", tree.name, "-o", str(to)])
    check_output_file(output, to, yes=yes, hint=again)
    write_whole(to, text)
    output.note(f"{tree.name} is in {to}, as {wanted}.")


@app.command("import", cls=Command)
def import_session(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="File written by `llmrun sessions export --format json`.")
    ],
    name: Annotated[str, typer.Option("--name", help="New name of the chat. Default: its old name.")] = "",
    json: JsonOption = False,
) -> None:
    """Import a chat that was exported as JSON."""
    output = Output(json=json)
    try:
        tree = read_json(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else "it is not UTF-8 text"
        raise UsageError(f"{str(file)!r} can't be read", why=why.lower()) from None
    with _sessions(output) as sessions:
        facts = sessions.find(str(sessions.add(tree, name).id))
    if json:
        output.result_json(_plain(facts))
    else:
        output.note(f"Saved as {facts.name}. `llmrun chat MODEL --session {shlex.quote(facts.name)}` continues it.")


@app.command("rename", cls=Command)
def rename_session(name: NameArgument, new: Annotated[str, typer.Argument(metavar="NEW", help="New name.")]) -> None:
    """Rename a saved chat."""
    output = Output()
    with _sessions(output) as sessions:
        sessions.rename(name, new)
    output.note(f"Renamed {name} to {new.strip()}.")


@app.command("rm", cls=Command)
def remove_sessions(names: NamesArgument, yes: RemovalYesOption = False, json: JsonOption = False) -> None:
    """Delete saved chats with all their branches."""
    output = Output(json=json)
    with _sessions(output) as sessions:
        found = list({facts.id: facts for facts in map(sessions.find, names)}.values())
        for facts in found:
            output.note(f"{facts.name}: {counted(facts.turns, 'turn')}, {facts.first}")
        question = f"Delete {counted(len(found), 'chat')}?"
        _ask(output, question, yes=yes, command=f"llmrun sessions rm -y {shlex.join(names)}")
        for facts in found:
            sessions.delete(str(facts.id))
    if json:
        output.result_json([_plain(facts) for facts in found])
    else:
        output.note("Deleted.")


@app.command("search", cls=Command)
def search_sessions(
    words: Annotated[
        list[str],
        typer.Argument(metavar="WORDS", help="Words or beginnings of words; a message must have all of them."),
    ],
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000, help="Maximum number of messages to show.")] = 20,
    json: JsonOption = False,
) -> None:
    """Search the messages of all saved chats, best match first."""
    output = Output(json=json)
    with _sessions(output) as sessions:
        hits = sessions.search(" ".join(words), limit)
    if json:
        output.result_json([{**asdict(hit), "created": iso_time(hit.created)} for hit in hits])
    elif hits:
        now = time.time()
        columns = (
            Column("NAME", style="bold"),
            Column("TURN", right=True),
            Column("WHO"),
            Column("SAID"),
            Column("TEXT"),
        )
        who = {"user": "you", "assistant": "model"}
        rows = [(h.session, str(h.turn), who[h.role], ago(now - h.created), h.excerpt) for h in hits]
        show_table(output, columns, rows)
    else:
        output.note(f"No message contains {' '.join(words)!r} in a saved chat.")


@contextmanager
def _sessions(output: Output | None = None) -> Iterator[Sessions]:
    """Open the saved chats; print notes about damaged ones."""
    on_damage = output.note if output else lambda line: None
    with Sessions(folder_in(load_settings().state_dir), on_damage=on_damage) as sessions:
        if output and sessions.note:
            output.note(sessions.note)
        yield sessions


def show_list(output: Output, found: list[SessionFacts], *, stderr: bool = False) -> None:
    """Print a table of saved chats."""
    columns = (
        Column("NAME", style="bold"),
        Column("TURNS", right=True),
        Column("MODEL"),
        Column("USED"),
        Column("BEGINS WITH", style="dim", is_excerpt=True, is_dispensable=True),  # as most names do
    )
    now = time.time()
    rows = [(f.name, str(f.turns), f.model, ago(now - f.updated), short(f.first)) for f in found]
    show_table(output, columns, rows, stderr=stderr)


def _plain(facts: SessionFacts) -> dict[str, Any]:
    return {**asdict(facts), "created": iso_time(facts.created), "updated": iso_time(facts.updated)}


def _print(output: Output, text: str) -> None:
    """Print a whole text: unchanged in a pipe, without control characters on a terminal."""
    text = text.removesuffix("\n")
    output.text(clean(text, newlines=True) if output.stdout_is_terminal else text)


def _ask(output: Output, question: str, *, yes: bool, command: str) -> None:
    if yes:
        return
    if not output.can_ask:
        raise UsageError("this needs confirmation", why="there is no terminal to ask on", hint=command)
    if not output.confirm(question):
        raise CancelledError("nothing was done")
