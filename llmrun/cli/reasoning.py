"""Options of reasoning: on the command line of commands that answer, and of /think in a chat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from llmrun.errors import UsageError, require_within
from llmrun.protocol.arguments import EFFORTS, Effort
from llmrun.protocol.params import MOST_TOKENS

ThinkOption = Annotated[
    bool | None,
    typer.Option(
        "--think/--no-think",
        help="Let a reasoning model think before it answers, or not. Default: as its template says.",
        rich_help_panel="Answer",
    ),
]
ThinkTokensOption = Annotated[
    int | None,
    typer.Option(
        "--think-tokens", metavar="TOKENS", help="End the reasoning after this many tokens.", rich_help_panel="Answer"
    ),
]
ThinkEffortOption = Annotated[
    Effort | None,
    typer.Option(
        "--think-effort",
        metavar="LEVEL",
        help="Reasoning effort: none, minimal, low, medium, high, xhigh or max; models know some of them.",
        rich_help_panel="Answer",
    ),
]
KeepReasoningOption = Annotated[
    bool | None,
    typer.Option(
        "--keep-reasoning/--no-keep-reasoning",
        help="Keep the reasoning of earlier answers in the prompt, or leave it out. Default: keep it where the "
        "template can, or where tools were called and the context window has room.",
        rich_help_panel="Answer",
    ),
]
ShowThoughtsOption = Annotated[
    Literal["on", "fold", "hide"],
    typer.Option(
        "--show-thoughts",
        metavar="on|fold|hide",
        help="Show the reasoning in full, only its beginning, or not at all.",
        rich_help_panel="Answer",
    ),
]


@dataclass(frozen=True, slots=True)
class ReasoningOptions:
    """Options of a reasoning model: whether and how long it reasons, and the part to show."""

    thinking: bool | None = None  # None: as the chat template says
    tokens: int | None = None  # at most
    effort: str | None = None  # one of EFFORTS
    shown: Literal["on", "hide", "fold"] = "fold"


def read_think(text: str, label: str) -> ReasoningOptions:
    """Parse the argument of /think.

    Raises:
        UsageError: the argument is invalid.
    """
    if text == "off":
        return ReasoningOptions(thinking=False)
    if text == "on":
        return ReasoningOptions(thinking=True, shown="on")
    if text in ("hide", "fold"):
        return ReasoningOptions(shown="hide" if text == "hide" else "fold")
    if text in EFFORTS:
        return ReasoningOptions(effort=text)
    if text.isdecimal():
        require_within(label, int(text), (0, MOST_TOKENS))
        return ReasoningOptions(tokens=int(text))
    raise UsageError(
        f"invalid {label} {text}", why="must be on, off, hide, fold, a number of tokens, or an effort such as low"
    )
