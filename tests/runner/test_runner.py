"""The front's end of the pipe: against a fake engine with every fault, and the real one without a model."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path

import psutil
import pytest

from llmrun.errors import (
    BadModelError,
    BadTemplateError,
    ContextOverflowError,
    EngineCrashedError,
    LlmrunError,
    OutOfMemoryError,
)
from llmrun.protocol.messages import (
    AnswerRequest,
    Count,
    Counted,
    Event,
    Finished,
    Generate,
    Load,
    Loaded,
    Message,
    PrefillProgress,
    Started,
    Stats,
    TextDelta,
)
from llmrun.runner import calls, pipe
from llmrun.runner.launch import launch
from llmrun.runner.runner import Runner

FAKE_ENGINE = Path(__file__).parents[1] / "support/fake_engine.py"
LAST_WORDS = "fake_engine.cpp:42: GGML_ASSERT(fake) failed"
LOAD = Load("/model.gguf", n_ctx=512, n_ctx_start=512)
HI = AnswerRequest((Message("user", "Hi"),))
COUNT, ASK = Count(2, HI), Generate(1, HI)

pytestmark = pytest.mark.usefixtures("package_on_path")
Start = Callable[[str], Runner]
Eventually = Callable[[Callable[[], bool], float], bool]


@pytest.fixture
def start() -> Iterator[Start]:
    """start(mode): a runner of a fake engine, closed in the end."""
    runners: list[Runner] = []

    def make(mode: str = "normal") -> Runner:
        runners.append(Runner(launch((sys.executable, str(FAKE_ENGINE), mode))))
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()


@pytest.fixture
def engine() -> Iterator[Runner]:
    """The real engine process."""
    runner = Runner()
    yield runner
    runner.close()


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody waited for yet has, too."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def crash(runner: Runner, request: Generate = ASK) -> EngineCrashedError:
    """The error that a request ends in."""
    with pytest.raises(EngineCrashedError) as caught:
        list(runner.generate(request))
    assert not runner.alive
    return caught.value


# ---- the normal flow --------------------------------------------------------------------------------


def test_load_and_generate(start: Start) -> None:
    runner = start("normal")
    fractions: list[float] = []
    assert runner.load(LOAD, fractions.append) == Loaded(512, 2048, 260, "fake", True, ("CPU",), 0.25)
    assert fractions == [0.5]
    assert list(runner.generate(ASK)) == [
        Started(1, 3, 0, 7),
        PrefillProgress(1, 3, 0.5),
        TextDelta(1, "Hel", 1),
        TextDelta(1, "lo", 1),
        Finished(1, "stop", Stats(3, completion_tokens=2)),
    ]
    assert runner.alive


def test_request_after_request(start: Start) -> None:
    runner = start("normal")
    for request in range(3):
        events = list(runner.generate(Generate(request, AnswerRequest(prompt="Hi" * 100_000))))
        assert events[-1] == Finished(request, "stop", Stats(3, completion_tokens=2))


def test_a_request_that_fails(start: Start) -> None:
    runner = start("failing")
    for _ in range(2):
        with pytest.raises(ContextOverflowError) as caught:
            list(runner.generate(ASK))
        assert (caught.value.what, caught.value.why, caught.value.hint) == ("too long", "it is", "shorten it")
    assert runner.alive


def test_a_model_that_is_refused_is_explained_by_the_log(start: Start) -> None:
    runner = start("refuse")
    with pytest.raises(BadModelError) as caught:
        runner.load(LOAD)
    assert caught.value.what == "llama.cpp can't load /model.gguf"
    assert caught.value.why == "llama_model_load: error loading model: no tensors"
    assert not runner.alive


def test_a_failed_allocation_is_too_little_memory(start: Start) -> None:
    with pytest.raises(OutOfMemoryError, match="failed to allocate"):
        start("no_memory").load(LOAD)


# ---- death ------------------------------------------------------------------------------------------

CAUSES = [
    ("SIGSEGV", "killed by SIGSEGV"),
    ("SIGABRT", "killed by SIGABRT"),
    ("SIGKILL", "killed by SIGKILL"),
    ("3", "it ended with status 3"),
    ("0", "it ended with status 0"),
]


@pytest.mark.parametrize(("cause", "words"), CAUSES)
def test_death_while_loading(start: Start, cause: str, words: str) -> None:
    runner = start(f"die:load:{cause}")
    with pytest.raises(EngineCrashedError) as caught:
        runner.load(LOAD)
    assert caught.value.what == "the engine died while loading the model"
    assert caught.value.why == f"{words}; {LAST_WORDS}"
    assert ("memory" in caught.value.hint) == (cause == "SIGKILL")
    assert not runner.alive


@pytest.mark.parametrize(("cause", "words"), CAUSES)
@pytest.mark.parametrize(
    ("phase", "what"),
    [
        ("render", "the engine died while rendering the chat template"),
        ("prefill", "the engine died in prefill"),
        ("decode", "the engine died in decode"),
    ],
)
def test_death_while_answering(start: Start, phase: str, what: str, cause: str, words: str) -> None:
    error = crash(start(f"die:{phase}:{cause}"))
    assert error.what == what
    assert error.why == f"{words}; {LAST_WORDS}"


def test_the_text_before_a_death_arrives(start: Start) -> None:
    events: list[Event] = []
    with pytest.raises(EngineCrashedError):
        events.extend(start("die:decode:SIGSEGV").generate(ASK))
    runner = start("die:decode:SIGSEGV")
    answer = runner.generate(ASK)
    assert [type(next(answer)) for _ in range(3)] == [Started, PrefillProgress, TextDelta]
    with pytest.raises(EngineCrashedError):
        next(answer)


def test_a_dead_engine_takes_no_request(start: Start, eventually: Eventually) -> None:
    runner = start("normal")
    list(runner.generate(ASK))
    os.kill(runner.pid, signal.SIGKILL)
    assert eventually(lambda: not runner.alive, 60.0)
    assert "SIGKILL" in crash(runner).why
    assert "SIGKILL" in crash(runner).why, "and again"


def test_a_command_that_does_not_exist() -> None:
    with pytest.raises(OSError, match="no/such"):
        launch(("/no/such/engine",))


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("garbage", "it sent garbage (not a frame"),
        ("claim_3_gb", "it sent garbage (a frame of 3221225472 bytes is over the limit"),
        ("send_command", "it sent a command instead of an event"),
        ("truncated", "it ended with status 0"),
    ],
)
def test_an_engine_that_sends_no_frames_is_ended(
    start: Start, monkeypatch: pytest.MonkeyPatch, mode: str, words: str
) -> None:
    monkeypatch.setattr(pipe, "_DEATH_SECONDS", 0.05)
    error = crash(start(mode))
    assert error.what == "the engine died in decode"
    assert error.why.startswith(words)


# ---- patience ---------------------------------------------------------------------------------------


def test_a_template_that_never_ends(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "RENDER_SECONDS", 0.2)
    runner = start("hang_in_render")
    with pytest.raises(BadTemplateError, match=r"longer than 0\.2 seconds"):
        list(runner.generate(ASK))
    assert not runner.alive


def test_a_template_that_never_ends_when_counting(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "RENDER_SECONDS", 0.2)
    runner = start("hang_in_render")
    with pytest.raises(BadTemplateError, match=r"longer than 0\.2 seconds"):
        runner.count(COUNT)
    assert not runner.alive


@pytest.mark.parametrize("mode", ["busy", "tokenizing"])
def test_only_rendering_is_held_against_the_template(start: Start, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Neither that the engine was in the middle of a prefill, nor that the text was long."""
    monkeypatch.setattr(calls, "RENDER_SECONDS", 0.1)
    runner = start(mode)
    assert runner.count(COUNT) == Counted(2, (3,), 7)
    assert isinstance(list(runner.generate(ASK))[-1], Finished)


def test_prefill_and_decode_may_take_longer_than_rendering(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "RENDER_SECONDS", 0.8)
    runner = start("slow")
    assert isinstance(list(runner.generate(ASK))[-1], Finished)


def test_cancel(start: Start) -> None:
    runner = start("obedient")
    for _ in range(2):
        events: list[Event] = []
        for event in runner.generate(ASK):
            events.append(event)
            if isinstance(event, TextDelta):
                runner.cancel()
                runner.cancel()  # an impatient second Ctrl-C
        assert events[-1] == Finished(1, "cancelled", Stats(3, completion_tokens=1))
        assert runner.alive


@pytest.mark.parametrize("mode", ["obedient", "late"])
def test_cancel_from_a_signal_handler(start: Start, mode: str) -> None:
    """Even in the middle of sending a long conversation to an engine that reads late."""
    runner = start(mode)
    before = signal.signal(signal.SIGALRM, lambda *_: runner.cancel())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.15)
        events = list(runner.generate(Generate(1, AnswerRequest(prompt="Hi" * 200_000))))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert events[-1] == Finished(1, "cancelled", Stats(3, completion_tokens=1))


@pytest.mark.parametrize("mode", ["deaf", "chatty"])
def test_an_engine_that_ignores_a_cancel_is_ended(start: Start, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setattr(calls, "CANCEL_SECONDS", 0.2)
    runner = start(mode)
    last: Event | None = None
    ends = float("inf")
    for event in runner.generate(ASK):
        assert time.monotonic() < ends, "cancelled long ago"
        last = event
        if isinstance(event, TextDelta) and ends == float("inf"):
            runner.cancel()
            ends = time.monotonic() + 30
    assert last == Finished(1, "cancelled", Stats())
    assert not runner.alive


def test_cancel_of_a_dead_engine_is_quiet(start: Start) -> None:
    runner = start("die:render:SIGKILL")
    crash(runner)
    runner.cancel()


def test_an_answer_that_nobody_reads_to_its_end_does_not_leak_into_the_next(start: Start) -> None:
    runner = start("normal")
    for event in runner.generate(ASK):
        if isinstance(event, Started):
            break
    events = list(runner.generate(Generate(2, HI)))
    assert {getattr(event, "request", None) for event in events} == {2}
    assert isinstance(events[-1], Finished)


# ---- two at a time ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["together", "normal"])
def test_two_open_answers_both_go_on(start: Start, mode: str) -> None:
    """Whether the engine gives them side by side or one behind the other."""
    runner = start(mode)
    one, other = (runner.generate(Generate(request, HI)) for request in (1, 2))
    pairs = list(zip_longest(one, other))
    for request, events in zip((1, 2), zip(*pairs, strict=True), strict=True):
        there = [event for event in events if event is not None]
        assert {event.request for event in there} == {request}
        assert "".join(event.text for event in there if isinstance(event, TextDelta)) == "Hello"
        assert isinstance(there[-1], Finished)


def test_a_question_between_the_tokens_of_an_answer(start: Start) -> None:
    runner = start("normal")
    answer = runner.generate(ASK)
    first = next(answer)
    assert runner.count(COUNT) == Counted(2, (3,), 7)
    assert isinstance([first, *answer][-1], Finished)


def test_an_answer_that_is_given_up_does_not_end_the_other(start: Start) -> None:
    runner = start("together")
    one, other = (runner.generate(Generate(request, HI)) for request in (1, 2))
    next(one)
    next(other)
    one.close()  # type: ignore[attr-defined]
    assert [type(event) for event in other] == [TextDelta, TextDelta, Finished]
    assert runner.alive


def test_a_death_ends_both(start: Start) -> None:
    runner = start("die:together:SIGSEGV")
    one, other = (runner.generate(Generate(request, HI)) for request in (1, 2))
    next(one)
    for answer in (other, one):
        with pytest.raises(EngineCrashedError, match=r"in decode.*SIGSEGV"):
            list(answer)


def test_an_answer_to_something_else_ends_the_engine(start: Start) -> None:
    assert crash(start("mistaken")).why == "it answered Generate with Counted"


# ---- the process ------------------------------------------------------------------------------------


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
    answer = runner.generate(ASK)
    next(answer)
    runner.close()
    assert not psutil.pid_exists(runner.pid)


def test_twenty_runners_leave_nothing_behind() -> None:
    process = psutil.Process()
    gc.collect()  # what other tests left
    before, children = process.num_fds(), len(process.children())
    for _ in range(20):
        Runner(launch((sys.executable, "-c", "input()"))).close()
    assert process.num_fds() == before
    assert len(process.children()) == children


def test_twenty_crashes_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    process = psutil.Process()
    before, children = process.num_fds(), len(process.children())
    for _ in range(20):
        with pytest.raises(EngineCrashedError):
            Runner(launch(("false",))).load(LOAD)
    assert process.num_fds() == before
    assert len(process.children()) == children


FRONT = """
import time
from llmrun.errors import LlmrunError
from llmrun.protocol.messages import AnswerRequest, Generate
from llmrun.runner.runner import Runner
engine = Runner()
try:
    list(engine.generate(Generate(1, AnswerRequest(prompt="Hi"))))
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
    program = "from llmrun.runner.runner import Runner; print(Runner().pid)"
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True, timeout=60)
    assert eventually(lambda: gone(int(done.stdout)), 60.0)


# ---- the real engine, without a model ---------------------------------------------------------------


def test_a_file_that_is_no_model(engine: Runner, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("This is no model at all.\n" * 100)
    with pytest.raises(BadModelError) as caught:
        engine.load(Load(str(path), n_ctx=512, n_ctx_start=512))
    assert "notes.txt" in caught.value.what
    assert caught.value.why, "llama.cpp's log says why"


def test_a_guess_that_is_no_model_is_told_by_load(engine: Runner, tmp_path: Path) -> None:
    path = tmp_path / "empty.gguf"
    path.touch()
    engine.open_ahead(str(path))
    with pytest.raises(BadModelError, match=r"empty\.gguf"):
        engine.load(Load(str(path), n_ctx=512, n_ctx_start=512))


def test_a_request_before_a_model_and_sigint(engine: Runner) -> None:
    """Ctrl-C reaches the whole process group; it is the front's business."""
    with pytest.raises(LlmrunError, match="before a model"):
        list(engine.generate(ASK))
    os.kill(engine.pid, signal.SIGINT)
    with pytest.raises(LlmrunError, match="before a model") as caught:
        list(engine.generate(ASK))
    assert not isinstance(caught.value, EngineCrashedError)
    assert engine.alive


def test_cancel_without_a_request(engine: Runner) -> None:
    engine.cancel()
    with pytest.raises(LlmrunError, match="before a model"):
        list(engine.generate(ASK))
    assert engine.alive


def test_the_engine_makes_no_core_dumps_and_no_debugger(engine: Runner) -> None:
    with pytest.raises(LlmrunError, match="before a model"):
        list(engine.generate(ASK))
    assert psutil.Process(engine.pid).rlimit(psutil.RLIMIT_CORE) == (0, 0)


def test_what_prints_in_the_engine_does_not_disturb_the_pipe() -> None:
    program = (
        "from llmrun.engine.channel import Channel; import os\n"
        "channel = Channel.private()\n"
        "print('hello from a library', flush=True); os.system('echo and from C')\n"
        "from llmrun.protocol.messages import Rendering, Finished, Stats\n"
        "channel.send(Rendering(1)); channel.send(Finished(1, 'stop', Stats()))\n"
        "channel.receive(); channel.receive()\n"
    )
    runner = Runner(launch((sys.executable, "-c", program)))
    try:
        assert list(runner.generate(ASK)) == [Finished(1, "stop", Stats())]
    finally:
        runner.close()
