"""The engine's end of the pipe to the front.

Owns the descriptors, and when events go out; must not know what they say.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterable
from itertools import chain
from typing import BinaryIO

from llmrun.errors import UsageError
from llmrun.protocol.frames import FrameError, encode, read_frame
from llmrun.protocol.messages import Event, Failed, Frame, TextDelta

_TEXT_INTERVAL = 0.05  # seconds between two TextDelta of an answer that a terminal shows
_SERVED_TEXT_INTERVAL = 0.01  # of one among many, where clients measure the inter-token latency


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
        """The next frame; None when the front is gone. A command that can't be read fails, and the next one is read.

        Raises:
            FrameError: what came is not a frame.
        """
        while True:
            try:
                return read_frame(self._commands.read)
            except FrameError as error:
                if error.failed is None:
                    raise
                self.send(error.failed)

    def send(self, *events: Event) -> None:
        """Send events to the front in one write, and Failed instead of one that is too large; end without a front."""
        data = b"".join(map(_encoded, events))
        try:
            with self._lock:
                self._events.write(data)
                self._events.flush()
        except OSError:
            os._exit(0)


def _encoded(event: Event) -> bytes:
    try:
        return encode(event)
    except FrameError as error:
        return encode(Failed.of(UsageError("the answer is too large", why=str(error)), event.request))


class Outbox:
    """Sends events on, the text of fast models a few tokens at a time.

    Whatever is written wakes the front up, on a core that computes the next token: at hundreds of tokens/s that costs
    decode several percent, and nobody reads that fast. So text waits for the interval at most, or for the next token if
    that takes longer, and what a step gave to all answers goes out together.

    Args:
        send: as Channel has it.
        clock: seconds, monotonic.

    Attributes:
        interval: seconds between two pieces of text.
    """

    def __init__(self, send: Callable[..., None], clock: Callable[[], float] = time.perf_counter) -> None:
        self.interval = _TEXT_INTERVAL
        self._send = send
        self._clock = clock
        self._waiting: dict[int, list[TextDelta]] = {}
        self._sent_at = -math.inf

    def serve(self, n_users: int) -> None:
        """From now on, so many users may be answered at once."""
        self.interval = _TEXT_INTERVAL if n_users == 1 else _SERVED_TEXT_INTERVAL

    def add(self, events: Iterable[Event]) -> None:
        """Send what a step gave, now or with the next ones; of one request, in its order."""
        due: list[Event] = []
        for event in events:
            if isinstance(event, TextDelta):
                _add(self._waiting.setdefault(event.request, []), event)
            else:
                due += [*self._waiting.pop(event.request, ()), event]
        if self._waiting and self._clock() - self._sent_at >= self.interval:
            due += chain.from_iterable(self._waiting.values())
            self._waiting.clear()
            self._sent_at = self._clock()
        if due:
            self._send(*due)


def _add(pieces: list[TextDelta], piece: TextDelta) -> None:
    """One more piece; joined with the last one where both were drafted, or neither."""
    last = pieces[-1] if pieces else None
    if last is not None and last.drafted == piece.drafted:
        text, tokens = last.text + piece.text, last.tokens + piece.tokens
        parts = None if last.parts is None and piece.parts is None else (*last.answer_parts, *piece.answer_parts)
        pieces[-1] = piece._replace(text=text, tokens=tokens, logprobs=last.logprobs + piece.logprobs, parts=parts)
    else:
        pieces.append(piece)
