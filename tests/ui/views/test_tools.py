"""A call as a user sees it before it runs: whole, and with nothing hidden in it."""

from __future__ import annotations

import io
import json
from collections.abc import Callable

import pytest

from llmrun.chat.store.turns import ToolOutput
from llmrun.protocol.media import Media
from llmrun.protocol.messages import Tool, ToolCall
from llmrun.ui.terminal.output import Output
from llmrun.ui.views.chat import show_call, show_result, show_tools


def shown(show: Callable[[Output], None]) -> str:
    output = Output(stdout=io.StringIO(), stderr=io.StringIO(), environment={})
    show(output)
    assert isinstance(output.stderr, io.StringIO)
    return output.stderr.getvalue()


def test_a_call_is_shown_whole() -> None:
    text = "first\n" + "long " * 5000 + "\n\nlast"
    call = ToolCall("1", "write", json.dumps({"path": "a.txt", "text": text, "mode": {"append": True}, "none": ""}))
    assert shown(lambda output: show_call(output, call)).splitlines() == [
        "● write",
        "    path: a.txt",
        "    text: first",
        f"      {'long ' * 5000}",
        "      ",
        "      last",
        '    mode: {"append": true}',
        "    none: ",
    ]


def test_what_a_terminal_would_not_show_is_shown_as_an_escape() -> None:
    call = ToolCall("1", "run", json.dumps({"command": "ls \x1b[8m; rm -rf ~", "a\u202eb": ["\u200b"]}))
    lines = shown(lambda output: show_call(output, call)).splitlines()
    assert lines[1] == '    command: "ls \\u001b[8m; rm -rf ~"'
    assert lines[2] == '    "a\\u202eb": "[\\"\\u200b\\"]"'


@pytest.mark.parametrize("arguments", ["{city: Rome}", "[1]", "[" * 2000 + "]" * 2000])
def test_arguments_that_are_not_an_object_are_shown_as_they_are(arguments: str) -> None:
    lines = shown(lambda output: show_call(output, ToolCall("1", "weather", arguments))).splitlines()
    assert lines == ["● weather", f"    arguments: {arguments}"]


def test_a_result_is_a_line_without_controls() -> None:
    line = shown(lambda output: show_result(output, ToolOutput("a\x1b[31m\n" + "b" * 500)))
    assert line == f"  → a {'b' * 157}…\n"
    seen = ToolOutput("Seen:", (Media("iVBORw0KGgoAAAAN"),) * 2)
    assert shown(lambda output: show_result(output, seen)) == "  → Seen: [image] [image]\n"


def test_tools_are_a_line_each() -> None:
    tools = (Tool("weather", "Tells it.\nMore.", '{"properties": {"city": {}, "days": {}}}'), Tool("now"))
    assert shown(lambda output: show_tools(output, tools)) == "  weather(city, days)  Tells it.\n  now()\n"
