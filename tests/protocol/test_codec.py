"""Dataclasses as plain JSON data and back: whatever comes in, only what the annotations say is made of it."""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from llmrun.errors import UsageError
from llmrun.protocol.codec import MAX_DEPTH, as_dict, from_json, load_json
from llmrun.protocol.params import Limits


@dataclass(frozen=True, slots=True)
class Say:
    say: str


@dataclass(frozen=True, slots=True)
class Everything:
    one: Say
    many: tuple[Say, ...]
    pair: tuple[str, int]
    named: dict[str, tuple[float, ...]]
    numbered: Mapping[int, float]
    maybe: Say | None
    other: float | None = None
    flag: bool = False
    kind: Literal["a", "b"] = "a"
    data: Any = None


FULL = Everything(
    one=Say("é\0\ud83d"),
    many=(Say("b"), Say("c")),
    pair=("", -(2**40)),
    named={"n": (0.5, -math.inf), "e": ()},
    numbered={64: 0.25, -1: 2.0},
    maybe=Say("d"),
    other=1.5,
    flag=True,
    kind="b",
    data={"x": [1, None, "y", {"z": 2.5}]},
)


@pytest.mark.parametrize("value", [FULL, Everything(Say("a"), (), ("x", 1), {}, {}, None)])
def test_what_is_written_comes_back(value: Everything) -> None:
    assert from_json(Everything, json.loads(json.dumps(as_dict(value)))) == value


def test_a_whole_number_is_a_number() -> None:
    again = from_json(Everything, {**as_dict(FULL), "other": 2})
    assert (again.other, type(again.other)) == (2.0, float)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("one", None, "Say is None"),
        ("one", {"say": 5}, "say of Say is 5"),
        ("one", {"say": "a", "more": 1}, "Say has no 'more'"),
        ("many", {"say": "a"}, "many of Everything is {'say': 'a'}"),
        ("many", "ab", "many of Everything is 'ab'"),
        ("many", [{"say": "a"}, 5], "Say is 5"),
        ("pair", ["a"], "shorter"),
        ("pair", ["a", 1, 2], "longer"),
        ("pair", ["a", 1.0], "pair of Everything is 1.0"),
        ("named", [], r"named of Everything is \[\]"),
        ("named", {"a": [True]}, "named of Everything is True"),
        ("numbered", {"many": 1.0}, "many"),
        ("other", "1.5", "other of Everything is '1.5'"),
        ("flag", 1, "flag of Everything is 1"),
        ("kind", "c", "kind of Everything is 'c'"),
    ],
)
def test_what_it_is_not_is_named(name: str, value: object, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        from_json(Everything, {**as_dict(FULL), name: value})


@pytest.mark.parametrize("data", [None, 5, "x", [], [["say", "a"]], {}, {"other": 1}])
def test_data_of_something_else_are_refused(data: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        from_json(Say, data)


def test_fields_of_a_newer_version_are_passed_over_at_any_depth() -> None:
    data = as_dict(FULL)
    data["new"], data["one"]["new"], data["many"][0]["new"] = 1, 2, 3
    assert from_json(Everything, data, newer=True) == FULL
    with pytest.raises(ValueError, match="has no 'new'"):
        from_json(Everything, data)


def test_a_dataclass_checks_its_own_values() -> None:
    with pytest.raises(UsageError, match="max_tokens"):
        from_json(Limits, {"max_tokens": 0})


def test_random_data_give_dataclasses_or_errors() -> None:
    rng = random.Random(1)
    pool = [None, True, 0, -1, 2.5, "", "a", [], {}, [1], {"say": "a"}, {"a": [0.5]}, [{"say": 1}], ["a", 1]]
    made = 0
    for _ in range(5000):
        data = {
            **as_dict(FULL),
            **{rng.choice(list(as_dict(FULL))): rng.choice(pool) for _ in range(rng.randint(0, 2))},
        }
        try:
            value = from_json(Everything, data)
        except (TypeError, ValueError):
            continue
        made += 1
        assert json.loads(json.dumps(as_dict(value))) == json.loads(json.dumps(data))
    assert made > 500


# ---- untrusted text ----


def nested(depth: int) -> str:
    return '{"a": [' * (depth // 2) + "1" + "]}" * (depth // 2)


def test_json_is_read_as_python_reads_it() -> None:
    text = json.dumps({"brackets": ["[{" * 500] * 200, "deep": json.loads(nested(MAX_DEPTH - 2))})
    assert load_json(text) == load_json(text.encode()) == json.loads(text)
    assert load_json("[NaN]", parse_constant=str.lower) == ["nan"]


LONE = r'{"a\ud800": ["b\uDFFF", {"c": "\ud83d\ude00\ud83d"}], "\\ud800": 1}'


@pytest.mark.parametrize("text", [LONE, LONE.encode(), LONE.encode("utf-16")])
def test_lone_surrogates_become_replacement_characters(text: str | bytes) -> None:
    assert load_json(text) == {"a\ufffd": ["b\ufffd", {"c": "😀\ufffd"}], "\\ud800": 1}
    assert load_json(text, has_paths=True) == json.loads(LONE), "a path's bytes stay"


RAW = '["\ud800é"]'


@pytest.mark.parametrize("text", [RAW, RAW.encode("utf-8", "surrogatepass"), RAW.encode("utf-16", "surrogatepass")])
def test_so_do_those_that_are_not_escaped(text: str | bytes) -> None:
    assert load_json(text) == ["\ufffdé"]
    assert load_json(text, has_paths=True) == ["\ud800é"]


@pytest.mark.parametrize("depth", [MAX_DEPTH + 2, 900, 5_000, 100_000])
@pytest.mark.parametrize("kind", [str, str.encode])
def test_deep_json_is_refused_whatever_the_interpreter_bears(depth: int, kind: Callable[[str], Any]) -> None:
    assert load_json(kind(nested(MAX_DEPTH)))
    with pytest.raises(ValueError, match="more than 100 levels"):
        load_json(kind(nested(depth)))


@pytest.mark.parametrize("text", ["", "{", "[1,]", b"\xff", b"\0\0\0", "1" * 5000])
def test_what_is_not_json_is_a_value_error(text: str | bytes) -> None:
    if sys.version_info < (3, 10, 7) and text == "1" * 5000:
        pytest.skip("this Python reads integers of any length")
    with pytest.raises(ValueError, match=r"."):
        load_json(text)


def test_a_value_that_is_no_record_is_read_by_its_type() -> None:
    assert from_json(str, "a") == "a"
    assert from_json(float, 1) == 1.0
    assert from_json(tuple[int, ...], [1, 2]) == (1, 2)
    for kind, data in ((str, 1), (float, "1"), (tuple[int, ...], [1, "2"]), (tuple[int, ...], {})):
        with pytest.raises(TypeError, match="the value is"):
            from_json(kind, data)
