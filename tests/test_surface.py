"""Commands, options, topics, routes and public Python names: none is lost by accident.

`surface.json` lists them. A new one is added with `python tests/test_surface.py`; one that goes is a decision, and is
taken out of the list by hand.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llmrun

LISTED = Path(__file__).with_name("surface.json")


def commands() -> Iterator[str]:
    """Every command with each of its options and arguments, e.g. `run --temp`, and `sessions export -o`."""
    import typer

    from llmrun.cli.app import RootCommand
    from llmrun.cli.commands import ALIASES, BENCH_COMMANDS, COMMANDS

    root = RootCommand(name="llmrun")
    context = typer.Context(root)
    for name in (*COMMANDS, *BENCH_COMMANDS, *ALIASES):
        yield from _options(name, root.get_command(context, name))


def _options(name: str, command: Any) -> Iterator[str]:
    yield name
    for parameter in command.params:
        words = [*parameter.opts, *parameter.secondary_opts]
        yield from (f"{name} {word}" for word in words)
    for each, inner in getattr(command, "commands", {}).items():
        yield from _options(f"{name} {each}", inner)


def topics() -> Iterator[str]:
    """The texts of `llmrun help`, and what can be typed in a chat."""
    from llmrun.cli.slash import SLASH_COMMANDS

    yield from (path.stem for path in Path(llmrun.__file__).parent.joinpath("cli", "topics").iterdir())
    yield from (line.split()[0] for line in SLASH_COMMANDS)


def python() -> Iterator[str]:
    """Public names of the package, with the public members of its classes and the parameters of their methods."""
    for name in llmrun.__all__:
        thing = getattr(llmrun, name)
        yield name
        if inspect.isclass(thing):
            yield from (f"{name}.{member}" for member in _members(thing))
        elif inspect.isfunction(thing):
            yield from (f"{name}({parameter})" for parameter in inspect.signature(thing).parameters)


def _members(thing: type) -> Iterator[str]:
    fields = {field.name for field in dataclasses.fields(thing)} if dataclasses.is_dataclass(thing) else set()
    for member in sorted({*dir(thing), *fields}):
        if not member.startswith("_"):
            yield member
            value = getattr(thing, member, None)
            if inspect.isfunction(value):
                yield from (f"{member}({parameter})" for parameter in inspect.signature(value).parameters)


def routes() -> Iterator[str]:
    """Paths that the server's modules name as text, where a route begins with a slash."""
    import ast

    for path in Path(llmrun.__file__).parent.joinpath("server").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Route" and node.args:
                yield from _texts(node.args[0])
            elif isinstance(node, ast.Dict):
                yield from (text for key in node.keys if key is not None for text in _texts(key))


def _texts(node: Any) -> Iterator[str]:
    value = getattr(node, "value", None)
    if isinstance(value, str) and value.startswith("/"):
        yield value


def surface() -> dict[str, list[str]]:
    parts = {"commands": commands, "topics": topics, "routes": routes, "python": python}
    return {name: sorted(set(part())) for name, part in parts.items()}


def test_nothing_that_people_use_is_lost() -> None:
    listed = json.loads(LISTED.read_text(encoding="utf-8"))
    found = surface()
    assert {name: len(part) for name, part in listed.items() if len(part) < 10} == {}, "the search finds nothing"
    lost = {name: sorted(set(part) - set(found[name])) for name, part in listed.items()}
    assert not any(lost.values()), lost
    new = {name: sorted(set(part) - set(listed[name])) for name, part in found.items()}
    assert not any(new.values()), f"add them with python tests/test_surface.py: {new}"


if __name__ == "__main__":
    sys.stdout.write(f"{LISTED.name}\n")
    LISTED.write_text(json.dumps(surface(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
