"""The engine's process: what is left of it after a close, a crash, or the front's own end."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

import psutil
import pytest

from llmrun.errors import EngineCrashedError, ResourceError
from llmrun.protocol.loading import Load
from llmrun.protocol.messages import AnswerRequest, Cancel, Generate, Message
from llmrun.runner import launch as launching
from llmrun.runner.client import EngineClient
from llmrun.runner.launch import launch
from llmrun.runner.pipe import Pipe

LOAD = Load("/model.gguf", n_ctx=512)
ASK = Generate(1, AnswerRequest((Message("user", "Hi"),)))

pytestmark = pytest.mark.usefixtures("package_on_path")
Start = Callable[[str], EngineClient]
Eventually = Callable[[Callable[[], bool], float], bool]


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody waited for yet has, too."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_close_twice(start: Start) -> None:
    runner = start("normal")
    pid = runner.pid
    runner.close()
    runner.close()
    assert not runner.alive
    assert not psutil.pid_exists(pid), "ended and waited for: no zombie"
    process = runner._pipe._process
    assert all(pipe is not None and pipe.closed for pipe in (process.stdin, process.stdout))


def test_close_in_the_middle_of_an_answer(start: Start) -> None:
    runner = start("deaf")
    answer = runner.submit(ASK)
    next(answer)
    runner.close()
    assert not psutil.pid_exists(runner.pid)


def test_twenty_runners_leave_nothing_behind() -> None:
    process = psutil.Process()
    gc.collect()  # what other tests left
    before, children = process.num_fds(), len(process.children())
    for _ in range(20):
        EngineClient(launch((sys.executable, "-c", "input()"))).close()
    assert process.num_fds() == before
    assert len(process.children()) == children


def test_twenty_crashes_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    process = psutil.Process()
    before, children = process.num_fds(), len(process.children())
    for _ in range(20):
        with pytest.raises(EngineCrashedError):
            EngineClient(launch(("false",))).load(LOAD)
    assert process.num_fds() == before
    assert len(process.children()) == children


def test_only_what_may_block_is_sent_in_another_thread() -> None:
    """And in order: what follows a long command waits with it."""
    code = (
        "import sys; from llmrun.protocol.frames import encode, read_frame\n"
        "from llmrun.protocol.messages import Rendered\n"
        "while frame := read_frame(sys.stdin.buffer.read):\n"
        "    sys.stdout.buffer.write(encode(Rendered(frame.request))); sys.stdout.flush()"
    )
    pipe, waiting = Pipe(launch((sys.executable, "-c", code))), list[Callable[[], None]]()
    short, long = (Generate(number, AnswerRequest(prompt="x" * n)) for number, n in ((1, 1), (2, 1_000_000)))
    try:
        pipe.send(short, waiting.append)
        assert (len(waiting), len(pipe._outgoing)) == (0, 0)
        pipe.send(long, waiting.append)
        pipe.send(Cancel(3), waiting.append)
        assert (len(waiting), len(pipe._outgoing)) == (2, 2)
        for flush in waiting:
            flush()
        answered: list[int] = []
        while len(answered) < 3:
            answered += [event.request for event in pipe.receive(1)]
        assert answered == [1, 2, 3]
    finally:
        pipe.close()


@pytest.mark.parametrize("listens", [False, True])
def test_the_last_reference_ends_the_engine(listens: bool, eventually: Eventually) -> None:
    """Without the garbage collector, and although a client has a thread that reads."""
    process, threads = psutil.Process(), threading.active_count()
    gc.collect()
    before = process.num_fds()
    gc.disable()
    try:
        shared = EngineClient(launch((sys.executable, "-c", "input()")))
        if listens:
            shared.listen(ASK, lambda event: None)
        pid = shared.pid
        assert not gone(pid)
        del shared
        assert eventually(lambda: gone(pid), 60.0) if listens else gone(pid)
        assert eventually(lambda: process.num_fds() <= before and threading.active_count() <= threads, 60.0)
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_that_drops_its_copy_does_not_end_the_engine(start: Start) -> None:
    runner = start("normal")
    child = os.fork()
    if not child:
        with suppress(BaseException):
            runner.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert runner.alive
    assert list(runner.submit(ASK))


FRONT = """
import time
from llmrun.errors import LlmrunError
from llmrun.protocol.messages import AnswerRequest, Generate
from llmrun.runner.client import EngineClient
engine = EngineClient()
try:
    list(engine.submit(Generate(1, AnswerRequest(prompt="Hi"))))
except LlmrunError:
    print(engine.pid, flush=True)  # it is up: it answered
time.sleep(60)
"""


def test_the_engine_does_not_outlive_a_killed_front(eventually: Eventually) -> None:
    with subprocess.Popen([sys.executable, "-c", FRONT], stdout=subprocess.PIPE) as front:
        assert front.stdout is not None
        engine = int(front.stdout.readline())
        assert not gone(engine)
        front.kill()
    assert eventually(lambda: gone(engine), 60.0)


def test_the_engine_does_not_outlive_a_front_that_just_ends(eventually: Eventually) -> None:
    program = "from llmrun.runner.client import EngineClient; print(EngineClient().pid)"
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True, timeout=60)
    assert eventually(lambda: gone(int(done.stdout)), 60.0)


def test_a_system_that_refuses_a_process_is_reported_when_one_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **more: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(launching, "_prestarted", None)
    launching.prestart()
    assert launching.take_prestarted() is None
    with pytest.raises(ResourceError, match="no process can be started") as refused:
        EngineClient()
    assert refused.value.why == os.strerror(errno.EAGAIN)
