"""Functions as tools: what a model is told of them, and how they are called."""

from __future__ import annotations

import dataclasses
import enum
import types
from typing import Any, Literal

import pytest

from llmrun.chat.tools.functions import adapter, answered, described, public_functions


class Unit(enum.Enum):
    CELSIUS = "c"
    FAHRENHEIT = "f"


@dataclasses.dataclass
class Place:
    name: str
    height: float = 0.0


def weather(city: str, days: int = 1, unit: Unit = Unit.CELSIUS) -> str:
    """Tells the weather.

    Args:
        city: where
        days: how many,
            from today on
    """
    return f"{city} {days + 1} {unit.name}"


def move(place: Place, ways: list[Literal["left", "right"]] = []) -> dict[str, Any]:  # noqa: B006 - is not changed
    """Moves somewhere.

    :param place: where to
    """
    return {"to": place, "ways": ways}


async def later() -> int:
    return 5


def unlucky() -> None:
    raise ValueError("no luck")


def leave() -> None:
    raise SystemExit


def long() -> str:
    return "x" * 10_010


def nameless(city: str, /) -> None: ...


FUNCTIONS = (weather, move, later, unlucky, leave, long)


def call(name: str, **arguments: Any) -> dict[str, str]:
    return answered({each.__name__: adapter(each) for each in FUNCTIONS}, {"call": name, "arguments": arguments})


def test_type_hints_and_docstring_are_the_schema() -> None:
    assert described("weather", weather) == {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "where"},
                "days": {"type": "integer", "default": 1, "description": "how many,\nfrom today on"},
                "unit": {"$ref": "#/$defs/Unit", "default": "c"},
            },
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"Unit": {"title": "Unit", "type": "string", "enum": ["c", "f"]}},
        },
    }
    place = described("move", move)["parameters"]["properties"]["place"]
    assert place == {"$ref": "#/$defs/Place", "description": "where to"}


def test_arguments_are_what_the_hints_say() -> None:
    assert call("weather", city="Rome", days=2, unit="f") == {"result": "Rome 3 FAHRENHEIT"}
    assert call("move", place={"name": "Rome"}) == {"result": '{"to":{"name":"Rome","height":0.0},"ways":[]}'}
    assert call("later") == {"result": "5"}


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("weather", {}, "city"),
        ("weather", {"city": "Rome", "country": "Italy"}, "country"),
        ("weather", {"city": "Rome", "days": "few"}, "days"),
        ("unlucky", {}, "ValueError: no luck"),
        ("leave", {}, "SystemExit"),
    ],
)
def test_what_goes_wrong_is_told(name: str, arguments: dict[str, Any], words: str) -> None:
    assert words in call(name, **arguments)["error"]


def test_a_long_result_is_cut() -> None:
    assert call("long") == {"result": "x" * 10_000 + "\n[10 more characters were cut off]"}


def test_arguments_need_names() -> None:
    with pytest.raises(TypeError, match=r"nameless\(\) can't be a tool"):
        described("nameless", nameless)


def test_only_a_modules_own_public_functions_are_tools() -> None:
    module = types.ModuleType("mine")
    exec("from os.path import join\nimport os\nclass A: pass\ndef seen(): pass\ndef _hidden(): pass", vars(module))
    assert [*public_functions(module)] == ["seen"]
