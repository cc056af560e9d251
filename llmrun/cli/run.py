"""`llmrun run`: one answer."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from llmrun.cli.answering import (
    cancelling,
    check_logprobs,
    collecting,
    on_ctrl_c,
    show,
    show_attached,
    show_logprobs,
    show_n_answers,
)
from llmrun.cli.beams import beam_options, search
from llmrun.cli.completion import complete_model
from llmrun.cli.defaults import no_model
from llmrun.cli.docs import DocsOptions, documents, open_documents, show_found
from llmrun.cli.loading import open_chat_model
from llmrun.cli.options import (
    AnswerOptions,
    AtOption,
    KeyFileOption,
    LoadingOptions,
    PresetOption,
    StatsOption,
    answer_options,
    check_output_file,
    loading,
    remote_server,
    with_options,
)
from llmrun.cli.sampling import SAMPLING_OPTIONS, sampling_rows
from llmrun.cli.tools import ToolOptions, Tools, toolbox, tooling
from llmrun.errors import CancelledError, CutOffError, LlmrunError, UsageError, require_within
from llmrun.model.chat_model import ChatModel, loaded_locally
from llmrun.model.loading import ExpectedUse
from llmrun.protocol.jobs.beams import BeamSettings
from llmrun.protocol.messages import AnswerRequest, Finished, Message, TextDelta, without
from llmrun.protocol.params import SamplingParams
from llmrun.protocol.settings import PARALLEL_BOUNDS
from llmrun.storage import decode_text
from llmrun.ui.answer.view import DisplayOptions
from llmrun.ui.terminal.output import Output

_WORTH_SAVING = 64  # tokens that had to be prefilled
_BYTES_A_TOKEN = 4  # of a prompt, as a guess
_ANSWER_TOKENS = 300  # of an answer of no stated length, as a guess


ModelOrServedArgument = Annotated[
    str,
    typer.Argument(
        metavar="[MODEL]",
        help="A name from `llmrun list --all`, owner/repo[:quant], URL, path, or a model of the --at server. Default: "
        "see llmrun help settings.",
        autocompletion=complete_model,
    ),
]
PromptArgument = Annotated[list[str] | None, typer.Argument(metavar="PROMPT", help="Prompt; - reads it from stdin.")]
RawOption = Annotated[
    bool, typer.Option("--raw", help="Continue the text, without the chat template.", rich_help_panel="Prompt")
]
PromptCacheOption = Annotated[
    bool,
    typer.Option(
        "--prompt-cache",
        help="Save the prompt's KV cache to disk, for the next prompt that begins the same way.",
        rich_help_panel="Prompt",
    ),
]
RecordOption = Annotated[
    Path | None,
    typer.Option(
        "--record",
        metavar="FILE",
        help="Record everything that `llmrun replay` needs to give the same answer again.",
        rich_help_panel="Answer",
    ),
]
AnswersOption = Annotated[
    int,
    typer.Option(
        "--answers",
        "-N",
        metavar="N",
        help="Answer the prompt N times, side by side, each time with another seed.",
        rich_help_panel="Answer",
    ),
]
LogprobsOption = Annotated[
    int | None,
    typer.Option(
        "--logprobs",
        metavar="N",
        help="Shade each token of the answer by its probability, and list the N likeliest tokens where it was low.",
        rich_help_panel="Answer",
    ),
]
EventsOption = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print the engine's events as JSON lines; with --answers, one JSON list of the answers.",
        rich_help_panel="Answer",
    ),
]
ExplainOption = Annotated[
    bool,
    typer.Option(
        "--explain-sampling", help="Print each sampling value and its origin to stderr.", rich_help_panel="Sampling"
    ),
]


@with_options(
    answer=answer_options, docs=documents, tooling=tooling, loading=loading, flags=SAMPLING_OPTIONS, beams=beam_options
)
def run(
    model: ModelOrServedArgument = "",
    prompt: PromptArgument = None,
    raw: RawOption = False,
    prompt_cache: PromptCacheOption = False,
    record: RecordOption = None,
    answers: AnswersOption = 1,
    logprobs: LogprobsOption = None,
    preset: PresetOption = None,
    stats: StatsOption = None,
    json: EventsOption = False,
    explain_sampling: ExplainOption = False,
    at: AtOption = None,
    key_file: KeyFileOption = None,
    *,
    answer: AnswerOptions,
    docs: DocsOptions,
    tooling: ToolOptions,
    loading: LoadingOptions,
    flags: Mapping[str, Any],
    beams: BeamSettings | None,
) -> None:
    """Answer one prompt. Text from stdin is put before the prompt."""
    output = Output(json=json)
    _check(output, model, prompt or [], answers, logprobs, record, yes=loading.yes)
    loading = replace(loading, server=remote_server(at, key_file))
    _refuse_file_names(answer, prompt or [])
    is_answer = prompt or raw or json or beams or record or prompt_cache or explain_sampling or answers > 1
    if not is_answer and logprobs is None and output.stdin_is_terminal and output.stdout_is_terminal:
        from llmrun.cli.chat import SessionOptions, talk_with  # slow, and most answers have a prompt

        talk_with(model, stats, answer, docs, tooling, SessionOptions(), loading, flags)
        return
    text = _with_files(output, read_prompt(output, prompt or []), answer, docs, loading)
    preferences = replace(loading.preferences, parallel=answers, as_alone=True, adapts_threads=record is None)
    loading = replace(loading, preferences=preferences)
    with (
        toolbox(tooling) as box,
        _open(output, model, text, answer, loading, flags, keeps_states=prompt_cache) as loaded,
    ):
        sampling, origins = loaded.sampling(flags)
        if explain_sampling:
            _explain_sampling(output, sampling, origins, loading.origins)
        request = replace(
            as_request(output, loaded, text, answer, raw=raw),
            sampling=sampling,
            speculation=loaded.speculation(),
            logprobs=logprobs,
        )
        shown_as = _display(answer, request, stats, raw=raw, shades=logprobs is not None)
        if beams is not None:
            search(output, loaded_locally(loaded, "--beams"), request, beams, shown_as)
            return
        if box is None:
            finished = _show(output, loaded, request, shown_as, answers, record)
        else:
            finished = _answer_with_tools(output, loaded, text, answer, flags, shown_as, Tools(output, box, tooling))
        if prompt_cache and finished.stats.prompt_tokens - finished.stats.reused_tokens >= _WORTH_SAVING:
            _save_state(output, loaded)
    _report_end(output, request, finished)


def _open(
    output: Output,
    model: str,
    text: str,
    answer: AnswerOptions,
    loading: LoadingOptions,
    flags: Mapping[str, Any],
    *,
    keeps_states: bool,
) -> AbstractContextManager[ChatModel]:
    """Return the model, for an answer to this text."""
    return open_chat_model(
        output,
        model,
        loading,
        answer.request,
        flags,
        modalities=answer.modalities,
        keeps_states=keeps_states,
        expected=ExpectedUse(len(text.encode()) // _BYTES_A_TOKEN, answer.request.limits.max_tokens or _ANSWER_TOKENS),
    )


def _display(
    answer: AnswerOptions, request: AnswerRequest, stats: bool | None, *, raw: bool, shades: bool
) -> DisplayOptions:
    is_plain = answer.plain or raw or bool(request.grammar)
    return DisplayOptions(stats, not is_plain, answer.thoughts, end_line=not raw, shades=shades)


def _report_end(output: Output, request: AnswerRequest, finished: Finished) -> None:
    if finished.reason == "cancelled":
        raise CancelledError("stopped by Ctrl-C")
    if finished.reason == "length":
        _note_limit(output, request, finished)


def _check(
    output: Output,
    model: str,
    words: list[str],
    answers: int,
    logprobs: int | None,
    record: Path | None,
    *,
    yes: bool,
) -> None:
    """Raise UsageError if an option is invalid, or there is no model."""
    require_within("--answers", answers, PARALLEL_BOUNDS)
    if logprobs is not None:
        check_logprobs(output, logprobs, answers)
    if record is not None:
        check_output_file(output, record, yes=yes)
    if not model:
        raise no_model("run", words)


def _explain_sampling(
    output: Output, sampling: SamplingParams, origins: Mapping[str, str], presets: Mapping[str, str]
) -> None:
    from llmrun.ui.views.chat import show_sampling  # most answers need no table

    show_sampling(output, sampling_rows(sampling, origins, presets))


def _with_files(output: Output, text: str, answer: AnswerOptions, docs: DocsOptions, loading: LoadingOptions) -> str:
    """Return the prompt after passages of documents and the attached files."""
    passages = _passages(output, text, docs, loading)
    if answer.attached is None:
        return passages + text
    show_attached(output, replace(answer.attached, media=()))  # the engine says more of them
    return passages + answer.attached.before(text)


def _passages(output: Output, text: str, docs: DocsOptions, loading: LoadingOptions) -> str:
    """Return the passages of documents that go before a prompt; the embedding model is unloaded then."""
    with open_documents(output, docs, loading) as index:
        if index is None:
            return ""
        from llmrun.chat.passages import passages_block, passages_for

        found = passages_for(index, text, "", loading.preferences.n_ctx or 0)
    show_found(output, found, hint=": " + "; ".join(passage.place for passage in found))
    return passages_block(found)


def _show(
    output: Output,
    model: ChatModel,
    request: AnswerRequest,
    shown_as: DisplayOptions,
    answers: int,
    record: Path | None,
) -> Finished:
    """Show the answer; write the recording and log-probabilities on request."""
    with cancelling(output, model):
        if answers > 1:
            return show_n_answers(output, model, request, answers, shown_as)
        deltas: list[TextDelta] = []
        events = model.answer(request)
        if record is not None or request.logprobs is not None:
            events = collecting(events, deltas)
        finished = show(output, events, model, shown_as)
    if record is not None:
        from llmrun.chat.replay import record_of, write

        text = "".join(delta.text for delta in deltas)
        write(record, record_of(loaded_locally(model, "--record"), request, text, finished))
    if request.logprobs is not None and not output.json:
        show_logprobs(output, deltas, request.logprobs)
    return finished


def _answer_with_tools(
    output: Output,
    model: ChatModel,
    text: str,
    answer: AnswerOptions,
    flags: Mapping[str, Any],
    shown_as: DisplayOptions,
    tools: Tools,
) -> Finished:
    """Show the answer to a prompt, and the calls of tools in it, as a chat of one question that is not saved."""
    from llmrun.chat.conversation import ChatSettings, Conversation
    from llmrun.chat.media import MediaFile
    from llmrun.chat.store.store import Sessions
    from llmrun.chat.store.turns import Question

    media = answer.attached.media if answer.attached is not None else ()
    settings = ChatSettings(flags, request=replace(answer.request, tools=tools.offered))
    with Sessions(None) as store:
        conversation = Conversation(
            model,
            store.new(system=answer.system or ""),
            settings,
            on_note=output.note,
            on_overflow=lambda misfit: "stop",
        )
        asked = conversation.ask(Question(text, media=tuple(map(MediaFile.of, media))))
        try:
            with on_ctrl_c(signal.default_int_handler):
                return tools.show_rounds(conversation, asked, shown_as)
        except KeyboardInterrupt:  # at the question about a call
            raise CancelledError("stopped by Ctrl-C") from None
        finally:
            conversation.end_turn()


def _note_limit(output: Output, request: AnswerRequest, finished: Finished) -> None:
    """Print the limit that ended an answer, unless it was requested.

    Raises:
        CutOffError: the answer had to follow a grammar, and is incomplete.
    """
    stats = finished.stats
    full = stats.is_full
    why = f"the context window of {stats.n_ctx:,} tokens is full" if full else f"--max-tokens {stats.completion_tokens}"
    if request.grammar is not None:
        hint = "a larger --ctx, or a shorter prompt" if full else "a larger --max-tokens, or none"
        raise CutOffError("the answer is cut off and incomplete", why=why, hint=hint)
    if full and not (output.json or output.stdout_is_terminal):
        output.note(f"the answer is cut off: {why}")


def _refuse_file_names(answer: AnswerOptions, words: list[str]) -> None:
    """Raise if the shell has expanded a pattern: one file for -f, and the others as the prompt.

    Raises:
        UsageError: a word of the prompt is a file.
    """
    if answer.attached is None:
        return
    names = [word for word in words if not word.isspace() and " " not in word and os.path.isfile(word)]  # noqa: PTH113
    if names:
        suffixes = {os.path.splitext(name)[1] for name in names}  # noqa: PTH122
        pattern = f"*{suffixes.pop()}" if len(suffixes) == 1 else "*"
        raise UsageError(
            f"{names[0]!r} is a file in the place of the prompt",
            why="-f takes one word, and the shell expands an unquoted pattern to several",
            hint=f"-f '{pattern}', or -f before each file",
        )


def _save_state(output: Output, model: ChatModel) -> None:
    """Save the prompt's KV state; print a note if that fails."""
    try:
        if not model.save_state(prompt_only=True).tokens:
            output.note("The prompt's KV state was not saved: it can't be written, or there is no room for it.")
    except LlmrunError as error:
        output.note(f"The prompt's KV state was not saved: {error}")


def as_request(output: Output, model: ChatModel, text: str, answer: AnswerOptions, *, raw: bool) -> AnswerRequest:
    """Return a text as a conversation, or as a prompt to continue without a chat template."""
    if raw or not (answer.request.template or has_template(output, model)):
        if answer.modalities:
            hint = "leave out --raw, or name one with --template"
            raise UsageError("images and audio need a chat template", hint=hint)
        prompt = "\n\n".join(filter(None, (answer.system, text)))
        return replace(without(answer.request, needs_template=True), prompt=prompt)
    messages = conversation(answer.system, text, model.examples)
    if answer.attached is not None:
        messages[-1] = replace(messages[-1], media=answer.attached.sent)
    return replace(answer.request, messages=tuple(messages))


def read_prompt(output: Output, words: list[str], command: str = "run") -> str:
    """Return the prompt of a command: stdin, then the words; a lone "-" stands for stdin.

    Raises:
        UsageError: the prompt is empty.
    """
    piped = "" if output.stdin_is_terminal and "-" not in words else _read_all(output)
    typed = " ".join(_decoded(word) for word in words if word != "-")
    text = "\n\n".join(part for part in (piped, typed) if part.strip())
    if not text:
        hint = f'llmrun {command} MODEL "Why is the sky blue?", or llmrun chat MODEL to talk'
        raise UsageError("there is no prompt", hint=hint)
    return text


def _decoded(word: str) -> str:
    """Decode an argument as UTF-8, in any locale."""
    return os.fsencode(word).decode("utf-8", "replace")


def _read_all(output: Output) -> str:
    data = output.stdin.buffer.read() if hasattr(output.stdin, "buffer") else output.stdin.read().encode()
    decoded = decode_text(bytes(data), "the text of stdin can't be read")
    if decoded.note:
        output.note(f"stdin: {decoded.note}")
    return decoded.text.rstrip("\n")


def has_template(output: Output, model: ChatModel) -> bool:
    """Return whether the model has a chat template; print a note if not."""
    if not model.has_template:
        output.note(f"{model.name} has no chat template: the text is continued (--template gives it one)")
    return model.has_template


def conversation(system: str | None, text: str, examples: Iterable[Message] = ()) -> list[Message]:
    first = [Message("system", system)] if system else []
    return [*first, *examples, Message("user", text)]
