"""The processes of `pytest --busy N` end with the session, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.busy import busy_processes
from support.installed import eventually, gone

BESIDE = """
import time
from support.busy import busy_processes
with busy_processes(2) as processes:
    print(*[process.pid for process in processes], flush=True)
    time.sleep(3600)
"""


def is_busy(process: psutil.Process) -> bool:
    return bool(process.cpu_times().user > 0.1)


def test_they_are_busy_until_the_block_ends() -> None:
    with busy_processes(2) as processes:
        watched = [psutil.Process(process.pid) for process in processes]
        assert eventually(lambda: all(map(is_busy, watched)), 60)
    assert [process.returncode for process in processes] == [-signal.SIGKILL] * 2


@pytest.mark.skipif(sys.platform == "win32", reason="there is no such signal")
def test_they_end_with_a_session_that_is_killed() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    session = subprocess.Popen((sys.executable, "-c", BESIDE), stdout=subprocess.PIPE, env=environment)
    assert session.stdout is not None
    processes = [psutil.Process(int(pid)) for pid in session.stdout.readline().split()]
    session.kill()
    session.wait()
    assert eventually(lambda: all(map(gone, processes)), 60)


def test_the_option_is_that_of_every_folder() -> None:
    test = Path(__file__).with_name("runner") / "test_pipe.py"
    command = (sys.executable, "-m", "pytest", "--busy", "1", "-n", "0", "--collect-only", str(test))
    ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1])
    assert "beside 1 busy processes" in ran.stdout
