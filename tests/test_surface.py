"""Commands, options, topics, routes and public Python names: none is lost by accident.

goldens/surface.txt lists them. One that goes is a decision.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llmrun


def commands() -> dict[str, list[str]]:
    """Every command with its options and arguments; those of other programs' names are of the command itself."""
    import typer

    from llmrun.cli.app import RootCommand
    from llmrun.cli.commands import ALIASES, BENCH_COMMANDS, COMMANDS

    root = RootCommand(name="llmrun")
    context = typer.Context(root)
    found = {"": list(ALIASES)}
    for name in (*COMMANDS, *BENCH_COMMANDS):
        found |= _options(name, root.get_command(context, name))
    return found


def _options(name: str, command: Any) -> dict[str, list[str]]:
    found = {name: [word for each in command.params for word in (*each.opts, *each.secondary_opts)]}
    for inner, subcommand in getattr(command, "commands", {}).items():
        found |= _options(f"{name} {inner}", subcommand)
    return found


def topics() -> dict[str, list[str]]:
    """The texts of `llmrun help`, and what can be typed in a chat."""
    from llmrun.cli.slash import SLASH_COMMANDS

    texts = [path.stem for path in Path(llmrun.__file__).parent.joinpath("cli", "topics").iterdir()]
    return {"llmrun help": texts, "chat": [line.split()[0] for line in SLASH_COMMANDS]}


def python() -> dict[str, list[str]]:
    """Public names of the package, with the public members of its classes and the parameters of their methods."""
    found = {name: getattr(llmrun, name) for name in llmrun.__all__}
    members = {name: list(_members(thing)) for name, thing in found.items() if inspect.isclass(thing)}
    functions = {
        name: list(inspect.signature(thing).parameters) for name, thing in found.items() if inspect.isfunction(thing)
    }
    return {"": list(found), **members, **functions}


def _members(thing: type) -> Iterator[str]:
    fields = {field.name for field in dataclasses.fields(thing)} if dataclasses.is_dataclass(thing) else set()
    for member in sorted({*dir(thing), *fields}):
        if not member.startswith("_"):
            yield member
            value = getattr(thing, member, None)
            if inspect.isfunction(value):
                yield from (f"{member}({parameter})" for parameter in inspect.signature(value).parameters)


def routes() -> dict[str, list[str]]:
    """Paths that the server's modules name as text, where a route begins with a slash."""
    found: set[str] = set()
    for path in Path(llmrun.__file__).parent.joinpath("server").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Route" and node.args:
                found |= set(_texts(node.args[0]))
            elif isinstance(node, ast.Dict):
                found |= {text for key in node.keys if key is not None for text in _texts(key)}
    return {"": sorted(found)}


def _texts(node: Any) -> Iterator[str]:
    value = getattr(node, "value", None)
    if isinstance(value, str) and value.startswith("/"):
        yield value


def surface() -> Iterator[str]:
    """`part group: name` of all of them."""
    for part, groups in (("command", commands()), ("help", topics()), ("route", routes()), ("python", python())):
        for group, names in groups.items():
            yield from (f"{' '.join(filter(None, (part, group)))}: {name}" for name in names)


def test_nothing_that_people_use_is_lost(golden: Callable[[str, str], None]) -> None:
    found = sorted(set(surface()))
    for part in ("command", "help", "route", "python"):
        assert sum(line.startswith(part) for line in found) > 40, "the search finds nothing"
    golden("surface.txt", "\n".join(found) + "\n")
