"""The progress and the result of a quantization, on stderr or as JSON on stdout."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from llmrun.protocol.sizes import readable_size
from llmrun.ui.terminal.activity import Activity, Pace, time_left
from llmrun.ui.terminal.format import seconds
from llmrun.ui.terminal.output import Output

if TYPE_CHECKING:
    from llmrun.lab.quantize.job import Preview, QuantizedFile

_STEPS = 10_000  # of the whole, because Pace counts integers
_LAST = "checking"


class Stages:
    """A live display of consecutive stages; call it with (stage, share of it that is done, 0 to 1)."""

    def __init__(self, activity: Activity, title: str, clock: Callable[[], float]) -> None:
        self._activity, self._title, self._clock = activity, title, clock
        self._pace = Pace()
        self._name = ""
        self.say, self.pause = activity.note, activity.pause

    def __call__(self, name: str, share: float) -> None:
        """Update the display; a new name begins a new stage."""
        begins = name != self._name
        if begins:
            self._pace.restart()
        self._name, share = name, min(max(share, 0.0), 1.0)
        self._pace.update(int(share * _STEPS), self._clock())
        left = time_left(self._pace.seconds_left(_STEPS))
        if share >= 1.0:
            left = _LAST if name == "quantizing" else ""
        self._activity.show(f"{self._title}: {name}", share, left, begins=begins)


@contextmanager
def stages(output: Output, title: str, *, clock: Callable[[], float] = time.monotonic) -> Iterator[Stages]:
    """Show stages until the end of the block.

    Args:
        title: name of the file in progress; untrusted text.
        clock: monotonic seconds.
    """
    with Activity(output, clock=clock) as activity:
        yield Stages(activity, title, clock)


def show_preview(output: Output, preview: Preview, kind: str, target: str) -> None:
    """Print the expected result of `--dry-run`, which writes no file."""
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
    mix = ", ".join(f"{count} {name}" for name, count in Counter(preview.types.values()).most_common())
    output.note(
        f"{target} would have {readable_size(preview.n_bytes)}, {preview.bits_per_weight:.2f} bits per weight "
        f"(now {preview.source.quant}, {readable_size(preview.source.file_size)}); tensors: {mix}"
    )


def show_done(output: Output, done: QuantizedFile) -> None:
    """Print the result."""
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
            }
        )
        return
    kind = "a mix of" if done.n_overrides else done.type
    output.note(
        f"{done.source_type} {readable_size(done.source_bytes)} -> {kind} {readable_size(done.n_bytes)}, "
        f"{done.bits_per_weight:.2f} bits per weight, in {seconds(done.seconds, brief=True)}: {done.path}"
    )
