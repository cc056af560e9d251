"""Shell completion.

Each press of the Tab key starts a process, so this module imports little, starts no engine and uses no network. A
shell evaluates the output, so only names of harmless characters are offered.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, MutableMapping

import typer

from llmrun.config import load_settings, model_aliases, settings_data
from llmrun.errors import LlmrunError

COMPLETE = "_LLMRUN_COMPLETE"
"""Set by the shell when it wants completions; its value says which shell it is."""

BENCH_ACTIONS = ("run", "history", "compare", "rm")
"""What `llmrun bench` takes in place of a model's name."""

_HEAD = "_LLMRUN_COMPLETE_HEAD"
_HARMLESS = re.compile(r"[A-Za-z0-9_./:@+-]+")
_PATH_STARTS = (".", "/", "~")


def complete_model(incomplete: str) -> list[str]:
    """Complete names of models, those on this disk first. Paths are left to the shell."""
    head = os.environ.get(_HEAD, "")
    wanted = head + incomplete
    if wanted.startswith(_PATH_STARTS):
        return []
    return _tails([*_on_disk(ours_only=False), *_in_catalogue(wanted)], wanted, head)


def complete_installed(incomplete: str) -> list[str]:
    """Complete names of models that can be removed and verified."""
    head = os.environ.get(_HEAD, "")
    return _tails(_on_disk(ours_only=True), head + incomplete, head)


def complete_words(*words: str) -> Callable[[str], list[str]]:
    """Return a function that completes these words."""
    return lambda incomplete: [word for word in words if word.startswith(incomplete)]


def complete_bench(context: typer.Context, incomplete: str) -> list[str]:
    """Complete what follows `llmrun bench`: models and actions."""
    actions = () if context.params.get("models") else BENCH_ACTIONS
    return [*(word for word in actions if word.startswith(incomplete)), *complete_model(incomplete)]


def complete_servers(incomplete: str) -> list[str]:
    """Complete addresses of the servers on this machine."""
    from llmrun.server.registry import running_servers

    head = os.environ.get(_HEAD, "")
    addresses = (server.address for server in running_servers(load_settings().state_dir))
    return _tails(addresses, head + incomplete, head)


def complete_preset(incomplete: str) -> list[str]:
    """Complete names of presets of the settings."""
    try:
        presets = settings_data().get("presets", {})
    except (OSError, ValueError):
        return []
    return [name for name in presets if name.startswith(incomplete)]


def complete_type(incomplete: str) -> list[str]:
    """Complete types of `llmrun quantize`, in lower case if the word begins so."""
    from llmrun.gguf.types import FILE_TYPES

    types = [name.lower() if incomplete.islower() else name for name in FILE_TYPES]
    return [name for name in ("int4", "int8", *types) if name.startswith(incomplete)]


def completes(environment: Mapping[str, str]) -> str:
    """Return "command" or "model" for completions that need no command's module, else ""."""
    words = typed_words(environment) if COMPLETE in environment else []
    if len(words) == 3 and not words[2].startswith("-"):
        return "model"
    return "command" if len(words) == 2 else ""


def typed_words(environment: Mapping[str, str]) -> list[str]:
    """Return the command line up to the cursor; its last word is to be completed."""
    if "_TYPER_COMPLETE_ARGS" in environment:  # zsh, fish and PowerShell give the line
        line = environment["_TYPER_COMPLETE_ARGS"]
        return [*line.split(), *([""] if line[-1:].isspace() else [])]
    index = environment.get("COMP_CWORD", "")
    return environment.get("COMP_WORDS", "").split("\n")[: int(index) + 1] if index.isdigit() else []


def fix_words(environment: MutableMapping[str, str]) -> None:
    """Join words that Bash has split at colons, such as `owner/repo:Q4`.

    The text before the colon is stored for complete_model(), since Bash expects only the text after it.
    """
    if environment.get(COMPLETE) != "complete_bash":
        return
    words = environment.get("COMP_WORDS", "").split("\n")
    index = environment.get("COMP_CWORD", "")
    if not index.isdigit() or not 0 < int(index) < len(words):
        return
    start = int(index)
    head, word = ("", words[start]) if words[start] != ":" else (words[start - 1] + ":", "")
    start -= words[start] == ":"
    while start > 1 and words[start - 1] == ":":
        head = f"{words[start - 2]}:{head}"
        start -= 2
    environment["COMP_WORDS"] = "\n".join([*words[:start], word])
    environment["COMP_CWORD"] = str(start)
    environment[_HEAD] = head


def _on_disk(*, ours_only: bool) -> list[str]:
    from llmrun.models.store.store import all_models

    try:
        return [model.name for model in all_models(load_settings()) if model.is_ours or not ours_only]
    except (LlmrunError, OSError):
        return []  # a key press is no place for an error


def _in_catalogue(wanted: str) -> list[str]:
    from llmrun.models.registry import load_catalogue

    try:
        entries = load_catalogue().entries
    except LlmrunError:
        return []
    entry = entries.get(wanted.partition(":")[0])
    quants = [f"{entry.alias}:{quant.upper()}" for quant in entry.quants] if entry and ":" in wanted else []
    return [*model_aliases(), *entries, *quants]


def _tails(names: Iterable[str], wanted: str, head: str) -> list[str]:
    """Return the part after `head` of each name that begins with `wanted`."""
    fitting = dict.fromkeys(name for name in names if name.startswith(wanted) and _HARMLESS.fullmatch(name))
    return [name.removeprefix(head) for name in fitting]
