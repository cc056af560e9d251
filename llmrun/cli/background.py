"""A server that outlives its command: in the background, or as a service of the user in systemd."""

from __future__ import annotations

import http.client
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.config import load_settings
from llmrun.errors import DiskFullError, EngineCrashedError, UsageError
from llmrun.server.registry import LOADING, running_servers
from llmrun.storage import write_whole
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
    output.note(f"Serving in the background, process {process.pid}: a page to chat on, and the API, at")
    output.text(server.address)
    output.note(f"llmrun stop --port {server.port} ends it. llmrun logs -f shows its log, {log}")


def log_file(port: int) -> Path:
    """Return the log of a server at a port, for port 0 one that no server uses; removes logs of servers that ended."""
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
            server = next((server for server in servers if server.pid == process.pid), None)
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
    """Return whether a server answers, and has loaded its models or failed to."""
    host = server.address.partition("://")[2].rpartition(":")[0].strip("[]")
    connection = http.client.HTTPConnection(host, server.port, timeout=_HEALTH_SECONDS)
    try:
        connection.request("GET", "/health")
        response = connection.getresponse()
        return response.status == http.client.OK or LOADING.encode() not in response.read()
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


_NAME = "llmrun.service"
_ENABLE = f"systemctl --user daemon-reload && systemctl --user enable --now {_NAME}"
_KEPT = (
    "HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "HF_HUB_OFFLINE", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "LLAMA_CPP_LIB_PATH", "LLMRUN_LLAMA", "LLMRUN_CPU", "LLMRUN_KERNELS",
    "CUDA_VISIBLE_DEVICES",
)  # fmt: skip
_LOOK_SECONDS = 0.2


def install_service(output: Output, arguments: Sequence[str], port: int, grace_seconds: float | None) -> None:
    """Write the service's file, and start the service if systemd can be reached.

    Args:
        arguments: of the server's command.
        grace_seconds: that the server has to end; None is no limit.

    Raises:
        UsageError: this system has no systemd.
        EngineCrashedError: the service does not start.
    """
    path, log = _file(), log_file(port)
    command = [sys.executable, "-m", "llmrun", *arguments]
    environment = {**_kept(os.environ), LOG_VARIABLE: str(log)}
    write_whole(path, unit(command, Path.cwd(), environment, log, grace_seconds), makes_folder=True)
    output.note(f"The service is in {path}.")
    if not _systemctl("show-environment"):
        output.note(f"Start it, now and with each session: {_ENABLE}", is_command=True)
        return
    _start(output, log)


def uninstall_service(output: Output) -> None:
    """Stop the service and remove its file.

    Raises:
        UsageError: there is none.
    """
    path = _file()
    if not path.exists():
        raise UsageError("no service is installed", why=f"there is no {path}", hint="llmrun serve MODEL --install")
    _systemctl("disable", "--now", _NAME)
    path.unlink()
    _systemctl("daemon-reload")
    output.note(f"{path} is removed.")


def unit(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], log: Path, grace_seconds: float | None
) -> str:
    """Return the text of systemd's unit. A wrong option or a missing model is not tried again."""
    lines = [f"Environment={_quoted(f'{name}={value}')}" for name, value in environment.items()]
    file = str(log).replace("%", "%%")
    end = "infinity" if grace_seconds is None else f"{grace_seconds + 10:g}"
    return "\n".join(
        [
            "[Unit]",
            "Description=llmrun: language models over HTTP",
            "",
            "[Service]",
            f"ExecStart={' '.join(_quoted(word).replace('$', '$$') for word in command)}",
            f"WorkingDirectory={str(folder).replace('%', '%%')}",
            *lines,
            f"StandardOutput=append:{file}",
            f"StandardError=append:{file}",
            "Restart=on-failure",
            "RestartPreventExitStatus=2 3 4 6 7",
            f"TimeoutStopSec={end}",
            "",
            "[Install]",
            "WantedBy=default.target",
            "",
        ]
    )


def _quoted(word: str) -> str:
    """Quote a word for systemd, which expands % everywhere."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("\n", "\\n")
    return f'"{escaped}"'


def _file() -> Path:
    if sys.platform in ("darwin", "win32"):
        raise UsageError("--install needs systemd", hint="llmrun serve MODEL --background")
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "systemd/user" / _NAME


def _kept(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the service needs; keys are not written to a file."""
    ours = (name for name in environment if name.startswith("LLMRUN_") and "KEY" not in name)
    return {name: environment[name] for name in (*ours, *_KEPT) if name in environment}


def _systemctl(*words: str) -> bool:
    """Run systemctl for this user; return whether it succeeded."""
    program = shutil.which("systemctl")
    if program is None:
        return False
    return subprocess.run([program, "--user", *words], capture_output=True, check=False).returncode == 0


def _start(output: Output, log: Path) -> None:
    """Start the service, or start it anew, and wait until it answers.

    Raises:
        EngineCrashedError: it does not.
    """
    begun = time.time()
    is_started = _systemctl("daemon-reload") and _systemctl("enable", _NAME) and _systemctl("restart", _NAME)
    while is_started:
        servers = running_servers(load_settings().state_dir)
        server = next((server for server in servers if server.log == str(log) and server.since >= begun), None)
        if server is not None and answers(server):
            output.note("It runs, and starts with each session; for a start at boot: loginctl enable-linger")
            output.note("llmrun logs -f shows its log; llmrun serve --uninstall stops and removes it.")
            output.text(server.address)
            return
        is_started = not _systemctl("is-failed", _NAME)
        time.sleep(_LOOK_SECONDS)
    raise EngineCrashedError("the service does not answer", why=tail(log), hint=f"systemctl --user status {_NAME}")
