"""The tools of the server on the page: the user's decision about each call, and its result.

Must not know HTTP. A tool that was allowed for good runs without a question in that chat, until the server ends.
"""

from __future__ import annotations

import asyncio
from typing import Literal

from llmrun.chat.store.turns import ToolOutput
from llmrun.chat.tools.toolbox import REFUSED, Toolbox
from llmrun.errors import UsageError
from llmrun.protocol.messages import Tool, ToolCall

Decision = Literal["once", "always", "no"]
_CANCEL_SECONDS = 2.0  # for a call to end, before it is cancelled again, which kills its process


class PageTools:
    """The tools that a model may call on the page.

    Args:
        allowed: names of tools that run without a question.
    """

    def __init__(self, toolbox: Toolbox | None, allowed: tuple[str, ...] = ()) -> None:
        self._toolbox, self._allowed = toolbox, allowed
        self._allowed_in: dict[int, set[str]] = {}  # by chat, until the server ends
        self._decisions: dict[str, asyncio.Future[Decision]] = {}
        self._running = asyncio.Lock()  # a toolbox runs one call at a time
        self._offered: tuple[Tool, ...] = toolbox.tools() if toolbox is not None else ()

    @property
    def offered(self) -> tuple[Tool, ...]:
        """The tools that servers have now; those of the last look while a call runs."""
        if self._toolbox is not None and not self._running.locked():
            changed = self._toolbox.changed_tools()
            self._offered = self._offered if changed is None else changed
        return self._offered

    def asks(self, call: ToolCall, chat: int) -> bool:
        """Return whether a call in a chat needs a decision."""
        return call.name not in self._allowed and call.name not in self._allowed_in.get(chat, ())

    def decide(self, call: str, decision: Decision) -> None:
        """Take the user's decision about a call. Raises UsageError if none is waited for."""
        waiting = self._decisions.get(call)
        if waiting is None or waiting.done():
            raise UsageError("this call waits for no decision", hint="reload the page")
        waiting.set_result(decision)

    async def result(self, call: ToolCall, chat: int) -> ToolOutput:
        """Wait for the decision about a call in a chat, run it if it is allowed, and return its result."""
        assert self._toolbox is not None
        called = REFUSED
        if await self._may_run(call, chat):
            async with self._running:
                calling = asyncio.ensure_future(asyncio.to_thread(self._toolbox.call, call))
                try:
                    called = await asyncio.shield(calling)
                except asyncio.CancelledError:
                    while not calling.done():  # the thread reads the process, as that of the next call would
                        self._toolbox.cancel()
                        await asyncio.wait((calling,), timeout=_CANCEL_SECONDS)
                    raise
        return called.output

    async def _may_run(self, call: ToolCall, chat: int) -> bool:
        if not self.asks(call, chat):
            return True
        decided = self._decisions[call.id] = asyncio.get_running_loop().create_future()
        try:
            decision: Decision = await decided
        finally:
            del self._decisions[call.id]
        if decision == "always":
            self._allowed_in.setdefault(chat, set()).add(call.name)
        return decision != "no"
