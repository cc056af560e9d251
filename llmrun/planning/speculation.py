"""How many tokens of an answer may be drafted: what a user may wish, and how long decode steps take here.

Owns the wish, steps.json with the measured step times, and the gain that they promise; must not know how they are
measured, nor how tokens are drafted and verified. A step's time depends on the machine, the build of llama.cpp, the
model's shape and the engine's settings: these are the key of an entry.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from llmrun.config import STEPS_FILE
from llmrun.errors import LlmrunError, UsageError
from llmrun.gguf.header import Header
from llmrun.planning import attention, measurement_cache
from llmrun.planning.hardware import Hardware
from llmrun.protocol.codec import from_json
from llmrun.protocol.loading import Load
from llmrun.protocol.messages import Event, Finished, Stats
from llmrun.protocol.speculation import AttentionTime, Speculation, StepsMeasured, StepTables, StepTime, StepTimes

AUTO, OFF = -1, 0
"""Drafted tokens a step: as many as the measured step times say will pay; none."""
DRAFT_BOUNDS = (3, 15)
"""Of a stated number: batches of 4 to 16 rows."""
_MOST_TIMES = 64
_SURPRISE = 1.5  # times as long, or as short, as expected ...
_MOST_SURPRISES = 3  # ... of so many answers in turn ...
_FEWEST_STEPS = 32  # ... of at least so many steps


def read_speculate(value: str | int, label: str = "--speculate") -> int:
    """Drafted tokens a step, AUTO or OFF, as a user says it: "auto", "off" or a number.

    Args:
        label: what the user calls it.

    Raises:
        UsageError: it is none of these.
    """
    low, high = DRAFT_BOUNDS
    if value in ("auto", "off"):
        return AUTO if value == "auto" else OFF
    if re.fullmatch("[0-9]{1,2}", str(value)) and low <= int(value) <= high:
        return int(value)
    raise UsageError(
        f"invalid {label} {value!s:.40}", why=f"must be auto, off, or a number of tokens from {low} to {high}"
    )


class DraftPolicy:
    """How a model's answers are drafted, as it is loaded here.

    Args:
        load: how that is.
        folder: config.Settings.state_dir.
        draft: header of the model that drafts for it, which `load` loads beside it.

    Attributes:
        most: drafted tokens a step, AUTO or OFF; may be changed between answers.
    """

    def __init__(
        self,
        header: Header,
        hardware: Hardware,
        load: Load,
        folder: Path,
        most: int = AUTO,
        draft: Header | None = None,
    ) -> None:
        self.most = most
        self._header, self._hardware, self._load = header, hardware, load
        self._draft: DraftPolicy | None = None  # it has step times of its own
        if draft is not None and load.draft is not None:
            self._draft = DraftPolicy(draft, hardware, load.draft, folder)
        self._folder, self._path = folder, folder / STEPS_FILE
        self._times: tuple[StepTime, ...] | None = None  # read when they are needed
        self._surprises = 0
        self._lacks_attention: bool | None = None  # read when it is needed

    @property
    def times(self) -> tuple[StepTime, ...]:
        """How long decode steps take; () where nobody measured that yet."""
        if self._times is None:
            entry = measurement_cache.find(self._path, self._key) if self._path.exists() else None
            self._times = _read_times(entry) if entry else ()
        return self._times

    @property
    def measured(self) -> StepTables:
        """The times, and the draft model's: where they are not measured, its weights' share of them is a fair guess."""
        times, draft = self.times, self._draft
        if draft is None or not times:
            return StepTables(times)
        share = draft._header.weight_bytes / max(self._header.weight_bytes, 1)
        guessed = tuple(each._replace(seconds=each.seconds * share) for each in times)
        return StepTables(times, draft.times or guessed)

    def wanted(self, most: int | None = None, *, probes: bool = False) -> Speculation | None:
        """What an answer is asked for with; None where nothing is drafted.

        Args:
            most: as the attribute, for this answer alone.
            probes: measure step times in this answer if there are none yet.
        """
        most = self.most if most is None else most
        if most == AUTO:
            if self.can_pay and self.times:
                return Speculation(DRAFT_BOUNDS[1], self.measured.times, self.measured.draft_times)
            return Speculation(DRAFT_BOUNDS[1], probes=True) if probes and self._can_probe else None
        return Speculation(most) if most else None

    @property
    def words(self) -> str:
        """What an answer is asked for with, e.g. "none, because no step times are measured here yet"."""
        if self.most > 0:
            return f"up to {self.most} a step"
        if self.most == AUTO and self.can_pay and self.times:
            return "as many as the measured step times say will pay"
        if self.most == OFF:
            return "none"
        return "none, because " + ("no step times are measured here yet" if self.can_pay else "they don't pay here")

    @property
    def lacks_times(self) -> bool:
        """Whether measuring them would change how answers are drafted."""
        is_known = self.times and self._surprises < _MOST_SURPRISES and (self._draft is None or self._draft.times)
        return self.most == AUTO and self.can_pay and not is_known

    @property
    def lacks_attention(self) -> bool:
        """Flash attention on and off can be compared here, and were not."""
        if self._lacks_attention is None:
            header, hardware, folder = self._header, self._hardware, self._folder
            is_known = attention.measured_attention(header, hardware, folder)
            self._lacks_attention = attention.can_be_measured(hardware, self._load) and not is_known
        return self._lacks_attention

    def noticing(self, events: Iterator[Event]) -> Iterator[Event]:
        """An answer's events, looked at: step times are old where several answers in turn took another time.

        Only where they had the engine for themselves.
        """
        for event in events:
            if isinstance(event, StepsMeasured):
                with suppress(LlmrunError):  # it can't be written
                    self.remember(event.times)
                continue
            if isinstance(event, Finished):
                self._notice(event.stats)
            yield event

    def _notice(self, stats: Stats) -> None:
        expected = expected_seconds(stats, self.measured)
        if expected is None or self._load.n_seq_max > 1 or stats.decode_steps < _FEWEST_STEPS:
            return
        ratio = stats.decode_seconds / expected
        self._surprises = self._surprises + 1 if not 1 / _SURPRISE < ratio < _SURPRISE else 0

    @property
    def can_pay(self) -> bool:
        """Whether drafts ever do here.

        Not where each row of a batch wakes experts of its own, nor where what was drafted can't be taken back.
        """
        return not (self._header.n_experts or self._header.recurrent_bytes or self._load.exact)

    @property
    def _can_probe(self) -> bool:
        """A GPU computes after decode() has returned, so that the time of a step is not that of the call."""
        return self.can_pay and self._load.n_seq_max == 1 and self._draft is None and not self._hardware.gpus

    def remember(
        self,
        times: tuple[StepTime, ...],
        draft_times: tuple[StepTime, ...] = (),
        attention_times: tuple[AttentionTime, ...] = (),
    ) -> bool:
        """Store what was measured; return whether there are step times.

        Raises:
            LlmrunError: the folder can't be written; this process knows it all the same.
        """
        if attention_times:
            self._lacks_attention = False
            attention.remember(attention_times, self._header, self._hardware, self._folder)
        if not times:
            return False
        self._times, self._surprises = times, 0
        if draft_times and self._draft is not None:
            self._draft.remember(draft_times)
        measurement_cache.keep(self._path, self._key, {"times": [each._asdict() for each in times]})
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
        if load.workers:
            settings["workers"] = [*load.workers, *load.layer_counts]
        return {**measurement_cache.model_key(self._header, self._hardware), "settings": settings}


def _read_times(entry: dict[str, Any]) -> tuple[StepTime, ...]:
    """An entry's times; () where they are damaged: somebody may have edited the file."""
    try:
        found = tuple(from_json(StepTime, each) for each in entry["times"])
    except (TypeError, ValueError, KeyError):
        return ()
    usable = all(each.width > 0 <= each.depth and 0 < each.seconds < math.inf for each in found)
    return found if usable and len(found) <= _MOST_TIMES and any(each.width == 1 for each in found) else ()


def tokens_a_step(stats: Stats) -> float:
    """What a decode step of an answer gave; 0 where there was none."""
    return stats.completion_tokens / stats.decode_steps if stats.decode_steps else 0.0


def expected_seconds(stats: Stats, measured: StepTables) -> float | None:
    """What an answer's decode takes by the measured step times, each as wide as they were on average.

    None where nothing is measured, or there was no step.
    """
    if not measured.times or not stats.decode_steps:
        return None
    depth, steps = stats.context_used, stats.decode_steps
    seconds = steps * StepTimes(measured.times).seconds(1 + stats.drafted_tokens / steps, depth)
    if measured.draft_times:
        seconds += stats.draft_steps * StepTimes(measured.draft_times).seconds(1, depth)
    return seconds


def expected_gain(stats: Stats, measured: StepTables) -> float | None:
    """How many times faster an answer came than without drafts, by the measured step times.

    None where nothing was drafted, or nothing is measured.
    """
    seconds = expected_seconds(stats, measured)
    if seconds is None or not stats.drafted_tokens:
        return None
    return stats.completion_tokens * StepTimes(measured.times).seconds(1, stats.context_used) / seconds
