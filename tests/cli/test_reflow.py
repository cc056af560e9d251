"""Texts of `llmrun help` on terminals of any width."""

from __future__ import annotations

import pytest

from llmrun.cli.help import TOPICS, topic
from llmrun.cli.pages import reflow

EXAMPLES = (
    "llmrun ",
    "git ",
    "export ",
    "LLMRUN_SERVER=",
    "{",
    "return ",
    "with ",
    "--",
    "drafted ",
    "Drafted ",
    "texts,",
    "POST ",
)


@pytest.mark.parametrize("columns", [40, 60, 120])
@pytest.mark.parametrize("name", TOPICS)
def test_a_topic_follows_the_terminal_and_loses_no_word(name: str, columns: int) -> None:
    text = topic(name)
    shown = reflow(text, columns)
    assert sorted(shown.split()) == sorted(text.split())
    too_long = [line for line in shown.split("\n") if len(line) > columns and not line.startswith("    ")]
    assert all(line.strip().startswith(EXAMPLES) for line in too_long), too_long
    assert reflow(text, 0) == reflow(text, 80) == text
    assert max(map(len, text.split("\n"))) <= 80


def test_examples_stay_as_they_are_and_terms_stand_above_their_texts_where_it_is_narrow() -> None:
    text = (
        "A paragraph goes on\nin the next line.\n\n    def f():\n        return 1\n\n"
        "A longer   One text.\nterm       More of it.\n  --flag F    What it is, and that\n              goes on."
    )
    assert reflow(text, 100).split("\n") == [
        "A paragraph goes on in the next line.", "", "    def f():", "        return 1", "",
        "A longer   One text.", "term       More of it.", "  --flag F    What it is, and that goes on.",
    ]  # fmt: skip
    assert reflow(text, 30).split("\n") == [
        "A paragraph goes on in the", "next line.", "", "    def f():", "        return 1", "",
        "A longer   One text.", "term       More of it.", "  --flag F", "    What it is, and that goes", "    on.",
    ]  # fmt: skip


@pytest.mark.parametrize("columns", [60, 100])
def test_a_numbered_list_keeps_its_rows(columns: int) -> None:
    rows = reflow(topic("settings"), columns).splitlines()
    numbers = [row.split("  ")[0] for row in (row.removeprefix("Order").strip() for row in rows) if row[:1].isdecimal()]
    assert numbers == ["1", "2", "3", "4", "5", "6", "7"]
