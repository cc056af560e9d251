"""Numbers as people read them: speeds, times. Pure; must not know where they are shown."""

from __future__ import annotations

from llmrun.protocol.sizes import readable_size


def rate(tokens_per_second: float, *, whole: bool = False) -> str:
    """A speed, e.g. "131.2 t/s"; whole drops the decimal from 100 on."""
    decimals = 0 if whole and tokens_per_second >= 100 else 1
    return f"{tokens_per_second:,.{decimals}f} t/s"


def seconds(value: float, *, brief: bool = False) -> str:
    """A short time, e.g. "0.21 s", or "0.2 s" when brief; from a minute on "1 min 15 s"."""
    if value < (59.95 if brief else 59.995):
        return f"{value:.{1 if brief else 2}f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def milliseconds(value: float) -> str:
    """A time given in seconds, e.g. "7.5 ms"."""
    return f"{value * 1000:,.1f} ms"


def rate_of_bytes(per_second: float) -> str:
    """A transfer speed, e.g. "12.3 MB/s"."""
    return f"{readable_size(per_second)}/s"


def counted(number: int, noun: str) -> str:
    """E.g. "1 token", "1,200 tokens"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def short(text: str, most: int = 60) -> str:
    """The beginning of a text as one line of at most so many characters."""
    line = " ".join(text[: 4 * most].split())
    return line if len(line) <= most else line[: most - 1].rstrip() + "…"


def bar(share: float, cells: int) -> str:
    """A bar as long as a share of so many cells, to an eighth of one; nothing is only shown for nothing."""
    eighths = max(round(share * cells * 8), share > 0)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def percent(probability: float) -> str:
    """Three digits at most, and never 0 for what is possible."""
    if 0 < probability < 0.0005:
        return "<0.1%"
    return f"{probability:.1%}"
