"""How far a quantization is: one bar on a terminal, now and then a plain line anywhere else; and what came out.

Owns the words and the drawing; must not know how files are made. Always on stderr, except JSON.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from llmrun.ui.terminal.format import seconds, size
from llmrun.ui.terminal.output import Output
from llmrun.ui.terminal.progress import Pace, rounded_seconds
from llmrun.ui.terminal.sanitize import clean

if TYPE_CHECKING:
    from llmrun.quantize.job import Done, Preview

_BAR_HZ = 8
_LINE_SECONDS = 10.0
_STEPS = 10_000  # of a whole, for Pace, which counts
_LAST = "checking"


class Stages(ABC):
    """Stages that follow each other are being shown. It is called with (stage, its share done: 0 to 1)."""

    def __init__(self, output: Output) -> None:
        self._output = output

    def say(self, text: str) -> None:
        """A line of its own."""
        self.pause()
        self._output.note(text)

    @abstractmethod
    def __call__(self, name: str, share: float) -> None:
        """As often as one likes; another name begins another stage."""

    @abstractmethod
    def pause(self) -> None:
        """Make room for lines on the terminal; the next call goes on."""


@contextmanager
def stages(output: Output, title: str, *, clock: Callable[[], float] = time.monotonic) -> Iterator[Stages]:
    """Show stages until the block ends, however it ends.

    Args:
        title: what is being made; untrusted text.
        clock: monotonic seconds.
    """
    if output.stderr_cursor_moves and not output.json:
        bar = _Bar(output, clean(title), clock)
        try:
            yield bar
        finally:
            bar.pause()
    else:
        yield _Lines(output, clean(title), clock)


class _Stage:
    """What is being done, how much of it, and how long it will still take."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pace = Pace()
        self.name = ""
        self.share = 0.0

    def update(self, name: str, share: float) -> bool:
        """Take a message in; whether another stage began."""
        is_new = name != self.name
        if is_new:
            self._pace.restart()
        self.name, self.share = name, min(max(share, 0.0), 1.0)
        self._pace.update(int(self.share * _STEPS), self._clock())
        return is_new

    @property
    def left(self) -> str:
        """E.g. "12 s left", or "" when nobody can tell."""
        if self.share >= 1.0:
            return _LAST if self.name == "quantizing" else ""
        left = self._pace.seconds_left(_STEPS)
        return f"{rounded_seconds(left)} left" if left is not None else ""


class _Bar(Stages):
    """A bar that is drawn _BAR_HZ times a second, from the first call on; a new stage begins it anew."""

    def __init__(self, output: Output, title: str, clock: Callable[[], float]) -> None:
        super().__init__(output)
        self._title = title
        self._stage = _Stage(clock)
        self._progress: Any = None
        self._task: Any = None

    def __call__(self, name: str, share: float) -> None:
        self._stage.update(name, share)
        if self._progress is None:
            self._begin()
        self._progress.update(
            self._task,
            description=f"{self._title}: {clean(name)}",
            completed=self._stage.share,
            left=self._stage.left,
        )

    def _begin(self) -> None:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TextColumn("{task.fields[left]}", style="progress.remaining", markup=False),
            console=self._output.console(stderr=True),
            refresh_per_second=_BAR_HZ,
            redirect_stdout=False,
            redirect_stderr=False,
            transient=True,  # the result's line says all that was of interest
        )
        self._task = self._progress.add_task(self._title, total=1.0, left="")
        self._progress.start()

    def pause(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


class _Lines(Stages):
    """One line when a stage begins, then one every _LINE_SECONDS."""

    def __init__(self, output: Output, title: str, clock: Callable[[], float]) -> None:
        super().__init__(output)
        self._title = title
        self._clock = clock
        self._stage = _Stage(clock)
        self._line_at = clock()

    def __call__(self, name: str, share: float) -> None:
        if self._stage.update(name, share):
            self._say(f"{self._title}: {name}")
        elif self._clock() - self._line_at >= _LINE_SECONDS:
            left = f", {self._stage.left}" if self._stage.left else ""
            self._say(f"{self._title}: {name}, {self._stage.share:.0%}{left}")

    def pause(self) -> None:
        """Nothing to do: lines don't get in each other's way."""

    def _say(self, line: str) -> None:
        self._line_at = self._clock()
        if not self._output.json:
            self._output.note(line)


def show_preview(output: Output, preview: Preview, kind: str, target: str) -> None:
    """What would come out, without a file: `--dry-run`."""
    if output.json:
        output.result_json(
            {
                "path": target,
                "type": kind,
                "n_bytes": preview.n_bytes,
                "bits_per_weight": round(preview.bits_per_weight, 3),
                "source_bytes": preview.source.file_size,
                "types": dict(preview.types),
                "notes": list(preview.notes),
            }
        )
        return
    counts: dict[str, int] = {}
    for name in preview.types.values():
        counts[name] = counts.get(name, 0) + 1
    mix = ", ".join(f"{count} {name}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))
    output.note(
        f"{target} would have {size(preview.n_bytes)}, {preview.bits_per_weight:.2f} bits a weight "
        f"(now {preview.source.quant}, {size(preview.source.file_size)}); tensors: {mix}"
    )


def show_done(output: Output, done: Done, extra: Mapping[str, Any] | None = None) -> None:
    """What came out.

    Args:
        extra: for the JSON.
    """
    if output.json:
        output.result_json(
            {
                "path": str(done.path),
                "type": done.type,
                "source_type": done.source_type,
                "source_bytes": done.source_bytes,
                "n_bytes": done.n_bytes,
                "n_parameters": done.n_parameters,
                "bits_per_weight": round(done.bits_per_weight, 3),
                "bytes_per_type": dict(done.bytes_per_type),
                "seconds": round(done.seconds, 3),
                "notes": list(done.notes),
                **(extra or {}),
            }
        )
        return
    kind = "a mix of" if done.n_overrides else done.type
    output.note(
        f"{done.source_type} {size(done.source_bytes)} -> {kind} {size(done.n_bytes)}, "
        f"{done.bits_per_weight:.2f} bits a weight, in {seconds(done.seconds, brief=True)}: {done.path}"
    )
