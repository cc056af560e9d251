"""Fixtures of the tests that call commands in this process, with real engines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from llmrun.cli import defaults
from llmrun.cli.app import RootCommand
from llmrun.cli.command import Command, ModelCommand
from llmrun.cli.commands import COMMANDS
from llmrun.cli.habits import TAKES_MODEL
from llmrun.cli.options import PRESET_ORIGINS
from llmrun.lab.convert.job import convert_folder
from llmrun.runner import client
from support.hf_writer import files_of, write


def filled(name: str, **values: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """The parsed values of a command, the defaults of what it leaves out, and the origins of these."""
    command: Any = RootCommand(name="llmrun").get_command(typer.Context(RootCommand(name="llmrun")), name)
    context: Any = SimpleNamespace(default_map={}, meta={})
    defaults.fill(name, context, values, command.typed(values))
    return values, context.default_map, context.meta.get(PRESET_ORIGINS, {})


def app_of(name: str) -> typer.Typer:
    """An app of one command, which reads its options as the installed one does."""
    app = typer.Typer()
    app.command(name, cls=ModelCommand if name in TAKES_MODEL else Command)(COMMANDS[name].load())
    return app


@pytest.fixture(scope="session")
def random_qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of random weights."""
    folder = tmp_path_factory.mktemp("qwen")
    return convert_folder(write(folder / "hf", files_of("Qwen3ForCausalLM")), folder / "tiny.gguf", type="f32").path


@pytest.fixture
def own_engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each command has an engine of its own, as in a process of its own."""
    with ExitStack() as engines:
        monkeypatch.setattr(client, "prestarted", lambda: engines.enter_context(closing(client.EngineClient())))
        yield
