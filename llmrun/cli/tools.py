"""`llmrun chat --tools`: its options, and the permission of calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from llmrun.cli.answering import cancelling
from llmrun.errors import UsageError, require_within
from llmrun.protocol.messages import Tool, ToolCall
from llmrun.ui.terminal.activity import Activity
from llmrun.ui.terminal.output import Output

if TYPE_CHECKING:
    from llmrun.chat.store.turns import ToolOutput
    from llmrun.chat.tools.source import Offer
    from llmrun.chat.tools.toolbox import Toolbox
    from llmrun.server.page.tools import PageTools

_PANEL = "Tools"


class ToolOptions(NamedTuple):
    """Sources of tools, tools that run without asking, and the time limit of a call."""

    sources: tuple[str, ...]
    allowed: tuple[str, ...]
    seconds: float


def tooling(
    tools: Annotated[
        list[str] | None,
        typer.Option(
            "--tools",
            metavar="FILE.py|mcp:COMMAND|mcp.json",
            help="Let the model call the functions of a Python file or the tools of MCP servers; may be repeated. "
            "See llmrun help tools.",
            rich_help_panel=_PANEL,
        ),
    ] = None,
    yes_to: Annotated[
        list[str] | None,
        typer.Option(
            "--yes-to", metavar="NAME", help="Run this tool without asking; may be repeated.", rich_help_panel=_PANEL
        ),
    ] = None,
    tool_timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="Time limit of a call, or since the last progress that its server has reported.",
            rich_help_panel=_PANEL,
        ),
    ] = 60,
) -> ToolOptions:
    """Collect the options of tools.

    Raises:
        UsageError: a value is invalid.
    """
    require_within("--tool-timeout", tool_timeout, (1, 86_400))
    if yes_to and not tools:
        raise UsageError("--yes-to needs --tools")
    return ToolOptions(tuple(tools or ()), tuple(yes_to or ()), tool_timeout)


def check_allowed(allowed: tuple[str, ...], offered: tuple[Tool, ...]) -> None:
    """Raise UsageError if a tool of --yes-to does not exist."""
    names = [tool.name for tool in offered]
    for name in allowed:
        if name not in names:
            raise UsageError(f"invalid --yes-to {name}", why=f"the tools are {', '.join(names)}")


@contextmanager
def page_tools(output: Output, options: ToolOptions) -> Iterator[PageTools]:
    """Start the processes of the page's tools, and wait until the tools are known.

    Raises:
        UsageError: a source can't be used, or an allowed tool does not exist.
    """
    from llmrun.server.page.tools import PageTools

    with toolbox(options) as box:
        tools = PageTools(box, options.allowed)
        _show_failures(output, box)
        check_allowed(options.allowed, tools.offered)
        yield tools


def _show_failures(output: Output, toolbox: Toolbox | None) -> None:
    """Name the servers of a file mcp.json that can't be used."""
    for error in toolbox.failures if toolbox is not None else ():
        output.note(f"Left out: {error}", dim=False)


class Tools:
    """The tools of a chat, and the permission of each."""

    def __init__(self, output: Output, toolbox: Toolbox | None, allowed: tuple[str, ...]) -> None:
        """Wait until the tools are known.

        Raises:
            UsageError: a source can't be used, or an allowed tool does not exist.
        """
        self._output, self._toolbox, self._allowed = output, toolbox, {*allowed}
        self._has_asked = False
        self.offered: tuple[Tool, ...] = ()
        self.offers: list[Offer] = []
        if toolbox:
            with Activity(output) as activity:
                activity.show("waiting for the tools")
                self.offered, self.offers = toolbox.tools(), toolbox.offers()
        _show_failures(output, toolbox)
        check_allowed(allowed, self.offered)

    def update(self) -> bool:
        """Take the tools of servers that have changed them; return whether one has. Print what is new or gone."""
        changed = self._toolbox.changed_tools() if self._toolbox is not None else None
        if self._toolbox is None or changed is None:
            return False
        before, after = ([tool.name for tool in tools] for tools in (self.offered, changed))
        self.offered, self.offers = changed, self._toolbox.offers()
        new = [f"+{name}" for name in after if name not in before]
        gone = [f"-{name}" for name in before if name not in after]
        self._output.note(" ".join(["The tools of a server have changed.", *new, *gone]))
        return True

    def answer(self, call: ToolCall) -> ToolOutput:
        """Show a call, ask for permission, run it, and return the result for the model."""
        from llmrun.chat.tools.toolbox import REFUSED
        from llmrun.ui.views.chat import show_call, show_result

        assert self._toolbox is not None
        show_call(self._output, call)
        if self._may_run(call.name):
            with cancelling(self._output, self._toolbox), Activity(self._output) as activity:
                activity.show(f"{call.name} runs")
                called = self._toolbox.call(call)
        else:
            called = REFUSED
        show_result(self._output, called.output)
        return called.output

    def _may_run(self, name: str) -> bool:
        if name in self._allowed:
            return True
        if not self._output.can_ask:
            self._output.note(f"Not run: there is no terminal to ask on. --yes-to {name} allows it.")
            return False
        answers = {"y": "yes", "a": "always: this tool runs without asking from now on", "n": "no"}
        chosen = self._output.choose("Run it?", answers, explained=not self._has_asked)
        self._has_asked = True
        if chosen == "a":
            self._allowed.add(name)
        return chosen != "n"


@contextmanager
def toolbox(options: ToolOptions) -> Iterator[Toolbox | None]:
    """Start the processes of the tools; None without tools."""
    if not options.sources:
        yield None
        return
    from llmrun.chat.tools.toolbox import Toolbox

    with Toolbox(options.sources, options.seconds) as made:
        yield made
