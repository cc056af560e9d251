"""The policy of speculative decoding: the user's preference, measured step times, and the gain they predict.

Step times are in steps.json; their key is the machine, the build of llama.cpp, the model's shape and the engine
settings.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from llmrun.config import STEPS_FILE
from llmrun.errors import LlmrunError, UsageError
from llmrun.gguf.header import Header
from llmrun.planning.hardware import Hardware
from llmrun.planning.measurements import (
    can_compare_attention,
    drop_entry,
    find_entry,
    forget_attention,
    keep_entry,
    measured_attention,
    model_key,
    remember_attention,
    remember_variants,
    uncompared_types,
)
from llmrun.protocol.codec import from_json
from llmrun.protocol.loading import Load
from llmrun.protocol.messages import Event, Finished, Stats
from llmrun.protocol.questions import MeasureSteps
from llmrun.protocol.speculation import Speculation, StepsMeasured, StepTables, StepTime, StepTimes

AUTO, OFF = -1, 0
"""Drafted tokens per step: as many as pay by the measured step times; none."""
DRAFT_BOUNDS = (3, 15)
"""Bounds of a number of drafted tokens per step: batches of 4 to 16 rows."""
_MOST_TIMES = 64
_NARROW = 2  # rows
_USABLE = 4  # rows: with times of narrower steps only, an answer measures more and drafts nothing
_SURPRISE = 1.5  # ratio of measured and expected time, or its inverse, of a wrong prediction
_MOST_SURPRISES = 3  # consecutive answers
_FEWEST_STEPS = 32  # of an answer that counts


def read_speculate(value: str | int, label: str = "--speculate") -> int:
    """Parse drafted tokens per step: "auto", "off" or a number.

    Args:
        label: the option's name, for the error.

    Raises:
        UsageError: the value is invalid.
    """
    low, high = DRAFT_BOUNDS
    if value in ("auto", "off"):
        return AUTO if value == "auto" else OFF
    if re.fullmatch("[0-9]{1,2}", str(value)) and low <= int(value) <= high:
        return int(value)
    raise UsageError(
        f"invalid {label} {value!s:.40}", why=f"must be auto, off, or a number of tokens from {low} to {high}"
    )


def read_draft_source(value: str | None) -> tuple[str | None, bool | None]:
    """Parse what drafts: "mtp", "off" or a model.

    Returns:
        The model's name, if any, and LoadPreferences.draft_heads.
    """
    if value in ("mtp", "off"):
        return None, value == "mtp"
    return value, None if value is None else False


class DraftPolicy:
    """The policy of drafts for a loaded model.

    Args:
        folder: config.Settings.state_dir.
        draft: header of load.draft.

    Attributes:
        most: drafted tokens per step, AUTO or OFF; may be changed between answers.
    """

    def __init__(
        self,
        header: Header,
        hardware: Hardware,
        load: Load,
        folder: Path,
        most: int = AUTO,
        draft: Header | None = None,
        *,
        is_of_heads: bool = False,
    ) -> None:
        self.most = most
        self._is_of_heads = is_of_heads  # the step times are those of the model's prediction heads
        self._header, self._hardware, self._load = header, hardware, load
        self._draft: DraftPolicy | None = None  # with step times of its own
        if draft is not None and load.draft is not None:
            of_heads = load.draft.draft_heads
            self._draft = DraftPolicy(draft, hardware, load.draft, folder, is_of_heads=of_heads)
        elif load.draft_heads and not is_of_heads:
            self._draft = DraftPolicy(header, hardware, load, folder, is_of_heads=True)
        self._folder, self._path = folder, folder / STEPS_FILE
        self._times: tuple[StepTime, ...] | None = None  # read on first use
        self._surprises = 0
        self._comparisons: MeasureSteps | None = None  # read when it is needed

    @property
    def times(self) -> tuple[StepTime, ...]:
        """The measured times of decode steps; () if they are not measured yet."""
        if self._times is None:
            entry = find_entry(self._path, self._key) if self._path.exists() else None
            self._times = _read_times(entry) if entry else ()
        return self._times

    @property
    def measured(self) -> StepTables:
        """The times of the model and the draft model; unmeasured ones are estimated by its share of weights."""
        times, draft = self.times, self._draft
        if draft is None or not times:
            return StepTables(times)
        share = draft._step_bytes / max(self._step_bytes, 1)
        guessed = tuple(time._replace(seconds=time.seconds * share) for time in times)
        return StepTables(times, draft.times or guessed)

    @property
    def _step_bytes(self) -> int:
        """Bytes of weights that a step reads: of heads, the output matrix too."""
        header = self._header
        if not self._is_of_heads:
            return header.weight_bytes - header.head_bytes
        output = next((tensor.n_bytes for tensor in header.tensors if tensor.name == "output.weight"), 0)
        return header.head_bytes + (output or next((tensor.n_bytes for tensor in header.tensors), 0))

    def speculation(self, most: int | None = None, *, probes: bool = False) -> Speculation | None:
        """Return the speculation of an answer; None without drafts.

        Args:
            most: overrides the attribute for this answer.
            probes: measure step times in this answer if there are none yet, or only of narrow steps. That depends on
                the clock, so an answer that has to be repeated exactly is none.
        """
        most = self.most if most is None else most
        if most == AUTO:
            widest = max((time.width for time in self.times), default=0)
            if probes and self._can_probe and widest < min(_USABLE, self._limit + 1):
                return Speculation(self._limit, self.times, probes=True)
            if self.can_pay and self.times:
                return Speculation(self._limit, self.measured.times, self.measured.draft_times)
            return None
        return Speculation(min(most, self._limit)) if most and self._limit else None

    @property
    def words(self) -> str:
        """The policy in words, e.g. "none, because no step times are measured here yet"."""
        if self.most > 0:
            return f"up to {self.most} per step"
        if self.most == AUTO and self.can_pay and self.times:
            return "as many as the measured step times say will pay"
        if self.most == OFF:
            return "none"
        return "none, because " + ("no step times are measured here yet" if self.can_pay else "they don't pay here")

    @property
    def lacks_times(self) -> bool:
        """Whether measuring step times would change the drafts."""
        # An answer measures at one depth only, and maybe not all widths.
        is_whole = any(not time.depth for time in self.times)
        is_known = is_whole and self._surprises < _MOST_SURPRISES and (self._draft is None or self._draft.times)
        has_heads = self._draft is not None and self._draft._is_of_heads
        if has_heads and not any(time.width == _NARROW for time in self.times):
            is_known = False  # heads pay with one or two tokens
        return self.most == AUTO and self.can_pay and not is_known

    @property
    def comparisons(self) -> MeasureSteps:
        """The measurement of step times, with those comparisons that are possible here and were not made yet."""
        if self._comparisons is None:
            header, hardware, folder = self._header, self._hardware, self._folder
            is_known = measured_attention(header, hardware, folder)
            self._comparisons = MeasureSteps(
                can_compare_attention(hardware, self._load) and not is_known,
                uncompared_types(header, hardware, self._load, folder),
            )
        return self._comparisons

    @property
    def unmeasured(self) -> MeasureSteps | None:
        """What an idle engine should measure; None if nothing is missing."""
        return self.comparisons if self.lacks_times or any(self.comparisons) else None

    def follow(self, event: Event) -> None:
        """Remember the step times among an answer's events, and compare them with its end."""
        if isinstance(event, StepsMeasured):
            with suppress(LlmrunError):  # it can't be written
                self.remember(StepTables(event.times))
        elif isinstance(event, Finished):
            self.notice(event.stats)

    def notice(self, stats: Stats, write: Callable[[Callable[[], None]], object] = lambda forget: forget()) -> bool:
        """Compare an answer with the step times; return whether they have to be measured again.

        That is so when several answers in a row take longer, only if the engine has a single sequence: others slow an
        answer down too. A faster answer shows at once that other programs ran during the measurement: its times are
        forgotten.

        Args:
            write: calls a function that waits for files, at once or in another thread.
        """
        expected = expected_seconds(stats, self.measured)
        if expected is None or stats.decode_steps < _FEWEST_STEPS:
            return False
        ratio = stats.decode_seconds / expected
        if ratio <= 1 / _SURPRISE:
            self._times = ()
            write(partial(self._forget, _SURPRISE * stats.decode_seconds / stats.decode_steps))
        self._surprises = self._surprises + 1 if ratio >= _SURPRISE and self._load.n_seq_max == 1 else 0
        return not self._times or self._surprises >= _MOST_SURPRISES

    def _forget(self, slowest: float) -> None:
        """Remove the step times from the disk, and a comparison of which no step was as fast as `slowest` seconds."""
        with suppress(LlmrunError):  # the folder can't be written
            drop_entry(self._path, self._key)
            forget_attention(self._header, self._hardware, self._folder, slowest)
        self._comparisons = None

    @property
    def can_pay(self) -> bool:
        """Whether drafts can pay: not if drafted tokens can't be removed."""
        return self._limit > 0

    @property
    def _limit(self) -> int:
        """Maximum number of drafted tokens per step."""
        return min(self._load.n_rollback, DRAFT_BOUNDS[1]) if self._header.recurrent_bytes else DRAFT_BOUNDS[1]

    @property
    def _can_probe(self) -> bool:
        """A GPU computes after decode() has returned, so that the time of a step is not that of the call.

        The drafts of a probe repeat one token, for which a mixture needs fewer experts than for others.
        """
        is_alone = self._load.n_seq_max == 1 and (self._draft is None or self._draft._is_of_heads)
        return self.can_pay and is_alone and not self._hardware.gpus and not self._header.n_experts

    def remember(self, measured: StepTables) -> bool:
        """Store what was measured; return whether there are step times.

        Raises:
            LlmrunError: the folder can't be written; the times hold for this process all the same.
        """
        if measured.attention:
            self._comparisons = self.comparisons._replace(attention=False)
            remember_attention(measured.attention, self._header, self._hardware, self._folder)
        if measured.variants:
            compared = {time.type for time in measured.variants}
            missing = tuple(name for name in self.comparisons.variant_types if name not in compared)
            self._comparisons = self.comparisons._replace(variant_types=missing)
            remember_variants(measured.variants, self._hardware, self._folder)
        if not measured.times:
            return False
        self._times, self._surprises = measured.times, 0
        if measured.draft_times and self._draft is not None:
            self._draft.remember(StepTables(measured.draft_times))
        keep_entry(self._path, self._key, {"times": [time._asdict() for time in measured.times]})
        return True

    @property
    def _key(self) -> dict[str, Any]:
        load = self._load
        settings = {
            "threads": load.threads,
            "gpu_layers": load.gpu_layers,
            "flash_attention": load.flash_attention,
            "kv_types": [load.kv_type_k, load.kv_type_v],
            "repack": load.repack,
        }
        if self._is_of_heads:
            settings["heads"] = True
        if load.cpu_variant:
            settings["cpu_variant"] = load.cpu_variant
        if load.n_rollback:
            settings["rollback"] = load.n_rollback
        if load.workers:
            settings["workers"] = [*load.workers, *load.layer_counts]
        return {**model_key(self._header, self._hardware), "settings": settings}


def _read_times(entry: dict[str, Any]) -> tuple[StepTime, ...]:
    """Return the times of an entry; () if they are damaged."""
    try:
        times = tuple(from_json(StepTime, row) for row in entry["times"])
    except (TypeError, ValueError, KeyError):
        return ()
    usable = all(row.width > 0 <= row.depth and 0 < row.seconds < math.inf for row in times)
    return times if usable and len(times) <= _MOST_TIMES and any(row.width == 1 for row in times) else ()


def expected_seconds(stats: Stats, measured: StepTables) -> float | None:
    """Return the decode time of an answer by the measured step times at its mean width; None without times or steps."""
    if not measured.times or not stats.decode_steps:
        return None
    depth, steps = stats.context_used, stats.decode_steps
    seconds = steps * StepTimes(measured.times).seconds(1 + stats.drafted_tokens / steps, depth)
    if measured.draft_times:
        seconds += stats.draft_steps * StepTimes(measured.draft_times).seconds(1, depth)
    return seconds


def expected_gain(stats: Stats, measured: StepTables) -> float | None:
    """Return the speedup of an answer by its drafts, by the measured step times; None without times or drafts."""
    seconds = expected_seconds(stats, measured)
    if seconds is None or not stats.drafted_tokens:
        return None
    return stats.completion_tokens * StepTimes(measured.times).seconds(1, stats.context_used) / seconds
