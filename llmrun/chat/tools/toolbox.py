"""The tools of a chat, and their calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from llmrun.chat.tools.source import CallResult, Offer, ToolSource, open_server, open_sources
from llmrun.errors import UsageError
from llmrun.protocol.codec import load_json
from llmrun.protocol.messages import Tool, ToolCall
from llmrun.protocol.toolcalls import TOOL_NAME, TOOL_NAME_RULE

REFUSED = CallResult("the user does not allow it", failed=True)
NOT_ASKED = CallResult("it was not run: there is nobody here who could be asked to allow it", failed=True)


def no_such_tool(call: ToolCall) -> CallResult:
    """Return the result of a call of a tool that is not offered."""
    return CallResult(f"there is no tool {call.name}", failed=True)


class Toolbox:
    """Tools from several sources. Use it as a context manager or call close().

    Args:
        names: of the sources, see open_sources(). Their processes start at once; tools() waits for them.
        seconds: limit of one call.
        search: the address of a SearXNG server, for ready-made tools.

    Attributes:
        failures: of the servers of a file mcp.json that tools() has left out.

    Raises:
        UsageError: a source can't be used.
    """

    def __init__(self, names: Iterable[str], seconds: float, search: str = "") -> None:
        self._seconds, self._search = seconds, search
        self._sources = [source for name in names for source in open_sources(name, search)]
        self._tools: dict[ToolSource, list[Tool]] = {}  # as they are called there
        self._of: dict[str, tuple[ToolSource, str]] = {}  # a tool's name here -> its source, and its name there
        self._running: ToolSource | None = None
        self.failures: list[UsageError] = []

    def tools(self) -> tuple[Tool, ...]:
        """Return all tools; where sources have one of the same name, a server's name stands before it.

        Raises:
            UsageError: a source or a name can't be used, or two tools have the same name.
        """
        self._tools = {source: self._listed(source) for source in self._sources}
        if self.failures and len(self.failures) == len(self._sources):
            raise self.failures[0]
        return self._named()

    def add(self, name: str) -> tuple[Tool, ...]:
        """Start a further source; return all tools. Raises UsageError as tools()."""
        return self._added(open_sources(name, self._search), self._listed)

    def add_server(self, name: str) -> tuple[Tool, ...]:
        """Start a server of the user's own mcp.json; return all tools. cancel() ends it.

        Raises:
            UsageError: as tools(), or the server can't be used.
        """
        return self._added([open_server(name)], ToolSource.tools)

    def _added(self, added: list[ToolSource], list_tools: Callable[[ToolSource], list[Tool]]) -> tuple[Tool, ...]:
        before = self._sources, self._tools
        self._sources = [*self._sources, *added]
        try:
            for source in added:
                self._running = source
                self._tools = {**self._tools, source: list_tools(source)}
            return self._named()
        except BaseException:  # Ctrl-C, too
            self._sources, self._tools = before
            for source in added:
                source.close()
            raise
        finally:
            self._running = None

    def server_of(self, tool: str) -> str | None:
        """Return the name that a tool's server has in its mcp.json; None for a tool of another source."""
        source = self._of[tool][0]
        return source.name if source.is_of_file else None

    def of_source(self, name: str) -> list[str]:
        """Return the names of the tools of a source, as they are called here."""
        return [tool for tool, (source, _) in self._of.items() if source.name == name]

    @property
    def notes(self) -> list[str]:
        """Notes for the user on the sources."""
        return [note for source in self._sources for note in source.notes]

    def changed_tools(self) -> tuple[Tool, ...] | None:
        """Return all tools if a server has changed its own since they were listed last; None otherwise.

        A list that can't be used is left out. Must not be called while a call runs.
        """
        changed = {source: tools for source in self._sources if (tools := source.changed_tools()) is not None}
        if not changed:
            return None
        before = self._tools
        self._tools = {**self._tools, **changed}
        try:
            return self._named()
        except UsageError:
            self._tools = before
            return None

    def _named(self) -> tuple[Tool, ...]:
        """Name the tools of all sources; return them. Raises UsageError as tools()."""
        listed = [(tool, source) for source, tools in self._tools.items() for tool in tools]
        times = Counter(tool.name for tool, _ in listed)
        tools, of = [], dict[str, tuple[ToolSource, str]]()
        for tool, source in listed:
            name = f"{source.name}_{tool.name}" if source.is_of_file and times[tool.name] > 1 else tool.name
            if not TOOL_NAME.fullmatch(name):
                raise UsageError(f"a tool can't be called {name!r:.80}", why=TOOL_NAME_RULE)
            if name in of:
                raise UsageError(f"there are two tools called {name}", hint="leave one of their --tools out")
            of[name] = source, tool.name
            tools.append(tool._replace(name=name))
        self._of = of
        return tuple(tools)

    def _listed(self, source: ToolSource) -> list[Tool]:
        """Return a source's tools; one of several servers of a file may fail, and the others be used."""
        try:
            return source.tools()
        except UsageError as error:
            if not source.is_of_file:
                raise
            self.failures.append(error)
            return []

    def offers(self) -> list[Offer]:
        """Return the resources and prompts of MCP servers, once tools() has waited for them."""
        return [offer for source in self._sources for offer in source.offers]

    def call(self, call: ToolCall) -> CallResult:
        """Call a tool; return its result or the error."""
        if call.name not in self._of:
            return no_such_tool(call)
        source, name = self._of[call.name]
        try:
            arguments = load_json(call.arguments)
        except ValueError:
            return CallResult("its arguments are not JSON", failed=True)
        self._running = source
        try:
            return source.call(name, arguments, self._seconds)
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
