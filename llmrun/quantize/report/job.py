"""The job that makes a report card.

Owns the order of the measurements and the behaviour at an interruption; verdict.py has the words.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.errors import CancelledError, EngineCrashedError, LlmrunError, TerminatedError, UsageError
from llmrun.planning.plan import LoadPreferences
from llmrun.quantize.evaluate import EvaluatedText
from llmrun.quantize.report.card import Card, CardRow, CardSpeed, Method
from llmrun.quantize.report.folder import working_folder
from llmrun.quantize.report.measure import SourceModel
from llmrun.quantize.report.timetable import ReportStep, Timetable

if TYPE_CHECKING:
    from llmrun.quantize.report.local_measurements import LocalMeasurements

ROUNDS = 5
"""Number of speed measurements of each type."""
QUICK_ROUNDS = 2

_EFFORT = {"timing": 4.0, "judging": 20.0}  # seconds, for a small model


@dataclass(frozen=True, slots=True)
class ReportUpdate:
    """Progress of the job."""

    doing: str  # "quantizing", "judging" or "timing"
    type: str  # of the weights
    share: float  # of the whole job, 0 to 1
    seconds_left: float | None  # None if unknown
    row: CardRow | None = None  # the type's figures so far, at the end of a step


OnUpdate = Callable[[ReportUpdate], None]


def make_report(
    source: Path,
    types: Sequence[str],
    *,
    name: str = "",
    text: EvaluatedText | None = None,
    imatrix: Path | None = None,
    preferences: LoadPreferences = LoadPreferences(),
    keep: Path | None = None,
    on_update: OnUpdate = lambda update: None,
    measures: LocalMeasurements | None = None,
    rounds: int = ROUNDS,
    is_quick: bool = False,
) -> Card:
    """Quantize a model to several types, and measure all of them and the source.

    Ctrl-C ends the job early: the card has the figures so far. A type that can't be made gets a row with the reason.

    Args:
        source: the (first) GGUF file.
        types: names of llmrun.gguf.types.FILE_TYPES; repeated ones count once.
        name: the model's name; "" for the stem of the file's name.
        text: text to measure quality on; None for the default of `llmrun evaluate`.
        preferences: load settings; n_ctx is ignored.
        keep: folder for the files; None to remove them.
        measures: the measurements; None for LocalMeasurements.
        rounds: number of speed measurements of each type.
        is_quick: read as little text as verdicts need, and measure speeds QUICK_ROUNDS times.

    Raises:
        UsageError: no type can be made, or a file exists already.
        DiskFullError: there is no room for the files.
        LlmrunError: the source, or every type, can't be measured.
    """
    if measures is None:
        from llmrun.quantize.report.local_measurements import MAX_CHUNKS, MIN_CHUNKS, LocalMeasurements

        measures = LocalMeasurements(
            source,
            name=name,
            text=text,
            imatrix=imatrix,
            preferences=preferences,
            chunks=MIN_CHUNKS if is_quick else MAX_CHUNKS,
        )
    kinds = list(dict.fromkeys(types))
    if not kinds:
        raise UsageError("a report needs at least one type", hint="--types Q8_0,Q4_K_M,Q4_0")
    original = measures.original()
    failures, needed = _expected(measures, kinds)
    targets = _targets(original, [kind for kind in kinds if kind not in failures], keep)
    with working_folder(keep, needed) as folder:
        work = _Work(source, original, measures, {kind: folder / name for kind, name in targets.items()}, on_update)
        for kind, reason in failures.items():
            work.fail(kind, reason)
        return work.run(QUICK_ROUNDS if is_quick else rounds, keeps=keep is not None, imatrix=imatrix)


def _expected(measures: LocalMeasurements, kinds: Sequence[str]) -> tuple[dict[str, str], int]:
    """Return type -> reason why it can't be made, and the total size of the other types."""
    failures, needed = {}, 0
    errors = []
    for kind in kinds:
        try:
            needed += measures.expected_bytes(kind)
        except (UsageError, EngineCrashedError) as error:
            failures[kind] = error.what
            errors.append(error)
    if len(failures) == len(kinds):
        raise errors[0]
    return failures, needed


def _targets(original: SourceModel, kinds: Sequence[str], keep: Path | None) -> dict[str, str]:
    names = {kind: f"{original.name}-{kind}.gguf" for kind in kinds}
    existing = [name for name in names.values() if keep is not None and (keep / name).exists()]
    if existing:
        raise UsageError(
            f"{str(keep and keep / existing[0])!r} is there already",
            why="a report replaces no file",
            hint="name another folder, or remove it",
        )
    return names


class _Work:
    """Steps of the job, and their results so far."""

    def __init__(
        self,
        source: Path,
        original: SourceModel,
        measures: LocalMeasurements,
        targets: dict[str, Path],
        on_update: OnUpdate,
    ) -> None:
        self._source = source
        self._original = original
        self._measures = measures
        self._targets = targets
        self._on_update = on_update
        source_row = CardRow(
            original.type, is_source=True, n_bytes=original.n_bytes, bits_per_weight=original.bits_per_weight
        )
        self._rows = {_SOURCE: source_row} | {kind: CardRow(kind) for kind in targets}
        self._method = Method(
            prompt_tokens=measures.prompt_tokens, answer_tokens=measures.answer_tokens, threads=measures.threads
        )
        self._timetable = Timetable([])

    def fail(self, kind: str, reason: str) -> None:
        self._rows[kind] = replace(self._rows.get(kind, CardRow(kind)), failure=reason)
        self._timetable.drop(kind)

    def run(self, rounds: int, *, keeps: bool, imatrix: Path | None) -> Card:
        started, began = time.time(), time.monotonic()
        steps = self._steps(rounds)
        self._timetable = Timetable(steps)
        is_complete = True
        try:
            for step in steps:
                if step.type == _SOURCE or not self._rows[step.type].failure:
                    self._run_step(step)
        except (KeyboardInterrupt, CancelledError):
            is_complete = False
        rows = [self._with_path(row, keeps) for row in self._rows.values()]
        # The file of a Hugging Face folder is temporary, so its name means nothing.
        is_file = self._source.suffix == ".gguf"
        return Card(
            name=self._original.name,
            source=self._source.name if is_file else f"{self._original.name} ({self._original.type})",
            rows=tuple(sorted(rows, key=_rank)),
            method=replace(self._method, rounds=rounds, imatrix=imatrix.name if imatrix else ""),
            machine=self._measures.machine(),
            started=started,
            seconds=time.monotonic() - began,
            is_complete=is_complete,
            notes=self._original.notes,
        )

    def _steps(self, rounds: int) -> list[ReportStep]:
        """Return the steps: each type is made, judged and timed once; then all types are timed again in turns."""
        steps = [_timing(_SOURCE)]
        for kind in self._targets:
            steps += [
                ReportStep("quantizing", kind, _effort(kind)),
                ReportStep("judging", kind, _EFFORT["judging"]),
                _timing(kind),
            ]
        for _ in range(rounds - 1):
            steps += [_timing(kind) for kind in (_SOURCE, *self._targets)]
        return steps

    def _run_step(self, step: ReportStep) -> None:
        began = time.monotonic()

        def report(share: float, row: CardRow | None = None) -> None:
            running = time.monotonic() - began
            timetable = self._timetable
            name = self._original.type if step.type == _SOURCE else step.type
            if row is None:
                done, left = timetable.share_done(share, running), timetable.seconds_left(share, running)
            else:
                done, left = timetable.share_done(), timetable.seconds_left()
            self._on_update(ReportUpdate(step.kind, name, done, left, row))

        report(0.0)
        try:
            self._measure(step, report)
        except (CancelledError, TerminatedError):
            raise
        except LlmrunError as error:
            if step.type == _SOURCE:
                raise
            self.fail(step.type, error.what)
            if all(row.failure and row.quality.kld is None for row in self._rows.values() if not row.is_source):
                raise
        else:
            self._timetable.finish(time.monotonic() - began)
        report(1.0, self._rows[step.type])

    def _measure(self, step: ReportStep, report: Callable[[float], None]) -> None:
        row = self._rows[step.type]
        path = self._source if step.type == _SOURCE else self._targets[step.type]
        if step.kind == "quantizing":
            made = self._measures.make(step.type, path, report)
            row = replace(
                row, n_bytes=made.n_bytes, bits_per_weight=made.bits_per_weight, seconds=made.seconds, notes=made.notes
            )
        elif step.kind == "judging":
            judged = self._measures.judge(path, report)
            row = replace(row, quality=judged.quality)
            self._rows[_SOURCE] = replace(self._rows[_SOURCE], quality=judged.source)
            self._method = replace(
                self._method, text=judged.text, text_sha256=judged.text_sha256, n_tokens=judged.n_tokens
            )
        else:
            timed = self._measures.time(path, report)
            peaks = [peak for peak in (row.peak_memory, timed.peak_memory) if peak is not None]
            row = replace(
                row,
                prefill=CardSpeed((*row.prefill.samples, timed.prefill)),
                decode=CardSpeed((*row.decode.samples, timed.decode)),
                peak_memory=max(peaks, default=None),
            )
        self._rows[step.type] = row

    def _with_path(self, row: CardRow, keeps: bool) -> CardRow:
        if row.is_source:
            return replace(row, path=str(self._source))
        made = keeps and row.n_bytes is not None
        return replace(row, path=str(self._targets[row.type])) if made else row


_SOURCE = ""  # the source's key: one of the types may be the source's own


def _rank(row: CardRow) -> tuple[bool, bool, int]:
    return not row.is_source, bool(row.failure), -(row.n_bytes or 0)


def _timing(kind: str) -> ReportStep:
    return ReportStep("timing", kind, _EFFORT["timing"])


def _effort(kind: str) -> float:
    """Return the estimated seconds for quantizing a small model: IQ types are slow, K-quants less so."""
    return 15.0 if kind.startswith("IQ") else 6.0 if kind.endswith(("_K", "_S", "_M", "_L")) else 1.0
