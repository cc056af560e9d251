"""The ready-made tool that runs Python code, in a process of its own within limits: see sandbox.py."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from llmrun.chat.tools import sandbox

_MAX_OUTPUT = 1 << 20  # bytes, until the process is stopped
_PASSED_ON = ("LANG", "LC_ALL", "TZ", "PATH")  # no keys


class Python:
    """The tool, and the process of its call."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = ""

    def run_python(self, code: str) -> str:
        """Run Python code, and return what it prints.

        It has the standard library, an empty folder, 30 seconds and 1 GB of memory, and no network; it can't start
        programs, and nothing remains of it.

        Args:
            code: the code; print() shows a value
        """
        self._folder = tempfile.mkdtemp(prefix="llmrun-python-")
        try:
            Path(self._folder, sandbox.CODE).write_text(code, encoding="utf-8")
            return self._run()
        finally:
            self.close()

    def _run(self) -> str:
        self._process = process = subprocess.Popen(
            [sys.executable, "-I", "-B", "-X", "utf8", sandbox.__file__],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=self._folder,
            env=self._environment(),
        )
        assert process.stdout is not None
        with process.stdout:
            output = process.stdout.read(_MAX_OUTPUT + 1)
        if len(output) > _MAX_OUTPUT:
            process.kill()
        process.wait()
        text = output.decode("utf-8", "replace").replace(f'File "{self._folder}{os.sep}', 'File "')
        return "\n".join(filter(None, (text.rstrip("\n"), _end_of(process.returncode, len(output)))))

    def _environment(self) -> dict[str, str]:
        kept = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")  # each reserves memory
        return {**kept, **threads, "HOME": self._folder, "TMPDIR": self._folder}

    def close(self) -> None:
        """End the process, and remove its folder."""
        if self._process is not None:
            with suppress(OSError):
                self._process.kill()
            self._process.wait()  # else it could still write into the folder
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


def _end_of(status: int, n_bytes: int) -> str:
    """Return what the model has to know of the end of a process; "" if it has printed something, and ended well."""
    if n_bytes > _MAX_OUTPUT:
        return f"[stopped: it printed more than {_MAX_OUTPUT:,} bytes]"
    if sys.platform != "win32" and status in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"[stopped: it took more than {sandbox.SECONDS} seconds of processor time]"
    if status < 0:
        return f"[it ended with signal {signal.Signals(-status).name}]"
    return f"[it ended with status {status}]" if status else "" if n_bytes else "[it printed nothing]"
