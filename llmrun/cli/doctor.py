"""`llmrun doctor`: checks of this machine and the installation."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from llmrun.cli.options import JsonOption
from llmrun.config import Settings, load_settings
from llmrun.errors import LlmrunError
from llmrun.ui.terminal.output import Output

if TYPE_CHECKING:
    from llmrun.doctor.trial import TrialResult


def doctor(
    answer: Annotated[
        bool, typer.Option("--answer/--no-answer", help="Test an answer of a model on this disk.")
    ] = True,
    json: JsonOption = False,
) -> None:
    """Check this machine and the installation, and suggest fixes.

    The exit code is 0 if nothing is broken, else that of the first problem.
    """
    from llmrun.doctor.doctor import examine
    from llmrun.models.store.store import Store
    from llmrun.ui.terminal.tables import show_findings

    output = Output(json=json)
    settings = load_settings()
    if output.stderr_is_terminal and not json:
        output.note("Testing an answer and asking the hub takes some seconds." if answer else "Asking the hub.")
    trial = _try(settings) if answer else None
    findings = examine(settings, installed=len(Store(settings).installed()), trial=trial)
    if json:
        output.result_json([asdict(finding) for finding in findings])
    else:
        show_findings(output, findings)
    status = next((finding.exit_status for finding in findings if finding.exit_status), 0)
    if status:
        raise typer.Exit(status)


def _try(settings: Settings) -> TrialResult | LlmrunError | None:
    from llmrun.doctor.trial import try_model

    try:
        return try_model(settings)
    except LlmrunError as error:
        return error
