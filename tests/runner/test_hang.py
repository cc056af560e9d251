"""An engine that hangs is told from one that has little of the processor."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from llmrun.runner import hang
from llmrun.runner.hang import HangDetector
from llmrun.system import processor_seconds


class Machine:
    """A clock, and the processor time of a process on it."""

    def __init__(self) -> None:
        self.now = self.used = 1000.0

    def run(self, detector: HangDetector, *, seconds: float, share: float, tick: float = 0.1) -> str:
        """Let the process have this share of a core, until it hangs; return why."""
        end = self.now + seconds
        while self.now < end:
            self.now += tick
            self.used += tick * share
            if why := detector.look():
                return why
        return ""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(hang.time, "monotonic", lambda: made.now)
    return made


def test_a_busy_machine_is_no_hang(machine: Machine) -> None:
    detector = HangDetector(lambda: machine.used, seconds=3.0)
    assert machine.run(detector, seconds=280, share=0.01) == ""
    assert machine.run(detector, seconds=280, share=0.01) == "it took more than 3 seconds of processor time"


def test_threads_beside_each_other_count_as_the_time_that_passed(machine: Machine) -> None:
    detector = HangDetector(lambda: machine.used, seconds=3.0)
    assert machine.run(detector, seconds=2.8, share=64) == ""
    assert machine.run(detector, seconds=1, share=64)


def test_a_process_that_does_nothing_hangs(machine: Machine) -> None:
    detector = HangDetector(lambda: machine.used)
    for _ in range(3):
        assert machine.run(detector, seconds=55, share=0) == ""
        assert machine.run(detector, seconds=1, share=1) == "", "a sign of life"
    assert machine.run(detector, seconds=70, share=0) == "it used no processor time for 60 seconds"


def test_a_suspended_machine_is_no_hang(machine: Machine) -> None:
    detector = HangDetector(lambda: machine.used)
    machine.now += 3600
    assert detector.look() == ""


def test_an_unknown_time_counts_as_work(machine: Machine) -> None:
    assert machine.run(HangDetector(lambda: None, seconds=3.0), seconds=2, share=0) == ""
    assert machine.run(HangDetector(lambda: None), seconds=1000, share=0) == ""


def others(process: int) -> float:
    """The processor time of all threads but the main one."""
    return (processor_seconds(process) or 0) - (processor_seconds(process, is_main_thread=True) or 0)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, the main thread's time is unknown")
def test_the_main_threads_time_is_told_apart(eventually: Callable[[Callable[[], bool], float], bool]) -> None:
    code = (
        "import threading\ndef spin():\n while True: pass\nthreading.Thread(target=spin, daemon=True).start()\ninput()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        try:
            assert eventually(lambda: others(process.pid) > 0.5, 600)
        finally:
            process.kill()
    assert processor_seconds(process.pid) is None
    assert processor_seconds(os.getpid()) is not None
