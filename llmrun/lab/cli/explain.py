"""`llmrun explain`: the computation between a prompt and its answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from llmrun.cli.answering import cancelling
from llmrun.cli.loading import open_model
from llmrun.cli.options import (
    AnswerOptions,
    JsonOption,
    LoadingOptions,
    ModelArgument,
    SystemOption,
    check_output_file,
    loading,
    with_options,
)
from llmrun.cli.run import PromptArgument, RawOption, as_request, read_prompt
from llmrun.cli.sampling import SAMPLING_OPTIONS
from llmrun.errors import CancelledError, UsageError, require_within
from llmrun.lab.cli.bench_history import put
from llmrun.lab.insight.explain import CANDIDATES, PAGE_CANDIDATES, JobRunner, explain_answer
from llmrun.lab.insight.merges import merge_rule
from llmrun.lab.views.explain import explain_page, show_explained
from llmrun.model import Model
from llmrun.protocol.codec import as_dict
from llmrun.protocol.messages import AnswerRequest, Finished
from llmrun.protocol.params import Limits, SamplingParams
from llmrun.protocol.questions import MOST_CHOICES
from llmrun.ui.terminal.activity import Activity
from llmrun.ui.terminal.output import Output

_ANSWER_TOKENS = 8


@with_options(loading=loading, flags=SAMPLING_OPTIONS)
def explain(
    model: ModelArgument,
    prompt: PromptArgument = None,
    answer: Annotated[
        int, typer.Option("--answer", metavar="TOKENS", help="Maximum length of the answer to explain.")
    ] = _ANSWER_TOKENS,
    raw: RawOption = False,
    system: SystemOption = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write everything as an interactive HTML page.")
    ] = None,
    json: JsonOption = False,
    *,
    loading: LoadingOptions,
    flags: Mapping[str, Any],
) -> None:
    """Show what a model computes between a prompt and its answer.

    The answer is the one that `llmrun run` gives with the same options. Prompt and answer are then computed once more
    to show every step: tokens, layers, logit lens, attention, KV cache, times, sampling. --html shows the steps for
    each token; --json prints them as numbers.
    """
    require_within("--answer", answer, (1, MOST_CHOICES))
    output = Output(json=json)
    if html is not None:
        _check_page(html, json=json)
        check_output_file(output, html, yes=loading.yes)
    if loading.preferences.workers:
        raise UsageError("explain needs all layers on this machine", hint="leave out --rpc")
    text = read_prompt(output, prompt or [], "explain")
    request = AnswerRequest(limits=Limits(answer), remember=MOST_CHOICES)
    with open_model(output, model, loading) as loaded:
        request = as_request(output, loaded, text, AnswerOptions(system, request, None, "hide", True), raw=raw)
        request = replace(request, sampling=loaded.sampling(flags)[0], speculation=loaded.drafting.speculation())
        wanted = CANDIDATES if html is None else PAGE_CANDIDATES
        with cancelling(output, loaded), Activity(output) as activity:
            activity.show("computing the answer")
            finished = [event for event in loaded.answer(request) if isinstance(event, Finished)]
        if finished[-1].reason == "cancelled":
            raise CancelledError("stopped by Ctrl-C")
        with Activity(output) as activity:
            activity.show("computing every step again")
            found = explain_answer(loaded, everywhere=json or html is not None, candidates=wanted)
    if html is not None:
        put(output, explain_page(found, request.sampling, merge_rule(loaded.path)), html)
        return
    if json:
        output.result_json(as_dict(found))
        return
    show_explained(output, found)


def explain_last_answer(output: Output, model: Model) -> None:
    """Print how a model made its last answer, which a chat asked for."""
    with Activity(output) as activity:
        activity.show("computing every step again")
        found = explain_answer(model)
    show_explained(output, found)


def explain_for_page(model: Model, measuring: tuple[JobRunner, int]) -> Callable[[SamplingParams], str]:
    """Explain an answer for the server's page, see server.page.insights.Explain."""
    found = explain_answer(model, measuring, everywhere=True, candidates=PAGE_CANDIDATES)
    rule = merge_rule(model.path)
    return lambda sampling: explain_page(found, sampling, rule)


def _check_page(file: Path, *, json: bool) -> None:
    """Raise UsageError unless an HTML page can have the name."""
    if json:
        raise UsageError("--json and --html can't be used together", hint="give one of them")
    if file.suffix.lower() != ".html":
        raise UsageError(f"invalid --html {file}", why="its name must end in .html", hint=f"--html {file}.html")
