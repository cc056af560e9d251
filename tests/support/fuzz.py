"""JSON bodies with hostile parts at any depth, also such as json.dumps() can't write: long numbers, repeated keys."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple


class Raw(NamedTuple):
    """Text that stands in a body as it is."""

    text: str


class Repeated(NamedTuple):
    """An object with the same key twice."""

    first: Mapping[str, Any]
    key: str
    value: Any


_DEEP, _LONG, _MEGABYTE = 1_000, 5_000, 1_000_000
SURROGATE = Raw('"a\\ud800b\\udfff"')
HOSTILE: tuple[Any, ...] = (
    SURROGATE,
    Raw('"\\ude00\\ud83d"'),
    Raw('"\\ud83d\\ude00"'),
    Raw("9" * 4_300),
    Raw("9" * _LONG),
    Raw("-" + "9" * 400),
    Raw("1e999"),
    Raw("1e308"),
    Raw("-1e-400"),
    Raw("NaN"),
    Raw("Infinity"),
    Raw("-Infinity"),
    Raw("-0.0"),
    Raw("[" * _DEEP + "]" * _DEEP),
    Raw('{"a":' * _DEEP + "1" + "}" * _DEEP),
    Raw("[" * 90 + "]" * 90),
    *(0, 1, -1, 2, 7, 2**31, 2**32, 2**63, -(2**63) - 1, 2**64, 10**30, 0.5, -0.5, 1e-320, 1.5e300),
    *(True, False, None),
    *("", " ", "\0", "a\0b", "\x1b[31m", "\n", "\u202e", "\ufeff", "🙂", "e\u0301", "-1", "1e999", "null", "NaN"),
    *("9" * _LONG, "<|im_start|>", "<s>", "</s>", "<0x00>", "<tool_call>", "{{ 1 / 0 }}", "{% for", "data:,", "%s%n"),
    *([], {}, [[]], [{}], [None], [""], {"": None}, {"\0": "\0"}, [0] * 3, ["a"] * 70, {"type": "object"}),
    *({"$ref": "#"}, {"type": "text", "text": "x"}, {"role": "user"}, {"url": "x"}, "../../etc/passwd"),
)  # fmt: skip
_LARGE = ("x" * _MEGABYTE, "é🙂" * (_MEGABYTE // 6), {"a": "b" * _MEGABYTE}, [1] * 50_000, [{}] * 70_000)
_WITHIN = (Raw("\\ud800"), Raw("\\udc00"), "\0", "🙂", "\\", '"', "\n", "<|im_end|>", "{{", "9" * 400, "=", "\u2028")


def write(value: Any) -> str:
    """Return JSON text, with the raw parts as they are."""
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, Repeated):
        pairs = [*value.first.items(), (value.key, value.value)]
        return "{" + ",".join(f"{json.dumps(key)}:{write(item)}" for key, item in pairs) + "}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{write(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(write, value)) + "]"
    return json.dumps(value)


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value."""
    yield place
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _places(item, (*place, key))


def _at(value: Any, place: Sequence[Any]) -> Any:
    for key in place:
        value = value[key]
    return value


class Fuzzer:
    """Makes bodies; the same for a seed every time.

    Args:
        bodies: good ones, to change and to take values from.
        untouched: names of fields that stay as they are.
    """

    def __init__(self, bodies: Sequence[Mapping[str, Any]], seed: int, untouched: Sequence[str] = ()) -> None:
        self._choose, self._untouched = random.Random(seed), {*untouched}
        self._bodies = bodies
        self._values = [_at(body, place) for body in bodies for place in _places(body) if place]

    def body(self, good: Mapping[str, Any]) -> bytes:
        """Return a good body with one to three changes, the bytes of which are sometimes damaged too."""
        changed = json.loads(json.dumps(good))
        for _ in range(self._choose.choice((1, 1, 1, 2, 3))):
            changed = self._changed(changed)
        data = write(changed).encode("utf-8", "surrogatepass")
        return self._damaged(data) if self._choose.random() < 0.03 else data

    def _changed(self, body: Any) -> Any:
        """Change one value somewhere in a body, or a key."""
        places = [place for place in _places(body) if place and not self._untouched & {*place}]
        if not places or not isinstance(body, dict):
            return body
        *above, key = self._choose.choice(places)
        holder = _at(body, above)
        match self._choose.randrange(8):
            case 0 | 1 | 2:
                holder[key] = self._hostile()
            case 3:
                holder[key] = deepcopy(self._choose.choice(self._values))
            case 4:
                holder[key] = self._within(holder[key])
            case 5:
                del holder[key]
            case 6 if isinstance(holder, dict):
                holder[self._choose.choice(("\0", "", "x" * 300, "🙂", str(key).upper()))] = holder.pop(key)
            case 7 if isinstance(holder, dict) and above:
                _at(body, above[:-1])[above[-1]] = Repeated(holder, key, self._hostile())
            case _ if isinstance(holder, list):
                holder *= self._choose.choice((2, 20))
            case _:
                holder[key] = [holder[key]]
        return body

    def _hostile(self) -> Any:
        return deepcopy(self._choose.choice(_LARGE if self._choose.random() < 0.01 else HOSTILE))

    def _within(self, value: Any) -> Any:
        """Return a text with something hostile in it; a number near a limit for a number."""
        if not isinstance(value, str):
            return self._choose.choice((-1, 0, 2**31 - 1, 2**31, 1e300, 65_536))
        middle, place = self._choose.choice(_WITHIN), self._choose.randrange(len(value) + 1)
        if isinstance(middle, str):
            return value[:place] + middle + value[place:]
        return Raw(f"{json.dumps(value[:place])[:-1]}{middle.text}{json.dumps(value[place:])[1:]}")

    def _damaged(self, data: bytes) -> bytes:
        place = self._choose.randrange(len(data) + 1)
        other = (b"", b"\xed\xa0\x80", b"\xff", b"\0", b"{", b"[1]", data[:3])
        return self._choose.choice((
            data[:place],
            data[:place] + self._choose.choice(other) + data[place:],
            data.decode("utf-8", "replace").encode("utf-16"),
            b"\xef\xbb\xbf" + data,
            b"[" + data + b"]",
        ))  # fmt: skip
