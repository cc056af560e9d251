"""The engine's end of the pipe to the front: its descriptors, and the timing of events."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import chain, groupby
from typing import Any, BinaryIO

from llmrun.errors import UsageError
from llmrun.protocol.frames import FrameError, TextDeltas, encode, encode_text, read_frame
from llmrun.protocol.messages import Event, Failed, Frame, TextDelta

_TEXT_INTERVAL = 0.05  # seconds between two TextDelta for a single user; a server's clients get each token at once


class Channel:
    """The pipe to the front. Sending is safe from any thread."""

    def __init__(self, commands: BinaryIO, events: BinaryIO) -> None:
        self._commands = commands
        self._events = events
        self._lock = threading.Lock()

    @classmethod
    def private(cls) -> Channel:
        """Take over stdin and stdout; later prints to stdout go to stderr."""
        events = os.dup(1)
        os.dup2(2, 1)
        return cls(os.fdopen(0, "rb", closefd=False), os.fdopen(events, "wb"))

    def receive(self) -> Frame | TextDeltas | None:
        """Return the next frame, None when the front is gone. Answer an invalid command with Failed, and read on.

        Raises:
            FrameError: the bytes are not a frame.
        """
        while True:
            try:
                return read_frame(self._commands.read)
            except FrameError as error:
                if error.failed is None:
                    raise
                self.send(error.failed)

    def send(self, *events: Event) -> None:
        """Send events in one write, and Failed instead of one that is too large; exit if the front is gone."""
        data = bytearray()
        for is_text, group in groupby(events, _is_text):
            frames: list[Any] = list(group)
            if is_text:
                with suppress(FrameError):
                    data += encode_text(frames)  # one frame for all
                    continue
            data += b"".join(map(_encoded, frames))
        try:
            with self._lock:
                self._events.write(data)
                self._events.flush()
        except OSError:
            os._exit(0)


def _is_text(event: Event) -> bool:
    return type(event) is TextDelta and not event.logprobs


def _encoded(event: Any) -> bytes:
    try:
        return encode(event)
    except FrameError as error:
        return encode(Failed.of(UsageError("the answer is too large", why=str(error)), event.request))


class Outbox:
    """A buffer that joins the text of a few tokens before it is sent to a single user.

    Every write wakes the front up, on a core that computes the next token: at hundreds of tokens/s that slows decode
    down by several percent, and no user reads that fast. So text waits for the interval at most, or for the next token
    if that takes longer, and the events of one step are sent together.

    Attributes:
        interval: seconds between two pieces of text.
    """

    def __init__(self, send: Callable[..., None], clock: Callable[[], float] = time.perf_counter) -> None:
        self.interval = _TEXT_INTERVAL
        self._send = send
        self._clock = clock
        self._waiting: dict[int, list[TextDelta]] = {}
        self._sent_at = -math.inf

    def set_joining(self, joins: bool) -> None:
        """Set whether the text of a few tokens is joined; else each token is sent at once."""
        self.interval = _TEXT_INTERVAL if joins else 0.0

    @property
    def due(self) -> float:
        """The time by the clock before which text waits."""
        return self._sent_at + self.interval

    def add(self, events: Iterable[Event]) -> float:
        """Send the events of a step, now or with the next ones, in the order of each request.

        Returns:
            The seconds until the next text is due.
        """
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
        return max(0.0, self.due - self._clock())


def _add(pieces: list[TextDelta], piece: TextDelta) -> None:
    """Append a piece; join it with the last one if both were drafted, or neither."""
    last = pieces[-1] if pieces else None
    if last is not None and last.drafted == piece.drafted:
        text, tokens = last.text + piece.text, last.tokens + piece.tokens
        parts = None if last.parts is None and piece.parts is None else (*last.answer_parts, *piece.answer_parts)
        logprobs, ids = last.logprobs + piece.logprobs, last.ids + piece.ids
        pieces[-1] = piece._replace(text=text, tokens=tokens, logprobs=logprobs, parts=parts, ids=ids)
    else:
        pieces.append(piece)
