"""Tokens as they are drawn."""

from __future__ import annotations

import io

from support.streams import Terminal

from llmrun.lab.insight.merges import SentencePiece
from llmrun.lab.insight.tokens import Token, script_counts
from llmrun.lab.views.tokens import show_compared, show_merges, show_scripts, show_tokens
from llmrun.ui.terminal.output import Output

WORDS = [b"<s>", b" hi", b"\xe4\xbd", b"\xa0", b"\x1b[2J\n"]
TOKENS = [Token(number, word, is_control=number == 0) for number, word in enumerate(WORDS)]


def output(**environment: str) -> Output:
    environment = {"TERM": "xterm-256color", "COLUMNS": "60", **environment}
    return Output(stdout=Terminal(), stderr=io.StringIO(), environment=environment)


def test_pieces_have_colours_and_characters_that_tokens_share_are_one_piece() -> None:
    out = output()
    show_tokens(out, TOKENS, table=False)
    text = out.stdout.getvalue()
    first = text.splitlines()[0]
    assert all(piece in first for piece in ("<s>", " hi", "你×2", "↵"))
    assert "\x1b[2J" not in text, "text of the model can't steer the terminal"
    assert first.count("\x1b[") >= 4


def test_without_colours_bars_part_the_pieces() -> None:
    out = output(NO_COLOR="1")
    show_tokens(out, TOKENS, table=False)
    first, _, *rows = out.stdout.getvalue().splitlines()
    assert first == "|<s>| hi|你×2|↵"
    assert [row.split() for row in rows if "of" in row] == [
        ["2", "1/2", "of", "'你'", "e4", "bd"],
        ["3", "2/2", "of", "'你'", "a0"],
    ]


def test_long_texts_have_rows_only_where_they_are_asked_for() -> None:
    for table, least in ((False, 0), (True, 100)):
        out = output()
        show_tokens(out, [Token(7, b"a", is_control=False)] * 100, table=table)
        assert out.stdout.getvalue().count("'a'") == least


def test_what_scripts_cost() -> None:
    out = output(NO_COLOR="1", COLUMNS="90")
    show_scripts(out, "tiny", TOKENS, script_counts(TOKENS), 9000)
    rows = [line.split() for line in out.stdout.getvalue().splitlines()]
    assert ["Chinese", "1", "3", "2", "0.50"] in rows
    assert out.stderr.getvalue().split(", ") == ["5 tokens", "1 of them control tokens", "of the 9,000 of tiny.\n"]


def test_a_tree_for_each_different_token() -> None:
    out = output(NO_COLOR="1")
    rule = SentencePiece([None, b"ab", b"a", b"b"], [0.0, -1.5, -2.0, -3.0])
    show_merges(out, rule, [Token(1, b"ab", False), Token(0, b"<s>", True), Token(1, b"ab", False)])
    lines = out.stdout.getvalue().splitlines()
    assert lines[-4:] == [
        "'ab'  token 1  score -1.5",
        "├── 'a'",
        "└── 'b'",
        "'<s>'  token 0: a whole token, without merges",
    ]


def test_a_vocabulary_without_a_rule_says_so() -> None:
    out = output()
    show_merges(out, None, TOKENS)
    assert (out.stdout.getvalue(), "Can't show merges" in out.stderr.getvalue()) == ("", True)


def test_two_models_beside_each_other() -> None:
    out = output(NO_COLOR="1", COLUMNS="100")
    other = TOKENS[1:]
    show_compared(out, [(name, each, script_counts(each)) for name, each in (("a/one", TOKENS), ("two", other))])
    rows = [line.split() for line in out.stdout.getvalue().splitlines()]
    assert ["SCRIPT", "CHARACTERS", "ONE", "TWO"] in rows
    assert ["Chinese", "1", "2", "2"] in rows
    assert rows[-2:] == [["control", "1", "0"], ["all", "5", "4"]]
