"""Beam search: options, and display of results."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from llmrun.cli.answering import cancelling, show_again
from llmrun.cli.completion import complete_words
from llmrun.errors import CancelledError, CutOffError, UsageError
from llmrun.model import Model
from llmrun.planning.memory import kv_bytes
from llmrun.protocol.jobs.beams import EARLY_STOPPING, BeamSettings, BeamsFound, SearchBeams, TreeNode
from llmrun.protocol.messages import AnswerRequest
from llmrun.ui.answer.view import DisplayOptions
from llmrun.ui.terminal.output import Output

_PANEL = "Beam search"


BeamsOption = Annotated[
    int | None,
    typer.Option(
        "--beams",
        metavar="B",
        help="Search for the likeliest answer with B beams; see llmrun help beams.",
        rich_help_panel=_PANEL,
    ),
]
LengthPenaltyOption = Annotated[
    float | None,
    typer.Option(
        "--length-penalty", help="Prefer long answers (above 0) or short ones (below 0).", rich_help_panel=_PANEL
    ),
]
EarlyStoppingOption = Annotated[
    str | None,
    typer.Option(
        "--early-stopping",
        metavar="true|false|never",
        help="Stop at B answers; when no beam looks better than the worst of them; or when none can become better.",
        autocompletion=complete_words(*EARLY_STOPPING),
        rich_help_panel=_PANEL,
    ),
]


def beam_options(
    beams: BeamsOption = None,
    length_penalty: LengthPenaltyOption = None,
    early_stopping: EarlyStoppingOption = None,
) -> BeamSettings | None:
    """Collect the options of beam search; None if it is off.

    Raises:
        UsageError: a value is invalid, or --beams is missing.
    """
    if beams is None:
        others = {"--length-penalty": length_penalty, "--early-stopping": early_stopping}
        alone = next((flag for flag, value in others.items() if value is not None), None)
        if alone is not None:
            raise UsageError(f"{alone} needs --beams", hint=f"--beams 4 {alone} {others[alone]}")
        return None
    given = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    return BeamSettings(beams, **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]


def search(
    output: Output, model: Model, request: AnswerRequest, settings: BeamSettings, shown_as: DisplayOptions
) -> None:
    """Search, then print the best answer to stdout and everything else to stderr.

    Raises:
        CancelledError: Ctrl-C; the partial result is shown.
        CutOffError: a limit cut off an answer that must follow a grammar.
    """
    with cancelling(output, model):
        found, tree = searched(output, model, request, settings)
    best = found.answers[0]
    if output.json:
        from llmrun.ui.views.beams import as_json

        output.result_json(as_json(settings, found, tree))
    else:
        show_again(output, best.text, shown_as)
        if shown_as.stats or (shown_as.stats is None and output.stdout_is_terminal):
            show_rest(output, model, settings, found, is_free=request.grammar is None)
    if found.is_cancelled:
        raise CancelledError("stopped by Ctrl-C")
    if best.reason == "length" and request.grammar is not None:
        why = "the beams have filled the KV cache" if found.is_full else "the length limit is reached"
        hint = "a larger --ctx, or fewer beams" if found.is_full else "a larger --max-tokens, or none"
        raise CutOffError("the answer is cut off and incomplete", why=why, hint=hint)
    if found.is_full and not output.json:
        output.note("The search is cut off: the beams have filled the KV cache. A larger --ctx gives them more room.")


def searched(
    output: Output, model: Model, request: AnswerRequest, settings: BeamSettings
) -> tuple[BeamsFound, list[TreeNode]]:
    """Search and draw the tree meanwhile; return the result and the tree."""
    from llmrun.ui.views.beams import BeamsView

    if model.thinks:
        request = replace(request, thinking=False)
    with BeamsView(output) as view:
        return model.beams(SearchBeams(request, settings), view.step), view.tree


def show_rest(output: Output, model: Model, settings: BeamSettings, found: BeamsFound, *, is_free: bool) -> None:
    """Show the other answers and the cost of the search."""
    from llmrun.ui.views.beams import show_cost, show_others

    show_others(output, found)
    n_bytes = kv_bytes(model.header, found.cells, model.load.kv_type_k)
    show_cost(output, settings, found, n_bytes, is_free=is_free)
