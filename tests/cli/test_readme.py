"""README.md and the topics of `llmrun help`: short, and every command in them is one that llmrun accepts as typed."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from support.gguf_writer import runnable_model, write
from support.installed import SECONDS

import llmrun
from llmrun.cli.app import RootCommand
from llmrun.cli.help import TOPICS, topic
from llmrun.models.registry import load_catalogue

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


FRONT = Path(__file__).parents[1] / "support/front.py"
COMMIT = "0" * 40
# ---- run by a shell, over the fake engine and tiny models of their names; tests/model/test_readme.py runs those that
# need a model's numbers

FILES = {
    "README.md": "The sky is blue.",
    "in.csv": "text\nhi\n",
    "notes.txt": "tea\nsea\n",
    "tools.py": 'def now() -> str:\n    """Return the time."""\n    return "noon"\n',
    "key": "k",
    "answer.txt": "Hello",
}
ELSEWHERE = re.compile(
    "pip install|uv run|^export|--web|llmrun (serve|worker|launch|tune|bench|explain|embed|rerank|report|evaluate|"
    "tokenize|score|watermark|replay|doctor|stop|logs|quantize)"
)
"""Commands that run on, install, or need what the fake engine lacks."""
STATUSES = {
    "llmrun run smolvlm-500m": 2,  # the image is empty
    "llmrun run ggml-org/ultravox": 2,  # no recording
    "llmrun search": 5,  # offline
    "llmrun rm": 2,  # asks first
    "llmrun verify": 5,  # the tiny models are not the hub's
    "llmrun convert": 3,  # no folder
    'llmrun run smollm2 "hi" --lora': 3,  # no adapter
    "llmrun chat --at": 5,  # no server
    "llmrun run big.gguf": 5,  # no worker
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a shell in a folder with all files and models that the README names."""
    folder = tmp_path_factory.mktemp("readme")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    (folder / "notes").mkdir()
    shutil.copy(folder / "notes.txt", folder / "notes")
    (folder / "cat.png").write_bytes(b"")
    model = write(folder / "f16.gguf", runnable_model())
    for name in ("my.gguf", "big.gguf"):
        shutil.copy(model, folder / name)
    for alias in ("smollm2", "qwen3-4b", "qwen3-0.6b", "smolvlm-500m", "bge-small"):
        entry = load_catalogue().entries[alias]
        repository = folder / "hub" / f"models--{entry.repository.replace('/', '--')}"
        for name in ("refs", "blobs", f"snapshots/{COMMIT}"):
            (repository / name).mkdir(parents=True)
        (repository / "refs/main").write_text(COMMIT)
        shutil.copy(model, repository / "blobs" / ("1" * 64))
        (repository / "snapshots" / COMMIT / entry.filename(entry.quant)).symlink_to(repository / "blobs" / ("1" * 64))
    command = folder / "bin/llmrun"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} {FRONT} normal "$@"\n')
    command.chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{Path(llmrun.__file__).parents[1]}{os.pathsep}{FRONT.parents[1]}",
        "HOME": str(folder),
        "LLMRUN_HOME": str(folder / "home"),
        "LLMRUN_CONFIG": str(folder / "config.toml"),
        "HF_HUB_CACHE": str(folder / "hub"),
        "HF_HUB_OFFLINE": "1",
        "PWD": str(folder),
    }


@pytest.mark.parametrize("line", [line for line in dict.fromkeys(readme_commands()) if not ELSEWHERE.search(line)])
def test_a_command_runs_over_the_fake_engine(line: str, place: dict[str, str]) -> None:
    done = subprocess.run(
        ["sh", "-c", line], input="Hi\n", capture_output=True, text=True, timeout=SECONDS, cwd=place["PWD"], env=place
    )
    expected = next((status for start, status in STATUSES.items() if line.startswith(start)), 0)
    allowed = (0, 2) if "--continue" in line else (expected,)  # without an earlier chat
    assert done.returncode in allowed, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout.strip() or done.stderr.strip()
