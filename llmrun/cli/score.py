"""`llmrun score`: the probability of each token of a text."""

from __future__ import annotations

from typing import Annotated

import typer

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
from llmrun.planning.plan import LoadPreferences
from llmrun.ui.terminal.output import Output


@with_options(preferences=PREFERENCES)
def score(
    model: ModelArgument,
    text: Annotated[str, typer.Argument(metavar="TEXT|FILE|-", help="Text, or name of a file; - is stdin.")],
    preferences: LoadPreferences,
    ctx: CtxOption = None,
    lora: LoraOption = None,
    yes: YesOption = False,
    json: JsonOption = False,
) -> None:
    """Show the probability of each token of a text, and the perplexity.

    The text is read as it is, without a chat template. In a pipe, each line has the log-probability of a token and its
    text in quotes. A text longer than the context window is read in windows that overlap by half.
    """
    from llmrun.cli.loading import find_model
    from llmrun.cli.tokenize import read_content
    from llmrun.models.store.use import using
    from llmrun.quantize.evaluate import check_sample
    from llmrun.quantize.evaluate import score as measure
    from llmrun.ui.views.evaluate import reading
    from llmrun.ui.views.score import score_json, show_score

    check_sample(ctx, None, long=False)
    output = Output(json=json)
    adapters, content = adapters_of(lora), read_content(output, text)
    _, path = find_model(output, model, yes=yes)
    with using(path), reading(output) as show:
        found = measure(path, content, n_ctx=ctx, preferences=preferences, adapters=adapters, on_update=show)
    if json:
        output.result_json(score_json(path.name, found))
    else:
        show_score(output, found)
