"""Lists without repetitions (uniqueItems) that no grammar can describe: their items are compared as they are written.

Reads the answer as JSON beside the grammar. A token that repeats an item, or leaves no way but to repeat it, is one to
step back from. Must not know tokens or grammars.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from llmrun.grammar import schema
from llmrun.grammar.shapes import Array, Listed, Object, Shapes, Term, Terms, canonical
from llmrun.protocol.codec import load_json

_WORDS = (b"true", b"false", b"null")


class _Level(NamedTuple):
    """A list or an object that is open.

    Attributes:
        shapes: what the schema allows it to be.
        start: the place of the current item in the answer; None between items.
        n_items: the items before the current one.
        key: the name of the current property, as JSON.
        items: the earlier items, in a list without repetitions.
        texts: the same as they are written.
        values: all items that the schema lists, as they are written; empty if it does not list them.
    """

    shapes: tuple[Array | Object, ...] = ()
    start: int | None = None
    n_items: int = 0
    key: bytes = b""
    items: frozenset[str] = frozenset()
    texts: tuple[bytes, ...] = ()
    values: frozenset[bytes] = frozenset()

    @property
    def is_unique(self) -> bool:
        """Items may not be repeated; if they may only by some of the shapes, they are not either."""
        return any(isinstance(shape, Array) and shape.is_unique for shape in self.shapes)


class _State(NamedTuple):
    size: int = 0  # bytes of the answer
    levels: tuple[_Level, ...] = ()
    is_text: bool = False
    is_escaped: bool = False
    is_scalar: bool = False  # inside a number or a word


class DistinctItems:
    """The items of the lists of one answer.

    Args:
        text: the schema.
    """

    def __init__(self, text: str, *, is_strict: bool) -> None:
        whole = schema.parse(text, is_strict=is_strict)
        self._shapes = Shapes(whole)
        self._root: Terms = (Term(whole.root),)
        self._answer = bytearray()
        self._states = [_State()]

    def copy(self) -> DistinctItems:
        twin = object.__new__(DistinctItems)
        twin._shapes, twin._root = self._shapes, self._root
        twin._answer, twin._states = bytearray(self._answer), list(self._states)
        return twin

    @property
    def may_repeat(self) -> bool:
        """What is written of the current item begins an earlier one."""
        return any(
            text.startswith(self._answer[level.start :])
            for level in self._states[-1].levels
            if level.start is not None
            for text in level.texts
        )

    @property
    def more(self) -> bytes | None:
        """The characters by which the current number may become one that is not in the list; None if it is one, or no
        number."""
        state = self._states[-1]
        level = state.levels[-1] if state.levels else _Level()
        if not state.is_scalar or not level.items or level.start is None:
            return None
        written = bytes(self._answer[level.start :])
        mantissa, *exponent = re.split(b"[eE]", written)
        is_zero = not mantissa.strip(b"-0.")
        if is_zero and exponent:
            return b"" if canonical(0) in level.items else None
        if not written[-1:].isdigit() or canonical(load_json(written)) not in level.items:
            return None
        return b"0123456789." if is_zero else b"0123456789.eE"

    def accept(self, piece: bytes) -> bool:
        """Append the bytes of a token; return False, and append nothing, if they repeat an item."""
        state = self._states[-1]
        for byte in piece:
            self._answer.append(byte)
            after = self._after(state, byte)
            if after is None:
                del self._answer[self._states[-1].size :]
                return False
            state = after
        if not all(map(self._has_value, state.levels)):
            del self._answer[self._states[-1].size :]
            return False
        self._states.append(state)
        return True

    def _has_value(self, level: _Level) -> bool:
        """Return whether the current item can become a listed value that is not in the list."""
        written = b"" if level.start is None else bytes(self._answer[level.start :])
        is_complete = level.start is None and not self._answer.endswith((b",", b" "))
        return (
            not level.values
            or is_complete
            or any(value.startswith(written) and value not in level.texts for value in level.values)
        )

    def rewind(self, n_tokens: int) -> None:
        """Remove the bytes of the last tokens."""
        if n_tokens:
            del self._states[-n_tokens:]
            del self._answer[self._states[-1].size :]

    def _after(self, state: _State, byte: int) -> _State | None:
        size = state.size + 1
        state = state._replace(size=size)
        if state.is_text:
            if state.is_escaped or byte == ord("\\"):
                return state._replace(is_escaped=not state.is_escaped)
            return state if byte != ord('"') else self._ended(state._replace(is_text=False))
        if byte == ord('"'):
            return self._begun(state._replace(is_text=True))
        if byte in b"[{":
            state = self._begun(state)
            level = _Level(tuple(self._shapes_of(state, is_list=byte == ord("["))))
            return state._replace(levels=(*state.levels, level._replace(values=self._values(level))))
        if byte in b",]}":
            ended: _State | None = state
            if state.is_scalar:
                ended = self._ended(state._replace(is_scalar=False), n_after=1)
            if byte == ord(",") or ended is None:
                return ended
            return self._ended(ended._replace(levels=ended.levels[:-1]))
        if byte in b" :" or not state.levels:
            return state
        state = self._begun(state)._replace(is_scalar=True)
        written = self._answer[state.levels[-1].start or 0 :]
        return self._ended(state._replace(is_scalar=False)) if bytes(written) in _WORDS else state

    def _begun(self, state: _State) -> _State:
        """Return the state at the first byte of a value or a name, if it is the first one."""
        if not state.levels or state.levels[-1].start is not None:
            return state
        return _with_last(state, state.levels[-1]._replace(start=state.size - 1))

    def _ended(self, state: _State, n_after: int = 0) -> _State | None:
        """Return the state after a value or a name; None if an item is repeated."""
        if not state.levels:
            return state
        level = state.levels[-1]
        if level.start is None:
            return state
        written = bytes(self._answer[level.start : state.size - n_after])
        after = level._replace(start=None, n_items=level.n_items + 1, key=written)
        if level.is_unique:
            item = canonical(load_json(written))
            if item in level.items:
                return None
            after = after._replace(items=level.items | {item}, texts=(*level.texts, written))
        return _with_last(state, after)

    def _shapes_of(self, state: _State, *, is_list: bool) -> Iterator[Array | Object]:
        """Yield the shapes that a list or an object may have that begins here."""
        kind = Array if is_list else Object
        for terms in self._terms(state.levels):
            for box in self._shapes.alternatives(terms):
                shape = box.get("array" if is_list else "object")
                if isinstance(shape, kind):
                    yield shape

    def _values(self, level: _Level) -> frozenset[bytes]:
        """Return all items that a list without repetitions may have; none if they are not listed."""
        terms = [shape.items or () for shape in level.shapes if isinstance(shape, Array) and not shape.prefix]
        if not level.is_unique or len(terms) < len(level.shapes):
            return frozenset()
        shapes = [shape for each in terms for box in self._shapes.alternatives(each) for shape in box.values()]
        if not all(isinstance(shape, Listed) for shape in shapes):
            return frozenset()
        values = (value for shape in shapes if isinstance(shape, Listed) for value in shape.values)
        return frozenset(json.dumps(value, ensure_ascii=False).encode() for value in values)

    def _terms(self, levels: tuple[_Level, ...]) -> Iterable[Terms]:
        if not levels:
            return [self._root]
        level = levels[-1]
        return [
            shape.terms_of(load_json(level.key)) if isinstance(shape, Object) else shape.terms_at(level.n_items)
            for shape in level.shapes
        ]


def _with_last(state: _State, level: _Level) -> _State:
    return state._replace(levels=(*state.levels[:-1], level))
