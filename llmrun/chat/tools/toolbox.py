"""The tools of a chat, and their calls.

Owns the names, and the text that a model gets for a refused or failed call; must not know terminals or permissions.
"""

from __future__ import annotations

from collections.abc import Iterable

from llmrun.chat.tools.source import CallResult, ToolSource
from llmrun.errors import UsageError
from llmrun.protocol.codec import load_json
from llmrun.protocol.messages import Tool, ToolCall
from llmrun.protocol.toolcalls import TOOL_NAME, TOOL_NAME_RULE

REFUSED = CallResult("the user does not allow it", failed=True)


class Toolbox:
    """Tools from several sources. Use it as a context manager or call close().

    Args:
        names: of the sources, see ToolSource. Their processes start at once; tools() waits for them.
        seconds: limit of one call.

    Raises:
        UsageError: a source can't be used.
    """

    def __init__(self, names: Iterable[str], seconds: float) -> None:
        self._seconds = seconds
        self._sources = [ToolSource(name) for name in names]
        self._of: dict[str, ToolSource] = {}
        self._running: ToolSource | None = None

    def tools(self) -> tuple[Tool, ...]:
        """Return all tools.

        Raises:
            UsageError: a source or a name can't be used, or two tools have the same name.
        """
        tools = [(tool, source) for source in self._sources for tool in source.tools()]
        for tool, source in tools:
            if not TOOL_NAME.fullmatch(tool.name):
                raise UsageError(f"a tool can't be called {tool.name!r:.80}", why=TOOL_NAME_RULE)
            if tool.name in self._of:
                raise UsageError(f"there are two tools called {tool.name}", hint="leave one of their --tools out")
            self._of[tool.name] = source
        return tuple(tool for tool, _ in tools)

    def call(self, call: ToolCall) -> CallResult:
        """Call a tool; return its result or the error."""
        source = self._of.get(call.name)
        if source is None:
            return CallResult(f"there is no tool {call.name}", failed=True)
        try:
            arguments = load_json(call.arguments)
        except ValueError:
            return CallResult("its arguments are not JSON", failed=True)
        self._running = source
        try:
            return source.call(call.name, arguments, self._seconds)
        finally:
            self._running = None

    def cancel(self) -> None:
        """Cancel the running call. Safe in a signal handler."""
        if self._running is not None:
            self._running.cancel()

    def close(self) -> None:
        """End all processes, at the same time."""
        for source in self._sources:
            source.let_go()
        for source in self._sources:
            source.close()

    def __enter__(self) -> Toolbox:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
