"""The view of choices: shares, the sampler's cuts, and the chosen token."""

from __future__ import annotations

import io

import pytest

from llmrun.protocol.messages import DraftedToken
from llmrun.protocol.questions import ChainStep, Choice
from llmrun.ui.terminal.output import Output
from llmrun.ui.views.chat import draft_cell, least_certain, show_choice, show_sampling

CHOICE = Choice(
    " the",
    forced=False,
    candidates=(" the", "\x1b[2J", " a"),
    chosen=0,
    steps=(
        ChainStep("model", 49_152, (0.5, 0.25, 0.0001)),
        ChainStep("top_k", 40, (0.6, 0.3, 0.0002)),
        ChainStep("min_p", 2, (0.7, 0.3, 0.0)),
        ChainStep("temperature", 2, (0.9, 0.1, 0.0)),
    ),
)


def shown(choice: Choice) -> list[str]:
    output = Output(stdout=io.StringIO(), stderr=io.StringIO(), environment={})
    show_choice(output, choice)
    assert output.stdout.getvalue() == "", "it is not the answer"
    return output.stderr.getvalue().splitlines()


def test_a_choice() -> None:
    head, columns, *rows = shown(CHOICE)
    assert head == "' the': the model gave it 50.0%; drawn with 90.0% from 2 candidates."
    assert columns.split() == ["TOKEN", "model", "top_k", "min_p", "temperature"]
    assert rows[0].split()[1:] == ["the'", "50.0%", "60.0%", "70.0%", "90.0%", "█" * 7 + "▎", "◀", "chosen"]
    assert rows[2].split()[2:] == ["<0.1%", "<0.1%", "cut"]
    assert rows[-1].split() == ["left", "49,152", "40", "2", "2"]


def test_the_least_certain_token() -> None:
    end = CHOICE._replace(text="<end>", steps=(ChainStep("model", 9, (0.99, 0.0, 0.0)),))
    forced = Choice('{"', forced=True)
    assert least_certain((forced, CHOICE, end)) is CHOICE
    assert least_certain((forced,)) is forced


def test_text_of_tokens_can_do_nothing_to_the_terminal() -> None:
    assert "\x1b" not in "".join(shown(CHOICE))


def test_a_forced_token() -> None:
    assert shown(Choice('{"', forced=True)) == ["'{\"': the grammar left no choice."]


@pytest.mark.parametrize(
    ("draft", "said", "cell"),
    [
        (
            DraftedToken("heads", 2, " the", accepted=True, probability=0.834),
            "Drafted: by the model's heads, with 83.4%, as token 2 of the draft.",
            "heads 2 83.4%",
        ),
        (
            DraftedToken("model", 1, "\x1b a", accepted=False, probability=0.75),
            "Drafted '\\x1b a', which was refused: by the draft model, with 75.0%, as token 1 of the draft.",
            "draft model 1 75.0%, not '\\x1b a'",
        ),
        (
            DraftedToken("answer", 3, " the", accepted=True),
            "Drafted: copied from the answer itself, as token 3 of the draft.",
            "answer 3",
        ),
    ],
)
def test_a_drafted_token(draft: DraftedToken, said: str, cell: str) -> None:
    assert draft_cell(draft) == cell
    assert shown(CHOICE._replace(draft=draft))[0].endswith(f"from 2 candidates. {said}")
    assert shown(Choice("x", forced=True, draft=draft)) == [f"'x': the grammar left no choice. {said}"]


def test_where_values_come_from() -> None:
    output = Output(stdout=io.StringIO(), stderr=io.StringIO(), environment={})
    show_sampling(output, [("--temp", "0.8", "default"), ("--top-k", "5", "flag")])
    lines = [line.split() for line in output.stderr.getvalue().splitlines()]
    assert lines == [["SAMPLING", "VALUE", "FROM"], ["--temp", "0.8", "default"], ["--top-k", "5", "flag"]]
