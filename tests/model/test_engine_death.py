"""What a person sees when one of the two processes dies, for each phase and cause."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from support.installed import (
    LONG_PROMPT,
    SECONDS,
    WITHOUT_END,
    Installed,
    Running,
    engine_of,
    eventually,
    gone,
    only_error_line,
)

from llmrun.planning.hardware import is_built_for_gpus
from llmrun.protocol.llama_folder import backend_folders

Phase = Callable[[Installed], Running]
CAUSES = [signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV]
STORY = ("run", "smollm2", "--json", "--temp", "0", *WITHOUT_END, "Write the numbers from 1 to 1000, one a line.")
READING = ("run", "smollm2", "--json", "--max-tokens", "1", "-")


def in_prefill(llmrun: Installed) -> Running:
    running = llmrun.start(*READING, stdin=LONG_PROMPT)
    running.event("PrefillProgress")  # of its first piece
    return running


def in_decode(llmrun: Installed) -> Running:
    running = llmrun.start(*STORY)
    running.event("TextDelta")
    return running


def held_in_load(llmrun: Installed) -> Running:
    """The engine stopped right after its start, the front waiting for it to load."""
    if any(map(is_built_for_gpus, backend_folders())):
        llmrun.run("plan", "smollm2")  # keeps that there is no GPU; the engine would be asked before it loads
    running = llmrun.start("run", "smollm2", "hi")
    running.engine.suspend()
    front = psutil.Process(running.process.pid)
    assert eventually(lambda: rests(front), SECONDS), "the front waits for the engine"
    return running


def rests(process: psutil.Process) -> bool:
    """Whether a process computes nothing: all it can do by itself is done."""
    before = process.cpu_times()
    time.sleep(0.5)
    after = process.cpu_times()
    return process.status() == psutil.STATUS_SLEEPING and (before.user, before.system) == (after.user, after.system)


def assert_explained(running: Running, phase: str, cause: signal.Signals) -> None:
    """The command says that the engine died, in which phase and of what, and leaves nothing behind."""
    status, stderr = running.end()
    assert status == 8
    said = stderr.splitlines()
    if said[0].startswith("{"):
        assert len(said) == 1
    else:
        assert only_error_line(stderr)
    assert f"the engine died {phase}" in stderr
    assert f"killed by {cause.name}" in stderr
    assert gone(running.engine)


@pytest.mark.parametrize("cause", CAUSES)
def test_engine_dies_in_load(llmrun: Installed, cause: signal.Signals) -> None:
    running = held_in_load(llmrun)
    running.engine.send_signal(cause)
    if cause != signal.SIGKILL:  # which alone does not wait for the process to go on
        running.engine.resume()
    assert_explained(running, "while loading the model", cause)


@pytest.mark.parametrize("cause", CAUSES)
def test_engine_dies_in_prefill(llmrun: Installed, cause: signal.Signals) -> None:
    running = in_prefill(llmrun)
    running.engine.send_signal(cause)
    assert_explained(running, "in prefill", cause)


@pytest.mark.parametrize("cause", CAUSES)
def test_engine_dies_in_decode(llmrun: Installed, cause: signal.Signals) -> None:
    running = in_decode(llmrun)
    running.engine.send_signal(cause)
    assert_explained(running, "in decode", cause)


def test_without_json_the_error_is_one_line_behind_the_answer(llmrun: Installed) -> None:
    running = llmrun.start(*(word for word in STORY if word != "--json"))
    assert running.process.stdout is not None
    assert running.process.stdout.read(1)
    running.engine.kill()
    assert_explained(running, "in decode", signal.SIGKILL)


@pytest.mark.parametrize("phase", [held_in_load, in_prefill, in_decode])
def test_the_engine_ends_with_its_front(llmrun: Installed, phase: Phase) -> None:
    running = phase(llmrun)
    running.process.kill()
    running.process.wait()
    if phase is held_in_load:
        running.engine.resume()
    assert eventually(lambda: gone(running.engine), SECONDS)


def test_the_engine_ends_with_a_front_killed_at_once(llmrun: Installed) -> None:
    running = llmrun.start("run", "smollm2", "hi")
    running.process.kill()
    running.process.wait()
    assert eventually(lambda: gone(running.engine), SECONDS)


@pytest.mark.parametrize("phase", [held_in_load, in_prefill, in_decode])
@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143)])
def test_signals_to_the_front(llmrun: Installed, phase: Phase, sent: signal.Signals, status: int) -> None:
    running = phase(llmrun)
    os.kill(running.process.pid, sent)
    # An engine that does not react, as the held one, is given a second.
    assert running.end() == (status, "")
    assert gone(running.engine)


def test_a_second_ctrl_c_does_no_harm(llmrun: Installed) -> None:
    running = in_prefill(llmrun)
    for _ in range(3):
        os.kill(running.process.pid, signal.SIGINT)
        time.sleep(0.01)
    assert running.end() == (-signal.SIGINT, "")
    assert gone(running.engine)


def test_ctrl_c_reaches_only_the_front_of_a_terminals_process_group(llmrun: Installed) -> None:
    terminal = llmrun.terminal("run", "smollm2", LONG_PROMPT)
    terminal.wait(lambda: any("prefill" in line for line in terminal.lines))
    engine = terminal.engine
    terminal.press("c")
    assert terminal.end() == -signal.SIGINT
    assert gone(engine)
    assert terminal.modes() == terminal.modes_before
    assert b"Traceback" not in terminal.raw
    assert b"error:" not in terminal.raw


def test_one_libllama_in_the_engine_and_none_in_the_front(llmrun: Installed) -> None:
    running = in_decode(llmrun)

    def libraries(process: psutil.Process) -> set[str]:
        return {found.path for found in process.memory_maps() if "libllama" in Path(found.path).name}

    if not hasattr(running.engine, "memory_maps"):
        pytest.skip("this system does not tell what a process has mapped")
    assert len(libraries(running.engine)) == 1
    assert not libraries(psutil.Process(running.process.pid))
    assert engine_of(running.process.pid).pid == running.engine.pid
