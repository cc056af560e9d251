"""Entry of the `llmrun` command: starts the engine as early as can be, then the command line."""

from __future__ import annotations

import gc
import os
import sys

_WITH_ENGINE = frozenset({"run", "chat", "quantize", "tokenize", "explain"})


def main() -> None:
    """Run the command that sys.argv asks for; ends the process."""
    gc.disable()  # nothing that is imported is garbage; cli.main.run() goes back to normal
    arguments = sys.argv[1:]
    if _needs_engine(arguments):
        from llmrun.runner import launch

        launch.prestart()
        if arguments[0] == "tokenize":
            from llmrun.insight.tokens import open_vocabulary_ahead

            open_vocabulary_ahead(arguments[1])
        elif _loads_named_model(arguments):
            from llmrun.model.loading import open_ahead

            open_ahead(arguments[1])
    from llmrun.cli.main import run

    run()


def _needs_engine(arguments: list[str]) -> bool:
    """Whether a command will surely want an engine; wrong guesses cost only time."""
    others = {"--help", "-h", "-v", "--verbose"}
    return (
        len(arguments) > 1 and arguments[0] in _WITH_ENGINE and not (others & set(arguments) or _is_remote(arguments))
    )


def _is_remote(arguments: list[str]) -> bool:
    """Whether a server answers in place of an engine here."""
    named = os.environ.get("LLMRUN_SERVER") or any(word == "--at" or word.startswith("--at=") for word in arguments)
    return arguments[0] in {"run", "chat"} and bool(named)


def _loads_named_model(arguments: list[str]) -> bool:
    """Whether a model answers whose name is where people mostly write it, and nothing changes how it is loaded."""
    moved = any(word.startswith(("--gpu-layers", "-ngl", "--n-cpu-moe", "--rpc")) for word in arguments)
    return arguments[0] in {"run", "chat", "explain"} and not arguments[1].startswith("-") and not moved


if __name__ == "__main__":
    main()
