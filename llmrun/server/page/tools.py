"""The tools of the server on the page: the user's decision about each call, and its result.

Must not know HTTP. A tool that was allowed for good runs without a question in that chat, until the server ends. The
MCP servers of the user's own mcp.json are started when a chat switches them on, and offered to such chats only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Set
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from llmrun.chat.store.turns import ToolOutput
from llmrun.chat.tools.source import own_file, own_servers
from llmrun.chat.tools.toolbox import REFUSED, Toolbox
from llmrun.errors import UsageError
from llmrun.protocol.messages import Tool, ToolCall

Decision = Literal["once", "always", "no"]
_CANCEL_SECONDS = 2.0  # for a call to end, before it is cancelled again, which kills its process
_Result = TypeVar("_Result")


class PageTools:
    """The tools that a model may call on the page.

    Args:
        allowed: names of tools that run without a question.
    """

    def __init__(self, toolbox: Toolbox, allowed: tuple[str, ...] = ()) -> None:
        self._toolbox, self._allowed = toolbox, allowed
        self._allowed_in: dict[int, set[str]] = {}  # by chat, until the server ends
        self._decisions: dict[str, asyncio.Future[Decision]] = {}
        self._running = asyncio.Lock()  # a toolbox runs one call, or starts one server, at a time
        self._started: set[str] = set()  # servers that a chat has switched on
        self._note(toolbox.tools())

    def _note(self, tools: tuple[Tool, ...]) -> None:
        self._known = [(tool, self._toolbox.server_of(tool.name)) for tool in tools]

    def offered(self, servers: Set[str] = frozenset()) -> tuple[Tool, ...]:
        """Return the tools of all sources; while a call runs, as they were before it.

        Args:
            servers: switched on in the chat; the tools of the others are left out.
        """
        if not self._running.locked() and (changed := self._toolbox.changed_tools()) is not None:
            self._note(changed)
        return tuple(tool for tool, server in self._known if server not in self._started or server in servers)

    def servers(self) -> list[dict[str, Any]]:
        """Return a name, a program or host, and the tools if it was started, of each server that a chat can switch on.

        A server that an option names is not among them. Raises UsageError if the file is invalid.
        """
        tools: dict[str | None, list[str]] = {}
        for tool, server in self._known:
            tools.setdefault(server, []).append(tool.name)
        return [
            {
                "name": name,
                "about": Path(given.command[0]).name if given.command else urlsplit(given.url).hostname,
                "tools": tools.get(name, []) if name in self._started else None,
            }
            for name, given in own_servers().items()
            if name in self._started or name not in tools
        ]

    async def start(self, name: str) -> list[str]:
        """Start a server, if that has not been done; return the names of its tools.

        Raises:
            UsageError: there is no such server, or it can't be used.
        """
        async with self._running:
            if name not in self._started:
                try:
                    tools = await self._in_thread(partial(self._toolbox.add_server, name))
                except UsageError as error:
                    hint = error.hint or f"change it in {own_file()}, then switch it on again"
                    raise UsageError(error.what, why=error.why, hint=hint) from None
                self._started.add(name)
                self._note(tools)
        return [tool.name for tool, server in self._known if server == name]

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
        called = REFUSED
        if await self._may_run(call, chat):
            async with self._running:
                called = await self._in_thread(partial(self._toolbox.call, call))
        return called.output

    async def _in_thread(self, work: Callable[[], _Result]) -> _Result:
        """Return the result of what a process is asked in a thread; a cancel ends the process if it must."""
        working = asyncio.ensure_future(asyncio.to_thread(work))
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            while not working.done():  # the thread reads the process, as that of the next call would
                self._toolbox.cancel()
                await asyncio.wait((working,), timeout=_CANCEL_SECONDS)
            raise

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
