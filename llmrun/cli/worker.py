"""`llmrun worker`: memory and compute of this machine for a model on another one."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from ipaddress import AddressValueError, IPv4Address
from typing import TYPE_CHECKING, Annotated

import typer

from llmrun.cli.options import engine_option
from llmrun.config import load_settings
from llmrun.errors import EngineCrashedError, NetworkError, UsageError, require_within
from llmrun.planning.hardware import probe
from llmrun.protocol.jobs.machine import WORKER, ServeDevices
from llmrun.protocol.settings import SETTINGS, check_setting
from llmrun.protocol.sizes import readable_size
from llmrun.runner.client import EngineClient
from llmrun.runner.launch import launch
from llmrun.runner.workers import PORT, VERSION, ask, engine_environment
from llmrun.server.registry import bind
from llmrun.ui.terminal.output import Output

if TYPE_CHECKING:
    from llmrun.protocol.jobs.machine import ServedDevices

_START_SECONDS = 60.0
_LOOK_SECONDS = 0.02
_OPEN = (
    "ggml's RPC has no authentication: anyone who can reach this port can run programs as you "
    "(CVE-2024-42477, CVE-2024-42478, CVE-2024-42479)"
)


def worker(
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="IPv4 address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port to listen on.")] = PORT,
    threads: Annotated[int | None, engine_option("threads", SETTINGS["threads"].unset)] = None,
    cache: Annotated[
        bool, typer.Option("--cache", help="Cache large weights on this disk, so that they are sent only once.")
    ] = False,
    anyone: Annotated[
        bool, typer.Option("--allow-anyone", help="Required with a --host beyond loopback: the port has no protection.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show llama.cpp's log.")] = False,
) -> None:
    """Run an RPC worker: compute layers of a model for another machine.

    Used by `llmrun run MODEL --rpc HOST:PORT` there; serves one program at a time, until Ctrl-C.
    """
    require_within("--port", port, (1, 65_535))
    check_setting("threads", threads)
    address = _address(host, anyone=anyone)
    bind(str(address), port, "llmrun worker").close()
    folder = load_settings().states_dir.with_name("rpc")
    if cache:
        folder.mkdir(parents=True, exist_ok=True)
    command = ServeDevices(f"{address}:{port}", threads or probe().usable_cores, str(folder) if cache else "")
    try:
        with closing(EngineClient(launch(verbose=verbose, environment=engine_environment()))) as engine:
            engine.do(WORKER, command, _shown(Output(), address, port))
    except EngineCrashedError as crash:
        raise EngineCrashedError("the worker crashed", why=crash.why, hint="start it again") from crash


def _address(host: str, *, anyone: bool) -> IPv4Address:
    """Return the address to listen on.

    Raises:
        UsageError: the address is not IPv4, or is open to others without --allow-anyone.
    """
    try:
        address = IPv4Address("127.0.0.1" if host == "localhost" else host)
    except AddressValueError:
        raise UsageError(f"invalid --host {host}", why="must be an IPv4 address of this machine") from None
    if not address.is_loopback and not anyone:
        hint = "leave out --host, and reach it through ssh -L; or add --allow-anyone where you trust the whole network"
        raise UsageError(f"--host {host} opens this machine to others", why=_OPEN, hint=hint)
    return address


def _shown(output: Output, address: IPv4Address, port: int) -> Callable[[ServedDevices], None]:
    """Return a function that prints the served devices once the worker can be reached."""

    def show(served: ServedDevices) -> None:
        _wait_for(f"127.0.0.1:{port}" if address.is_unspecified else f"{address}:{port}")
        version = ".".join(map(str, VERSION))
        devices = ", ".join(f"{gpu.description} with {readable_size(gpu.memory_total)}" for gpu in served.devices)
        output.note(f"{devices}: served at {address}:{port} (RPC {version}, ggml {served.build}) until Ctrl-C")
        if address.is_loopback:
            tunnel = f"ssh -N -L {port}:127.0.0.1:{port} THIS-MACHINE"
            output.note(f"on the other machine: {tunnel} & llmrun run MODEL --rpc 127.0.0.1:{port}", is_command=True)
        else:
            output.note(f"warning: {_OPEN}", dim=False)

    return show


def _wait_for(endpoint: str) -> None:
    """Wait until the worker answers, shortly after its start. Raises NetworkError."""
    ends_at = time.monotonic() + _START_SECONDS
    while True:
        try:
            ask(endpoint)
        except NetworkError:
            if time.monotonic() > ends_at:
                raise
            time.sleep(_LOOK_SECONDS)
        else:
            return
