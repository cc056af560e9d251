"""The report of `llmrun quantize --report`: several types of one model, quantized, measured in turns and rated.

LocalMeasurements quantizes, evaluates and measures speed; card.py has the figures and the verdicts.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import FileLock, Timeout

from llmrun.errors import CancelledError, DiskFullError, EngineCrashedError, LlmrunError, TerminatedError, UsageError
from llmrun.gguf.reader import read_header
from llmrun.lab.bench.machine import describe
from llmrun.lab.bench.results import Machine
from llmrun.lab.quantize.card import Card, CardRow, CardSpeed, Method, Quality
from llmrun.lab.quantize.evaluate import EvaluatedText, choose_context, default_text, evaluate
from llmrun.lab.quantize.job import Preview, QuantizeRequest, preview, quantize
from llmrun.lab.quantize.request import model_stem
from llmrun.planning.hardware import probe
from llmrun.planning.preferences import ALL_LAYERS, LoadPreferences
from llmrun.protocol.jobs.bench import BENCH, Bench, BenchResult, BenchTest
from llmrun.protocol.jobs.evaluate import EvaluateResult, EvaluateUpdate, least_chunks
from llmrun.protocol.jobs.text import TOKENIZE, TokenizeText
from llmrun.protocol.loading import Load
from llmrun.runner.client import EngineClient
from llmrun.storage import disk_errors, free_bytes

OnShare = Callable[[float], None]
"""Called with the share of one measurement that is done, 0 to 1."""


# ---- progress and remaining time


@dataclass(frozen=True, slots=True)
class ReportStep:
    """Step of the job."""

    kind: str  # "quantizing", "judging" or "timing"; finished steps improve the estimates for others of their kind
    type: str  # of the weights
    effort: float  # estimated seconds; only ratios count


class Timetable:
    """Estimates from the durations of finished steps."""

    def __init__(self, steps: Sequence[ReportStep]) -> None:
        self._left = list(steps)
        self._taken: dict[str, tuple[float, float]] = {}  # kind -> effort and seconds of the finished steps
        self._seconds = 0.0
        self._share = 0.0

    def finish(self, seconds: float) -> None:
        """Record that the first remaining step is finished, and its duration."""
        step = self._left.pop(0)
        effort, taken = self._taken.get(step.kind, (0.0, 0.0))
        self._taken[step.kind] = effort + step.effort, taken + seconds
        self._seconds += seconds

    def drop(self, type_name: str) -> None:
        self._left = [step for step in self._left if step.type != type_name]

    def seconds_left(self, share: float = 0.0, running: float = 0.0) -> float | None:
        """Return the estimated remaining seconds; None if unknown.

        Args:
            share: finished share of the first remaining step, 0 to 1.
            running: seconds since that step began.
        """
        if not self._taken and share <= 0.0:
            return None
        expected = [self._expected(step) for step in self._left]
        if share > 0.0 and running > 0.0 and expected:
            # The closer to its end, the more its own pace counts.
            by_pace = running / share
            expected[0] = share * by_pace + (1 - share) * expected[0] if self._taken else by_pace
            expected[0] = max(expected[0] - running, 0.0)
        return sum(expected)

    def share_done(self, share: float = 0.0, running: float = 0.0) -> float:
        """Return the finished share of the whole job, 0 to 1, which never decreases. Arguments as in seconds_left()."""
        left = self.seconds_left(share, running)
        if left is not None:
            done = self._seconds + running
            self._share = max(self._share, done / max(done + left, 1e-9))
        return self._share

    def _expected(self, step: ReportStep) -> float:
        """Estimate a step by the finished steps of its kind, or by all of them if there are none."""
        effort, seconds = self._taken.get(step.kind, (0.0, 0.0))
        if effort <= 0.0:
            effort = sum(effort for effort, _ in self._taken.values())
            seconds = sum(seconds for _, seconds in self._taken.values())
        return step.effort * seconds / effort if effort > 0.0 else step.effort


# ---- the folder of the files: one named by the user, or a temporary one

_SPARE = 1.02  # overhead of the file system
_PREFIX, _LOCK = ".llmrun-report-", ".lock"


@contextmanager
def working_folder(keep: Path | None, n_bytes: int) -> Iterator[Path]:
    """Yield a folder with room for `n_bytes`.

    Args:
        keep: the folder, which stays; None for a temporary one in the current directory, or else in the system's
            folder for temporary files.

    Raises:
        DiskFullError: there is no room.
        ResourceError: the folder can't be created.
    """
    needed = int(n_bytes * _SPARE)
    if keep is not None:
        _require_room([keep], needed)
        with disk_errors(keep):
            keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    parents = [parent for parent in (Path.cwd(), Path(tempfile.gettempdir())) if os.access(parent, os.W_OK)]
    for parent in parents:
        _remove_leftovers(parent)
    parent = _require_room(parents, needed)
    with disk_errors(parent / _PREFIX):
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    try:
        with FileLock(folder / _LOCK):  # ends with the process, see _remove_leftovers()
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _require_room(folders: list[Path], needed: int) -> Path:
    for folder in folders:
        if free_bytes(folder) >= needed:
            return folder
    free = ", ".join(f"{free_bytes(folder):,} in {str(folder)!r}" for folder in folders) or "no folder is writable"
    raise DiskFullError(
        "the disk is too full for the files of all types",
        why=f"{needed:,} bytes are needed, free are: {free}",
        hint="fewer --types, or --keep FOLDER on another disk",
    )


def _remove_leftovers(parent: Path) -> None:
    """Remove the folders of killed processes; those of other users stay."""
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            with FileLock(folder / _LOCK, timeout=0):
                pass
        except (Timeout, OSError):
            continue
        shutil.rmtree(folder, ignore_errors=True)


# ---- measuring

_PROMPT, _ANSWER = 256, 32
MAX_CHUNKS, MIN_CHUNKS = 16, 4
"""Chunks of text that quality is measured on; the fewest are those of a quick report."""
_CHUNK = 512  # tokens
_JUDGE_SECONDS = 240.0  # approximate limit per type; slow models read less text
_MAX_TOKEN_LENGTH = 32  # characters, on average


def require_text(model: Path, text: EvaluatedText) -> None:
    """Raise UsageError if a text has too few tokens for a report, whose verdicts need intervals.

    Args:
        model: the (first) GGUF file; its vocabulary is loaded.
        text: text to measure quality on.
    """
    n_ctx = choose_context([read_header(model)], None, long=False)
    needed = least_chunks(n_ctx) * n_ctx
    command = TokenizeText(str(model.absolute()), text.content[: needed * _MAX_TOKEN_LENGTH], special=False)
    with closing(EngineClient()) as engine:
        n_tokens = len(engine.do(TOKENIZE, command).tokens)
    if n_tokens < needed:
        raise UsageError(
            "the text is too short for a report",
            why=f"{text.name} has {n_tokens:,} tokens, and at least {needed:,} are needed",
            hint="use a longer --text, or none, for Python's language reference",
        )


class LocalMeasurements:
    """Measurements of a model's types on this machine.

    Each adds its figures to a type's row. Each raises LlmrunError after a failure, and can be interrupted.

    Args:
        source: the (first) GGUF file.
        name: the model's name; "" for the stem of the file's name.
        text: text to measure quality on; None for the default of `llmrun evaluate`.
        preferences: load settings; n_ctx is ignored.
        chunks: maximum number of the text's chunks.

    Attributes:
        method: facts about the measurements so far.
        notes: a sentence about each load setting that is not the default.

    Raises BadModelError or ModelNotFoundError if the source is not a model's file.
    """

    def __init__(
        self,
        source: Path,
        *,
        name: str = "",
        text: EvaluatedText | None = None,
        imatrix: Path | None = None,
        preferences: LoadPreferences = LoadPreferences(),
        chunks: int = MAX_CHUNKS,
    ) -> None:
        self.source = source
        self._text = text or default_text()
        self._imatrix = imatrix
        self._preferences = preferences
        self._chunks = chunks
        self._header = read_header(source)
        self._build_commit = ""
        self._previews: dict[str, Preview] = {}
        self.name = name or model_stem(source)
        self.notes = tuple(_unusual(preferences))
        self.method = Method(
            prompt_tokens=_PROMPT,
            answer_tokens=_ANSWER,
            threads=preferences.threads or probe().usable_cores,
            imatrix=imatrix.name if imatrix else "",
        )

    def machine(self) -> Machine:
        return describe(build_commit=self._build_commit)

    def source_row(self) -> CardRow:
        header = self._header
        return CardRow(header.quant, is_source=True, n_bytes=header.file_size, bits_per_weight=header.bits_per_weight)

    def expected_bytes(self, type_name: str) -> int:
        """Return the expected file size of a type; raise UsageError if the type is invalid."""
        if type_name not in self._previews:
            self._previews[type_name] = preview(self._request(type_name, self.source.with_name("none.gguf")))
        return self._previews[type_name].n_bytes

    def make(self, row: CardRow, target: Path, on_share: OnShare) -> CardRow:
        """Write the file of a type."""
        made = quantize(
            self._request(row.type, target), lambda _, share: on_share(share), estimate=self._previews.get(row.type)
        )
        return replace(
            row, n_bytes=made.n_bytes, bits_per_weight=made.bits_per_weight, seconds=made.seconds, notes=made.notes
        )

    def time(self, row: CardRow, model: Path, on_share: OnShare) -> CardRow:
        """Measure the speed of a model once, in an engine process of its own."""
        settings = replace(self._preferences.settings(probe()), threads=self.method.threads)
        load = Load.of(settings, str(model.absolute()), n_ctx=0)
        with closing(EngineClient()) as engine:
            on_share(0.1)
            prefill = engine.do(BENCH, Bench(load, BenchTest(n_prompt=_PROMPT), repetitions=1))
            on_share(0.6)
            decode = engine.do(BENCH, Bench(load, BenchTest(n_gen=_ANSWER), repetitions=1))
        self._build_commit = decode.model.build_commit
        if model == self.source:
            self._chunks = chunks_for(_rate(prefill, _PROMPT), self._chunks)
        peaks = (row.peak_memory, prefill.peak_bytes, decode.peak_bytes)
        return replace(
            row,
            prefill=CardSpeed((*row.prefill.samples, _rate(prefill, _PROMPT))),
            decode=CardSpeed((*row.decode.samples, _rate(decode, _ANSWER))),
            peak_memory=max((peak for peak in peaks if peak is not None), default=None),
        )

    def judge(self, row: CardRow, model: Path, on_share: OnShare) -> tuple[CardRow, Quality]:
        """Compare a model with the source; return the source's quality too."""

        def report(update: EvaluateUpdate) -> None:
            on_share(update.done / update.total if update.total else 0.0)

        text = self._text
        result = evaluate(
            model,
            reference=self.source,
            text=text,
            chunks=self._chunks,
            preferences=self._preferences,
            on_update=report,
        )
        quality, of_source = _qualities(result)
        self.method = replace(
            self.method, text=text.name, text_sha256=text.sha256, n_tokens=result.chunks * result.n_ctx
        )
        return replace(row, quality=quality), of_source

    def _request(self, type_name: str, target: Path) -> QuantizeRequest:
        return QuantizeRequest(self.source, target, type_name, imatrix=self._imatrix, threads=self._preferences.threads)


def chunks_for(prefill: float, limit: int) -> int:
    """Return the number of chunks that a model and its source, with this prefill speed, read in reasonable time.

    `limit` takes precedence over the minimum of a few chunks.
    """
    readable = int(_JUDGE_SECONDS * prefill / (2 * _CHUNK))
    return min(max(readable, MIN_CHUNKS), limit)


def _unusual(preferences: LoadPreferences) -> Iterator[str]:
    """Yield a sentence about each load setting that is not the default."""
    attention = preferences.attention
    if (attention["kv_type_k"], attention["kv_type_v"]) != ("f16", "f16"):
        types = f"{attention['kv_type_k']} keys and {attention['kv_type_v']} values"
        yield f"the KV cache has {types}; quality is compared with the source's in f16"
    if attention["flash_attention"] != "auto":
        yield f"flash attention is {attention['flash_attention']}"
    if preferences.gpu_layers is not None and preferences.gpu_layers != ALL_LAYERS:
        yield f"{preferences.gpu_layers} layers are on the GPU"


def _qualities(result: EvaluateResult) -> tuple[Quality, Quality]:
    """Return the quality of the model, and of the source."""
    divergence = result.divergence
    if divergence is None or result.perplexity is None:
        raise LlmrunError("nothing was evaluated")
    quality = Quality(
        perplexity=result.perplexity.value,
        perplexity_error=result.perplexity.half,
        kld=divergence.mean.value,
        kld_error=divergence.mean.half,
        same_top=divergence.same_top.value,
        same_top_error=divergence.same_top.half,
    )
    reference = divergence.reference_perplexity
    return quality, Quality(perplexity=reference.value, perplexity_error=reference.half)


def _rate(done: BenchResult, n_tokens: int) -> float:
    return 1e9 * n_tokens * len(done.repetitions) / max(sum(repetition.ns for repetition in done.repetitions), 1)


# ---- the job

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
    measures: LocalMeasurements,
    types: Sequence[str],
    *,
    keep: Path | None = None,
    on_update: OnUpdate = lambda update: None,
    rounds: int = ROUNDS,
) -> Card:
    """Quantize a model to several types, and measure all of them and the source.

    Ctrl-C ends the job early: the card has the figures so far. A type that can't be made gets a row with the reason.

    Args:
        types: names of llmrun.gguf.types.FILE_TYPES; repeated ones count once.
        keep: folder for the files; None to remove them.
        rounds: number of speed measurements of each type.

    Raises:
        UsageError: no type can be made, or a file exists already.
        DiskFullError: there is no room for the files.
        LlmrunError: the source, or every type, can't be measured.
    """
    type_names = list(dict.fromkeys(types))
    if not type_names:
        raise UsageError("a report needs at least one type", hint="--types Q8_0,Q4_K_M,Q4_0")
    failures, needed = _expected(measures, type_names)
    names = {type_name: f"{measures.name}-{type_name}.gguf" for type_name in type_names if type_name not in failures}
    if keep is not None:
        _refuse_existing([keep / name for name in names.values()])
    with working_folder(keep, needed) as folder:
        work = _Work(measures, {type_name: folder / name for type_name, name in names.items()}, on_update)
        for type_name, reason in failures.items():
            work.fail(type_name, reason)
        return work.run(rounds, keeps=keep is not None)


def _expected(measures: LocalMeasurements, type_names: Sequence[str]) -> tuple[dict[str, str], int]:
    """Return type -> reason why it can't be made, and the total size of the other types."""
    failures, needed = {}, 0
    errors = []
    for type_name in type_names:
        try:
            needed += measures.expected_bytes(type_name)
        except (UsageError, EngineCrashedError) as error:
            failures[type_name] = error.what
            errors.append(error)
    if len(failures) == len(type_names):
        raise errors[0]
    return failures, needed


def _refuse_existing(targets: Sequence[Path]) -> None:
    existing = [target for target in targets if target.exists()]
    if existing:
        raise UsageError(
            f"{str(existing[0])!r} is there already",
            why="a report replaces no file",
            hint="name another folder, or remove it",
        )


class _Work:
    """Steps of the job, and their results so far."""

    def __init__(self, measures: LocalMeasurements, targets: dict[str, Path], on_update: OnUpdate) -> None:
        self._measures = measures
        self._paths = {_SOURCE: measures.source} | targets
        self._on_update = on_update
        self._rows = {_SOURCE: measures.source_row()} | {type_name: CardRow(type_name) for type_name in targets}
        self._timetable = Timetable([])

    def fail(self, type_name: str, reason: str) -> None:
        self._rows[type_name] = replace(self._rows.get(type_name, CardRow(type_name)), failure=reason)
        self._timetable.drop(type_name)

    def run(self, rounds: int, *, keeps: bool) -> Card:
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
        measures, source = self._measures, self._paths[_SOURCE]
        rows = [
            replace(row, path=str(self._paths[type_name]))
            if type_name == _SOURCE or (keeps and row.n_bytes is not None)
            else row
            for type_name, row in self._rows.items()
        ]
        # The file of a Hugging Face folder is temporary, so its name means nothing.
        is_file = source.suffix == ".gguf"
        return Card(
            name=measures.name,
            source=source.name if is_file else f"{measures.name} ({self._rows[_SOURCE].type})",
            rows=tuple(sorted(rows, key=_rank)),
            method=replace(measures.method, rounds=rounds),
            machine=measures.machine(),
            started=started,
            seconds=time.monotonic() - began,
            is_complete=is_complete,
            notes=measures.notes,
        )

    def _steps(self, rounds: int) -> list[ReportStep]:
        """Return the steps: each type is made, judged and timed once; then all types are timed again in turns."""
        type_names = [type_name for type_name in self._paths if type_name != _SOURCE]
        steps = [_timing(_SOURCE)]
        for type_name in type_names:
            steps += [
                ReportStep("quantizing", type_name, _effort(type_name)),
                ReportStep("judging", type_name, _EFFORT["judging"]),
                _timing(type_name),
            ]
        return steps + [_timing(type_name) for type_name in (_SOURCE, *type_names)] * (rounds - 1)

    def _run_step(self, step: ReportStep) -> None:
        began = time.monotonic()

        def report(share: float, row: CardRow | None = None) -> None:
            running = time.monotonic() - began
            timetable = self._timetable
            name = self._rows[step.type].type
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

    def _measure(self, step: ReportStep, on_share: OnShare) -> None:
        row, path = self._rows[step.type], self._paths[step.type]
        if step.kind == "quantizing":
            row = self._measures.make(row, path, on_share)
        elif step.kind == "judging":
            row, of_source = self._measures.judge(row, path, on_share)
            self._rows[_SOURCE] = replace(self._rows[_SOURCE], quality=of_source)
        else:
            row = self._measures.time(row, path, on_share)
        self._rows[step.type] = row


_SOURCE = ""  # the source's key: one of the types may be the source's own


def _rank(row: CardRow) -> tuple[bool, bool, int]:
    return not row.is_source, bool(row.failure), -(row.n_bytes or 0)


def _timing(type_name: str) -> ReportStep:
    return ReportStep("timing", type_name, _EFFORT["timing"])


def _effort(type_name: str) -> float:
    """Return the estimated seconds for quantizing a small model: IQ types are slow, K-quants less so."""
    return 15.0 if type_name.startswith("IQ") else 6.0 if type_name.endswith(("_K", "_S", "_M", "_L")) else 1.0
