"""The exception tree: as drawn, with one code each, as the help of exit codes promises."""

from __future__ import annotations

import re

import pytest

from llmrun import errors
from llmrun.errors import BY_CODE, LlmrunError

CLASSES = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, LlmrunError)]

# Line of the drawing: indentation, name, status, code.
_DRAWN = re.compile(r"^    ([│├└─ ]*)(\w+) +(\d+) +([\w-]+)$", re.MULTILINE)


def drawn_tree() -> dict[str, tuple[str, int, str]]:
    """Class name -> (parent's name, exit status, code), from the docstring."""
    found: dict[str, tuple[str, int, str]] = {}
    above: dict[int, str] = {-1: ""}
    for branches, name, status, code in _DRAWN.findall(errors.__doc__ or ""):
        depth = len(branches) // 4
        above[depth] = name
        found[name] = (above[depth - 1], int(status), code)
    return found


def test_drawing_is_the_tree() -> None:
    real = {
        kind.__name__: (
            kind.__mro__[1].__name__ if kind is not LlmrunError else "",
            kind.exit_status,
            kind.code,
        )
        for kind in CLASSES
    }
    assert drawn_tree() == real


def test_codes_are_kebab_case_and_name_one_class_each() -> None:
    codes = [kind.code for kind in CLASSES]
    assert sorted(codes) == sorted(set(codes))
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", code) for code in codes)
    assert {BY_CODE[kind.code] for kind in CLASSES} == set(CLASSES)
    assert set(BY_CODE) == set(codes)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_class_has_a_docstring_and_sound_numbers(kind: type[LlmrunError]) -> None:
    assert kind.__doc__
    assert "code" in vars(kind)
    assert 1 <= kind.exit_status <= 255
    assert 400 <= kind.http_status <= 599


def test_exit_status_has_one_meaning() -> None:
    """Classes that share a status are of one branch: their common ancestor has it too."""
    for kind in CLASSES:
        same = [other for other in CLASSES if other.exit_status == kind.exit_status]
        assert any(all(issubclass(other, root) for other in same) for root in same)


def test_text() -> None:
    assert str(LlmrunError("it broke")) == "it broke"
    error = LlmrunError("it broke", why="it was old", hint="buy a new one")
    assert str(error) == "it broke: it was old"
    assert (error.what, error.why, error.hint) == ("it broke", "it was old", "buy a new one")


def test_names_much_less_similar_than_the_best_are_not_asked_about() -> None:
    names = ["serve.port", "serve.host", "serve.keep", "model"]
    assert errors.near_names("serve.prot", names) == ["serve.port"]
    assert errors.near_names("serve", names) == names[:3]
    assert errors.near_names("bat", ["cat", "rat"]) == ["rat", "cat"]
    assert errors.near_names("zzz", names) == []


def test_a_number_that_no_float_holds_is_refused() -> None:
    with pytest.raises(errors.UsageError, match="invalid --port 999"):
        errors.require_within("--port", int("9" * 400), (1, 65_535))
