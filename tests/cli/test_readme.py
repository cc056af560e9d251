"""README.md and the topics of `llmrun help`: short, and every command in them is one that llmrun accepts as typed."""

from __future__ import annotations

import ast
import os
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from llmrun.cli.app import RootCommand
from llmrun.cli.help import TOPICS, topic

README = Path(__file__).parents[2].joinpath("README.md").read_text(encoding="utf-8")
OPERATORS = {"|", "||", "&&", ">", "<", ";"}


def simple_commands(text: str) -> Iterator[tuple[str, ...]]:
    """The words of each llmrun command in shell text, without pipes, redirections and comments."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|&<>;")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if word not in OPERATORS:
            words.append(word)
            continue
        while words and re.match(r"\w+=", words[0]):
            del words[0]
        if words[:2] == ["uv", "run"]:
            del words[:2]
        if words and words[0] == "llmrun":
            yield tuple(words[1:])
        words = []


def readme_commands() -> Iterator[str]:
    """Every command line in a block or a code span of README.md."""
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL):
        yield from block.replace("\\\n", "").splitlines()
    for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", re.sub(r"```.*?```|\*\*`.*?`\*\*", "", README, flags=re.DOTALL)):
        if "llmrun " in span and not span.startswith(("llmrun help TOPIC", "llmrun COMMAND")):
            yield span.replace("\n", " ").replace("\\|", "|")


def topic_commands() -> Iterator[str]:
    """Every example line of a topic that is a whole command."""
    for name in TOPICS:
        for line in topic(name).splitlines():
            if found := re.match(r" {2,4}((?:llmrun|git) .+?)(?: {2,}|$)", line):
                yield found[1].partition("; ")[0]


def parse(words: tuple[str, ...]) -> None:
    """Parse a command with all its options as the command line does, without running it."""
    command, context = RootCommand(name="llmrun"), typer.Context(RootCommand(name="llmrun"))
    rest = list(words)
    group: object = command
    while hasattr(group, "get_command") and rest and not rest[0].startswith("-"):
        found = group.get_command(context, rest[0])
        if found is None:
            break
        group = found
        context = typer.Context(found, parent=context, info_name=rest.pop(0))
        if not hasattr(found, "get_command"):
            found.parse_args(context, rest)
            return
    assert words[:1] == ("--install-completion",) or group is not command, words


COMMANDS = sorted({words for line in (*readme_commands(), *topic_commands()) for words in simple_commands(line)})


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_is_accepted_as_typed(words: tuple[str, ...]) -> None:
    parse(words)


def test_the_commands_are_found() -> None:
    assert len(COMMANDS) > 100
    assert ("run", "smollm2", "Why is the sky blue?") in COMMANDS
    with pytest.raises(Exception, match="--temprature"):
        parse(("run", "smollm2", "hi", "--temprature", "1"))


def test_the_readme_is_short_and_names_every_topic() -> None:
    assert len(README.splitlines()) <= 150
    named = set(re.findall(r"\| `([\w-]+)` \|$", README, re.MULTILINE))
    assert named == set(TOPICS)


def test_a_property_of_a_shown_schema_is_required() -> None:
    schemas = [words[i + 1] for words in COMMANDS for i, word in enumerate(words) if word == "--json-schema"]
    inline = [ast.literal_eval(schema) for schema in schemas if schema.startswith("{")]
    assert inline
    assert all(schema["type"] == "object" and schema["required"] == list(schema["properties"]) for schema in inline)


@pytest.mark.parametrize("name", ["api", "python", "tools"])
def test_python_in_a_topic_compiles(name: str) -> None:
    blocks = re.findall(r"(?<=\n\n)(?: {4}[^\n]*\n(?:\n(?= {4}))?)+", topic(name) + "\n", re.MULTILINE)
    code = [textwrap.dedent(block) for block in blocks if "import " in block]
    assert code
    for block in code:
        compile(block, os.fspath(name), "exec")
