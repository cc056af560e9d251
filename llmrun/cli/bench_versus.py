"""`llmrun bench --vs llama-bench`: both measured alternately."""

from __future__ import annotations

from llmrun.bench.external import LLAMA_BENCH, ExternalComparison, find, our_side, result_of, versus
from llmrun.bench.run import BenchOutcome, BenchRequest, Progress
from llmrun.errors import LlmrunError, UsageError
from llmrun.planning.hardware import Hardware
from llmrun.runner.client import EngineClient
from llmrun.ui.terminal.output import Output
from llmrun.ui.views.bench import BenchView
from llmrun.ui.views.bench_history import show_versus


def measure(
    output: Output, request: BenchRequest, hardware: Hardware, program: str, *, shows_table: bool
) -> BenchOutcome:
    """Measure every case of every model on both sides. Ctrl-C or a failure returns the partial result.

    Raises:
        UsageError: the program does not exist, or would ignore the adapters of the models.
    """
    if any(model.adapters for model in request.models):
        raise UsageError("--lora and --vs can't be used together", hint="give one of them")
    if hardware.workers:
        raise UsageError("--rpc and --vs can't be used together", hint="give one of them")
    llama_bench = find(program)
    view = BenchView(output, [model.name for model in request.models], request.cases, shows_rows=False)
    found: list[ExternalComparison] = []
    error: LlmrunError | None = None
    try:
        with our_side(EngineClient, hardware) as ours:
            pairs = [(model, case) for model in request.models for case in request.cases]
            for number, (model, case) in enumerate(pairs):

                def tell(done: int, total: int, at: int = number) -> None:
                    model, case = pairs[at]
                    share = at * total + done, len(pairs) * total
                    turn = min(done // 2 + 1, total // 2)
                    view.progress(Progress(model.name, case.test.name, *share, LLAMA_BENCH, turn, total // 2))

                one = versus(
                    llama_bench,
                    lambda model=model, case=case: ours(model, case),  # type: ignore[misc]
                    model,
                    case,
                    repetitions=request.repetitions,
                    on_update=tell,
                )
                found.append(one)
    except LlmrunError as stopped:
        error = stopped
    view.clear()
    if found and shows_table:
        show_versus(output, found, LLAMA_BENCH)
    return BenchOutcome(result_of(found), error)
