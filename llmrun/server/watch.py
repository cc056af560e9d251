"""The end of a request's work when its client leaves, its time is over, or the server ends.

Must not know models, routes or protocols.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from llmrun.errors import LlmrunError
from llmrun.server.http import AnswerTimeoutError, ClientLeftError, Receive


class Watch:
    """The work of one request, in the task that created this object."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._is_answered = False
        self.error: LlmrunError | None = None

    def end(self, error: LlmrunError) -> None:
        """Stop the work: this error is raised from watched()."""
        if self.error is None and not self._is_answered:
            self.error = error
            self._task.cancel()

    def cancel(self) -> None:
        """Cancel the task, even if only the end of the response is left to be sent."""
        self._task.cancel()

    def answered(self) -> None:
        """Let the task finish: only the end of the response is left to be sent."""
        self._is_answered = True

    def take_back(self) -> None:
        """Undo the count of the cancellation that stopped the work, so that the task can go on."""
        if hasattr(self._task, "uncancel"):  # from Python 3.11 on
            self._task.uncancel()


@asynccontextmanager
async def watched(receive: Receive, seconds: float = math.inf) -> AsyncIterator[Watch]:
    """Watch a request until the block ends, whatever the block waits for.

    Args:
        receive: of the request, whose body was read.
        seconds: time limit.

    Raises:
        ClientLeftError: the client disconnected.
        AnswerTimeoutError: the time is over.
        LlmrunError: see Watch.end().
    """
    watch = Watch()
    leaving = asyncio.ensure_future(_end_when_left(watch, receive))
    late = AnswerTimeoutError(f"the answer takes longer than {seconds:g} seconds")
    timer = asyncio.get_running_loop().call_later(seconds, watch.end, late) if seconds < math.inf else None
    try:
        yield watch
    except asyncio.CancelledError:
        if watch.error is None:
            raise
        watch.take_back()
        raise watch.error from None
    finally:
        leaving.cancel()
        if timer is not None:
            timer.cancel()


async def _end_when_left(watch: Watch, receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    watch.end(ClientLeftError("the client disconnected"))
