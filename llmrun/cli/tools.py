"""`--tools`: its options, the permission of calls, and the rounds of an answer that calls tools."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from llmrun.cli import settings_file
from llmrun.cli.answering import cancelling, show
from llmrun.errors import UsageError, require_within
from llmrun.protocol.messages import Event, Finished, Tool, ToolCall
from llmrun.ui.answer.view import DisplayOptions
from llmrun.ui.terminal.activity import Activity
from llmrun.ui.terminal.output import Output

if TYPE_CHECKING:
    from llmrun.chat.conversation import Conversation
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
            metavar="files|web|python|all|FILE.py|mcp:COMMAND|mcp.json",
            help="Let the model call ready-made tools, the functions of a Python file, or the tools of MCP servers, "
            "each after a question. May be repeated; see llmrun help tools.",
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
    from llmrun.chat.tools.toolbox import Toolbox
    from llmrun.server.page.tools import PageTools

    with Toolbox(options.sources, options.seconds, search_address() if options.sources else "") as box:
        tools = PageTools(box, options.allowed)
        _show_failures(output, box)
        check_allowed(options.allowed, tools.offered())
        yield tools


def _show_failures(output: Output, toolbox: Toolbox | None, n_failures: int = 0, n_notes: int = 0) -> None:
    """Name the servers of mcp.json that can't be used, and what ready-made tools lack, from the given numbers on."""
    if toolbox is None:
        return
    for error in toolbox.failures[n_failures:]:
        output.note(f"Left out: {error}", dim=False)
    for note in toolbox.notes[n_notes:]:
        output.note(note)


class Tools:
    """The tools of a chat, and the permission of each."""

    def __init__(self, output: Output, toolbox: Toolbox | None, options: ToolOptions) -> None:
        """Wait until the tools are known.

        Raises:
            UsageError: a source can't be used, or an allowed tool does not exist.
        """
        self._output, self._toolbox, self._allowed = output, toolbox, {*options.allowed}
        self._seconds = options.seconds
        self._has_asked = False
        self._known: tuple[Tool, ...] = ()
        self._off: set[str] = set()
        self.offers: list[Offer] = []
        if toolbox:
            with Activity(output) as activity:
                activity.show("waiting for the tools")
                self._known, self.offers = toolbox.tools(), toolbox.offers()
        _show_failures(output, toolbox)
        check_allowed(options.allowed, self._known)

    @property
    def offered(self) -> tuple[Tool, ...]:
        """The tools that the model may call."""
        return tuple(tool for tool in self._known if tool.name not in self._off)

    @property
    def switched_off(self) -> list[str]:
        return [tool.name for tool in self._known if tool.name in self._off]

    def switch(self, name: str, opened: ExitStack, *, is_on: bool) -> None:
        """Switch a tool, or all of a source, on or off; a source that is not there yet is started.

        Args:
            opened: what the chat closes at its end.

        Raises:
            UsageError: there is no such tool or source, or it can't be used.
        """
        from llmrun.chat.tools.ready import ALL, OF_ALL

        if name == ALL and is_on:
            for kind in OF_ALL:
                self.switch(kind, opened, is_on=True)
            return
        names = {tool.name for tool in self._known if name in (tool.name, ALL)}
        names |= {*self._toolbox.of_source(name)} if self._toolbox is not None else set()
        if is_on and not names:
            self._add(name, opened)
        elif not names:
            raise UsageError(f"there is no tool {name}", hint="/tools lists them")
        self._off = self._off - names if is_on else self._off | names

    def _add(self, name: str, opened: ExitStack) -> None:
        if self._toolbox is None:
            from llmrun.chat.tools.toolbox import Toolbox

            self._toolbox = opened.enter_context(Toolbox((), self._seconds, search_address()))
        shown = len(self._toolbox.failures), len(self._toolbox.notes)
        with Activity(self._output) as activity:
            activity.show("waiting for the tools")
            self._known = self._toolbox.add(name)
        self.offers = self._toolbox.offers()
        _show_failures(self._output, self._toolbox, *shown)

    def names_to_switch(self, word: str) -> list[str]:
        """Return what may stand after "on" or "off"."""
        from llmrun.chat.tools.ready import ALL, KINDS

        return [*KINDS, ALL, *self.switched_off] if word == "on" else [ALL, *(tool.name for tool in self.offered)]

    def update(self, conversation: Conversation) -> None:
        """Offer the model the tools that its servers have now. Print what is new or gone."""
        changed = self._toolbox.changed_tools() if self._toolbox is not None else None
        if self._toolbox is None or changed is None:
            return
        before, after = ([tool.name for tool in tools] for tools in (self._known, changed))
        self._known, self.offers = changed, self._toolbox.offers()
        new = [f"+{name}" for name in after if name not in before]
        gone = [f"-{name}" for name in before if name not in after]
        self._output.note(" ".join(["The tools of a server have changed.", *new, *gone]))
        self.offer_in(conversation)

    def offer_in(self, conversation: Conversation) -> None:
        """Let the next request of a conversation offer the tools."""
        conversation.settings.request = replace(conversation.settings.request, tools=self.offered)

    def show_rounds(
        self, conversation: Conversation, events: Generator[Event, None, None], shown_as: DisplayOptions
    ) -> Finished:
        """Show an answer, and after calls of tools the next ones."""
        finished = self._show_round(conversation, events, shown_as)
        while conversation.calls:
            results = [self.answer(call) for call in conversation.calls]
            self.update(conversation)
            finished = self._show_round(conversation, conversation.go_on(results), shown_as)
        return finished

    def _show_round(
        self, conversation: Conversation, events: Generator[Event, None, None], shown_as: DisplayOptions
    ) -> Finished:
        """Show one answer, which may end in calls of tools."""
        # The partial answer is saved before the store is closed, whatever is raised here.
        with closing(events), cancelling(self._output, conversation.model):
            finished = show(self._output, events, conversation.model, shown_as)
            for _ in events:
                pass  # the turn is saved after its last event
        return finished

    def answer(self, call: ToolCall) -> ToolOutput:
        """Show a call, ask for permission, run it, and return the result for the model."""
        from llmrun.chat.tools.toolbox import NOT_ASKED, REFUSED, no_such_tool
        from llmrun.ui.views.chat import show_call, show_result

        assert self._toolbox is not None
        show_call(self._output, call)
        if call.name in self._off:
            called = no_such_tool(call)
        elif call.name not in self._allowed and not self._output.can_ask:
            self._output.note(f"Not run: there is no terminal to ask on. --yes-to {call.name} allows it.")
            called = NOT_ASKED
        elif self._may_run(call.name):
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
        answers = {"y": "yes", "a": f"always in this chat: {name} runs without asking from now on", "n": "no"}
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

    with Toolbox(options.sources, options.seconds, search_address()) as made:
        yield made


def search_address() -> str:
    """Return the address of the user's SearXNG server; "" without one. Raises UsageError if it is invalid."""
    found = settings_file.look_up(settings_file.SEARCH_KEY, settings_file.read_file())
    return found[0] if found is not None else ""
