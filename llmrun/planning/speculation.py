"""How many tokens of an answer may be drafted: what a user may wish, and how long decode steps take here.

Owns the wish, steps.json with the measured step times, and the gain that they promise; must not know how they are
measured, nor how tokens are drafted and verified. A step's time depends on the machine, the build of llama.cpp, the
model's shape and the engine's settings: these are the key of an entry.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmrun.config import STEPS_FILE
from llmrun.errors import UsageError
from llmrun.gguf.header import Header
from llmrun.planning import kept
from llmrun.planning.hardware import Hardware
from llmrun.protocol.codec import from_json
from llmrun.protocol.messages import Load, Stats
from llmrun.protocol.speculation import Speculation, StepTime, StepTimes

AUTO, OFF = -1, 0
"""Drafted tokens a step: as many as the measured step times say will pay; none."""
DRAFT_BOUNDS = (3, 15)
"""Of a stated number: batches of 4 to 16 rows."""
_MOST_TIMES = 64


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

    Attributes:
        most: drafted tokens a step, AUTO or OFF; may be changed between answers.
    """

    def __init__(self, header: Header, hardware: Hardware, load: Load, folder: Path, most: int = AUTO) -> None:
        self.most = most
        self._header, self._hardware, self._load = header, hardware, load
        self._path = folder / STEPS_FILE
        self._times: tuple[StepTime, ...] | None = None  # read when they are needed

    @property
    def times(self) -> tuple[StepTime, ...]:
        """How long decode steps take; () where nobody measured that yet."""
        if self._times is None:
            entry = kept.find(self._path, self._key) if self._path.exists() else None
            self._times = _read_times(entry) if entry else ()
        return self._times

    def wanted(self, most: int | None = None) -> Speculation | None:
        """What an answer is asked for with; None where nothing is drafted.

        Args:
            most: as the attribute, for this answer alone.
        """
        most = self.most if most is None else most
        if most == AUTO:
            return Speculation(DRAFT_BOUNDS[1], self.times) if self.can_pay and self.times else None
        return Speculation(most) if most else None

    @property
    def words(self) -> str:
        """What an answer is asked for with, e.g. "none, because no step times are measured here yet"."""
        if self.most > 0:
            return f"up to {self.most} a step"
        if self.wanted() is not None:
            return "as many as the measured step times say will pay"
        if self.most == OFF:
            return "none"
        return "none, because " + ("no step times are measured here yet" if self.can_pay else "they don't pay here")

    @property
    def lacks_times(self) -> bool:
        """Whether measuring them would change how answers are drafted."""
        return self.most == AUTO and self.can_pay and not self.times

    @property
    def can_pay(self) -> bool:
        """Whether drafts ever do here.

        Not where each row of a batch wakes experts of its own, nor where what was drafted can't be taken back.
        """
        return not (self._header.n_experts or self._header.recurrent_bytes or self._load.exact)

    def remember(self, times: tuple[StepTime, ...]) -> None:
        """Keep what was measured.

        Raises:
            LlmrunError: the folder can't be written; this process knows it all the same.
        """
        self._times = times
        kept.keep(self._path, self._key, {"times": [each._asdict() for each in times]})

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
        return {**kept.model_key(self._header, self._hardware), "settings": settings}


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


def expected_gain(stats: Stats, times: Sequence[StepTime]) -> float | None:
    """How many times faster an answer came than without drafts, by the measured step times.

    Its tokens a step, over the time of a step as wide as its steps were on average. None where nothing was drafted, or
    nothing is measured.
    """
    if not times or not stats.drafted_tokens or not stats.decode_steps:
        return None
    rows = 1 + stats.drafted_tokens / stats.decode_steps
    plain, wide = (StepTimes(times).seconds(width, stats.context_used) for width in (1, rows))
    return tokens_a_step(stats) * plain / wide
