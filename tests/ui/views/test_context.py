"""The view of the context window's content."""

from __future__ import annotations

import io

from llmrun.protocol.messages import Message, PromptHistory
from llmrun.protocol.questions import TokenCount
from llmrun.ui.terminal.output import Output
from llmrun.ui.views.chat import show_context


def test_every_message_the_template_and_what_is_free() -> None:
    output = Output(stdout=io.StringIO(), stderr=io.StringIO(), environment={})
    messages = [Message("system", "Be kind."), Message("user", "x" * 99), Message("assistant", "\x1b[2Jyes")]
    show_context(output, messages, TokenCount((3, 40, 1), 50), 100)
    assert output.stdout.getvalue() == ""
    lines = [line.split() for line in output.stderr.getvalue().splitlines()]
    assert lines[1][:1] + lines[1][-3:] == ["system", "3", "3.0%", "▌"]
    assert lines[2][-3:] == ["40", "40.0%", "█" * 6 + "▍"]
    assert lines[4][:1] + lines[4][-3:] == ["template", "6", "6.0%", "█"]
    assert lines[5] == ["free", "50", "50.0%", "█" * 8]
    assert lines[6] == ["50", "of", "100", "tokens."]
    assert "\x1b" not in output.stderr.getvalue()


def test_a_window_that_nobody_knows_has_no_shares() -> None:
    output = Output(stdout=io.StringIO(), stderr=io.StringIO(), environment={})
    show_context(output, [Message("user", "Hi")], TokenCount((3,), 12), 0, about=True)
    said = output.stderr.getvalue()
    assert "%" not in said
    assert "free" not in said
    assert said.endswith("About 12 tokens.\n")


def test_what_stands_as_it_was_generated() -> None:
    for history, expected in (
        (PromptHistory(2, 1_500), "The first 1,500 tokens stand as they were computed and generated.\n"),
        (PromptHistory(0, 0, is_shortened=True), "reasoning of earlier turns is left out.\n"),
    ):
        output = Output(stdout=io.StringIO(), stderr=io.StringIO(), environment={})
        show_context(output, [Message("user", "Hi")], TokenCount((3,), 2_000, history), 4_096)
        assert output.stderr.getvalue().endswith(expected)


def test_what_the_user_typed_stands_where_passages_or_files_come_first() -> None:
    output = Output(stderr=io.StringIO(), environment={"COLUMNS": "100"})
    message = Message("user", "Passages of my documents ... Where is the tea?")
    show_context(output, [message], TokenCount((3,), 12), 0, typed={message.content: "[1 passage] Where is the tea?"})
    shown = output.stderr.getvalue()
    assert "[1 passage] Where is the tea?" in shown
    assert "Passages of my documents" not in shown
