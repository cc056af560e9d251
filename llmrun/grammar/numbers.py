"""Ranges of JSON numbers as terminals of Lark, with at most as many digits as a double or the bounds have.

llguidance's own numbers (%json) have no limit of digits, which a small model writes without end, may be beyond a
double, and have no exponent beside a bound.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from math import ceil, floor

from llmrun.grammar.shapes import Number

INTEGER_DIGITS = 19  # of a 64-bit integer
FRACTION_DIGITS = 17  # of a double
_MAX_EXPONENT = 307
_FRACTION = f"(?:\\.[0-9]{{1,{FRACTION_DIGITS}}})?"


@lru_cache(maxsize=256)
def terminal(shape: Number) -> str:
    """Return an expression of Lark terminals for the numbers of a shape.

    A multiple is only respected if it is a power of ten; see needs_multiple().
    """
    return _integers(shape) if shape.is_integer or _step_digits(shape) <= 0 else _decimals(shape)


def needs_multiple(shape: Number) -> bool:
    """Return whether a terminal can't express a shape's multipleOf."""
    return shape.multiple is not None and _power_of_ten(shape.multiple) is None


def _power_of_ten(number: Fraction) -> int | None:
    digits = len(str(number.numerator)) - 1 or 1 - len(str(number.denominator))
    return digits if Fraction(10) ** digits == number else None


def _step_digits(shape: Number) -> int:
    """Return the number of digits after the point; negative if even the last digits before it are zeros."""
    power = None if shape.multiple is None else _power_of_ten(shape.multiple)
    return FRACTION_DIGITS if power is None else -power


def _integers(shape: Number) -> str:
    zeros = max(0, -_step_digits(shape))
    step = Fraction(10) ** zeros
    low = None if shape.low is None else ceil(shape.low / step)
    high = None if shape.high is None else floor(shape.high / step)
    if low is not None and shape.is_low_open and low * step == shape.low:
        low += 1
    if high is not None and shape.is_high_open and high * step == shape.high:
        high -= 1
    largest = 10 ** max(INTEGER_DIGITS - zeros, *(len(str(abs(bound))) for bound in (low or 0, high or 0))) - 1
    low, high = -largest if low is None else low, largest if high is None else high
    options = []
    tail = f"0{{{zeros}}}" if zeros else ""
    if low <= 0 <= high:
        options.append("0")
    if high > 0:
        options.append(_range(max(1, low), high) + tail)
    if low < 0:
        options.append(f"-{_range(max(1, -high), -low)}{tail}")
    return f"/{'|'.join(options)}/"


def _range(low: int, high: int) -> str:
    """Return a regular expression of the integers from low to high, both from 0 on, without leading zeros."""
    if low == 1 and set(str(high)) == {"9"}:
        return f"[1-9][0-9]{{0,{len(str(high)) - 1}}}"
    options = []
    while low <= high:
        # The largest block of integers that begins at low: the same first digits, then a digit of a range, then any.
        free = 0
        while low % 10 ** (free + 1) == 0 and low > 0 and low + 10 ** (free + 1) - 1 <= high:
            free += 1
        size = 10**free
        head, digit = divmod(low // size, 10)
        last = min(9, (high + 1) // size - 1 - head * 10)
        digits = str(digit) if last == digit else f"[{digit}-{last}]"
        options.append(f"{head or ''}{digits}{_any(free)}")
        low = (head * 10 + last + 1) * size
    return f"(?:{'|'.join(options)})"


def _any(count: int) -> str:
    return "" if count == 0 else "[0-9]" if count == 1 else f"[0-9]{{{count}}}"


def _decimals(shape: Number) -> str:
    low, high = shape.low, shape.high
    if low is None and high is None and shape.multiple is None:
        return f"/-?{_UNSIGNED}/"
    if low == 0 and high is None and not shape.is_low_open and shape.multiple is None:
        return f"/{_UNSIGNED}/"
    options = []
    if high is None or high > 0 or (high == 0 and not shape.is_high_open):
        start = (low, shape.is_low_open) if low is not None and low >= 0 else (Fraction(0), False)
        options += _positive(shape, *start, high, shape.is_high_open)
    if low is None or low < 0:
        start = (-high, shape.is_high_open) if high is not None and high <= 0 else (Fraction(0), False)
        end = None if low is None else -low
        options += [f'"-" ({option})' for option in _positive(shape, *start, end, shape.is_low_open)]
    return " | ".join(options)


def _positive(shape: Number, low: Fraction, is_low_open: bool, high: Fraction | None, is_high_open: bool) -> list[str]:
    """Return terminals for decimal numbers in a range from 0 on."""
    bounds = [low, *([] if high is None else [high])]
    n_integer = max(INTEGER_DIGITS, *(len(str(floor(bound))) for bound in bounds))
    n_fraction = max(FRACTION_DIGITS, *(len(_digits(bound)) for bound in bounds))
    if shape.multiple is not None:
        n_fraction = _step_digits(shape)
    form = f"/(?:0|[1-9][0-9]{{0,{n_integer - 1}}})(?:\\.[0-9]{{1,{n_fraction}}})?/"
    parts = [form]
    if low > 0 or is_low_open:
        parts.append(f"/{_at_least(low, is_low_open)}/")
    if high is not None:
        parts.append(f"/{_at_most(high, is_high_open)}/")
    options = [" & ".join(parts)]
    if low == 0 and (high is None or high >= 1) and shape.multiple is None:
        largest = _MAX_EXPONENT if high is None else len(str(floor(high))) - 2
        exponents = "-[0-9]{1,3}" + (f"|\\+?{_range(0, min(largest, _MAX_EXPONENT))}" if largest >= 0 else "")
        options.append(f"/[1-9]{_FRACTION}[eE](?:{exponents})/")
    return options


_UNSIGNED = (
    f"(?:(?:0|[1-9][0-9]{{0,{INTEGER_DIGITS - 1}}}){_FRACTION}(?:[eE](?:-[0-9]{{1,3}}|\\+?(?:[0-9]{{1,2}}|1[0-9]{{2}}"
    f"|2[0-7][0-9])))?|[1-9]{_FRACTION}[eE]\\+?{_range(280, _MAX_EXPONENT)})"
)  # a finite double


def _digits(bound: Fraction) -> str:
    """Return the digits after the point."""
    rest, digits = bound - floor(bound), ""
    while rest:
        rest *= 10
        digits += str(floor(rest))
        rest -= floor(rest)
    return digits


def _at_least(bound: Fraction, is_open: bool) -> str:
    whole, digits = floor(bound), _digits(bound)
    # Every integer part beyond the bound's, without leading zeros.
    longer = f"[1-9][0-9]{{{len(str(whole))},}}"
    same = 10 ** len(str(whole)) - 1
    larger = f"{_range(whole + 1, same)}|{longer}" if whole < same else longer
    options = [f"(?:{larger})(?:\\.[0-9]+)?"]
    if not digits and not is_open:
        options.append(f"{whole}(?:\\.[0-9]+)?")
    elif not digits:
        options.append(f"{whole}\\.0*[1-9][0-9]*")
    else:
        for index, digit in enumerate(digits):
            if digit < "9":
                options.append(f"{whole}\\.{digits[:index]}[{int(digit) + 1}-9][0-9]*")
        options.append(f"{whole}\\.{digits}" + ("0*[1-9][0-9]*" if is_open else "[0-9]*"))
    return "|".join(options)


def _at_most(bound: Fraction, is_open: bool) -> str:
    whole, digits = floor(bound), _digits(bound)
    options = [f"{_range(0, whole - 1)}(?:\\.[0-9]+)?"] if whole else []
    if digits or not is_open:
        options.append(f"{whole}(?:\\.0+)?")
    for index, digit in enumerate(digits):
        if index:
            options.append(f"{whole}\\.{digits[:index]}0*")
        if digit > "0":
            options.append(f"{whole}\\.{digits[:index]}[0-{int(digit) - 1}][0-9]*")
    if digits and not is_open:
        options.append(f"{whole}\\.{digits}0*")
    return "|".join(options) or "[^\\x{0}-\\x{10FFFF}]"
