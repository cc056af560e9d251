"""Operating systems: locks, waiting for a pipe, and a start without the modules that only some systems have."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from llmrun.system import PipeReader, can_write, lock, lock_byte, unlock_byte

MISSING_ON_WINDOWS = ("fcntl", "grp", "pwd", "resource", "termios", "tty")

_IMPORT_ALL = """
import pkgutil, sys
import psutil  # whose part for this system needs them
for name in {missing}:
    sys.modules[name] = None
import llmrun
skipped = ("llmrun.batch.cluster", "llmrun.chat.tools.subreaper", "llmrun.chat.tools.servers", "llmrun.__main__")
for module in pkgutil.walk_packages(llmrun.__path__, "llmrun."):
    if module.name not in skipped and "_native" not in module.name:
        __import__(module.name)
"""


@pytest.mark.usefixtures("package_on_path")
def test_every_module_can_be_imported_without_those_that_windows_lacks(tmp_path: Path) -> None:
    code = _IMPORT_ALL.format(missing=MISSING_ON_WINDOWS)
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def _try_lock(path: Path, code: str) -> str:
    """Return what another process prints about a lock of a file."""
    code = f"import os, sys; from llmrun.system import *; d = os.open(sys.argv[1], os.O_RDWR); print({code})"
    ran = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    return ran.stdout.strip()


def test_an_exclusive_lock_excludes_other_processes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("xb") as file:
        assert lock(file.fileno())
        assert _try_lock(path, "lock(d)") == "False"
        assert _try_lock(path, "lock(d, shared=True)") == "False"
    assert _try_lock(path, "lock(d)") == "True"


def test_shared_locks_exclude_exclusive_ones(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("xb") as file:
        assert lock(file.fileno(), shared=True)
        assert _try_lock(path, "lock(d, shared=True)") == "True"
        assert _try_lock(path, "lock(d)") == "False"


def test_bytes_are_locked_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("xb") as file:
        assert lock_byte(file.fileno(), 5)
        assert _try_lock(path, "lock_byte(d, 5), lock_byte(d, 6)") == "False True"
        unlock_byte(file.fileno(), 5)
        assert _try_lock(path, "lock_byte(d, 5)") == "True"


@pytest.mark.parametrize("is_copied", [False, True])
def test_a_pipe_is_read_until_its_end(is_copied: bool) -> None:
    """A copy is what Windows reads."""
    reading, writing = os.pipe()
    data = os.urandom(1 << 20)
    code = "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read())"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=reading, stdout=subprocess.PIPE)
    os.close(reading)
    assert process.stdout is not None
    with process.stdout as pipe:
        reader = PipeReader(pipe, is_copied=is_copied)
        assert reader.read(0) is None
        assert reader.read(-1) is None
        with os.fdopen(writing, "wb") as file:
            file.write(data)
        received = b""
        while part := reader.read(60):
            received += part
        assert received == data
        assert part == b""
    process.wait()
    with pytest.raises(ValueError, match="closed"):
        reader.read(0)


@pytest.mark.parametrize("is_copied", [False, True])
def test_waiting_for_a_silent_pipe_ends(is_copied: bool) -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb", buffering=0) as pipe, os.fdopen(writing, "wb", buffering=0) as other:
        reader = PipeReader(pipe, is_copied=is_copied)
        began = time.monotonic()
        assert reader.read(0.05) is None
        assert time.monotonic() - began >= 0.05
        other.write(b"x")
        assert reader.read(60) == b"x"


@pytest.mark.skipif(sys.platform == "win32", reason="it has no such signals")
def test_a_signal_that_interrupts_no_system_call_is_handled_while_a_pipe_is_silent() -> None:
    """One that another thread receives; the system may deliver one just before the call, too."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb", buffering=0) as pipe, os.fdopen(writing, "wb", buffering=0) as other:
        reader = PipeReader(pipe)
        before = signal.signal(signal.SIGUSR1, lambda *_: other.write(b"x"))
        sender = threading.Timer(0.2, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGUSR1))
        sender.start()
        try:
            assert reader.read(60) == b"x"
        finally:
            sender.join()
            signal.signal(signal.SIGUSR1, before)


@pytest.mark.skipif(sys.platform == "win32", reason="its pipes can't be asked")
def test_a_full_pipe_may_block() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb", buffering=0), os.fdopen(writing, "wb", buffering=0) as pipe:
        assert can_write(writing, select.PIPE_BUF)
        assert not can_write(writing, select.PIPE_BUF + 1), "only so many bytes are certain"
        os.set_blocking(writing, False)
        while pipe.write(bytes(1 << 16)):
            pass
        assert not can_write(writing, 1)
