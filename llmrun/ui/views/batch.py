"""The output of `llmrun batch`: the plan, progress, and a summary."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from llmrun.batch.plan import BatchPlan
from llmrun.batch.results import OutputFiles
from llmrun.batch.run import BatchProgress
from llmrun.protocol.codec import as_dict
from llmrun.ui.terminal.activity import Activity, time_left
from llmrun.ui.terminal.format import counted, rate, seconds
from llmrun.ui.terminal.output import Output

_DRAW_SECONDS = 0.1


class BatchView:
    """The progress of a batch, and a summary at its end, also after an error.

    Args:
        tally: progress so far, which the batch updates.
        files: of the answers.
        parallel: number of rows answered at the same time.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        output: Output,
        tally: BatchProgress,
        files: OutputFiles,
        parallel: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._output, self._tally, self._files, self._parallel = output, tally, files, parallel
        self._activity, self._clock, self._drawn_at = Activity(output), clock, 0.0

    def __enter__(self) -> BatchView:
        tally = self._tally
        if tally.before:
            failed = f", {tally.failed_before:,} of them errors" if tally.failed_before else ""
            self._activity.note(
                f"{tally.before:,} of {tally.total:,} rows are already answered in {self._files.lines}{failed}"
            )
        return self

    def note(self, text: str) -> None:
        """Print a line above the progress."""
        self._activity.note(text)

    def progress(self) -> None:
        """Redraw the progress after a row."""
        tally, now = self._tally, self._clock()
        done = tally.before + tally.done
        if now - self._drawn_at < _DRAW_SECONDS and done < tally.total:
            return
        self._drawn_at = now
        words = f"{done:,} of {tally.total:,} rows" + (f", {tally.failed:,} failed" if tally.failed else "")
        speed = ", ".join(filter(None, (rate(tally.tokens_per_second, whole=True), time_left(tally.seconds_left))))
        self._activity.show(words, done / tally.total, speed)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._activity.pause()
        if self._output.json:
            if error is None:
                speed, out = self._tally.tokens_per_second, str(self._files.shown)
                facts = {"tokens_per_second": speed, "parallel": self._parallel, "output": out}
                self._output.result_json({**as_dict(self._tally), **facts})
            return
        for line in self._summary():
            self._output.note(line)
        if error is not None and self._tally.done:
            table = f"; {self._files.table} is written when all rows are answered" if self._files.table else ""
            self._output.note(f"run the same command again to continue{table}")

    def _summary(self) -> list[str]:
        tally = self._tally
        if not tally.done:
            if tally.before < tally.total:
                return []
            return [f"nothing to do: all {tally.total:,} rows are answered in {self._files.shown}"]
        done = f"{counted(tally.done, 'row')} in {seconds(tally.seconds)}, up to {self._parallel} at a time"
        lines = [
            f"{done}: {self._files.shown if tally.before + tally.done == tally.total else self._files.lines}",
            f"{tally.completion_tokens:,} tokens of answers, {rate(tally.tokens_per_second, whole=True)}; "
            f"{tally.prompt_tokens:,} of prompts, {tally.cached_tokens:,} of them from the KV cache",
        ]
        if tally.deaths:
            lines.append(f"the engine crashed {counted(tally.deaths, 'time')}; see the errors in the answers")
        return lines


def show_plan(output: Output, plan: BatchPlan, expected: float | None) -> None:
    """Print the work of a batch before it starts.

    Args:
        expected: estimated seconds; None if unknown.
    """
    maximum = plan.most_answer_tokens
    if output.json:
        output.result_json(
            {
                "rows": len(plan.todo),
                "broken_rows": len(plan.broken),
                "prompt_tokens": plan.prompt_tokens,
                "most_answer_tokens": maximum,
                "parallel": plan.parallel,
                "seconds": expected,
            }
        )
        return
    broken = f", and {len(plan.broken):,} invalid ones" if plan.broken else ""
    output.sentence(f"{len(plan.todo):,} rows to answer{broken}")
    if not plan.todo:
        return
    limit = "without a limit (--max-tokens)" if maximum is None else f"at most {maximum:,}"
    output.sentence(f"about {plan.prompt_tokens:,} tokens of prompts; of answers {limit}")
    output.sentence(f"{plan.parallel} rows at a time")
    if expected is not None:
        output.sentence(f"about {seconds(expected)}, if every answer is as long as allowed")
