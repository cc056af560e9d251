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
from llmrun.protocol.engine_status import EngineStatus, GetStatus
from llmrun.protocol.finished_answers import AnswerExplanation, Explain, SaveState, StateSaved
from llmrun.protocol.frames import read_frame
from llmrun.protocol.loading import Load, Loaded, Open
from llmrun.protocol.messages import (
    AnswerRequest,
    Cancel,
    Command,
    CountTokens,
    Detokenize,
    Detokenized,
    Event,
    Failed,
    Finished,
    Generate,
    Job,
    JobDone,
    Message,
    TokenCount,
    Tokenize,
    Tokenized,
)
from llmrun.protocol.params import Limits
from llmrun.protocol.speculation import MeasureSteps, StepsMeasured
from llmrun.runner.client import Client
from llmrun.runner.launch import launch
from llmrun.runner.requests import EngineRequests

pytestmark = pytest.mark.usefixtures("package_on_path")
HI = AnswerRequest((Message("user", "Hi"),), limits=Limits(3), remember=3)


def commands(path: Path) -> list[tuple[Command, type[Event] | None]]:
    """Each command, in an order that an engine can do, and the last event of its answer."""
    return [
        (Open(str(path)), None),
        (Load(str(path), 64, 64), Loaded),
        (Generate(1, HI), Finished),
        (Explain(2, 1, 3, 2), AnswerExplanation),
        (SaveState(3, 1), StateSaved),
        (CountTokens(4, HI), TokenCount),
        (Tokenize(5, "Hi"), Tokenized),
        (Detokenize(6, (75, 108)), Detokenized),
        (MeasureSteps(7), StepsMeasured),
        (Cancel(1), None),
        (Job(8, "tokenize", {"model": str(path), "text": "Hi"}), JobDone),
        (GetStatus(9), EngineStatus),
    ]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "tiny.gguf", runnable_model())


@pytest.fixture
def engine() -> Iterator[Client]:
    client = Client(launch())
    yield client
    client.close()


def send_all(engine: Client, path: Path) -> None:
    """Every command, and what it is answered by."""
    for command, last in commands(path):
        if last is None:
            engine._exchange.pipe.send(command)
        else:
            *_, event = engine.submit(command)
            assert type(event) is last


def test_every_command_has_a_handler() -> None:
    assert EngineProcess(Channel(io.BytesIO(), io.BytesIO())).handled == frozenset(get_args(Command))


def test_every_command_is_answered_by_the_real_process(engine: Client, path: Path) -> None:
    assert {type(command) for command, _ in commands(path)} == set(get_args(Command))
    send_all(engine, path)
    assert engine.alive


def raw(engine: Client, frame: dict[str, Any]) -> None:
    body = json.dumps(frame).encode()
    engine._exchange.pipe._write(struct.pack(">I", len(body)) + body)


@pytest.mark.parametrize(
    ("name", "arguments"), [("sing", {}), ("tokenize", {}), ("../main", {}), ("tokenize", {"model": 5, "text": "Hi"})]
)
def test_a_job_that_can_not_be_done_fails_alone(
    engine: Client, path: Path, name: str, arguments: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match=r"can.t (do the job|read the request)"):
        list(engine.submit(Job(1, name, arguments)))
    send_all(engine, path)


@pytest.mark.parametrize(
    "frame",
    [
        {"kind": "Sing"},
        {"kind": "Detokenize", "tokens": ["Hi"]},
        {"kind": "Tokenize"},
        {"kind": "Tokenize", "text": "Hi", "loud": True},
    ],
    ids=["an unknown command", "a field of another type", "a field missing", "a field too many"],
)
def test_what_can_not_be_read_fails_alone(engine: Client, path: Path, frame: dict[str, Any], monkeypatch: Any) -> None:
    monkeypatch.setattr(
        EngineRequests, "_send", lambda self, call: raw(engine, {**frame, "request": call.command.request})
    )
    with pytest.raises(UsageError, match="can't read the request"):
        list(engine.submit(Tokenize(1, "Hi")))
    monkeypatch.undo()
    send_all(engine, path)


def test_a_command_without_a_handler_fails_alone() -> None:
    sent: list[Event] = []

    class Front:
        """A front that asks one thing and goes."""

        def __init__(self) -> None:
            self._left = [Detokenize(1, (5,))]

        def receive(self) -> Command:
            if not self._left:
                raise EOFError
            return self._left.pop()

        send = sent.append

    channel: Any = Front()
    process = EngineProcess(channel)
    del process._prepare_handlers[Detokenize]
    with pytest.raises(EOFError):
        process._read()
    (failed,) = sent
    assert isinstance(failed, Failed)
    assert (failed.request, failed.what) == (1, "the engine has no handler for Detokenize")


def test_an_answer_that_is_too_large_for_a_frame_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 200)
    events = io.BytesIO()
    Channel(io.BytesIO(), events).send(Detokenized(1, "x" * 200), Detokenized(2, "Hi"))
    events.seek(0)
    failed, other = read_frame(events.read), read_frame(events.read)
    assert isinstance(failed, Failed)
    assert (failed.request, failed.what) == (1, "the answer is too large")
    assert other == Detokenized(2, "Hi")
