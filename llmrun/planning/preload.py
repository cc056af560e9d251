"""The guess of a command's model, so that its weights load while the command line is parsed. Imports little."""

from __future__ import annotations

from contextlib import suppress

from llmrun.config import TUNE_FILE, load_settings
from llmrun.errors import LlmrunError
from llmrun.models.location import locate
from llmrun.runner import launch


def preload(name: str) -> None:
    """Let the prestarted engine load a model's weights.

    A guess: if it is wrong, or there is no such model, the command reports it later.
    """
    with suppress(LlmrunError):
        settings = load_settings()
        path = locate(name, settings).path
        if path is None or not path.is_file():
            return
        if (settings.state_dir / TUNE_FILE).exists():  # spares every other start the import
            from llmrun.planning.tuned import loads_as_usual

            if not loads_as_usual(path, settings.state_dir):
                return
        launch.preload(str(path.absolute()))
