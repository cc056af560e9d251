"""Commands, options, topics, routes and public Python names: none is lost by accident.

`surface.json` lists them. A new one is added with `python tests/test_surface.py`; one that goes is a decision, and is
taken out of the list by hand.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llmrun

LISTED = Path(__file__).with_name("surface.json")


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


def surface() -> dict[str, dict[str, str]]:
    """Return the names of each group, in one text a command or class."""
    parts = {"commands": commands(), "topics": topics(), "routes": routes(), "python": python()}
    return {
        part: {name: " ".join(sorted(set(names))) for name, names in groups.items()} for part, groups in parts.items()
    }


def test_nothing_that_people_use_is_lost() -> None:
    listed, found = json.loads(LISTED.read_text(encoding="utf-8")), surface()
    assert set(listed) == set(found)
    changed = {}
    for part, groups in found.items():
        assert sum(len(names.split()) for names in listed[part].values()) > 40, "the search finds nothing"
        for name in {*groups, *listed[part]}:
            before, now = set(listed[part].get(name, "").split()), set(groups.get(name, "").split())
            if before != now or (name in groups) != (name in listed[part]):
                changed[f"{part}: {name}"] = {"lost": sorted(before - now), "new": sorted(now - before)}
    assert not changed, f"if this is meant: python tests/test_surface.py; {changed}"


if __name__ == "__main__":
    sys.stdout.write(f"{LISTED.name}\n")
    LISTED.write_text(json.dumps(surface(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
