"""Jobs: what they tell and give back, and what becomes of the engine when one ends in another way."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from llmrun.errors import CancelledError, DiskFullError, EngineCrashedError, LlmrunError
from llmrun.protocol.jobs import JobKind
from llmrun.runner import hang
from llmrun.runner.client import EngineClient
from llmrun.runner.launch import launch

pytestmark = pytest.mark.usefixtures("package_on_path")


@dataclass(frozen=True, slots=True)
class Say:
    say: str


@dataclass(frozen=True, slots=True)
class Done:
    done: int


@dataclass(frozen=True, slots=True)
class Said:
    said: str
    name: str


SAY = JobKind("say", Say, Done, Said)


def test_a_job_tells_how_far_it_is_and_what_came_out(start: Callable[[str], EngineClient]) -> None:
    runner, seen = start("normal"), list[Done]()
    assert runner.do(SAY, Say("hello"), seen.append) == Said("hello", "say")
    assert seen == [Done(1), Done(2)]
    assert runner.do(SAY, Say("again")).said == "again"


def test_a_failed_job_raises_its_own_error(start: Callable[[str], EngineClient]) -> None:
    with pytest.raises(DiskFullError, match="no space is left"):
        start("failing").do(SAY, Say(""))


def test_a_dead_engine_is_named(start: Callable[[str], EngineClient]) -> None:
    with pytest.raises(EngineCrashedError, match=r"in its job, say.*GGML_ASSERT"):
        start("die:job:SIGSEGV").do(SAY, Say(""))


def test_a_job_that_takes_too_long_is_given_up(
    start: Callable[[str], EngineClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang, "SILENT_SECONDS", 0.2)
    runner = start("deaf")
    with pytest.raises(LlmrunError, match=r"does not answer: it used no processor time for 0\.2 seconds"):
        runner.do(SAY, Say(""), seconds=10)
    assert not runner.alive


@pytest.mark.parametrize("kind", [replace(SAY, result=Done), replace(SAY, update=Said)])
def test_a_job_that_tells_something_else_is_a_crash(
    start: Callable[[str], EngineClient], kind: JobKind[Any, Any, Any]
) -> None:
    runner = start("normal")
    with pytest.raises(EngineCrashedError, match="in its job, say: it sent garbage"):
        runner.do(kind, Say(""))
    assert not runner.alive


def test_an_exception_meanwhile_ends_the_engine_at_once(start: Callable[[str], EngineClient]) -> None:
    runner = start("deaf")

    def stop(update: Done) -> None:
        raise CancelledError("stopped by Ctrl-C")

    with pytest.raises(CancelledError):
        runner.do(SAY, Say(""), stop)
    assert not runner.alive


def test_the_engine_names_a_job_that_it_does_not_know() -> None:
    runner = EngineClient()
    with pytest.raises(LlmrunError):
        runner.do(SAY, Say(""))
    assert not runner.alive


def test_the_environment_reaches_the_engine() -> None:
    code = "import os, sys; sys.stdout.write(os.environ['OMP_WAIT_POLICY'])"
    launched = launch((sys.executable, "-c", code), environment={"OMP_WAIT_POLICY": "active"})
    assert launched.process.communicate()[0] == b"active"


def test_an_engine_starts_where_nothing_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: str) -> None:
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    monkeypatch.setattr("os.memfd_create", refuse, raising=False)
    launched = launch((sys.executable, "-c", "import sys; sys.stderr.write('lost'); print('there')"))
    assert launched.log is None
    assert launched.process.communicate()[0].strip() == b"there"
