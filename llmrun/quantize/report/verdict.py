"""What to say about each type, from its figures alone: pure rules. Must not know how they were measured or are shown.

A type is beaten when another one is better at something and worse at nothing. Of those that are not, each has what it
is best at. Differences that the measurements can't tell apart count as none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmrun.bench import statistics
from llmrun.quantize.report.card import CardRow, CardSpeed, Quality

# Mean KLD in nats up to which it is said, from tables of Llama-3-8B: Q8_0 has 0.001, Q5_K_M 0.011, Q4_K_M 0.031,
# Q4_0 0.072, Q3_K_M about 0.1.
_LOSSES = (
    (0.004, "no loss to speak of"),
    (0.02, "hardly any loss"),
    (0.06, "a small loss"),
    (0.2, "the loss is visible"),
    (0.6, "a heavy loss"),
)
_WORST = "broken: it answers differently"
_MAX_ROLES = 3
_GOOD_KLD, _FAIR_KLD = 0.06, 0.2

_SAME_SIZE = 0.005  # share of the size below which two files are equally large
_SAME_SPEED = 0.03  # of the speed, even where it is certain
_SAME_KLD = 0.03  # of the divergence
# All types are measured on the same text, so their errors go up and down together: what is certain about a difference
# is more than the errors of both say. A half of the larger one is a careful guess.
_SHARED_ERROR = 0.5


@dataclass(frozen=True, slots=True)
class TypeComparison:
    """What one type is clearly better at than another: each True, or None when one of them was not measured."""

    smaller: bool
    exacter: bool
    faster: bool
    faster_prefill: bool

    @property
    def words(self) -> list[str]:
        """For people, e.g. ["smaller", "faster"]."""
        said = []
        if self.smaller:
            said.append("smaller")
        if self.faster:
            said.append("faster")
        elif self.faster_prefill:
            said.append("faster with prompts")
        if self.exacter:
            said.append("more exact")
        return said


def compare(one: CardRow, other: CardRow) -> TypeComparison:
    """What `one` is clearly better at."""
    smaller = _known(one.n_bytes, other.n_bytes, lambda a, b: a < b * (1 - _SAME_SIZE))
    return TypeComparison(
        smaller,
        _is_exacter(one.quality, other.quality),
        _is_faster(one.decode, other.decode),
        _is_faster(one.prefill, other.prefill),
    )


def _known(one: float | None, other: float | None, test: Callable[[float, float], bool]) -> bool:
    return one is not None and other is not None and test(one, other)


def _is_exacter(one: Quality, other: Quality) -> bool:
    if one.kld is None or other.kld is None or one.kld_error is None or other.kld_error is None:
        return False
    doubt = _SHARED_ERROR * max(one.kld_error, other.kld_error)
    return other.kld - one.kld > max(doubt, _SAME_KLD * other.kld)


def _is_faster(one: CardSpeed, other: CardSpeed) -> bool:
    """With 95 % confidence, and enough to care. Rounds are pairs: all types were measured in each."""
    if not one.samples or not other.samples or min(*one.samples, *other.samples) <= 0:
        return False
    rounds = min(len(one.samples), len(other.samples))
    found = statistics.compare(other.samples[:rounds], one.samples[:rounds], paired=True)
    return found.kind == "faster" and found.ratio > 1 + _SAME_SPEED


def is_measured(row: CardRow) -> bool:
    """Whether enough is known for a verdict."""
    return not row.failure and row.n_bytes is not None and row.quality.kld is not None


def beaten_by(row: CardRow, rows: Sequence[CardRow]) -> tuple[CardRow, TypeComparison] | None:
    """The type that leaves no reason to take this one: the one with the most words; None when there is none."""
    found = []
    for other in rows:
        if other is row or other.is_source or not is_measured(other):
            continue
        ahead, behind = compare(other, row), compare(row, other)
        if ahead.words and not behind.words:
            found.append((other, ahead))
    return max(found, key=lambda pair: len(pair[1].words), default=None)


def contenders(rows: Sequence[CardRow]) -> list[CardRow]:
    """The measured types that nothing beats, the source not among them.

    All of them if each is beaten by another: differences just above what counts can go round in a circle.
    """
    measured = [row for row in rows if not row.is_source and is_measured(row)]
    return [row for row in measured if beaten_by(row, rows) is None] or measured


def recommended(rows: Sequence[CardRow]) -> CardRow | None:
    """The type to take when nothing is known of what it is for: the fastest of those that lose little.

    Those that lose as little as possible when all lose much, and the smaller one of equally fast ones.
    """
    good = contenders(rows)
    for most in (_GOOD_KLD, _FAIR_KLD):
        kept = [row for row in good if (row.quality.kld or 0.0) <= most]
        if kept:
            best = max(kept, key=lambda row: row.decode.median or 0.0)
            tied = [row for row in kept if not _is_faster(best.decode, row.decode)]
            return min(tied, key=lambda row: row.n_bytes or 0)
    return min(good, key=lambda row: row.quality.kld or 0.0, default=None)


def praise(row: CardRow) -> str:
    """What the type that recommended() gave is: it may be no more than the best of a bad lot."""
    return "recommended" if (row.quality.kld or 0.0) <= _FAIR_KLD else "loses least"


def bits_of(kind: str) -> int:
    """The bits that a type's name promises, e.g. 4 for "IQ4_NL"; 0 when it promises none."""
    found = re.search(r"\d+", kind)
    return int(found[0]) if found else 0


def verdict(row: CardRow, rows: Sequence[CardRow]) -> str:
    """What is to be said about a type among others, in a few words.

    Args:
        row: one of rows.
        rows: all of the card.
    """
    if row.failure:
        return f"not measured: {row.failure}"
    if row.is_source:
        return "the source of the others"
    if not is_measured(row):
        return "not measured to the end"
    loss = loss_in_words(row.quality.kld or 0.0)
    better = beaten_by(row, rows)
    if better is not None:
        return f"beaten by {better[0].type}, which is {joined(better[1].words)}; {loss}"
    roles = [praise(row)] if row is recommended(rows) else []
    roles += _roles(row, contenders(rows))
    sizes = [other.n_bytes for other in rows if not other.is_source and other.n_bytes is not None]
    roles += ["smallest"] if row.n_bytes == min(sizes) and len(sizes) > 1 else []
    return "; ".join([", ".join(roles[:_MAX_ROLES]), loss] if roles else [loss])


def _roles(row: CardRow, rows: Sequence[CardRow]) -> list[str]:
    """What a type is best at. rows: those that nothing beats."""
    if len(rows) < 2:
        return []
    others = [other for other in rows if other is not row]
    roles = []
    if all(compare(row, other).faster for other in others):
        roles.append("fastest here")
    same_bits = [other for other in others if bits_of(other.type) == bits_of(row.type)]
    if all(compare(row, other).exacter for other in others):
        roles.append("nearest to the source")
    elif same_bits and all(compare(row, other).exacter for other in same_bits):
        roles.append(f"most exact {bits_of(row.type)}-bit type")
    return roles


def loss_in_words(kld: float) -> str:
    """A mean divergence for people, e.g. "a small loss"."""
    return next((words for most, words in _LOSSES if kld <= most), _WORST)


def joined(words: Sequence[str]) -> str:
    """For people: "a", "a and b", "a, b and c"."""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def verdicts(rows: Sequence[CardRow]) -> tuple[str, ...]:
    """A verdict for each row."""
    return tuple(verdict(row, rows) for row in rows)


def front(rows: Sequence[CardRow]) -> list[CardRow]:
    """The types that none is at once smaller and more exact than, the smallest first; the source may be among them."""
    measured = [row for row in rows if is_measured(row) or (row.is_source and row.n_bytes is not None)]
    kept: list[CardRow] = []
    for row in sorted(measured, key=lambda one: (one.n_bytes or 0, one.quality.kld or 0.0)):
        if not kept or (row.quality.kld or 0.0) < (kept[-1].quality.kld or 0.0):
            kept.append(row)
    return kept
