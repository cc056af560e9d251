"""Numbers and short texts for people: speeds, times, counts. Pure."""

from __future__ import annotations

from llmrun.protocol.sizes import readable_size


def rate(tokens_per_second: float, *, whole: bool = False) -> str:
    """Return a speed, e.g. "131.2 tokens/s"; whole drops the decimal from 100 on."""
    decimals = 0 if whole and tokens_per_second >= 100 else 1
    return f"{tokens_per_second:,.{decimals}f} tokens/s"


def rough(value: float) -> str:
    """Return an estimated figure with two digits, e.g. "~320", "~5.0", "~0.26"."""
    rounded = float(f"{value:.1e}")
    return f"~{rounded:,.{0 if rounded >= 10 else 1 if rounded >= 1 else 2}f}"


def seconds(value: float, *, brief: bool = False) -> str:
    """Return a duration, e.g. "0.21 s", or "0.2 s" when brief; from a minute on "1 min 15 s"."""
    if value < (59.95 if brief else 59.995):
        return f"{value:.{1 if brief else 2}f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def ago(seconds: float) -> str:
    """Return a time in the past, e.g. "3 hours ago"."""
    for unit, length in (("year", 31_557_600), ("month", 2_629_800), ("day", 86_400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            count = int(seconds // length)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"


def milliseconds(value: float) -> str:
    """Return a duration given in seconds, e.g. "7.5 ms"."""
    return f"{value * 1000:,.1f} ms"


def rate_of_bytes(per_second: float) -> str:
    """Return a transfer speed, e.g. "12.3 MB/s"."""
    return f"{readable_size(per_second)}/s"


def context_name(n_ctx: int) -> str:
    """Return a short name of a context size, e.g. "32k" for 32,768, "5,000" for 5,000."""
    return f"{n_ctx // 1024}k" if n_ctx % 1024 == 0 else f"{n_ctx:,}"


def counted(number: int, noun: str) -> str:
    """Return e.g. "1 token", "1,200 tokens"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def short(text: str, limit: int = 60) -> str:
    """Return the beginning of a text as one line of at most `limit` characters."""
    line = " ".join(text[: 4 * limit].split())
    return line if len(line) <= limit else line[: limit - 1].rstrip() + "…"


def bar(share: float, cells: int) -> str:
    """Return a bar of a share of `cells` cells, to an eighth of one; a share above 0 is never invisible."""
    eighths = max(round(share * cells * 8), share > 0)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def percent(probability: float) -> str:
    """Return a probability with at most three digits; "0" only for 0."""
    if 0 < probability < 0.0005:
        return "<0.1%"
    return f"{probability:.1%}"
