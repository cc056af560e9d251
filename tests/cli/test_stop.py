"""`llmrun stop` beside running answers of every protocol: once, twice, and --now; and what a second signal does."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.gguf_writer import runnable_model, write
from support.installed import SECONDS, eventually

from llmrun.cli.main import Interrupt
from llmrun.errors import CancelledError, TerminatedError
from llmrun.server.registry import RunningServer, running_servers

pytestmark = pytest.mark.usefixtures("package_on_path")
FRONT = Path(__file__).parents[1] / "support/front.py"
SAID = [{"role": "user", "content": "Hi"}]
# Path -> what is asked, what an answer ends with, and what an error is told by.
STREAMS: dict[str, tuple[dict[str, Any], bytes, bytes]] = {
    "/v1/chat/completions": ({"messages": SAID}, b"data: [DONE]", b'data: {"error":{'),
    "/v1/completions": ({"prompt": "Hi"}, b"data: [DONE]", b'data: {"error":{'),
    "/v1/responses": ({"input": "Hi"}, b"event: response.completed", b"event: response.failed"),
    "/v1/messages": ({"messages": SAID, "max_tokens": 9}, b"event: message_stop", b"event: error"),
    "/api/chat": ({"messages": SAID}, b'"done":true', b'{"error":"'),
    "/api/generate": ({"prompt": "Hi"}, b'"done":true', b'{"error":"'),
}


class Served:
    """`llmrun serve` in a process of its own, with an answer of each protocol under way."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        model = str(write(folder / "tiny.gguf", runnable_model()))
        self.log = (folder / "log").open("w+")
        self.process = self.start("held", "serve", model, "--port", "0", "--parallel", "8", stderr=self.log)
        stack.callback(self.process.wait, SECONDS)
        stack.callback(self.process.kill)
        assert eventually(lambda: bool(self.listed), SECONDS), self.logged
        self.port = self.listed[0].port
        self.streams = {path: stack.enter_context(self.stream(path)) for path in STREAMS}
        for answer in self.streams.values():
            line = b" "
            while b"Hel" not in line:
                assert line, self.logged
                line = answer.readline()

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        environment = {**os.environ, "LLMRUN_HOME": str(self.folder / "home")}
        return subprocess.Popen([sys.executable, str(FRONT), *arguments], text=True, env=environment, **options)

    def stop(self, *options: str) -> str:
        """What `llmrun stop` says."""
        stopped = self.start("none", "stop", *options, stderr=subprocess.PIPE)
        said = stopped.communicate(timeout=SECONDS)[1]
        assert stopped.returncode == 0, said
        return said

    @property
    def listed(self) -> list[RunningServer]:
        return running_servers(self.folder / "home")

    @property
    def logged(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def get(self, path: str) -> int:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)) as connection:
            connection.request("GET", path)
            return connection.getresponse().status

    @contextmanager
    def stream(self, path: str) -> Iterator[http.client.HTTPResponse]:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)) as connection:
            body = json.dumps({**STREAMS[path][0], "stream": True})
            connection.request("POST", path, body, {"content-type": "application/json"})
            yield connection.getresponse()

    def ends(self, status: int, place: int) -> None:
        """Every stream ends as its protocol has it: the answer's end is at place 1, an error's at 2."""
        for path, answer in self.streams.items():
            assert STREAMS[path][place] in answer.read(), path
        assert self.process.wait(SECONDS) == status
        assert "Traceback" not in self.logged


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with ExitStack() as stack:
        # Below nohup, hang-ups are ignored, and the server would inherit that.
        stack.callback(signal.signal, signal.SIGHUP, signal.signal(signal.SIGHUP, signal.SIG_DFL))
        yield Served(tmp_path, stack)


def finish(served: Served) -> None:
    """Let the engine finish its answers."""
    assert served.get("/metrics") == 200


def test_stop_waits_for_running_answers(served: Served) -> None:
    said = " ".join(served.stop().split())
    assert "ends when running answers are finished, in 30 s at most" in said
    assert "llmrun stop --now" in said
    assert eventually(lambda: served.get("/health") == 503, SECONDS)
    finish(served)
    served.ends(0, 1)


def test_stop_twice_is_the_same_as_once(served: Served) -> None:
    served.stop()
    assert eventually(lambda: served.listed[0].is_ending, SECONDS)
    assert "is ending already" in " ".join(served.stop().split())
    finish(served)
    served.ends(0, 1)


@pytest.mark.parametrize("before", [False, True], ids=["at once", "behind a stop"])
def test_stop_now_ends_every_stream_with_an_error(served: Served, before: bool) -> None:
    if before:
        served.stop()
    assert "ends now; running answers end with an error" in " ".join(served.stop("--now").split())
    served.ends(143, 2)


def test_ctrl_c_twice_ends_every_stream_with_an_error(served: Served) -> None:
    served.process.send_signal(signal.SIGINT)
    assert eventually(lambda: served.get("/health") == 503, SECONDS)
    served.process.send_signal(signal.SIGINT)
    served.ends(-signal.SIGINT, 2)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_that_end_a_server_always_wait(served: Served, number: signal.Signals) -> None:
    for _ in range(3):
        served.process.send_signal(number)
        assert eventually(lambda: served.get("/health") == 503, SECONDS)
    finish(served)
    served.ends(0, 1)


# ---- other commands


def test_a_second_signal_counts_again_after_a_while() -> None:
    """The first may have been caught, and nothing could end the command any more."""
    now = 10.0
    interrupt = Interrupt(lambda: now)
    with pytest.raises(CancelledError):
        interrupt(signal.SIGINT, None)
    now = 10.5
    interrupt(signal.SIGINT, None)
    interrupt(signal.SIGTERM, None)
    now = 11.5
    with pytest.raises(TerminatedError, match="SIGTERM"):
        interrupt(signal.SIGTERM, None)
    now, interrupt.is_over = 13.0, True
    interrupt(signal.SIGINT, None)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("command", ["run", "batch"])
def test_signals_twice_end_as_one_does(tmp_path: Path, command: str, number: signal.Signals, status: int) -> None:
    model, rows = str(write(tmp_path / "tiny.gguf", runnable_model())), tmp_path / "rows.txt"
    rows.write_text("Hi\n")
    words = [command, model, *(["Hi"] if command == "run" else [str(rows), "-o", str(tmp_path / "answers.jsonl")])]
    environment = {**os.environ, "LLMRUN_HOME": str(tmp_path / "home")}
    arguments = [sys.executable, str(FRONT), "obedient", *words]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(arguments, text=True, env=environment, **pipes)
    if command == "run":
        assert process.stdout is not None
        assert process.stdout.read(1) == "H"
    else:
        assert eventually(lambda: psutil.Process(process.pid).children(), SECONDS)
    process.send_signal(number)
    process.send_signal(number)
    said = process.communicate(timeout=SECONDS)[1]
    assert process.returncode == status, said
    assert "Traceback" not in said
