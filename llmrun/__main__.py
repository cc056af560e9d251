"""Entry of the `llmrun` command: starts the engine as early as possible, then the command line."""

from __future__ import annotations

import gc
import os
import signal
import sys

_MOVES = (
    "--gpu-layers", "-ngl", "--n-cpu-moe", "-ncmoe", "--rpc", "--split-mode", "-sm", "--main-gpu", "-mg",
    "--tensor-split", "-ts", "--device", "-dev", "--override-tensor", "-ot",
)  # fmt: skip
_WITH_ENGINE = frozenset({"run", "chat", "quantize", "tokenize", "explain"})


def main() -> None:
    """Run the command in sys.argv; ends the process."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of an import; cli.main.run() sets the real handler
    gc.disable()  # imports make no garbage; cli.main.run() enables it again
    arguments = sys.argv[1:]
    if _needs_engine(arguments):
        from llmrun.runner import launch

        _choose_kernels(arguments)
        launch.prestart()
        if arguments[0] == "tokenize":
            _load_vocabulary_ahead(arguments[1])
        elif _loads_named_model(arguments):
            _load_ahead(arguments[1])
    from llmrun.cli.main import run

    run()


def _needs_engine(arguments: list[str]) -> bool:
    """Return whether a command will surely need an engine; wrong guesses cost only time."""
    others = {"--help", "-h", "-v", "--verbose", "--web"}  # the page's server starts engines of its own
    return (
        len(arguments) > 1 and arguments[0] in _WITH_ENGINE and not (others & set(arguments) or _is_remote(arguments))
    )


def _choose_kernels(arguments: list[str]) -> None:
    """Set the variable of --kernels for the engine that starts now; the command checks the value."""
    for word, value in zip(arguments, [*arguments[1:], ""], strict=True):
        name, is_joined, joined = word.partition("=")
        if name == "--kernels":
            os.environ["LLMRUN_KERNELS"] = joined if is_joined else value


def _is_remote(arguments: list[str]) -> bool:
    """Return whether a remote server answers instead of an engine."""
    named = os.environ.get("LLMRUN_SERVER") or any(word == "--at" or word.startswith("--at=") for word in arguments)
    return arguments[0] in {"run", "chat"} and bool(named)


def _loads_named_model(arguments: list[str]) -> bool:
    """Return whether the first argument names the model to load, and no option changes its loading."""
    moved = any(word.startswith(_MOVES) for word in arguments)
    return arguments[0] in {"run", "chat", "explain"} and not arguments[1].startswith("-") and not moved


def _load_ahead(name: str) -> None:
    """Let the prestarted engine load a model's weights while the command line is parsed.

    A guess: if it is wrong, or there is no such model, the command reports it later.
    """
    from contextlib import suppress

    from llmrun.config import load_settings, may_load_otherwise
    from llmrun.errors import LlmrunError
    from llmrun.models.location import locate
    from llmrun.runner import launch

    with suppress(LlmrunError):
        settings = load_settings()
        path = locate(name, settings).path
        if path is None or not path.is_file():
            return
        folder = settings.state_dir
        if may_load_otherwise(folder):  # few starts need the import
            from llmrun.planning.tuned import loads_as_usual

            if not loads_as_usual(path, folder):
                return
        launch.preload(str(path.absolute()))


def _load_vocabulary_ahead(name: str) -> None:
    """Let the prestarted engine load a model's vocabulary, and no weights, while the command line is parsed.

    A guess, as above.
    """
    from contextlib import suppress

    from llmrun.config import load_settings
    from llmrun.errors import LlmrunError
    from llmrun.models.location import locate
    from llmrun.protocol.jobs.text import TOKENIZE, TokenizeText
    from llmrun.runner import client

    with suppress(LlmrunError):
        path = locate(name, load_settings()).path
        if path is not None and path.is_file():
            client.prestarted().begin(TOKENIZE, TokenizeText(str(path.absolute()), "", special=False))


if __name__ == "__main__":
    main()
