"""The installed `llmrun serve` with the real SmolLM2."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import urllib.request
from pathlib import Path

from support.installed import SECONDS, eventually


class RealServer:
    """`llmrun serve` on a free port."""

    def __init__(self, command: str, home: Path, *options: str, model: str = "smollm2") -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        self.log = home / "serve.log"
        arguments = [command, "serve", model, "--port", str(self.port), *options]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(arguments, stderr=log, env=environment(home))
        assert eventually(self.is_up, SECONDS), self.log.read_text()

    def is_up(self) -> bool:
        """Whether it answers."""
        try:
            with urllib.request.urlopen(f"{self.address}/health", timeout=SECONDS) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def end(self, number: int = signal.SIGTERM) -> int:
        """Its exit status."""
        self.process.send_signal(number)
        return self.process.wait(SECONDS)


def environment(home: Path) -> dict[str, str]:
    """Of the command."""
    return {**os.environ, "LLMRUN_HOME": str(home)}
