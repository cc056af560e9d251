"""`llmrun chat`: a conversation on the terminal, or line by line from a pipe."""

from __future__ import annotations

import inspect
import shlex
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmrun.chat.attachments import Attachments
from llmrun.chat.conversation import ChatSettings, Conversation
from llmrun.chat.store.chat import SavedChat
from llmrun.chat.store.store import Sessions, folder_in
from llmrun.chat.truncation import POLICIES, DoesNotFit, Policy
from llmrun.chat.turn import Overflow
from llmrun.cli.answering import on_ctrl_c
from llmrun.cli.completion import complete_model
from llmrun.cli.defaults import no_model
from llmrun.cli.docs import DocsOptions, documents, open_documents
from llmrun.cli.loading import open_chat_model
from llmrun.cli.options import (
    AnswerOptions,
    AtOption,
    KeyFileOption,
    LoadingOptions,
    PresetOption,
    StatsOption,
    answer_options,
    loading,
    remote_server,
    with_options,
)
from llmrun.cli.options import loading as load_options
from llmrun.cli.sampling import SAMPLING_OPTIONS
from llmrun.cli.sessions import complete_session
from llmrun.cli.slash import BY_NAME, REMEMBERED, completions
from llmrun.cli.talk import Chat
from llmrun.cli.tools import ToolOptions, Tools, toolbox, tooling
from llmrun.config import load_settings
from llmrun.errors import ResourceError, UsageError
from llmrun.model.loading import A_CHAT
from llmrun.models.fingerprint import ModelFingerprint
from llmrun.protocol.adapters import Adapter
from llmrun.ui.answer.view import DisplayOptions
from llmrun.ui.prompt.input import ChatInput
from llmrun.ui.terminal.output import Output

if TYPE_CHECKING:
    from llmrun.remote.server import Server


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """Which saved chat goes on, and what is dropped from the context window when it is full."""

    last: bool = False
    session: str | None = None
    private: bool = False
    overflow: Overflow | None = None
    keep: int = 0


def saving(
    last: Annotated[
        bool, typer.Option("--continue", help="Continue the last chat that is free.", rich_help_panel="Chat")
    ] = False,
    session: Annotated[
        str | None,
        typer.Option(
            "--session",
            metavar="NAME",
            help="Continue this chat, or start it.",
            autocompletion=complete_session,
            rich_help_panel="Chat",
        ),
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Do not save the chat.", rich_help_panel="Chat")] = False,
    overflow: Annotated[
        Overflow | None,
        typer.Option(
            help="When the context window is full: ask, stop, drop the oldest turns (roll), drop turns in the middle, "
            "or summarize the oldest. Default: ask on a terminal, else stop.",
            rich_help_panel="Chat",
        ),
    ] = None,
    keep: Annotated[
        int, typer.Option(metavar="TURNS", min=0, help="Never drop the first N turns.", rich_help_panel="Chat")
    ] = 0,
) -> SessionOptions:
    """The options that only a chat has."""
    return SessionOptions(last, session, private, overflow, keep)


@with_options(
    answer=answer_options, docs=documents, tooling=tooling, saving=saving, loading=loading, flags=SAMPLING_OPTIONS
)
def chat(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="[MODEL]",
            help="A name, owner/repo[:quant], URL or path. Default: the model of the continued chat, the only model "
            "of the --at server, or see llmrun help settings.",
            autocompletion=complete_model,
        ),
    ] = "",
    web: Annotated[
        bool,
        typer.Option("--web", help="Chat on a page in the browser, until Ctrl-C here.", rich_help_panel="Chat"),
    ] = False,
    phone: Annotated[
        bool,
        typer.Option(
            "--phone",
            help="With --web: print a code that opens the page on a phone in this network.",
            rich_help_panel="Chat",
        ),
    ] = False,
    preset: PresetOption = None,
    stats: StatsOption = None,
    at: AtOption = None,
    key_file: KeyFileOption = None,
    *,
    answer: AnswerOptions,
    docs: DocsOptions,
    tooling: ToolOptions,
    saving: SessionOptions,
    loading: LoadingOptions,
    flags: Mapping[str, Any],
) -> None:
    """Chat with a model. Ctrl-C stops an answer and keeps it; Ctrl-D exits."""
    if web:
        _refuse_with_web(context)
        _show_page(model, preset, saving, loading, docs, tooling, phone=phone)
        return
    if phone:
        raise UsageError("--phone needs --web", hint="llmrun chat --web --phone")
    loading = replace(loading, server=remote_server(at, key_file))
    talk_with(model, stats, answer, docs, tooling, saving, loading, flags)


def _refuse_with_web(context: typer.Context) -> None:
    """Raise UsageError for an option that only a chat on the terminal has."""
    shared = {"model", "web", "phone", "preset", "last", "session", *inspect.signature(load_options).parameters}
    shared |= {*inspect.signature(tooling).parameters, *inspect.signature(documents).parameters}
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE" and parameter.name not in shared:
            raise UsageError(
                f"--web and {parameter.opts[0]} can't be used together",
                why="the page has settings of its own",
                hint=f"leave out {parameter.opts[0]}, and set it on the page",
            )


def _show_page(
    model: str,
    preset: str | None,
    saving: SessionOptions,
    loading: LoadingOptions,
    docs: DocsOptions,
    options: ToolOptions,
    *,
    phone: bool,
) -> None:
    """Serve the page of a new chat, or of the one that goes on, until Ctrl-C."""
    from llmrun.cli.serve import serve_page

    output, page = Output(), f"/#preset={preset}" if preset else "/"
    if saving.last or saving.session is not None:
        with _store(output, saving) as store:
            saved = _reopened(store, saving, output)
            page, model = f"/#chat={saved.id}", model or _last_model(saved, None)
            saved.release()
    if not model:
        raise no_model("chat --web")
    serve_page(model, loading, docs, options, page, phone=phone)


def talk_with(
    model: str,
    stats: bool | None,
    answer: AnswerOptions,
    docs: DocsOptions,
    tooling: ToolOptions,
    saving: SessionOptions,
    loading: LoadingOptions,
    flags: Mapping[str, Any],
) -> None:
    """Talk to a model until the user leaves; the arguments are those of chat(), read and checked."""
    output = Output()
    settings = load_settings()
    with (
        ChatInput(output, settings.state_dir / "chat_history") as typed,
        toolbox(tooling) as box,
        _store(output, saving) as store,
        open_documents(output, docs, loading) as index,
    ):
        saved = _saved_chat(output, store, saving, answer.system or "")
        name = model or _last_model(saved, loading.server)
        if not loading.adapters:
            loading = replace(loading, adapters=_last_adapters(output, saved, name))
        with open_chat_model(
            output,
            name,
            loading,
            answer.request,
            flags,
            modalities=answer.modalities,
            warm_up=typed.interactive,
            keeps_states=not saving.private,
            expected=A_CHAT,
        ) as loaded:
            tools = Tools(output, box, tooling)
            chat_settings = ChatSettings(
                flags=flags,
                request=replace(answer.request, remember=REMEMBERED if typed.interactive else 0, tools=tools.offered),
                overflow=saving.overflow or ("ask" if output.can_ask else "stop"),
                keep=saving.keep,
            )
            conversation = Conversation(
                loaded,
                saved,
                chat_settings,
                on_note=output.note,
                on_overflow=lambda misfit: _ask_policy(output, misfit),
            )
            markdown = not (answer.plain or answer.request.grammar)
            shown_as = DisplayOptions(stats, markdown, think=answer.thoughts, end_line=True)
            attached = answer.attached or Attachments()
            talk = Chat(output, typed, store, conversation, loading, shown_as, attached, tools, BY_NAME, index)
            typed.commands = completions(talk)
            talk.greet()
            talk.run()


@contextmanager
def _store(output: Output, saving: SessionOptions) -> Iterator[Sessions]:
    """Open the store of saved chats: in memory for a private chat, or for a new one if the disk refuses.

    Raises:
        ResourceError: the disk refuses, and the chat may be saved there.
    """
    try:
        folder = None if saving.private else folder_in(load_settings().state_dir)
        store = Sessions(folder, on_damage=output.note)
    except ResourceError as error:
        if saving.last or saving.session is not None:
            raise
        output.note(f"This chat is not saved: {error}")
        store = Sessions(None)
    with store:
        if store.note:
            output.note(store.note)
        yield store


def _saved_chat(output: Output, store: Sessions, saving: SessionOptions, system: str) -> SavedChat:
    """Return the chat to resume, or a new one."""
    if saving.session is not None:
        if not store.has(saving.session):
            return store.new(saving.session, system=system)
    elif not saving.last:
        return store.new(system=system)
    saved = _reopened(store, saving, output)
    if saved.open_elsewhere:
        raise UsageError(f"{saved.name} is open in another llmrun", hint=_other_chat(store, saved))
    if system:
        saved.set_system(system)
    return saved


def _reopened(store: Sessions, saving: SessionOptions, output: Output) -> SavedChat:
    """Open the named chat, or the last one that is free; say which ones were passed over."""
    if saving.session is not None:
        return store.open(saving.session)
    free, passed = store.last_free()
    if passed:
        verb = "is" if len(passed) == 1 else "are"
        output.note(f"{', '.join(passed)} {verb} open in another llmrun: going on with {free.name}.")
        output.note("/sessions shows the other chats.")
    return store.open(str(free.id))


def _other_chat(store: Sessions, saved: SavedChat) -> str:
    """Return what to type instead of a chat that is open in another process."""
    free, _ = store.last_free()
    if free.id == saved.id:
        return "leave it there first"
    return f"leave it there first, or go on with another: llmrun chat --session {shlex.quote(free.name)}"


def _last_model(saved: SavedChat, server: Server | None) -> str:
    """Return the name or path of the model of the last answer; "" for the only model of another server.

    Raises:
        UsageError: there is no answer yet and no default model, or it is of a server that the user did not name again.
    """
    used = saved.last_answer.model if saved.last_answer is not None else ModelFingerprint("")
    if server is not None:
        return used.name if used.server == server.url else ""
    if used.server:
        what = f"{used.name} at {used.server} answered in this chat"
        hint = f"llmrun chat --session {shlex.quote(saved.name)} --at {used.server}, or name a model of this machine"
        raise UsageError(what, why="nothing is sent to a server that is not named", hint=hint)
    if not (used.name or used.path):
        raise no_model("chat")
    return used.name or used.path


def _last_adapters(output: Output, saved: SavedChat, model: str) -> tuple[Adapter, ...]:
    """Return the adapters of the last answer, if the chat goes on with its model; report missing ones."""
    answer = saved.last_answer
    adapters = [adapter for adapter in answer.adapters if not adapter.is_stored] if answer is not None else []
    if answer is None or not adapters:
        return ()
    if model not in (answer.model.name, answer.model.path):
        output.note(f"Going on without the adapters of {answer.model.name}.")
        return ()
    found = tuple(adapter for adapter in adapters if Path(adapter.path).is_file())
    for adapter in adapters:
        if adapter in found:
            output.note(f"Going on with the adapter {adapter.name}, scale {adapter.scale:g}.")
        else:
            output.note(f"Going on without the adapter {adapter.name}: {adapter.path} is missing.")
    return found


def _ask_policy(output: Output, misfit: DoesNotFit) -> Policy:
    """Ask the user for a policy for a conversation that is too long."""
    output.note(f"The context window is full: {misfit.why}.")
    answers = {
        "r": "roll: the oldest turns",
        "m": "middle: turns in the middle",
        "s": "summarize: the oldest, which the model condenses first",
        "n": "none: the message is not sent",
    }
    try:
        with on_ctrl_c(signal.default_int_handler):  # there is no answer yet that it could stop
            chosen = output.choose("Which turns should be dropped?", answers)
    except KeyboardInterrupt:
        return "stop"
    return next((policy for policy in POLICIES if policy[0] == chosen), "stop")
