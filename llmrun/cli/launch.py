"""`llmrun launch`: a coding agent with a local model, in one command."""

from __future__ import annotations

import json as json_module
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from llmrun.cli.agent_window import (
    OTHER_MODELS,
    ModelWindow,
    describe_window,
    installed_windows,
    refusal,
    window_of,
)
from llmrun.cli.agents import AGENTS, Agent, AgentSettings, Endpoint
from llmrun.cli.background import start_server
from llmrun.cli.command import Command
from llmrun.cli.completion import complete_model, complete_words
from llmrun.cli.loading import find_model
from llmrun.cli.options import (
    AtOption,
    CtxOption,
    JsonOption,
    KeyFileOption,
    YesOption,
    engine_options,
    remote_server,
    with_options,
)
from llmrun.config import load_settings
from llmrun.errors import LlmrunError, ModelNotFoundError, NetworkError, UsageError, did_you_mean
from llmrun.models.location import locate
from llmrun.models.registry import load_catalogue
from llmrun.planning.preferences import LoadPreferences
from llmrun.protocol.settings import SETTINGS
from llmrun.remote.capabilities import Capabilities, facts_of
from llmrun.remote.server import choose_model, read_server
from llmrun.remote.transport import models
from llmrun.server.registry import running_servers
from llmrun.ui.terminal.output import Output
from llmrun.ui.terminal.tables import Column, right, show_table

if TYPE_CHECKING:
    from llmrun.remote.server import Server
    from llmrun.server.registry import RunningServer

_FOLDER, _KEY = "${folder}", "${LLMRUN_SERVER_KEY}"  # in a printed script
_END_SECONDS = 10.0
_KV_TYPES = ("kv_type_k", "kv_type_v")
_SERVED_PARALLEL = 8  # the default of `llmrun serve`


class LaunchCommand(Command):
    """Keeps the words after `--` for the agent: `launch claude -- -p hi` names no model."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        ctx.obj = args[end + 1 :]
        return super().parse_args(ctx, args[:end])


app = typer.Typer(
    help="Run a coding agent, such as Claude Code, with a local model.",
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Target(NamedTuple):
    """The server that an agent is to use."""

    server: Endpoint
    is_running: bool = True
    start: tuple[str, ...] = ()  # arguments of the command that starts it, if it does not run
    port: int = 0  # of a running server of this machine


@app.command(cls=LaunchCommand)
@with_options(engine=engine_options("kv_type_k", "kv_type_v"))
def launch(
    context: typer.Context,
    agent: Annotated[
        str | None,
        typer.Argument(
            metavar="AGENT",
            help=f"{', '.join(AGENTS)}. Default: list them, with the window that each needs.",
            autocompletion=complete_words(*AGENTS),
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Default: the model of a running server, else the largest installed one with a window of 64k here.",
            autocompletion=complete_model,
        ),
    ] = None,
    ctx: CtxOption = None,
    *,
    engine: dict[str, Any],
    at: AtOption = None,
    key_file: KeyFileOption = None,
    any_window: Annotated[
        bool, typer.Option("--any-window", help="Start the agent even if the context window is too small for it.")
    ] = False,
    show: Annotated[bool, typer.Option("--print", help="Print the settings and start nothing.")] = False,
    yes: YesOption = False,
    json: JsonOption = False,
) -> None:
    """Run a coding agent, such as Claude Code, with a local model.

    llmrun launch claude [MODEL] [-- ARGS of the agent]

    Uses a running server that has the model, else starts one that ends with the agent. Changes no file of the agent.
    """
    output, preferences = Output(json=json), LoadPreferences(ctx, **engine)
    remote = remote_server(at, key_file)
    if agent is None:
        _list(output, preferences, remote)
        return
    found = _agent(agent)
    executable = shutil.which(found.executable)
    if executable is None and not show:
        raise UsageError(f"{found.title} is not installed", why=f"no {found.executable} in PATH", hint=found.install)
    if show:
        target = _expected(model, preferences, remote)
        _print(output, found, target, context.obj)
        refused = None if any_window else _refused(agent, target, preferences)
        if refused is not None:
            output.note(f"llmrun launch refuses this window: {refused.hint}")
        return
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(prefix="llmrun-launch-"))
        target = _target(output, model, preferences, remote, yes=yes)
        _check(output, agent, target, preferences, any_window=any_window)
        server = stack.enter_context(_serving(output, target, Path(folder)))
        settings = _write(found, server, folder)
        assert executable is not None
        status = _run([executable, *settings.arguments, *context.obj], settings.environment)
    raise typer.Exit(status)


def _agent(name: str) -> Agent:
    """Return an agent by its name, or raise UsageError."""
    if name not in AGENTS:
        hint = did_you_mean(name, [*AGENTS], "llmrun launch lists them")
        raise UsageError(f"there is no agent {name!r}", hint=hint)
    return AGENTS[name]


def _list(output: Output, preferences: LoadPreferences, remote: Server | None) -> None:
    """List the agents, those for small windows first, and which of them fit the model that a start would use."""
    try:
        server = _expected(None, preferences, remote).server
    except LlmrunError:  # no model, or a server that does not answer
        server = None
    n_ctx = server.n_ctx if server else 0
    names = sorted(
        AGENTS, key=lambda name: (AGENTS[name].needs.smallest_window or math.inf, AGENTS[name].needs.first_prompt)
    )
    paths = {name: shutil.which(AGENTS[name].executable) for name in names}
    if output.json:
        output.result_json(
            [
                {"name": name, "path": paths[name], "install": agent.install, **_needs(agent, n_ctx)}
                for name, agent in ((name, AGENTS[name]) for name in names)
            ]
        )
        return
    fits = {True: "yes", False: "no", None: ""}
    rows = [
        (
            name,
            *(f"{figure:,}" if figure else "" for figure in (agent.needs.smallest_window, agent.needs.first_prompt)),
            fits[agent.can_live_in(n_ctx)],
            "(installed)" if paths[name] else agent.install,
        )
        for name, agent in ((name, AGENTS[name]) for name in names)
    ]
    columns = [Column("AGENT", style="cyan"), *right("WINDOW", "FIRST PROMPT"), Column("FITS"), Column("INSTALL WITH")]
    show_table(output, columns, rows)
    output.note("WINDOW: context window in tokens that long sessions need.")
    if server:
        output.note(f"FITS: {server.model} has a context window of {n_ctx:,} tokens here.")
        if not any(agent.can_live_in(n_ctx) for agent in AGENTS.values()):
            output.note(f"{OTHER_MODELS}.")
    output.note("llmrun launch AGENT [MODEL] starts one.")


def _needs(agent: Agent, n_ctx: int) -> dict[str, Any]:
    """Return what JSON says of an agent and a window; null is unknown."""
    return {
        "n_ctx": n_ctx or None,
        "first_prompt": agent.needs.first_prompt or None,
        "smallest_window": agent.needs.smallest_window or None,
        "measured_with": agent.needs.version or None,
        "fits": agent.can_live_in(n_ctx),
    }


# ---- the server ----


def _expected(model: str | None, preferences: LoadPreferences, remote: Server | None) -> Target:
    """Return the server that a start would use, as far as that is known without one."""
    if remote is not None:
        try:
            return Target(_endpoint(remote, model))
        except NetworkError:
            if model is None:
                raise
            facts = Capabilities(preferences.n_ctx or 0, frozenset())
            return Target(_address_only(remote, model, facts), is_running=False)
    return _running(model, preferences) or _planned(_window(model, preferences), preferences)


def _target(
    output: Output, model: str | None, preferences: LoadPreferences, remote: Server | None, *, yes: bool
) -> Target:
    """Return the server to use: a remote one, one that runs, or one to start, whose model is downloaded if necessary.

    Raises:
        LlmrunError: there is no such model, or the server can't be asked.
    """
    if remote is not None:
        return Target(_endpoint(remote, model))
    running = _running(model, preferences)
    if running is not None:
        output.note(f"Using the server at {running.server.address}, which has {running.server.model} in memory.")
        return running
    if model is not None:
        find_model(output, model, yes=yes)
    window = _window(model, preferences)
    what, chosen = ("a model", f" Using {window.model}.") if model is None else (model, "")
    size = f" with a window of {preferences.n_ctx:,} tokens" if preferences.n_ctx else ""
    output.note(f"No running server has {what} in memory{size}.{chosen}")
    return _planned(window, preferences)


def _window(model: str | None, preferences: LoadPreferences) -> ModelWindow:
    """Return the window of a model, or of the installed one that suits an agent best.

    Raises:
        ModelNotFoundError: no installed model generates text and fits.
    """
    if model is not None:
        return window_of(model, preferences)
    windows = installed_windows(preferences)
    if not windows:
        raise ModelNotFoundError("no installed model fits this machine", hint="llmrun list --all; llmrun pull MODEL")
    return windows[-1]


def _planned(window: ModelWindow, preferences: LoadPreferences) -> Target:
    """Return a server that is to be started."""
    given = {
        "--ctx": window.n_ctx,
        "--parallel": window.parallel if window.parallel != _SERVED_PARALLEL else 0,
        **{SETTINGS[name].short or SETTINGS[name].option: getattr(preferences, name) for name in _KV_TYPES},
    }
    options = [word for flag, value in given.items() if value for word in (flag, str(value))]
    server = Endpoint("http://127.0.0.1:8080", "", window.model, window.n_ctx)
    return Target(server, is_running=False, start=("serve", window.model, *options))


@contextmanager
def _serving(output: Output, target: Target, folder: Path) -> Iterator[Endpoint]:
    """Start the server if it does not run, until the block ends.

    Raises:
        LlmrunError: it can't be started or asked.
    """
    if target.is_running:
        yield target.server
        return
    with _own_server(output, target, folder) as started:
        yield _endpoint(_local(started.address), started.models[0])  # its name, where the user gave a path


def _running(model: str | None, preferences: LoadPreferences) -> Target | None:
    """Return a server of this machine with the model in memory and the preferred window; of several the first."""
    for server in running_servers(load_settings().state_dir):
        name = _name_at(server, model)
        if name is None or server.is_ending:
            continue
        found, n_ctx = _endpoint(_local(server.address), name), preferences.n_ctx
        if n_ctx is None or found.n_ctx >= n_ctx:
            return Target(found._replace(n_ctx=n_ctx or found.n_ctx), port=server.port)
    return None


def _name_at(server: RunningServer, model: str | None) -> str | None:
    """Return a server's name of a model that it has in memory, of any without a model; None if it has not.

    The names of one file differ: a path, the name of its repository, an alias.
    """
    if model is None or model in server.models:
        return model or next(iter(server.models), None)
    with suppress(LlmrunError):
        path = locate(model, load_settings()).path
        if path is not None:
            file = str(path.absolute())
            return next((name for name, each in zip(server.models, server.files, strict=False) if each == file), None)
    return None


def _local(address: str) -> Server:
    return read_server(address, os.environ)


def _endpoint(server: Server, model: str | None) -> Endpoint:
    """Ask a server for the model's window.

    Raises:
        LlmrunError: it can't be asked, or has no such model.
    """
    chosen = choose_model(server, models(server), model)
    return _address_only(server, chosen.name, facts_of(server, chosen))


def _address_only(server: Server, model: str, facts: Capabilities) -> Endpoint:
    return Endpoint(
        server.url.removesuffix("/v1"), server.key, model, facts.n_ctx, "image" in facts.modalities, facts.thinks
    )


@contextmanager
def _own_server(output: Output, target: Target, folder: Path) -> Iterator[RunningServer]:
    """Start `llmrun serve`; yield it with the model loaded, and end it after the block.

    Raises:
        EngineCrashedError: it ended before it answered; the end of its log is the reason.
    """
    arguments = [*target.start, "--port", "0", "--keep", "forever", "--parent", str(os.getpid())]
    output.note(f"Loading {target.server.model} ...")
    process, server = start_server(arguments, folder / "serve.log", lambda server: bool(server.models))
    try:
        yield server
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _check(output: Output, name: str, target: Target, preferences: LoadPreferences, *, any_window: bool) -> None:
    """Say what the window is, warn about a model that is weak as an agent, and refuse a window that is too small.

    Raises:
        UsageError: the agent can't live in the window.
    """
    server = target.server
    catalogue, short = load_catalogue(), server.model.partition(":")[0]
    entry = catalogue.entries.get(short) or catalogue.of_repository(short)
    if entry and not entry.agents:
        output.note(f"warning: {server.model} is weak as a coding agent; llmrun list --all lists others")
    refused = None if any_window else _refused(name, target, preferences)
    if refused is not None:
        raise refused
    output.note(describe_window(AGENTS[name], server.n_ctx))


def _refused(name: str, target: Target, preferences: LoadPreferences) -> UsageError | None:
    """Return the error for an agent that can't live in the window; None if it can, or if that is unknown."""
    agent, server = AGENTS[name], target.server
    if agent.can_live_in(server.n_ctx) is not False:
        return None
    way, at = "", "" if target.port or not target.is_running else f" --at {server.address}"
    if target.port:
        way = f"llmrun stop --port {target.port}, then launch again for a server with a larger window,"
    elif target.is_running:
        way = f"start that server with a context window of {agent.needs.smallest_window:,} or more,"
    return refusal(name, ModelWindow(server.model, server.n_ctx, 0), preferences, way=way, at=at)


# ---- the agent ----


def _write(agent: Agent, server: Endpoint, folder: str) -> AgentSettings:
    """Write the settings' files to the temporary folder."""
    settings = agent.settings(server, folder, _described(agent))
    for name, text in settings.files.items():
        Path(folder, name).write_text(text, encoding="utf-8")
    return settings


def _described(agent: Agent) -> str:
    """Return what an agent prints of models that it knows; "" if it can't, or is not installed."""
    executable = shutil.which(agent.executable) if agent.describe else None
    if executable is None:
        return ""
    try:
        found = subprocess.run(
            [executable, *agent.describe],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_END_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.decode("utf-8", "replace")


def _run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the agent in this terminal; return its exit status."""
    process = subprocess.Popen(command, env={**os.environ, **environment})
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the agent's
    try:
        status = process.wait()
    finally:
        signal.signal(signal.SIGINT, handler)
        if process.poll() is None:
            process.terminate()
            process.wait()
    return status if status >= 0 else 128 - status


def _print(output: Output, agent: Agent, target: Target, arguments: Sequence[str]) -> None:
    """Print a shell script that does the same beside a server that runs; it makes a folder, and asks for the key."""
    server = target.server
    hidden = server._replace(key=_KEY) if server.key else server
    settings = agent.settings(hidden, _FOLDER, _described(agent))
    command = [agent.executable, *settings.arguments, *arguments]
    if output.json:
        output.result_json(
            {
                "environment": settings.environment,
                "command": command,
                "files": settings.files,
                "server": server.address,
                "model": server.model,
                "is_running": target.is_running,
                "start": ["llmrun", *target.start] if target.start else None,
                **_needs(agent, server.n_ctx),
            }
        )
        return
    lines = [f"# {agent.title} with {server.model} at {server.address}"]
    lines += textwrap.wrap(describe_window(agent, server.n_ctx), 78, initial_indent="# ", subsequent_indent="# ")
    if target.start:
        start = shlex.join(["llmrun", *target.start])
        lines += ["# No running server has this model with this window. To start one:", f"#   {start}"]
    elif not target.is_running:
        lines.append("# This server does not answer now.")
    if server.key:
        lines.append(f': "${{{_KEY[2:-1]}:?must be the key of {server.address}}}"')
    if settings.files:
        lines.append("folder=$(mktemp -d)")
    for name, text in settings.files.items():
        lines.append(f'cat > "$folder"/{name} <<END\n{_here(_pretty(text).rstrip())}\nEND')
    lines += [f"export {name}={_quoted(value)}" for name, value in settings.environment.items()]
    output.text("\n".join([*lines, " ".join(map(_quoted, command)), ""]))


def _pretty(text: str) -> str:
    """Return JSON with indentation, and any other text as it is."""
    try:
        return json_module.dumps(json_module.loads(text), indent=2)
    except ValueError:
        return text


def _here(text: str) -> str:
    """Return a text for a here-document in which the folder and the key are variables, and nothing else is."""
    parts = re.split(f"({re.escape(_FOLDER)}|{re.escape(_KEY)})", text)
    return "".join(part if part in (_FOLDER, _KEY) else re.sub(r"([\\$`])", r"\\\1", part) for part in parts)


def _quoted(word: str) -> str:
    """Return a word for a shell in which the folder and the key are variables."""
    if _FOLDER not in word and _KEY not in word:
        return shlex.quote(word)
    return '"' + _here(word).replace('"', r"\"") + '"'
