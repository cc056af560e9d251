"""Habits from other programs: names of commands and options in llama.cpp, Ollama, LM Studio, vLLM and llm, as data.

A habit with one clear meaning works; another one is an error whose hint is the command to type. Must not import a
command or Typer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

MODEL_OPTIONS = ("-m", "--model", "-hf", "--hf-repo")
PROMPT_OPTIONS = ("-p", "--prompt")
MODEL, PROMPT = "foreign_model", "foreign_prompt"  # names of the hidden options
TAKES_MODEL = frozenset(
    {"run", "chat", "serve", "batch", "embed", "rerank", "pull", "show", "plan", "bench", "tune", "evaluate", "explain"}
    | {"tokenize", "score"}
)
TAKES_PROMPT = frozenset({"run", "explain", "tokenize", "score"})


class Habit(NamedTuple):
    """A command of other programs that llmrun does not have."""

    why: str
    hint: str  # the command to type


COMMANDS = {
    "create": Habit(
        "a Modelfile is made a preset",
        "llmrun config import Modelfile NAME; for a file of a model: llmrun import FILE --name NAME",
    ),
    "push": Habit("nothing is uploaded", "hf upload OWNER/REPO FILE"),
    "cp": Habit("a model gets another name by a link to its file", "llmrun import FILE --link --name NAME"),
    "copy": Habit("a model gets another name by a link to its file", "llmrun import FILE --link --name NAME"),
    "load": Habit("a model is loaded by the command that uses it", "llmrun serve MODEL --keep forever"),
    "unload": Habit("a server unloads idle models after --keep; it ends with its models", "llmrun stop"),
    "login": Habit("the token is shared with other Hugging Face tools", "hf auth login, or set HF_TOKEN"),
    "signin": Habit("the token is shared with other Hugging Face tools", "hf auth login, or set HF_TOKEN"),
    "update": Habit("a model is updated by downloading it again", "llmrun pull MODEL"),
    "version": Habit("", "llmrun --version"),
    "generate": Habit("", "llmrun run MODEL PROMPT"),
    "complete": Habit("", "llmrun run MODEL PROMPT --raw"),
    "status": Habit("", "llmrun ps"),
    "start": Habit("", "llmrun serve --background"),
}
SERVER_WORDS = {"start": "llmrun serve --background", "stop": "llmrun stop", "status": "llmrun ps"}
"""The word after `server` in LM Studio."""

WORDS = {
    "delete": ("rm", "unset"),
    "remove": ("rm", "unset"),
    "rm": ("unset",),
    "ls": ("list",),
    "mv": ("rename",),
    "cat": ("show",),
    "view": ("show",),
    "find": ("search",),
}
"""Word after `sessions`, `config` and other groups -> names of the same command there, the first one that it has."""

OPTIONS = {
    "--ctx-size": "--ctx TOKENS",
    "--num-ctx": "--ctx TOKENS",
    "--context-length": "--ctx TOKENS",
    "--max-model-len": "--ctx TOKENS",
    "--n-predict": "--max-tokens TOKENS",
    "--num-predict": "--max-tokens TOKENS",
    "--predict": "--max-tokens TOKENS",
    "--n-gpu-layers": "--gpu-layers LAYERS",
    "--gpu": "--gpu-layers LAYERS",
    "--system-prompt": "--system TEXT",
    "-sys": "--system TEXT",
    "--hidethinking": "--show-thoughts hide",
    "--keepalive": "llmrun serve MODEL --keep TIME",
    "--api-key": "--key-file FILE",
    "-cnv": "llmrun chat MODEL",
    "--conversation": "llmrun chat MODEL",
    "-i": "llmrun chat MODEL",
    "-p": "--port NUMBER",  # where it can't be a prompt
    "--interactive": "llmrun chat MODEL",
    "--interactive-first": "llmrun chat MODEL",
}
"""Option of another program -> what to write instead."""


def begins_answer(arguments: Sequence[str]) -> bool:
    """Return whether arguments are `-m MODEL -p PROMPT`, without a command."""
    return bool(arguments) and arguments[0].partition("=")[0] in (*MODEL_OPTIONS, *PROMPT_OPTIONS)


def name_arguments(values: dict[str, Any], arguments: Sequence[Any], rest: list[str]) -> list[str]:
    """Put the values of MODEL_OPTIONS and PROMPT_OPTIONS in the places of the first and the last argument.

    Args:
        values: parsed values by parameter; changed.
        arguments: the command's arguments in order, as Typer's parameters; only the last one takes several words.
        rest: words beyond them.

    Returns: the new `rest`.
    """
    model, prompt = values.pop(MODEL, None), values.pop(PROMPT, None)
    if model is None and prompt is None:
        return rest
    words: list[str] = [] if model is None else [model]
    for argument in arguments:
        value = values.get(argument.name)
        words += [] if value is None else [value] if isinstance(value, str) else value
    if not words:  # the prompt alone, for the default model
        values[arguments[-1].name] = (prompt,) if arguments[-1].nargs == -1 else prompt
        return rest
    words += [*rest, *([] if prompt is None else [prompt])]
    for argument in arguments:
        count = 1 if argument.nargs == 1 else len(words)
        taken, words = words[:count], words[count:]
        values[argument.name] = None if not taken else taken[0] if argument.nargs == 1 else tuple(taken)
    return words
