"""Speed and progress of an answer in words: the fields of the live line, and the summary.

Pure except for the clock passed in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from llmrun.protocol.loading import Loaded, LoadProgress
from llmrun.protocol.messages import Event, Finished, PrefillProgress, Rendering, Started, Stats, TextDelta
from llmrun.ui.terminal.cells import cut, width
from llmrun.ui.terminal.format import counted, milliseconds, rate, seconds
from llmrun.ui.terminal.sanitize import clean

SEPARATOR = " · "

SILENT_SECONDS = 10.0
_SHOWN_SECONDS = 0.01  # of a part of the time to first token
_REPEATED_CELLS = 40  # of a quoted repetition


class Meter:
    """The progress of one answer, from the loading of the model on.

    Args:
        clock: monotonic seconds.
        n_ctx: context window in tokens, if the model was loaded earlier; 0 if unknown.
    """

    def __init__(self, clock: Callable[[], float], n_ctx: int = 0) -> None:
        self._clock = clock
        self._n_ctx = n_ctx
        self._loaded_fraction: float | None = None
        self._rendering_at: float | None = None
        self._started_at = 0.0
        self._started: Started | None = None
        self._prefill = PrefillProgress(0, 0, 0.0)
        self._first_text_at: float | None = None
        self._last_text_at = 0.0
        self._tokens = 0
        self._event_at = self._began = clock()

    def follow(self, event: Event) -> None:
        """Update the state with an event."""
        self._event_at = now = self._clock()
        if isinstance(event, TextDelta):
            self._text(event, now)
        elif isinstance(event, LoadProgress):
            self._loaded_fraction = event.fraction
        elif isinstance(event, Loaded):
            self._loaded_fraction, self._n_ctx, self._began = None, event.n_ctx, now
        elif isinstance(event, Rendering):
            self._rendering_at = now
        elif isinstance(event, Started):
            self._rendering_at = now if self._rendering_at is None else self._rendering_at
            self._started_at, self._started = now, event
        elif isinstance(event, PrefillProgress):
            self._prefill = event

    def resume(self) -> None:
        """Restart the clock of silence() after the process was stopped."""
        self._event_at = self._clock()

    def silence(self) -> list[str]:
        """Return a field about an engine or server that has sent nothing for long; else none."""
        silent = self._clock() - self._event_at
        return [f"no output for {silent:.0f} s, Ctrl-C stops it"] if silent >= SILENT_SECONDS else []

    def fields(self) -> list[str]:
        """Return the fields of the live line, the most important first."""
        if self._first_text_at is not None:
            return self._decoding(self._first_text_at)
        if self._started is not None:
            return self._prefilling(self._started)
        if self._rendering_at is not None:
            return ["reading the prompt"]
        return [] if self._loaded_fraction is None else [f"loading the model {self._loaded_fraction:.0%}"]

    def _text(self, event: TextDelta, now: float) -> None:
        self._tokens += event.tokens
        self._last_text_at = now
        if self._first_text_at is None:
            self._first_text_at = now

    def _prefilling(self, started: Started) -> list[str]:
        if not started.prompt_tokens:  # a server reports the number at the end
            return ["waiting for the first token"]
        total = started.prompt_tokens - started.reused_tokens
        fields = [f"prefill {self._prefill.tokens:,}/{total:,} tokens"]
        if self._prefill.seconds > 0:
            fields.append(rate(self._prefill.tokens / self._prefill.seconds, whole=True))
        return fields

    def _decoding(self, first_text_at: float) -> list[str]:
        fields = []
        started, prompt_tokens = self._started, 0
        if started is not None:
            prompt_tokens = started.prompt_tokens
            prefilled, took = prompt_tokens - started.reused_tokens, first_text_at - self._started_at
            if prefilled > 0 and took > 0:
                fields.append(f"prefill {rate(prefilled / took, whole=True)}")
        took = self._last_text_at - first_text_at
        if self._tokens > 1 and took > 0:
            fields.append(f"decode {rate((self._tokens - 1) / took)}")
        fields.append(f"TTFT {seconds(first_text_at - self._began)}")
        if self._n_ctx and prompt_tokens:
            fields.append(f"ctx {prompt_tokens + self._tokens:,}/{self._n_ctx:,}")
        if started is not None and started.reused_tokens:
            fields.append(f"reused {started.reused_tokens:,}")
        return fields


def summary(finished: Finished) -> str:
    """Return a line about a finished answer: all speeds, context window, seed, and the reason if it was stopped."""
    stats = finished.stats
    decode = f"decode {counted(stats.completion_tokens, 'token')}"
    if stats.decode_rate:
        decode += " " + rate(stats.decode_rate)
    fields = [*_prefilled(stats), decode]
    if stats.ttft_seconds > 0:
        fields.append(f"TTFT {seconds(stats.ttft_seconds)}{_parts(stats)}")
    if stats.itl_p50_seconds > 0:
        p50, p95 = milliseconds(stats.itl_p50_seconds), milliseconds(stats.itl_p95_seconds)
        fields.append(f"inter-token p50 {p50} p95 {p95}")
    fields += _window(stats)
    if stats.reused_tokens:
        fields.append(f"reused {stats.reused_tokens:,} of {stats.prompt_tokens:,}")
    if stats.retracted_tokens:
        fields.append(f"{stats.retracted_tokens:,} retracted")
    fields += [*_encoded(stats), *_drafted(stats), *_threads(stats)]
    fields += ["timed over the network"] if stats.over_network else []
    fields += [f"seed {stats.seed}"] if stats.seed or not stats.over_network else []
    return SEPARATOR.join([*fields, *_stopped(finished)])


def _parts(stats: Stats) -> str:
    """Return the parts of the time to first token, if there is more to see than the prefill."""
    found = {name: value for name, value in stats.ttft_parts.items() if value >= _SHOWN_SECONDS}
    return (
        f" ({', '.join(f'{name} {seconds(value)}' for name, value in found.items())})"
        if found.keys() - {"prefill"}
        else ""
    )


def short_summary(finished: Finished) -> str:
    """Return the main figures: speed, fill of the context window, reason of the end."""
    stats = finished.stats
    fields = [rate(stats.decode_rate)] if stats.decode_rate else []
    fields += [f"TTFT {seconds(stats.ttft_seconds)}"] if stats.ttft_seconds > 0 else []
    fields += _window(stats)
    drafted = _drafted(stats) if stats.accepted_tokens else []
    return SEPARATOR.join([*fields, *_encoded(stats), *drafted, *_threads(stats), *_stopped(finished)])


def _prefilled(stats: Stats) -> list[str]:
    """Return the length of the prompt and the speed of prefill; for a server only the length."""
    if stats.over_network:
        return [f"prompt {counted(stats.prompt_tokens, 'token')}"] if stats.prompt_tokens else []
    speed = f" {rate(stats.prefill_rate, whole=True)}" if stats.prefill_rate else ""
    return [f"prefill {counted(stats.prompt_tokens - stats.reused_tokens, 'token')}{speed}"]


def _window(stats: Stats) -> list[str]:
    """Return the fill of the context window, if known."""
    if not stats.context_used and (stats.over_network or not stats.n_ctx):
        return []
    return [f"ctx {stats.context_used:,}/{stats.n_ctx:,}" if stats.n_ctx else f"ctx {stats.context_used:,}"]


def _encoded(stats: Stats) -> list[str]:
    """Return the time for encoding images and audio, if any."""
    return [f"media {seconds(stats.media_seconds)}"] if stats.media_seconds else []


def summary_of_all(finished: Sequence[Finished], *, short: bool) -> str:
    """Return a line about several answers to one prompt that were decoded together.

    Args:
        short: only the main figures.
    """
    *others, first = sorted((each.stats for each in finished), key=_computed)
    # After a shared prompt, each answer computes the last token again, as the first step of its decode.
    prefilled = _computed(first) + sum(max(_computed(stats) - 1, 0) for stats in others)
    tokens = sum(each.stats.completion_tokens for each in finished)
    took = max(each.stats.decode_seconds for each in finished)
    fields = [counted(len(finished), "answer")]
    if not short:
        is_shared = first.prefill_rate and prefilled == _computed(first)
        speed = f" {rate(first.prefill_rate, whole=True)}" if is_shared else ""
        fields.append(f"prefill {counted(prefilled, 'token')}{speed}")
    decode = "" if short else f"decode {counted(tokens, 'token')} "
    fields += [f"{decode}{rate((tokens - len(finished)) / took)} together"] if took else []
    fields += [f"TTFT {seconds(first.ttft_seconds)}"] if first.ttft_seconds > 0 else []
    reasons = Counter(reason for each in finished for reason in _stopped(each))
    return SEPARATOR.join([*fields, *(f"{number} {reason}" for reason, number in reasons.items())])


def _computed(stats: Stats) -> int:
    return stats.prompt_tokens - stats.reused_tokens


def _drafted(stats: Stats) -> list[str]:
    """Return the fields about drafted tokens, if any, and their gain if known."""
    if not stats.drafted_tokens:
        return []
    fields = [f"drafted {stats.drafted_tokens:,}, accepted {stats.accepted_tokens:,}"]
    if stats.model_drafted:
        fields[0] += f" (model {stats.model_drafted:,}, {stats.model_accepted:,})"
    fields.append(f"{stats.tokens_per_step:.1f} tokens a step")
    return [*fields, f"{stats.draft_gain:.1f}x"] if stats.draft_gain else fields


def _threads(stats: Stats) -> list[str]:
    """Return the number of threads, if other programs left no cores for the rest."""
    used, most = stats.threads
    return [f"{used} of {counted(most, 'thread')}: the machine is busy"] if used < most else []


def _stopped(finished: Finished) -> list[str]:
    """Return the reason why an answer was stopped, if it was, and whether its reasoning was."""
    closed = ["reasoning closed: it repeated itself"] if finished.stats.loops_closed else []
    return closed if finished.reason == "stop" else [*closed, _why_stopped(finished)]


def _why_stopped(finished: Finished) -> str:
    if finished.reason == "repeats":
        text = clean(finished.detail).strip()
        quoted = text if cut(text, _REPEATED_CELLS) == text else cut(text, _REPEATED_CELLS - 1) + "…"
        return f"stopped: it repeats “{quoted}”" if quoted else "stopped: it repeats itself"
    if finished.reason == "length":
        return "stopped: the context window is full" if finished.stats.is_full else "stopped: max tokens reached"
    return "stopped by Ctrl-C" if finished.reason == "cancelled" else f"stopped: {finished.reason}"


def in_rows(line: str, cells: int) -> list[str]:
    """Return a summary in rows of at most `cells` cells, broken between its fields."""
    rows = [""]
    for field in line.split(SEPARATOR):
        longer = f"{rows[-1]}{SEPARATOR}{field}" if rows[-1] else field
        if width(longer) > cells and rows[-1]:
            rows[-1] += SEPARATOR.rstrip()
            rows.append(field)
        else:
            rows[-1] = longer
    return rows


def fit(fields: list[str], cells: int) -> str:
    """Return the first fields that fit; the first one is cut if it is too long."""
    first = in_rows(SEPARATOR.join(fields), cells)[0]
    return cut(first.removesuffix(SEPARATOR.rstrip()), cells)
