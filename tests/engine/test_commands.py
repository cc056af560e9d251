"""Every command of the protocol, sent once through the real engine process."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from support.gguf_writer import runnable_model, write

from llmrun.engine.channel import Channel
from llmrun.engine.main import EngineProcess
from llmrun.errors import UsageError
from llmrun.protocol import frames
from llmrun.protocol.frames import read_frame
from llmrun.protocol.jobs.text import TokenizeText
from llmrun.protocol.loading import Load, Loaded
from llmrun.protocol.messages import (
    AnswerRequest,
    Cancel,
    Command,
    Event,
    Failed,
    Finished,
    Generate,
    Job,
    JobDone,
    Message,
)
from llmrun.protocol.params import Limits
from llmrun.protocol.questions import (
    QUESTIONS,
    TOKENIZE_LOADED,
    ExplainChoices,
    SaveState,
)
from llmrun.runner.client import EngineClient
from llmrun.runner.launch import launch
from llmrun.runner.pipe import Pipe

pytestmark = pytest.mark.usefixtures("package_on_path")
HI = AnswerRequest((Message("user", "Hi"),), limits=Limits(3), remember=3)


def commands(path: Path) -> list[tuple[Command, type[Event] | None]]:
    """Each command, in an order that an engine can do, and the last event of its answer."""
    return [
        (Load(str(path), 64), Loaded),
        (Generate(1, HI), Finished),
        (Job(2, "explain_choices", ExplainChoices(1, 3, 2)), JobDone),
        (Job(3, "save_state", SaveState(1)), JobDone),
        (Job(4, "count_tokens", HI), JobDone),
        (Job(5, "tokenize_loaded", TokenizeText("", "Hi")), JobDone),
        (Job(6, "detokenize", (75, 108)), JobDone),
        (Job(7, "compare", {}), JobDone),
        (Cancel(1), None),
        (Job(8, "tokenize", TokenizeText(str(path), "Hi")), JobDone),
        (Job(9, "status", {}), JobDone),
        (Job(10, "apply_template", HI), JobDone),
    ]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "tiny.gguf", runnable_model())


@pytest.fixture
def engine() -> Iterator[EngineClient]:
    client = EngineClient(launch())
    yield client
    client.close()


def send_all(engine: EngineClient, path: Path) -> None:
    """Every command, and what it is answered by."""
    for command, last in commands(path):
        if last is None:
            engine._pipe.send(command)
        else:
            *_, event = engine.submit(command)
            assert type(event) is last


def test_every_command_and_every_question_has_a_handler() -> None:
    process = EngineProcess(Channel(io.BytesIO(), io.BytesIO()))
    assert {Cancel, *process._compute_handlers} == set(get_args(Command))
    assert sorted((*process._read_questions, *process._prepare_questions, *process._compute_questions)) == sorted(
        QUESTIONS
    )


def test_every_command_is_answered_by_the_real_process(engine: EngineClient, path: Path) -> None:
    assert {type(command) for command, _ in commands(path)} == set(get_args(Command))
    assert {command.name for command, _ in commands(path) if isinstance(command, Job)} == {*QUESTIONS, "tokenize"}
    send_all(engine, path)
    assert engine.alive


def raw(engine: EngineClient, frame: dict[str, Any]) -> None:
    body = json.dumps(frame).encode()
    engine._pipe._write(struct.pack(">I", len(body)) + body)


@pytest.mark.parametrize(
    ("name", "arguments"), [("sing", {}), ("tokenize", {}), ("../main", {}), ("tokenize", {"model": 5, "text": "Hi"})]
)
def test_a_job_that_can_not_be_done_fails_alone(
    engine: EngineClient, path: Path, name: str, arguments: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match=r"can.t (do the job|read the request)"):
        list(engine.submit(Job(1, name, arguments)))
    send_all(engine, path)


@pytest.mark.parametrize(
    "frame",
    [
        {"kind": "Sing"},
        {"kind": "Job", "name": "detokenize", "arguments": {"tokens": ["Hi"]}},
        {"kind": "Job", "name": "status", "arguments": 5},
        {"kind": "Job", "name": "tokenize_loaded", "arguments": {"text": "Hi"}},
        {"kind": "Job", "name": "tokenize_loaded", "arguments": {"model": "", "text": "Hi", "loud": True}},
    ],
    ids=["an unknown command", "a field of another type", "no fields", "a field missing", "a field too many"],
)
def test_what_can_not_be_read_fails_alone(
    engine: EngineClient, path: Path, frame: dict[str, Any], monkeypatch: Any
) -> None:
    monkeypatch.setattr(Pipe, "send", lambda self, command, run: raw(engine, {**frame, "request": command.request}))
    with pytest.raises(UsageError, match="can't read the request"):
        engine.do(TOKENIZE_LOADED, TokenizeText("", "Hi"))
    monkeypatch.undo()
    send_all(engine, path)


def test_an_answer_that_is_too_large_for_a_frame_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 200)
    events = io.BytesIO()
    Channel(io.BytesIO(), events).send(JobDone(1, "x" * 200), JobDone(2, "Hi"))
    events.seek(0)
    failed, other = read_frame(events.read), read_frame(events.read)
    assert isinstance(failed, Failed)
    assert (failed.request, failed.what) == (1, "the answer is too large")
    assert other == JobDone(2, "Hi")
