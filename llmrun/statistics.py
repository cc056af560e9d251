"""Quantiles, intervals of a few measurements, and the comparison of two sets.

Compared samples are rates (tokens/s), more is better. Comparisons use logarithms, so that a ratio and its inverse are
treated alike.

The tests, and why (tests/benchmarks/same_or_different.py prints their rates of errors and hits):

- Sets measured in turns, A B B A ...: the logarithms' differences within each pair. What slows a machine down for
  longer than a pair hits both sides and drops out. Student's t up to 7 pairs, where a rank test has too few levels
  (5 pairs can't reach 95 % at all); from 8 on the Hodges-Lehmann estimate with Wilcoxon's exact signed-rank interval,
  which a burst of other load pulls away less.
- Sets measured one after the other: the Hodges-Lehmann shift with the exact Mann-Whitney interval (Welch's t below
  four samples), widened by what samples can't show: two starts of one program on one machine differ (addresses,
  clocks, neighbours), more so on a restless machine, and a set that got slower while it was measured would have gone
  on doing so.
- A bootstrap is not used: on five samples its 95 % interval holds the truth in about 83 % of cases.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from itertools import combinations
from statistics import NormalDist, fmean, median, stdev, variance
from typing import Literal, NamedTuple

CONFIDENCE = 0.95
BETWEEN = 0.01
"""Standard deviation of the speed of one program from start to start, as a share. For sets not measured
in turns; compare() takes a better value from the history."""
DISTURBED = 0.20
"""The same while other programs computed. On two cores shared by nine users, medians of starts had 3 % (prefill) to
11 % (decode), and 10 % still gave 3 false alarms in 24; with 20 %, only a difference of 1.7 times is believed."""
RESOLUTION = 0.05
"""A comparison that could overlook a difference of this share is "too noisy to tell"; a row as uncertain is noisy."""

_RANKS_FROM_PAIRS = 8
_RANKS_FROM_SAMPLES = 4
_CALM = 0.03  # standard deviation within a set, as a share, that suggests none between starts
_EXACT = 50  # samples of a side up to which distributions are exact; beyond, a normal approximation is as good
_TREND_CHANCE = 0.1  # level of the trend test: a false trend costs less than a missed one
_MOST_ADVISED = 50  # repetitions; more would need a quieter machine
_OUTLIER = 3.5  # modified z-score, after Iglewicz and Hoaglin (1993)
_LEAST_SPREAD = 0.002  # samples nearer than this share to the median are no outliers


class Interval(NamedTuple):
    """The confidence interval of a mean, at CONFIDENCE."""

    low: float
    mean: float
    high: float

    @property
    def half_width(self) -> float:
        """Half of the interval as a share of the mean, on a log scale: 0.01 is "± 1 %"."""
        return math.log(self.high / self.low) / 2 if self.low else math.inf

    @property
    def is_noisy(self) -> bool:
        """Whether the interval hides a difference of RESOLUTION."""
        return self.half_width > RESOLUTION


class Verdict(NamedTuple):
    """The outcome of comparing B with A."""

    # "faster" or "slower": B, with 95 % confidence. "same": no difference, where one of RESOLUTION would show. "noisy":
    # too noisy to tell, or too few samples.
    kind: Literal["faster", "slower", "same", "noisy"]
    ratio: float  # of B's speed to A's
    # The 95 % interval of that ratio; 0 and infinity where there are too few samples.
    low: float
    high: float
    samples: tuple[int, int]  # of A and of B
    paired: bool  # whether they were measured in turns
    why: str = ""  # the reason for "noisy", or for a wider interval; "" for none

    @property
    def is_different(self) -> bool:
        """Whether the speeds differ, with confidence."""
        return self.kind in {"faster", "slower"}

    @property
    def words(self) -> str:
        """The verdict for display, e.g. "faster", "no difference seen"."""
        return {"same": "no difference seen", "noisy": "too noisy to tell"}.get(self.kind, self.kind)


# ---- one set ---------------------------------------------------------------------------------------


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return a quantile of sorted values, interpolated between neighbours as NumPy does; `share` is from 0 to 1."""
    position = share * (len(ordered) - 1)
    index = int(position)
    below, above = float(ordered[index]), float(ordered[min(index + 1, len(ordered) - 1)])
    return below + (above - below) * (position - index)


def half_width(samples: Sequence[float]) -> float:
    """Return half of the 95 % confidence interval of the mean of two or more independent samples."""
    return student(len(samples) - 1) * stdev(samples) / math.sqrt(len(samples))


def positive_interval(mean: float, half: float) -> tuple[float, float]:
    """Return the interval of a non-negative mean, such as a rate or a divergence: mean * exp(± half / mean).

    It is symmetric on a logarithmic scale (the delta method), so both ends are positive. If half is small, it is about
    mean ± half.
    """
    if not half:
        return mean, mean
    return mean * math.exp(-half / mean), mean * math.exp(half / mean)


def interval(samples: Sequence[float]) -> Interval | None:
    """Return the interval of the mean of the sampled rates, by Student's t; None for fewer than two samples.

    The mean because that is what llama-bench prints. An outlier makes the interval wide rather than wrong. Rates are
    positive, and so are both ends.
    """
    if len(samples) < 2:
        return None
    mean = fmean(samples)
    low, high = positive_interval(mean, half_width(samples))
    return Interval(low, mean, high)


def outliers(samples: Sequence[float]) -> tuple[int, ...]:
    """Return the positions of outliers by the median absolute deviation; they are marked, never dropped.

    Fewer than four samples have none: there is no telling which of them is odd.
    """
    if len(samples) < 4:
        return ()
    middle = median(samples)
    spread = median(abs(sample - middle) for sample in samples) / 0.6745  # a standard deviation, were they normal
    limit = _OUTLIER * max(spread, _LEAST_SPREAD * abs(middle))
    return tuple(index for index, sample in enumerate(samples) if abs(sample - middle) > limit)


def drift(samples: Sequence[float]) -> float:
    """Return the change from the first sample to the last as a share, e.g. -0.08; 0 where chance explains the order.

    Theil and Sen's slope where Kendall's test sees a trend.
    """
    if len(samples) < 3 or min(samples) <= 0:
        return 0.0
    return math.expm1(_log_drift([math.log(sample) for sample in samples]))


def _log_drift(logs: Sequence[float]) -> float:
    steps = [(late - early, j - i) for (i, early), (j, late) in combinations(enumerate(logs), 2)]
    score = sum((change > 0) - (change < 0) for change, _ in steps)
    if abs(score) < _least_trend(len(logs)):
        return 0.0
    return median(change / apart for change, apart in steps) * (len(logs) - 1)


# ---- two sets --------------------------------------------------------------------------------------


def compare(a: Sequence[float], b: Sequence[float], *, paired: bool = False, between: float = BETWEEN) -> Verdict:
    """Compare B with A.

    Args:
        a, b: rates, in the order in which they were measured.
        paired: the n-th of A and of B were measured one right after the other. Measure A B B A A B ..., so that a
            steady drift favours neither.
        between: standard deviation between starts of the same program, as a share; not needed for pairs.

    Raises:
        ValueError: a rate is not above 0, or paired sides differ in length.
    """
    if paired and len(a) != len(b):
        raise ValueError(f"{len(a)} and {len(b)} samples are not pairs")
    if not a or not b or min(*a, *b) <= 0:
        raise ValueError("rates have to be above 0")
    logs_a, logs_b = [math.log(rate) for rate in a], [math.log(rate) for rate in b]
    if min(len(a), len(b)) < 2:
        ratio = math.exp(fmean(logs_b) - fmean(logs_a))
        return Verdict("noisy", ratio, 0.0, math.inf, (len(a), len(b)), paired, "one sample tells nothing about noise")
    if paired:
        shift, low, high = _paired([y - x for x, y in zip(logs_a, logs_b, strict=True)])
        fixed, why = 0.0, ""
    else:
        fixed = _starts(logs_a, logs_b, between)
        shift, low, high = _apart(logs_a, logs_b, fixed)
        why = _drifting(logs_a, logs_b)
    kind = _kind(low, high)
    if kind == "noisy" and not why:
        why = _too_few(max(high, -low), fixed, min(len(a), len(b)))
    return Verdict(kind, math.exp(shift), _exp(low), _exp(high), (len(a), len(b)), paired, why)


def _kind(low: float, high: float) -> Literal["faster", "slower", "same", "noisy"]:
    if low > 0:
        return "faster"
    if high < 0:
        return "slower"
    return "noisy" if max(high, -low) > math.log1p(RESOLUTION) else "same"


def _too_few(reach: float, fixed: float, repetitions: int) -> str:
    """Return the advice on repetitions: an interval narrows with the square root of their number."""
    room = math.log1p(RESOLUTION) ** 2 - fixed**2
    more = math.ceil(repetitions * (reach**2 - fixed**2) / room) if room > 0 else _MOST_ADVISED + 1
    text = "the samples spread too far for their number"
    return f"{text}: about {more} repetitions would do" if more <= _MOST_ADVISED else text


def _paired(changes: Sequence[float]) -> tuple[float, float, float]:
    """Return estimate and interval of the shift."""
    if len(changes) < _RANKS_FROM_PAIRS:
        middle = fmean(changes)
        half = half_width(changes)
        return middle, middle - half, middle + half
    means = sorted((x + y) / 2 for i, x in enumerate(changes) for y in changes[i:])
    cut = _signed_rank_cut(len(changes))
    return median(means), means[cut], means[-1 - cut]


def _apart(a: Sequence[float], b: Sequence[float], starts: float) -> tuple[float, float, float]:
    """Return estimate and interval of the shift, widened by errors that the samples can't show."""
    shift, low, high = _welch(a, b) if min(len(a), len(b)) < _RANKS_FROM_SAMPLES else _mann_whitney(a, b)
    # A trend is a bias, not a scatter: each mean may be half of it away from where the other set was measured.
    trend = (abs(_log_drift(a)) + abs(_log_drift(b))) / 2
    return shift, shift - math.hypot(shift - low, starts) - trend, shift + math.hypot(high - shift, starts) + trend


def _starts(a: Sequence[float], b: Sequence[float], between: float) -> float:
    """Return the half-width of the interval due to starting a program twice."""
    # Large scatter within a set suggests scatter between sets too.
    restless = max(0.0, variance(a) - _CALM**2, variance(b) - _CALM**2)
    return _normal(CONFIDENCE) * math.sqrt(2 * (between**2 + restless))


def _welch(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, float]:
    share_a, share_b = variance(a) / len(a), variance(b) / len(b)
    shift = fmean(b) - fmean(a)
    if not share_a + share_b:
        return shift, shift, shift
    freedom = (share_a + share_b) ** 2 / (share_a**2 / (len(a) - 1) + share_b**2 / (len(b) - 1))
    half = student(freedom) * math.sqrt(share_a + share_b)
    return shift, shift - half, shift + half


def _mann_whitney(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, float]:
    shifts = sorted(y - x for x in a for y in b)
    cut = _mann_whitney_cut(len(a), len(b))
    return median(shifts), shifts[cut], shifts[-1 - cut]


def _drifting(a: Sequence[float], b: Sequence[float]) -> str:
    drifts = [(name, math.expm1(_log_drift(logs))) for name, logs in (("A", a), ("B", b))]
    return ", ".join(
        f"{name} got {abs(change):.0%} {'faster' if change > 0 else 'slower'} while it was measured"
        for name, change in drifts
        if abs(change) >= 0.005
    )


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


# ---- distributions ---------------------------------------------------------------------------------


@functools.cache
def student(freedom: float) -> float:
    """Return the bound of |t| with CONFIDENCE; 12.71 for one degree of freedom."""
    low, high = 0.0, 1.0
    while _within(high, freedom) < CONFIDENCE:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < CONFIDENCE else (low, middle)
    return high


def _within(t: float, freedom: float) -> float:
    """Return P(|T| < t): with T = sqrt(freedom) tan(angle), the integral of cos(angle)^(freedom - 1)."""
    steps, end = 200, math.atan(t / math.sqrt(freedom))
    heights = [math.pow(math.cos(end * step / steps), freedom - 1) for step in range(steps + 1)]
    area = end / steps / 3 * (heights[0] + 4 * sum(heights[1:-1:2]) + 2 * sum(heights[2:-1:2]) + heights[-1])  # Simpson
    return 2 * area * math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(math.pi) / 2)


def _normal(confidence: float) -> float:
    return NormalDist().inv_cdf((1 + confidence) / 2)


@functools.cache
def _mann_whitney_cut(n: int, m: int) -> int:
    """Return the number of the n * m sorted differences outside the interval, on each side."""
    if max(n, m) > _EXACT:
        deviation = math.sqrt(n * m * (n + m + 1) / 12)
        return max(int(n * m / 2 - _normal(CONFIDENCE) * deviation - 0.5), 0)
    # Ways to choose n of n + m ranks, by U: the coefficients of the Gaussian binomial.
    ways = [1] + [0] * (n * m)
    for i in range(1, n + 1):
        for u in range(n * m, m + i - 1, -1):
            ways[u] -= ways[u - m - i]
        for u in range(i, n * m + 1):
            ways[u] += ways[u - i]
    return _cut(ways, math.comb(n + m, n))


@functools.cache
def _signed_rank_cut(n: int) -> int:
    """Return the number of the sorted means of two outside the interval, on each side."""
    if n > _EXACT:
        deviation = math.sqrt(n * (n + 1) * (2 * n + 1) / 24)
        return int(n * (n + 1) / 4 - _normal(CONFIDENCE) * deviation - 0.5)
    ways = [1] + [0] * (n * (n + 1) // 2)
    for rank in range(1, n + 1):
        for total in range(len(ways) - 1, rank - 1, -1):
            ways[total] += ways[total - rank]
    return _cut(ways, 2**n)


def _cut(ways: Sequence[int], total: int) -> int:
    """Return the largest k such that both tails of fewer than k together have a probability of 1 - CONFIDENCE."""
    below = 0
    for k, count in enumerate(ways):
        below += count
        if 2 * below > (1 - CONFIDENCE) * total:
            return k - 1
    raise AssertionError("half of the ways are above any level")


@functools.cache
def _least_trend(n: int) -> int:
    """Return the Kendall score (rises minus falls) that chance reaches in at most _TREND_CHANCE of cases."""
    if n > _EXACT:
        return int(_normal(1 - _TREND_CHANCE) * math.sqrt(n * (n - 1) * (2 * n + 5) / 18)) + 1
    ways = [1]  # orders of i values, by inversions
    for i in range(2, n + 1):
        longer = [0] * (len(ways) + i - 1)
        for inversions, count in enumerate(ways):
            for more in range(i):
                longer[inversions + more] += count
        ways = longer
    below, total, most = 0, math.factorial(n), n * (n - 1) // 2
    for inversions, count in enumerate(ways):
        below += count
        if 2 * below > _TREND_CHANCE * total:
            return most - 2 * inversions + 2
    raise AssertionError("half of the orders are above any level")
