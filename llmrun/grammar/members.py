"""The rules of an object's properties in llguidance's Lark: which may be written next, and whether the object may end.

llguidance's rules may have a parameter of 64 bits. Here it has a bit for each property that is written, one for any
further property, and a counter; so there is one rule for all sets of properties.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

MAX_BITS = 40  # properties of one rule; those after them have the next one


class Members(NamedTuple):
    """The properties of an object.

    Attributes:
        pairs: expressions of the listed properties with their values, in the order of the schema.
        required: indices of the required properties.
        other: an expression of any further property; "" if there are none.
        minimum: the least number of properties, of which no more than one is a further one, since these may be equal.
        any_order: the listed properties may be written in any order; the further ones are the last always.
    """

    pairs: Sequence[str]
    required: frozenset[int]
    other: str = ""
    minimum: int = 0
    maximum: int | None = None
    any_order: bool = False

    @property
    def is_counted(self) -> bool:
        """The properties have to be counted while they are written."""
        most = None if self.other else len(self.pairs)
        is_limited = self.maximum is not None and (most is None or self.maximum < most)
        return is_limited or self.minimum > max(1, len(self.required))


def times(expression: str, minimum: int, maximum: int | None) -> str:
    """Return an expression of Lark repeated that many times."""
    if maximum == 0:
        return ""
    simple = {(0, None): "*", (1, None): "+", (0, 1): "?", (1, 1): ""}.get((minimum, maximum))
    return expression + (f"{{{minimum},{'' if maximum is None else maximum}}}" if simple is None else simple)


def members_rules(name: str, members: Members) -> tuple[str, list[str]]:
    """Return an expression of the properties with commas between them, and the rules that it needs.

    Args:
        name: the beginning of the rules' names.
    """
    if not members.pairs:
        return _others(members), []
    lines = [
        line
        for number, start in enumerate(range(0, len(members.pairs), MAX_BITS))
        for line in _Rules(name, number, range(start, min(start + MAX_BITS, len(members.pairs))), members).lines()
    ]
    return f"{name}_0::0x0" if members.required or members.minimum else f"({name}_0::0x0)?", lines


def _others(members: Members) -> str:
    """Return an expression of an object's properties if none is listed."""
    if not members.other or members.maximum == 0:
        return ""
    most = None if members.maximum is None else members.maximum - 1
    more = times(f'(", " {members.other})', max(0, members.minimum - 1), most)
    some = f"{members.other} {more}".rstrip()
    return some if members.minimum else f"({some})?"


class _Rules:
    """The rules of the next property and of what follows it, for up to MAX_BITS listed properties.

    Args:
        chunk: the indices of these properties.
    """

    def __init__(self, name: str, number: int, chunk: range, members: Members) -> None:
        self._next, self._after, self._following = f"{name}_{number}", f"{name}_{number}a", f"{name}_{number + 1}"
        self._chunk, self._members = chunk, members
        # The required properties have the first bits, so that a range of bits tells whether they are there.
        ordered = sorted(chunk, key=lambda index: index not in members.required)
        self._bits = {index: bit for bit, index in enumerate(ordered)}
        self._n_required = sum(index in members.required for index in chunk)
        self._complete = _ones(self._n_required)
        # The bit of a further property, and those that count commas.
        self._other, self._counter = len(chunk), f"[{len(chunk) + 1}:64]"

    def lines(self) -> Iterator[str]:
        members, after = self._members, self._after
        is_counted, is_last = members.is_counted, self._chunk.stop == len(members.pairs)
        options = [
            f"{members.pairs[index]} {after}::set_bit({bit}){_if(self._order(index), *self._room(index))}"
            for index, bit in sorted(self._bits.items())
        ]
        if not is_last:
            options.append(f"{self._following}::0x0{_if(self._complete)}")
        elif members.other and is_counted:
            enough = self._at_least(members.minimum - 1)
            options.append(
                f"{members.other} {after}::set_bit({self._other}){_if(self._complete, enough, *self._room())}"
            )
        elif members.other:
            options.append(f'{members.other} (", " {members.other})*{_if(self._complete)}')
        yield f"{self._next}::_: {' | '.join(options)}"
        enough = self._at_least(members.minimum) if is_counted else ""
        ends = [f'""{_if(self._complete, enough)}'] if not self._needs_following() else []
        yield f"{self._after}::_: {' | '.join([*ends, self._more(is_last=is_last)])}"

    def _needs_following(self) -> bool:
        return any(index >= self._chunk.stop for index in self._members.required)

    def _more(self, *, is_last: bool) -> str:
        """Return an expression of more properties, where there may be one."""
        members = self._members
        is_left = ""
        if is_last and not members.other:
            every = _ones(len(self._chunk))
            is_left = f"not({every})" if members.any_order else f"bit_clear({self._bits[self._chunk[-1]]})"
        if not (members.is_counted and members.maximum is not None):
            return f'", " {self._next}::_{_if(is_left)}'
        return f'", " {self._next}::incr({self._counter}){_if(is_left, f"lt({self._counter}, {members.maximum - 1})")}'

    def _at_least(self, count: int) -> str:
        """Return the condition that some properties are written, of which one may be a further one."""
        return f"bit_count_ge([0:{self._other + 1}], {count})" if count > 0 else ""

    def _order(self, index: int) -> str:
        """Return the condition that a property is not written, nor one that has to come after it."""
        if self._members.any_order:
            return f"bit_clear({self._bits[index]})"
        before = range(self._chunk.start, index)
        n_required = sum(each in self._members.required for each in before)
        first_optional = self._n_required + len(before) - n_required
        later = [(n_required, self._n_required), (first_optional, len(self._chunk))]
        zeros = [f"is_zeros([{start}:{end}])" for start, end in later if start < end]
        return _all(_ones(n_required), *zeros)

    def _room(self, index: int | None = None) -> Iterator[str]:
        """Yield the conditions that a property, or a further one, leaves room for required ones, and enough others."""
        members, n_listed = self._members, len(self._chunk)
        if not members.is_counted:
            return
        if index is not None:
            if members.other:
                yield f"bit_clear({self._other})"
            least = members.minimum - (n_listed - index) - bool(members.other)
            if not members.any_order and least > 0:
                yield self._at_least(least)
        if members.maximum is None or index in members.required:
            return  # there is always room for the required ones
        rooms = [
            _all(
                f"bit_count_ge([0:{self._n_required}], {self._n_required - missing})" if self._n_required else "",
                f"lt({self._counter}, {members.maximum - missing})",
            )
            for missing in range(min(self._n_required, members.maximum - 1) + 1)
        ]
        yield _nested("or", rooms)


def _ones(end: int) -> str:
    return f"is_ones([0:{end}])" if end else ""


def _nested(function: str, conditions: Sequence[str]) -> str:
    """Return a function of two conditions for several."""
    first, *others = conditions
    return f"{function}({first}, {_nested(function, others)})" if others else first


def _all(*conditions: str) -> str:
    some = [condition for condition in conditions if condition]
    return _nested("and", some) if some else ""


def _if(*conditions: str) -> str:
    condition = _all(*conditions)
    return f" %if {condition}" if condition else ""
