"""The number of threads that compute a decode step: all, or fewer while other programs need the cores.

ggml's threads wait for each other after every operation, so a step is as slow as the thread that shares its core with
another program. On two cores beside one busy program, one thread decodes SmolLM2 three to eight times as fast as two,
and a model of 1B 1.4 times. A wide batch keeps all threads: there ggml hands out rows to whichever thread is free, and
two threads were as fast as one or faster beside up to four busy programs.

Must not know llama.cpp, nor sequences.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from llmrun.engine.core.policy import POLICY
from llmrun.system import busy_seconds


class MachineLoad:
    """The cores that other programs use at normal priority, measured over the last moments.

    Args:
        busy: returns the seconds that all programs have computed on this process's cores; None if unknown.
        own: returns those of this process.

    Attributes:
        others: the cores in use by others; None until measured.
    """

    def __init__(
        self,
        busy: Callable[[], float | None] = busy_seconds,
        own: Callable[[], float] = time.process_time,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._busy, self._own, self._clock = busy, own, clock
        self.others: float | None = None
        self._since, self._before = self._clock(), self._reading()

    def _reading(self) -> float | None:
        busy = self._busy()
        return None if busy is None else busy - self._own()

    def update(self) -> bool:
        """Measure the load if it is time to; return whether it did."""
        now = self._clock()
        elapsed = now - self._since
        if elapsed < (POLICY.first_load_seconds if self.others is None else POLICY.load_seconds):
            return False
        before, reading = self._before, self._reading()
        self._since, self._before = now, reading
        if before is None or reading is None or elapsed > 8 * POLICY.load_seconds:  # so long says little about now
            return False
        self.others = max(0.0, reading - before) / elapsed
        return True


class ThreadChooser:
    """Chooses the threads of decode steps by the machine's load, and corrects the choice by timing other numbers.

    Without load there are no trials, so a quiet machine is never slowed.

    Args:
        most: threads that the model was loaded with.
        cores: hardware threads that this process may use.
        load: of the machine.

    Attributes:
        n_threads: of the next steps.
        chosen: of all but trials.
    """

    def __init__(
        self,
        most: int,
        cores: int,
        load: MachineLoad,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.most, self._spare = most, max(0, cores - most)
        self._load, self._clock = load, clock
        self.n_threads = self.chosen = self._suggested = most
        self._shape = 0  # rows of the steps that were timed
        self._times: dict[int, _StepTime] = {}  # by number of threads
        self._next_trial, self._goes_up = 0.0, True

    @property
    def is_busy(self) -> bool:
        """Whether other programs need cores that the threads would use."""
        return self._suggested < self.most

    def update(self) -> None:
        """Follow the machine's load."""
        if not self._load.update():
            return
        left = self.most - max(0.0, (self._load.others or 0.0) - self._spare)
        tolerated = POLICY.few_others, POLICY.most_others
        fewest, most = (max(1, int(left + others)) for others in tolerated)
        suggested = min(max(self._suggested, fewest), most)
        if suggested != self._suggested:
            self._suggested = self.chosen = self.n_threads = suggested
            self._forget_times()

    def record(self, n_rows: int, n_steps: int, seconds: float) -> None:
        """Account for decode steps with as many threads as chosen.

        Args:
            n_rows: tokens of each step.
            seconds: of all steps together.
        """
        if not self.is_busy or not n_steps:
            return
        if n_rows != self._shape:
            self._shape = n_rows
            self._forget_times()
        self._times.setdefault(self.n_threads, _StepTime()).add(n_steps, seconds)
        if self.n_threads != self.chosen:
            self._end_trial()
        elif self._clock() >= self._next_trial and self._times[self.chosen].is_enough:
            self._begin_trial()

    def _forget_times(self) -> None:
        """Time the chosen number first, then try others."""
        self.n_threads = self.chosen
        self._times.clear()
        self._next_trial = max(self._next_trial, self._clock() + POLICY.trial_cost * POLICY.trial_seconds)

    def _begin_trial(self) -> None:
        """Try up to twice as many threads and down to half as many in turn."""
        self._goes_up = not self._goes_up if 1 < self.chosen < self.most else self.chosen == 1
        other = min(self.most, 2 * self.chosen) if self._goes_up else self.chosen // 2
        self.n_threads = other
        self._times.pop(other, None)

    def _end_trial(self) -> None:
        """Keep the faster number once the trial tells."""
        trial, usual = self._times[self.n_threads], self._times[self.chosen]
        if not trial.is_enough and trial.mean < POLICY.trial_hopeless * usual.mean:
            return
        if trial.mean <= POLICY.trial_gain * usual.mean:
            self.chosen = self.n_threads
        self.n_threads = self.chosen
        lost = trial.seconds - trial.steps * usual.mean
        self._next_trial = self._clock() + POLICY.trial_cost * max(POLICY.trial_seconds, lost)


class _StepTime:
    """The recent mean time of a step."""

    def __init__(self) -> None:
        self.steps = self.seconds = 0.0
        self._weight = self._weighted = 0.0

    def add(self, n_steps: int, seconds: float) -> None:
        memory = POLICY.step_memory**n_steps
        self.steps += n_steps
        self.seconds += seconds
        self._weight = memory * self._weight + n_steps
        self._weighted = memory * self._weighted + seconds

    @property
    def mean(self) -> float:
        return self._weighted / self._weight

    @property
    def is_enough(self) -> bool:
        return self.steps >= POLICY.trial_steps and self.seconds >= POLICY.trial_seconds
