"""One engine for one user: against a fake engine with every fault."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from support.gguf_writer import tiny_model, write
from support.stand_in_worker import closing, good, worker

from llmrun.errors import (
    BadModelError,
    BadTemplateError,
    ContextOverflowError,
    EngineCrashedError,
    OutOfMemoryError,
    ResourceError,
)
from llmrun.protocol.jobs import JobKind
from llmrun.protocol.jobs.bench import BENCH, Bench, BenchTest
from llmrun.protocol.jobs.evaluate import EVALUATE, Evaluate
from llmrun.protocol.jobs.importance import IMPORTANCE, Importance
from llmrun.protocol.jobs.mix import MIX, MeasureMix
from llmrun.protocol.jobs.quantize import QUANTIZE, Quantize
from llmrun.protocol.loading import Load, Loaded
from llmrun.protocol.media import Media
from llmrun.protocol.messages import (
    AnswerRequest,
    Event,
    Failed,
    Finished,
    Generate,
    Job,
    Message,
    PrefillProgress,
    Rendered,
    Rendering,
    Started,
    Stats,
    TextDelta,
)
from llmrun.protocol.questions import COUNT_TOKENS, TokenCount
from llmrun.runner import hang, pipe, requests
from llmrun.runner.client import EngineClient
from llmrun.runner.launch import launch

ANSWERED = Stats(3, completion_tokens=2, context_used=5, n_ctx=256)
LAST_WORDS = "fake_engine.cpp:42: GGML_ASSERT(fake) failed"
LOAD = Load("/model.gguf", n_ctx=512)
HI = AnswerRequest((Message("user", "Hi"),))
ASK = Generate(1, HI)

pytestmark = pytest.mark.usefixtures("package_on_path")
Start = Callable[[str], EngineClient]
Eventually = Callable[[Callable[[], bool], float], bool]


def crash(runner: EngineClient, request: Generate = ASK) -> EngineCrashedError:
    """The error that a request ends in."""
    with pytest.raises(EngineCrashedError) as caught:
        list(runner.submit(request))
    assert not runner.alive
    return caught.value


def test_who_waits_for_a_silent_engine_hears_of_it(start: Start) -> None:
    runner = start("obedient")
    runner.load(LOAD)
    waits: list[None] = []

    def wait() -> None:
        waits.append(None)
        if len(waits) == 3:
            runner.cancel()

    *_, finished = runner.submit(ASK, on_wait=wait)
    assert isinstance(finished, Finished)
    assert finished.reason == "cancelled"
    assert len(waits) >= 3


def test_several_answers_are_asked_for_at_once_and_come_as_they_are_given(start: Start) -> None:
    runner = start("together")
    runner.load(LOAD)
    events = list(runner.submit(*(Generate(runner.next_request(), HI) for _ in range(2))))
    assert [(type(event).__name__, event.request) for event in events] == [
        *(("Started", request) for request in (1, 2)),
        *(("TextDelta", request) for request in (1, 2, 1, 2)),
        *(("Finished", request) for request in (1, 2)),
    ]


def test_the_first_of_several_that_fails_ends_all(start: Start) -> None:
    runner = start("failing")
    runner.load(LOAD)
    with pytest.raises(ContextOverflowError):
        list(runner.submit(*(Generate(runner.next_request(), HI) for _ in range(3))))
    assert runner.alive


# ---- the normal flow --------------------------------------------------------------------------------


def test_load_and_generate(start: Start) -> None:
    runner = start("normal")
    fractions: list[float] = []
    assert runner.load(LOAD, fractions.append) == Loaded(512, 2048, 260, "fake", True, ("CPU",), 0.25)
    assert fractions == [0.5]
    assert list(runner.submit(ASK)) == [
        Started(1, 3, 0, 7),
        PrefillProgress(1, 3, 0.5),
        TextDelta(1, "Hel", 1),
        TextDelta(1, "lo", 1),
        Finished(1, "stop", ANSWERED),
    ]
    assert runner.alive


def test_request_after_request(start: Start) -> None:
    runner = start("normal")
    for request in range(3):
        events = list(runner.submit(Generate(request, AnswerRequest(prompt="Hi" * 100_000))))
        assert events[-1] == Finished(request, "stop", ANSWERED)


def test_a_request_that_fails(start: Start) -> None:
    runner = start("failing")
    for _ in range(2):
        with pytest.raises(ContextOverflowError) as caught:
            list(runner.submit(ASK))
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


def test_an_error_holds_no_line_of_the_log_from_before_its_request(start: Start) -> None:
    runner = start("normal")
    runner.load(LOAD)
    pipe = runner._pipe
    assert pipe._log is not None

    def reason(code: str, line: str) -> str:
        found: list[Any] = []
        request = requests.PendingRequest(Job(1, "embed", HI), pipe, found.append)
        os.write(pipe._log.fileno(), line.encode())  # type: ignore[union-attr]
        request.take(Failed(1, code, "it failed"))
        return str(found[0].why)

    assert reason("internal", "llama_decode: failed to decode\n") == "llama_decode: failed to decode"
    assert reason("internal", "") == "", "that line was about another request"
    assert reason("context-overflow", "llama_context: an error\n") == "", "it is not llama.cpp's"
    assert reason("internal", "llama_context: the cause\n") == "llama_context: the cause"


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


@pytest.mark.parametrize("phase", ["load", "decode"])
def test_a_kv_cache_too_large_for_a_gpu_names_the_flags_that_help(start: Start, phase: str) -> None:
    runner = start(f"die:{phase}:SIGABRT:too_large")

    def work() -> None:
        runner.load(LOAD)
        list(runner.submit(ASK))

    with pytest.raises(OutOfMemoryError) as caught:
        work()
    assert re.search("-ngl.*-ctk.*--ctx", caught.value.hint)


def test_a_death_while_loading_names_the_worker_that_is_gone(start: Start) -> None:
    with worker(good()) as living, worker(closing) as gone, pytest.raises(EngineCrashedError) as caught:
        start("die:load:SIGABRT").load(replace(LOAD, workers=(living, gone)))
    assert caught.value.what == f"the worker {gone} was lost while loading the model"
    assert "llmrun worker --port" in caught.value.hint


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_death_while_answering_names_the_worker_that_is_gone(start: Start, phase: str) -> None:
    with worker(good()) as living, worker(closing) as gone:
        runner = start(f"die:{phase}:SIGABRT")
        runner.load(replace(LOAD, workers=(living, gone)))
        assert crash(runner).what == f"the worker {gone} was lost in {phase}"


def test_a_death_beside_workers_that_all_live_is_the_engines(start: Start) -> None:
    with worker(good()) as living:
        runner = start("die:decode:SIGABRT")
        runner.load(replace(LOAD, workers=(living,)))
        assert crash(runner).what == "the engine died in decode"


def test_a_death_before_a_picture_became_tokens_names_it(start: Start) -> None:
    seeing = AnswerRequest((Message("user", "Hi", media=(Media("", "a.png"),)),))
    assert crash(start("die:rendered:SIGSEGV"), Generate(1, seeing)).what == "the engine died while encoding an image"
    assert crash(start("die:rendered:SIGSEGV")).what == "the engine died while tokenizing the prompt"


def test_the_text_before_a_death_arrives(start: Start) -> None:
    events: list[Event] = []
    with pytest.raises(EngineCrashedError):
        events.extend(start("die:decode:SIGSEGV").submit(ASK))
    runner = start("die:decode:SIGSEGV")
    answer = runner.submit(ASK)
    assert [type(next(answer)) for _ in range(3)] == [Started, PrefillProgress, TextDelta]
    with pytest.raises(EngineCrashedError):
        next(answer)


def test_a_dead_engine_takes_no_request(start: Start, eventually: Eventually) -> None:
    runner = start("normal")
    list(runner.submit(ASK))
    os.kill(runner.pid, signal.SIGKILL)
    assert eventually(lambda: not runner.alive, 60.0)
    assert "SIGKILL" in crash(runner).why
    assert "SIGKILL" in crash(runner).why, "and again"


def test_a_file_that_kills_engines_is_named_whatever_it_was_read_for(start: Start, tmp_path: Path) -> None:
    twice = str(write(tmp_path / "twice.gguf", tiny_model({"tokenizer.ggml.tokens": ["a", "b", "a"]})))
    good = str(write(tmp_path / "good.gguf", tiny_model({})))
    load = Load(twice, 512)
    jobs: list[tuple[JobKind[Any, Any, Any], object]] = [
        (BENCH, Bench(load, BenchTest(4))),
        (QUANTIZE, Quantize(twice, "", 2)),
        (EVALUATE, Evaluate(good, "text", reference=twice)),
        (IMPORTANCE, Importance(twice, "")),
        (MIX, MeasureMix(twice, {}, "text")),
    ]
    for kind, command in jobs:
        with pytest.raises(BadModelError, match="tokens 0 and 2"):
            start("die:job:SIGABRT").do(kind, command)
    with pytest.raises(BadModelError, match="tokens 0 and 2"):
        start("die:load:SIGABRT").load(load)
    runner = start("die:prefill:SIGABRT")
    runner.load(load)
    with pytest.raises(BadModelError, match="tokens 0 and 2") as caught:
        list(runner.submit(ASK))
    assert isinstance(caught.value.__cause__, EngineCrashedError)
    with pytest.raises(EngineCrashedError):
        start("die:job:SIGABRT").do(QUANTIZE, Quantize(good, "", 2))


def test_a_command_that_does_not_exist() -> None:
    with pytest.raises(ResourceError, match="No such file"):
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


def test_an_engine_that_dies_slowly_has_its_own_cause_of_death(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the memory of a large model is freed for longer than anybody waits."""
    monkeypatch.setattr(pipe, "_DEATH_SECONDS", 0.0)
    for _ in range(10):
        assert "killed by SIGSEGV" in crash(start("die:decode:SIGSEGV")).why


# ---- patience ---------------------------------------------------------------------------------------


ENDLESS = pytest.mark.parametrize(
    ("mode", "why"),
    [
        ("hang_in_render", r"it used no processor time for 0\.2 seconds"),
        pytest.param(
            "spin_in_render",
            r"it took more than 0\.1 seconds of processor time",
            marks=pytest.mark.skipif(sys.platform != "linux", reason="the main thread's time is unknown"),
        ),
    ],
)


@ENDLESS
@pytest.mark.parametrize("counts", [False, True])
def test_a_template_that_never_ends(
    start: Start, monkeypatch: pytest.MonkeyPatch, mode: str, why: str, *, counts: bool
) -> None:
    monkeypatch.setattr(requests, "RENDER_SECONDS", 0.1)
    if mode == "hang_in_render":
        monkeypatch.setattr(hang, "SILENT_SECONDS", 0.2)
    runner = start(mode)
    with pytest.raises(BadTemplateError, match=why):
        runner.do(COUNT_TOKENS, HI) if counts else list(runner.submit(ASK))
    assert not runner.alive


@pytest.mark.skipif(sys.platform != "linux", reason="the main thread's time is unknown")
def test_a_template_may_take_any_time_on_a_busy_machine(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(requests, "RENDER_SECONDS", 0.5)
    monkeypatch.setenv("FAKE_ENGINE_MAY_END", str(tmp_path / "may end"))
    runner = start("starved_in_render")
    asked_at, waits = time.monotonic(), iter(range(10))

    def on_wait() -> None:
        if next(waits, None) is None:
            (tmp_path / "may end").touch()

    events = runner.submit(ASK, on_wait=on_wait)
    assert [type(event) for event in events][-1] is Finished
    assert time.monotonic() - asked_at > requests.RENDER_SECONDS
    assert runner.alive


@pytest.mark.parametrize("command", [ASK, Job(1, "count_tokens", HI)])
def test_only_rendering_is_held_against_the_template(start: Start, command: Generate | Job) -> None:
    """Neither a prefill that the engine was in the middle of, nor a long text to tokenize, nor the answer."""
    call = requests.PendingRequest(command, start("normal")._pipe, lambda event: None)
    assert call.hang is None
    call.take(Rendering(command.request))
    assert call.hang is not None
    call.take(Rendered(command.request))
    assert call.hang is None


def test_cancel(start: Start) -> None:
    runner = start("obedient")
    for _ in range(2):
        events: list[Event] = []
        for event in runner.submit(ASK):
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
        events = list(runner.submit(Generate(1, AnswerRequest(prompt="Hi" * 200_000))))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert events[-1] == Finished(1, "cancelled", Stats(3, completion_tokens=1))


@pytest.mark.parametrize("mode", ["deaf", "chatty"])
def test_an_engine_that_ignores_a_cancel(start: Start, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setattr(requests, "CANCEL_SECONDS", 0.2)
    runner = start(mode)
    cancelled, last = False, None
    for event in runner.submit(ASK):
        last = event
        if isinstance(event, TextDelta) and not cancelled:
            runner.cancel()
            cancelled = True
    assert last == Finished(1, "cancelled", Stats())
    assert runner.alive


def test_cancel_of_a_dead_engine_is_quiet(start: Start) -> None:
    runner = start("die:render:SIGKILL")
    crash(runner)
    runner.cancel()


def test_an_answer_that_nobody_reads_to_its_end_does_not_leak_into_the_next(start: Start) -> None:
    runner = start("normal")
    for event in runner.submit(ASK):
        if isinstance(event, Started):
            break
    events = list(runner.submit(Generate(2, HI)))
    assert {getattr(event, "request", None) for event in events} == {2}
    assert isinstance(events[-1], Finished)


# ---- two at a time ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["together", "normal"])
def test_two_open_answers_both_go_on(start: Start, mode: str) -> None:
    """Whether the engine gives them side by side or one behind the other."""
    runner = start(mode)
    one, other = (runner.submit(Generate(request, HI)) for request in (1, 2))
    pairs = list(zip_longest(one, other))
    for request, events in zip((1, 2), zip(*pairs, strict=True), strict=True):
        there = [event for event in events if event is not None]
        assert {event.request for event in there} == {request}
        assert "".join(event.text for event in there if isinstance(event, TextDelta)) == "Hello"
        assert isinstance(there[-1], Finished)


def test_a_question_between_the_tokens_of_an_answer(start: Start) -> None:
    runner = start("normal")
    answer = runner.submit(Generate(runner.next_request(), HI))
    first = next(answer)
    assert runner.do(COUNT_TOKENS, HI) == TokenCount((3,), 7)
    assert isinstance([first, *answer][-1], Finished)


def test_an_answer_that_is_given_up_does_not_end_the_other(start: Start) -> None:
    runner = start("together")
    one, other = (runner.submit(Generate(request, HI)) for request in (1, 2))
    next(one)
    next(other)
    one.close()  # type: ignore[attr-defined]
    assert [type(event) for event in other] == [TextDelta, TextDelta, Finished]
    assert runner.alive


def test_a_death_ends_both(start: Start) -> None:
    runner = start("die:together:SIGSEGV")
    one, other = (runner.submit(Generate(request, HI)) for request in (1, 2))
    next(one)
    for answer in (other, one):
        with pytest.raises(EngineCrashedError, match=r"in decode.*SIGSEGV"):
            list(answer)


def test_an_answer_to_something_else_ends_the_engine(start: Start) -> None:
    assert crash(start("mistaken")).why == "it answered Generate with JobDone"
