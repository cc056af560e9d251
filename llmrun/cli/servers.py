"""`llmrun ps`, `llmrun stop` and `llmrun logs`: the servers on this machine."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from llmrun.cli.background import previous_log
from llmrun.cli.options import JsonOption
from llmrun.config import load_settings
from llmrun.errors import UsageError
from llmrun.server.registry import RunningServer, running_servers
from llmrun.ui.terminal.output import Output
from llmrun.ui.views.serve import show_drafts, show_requests, show_servers

_BACKGROUND = "llmrun serve MODEL --background"
_FOLLOW_SECONDS = 0.2


def list_servers(json: JsonOption = False) -> None:
    """List running servers and their models."""
    output = Output(json=json)
    servers = running_servers(load_settings().state_dir)
    if json:
        drafts = [[draft._asdict() for draft in server.drafts] for server in servers]
        output.result_json([{**server._asdict(), "drafts": own} for server, own in zip(servers, drafts, strict=True)])
    else:
        show_servers(output, servers, time.time())
        show_drafts(output, [drafts for server in servers for drafts in server.drafts])
        show_requests(output, [request for server in servers for request in server.requests])


def logs(
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print further lines until the server ends, or Ctrl-C.")
    ] = False,
    port: Annotated[int | None, typer.Option("--port", help="Port of the server, if several are running.")] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Lines to print.")] = 100,
) -> None:
    """Show the log of a server in the background.

    If none is running, that of the last one.
    """
    output, state_dir = Output(), load_settings().state_dir
    path = _log(output, running_servers(state_dir), state_dir, port)
    with path.open("rb") as file:
        before = previous_log(path)
        older = before.read_bytes().splitlines() if before.exists() else []
        _show_lines(output, deque(chain(older, file), lines))
        while follow:
            is_running = any(server.log == str(path) for server in running_servers(state_dir))
            if path.stat().st_size < file.tell():
                file.seek(0)  # the log began anew
            _show_lines(output, file)
            if not is_running:
                break
            time.sleep(_FOLLOW_SECONDS)


def _show_lines(output: Output, lines: Iterable[bytes]) -> None:
    for line in lines:
        output.sentence(line.decode("utf-8", "replace").rstrip("\r\n"), is_command=True)


def _log(output: Output, servers: list[RunningServer], state_dir: Path, port: int | None) -> Path:
    """Return the log of the server that is meant, or of the last one.

    Raises:
        UsageError: there is none, or the choice is ambiguous.
    """
    logged = [server for server in servers if server.log]
    if logged or port is not None:
        return Path(_meant(logged, port, every=False, command="logs")[0].log)
    if servers:
        raise UsageError(f"{servers[0].address} has no log", why="it writes to its terminal", hint=_BACKGROUND)
    ended = sorted((state_dir / "logs").glob("*.log"), key=lambda path: path.stat().st_mtime)
    if not ended:
        raise UsageError("there is no log", why="no server ran in the background", hint=_BACKGROUND)
    output.note(f"No server is running; the last one wrote {ended[-1]}.")
    return ended[-1]


def stop(
    model: Annotated[str, typer.Argument(hidden=True)] = "",
    port: Annotated[
        int | None, typer.Option("--port", help="Port of the server to stop, if several are running.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Stop all running servers.")] = False,
    now: Annotated[
        bool, typer.Option("--now", help="End running answers with an error instead of finishing them.")
    ] = False,
) -> None:
    """Stop a running server.

    Running answers are finished first, within the time that `serve --grace` allows.
    """
    output = Output()
    if model:
        raise _whole_server(model, running_servers(load_settings().state_dir))
    for server in _meant(running_servers(load_settings().state_dir), port, every=every):
        server.stop(now=now)
        output.note(f"{server.address} {_what_happens(server, now=now)}")


def _whole_server(model: str, servers: list[RunningServer]) -> UsageError:
    """Return the error for `stop MODEL`, which unloads a model in Ollama."""
    ports = [server.port for server in servers if model in server.models]
    return UsageError(
        f"{model!r} can't be stopped alone" if ports else f"no server has {model!r} loaded",
        why="llmrun stop ends a whole server; an idle model is unloaded after serve --keep",
        hint=" or ".join(f"llmrun stop --port {port}" for port in ports) or "llmrun ps",
    )


def _what_happens(server: RunningServer, *, now: bool) -> str:
    """Describe how the server and its answers end."""
    if now:
        return "ends now; running answers end with an error"
    begins = "is ending already:" if server.is_ending else "takes no more requests:"
    most = at_most(server.grace_seconds)
    return f"{begins} it ends when running answers are finished{most}; llmrun stop --now does not wait"


def at_most(grace_seconds: float | None) -> str:
    """Describe the time limit of a server's last answers; None is no limit."""
    return "" if grace_seconds is None else f", in {grace_seconds:g} s at most"


def _meant(
    servers: list[RunningServer], port: int | None, *, every: bool, command: str = "stop"
) -> list[RunningServer]:
    """Return the servers that a command means.

    Raises:
        UsageError: there is none, or the choice is ambiguous.
    """
    found = [server for server in servers if port in (None, server.port)]
    if not found:
        hint = "llmrun ps lists those that run" if servers else "llmrun serve MODEL --background starts one"
        raise UsageError("no server is running" + (f" on port {port}" if port is not None else ""), hint=hint)
    if len(found) > 1 and not every:
        ports = [f"--port {server.port}" for server in found]
        ways = ports if len(set(ports)) == len(ports) else []  # else at different addresses
        ways += ["--all"] if command == "stop" else []
        raise UsageError(f"{len(found)} servers run", hint=" or ".join(f"llmrun {command} {way}" for way in ways))
    return found
