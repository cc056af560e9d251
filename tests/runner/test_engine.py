"""The real engine process, without a model."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from llmrun.errors import BadModelError, EngineCrashedError, LlmrunError
from llmrun.protocol.messages import AnswerRequest, Finished, Generate, Load, Message, Stats
from llmrun.runner.launch import launch
from llmrun.runner.runner import Runner

ASK = Generate(1, AnswerRequest((Message("user", "Hi"),)))

pytestmark = pytest.mark.usefixtures("package_on_path")


@pytest.fixture
def engine() -> Iterator[Runner]:
    """The real engine process."""
    runner = Runner()
    yield runner
    runner.close()


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
