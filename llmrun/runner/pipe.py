"""The engine's process and its pipes: frames go in, events come out, and a death has a cause.

Must not know requests. Any thread may send; one at a time reads.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import IO

from llmrun.errors import CancelledError, LlmrunError, OutOfMemoryError, UsageError
from llmrun.protocol.frames import PREFIX_BYTES, FrameError, TextDeltas, decode, encode, frame_length
from llmrun.protocol.messages import Command, Event
from llmrun.runner.launch import EngineHandle, launch
from llmrun.system import PipeReader, can_write

_DEATH_SECONDS = 0.5  # for an engine to end by itself; then it is killed
_LOG_TAIL_BYTES = 64 * 1024
_USUAL = (  # parts of log lines that explain nothing
    "AMX is not ready",  # see engine/llama/library.py
    "failed to decode, ret = 2",  # an answer was cancelled
    "model default pooling_type is",  # embeddings by a model for text
)
_TELLING = ("GGML_ASSERT", "pre-allocated", "rror", "failed", "terminate")  # parts of log lines that name a cause
_LAST = "failed to load model"  # follows every reason
_BUILD_FOLDER = re.compile(r"\S*/vendor/llama\.cpp/")  # of the library, in the source files that assertions name

Run = Callable[[Callable[[], None]], object]


class EngineExited(Exception):  # noqa: N818 - the request in progress decides about the error
    """The engine died, or had to be killed. `why` and `hint` are as in EngineCrashedError."""

    def __init__(self, why: str, hint: str = "") -> None:
        super().__init__(why)
        self.why, self.hint = why, hint


class Pipe:
    """One engine process, which ends with the last reference to this.

    Args:
        launched: a process started by launch.launch(); by default, a new one.
    """

    def __init__(self, launched: EngineHandle | None = None) -> None:
        self._process, self._log = launched or launch()
        self._received = bytearray()
        self._outgoing: deque[bytes] = deque()
        self._is_sending = False
        self._has_sent, self._log_start = False, 0  # bytes of the log before the last command; 0 at the first one
        self._lock = threading.RLock()  # a signal handler may send while its own thread does
        assert self._process.stdout is not None
        self._reader = PipeReader(self._process.stdout)
        self._end = weakref.finalize(self, _end, self._process, self._log)

    @property
    def alive(self) -> bool:
        """Whether the engine can take another command."""
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        """The engine's process id."""
        return self._process.pid

    @property
    def log_size(self) -> int:
        """The size of the log before a command that is sent now; an engine begins to load before its first one."""
        if self._log is None or self._log.closed or not self._has_sent:
            return 0
        return os.fstat(self._log.fileno()).st_size

    @property
    def descriptor(self) -> int:
        """The file descriptor that is readable when events come."""
        return self._reader.fileno()

    def send(self, command: Command, run: Run | None = None) -> None:
        """Send a command. A signal handler that interrupts another send() queues its command after that one.

        Args:
            run: calls a function in another thread, for a caller that must not block; errors are lost there.

        Raises:
            UsageError: the command is too long.
            EngineExited: the engine is dead.
        """
        try:
            frame = encode(command)
        except FrameError as error:
            raise UsageError("the conversation is too long to be sent to the engine", why=str(error)) from None
        self._log_start, self._has_sent = self.log_size, True
        self._outgoing.append(frame)
        if run is None or self._can_flush(len(frame)):
            self._flush()
        else:
            run(self._flush)

    def _can_flush(self, n_bytes: int) -> bool:
        """Return whether _flush() sends the only queued frame without blocking."""
        pipe = self._process.stdin
        assert pipe is not None
        is_only = len(self._outgoing) == 1 and not self._is_sending
        return is_only and not pipe.closed and can_write(pipe.fileno(), n_bytes)

    def _flush(self) -> None:
        with self._lock:
            while self._outgoing and not self._is_sending:
                self._is_sending = True
                try:
                    while self._outgoing:
                        self._write(self._outgoing.popleft())
                finally:
                    self._is_sending = False

    def _write(self, frame: bytes) -> None:
        data, pipe = memoryview(frame), self._process.stdin
        assert pipe is not None
        try:
            while data:
                data = data[os.write(pipe.fileno(), data) :]
        except (OSError, ValueError) as error:  # broken, or closed
            raise self._gone() from error

    def receive(self, seconds: float) -> Iterator[Event]:
        """Yield the next events, all that have come; none if the engine is silent for this time.

        Raises:
            EngineExited: the engine died, or sent something that is not an event.
        """
        if not self._whole_frame():
            self._read(seconds)
        while length := self._whole_frame():
            body = bytes(self._received[PREFIX_BYTES:length])
            del self._received[:length]
            try:
                frame = decode(body)
            except FrameError as error:
                raise self._garbage(error) from error
            if isinstance(frame, TextDeltas):
                yield from frame.rows
            elif isinstance(frame, Command):
                raise self._gone("it sent a command instead of an event")
            else:
                yield frame

    def _read(self, seconds: float) -> None:
        """Wait for more bytes."""
        try:
            data = self._reader.read(seconds)
        except (OSError, ValueError) as error:  # closed
            raise self._gone() from error
        if data is None:
            return
        if not data:
            raise self._gone()
        self._received += data

    def _whole_frame(self) -> int:
        """Return the length of the first frame if all of it has come, else 0."""
        try:
            length = frame_length(self._received) or 0
        except FrameError as error:
            raise self._garbage(error) from error
        return length if len(self._received) >= length else 0

    def _garbage(self, error: FrameError) -> EngineExited:
        return self._gone(f"it sent garbage ({error})")

    def kill(self) -> None:
        _kill(self._process)

    def close(self) -> None:
        """End the process and close the pipes. May be called again; not while another thread reads."""
        self.kill()
        with self._lock:
            self._end()

    def _gone(self, why: str = "") -> EngineExited:
        """Kill the engine, and return its cause of death with llama.cpp's last words."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_DEATH_SECONDS)
        was_alive = self._process.poll() is None
        self.kill()
        status: int | None = self._process.returncode  # a process that was ending already keeps its own
        if was_alive and (sys.platform == "win32" or status == -signal.SIGKILL):
            status = None
        causes = [why or _cause(status), self._last_words(self._log_start)]
        return EngineExited("; ".join(cause for cause in causes if cause), _HINTS.get(-(status or 0), ""))

    def with_log(self, error: LlmrunError, start: int) -> LlmrunError:
        """Return an error of llama.cpp's with the reason from its log, if it has none.

        Args:
            start: log_size before the command.
        """
        if error.why or isinstance(error, UsageError | CancelledError):
            return error
        words = self._last_words(start)
        kind = OutOfMemoryError if "failed to allocate" in words else type(error)
        return kind(error.what, why=words, hint=error.hint)

    def _last_words(self, start: int) -> str:
        """Return the line of llama.cpp's log, from this byte on, that best explains the failure."""
        if self._log is None or self._log.closed:
            return ""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(start, size - _LOG_TAIL_BYTES))
        text = self._log.read().decode("utf-8", "replace")
        lines = [
            line.strip() for line in text.splitlines() if line.strip() and not any(words in line for words in _USUAL)
        ]
        telling = [line for line in lines if _LAST not in line and any(word in line for word in _TELLING)]
        return _BUILD_FOLDER.sub("", (telling or lines or [""])[-1])[:500]


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:  # never so in a fork of the process that started it
        process.kill()
        process.wait()


def _end(process: subprocess.Popen[bytes], log: IO[bytes] | None) -> None:
    """End the process and close the pipes; must not hold the Pipe, which may be gone."""
    _kill(process)
    for file in (process.stdin, process.stdout, log):
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()


_HINTS: dict[int, str] = {
    9: "the system may have run out of memory: try a smaller --ctx or a smaller quant",
    signal.SIGILL: "llama.cpp was built for another processor: pip install --force-reinstall --no-cache-dir llmrun",
}


def _cause(status: int | None) -> str:
    if status is None:
        return "it hangs"
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-status).name}"
        return f"killed by signal {-status}"
    return f"it ended with status {status}"
