"""Which commands there are, and where. Only the module of the command that was typed is imported: the others would cost
every start tens of milliseconds. Help, and completion of a command's name, need all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Annotated

import typer

from llmrun.cli.completion import complete_model

# Name -> (module of this package, its function or app), in the order in which the help shows them.
COMMANDS = {
    "run": ("run_command", "run"),
    "chat": ("chat", "chat"),
    "pull": ("models", "pull"),
    "list": ("models", "list_models"),
    "show": ("show", "show"),
    "search": ("models", "search"),
    "plan": ("plan", "plan"),
    "rm": ("storage", "remove"),
    "gc": ("storage", "collect_garbage"),
    "import": ("storage", "import_file"),
    "verify": ("storage", "verify"),
    "quantize": ("quantize", "quantize"),
    "convert": ("convert", "convert"),
    "evaluate": ("evaluate", "evaluate"),
    "bench": ("bench", "bench"),
    "tune": ("tune", "tune"),
    "replay": ("replay", "replay"),
    "sessions": ("sessions", "app"),
    "doctor": ("doctor", "doctor"),
    "help": ("topics", "show_help"),
}
ALIASES = {"ls": "list", "remove": "rm"}
"""Names that people are used to from elsewhere; the help does not show them."""


_MODEL_FIRST = frozenset({"run", "chat", "pull", "show", "plan", "quantize", "evaluate", "bench", "tune"})


def register(app: typer.Typer, typed: str = "", *, completes_model: bool = False) -> None:
    """Give the app its commands: only the one that was typed, or all when it is none of them.

    Args:
        typed: the command that is to be run or completed.
        completes_model: only the word behind it is to be completed; where that is a model, the command is not needed.
    """
    if completes_model and typed in _MODEL_FIRST:
        app.command(typed)(_name_model)
        return
    names: Iterable[str] = [typed] if typed in COMMANDS or typed in ALIASES else [*COMMANDS, *ALIASES]
    for name in names:
        module, function = COMMANDS[ALIASES.get(name, name)]
        command = getattr(import_module(f"llmrun.cli.{module}"), function)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name, hidden=name in ALIASES)(command)


def _name_model(model: Annotated[str, typer.Argument(autocompletion=complete_model)]) -> None:
    """Stands in for a command while its model is being typed."""
