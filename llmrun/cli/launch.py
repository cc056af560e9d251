"""`llmrun launch`: a coding agent with a local model, in one command."""

from __future__ import annotations

import json as json_module
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

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
    remote_server,
)
from llmrun.config import load_settings
from llmrun.errors import LlmrunError, ModelNotFoundError, NetworkError, UsageError, did_you_mean
from llmrun.gguf.pooling import makes_embeddings
from llmrun.gguf.reader import read_header
from llmrun.models.registry import load_catalogue
from llmrun.models.store.store import all_models
from llmrun.planning.hardware import this_machine
from llmrun.planning.plan import make_plan
from llmrun.planning.preferences import LoadPreferences
from llmrun.remote.capabilities import Capabilities, facts_of
from llmrun.remote.server import choose_model, read_server
from llmrun.remote.transport import models
from llmrun.server.registry import running_servers
from llmrun.ui.terminal.output import Output
from llmrun.ui.terminal.tables import Column, show_table

if TYPE_CHECKING:
    from llmrun.remote.server import Server
    from llmrun.server.registry import RunningServer

COMFORTABLE_WINDOW = 65_536
"""Tokens: agents work below it, but summarize their session all the time."""
_FOLDER, _KEY = "${folder}", "${LLMRUN_SERVER_KEY}"  # in a printed script
_END_SECONDS = 10.0


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


@app.command(cls=LaunchCommand)
def launch(
    context: typer.Context,
    agent: Annotated[
        str | None,
        typer.Argument(
            metavar="AGENT",
            help=f"{', '.join(AGENTS)}. Default: list which are installed.",
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
    at: AtOption = None,
    key_file: KeyFileOption = None,
    show: Annotated[bool, typer.Option("--print", help="Print the settings and start nothing.")] = False,
    yes: YesOption = False,
    json: JsonOption = False,
) -> None:
    """Run a coding agent, such as Claude Code, with a local model.

    llmrun launch claude [MODEL] [-- ARGS of the agent]

    Uses a running server that has the model, else starts one that ends with the agent. Changes no file of the agent.
    """
    output = Output(json=json)
    if agent is None:
        _list(output)
        return
    found = AGENTS.get(agent)
    if found is None:
        raise UsageError(
            f"there is no agent {agent!r}", hint=did_you_mean(agent, [*AGENTS], "llmrun launch lists them")
        )
    executable = shutil.which(found.executable)
    if executable is None and not show:
        raise UsageError(f"{found.title} is not installed", why=f"no {found.executable} in PATH", hint=found.install)
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(prefix="llmrun-launch-"))
        if show:
            _print(output, found, _expected(model, ctx, at, key_file), context.obj)
            return
        server = stack.enter_context(_serving(output, model, ctx, at, key_file, Path(folder), yes=yes))
        _check_model(output, found, server)
        settings = _write(found, server, folder)
        assert executable is not None
        status = _run([executable, *settings.arguments, *context.obj], settings.environment)
    raise typer.Exit(status)


def _list(output: Output) -> None:
    paths = {name: shutil.which(agent.executable) for name, agent in AGENTS.items()}
    if output.json:
        output.result_json([{"name": name, "path": paths[name], "install": AGENTS[name].install} for name in AGENTS])
        return
    rows = [(name, "yes" if paths[name] else "no", "" if paths[name] else AGENTS[name].install) for name in AGENTS]
    show_table(output, [Column("AGENT", style="cyan"), Column("INSTALLED"), Column("INSTALL WITH", style="dim")], rows)
    output.note("llmrun launch AGENT [MODEL] starts one.")


# ---- the server ----


def _expected(model: str | None, ctx: int | None, at: str | None, key_file: Path | None) -> Endpoint:
    """The server that a start would use, as far as that is known without one."""

    remote = remote_server(at, key_file)
    if remote is not None:
        try:
            return _endpoint(remote, model)
        except NetworkError:
            if model is None:
                raise
            return _address_only(remote, model, Capabilities(ctx or 0, frozenset()))
    running = _running(model) if ctx is None else None
    if running is not None:
        return _of_running(running, model)
    name, n_ctx = _choose_model(model)
    return Endpoint("http://127.0.0.1:8080", "", name, ctx or n_ctx)


@contextmanager
def _serving(
    output: Output,
    model: str | None,
    ctx: int | None,
    at: str | None,
    key_file: Path | None,
    folder: Path,
    *,
    yes: bool,
) -> Iterator[Endpoint]:
    """A server with the model: a remote one, one that runs, or one of our own until the block ends.

    Raises:
        LlmrunError: there is no such model, or the server can't be started or asked.
    """
    remote = remote_server(at, key_file)
    if remote is not None:
        yield _endpoint(remote, model)
        return
    running = _running(model) if ctx is None else None
    if running is not None:
        output.note(f"Using the server at {running.address}.")
        yield _of_running(running, model)
        return
    if model is None:
        model, _ = _choose_model()
        output.note(f"Using {model}, the largest installed model that fits.")
    else:
        find_model(output, model, yes=yes)
    with _own_server(output, model, ctx, folder) as address:
        yield _endpoint(_local(address), model)


def _running(model: str | None) -> RunningServer | None:
    """A server of this machine with the model in memory; of several the first."""

    servers = [each for each in running_servers(load_settings().state_dir) if each.models and not each.is_ending]
    return next((server for server in servers if model is None or model in server.models), None)


def _of_running(server: RunningServer, model: str | None) -> Endpoint:
    return _endpoint(_local(server.address), model or server.models[0])


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
def _own_server(output: Output, model: str, ctx: int | None, folder: Path) -> Iterator[str]:
    """Start `llmrun serve` with the model loaded; yield its address, and end it after the block.

    Raises:
        EngineCrashedError: it ended before it answered; the end of its log is the reason.
    """

    window = [] if ctx is None else ["--ctx", str(ctx)]
    arguments = ["serve", model, "--port", "0", "--keep", "forever", *window, "--parent", str(os.getpid())]
    output.note(f"Loading {model} ...")
    process, server = start_server(arguments, folder / "serve.log", lambda server: bool(server.models))
    try:
        yield server.address
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _choose_model(named: str | None = None) -> tuple[str, int]:
    """Choose the largest installed model with a comfortable window here, else the one with the largest window.

    Args:
        named: the model that the user chose; may be one that is not on this disk.

    Returns:
        The model's name, and the context window in tokens that fits; 0 is unknown.

    Raises:
        ModelNotFoundError: no installed model generates text and fits.
    """

    hardware, choices = this_machine(), []
    for installed in all_models(load_settings()):
        if named not in (None, installed.name):
            continue
        try:
            header = read_header(installed.path)
            if not makes_embeddings(header):
                n_ctx = make_plan(header, hardware, LoadPreferences()).n_ctx
                choices.append((min(n_ctx, COMFORTABLE_WINDOW), installed.size, installed.name, n_ctx))
        except LlmrunError:
            continue  # damaged, or too large for this machine
    if named is not None:
        return named, choices[0][-1] if choices else 0
    if not choices:
        raise ModelNotFoundError("no installed model fits this machine", hint="llmrun list --all; llmrun pull MODEL")
    *_, name, n_ctx = max(choices)
    return name, n_ctx


def _check_model(output: Output, agent: Agent, server: Endpoint) -> None:
    """Warn about a model that is weak as an agent, and about a small window."""
    catalogue, name = load_catalogue(), server.model.partition(":")[0]
    entry = catalogue.entries.get(name) or catalogue.of_repository(name)
    if entry and not entry.agents:
        output.note(f"warning: {server.model} is weak as a coding agent; llmrun list --all lists others")
    if not server.n_ctx or server.n_ctx >= COMFORTABLE_WINDOW:
        return
    needs = f"; {agent.title} sends about {agent.first_prompt:,} before the first word" if agent.first_prompt else ""
    output.note(
        f"warning: the context window of {server.model} here is {server.n_ctx:,} tokens{needs}. "
        f"Agents want {COMFORTABLE_WINDOW:,} or more."
    )


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


def _print(output: Output, agent: Agent, server: Endpoint, arguments: Sequence[str]) -> None:
    """Print a shell script that does the same beside a server that runs; it makes a folder, and asks for the key."""
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
                "n_ctx": server.n_ctx or None,
            }
        )
        return
    window = f"{server.n_ctx:,} tokens" if server.n_ctx else "unknown"
    lines = [f"# {agent.title} with {server.model} at {server.address}; context window: {window}"]
    if server.key:
        lines.append(f': "${{{_KEY[2:-1]}:?must be the key of {server.address}}}"')
    if settings.files:
        lines.append("folder=$(mktemp -d)")
    for name, text in settings.files.items():
        pretty = json_module.dumps(json_module.loads(text), indent=2)
        lines.append(f'cat > "$folder"/{name} <<END\n{_here(pretty)}\nEND')
    lines += [f"export {name}={_quoted(value)}" for name, value in settings.environment.items()]
    output.text("\n".join([*lines, " ".join(map(_quoted, command)), ""]))


def _here(text: str) -> str:
    """Return a text for a here-document in which the folder and the key are variables, and nothing else is."""
    parts = re.split(f"({re.escape(_FOLDER)}|{re.escape(_KEY)})", text)
    return "".join(part if part in (_FOLDER, _KEY) else re.sub(r"([\\$`])", r"\\\1", part) for part in parts)


def _quoted(word: str) -> str:
    """Return a word for a shell in which the folder and the key are variables."""
    if _FOLDER not in word and _KEY not in word:
        return shlex.quote(word)
    return '"' + _here(word).replace('"', r"\"") + '"'
