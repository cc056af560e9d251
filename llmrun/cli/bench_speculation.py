"""`llmrun bench --speculate`: the gain of speculative decoding on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from llmrun.cli.bench_load import LoadTestOptions, number_of_threads, refuse_others
from llmrun.cli.completion import BENCH_ACTIONS
from llmrun.cli.defaults import with_preset
from llmrun.errors import UsageError, require_within

if TYPE_CHECKING:
    from llmrun.cli.bench_history import OutputOptions
    from llmrun.cli.bench_options import BenchArguments, MeasurementOptions
    from llmrun.ui.terminal.output import Output

_DEFAULT_TOKENS = 400
_FLAG = "--speculate"


def measure(
    output: Output,
    models: Sequence[str],
    asked: LoadTestOptions,
    lists: BenchArguments,
    how: MeasurementOptions,
    after: OutputOptions,
    *,
    yes: bool,
) -> None:
    """Measure a model and show the result, also a partial one after Ctrl-C or a failure.

    Raises:
        UsageError: an option does not apply, or is out of bounds.
    """
    from llmrun.bench.speculation import measure as measure_gains
    from llmrun.cli.loading import find_draft, find_model
    from llmrun.model.loading import A_CHAT, prepare
    from llmrun.models.store.use import using
    from llmrun.planning.plan import LoadPreferences
    from llmrun.planning.speculation import read_draft_source
    from llmrun.protocol.params import MOST_TOKENS
    from llmrun.ui.views.bench import BenchView
    from llmrun.ui.views.bench_speculation import show_outcome

    if len(models) != 1 or models[0] in BENCH_ACTIONS:
        raise UsageError(f"{_FLAG} measures one model", hint=f"llmrun bench smollm2 {_FLAG}")
    refuse_others(_FLAG, lists, how, after)
    require_within("--tokens", asked.tokens, (2, MOST_TOKENS))
    preferences = LoadPreferences(threads=number_of_threads(_FLAG, lists), workers=lists.workers)
    preferences = with_preset(models[0], preferences)
    spec, path = find_model(output, models[0], yes=yes)
    name = path.stem if spec.path else models[0]
    draft, heads = read_draft_source(asked.draft)
    preferences = replace(preferences, draft_heads=heads)
    drafts = find_draft(output, draft, yes=yes)
    with using(path), using(drafts.path) if drafts is not None else nullcontext():
        model = prepare(spec, path, preferences, warm_up=True, expected=A_CHAT, draft=drafts, adapters=lists.adapters)
        for note in model.plan.notes:
            output.note(note)
        view = BenchView(output, [name], (), shows_rows=False)
        outcome = measure_gains(
            model,
            name,
            tokens=asked.tokens or _DEFAULT_TOKENS,
            repetitions=how.repetitions,
            warm_up=how.warm_up,
            on_progress=view.progress,
        )
        view.clear()
    if outcome.rows:
        show_outcome(output, name, model.load, outcome, after.machine)
    if outcome.error is not None:
        raise outcome.error
