"""`llmrun run`: one answer."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from llmrun.cli.answering import ShownAs, cancelling, collecting, show, show_attached
from llmrun.cli.loading import open_model
from llmrun.cli.options import AnswerOptions, LoadingOptions, ModelArgument, StatsOption, loading, wanted, with_options
from llmrun.cli.sampling import sampling_flags, sampling_rows
from llmrun.errors import CancelledError, CutOffError, LlmrunError, UsageError
from llmrun.model import Expected, Model
from llmrun.protocol.messages import AnswerRequest, Finished, Message
from llmrun.storage import check_target
from llmrun.ui.terminal.output import Output

_WORTH_SAVING = 64  # tokens that had to be prefilled
_BYTES_A_TOKEN = 4  # of a prompt, as a guess
_ANSWER_TOKENS = 300  # of an answer of no stated length, as a guess


PromptArgument = Annotated[list[str] | None, typer.Argument(metavar="PROMPT", help="What to ask; - is stdin.")]
RawOption = Annotated[
    bool, typer.Option("--raw", help="Continue the text; no chat template.", rich_help_panel="Prompt")
]
PromptCacheOption = Annotated[
    bool,
    typer.Option(
        "--prompt-cache",
        help="Keep the prompt's KV state on disk: the next prompt that begins alike starts from it.",
        rich_help_panel="Prompt",
    ),
]
RecordOption = Annotated[
    Path | None,
    typer.Option(
        "--record",
        metavar="FILE",
        help="Keep all that made the answer, for llmrun replay.",
        rich_help_panel="Answer",
    ),
]
EventsOption = Annotated[
    bool,
    typer.Option("--json", help="Print the engine's events, one JSON object a line.", rich_help_panel="Answer"),
]
ExplainOption = Annotated[
    bool,
    typer.Option(
        "--explain-sampling", help="Say on stderr where each sampling value comes from.", rich_help_panel="Sampling"
    ),
]


@with_options(wanted=wanted, loading=loading, flags=sampling_flags)
def run(
    model: ModelArgument,
    prompt: PromptArgument = None,
    raw: RawOption = False,
    prompt_cache: PromptCacheOption = False,
    record: RecordOption = None,
    stats: StatsOption = None,
    json: EventsOption = False,
    explain_sampling: ExplainOption = False,
    *,
    wanted: AnswerOptions,
    loading: LoadingOptions,
    flags: Mapping[str, Any],
) -> None:
    """Answer one prompt. What comes in on stdin stands before it."""
    output = Output(json=json)
    if record is not None:
        check_target(record)
    if wanted.attached is not None:
        refuse_file_names(prompt or [])
    special = raw or prompt_cache or record or json or explain_sampling
    if not prompt and output.stdin_is_terminal and output.stdout_is_terminal and not special:
        _chat(model, stats, wanted, loading, flags)
        return
    text = read_prompt(output, prompt or [])
    if wanted.attached is not None:
        show_attached(output, wanted.attached)
        text = wanted.attached.before(text)
    expected = Expected(len(text.encode()) // _BYTES_A_TOKEN, wanted.asked.limits.max_tokens or _ANSWER_TOKENS)
    with open_model(output, model, loading, keeps_states=prompt_cache, expected=expected) as loaded:
        sampling, origins = loaded.sampling(flags)
        if explain_sampling:
            from llmrun.ui.views.sampling import show_sampling

            show_sampling(output, sampling_rows(sampling, origins))
        asked = asked_for(output, loaded, text, wanted, raw=raw)
        asked = replace(asked, sampling=sampling, speculation=loaded.drafting.wanted())
        markdown = not (wanted.plain or raw or asked.grammar)
        shown_as = ShownAs(stats, markdown, wanted.thoughts, end_line=not raw)
        pieces: list[str] = []
        with cancelling(loaded):
            finished = show(output, collecting(loaded.answer(asked), pieces), loaded, shown_as)
        if prompt_cache and finished.stats.prompt_tokens - finished.stats.reused_tokens >= _WORTH_SAVING:
            _save_state(output, loaded)
        if record is not None:
            from llmrun.chat.replay import record_of, write

            write(record, record_of(loaded, asked, "".join(pieces), finished))
    if finished.reason == "cancelled":
        raise CancelledError("stopped by Ctrl-C")
    if finished.reason == "length":
        _say_limit(output, asked, finished)


def _chat(
    model: str, stats: bool | None, wanted: AnswerOptions, loading: LoadingOptions, flags: Mapping[str, Any]
) -> None:
    """A conversation, where there is no prompt and somebody who can type."""
    from llmrun.cli.chat import Saving, chat
    from llmrun.cli.tools import tooling

    saving = Saving(last=False, session=None, private=False, overflow=None, keep=0)
    inspect.unwrap(chat)(model, stats, wanted=wanted, tooling=tooling(), saving=saving, loading=loading, flags=flags)


def _say_limit(output: Output, asked: AnswerRequest, finished: Finished) -> None:
    """Which limit ended an answer, where that was not asked for.

    Raises:
        CutOffError: the answer had to follow a grammar, and does so no more.
    """
    stats = finished.stats
    full = stats.context_used >= stats.n_ctx
    why = f"the context window of {stats.n_ctx:,} tokens is full" if full else f"--max-tokens {stats.completion_tokens}"
    if asked.grammar is not None:
        hint = "a larger --ctx, or a shorter prompt" if full else "a larger --max-tokens, or none"
        raise CutOffError("the answer is cut off and incomplete", why=why, hint=hint)
    if full and not (output.json or output.stdout_is_terminal):
        output.note(f"the answer is cut off: {why}")


def refuse_file_names(words: list[str]) -> None:
    """See that the shell has not made one file for -f, and a prompt of the others, out of a pattern.

    Raises:
        UsageError: it has.
    """
    names = [word for word in words if not word.isspace() and " " not in word and os.path.isfile(word)]  # noqa: PTH113
    if names:
        suffixes = {os.path.splitext(name)[1] for name in names}  # noqa: PTH122
        pattern = f"*{suffixes.pop()}" if len(suffixes) == 1 else "*"
        raise UsageError(
            f"{names[0]!r} is a file, and stands where the prompt does",
            why="-f takes one word, and the shell makes several of an unquoted pattern",
            hint=f"-f '{pattern}', or -f before each file",
        )


def _save_state(output: Output, model: Model) -> None:
    """Keep the prompt's KV state; the answer is there whether that succeeds or not."""
    try:
        if not model.save_state(prompt_only=True).tokens:
            output.note("The next prompt will be read anew: its KV state can't be written, or there is no room for it.")
    except LlmrunError as error:
        output.note(f"The next prompt will be read anew: {error}")


def asked_for(output: Output, model: Model, text: str, wanted: AnswerOptions, *, raw: bool) -> AnswerRequest:
    """A text as a conversation, or to be continued where there is no chat template."""
    if raw or not (wanted.asked.template or has_template(output, model)):
        prompt = "\n\n".join(filter(None, (wanted.system, text)))
        return replace(wanted.asked, prompt=prompt, template=None, thinking=None, thinking_tokens=None)
    return replace(wanted.asked, messages=tuple(conversation(wanted.system, text)))


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
