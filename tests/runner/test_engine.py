"""The real engine process, without a model."""

from __future__ import annotations

import base64
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.hf_writer import WIDTH
from support.tiny_projector import TILE_TOKENS, png, projector, text_model

from llmrun.errors import BadModelError, EngineCrashedError, LlmrunError, UsageError
from llmrun.protocol.jobs.text import EMBED, EmbedTexts, TokenizeText
from llmrun.protocol.loading import Load
from llmrun.protocol.media import Media
from llmrun.protocol.messages import (
    AnswerRequest,
    Event,
    Finished,
    Generate,
    MediaAccepted,
    Message,
    Stats,
)
from llmrun.protocol.params import Limits
from llmrun.protocol.questions import TOKENIZE_LOADED
from llmrun.runner.client import EngineClient
from llmrun.runner.launch import launch

ASK = Generate(1, AnswerRequest((Message("user", "Hi"),)))

pytestmark = pytest.mark.usefixtures("package_on_path")


@pytest.fixture
def engine() -> Iterator[EngineClient]:
    """The real engine process."""
    runner = EngineClient()
    yield runner
    runner.close()


def test_a_file_that_is_no_model(engine: EngineClient, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("This is no model at all.\n" * 100)
    with pytest.raises(BadModelError) as caught:
        engine.load(Load(str(path), n_ctx=512))
    assert "notes.txt" in caught.value.what
    assert caught.value.why, "llama.cpp's log says why"


def test_a_request_before_a_model_and_sigint(engine: EngineClient) -> None:
    """Ctrl-C reaches the whole process group; it is the front's business."""
    with pytest.raises(LlmrunError, match="no model is loaded"):
        list(engine.submit(ASK))
    os.kill(engine.pid, signal.SIGINT)
    with pytest.raises(LlmrunError, match="no model is loaded") as caught:
        list(engine.submit(ASK))
    assert not isinstance(caught.value, EngineCrashedError)
    assert engine.alive


def test_a_command_that_can_not_be_read_fails_and_the_engine_lives(engine: EngineClient) -> None:
    """Nothing a program can give is to reach the engine so; if it does, it costs that request alone."""
    pid = engine.pid
    asked, limits = AnswerRequest(prompt="hi"), Limits()
    for record, field, value in ((asked, "thinking_tokens", "many"), (limits, "max_tokens", 2.5)):
        object.__setattr__(record, field, value)
    for wrong, words in ((asked, "tokens of AnswerRequest is 'many'"), (AnswerRequest(limits=limits), "Limits is 2.5")):
        with pytest.raises(UsageError, match=f"can't read the request: .*{words}"):
            list(engine.submit(Generate(engine.next_request(), wrong)))
    with pytest.raises(UsageError, match="can't read the request: text of TokenizeText is 5"):
        engine.do(TOKENIZE_LOADED, TokenizeText("", 5))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="can't read the request: texts of EmbedTexts is 5"):
        engine.do(EMBED, EmbedTexts((5,), "mean"))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="can't be written as JSON"):
        engine.do(EMBED, EmbedTexts((object(),), "mean"))  # type: ignore[arg-type]
    with pytest.raises(LlmrunError, match="no model is loaded"):
        list(engine.submit(ASK))
    assert engine.pid == pid
    assert engine.alive


def test_pictures_go_through_the_pipe_and_a_hostile_one_ends_nothing(engine: EngineClient, tmp_path: Path) -> None:
    model = text_model(tmp_path / "tiny.gguf", "gemma3")
    seeing = projector(tmp_path / "mmproj.gguf", WIDTH, "gemma3")
    engine.load(Load(str(model), n_ctx=512, gpu_layers=0, projector=str(seeing)))

    def ask(data: bytes) -> list[Event]:
        picture = Media(base64.b64encode(data).decode(), "a.png")
        messages = (Message("user", "What is it?", media=(picture,)),)
        asked = AnswerRequest(messages, limits=Limits(3), template="{{ messages[0].content }} so")
        return list(engine.submit(Generate(engine.next_request(), asked)))

    for hostile in (b"", b"\x89PNG", png(20, 20)[:60], b"GIF89a" + bytes(range(200)), random.Random(1).randbytes(999)):
        with pytest.raises(UsageError):
            ask(hostile)
    told = [event for event in ask(png(40, 30)) if isinstance(event, MediaAccepted | Finished)]
    assert isinstance(told[0], MediaAccepted)
    assert (told[0].width, told[0].height) == (40, 30)
    assert isinstance(told[1], Finished)
    assert told[1].stats.media_tokens == TILE_TOKENS


def test_cancel_without_a_request(engine: EngineClient) -> None:
    engine.cancel()
    with pytest.raises(LlmrunError, match="no model is loaded"):
        list(engine.submit(ASK))
    assert engine.alive


def test_the_engine_makes_no_core_dumps_and_no_debugger(engine: EngineClient) -> None:
    with pytest.raises(LlmrunError, match="no model is loaded"):
        list(engine.submit(ASK))
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
    runner = EngineClient(launch((sys.executable, "-c", program)))
    try:
        assert list(runner.submit(ASK)) == [Finished(1, "stop", Stats())]
    finally:
        runner.close()
