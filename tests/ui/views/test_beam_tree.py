"""The tree of a search as rows of text."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest

from llmrun.protocol.jobs.beams import ROOT, BeamAnswer, BeamSettings, BeamsFound, BeamStep, TreeNode
from llmrun.ui.terminal.output import Output
from llmrun.ui.views.beams import BeamsView, show_cost, show_others, tree_rows


def node(parent: int, text: str, total: float = -1.0, *, ended: bool = False) -> TreeNode:
    return TreeNode(parent, 0, text, -0.5, total, ended)


TREE = [
    node(ROOT, "The"),  # 0
    node(0, " sky"),
    node(0, " air", -3.0),
    node(1, " is"),
    node(1, " was", -4.0),
    node(3, " blue", -1.5),  # 5
    node(3, "</s>", -2.0, ended=True),
]


def test_tokens_without_a_fork_are_one_row() -> None:
    rows = tree_rows(TREE, [5], 20, 60)
    assert [row.text for row in rows] == [
        "The",
        "├─ sky",
        "│ ├─ is",
        "│ │ ├─ blue -1.50",
        "│ │ └─ ■ -2.00",
        "│ └─ was -4.00",
        "└─ air -3.00",
    ]  # fmt: skip


def test_what_goes_on_or_has_ended_is_alive_the_rest_is_pruned() -> None:
    rows = {row.text.split()[-2]: row.alive for row in tree_rows(TREE, [5], 20, 60) if "-" in row.text}
    assert rows == {"blue": True, "■": True, "was": False, "air": False}


@pytest.mark.parametrize("height", range(1, 9))
def test_it_fits_the_terminal_and_what_was_pruned_first_goes_first(height: int) -> None:
    rows = [row.text for row in tree_rows(TREE, [5], height, 60)]
    assert len(rows) <= height
    assert any("blue" in row for row in rows) or height < 3
    assert any("air" in row for row in rows) == (height >= 7)


@pytest.mark.parametrize("columns", [10, 20, 40])
def test_a_long_branch_shows_its_end(columns: int) -> None:
    tree = [node(ROOT, "word"), *(node(place, f" w{place}") for place in range(50))]
    (row,) = tree_rows(tree, [50], 5, columns)
    assert len(row.text) <= columns
    assert row.text.startswith("…")
    assert row.text.endswith("w49 -1.00")


def test_terminals_without_unicode_get_other_lines() -> None:
    rows = tree_rows(TREE, [5], 20, 60, unicode=False)
    assert all(row.text.isascii() for row in rows)


def test_what_a_model_writes_can_do_nothing_to_the_terminal() -> None:
    (row,) = tree_rows([node(ROOT, "a\x1b[2Jb\nc\r")], [0], 5, 60)
    assert "\x1b" not in row.text
    assert "\n" not in row.text


FOUND = BeamsFound(
    answers=(
        BeamAnswer((1, 2), "The capital city of Italy is Rome.", -1.0, -0.5, "stop", 6),
        BeamAnswer((1, 3), "The capital city of Italy is Milan.", -3.0, -1.5, "stop", 5),
    ),
    prompt_tokens=5,
    prefill_seconds=0.1,
    steps=2,
    rows=8,
    decode_seconds=0.5,
    cells=256,
    is_full=False,
    is_cancelled=False,
)


def output() -> Output:
    return Output(stdout=io.StringIO(), stderr=io.StringIO(), environment={})


def test_other_answers_and_the_cost_are_beside_the_answer() -> None:
    shown = output()
    show_others(shown, FOUND)
    show_cost(shown, BeamSettings(4), FOUND, 1_000_000, is_free=True)
    assert not shown.stdout.getvalue()
    lines = shown.stderr.getvalue().splitlines()
    assert any(line.split() == ["-1.500", "-3.00", "2", "…", "Milan."] for line in lines)
    assert any("2 steps of 4.0 rows" in line and "16.0 tokens/s" in line and "1.0 MB" in line for line in lines)
    assert not any("sampling" in line for line in lines), "the answer is short"


def test_a_search_that_ended_before_a_decode_step_has_no_rate() -> None:
    shown = output()
    found = replace(FOUND, steps=0, rows=0)
    show_cost(shown, BeamSettings(4), found, 1_000_000, is_free=True)
    assert shown.stderr.getvalue() == "4 beams: no decode step after the prompt · KV cache 1.0 MB\n"


def test_long_free_text_is_told_to_be_sampled() -> None:
    answers = (BeamAnswer(tuple(range(100)), "x", -9.0, -1.0, "length", 0),)
    for is_free in (False, True):
        shown = output()
        found = BeamsFound(answers, 5, 0.1, 100, 400, 1.0, 256, is_full=False, is_cancelled=False)
        show_cost(shown, BeamSettings(4), found, 1_000_000, is_free=is_free)
        assert ("sampling" in shown.stderr.getvalue()) is is_free


def test_in_a_pipe_the_tree_is_kept_and_not_drawn() -> None:
    shown = output()
    with BeamsView(shown) as view:
        view.step(BeamStep(tuple(TREE[:3]), (1, 2)))
        view.step(BeamStep(tuple(TREE[3:]), (5,)))
    assert view.tree == TREE
    assert not shown.stderr.getvalue()
