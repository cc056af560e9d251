"""`llmrun evaluate` and `llmrun score`: perplexity, distance from a reference, and the probability of each token."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmrun.cli.completion import complete_model
from llmrun.cli.loading import find_model
from llmrun.cli.options import (
    PREFERENCES,
    CtxOption,
    JsonOption,
    LoraOption,
    ModelArgument,
    YesOption,
    adapters_of,
    with_options,
)
from llmrun.errors import UsageError
from llmrun.lab.cli.tokenize import read_content
from llmrun.lab.quantize.evaluate import ALL_CHUNKS, check_sample, default_text, read_text, verdict
from llmrun.lab.quantize.evaluate import evaluate as measure
from llmrun.lab.quantize.evaluate import score as score_text
from llmrun.lab.views.evaluate import EvaluationSubject, reading, score_json, show_evaluated, show_score
from llmrun.models.store.use import using
from llmrun.planning.preferences import LoadPreferences
from llmrun.protocol.jobs.evaluate import least_chunks
from llmrun.ui.terminal.format import seconds
from llmrun.ui.terminal.output import Output

if TYPE_CHECKING:
    from llmrun.lab.quantize.evaluate import EvaluatedText
    from llmrun.protocol.jobs.evaluate import EvaluateResult, EvaluateUpdate


@dataclass(frozen=True, slots=True)
class _TextSample:
    """A text to measure a model on; see llmrun.lab.quantize.evaluate.evaluate()."""

    text: EvaluatedText
    n_ctx: int | None
    chunks: int | None
    long: bool


def _sample(
    text: Annotated[
        Path | None,
        typer.Option("--text", metavar="FILE", help="Text to predict. Default: Python's language reference."),
    ] = None,
    ctx: Annotated[
        int | None,
        typer.Option(
            "--ctx", "-c", metavar="TOKENS", help="Tokens per chunk. Default: 512, or up to 8192 with --long."
        ),
    ] = None,
    chunks: Annotated[
        str, typer.Option("--chunks", metavar="N|all", help="Maximum number of chunks. Default: 20,480 tokens of text.")
    ] = "",
    long: Annotated[
        bool, typer.Option("--long", help="Add figures by position, and test finding facts in long texts.")
    ] = False,
) -> _TextSample:
    """Collect the options of the text, checked before a model is loaded.

    Raises:
        UsageError: an option is invalid, or the text can't be read.
    """
    try:
        count = ALL_CHUNKS if chunks == "all" else int(chunks) if chunks else None
    except ValueError:
        raise UsageError(f"invalid --chunks {chunks}", why="must be a number, or all") from None
    return _TextSample(read_text(text) if text is not None else default_text(), ctx, count, long)


@with_options(sample=_sample, preferences=PREFERENCES)
def evaluate(
    model: ModelArgument,
    sample: _TextSample,
    preferences: LoadPreferences,
    reference: Annotated[
        str,
        typer.Option(
            "--reference",
            "-r",
            metavar="MODEL",
            help="Compare with this model, usually the same model at a higher precision.",
            autocompletion=complete_model,
        ),
    ] = "",
    lora: LoraOption = None,
    yes: YesOption = False,
    json: JsonOption = False,
) -> None:
    """Measure the perplexity of a model, and its distance from a reference.

    The figures and their standard errors are those of llama-perplexity: compare them only for the same text, --ctx and
    --chunks. The standard error treats positions as independent; the 95 % interval does not, and needs 3 chunks of 512
    tokens, or 10 of 128.

    --cache-type-k, --cache-type-v and --lora apply to the model, not to the reference: compare a model with itself to
    measure their effect. Ctrl-C prints the figures so far.
    """
    check_sample(sample.n_ctx, sample.chunks, long=sample.long)
    output, result, adapters = Output(json=json), _EvaluationOutput(), adapters_of(lora)
    paths = [find_model(output, name, yes=yes)[1] for name in [model, *filter(None, [reference])]]
    label = " + ".join((paths[0].name, *(adapter.name for adapter in adapters)))
    about = EvaluationSubject(label, paths[1].name if reference else "", sample.text.name, sample.text.sha256)
    try:
        with ExitStack() as held:
            for path in paths:
                held.enter_context(using(path))
            show = held.enter_context(reading(output))
            result.found = measure(
                paths[0],
                reference=paths[1] if reference else None,
                text=sample.text,
                n_ctx=sample.n_ctx,
                chunks=sample.chunks,
                long=sample.long,
                preferences=preferences,
                adapters=adapters,
                on_update=result.kept_before(show),
            )
            result.is_whole = True
    finally:
        result.show(output, about)


class _EvaluationOutput:
    """The latest figures, complete or not."""

    def __init__(self) -> None:
        self.found: EvaluateResult | None = None
        self.is_whole = False
        self._began = time.monotonic()

    def kept_before(self, show: Callable[[EvaluateUpdate], None]) -> Callable[[EvaluateUpdate], None]:
        """Return a function that stores the figures of an update before it is shown."""

        def keep(update: EvaluateUpdate) -> None:
            self.found = update.so_far or self.found
            show(update)

        return keep

    def show(self, output: Output, about: EvaluationSubject) -> None:
        if self.found is None:
            return
        words, elapsed = verdict(self.found), time.monotonic() - self._began
        if output.json:
            facts = {**asdict(about), "complete": self.is_whole, **asdict(self.found)}
            facts["least_chunks"] = least_chunks(self.found.n_ctx)
            output.result_json({**facts, "verdict": words, "seconds": elapsed})
            return
        show_evaluated(output, about, self.found, words)
        output.note(f"took {seconds(elapsed)}" if self.is_whole else "stopped: these are the figures so far")


@with_options(preferences=PREFERENCES)
def score(
    model: ModelArgument,
    text: Annotated[str, typer.Argument(metavar="TEXT|FILE|-", help="Text, or name of a file; - is stdin.")],
    preferences: LoadPreferences,
    n_ctx: CtxOption = None,
    lora: LoraOption = None,
    yes: YesOption = False,
    json: JsonOption = False,
) -> None:
    """Show the probability of each token of a text, and the perplexity.

    The text is read as it is, without a chat template. In a pipe, each line has the log-probability of a token and its
    text in quotes. A text longer than the context window is read in windows that overlap by half.
    """
    check_sample(n_ctx, None, long=False)
    output = Output(json=json)
    adapters, content = adapters_of(lora), read_content(output, text)
    _, path = find_model(output, model, yes=yes)
    with using(path), reading(output) as show:
        found = score_text(path, content, n_ctx=n_ctx, preferences=preferences, adapters=adapters, on_update=show)
    if json:
        output.result_json(score_json(path.name, found))
    else:
        show_score(output, found)
