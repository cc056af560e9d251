"""The engine's end of the pipe to the front.

Owns the descriptors, and when events go out; must not know what they say.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from typing import BinaryIO

from llmrun.protocol.frames import encode, read_frame
from llmrun.protocol.messages import Event, Frame, TextDelta

_TEXT_INTERVAL = 0.05  # seconds between two TextDelta of an answer


class Channel:
    """The pipe to the front. Sending is safe from any thread."""

    def __init__(self, commands: BinaryIO, events: BinaryIO) -> None:
        self._commands = commands
        self._events = events
        self._lock = threading.Lock()

    @classmethod
    def private(cls) -> Channel:
        """The pipe's ends under our own descriptors: what prints to stdout from now on goes to stderr."""
        events = os.dup(1)
        os.dup2(2, 1)
        return cls(os.fdopen(0, "rb", closefd=False), os.fdopen(events, "wb"))

    def receive(self) -> Frame | None:
        """The next frame; None when the front is gone.

        Raises:
            FrameError: what came is not a frame.
        """
        return read_frame(self._commands.read)

    def send(self, event: Event) -> None:
        """Give an event to the front; without a front there is nothing left to do."""
        data = encode(event)
        try:
            with self._lock:
                self._events.write(data)
                self._events.flush()
        except OSError:
            os._exit(0)


class Outbox:
    """Sends events on, the text of fast models a few tokens at a time.

    Every frame wakes the front up, on a core that computes the next token: at hundreds of tokens/s that costs decode
    several percent, and nobody reads that fast. Text waits for _TEXT_INTERVAL at most, or for the next token if that
    takes longer.
    """

    def __init__(self, send: Callable[[Event], None], clock: Callable[[], float] = time.perf_counter) -> None:
        self._send = send
        self._clock = clock
        self._waiting: dict[int, TextDelta] = {}
        self._sent_at = -math.inf

    def add(self, event: Event) -> None:
        """Send an event now, or with the next ones."""
        if not isinstance(event, TextDelta):
            self._flush()
            self._send(event)
            return
        before = self._waiting.get(event.request)
        if before is not None:
            text, tokens = before.text + event.text, before.tokens + event.tokens
            event = TextDelta(event.request, text, tokens, before.logprobs + event.logprobs)
        self._waiting[event.request] = event
        if self._clock() - self._sent_at >= _TEXT_INTERVAL:
            self._flush()

    def _flush(self) -> None:
        for event in self._waiting.values():
            self._send(event)
        self._waiting.clear()
        self._sent_at = self._clock()
