"""Making a report card: which measurement comes when, what is kept of it, and what an interruption leaves.

Owns the order; the measurements are measure.py's, the words verdict.py's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llmrun.errors import CancelledError, EngineCrashedError, LlmrunError, TerminatedError, UsageError
from llmrun.planning.plan import LoadPreferences
from llmrun.quantize.evaluate import EvaluatedText
from llmrun.quantize.report.card import Card, CardRow, CardSpeed, Method
from llmrun.quantize.report.folder import working_folder
from llmrun.quantize.report.measure import Measurements, SourceModel
from llmrun.quantize.report.timetable import ReportStep, Timetable

ROUNDS = 5
"""How often the speed of each type is measured."""

_EFFORT = {"timing": 4.0, "judging": 20.0}  # seconds, for a small model


@dataclass(frozen=True, slots=True)
class ReportUpdate:
    """How far it is.

    Attributes:
        doing: "quantizing", "judging" or "timing".
        type: of which weights.
        share: of the whole job that is done, 0 to 1.
        seconds_left: None while nobody can tell.
        row: what is known of a type now, when a step with it has ended; else None.
    """

    doing: str
    type: str
    share: float
    seconds_left: float | None
    row: CardRow | None = None


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
    measures: Measurements | None = None,
    rounds: int = ROUNDS,
) -> Card:
    """Make every type of a model, measure all of them, and the source, side by side.

    Ctrl-C ends it early: the card has what was measured by then. A type that can't be made gets a row with the reason.

    Args:
        source: the (first) GGUF file.
        types: names of llmrun.quantize.types.FILE_TYPES; twice the same is once.
        name: what the model is called; "" takes it from the file's name.
        text: what quality is measured on; None is what `llmrun evaluate` reads by default.
        imatrix: an importance matrix of llama.cpp's, in GGUF.
        preferences: how models are loaded; n_ctx does not count.
        keep: folder where the files stay; None keeps none.
        on_update: told now and then how far it is.
        measures: how it is measured; None is with llama.cpp, here.
        rounds: how often the speed is measured.

    Raises:
        UsageError: no type can be made; says why. A file is in the way.
        DiskFullError: there is no room for all of them.
        LlmrunError: the source itself, or none of the types, can be measured.
    """
    if measures is None:
        from llmrun.quantize.report.local_measurements import LocalMeasurements

        measures = LocalMeasurements(source, name=name, text=text, imatrix=imatrix, preferences=preferences)
    kinds = list(dict.fromkeys(types))
    if not kinds:
        raise UsageError("a report needs at least one type", hint="--types Q8_0,Q4_K_M,Q4_0")
    original = measures.original()
    failures, needed = _expected(measures, kinds)
    targets = _targets(original, [kind for kind in kinds if kind not in failures], keep)
    with working_folder(keep, needed) as folder:
        work = _Work(source, original, measures, {kind: folder / name for kind, name in targets.items()}, on_update)
        for kind, why in failures.items():
            work.fail(kind, why)
        return work.run(rounds, keeps=keep is not None, imatrix=imatrix)


def _expected(measures: Measurements, kinds: Sequence[str]) -> tuple[dict[str, str], int]:
    """Type -> why it can't be made, and the bytes that the others need together."""
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
    in_the_way = [name for name in names.values() if keep is not None and (keep / name).exists()]
    if in_the_way:
        raise UsageError(
            f"{str(keep and keep / in_the_way[0])!r} is there already",
            why="a report replaces no file",
            hint="name another folder, or remove it",
        )
    return names


class _Work:
    """The steps, and what came out of them so far."""

    def __init__(
        self, source: Path, original: SourceModel, measures: Measurements, targets: dict[str, Path], on_update: OnUpdate
    ) -> None:
        self._source = source
        self._original = original
        self._measures = measures
        self._targets = targets
        self._on_update = on_update
        self._rows = {_SOURCE: _source_row(original)} | {kind: CardRow(kind) for kind in targets}
        self._method = Method(
            prompt_tokens=measures.prompt_tokens, answer_tokens=measures.answer_tokens, threads=measures.threads
        )
        self._timetable = Timetable([])

    def fail(self, kind: str, why: str) -> None:
        """Note that a type can't be made or measured."""
        self._rows[kind] = replace(self._rows.get(kind, CardRow(kind)), failure=why)
        self._timetable.drop(kind)

    def run(self, rounds: int, *, keeps: bool, imatrix: Path | None) -> Card:
        """Take all steps, or as many as there is time for."""
        started, began = time.time(), time.monotonic()
        steps = self._steps(rounds)
        self._timetable = Timetable(steps)
        is_complete = True
        try:
            for step in steps:
                if step.type == _SOURCE or not self._rows[step.type].failure:
                    self._take(step)
        except (KeyboardInterrupt, CancelledError):
            is_complete = False
        rows = [self._with_path(row, keeps) for row in self._rows.values()]
        return Card(
            name=self._original.name,
            source=_file_name(self._source, self._original),
            rows=tuple(sorted(rows, key=_rank)),
            method=replace(self._method, rounds=rounds, imatrix=imatrix.name if imatrix else ""),
            machine=self._measures.machine(),
            started=started,
            seconds=time.monotonic() - began,
            is_complete=is_complete,
            notes=self._original.notes,
        )

    def _steps(self, rounds: int) -> list[ReportStep]:
        """Each type is made, judged and timed once; then all types take turns in being timed again."""
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

    def _take(self, step: ReportStep) -> None:
        began = time.monotonic()

        def tell(share: float, row: CardRow | None = None) -> None:
            running = time.monotonic() - began
            timetable = self._timetable
            name = self._original.type if step.type == _SOURCE else step.type
            if row is None:
                done, left = timetable.share_done(share, running), timetable.seconds_left(share, running)
            else:
                done, left = timetable.share_done(), timetable.seconds_left()
            self._on_update(ReportUpdate(step.kind, name, done, left, row))

        tell(0.0)
        try:
            self._measure(step, tell)
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
        tell(1.0, self._rows[step.type])

    def _measure(self, step: ReportStep, tell: Callable[[float], None]) -> None:
        row = self._rows[step.type]
        path = self._source if step.type == _SOURCE else self._targets[step.type]
        if step.kind == "quantizing":
            made = self._measures.make(step.type, path, tell)
            row = replace(
                row, n_bytes=made.n_bytes, bits_per_weight=made.bits_per_weight, seconds=made.seconds, notes=made.notes
            )
        elif step.kind == "judging":
            judged = self._measures.judge(path, tell)
            row = replace(row, quality=judged.quality)
            self._rows[_SOURCE] = replace(self._rows[_SOURCE], quality=judged.source)
            self._method = replace(
                self._method, text=judged.text, text_sha256=judged.text_sha256, n_tokens=judged.n_tokens
            )
        else:
            timed = self._measures.time(path, tell)
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


_SOURCE = ""  # stands for the source where types are told apart: one of the types may be the source's own


def _source_row(original: SourceModel) -> CardRow:
    return CardRow(original.type, is_source=True, n_bytes=original.n_bytes, bits_per_weight=original.bits_per_weight)


def _file_name(source: Path, original: SourceModel) -> str:
    """The source's, or what a folder's model is called: the file it was converted to is a temporary one."""
    return source.name if source.suffix == ".gguf" else f"{original.name} ({original.type})"


def _rank(row: CardRow) -> tuple[bool, bool, int]:
    return not row.is_source, bool(row.failure), -(row.n_bytes or 0)


def _timing(kind: str) -> ReportStep:
    return ReportStep("timing", kind, _EFFORT["timing"])


def _effort(kind: str) -> float:
    """Guessed seconds of quantizing a small model: IQ types search long, K-quants a while."""
    return 15.0 if kind.startswith("IQ") else 6.0 if kind.endswith(("_K", "_S", "_M", "_L")) else 1.0
