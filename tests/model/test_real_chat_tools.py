"""A chat with the real model and a real tool: the call is the grammar's, the result comes from another process."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import llmrun as library
from llmrun.chat.conversation import ChatSettings, Conversation
from llmrun.chat.store.store import Sessions
from llmrun.chat.store.turns import Question
from llmrun.chat.tools.toolbox import Toolbox
from llmrun.protocol.messages import AnswerRequest, Started
from llmrun.protocol.params import Limits

pytestmark = pytest.mark.usefixtures("pulled", "package_on_path")

FILE = '''
def add(first: int, second: int) -> int:
    """Adds two numbers.

    Args:
        first: of the two
        second: of the two
    """
    return first + second
'''


def test_a_turn_with_a_call(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FILE)
    with (
        library.load("smollm2") as model,
        Toolbox([str(tmp_path / "mine.py")], 600) as toolbox,
        Sessions(tmp_path) as store,
    ):
        asked = AnswerRequest(tools=toolbox.tools(), tool_choice="=add", limits=Limits(100))
        settings = ChatSettings(flags={"seed": 1}, request=asked)
        conversation = Conversation(model, store.new(), settings, on_note=print, on_overflow=lambda misfit: "stop")
        list(conversation.ask(Question("What is 12 and 30?")))
        (call,) = conversation.calls
        numbers = json.loads(call.arguments)
        result = toolbox.call(call)
        assert (result.text, result.failed) == (str(numbers["first"] + numbers["second"]), False)

        settings.request = replace(asked, tool_choice="auto", limits=Limits(20))
        started, *_ = conversation.go_on([result.output])
        conversation.end_turn()
        assert isinstance(started, Started)
        assert started.reused_tokens > started.prompt_tokens / 2
        answer = store.open().last_answer
        assert answer is not None
        assert answer.rounds[0].calls == (call,)
        assert answer.rounds[0].results == (result.text,)


def test_a_ready_made_tool_is_called(tmp_path: Path) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "notes.txt").write_text("Tea is in the kitchen.")
    with (
        library.load("smollm2") as model,
        Toolbox([f"files:{folder}"], 600) as toolbox,
        Sessions(tmp_path) as store,
    ):
        tools = [tool for tool in toolbox.tools() if tool.name == "read_file"]
        asked = AnswerRequest(tools=tuple(tools), tool_choice="=read_file", limits=Limits(100))
        settings = ChatSettings(flags={"seed": 1}, request=asked)
        conversation = Conversation(model, store.new(), settings, on_note=print, on_overflow=lambda misfit: "stop")
        list(conversation.ask(Question("Read notes.txt")))
        (call,) = conversation.calls
        path = json.loads(call.arguments)["path"]
        expected = "Tea is in the kitchen." if path == "notes.txt" else f"FileNotFoundError: {path} is not a file"
        assert toolbox.call(call).text in (expected, f"PermissionError: {path} is outside of the folder")
        conversation.end_turn()
