"""A server in the background: its start, its log, and the wait until it answers."""

from __future__ import annotations

import http.client
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.config import load_settings
from llmrun.errors import DiskFullError, EngineCrashedError
from llmrun.ui.terminal.output import Output

if TYPE_CHECKING:
    from llmrun.server.registry import RunningServer

LOG_VARIABLE = "LLMRUN_SERVE_LOG"
"""Environment variable that tells a server the file of its log, for `llmrun logs`."""
_POLL_SECONDS = 0.1
_HEALTH_SECONDS = 2.0
_LOG_TAIL = 2000  # characters of a log in an error
_STDERR = 2
_MOST_LOG_BYTES = 10_000_000  # of a log, before it begins anew; the one before is kept


def serve_in_background(output: Output, arguments: Sequence[str], port: int) -> None:
    """Start a server that outlives this command; print its address when it answers.

    Args:
        arguments: of the server's command.
        port: that it is to use; 0 is a free one.
    """
    log = log_file(port)
    process, server = start_server(arguments, log, answers)
    output.note(f"Serving in the background, process {process.pid}. llmrun logs -f shows the log, {log}.")
    output.note(f"llmrun stop --port {server.port} ends it.")
    output.text(server.address)


def log_file(port: int) -> Path:
    """Return the log of a server at a port, for port 0 one that no server uses; removes logs of servers that ended."""
    from llmrun.server.registry import running_servers

    folder = load_settings().state_dir / "logs"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    used = {server.log for server in running_servers(load_settings().state_dir)}
    for path in folder.glob("serve-free-*.log"):
        if str(path) not in used:
            path.unlink(missing_ok=True)
            previous_log(path).unlink(missing_ok=True)
    return folder / (f"serve-{port}.log" if port else f"serve-free-{os.getpid()}.log")


def start_server(
    arguments: Sequence[str], log: Path, is_ready: Callable[[RunningServer], bool]
) -> tuple[subprocess.Popen[bytes], RunningServer]:
    """Start a server in a session of its own, and wait until it is ready. An interrupted wait ends it.

    Args:
        arguments: of its command: "serve", ...
        log: file for its output; replaced.

    Raises:
        DiskFullError: the log can't be written.
        EngineCrashedError: it ended before; the end of its log is the reason.
    """
    from llmrun.server.registry import running_servers

    try:
        previous_log(log).unlink(missing_ok=True)
        log.write_bytes(f"llmrun {shlex.join(arguments)}\n".encode())
        with log.open("ab", buffering=0) as file:  # appended to, so that rotate() can empty it
            process = subprocess.Popen(
                [sys.executable, "-m", "llmrun", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,  # Ctrl-C and the end of the terminal are not for the server
                env={**os.environ, LOG_VARIABLE: str(log)},
            )
    except OSError as error:
        raise DiskFullError(f"the log {str(log)!r} can't be written", why=error.strerror or str(error)) from None
    try:
        while True:
            servers = running_servers(load_settings().state_dir)
            server = next((each for each in servers if each.pid == process.pid), None)
            if server is not None and is_ready(server):
                return process, server
            if process.poll() is not None:
                hint = shlex.join(["llmrun", *arguments])
                raise EngineCrashedError("the server ended before it answered", why=tail(log), hint=hint)
            time.sleep(_POLL_SECONDS)
    except BaseException:
        process.terminate()
        raise


def answers(server: RunningServer) -> bool:
    """Return whether /health of a server answers."""
    host = server.address.partition("://")[2].rpartition(":")[0].strip("[]")
    connection = http.client.HTTPConnection(host, server.port, timeout=_HEALTH_SECONDS)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def previous_log(log: Path) -> Path:
    """Return the file with what a log had before it began anew."""
    return log.with_name(f"{log.name}.1")


def rotate(log: Path, descriptor: int = _STDERR, limit: int = _MOST_LOG_BYTES) -> None:
    """Copy a log that is too long to previous_log(), and empty it. Its writer continues at its beginning.

    Args:
        descriptor: writes to it, or to something else, which stays as it is.
    """
    with suppress(OSError):  # the disk is full, or there is no such file
        status = log.stat()
        if status.st_size < limit or not os.path.samestat(status, os.fstat(descriptor)):
            return
        shutil.copyfile(log, previous_log(log))
        os.truncate(log, 0)
        os.lseek(descriptor, 0, os.SEEK_SET)  # where a system does not append


def tail(log: Path) -> str:
    """Return the end of a log, without its first line, which is the command."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace").partition("\n")[2].strip()
    except OSError as error:
        return f"no log: {error.strerror}"
    return text[-_LOG_TAIL:] or "it wrote nothing"
