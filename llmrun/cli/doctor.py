"""`llmrun doctor`: what this machine and this installation can do."""

from __future__ import annotations

from dataclasses import asdict

from llmrun.cli.options import JsonOption
from llmrun.config import Settings, load_settings
from llmrun.errors import LlmrunError
from llmrun.messages import Loaded
from llmrun.ui.output import Output


def doctor(json: JsonOption = False) -> None:
    """Look at this machine and installation, and say what to mend."""
    from llmrun.doctor import Finding, examine
    from llmrun.models.store import Store
    from llmrun.ui.tables import show_findings

    output = Output(json=json)
    settings = load_settings()
    try:
        engine = _try_engine(settings)
        trouble = []
    except LlmrunError as error:
        engine = None
        trouble = [Finding("engine", "problem", str(error), error.hint)]
    findings = examine(settings, installed=len(Store(settings).installed()), engine=engine) + trouble
    if json:
        output.result_json([asdict(finding) for finding in findings])
    else:
        show_findings(output, findings)


def _try_engine(settings: Settings) -> Loaded | None:
    """Load the default model, if it is on this disk."""
    from llmrun import runner
    from llmrun.model import locate, prepare
    from llmrun.models.registry import load_catalogue
    from llmrun.plan import Wishes

    located = locate(load_catalogue().default, settings)
    if located.path is None:
        return None
    with prepare(located.spec, located.path, Wishes(n_ctx=512)) as model:
        model.start(runner.Runner())
        return model.loaded
