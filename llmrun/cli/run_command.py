"""`llmrun run`: one answer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from llmrun.cli.answering import cancelling, show
from llmrun.cli.loading import open_model
from llmrun.cli.options import (
    CtxOption,
    GpuLayersOption,
    MaxTokensOption,
    ModelArgument,
    StatsOption,
    StopOption,
    SystemOption,
    TemplateOption,
    ThreadsOption,
    VerboseOption,
    YesOption,
    limits,
    template_text,
    with_sampling,
)
from llmrun.errors import CancelledError, UsageError
from llmrun.messages import Message
from llmrun.model import Model
from llmrun.plan import Wishes
from llmrun.ui.output import Output


@with_sampling
def run(
    model: ModelArgument,
    prompt: Annotated[list[str] | None, typer.Argument(metavar="PROMPT", help="What to ask; - is stdin.")] = None,
    system: SystemOption = None,
    template: TemplateOption = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text; no chat template.", rich_help_panel="Prompt")
    ] = False,
    max_tokens: MaxTokensOption = None,
    stop: StopOption = None,
    stats: StatsOption = None,
    json: Annotated[
        bool,
        typer.Option("--json", help="Print the engine's events, one JSON object a line.", rich_help_panel="Answer"),
    ] = False,
    ctx: CtxOption = None,
    threads: ThreadsOption = None,
    gpu_layers: GpuLayersOption = None,
    verbose: VerboseOption = False,
    yes: YesOption = False,
    *,
    flags: Mapping[str, Any],
) -> None:
    """Answer one prompt. What comes in on stdin stands before it."""
    output = Output(json=json)
    text = read_prompt(output, prompt or [])
    jinja = template_text(template)
    ends = limits(max_tokens, stop)
    with open_model(output, model, Wishes(ctx, threads, gpu_layers), yes=yes, verbose=verbose) as loaded:
        sampling, _ = loaded.sampling(flags)
        if raw or not (jinja or has_template(output, loaded)):
            events = loaded.generate("\n\n".join(filter(None, (system, text))), sampling=sampling, limits=ends)
        else:
            events = loaded.chat(conversation(system, text), sampling=sampling, limits=ends, template=jinja)
        with cancelling(loaded):
            finished = show(output, events, loaded, stats)
    if finished.reason == "cancelled":
        raise CancelledError("stopped by Ctrl-C")


def read_prompt(output: Output, words: list[str]) -> str:
    """The prompt: the arguments' words, with what a pipe brings before them or in place of a lone "-".

    Raises:
        UsageError: there is nothing to ask.
    """
    piped = "" if output.stdin_is_terminal and "-" not in words else _read_all(output)
    typed = " ".join(_decoded(word) for word in words if word != "-")
    text = "\n\n".join(part for part in (piped, typed) if part.strip())
    if not text:
        raise UsageError(
            "there is no prompt", hint='llmrun run MODEL "Why is the sky blue?", or llmrun chat MODEL to talk'
        )
    return text


def _decoded(word: str) -> str:
    """An argument as UTF-8, whatever the locale took it for."""
    return os.fsencode(word).decode("utf-8", "replace")


def _read_all(output: Output) -> str:
    data = output.stdin.buffer.read() if hasattr(output.stdin, "buffer") else output.stdin.read().encode()
    return bytes(data).decode("utf-8", "replace").rstrip("\n")


def has_template(output: Output, model: Model) -> bool:
    """Whether the model can be talked to; says so when it can't."""
    if not model.loaded.has_template:
        output.note(f"{model.spec.name} has no chat template: the text is continued (--template gives it one)")
    return model.loaded.has_template


def conversation(system: str | None, text: str) -> list[Message]:
    """A user's message, behind the system prompt if there is one."""
    first = [Message("system", system)] if system else []
    return [*first, Message("user", text)]
