"""`llmrun serve --install`: a service of the user in systemd, which starts with the session."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from llmrun.cli.background import LOG_VARIABLE, answers, log_file, tail
from llmrun.config import load_settings
from llmrun.errors import EngineCrashedError, UsageError
from llmrun.storage import write_whole
from llmrun.ui.terminal.output import Output

_NAME = "llmrun.service"
_ENABLE = f"systemctl --user daemon-reload && systemctl --user enable --now {_NAME}"
_KEPT = (
    "HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "HF_HUB_OFFLINE", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "LLAMA_CPP_LIB_PATH", "LLMRUN_LLAMA", "LLMRUN_CPU", "CUDA_VISIBLE_DEVICES",
)  # fmt: skip
_ANSWER_SECONDS, _POLL_SECONDS = 60.0, 0.2


def install(output: Output, arguments: Sequence[str], port: int, grace_seconds: float | None) -> None:
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


def uninstall(output: Output) -> None:
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
    from llmrun.server.registry import running_servers

    begun = time.time()
    is_started = _systemctl("daemon-reload") and _systemctl("enable", _NAME) and _systemctl("restart", _NAME)
    while is_started and time.time() - begun < _ANSWER_SECONDS:
        servers = running_servers(load_settings().state_dir)
        server = next((each for each in servers if each.log == str(log) and each.since >= begun), None)
        if server is not None and answers(server):
            output.note("It runs, and starts with each session; for a start at boot: loginctl enable-linger")
            output.note("llmrun logs -f shows its log; llmrun serve --uninstall stops and removes it.")
            output.text(server.address)
            return
        is_started = not _systemctl("is-failed", _NAME)
        time.sleep(_POLL_SECONDS)
    raise EngineCrashedError("the service does not answer", why=tail(log), hint=f"systemctl --user status {_NAME}")
