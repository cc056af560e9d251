"""What `llmrun batch` shows: how far it is, what it came to, and before that what there is to do.

Owns the words; must not know how rows are answered.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from llmrun.batch.ledger import BatchProgress
from llmrun.batch.plan import BatchPlan
from llmrun.protocol.codec import as_dict
from llmrun.ui.terminal.activity import Activity
from llmrun.ui.terminal.format import rate, seconds
from llmrun.ui.terminal.output import Output
from llmrun.ui.terminal.progress import time_left

_DRAW_SECONDS = 0.1


class BatchView:
    """A batch while it runs, and a summary when it ends, however it ends.

    Args:
        tally: is looked at.
        out: where the answers are.
        parallel: rows side by side.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        output: Output,
        tally: BatchProgress,
        out: Path,
        parallel: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._output, self._tally, self._out, self._parallel = output, tally, out, parallel
        self._activity, self._clock, self._drawn_at = Activity(output), clock, 0.0

    def __enter__(self) -> BatchView:
        tally = self._tally
        if tally.before:
            failed = f", {tally.failed_before:,} of them errors" if tally.failed_before else ""
            self._activity.note(
                f"{tally.before:,} of {tally.total:,} rows have their answers in {self._out} already{failed}"
            )
        return self

    def note(self, text: str) -> None:
        """What the user should know."""
        self._activity.note(text)

    def progress(self) -> None:
        """A row was done."""
        tally, now = self._tally, self._clock()
        done = tally.before + tally.done
        if now - self._drawn_at < _DRAW_SECONDS and done < tally.total:
            return
        self._drawn_at = now
        words = f"{done:,} of {tally.total:,} rows" + (f", {tally.failed:,} failed" if tally.failed else "")
        left = ", ".join(filter(None, (rate(tally.tokens_per_second, whole=True), time_left(tally.seconds_left))))
        self._activity.show(words, done / tally.total, left)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._activity.pause()
        if self._output.json:
            if error is None:
                self._output.result_json(self._facts())
            return
        for line in self._summary():
            self._output.note(line)
        if error is not None and self._tally.done:
            self._output.note("the same command goes on from here")

    def _facts(self) -> dict[str, Any]:
        tally = self._tally
        return {
            **as_dict(tally),
            "tokens_per_second": tally.tokens_per_second,
            "parallel": self._parallel,
            "output": str(self._out),
        }

    def _summary(self) -> list[str]:
        tally = self._tally
        if not tally.done:
            if tally.before < tally.total:
                return []
            return [f"nothing is left to do: all {tally.total:,} rows have their lines in {self._out}"]
        lines = [
            f"{tally.done:,} rows in {seconds(tally.seconds)}, up to {self._parallel} side by side: {self._out}",
            f"{tally.completion_tokens:,} tokens of answers, {rate(tally.tokens_per_second, whole=True)}; "
            f"{tally.prompt_tokens:,} of prompts, {tally.cached_tokens:,} of them from the KV cache",
        ]
        if tally.joules is not None:
            lines.append(f"{tally.joules:,.0f} J, {tally.joules / tally.done:.3g} J a row")
        if tally.deaths:
            lines.append(f"the engine died {tally.deaths:,} times; whose fault that was is in the answers")
        return lines


def show_plan(output: Output, plan: BatchPlan, expected: float | None) -> None:
    """What there is to do.

    Args:
        expected: seconds that it will take, about; None where nobody can tell.
    """
    most = plan.most_answer_tokens
    if output.json:
        output.result_json(
            {
                "rows": len(plan.todo),
                "broken_rows": len(plan.broken),
                "prompt_tokens": plan.prompt_tokens,
                "most_answer_tokens": most,
                "parallel": plan.parallel,
                "seconds": expected,
            }
        )
        return
    broken = f", and {len(plan.broken):,} that can't be asked" if plan.broken else ""
    output.sentence(f"{len(plan.todo):,} rows to answer{broken}")
    if not plan.todo:
        return
    longest = "as many as the model likes (--max-tokens)" if most is None else f"at most {most:,}"
    output.sentence(f"about {plan.prompt_tokens:,} tokens of prompts; of answers {longest}")
    output.sentence(f"{plan.parallel} rows side by side")
    if expected is not None:
        output.sentence(f"about {seconds(expected)}, if every answer is as long as it may be")
