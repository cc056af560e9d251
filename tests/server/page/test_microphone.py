"""The microphone of the page: what it records is attached, for models that hear, where browsers allow it."""

from __future__ import annotations

import io
import wave
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.chromium import PROGRAM, Chromium
from support.hf_writer import WIDTH
from support.page import IDLE, Page
from support.page_client import store
from support.served import LiveServer
from support.tiny_projector import RATE, audio_projector, text_model

from llmrun.chat.store.turns import Question
from llmrun.server.guard import LOOPBACK, Policy

pytestmark = pytest.mark.usefixtures("package_on_path")
ELSEWHERE = "phone.test"
RECORD = "document.querySelector('#record')"
SECONDS_RECORDED = f"Number({RECORD}.textContent.split(':')[1])"
PROBLEM = "document.querySelector('#problem').textContent"


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    """A browser with a microphone that hears beeps, and with a name of this machine that browsers don't trust."""
    if PROGRAM is None:
        pytest.skip("there is no Chromium")
    devices = ("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream")
    names = f"--host-resolver-rules=MAP {ELSEWHERE} 127.0.0.1, MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
    found = Chromium(tmp_path_factory.mktemp("profile"), *devices, names)
    yield found
    found.close()


@pytest.fixture
def hearing(tmp_path: Path) -> Iterator[LiveServer]:
    """A server whose model hears."""
    projector = str(audio_projector(tmp_path / "mmproj.gguf", WIDTH, "ultravox"))
    model = text_model(
        tmp_path / "tiny.gguf", "ultravox", "{% for each in messages %}{{ each.content }} {% endfor %}so"
    )
    policy = Policy(LOOPBACK | {ELSEWHERE})
    with LiveServer(tmp_path, ("real",), model=model, projector=projector, n_ctx=4096, policy=policy) as server:
        yield server.once_loaded()


def test_a_recording_goes_along_with_the_question(recorder: Chromium, hearing: LiveServer) -> None:
    page = Page(recorder, hearing, 400)
    page.until(f"!{RECORD}.hidden")
    assert page.see("document.documentElement.scrollWidth") <= 400
    page.set("Maximum tokens", "5")
    page.see(f"{RECORD}.focus()")
    page.key("Space")
    page.until(f"{RECORD}.ariaPressed === 'true' && {SECONDS_RECORDED} >= 2")
    assert page.see(f"{RECORD}.title") == "Stop recording"
    page.key("Space")
    page.until("document.querySelector('#attached').textContent.includes('recording-1.wav')")
    page.see(f"{RECORD}.click()")
    page.until(f"{SECONDS_RECORDED} >= 2")
    page.ask("What is it?")  # ends the second recording
    question = page.see("document.querySelector('.question').textContent")
    assert "Attached: recording-1.wav" in question
    assert "Attached: recording-2.wav" in question
    assert not page.see(PROBLEM), "the model hears both"
    assert page.see(f"{RECORD}.ariaPressed") == "false"
    with store() as terminal:
        asked = terminal.open("1").entries[0].part
        assert isinstance(asked, Question)
        recordings = [Path(file.path).read_bytes() for file in asked.media]
    for data in recordings:
        with wave.open(io.BytesIO(data)) as found:
            assert (found.getnchannels(), found.getsampwidth(), found.getframerate()) == (1, 2, RATE)
            samples = array("h", found.readframes(found.getnframes()))
        assert len(samples) > RATE // 2
        assert max(samples) > 1000, "a beep"
    page.check()


def test_a_model_that_does_not_hear_has_no_microphone(recorder: Chromium, serve: Callable[..., LiveServer]) -> None:
    page = Page(recorder, serve().once_loaded())
    page.ask("Hello")
    assert page.see(f"{RECORD}.hidden")


def test_what_browsers_refuse_is_said(recorder: Chromium, hearing: LiveServer) -> None:
    page = Page(recorder, hearing)
    page.until(f"!{RECORD}.hidden")
    refuse = "navigator.mediaDevices.getUserMedia = () => Promise.reject(new DOMException('no', 'NotAllowedError'))"
    page.see(f"{refuse}, {RECORD}.click()")
    page.until(f"{PROBLEM}.includes('not allowed. Allow it for this page in your browser')")
    recorder.open(f"http://{ELSEWHERE}:{hearing.port}/")
    page.until(f"{IDLE} && !{RECORD}.hidden")
    page.see(f"{RECORD}.click()")
    page.until(f"{PROBLEM}.includes('only on pages of this machine or over https')")
    assert page.see(f"{RECORD}.ariaPressed") == "false"
